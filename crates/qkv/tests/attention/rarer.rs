//! The rarer mechanisms: properties of hard, top-k and sparsemax attention, of predicted centers, hash buckets and
//! pages, beyond those of the conformance suite.

use half::bf16;
use qkv::{
    Attention, Cache, Choice, Decode, Element, Inputs, Lsh, Mask, Output, PagedCache, Pages, Select, Tensor, Upstream,
    View,
};

fn randn<T: Element>(shape: [usize; 4], seed: u64) -> Tensor<T, 4> {
    Tensor::randn(shape, seed)
}

fn bits<T: Element>(out: &Output<T>) -> (Vec<f64>, Vec<f64>) {
    let wide = |x: &[T]| x.iter().map(|x| x.to_f64()).collect();
    (wide(out.values.data()), out.lse.rounded::<f64>().into_data())
}

#[test]
fn hard_attention_takes_the_largest_and_the_lowest_of_equals() {
    let q = Tensor::from_fn([1, 1, 1, 1], |_| 1.0f32);
    let k = Tensor::new(vec![0.0, 3.0, 1.0, 3.0, 2.0], [1, 1, 5, 1]).unwrap();
    let v = Tensor::new(vec![10.0, 11.0, 12.0, 13.0, 14.0], [1, 1, 5, 1]).unwrap();
    let out = Attention::dot().hard().forward(Inputs::new(&q, &k, &v)).unwrap();
    assert_eq!(out.values.data(), [11.0]);
    assert_eq!(out.chosen.unwrap().data(), [1]);
    let total: f32 = k.data().iter().map(|x| x.exp()).sum();
    assert!((out.log_prob.unwrap().data()[0] - (3.0 - total.ln())).abs() < 1e-6);
    let top = Attention::dot().top_k(3).forward(Inputs::new(&q, &k, &v)).unwrap();
    assert_eq!(top.chosen.unwrap().data(), [1, 3, 4]);
    let fewer = Attention::dot().mask(Mask::window(0, 1)).top_k(3).forward(Inputs::new(&q, &k, &v)).unwrap();
    assert_eq!(fewer.chosen.unwrap().data(), [-1, 0, 1]);
}

#[test]
fn a_sample_follows_the_softmax() {
    let (n, m) = (6000, 6);
    let q = Tensor::from_fn([1, 1, n, 1], |_| 1.0f32);
    let k = Tensor::from_fn([1, 1, m, 1], |[_, _, j, _]| j as f32 * 0.4);
    let attention = Attention::dot().sample();
    let inputs = Inputs::new(&q, &k, &k).seed(17);
    let out = attention.forward(inputs).unwrap();
    let chosen = out.chosen.as_ref().unwrap();
    let total: f64 = (0..m).map(|j| (j as f64 * 0.4).exp()).sum();
    for j in 0..m {
        let p = (j as f64 * 0.4).exp() / total;
        let share = chosen.data().iter().filter(|&&c| c == j as i64).count() as f64 / n as f64;
        // Four standard deviations of a binomial share.
        assert!((share - p).abs() < 4.0 * (p * (1.0 - p) / n as f64).sqrt(), "key {j}: {share} for {p}");
    }
    assert_eq!(attention.forward(inputs).unwrap(), out);
    assert_ne!(attention.forward(inputs.seed(18)).unwrap().chosen, out.chosen);
}

#[test]
fn straight_through_gives_the_scores_the_gradients_of_soft_attention() {
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| randn::<f64>([1, 2, 40, 8], seed));
    let inputs = || Inputs::new(&q, &k, &v).seed(3);
    let soft = Attention::scaled_dot();
    let soft_out = soft.forward(inputs()).unwrap();
    let expected = soft.backward(inputs(), &soft_out, Upstream::new(&d_out)).unwrap();
    let hard = Attention::scaled_dot().sample().straight_through();
    let out = hard.forward(inputs()).unwrap();
    let grad = hard.backward(inputs(), &out, Upstream::new(&d_out)).unwrap();
    for (a, b) in grad.q.data().iter().zip(expected.q.data()).chain(grad.k.data().iter().zip(expected.k.data())) {
        assert!((a - b).abs() < 1e-12);
    }
    assert_ne!(grad.v, expected.v);
    let plain = Attention::scaled_dot().sample();
    let out = plain.forward(inputs()).unwrap();
    let grad = plain.backward(inputs(), &out, Upstream::new(&d_out)).unwrap();
    assert!(grad.q.data().iter().all(|&g| g == 0.0), "without it, the choice has no gradient of its own");
}

#[test]
fn sparsemax_weights_are_the_nearest_point_of_the_simplex() {
    let [q, k] = [1, 2].map(|seed| randn::<f64>([1, 1, 30, 4], seed));
    let attention = Attention::dot().sparsemax();
    let out = attention.forward(Inputs::new(&q, &k, &k)).unwrap();
    let weights = attention.weights(Inputs::new(&q, &k, &k), &out).unwrap().rows(0, 0, 0..30).unwrap();
    for i in 0..30 {
        let row = &weights.data()[i * 30..][..30];
        assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12 && row.iter().all(|&w| w >= 0.0));
        let scores: Vec<f64> = (0..30).map(|j| (0..4).map(|x| q[[0, 0, i, x]] * k[[0, 0, j, x]]).sum()).collect();
        let tau = out.threshold.as_ref().unwrap()[[0, 0, i]];
        for (w, s) in row.iter().zip(&scores) {
            assert!((w - (s - tau).max(0.0)).abs() < 1e-12);
        }
    }
    // Far apart scores: all weight on one key; equal scores: all alike.
    let far = Tensor::new(vec![5.0, 1.0, 2.0], [1, 1, 3, 1]).unwrap();
    let one = Tensor::new(vec![1.0f64], [1, 1, 1, 1]).unwrap();
    assert_eq!(attention.forward(Inputs::new(&one, &far, &far)).unwrap().values.data(), [5.0]);
}

#[test]
fn selections_refuse_what_only_a_softmax_has() {
    let x = randn::<f32>([1, 1, 5, 4], 1);
    for attention in [Attention::dot().hard(), Attention::dot().top_k(2), Attention::dot().sparsemax()] {
        let refused = |attention: Attention| attention.forward(Inputs::new(&x, &x, &x)).unwrap_err().to_string();
        assert!(refused(attention.clone().dropout(0.5)).contains("cannot go with"));
        let sunk = attention.clone().with_sinks();
        assert!(
            sunk.forward(Inputs::new(&x, &x, &x).sinks(&[0.0])).unwrap_err().to_string().contains("cannot go with")
        );
        assert!(attention.clone().local(3).forward(Inputs::new(&x, &x, &x).center(&[1.0; 5])).is_err());
        let out = attention.forward(Inputs::new(&x, &x, &x)).unwrap();
        if !matches!(attention.select, Select::Hard(Choice { .. })) {
            let upstream = Upstream::new(&x).log_prob(&[0.0; 5]);
            assert!(attention.backward(Inputs::new(&x, &x, &x), &out, upstream).is_err());
        }
        let soft = Attention::dot().forward(Inputs::new(&x, &x, &x)).unwrap();
        let error = attention.backward(Inputs::new(&x, &x, &x), &soft, Upstream::new(&x)).unwrap_err().to_string();
        assert!(error.contains("is missing"), "{error}");
    }
    let refused = |attention: Attention| attention.forward(Inputs::new(&x, &x, &x)).unwrap_err().to_string();
    assert_eq!(refused(Attention::dot().top_k(0)), "`top-k` is 0, expected at least 1 key");
    assert!(Attention::dot().local(0).forward(Inputs::new(&x, &x, &x).center(&[1.0; 5])).is_err());
    assert_eq!(refused(Attention::dot().local(2)), "`center` is missing: local attention needs it");
    assert!(Attention::dot().local(2).forward(Inputs::new(&x, &x, &x).center(&[f32::NAN; 5])).is_err());
}

#[test]
fn what_is_not_seen_has_no_effect_on_a_selection() {
    for attention in
        [Attention::scaled_dot().sample(), Attention::scaled_dot().top_k(3), Attention::scaled_dot().sparsemax()]
    {
        let attention = attention.mask(Mask::lengths());
        let [q, d_out] = [1, 2].map(|seed| randn::<f32>([1, 2, 20, 4], seed));
        let clean = [3, 4].map(|seed| randn::<f32>([1, 1, 150, 4], seed));
        let mut dirty = clean.clone();
        for t in &mut dirty {
            t.data_mut()[100 * 4..].fill(f32::NAN);
        }
        let run = |[k, v]: &[Tensor<f32, 4>; 2]| {
            let inputs = Inputs::new(&q, k, v).lengths(&[100]).seed(3);
            let out = attention.forward(inputs).unwrap();
            let grad = attention.backward(inputs, &out, Upstream::new(&d_out)).unwrap();
            (out, grad)
        };
        assert!(run(&clean) == run(&dirty), "{:?}", attention.select);
    }
}

#[test]
fn the_rarer_mechanisms_have_the_same_bits_for_any_threads() {
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| randn::<f32>([2, 2, 700, 8], seed));
    let center: Vec<f32> = (0..2 * 2 * 700).map(|i| (i % 700) as f32 + 0.3).collect();
    let lsh = Lsh { buckets: 16, rounds: 2, seed: 1 };
    let buckets = (lsh.hash(&q).unwrap(), lsh.hash(&k).unwrap());
    for (attention, local, hashed) in [
        (Attention::scaled_dot().sample().straight_through(), false, false),
        (Attention::scaled_dot().top_k(5), false, false),
        (Attention::scaled_dot().sparsemax(), false, false),
        (Attention::scaled_dot().local(9), true, false),
        (Attention::scaled_dot().mask(Mask::lsh(lsh) & Mask::causal()), false, true),
    ] {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut inputs = Inputs::new(&q, &k, &v).seed(3);
                if local {
                    inputs = inputs.center(&center);
                }
                if hashed {
                    inputs = inputs.buckets(&buckets.0, &buckets.1);
                }
                let out = attention.forward(inputs).unwrap();
                let grad = attention.backward(inputs, &out, Upstream::new(&d_out)).unwrap();
                (out, grad)
            })
        };
        let one = run(1);
        assert!([2, 3, 8].into_iter().all(|threads| run(threads) == one), "{attention:?}");
    }
}

#[test]
fn vectors_that_point_the_same_way_share_a_bucket() {
    let lsh = Lsh { buckets: 64, rounds: 3, seed: 5 };
    let x = randn::<f64>([1, 1, 500, 16], 1);
    let buckets = lsh.hash(&x).unwrap();
    assert!(buckets.data().iter().all(|&b| (0..64).contains(&b)));
    // A little noise leaves most in their bucket; another direction finds another, about one in 64 times the same.
    let near = Tensor::from_fn([1, 1, 500, 16], |[_, _, i, c]| x[[0, 0, i, c]] + 0.02 * ((i * 16 + c) as f64).sin());
    let same = |a: &Tensor<i32, 4>, b: &Tensor<i32, 4>| {
        a.data().iter().zip(b.data()).filter(|(a, b)| a == b).count() as f64 / a.data().len() as f64
    };
    assert!(same(&buckets, &lsh.hash(&near).unwrap()) > 0.9);
    assert!(same(&buckets, &lsh.hash(&randn::<f64>([1, 1, 500, 16], 2)).unwrap()) < 0.05);
    // Element types see the buckets they are given, not their own.
    assert_ne!(lsh.hash(&x).unwrap(), Lsh { seed: 6, ..lsh }.hash(&x).unwrap());
    let absurd = Lsh { rounds: usize::MAX / 2, ..lsh };
    let prime = Lsh { buckets: 200_000_006, ..lsh };
    for bad in [Lsh { buckets: 7, ..lsh }, Lsh { buckets: 0, ..lsh }, Lsh { rounds: 0, ..lsh }, absurd, prime] {
        assert!(bad.hash(&x).is_err(), "{bad:?}");
    }
    let attention = Attention::dot().mask(Mask::lsh(lsh));
    assert_eq!(
        attention.forward(Inputs::new(&x, &x, &x)).unwrap_err().to_string(),
        "`buckets` is missing: a mask of hash buckets needs it"
    );
    let short = lsh.hash(View::from(&x).truncate(9)).unwrap();
    let error = attention.forward(Inputs::new(&x, &x, &x).buckets(&buckets, &short)).unwrap_err().to_string();
    assert_eq!(error, "`buckets of keys` has shape [1, 1, 9, 3], expected [1, 1, 500, 3]");
}

#[test]
fn hashing_touches_few_tiles_of_a_long_sequence() {
    let x = randn::<f32>([1, 1, 8192, 16], 1);
    let lsh = Lsh { buckets: 128, rounds: 2, seed: 5 };
    let buckets = lsh.hash(&x).unwrap();
    let inputs = Inputs::new(&x, &x, &x).buckets(&buckets, &buckets);
    let tiles = Attention::scaled_dot().mask(Mask::lsh(lsh)).tiles(inputs).unwrap();
    let touched = tiles.partial + tiles.full;
    assert!(touched < 1200, "{touched} of {}", 128 * 64);
}

/// Fills a paged and a contiguous cache alike, and decodes from both.
fn pages_equal_rows<T: Element>(size: usize, lengths: &[usize], new: usize) {
    let (hq, hk, d, dv) = (4, 2, 12, 7);
    let mut paged = PagedCache::<T>::new(hk, d, dv, size).unwrap();
    let ids: Vec<_> = lengths.iter().map(|_| paged.add()).collect();
    let mut rows: Vec<Cache<T>> = lengths.iter().map(|_| Cache::new(1, hk, d, dv)).collect();
    // Interleaved, so that the pages of a sequence lie apart.
    for start in (0..*lengths.iter().max().unwrap()).step_by(5) {
        for (s, &length) in lengths.iter().enumerate() {
            let count = length.saturating_sub(start).min(5);
            let k = randn::<T>([1, hk, count, d], (start * 31 + s) as u64);
            let v = randn::<T>([1, hk, count, dv], (start * 37 + s) as u64);
            paged.append(ids[s], &k, &v).unwrap();
            rows[s].append(&k, &v).unwrap();
        }
    }
    let q = randn::<T>([lengths.len(), hq, new, d], 99);
    let batch = paged.batch(&ids).unwrap();
    let attention = Attention::scaled_dot().mask(Mask::causal() & Mask::window(90, 0));
    for how in [Decode::Exact, Decode::Fast] {
        let together = attention.decode_paged(&q, &batch, how).unwrap();
        let (values, lse) = bits(&together);
        for (s, rows) in rows.iter().enumerate() {
            let per = hq * new;
            let q = Tensor::new(q.data()[s * per * d..][..per * d].to_vec(), [1, hq, new, d]).unwrap();
            let alone = attention.decode(Inputs::new(&q, rows.keys(), rows.values()), how).unwrap();
            assert_eq!(bits(&alone).0, values[s * per * dv..][..per * dv], "pages of {size}, sequence {s}");
            assert_eq!(bits(&alone).1, lse[s * per..][..per]);
        }
    }
}

#[test]
fn pages_give_the_bits_of_rows() {
    for size in [1, 3, 16, 64] {
        pages_equal_rows::<f32>(size, &[130, 1, 64, 300], 1);
        pages_equal_rows::<bf16>(size, &[20, 257], 9);
    }
    pages_equal_rows::<f32>(16, &[4500, 9000, 30], 2);
}

#[test]
fn pages_are_given_back_and_used_again() {
    let mut cache = PagedCache::<f32>::new(1, 2, 2, 4).unwrap();
    let tokens = |count| randn::<f32>([1, 1, count, 2], count as u64);
    let a = cache.add();
    cache.append(a, &tokens(9), &tokens(9)).unwrap();
    let b = cache.add();
    cache.append(b, &tokens(4), &tokens(4)).unwrap();
    assert_eq!(cache.pages().0, 4);
    cache.remove(a).unwrap();
    assert_eq!(cache.pages().0, 1);
    assert!(cache.remove(a).is_err() && cache.append(a, &tokens(1), &tokens(1)).is_err() && cache.batch(&[a]).is_err());
    let c = cache.add();
    cache.append(c, &tokens(12), &tokens(12)).unwrap();
    let (used, there) = cache.pages();
    assert_eq!((used, cache.len(c).unwrap()), (4, 12));
    assert!(there <= 8, "freed pages come first");
    assert!(cache.append(c, &tokens(2), &tokens(3)).is_err());
    assert!(PagedCache::<f32>::new(1, 2, 2, 0).is_err());
}

#[test]
fn a_page_table_that_lies_is_refused() {
    let pool = randn::<f32>([3, 1, 4, 2], 1);
    assert!(Pages::new(&pool, &[0, 1, 2], 1, 12).is_ok());
    assert!(Pages::new(&pool, &[0, 1, 3], 1, 12).unwrap_err().to_string().contains("page 3"));
    assert!(Pages::new(&pool, &[0, 1, 9], 1, 8).is_ok(), "what is not reached may be anything");
    assert!(Pages::new(&pool, &[0, 1], 1, 9).unwrap_err().to_string().contains("room for 9 tokens"));
    assert!(Pages::new(&pool, &[0, 1, 2], 2, 4).unwrap_err().to_string().contains("`page table` has shape [3]"));
    assert!(Pages::<f32>::new(&pool, &[], 0, 5).is_ok());
}

#[test]
fn backward_goes_through_pages() {
    let [k, v] = [1, 2].map(|seed| randn::<f64>([1, 1, 10, 4], seed));
    let [q, d_out] = [3, 4].map(|seed| randn::<f64>([1, 2, 6, 4], seed));
    // The same tokens in pages of two, backwards.
    let scattered =
        |t: &Tensor<f64, 4>| Tensor::from_fn([5, 1, 2, 4], |[page, _, i, x]| t[[0, 0, (4 - page) * 2 + i, x]]);
    let (pk, pv) = (scattered(&k), scattered(&v));
    let table = [4, 3, 2, 1, 0];
    let paged = || Inputs::new(&q, Pages::new(&pk, &table, 1, 10).unwrap(), Pages::new(&pv, &table, 1, 10).unwrap());
    for attention in [Attention::scaled_dot(), Attention::cosine().top_k(4), Attention::distance().sparsemax()] {
        let out = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
        assert_eq!(attention.forward(paged()).unwrap(), out);
        let grad = attention.backward(Inputs::new(&q, &k, &v), &out, Upstream::new(&d_out)).unwrap();
        assert_eq!(attention.backward(paged(), &out, Upstream::new(&d_out)).unwrap(), grad);
    }
}

#[test]
fn weights_and_gradients_after_decoding_stand_where_decoding_stood() {
    let q = randn::<f64>([1, 1, 2, 8], 2);
    let k = randn::<f64>([1, 1, 9, 8], 1);
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let inputs = || Inputs::new(&q, &k, &k);
    let out = causal.decode(inputs(), Decode::Fast).unwrap();
    let rows = causal.weights(inputs(), &out).unwrap().rows(0, 0, 0..2).unwrap();
    assert!(rows[[0, 7]] > 0.0 && rows[[0, 8]] == 0.0 && rows[[1, 8]] > 0.0);
    for i in 0..2 {
        assert!((rows.data()[i * 9..][..9].iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }
    let grad = causal.backward(inputs(), &out, Upstream::new(&q)).unwrap();
    assert!(grad.v[[0, 0, 8, 0]] != 0.0);
}
