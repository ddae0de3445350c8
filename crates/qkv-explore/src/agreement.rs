//! Agreement between attention and a reference word alignment.

use crate::words::Matrix;
use qkv_models::{Error, Result};
use serde::Serialize;

/// Keys with at least this weight are linked, besides the one with the largest.
const LINK_THRESHOLD: f32 = 0.3;

/// Links between words: source and target index.
pub type Links = Vec<(usize, usize)>;

/// Agreement of links with those of a reference.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// The share of our links that are in the reference.
    pub precision: f64,
    /// The share of the reference's links that are ours.
    pub recall: f64,
    /// The alignment error rate, `1 − 2 |A ∩ R| / (|A| + |R|)` (Och and Ney 2003), all links counted as sure.
    pub error_rate: f64,
}

impl Matrix {
    /// The links of an alignment, sorted: for each row the column with the largest weight (the first on a tie) and
    /// every other column with a weight of at least 0.3.
    pub fn links(&self) -> Links {
        let mut links = Vec::new();
        for (to, row) in self.weights.iter().enumerate() {
            let most = (0..row.len()).reduce(|most, at| if row[at] > row[most] { at } else { most });
            let linked = |from: &usize| Some(*from) == most || row[*from] >= LINK_THRESHOLD;
            links.extend((0..row.len()).filter(linked).map(|from| (from, to)));
        }
        links.sort();
        links
    }

    /// Its links in Pharaoh format, `0-0 1-2 …`: source word, target word.
    pub fn pharaoh(&self) -> String {
        self.links().iter().map(|(from, to)| format!("{from}-{to}")).collect::<Vec<_>>().join(" ")
    }

    /// The agreement of its links with those of a reference.
    pub fn agreement(&self, reference: &Links) -> Agreement {
        let ours = self.links();
        let mut theirs = reference.clone();
        theirs.sort();
        theirs.dedup();
        let common = ours.iter().filter(|link| theirs.binary_search(link).is_ok()).count() as f64;
        let share = |of: f64| if of == 0.0 { 0.0 } else { common / of };
        let (ours, theirs) = (ours.len() as f64, theirs.len() as f64);
        let error_rate = if ours + theirs == 0.0 { 0.0 } else { 1.0 - 2.0 * common / (ours + theirs) };
        Agreement { precision: share(ours), recall: share(theirs), error_rate }
    }
}

/// Reads a line in Pharaoh format.
///
/// # Errors
/// Names the word that is not a link.
pub fn pharaoh(line: &str) -> Result<Links> {
    let link = |word: &str| {
        let (from, to) = word.split_once('-')?;
        Some((from.parse().ok()?, to.parse().ok()?))
    };
    line.split_whitespace()
        .map(|word| {
            link(word).ok_or_else(|| {
                Error::invalid(format!("`{word}` is not a link")).with_hint("links look like `0-0 1-2`: source, target")
            })
        })
        .collect()
}
