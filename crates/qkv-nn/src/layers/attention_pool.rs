//! Pools a sequence into one row by attention from a learned query (Yang et al. 2016, "Hierarchical attention
//! networks"). With the additive score that is `softmax(vᵀ tanh(W xᵢ + b))`, `b` being the query.

use super::{Builder, Linear};
use crate::float::Float;
use crate::ops::attention::AttendOptions;
use crate::ops::embedding::Positions;
use crate::parameters::{Init, Param};
use crate::saved_call::ScoreParameters;
use crate::tape::{Tape, Var};
use qkv::{Attention, Bias, Mask, Scale, Score};
use std::sync::Arc;

/// Attention from a learned query to the tokens of a sequence.
#[derive(Clone, Debug)]
pub struct AttentionPool {
    attention: Attention,
    key: Linear,
    query: Param,
    parameters: ScoreParameters,
    entropy: f64,
    label: Arc<str>,
}

impl AttentionPool {
    /// A pool over rows of width `inputs`, scored in width `width`. Parameters: `key`, `query`, and those of the score.
    ///
    /// # Errors
    /// If the description needs data that a layer does not have, or has a mask or a bias, since the query has no
    /// position among the tokens.
    pub fn new<T: Float>(
        at: &mut Builder<'_, T>,
        attention: &Attention,
        inputs: usize,
        width: usize,
    ) -> qkv::Result<Self> {
        super::multi_head::check(attention)?;
        if attention.mask != Mask::Full || attention.bias != Bias::none() {
            return Err(qkv::Error::Value {
                name: "attention",
                found: "one with a mask or a bias".into(),
                expected: "none: the one query has no position among the tokens".into(),
            });
        }
        let key = Linear::new(&mut at.at("key"), inputs, width, false);
        let additive = attention.score == Score::Additive;
        // The query of an additive score is a bias and starts at zero; with any other score, a zero query would make
        // all scores zero.
        let init = if additive { Init::Zeros } else { Init::Normal(1.0) };
        let query = at.add("query", &[1, width], init);
        let mut add = |needed: bool, name: &str, shape: &[usize], init| needed.then(|| at.add(name, shape, init));
        let parameters = ScoreParameters {
            w: add(attention.score == Score::General, "score.weight", &[width, width], Init::Xavier),
            v: add(additive, "score.v", &[width], Init::Uniform((width as f64).powf(-0.5))),
            scale: add(attention.scale == Scale::Learned, "score.scale", &[1], Init::Ones),
            sinks: add(attention.sinks, "score.sinks", &[1], Init::Zeros),
            table: None,
        };
        Ok(AttentionPool { attention: attention.clone(), key, query, parameters, entropy: 0.0, label: at.label() })
    }

    /// The same pool with an entropy penalty: see [`AttendOptions::entropy`].
    pub fn penalized(self, entropy: f64) -> Self {
        AttentionPool { entropy, ..self }
    }

    /// Pools sequences `x [B, N, C]`, of which the first `lengths[b]` tokens are not padding: `[B, 1, C]`. A sequence
    /// without tokens gives zeros.
    ///
    /// # Errors
    /// As [`Tape::attend`].
    pub fn forward<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        lengths: Option<&[usize]>,
    ) -> qkv::Result<Var<T>> {
        let keys = self.key.forward(tape, x); // (B, N, A)
        let first_row = vec![0; x.shape()[0]];
        let query = tape.embedding(&first_row, 1, self.query, 1.0, Positions::None, 0); // (B, 1, A)
        let options = AttendOptions {
            label: &self.label,
            parameters: self.parameters,
            key_lengths: lengths,
            entropy: self.entropy,
            ..AttendOptions::new(&self.attention)
        };
        tape.attend(&query, &keys, x, None, &options)
    }
}
