//! What `qkv eval` found: the same numbers as one JSON object or as lines, with signatures as sacrebleu writes them.

use qkv_models::metrics::{bleu, chrf, exact};
use serde::Serialize;
use std::fmt;

/// All that was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    sentences: usize,
    bleu: Bleu,
    chrf: Chrf,
    exact: Exact,
    #[serde(flatten)]
    model: Option<Model>,
}

#[derive(Debug, Serialize)]
struct Bleu {
    score: f64,
    precisions: [f64; 4],
    brevity: f64,
    length: usize,
    reference_length: usize,
    signature: String,
}

#[derive(Debug, Serialize)]
struct Chrf {
    score: f64,
    signature: String,
}

#[derive(Debug, Serialize)]
struct Exact {
    score: f64,
    right: usize,
}

/// What can be said of a model alone.
#[derive(Debug, Serialize)]
pub(crate) struct Model {
    pub model: String,
    /// Of the targets, a token.
    pub loss: f64,
    pub perplexity: f64,
    /// That the translations took.
    pub seconds: f64,
    pub sentences_per_second: f64,
}

impl Report {
    pub fn new(bleu: &bleu::Bleu, chrf: &chrf::Chrf, exact: exact::Exact, model: Option<Model>) -> Report {
        let version = concat!("version:qkv-", env!("CARGO_PKG_VERSION"));
        Report {
            sentences: exact.all,
            bleu: Bleu {
                score: bleu.score,
                precisions: bleu.precisions,
                brevity: bleu.brevity,
                length: bleu.length,
                reference_length: bleu.reference_length,
                signature: format!("BLEU|{}|{version}", bleu.signature()),
            },
            chrf: Chrf { score: chrf.score, signature: format!("chrF2|{}|{version}", chrf.signature()) },
            exact: Exact { score: exact.score(), right: exact.right },
            model,
        }
    }

    /// As one JSON object on a line.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("a report is plain data") + "\n"
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { bleu, chrf, exact, .. } = self;
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
            writeln!(f, "loss = {:.4} a token, perplexity = {:.3}", model.loss, model.perplexity)?;
            let Model { seconds, sentences_per_second, .. } = model;
            writeln!(f, "speed = {sentences_per_second:.1} sentences/s ({} in {seconds:.1} s)", self.sentences)?;
        }
        Ok(())
    }
}
