//! The suite on a GPU of this machine, in every type: the general kernels, and Hopper's own if it is a Hopper GPU.
//! Without a GPU the tests say so and pass.

use crate::engine::{self, DeviceEngine, TYPES, holds};
use qkv::{Attention, Bias, BigBird, Blocks, Element, Inputs, Mask, Place, Pool, Tensor};
use qkv_conformance::case::{Case, Extras, Sizes};
use qkv_conformance::grid;
use qkv_cuda::{
    Buffer, Cuda, Dtype, Error, Gradients, Outputs, PlanOptions, Stream, Strided, Tensors, Upstreams, Vector, Workspace,
};
use std::io::Write;
use std::sync::Once;

/// The first GPU; without one, prints why.
fn device() -> Option<Cuda> {
    match Cuda::new(0) {
        Ok(cuda) => Some(cuda),
        Err(error @ (Error::NoDriver { .. } | Error::NoDevice { .. } | Error::TooOld { .. })) => {
            // Once, bypassing the harness, which captures the output of passing tests. The general kernels are also
            // tested by `emulated.rs`; Hopper's own only here.
            static REPORTED: Once = Once::new();
            REPORTED.call_once(|| drop(writeln!(std::io::stderr(), "skipped: {error}")));
            None
        }
        Err(error) => panic!("there is a GPU, but: {error}"),
    }
}

fn group(cases: Vec<Case>, decoding: bool) {
    if let Some(cuda) = device() {
        holds(&DeviceEngine { cuda, decoding }, cases, 1, TYPES);
    }
}

#[test]
fn odd_shapes_hold() {
    group(grid::shapes(), false);
}

#[test]
fn heads_are_shared_as_defined() {
    group(grid::heads(), false);
}

#[test]
fn scales_caps_and_biases_hold() {
    group(grid::on_top(), false);
}

#[test]
fn every_mask_holds_at_every_place() {
    group(grid::masks(), false);
}

#[test]
fn scattered_masks_hold() {
    group(grid::gathered(), false);
}

#[test]
fn dropout_and_sinks_hold() {
    group(grid::selection(), false);
}

#[test]
fn hash_buckets_hold() {
    group(grid::hashed(), false);
}

#[test]
fn decoding_holds() {
    group(grid::decoding(), true);
}

#[test]
fn decoding_one_token_of_whole_widths_holds() {
    group(engine::one_token(), true);
}

/// Cases that Hopper's kernels support: no entropy, more than a few queries.
fn for_hopper() -> Vec<Case> {
    let plain = Extras::default;
    let mut cases = Vec::new();
    for (n, m, d, dv, hq, hk) in
        [(130, 257, 64, 64, 2, 1), (300, 300, 128, 128, 2, 2), (200, 150, 256, 256, 2, 1), (90, 400, 80, 40, 4, 2)]
    {
        let sizes = Sizes::new(n, m, d).heads(2, hq, hk).widths(d, dv);
        let lengths = Extras { lengths: true, ..plain() };
        let segments = Extras { segments: true, ..plain() };
        let lse = Extras { all_upstream: true, ..plain() };
        let sinks = Extras { sinks: true, ..plain() };
        let bias = Extras { bias: Some([true, true, true, true]), ..plain() };
        let shared = Extras { bias: Some([false, true, false, true]), ..plain() };
        let scaled = Attention::scaled_dot;
        let drawn = BigBird { block: 32, window: 3, globals: 1, random: 2, seed: 3 };
        let seen =
            (0..n.div_ceil(50)).map(|i| (0..m.div_ceil(50)).map(|j| (i * 7 + j * 3) % 4 != 1).collect()).collect();
        for (name, attention, extras) in [
            ("longformer", scaled().mask(Mask::longformer(64, [0, 77])), plain()),
            ("longformer with lengths", scaled().mask(Mask::longformer(90, [3])), lengths.clone()),
            (
                "causal longformer at the end",
                scaled().mask(Mask::longformer(40, [1]) & Mask::causal()).place(Place::End),
                sinks.clone(),
            ),
            ("bigbird", scaled().mask(Mask::bigbird(drawn)), lse.clone()),
            ("strided", scaled().mask(Mask::strided(24) & Mask::causal()), plain()),
            ("blocks", scaled().mask(Mask::blocks(Blocks { size: 50, seen })).dropout(0.1), plain()),
            ("all but a window", scaled().mask(!Mask::window(30, 30)).softcap(3.0), plain()),
            ("full", scaled(), lse.clone()),
            ("causal", scaled().mask(Mask::causal()), lse),
            ("causal at the end", scaled().mask(Mask::causal()).place(Place::End), plain()),
            ("window", scaled().mask(Mask::window(40, 9)), plain()),
            ("causal window", scaled().mask(Mask::causal() & Mask::window(70, 0)), plain()),
            ("lengths", scaled(), lengths.clone()),
            ("causal lengths", scaled().mask(Mask::causal()), lengths),
            ("segments", scaled(), segments.clone()),
            ("causal segments", scaled().mask(Mask::causal()), segments),
            ("soft-cap", scaled().softcap(2.0).scale(0.3), plain()),
            ("alibi", scaled().bias(Bias::alibi()).mask(Mask::causal()), plain()),
            ("sinks", scaled(), sinks),
            ("bias", scaled(), bias),
            ("shared bias", scaled(), shared),
            ("dropout", scaled().dropout(0.2), plain()),
            ("temperature", scaled().temperature(1.7), plain()),
        ] {
            let mut case = Case::new(format!("{name} {n}×{m}×{d}/{dv}"), attention, sizes, extras);
            case.attention.entropy = false;
            cases.push(case);
        }
    }
    cases
}

#[test]
fn cases_of_the_hopper_kernels_hold() {
    if let Some(cuda) = device() {
        holds(&DeviceEngine { cuda, decoding: false }, for_hopper(), 1, "bf16,f16");
    }
}

/// A pseudo-random number below `below`.
fn draw(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 33) as usize) % below
}

/// Random sizes, masks and features; `QKV_SEED` changes the seed.
fn at_random(count: usize) -> Vec<Case> {
    let seed = std::env::var("QKV_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut state: u64 = seed;
    let mut cases = Vec::new();
    for _ in 0..count {
        let mut next = |below: usize| draw(&mut state, below);
        let (n, m) = (17 + next(400), 1 + next(500));
        let (d, dv) = (8 * (1 + next(32)), 8 * (1 + next(32)));
        let (hk, group) = (1 + next(3), 1 + next(3));
        let sizes = Sizes::new(n, m, d).heads(1 + next(2), hk * group, hk).widths(d, dv);
        let mask = match next(7) {
            0 => Mask::full(),
            1 => Mask::causal(),
            2 => Mask::window(next(200), next(100)),
            3 => Mask::longformer(2 + next(120), [next(m), next(m)]),
            4 => Mask::strided(1 + next(40)) & Mask::causal(),
            5 => Mask::bigbird(BigBird { block: 8 + next(60), window: 3, globals: 1, random: 1, seed: 5 }),
            _ => Mask::causal() | Mask::window(0, next(64)),
        };
        let place = [Place::Start, Place::End, Place::Offset(next(90) as i64 - 30)][next(3)];
        let attention = Attention::scaled_dot().mask(mask.clone()).place(place);
        let extras = Extras { lengths: next(3) == 0, segments: next(5) == 0, sinks: next(4) == 0, ..Extras::default() };
        let name = format!("at random {n}×{m}×{d}/{dv} of {hk}·{group}, {mask:?}, {place:?}");
        let mut case = Case::new(name, attention, sizes, extras);
        case.attention.entropy = false;
        cases.push(case);
    }
    cases
}

#[test]
fn shapes_and_masks_at_random_hold() {
    if let Some(cuda) = device() {
        let count = if std::env::var_os("QKV_EVERY_CASE").is_some() { 400 } else { 60 };
        holds(&DeviceEngine { cuda, decoding: false }, at_random(count), 1, "bf16,f16");
    }
}

/// NaN in a key and a value that only some queries of a tile see: it reaches those queries and no others.
#[test]
fn nan_under_a_mask_reaches_only_those_who_see_it() {
    let Some(cuda) = device() else { return };
    let (n, d) = (400, 64);
    let plain = |seed| Tensor::<half::bf16, 4>::randn([1, 2, n, d], seed);
    let (q, d_out) = (plain(1), plain(4));
    for (mask, from) in [(Mask::causal(), 150), (Mask::window(40, 20), 150), (Mask::longformer(32, []), 150)] {
        let attention = Attention::scaled_dot().mask(mask.clone());
        let run = |odd: f32| {
            let (mut k, mut v) = (plain(2), plain(3));
            for x in 0..d {
                (k[[0, 0, from, x]], v[[0, 1, from, x]]) = (half::bf16::from_f32(odd), half::bf16::from_f32(odd));
            }
            let inputs = Inputs::new(&q, &k, &v);
            let out = cuda.forward(&attention, inputs).unwrap();
            let grad = cuda.backward(&attention, inputs, &out, qkv::Upstream::new(&d_out)).unwrap();
            (out.values, grad.q)
        };
        let (clean, poisoned) = (run(0.0), run(f32::NAN));
        for (clean, poisoned) in [(&clean.0, &poisoned.0), (&clean.1, &poisoned.1)] {
            for (h, i) in (0..2).flat_map(|h| (0..n).map(move |i| (h, i))) {
                let sees = match mask {
                    Mask::Causal => from <= i,
                    Mask::Window { left, right } => from + left >= i && from <= i + right,
                    _ => from.abs_diff(i) <= 16,
                };
                let row = |of: &Tensor<half::bf16, 4>| (0..d).map(|x| of[[0, h, i, x]].to_f32()).collect::<Vec<_>>();
                let apart = row(clean).iter().zip(row(poisoned)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(sees || apart < 0.05, "{mask:?}: row {i} of head {h} is {apart} apart");
                assert!(!sees || row(poisoned).iter().any(|x| x.is_nan()), "{mask:?}: row {i} of head {h} saw nothing");
            }
        }
    }
}

/// Segments that are runs, runs with one moved to the end, and segments that are not runs, which are left to the
/// general kernels.
#[test]
fn segments_in_any_order_hold() {
    let Some(cuda) = device() else { return };
    let (n, d) = (300, 64);
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<half::bf16, 4>::randn([2, 2, n, d], seed));
    let attention = Attention::scaled_dot().mask(Mask::segments());
    let run: Vec<i32> = (0..n as i32).map(|i| i / 70).collect();
    let padded: Vec<i32> = (0..n as i32).map(|i| if i < 250 { 1 + i / 90 } else { 0 }).collect();
    let mixed: Vec<i32> = (0..n as i32).map(|i| i / 10 % 4).collect();
    for two in [[&run, &padded], [&run, &mixed], [&mixed, &mixed]] {
        let ids: Vec<i32> = two.into_iter().flatten().copied().collect();
        let inputs = Inputs::new(&q, &k, &v).segments(&ids, &ids);
        let of = |general_only: bool| {
            let options = PlanOptions::default().backward(true).general_only(general_only);
            let mut session = cuda.session(&attention, inputs, Place::Start, options).unwrap();
            let out = session.forward().unwrap();
            let grad = session.backward(qkv::Upstream::new(&d_out)).unwrap();
            [out.values, grad.q, grad.k, grad.v]
        };
        for (ours, general) in of(false).iter().zip(of(true).iter()) {
            let apart = ours.data().iter().zip(general.data()).map(|(a, b)| (a.to_f32() - b.to_f32()).abs());
            let worst = apart.fold(0.0, |a: f32, b| if b.is_nan() { f32::INFINITY } else { a.max(b) });
            assert!(worst < 0.1, "{worst}");
        }
    }
}

/// Rows so long that they are split among blocks: global tokens beside a window, against the CPU in f32. Each global
/// row is compared by itself: an error in one would vanish among the others.
#[test]
fn split_rows_hold() {
    let Some(cuda) = device() else { return };
    let globals = [0, 3_000, 5_999];
    let lengths = [5_000, 2_100];
    for (d, softcap, dropout, padded) in
        [(64, None, None, false), (128, None, Some(0.1), true), (128, Some(5.0), None, false), (256, None, None, true)]
    {
        let n = 6_000;
        let plain = |heads: usize, seed: u64| Tensor::<half::bf16, 4>::randn([2, heads, n, d], seed);
        let [q, k, v, d_out] = [(4, 1), (2, 2), (2, 3), (4, 4)].map(|(heads, seed)| plain(heads, seed));
        let sinks = [1.0, 0.5, -1.0, 3.0].map(half::bf16::from_f32);
        let mut attention = Attention::scaled_dot().mask(Mask::longformer(300, globals)).with_sinks();
        (attention.softcap, attention.mask) =
            (softcap, if padded { attention.mask & Mask::lengths() } else { attention.mask });
        if let Some(part) = dropout {
            attention = attention.dropout(part);
        }
        let inputs = Inputs::new(&q, &k, &v).sinks(&sinks).seed(9);
        let inputs = if padded { inputs.lengths(&lengths) } else { inputs };
        let run = || {
            let out = cuda.forward(&attention, inputs).unwrap();
            let grad = cuda.backward(&attention, inputs, &out, qkv::Upstream::new(&d_out)).unwrap();
            [out.values, grad.q, grad.k, grad.v]
        };
        let ours = run();
        assert_eq!(run(), ours, "two runs at width {d}");
        let [q, k, v, d_out] = [&q, &k, &v, &d_out].map(|x| x.map(|x| x.to_f32()));
        let sinks = sinks.map(half::bf16::to_f32);
        let inputs = Inputs::new(&q, &k, &v).sinks(&sinks).seed(9);
        let inputs = if padded { inputs.lengths(&lengths) } else { inputs };
        let out = attention.forward(inputs).unwrap();
        let grad = attention.backward(inputs, &out, qkv::Upstream::new(&d_out)).unwrap();
        for (name, ours, exact) in [
            ("out", &ours[0], &out.values),
            ("dq", &ours[1], &grad.q),
            ("dk", &ours[2], &grad.k),
            ("dv", &ours[3], &grad.v),
        ] {
            let [batch, heads, ..] = exact.shape();
            let apart = |b: usize, h: usize, rows: &[usize]| {
                let (mut error, mut size) = (0.0f64, 0.0f64);
                for (&i, x) in rows.iter().flat_map(|i| (0..d).map(move |x| (i, x))) {
                    let exact = f64::from(exact[[b, h, i, x]]);
                    error += (f64::from(ours[[b, h, i, x]].to_f32()) - exact).powi(2);
                    size += exact.powi(2);
                }
                (error / size.max(1e-12)).sqrt()
            };
            let all: Vec<usize> = (0..n).collect();
            for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                for rows in globals.iter().map(std::slice::from_ref).chain([&all[..]]) {
                    let apart = apart(b, h, rows);
                    assert!(
                        apart < 0.02,
                        "{name} at width {d}, sequence {b}, head {h}, rows {:?}: {apart}",
                        rows.first()
                    );
                }
            }
        }
    }
}

/// Lengths per sequence, segments per token, and whether there is a gradient of the log-sum-exp.
#[derive(Clone, Copy, Default)]
struct Beside<'a> {
    lengths: Option<&'a [usize]>,
    segments: Option<&'a [i32]>,
    d_lse: bool,
}

/// Each of `some` sequences has the same bits on its own as in the batch, forward and backward.
fn alone_as_together<T: Element<Acc = f32>>(
    cuda: &Cuda,
    attention: &Attention,
    [q, k, v, d_out]: [&Tensor<T, 4>; 4],
    some: &[usize],
    beside: Beside<'_>,
) {
    let [all, heads, n, _] = q.shape();
    let d_lse: Vec<f32> = (0..all * heads * n).map(|x| (x % 7) as f32 * 0.01).collect();
    let run = |[q, k, v, d_out]: [&Tensor<T, 4>; 4], of: std::ops::Range<usize>| {
        let mut inputs = Inputs::new(q, k, v);
        if let Some(lengths) = beside.lengths {
            inputs = inputs.lengths(&lengths[of.clone()]);
        }
        if let Some(segments) = beside.segments {
            let segments = &segments[of.start * n..of.end * n];
            inputs = inputs.segments(segments, segments);
        }
        let mut upstream = qkv::Upstream::new(d_out);
        if beside.d_lse {
            upstream = upstream.lse(&d_lse[of.start * heads * n..of.end * heads * n]);
        }
        let out = cuda.forward(attention, inputs).unwrap();
        let grad = cuda.backward(attention, inputs, &out, upstream).unwrap();
        [out.values, grad.q, grad.k, grad.v]
    };
    let together = run([q, k, v, d_out], 0..all);
    for &b in some {
        let of = |x: &Tensor<T, 4>| {
            let [_, h, n, d] = x.shape();
            Tensor::from_fn([1, h, n, d], |[_, h, i, c]| x[[b, h, i, c]])
        };
        let alone = run([&of(q), &of(k), &of(v), &of(d_out)], b..b + 1);
        for ((name, all), one) in ["out", "dq", "dk", "dv"].iter().zip(&together).zip(&alone) {
            assert!(of(all) == *one, "{name} of sequence {b}, q {:?}, {:?}", q.shape(), attention.mask);
        }
    }
}

/// Enough sequences that most heads are preprocessed, and dq of some is converted, beside the main kernel; against each
/// sequence alone, where nothing overlaps.
#[test]
fn overlapped_preprocessing_has_the_same_bits() {
    let Some(cuda) = device() else { return };
    fn holds<T: Element<Acc = f32>>(cuda: &Cuda, [hq, hk, n, m, d]: [usize; 5], mask: Mask, beside: Beside<'_>) {
        let plain = |heads: usize, len: usize, seed: u64| Tensor::<T, 4>::randn([4, heads, len, d], seed);
        let tensors = [plain(hq, n, 1), plain(hk, m, 2), plain(hk, m, 3), plain(hq, n, 4)];
        alone_as_together(cuda, &Attention::scaled_dot().mask(mask), tensors.each_ref(), &[0, 1, 2, 3], beside);
    }
    use half::{bf16, f16};
    let (none, n) = (Beside::default(), 8_192);
    let shorter = Beside { lengths: Some(&[8_192, 5_000, 0, 8_000]), ..none };
    holds::<bf16>(&cuda, [8, 4, n, n, 64], Mask::window(900, 0), none);
    holds::<bf16>(&cuda, [8, 8, n, n, 64], Mask::window(600, 500) & Mask::lengths(), shorter);
    holds::<bf16>(&cuda, [4, 4, n, n, 128], Mask::window(1_000, 70), Beside { d_lse: true, ..none });
    // A tile list: a window with a hole is no band.
    holds::<bf16>(&cuda, [4, 4, n, n, 128], Mask::window(900, 900) & !Mask::window(5, 5), none);
    // A width between two kernels; fewer queries than keys.
    holds::<f16>(&cuda, [8, 8, n, n, 72], Mask::window(600, 600), none);
    holds::<f16>(&cuda, [4, 4, 6_000, n, 256], Mask::window(700, 700), none);
}

/// More sequences than the second axis of a grid can count.
#[test]
fn very_many_sequences_hold() {
    let Some(cuda) = device() else { return };
    let (all, n, d) = (66_000, 20, 8);
    let plain = |seed: usize| {
        let number = |[b, _, i, c]: [usize; 4]| (((b * n + i) * d + c) * 7_919 + seed * 104_729) % 1_009;
        Tensor::from_fn([all, 1, n, d], |at| half::bf16::from_f32(number(at) as f32 / 252.0 - 2.0))
    };
    let tensors = [plain(1), plain(2), plain(3), plain(4)];
    let segments: Vec<i32> = (0..all * n).map(|x| (x % n / 6) as i32).collect();
    let packed = Beside { segments: Some(&segments), ..Beside::default() };
    for (mask, beside) in [(Mask::causal(), Beside::default()), (Mask::segments(), packed)] {
        let attention = Attention::scaled_dot().mask(mask);
        alone_as_together(&cuda, &attention, tensors.each_ref(), &[0, 1, 32_768, 65_535, 65_536, all - 1], beside);
    }
}

/// Any stride on an axis of length 1, and gaps of any length between rows.
#[test]
fn bits_do_not_depend_on_strides() {
    let Some(cuda) = device() else { return };
    let (h, n, d) = (8, 8_192, 64);
    let shape = [1, h, n, d];
    let attention = Attention::scaled_dot().mask(Mask::window(600, 600));
    let dense = Strided::contiguous(0, shape);
    let odd = Strided { strides: [1, dense.strides[1], dense.strides[2], 1], ..dense };
    let gaps = Strided { strides: [1, (n * (d + 1)) as i64, d as i64 + 1, 1], ..dense };
    let given: [Tensor<half::bf16, 4>; 4] = std::array::from_fn(|x| Tensor::randn(shape, 1 + x as u64));
    let run = |form: Strided| {
        let bytes = form.span() * 2;
        let put = |x: &Tensor<half::bf16, 4>| {
            let mut data = vec![half::bf16::NAN; form.span()];
            for (row, values) in x.data().chunks(d).enumerate() {
                let at = row / n * form.strides[1] as usize + row % n * form.strides[2] as usize;
                data[at..at + d].copy_from_slice(values);
            }
            let buffer = cuda.buffer(bytes).unwrap();
            buffer.write(&data, Stream(0)).unwrap();
            buffer
        };
        let given = given.each_ref().map(put);
        let made: [Buffer; 4] = std::array::from_fn(|_| cuda.buffer(bytes).unwrap());
        let lse = cuda.buffer(h * n * 4).unwrap();
        let at = |buffer: &Buffer| Strided { ptr: buffer.ptr(), ..form };
        let [q, k, v, d_out] = given.each_ref().map(at);
        let [values, d_q, d_k, d_v] = made.each_ref().map(at);
        let tensors = Tensors::new(q, k, v);
        let options = PlanOptions::default().backward(true);
        let plan = cuda.plan(&attention, Dtype::Bf16, Place::Start, &tensors, options).unwrap();
        let room = cuda.buffer(plan.forward_workspace().max(plan.backward_workspace())).unwrap();
        let workspace = Workspace::new(room.ptr(), room.bytes());
        let out = Outputs::new(values, Vector::new(lse.ptr(), h * n));
        let upstream = Upstreams::new(d_out);
        let into = Gradients::new(d_q, d_k, d_v);
        // SAFETY: all buffers outlive the reads below, which wait for the stream.
        unsafe {
            plan.forward(&tensors, &out, workspace, Stream(0)).unwrap();
            plan.backward(&tensors, &out, &upstream, &into, workspace, Stream(0)).unwrap();
        }
        made.map(|buffer| {
            let data = buffer.read::<half::bf16>(form.span(), Stream(0)).unwrap();
            let at = |row: usize| row / n * form.strides[1] as usize + row % n * form.strides[2] as usize;
            (0..h * n).flat_map(|row| data[at(row)..at(row) + d].to_vec()).collect::<Vec<_>>()
        })
    };
    let plain = run(dense);
    for (name, form) in [("an axis of one", odd), ("gaps", gaps)] {
        for ((what, found), expected) in ["out", "dq", "dk", "dv"].iter().zip(run(form)).zip(&plain) {
            assert!(found == *expected, "{what} with {name}");
        }
    }
}

#[test]
fn two_runs_give_the_same_bits() {
    let Some(cuda) = device() else { return };
    let x = Tensor::<half::bf16, 4>::randn([2, 4, 777, 64], 1);
    let attention = Attention::scaled_dot().mask(Mask::causal());
    let inputs = || Inputs::new(&x, &x, &x);
    let run = || {
        let out = cuda.forward(&attention, inputs()).unwrap();
        let grad = cuda.backward(&attention, inputs(), &out, qkv::Upstream::new(&x)).unwrap();
        (out, grad)
    };
    let first = run();
    for _ in 0..5 {
        assert_eq!(run(), first);
    }
}

#[test]
fn a_picture_is_pooled_from_the_weights() {
    let Some(cuda) = device() else { return };
    pooling_holds(&cuda);
}

fn pooling_holds(cuda: &Cuda) {
    let x = Tensor::<f32, 4>::randn([1, 2, 130, 16], 1);
    let attention = Attention::scaled_dot().mask(Mask::causal());
    let inputs = Inputs::new(&x, &x, &x);
    let options = PlanOptions::default().weights(true);
    let mut session = cuda.session(&attention, inputs, Place::Start, options).unwrap();
    let out = session.forward().unwrap();
    let weights = attention.weights(inputs, &out).unwrap();
    for pool in [Pool::Max, Pool::Mean] {
        for (rows, cols, shape) in [(0..130, 0..130, [7, 9]), (20..101, 3..80, [100, 5]), (5..5, 0..10, [2, 2])] {
            let ours = session.pooled([0, 1], rows.clone(), cols.clone(), shape, pool).unwrap();
            let theirs = weights.pooled(0, 1, rows, cols, shape, pool).unwrap();
            let apart = ours.data().iter().zip(theirs.data()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-5, "{pool:?} {shape:?}: {apart}");
        }
        for (rows, cols, cells) in [(0..130, 0..130, [8, 8]), (64..130, 3..80, [64, 1]), (20..20, 0..10, [2, 2])] {
            let ours = session.map([0, 1], rows.clone(), cols.clone(), cells, pool).unwrap();
            let theirs = weights.map(0, 1, rows, cols, cells, pool, None).unwrap();
            assert_eq!(ours.shape(), theirs.shape());
            let apart = ours.data().iter().zip(theirs.data()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-5, "{pool:?} {cells:?}: {apart}");
        }
    }
    let refused = session.map([0, 0], 0..10, 0..10, [0, 3], Pool::Max).unwrap_err();
    assert!(refused.to_string().contains("cells"), "{refused}");
}

#[test]
fn weights_are_pooled_in_emulation_too() {
    match Cuda::emulated() {
        Ok(cuda) => pooling_holds(&cuda),
        Err(error) => drop(writeln!(std::io::stderr(), "skipped: {error}")),
    }
}
