//! The metric of validation, and the objective if the data leaves a choice.

use serde::{Deserialize, Serialize};

/// The metric that decides which weights are best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Metric {
    /// BLEU as sacrebleu computes it.
    #[default]
    Bleu,
    /// chrF as sacrebleu computes it.
    Chrf,
    /// Fraction of exact matches, or accuracy of labels.
    Exact,
    /// F1 of classes, entities or answers.
    F1,
    /// Loss on the dev set; lower is better.
    Loss,
}

/// The objective, if the data leaves a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Masked language modelling (BERT), for an encoder on plain text: 15 % of the tokens are predicted, of which 80 %
    /// are replaced by a mask and 10 % by another token.
    Mlm,
}
