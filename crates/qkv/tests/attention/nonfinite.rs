//! NaN, ±∞ and the largest finite numbers in every input of every mechanism, forward and backward, in every type:
//! nothing panics, a row is NaN only if it sees one, and a row that sees a NaN shows it in its output and in its
//! gradients.

use half::{bf16, f16};
use qkv::{Attention, Bias, Element, Features, Mask, OwnedInputs, Scale, Score, Tensor, Upstream};

const N: usize = 12;
const M: usize = 140; // more than one tile of keys
const D: usize = 4;
/// The poisoned key.
const BAD: usize = 130;

fn mechanisms() -> Vec<(String, Attention)> {
    let mut all = Vec::new();
    for score in [Score::Dot, Score::ScaledDot, Score::General, Score::Additive, Score::Cosine, Score::Distance] {
        let plain = Attention::new(score);
        for (name, attention) in [
            ("softmax", plain.clone()),
            ("everything", plain.clone().learned_scale().bias(Bias::tensor() + Bias::relative(3)).with_sinks()),
            ("soft-cap", plain.clone().softcap(5.0).with_entropy()),
            ("dropout", plain.clone().dropout(0.2)),
            ("hard", plain.clone().hard()),
            ("sampled", plain.clone().sample()),
            ("straight-through", plain.clone().hard().straight_through().bias(Bias::tensor())),
            ("top-k", plain.clone().top_k(5).bias(Bias::tensor())),
            ("sparsemax", plain.clone().sparsemax()),
            ("biased sparsemax", plain.sparsemax().bias(Bias::tensor()).learned_scale()),
        ] {
            all.push((format!("{score:?} {name}"), attention));
        }
    }
    for features in [Features::Elu, Features::Relu, Features::Favor { count: 16, seed: 1 }] {
        all.push((format!("{features:?}"), Attention::linear(features)));
    }
    all
}

fn inputs<T: Element>(attention: &Attention) -> OwnedInputs<T> {
    let vector = |len, seed| Tensor::<T, 1>::randn([len], seed).into_data();
    let mut inputs = OwnedInputs::new(
        Tensor::randn([1, 2, N, D], 1),
        Tensor::randn([1, 1, M, D], 2),
        Tensor::randn([1, 1, M, 3], 3),
    );
    if attention.score == Score::General {
        inputs.w = Some(Tensor::randn([1, 1, D, D], 4));
    }
    if attention.score == Score::Additive {
        inputs.w_q = Some(Tensor::randn([1, 1, 6, D], 5));
        inputs.w_k = Some(Tensor::randn([1, 1, 6, D], 6));
        inputs.v_score = Some(vector(6, 7));
    }
    inputs.scale = (attention.scale == Scale::Learned).then(|| vector(2, 8));
    inputs.bias = attention.bias.wants_tensor().then(|| Tensor::randn([1, 2, N, M], 9));
    inputs.table = attention.bias.reach().map(|reach| Tensor::randn([1, 1, 2, 2 * reach + 1], 10));
    inputs.sinks = attention.sinks.then(|| vector(2, 11));
    inputs.seed = Some(3);
    inputs
}

/// The inputs by name, with the element of each that is poisoned: in keys and values that of key `BAD`, in queries that
/// of query 2 of head 0, in a bias that of both.
fn numbers<T: Element>(inputs: &mut OwnedInputs<T>) -> Vec<(&'static str, &mut T)> {
    let mut all: Vec<(&'static str, &mut T)> = vec![
        ("q", &mut inputs.q.data_mut()[2 * D + 1]),
        ("k", &mut inputs.k.data_mut()[BAD * D + 2]),
        ("v", &mut inputs.v.data_mut()[BAD * 3 + 1]),
    ];
    let tensors =
        [("w", &mut inputs.w), ("w_q", &mut inputs.w_q), ("w_k", &mut inputs.w_k), ("table", &mut inputs.table)];
    all.extend(tensors.into_iter().filter_map(|(name, t)| Some((name, &mut t.as_mut()?.data_mut()[0]))));
    all.extend(inputs.bias.as_mut().map(|bias| ("bias", &mut bias.data_mut()[2 * M + BAD])));
    let vectors = [("v_score", &mut inputs.v_score), ("scale", &mut inputs.scale), ("sinks", &mut inputs.sinks)];
    all.extend(vectors.into_iter().filter_map(|(name, v)| Some((name, &mut v.as_mut()?[0]))));
    all
}

/// Queries 0 .. 6 see keys up to 126, which are before the poisoned one; the others see all.
fn masked(attention: Attention) -> Attention {
    attention.mask(Mask::causal()).place(qkv::Place::Given)
}

fn positions() -> Vec<i64> {
    (0..N as i64).map(|i| if i < 6 { 120 + i } else { M as i64 - 1 }).collect()
}

fn hold<T: Element>() {
    let positions = positions();
    let d_out = Tensor::<T, 4>::randn([1, 2, N, 3], 12);
    for (name, attention) in mechanisms() {
        let attention = masked(attention);
        let names: Vec<&str> = numbers(&mut inputs::<T>(&attention)).iter().map(|(name, _)| *name).collect();
        for (at, input) in names.into_iter().enumerate() {
            for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, f64::MIN] {
                let mut inputs = inputs::<T>(&attention);
                let largest = if poison.is_finite() { largest::<T>().copysign(poison) } else { poison };
                *numbers(&mut inputs)[at].1 = T::of_f64(largest);
                inputs.positions = Some(positions.clone());
                let case = format!("{name}, {largest} in {input}, {}", T::NAME);
                let call = inputs.inputs();
                let out = attention.forward(call).unwrap_or_else(|error| panic!("{case}: {error}"));
                let grad = attention.backward(call, &out, Upstream::new(&d_out)).unwrap();
                let weights = attention.weights(call, &out).unwrap();
                let [w0, w1] = [0, 1].map(|h| weights.rows(0, h, 0..N).unwrap());
                if !matches!(input, "q" | "k" | "v" | "bias") {
                    continue; // seen by every row
                }
                let finite = |row: &[T]| row.iter().all(|x| x.to_f64().is_finite());
                let row_statistic = out.threshold.as_ref().unwrap_or(&out.lse).rounded::<f64>();
                for (h, weights) in [(0, &w0.rounded::<f64>()), (1, &w1.rounded::<f64>())] {
                    for i in 0..N {
                        let row = &out.values.data()[(h * N + i) * 3..][..3];
                        let d_q = &grad.q.data()[(h * N + i) * D..][..D];
                        let weights = &weights.data()[i * M..][..M];
                        let sees = match input {
                            "q" => (h, i) == (0, 2),
                            "bias" => false, // query 2 does not see key `BAD`
                            _ => i >= 6,
                        };
                        if !sees {
                            assert!(finite(row) && finite(d_q), "{case}: row {h} {i} {row:?} {d_q:?}");
                            assert!(weights.iter().all(|w| w.is_finite()), "{case}: weights of row {h} {i}");
                            // −∞ is a query all of whose ReLU features are 0.
                            let statistic = row_statistic[[0, h, i]];
                            assert!(!statistic.is_nan() && statistic < f64::INFINITY, "{case}: row {h} {i}");
                        } else if poison.is_nan() && input != "v" && !matches!(attention.score, Score::Linear(_)) {
                            assert!(row_statistic[[0, h, i]].is_nan(), "{case}: row {h} {i}");
                            assert!(row.iter().all(|x| x.to_f64().is_nan()), "{case}: row {h} {i} is {row:?}");
                            assert!(weights.iter().any(|w| w.is_nan()), "{case}: weights of row {h} {i}");
                            assert!(d_q.iter().all(|x| x.to_f64().is_nan()), "{case}: d_q of row {h} {i} is {d_q:?}");
                        }
                    }
                }
                if poison.is_nan() && input == "k" && !matches!(attention.score, Score::Linear(_)) {
                    let [d_k, d_v] = [(&grad.k, D), (&grad.v, 3)].map(|(t, width)| &t.data()[BAD * width..][..width]);
                    assert!(d_k.iter().chain(d_v).all(|x| x.to_f64().is_nan()), "{case}: {d_k:?} {d_v:?}");
                }
            }
        }
    }
}

fn largest<T: Element>() -> f64 {
    match T::NAME {
        "f64" => f64::MAX,
        "f32" => f64::from(f32::MAX),
        "bf16" => bf16::MAX.to_f64(),
        _ => f16::MAX.to_f64(),
    }
}

#[test]
fn nothing_panics_and_nan_stays_where_it_is_seen_in_f32() {
    hold::<f32>();
}

#[test]
fn nothing_panics_and_nan_stays_where_it_is_seen_in_f64() {
    hold::<f64>();
}

#[test]
fn nothing_panics_and_nan_stays_where_it_is_seen_in_bf16() {
    hold::<bf16>();
}

#[test]
fn nothing_panics_and_nan_stays_where_it_is_seen_in_f16() {
    hold::<f16>();
}
