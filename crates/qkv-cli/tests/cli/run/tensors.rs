//! Every tensor that is present is used, in any shape and type that is allowed.

use crate::run::program::{Found, Input, Stored, noise, qkv};
use qkv::reference::Reference;
use qkv::{Attention, Bias, Element, Inputs, Mask, Tensor};
use safetensors::Dtype;

fn definition<T: Element>(attention: &Attention, inputs: Inputs<'_, T>) -> Tensor<f64, 4> {
    Reference::<f64>::exact().forward(attention, inputs).unwrap().output.values
}

fn out(file: Input) -> Found {
    file.folder().run("")["out"].clone()
}

#[test]
fn a_bias_broadcasts_from_any_number_of_axes() {
    let [q, k, v] = qkv::<f32>();
    let biased = Attention::scaled_dot().bias(Bias::tensor());
    for shape in [&[9][..], &[1], &[7, 9], &[7, 1], &[4, 7, 9], &[4, 1, 9], &[2, 4, 7, 9], &[2, 1, 1, 9]] {
        let mut four = [1; 4];
        four[4 - shape.len()..].copy_from_slice(shape);
        let bias = noise::<f32, 4>(four, 9);
        let truth = definition(&biased, Inputs::new(&q, &k, &v).bias(&bias));
        let found = out(Input::of(&q, &k, &v).numbers("bias", shape, bias.data()));
        found.is(&[2, 4, 7, 8], truth.data(), 2e-5);
    }
}

#[test]
fn a_mask_is_bool_or_u8_with_any_number_of_axes() {
    let [q, k, v] = qkv::<f32>();
    let masked = Attention::scaled_dot().mask(Mask::bits());
    for shape in [&[9][..], &[7, 9], &[4, 7, 9], &[2, 1, 7, 9], &[2, 1, 1, 9]] {
        let mut four = [1; 4];
        four[4 - shape.len()..].copy_from_slice(shape);
        let bits = Tensor::from_fn(four, |[b, h, i, j]| u8::from((b + 2 * h + 3 * i + 5 * j) % 3 != 0));
        let truth = definition(&masked, Inputs::new(&q, &k, &v).bits(&bits));
        for dtype in [Dtype::BOOL, Dtype::U8] {
            let file = Input::of(&q, &k, &v).raw("mask", dtype, shape, bits.data().to_vec());
            out(file).is(&[2, 4, 7, 8], truth.data(), 2e-5);
        }
    }
}

#[test]
fn key_lengths_and_segments_may_be_of_any_integer_type() {
    fn check<I: Stored + TryFrom<i32>>() {
        let number = |x: i32| I::try_from(x).ok().unwrap();
        let [q, k, v] = qkv::<f32>();
        let lengths = Attention::scaled_dot().mask(Mask::lengths());
        let truth = definition(&lengths, Inputs::new(&q, &k, &v).lengths(&[4, 9]));
        let found = out(Input::of(&q, &k, &v).numbers("key_lengths", &[2], &[number(4), number(9)]));
        found.is(&[2, 4, 7, 8], truth.data(), 2e-5);

        let of_query: Vec<i32> = (0..14).map(|at| at % 7 / 3).collect();
        let of_key: Vec<i32> = (0..18).map(|at| at % 9 / 4).collect();
        let packed = Attention::scaled_dot().mask(Mask::segments());
        let truth = definition(&packed, Inputs::new(&q, &k, &v).segments(&of_query, &of_key));
        let numbers = |of: &[i32]| of.iter().map(|&x| number(x)).collect::<Vec<I>>();
        let file = Input::of(&q, &k, &v).numbers("segments_q", &[2, 7], &numbers(&of_query));
        out(file.numbers("segments_k", &[2, 9], &numbers(&of_key))).is(&[2, 4, 7, 8], truth.data(), 2e-5);
    }
    check::<u8>();
    check::<i8>();
    check::<u16>();
    check::<i16>();
    check::<u32>();
    check::<i32>();
    check::<u64>();
    check::<i64>();
}

#[test]
fn sinks_tables_and_learned_scales_are_used_where_they_are_given() {
    let [q, k, v] = qkv::<f32>();
    let (sinks, table, scale) = (noise::<f32, 1>([4], 1), noise::<f32, 2>([4, 5], 2), noise::<f32, 1>([4], 3));
    let inputs = Inputs::new(&q, &k, &v);
    let file = || Input::of(&q, &k, &v);

    let truth = definition(&Attention::scaled_dot().with_sinks(), inputs.sinks(sinks.data()));
    out(file().tensor("sinks", &sinks)).is(&[2, 4, 7, 8], truth.data(), 2e-5);

    let truth = definition(&Attention::scaled_dot().bias(Bias::relative(2)), inputs.table(&table));
    out(file().tensor("table", &table)).is(&[2, 4, 7, 8], truth.data(), 2e-5);

    let truth = definition(&Attention::scaled_dot().learned_scale(), inputs.scale(scale.data()));
    out(file().tensor("scale", &scale)).is(&[2, 4, 7, 8], truth.data(), 2e-5);

    let truth = definition(&Attention::scaled_dot().scale(0.5), inputs);
    for shape in [&[][..], &[1]] {
        out(file().numbers("scale", shape, &[0.5f32])).is(&[2, 4, 7, 8], truth.data(), 2e-5);
    }
}

#[test]
fn tensors_with_unknown_names_get_a_warning_and_change_nothing() {
    let [q, k, v] = qkv::<f32>();
    let plain = out(Input::of(&q, &k, &v));
    let file = Input::of(&q, &k, &v).numbers("Bias", &[9], &[1.0f32; 9]).numbers("attn_mask", &[1], &[1u8]);
    let folder = file.folder();
    let ran = folder.qkv("run --input in.safetensors --output out.safetensors");
    assert_eq!(ran.code, Some(0));
    assert!(ran.err.starts_with("warning: `in.safetensors`"), "{}", ran.err);
    assert!(ran.err.contains("`Bias`, `attn_mask`"), "{}", ran.err);
    assert_eq!(folder.read("out.safetensors")["out"], plain);
}
