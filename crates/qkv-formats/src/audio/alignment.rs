//! Dynamic time warping: the path through attention weights `[tokens, positions]` along which tokens were spoken.

/// Width of the median filter, in positions.
const MEDIAN: usize = 7;

/// Makes rows sum to 1 over the window's positions, then gives each column mean 0 and standard deviation 1.
pub fn normalize(weights: &mut [f32], width: usize) {
    for row in weights.chunks_exact_mut(width) {
        let total: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x /= total.max(f32::MIN_POSITIVE));
    }
    let count = (weights.len() / width) as f32;
    for column in 0..width {
        let values = || weights[column..].iter().step_by(width);
        let mean = values().sum::<f32>() / count;
        let deviation = (values().map(|x| (x - mean) * (x - mean)).sum::<f32>() / count).sqrt();
        weights[column..].iter_mut().step_by(width).for_each(|x| *x = (*x - mean) / deviation.max(f32::MIN_POSITIVE));
    }
}

/// The median of each position and its neighbors, mirrored at the ends.
pub fn median(weights: &[f32], width: usize) -> Vec<f32> {
    let half = MEDIAN / 2;
    if width <= half {
        return weights.to_vec();
    }
    let place = |at: isize| match at {
        at if at < 0 => (-at) as usize,
        at if at as usize >= width => 2 * (width - 1) - at as usize,
        at => at as usize,
    };
    let filtered = weights.chunks_exact(width).flat_map(|row| {
        (0..width as isize).map(move |at| {
            let mut near = [0.0; MEDIAN];
            near.iter_mut().enumerate().for_each(|(x, to)| *to = row[place(at + x as isize - half as isize)]);
            near.sort_unstable_by(f32::total_cmp);
            near[half]
        })
    });
    filtered.collect()
}

/// The path with the largest sum from the first row and column to the last, in steps down, right or both.
pub fn path(weights: &[f32], width: usize) -> Vec<(usize, usize)> {
    let rows = weights.len() / width;
    let (stride, far) = (width + 1, f32::INFINITY);
    let mut cost = vec![far; (rows + 1) * stride];
    let mut trace = vec![0u8; (rows + 1) * stride];
    cost[0] = 0.0;
    for i in 1..=rows {
        for j in 1..=width {
            let [both, down, right] = [(i - 1, j - 1), (i - 1, j), (i, j - 1)].map(|(i, j)| cost[i * stride + j]);
            let (least, step) = match (both, down, right) {
                _ if both < down && both < right => (both, 0),
                _ if down < both && down < right => (down, 1),
                _ => (right, 2),
            };
            cost[i * stride + j] = least - weights[(i - 1) * width + j - 1];
            trace[i * stride + j] = step;
        }
    }
    let (mut i, mut j, mut found) = (rows, width, Vec::new());
    while i > 0 || j > 0 {
        found.push((i.saturating_sub(1), j.saturating_sub(1)));
        match trace[i * stride + j] {
            _ if i == 0 => j -= 1,
            _ if j == 0 => i -= 1,
            0 => (i, j) = (i - 1, j - 1),
            1 => i -= 1,
            _ => j -= 1,
        }
    }
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_follows_the_largest_weights() {
        // Row 0 in columns 0–1, row 1 in column 2, row 2 in columns 3–4.
        let weights = [3.0, 3.0, -1.0, -1.0, -1.0, -1.0, -1.0, 3.0, -1.0, -1.0, -1.0, -1.0, -1.0, 3.0, 3.0];
        let found = path(&weights, 5);
        assert_eq!(found, [(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)]);
    }

    #[test]
    fn a_path_is_at_least_as_good_as_any_other() {
        // All monotone paths through a small matrix, by recursion.
        fn best(weights: &[f32], width: usize, i: usize, j: usize) -> f32 {
            let rows = weights.len() / width;
            if (i, j) == (rows - 1, width - 1) {
                return weights[i * width + j];
            }
            let next = [(i + 1, j + 1), (i + 1, j), (i, j + 1)];
            let more = next.iter().filter(|&&(i, j)| i < rows && j < width).map(|&(i, j)| best(weights, width, i, j));
            weights[i * width + j] + more.fold(f32::NEG_INFINITY, f32::max)
        }
        for seed in 0..20u32 {
            let weights: Vec<f32> = (0..20).map(|x| ((x * 37 + seed * 101) as f32).sin()).collect();
            let found = path(&weights, 5);
            let sum: f32 = found.iter().map(|&(i, j)| weights[i * 5 + j]).sum();
            assert!((sum - best(&weights, 5, 0, 0)).abs() < 1e-4, "{seed}");
            assert_eq!((found[0], found[found.len() - 1]), ((0, 0), (3, 4)));
        }
    }

    #[test]
    fn medians_remove_single_peaks_and_columns_are_normalized() {
        let mut row = vec![0.0; 12];
        row[5] = 9.0;
        assert_eq!(median(&row, 12), vec![0.0; 12]);
        let mut weights = vec![0.2, 0.8, 0.6, 0.4];
        normalize(&mut weights, 2);
        weights.iter().zip([-1.0, 1.0, 1.0, -1.0]).for_each(|(x, y)| assert!((x - y).abs() < 1e-4, "{x} {y}"));
    }
}
