//! Metrics over corpora: BLEU and chrF as sacrebleu computes them, CIDEr, exact match, perplexity, descriptions of
//! images, average precision of boxes, entity F1, F1 by class, and answers of SQuAD.

pub mod answers;
pub mod bleu;
pub mod captions;
pub mod chrf;
pub mod cider;
pub mod classes;
pub mod detection;
pub mod entities;
pub mod exact;
pub mod words;

use crate::{Error, Result};

/// The perplexity of a mean loss per token in nats.
///
/// ```
/// let loss = 8f64.ln();
/// assert!((qkv_models::metrics::perplexity(loss) - 8.0).abs() < 1e-12);
/// ```
pub fn perplexity(loss: f64) -> f64 {
    loss.exp()
}

/// Refuses corpora that cannot be compared line by line.
fn same_length(outputs: usize, references: usize) -> Result<()> {
    if outputs != references {
        return Err(Error::invalid(format!("there are {outputs} outputs and {references} references"))
            .with_hint("both need one line for each sentence"));
    }
    if outputs == 0 {
        return Err(Error::invalid("there is nothing to score"));
    }
    Ok(())
}

/// `part` of `all` in percent; 0 if `all` is 0.
fn share(part: usize, all: usize) -> f64 {
    100.0 * part as f64 / all.max(1) as f64
}

/// White space of Python's `str.split`: Unicode's, and the four ASCII separators.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}
