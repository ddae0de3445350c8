//! What linear attention promises beyond the conformance suite: gradients that match finite differences, a past that
//! does not depend on its future, a recurrence with the bits of the full pass, the same bits on any number of threads,
//! absence of what is masked, and refusal of what it does not support.

use half::{bf16, f16};
use qkv::{
    Attention, Bias, Blocks, Element, Error, Features, Gradients, Inputs, LinearState, Mask, Output, Place, Pool,
    Tensor, Upstream, View,
};
use qkv_conformance::case::{Case, Data, Extras, Sizes};

const MAPS: [Features; 3] = [Features::Elu, Features::Relu, Features::Favor { count: 24, seed: 3 }];

fn with_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

fn run<T: Element>(case: &Case, data: &Data<T>) -> (Output<T>, Gradients<T>) {
    let out = case.attention.forward(data.inputs()).unwrap();
    let grad = case.attention.backward(data.inputs(), &out, data.upstream()).unwrap();
    (out, grad)
}

/// Rows `rows` of every head.
fn part<T: Element>(t: &Tensor<T, 4>, rows: std::ops::Range<usize>) -> Tensor<T, 4> {
    let [b, h, _, d] = t.shape();
    Tensor::from_fn([b, h, rows.len(), d], |[b, h, i, x]| t[[b, h, rows.start + i, x]])
}

fn loss(case: &Case, data: &Data<f64>) -> f64 {
    let out = case.attention.forward(data.inputs()).unwrap();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).filter(|(a, _)| a.is_finite()).map(|(a, b)| a * b).sum::<f64>();
    dot(out.values.data(), data.d_out.data()) + data.d_lse.as_ref().map_or(0.0, |d| dot(out.lse.data(), d))
}

#[test]
fn every_gradient_is_what_the_loss_moves_by() {
    let both = Extras { all_upstream: true, ..Extras::default() };
    let masked = Extras { lengths: true, segments: true, ..both.clone() };
    for features in MAPS {
        let linear = Attention::linear(features);
        let causal = linear.clone().mask(Mask::causal());
        for (attention, extras) in [
            (linear.clone(), both.clone()),
            (causal.clone().place(Place::End), both.clone()),
            (causal.clone(), masked.clone()),
            (linear, masked.clone()),
            (causal, Extras { positions: true, ..both.clone() }),
        ] {
            let sizes = Sizes::new(70, 140, 5).heads(2, 4, 2).widths(5, 3);
            let case = Case::new(format!("{features:?} {extras:?}"), attention, sizes, extras);
            let mut data = case.data::<f64>();
            let (_, grad) = run(&case, &data);
            type Part = fn(&mut Data<f64>) -> &mut [f64];
            let parts: [(&str, Part, &[f64]); 3] = [
                ("q", |d| d.q.data_mut(), grad.q.data()),
                ("k", |d| d.k.data_mut(), grad.k.data()),
                ("v", |d| d.v.data_mut(), grad.v.data()),
            ];
            for (name, part, grad) in parts {
                let largest = grad.iter().fold(0.0f64, |a, b| a.max(b.abs()));
                for at in (0..grad.len()).step_by(grad.len() / 23) {
                    let step = 1e-5;
                    let mut moved = |by: f64| {
                        part(&mut data)[at] += by;
                        let loss = loss(&case, &data);
                        part(&mut data)[at] -= by;
                        loss
                    };
                    let difference = (moved(step) - moved(-step)) / (2.0 * step);
                    let apart = (difference - grad[at]).abs();
                    assert!(
                        apart <= 1e-7 * largest.max(1.0),
                        "{} {name}[{at}]: {} but moves by {difference}",
                        case.name,
                        grad[at]
                    );
                }
            }
        }
    }
}

#[test]
fn the_past_does_not_know_its_future() {
    for features in MAPS {
        let causal = Attention::linear(features).mask(Mask::causal());
        let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 2, 1100, 12], seed));
        let full = causal.forward(Inputs::new(&q, &k, &v)).unwrap();
        for length in [1, 2, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025] {
            let [q, k, v] = [&q, &k, &v].map(|t| part(t, 0..length));
            let prefix = causal.forward(Inputs::new(&q, &k, &v)).unwrap();
            assert_eq!(prefix.values, part(&full.values, 0..length), "{features:?} {length}");
        }
        // Whatever the future holds, NaN and keys that are larger by far included.
        for poison in [f32::NAN, f32::INFINITY, 1e4] {
            let (mut k, mut v) = (k.clone(), v.clone());
            for h in 0..2 {
                for x in 0..12 {
                    k[[0, h, 700, x]] = poison;
                    v[[0, h, 700, x]] = poison;
                }
            }
            let poisoned = causal.forward(Inputs::new(&q, &k, &v)).unwrap();
            assert_eq!(part(&poisoned.values, 0..700), part(&full.values, 0..700), "{features:?} {poison}");
        }
    }
}

fn recurrence_equals_the_full_pass<T: Element>(features: Features, steps: &[usize]) {
    let causal = Attention::linear(features).mask(Mask::causal());
    let (hq, hk, d, dv, length) = (4, 2, 12, 9, steps.iter().sum());
    let q = Tensor::<T, 4>::randn([2, hq, length, d], 1);
    let (k, v) = (Tensor::<T, 4>::randn([2, hk, length, d], 2), Tensor::<T, 4>::randn([2, hk, length, dv], 3));
    let full = causal.forward(Inputs::new(&q, &k, &v)).unwrap();
    let mut state = LinearState::<T>::new(&causal, 2, hq, hk, d, dv).unwrap();
    let mut at = 0;
    for &step in steps {
        let [q, k, v] = [&q, &k, &v].map(|t| part(t, at..at + step));
        let out = if step == 1 {
            state.append(&k, &v).unwrap();
            state.attend(&q).unwrap()
        } else {
            state.step(&q, &k, &v).unwrap()
        };
        assert_eq!(out.values, part(&full.values, at..at + step), "{features:?} {} at {at}", T::NAME);
        for (b, h) in [(0, 0), (1, 3)] {
            assert_eq!(out.lse[[b, h, step - 1]], full.lse[[b, h, at + step - 1]]);
        }
        at += step;
    }
    assert_eq!(state.len(), length);
}

#[test]
fn the_recurrence_equals_the_full_pass_bit_for_bit() {
    for features in MAPS {
        recurrence_equals_the_full_pass::<f32>(features, &[1; 200]);
        recurrence_equals_the_full_pass::<f32>(features, &[1000, 1, 1, 30, 60, 1, 1, 1100, 1]);
        recurrence_equals_the_full_pass::<f64>(features, &[63, 1, 1, 64, 128, 7]);
        recurrence_equals_the_full_pass::<bf16>(features, &[64, 1, 2, 100]);
        recurrence_equals_the_full_pass::<f16>(features, &[5, 1, 200]);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    fn same<T: Element>() {
        let both = Extras { all_upstream: true, ..Extras::default() };
        for features in MAPS {
            let linear = Attention::linear(features);
            for attention in [linear.clone(), linear.mask(Mask::causal()).place(Place::End)] {
                for extras in [both.clone(), Extras { segments: true, ..both.clone() }] {
                    let sizes = Sizes::new(2500, 4200, 6).heads(1, 2, 1);
                    let case = Case::new(format!("{features:?}"), attention.clone(), sizes, extras);
                    let data = case.data::<T>();
                    let one = with_threads(1, || run(&case, &data));
                    for threads in [2, 3, 8] {
                        let many = with_threads(threads, || run(&case, &data));
                        assert!(one == many, "{} {} differs with {threads} threads", case.name, T::NAME);
                    }
                }
            }
        }
    }
    same::<f32>();
    same::<bf16>();
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_in_a_batch() {
    for features in MAPS {
        let attention = Attention::linear(features).mask(Mask::causal());
        let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([3, 2, 150, 10], seed));
        let out = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
        let grad = attention.backward(Inputs::new(&q, &k, &v), &out, Upstream::new(&d_out)).unwrap();
        for b in 0..3 {
            let alone = |t: &Tensor<f32, 4>| Tensor::from_fn([1, 2, 150, 10], |[_, h, i, x]| t[[b, h, i, x]]);
            let (q, k, v, d_out) = (alone(&q), alone(&k), alone(&v), alone(&d_out));
            let one = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
            let one_grad = attention.backward(Inputs::new(&q, &k, &v), &one, Upstream::new(&d_out)).unwrap();
            assert_eq!(one.values, alone(&out.values));
            assert_eq!([one_grad.q, one_grad.k, one_grad.v], [&grad.q, &grad.k, &grad.v].map(alone));
        }
    }
}

#[test]
fn shared_heads_are_repeated_heads() {
    for features in MAPS {
        for mask in [Mask::full(), Mask::causal()] {
            let attention = Attention::linear(features).mask(mask);
            let q = Tensor::<f64, 4>::randn([1, 6, 130, 7], 1);
            let [k, v] = [2, 3].map(|seed| Tensor::<f64, 4>::randn([1, 2, 130, 7], seed));
            let shared = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
            let repeat = |t: &Tensor<f64, 4>| Tensor::from_fn([1, 6, 130, 7], |[b, h, i, x]| t[[b, h / 3, i, x]]);
            let (k_all, v_all) = (repeat(&k), repeat(&v));
            assert_eq!(shared, attention.forward(Inputs::new(&q, &k_all, &v_all)).unwrap());
            // And with strides instead of copies.
            let stretched = |t| View::strided(Tensor::data(t), 0, [1, 2, 130, 7], [0, 130 * 7, 7, 1]).unwrap();
            assert_eq!(shared, attention.forward(Inputs::new(&q, stretched(&k), stretched(&v))).unwrap());
        }
    }
}

#[test]
fn rows_of_weights_sum_to_one_and_make_the_output() {
    for features in MAPS {
        let attention = Attention::linear(features).mask(Mask::causal() & Mask::segments());
        let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f64, 4>::randn([1, 2, 200, 6], seed));
        let segments: Vec<i32> = (0..200).map(|i| [7, -3, 7, 100][i / 50]).collect(); // one of them in two parts
        let inputs = Inputs::new(&q, &k, &v).segments(&segments, &segments);
        let out = attention.forward(inputs).unwrap();
        let weights = attention.weights(inputs, &out).unwrap();
        let rows = weights.rows(0, 1, 0..200).unwrap();
        for i in 0..200 {
            if out.lse[[0, 1, i]] == f64::NEG_INFINITY {
                continue; // ReLU can leave nothing
            }
            let sum: f64 = (0..200).map(|j| rows[[i, j]]).sum();
            assert!((sum - 1.0).abs() < 1e-12, "{features:?} row {i}: {sum}");
            let value: f64 = (0..200).map(|j| rows[[i, j]] * v[[0, 1, j, 4]]).sum();
            assert!((value - out.values[[0, 1, i, 4]]).abs() < 1e-12);
            assert!((i..200).all(|j| j == i || rows[[i, j]] == 0.0));
        }
        let corner = weights.rectangle(0, 1, 120..130, 3..90).unwrap();
        assert!((corner[[5, 10]] - rows[[125, 13]]).abs() <= 1e-15);
        let picture = weights.pooled(0, 1, 0..200, 0..200, [10, 10], Pool::Mean).unwrap();
        assert!((picture.data().iter().sum::<f64>() / 100.0 - 1.0 / 200.0).abs() < 1e-3);
        assert_eq!(picture[[3, 0]], 0.0);
    }
}

#[test]
fn a_nan_in_a_masked_key_or_value_changes_nothing() {
    for features in MAPS {
        for (mask, poison) in [(Mask::full(), f32::NAN), (Mask::causal(), f32::INFINITY)] {
            let attention = Attention::linear(features).mask(mask & Mask::lengths() & Mask::segments());
            let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([2, 2, 200, 6], seed));
            let lengths = [150, 7];
            let queries: Vec<i32> = (0..400).map(|i| i % 3).collect();
            // Segment 9 has no query.
            let keys: Vec<i32> = (0..400).map(|i| if i % 5 == 0 { 9 } else { i % 3 }).collect();
            let (mut dirty_k, mut dirty_v) = (k.clone(), v.clone());
            for b in 0..2 {
                for j in (0..200).filter(|&j| j >= lengths[b] || keys[b * 200 + j] == 9) {
                    for (h, x) in (0..2).flat_map(|h| (0..6).map(move |x| (h, x))) {
                        dirty_k[[b, h, j, x]] = poison;
                        dirty_v[[b, h, j, x]] = poison;
                    }
                }
            }
            let both = |k, v| {
                let inputs = Inputs::new(&q, k, v).lengths(&lengths).segments(&queries, &keys);
                let out = attention.forward(inputs).unwrap();
                let grad = attention.backward(inputs, &out, Upstream::new(&d_out)).unwrap();
                (out, grad)
            };
            let clean = both(&k, &v);
            assert!(clean == both(&dirty_k, &dirty_v), "{features:?}");
            assert!(clean.1.k.data().iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn gradients_of_the_past_do_not_know_the_future_either() {
    for features in MAPS {
        let causal = Attention::linear(features).mask(Mask::causal());
        let [q, k, v, mut d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 1, 200, 6], seed));
        // No gradient comes back from token 100 on, and the keys and values there are garbage.
        let (mut dirty_k, mut dirty_v) = (k.clone(), v.clone());
        for i in 100..200 {
            for x in 0..6 {
                d_out[[0, 0, i, x]] = 0.0;
                dirty_k[[0, 0, i, x]] = f32::NAN;
                dirty_v[[0, 0, i, x]] = f32::NAN;
            }
        }
        let [q100, k100, v100, d100] = [&q, &k, &v, &d_out].map(|t| part(t, 0..100));
        let out = causal.forward(Inputs::new(&q100, &k100, &v100)).unwrap();
        let expected = causal.backward(Inputs::new(&q100, &k100, &v100), &out, Upstream::new(&d100)).unwrap();
        let out = causal.forward(Inputs::new(&q, &dirty_k, &dirty_v)).unwrap();
        let got = causal.backward(Inputs::new(&q, &dirty_k, &dirty_v), &out, Upstream::new(&d_out)).unwrap();
        assert_eq!(part(&got.q, 0..100), expected.q, "{features:?}");
    }
}

#[test]
fn a_query_that_sees_nothing_gets_zero() {
    for features in MAPS {
        let attention = Attention::linear(features).mask(Mask::causal()).place(Place::Offset(-10));
        let mut q = Tensor::<f32, 4>::randn([1, 2, 40, 6], 1);
        let [k, d_out] = [2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 2, 40, 6], seed));
        (0..10).for_each(|i| q[[0, 0, i, 0]] = f32::NAN);
        let rows = vec![1.0; 80];
        let out = attention.forward(Inputs::new(&q, &k, &k)).unwrap();
        let grad = attention.backward(Inputs::new(&q, &k, &k), &out, Upstream::new(&d_out).lse(&rows)).unwrap();
        for i in 0..10 {
            assert_eq!(out.lse[[0, 0, i]], f32::NEG_INFINITY);
            assert!((0..6).all(|x| out.values[[0, 0, i, x]] == 0.0 && grad.q[[0, 0, i, x]] == 0.0));
        }
        assert!(grad.k.data().iter().all(|x| x.is_finite()));
    }
    // Features that never meet: the denominator is 0.
    let q = Tensor::from_fn([1, 1, 3, 2], |[_, _, _, x]| [1.0f32, -1.0][x]);
    let k = Tensor::from_fn([1, 1, 3, 2], |[_, _, _, x]| [-1.0f32, 1.0][x]);
    let relu = Attention::linear(Features::Relu);
    let out = relu.forward(Inputs::new(&q, &k, &k)).unwrap();
    let grad = relu.backward(Inputs::new(&q, &k, &k), &out, Upstream::new(&q).lse(&[1.0; 3])).unwrap();
    assert!(out.values.data().iter().chain(grad.q.data()).chain(grad.k.data()).chain(grad.v.data()).all(|&x| x == 0.0));
    assert!(out.lse.data().iter().all(|&lse| lse == f32::NEG_INFINITY));
}

#[test]
fn large_keys_do_not_overflow() {
    let favor = Attention::linear(Features::Favor { count: 64, seed: 1 }).scale(1.0);
    for mask in [Mask::full(), Mask::causal()] {
        let attention = favor.clone().mask(mask);
        let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 1, 300, 8], seed));
        let (q, k) = (q.map(|x| x * 6.0), k.map(|x| x * 6.0)); // exponents of hundreds
        let out = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
        let grad = attention.backward(Inputs::new(&q, &k, &v), &out, Upstream::new(&v)).unwrap();
        for t in [&out.values, &grad.q, &grad.k, &grad.v] {
            assert!(t.data().iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn what_does_not_go_with_it_is_refused_by_name() {
    let x = Tensor::<f32, 4>::randn([1, 2, 6, 4], 1);
    let elu = || Attention::linear(Features::Elu);
    let refused = |attention: Attention| match attention.forward(Inputs::new(&x, &x, &x)) {
        Err(Error::Conflict { first: "linear attention", second, .. }) => second,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(elu().temperature(2.0)), "a temperature");
    assert_eq!(refused(elu().softcap(2.0)), "a soft-cap");
    assert_eq!(refused(elu().bias(Bias::alibi())), "a bias");
    assert_eq!(refused(elu().learned_scale()), "a learned scale");
    assert_eq!(refused(elu().scale(2.0)), "a scale");
    assert_eq!(refused(elu().dropout(0.1)), "dropout");
    assert_eq!(refused(elu().with_sinks()), "sinks");
    assert_eq!(refused(elu().with_entropy()), "an entropy");
    assert_eq!(refused(elu().mask(Mask::window(2, 2))), "a window");
    assert_eq!(refused(elu().mask(Mask::causal() & !Mask::lengths())), "a mask negated by `!`");
    assert_eq!(refused(elu().mask(Mask::causal() | Mask::lengths())), "masks joined by `|`");
    let blocks = Blocks { size: 6, seen: vec![vec![true]] };
    assert_eq!(refused(elu().mask(Mask::blocks(blocks))), "a mask of blocks");
    let favor = |count| Attention::linear(Features::Favor { count, seed: 1 });
    let error = |attention: Attention| attention.forward(Inputs::new(&x, &x, &x)).unwrap_err().to_string();
    assert_eq!(error(favor(0)), "`favor` is 0, expected 1 to 65536 features");
    assert!(error(favor(8).scale(-1.0)).starts_with("`scale` is -1, expected a finite number above 0"));
    let out = elu().forward(Inputs::new(&x, &x, &x)).unwrap();
    let entropy = vec![0.0; 12];
    assert!(elu().backward(Inputs::new(&x, &x, &x), &out, Upstream::new(&x).entropy(&entropy)).is_err());
    assert!(LinearState::<f32>::new(&Attention::dot().mask(Mask::causal()), 1, 1, 1, 4, 4).is_err());
    assert!(LinearState::<f32>::new(&elu(), 1, 1, 1, 4, 4).is_err());
    let mut state = LinearState::<f32>::new(&elu().mask(Mask::causal()), 1, 2, 2, 4, 4).unwrap();
    assert!(state.attend(&x).is_err(), "six queries, no tokens");
    assert!(state.append(&x, &Tensor::<f32, 4>::randn([1, 2, 6, 5], 1)).is_err());
}

#[test]
fn a_description_can_be_written_and_read_back() {
    for (features, written) in [
        (Features::Elu, r#"{"linear":"elu"}"#),
        (Features::Favor { count: 64, seed: 7 }, r#"{"linear":{"favor":{"count":64,"seed":7}}}"#),
    ] {
        let attention = Attention::linear(features).mask(Mask::causal());
        let json = serde_json::to_string(&attention).unwrap();
        assert!(json.contains(written), "{json}");
        assert_eq!(serde_json::from_str::<Attention>(&json).unwrap(), attention);
    }
}

#[test]
fn no_tile_is_touched() {
    let x = Tensor::<f32, 4>::randn([1, 2, 300, 4], 1);
    assert_eq!(Attention::linear(Features::Relu).tiles(Inputs::new(&x, &x, &x)).unwrap(), qkv::Tiles::default());
}

#[test]
fn favor_estimates_softmax_attention_the_better_the_more_features() {
    let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f64, 4>::randn([1, 1, 128, 16], seed));
    let exact = Attention::scaled_dot().scale(0.1).forward(Inputs::new(&q, &k, &v)).unwrap();
    let error = |count| {
        (0..6)
            .map(|seed| {
                let favor = Attention::linear(Features::Favor { count, seed }).scale(0.1);
                let out = favor.forward(Inputs::new(&q, &k, &v)).unwrap();
                let apart = out.values.data().iter().zip(exact.values.data()).map(|(a, b)| (a - b).powi(2));
                apart.sum::<f64>().sqrt()
            })
            .sum::<f64>()
    };
    let errors = [16, 64, 256, 1024].map(error);
    assert!(errors.windows(2).all(|pair| pair[1] < 0.75 * pair[0]), "{errors:?}");
}
