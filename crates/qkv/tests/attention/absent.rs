//! Promises 3 and 7: masked means absent. A key that is not seen has no effect, whatever it holds; a query that sees
//! nothing gets nothing; what is seen has the effect that it has in the definition.

use qkv::reference::Reference;
use qkv::{Attention, Bias, Element, Gradients, Inputs, Mask, Output, Place, Score, Tensor, Upstream};

const SCORES: [Score; 6] =
    [Score::Dot, Score::ScaledDot, Score::General, Score::Additive, Score::Cosine, Score::Distance];

struct Given<T> {
    tensors: [Tensor<T, 4>; 4],
    w: Tensor<T, 2>,
    w_q: Tensor<T, 2>,
    w_k: Tensor<T, 2>,
    v_score: Vec<T>,
}

impl<T: Element> Given<T> {
    fn new(n: usize, m: usize) -> Self {
        let noise = |h, n, seed| Tensor::randn([2, h, n, 6], seed);
        Given {
            tensors: [noise(2, n, 1), noise(1, m, 2), noise(1, m, 3), noise(2, n, 4)],
            w: Tensor::randn([6, 6], 5),
            w_q: Tensor::randn([5, 6], 6),
            w_k: Tensor::randn([5, 6], 7),
            v_score: Tensor::<T, 1>::randn([5], 8).into_data(),
        }
    }

    fn inputs(&self, score: Score) -> Inputs<'_, T> {
        let inputs = Inputs::new(&self.tensors[0], &self.tensors[1], &self.tensors[2]);
        match score {
            Score::General => inputs.w(&self.w),
            Score::Additive => inputs.w_q(&self.w_q).w_k(&self.w_k).v_score(&self.v_score),
            _ => inputs,
        }
    }
}

fn both<T: Element>(attention: &Attention, inputs: Inputs<'_, T>, d_out: &Tensor<T, 4>) -> (Output<T>, Gradients<T>) {
    let out = attention.forward(inputs).unwrap();
    let grad = attention.backward(inputs, &out, Upstream::new(d_out)).unwrap();
    (out, grad)
}

#[test]
fn a_nan_in_a_masked_key_or_value_changes_nothing() {
    for score in SCORES {
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let clean = Given::<f32>::new(90, 200);
            let mut dirty = Given::<f32>::new(90, 200);
            let lengths = [150, 7];
            for t in 1..3 {
                for (b, &length) in lengths.iter().enumerate() {
                    for j in length..200 {
                        for x in 0..6 {
                            dirty.tensors[t][[b, 0, j, x]] = poison;
                        }
                    }
                }
            }
            let attention = Attention::new(score).mask(Mask::lengths());
            let expected = both(&attention, clean.inputs(score).lengths(&lengths), &clean.tensors[3]);
            let got = both(&attention, dirty.inputs(score).lengths(&lengths), &clean.tensors[3]);
            assert!(expected == got, "{score:?} with {poison}");
            assert!(got.1.k.data().iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn a_nan_in_a_query_that_sees_nothing_reaches_no_key() {
    for score in SCORES {
        let clean = Given::<f64>::new(90, 200);
        let mut dirty = Given::<f64>::new(90, 200);
        // Queries before place 0 see nothing; they and their gradients hold garbage.
        for b in 0..2 {
            for h in 0..2 {
                for i in 0..30 {
                    for x in 0..6 {
                        dirty.tensors[0][[b, h, i, x]] = f64::NAN;
                        dirty.tensors[3][[b, h, i, x]] = f64::NAN;
                    }
                }
            }
        }
        let attention = Attention::new(score).mask(Mask::causal()).place(Place::Offset(-30));
        let (out, expected) = both(&attention, clean.inputs(score), &clean.tensors[3]);
        let (dirty_out, got) = both(&attention, dirty.inputs(score), &dirty.tensors[3]);
        assert!(out == dirty_out && expected == got, "{score:?}");
    }
}

#[test]
fn a_query_that_sees_nothing_gets_zero() {
    for score in SCORES {
        let given = Given::<f32>::new(40, 70);
        let attention = Attention::new(score).mask(Mask::causal()).place(Place::Offset(-10)).with_entropy();
        let out = attention.forward(given.inputs(score)).unwrap();
        let rows = vec![1.0; 2 * 2 * 40];
        let upstream = Upstream::new(&given.tensors[3]).lse(&rows).entropy(&rows);
        let grad = attention.backward(given.inputs(score), &out, upstream).unwrap();
        for i in 0..40 {
            assert_eq!(out.lse[[1, 1, i]] == f32::NEG_INFINITY, i < 10);
            for x in 0..6 {
                assert_eq!(out.values[[1, 1, i, x]] == 0.0, i < 10);
                assert_eq!(grad.q[[1, 1, i, x]] == 0.0, i < 10, "{score:?} {i} {x}");
            }
        }
        assert_eq!(out.entropy.unwrap()[[0, 0, 3]], 0.0);
        assert!((30..70).all(|j| (0..6).all(|x| grad.k[[0, 0, j, x]] == 0.0 && grad.v[[0, 0, j, x]] == 0.0)));
    }
}

#[test]
fn a_bias_of_minus_infinity_is_a_mask() {
    let mut given = Given::<f32>::new(20, 150);
    let hidden = 11; // a key that no query sees; query 7 sees no key
    let seen = |i: usize, j: usize| !(i * 31 + j * 17).is_multiple_of(5) && i != 7 && j != hidden;
    let bits = Tensor::from_fn([1, 1, 20, 150], |[_, _, i, j]| u8::from(seen(i, j)));
    let bias = Tensor::from_fn([1, 1, 20, 150], |[_, _, i, j]| if seen(i, j) { 0.0 } else { f32::NEG_INFINITY });
    let masked = Attention::scaled_dot().mask(Mask::bits());
    let biased = Attention::scaled_dot().bias(Bias::tensor());
    let expected = both(&masked, given.inputs(Score::ScaledDot).bits(&bits), &given.tensors[3]);
    let got = both(&biased, given.inputs(Score::ScaledDot).bias(&bias), &given.tensors[3]);
    assert_eq!(expected.0, got.0);
    assert_eq!((&expected.1.q, &expected.1.k, &expected.1.v), (&got.1.q, &got.1.k, &got.1.v));
    // The value of the hidden key has no effect.
    given.tensors[2][[0, 0, hidden, 0]] = f32::NAN;
    assert_eq!(biased.forward(given.inputs(Score::ScaledDot).bias(&bias)).unwrap(), expected.0);
}

#[test]
fn what_is_seen_flows_through_as_the_definition_would() {
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (tensor, name) in ["q", "k", "v"].into_iter().enumerate() {
            let mut given = Given::<f32>::new(70, 140);
            given.tensors[tensor][[1, 0, 65, 2]] = poison;
            let attention = Attention::scaled_dot().mask(Mask::window(20, 20));
            let got = attention.forward(given.inputs(Score::ScaledDot)).unwrap();
            let truth = Reference::<f32>::exact().forward(&attention, given.inputs(Score::ScaledDot)).unwrap().output;
            for (a, b) in got.values.data().iter().zip(truth.values.data()) {
                let same = (a - b).abs() < 1e-5 || a == b || a.is_nan() && b.is_nan();
                assert!(same, "{poison} in {name}: {a} for {b}");
            }
            for (a, b) in got.lse.data().iter().zip(truth.lse.data()) {
                assert!(
                    (a - b).abs() < 1e-5 || a == b || a.is_nan() && b.is_nan(),
                    "lse, {poison} in {name}: {a} for {b}"
                );
            }
        }
    }
}

#[test]
fn nothing_to_see_and_nobody_to_look_are_fine() {
    for (n, m) in [(0, 5), (5, 0), (0, 0)] {
        for score in SCORES {
            let given = Given::<f32>::new(n, m);
            let (out, grad) = both(&Attention::new(score), given.inputs(score), &given.tensors[3]);
            assert_eq!(out.values.shape(), [2, 2, n, 6]);
            assert!(out.lse.data().iter().all(|&lse| lse == f32::NEG_INFINITY));
            assert!(grad.q.data().iter().chain(grad.k.data()).all(|&x| x == 0.0));
        }
    }
}
