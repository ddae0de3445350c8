//! F1 of named entities as in the CoNLL shared tasks: first word, last word and kind must be right.

use super::classes::{self, ClassScore, Counts};
use super::{same_length, share};
use crate::Result;
use std::collections::{BTreeMap, HashSet};
use std::fmt;

/// Counts of entities in a corpus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entities {
    /// Predicted and right.
    pub right: usize,
    /// Predicted.
    pub found: usize,
    /// In the references.
    pub there: usize,
}

/// An entity: its first word, the word after its last, its kind.
type Entity<'a> = (usize, usize, &'a str);

/// The entities of a sentence. One starts at `B-`, and at an `I-` that does not continue the one before.
fn entities<S: AsRef<str>>(tags: &[S]) -> HashSet<Entity<'_>> {
    let mut found = HashSet::new();
    let mut open: Option<(usize, &str)> = None;
    for (at, tag) in tags.iter().map(|tag| Some(tag.as_ref())).chain([None]).enumerate() {
        let (mark, kind) = tag.and_then(|tag| tag.split_once('-')).unwrap_or(("O", ""));
        if open.is_some_and(|(_, before)| mark != "I" || before != kind) {
            let (from, kind) = open.take().expect("just seen");
            found.insert((from, at, kind));
        }
        if mark != "O" && open.is_none() {
            open = Some((at, kind));
        }
    }
    found
}

impl Entities {
    /// Counts the entities of sentences, a tag per word.
    ///
    /// ```
    /// use qkv_models::metrics::entities::Entities;
    /// let found = [vec!["B-person", "I-person", "O", "B-place"]];
    /// let there = [vec!["B-person", "I-person", "O", "O"]];
    /// let entities = Entities::of(&found, &there)?;
    /// assert_eq!((entities.precision(), entities.recall()), (50.0, 100.0));
    /// assert_eq!(entities.to_string(), "F1 66.67 (precision 50.00, recall 100.00; 1 of 1 entities)");
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the numbers of sentences differ.
    pub fn of<A: AsRef<str>, B: AsRef<str>>(outputs: &[Vec<A>], references: &[Vec<B>]) -> Result<Self> {
        same_length(outputs.len(), references.len())?;
        let mut all = Entities::default();
        for (output, reference) in outputs.iter().zip(references) {
            let (found, there) = (entities(output), entities(reference));
            all.right += found.intersection(&there).count();
            all.found += found.len();
            all.there += there.len();
        }
        Ok(all)
    }

    /// Scores by kind of entity, sorted by name, as seqeval's `classification_report`.
    ///
    /// # Errors
    /// As [`of`](Entities::of).
    pub fn by_kind<A: AsRef<str>, B: AsRef<str>>(outputs: &[Vec<A>], references: &[Vec<B>]) -> Result<Vec<ClassScore>> {
        same_length(outputs.len(), references.len())?;
        let mut counts: BTreeMap<String, Counts> = BTreeMap::new();
        for (output, reference) in outputs.iter().zip(references) {
            let (found, there) = (entities(output), entities(reference));
            let mut count = |at: usize, kind: &str| counts.entry(kind.to_owned()).or_default()[at] += 1;
            found.intersection(&there).for_each(|(.., kind)| count(0, kind));
            found.iter().for_each(|(.., kind)| count(1, kind));
            there.iter().for_each(|(.., kind)| count(2, kind));
        }
        Ok(classes::scores(&counts))
    }

    /// Precision in percent.
    pub fn precision(&self) -> f64 {
        share(self.right, self.found)
    }

    /// Recall in percent.
    pub fn recall(&self) -> f64 {
        share(self.right, self.there)
    }

    /// The harmonic mean of precision and recall.
    pub fn f1(&self) -> f64 {
        share(2 * self.right, self.found + self.there)
    }
}

impl fmt::Display for Entities {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (precision, recall) = (self.precision(), self.recall());
        write!(f, "F1 {:.2} (precision {precision:.2}, recall {recall:.2}; ", self.f1())?;
        write!(f, "{} of {} entities)", self.right, self.there)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entities_end_where_another_begins() {
        let tags = ["I-a", "I-a", "B-a", "I-b", "O", "I-b", "B-b"];
        let found = entities(&tags);
        let expected = [(0, 2, "a"), (2, 3, "a"), (3, 4, "b"), (5, 6, "b"), (6, 7, "b")];
        assert_eq!(found, expected.into_iter().collect());
        assert!(entities::<&str>(&[]).is_empty());
        let kinds = Entities::by_kind(&[tags.to_vec()], &[vec!["B-a", "I-a", "O", "O", "O", "B-b", "O"]]).unwrap();
        assert_eq!(kinds.iter().map(|kind| (&kind.name[..], kind.support)).collect::<Vec<_>>(), [("a", 1), ("b", 1)]);
        assert_eq!((kinds[0].precision, kinds[0].recall), (50.0, 100.0));
        assert!((kinds[1].precision - 100.0 / 3.0).abs() < 1e-9 && kinds[1].recall == 100.0);
    }
}
