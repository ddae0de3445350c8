//! Precision, recall and F1 of each class, and their means, as seqeval's and scikit-learn's `classification_report`
//! print them.

use super::{same_length, share};
use crate::Result;
use serde::Serialize;
use std::collections::BTreeMap;

/// The scores of one class, in percent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassScore {
    /// The class.
    pub name: String,
    /// Share of the predicted that are right.
    pub precision: f64,
    /// Share of those in the references that were found.
    pub recall: f64,
    /// Their harmonic mean.
    pub f1: f64,
    /// Number of occurrences in the references.
    pub support: usize,
}

/// Counts of one class: right, found, there.
pub(crate) type Counts = [usize; 3];

/// Scores of each class, sorted by name.
pub(crate) fn scores(counts: &BTreeMap<String, Counts>) -> Vec<ClassScore> {
    let score = |(name, &[right, found, there]): (&String, &Counts)| ClassScore {
        name: name.clone(),
        precision: share(right, found),
        recall: share(right, there),
        f1: share(2 * right, found + there),
        support: there,
    };
    counts.iter().map(score).collect()
}

/// Scores of each class, sorted by name, including classes that were only predicted.
///
/// ```
/// let found = qkv_models::metrics::classes::of(&["good", "good", "bad"], &["good", "bad", "bad"])?;
/// assert_eq!((found[0].name.as_str(), found[0].precision, found[0].recall, found[0].support), ("bad", 100.0, 50.0,
/// 2));
/// # Ok::<(), qkv_models::Error>(())
/// ```
///
/// # Errors
/// If outputs and references differ in number.
pub fn of<A: AsRef<str>, B: AsRef<str>>(outputs: &[A], references: &[B]) -> Result<Vec<ClassScore>> {
    same_length(outputs.len(), references.len())?;
    let mut counts: BTreeMap<String, Counts> = BTreeMap::new();
    for (output, reference) in outputs.iter().map(AsRef::as_ref).zip(references.iter().map(AsRef::as_ref)) {
        counts.entry(output.to_owned()).or_default()[1] += 1;
        counts.entry(reference.to_owned()).or_default()[2] += 1;
        counts.entry(output.to_owned()).or_default()[0] += usize::from(output == reference);
    }
    Ok(scores(&counts))
}

/// The mean of the classes' F1; 0 without classes.
pub fn macro_f1(classes: &[ClassScore]) -> f64 {
    classes.iter().map(|class| class.f1).sum::<f64>() / classes.len().max(1) as f64
}
