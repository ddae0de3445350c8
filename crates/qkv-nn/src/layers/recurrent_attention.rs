//! The attention of a recurrent decoder, one query per step: Bahdanau's, from the state before the step, and Luong's,
//! from the state after it. Keys are projected once for all steps.

use super::{Builder, Linear};
use crate::float::Float;
use crate::loops::Activation;
use crate::ops::attention::AttendOptions;
use crate::parameters::Init;
use crate::saved_call::ScoreParameters;
use crate::tape::{Tape, Var};
use qkv::{Attention, Score};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Which decoder state is the query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionStyle {
    /// The state before the step; the context is an input of the recurrent unit (Bahdanau et al. 2014,
    /// arXiv:1409.0473).
    #[default]
    Bahdanau,
    /// The state after the step; the context is joined to the state ahead of the output layer (Luong et al. 2015,
    /// arXiv:1508.04025).
    Luong,
}

/// Single-head attention from a decoder's states to an encoder's.
#[derive(Clone, Debug)]
pub struct RecurrentAttention {
    attention: Attention,
    query: Option<Linear>,
    key: Option<Linear>,
    parameters: ScoreParameters,
    /// Predicts the center of local attention.
    center: Option<[Linear; 2]>,
    entropy: f64,
    label: Arc<str>,
}

/// The encoder's states, with their projected keys.
#[derive(Clone, Debug)]
pub struct RecurrentMemory<T: Float> {
    keys: Var<T>,
    values: Var<T>,
    lengths: Option<Vec<usize>>,
}

impl<T: Float> RecurrentMemory<T> {
    /// The encoder's states, `[B, M, C]`.
    pub fn values(&self) -> &Var<T> {
        &self.values
    }

    /// Keeps these sequences in this order, possibly with repetitions, as in beam search. For inference.
    pub fn select(&mut self, tape: &Tape<'_, T>, sequences: &[usize]) {
        self.keys = tape.constant(self.keys.value().select(sequences));
        self.values = tape.constant(self.values.value().select(sequences));
        if let Some(lengths) = &mut self.lengths {
            *lengths = sequences.iter().map(|&b| lengths[b]).collect();
        }
    }

    /// Number of tokens of each sequence, if they are padded.
    pub fn lengths(&self) -> Option<&[usize]> {
        self.lengths.as_deref()
    }
}

impl RecurrentAttention {
    /// Attention from states of width `query` to memories of width `key`. The additive score projects both to `width`;
    /// other scores project the query if the widths differ, except general, which uses its own matrix. With `local`,
    /// two linear maps predict the center (Luong's local-p).
    pub fn new<T: Float>(
        at: &mut Builder<'_, T>,
        attention: &Attention,
        query: usize,
        key: usize,
        width: usize,
        entropy: f64,
    ) -> Self {
        let mut linear = |name: &str, inputs, outputs| Linear::new(&mut at.at(name), inputs, outputs, false);
        let (q, k) = match attention.score {
            Score::Additive => (Some(linear("query", query, width)), Some(linear("key", key, width))),
            Score::General => (None, None),
            _ if query == key => (None, None),
            _ => (Some(linear("query", query, key)), None),
        };
        let center = attention.local.map(|_| [linear("center.hidden", query, width), linear("center.out", width, 1)]);
        let parameters = ScoreParameters {
            w: (attention.score == Score::General).then(|| at.add("score.weight", &[query, key], Init::Xavier)),
            v: (attention.score == Score::Additive)
                .then(|| at.add("score.v", &[width], Init::Uniform((width as f64).powf(-0.5)))),
            scale: (attention.scale == qkv::Scale::Learned).then(|| at.add("score.scale", &[1], Init::Ones)),
            table: attention.bias.reach().map(|reach| at.add("score.relative", &[1, 2 * reach + 1], Init::Zeros)),
            sinks: attention.sinks.then(|| at.add("score.sinks", &[1], Init::Zeros)),
        };
        let (attention, label) = (attention.clone(), at.label());
        RecurrentAttention { attention, query: q, key: k, parameters, center, entropy, label }
    }

    /// Projects the encoder's states `values [B, M, C]`, of which the first `lengths[b]` are not padding, to keys.
    pub fn memory<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        values: Var<T>,
        lengths: Option<&[usize]>,
    ) -> RecurrentMemory<T> {
        let keys = match self.key {
            Some(projection) => projection.forward(tape, &values),
            None => values.clone(),
        };
        RecurrentMemory { keys, values, lengths: lengths.map(<[_]>::to_vec) }
    }

    /// Attends from `states [B, N, C]`, the first at step `start`: `[B, N, C]`.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn forward<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        states: &Var<T>,
        memory: &RecurrentMemory<T>,
        start: usize,
    ) -> qkv::Result<Var<T>> {
        let q = match self.query {
            Some(projection) => projection.forward(tape, states),
            None => states.clone(),
        };
        let center = self.center.map(|[hidden, out]| {
            let hidden = hidden.activated(tape, states, Activation::Tanh, 0.0);
            let fraction = out.activated(tape, &hidden, Activation::Sigmoid, 0.0); // (B, N, 1), between 0 and 1
            let last = |length: usize| T::of_f64(length.saturating_sub(1) as f64);
            let ends: Vec<T> = match &memory.lengths {
                Some(lengths) => lengths.iter().map(|&length| last(length)).collect(),
                None => vec![last(memory.keys.shape()[1]); states.shape()[0]],
            };
            tape.scale(fraction, &ends)
        });
        let options = AttendOptions {
            label: &self.label,
            parameters: self.parameters,
            key_lengths: memory.lengths.as_deref(),
            entropy: self.entropy,
            start,
            ..AttendOptions::new(&self.attention)
        };
        tape.attend(&q, &memory.keys, &memory.values, center.as_ref(), &options)
    }
}
