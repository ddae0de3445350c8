//! Promise 5: on one instruction set, results are the same bit for bit for any number of threads, and for a sequence
//! whatever else is in its batch; exact decoding equals the full pass.

use half::{bf16, f16};
use qkv::{Attention, Bias, Cache, Decode, Element, Gradients, Inputs, Mask, Output, Place, Tensor, Upstream, View};
use qkv_conformance::case::{Case, Data, Extras, Sizes};
use qkv_conformance::sample::Sample;

fn with_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

fn run<T: Element>(case: &Case, data: &Data<T>) -> (Output<T>, Gradients<T>) {
    let out = case.attention.forward(data.inputs()).unwrap();
    let grad = case.attention.backward(data.inputs(), &out, data.upstream()).unwrap();
    (out, grad)
}

/// Cases in which many tasks meet: shared biases, tables, grouped heads, several pieces, projections.
fn cases() -> Vec<Case> {
    let sizes = Sizes::new(300, 700, 24).heads(2, 4, 2);
    let extras = |f: fn(&mut Extras)| {
        let mut extras = Extras { all_upstream: true, ..Extras::default() };
        f(&mut extras);
        extras
    };
    let causal = || Attention::scaled_dot().mask(Mask::causal()).place(Place::End);
    vec![
        Case::new("plain", Attention::scaled_dot(), sizes, extras(|_| {})),
        // So long that workers that share a head pack keys tile by tile, and others pack whole heads.
        Case::new("long", causal(), Sizes::new(1300, 1300, 24).heads(1, 4, 2), extras(|_| {})),
        Case::new("causal with dropout and sinks", causal().dropout(0.1), sizes, extras(|e| e.sinks = true)),
        Case::new("shared bias", causal(), sizes, extras(|e| e.bias = Some([false, false, true, true]))),
        Case::new("bias of keys", causal(), sizes, extras(|e| e.bias = Some([false, false, false, true]))),
        Case::new("bias of queries", causal(), sizes, extras(|e| e.bias = Some([false, true, true, false]))),
        Case::new("table", causal(), sizes, extras(|e| e.table = Some((50, false)))),
        Case::new("strided", causal().mask(Mask::strided(26)), sizes, extras(|e| e.table = Some((5, true)))),
        // Its hyperbolic tangents take so long that fewer tasks have to do.
        Case::new("additive", Attention::additive(), Sizes::new(130, 300, 24).heads(2, 4, 2), extras(|_| {})),
        Case::new("general with learned scale", Attention::general(), sizes, extras(|e| e.scale = Some(true))),
        Case::new("cosine with alibi", Attention::cosine().bias(Bias::alibi()), sizes, extras(|_| {})),
    ]
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    fn same<T: Element>() {
        for case in Sample::from_env().draw(cases(), |case| &case.name) {
            let data = case.data::<T>();
            let one = with_threads(1, || run(&case, &data));
            for threads in [2, 3, 8] {
                let many = with_threads(threads, || run(&case, &data));
                assert!(one == many, "{} {} differs with {threads} threads", case.name, T::NAME);
            }
        }
    }
    same::<f32>();
    same::<f64>();
    same::<bf16>();
    same::<f16>();
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_in_a_batch() {
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([3, 4, 150, 20], seed));
    let attention = Attention::scaled_dot().mask(Mask::causal()).bias(Bias::alibi());
    let out = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
    let grad = attention.backward(Inputs::new(&q, &k, &v), &out, Upstream::new(&d_out)).unwrap();
    let size = 4 * 150 * 20;
    for b in 0..3 {
        let alone = |t: &Tensor<f32, 4>| Tensor::new(t.data()[b * size..][..size].to_vec(), [1, 4, 150, 20]).unwrap();
        let (q, k, v, d_out) = (alone(&q), alone(&k), alone(&v), alone(&d_out));
        let one = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
        let one_grad = attention.backward(Inputs::new(&q, &k, &v), &one, Upstream::new(&d_out)).unwrap();
        assert_eq!(one.values, alone(&out.values));
        assert_eq!(one_grad.q, alone(&grad.q));
        assert_eq!(one_grad.k, alone(&grad.k));
        assert_eq!(one_grad.v, alone(&grad.v));
    }
}

#[test]
fn a_query_has_the_same_bits_whatever_queries_are_beside_it() {
    let [q, k, v] = [1, 2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 2, 200, 24], seed));
    let attention = Attention::scaled_dot();
    let whole = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
    for start in [0, 1, 63, 64, 150] {
        let some = View::strided(q.data(), start * 24, [1, 2, 30, 24], [0, 200 * 24, 24, 1]).unwrap();
        let part = attention.forward(Inputs::new(some, &k, &v)).unwrap();
        for h in 0..2 {
            for i in 0..30 {
                for x in 0..24 {
                    assert_eq!(part.values[[0, h, i, x]], whole.values[[0, h, start + i, x]]);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_however_large_its_neighbours_and_what_it_does_not_see_are() {
    fn same<T: Element>() {
        let (n, d) = (400, 64);
        let numbers = |seed| Tensor::<f32, 4>::randn([1, 1, n, d], seed);
        let rounded = |t: Tensor<f32, 4>| t.map(|x| T::of_f64((*x).into()));
        let attention = Attention::scaled_dot().mask(Mask::causal());
        let run = |large: Option<usize>| {
            let [mut q, mut k, v] = [1, 2, 3].map(numbers);
            for t in [&mut q, &mut k] {
                large.iter().for_each(|&at| t.data_mut()[at * d..][..d].iter_mut().for_each(|x| *x *= 1e6));
            }
            let [q, k, v] = [q, k, v].map(rounded);
            attention.forward(Inputs::new(&q, &k, &v)).unwrap()
        };
        let plain = run(None);
        for at in [300, 399] {
            let other = run(Some(at));
            assert!(plain.values.data()[..at * d] == other.values.data()[..at * d], "{} {at}", T::NAME);
            assert_eq!(plain.lse.data()[..at], other.lse.data()[..at], "{} {at}", T::NAME);
        }
    }
    same::<f32>();
    same::<bf16>();
}

/// Decodes token by token, and then a few at a time, and compares with the full causal pass.
fn decoding_equals_the_full_pass<T: Element>(attention: &Attention, steps: &[usize]) {
    let length: usize = steps.iter().sum();
    let (hq, hk, d) = (8, 2, 24);
    let q = Tensor::<T, 4>::randn([2, hq, length, d], 1);
    let [k, v] = [2, 3].map(|seed| Tensor::<T, 4>::randn([2, hk, length, d], seed));
    let full = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
    let mut cache = Cache::<T>::new(2, hk, d, d);
    let mut at = 0;
    for &step in steps {
        let new =
            |t: &Tensor<T, 4>, heads: usize| Tensor::from_fn([2, heads, step, d], |[b, h, i, x]| t[[b, h, at + i, x]]);
        cache.append(&new(&k, hk), &new(&v, hk)).unwrap();
        let q = new(&q, hq);
        let inputs = Inputs::new(&q, cache.keys(), cache.values());
        let exact = attention.decode(inputs, Decode::Exact).unwrap();
        let fast = attention.decode(inputs, Decode::Fast).unwrap();
        for b in 0..2 {
            for h in 0..hq {
                for i in 0..step {
                    assert_eq!(exact.lse[[b, h, i]], full.lse[[b, h, at + i]]);
                    for x in 0..d {
                        assert_eq!(exact.values[[b, h, i, x]], full.values[[b, h, at + i, x]], "token {}", at + i);
                        let (fast, full) =
                            (fast.values[[b, h, i, x]].to_f64(), full.values[[b, h, at + i, x]].to_f64());
                        assert!((fast - full).abs() <= 8.0 * T::EPSILON * 4.0);
                    }
                }
            }
        }
        at += step;
    }
}

#[test]
fn decoding_equals_the_full_pass_bit_for_bit() {
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let windowed = causal.clone().mask(Mask::window(100, 0)).bias(Bias::alibi()).softcap(30.0);
    decoding_equals_the_full_pass::<f32>(&causal, &[1; 300]);
    decoding_equals_the_full_pass::<f32>(&windowed, &[100, 1, 1, 5, 60, 7, 130, 1]);
    decoding_equals_the_full_pass::<bf16>(&causal, &[127, 1, 1, 1, 126, 1, 1]);
    decoding_equals_the_full_pass::<f64>(&windowed, &[3, 200, 1]);
}

#[test]
fn a_long_cache_is_split_and_merged_to_the_same_result_for_any_threads() {
    let q = Tensor::<f32, 4>::randn([1, 8, 1, 32], 1);
    let [k, v] = [2, 3].map(|seed| Tensor::<f32, 4>::randn([1, 2, 13_000, 32], seed));
    let attention = Attention::scaled_dot().mask(Mask::causal()).with_entropy();
    let decode = |how| attention.decode(Inputs::new(&q, &k, &v), how).unwrap();
    let fast = with_threads(1, || decode(Decode::Fast));
    assert!(fast == with_threads(3, || decode(Decode::Fast)));
    let exact = decode(Decode::Exact);
    assert!(fast != exact, "13,000 keys are cut into pieces, whose merging rounds differently");
    for (a, b) in fast.values.data().iter().zip(exact.values.data()) {
        assert!((a - b).abs() < 1e-6);
    }
    for (a, b) in fast.entropy.unwrap().data().iter().zip(exact.entropy.unwrap().data()) {
        assert!((a - b).abs() < 1e-5);
    }
}
