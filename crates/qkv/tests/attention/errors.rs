//! Promise 8: bad input gets a typed error that names the tensor, what it is and what was expected.

use qkv::{
    Attention, Bias, BigBird, Blocks, Cache, Error, Inputs, Mask, Place, Score, Tensor, Upstream, View, ViewMut,
};

fn t(shape: [usize; 4]) -> Tensor<f32, 4> {
    Tensor::randn(shape, 1)
}

/// The error of a forward pass over good q, k and v.
fn refused(attention: Attention, more: impl for<'a> Fn(Inputs<'a, f32>) -> Inputs<'a, f32>) -> String {
    let x = t([2, 4, 6, 8]);
    attention.forward(more(Inputs::new(&x, &x, &x))).expect_err("this makes no sense").to_string()
}

fn plain(inputs: Inputs<'_, f32>) -> Inputs<'_, f32> {
    inputs
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let forward = |q, k, v| Attention::scaled_dot().forward(Inputs::new(&t(q), &t(k), &t(v))).unwrap_err().to_string();
    let good = [2, 4, 6, 8];
    assert_eq!(
        forward(good, [3, 4, 6, 8], [3, 4, 6, 8]),
        "`k` has shape [3, 4, 6, 8], expected a batch of 2, as `q` has"
    );
    assert_eq!(forward(good, good, [2, 4, 5, 8]), "`v` has shape [2, 4, 5, 8], expected [2, 4, 6, …], as `k` has");
    assert_eq!(
        forward(good, [2, 4, 6, 7], good),
        "`k` has shape [2, 4, 6, 7], expected a width of 8, as `q` has (only general and additive scores take two widths)"
    );
    assert_eq!(
        forward(good, [2, 3, 6, 8], [2, 3, 6, 8]),
        "`q` has 4 heads and `k` has 3: the first must be a multiple of the second"
    );
    assert!(matches!(
        Attention::dot().forward(Inputs::new(&t([1, 0, 2, 2]), &t([1, 2, 2, 2]), &t([1, 2, 2, 2]))),
        Ok(out) if out.values.data().is_empty()
    ));
}

#[test]
fn numbers_without_meaning_are_named() {
    assert_eq!(refused(Attention::dot().scale(f64::NAN), plain), "`scale` is NaN, expected a finite number");
    assert_eq!(refused(Attention::dot().scale(f64::INFINITY), plain), "`scale` is inf, expected a finite number");
    assert_eq!(
        refused(Attention::dot().temperature(0.0), plain),
        "`temperature` is 0, expected a finite number above 0"
    );
    assert_eq!(refused(Attention::dot().softcap(-1.0), plain), "`softcap` is -1, expected a finite number above 0");
    let dropout = "a probability, at least 0 and less than 1";
    assert_eq!(refused(Attention::dot().dropout(1.0), plain), format!("`dropout` is 1, expected {dropout}"));
    assert_eq!(refused(Attention::dot().dropout(f64::NAN), plain), format!("`dropout` is NaN, expected {dropout}"));
    assert!(
        refused(Attention::dot().place(Place::Offset(i64::MAX)), plain).starts_with("`place` is 9223372036854775807")
    );
}

#[test]
fn patterns_that_make_no_sense_are_named() {
    let mask = |mask| refused(Attention::dot().mask(mask), plain);
    assert_eq!(mask(Mask::strided(0)), "`strided` is 0, expected a stride of at least 1");
    assert!(mask(Mask::fixed(4, 5)).starts_with("`fixed` is 4,5, expected"));
    assert!(mask(Mask::fixed(4, 0)).starts_with("`fixed` is 4,0, expected"));
    let unordered = Mask::Longformer { window: 2, globals: vec![3, 1] };
    assert_eq!(mask(unordered), "`longformer` is [3, 1], expected global positions in ascending order");
    let bigbird = BigBird { block: 0, window: 1, globals: 1, random: 1, seed: 1 };
    assert_eq!(mask(Mask::bigbird(bigbird)), "`bigbird` is a block of 0, expected a block of at least 1");
    let blocks = Blocks { size: 2, seen: vec![vec![true; 2]; 3] };
    assert_eq!(mask(!Mask::blocks(blocks)), "`blocks` is 3 × 2 blocks of 2, expected 3 × 3 at least");
}

#[test]
fn what_is_missing_and_what_is_not_used_are_named() {
    assert_eq!(refused(Attention::general(), plain), "`w` is missing: the general score needs it");
    assert_eq!(refused(Attention::additive(), plain), "`v_score` is missing: the additive score needs it");
    assert_eq!(
        refused(Attention::additive(), |i| i.v_score(&[0.0; 3])),
        "`w_q` is missing: the additive score needs it"
    );
    assert_eq!(refused(Attention::dot().with_sinks(), plain), "`sinks` is missing: attention with sinks needs it");
    assert_eq!(refused(Attention::dot().mask(Mask::lengths()), plain), "`lengths` is missing: a padding mask needs it");
    assert_eq!(refused(Attention::dot().bias(Bias::tensor()), plain), "`bias` is missing: a tensor bias needs it");
    assert_eq!(refused(Attention::dot().learned_scale(), plain), "`scale` is missing: a learned scale needs it");
    assert_eq!(refused(Attention::dot(), |i| i.sinks(&[0.0; 4])), "`sinks` was given, but the attention has no sinks");
    assert_eq!(
        refused(Attention::dot(), |i| i.lengths(&[1, 2])),
        "`lengths` was given, but no rule of the mask looks at it"
    );
    assert_eq!(
        refused(Attention::dot(), |i| i.v_score(&[0.0])),
        "`v_score` was given, but the score has no such parameter"
    );
    assert_eq!(
        refused(Attention::dot(), |i| i.positions(&[0; 12])),
        "`positions` was given, but the place is not taken from it"
    );
}

#[test]
fn parameters_of_the_wrong_size_are_named() {
    let with_sinks = Attention::dot().with_sinks();
    assert_eq!(refused(with_sinks, |i| i.sinks(&[0.0; 3])), "`sinks` has shape [3], expected [4], one a query head");
    let padded = Attention::dot().mask(Mask::lengths());
    assert_eq!(refused(padded.clone(), |i| i.lengths(&[1])), "`lengths` has shape [1], expected [2], one a sequence");
    assert_eq!(refused(padded, |i| i.lengths(&[1, 7])), "`lengths` is 7, expected at most 6, the number of keys");
    let packed = Attention::dot().mask(Mask::segments());
    assert_eq!(
        refused(packed.clone(), |i| i.segments(&[0; 5], &[0; 12])),
        "`segments_q` has shape [5], expected [2, 6], one a query"
    );
    assert_eq!(
        refused(packed, |i| i.segments(&[0; 12], &[0; 5])),
        "`segments_k` has shape [5], expected [2, 6], one a key"
    );
    let x = t([2, 4, 6, 8]);
    let inputs = || Inputs::new(&x, &x, &x);
    let error = |result: qkv::Result<qkv::Output<f32>>| result.unwrap_err().to_string();
    let bits = Tensor::from_fn([1, 3, 6, 6], |_| 1u8);
    assert_eq!(
        error(Attention::dot().mask(Mask::bits()).forward(inputs().bits(&bits))),
        "`bits` has shape [1, 3, 6, 6], expected something that broadcasts to [2, 4, 6, 6]"
    );
    let bias = t([2, 4, 6, 5]);
    assert_eq!(
        error(Attention::dot().bias(Bias::tensor()).forward(inputs().bias(&bias))),
        "`bias` has shape [2, 4, 6, 5], expected something that broadcasts to [2, 4, 6, 6]"
    );
    let w = Tensor::<f32, 2>::randn([8, 7], 1);
    assert!(
        error(Attention::new(Score::General).forward(inputs().w(&w)))
            .starts_with("`w` has shape [1, 8, 7], expected [8, 8]")
    );
    let table = Tensor::<f32, 2>::randn([4, 6], 1);
    assert!(
        error(Attention::dot().bias(Bias::relative(3)).forward(inputs().table(&table)))
            .contains("`table` has shape [4, 6]")
    );
    let huge = Attention::dot().bias(Bias::relative(usize::MAX));
    assert!(error(huge.forward(inputs().table(&table))).contains("`table` has shape"));
}

#[test]
fn an_output_or_gradient_of_another_call_is_refused() {
    let (x, small) = (t([1, 1, 6, 8]), t([1, 1, 5, 8]));
    let attention = Attention::dot();
    let out = attention.forward(Inputs::new(&x, &x, &x)).unwrap();
    let other = attention.forward(Inputs::new(&small, &x, &x)).unwrap();
    let backward =
        |out, d_out| attention.backward(Inputs::new(&x, &x, &x), out, Upstream::new(d_out)).unwrap_err().to_string();
    assert_eq!(backward(&other, &x), "`out` has shape [1, 1, 5, 8], expected [1, 1, 6, 8]");
    assert_eq!(backward(&out, &small), "`d_out` has shape [1, 1, 5, 8], expected [1, 1, 6, 8], as the output has");
    let upstream = Upstream::new(&x).entropy(&[0.0; 6]);
    let error = attention.backward(Inputs::new(&x, &x, &x), &out, upstream).unwrap_err();
    assert!(matches!(error, Error::Missing { tensor: "entropy", .. }));
    let upstream = Upstream::new(&x).lse(&[0.0; 5]);
    assert!(
        attention
            .backward(Inputs::new(&x, &x, &x), &out, upstream)
            .unwrap_err()
            .to_string()
            .starts_with("`d_lse` has shape [5]")
    );
    let weights = attention.weights(Inputs::new(&x, &x, &x), &out).unwrap();
    assert_eq!(weights.rows(0, 0, 3..9).unwrap_err().to_string(), "`rows` is 3..9, expected within 0..6");
    assert_eq!(weights.rows(0, 1, 0..1).unwrap_err().to_string(), "`head` is 1, expected within 0..1");
    assert!(weights.rows(1, 0, 0..1).is_err() && weights.rectangle(0, 0, 0..1, 5..7).is_err());
}

#[test]
fn sizes_beyond_the_machine_are_refused_and_not_allocated() {
    let one = [1.0f32];
    // With a stride of 0 a view can have any number of rows; their results would not fit into memory.
    let huge = View::strided(&one, 0, [1 << 20, 1 << 20, 1 << 20, 1], [0; 4]).unwrap();
    let x = View::new(&one, [1, 1, 1, 1]).unwrap();
    let k = x.broadcast([1 << 20, 1 << 20, 1, 1]).unwrap();
    assert!(matches!(Attention::dot().forward(Inputs::new(huge, k, k)), Err(Error::TooLarge { tensor: "out", .. })));
    assert!(View::new(&one, [usize::MAX, usize::MAX, 1, 1]).is_err());
    assert!(Tensor::<f32, 4>::new(vec![], [usize::MAX, 2, 1, 1]).is_err());
}

#[test]
fn a_cache_refuses_what_it_cannot_hold() {
    let mut cache = Cache::<f32>::new(1, 2, 8, 4);
    let error = cache.append(&t([1, 2, 3, 8]), &t([1, 2, 2, 4])).unwrap_err().to_string();
    assert_eq!(error, "`v` has shape [1, 2, 2, 4], expected [1, 2, 3, 4], to be appended");
    assert!(cache.append(&t([1, 1, 3, 8]), &t([1, 1, 3, 4])).is_err());
    assert!(cache.is_empty());
    cache.append(&t([1, 2, 3, 8]), &t([1, 2, 3, 4])).unwrap();
    assert!(cache.reserve(usize::MAX).is_err());
    assert_eq!(cache.len(), 3);
}

#[test]
fn output_memory_must_have_a_place_for_every_number() {
    let mut memory = vec![0.0f32; 100];
    assert!(ViewMut::strided(&mut memory, 0, [1, 2, 10, 5], [0, 0, 5, 1]).is_err());
    let x = t([1, 2, 10, 5]);
    let mut lse = vec![0.0f32; 20];
    let into = qkv::OutputMut::new(
        ViewMut::new(&mut memory, [1, 2, 10, 5]).unwrap(),
        ViewMut::new(&mut lse, [1, 1, 20, 1]).unwrap(),
    );
    let error = Attention::dot().forward_into(Inputs::new(&x, &x, &x), into, &qkv::Scratch::new(), 1).unwrap_err();
    assert_eq!(error.to_string(), "`lse` has shape [1, 1, 20, 1], expected [1, 2, 10, 1]");
}
