//! The scores of `qkv eval` as text or as one JSON object, with the signatures of sacrebleu.

use qkv_models::metrics::{bleu, chrf, exact};
use serde::Serialize;
use std::fmt;

/// All scores.
#[derive(Debug, Serialize)]
pub(crate) struct EvalReport {
    sentences: usize,
    bleu: BleuJson,
    chrf: ChrfJson,
    exact: ExactJson,
    #[serde(flatten)]
    model: Option<ModelScores>,
}

#[derive(Debug, Serialize)]
struct BleuJson {
    score: f64,
    precisions: [f64; 4],
    brevity: f64,
    length: usize,
    reference_length: usize,
    signature: String,
}

#[derive(Debug, Serialize)]
struct ChrfJson {
    score: f64,
    signature: String,
}

#[derive(Debug, Serialize)]
struct ExactJson {
    score: f64,
    right: usize,
}

/// The scores that need a model.
#[derive(Debug, Serialize)]
pub(crate) struct ModelScores {
    pub model: String,
    /// Cross-entropy per target token.
    pub loss: f64,
    pub perplexity: f64,
    /// The time spent translating.
    pub seconds: f64,
    pub sentences_per_second: f64,
}

impl EvalReport {
    pub fn new(bleu: &bleu::Bleu, chrf: &chrf::Chrf, exact: exact::Exact, model: Option<ModelScores>) -> EvalReport {
        let version = concat!("version:qkv-", env!("CARGO_PKG_VERSION"));
        EvalReport {
            sentences: exact.all,
            bleu: BleuJson {
                score: bleu.score,
                precisions: bleu.precisions,
                brevity: bleu.brevity,
                length: bleu.length,
                reference_length: bleu.reference_length,
                signature: format!("BLEU|{}|{version}", bleu.signature()),
            },
            chrf: ChrfJson { score: chrf.score, signature: format!("chrF2|{}|{version}", chrf.signature()) },
            exact: ExactJson { score: exact.score(), right: exact.right },
            model,
        }
    }

    /// One JSON object, on one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a report is plain data") + "\n"
    }
}

impl fmt::Display for EvalReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EvalReport { bleu, chrf, exact, .. } = self;
        let [a, b, c, d] = bleu.precisions;
        let (length, reference) = (bleu.length, bleu.reference_length);
        let ratio = length as f64 / reference.max(1) as f64;
        writeln!(
            f,
            "{} = {:.2} {a:.1}/{b:.1}/{c:.1}/{d:.1} (BP = {:.3} ratio = {ratio:.3} hyp_len = {length} ref_len = {reference})",
            bleu.signature, bleu.score, bleu.brevity
        )?;
        writeln!(f, "{} = {:.2}", chrf.signature, chrf.score)?;
        writeln!(f, "exact match = {:.2} % ({} of {})", exact.score, exact.right, self.sentences)?;
        if let Some(model) = &self.model {
            writeln!(f, "loss = {:.4} per token, perplexity = {:.3}", model.loss, model.perplexity)?;
            let ModelScores { seconds, sentences_per_second, .. } = model;
            writeln!(f, "speed = {sentences_per_second:.1} sentences/s ({} in {seconds:.1} s)", self.sentences)?;
        }
        Ok(())
    }
}
