//! One attention layer of a recording, and access to its weights: single rows, rectangles, pooled maps.
//!
//! Weights are recomputed exactly from queries, keys and the log-sum-exp, or taken from a file that stores them. Code
//! outside this module need not know which.

use qkv::{Attention, Mask, Output, OwnedInputs, Place, Pool, Select, Tensor};
use qkv_models::{Error, Result};
use std::ops::Range;
use std::sync::OnceLock;

/// One attention layer: some heads, each from queries to keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Its name, after the model's parameters: `decoder.layers.1.cross_attn`.
    pub name: String,
    /// The part of the model: `encoder`, `decoder`, `cross`.
    pub group: String,
    /// Index of the side of the recording that the rows stand for.
    pub queries: usize,
    /// Index of the side that the columns stand for.
    pub keys: usize,
    /// Where its weights come from.
    pub weights: WeightSource,
    /// How much the loss depends on each head, if known.
    pub importance: Option<Vec<f64>>,
}

/// Where weights come from.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightSource {
    /// Recomputed from the attention call, of one sequence.
    Call(Box<AttentionCall>),
    /// Stored, `[H, N, M]`.
    Stored(Tensor<f32, 3>),
}

/// An attention call that was recorded: description, inputs, and the output that weights are recomputed from.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionCall {
    /// The description.
    pub attention: Attention,
    /// The inputs, of one sequence.
    pub inputs: OwnedInputs<f32>,
    /// Computed on first use if a file did not store it: for 100,000 tokens that takes half a minute.
    output: OnceLock<Output<f32>>,
}

impl AttentionCall {
    /// A call whose output is known; without it, the output is computed when weights first need it.
    pub fn new(attention: Attention, inputs: OwnedInputs<f32>, output: Option<Output<f32>>) -> AttentionCall {
        let output = output.map_or_else(OnceLock::new, OnceLock::from);
        AttentionCall { attention, inputs, output }
    }

    /// The output, which is computed now if it is not known yet.
    ///
    /// # Errors
    /// If the inputs do not fit the description.
    pub fn output(&self) -> Result<&Output<f32>> {
        if let Some(output) = self.output.get() {
            return Ok(output);
        }
        let output = self.attention.forward(self.inputs.inputs())?;
        Ok(self.output.get_or_init(|| output))
    }

    /// The output, if it is known already.
    pub fn known_output(&self) -> Option<&Output<f32>> {
        self.output.get()
    }

    /// The key position of a query.
    fn place(&self, query: usize) -> Option<i64> {
        let ([_, _, n, _], [_, _, m, _]) = (self.inputs.q.shape(), self.inputs.k.shape());
        match self.attention.place {
            Place::Start => Some(query as i64),
            Place::End => Some(query as i64 + m as i64 - n as i64),
            Place::Offset(offset) => Some(query as i64 + offset),
            Place::Given => Some(self.inputs.positions.as_ref()?[query]),
        }
    }

    /// Whether a row depends on nothing but its query, its place and the keys. Such rows can be computed by themselves.
    fn has_independent_rows(&self) -> bool {
        let OwnedInputs { bias, bits, segments, buckets, center, .. } = &self.inputs;
        let by_place = matches!(self.attention.mask, Mask::Full | Mask::Causal | Mask::Lengths | Mask::Window { .. });
        let no_row_data =
            bias.is_none() && bits.is_none() && segments.is_none() && buckets.is_none() && center.is_none();
        by_place && no_row_data && self.attention.select == Select::Soft && self.attention.dropout.is_none()
    }

    /// The weights of some queries of a head, `[rows, M]`. Computes no more than these rows need: as long as the output
    /// is unknown, attention runs over the listed queries only.
    fn rows_at(&self, head: usize, rows: &[usize]) -> Result<Tensor<f32, 2>> {
        let n = self.inputs.q.shape()[2];
        if self.output.get().is_some() || rows.len() >= n / 4 || !self.has_independent_rows() {
            return Ok(self.attention.weights(self.inputs.inputs(), self.output()?)?.rows_at(0, head, rows)?);
        }
        let [_, heads, _, d] = self.inputs.q.shape();
        let q = Tensor::from_fn([1, heads, rows.len(), d], |[_, h, i, x]| self.inputs.q[[0, h, rows[i], x]]);
        let positions: Option<Vec<i64>> = rows.iter().map(|&row| self.place(row)).collect();
        let mut inputs = OwnedInputs::new(q, self.inputs.k.clone(), self.inputs.v.clone());
        let OwnedInputs { w, w_q, w_k, table, v_score, scale, sinks, lengths, .. } = self.inputs.clone();
        (inputs.w, inputs.w_q, inputs.w_k, inputs.table) = (w, w_q, w_k, table);
        (inputs.v_score, inputs.scale, inputs.sinks, inputs.lengths) = (v_score, scale, sinks, lengths);
        inputs.positions = positions;
        let attention = self.attention.clone().place(Place::Given);
        let output = attention.forward(inputs.inputs())?;
        Ok(attention.weights(inputs.inputs(), &output)?.rows(0, head, 0..rows.len())?)
    }
}

impl Layer {
    /// Number of heads.
    pub fn heads(&self) -> usize {
        match &self.weights {
            WeightSource::Call(call) => call.inputs.q.shape()[1],
            WeightSource::Stored(weights) => weights.shape()[0],
        }
    }

    /// Number of queries and keys, `[N, M]`.
    pub fn size(&self) -> [usize; 2] {
        match &self.weights {
            WeightSource::Call(call) => [call.inputs.q.shape()[2], call.inputs.k.shape()[2]],
            WeightSource::Stored(weights) => [weights.shape()[1], weights.shape()[2]],
        }
    }

    /// The attention call, unless the weights were stored.
    pub fn call(&self) -> Option<&AttentionCall> {
        match &self.weights {
            WeightSource::Call(call) => Some(call),
            WeightSource::Stored(_) => None,
        }
    }

    /// Computes the log-sum-exp, which all weights need, unless it is known.
    ///
    /// # Errors
    /// If the inputs do not fit the description.
    pub fn prepare(&self) -> Result<()> {
        self.call().map_or(Ok(()), |call| call.output().map(drop))
    }

    /// The key at the position of a query, in a layer of self-attention.
    pub fn key_of_query(&self, query: usize) -> Option<usize> {
        let at = match &self.weights {
            WeightSource::Stored(_) => query as i64,
            WeightSource::Call(call) => call.place(query)?,
        };
        usize::try_from(at).ok().filter(|&at| at < self.size()[1])
    }

    fn check(&self, head: usize, rows: &Range<usize>, cols: &Range<usize>) -> Result<()> {
        let ([n, m], heads) = (self.size(), self.heads());
        let within = |range: &Range<usize>, limit| range.start <= range.end && range.end <= limit;
        match () {
            () if head >= heads => {
                Err(Error::invalid(format!("head {head} does not exist: the layer has {heads}, counted from 0")))
            }
            () if !within(rows, n) => Err(Error::invalid(format!("rows {rows:?} are not within 0..{n}"))),
            () if !within(cols, m) => Err(Error::invalid(format!("columns {cols:?} are not within 0..{m}"))),
            () => Ok(()),
        }
    }

    /// The weights of a rectangle of queries and keys, `[rows, cols]`.
    ///
    /// # Errors
    /// If there is no such head, row or column.
    pub fn rectangle(&self, head: usize, rows: Range<usize>, cols: Range<usize>) -> Result<Tensor<f32, 2>> {
        self.check(head, &rows, &cols)?;
        match &self.weights {
            WeightSource::Call(call) => {
                let weights = call.attention.weights(call.inputs.inputs(), call.output()?)?;
                Ok(weights.rectangle(0, head, rows, cols)?)
            }
            WeightSource::Stored(weights) => {
                let cell = |[r, c]: [usize; 2]| weights[[head, rows.start + r, cols.start + c]];
                Ok(Tensor::from_fn([rows.len(), cols.len()], cell))
            }
        }
    }

    /// All weights of some queries, `[rows, M]`.
    ///
    /// # Errors
    /// As [`rectangle`](Layer::rectangle).
    pub fn rows(&self, head: usize, rows: Range<usize>) -> Result<Tensor<f32, 2>> {
        self.rectangle(head, rows, 0..self.size()[1])
    }

    /// All weights of a head, `[N, M]`.
    ///
    /// # Errors
    /// As [`rectangle`](Layer::rectangle).
    pub fn weights(&self, head: usize) -> Result<Tensor<f32, 2>> {
        self.rows(head, 0..self.size()[0])
    }

    /// The weights of the listed queries, `[rows, M]`. A few rows out of many are computed by themselves, if possible.
    ///
    /// # Errors
    /// As [`rectangle`](Layer::rectangle).
    pub fn rows_at(&self, head: usize, rows: &[usize]) -> Result<Tensor<f32, 2>> {
        self.check(head, &(0..rows.iter().max().map_or(0, |most| most + 1)), &(0..0))?;
        match &self.weights {
            WeightSource::Call(call) => call.rows_at(head, rows),
            WeightSource::Stored(weights) => {
                Ok(Tensor::from_fn([rows.len(), self.size()[1]], |[r, j]| weights[[head, rows[r], j]]))
            }
        }
    }

    /// A pooled rectangle: each cell covers `each` weights, the last cells whatever remains. With `max_rows`, at most
    /// that many rows of a cell are read, which is faster but not exact.
    ///
    /// # Errors
    /// As [`rectangle`](Layer::rectangle).
    pub fn map(
        &self,
        head: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        each: [usize; 2],
        pool: Pool,
        max_rows: Option<usize>,
    ) -> Result<Tensor<f32, 2>> {
        self.check(head, &rows, &cols)?;
        match &self.weights {
            WeightSource::Call(call) => {
                let weights = call.attention.weights(call.inputs.inputs(), call.output()?)?;
                Ok(weights.map(0, head, rows, cols, each, pool, max_rows)?)
            }
            WeightSource::Stored(weights) => {
                let (down, across, [n, m]) = (each[0].max(1), each[1].max(1), [rows.len(), cols.len()]);
                let covered: [&dyn Fn(usize) -> Range<usize>; 2] =
                    [&|y| y * down..((y + 1) * down).min(n), &|x| x * across..((x + 1) * across).min(m)];
                let size = [n.div_ceil(down), m.div_ceil(across)];
                Ok(pool_stored(weights, [head, rows.start, cols.start], size, covered, pool))
            }
        }
    }

    /// All weights of a head, pooled to `[height, width]` cells. Weights repeat if there are fewer of them than cells.
    ///
    /// # Errors
    /// As [`rectangle`](Layer::rectangle).
    pub fn pooled(&self, head: usize, [height, width]: [usize; 2], pool: Pool) -> Result<Tensor<f32, 2>> {
        let [n, m] = self.size();
        self.check(head, &(0..n), &(0..m))?;
        match &self.weights {
            WeightSource::Call(call) => {
                let weights = call.attention.weights(call.inputs.inputs(), call.output()?)?;
                Ok(weights.pooled(0, head, 0..n, 0..m, [height, width], pool)?)
            }
            WeightSource::Stored(weights) => {
                let cell = |at: usize, of: usize, cells: usize| {
                    let edge = |at: usize| (at as u128 * of as u128 / cells as u128) as usize;
                    edge(at)..edge(at + 1).max(edge(at) + 1)
                };
                let covered: [&dyn Fn(usize) -> Range<usize>; 2] = [&|y| cell(y, n, height), &|x| cell(x, m, width)];
                let size = if n == 0 || m == 0 { [0; 2] } else { [height, width] };
                Ok(pool_stored(weights, [head, 0, 0], size, covered, pool))
            }
        }
    }

    /// A short description: `scaled dot · causal`.
    pub fn description(&self) -> String {
        let Some(call) = self.call() else { return "stored weights".into() };
        let Attention { score, mask, select, .. } = &call.attention;
        let mut words = vec![score.name().replace('-', " ")];
        if mask.uses(&qkv::Mask::causal()) {
            words.push("causal".into());
        }
        match select {
            qkv::Select::Soft => {}
            qkv::Select::TopK(k) => words.push(format!("top {k}")),
            qkv::Select::Sparsemax => words.push("sparsemax".into()),
            qkv::Select::Hard(_) => words.push("hard".into()),
            _ => {}
        }
        words.join(" · ")
    }
}

/// Stored weights, pooled; `covered` gives the rows and columns that a cell covers, counted from the corner.
fn pool_stored(
    weights: &Tensor<f32, 3>,
    [head, top, left]: [usize; 3],
    size: [usize; 2],
    covered: [&dyn Fn(usize) -> Range<usize>; 2],
    pool: Pool,
) -> Tensor<f32, 2> {
    Tensor::from_fn(size, |[y, x]| {
        let (rows, cols) = (covered[0](y), covered[1](x));
        let count = (rows.len() * cols.len()) as f32;
        let all = rows.flat_map(|i| cols.clone().map(move |j| [head, top + i, left + j])).map(|at| weights[at]);
        match pool {
            Pool::Max => all.fold(0.0, f32::max),
            Pool::Mean => all.sum::<f32>() / count,
        }
    })
}
