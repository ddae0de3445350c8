//! Exact match: outputs that equal their references.

use super::same_length;
use crate::Result;
use std::fmt;

/// Exact match of a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exact {
    /// Number of matches.
    pub right: usize,
    /// Number of outputs.
    pub all: usize,
}

impl Exact {
    /// Counts outputs that equal their reference, ignoring white space at the ends.
    ///
    /// ```
    /// use qkv_models::metrics::exact::Exact;
    ///
    /// let exact = Exact::of(&["2026-11-15", "2026-11-16"], &["2026-11-15", "2026-11-17"])?;
    /// assert_eq!(exact.to_string(), "50.00 % (1 of 2)");
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    pub fn of<A: AsRef<str>, B: AsRef<str>>(outputs: &[A], references: &[B]) -> Result<Self> {
        same_length(outputs.len(), references.len())?;
        let right = outputs.iter().zip(references).filter(|(a, b)| a.as_ref().trim() == b.as_ref().trim()).count();
        Ok(Exact { right, all: outputs.len() })
    }

    /// Percentage of matches.
    pub fn score(&self) -> f64 {
        100.0 * self.right as f64 / self.all as f64
    }
}

/// The score and the counts.
impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:.2} % ({} of {})", self.score(), self.right, self.all)
    }
}
