//! **Select**: how do scores become weights? By softmax, with dropout and sinks where they are asked for.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Attention dropout (Srivastava et al. 2014; Vaswani et al. 2017): each weight is dropped with probability `p` and what
/// is kept is scaled up. Which are dropped is a pure function of seed, sequence, query head, query and key: the map is
/// written down in [`qkv_simd::philox`], and every device draws the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// The probability of dropping a weight, from 0 up to but not including 1; kept to 1/65,536.
    pub p: f64,
    /// The seed of the draw.
    pub seed: u64,
}

impl Dropout {
    /// A weight whose 16 random bits are below this is dropped.
    pub(crate) fn threshold(self) -> u32 {
        (self.p * 65536.0).round().min(65535.0) as u32
    }

    /// What a kept weight is multiplied by: one over the probability, as the threshold has it, of being kept.
    pub(crate) fn kept_scale(self) -> f64 {
        65536.0 / (65536.0 - f64::from(self.threshold()))
    }

    pub(crate) fn check(self) -> Result<()> {
        match self.p {
            p if (0.0..1.0).contains(&p) => Ok(()),
            p => Err(Error::value("dropout", p, "a probability, at least 0 and less than 1")),
        }
    }
}
