//! Average precision of boxes as COCO defines it: precision at 101 levels of recall, averaged over classes, at one
//! overlap threshold or over ten. These are the numbers of `pycocotools` for all areas and 100 boxes per image.

/// A predicted or a true box.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredBox {
    /// Its class.
    pub class: usize,
    /// Confidence of the model; 1 for a true box.
    pub score: f64,
    /// Its left, top, right and bottom edge, in any unit.
    pub edges: [f64; 4],
}

/// Average precision, in percent.
#[derive(Clone, Debug, PartialEq)]
pub struct AveragePrecision {
    /// At an overlap threshold of 0.5: `AP50`.
    pub at_half: f64,
    /// The mean over overlap thresholds from 0.5 to 0.95: `AP`.
    pub mean: f64,
    /// At 0.5, for each class with true boxes: its number and its average precision.
    pub classes: Vec<(usize, f64)>,
}

/// The most boxes that count per image and class.
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

/// Average precision of one class at one threshold; `None` if it has no true boxes.
fn of_class(found: &[Vec<ScoredBox>], there: &[Vec<ScoredBox>], class: usize, threshold: f64) -> Option<f64> {
    let all: usize = there.iter().flatten().filter(|one| one.class == class).count();
    if all == 0 {
        return None;
    }
    // Score of each box and whether it is right, image by image.
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
                // On ties, the last, as in pycocotools.
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
    /// Scores the boxes found in images against the true ones.
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
    /// If the numbers of images differ.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn average_precision_is_that_of_pycocotools() {
        // Class, score in percent, left, top, right and bottom in pixels; two scores are equal. The expected numbers
        // are those of `COCOeval` in pycocotools 2.0; `dev/detection.py` compares many more.
        let there: [&[[i32; 6]]; 4] = [
            &[[1, 100, 55, 35, 92, 74], [0, 100, 34, 51, 72, 83], [0, 100, 29, 20, 53, 48]],
            &[[1, 100, 20, 48, 37, 74], [1, 100, 4, 36, 38, 49], [0, 100, 54, 18, 76, 30]],
            &[[0, 100, 45, 25, 68, 37], [0, 100, 8, 15, 40, 28], [0, 100, 29, 51, 54, 66]],
            &[[0, 100, 25, 54, 54, 84], [0, 100, 9, 13, 33, 31]],
        ];
        let found: [&[[i32; 6]]; 4] = [
            &[
                [1, 76, 56, 41, 89, 76],
                [1, 24, 57, 34, 93, 74],
                [1, 84, 31, 51, 78, 80],
                [0, 5, 35, 48, 72, 89],
                [0, 64, 33, 20, 55, 52],
                [0, 91, 17, 26, 37, 41],
            ],
            &[[0, 61, 13, 13, 33, 28]],
            &[[0, 50, 45, 27, 74, 37], [0, 94, 31, 55, 56, 66], [0, 28, 28, 57, 60, 63], [0, 27, 19, 56, 39, 71]],
            &[[0, 50, 9, 13, 34, 28], [0, 77, 40, 15, 60, 30]],
        ];
        let boxes = |images: [&[[i32; 6]]; 4]| -> Vec<Vec<ScoredBox>> {
            let one = |row: &[i32; 6]| {
                let edges = [row[2], row[3], row[4], row[5]].map(|x| f64::from(x) / 100.0);
                ScoredBox { class: row[0] as usize, score: f64::from(row[1]) / 100.0, edges }
            };
            images.iter().map(|boxes| boxes.iter().map(one).collect()).collect()
        };
        let precision = AveragePrecision::of(&boxes(found), &boxes(there));
        assert!((precision.at_half - 28.571428571429).abs() < 1e-9, "{precision:?}");
        assert!((precision.mean - 13.608203677511).abs() < 1e-9, "{precision:?}");
        assert!((precision.classes[0].1 - 40.3111739745403).abs() < 1e-9, "{precision:?}");
        assert!((precision.classes[1].1 - 16.831683168316832).abs() < 1e-9, "{precision:?}");
    }
}
