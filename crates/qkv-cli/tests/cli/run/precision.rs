//! Element types: in the file, of the computation, and of the results.

use crate::run::program::{Input, Stored, noise, qkv};
use half::{bf16, f16};
use qkv::reference::Reference;
use qkv::{Attention, Element, Inputs};
use safetensors::Dtype;

fn is_computed_in_its_own_type<T: Element + Stored>(lse: Dtype) {
    let [q, k, v] = qkv::<T>();
    let truth = Reference::<f64>::exact().forward(&Attention::scaled_dot(), Inputs::new(&q, &k, &v)).unwrap();
    let file = Input::of(&q, &k, &v).tensor("d_out", &noise::<T, 4>([2, 4, 7, 8], 4));
    let written = file.folder().run("--weights");
    for name in ["out", "weights", "d_q", "d_k", "d_v"] {
        assert_eq!(written[name].dtype, T::DTYPE, "{name}");
    }
    assert_eq!(written["lse"].dtype, lse);
    let tolerance = 4.0 * T::EPSILON;
    written["out"].is(&[2, 4, 7, 8], truth.output.values.data(), tolerance);
    written["weights"].is(&[2, 4, 7, 9], truth.weights.data(), tolerance);
    written["lse"].is(&[2, 4, 7], truth.output.lse.data(), tolerance.min(1e-6));
}

#[test]
fn a_file_is_computed_and_written_in_the_type_of_its_queries() {
    is_computed_in_its_own_type::<f32>(Dtype::F32);
    is_computed_in_its_own_type::<f64>(Dtype::F64);
    is_computed_in_its_own_type::<bf16>(Dtype::F32);
    is_computed_in_its_own_type::<f16>(Dtype::F32);
}

#[test]
fn a_type_that_is_asked_for_is_computed_in_whatever_the_file_holds() {
    let [q, k, v] = qkv::<f64>();
    let folder = Input::of(&q, &k, &v).folder();
    let truth = Reference::<f64>::exact().forward(&Attention::scaled_dot(), Inputs::new(&q, &k, &v)).unwrap();
    for (name, dtype, lse, tolerance) in [
        ("f32", Dtype::F32, Dtype::F32, 1e-6),
        ("f64", Dtype::F64, Dtype::F64, 1e-14),
        ("bf16", Dtype::BF16, Dtype::F32, 0.05),
        ("f16", Dtype::F16, Dtype::F32, 0.01),
    ] {
        for engine in ["exact", "reference"] {
            let written = folder.run(&format!("--dtype {name} --engine {engine}"));
            assert_eq!((written["out"].dtype, written["lse"].dtype), (dtype, lse));
            written["out"].is(&[2, 4, 7, 8], truth.output.values.data(), tolerance);
        }
    }
}

#[test]
fn tensors_of_one_file_may_be_of_different_types() {
    let [q, k, v] = qkv::<f32>();
    let (k, v) = (k.map(|&x| bf16::from_f64(x.into())), v.map(|&x| f64::from(x)));
    let exact = k.map(|&k| k.to_f32());
    let v32 = v.map(|&v| v as f32);
    let truth = Reference::<f64>::exact().forward(&Attention::scaled_dot(), Inputs::new(&q, &exact, &v32)).unwrap();
    let written = Input::new().tensor("q", &q).tensor("k", &k).tensor("v", &v).folder().run("");
    assert_eq!(written["out"].dtype, Dtype::F32);
    written["out"].is(&[2, 4, 7, 8], truth.output.values.data(), 1e-6);
}

#[test]
fn the_reference_is_rounded_only_at_the_end() {
    let [q, k, v] = qkv::<bf16>();
    let truth = Reference::<f64>::exact().forward(&Attention::scaled_dot(), Inputs::new(&q, &k, &v)).unwrap();
    let written = Input::of(&q, &k, &v).folder().run("--engine reference");
    let rounded = truth.output.values.map(|&x| bf16::from_f64(x));
    written["out"].is(&[2, 4, 7, 8], rounded.data(), 0.0);
}
