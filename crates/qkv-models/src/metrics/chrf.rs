//! Corpus chrF2 (Popović, 2015) as sacrebleu computes it: character n-grams up to 6 without spaces, recall weighted
//! twice, averaged over the orders that both sides have.

use super::{is_space, same_length};
use crate::Result;
use std::collections::HashMap;
use std::fmt;

/// The longest n-gram.
const ORDERS: usize = 6;
/// β²: the weight of recall.
const RECALL: f64 = 4.0;

/// chrF2 of a corpus.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chrf {
    /// The score, from 0 to 100.
    pub score: f64,
}

impl Chrf {
    /// Scores outputs against one reference each.
    ///
    /// ```
    /// use qkv_models::metrics::chrf::Chrf;
    ///
    /// let chrf = Chrf::of(&["Long time no see."], &["Long time, no see."])?;
    /// assert_eq!(chrf.to_string(), "70.64");
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    pub fn of<A: AsRef<str>, B: AsRef<str>>(outputs: &[A], references: &[B]) -> Result<Self> {
        same_length(outputs.len(), references.len())?;
        // For each order: n-grams of the outputs, of the references, and in both.
        let mut counts = [[0u64; 3]; ORDERS];
        for (output, reference) in outputs.iter().zip(references) {
            let output: Vec<char> = output.as_ref().chars().filter(|&c| !is_space(c)).collect();
            let reference: Vec<char> = reference.as_ref().chars().filter(|&c| !is_space(c)).collect();
            for (order, [own, theirs, both]) in (1..).zip(&mut counts) {
                let mut left: HashMap<&[char], u64> = HashMap::new();
                reference.windows(order).for_each(|run| *left.entry(run).or_default() += 1);
                *theirs += reference.windows(order).len() as u64;
                // Orders longer than the reference do not count.
                if left.is_empty() {
                    continue;
                }
                for run in output.windows(order) {
                    *own += 1;
                    if let Some(count) = left.get_mut(run).filter(|count| **count > 0) {
                        *count -= 1;
                        *both += 1;
                    }
                }
            }
        }
        let (mut precision, mut recall, mut orders) = (0.0, 0.0, 0.0);
        for [own, theirs, both] in counts.into_iter().filter(|&[own, theirs, _]| own > 0 && theirs > 0) {
            precision += both as f64 / own as f64;
            recall += both as f64 / theirs as f64;
            orders += 1.0;
        }
        if precision + recall == 0.0 {
            return Ok(Chrf { score: 0.0 });
        }
        let (precision, recall) = (precision / orders, recall / orders);
        Ok(Chrf { score: 100.0 * ((1.0 + RECALL) * precision * recall / (RECALL * precision + recall)) })
    }

    /// The signature in sacrebleu's form.
    pub fn signature(&self) -> &'static str {
        "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no"
    }
}

/// The score.
impl fmt::Display for Chrf {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{:.2}", self.score)
    }
}
