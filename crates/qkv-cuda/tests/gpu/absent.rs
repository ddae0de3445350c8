//! Masked elements have no effect, whatever they hold: NaN and ∞ in keys and values that no query sees, in queries that
//! see nothing, and in their upstream gradients. On the emulation, and on a GPU if there is one.

use half::bf16;
use qkv::{Attention, Element, Inputs, Mask, Tensor, Upstream};
use qkv_cuda::Cuda;
use std::io::Write;

/// The devices of this machine.
fn devices() -> Vec<Cuda> {
    let all = [Cuda::emulated(), Cuda::new(0)];
    all.into_iter()
        .filter_map(|cuda| cuda.map_err(|error| drop(writeln!(std::io::stderr(), "skipped: {error}"))).ok())
        .collect()
}

/// Normal noise, with `odd` in every row from `from` on.
fn noise<T: Element>(seed: u64, from: usize, odd: f64) -> Tensor<T, 4> {
    let mut noise = Tensor::<T, 4>::randn([1, 2, 90, 16], seed);
    for h in 0..2 {
        for i in from..90 {
            for x in 0..16 {
                noise[[0, h, i, x]] = T::of_f64(odd);
            }
        }
    }
    noise
}

/// The results of a run in which everything from row 70 on is `odd`, and masked.
fn run<T: Element>(cuda: &Cuda, odd: f64) -> Vec<f64> {
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| noise::<T>(seed, 70, odd));
    let segments: Vec<i32> = (0..90).map(|i| if i < 70 { i / 40 } else { 100 + i }).collect();
    let other: Vec<i32> = (0..90).map(|i| if i < 70 { i / 40 } else { 1000 + i }).collect();
    let attention = Attention::scaled_dot().mask(Mask::causal() & Mask::segments());
    let inputs = Inputs::new(&q, &k, &v).segments(&segments, &other);
    let out = cuda.forward(&attention, inputs).unwrap();
    let grad = cuda.backward(&attention, inputs, &out, Upstream::new(&d_out)).unwrap();
    let all = [&out.values, &grad.q, &grad.k, &grad.v];
    all.into_iter().flat_map(|tensor| tensor.data().iter().map(|x| x.to_f64())).collect()
}

fn masked_values_have_no_effect<T: Element>(tolerance: f64) {
    for cuda in devices() {
        let plain = run::<T>(&cuda, 0.0);
        assert!(plain.iter().all(|x| x.is_finite()));
        for odd in [f64::NAN, f64::INFINITY] {
            let held = run::<T>(&cuda, odd);
            let apart = plain.iter().zip(&held).map(|(a, b)| (a - b).abs());
            let worst = apart.fold(0.0, |a: f64, b| if b.is_nan() { f64::INFINITY } else { a.max(b) });
            assert!(worst <= tolerance, "{odd} on {}: {worst}", cuda.device().name);
        }
    }
}

#[test]
fn masked_nan_has_no_effect_in_f32() {
    masked_values_have_no_effect::<f32>(1e-5);
}

#[test]
fn masked_nan_has_no_effect_in_bf16() {
    masked_values_have_no_effect::<bf16>(3e-2);
}

/// The results for the first 20 of 40 queries, with `odd` in keys and values from 20 on, which these queries do not
/// see, and which no query sees from 30 on.
fn short_run(cuda: &Cuda, odd: f64) -> Vec<f64> {
    let shape = [1, 2, 40, 16];
    let mut inputs = [1, 2, 3, 4].map(|seed| Tensor::<bf16, 4>::randn(shape, seed));
    for tensor in &mut inputs[1..3] {
        for (h, i) in (0..2).flat_map(|h| (20..40).map(move |i| (h, i))) {
            tensor[[0, h, i, i % 16]] = bf16::from_f64(odd);
        }
    }
    let [q, k, v, mut d_out] = inputs;
    for (h, i, x) in (0..2).flat_map(|h| (20..40).flat_map(move |i| (0..16).map(move |x| (h, i, x)))) {
        d_out[[0, h, i, x]] = bf16::ZERO;
    }
    let attention = Attention::scaled_dot().mask(Mask::causal() & Mask::lengths());
    let inputs = Inputs::new(&q, &k, &v).lengths(&[30]);
    let out = cuda.forward(&attention, inputs).unwrap();
    let grad = cuda.backward(&attention, inputs, &out, Upstream::new(&d_out)).unwrap();
    let rows = (0..2).flat_map(|h| (0..20).map(move |i| (h, i)));
    rows.flat_map(|(h, i)| (0..16).flat_map(move |x| [[0, h, i, x]]))
        .flat_map(|at| [out.values[at], grad.q[at]].map(bf16::to_f64))
        .collect()
}

#[test]
fn masked_nan_has_no_effect_in_short_sequences() {
    for cuda in devices() {
        let plain = short_run(&cuda, 0.0);
        assert!(plain.iter().all(|x| x.is_finite()));
        for odd in [f64::NAN, f64::INFINITY] {
            let held = short_run(&cuda, odd);
            let worst = plain.iter().zip(&held).map(|(a, b)| (a - b).abs());
            let worst = worst.fold(0.0, |a: f64, b| if b.is_nan() { f64::INFINITY } else { a.max(b) });
            assert!(worst <= 3e-2, "{odd} on {}: {worst}", cuda.device().name);
        }
    }
}

#[test]
fn a_token_sees_nothing_beyond_its_length() {
    let lengths = [0, 1, 15, 16, 17, 64, 65, 511, 512, 513, 600];
    let attention = Attention::scaled_dot().mask(Mask::lengths());
    for (cuda, width) in devices().iter().flat_map(|cuda| [64, 128].map(|width| (cuda, width))) {
        let q = Tensor::<bf16, 4>::randn([lengths.len(), 6, 1, width], 1);
        let run = |odd: f32| {
            let [k, v] = [2, 3].map(|seed| {
                let mut rows = Tensor::<bf16, 4>::randn([lengths.len(), 2, 600, width], seed);
                for (b, &length) in lengths.iter().enumerate() {
                    for (h, i, x) in
                        (0..2).flat_map(|h| (length..600).flat_map(move |i| (0..width).map(move |x| (h, i, x))))
                    {
                        rows[[b, h, i, x]] = bf16::from_f32(odd);
                    }
                }
                rows
            });
            cuda.forward(&attention, Inputs::new(&q, &k, &v).lengths(&lengths)).unwrap().values
        };
        let plain = run(0.0);
        assert!(plain.data().iter().all(|x| x.to_f32().is_finite()));
        assert!(plain.data()[..6 * width].iter().all(|x| *x == bf16::ZERO), "without keys there is nothing to mix");
        for odd in [f32::NAN, f32::INFINITY] {
            assert_eq!(run(odd).data(), plain.data(), "{odd}, heads of {width} on {}", cuda.device().name);
        }
    }
}
