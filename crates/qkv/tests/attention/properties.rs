//! Properties of attention that hold for any numbers, checked on random cases.

use proptest::prelude::*;
use qkv::reference::Reference;
use qkv::{Attention, Bias, BigBird, Inputs, Mask, Output, Place, Pool, Score, Tensor, View, segments_of};

fn randn(shape: [usize; 4], seed: u64) -> Tensor<f64, 4> {
    Tensor::randn(shape, seed)
}

fn close(a: &[f64], b: &[f64], tolerance: f64) -> Result<(), TestCaseError> {
    prop_assert_eq!(a.len(), b.len());
    for (at, (x, y)) in a.iter().zip(b).enumerate() {
        prop_assert!(x == y || (x - y).abs() <= tolerance, "at {}: {} and {}", at, x, y);
    }
    Ok(())
}

/// Any mask that needs no data, a few rules deep.
fn masks() -> impl Strategy<Value = Mask> {
    let leaf = prop_oneof![
        Just(Mask::full()),
        Just(Mask::causal()),
        (0usize..80, 0usize..80).prop_map(|(l, r)| Mask::window(l, r)),
        (1usize..40).prop_map(Mask::strided),
        (1usize..40).prop_flat_map(|s| (Just(s), 1..=s)).prop_map(|(s, c)| Mask::fixed(s, c)),
        (0usize..60, prop::collection::vec(0usize..40, 0..4)).prop_map(|(w, g)| Mask::longformer(w, g)),
        (1usize..20, 0usize..5, 0usize..3, 0usize..4, any::<u64>()).prop_map(
            |(block, window, globals, random, seed)| {
                Mask::bigbird(BigBird { block, window, globals, random, seed })
            }
        ),
    ];
    leaf.prop_recursive(3, 8, 2, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(a, b)| a & b),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| a | b),
            inner.prop_map(|a| !a),
        ]
    })
}

fn places() -> impl Strategy<Value = Place> {
    prop_oneof![Just(Place::Start), Just(Place::End), (-50i64..50).prop_map(Place::Offset)]
}

/// Which pairs a mask keeps, read off the weights.
fn kept(mask: Mask, place: Place, n: usize, m: usize) -> Vec<bool> {
    let zeros = Tensor::from_fn([1, 1, n.max(m), 1], |_| 0.0f64);
    let (q, k) = (View::from(&zeros).truncate(n), View::from(&zeros).truncate(m));
    let attention = Attention::dot().mask(mask).place(place);
    let out = attention.forward(Inputs::new(q, k, k)).unwrap();
    let weights = attention.weights(Inputs::new(q, k, k), &out).unwrap();
    weights.rows(0, 0, 0..n).unwrap().data().iter().map(|&w| w > 0.0).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn rows_sum_to_one_and_weights_times_values_is_the_output(
        mask in masks(), place in places(), n in 40usize..150, m in 40usize..300, seed: u64,
    ) {
        let (q, k, v) = (randn([1, 2, n, 6], seed), randn([1, 1, m, 6], seed ^ 1), randn([1, 1, m, 3], seed ^ 2));
        let attention = Attention::scaled_dot().mask(mask).place(place);
        let out = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
        let weights = attention.weights(Inputs::new(&q, &k, &v), &out).unwrap().rows(0, 1, 0..n).unwrap();
        for i in 0..n {
            let row = &weights.data()[i * m..][..m];
            let sum: f64 = row.iter().sum();
            let nothing = out.lse[[0, 1, i]] == f64::NEG_INFINITY;
            prop_assert!((sum - if nothing { 0.0 } else { 1.0 }).abs() < 1e-12, "row {} sums to {}", i, sum);
            let product: Vec<f64> = (0..3).map(|x| (0..m).map(|j| row[j] * v[[0, 0, j, x]]).sum()).collect();
            let values: Vec<f64> = (0..3).map(|x| out.values[[0, 1, i, x]]).collect();
            close(&product, &values, 1e-12)?;
        }
    }

    #[test]
    fn one_pair_taken_apart_is_the_score_of_the_definition(
        mask in masks(), place in places(), n in 2usize..20, m in 2usize..40,
        cap in prop::option::of(1.0f64..20.0), seed: u64,
    ) {
        let (q, k) = (randn([1, 2, n, 6], seed), randn([1, 1, m, 6], seed ^ 1));
        let mut attention = Attention::scaled_dot().mask(mask).place(place).bias(Bias::alibi());
        attention.softcap = cap;
        let inputs = Inputs::new(&q, &k, &k);
        let whole = Reference::<f64>::exact().forward(&attention, inputs).unwrap();
        for at in [[0, 1, 0, 0], [0, 0, n - 1, m - 1], [0, 1, n / 2, m / 2]] {
            let pair = Reference::<f64>::exact().pair(&attention, inputs, at).unwrap();
            prop_assert_eq!(pair.score, whole.scores[at]);
            prop_assert_eq!(pair.seen, whole.scores[at] != f64::NEG_INFINITY);
        }
        prop_assert!(Reference::<f64>::exact().pair(&attention, inputs, [0, 0, n, 0]).is_err());
    }

    #[test]
    fn cells_of_a_map_are_the_largest_and_the_mean_of_what_they_cover(
        mask in masks(), n in 20usize..150, m in 20usize..300, each in 1usize..40, across in 1usize..40, seed: u64,
    ) {
        let (q, k) = (randn([1, 1, n, 6], seed), randn([1, 1, m, 6], seed ^ 1));
        let attention = Attention::scaled_dot().mask(mask);
        let out = attention.forward(Inputs::new(&q, &k, &k)).unwrap();
        let weights = attention.weights(Inputs::new(&q, &k, &k), &out).unwrap();
        let (rows, cols) = (n / 5..n, m / 7..m - 3);
        let part = weights.rectangle(0, 0, rows.clone(), cols.clone()).unwrap();
        let map = |pool, most| weights.map(0, 0, rows.clone(), cols.clone(), [each, across], pool, most).unwrap();
        let (largest, mean, some) = (map(Pool::Max, None), map(Pool::Mean, None), map(Pool::Max, Some(1)));
        let [height, width] = largest.shape();
        prop_assert_eq!([height, width], [rows.len().div_ceil(each), cols.len().div_ceil(across)]);
        for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
            let down = y * each..((y + 1) * each).min(rows.len());
            let over = x * across..((x + 1) * across).min(cols.len());
            let positions = down.clone().flat_map(|i| over.clone().map(move |j| [i, j]));
            let covered: Vec<f64> = positions.map(|at| part[at]).collect();
            prop_assert_eq!(largest[[y, x]], covered.iter().copied().fold(0.0, f64::max));
            let expected = covered.iter().sum::<f64>() / covered.len() as f64;
            prop_assert!((mean[[y, x]] - expected).abs() < 1e-12);
            prop_assert_eq!(some[[y, x]], over.map(|j| part[[down.start, j]]).fold(0.0, f64::max));
        }
        let listed = weights.rows_at(0, 0, &[n - 1, 0, n / 2]).unwrap();
        let alone = weights.rows(0, 0, n / 2..n / 2 + 1).unwrap();
        prop_assert_eq!(&listed.data()[2 * m..], alone.data());
    }

    #[test]
    fn masks_are_an_algebra(a in masks(), b in masks(), place in places(), n in 40usize..100, m in 40usize..200) {
        let of = |mask: Mask| kept(mask, place, n, m);
        let (x, y) = (of(a.clone()), of(b.clone()));
        let both: Vec<bool> = x.iter().zip(&y).map(|(x, y)| *x && *y).collect();
        let either: Vec<bool> = x.iter().zip(&y).map(|(x, y)| *x || *y).collect();
        prop_assert_eq!(of(a.clone() & b.clone()), both.clone());
        prop_assert_eq!(of(a.clone() | b.clone()), either);
        prop_assert_eq!(of(!(!a.clone() | !b.clone())), both); // De Morgan
        prop_assert_eq!(of(!!a.clone()), x.clone());
        prop_assert_eq!(of(!a), x.iter().map(|x| !x).collect::<Vec<bool>>());
    }

    #[test]
    fn attention_is_equivariant_under_permutation(n in 1usize..150, seed: u64) {
        let [q, k, v] = [0, 1, 2].map(|x| randn([1, 1, n, 4], seed ^ x));
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by_key(|&i| qkv_simd::philox::block([i as u32, 0, 0, 0], seed)[0]);
        let permuted = |t: &Tensor<f64, 4>| Tensor::from_fn([1, 1, n, 4], |[_, _, i, x]| t[[0, 0, order[i], x]]);
        let attention = Attention::scaled_dot();
        let out = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
        let (pq, pk, pv) = (permuted(&q), permuted(&k), permuted(&v));
        let permuted_out = attention.forward(Inputs::new(&pq, &pk, &pv)).unwrap();
        close(permuted_out.values.data(), permuted(&out.values).data(), 1e-12)?;
        // Permuting only keys and values changes nothing.
        let same = attention.forward(Inputs::new(&q, &pk, &pv)).unwrap();
        close(same.values.data(), out.values.data(), 1e-12)?;
    }

    #[test]
    fn the_output_lies_inside_the_hull_of_the_values(
        n in 1usize..80, m in 1usize..200, sharpness in 0.0f64..50.0, seed: u64,
    ) {
        let q = randn([1, 1, n, 4], seed).map(|x| x * sharpness);
        let (k, v) = (randn([1, 1, m, 4], seed ^ 1), randn([1, 1, m, 3], seed ^ 2));
        let out = Attention::dot().forward(Inputs::new(&q, &k, &v)).unwrap();
        // Along any direction, no output lies beyond the farthest value.
        for direction in [[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.3, 0.5, -0.8]] {
            let along = |t: &Tensor<f64, 4>, i: usize| (0..3).map(|x| t[[0, 0, i, x]] * direction[x]).sum::<f64>();
            let farthest = (0..m).map(|j| along(&v, j)).fold(f64::NEG_INFINITY, f64::max);
            for i in 0..n {
                prop_assert!(along(&out.values, i) <= farthest + 1e-12);
            }
        }
    }

    #[test]
    fn packed_segments_equal_separate_calls(lengths in prop::collection::vec(0usize..90, 1..5), seed: u64) {
        let mut cumulative = vec![0];
        for length in &lengths {
            cumulative.push(cumulative.last().unwrap() + length);
        }
        let total = *cumulative.last().unwrap();
        let [q, k, v] = [0, 1, 2].map(|x| randn([1, 2, total, 4], seed ^ x));
        let causal = Attention::scaled_dot().mask(Mask::causal());
        let segments = segments_of(&cumulative).unwrap();
        let inputs = Inputs::new(&q, &k, &v).segments(&segments, &segments);
        let packed = causal.clone().mask(Mask::segments()).forward(inputs).unwrap();
        for pair in cumulative.windows(2) {
            let length = pair[1] - pair[0];
            let part =
                |t: &Tensor<f64, 4>| Tensor::from_fn([1, 2, length, 4], |[_, h, i, x]| t[[0, h, pair[0] + i, x]]);
            let (q, k, v) = (part(&q), part(&k), part(&v));
            let alone = causal.forward(Inputs::new(&q, &k, &v)).unwrap();
            close(alone.values.data(), part(&packed.values).data(), 1e-12)?;
        }
    }

    #[test]
    fn grouped_heads_equal_repeated_ones(group in 1usize..5, n in 1usize..40, m in 1usize..200, seed: u64) {
        let (heads, d) = (2, 5);
        let q = randn([1, heads * group, n, d], seed);
        let [k, v] = [1, 2].map(|x| randn([1, heads, m, d], seed ^ x));
        let repeated =
            |t: &Tensor<f64, 4>| Tensor::from_fn([1, heads * group, m, d], |[_, h, j, x]| t[[0, h / group, j, x]]);
        let attention = Attention::scaled_dot().bias(Bias::alibi());
        let (rk, rv) = (repeated(&k), repeated(&v));
        let shared = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
        let apart = attention.forward(Inputs::new(&q, &rk, &rv)).unwrap();
        prop_assert_eq!(shared, apart);
    }

    #[test]
    fn the_lse_of_a_split_merges_to_the_whole(n in 1usize..40, left in 0usize..150, right in 0usize..150, seed: u64) {
        let m = left + right;
        let (q, k, v) = (randn([1, 1, n, 4], seed), randn([1, 1, m, 4], seed ^ 1), randn([1, 1, m, 4], seed ^ 2));
        let attention = Attention::scaled_dot();
        let keys = |range: std::ops::Range<usize>| {
            let part = |t: &Tensor<f64, 4>| {
                Tensor::from_fn([1, 1, range.len(), 4], |[_, _, j, x]| t[[0, 0, range.start + j, x]])
            };
            attention.forward(Inputs::new(&q, &part(&k), &part(&v))).unwrap()
        };
        let (whole, a, b): (Output<f64>, _, _) = (keys(0..m), keys(0..left), keys(left..m));
        for i in 0..n {
            let (x, y, lse) = (a.lse[[0, 0, i]], b.lse[[0, 0, i]], whole.lse[[0, 0, i]]);
            let (x, y) = if m == 0 { (0.0, 0.0) } else { ((x - lse).exp(), (y - lse).exp()) };
            if m > 0 {
                prop_assert!((x + y - 1.0).abs() < 1e-12);
            }
            for c in 0..4 {
                let merged = x * a.values[[0, 0, i, c]] + y * b.values[[0, 0, i, c]];
                prop_assert!((merged - whole.values[[0, 0, i, c]]).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn strides_do_not_matter(b in 1usize..3, h in 1usize..4, n in 1usize..70, d in 1usize..20, seed: u64) {
        let x = randn([b, h, n, d], seed);
        // The same numbers stored as [B, N, H, D], and backwards.
        let moved: Vec<f64> = Tensor::from_fn([b, n, h, d], |[b, i, h, x_]| x[[b, h, i, x_]]).into_data();
        let (bi, hi, ni, di) = (b as isize, h as isize, n as isize, d as isize);
        let other = View::strided(&moved, 0, [b, h, n, d], [ni * hi * di, di, hi * di, 1]).unwrap();
        let mut reversed: Vec<f64> = x.data().to_vec();
        reversed.reverse();
        let last = b * h * n * d - 1;
        let backwards = View::strided(&reversed, last, [b, h, n, d], [-hi * ni * di, -ni * di, -di, -1]).unwrap();
        let _ = bi;
        let attention = Attention::scaled_dot().mask(Mask::causal());
        let expected = attention.forward(Inputs::new(&x, &x, &x)).unwrap();
        prop_assert_eq!(&expected, &attention.forward(Inputs::new(other, backwards, other)).unwrap());
        // One row for every head and sequence: zero strides.
        let shared = View::strided(x.data(), 0, [b, h, n, d], [0, 0, di, 1]).unwrap();
        let copied = Tensor::from_fn([b, h, n, d], |[_, _, i, c]| x[[0, 0, i, c]]);
        prop_assert_eq!(
            attention.forward(Inputs::new(shared, shared, shared)).unwrap(),
            attention.forward(Inputs::new(&copied, &copied, &copied)).unwrap()
        );
    }

    #[test]
    fn a_picture_is_pooled_from_the_rows(
        mask in masks(), n in 40usize..150, m in 40usize..200, height in 1usize..200, width in 1usize..90, seed: u64,
    ) {
        let (q, k) = (randn([1, 1, n, 4], seed), randn([1, 1, m, 4], seed ^ 1));
        let attention = Attention::scaled_dot().mask(mask);
        let out = attention.forward(Inputs::new(&q, &k, &k)).unwrap();
        let weights = attention.weights(Inputs::new(&q, &k, &k), &out).unwrap();
        let (rows, cols) = (n / 5..n, m / 7..m - 3);
        let all = weights.rectangle(0, 0, rows.clone(), cols.clone()).unwrap();
        let whole = weights.rows(0, 0, 0..n).unwrap();
        prop_assert_eq!(all[[0, 2]], whole[[n / 5, m / 7 + 2]]);
        for pool in [Pool::Max, Pool::Mean] {
            let picture = weights.pooled(0, 0, rows.clone(), cols.clone(), [height, width], pool).unwrap();
            let cell = |at: usize, len: usize, cells: usize| {
                let start = at * len / cells;
                start..((at + 1) * len / cells).max(start + 1)
            };
            for y in 0..height {
                for x in 0..width {
                    let covered = cell(y, rows.len(), height)
                        .flat_map(|i| cell(x, cols.len(), width).map(move |j| (i, j)))
                        .map(|(i, j)| all[[i, j]]);
                    let count = covered.clone().count() as f64;
                    let expected = match pool {
                        Pool::Max => covered.fold(0.0, f64::max),
                        Pool::Mean => covered.sum::<f64>() / count,
                    };
                    prop_assert!((picture[[y, x]] - expected).abs() < 1e-12);
                }
            }
        }
    }
}

#[test]
fn a_description_survives_being_written_down() {
    let attention = Attention::new(Score::Cosine)
        .learned_scale()
        .temperature(0.5)
        .softcap(30.0)
        .bias(Bias::alibi() + Bias::relative(16))
        .mask(Mask::causal() & !(Mask::strided(4) | Mask::longformer(3, [1, 2])))
        .place(Place::Offset(-3))
        .dropout(0.1)
        .with_sinks()
        .with_entropy();
    let written = serde_json::to_string(&attention).unwrap();
    assert_eq!(serde_json::from_str::<Attention>(&written).unwrap(), attention);
    assert_eq!(serde_json::from_str::<Attention>("{}").unwrap(), Attention::scaled_dot());
    assert!(serde_json::from_str::<Attention>(r#"{"maks": "causal"}"#).is_err());
}

#[test]
fn descriptions_that_hold_a_seed_are_still_read() {
    let read = |json: &str| serde_json::from_str::<Attention>(json).unwrap();
    assert_eq!(read(r#"{"dropout": {"p": 0.1, "seed": 42}}"#), Attention::scaled_dot().dropout(0.1));
    let hard = |sample: &str| format!(r#"{{"select": {{"hard": {{"sample": {sample}, "straight_through": true}}}}}}"#);
    assert_eq!(read(&hard("17")), Attention::scaled_dot().sample().straight_through());
    assert_eq!(read(&hard("null")), Attention::scaled_dot().hard().straight_through());
    assert_eq!(read(&hard("true")), Attention::scaled_dot().sample().straight_through());
}

#[test]
fn a_sink_takes_its_share() {
    let x = Tensor::<f32, 4>::randn([1, 2, 50, 8], 1);
    let attention = Attention::scaled_dot().with_sinks();
    let inputs = Inputs::new(&x, &x, &x).sinks(&[1.5, f32::NEG_INFINITY]);
    let out = attention.forward(inputs).unwrap();
    for (h, sink) in [(0, 1.5), (1, f32::NEG_INFINITY)] {
        let rows = attention.weights(inputs, &out).unwrap().rows(0, h, 0..50).unwrap();
        for i in 0..50 {
            let sum: f32 = rows.data()[i * 50..][..50].iter().sum();
            let share = (sink - out.lse[[0, h, i]]).exp();
            assert!((sum + share - 1.0).abs() < 1e-5 && (share > 0.0) == (h == 0));
        }
    }
}

#[test]
fn dropout_keeps_the_mean_and_drops_its_share() {
    let (n, m, p) = (64, 512, 0.25);
    let x = Tensor::<f32, 4>::from_fn([1, 1, m, 4], |_| 0.0);
    let q = View::from(&x).truncate(n);
    let attention = Attention::dot().dropout(p);
    let inputs = Inputs::new(q, &x, &x).seed(11);
    let out = attention.forward(inputs).unwrap();
    let weights = attention.weights(inputs, &out).unwrap().rows(0, 0, 0..n).unwrap();
    let dropped = weights.data().iter().filter(|&&w| w == 0.0).count() as f64 / (n * m) as f64;
    assert!((dropped - p).abs() < 0.01, "{dropped}");
    let sum: f32 = weights.data().iter().sum::<f32>() / n as f32;
    assert!((sum - 1.0).abs() < 0.02, "{sum}");
    let other = attention.forward(inputs.seed(12)).unwrap();
    assert_eq!(other.lse, out.lse);
    let upstream = || qkv::Upstream::new(q);
    assert!(attention.backward(inputs, &out, upstream()).is_ok());
    let wrong = attention.backward(inputs.seed(12), &out, upstream()).unwrap_err();
    assert_eq!(wrong.to_string(), "`seed` is 12, expected 11, the seed of the forward pass");
    let missing = attention.forward(Inputs::new(q, &x, &x)).unwrap_err();
    assert_eq!(missing.to_string(), "`seed` is missing: dropout needs it");
}

#[test]
fn a_dilated_window_sees_every_step_th_key_on_both_sides() {
    let mask = Mask::dilated(4, 3);
    let data = qkv::MaskData::new(20, 20);
    let visible = |i: usize| (0..20).filter(|&j| mask.allows(i, j, &data).unwrap()).collect::<Vec<_>>();
    assert_eq!(visible(10), [4, 7, 10, 13, 16]);
    assert_eq!(visible(1), [1, 4, 7]);
    // A step of 1 is a plain window, and a window of 0 the query's own key.
    let alike = |a: &Mask, b: &Mask| {
        (0..20).all(|i| (0..20).all(|j| a.allows(i, j, &data).unwrap() == b.allows(i, j, &data).unwrap()))
    };
    assert!(alike(&Mask::dilated(6, 1), &Mask::window(3, 3)));
    assert!(alike(&Mask::dilated(0, 5), &Mask::window(0, 0)));
    let x = Tensor::<f32, 4>::randn([1, 1, 4096, 1], 1);
    let tiles = |mask: Mask| Attention::dot().mask(mask).tiles(Inputs::new(&x, &x, &x)).unwrap();
    let (dilated, window) = (tiles(Mask::dilated(64, 16)), tiles(Mask::window(512, 512)));
    assert!(3 * (dilated.partial + dilated.full) < window.partial + window.full, "{dilated:?} {window:?}");
    let refused = Attention::dot().mask(Mask::dilated(4, 0)).forward(Inputs::new(&x, &x, &x)).unwrap_err();
    assert_eq!(refused.to_string(), "`dilated` is 0, expected a step of at least 1");
}
