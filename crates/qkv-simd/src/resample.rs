//! The inner loops of resampling, which visit every pixel of a photograph and every sample of a recording.

/// Weighted sums of the pixels of a line with 1 or 3 channels: `out[x] = Σ weight · line[first + k]`, in order of `k`.
/// For each new pixel, `taps` has the first pixel of its sum and the weights from there on.
///
/// ```
/// let mut out = [0.0; 2];
/// qkv_simd::resample::weigh_line(&[10, 20, 40], 1, &[(0, vec![0.5, 0.5]), (2, vec![1.0])], &mut out);
/// assert_eq!(out, [15.0, 40.0]);
/// ```
///
/// # Panics
/// If there is another number of channels, or a slice is too short.
pub fn weigh_line(line: &[u8], channels: usize, taps: &[(usize, Vec<f32>)], out: &mut [f32]) {
    match channels {
        1 => weigh::<1>(line, taps, out),
        3 => weigh::<3>(line, taps, out),
        _ => panic!("{channels} channels"),
    }
}

fn weigh<const C: usize>(line: &[u8], taps: &[(usize, Vec<f32>)], out: &mut [f32]) {
    for ((first, weights), out) in taps.iter().zip(out.chunks_exact_mut(C)) {
        let mut sums = [0.0; C];
        for (pixel, weight) in line[first * C..][..weights.len() * C].chunks_exact(C).zip(weights) {
            for (sum, &x) in sums.iter_mut().zip(pixel) {
                *sum += weight * f32::from(x);
            }
        }
        out.copy_from_slice(&sums);
    }
}

/// `sums += weight · row`.
///
/// ```
/// let mut sums = [1.0, 2.0];
/// qkv_simd::resample::add_weighted(&mut sums, &[10.0, 20.0], 0.5);
/// assert_eq!(sums, [6.0, 12.0]);
/// ```
pub fn add_weighted(sums: &mut [f32], row: &[f32], weight: f32) {
    for (sum, x) in sums.iter_mut().zip(row) {
        *sum += weight * x;
    }
}

/// Partial sums of [`weighted_sum`]: enough for the widest registers, the same on every CPU.
const PARTIAL: usize = 16;

/// `Σ weight · sample`, in one order of summation on every CPU.
///
/// ```
/// assert_eq!(qkv_simd::resample::weighted_sum(&[1.0, 2.0, 3.0], &[0.5, 0.25, 1.0]), 4.0);
/// ```
///
/// # Panics
/// If there are not as many weights as samples.
pub fn weighted_sum(samples: &[f32], weights: &[f32]) -> f32 {
    assert_eq!(samples.len(), weights.len(), "a weight for each sample");
    let (mut sums, mut last) = ([0.0; PARTIAL], [0.0; PARTIAL]);
    let blocks = samples.chunks_exact(PARTIAL).zip(weights.chunks_exact(PARTIAL));
    for (samples, weights) in blocks {
        for ((sum, sample), weight) in sums.iter_mut().zip(samples).zip(weights) {
            *sum += sample * weight;
        }
    }
    let whole = samples.len() / PARTIAL * PARTIAL;
    for ((sum, sample), weight) in last.iter_mut().zip(&samples[whole..]).zip(&weights[whole..]) {
        *sum = sample * weight;
    }
    sums.iter().zip(last).map(|(sum, last)| sum + last).sum()
}
