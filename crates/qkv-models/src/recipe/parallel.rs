//! The table `[parallel]` of a recipe: what is sharded over the ranks of a run besides its micro-batches.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Whether something is kept whole or sharded over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Division {
    /// Kept whole.
    #[default]
    Whole,
    /// Each rank has a part.
    Sharded,
}

/// What is sharded over ranks besides micro-batches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parallel {
    /// The optimizer's state and the running average of the weights (ZeRO-1; Rajbhandari et al. 2019,
    /// arXiv:1910.02054): `sharded` saves memory and gives the same bits.
    pub optimizer: Division,
    /// The files of checkpoints: if `sharded`, all ranks write them, into a folder that they share.
    pub checkpoint: Division,
    /// How many ranks share the sequences of a micro-batch, for decoder-only models. Sums over tokens then have another
    /// order, which depends only on this number.
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
