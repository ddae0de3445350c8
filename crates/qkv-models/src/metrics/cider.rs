//! CIDEr-D (Vedantam et al. 2015, arXiv:1411.5726) as COCO's evaluation computes it: how similar the n-grams of a
//! description, weighted by their rarity among the images, are to those of its references.

use super::same_length;
use super::words::Words;
use crate::Result;
use std::collections::{HashMap, HashSet};

/// The longest n-gram.
const ORDERS: usize = 4;
/// Standard deviation of the Gaussian penalty on a difference in length.
const SIGMA: f64 = 6.0;

/// A text as counts of its n-grams.
type Counts = HashMap<Vec<String>, f64>;

/// Weights of a text's n-grams by order, the norms of these vectors, and the number of its bigrams.
struct Weighted {
    weights: [Counts; ORDERS],
    lengths: [f64; ORDERS],
    bigrams: f64,
}

fn counts(text: &str, words: Words) -> Counts {
    let text = words.cut(text);
    let words: Vec<String> = text.split(' ').filter(|word| !word.is_empty()).map(str::to_owned).collect();
    let mut counts = Counts::new();
    for order in 1..=ORDERS {
        words.windows(order).for_each(|run| *counts.entry(run.to_vec()).or_default() += 1.0);
    }
    counts
}

impl Weighted {
    /// TF-IDF weights: each count times ln(images / images with the n-gram).
    fn new(counts: &Counts, images: &HashMap<Vec<String>, f64>, all: f64) -> Weighted {
        let mut found = Weighted { weights: Default::default(), lengths: [0.0; ORDERS], bigrams: 0.0 };
        for (run, &count) in counts {
            let rarity = all.ln() - images.get(run).copied().unwrap_or(0.0).max(1.0).ln();
            let order = run.len() - 1;
            found.lengths[order] += (count * rarity).powi(2);
            found.weights[order].insert(run.clone(), count * rarity);
            found.bigrams += if order == 1 { count } else { 0.0 };
        }
        found.lengths = found.lengths.map(f64::sqrt);
        found
    }

    /// The cosine to a reference with weights clipped to the reference's, averaged over orders, times the length
    /// penalty.
    fn similarity(&self, reference: &Weighted) -> f64 {
        let of_order = |order: usize| {
            let lengths = self.lengths[order] * reference.lengths[order];
            let both = self.weights[order]
                .iter()
                .filter_map(|(run, &own)| reference.weights[order].get(run).map(|&theirs| own.min(theirs) * theirs));
            if lengths > 0.0 { both.sum::<f64>() / lengths } else { 0.0 }
        };
        let difference = self.bigrams - reference.bigrams;
        let penalty = (-difference * difference / (2.0 * SIGMA * SIGMA)).exp();
        penalty * (0..ORDERS).map(of_order).sum::<f64>() / ORDERS as f64
    }
}

/// Mean CIDEr-D over outputs with one or several references each, times 100: 0.6 in COCO's evaluation is 60 here.
///
/// ```
/// use qkv_models::metrics::{cider, words::Words};
/// let references = [vec!["a dog runs on grass", "the dog runs"], vec!["a man rides a horse", "man on horse"]];
/// let same = cider::of(&["a dog runs on grass", "a man rides a horse"], &references, Words::Spaces)?;
/// let other = cider::of(&["a man rides a horse", "a dog runs on grass"], &references, Words::Spaces)?;
/// assert!(same > 400.0 && other < 1.0);
/// # Ok::<(), qkv_models::Error>(())
/// ```
///
/// # Errors
/// If there are not as many sets of references as outputs.
pub fn of<A: AsRef<str>, B: AsRef<str>, C: AsRef<[B]>>(outputs: &[A], references: &[C], words: Words) -> Result<f64> {
    same_length(outputs.len(), references.len())?;
    let counted: Vec<Vec<Counts>> = (references.iter())
        .map(|references| references.as_ref().iter().map(|text| counts(text.as_ref(), words)).collect())
        .collect();
    let mut images: HashMap<Vec<String>, f64> = HashMap::new();
    for references in &counted {
        let runs: HashSet<&Vec<String>> = references.iter().flat_map(HashMap::keys).collect();
        runs.into_iter().for_each(|run| *images.entry(run.clone()).or_default() += 1.0);
    }
    let all = outputs.len() as f64;
    let score = |(output, references): (&A, &Vec<Counts>)| {
        let output = Weighted::new(&counts(output.as_ref(), words), &images, all);
        let each = references.iter().map(|counts| output.similarity(&Weighted::new(counts, &images, all)));
        each.sum::<f64>() / references.len().max(1) as f64
    };
    Ok(1000.0 * outputs.iter().zip(&counted).map(score).sum::<f64>() / all)
}
