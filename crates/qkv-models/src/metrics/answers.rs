//! Exact match and word F1 of answers as in SQuAD's script: ignoring case, punctuation and articles, against the best
//! matching reference.

use super::same_length;
use crate::Result;

/// Metrics of answers, in percent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Answers {
    /// Exact matches.
    pub exact: f64,
    /// Mean word F1.
    pub f1: f64,
}

fn words(text: &str) -> Vec<String> {
    let plain: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    plain.split_whitespace().filter(|word| !["a", "an", "the"].contains(word)).map(str::to_owned).collect()
}

fn overlap(output: &[String], reference: &[String]) -> f64 {
    let mut left = reference.to_vec();
    let same = output.iter().filter(|word| {
        let at = left.iter().position(|other| other == *word);
        at.map(|at| left.swap_remove(at)).is_some()
    });
    let same = same.count() as f64;
    if output.is_empty() || reference.is_empty() {
        return f64::from(u8::from(output.is_empty() && reference.is_empty()));
    }
    2.0 * same / (output.len() + reference.len()) as f64
}

impl Answers {
    /// Compares answers with their references.
    ///
    /// ```
    /// use qkv_models::metrics::answers::Answers;
    /// let found = Answers::of(&["the Oslo fjord"], &[vec!["Oslo", "Oslo Fjord!"]])?;
    /// assert_eq!((found.exact, found.f1), (100.0, 100.0));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there are not as many answers as references.
    pub fn of<A: AsRef<str>, B: AsRef<str>>(outputs: &[A], references: &[Vec<B>]) -> Result<Self> {
        same_length(outputs.len(), references.len())?;
        let (mut exact, mut f1) = (0.0, 0.0);
        for (output, references) in outputs.iter().zip(references) {
            let output = words(output.as_ref());
            let references: Vec<Vec<String>> = references.iter().map(|text| words(text.as_ref())).collect();
            exact += f64::from(u8::from(references.contains(&output)));
            f1 += references.iter().map(|reference| overlap(&output, reference)).fold(0.0, f64::max);
        }
        let share = 100.0 / outputs.len() as f64;
        Ok(Answers { exact: exact * share, f1: f1 * share })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_count_once_each() {
        let found = Answers::of(&["new new york"], &[vec!["new york city"]]).unwrap();
        assert!((found.f1 - 200.0 / 3.0).abs() < 1e-9 && found.exact == 0.0);
        assert_eq!(Answers::of(&["the"], &[vec!["a"]]).unwrap().f1, 100.0);
    }
}
