//! The table `[parallel]` of a recipe: what is divided over the ranks of a run, besides its micro-batches.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Whether something is whole on one rank or divided over all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Division {
    /// Whole.
    #[default]
    Whole,
    /// Each rank has a part.
    Sharded,
}

/// What is divided over ranks, besides micro-batches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parallel {
    /// The optimizer's state and the running average of the weights (ZeRO-1; Rajbhandari et al. 2019,
    /// arXiv:1910.02054): `sharded` saves memory, and changes no bit.
    pub optimizer: Division,
    /// The files of checkpoints: `sharded` are written by all ranks, into a folder that they share.
    pub checkpoint: Division,
    /// How many ranks share the sequences of a micro-batch, for decoder-only models: sums over tokens then have another
    /// order, which depends on this number alone.
    pub context: usize,
}

impl Default for Parallel {
    fn default() -> Self {
        Parallel { optimizer: Division::Whole, checkpoint: Division::Whole, context: 1 }
    }
}

impl Parallel {
    pub(super) fn is_default(&self) -> bool {
        *self == Parallel::default()
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.context {
            1..=1024 => Ok(()),
            found => Err(Error::invalid(format!("`parallel.context` is {found}, expected between 1 and 1024"))),
        }
    }
}
