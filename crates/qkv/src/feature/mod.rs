//! The linear engine: attention whose weight is a product of features, `φ(q)·φ(k)`, forward and backward, in time and
//! memory linear in the sequence.
//!
//! | module | owns |
//! | --- | --- |
//! | [`map`] | the feature maps: [`Features`](crate::Features) of rows |
//! | [`orthogonal`] | the random rows of FAVOR+ |
//! | [`sequence`] | sequences as prefixes: keys in order, how many each query sees, and the splits |
//! | [`chunk`] | a chunk of rows, and the state that chunks are summed into |
//! | [`sums`] | states of long sequences, computed in parallel and summed in order |
//! | [`forward`](mod@forward), [`backward`](mod@backward) | the two passes |
//! | [`recurrent`] | the same as a recurrence, for decoding |
//! | [`weights`] | weights on demand |
//!
//! Determinism rests on three rules: chunks and spans have fixed sizes and start at the first key of a sequence; states
//! are summed in order; whether a row is rescaled depends only on that row and the keys it sees.

mod backward;
mod chunk;
mod forward;
mod map;
mod orthogonal;
mod recurrent;
mod sequence;
mod sums;
mod weights;

use crate::attention::Attention;
use crate::bias::Bias;
use crate::error::{Error, Result};
use crate::features::Features;
use crate::score::{Scale, Score};
use crate::select::Select;
use crate::tensor::checked_len;

pub(crate) use backward::backward;
pub(crate) use forward::{forward, sizes_of};
pub(crate) use orthogonal::orthogonal_rows;
pub use recurrent::LinearState;
pub(crate) use weights::Weigher;

/// The maximum number of features of FAVOR+: with that many, softmax attention itself costs less.
const MOST: usize = 1 << 16;

/// Refuses settings that linear attention does not support, if the score is linear.
pub(crate) fn check(attention: &Attention, d: usize, dv: usize) -> Result<()> {
    let Score::Linear(features) = attention.score else { return Ok(()) };
    let Attention { scale, temperature, softcap, bias, dropout, sinks, entropy, select, local, .. } = attention;
    let no_score = "it has no score to change, only features";
    let no_weight = "it never makes a single weight";
    for (asked, second, reason) in [
        (temperature.is_some(), "a temperature", no_score),
        (softcap.is_some(), "a soft-cap", no_score),
        (*bias != Bias::default(), "a bias", no_score),
        (*scale == Scale::Learned, "a learned scale", no_score),
        (dropout.is_some(), "dropout", no_weight),
        (*sinks, "sinks", no_weight),
        (*entropy, "an entropy", no_weight),
        (*select != Select::Soft, "a selection other than softmax", no_weight),
        (local.is_some(), "predictive local attention", no_weight),
    ] {
        if asked {
            return Err(Error::Conflict { first: "linear attention", second, reason });
        }
    }
    sequence::PrefixMask::new(&attention.mask)?;
    match (features, scale) {
        (Features::Favor { count, .. }, _) if count == 0 || count > MOST => {
            Err(Error::value("favor", count, format!("1 to {MOST} features")))
        }
        (Features::Favor { .. }, Scale::Fixed(scale)) if !(scale.is_finite() && *scale > 0.0) => {
            Err(Error::value("scale", scale, "a finite number above 0, of which FAVOR+ takes the root"))
        }
        (Features::Elu | Features::Relu, Scale::Fixed(_)) => Err(Error::Conflict {
            first: "linear attention",
            second: "a scale",
            reason: "elu and ReLU features have none, only FAVOR+ has",
        }),
        _ => Ok(()),
    }?;
    checked_len::<f64>("features", &[features.count(d).max(1), dv.max(d).max(1) + 64])?;
    Ok(())
}
