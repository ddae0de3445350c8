//! Properties of decoding beyond the conformance suite: its bits, whatever the layout of the cache, and that keys that
//! are not seen are absent.

use half::{bf16, f16};
use qkv::{
    Attention, Bias, Decode, Element, Inputs, Mask, Output, OutputMut, PagedCache, Scratch, Tensor, View, ViewMut,
};

fn randn<T: Element>(shape: [usize; 4], seed: u64) -> Tensor<T, 4> {
    Tensor::randn(shape, seed)
}

fn fast<T: Element>(attention: &Attention, inputs: Inputs<'_, T>) -> Output<T> {
    attention.decode(inputs, Decode::Fast).unwrap()
}

fn with_threads<R: Send>(threads: usize, run: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run)
}

/// Whether the rows that `keep` picks have the same bits in both.
fn same_rows<T: Element>(a: &Output<T>, b: &Output<T>, keep: impl Fn([usize; 3]) -> bool) -> bool {
    let [batch, heads, n, dv] = a.values.shape();
    let rows = (0..batch * heads * n).map(|r| [r / (heads * n), r / n % heads, r % n]);
    rows.filter(|&row| keep(row)).all(|[s, h, i]| {
        let values = (0..dv).all(|x| a.values[[s, h, i, x]] == b.values[[s, h, i, x]]);
        values && a.lse[[s, h, i]] == b.lse[[s, h, i]]
    })
}

fn what_is_masked_has_no_effect<T: Element>() {
    let (n, m, d) = (3, 300, 20);
    let q = randn::<T>([2, 8, n, d], 1);
    let clean = [2, 3].map(|seed| randn::<T>([2, 2, m, d], seed));
    let lengths = [200, 77];
    let bits = Tensor::from_fn([1, 1, 1, m], |[.., j]| u8::from(j % 3 != 0));
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let dirty = |absent: &dyn Fn(usize, usize) -> bool| {
            clean.clone().map(|mut t| {
                for (at, x) in t.data_mut().iter_mut().enumerate() {
                    if absent(at / (2 * m * d), at / d % m) {
                        *x = T::of_f64(poison);
                    }
                }
                t
            })
        };
        let padded = Attention::scaled_dot().mask(Mask::lengths());
        let [k, v] = dirty(&|b, j| j >= lengths[b]);
        let seen = fast(&padded, Inputs::new(&q, &clean[0], &clean[1]).lengths(&lengths));
        assert!(seen == fast(&padded, Inputs::new(&q, &k, &v).lengths(&lengths)), "{} {poison}", T::NAME);
        let scattered = Attention::scaled_dot().mask(Mask::bits()).dropout(0.3).softcap(9.0);
        let [k, v] = dirty(&|_, j| j % 3 == 0);
        let seen = fast(&scattered, Inputs::new(&q, &clean[0], &clean[1]).bits(&bits).seed(5));
        assert!(seen == fast(&scattered, Inputs::new(&q, &k, &v).bits(&bits).seed(5)), "{} {poison}", T::NAME);
        // The last key is seen only by the last query, so it affects only that one.
        let causal = Attention::scaled_dot().mask(Mask::causal()).bias(Bias::alibi());
        let seen = fast(&causal, Inputs::new(&q, &clean[0], &clean[1]));
        let [k, v] = dirty(&|_, j| j == m - 1);
        for (k, v) in [(&k, &clean[1]), (&clean[0], &v), (&k, &v)] {
            let felt = fast(&causal, Inputs::new(&q, k, v));
            assert!(same_rows(&seen, &felt, |[_, _, i]| i < n - 1), "{} {poison}", T::NAME);
        }
        let felt = fast(&causal, Inputs::new(&q, &clean[0], &v));
        assert!(!felt.values[[0, 0, n - 1, 0]].is_finite());
    }
}

#[test]
fn what_is_masked_has_no_effect_on_who_does_not_see_it() {
    what_is_masked_has_no_effect::<f32>();
    what_is_masked_has_no_effect::<f64>();
    what_is_masked_has_no_effect::<bf16>();
    what_is_masked_has_no_effect::<f16>();
}

fn strides_do_not_matter<T: Element>() {
    let (m, hk, d) = (4_500, 2, 24);
    let q = randn::<T>([1, 6, 2, d], 1);
    let [k, v] = [2, 3].map(|seed| randn::<T>([1, hk, m, d], seed));
    let attention = Attention::scaled_dot().mask(Mask::causal());
    let expected = fast(&attention, Inputs::new(&q, &k, &v));
    // Heads next to each other, [B, M, Hk, D]; and in reverse, from the end.
    let beside = |t: &Tensor<T, 4>| -> Vec<T> {
        let at = |at: usize| t[[0, at / d % hk, at / (hk * d), at % d]];
        (0..m * hk * d).map(at).collect()
    };
    let (kb, vb) = (beside(&k), beside(&v));
    let strides = [0, d as isize, (hk * d) as isize, 1];
    let [kb, vb] = [&kb, &vb].map(|data| View::strided(data, 0, [1, hk, m, d], strides).unwrap());
    assert!(expected == fast(&attention, Inputs::new(&q, kb, vb)), "{}", T::NAME);
    // Rows that are not contiguous take the other path, and agree up to rounding.
    let apart = |t: &Tensor<T, 4>| t.data().iter().flat_map(|&x| [x, T::of_f64(f64::NAN)]).collect::<Vec<T>>();
    let (ka, va) = (apart(&k), apart(&v));
    let strides = [0, 2 * (m * d) as isize, 2 * d as isize, 2];
    let [ka, va] = [&ka, &va].map(|data| View::strided(data, 0, [1, hk, m, d], strides).unwrap());
    let found = fast(&attention, Inputs::new(&q, ka, va));
    for (a, b) in found.values.data().iter().zip(expected.values.data()) {
        assert!((a.to_f64() - b.to_f64()).abs() <= 4.0 * T::EPSILON);
    }
}

#[test]
fn keys_and_values_may_lie_anywhere() {
    strides_do_not_matter::<f32>();
    strides_do_not_matter::<f64>();
    strides_do_not_matter::<bf16>();
    strides_do_not_matter::<f16>();
}

fn pages_do_not_matter<T: Element>() {
    let (hk, d, lengths) = (2, 20, [5_000, 129, 1]);
    let q = randn::<T>([3, 8, 1, d], 1);
    let attention = Attention::scaled_dot().mask(Mask::causal());
    let new = |length, seed| randn::<T>([1, hk, length, d], seed);
    for size in [1, 16, 100, 128, 300] {
        let mut cache = PagedCache::<T>::new(hk, d, d, size).unwrap();
        let ids = lengths.map(|_| cache.add());
        for (s, &id) in ids.iter().enumerate() {
            let [k, v] = [2, 3].map(|seed| new(lengths[s], seed + 10 * s as u64));
            cache.append(id, &k, &v).unwrap();
        }
        let together = attention.decode_paged(&q, &cache.batch(&ids).unwrap(), Decode::Fast).unwrap();
        for (s, &length) in lengths.iter().enumerate() {
            let [k, v] = [2, 3].map(|seed| new(length, seed + 10 * s as u64));
            let one = Tensor::from_fn([1, 8, 1, d], |[_, h, i, x]| q[[s, h, i, x]]);
            let alone = fast(&attention, Inputs::new(&one, &k, &v));
            for h in 0..8 {
                assert_eq!(alone.lse[[0, h, 0]], together.lse[[s, h, 0]], "pages of {size}");
                for x in 0..d {
                    assert_eq!(alone.values[[0, h, 0, x]], together.values[[s, h, 0, x]], "pages of {size}");
                }
            }
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_in_a_batch_and_in_pages_of_any_size() {
    pages_do_not_matter::<f32>();
    pages_do_not_matter::<f64>();
    pages_do_not_matter::<bf16>();
    pages_do_not_matter::<f16>();
}

#[test]
fn any_number_of_threads_decodes_the_same_bits() {
    let q = randn::<f32>([2, 8, 2, 20], 1);
    let [k, v] = [2, 3].map(|seed| randn::<f32>([2, 2, 9_000, 20], seed));
    let plain = Attention::scaled_dot().mask(Mask::causal());
    for attention in [plain.clone(), plain.clone().dropout(0.2).with_entropy(), plain.mask(Mask::strided(64))] {
        let run = || fast(&attention, Inputs::new(&q, &k, &v).seed(3));
        let one = with_threads(1, run);
        for threads in [2, 3, 8] {
            assert!(one == with_threads(threads, run), "{threads} threads");
        }
    }
}

#[test]
fn a_query_decodes_to_the_same_bits_whatever_queries_are_beside_it() {
    let q = randn::<f32>([1, 4, 4, 33], 1);
    let [k, v] = [2, 3].map(|seed| randn::<f32>([1, 1, 700, 33], seed));
    let all = fast(&Attention::scaled_dot(), Inputs::new(&q, &k, &v));
    for i in 0..4 {
        for h in 0..4 {
            let one = Tensor::from_fn([1, 1, 1, 33], |[.., x]| q[[0, h, i, x]]);
            let alone = fast(&Attention::scaled_dot(), Inputs::new(&one, &k, &v));
            assert_eq!(alone.lse[[0, 0, 0]], all.lse[[0, h, i]]);
            assert!((0..33).all(|x| alone.values[[0, 0, 0, x]] == all.values[[0, h, i, x]]));
        }
    }
}

#[test]
fn decoding_into_given_memory_has_the_same_bits_from_any_scratch() {
    let q = randn::<f32>([1, 8, 1, 16], 1);
    let attention = Attention::scaled_dot().mask(Mask::causal());
    let scratch = Scratch::new();
    for m in [9_000, 40, 5_000] {
        let [k, v] = [2, 3].map(|seed| randn::<f32>([1, 2, m, 16], seed));
        let expected = fast(&attention, Inputs::new(&q, &k, &v));
        let (mut values, mut lse) = (vec![f32::NAN; 8 * 16], vec![f32::NAN; 8]);
        let into = OutputMut::new(
            ViewMut::new(&mut values, [1, 8, 1, 16]).unwrap(),
            ViewMut::new(&mut lse, [1, 8, 1, 1]).unwrap(),
        );
        attention.decode_into(Inputs::new(&q, &k, &v), into, Decode::Fast, &scratch, 2).unwrap();
        assert_eq!((&values[..], &lse[..]), (expected.values.data(), expected.lse.data()));
    }
    let (mut values, mut lse) = (vec![0.0; 8 * 16], vec![0.0; 8]);
    let into = OutputMut::new(
        ViewMut::new(&mut values, [1, 8, 1, 16]).unwrap(),
        ViewMut::new(&mut lse, [1, 8, 1, 1]).unwrap(),
    );
    let k = randn::<f32>([1, 2, 9, 16], 2);
    let refused = Attention::dot().top_k(3).decode_into(Inputs::new(&q, &k, &k), into, Decode::Fast, &scratch, 2);
    assert!(refused.unwrap_err().to_string().contains("cannot go with"));
}
