//! The table `[train]` of a recipe: optimizer, schedule, validation and checkpoints.

use super::{Metric, Objective};
use crate::schedule::Schedule;
use qkv_nn::{AdamW, Precision};
use serde::{Deserialize, Serialize};

/// Settings of training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Training {
    /// The objective, if not the one that the data implies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub objective: Option<Objective>,
    /// Number of steps.
    pub steps: u64,
    /// Tokens per batch: pairs × the longest side among them.
    pub tokens: usize,
    /// Pairs with a longer side, in tokens, are left out.
    pub longest: usize,
    /// Gradient accumulation: batches per step.
    pub accumulate: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Steps of linear warmup.
    pub warmup: u64,
    /// Schedule after the warmup.
    pub schedule: Schedule,
    /// Settings of AdamW.
    pub adam: AdamW,
    /// Largest gradient norm; larger gradients are scaled down to it. 0 disables clipping.
    pub clip: f64,
    /// Label smoothing.
    pub smoothing: f64,
    /// Weight of the policy gradient of hard attention that samples its choices and is not straight-through (REINFORCE,
    /// as in Xu et al. 2015, arXiv:1502.03044).
    pub reinforce: f64,
    /// Share of sequences that use soft instead of hard attention in such training.
    pub expected: f64,
    /// Fraction of words replaced by UNK during training, in documents and in pairs: in the source and in the decoder's
    /// input (Sennrich et al. 2016, arXiv:1606.02891).
    pub word_dropout: f64,
    /// Probability that a merge is skipped when pairs are tokenized for a batch: BPE-dropout (Provilkov et al. 2020,
    /// arXiv:1910.13267).
    pub bpe_dropout: f64,
    /// Largest random shift of training images with a class or captions, in pixels.
    pub shift: usize,
    /// Whether training images are mirrored at random: horizontally, and those with boxes also vertically.
    pub mirror: bool,
    /// Probability that a rectangle of a training image with a class is erased (Zhong et al. 2017, arXiv:1708.04896).
    pub erase: f64,
    /// α of mixup: two images with classes and their losses are mixed by a share from Beta(α, α) (Zhang et al. 2017,
    /// arXiv:1710.09412); 0 mixes none.
    pub mixup: f64,
    /// Largest random change of scale of training images with boxes or captions, as a fraction: the image is cropped or
    /// padded. Images with captions are taken to show text and only become smaller.
    pub zoom: f64,
    /// Largest random change of brightness and contrast of training images, as a fraction.
    pub color: f64,
    /// Decay of the exponential moving average of the weights, which inference uses; 0 uses the weights themselves.
    pub average: f64,
    /// Arithmetic of matrix products.
    pub precision: Precision,
    /// Trains only this many last layers and what follows them; 0 trains all.
    pub last_layers: usize,
    /// Parameters that are not trained: `embeddings`, or names and patterns as in `lora.targets`.
    pub freeze: Vec<String>,
    /// Factor of the learning rate from each layer to the one below it (Howard and Ruder 2018); with 1, all have the
    /// same rate.
    pub layer_decay: f64,
    /// Packs conversations into one row without padding; attention stays within each.
    pub pack: bool,
    /// Gradient checkpointing: layers save only their inputs and are recomputed in the backward pass.
    pub recompute: bool,
    /// Steps between validations.
    pub validate: u64,
    /// Sentences translated per validation.
    pub validate_sentences: usize,
    /// Metric that decides which weights are best.
    pub metric: Metric,
    /// Validations without improvement after which training stops; 0 never stops early.
    pub patience: u64,
    /// Steps between checkpoints.
    pub save: u64,
    /// Number of checkpoints to keep.
    pub keep: usize,
    /// Steps between lines of progress.
    pub log: u64,
}

impl Default for Training {
    fn default() -> Self {
        Training {
            objective: None,
            steps: 10_000,
            tokens: 4096,
            longest: 128,
            accumulate: 1,
            lr: 1e-3,
            warmup: 1000,
            schedule: Schedule::InverseSqrt,
            adam: AdamW::default(),
            clip: 1.0,
            smoothing: 0.1,
            reinforce: 1.0,
            expected: 0.5,
            word_dropout: 0.0,
            bpe_dropout: 0.0,
            shift: 0,
            mirror: false,
            erase: 0.0,
            mixup: 0.0,
            zoom: 0.0,
            color: 0.0,
            average: 0.999,
            precision: Precision::F32,
            last_layers: 0,
            freeze: Vec::new(),
            layer_decay: 1.0,
            pack: false,
            recompute: false,
            validate: 500,
            validate_sentences: 500,
            metric: Metric::Bleu,
            patience: 0,
            save: 500,
            keep: 2,
            log: 50,
        }
    }
}

impl Training {
    /// The learning rate of a step.
    pub(crate) fn rate(&self, step: u64) -> f64 {
        self.lr * self.schedule.factor(step, self.warmup, self.steps)
    }

    /// The decay of the running average at a step: smaller in the first steps, so that the average follows faster.
    pub(crate) fn average_decay(&self, step: u64) -> f64 {
        self.average.min((1.0 + step as f64) / (10.0 + step as f64))
    }
}
