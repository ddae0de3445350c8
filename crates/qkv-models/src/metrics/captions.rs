//! Scores of texts about images: BLEU against all references of an image, exact match with one of them, and the edit
//! distance to the nearest.

use super::bleu::Bleu;
use super::words::Words;
use super::{same_length, share};
use crate::Result;

/// Scores of descriptions.
#[derive(Clone, Debug, PartialEq)]
pub struct Captions {
    /// BLEU against all references.
    pub bleu: Bleu,
    /// Percentage of outputs equal to one of their references.
    pub exact: f64,
    /// `100 · (1 − edits / length)`, averaged over outputs: the edit distance in words to the nearest reference over
    /// the length of the longer text.
    pub similarity: f64,
}

impl Captions {
    /// Scores outputs against one or several references each. White space only separates words.
    ///
    /// ```
    /// use qkv_models::metrics::{captions::Captions, words::Words};
    /// let outputs = ["a red circle", "a blue square here"];
    /// let references = [vec!["a circle", "a  red circle"], vec!["a blue triangle here"]];
    /// let scores = Captions::of(&outputs, &references, Words::V13a)?;
    /// assert_eq!((scores.exact, scores.similarity), (50.0, 87.5));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there are not as many sets of references as outputs, or one of them is empty.
    pub fn of<A: AsRef<str>, B: AsRef<str>, C: AsRef<[B]>>(
        outputs: &[A],
        references: &[C],
        words: Words,
    ) -> Result<Captions> {
        same_length(outputs.len(), references.len())?;
        let (mut exact, mut similarity) = (0, 0.0);
        for (output, references) in outputs.iter().zip(references) {
            let output: Vec<&str> = output.as_ref().split_whitespace().collect();
            let share = |reference: &B| {
                let reference: Vec<&str> = reference.as_ref().split_whitespace().collect();
                1.0 - distance(&output, &reference) as f64 / output.len().max(reference.len()).max(1) as f64
            };
            let best = references.as_ref().iter().map(share).fold(0.0, f64::max);
            exact += usize::from(best == 1.0);
            similarity += best;
        }
        let similarity = 100.0 * similarity / outputs.len() as f64;
        let bleu = Bleu::of_several(outputs, references, words)?;
        Ok(Captions { bleu, exact: share(exact, outputs.len()), similarity })
    }
}

/// The edit distance of two sequences: insertions, deletions and replacements (Levenshtein).
pub fn distance<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_edits() {
        let distance = |a: &str, b: &str| super::distance(a.as_bytes(), b.as_bytes());
        assert_eq!([distance("kitten", "sitting"), distance("", "abc"), distance("abc", "abc")], [3, 3, 0]);
        assert_eq!([distance("abcd", "bcda"), distance("flaw", "lawn"), distance("ab", "")], [2, 2, 2]);
    }

    #[test]
    fn one_reference_of_several_is_enough() {
        let scores = Captions::of(&["a dog runs"], &[["a cat sleeps", "a dog runs"]], Words::V13a).unwrap();
        assert_eq!((scores.exact, scores.similarity), (100.0, 100.0));
        assert_eq!(scores.bleu.reference_length, 3);
        assert!(Captions::of(&["a"], &[Vec::<&str>::new()], Words::V13a).is_err());
    }
}
