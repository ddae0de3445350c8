//! The table `[lora]` of a recipe: low-rank adapters, trained instead of all weights.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Settings of low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lora {
    /// Rank of the adapters, `r`.
    pub rank: usize,
    /// Adapters are scaled by `alpha / r`.
    pub alpha: f64,
    /// Dropout of the adapters' inputs.
    pub dropout: f64,
    /// The matrices that get an adapter: the last parts of their names, qkv's or the file's (`q_proj`, `mlp.down_proj`,
    /// `attention.self.query`), patterns with `*`, or `all-linear`.
    pub targets: Vec<String>,
    /// Rounds the matrices of the layers to bf16 (16), or to blocks of 8 or 4 bits (QLoRA; Dettmers et al. 2023,
    /// arXiv:2305.14314). Matrices that the file stores in fewer than 32 bits stay as they are whether or not this is
    /// set, unless it asks for blocks and they have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits: Option<u32>,
    /// Whether the model is written with the adapters merged into its matrices, instead of only the adapters.
    pub merge: bool,
}

impl Default for Lora {
    fn default() -> Self {
        let targets = ["q_proj", "v_proj"].map(str::to_owned).to_vec();
        Lora { rank: 8, alpha: 16.0, dropout: 0.0, targets, bits: None, merge: false }
    }
}

impl Lora {
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |name: &str, found: String, expected: &str| {
            Err(Error::invalid(format!("`lora.{name}` is {found}, expected {expected}")))
        };
        if !(1..=1 << 12).contains(&self.rank) {
            return refuse("rank", self.rank.to_string(), "between 1 and 4096");
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return refuse("alpha", self.alpha.to_string(), "above 0");
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return refuse("dropout", self.dropout.to_string(), "at least 0 and less than 1");
        }
        if self.bits.is_some_and(|bits| ![4, 8, 16].contains(&bits)) {
            return refuse("bits", format!("{:?}", self.bits.unwrap_or(0)), "4, 8 or 16");
        }
        if self.targets.is_empty() {
            return refuse("targets", "empty".into(), "names of matrices such as `q_proj`");
        }
        Ok(())
    }
}
