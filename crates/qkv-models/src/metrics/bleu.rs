//! Corpus BLEU (Papineni et al., 2002) as sacrebleu computes it: cased, up to 4-grams, one or several references,
//! exponential smoothing of orders without a match.

use super::same_length;
use super::words::Words;
use crate::{Error, Result};
use std::collections::HashMap;
use std::fmt;

/// The longest n-gram.
const ORDERS: usize = 4;

/// BLEU of a corpus.
#[derive(Clone, Debug, PartialEq)]
pub struct Bleu {
    /// The score, from 0 to 100.
    pub score: f64,
    /// Precision of each n-gram order, in percent.
    pub precisions: [f64; ORDERS],
    /// Brevity penalty.
    pub brevity: f64,
    /// Words in the output.
    pub length: usize,
    /// Words in the references.
    pub reference_length: usize,
    /// The tokenization of words.
    pub words: Words,
}

impl Bleu {
    /// Scores outputs against one reference each.
    ///
    /// ```
    /// use qkv_models::metrics::{bleu::Bleu, words::Words};
    ///
    /// let outputs = ["Long time no see.", "How are you today?"];
    /// let references = ["Long time, no see.", "How are you today?"];
    /// let bleu = Bleu::of(&outputs, &references, Words::V13a)?;
    /// assert_eq!(bleu.to_string(), "66.50 100.0/87.5/66.7/50.0 (BP = 0.905, 10 words for 11)");
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    pub fn of<A: AsRef<str>, B: AsRef<str>>(outputs: &[A], references: &[B], words: Words) -> Result<Self> {
        Bleu::of_several(outputs, &references.iter().map(std::slice::from_ref).collect::<Vec<_>>(), words)
    }

    /// Scores outputs against several references each: an n-gram matches at most as often as it occurs in any one
    /// reference, and the reference length is the one closest to the output's, the shorter on ties.
    ///
    /// # Errors
    /// If there are not as many sets of references as outputs, or one of them is empty.
    pub fn of_several<A: AsRef<str>, B: AsRef<str>, C: AsRef<[B]>>(
        outputs: &[A],
        references: &[C],
        words: Words,
    ) -> Result<Self> {
        same_length(outputs.len(), references.len())?;
        let (mut found, mut all) = ([0u64; ORDERS], [0u64; ORDERS]);
        let (mut length, mut reference_length) = (0, 0);
        for (output, references) in outputs.iter().zip(references) {
            let output = words.cut(output.as_ref());
            let output: Vec<&str> = output.split(' ').filter(|word| !word.is_empty()).collect();
            let references: Vec<String> =
                references.as_ref().iter().map(|reference| words.cut(reference.as_ref())).collect();
            let references: Vec<Vec<&str>> = (references.iter())
                .map(|reference| reference.split(' ').filter(|word| !word.is_empty()).collect())
                .collect();
            length += output.len();
            let lengths = references.iter().map(Vec::len);
            let nearest = lengths.min_by_key(|&length| (length.abs_diff(output.len()), length));
            reference_length += nearest.ok_or_else(|| Error::invalid("an output has no reference"))?;
            for order in 1..=ORDERS {
                let mut left: HashMap<&[&str], u64> = HashMap::new();
                for reference in &references {
                    let mut counts: HashMap<&[&str], u64> = HashMap::new();
                    reference.windows(order).for_each(|run| *counts.entry(run).or_default() += 1);
                    for (run, count) in counts {
                        let most = left.entry(run).or_default();
                        *most = count.max(*most);
                    }
                }
                for run in output.windows(order) {
                    all[order - 1] += 1;
                    if let Some(count) = left.get_mut(run).filter(|count| **count > 0) {
                        *count -= 1;
                        found[order - 1] += 1;
                    }
                }
            }
        }
        let brevity = match (length, reference_length) {
            (0, 1..) => 0.0,
            (own, theirs) if own < theirs => (1.0 - theirs as f64 / own as f64).exp(),
            _ => 1.0,
        };
        let precisions = precisions(found, all);
        let score = match precisions.iter().all(|&p| p > 0.0) {
            true => brevity * (precisions.iter().map(|p| p.ln()).sum::<f64>() / ORDERS as f64).exp(),
            false => 0.0,
        };
        Ok(Bleu { score, precisions, brevity, length, reference_length, words })
    }

    /// The signature in sacrebleu's form.
    pub fn signature(&self) -> String {
        format!("nrefs:1|case:mixed|eff:no|tok:{}|smooth:exp", self.words.name())
    }
}

/// Smoothed precisions in percent. Orders longer than every output are zero.
fn precisions(found: [u64; ORDERS], all: [u64; ORDERS]) -> [f64; ORDERS] {
    let mut precisions = [0.0; ORDERS];
    if found == [0; ORDERS] {
        return precisions;
    }
    let mut smallest = 1.0;
    for ((precision, found), all) in precisions.iter_mut().zip(found).zip(all).take_while(|(_, all)| *all > 0) {
        *precision = if found == 0 {
            smallest *= 2.0;
            100.0 / (smallest * all as f64)
        } else {
            100.0 * found as f64 / all as f64
        };
    }
    precisions
}

/// Score, precisions, brevity penalty and lengths.
impl fmt::Display for Bleu {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [a, b, c, d] = self.precisions;
        write!(f, "{:.2} {a:.1}/{b:.1}/{c:.1}/{d:.1} (BP = {:.3}, ", self.score, self.brevity)?;
        write!(f, "{} words for {})", self.length, self.reference_length)
    }
}
