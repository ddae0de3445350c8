//! One attention of a recording, and its weights: recomputed exactly from queries, keys and the log-sum-exp, or as a file gave
//! them. Rows, rectangles and pictures are all that anyone asks for; where they come from is known here alone.

use qkv::{Attention, Output, OwnedInputs, Pool, Tensor};
use qkv_models::{Error, Result};
use std::ops::Range;

/// One attention: some heads, each from queries to keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Its name, as the model's parameters have it: `decoder.layers.1.cross_attn`.
    pub name: String,
    /// The part of the model that it belongs to.
    pub group: String,
    /// Which side of the recording the rows stand for.
    pub queries: usize,
    /// Which side the columns stand for.
    pub keys: usize,
    /// How its weights are known.
    pub seen: Seen,
    /// How much the loss depends on each head, where it is known.
    pub importance: Option<Vec<f64>>,
}

/// How weights are known.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    /// By what they are computed from, for one sequence.
    Computed(Box<Computed>),
    /// As they are, `[H, N, M]`.
    Given(Tensor<f32, 3>),
}

/// A call of an attention, kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Computed {
    /// What was computed.
    pub attention: Attention,
    /// From what; one sequence.
    pub inputs: OwnedInputs<f32>,
    /// And what was kept of what came out.
    pub output: Output<f32>,
}

impl Layer {
    /// How many heads.
    pub fn heads(&self) -> usize {
        match &self.seen {
            Seen::Computed(call) => call.inputs.q.shape()[1],
            Seen::Given(weights) => weights.shape()[0],
        }
    }

    /// Queries and keys.
    pub fn size(&self) -> [usize; 2] {
        match &self.seen {
            Seen::Computed(call) => [call.inputs.q.shape()[2], call.inputs.k.shape()[2]],
            Seen::Given(weights) => [weights.shape()[1], weights.shape()[2]],
        }
    }

    /// What is known of how it was computed.
    pub fn computed(&self) -> Option<&Computed> {
        match &self.seen {
            Seen::Computed(call) => Some(call),
            Seen::Given(_) => None,
        }
    }

    /// The key at which a query stands, where rows and columns stand for the same tokens.
    pub fn place(&self, query: usize) -> Option<usize> {
        let [n, m] = self.size();
        let at = match &self.seen {
            Seen::Given(_) => query as i64,
            Seen::Computed(call) => match call.attention.place {
                qkv::Place::Start => query as i64,
                qkv::Place::End => query as i64 + m as i64 - n as i64,
                qkv::Place::Offset(offset) => query as i64 + offset,
                qkv::Place::Given => call.inputs.positions.as_ref()?[query],
            },
        };
        usize::try_from(at).ok().filter(|&at| at < m)
    }

    fn check(&self, head: usize, rows: &Range<usize>, cols: &Range<usize>) -> Result<()> {
        let ([n, m], heads) = (self.size(), self.heads());
        let within = |range: &Range<usize>, limit| range.start <= range.end && range.end <= limit;
        match () {
            () if head >= heads => Err(Error::invalid(format!("there is no head {head}, only {heads} from 0"))),
            () if !within(rows, n) => Err(Error::invalid(format!("rows {rows:?} are not within 0..{n}"))),
            () if !within(cols, m) => Err(Error::invalid(format!("columns {cols:?} are not within 0..{m}"))),
            () => Ok(()),
        }
    }

    /// The weights of some queries to some keys, `[rows, cols]`.
    ///
    /// # Errors
    /// Where there is no such head, row or column.
    pub fn rectangle(&self, head: usize, rows: Range<usize>, cols: Range<usize>) -> Result<Tensor<f32, 2>> {
        self.check(head, &rows, &cols)?;
        match &self.seen {
            Seen::Computed(call) => {
                let weights = call.attention.weights(call.inputs.inputs(), &call.output)?;
                Ok(weights.rectangle(0, head, rows, cols)?)
            }
            Seen::Given(weights) => {
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

    /// The weights of the queries that are listed, `[rows, M]`.
    ///
    /// # Errors
    /// As [`rectangle`](Layer::rectangle).
    pub fn rows_at(&self, head: usize, rows: &[usize]) -> Result<Tensor<f32, 2>> {
        self.check(head, &(0..rows.iter().max().map_or(0, |most| most + 1)), &(0..0))?;
        match &self.seen {
            Seen::Computed(call) => {
                Ok(call.attention.weights(call.inputs.inputs(), &call.output)?.rows_at(0, head, rows)?)
            }
            Seen::Given(weights) => {
                Ok(Tensor::from_fn([rows.len(), self.size()[1]], |[r, j]| weights[[head, rows[r], j]]))
            }
        }
    }

    /// A rectangle as a picture whose cells each cover `each` weights both ways, the last ones what is left. With `most`, no
    /// more than so many rows of a cell are looked at: quick, and not exact.
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
        most: Option<usize>,
    ) -> Result<Tensor<f32, 2>> {
        self.check(head, &rows, &cols)?;
        match &self.seen {
            Seen::Computed(call) => {
                let weights = call.attention.weights(call.inputs.inputs(), &call.output)?;
                Ok(weights.map(0, head, rows, cols, each, pool, most)?)
            }
            Seen::Given(weights) => {
                let (down, across, [n, m]) = (each[0].max(1), each[1].max(1), [rows.len(), cols.len()]);
                let covered: [&dyn Fn(usize) -> Range<usize>; 2] =
                    [&|y| y * down..((y + 1) * down).min(n), &|x| x * across..((x + 1) * across).min(m)];
                let size = [n.div_ceil(down), m.div_ceil(across)];
                Ok(pictured(weights, [head, rows.start, cols.start], size, covered, pool))
            }
        }
    }

    /// All of a head as a picture of `[height, width]` cells, each the largest or the mean of the weights it covers; where the
    /// picture is finer than the weights, they repeat.
    ///
    /// # Errors
    /// As [`rectangle`](Layer::rectangle).
    pub fn pooled(&self, head: usize, [height, width]: [usize; 2], pool: Pool) -> Result<Tensor<f32, 2>> {
        let [n, m] = self.size();
        self.check(head, &(0..n), &(0..m))?;
        match &self.seen {
            Seen::Computed(call) => {
                let weights = call.attention.weights(call.inputs.inputs(), &call.output)?;
                Ok(weights.pooled(0, head, 0..n, 0..m, [height, width], pool)?)
            }
            Seen::Given(weights) => {
                let cell = |at: usize, of: usize, cells: usize| {
                    let edge = |at: usize| (at as u128 * of as u128 / cells as u128) as usize;
                    edge(at)..edge(at + 1).max(edge(at) + 1)
                };
                let covered: [&dyn Fn(usize) -> Range<usize>; 2] = [&|y| cell(y, n, height), &|x| cell(x, m, width)];
                let size = if n == 0 || m == 0 { [0; 2] } else { [height, width] };
                Ok(pictured(weights, [head, 0, 0], size, covered, pool))
            }
        }
    }

    /// In a few words: `scaled dot · causal`.
    pub fn description(&self) -> String {
        let Some(call) = self.computed() else { return "given weights".into() };
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

/// Weights that were given, as a picture: which of them a cell covers, counted from the corner, is said for both ways.
fn pictured(
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
