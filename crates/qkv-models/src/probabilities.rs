//! Softmax of logits.

/// Softmax of logits, row by row.
pub(crate) fn probabilities(scores: &[f32], classes: usize) -> Vec<Vec<f32>> {
    let row = |row: &[f32]| {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut row: Vec<f32> = row.iter().map(|x| (x - most).exp()).collect();
        let total: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x /= total);
        row
    };
    scores.chunks_exact(classes.max(1)).map(row).collect()
}
