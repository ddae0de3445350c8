//! Attention as a recurrent decoder uses it, one query a step: Bahdanau's, which asks before the unit moves, and Luong's, which
//! asks after. Where a key's part of the score is a map of its own, it is made once for all steps.

use super::{Builder, Linear};
use crate::float::Float;
use crate::ops::attention::{Attend, Heads, Scoring};
use crate::ops::linear::Activation;
use crate::parameters::Init;
use crate::tape::{Tape, Var};
use qkv::{Attention, Score};
use serde::{Deserialize, Serialize};

/// Which state asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionStyle {
    /// The state before the step; what it finds goes into the unit (Bahdanau et al. 2014, arXiv:1409.0473).
    #[default]
    Bahdanau,
    /// The state after the step; what it finds joins the state in front of the output (Luong et al. 2015, arXiv:1508.04025).
    Luong,
}

/// One head of attention from a decoder's state to an encoder's.
#[derive(Clone, Debug)]
pub struct RecurrentAttention {
    attention: Attention,
    query: Option<Linear>,
    key: Option<Linear>,
    scoring: Scoring,
    /// Predicts where to look, for local attention.
    center: Option<[Linear; 2]>,
    entropy: f64,
}

/// What the steps of one batch look at.
#[derive(Clone, Debug)]
pub struct RecurrentMemory<T: Float> {
    keys: Var<T>,
    values: Var<T>,
    lengths: Option<Vec<usize>>,
}

impl<T: Float> RecurrentMemory<T> {
    /// What it gives back, `[B, M, C]`.
    pub fn values(&self) -> &Var<T> {
        &self.values
    }

    /// Keeps these sequences, in this order, for inference.
    pub fn select(&mut self, tape: &Tape<'_, T>, sequences: &[usize]) {
        self.keys = tape.constant(self.keys.value().select(sequences));
        self.values = tape.constant(self.values.value().select(sequences));
        if let Some(lengths) = &mut self.lengths {
            *lengths = sequences.iter().map(|&b| lengths[b]).collect();
        }
    }

    /// How many of its tokens count.
    pub fn lengths(&self) -> Option<&[usize]> {
        self.lengths.as_deref()
    }
}

impl RecurrentAttention {
    /// From states of width `query` to memories of width `key`. The additive score projects both to `width`; dot and
    /// scaled-dot project the query where the widths differ; general has its matrix. With `local`, two maps predict the centre
    /// (Luong's local-p).
    ///
    /// # Errors
    /// Where the score is none of these.
    pub fn new<T: Float>(
        at: &mut Builder<'_, T>,
        attention: &Attention,
        query: usize,
        key: usize,
        width: usize,
        entropy: f64,
    ) -> qkv::Result<Self> {
        let mut map = |name: &str, inputs, outputs, bias| Linear::new(&mut at.at(name), inputs, outputs, bias);
        let (q, k) = match attention.score {
            Score::Additive => (Some(map("query", query, width, false)), Some(map("key", key, width, false))),
            Score::General => (None, None),
            _ if query == key => (None, None),
            _ => (Some(map("query", query, key, false)), None),
        };
        let center =
            attention.local.map(|_| [map("center.hidden", query, width, false), map("center.out", width, 1, false)]);
        let scoring = Scoring {
            w: (attention.score == Score::General).then(|| at.add("score.weight", &[query, key], Init::Xavier)),
            v: (attention.score == Score::Additive)
                .then(|| at.add("score.v", &[width], Init::Uniform((width as f64).powf(-0.5)))),
            scale: (attention.scale == qkv::Scale::Learned).then(|| at.add("score.scale", &[1], Init::Ones)),
            table: attention.bias.reach().map(|reach| at.add("score.relative", &[1, 2 * reach + 1], Init::Zeros)),
            sinks: attention.sinks.then(|| at.add("score.sinks", &[1], Init::Zeros)),
        };
        Ok(RecurrentAttention { attention: attention.clone(), query: q, key: k, scoring, center, entropy })
    }

    /// What the steps will look at: `values [B, M, C]`, of which `lengths` count.
    pub fn remember<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        values: Var<T>,
        lengths: Option<&[usize]>,
    ) -> RecurrentMemory<T> {
        let keys = match self.key {
            Some(map) => map.forward(tape, &values),
            None => values.clone(),
        };
        RecurrentMemory { keys, values, lengths: lengths.map(<[_]>::to_vec) }
    }

    /// Looks from `states [B, N, C]`, the first of which is step `from`: `[B, N, C]`.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn forward<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        states: &Var<T>,
        memory: &RecurrentMemory<T>,
        from: usize,
    ) -> qkv::Result<Var<T>> {
        let q = match self.query {
            Some(map) => map.forward(tape, states),
            None => states.clone(),
        };
        let center = self.center.map(|[hidden, out]| {
            let hidden = hidden.activated(tape, states, Activation::Tanh, 0.0);
            let part = out.activated(tape, &hidden, Activation::Sigmoid, 0.0); // (B, N, 1), between 0 and 1
            let most = memory.keys.shape()[1];
            let last = |length: usize| T::of_f64(length.saturating_sub(1) as f64);
            let ends: Vec<T> = match &memory.lengths {
                Some(lengths) => lengths.iter().map(|&length| last(length)).collect(),
                None => vec![last(most); states.shape()[0]],
            };
            tape.scale(part, &ends)
        });
        let how = Attend {
            heads: Heads { query: 1, key: 1 },
            scoring: self.scoring,
            lengths: memory.lengths.as_deref(),
            entropy: self.entropy,
            from,
            ..Attend::new(&self.attention)
        };
        tape.attend(&q, &memory.keys, &memory.values, center.as_ref(), &how)
    }
}
