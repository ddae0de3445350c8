//! A sequence as one row, by attention: a query that is learned and asks every sequence the same (Yang et al. 2016, "Hierarchical
//! attention networks"). With the additive score that is `softmax(vᵀ tanh(W xᵢ + b))`, `b` being the query.

use super::{Builder, Linear};
use crate::float::Float;
use crate::ops::attention::{Attend, Scoring};
use crate::ops::embedding::Positions;
use crate::parameters::{Init, Param};
use crate::tape::{Tape, Var};
use qkv::{Attention, Bias, Mask, Scale, Score};

/// Attention from a learned query to each token of a sequence.
#[derive(Clone, Debug)]
pub struct AttentionPool {
    attention: Attention,
    key: Linear,
    query: Param,
    scoring: Scoring,
    entropy: f64,
}

impl AttentionPool {
    /// Over rows of `inputs`, which are compared with the query in `width`. Parameters: `key`, `query`, and what the score asks
    /// for.
    ///
    /// # Errors
    /// Where the description asks for data that a layer has not, or for a mask or a bias: the one query
    /// stands nowhere among the tokens.
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
                expected: "none: one query, which stands nowhere, asks all tokens".into(),
            });
        }
        let key = Linear::new(&mut at.at("key"), inputs, width, false);
        let additive = attention.score == Score::Additive;
        // The bias of an additive score begins at nothing; any other score needs something to compare with.
        let begin = if additive { Init::Zeros } else { Init::Normal(1.0) };
        let query = at.add("query", &[1, width], begin);
        let mut asked = |wanted: bool, name: &str, shape: &[usize], init| wanted.then(|| at.add(name, shape, init));
        let scoring = Scoring {
            w: asked(attention.score == Score::General, "score.weight", &[width, width], Init::Xavier),
            v: asked(additive, "score.v", &[width], Init::Uniform((width as f64).powf(-0.5))),
            scale: asked(attention.scale == Scale::Learned, "score.scale", &[1], Init::Ones),
            sinks: asked(attention.sinks, "score.sinks", &[1], Init::Zeros),
            table: None,
        };
        Ok(AttentionPool { attention: attention.clone(), key, query, scoring, entropy: 0.0 })
    }

    /// With a penalty on weights that spread. See [`Attend::entropy`].
    pub fn penalised(self, entropy: f64) -> Self {
        AttentionPool { entropy, ..self }
    }

    /// What each sequence of `x [B, N, C]`, of which `lengths` count, comes to: `[B, 1, C]`. One without tokens is zeros.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn forward<T: Float>(
        &self,
        tape: &mut Tape<'_, T>,
        x: &Var<T>,
        lengths: Option<&[usize]>,
    ) -> qkv::Result<Var<T>> {
        let keys = self.key.forward(tape, x); // (B, N, A)
        let asked = vec![0; x.shape()[0]];
        let query = tape.embedding(&asked, 1, self.query, 1.0, Positions::None, 0); // (B, 1, A)
        let how = Attend { scoring: self.scoring, lengths, entropy: self.entropy, ..Attend::new(&self.attention) };
        tape.attend(&query, &keys, x, None, &how)
    }
}
