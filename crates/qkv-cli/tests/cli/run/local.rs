//! `--local predictive:D`: a window and a Gaussian around a center that is read from the file, and gets a gradient.

use crate::run::program::{Folder, Input, noise, qkv};
use qkv::reference::Reference;
use qkv::{Attention, Inputs, Mask, Tensor, Upstream};

/// Centers among nine keys, and a few outside.
fn center() -> Tensor<f32, 3> {
    Tensor::from_fn([2, 4, 7], |[b, h, i]| (b + 2 * h + i) as f32 * 0.83 - 1.3)
}

#[test]
fn output_and_gradients_are_the_librarys() {
    let [q, k, v] = qkv::<f32>();
    let (center, d_out) = (center(), noise::<f32, 4>([2, 4, 7, 8], 4));
    let folder = Input::of(&q, &k, &v).tensor("center", &center).tensor("d_out", &d_out).folder();
    let inputs = Inputs::new(&q, &k, &v).center(center.data()).seed(0);
    let definition = Reference::<f64>::exact();
    for (typed, described) in [
        ("--local predictive:2", Attention::scaled_dot().local(2)),
        ("--score dot --local predictive:3 --dropout 0.2", Attention::dot().local(3).dropout(0.2)),
        ("--score cosine --local predictive:1 --causal start", Attention::cosine().local(1).mask(Mask::causal())),
    ] {
        let truth = definition.forward(&described, inputs).unwrap();
        let gradients = definition.backward(&described, inputs, &truth, Upstream::new(&d_out)).unwrap();
        for engine in ["exact", "reference"] {
            println!("{typed} --engine {engine}");
            let written = folder.run(&format!("{typed} --weights --engine {engine}"));
            assert_eq!(written.names(), ["d_center", "d_k", "d_q", "d_v", "lse", "out", "weights"]);
            written["out"].is(&[2, 4, 7, 8], truth.output.values.data(), 2e-5);
            written["weights"].is(&[2, 4, 7, 9], truth.weights.data(), 2e-5);
            written["d_q"].is(&[2, 4, 7, 8], gradients.q.data(), 5e-5);
            written["d_k"].is(&[2, 2, 9, 8], gradients.k.data(), 5e-5);
            written["d_v"].is(&[2, 2, 9, 8], gradients.v.data(), 5e-5);
            written["d_center"].is(&[2, 4, 7], gradients.center.as_ref().unwrap(), 5e-5);
        }
    }
}

#[test]
fn a_center_is_asked_for_and_asks_for_the_choice() {
    let [q, k, v] = qkv::<f32>();
    let file = Input::of(&q, &k, &v);
    file.folder().fails("--local predictive:2", &["`center` is missing", "hint: add the tensor `center` to the file"]);
    let with = file.tensor("center", &center()).folder();
    with.fails("", &["`center` was given, but", "hint: `center` is for `--local predictive:D`"]);
    Folder::new().qkv("run --local predictive:2").fails(&["`center` is missing", "hint: the built-in example has"]);
}

#[test]
fn a_center_that_is_none_is_refused() {
    let [q, k, v] = qkv::<f32>();
    let file = Input::of(&q, &k, &v);
    let fails = |file: Input, words: &str| file.folder().fails("--local predictive:2", &["`in.safetensors`", words]);
    let numbers = |shape: &[usize]| file.clone().numbers("center", shape, &vec![1f32; shape.iter().product()]);
    fails(numbers(&[2, 7, 4]), "`center` has shape [2, 7, 4], expected [2, 4, 7], as `q` has");
    fails(numbers(&[4, 7]), "`center` has shape [4, 7], expected 3 axes");
    fails(file.clone().numbers("center", &[2, 4, 7], &[1i32; 56]), "`center` is of type I32");
    for bad in [f32::NAN, f32::INFINITY] {
        fails(file.clone().numbers("center", &[2, 4, 7], &[bad; 56]), "`center` is not finite");
    }
}

#[test]
fn centers_and_widths_as_large_as_can_be_given_are_harmless() {
    let [q, k, v] = qkv::<f32>();
    let d_out = noise::<f32, 4>([2, 4, 7, 8], 4);
    let file = Input::of(&q, &k, &v).tensor("d_out", &d_out);
    let at = |center: f64| file.clone().numbers("center", &[2, 4, 7], &[center; 56]).folder();
    for engine in ["exact", "reference"] {
        let wide = at(4.0).run(&format!("--local predictive:{} --engine {engine}", u64::MAX));
        let plain = file.folder().run("");
        wide["out"].is(&[2, 4, 7, 8], &plain["out"].data, 2e-6);
        for far in [1e30, -1e30, 1e19, -1e19] {
            let nothing = at(far).run(&format!("--local predictive:2 --engine {engine}"));
            assert!(nothing["out"].data.iter().chain(&nothing["d_center"].data).all(|&x| x == 0.0), "{far}");
        }
    }
}
