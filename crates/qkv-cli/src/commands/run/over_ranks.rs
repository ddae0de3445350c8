//! The call divided over ranks. Every rank reads the file and computes its own rows or heads; the first one gathers all
//! results, which are bit-identical to those of one process except in a ring.

use super::compute::{Call, RunOutput, all_weights, timed};
use qkv::{Element, Gradients, Inputs, Output, Tensor, Tiles, Upstream, View};
use qkv_ranks::{Number, Ranks, Result, Shards, Way};
use serde::Serialize;
use std::time::Duration;

/// How a call is divided over ranks.
#[derive(Clone, Debug)]
pub(crate) struct Division {
    pub ranks: Ranks,
    /// The requested way.
    pub way: Option<Way>,
}

/// What the ranks did.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RankReport {
    /// The number of ranks.
    pub count: usize,
    /// How the call was divided.
    pub way: &'static str,
    /// Bytes sent by all of them, in both passes.
    pub sent_bytes: u64,
    /// The longest time that any of them waited for messages.
    pub waited_milliseconds: f64,
}

/// The name of a way on the command line.
pub(crate) fn name(way: Way) -> &'static str {
    match way {
        Way::Heads => "heads",
        Way::Gathered => "gathered",
        Way::Ring => "ring",
    }
}

/// Each rank's rows of the queries and of the keys.
struct Rows {
    queries: Shards,
    keys: Shards,
}

/// The results on the first rank; `None` on the others.
pub(crate) fn compute<T>(
    (attention, inputs, upstream, with_weights): Call<'_, T>,
    tiles: Tiles,
    Division { ranks, way }: &Division,
) -> Result<Option<RunOutput<T>>>
where
    T: Element + Number,
    T::Acc: Element<Acc = T::Acc> + Number,
{
    let (n, m, size) = (inputs.q.shape()[2], inputs.k.shape()[2], ranks.size());
    // An early and a late part per rank, to balance the work under a causal mask.
    let rows = Rows { queries: Shards::balanced(n, size), keys: Shards::balanced(m, size) };
    let (rank, whole) = (ranks.rank(), inputs);
    let [q, k, v] = [
        rows.queries.take(rank, inputs.q),
        rows.keys.take(rank, View::from(&Tensor::new(inputs.k.to_vec(), inputs.k.shape())?)),
        rows.keys.take(rank, View::from(&Tensor::new(inputs.v.to_vec(), inputs.v.shape())?)),
    ];
    let plain = Inputs::new(&q, &k, &v);
    let mut inputs = inputs;
    (inputs.q, inputs.k, inputs.v) = (plain.q, plain.k, plain.v);
    let mut context = ranks.attention(attention, &rows.queries, &rows.keys).threads(rayon::current_num_threads());
    if let Some(way) = way {
        context = context.way(*way);
    }
    let taken = context.taken(k.shape()[1])?;
    ranks.barrier()?;
    let before = ranks.traffic();
    let (forward_ms, out) = timed(|| context.forward(inputs))?;
    let backward = upstream.map(|upstream| {
        let above = OwnUpstream::new(&rows.queries, rank, &upstream);
        timed(|| context.backward(inputs, &out, above.upstream(&upstream)))
    });
    let (backward_ms, gradients) = backward.transpose()?.unzip();
    let counted = ranks.traffic() - before;
    let report = report(ranks, taken, counted.sent, counted.waited)?;
    let out = whole_output(ranks, &rows.queries, attention.place, &out)?;
    let gradients = gradients.map(|gradients| whole_gradients(ranks, &rows, gradients)).transpose()?;
    if !ranks.is_first() {
        return Ok(None);
    }
    let weights = with_weights.map(|m| all_weights(attention, whole, &out, m)).transpose()?;
    let ranks = Some(report);
    Ok(Some(RunOutput { out, weights, gradients, tiles, forward_ms, backward_ms, kernels: None, ranks }))
}

/// A rank's rows of the upstream gradients.
struct OwnUpstream<T: Element> {
    values: Tensor<T, 4>,
    columns: [Option<Vec<T::Acc>>; 2],
}

impl<T: Element> OwnUpstream<T> {
    fn new(shards: &Shards, rank: usize, upstream: &Upstream<'_, T>) -> Self {
        let [b, h, n, _] = upstream.values.shape();
        let column = |of: &[T::Acc]| {
            let whole = View::new(of, [b, h, n, 1]).expect("checked by the library");
            shards.take(rank, whole).into_data()
        };
        let columns = [upstream.lse.map(column), upstream.log_prob.map(column)];
        OwnUpstream { values: shards.take(rank, upstream.values), columns }
    }

    fn upstream<'a>(&'a self, whole: &Upstream<'_, T>) -> Upstream<'a, T> {
        let mut own = Upstream::new(&self.values);
        let [lse, log_prob] = &self.columns;
        (own.lse, own.log_prob, own.for_bias) = (lse.as_deref(), log_prob.as_deref(), whole.for_bias);
        own
    }
}

/// What all ranks sent, and the longest wait.
fn report(ranks: &Ranks, taken: Way, sent: u64, waited: Duration) -> Result<RankReport> {
    let own = [sent.to_le_bytes(), (waited.as_micros() as u64).to_le_bytes()].concat();
    let all = ranks.all_gather(&own)?;
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let waited = all.iter().map(|bytes| number(&bytes[8..])).max().unwrap_or(0);
    let sent_bytes = all.iter().map(|bytes| number(&bytes[..8])).sum();
    Ok(RankReport { count: ranks.size(), way: name(taken), sent_bytes, waited_milliseconds: waited as f64 / 1e3 })
}

/// The output of all rows, on the first rank.
fn whole_output<T>(ranks: &Ranks, shards: &Shards, place: qkv::Place, own: &Output<T>) -> Result<Output<T>>
where
    T: Element + Number,
    T::Acc: Number,
{
    let column = |own: &Tensor<T::Acc, 3>| -> Result<Tensor<T::Acc, 3>> {
        let [b, h, n] = own.shape();
        if own.data().is_empty() {
            return Ok(own.clone());
        }
        let all = ranks.gather_to_first(shards, &Tensor::new(own.data().to_vec(), [b, h, n, 1])?)?;
        let [b, h, n, _] = all.shape();
        Ok(Tensor::new(all.into_data(), [b, h, n])?)
    };
    let some = |own: &Option<Tensor<T::Acc, 3>>| own.as_ref().map(column).transpose();
    let mut all = Output::of_lse(column(&own.lse)?, 0, place)?;
    all.values = ranks.gather_to_first(shards, &own.values)?;
    (all.threshold, all.entropy, all.log_prob) = (some(&own.threshold)?, some(&own.entropy)?, some(&own.log_prob)?);
    all.chosen = own.chosen.as_ref().map(|chosen| ranks.gather_to_first(shards, chosen)).transpose()?;
    Ok(all)
}

/// The gradients of all rows, on the first rank. Those of parameters are already complete on every rank.
fn whole_gradients<T: Element + Number>(ranks: &Ranks, rows: &Rows, own: Gradients<T>) -> Result<Gradients<T>> {
    let mut all = own;
    all.q = ranks.gather_to_first(&rows.queries, &all.q)?;
    all.k = ranks.gather_to_first(&rows.keys, &all.k)?;
    all.v = ranks.gather_to_first(&rows.keys, &all.v)?;
    Ok(all)
}
