//! Average precision of boxes as COCO defines it: precision at 101 levels of recall, averaged over classes, at one
//! threshold of overlap or over ten of them; the numbers of `pycocotools`, for all areas and 100 boxes an image.

/// A box that was found or is there: left, top, right and bottom.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredBox {
    /// Its class.
    pub class: usize,
    /// How sure the model is; 1 for what is there.
    pub score: f64,
    /// Its edges, in any unit.
    pub edges: [f64; 4],
}

/// Average precision, in percent.
#[derive(Clone, Debug, PartialEq)]
pub struct AveragePrecision {
    /// At an overlap of 0.5: `AP50`.
    pub at_half: f64,
    /// The mean over overlaps from 0.5 to 0.95: `AP`.
    pub mean: f64,
    /// At 0.5, for each class that is there: its number and its precision.
    pub classes: Vec<(usize, f64)>,
}

/// Boxes of an image and class that count.
const MOST: usize = 100;
/// Levels of recall.
const LEVELS: usize = 101;

/// Intersection over union.
fn overlap(a: [f64; 4], b: [f64; 4]) -> f64 {
    let across = (a[2].min(b[2]) - a[0].max(b[0])).max(0.0);
    let down = (a[3].min(b[3]) - a[1].max(b[1])).max(0.0);
    let area = |[left, top, right, bottom]: [f64; 4]| (right - left).max(0.0) * (bottom - top).max(0.0);
    let inter = across * down;
    let union = area(a) + area(b) - inter;
    if union > 0.0 { inter / union } else { 0.0 }
}

/// Average precision of one class at one threshold; `None` where nothing of it is there.
fn of_class(found: &[Vec<ScoredBox>], there: &[Vec<ScoredBox>], class: usize, threshold: f64) -> Option<f64> {
    let all: usize = there.iter().flatten().filter(|one| one.class == class).count();
    if all == 0 {
        return None;
    }
    // Score, and whether it is right, image by image.
    let mut judged: Vec<(f64, bool)> = Vec::new();
    for (found, there) in found.iter().zip(there) {
        let mut found: Vec<&ScoredBox> = found.iter().filter(|one| one.class == class).collect();
        found.sort_by(|a, b| b.score.total_cmp(&a.score));
        found.truncate(MOST);
        let there: Vec<&ScoredBox> = there.iter().filter(|one| one.class == class).collect();
        let mut taken = vec![false; there.len()];
        for one in found {
            let (mut best, mut place) = (threshold.min(1.0 - 1e-10), None);
            for (at, other) in there.iter().enumerate().filter(|(at, _)| !taken[*at]).collect::<Vec<_>>() {
                let overlap = overlap(one.edges, other.edges);
                // Of equal ones, the last.
                if overlap >= best {
                    (best, place) = (overlap, Some(at));
                }
            }
            if let Some(at) = place {
                taken[at] = true;
            }
            judged.push((one.score, place.is_some()));
        }
    }
    judged.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut right = 0;
    let (mut recalls, mut precisions) = (Vec::with_capacity(judged.len()), Vec::with_capacity(judged.len()));
    for (at, (_, good)) in judged.iter().enumerate() {
        right += usize::from(*good);
        recalls.push(right as f64 / all as f64);
        precisions.push(right as f64 / (at + 1) as f64);
    }
    // The best precision at this recall or a higher one.
    for at in (1..precisions.len()).rev() {
        precisions[at - 1] = precisions[at - 1].max(precisions[at]);
    }
    let level = |at: usize| {
        let level = at as f64 / (LEVELS - 1) as f64;
        precisions.get(recalls.partition_point(|&recall| recall < level)).copied().unwrap_or(0.0)
    };
    Some((0..LEVELS).map(level).sum::<f64>() / LEVELS as f64)
}

impl AveragePrecision {
    /// Scores the boxes found in images against those that are there.
    ///
    /// ```
    /// use qkv_models::metrics::detection::{AveragePrecision, ScoredBox};
    /// let one = |score, left: f64| ScoredBox { class: 0, score, edges: [left, 0.0, left + 10.0, 10.0] };
    /// let there = [vec![one(1.0, 0.0), one(1.0, 50.0)]];
    /// // One exact, one too far to the right, one beside everything.
    /// let found = [vec![one(0.9, 0.0), one(0.8, 52.0), one(0.7, 90.0)]];
    /// let scores = AveragePrecision::of(&found, &there);
    /// assert_eq!(scores.at_half, 100.0);
    /// assert!(scores.mean > 70.0 && scores.mean < 75.0);
    /// ```
    ///
    /// # Panics
    /// Where there are not as many images on both sides.
    pub fn of(found: &[Vec<ScoredBox>], there: &[Vec<ScoredBox>]) -> AveragePrecision {
        assert_eq!(found.len(), there.len(), "the same images");
        let classes: std::collections::BTreeSet<usize> = there.iter().flatten().map(|one| one.class).collect();
        let mut sums = [0.0; 10];
        let mut at_half = Vec::new();
        for &class in &classes {
            for (at, sum) in sums.iter_mut().enumerate() {
                let precision = of_class(found, there, class, 0.5 + 0.05 * at as f64).unwrap_or(0.0);
                *sum += precision;
                if at == 0 {
                    at_half.push((class, 100.0 * precision));
                }
            }
        }
        let count = classes.len().max(1) as f64;
        let mean = 100.0 * sums.iter().sum::<f64>() / (10.0 * count);
        AveragePrecision { at_half: 100.0 * sums[0] / count, mean, classes: at_half }
    }
}
