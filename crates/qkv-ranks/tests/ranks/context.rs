//! Attention over ranks has the bits of one process: output, log-sum-exp and the gradients of q, k and v, for the cases
//! of the conformance suite over uneven shards.

use qkv::{Attention, Element, Gradients, Inputs, Mask, Output, Tensor, Upstream};
use qkv_conformance::case::Case;
use qkv_conformance::grid;
use qkv_ranks::{Error, Number, Ranks, Shards, Way, run_in_process};
use std::ops::Range;

/// Shards of which none is a multiple of a tile, and each rank has an early and a late part.
pub fn uneven(len: usize, ranks: usize) -> Shards {
    let cut =
        |at: usize| if at == 2 * ranks { len } else { (len * at * (at + 1) / (2 * ranks * (2 * ranks + 1))).min(len) };
    let part = |at: usize| cut(at)..cut(at + 1);
    Shards::new((0..ranks).map(|rank| vec![part(rank), part(2 * ranks - 1 - rank)]).collect()).unwrap()
}

/// Some rows of a tensor `[B, H, N, W]`.
pub fn rows<E: Copy + Default>(of: &Tensor<E, 4>, ranges: &[Range<usize>]) -> Tensor<E, 4> {
    let wanted: Vec<usize> = ranges.iter().cloned().flatten().collect();
    let [b, h, _, w] = of.shape();
    Tensor::from_fn([b, h, wanted.len(), w], |[b, h, i, x]| of[[b, h, wanted[i], x]])
}

pub fn column<E: Copy + Default>(of: &[E], [b, h, n]: [usize; 3], ranges: &[Range<usize>]) -> Vec<E> {
    rows(&Tensor::new(of.to_vec(), [b, h, n, 1]).unwrap(), ranges).into_data()
}

/// What one rank holds of a case over uneven shards.
pub struct Held<T: Element> {
    pub queries: Shards,
    pub keys: Shards,
    q: Tensor<T, 4>,
    k: Tensor<T, 4>,
    v: Tensor<T, 4>,
    d_out: Tensor<T, 4>,
    d_lse: Option<Vec<T::Acc>>,
    d_entropy: Option<Vec<T::Acc>>,
    d_log_prob: Option<Vec<T::Acc>>,
}

impl<T> Held<T>
where
    T: Element + Number,
    T::Acc: Element<Acc = T::Acc> + Number,
{
    pub fn by(ranks: &Ranks, inputs: Inputs<'_, T>, upstream: Upstream<'_, T>) -> Held<T> {
        let ([b, hq, n, _], m) = (inputs.q.shape(), inputs.k.shape()[2]);
        let (queries, keys) = (uneven(n, ranks.size()), uneven(m, ranks.size()));
        let (own, own_keys) = (queries.of(ranks.rank()), keys.of(ranks.rank()));
        let part = |values: Vec<T>, shape, ranges| rows(&Tensor::new(values, shape).unwrap(), ranges);
        let columns = |of: Option<&[T::Acc]>| of.map(|of| column(of, [b, hq, n], own));
        Held {
            q: part(inputs.q.to_vec(), inputs.q.shape(), own),
            k: part(inputs.k.to_vec(), inputs.k.shape(), own_keys),
            v: part(inputs.v.to_vec(), inputs.v.shape(), own_keys),
            d_out: part(upstream.values.to_vec(), upstream.values.shape(), own),
            d_lse: columns(upstream.lse),
            d_entropy: columns(upstream.entropy),
            d_log_prob: columns(upstream.log_prob),
            queries,
            keys,
        }
    }

    /// These inputs with the rank's queries, keys and values in place of all.
    pub fn inputs<'a>(&'a self, mut inputs: Inputs<'a, T>) -> Inputs<'a, T> {
        let own = Inputs::new(&self.q, &self.k, &self.v);
        (inputs.q, inputs.k, inputs.v) = (own.q, own.k, own.v);
        inputs
    }

    pub fn upstream(&self) -> Upstream<'_, T> {
        let mut upstream = Upstream::new(&self.d_out);
        (upstream.lse, upstream.entropy) = (self.d_lse.as_deref(), self.d_entropy.as_deref());
        upstream.log_prob = self.d_log_prob.as_deref();
        upstream
    }
}

fn same<T: Element>(what: &str, found: &[T], expected: &[T]) -> Option<String> {
    let bits = |x: &T| x.to_f64().to_bits();
    let differ = found.iter().zip(expected).filter(|(a, b)| bits(a) != bits(b)).count();
    (differ > 0 || found.len() != expected.len()).then(|| format!("{what}: {differ} of {} differ", expected.len()))
}

/// What is wrong on one rank.
fn check<T>(
    ranks: &Ranks,
    case: &Case,
    way: Option<Way>,
    (inputs, upstream): (Inputs<'_, T>, Upstream<'_, T>),
    (out, gradients): (&Output<T>, &Gradients<T>),
    same_order: bool,
) -> Result<Vec<String>, Error>
where
    T: Element + Number,
    T::Acc: Element<Acc = T::Acc> + Number,
{
    let [b, hq, n, _] = inputs.q.shape();
    let held = Held::by(ranks, inputs, upstream);
    let (local, above) = (held.inputs(inputs), held.upstream());
    let (own, own_keys) = (held.queries.of(ranks.rank()), held.keys.of(ranks.rank()));

    let mut context = ranks.attention(&case.attention, &held.queries, &held.keys);
    if let Some(way) = way {
        context = context.way(way);
    }
    let taken = context.taken(inputs.k.shape()[1])?;
    let found = context.forward(local)?;
    let back = context.backward(local, &found, above)?;
    let mut wrong = vec![same("out", found.values.data(), rows(&out.values, own).data())];
    if !out.lse.data().is_empty() {
        wrong.push(same("lse", found.lse.data(), &column(out.lse.data(), [b, hq, n], own)));
    }
    for (what, found, expected) in [
        ("d_q", &back.q, rows(&gradients.q, own)),
        ("d_k", &back.k, rows(&gradients.k, own_keys)),
        ("d_v", &back.v, rows(&gradients.v, own_keys)),
    ] {
        let close = |(a, b): (&T, &T)| (a.to_f64() - b.to_f64()).abs() <= 1e-4 * (1.0 + b.to_f64().abs());
        if same_order || taken == Way::Heads {
            wrong.push(same(what, found.data(), expected.data()));
        } else {
            wrong.push((!found.data().iter().zip(expected.data()).all(close)).then(|| format!("{what} is far off")));
        }
    }
    if let (Some(found), Some(expected)) = (&back.sinks, &gradients.sinks) {
        let close = |(a, b): (&T, &T)| (a.to_f64() - b.to_f64()).abs() <= 1e-3 * (1.0 + b.to_f64().abs());
        wrong.push((!found.iter().zip(expected).all(close)).then(|| "d_sinks".to_owned()));
    }
    // Any row of the weights is that of one process.
    if let Some(row) = (0..local.q.shape()[2]).last().filter(|_| case.attention.select == qkv::Select::Soft) {
        let number = own.iter().cloned().flatten().nth(row).expect("held here");
        let seen = context.weights(local, &found, (0, hq - 1), &[row]);
        if let (Ok(seen), Ok(whole)) = (seen, case.attention.weights(inputs, out)) {
            let expected = whole.rows_at(0, hq - 1, &[number])?;
            wrong.push(same("weights", seen.data(), expected.data()));
        }
    }
    let named = |what: String| format!("{} on {:?} by {taken:?}: {what}", case.name, ranks);
    Ok(wrong.into_iter().flatten().map(named).collect())
}

fn hold<T>(cases: Vec<Case>, same_order: bool)
where
    T: Element + Number,
    T::Acc: Element<Acc = T::Acc> + Number,
{
    let mut wrong = Vec::new();
    for case in &cases {
        let data = case.data::<T>();
        let (inputs, upstream) = (data.inputs(), data.upstream());
        let out = case.attention.forward(inputs).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let gradients = case.attention.backward(inputs, &out, upstream).unwrap();
        let every = std::env::var_os("QKV_EVERY_CASE").is_some();
        for &size in if every { &crate::SIZES[..] } else { &[3] } {
            for way in [None, Some(Way::Gathered)] {
                let linear = matches!(case.attention.score, qkv::Score::Linear(_));
                let too_few = linear && inputs.k.shape()[1] < size;
                if too_few || linear && way.is_some() || inputs.q.shape()[2] == 0 || inputs.k.shape()[2] == 0 {
                    continue;
                }
                let (given, whole) = ((inputs, upstream), (&out, &gradients));
                let found = run_in_process(size, |ranks| check(&ranks, case, way, given, whole, same_order));
                let told = |found| match found {
                    Ok(wrong) => wrong,
                    Err(error) => vec![format!("{} on {size} ranks: {error}", case.name)],
                };
                wrong.extend(found.into_iter().flat_map(told));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn masks_have_the_bits_of_one_process() {
    hold::<f32>(grid::masks(), true);
    // The engine orders these by the keys they keep, and a rectangle of them differently.
    hold::<f32>(grid::gathered(), false);
}

#[test]
fn heads_biases_dropout_and_sinks_have_the_bits_of_one_process() {
    hold::<f32>(grid::heads(), true);
    hold::<f32>(grid::on_top(), true);
    hold::<f32>(grid::hashed(), true);
}

#[test]
fn selections_and_centers_have_the_bits_of_one_process() {
    hold::<f32>(grid::selection(), true);
    hold::<f32>(grid::choices(), true);
    hold::<f32>(grid::local(), true);
}

#[test]
fn other_types_and_linear_attention_have_the_bits_of_one_process() {
    hold::<qkv::half::bf16>(grid::masks().into_iter().step_by(4).collect(), true);
    hold::<f64>(grid::masks().into_iter().step_by(4).collect(), true);
    hold::<f32>(grid::linear(), true);
}

#[test]
fn rows_that_are_not_those_of_the_shards_are_refused() {
    let x = Tensor::<f32, 4>::randn([1, 2, 5, 4], 1);
    let (causal, shards) = (Attention::scaled_dot().mask(Mask::causal()), Shards::even(12, 2));
    for result in run_in_process(2, |ranks| ranks.attention(&causal, &shards, &shards).forward(Inputs::new(&x, &x, &x)))
    {
        assert_eq!(result.unwrap_err().to_string(), "`q` has 5 rows, which are not those of its shards");
    }
}

#[test]
fn bytes_of_both_ways_are_those_of_the_formula() {
    let (b, h, n, d) = (1, 4, 512, 16);
    let x = Tensor::<f32, 4>::randn([b, h, n / 4, d], 1);
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let shards = Shards::even(n, 4);
    let row = (b * h * d * 4) as u64;
    for (way, expected) in [
        // q, k and v to the heads' ranks, the output and its log-sum-exp back: 3/4 of a quarter each.
        (Way::Heads, 3 * (n as u64 / 16) * (4 * row + (b * h * 4) as u64)),
        // Keys and values to three others; shards are whole blocks, so queries stay where they are.
        (Way::Gathered, 3 * (n as u64 / 4) * 2 * row),
    ] {
        let sent = run_in_process(4, |ranks| {
            ranks.attention(&causal, &shards, &shards).way(way).forward(Inputs::new(&x, &x, &x)).unwrap();
            ranks.traffic().sent
        });
        assert_eq!(sent, [expected; 4], "{way:?}");
    }
}
