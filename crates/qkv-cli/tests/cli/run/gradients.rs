//! With `d_out` in the file, the gradient of every float tensor is written, in the shape in which the tensor was given.

use crate::run::program::{Input, Written, noise, qkv};
use qkv::reference::Reference;
use qkv::{Attention, Bias, Gradients, Inputs, Mask, Place, Tensor, Upstream};

fn definition(attention: &Attention, inputs: Inputs<'_, f32>, d_out: &Tensor<f32, 4>) -> Gradients<f64> {
    let definition = Reference::<f64>::exact();
    let forward = definition.forward(attention, inputs).unwrap();
    definition.backward(attention, inputs, &forward, Upstream::new(d_out)).unwrap()
}

fn are_those_of_q_k_and_v(written: &Written, truth: &Gradients<f64>) {
    written["d_q"].is(&truth.q.shape(), truth.q.data(), 5e-5);
    written["d_k"].is(&truth.k.shape(), truth.k.data(), 5e-5);
    written["d_v"].is(&truth.v.shape(), truth.v.data(), 5e-5);
}

#[test]
fn bias_table_scale_and_sinks_have_gradients_in_their_own_shapes() {
    let [q, k, v] = qkv::<f32>();
    let d_out = noise([2, 4, 7, 8], 4);
    let (bias, table) = (noise([4, 7, 9], 5), noise([1, 5], 6));
    let (scale, sinks) = (noise::<f32, 1>([4], 7), noise::<f32, 1>([4], 8));
    let attention = Attention::cosine()
        .learned_scale()
        .bias(Bias::tensor() + Bias::relative(2))
        .mask(Mask::causal())
        .place(Place::End)
        .with_sinks();
    let inputs = Inputs::new(&q, &k, &v).bias(&bias).table(&table).scale(scale.data()).sinks(sinks.data());
    let truth = definition(&attention, inputs, &d_out);

    let file = Input::of(&q, &k, &v).tensor("d_out", &d_out).tensor("bias", &bias).tensor("table", &table);
    let folder = file.tensor("scale", &scale).tensor("sinks", &sinks).folder();
    for engine in ["exact", "reference"] {
        let written = folder.run(&format!("--score cosine --causal end --engine {engine}"));
        let names = ["d_bias", "d_k", "d_q", "d_scale", "d_sinks", "d_table", "d_v", "lse", "out"];
        assert_eq!(written.names(), names);
        are_those_of_q_k_and_v(&written, &truth);
        written["d_bias"].is(&[4, 7, 9], truth.bias.as_ref().unwrap().data(), 5e-5);
        written["d_table"].is(&[1, 5], truth.table.as_ref().unwrap().data(), 5e-5);
        written["d_scale"].is(&[4], truth.scale.as_ref().unwrap(), 5e-5);
        written["d_sinks"].is(&[4], truth.sinks.as_ref().unwrap(), 5e-5);
    }
}

#[test]
fn the_general_scores_matrix_has_a_gradient_with_as_many_axes_as_it_had() {
    let (q, k, v) = (noise([2, 4, 3, 5], 1), noise([2, 2, 6, 7], 2), noise([2, 2, 6, 3], 3));
    let d_out = noise([2, 4, 3, 3], 4);
    for shape in [&[5, 7][..], &[4, 5, 7]] {
        let mut four = [1; 4];
        four[4 - shape.len()..].copy_from_slice(shape);
        let w: Tensor<f32, 4> = noise(four, 5);
        let truth = definition(&Attention::general(), Inputs::new(&q, &k, &v).w(&w), &d_out);
        let file = Input::of(&q, &k, &v).tensor("d_out", &d_out).numbers("w", shape, w.data());
        let written = file.folder().run("--score general");
        are_those_of_q_k_and_v(&written, &truth);
        written["d_w"].is(shape, truth.w.unwrap().data(), 5e-5);
    }
}

#[test]
fn the_additive_scores_parameters_have_gradients() {
    let (q, k, v) = (noise([1, 2, 3, 5], 1), noise([1, 2, 6, 7], 2), noise([1, 2, 6, 3], 3));
    let (d_out, w_q, w_k, v_score) = (noise([1, 2, 3, 3], 4), noise([4, 5], 5), noise([4, 7], 6), noise([4], 7));
    let inputs = Inputs::new(&q, &k, &v).w_q(&w_q).w_k(&w_k).v_score(Tensor::<f32, 1>::data(&v_score));
    let truth = definition(&Attention::additive(), inputs, &d_out);
    let file = Input::of(&q, &k, &v).tensor("d_out", &d_out).tensor("w_q", &w_q).tensor("w_k", &w_k);
    let written = file.tensor("v_score", &v_score).folder().run("--score additive");
    assert_eq!(written.names(), ["d_k", "d_q", "d_v", "d_v_score", "d_w_k", "d_w_q", "lse", "out"]);
    are_those_of_q_k_and_v(&written, &truth);
    written["d_w_q"].is(&[4, 5], truth.w_q.unwrap().data(), 5e-5);
    written["d_w_k"].is(&[4, 7], truth.w_k.unwrap().data(), 5e-5);
    written["d_v_score"].is(&[4], &truth.v_score.unwrap(), 5e-5);
}

#[test]
fn without_d_out_no_gradient_is_written() {
    let [q, k, v] = qkv::<f32>();
    let written = Input::of(&q, &k, &v).tensor("bias", &noise::<f32, 1>([9], 1)).folder().run("");
    assert_eq!(written.names(), ["lse", "out"]);
}
