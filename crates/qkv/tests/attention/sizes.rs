//! Numbers of any size: large, small and infinite ones give in f32 what they give in f64. Products of f32 may be
//! computed from terms of fewer bits, which must not be noticeable.

use qkv::{Attention, Inputs, Mask, Tensor, Upstream};

type Rows<T> = Tensor<T, 4>;

fn wide(x: &Rows<f32>) -> Rows<f64> {
    Tensor::from_fn(x.shape(), |at| f64::from(x[at]))
}

/// Numbers of magnitude about 2 to this power.
fn about(power: i32, shape: [usize; 4], seed: u64) -> Rows<f32> {
    let x = Rows::<f32>::randn(shape, seed);
    Tensor::from_fn(shape, |at| x[at] * 2f32.powi(power))
}

/// Asserts that both agree to five digits of the largest number, and exactly where they are not finite.
fn agree(what: &str, found: &Rows<f32>, truth: &Rows<f64>) {
    let largest = truth.data().iter().filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs()));
    for (at, (&found, &truth)) in found.data().iter().zip(truth.data()).enumerate() {
        let found = f64::from(found);
        let same = found == truth || found.is_nan() && truth.is_nan() || (found - truth).abs() <= 1e-5 * largest;
        assert!(same, "{what} at {at}: {found:e} for {truth:e}, the largest is {largest:e}");
    }
}

fn check(what: &str, attention: &Attention, [q, k, v, d_out]: &[Rows<f32>; 4]) {
    let out = attention.forward(Inputs::new(q, k, v)).unwrap();
    let grads = attention.backward(Inputs::new(q, k, v), &out, Upstream::new(d_out)).unwrap();
    let [wq, wk, wv, wd] = [q, k, v, d_out].map(wide);
    let truth = attention.forward(Inputs::new(&wq, &wk, &wv)).unwrap();
    let expected = attention.backward(Inputs::new(&wq, &wk, &wv), &truth, Upstream::new(&wd)).unwrap();
    agree(&format!("{what} values"), &out.values, &truth.values);
    agree(&format!("{what} d_q"), &grads.q, &expected.q);
    agree(&format!("{what} d_k"), &grads.k, &expected.k);
    agree(&format!("{what} d_v"), &grads.v, &expected.v);
}

#[test]
fn large_and_small_numbers_are_as_good_as_others() {
    let shape = [1, 2, 150, 40];
    for (q, k, v, d_out) in [(0, 0, 0, 0), (40, -40, -60, 0), (-30, 30, 100, -60), (60, -60, 0, 20), (0, 0, -20, -40)] {
        let powers = [(q, 1), (k, 2), (v, 3), (d_out, 4)];
        let inputs = powers.map(|(power, seed)| about(power, shape, seed));
        for (name, mask) in [("full", Mask::full()), ("causal", Mask::causal())] {
            let what = format!("2^{q} 2^{k} 2^{v} 2^{d_out} {name}");
            check(&what, &Attention::scaled_dot().mask(mask), &inputs);
        }
    }
}

#[test]
fn the_largest_numbers_do_not_overflow_on_the_way() {
    let mut v = about(0, [1, 1, 70, 20], 3);
    // One per column, since values are summed with weights that are not normalized yet.
    v[[0, 0, 11, 5]] = f32::MAX;
    v[[0, 0, 50, 6]] = -3.4e38;
    let [q, k] = [1, 2].map(|seed| about(0, [1, 1, 70, 20], seed));
    let out = Attention::scaled_dot().forward(Inputs::new(&q, &k, &v)).unwrap();
    let truth = Attention::scaled_dot().forward(Inputs::new(&wide(&q), &wide(&k), &wide(&v))).unwrap();
    agree("values", &out.values, &truth.values);
    assert!(out.values.data().iter().all(|x| x.is_finite()));
}

#[test]
fn what_is_infinite_is_what_it_is_in_f64() {
    let shape = [1, 1, 90, 24];
    let attention = Attention::scaled_dot();
    let ordinary = [1, 2, 3, 4].map(|seed| about(0, shape, seed));
    // A score of −∞ makes a pair absent; whether a key's score is −∞ depends on the sign of the query's element.
    let [mut q, mut k, v, d_out] = ordinary.clone();
    for i in 0..90 {
        q[[0, 0, i, 3]] = q[[0, 0, i, 3]].abs();
    }
    k[[0, 0, 40, 3]] = f32::NEG_INFINITY;
    let inputs = [&q, &k, &v].map(wide);
    let out = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
    let truth = attention.forward(Inputs::new(&inputs[0], &inputs[1], &inputs[2])).unwrap();
    agree("a key with −∞", &out.values, &truth.values);
    assert!(out.values.data().iter().all(|x| x.is_finite()));
    let grads = attention.backward(Inputs::new(&q, &k, &v), &out, Upstream::new(&d_out)).unwrap();
    let expected = Inputs::new(&inputs[0], &inputs[1], &inputs[2]);
    let expected = attention.backward(expected, &truth, Upstream::new(&wide(&d_out))).unwrap();
    agree("its d_v", &grads.v, &expected.v);
    // A query with ∞ has no defined weights, and others are not affected.
    let [mut q, k, v, _] = ordinary.clone();
    q[[0, 0, 7, 0]] = f32::INFINITY;
    let out = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
    let truth = attention.forward(Inputs::new(&wide(&q), &wide(&k), &wide(&v))).unwrap();
    agree("a query with ∞", &out.values, &truth.values);
    // An infinite value is the result of every query that sees it.
    let [q, k, mut v, _] = ordinary;
    v[[0, 0, 60, 2]] = f32::INFINITY;
    let causal = attention.mask(Mask::causal());
    let out = causal.forward(Inputs::new(&q, &k, &v)).unwrap();
    let truth = causal.forward(Inputs::new(&wide(&q), &wide(&k), &wide(&v))).unwrap();
    agree("a value of ∞", &out.values, &truth.values);
    assert!((0..90).all(|i| out.values[[0, 0, i, 2]].is_finite() == (i < 60)));
}

/// Scores beyond what an f32 holds: −∞ makes a pair absent, and no NaN comes of finite numbers.
#[test]
fn scores_that_overflow_are_infinite_not_nan() {
    let shape = [1, 1, 90, 24];
    for (query, key) in [(1e5, -1.234_567_8e38), (1e3, -f32::MAX), (1.2e21, -1.2e21), (3e19, -1.7e19), (-2e30, 3.3e38)]
    {
        let [mut q, mut k, v, d_out] = [1, 2, 3, 4].map(|seed| about(0, shape, seed));
        for i in 0..90 {
            q[[0, 0, i, 3]] = query;
            k[[0, 0, i, 3]] = if i == 40 { key } else { 0.0 };
        }
        for (name, mask) in [("full", Mask::full()), ("causal", Mask::causal())] {
            let attention = Attention::scaled_dot().mask(mask);
            let out = attention.forward(Inputs::new(&q, &k, &v)).unwrap();
            let truth = attention.forward(Inputs::new(&wide(&q), &wide(&k), &wide(&v))).unwrap();
            agree(&format!("{query:e} · {key:e} {name}"), &out.values, &truth.values);
            let grads = attention.backward(Inputs::new(&q, &k, &v), &out, Upstream::new(&d_out)).unwrap();
            let inputs = [&q, &k, &v].map(wide);
            let expected = attention
                .backward(Inputs::new(&inputs[0], &inputs[1], &inputs[2]), &truth, Upstream::new(&wide(&d_out)))
                .unwrap();
            agree(&format!("{query:e} · {key:e} {name} d_v"), &grads.v, &expected.v);
        }
    }
}

/// The largest score that an f32 holds, from numbers that round up.
#[test]
fn a_score_just_below_the_largest_number_is_finite() {
    let x = 1.998 * 2f32.powi(63);
    let row = |numbers: [f32; 2]| Tensor::from_fn([1, 1, 2, 1], |[_, _, i, _]| numbers[i]);
    let (q, k, v) = (row([x, 1.0]), row([x, 0.0]), row([1.0, 5.0]));
    let out = Attention::dot().forward(Inputs::new(&q, &k, &v)).unwrap();
    assert_eq!(out.values.data(), [1.0, 1.0]);
    assert_eq!(out.lse.data(), [x * x, x]);
}

/// Masked NaN has no effect, in any place of a tile, beside numbers of any size.
#[test]
fn what_is_masked_may_be_anything() {
    let shape = [1, 2, 300, 40];
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| about(0, shape, seed));
    let attention = Attention::scaled_dot().mask(Mask::causal() & Mask::lengths());
    let run = |k: &Rows<f32>, v: &Rows<f32>| {
        let inputs = Inputs::new(&q, k, v).lengths(&[250]);
        let out = attention.forward(inputs).unwrap();
        let grads = attention.backward(inputs, &out, Upstream::new(&d_out)).unwrap();
        (out.values, out.lse, grads.q, grads.v)
    };
    let clean = run(&k, &v);
    for junk in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -3e38] {
        let [mut k, mut v] = [k.clone(), v.clone()];
        for (j, h) in (250..300).flat_map(|j| [(j, 0), (j, 1)]) {
            k[[0, h, j, j % 40]] = junk;
            v[[0, h, j, (3 * j) % 40]] = junk;
        }
        assert!(run(&k, &v) == clean, "{junk}");
    }
}
