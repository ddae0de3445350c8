//! Loops over all elements of a tensor, for readers and writers of models. They are compiled here, for speed, and not
//! in the crates above, which are mostly glue and not optimized.

use half::{bf16, f16};

/// `sum += x`.
///
/// ```
/// let mut sum = [1.0, 2.0];
/// qkv_formats::numbers::add(&mut sum, &[10.0, 20.0]);
/// assert_eq!(sum, [11.0, 22.0]);
/// ```
pub fn add(sum: &mut [f32], x: &[f32]) {
    sum.iter_mut().zip(x).for_each(|(sum, &x)| *sum += x);
}

/// Adds a number to every element.
pub fn add_to_each(values: &mut [f32], more: f32) {
    values.iter_mut().for_each(|x| *x += more);
}

/// Rounded to bf16.
pub fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// Rounded to f16.
pub fn to_f16(values: &[f32]) -> Vec<f16> {
    values.iter().map(|&x| f16::from_f32(x)).collect()
}

/// Widens bf16.
pub fn widen_bf16(from: &[bf16], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
}

/// The transpose of each of several consecutive matrices of `rows` rows and `width` columns.
///
/// ```
/// let twice = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
/// assert_eq!(qkv_formats::numbers::transposed(&twice, 2, 2), [1.0, 3.0, 2.0, 4.0, 5.0, 7.0, 6.0, 8.0]);
/// ```
pub fn transposed(values: &[f32], rows: usize, width: usize) -> Vec<f32> {
    let matrices = values.chunks_exact((rows * width).max(1));
    matrices.flat_map(|matrix| (0..width).flat_map(move |x| (0..rows).map(move |r| matrix[r * width + x]))).collect()
}

/// Gives elements the mean 0 and the standard deviation 1; `epsilon` is added to the deviation.
pub fn standardize(values: &mut [f32], epsilon: f64) {
    let count = values.len() as f64;
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let variance = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / count;
    let scale = 1.0 / (variance.sqrt() + epsilon);
    values.iter_mut().for_each(|x| *x = ((f64::from(*x) - mean) * scale) as f32);
}

/// Logits as log-probabilities, for each row of `width`.
pub fn log_softmax(rows: &mut [f32], width: usize) {
    for row in rows.chunks_exact_mut(width.max(1)) {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - most).exp()).sum();
        let lse = most + sum.ln() as f32;
        row.iter_mut().for_each(|x| *x -= lse);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transpose_of_a_transpose_is_the_matrix() {
        let values: Vec<f32> = (0..2 * 3 * 5).map(|x| x as f32).collect();
        assert_eq!(transposed(&transposed(&values, 3, 5), 5, 3), values);
        assert!(transposed(&[], 0, 5).is_empty());
    }

    #[test]
    fn standardized_numbers_have_mean_0_and_deviation_1() {
        let mut values: Vec<f32> = (0..100).map(|x| (x * x % 37) as f32).collect();
        standardize(&mut values, 0.0);
        let sum = |power: i32| values.iter().map(|&x| f64::from(x).powi(power)).sum::<f64>() / 100.0;
        assert!(sum(1).abs() < 1e-6 && (sum(2) - 1.0).abs() < 1e-5);
    }

    #[test]
    fn probabilities_sum_to_1() {
        let mut rows = vec![1.0, 2.0, 3.0, f32::NEG_INFINITY, 100.0, 0.0];
        log_softmax(&mut rows, 3);
        for row in rows.chunks(3) {
            assert!((row.iter().map(|x| x.exp()).sum::<f32>() - 1.0).abs() < 1e-6);
        }
    }
}
