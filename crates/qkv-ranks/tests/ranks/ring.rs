//! A ring is as exact as one process, over uneven shards, and the same from run to run.

use crate::context::{Held, column, rows, uneven};
use qkv::reference::Reference;
use qkv::{Attention, Bias, Element, Inputs, Mask, Select, Tensor, Upstream};
use qkv_conformance::case::Case;
use qkv_conformance::check::definition;
use qkv_conformance::grid;
use qkv_ranks::{Error, Number, Ranks, Shards, Way, run_in_process};
use std::ops::Range;

/// One rank's rows of the results, or the gradients of parameters, by name.
type Results = Vec<(&'static str, Vec<f64>)>;

fn wide<E: Element>(values: &[E]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

/// The gradients of parameters.
fn parameters<T: Element>(of: &qkv::Gradients<T>) -> Results {
    let tensors =
        [("d_w", &of.w), ("d_w_q", &of.w_q), ("d_w_k", &of.w_k), ("d_bias", &of.bias), ("d_table", &of.table)];
    let vectors = [("d_v_score", &of.v_score), ("d_scale", &of.scale), ("d_sinks", &of.sinks)];
    let tensors = tensors.into_iter().filter_map(|(name, t)| Some((name, wide(t.as_ref()?.data()))));
    tensors.chain(vectors.into_iter().filter_map(|(name, v)| Some((name, wide(v.as_ref()?))))).collect()
}

/// What a rank gets from a ring.
fn by_ring<T>(ranks: &Ranks, case: &Case, inputs: Inputs<'_, T>, upstream: Upstream<'_, T>) -> Result<Results, Error>
where
    T: Element + Number,
    T::Acc: Element<Acc = T::Acc> + Number,
{
    let held = Held::by(ranks, inputs, upstream);
    let local = held.inputs(inputs);
    let context = ranks.attention(&case.attention, &held.queries, &held.keys).way(Way::Ring);
    let out = context.forward(local)?;
    let gradients = context.backward(local, &out, held.upstream())?;
    let mut found = vec![
        ("out", wide(out.values.data())),
        ("lse", wide(out.lse.data())),
        ("d_q", wide(gradients.q.data())),
        ("d_k", wide(gradients.k.data())),
        ("d_v", wide(gradients.v.data())),
    ];
    found.extend(parameters(&gradients));
    Ok(found)
}

/// The largest distance of two results, and the largest number of the second.
fn distance(found: &[f64], truth: &[f64]) -> (f64, f64) {
    assert_eq!(found.len(), truth.len());
    let same = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan();
    let off = |(&a, &b): (&f64, &f64)| if same(a, b) { 0.0 } else { (a - b).abs() };
    let largest = truth.iter().filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs()));
    (found.iter().zip(truth).map(off).fold(0.0, f64::max), largest)
}

/// Holds rings of several sizes to the definition: at most three times as far from it as one process, and some
/// roundings of the largest number. Each rank that a row's log-sum-exp has passed rounded it once, and the weights of
/// the backward pass are off by what that lost. Returns how many cases a ring supports.
fn hold<T>(cases: Vec<Case>) -> usize
where
    T: Element + Number,
    T::Acc: Element<Acc = T::Acc> + Number,
{
    let (mut wrong, mut known) = (Vec::new(), 0);
    for mut case in cases {
        // Most cases request it, and a ring does not support it.
        case.attention.entropy = false;
        let case = &case;
        let data = case.data::<T>();
        let (inputs, upstream) = (data.inputs(), data.upstream());
        let ([b, hq, n, _], [_, _, m, _]) = (inputs.q.shape(), inputs.k.shape());
        let refused = |ranks: Ranks| {
            let shards = Shards::even(0, 1);
            ranks.attention(&case.attention, &shards, &shards).way(Way::Ring).taken(1).is_err()
        };
        if n == 0 || m == 0 || refused(Ranks::alone()) {
            continue;
        }
        known += 1;
        let (truth, truth_back) = definition(case, &data.wide()).unwrap();
        let one = case.attention.forward(inputs).unwrap();
        let one_back = case.attention.backward(inputs, &one, upstream).unwrap();
        let (_, sharpest) = distance(truth.output.lse.data(), truth.output.lse.data());
        for size in [2, 3] {
            // Sums of narrow types are f32.
            let of_merges = (size - 1) as f64 * T::EPSILON.min(f64::from(f32::EPSILON)) * sharpest;
            let run = || run_in_process(size, |ranks| by_ring(&ranks, case, inputs, upstream).unwrap());
            let found = run();
            if size == 3 {
                assert!(format!("{found:?}") == format!("{:?}", run()), "{}: another run differs", case.name);
            }
            for (rank, found) in found.into_iter().enumerate() {
                let (queries, keys) = (uneven(n, size), uneven(m, size));
                let (own, own_keys) = (queries.of(rank), keys.of(rank));
                let of = |t: &Tensor<f64, 4>, ranges: &[Range<usize>]| rows(t, ranges).into_data();
                let narrow = |t: &Tensor<T, 4>, ranges: &[Range<usize>]| wide(rows(t, ranges).data());
                let column_of = |lse: &[f64]| column(lse, [b, hq, n], own);
                let mut expected = vec![
                    ("out", of(&truth.output.values, own), narrow(&one.values, own)),
                    ("lse", column_of(truth.output.lse.data()), column_of(&wide(one.lse.data()))),
                    ("d_q", of(&truth_back.q, own), narrow(&one_back.q, own)),
                    ("d_k", of(&truth_back.k, own_keys), narrow(&one_back.k, own_keys)),
                    ("d_v", of(&truth_back.v, own_keys), narrow(&one_back.v, own_keys)),
                ];
                let of_one = parameters(&one_back).into_iter().map(|(_, values)| values);
                let of_truth = parameters(&truth_back);
                expected.extend(of_truth.into_iter().zip(of_one).map(|((name, truth), one)| (name, truth, one)));
                assert_eq!(found.len(), expected.len(), "{}", case.name);
                for ((name, found), (_, truth, one)) in found.iter().zip(&expected) {
                    let ((off, largest), (of_one, _)) = (distance(found, truth), distance(one, truth));
                    // The gradient of a parameter is a sum over very many pairs, which may cancel.
                    let least = if matches!(*name, "out" | "lse" | "d_q" | "d_k" | "d_v") { 1e-3 } else { 10.0 };
                    let bound = 3.0 * of_one + (8.0 * T::EPSILON + of_merges) * largest.max(least);
                    if off > bound || off.is_nan() {
                        wrong.push(format!(
                            "{} {} on rank {rank} of {size}: {name} is {off:e} off, not {bound:e}",
                            case.name,
                            T::NAME
                        ));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} results:\n{}", wrong.len(), wrong.join("\n"));
    known
}

#[test]
fn a_ring_is_as_exact_as_one_process() {
    // Of the suite's masks, those that depend on distance or come as data.
    let every = std::env::var_os("QKV_EVERY_CASE").is_some();
    let some = |cases: Vec<Case>| cases.into_iter().step_by(if every { 1 } else { 3 }).collect::<Vec<_>>();
    assert!(hold::<f32>(some(grid::masks())) >= 2);
    assert!(hold::<f32>(some(grid::heads())) >= 1);
    assert!(hold::<f32>(some(grid::on_top())) >= 2);
}

#[test]
fn a_ring_of_narrow_types_adds_in_f32() {
    let some = |cases: Vec<Case>| cases.into_iter().step_by(3).collect::<Vec<_>>();
    assert!(hold::<qkv::half::bf16>(some(grid::masks())) > 0);
    assert!(hold::<f64>(some(grid::masks())) > 0);
    assert!(hold::<f32>(some(grid::hashed())) > 0);
}

#[test]
fn a_ring_says_what_it_does_not_know() {
    let shards = Shards::even(8, 2);
    for (attention, what) in [
        (Attention::scaled_dot().dropout(0.1), "dropout and sampling"),
        (Attention::scaled_dot().select(Select::Sparsemax), "a selection other than softmax"),
        (Attention::scaled_dot().mask(Mask::causal() & Mask::fixed(4, 1)), "a fixed pattern"),
        (Attention::scaled_dot().bias(Bias::alibi()).mask(Mask::longformer(2, [0])), "global positions"),
        (Attention::scaled_dot().with_entropy(), "the entropy of rows"),
    ] {
        let found = run_in_process(2, |ranks| {
            ranks.attention(&attention, &shards, &shards).way(Way::Ring).taken(2).unwrap_err().to_string()
        });
        assert_eq!(found[1], format!("a ring does not know {what}: gather keys and values instead"));
    }
}

#[test]
fn bytes_of_a_ring_are_those_of_the_formula() {
    let (b, h, n, d, size) = (1, 4, 512, 16, 4);
    let x = Tensor::<f32, 4>::randn([b, h, n / size, d], 1);
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let shards = Shards::even(n, size);
    let sent = run_in_process(size, |ranks| {
        let ring = ranks.attention(&causal, &shards, &shards).way(Way::Ring);
        let inputs = Inputs::new(&x, &x, &x);
        let out = ring.forward(inputs).unwrap();
        let forward = ranks.traffic().sent;
        ring.backward(inputs, &out, Upstream::new(&x)).unwrap();
        [forward, ranks.traffic().sent - forward]
    });
    // A rank's keys and values, P − 1 times; backward, their gradients come all the way around: P times.
    let own = (2 * b * h * (n / size) * d * 4) as u64;
    assert_eq!(sent, [[3 * own, 3 * own + 4 * own]; 4]);
}

#[test]
fn the_error_does_not_grow_with_the_number_of_ranks() {
    type Half = qkv::half::bf16;
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 2, 512, 32], seed).rounded::<Half>());
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let inputs = Inputs::new(&q, &k, &v);
    let reference = Reference::<f64>::exact();
    let truth = reference.forward(&causal, inputs).unwrap();
    let back = reference.backward(&causal, inputs, &truth, Upstream::new(&d_out)).unwrap();
    let errors = [1, 2, 4, 8].map(|size| {
        let shards = Shards::balanced(512, size);
        let found = run_in_process(size, |ranks| {
            let own = |of: &Tensor<Half, 4>| shards.take(ranks.rank(), of.into());
            let [q, k, v, d_out] = [&q, &k, &v, &d_out].map(own);
            let ring = ranks.attention(&causal, &shards, &shards).way(Way::Ring);
            let out = ring.forward(Inputs::new(&q, &k, &v)).unwrap();
            let found = ring.backward(Inputs::new(&q, &k, &v), &out, Upstream::new(&d_out)).unwrap();
            let far = |found: &Tensor<Half, 4>, truth: &Tensor<f64, 4>| {
                distance(&wide(found.data()), shards.take(ranks.rank(), truth.into()).data()).0
            };
            [far(&out.values, &truth.output.values), far(&found.q, &back.q), far(&found.k, &back.k)]
        });
        [0, 1, 2].map(|at| found.iter().map(|errors| errors[at]).fold(0.0, f64::max))
    });
    for more in &errors[1..] {
        assert!(more.iter().zip(&errors[0]).all(|(more, one)| *more <= 1.25 * one), "{errors:?}");
    }
}
