//! 8-bit rows: each row of a matrix as integers from −127 to 127 with one scale.

/// The largest integer.
const LARGEST: f32 = 127.0;

/// Quantizes a matrix: its integers and scales, or the first row with a non-finite value.
pub(super) fn narrow(values: &[f32], count: usize, width: usize) -> Result<(Vec<u8>, Vec<f32>), usize> {
    let (mut bytes, mut scales) = (Vec::with_capacity(values.len()), Vec::with_capacity(count));
    for row in 0..count {
        let values = &values[row * width..][..width];
        if values.iter().any(|x| !x.is_finite()) {
            return Err(row);
        }
        let scale = values.iter().fold(0f32, |most, x| most.max(x.abs())) / LARGEST;
        // A row of zeros, or of subnormal values whose scale underflows, is zero.
        let number = |x: f32| if scale > 0.0 { (x / scale).round().clamp(-LARGEST, LARGEST) as i8 } else { 0 };
        bytes.extend(values.iter().map(|&x| number(x) as u8));
        scales.push(scale);
    }
    Ok((bytes, scales))
}

/// Dequantizes a matrix.
pub(super) fn widen(bytes: &[u8], scales: &[f32], width: usize) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len()];
    let rows = values.chunks_exact_mut(width.max(1)).zip(bytes.chunks_exact(width.max(1)));
    for ((to, from), scale) in rows.zip(scales) {
        for (to, &byte) in to.iter_mut().zip(from) {
            *to = f32::from(byte as i8) * scale;
        }
    }
    values
}
