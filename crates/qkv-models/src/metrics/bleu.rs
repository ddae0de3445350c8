//! BLEU of a corpus (Papineni et al., 2002), as sacrebleu computes it: case as it is, up to four words, one reference, and
//! where an order has no match, half of the smallest possible count, then a quarter, and so on (`exp`).

use super::same_length;
use super::words::Words;
use crate::Result;
use std::collections::HashMap;
use std::fmt;

/// The longest run of words that is compared.
const ORDERS: usize = 4;

/// The BLEU of a corpus.
#[derive(Clone, Debug, PartialEq)]
pub struct Bleu {
    /// The score, from 0 to 100.
    pub score: f64,
    /// For runs of one to four words, how many in a hundred are in the reference.
    pub precisions: [f64; ORDERS],
    /// What the score is multiplied by because the output is shorter than the references.
    pub brevity: f64,
    /// The words of the output.
    pub length: usize,
    /// The words of the references.
    pub reference_length: usize,
    /// The rules that cut the words.
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
        same_length(outputs.len(), references.len())?;
        let (mut found, mut all) = ([0u64; ORDERS], [0u64; ORDERS]);
        let (mut length, mut reference_length) = (0, 0);
        for (output, reference) in outputs.iter().zip(references) {
            let (output, reference) = (words.cut(output.as_ref()), words.cut(reference.as_ref()));
            let output: Vec<&str> = output.split(' ').filter(|word| !word.is_empty()).collect();
            let reference: Vec<&str> = reference.split(' ').filter(|word| !word.is_empty()).collect();
            length += output.len();
            reference_length += reference.len();
            for order in 1..=ORDERS {
                let mut left: HashMap<&[&str], u64> = HashMap::new();
                reference.windows(order).for_each(|run| *left.entry(run).or_default() += 1);
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

    /// What the score depends on beside the text, as sacrebleu writes it.
    pub fn signature(&self) -> String {
        format!("nrefs:1|case:mixed|eff:no|tok:{}|smooth:exp", self.words.name())
    }
}

/// How many in a hundred, smoothed. An order of which the output has no run, and all after it, stay zero.
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

/// The score, the precisions, the brevity penalty and the lengths.
impl fmt::Display for Bleu {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let [a, b, c, d] = self.precisions;
        write!(f, "{:.2} {a:.1}/{b:.1}/{c:.1}/{d:.1} (BP = {:.3}, ", self.score, self.brevity)?;
        write!(f, "{} words for {})", self.length, self.reference_length)
    }
}
