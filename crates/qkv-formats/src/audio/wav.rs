//! Writing WAV files: one channel, 16 bits.

/// The bytes of a WAV file. Samples beyond ±1 are clipped.
///
/// ```
/// let bytes = qkv_formats::audio::wav::to_bytes(&[0.0, 1.0], 16_000);
/// assert_eq!((&bytes[..4], bytes.len()), (&b"RIFF"[..], 44 + 4));
/// ```
pub fn to_bytes(samples: &[f32], rate: u32) -> Vec<u8> {
    let length = (samples.len() * 2) as u32;
    let mut bytes = Vec::with_capacity(44 + samples.len() * 2);
    let words: [&[u8]; 12] = [
        b"RIFF",
        &(36 + length).to_le_bytes(),
        b"WAVEfmt ",
        &16u32.to_le_bytes(),
        &1u16.to_le_bytes(), // PCM
        &1u16.to_le_bytes(), // channels
        &rate.to_le_bytes(),
        &(2 * rate).to_le_bytes(),
        &2u16.to_le_bytes(), // bytes of all channels
        &16u16.to_le_bytes(),
        b"data",
        &length.to_le_bytes(),
    ];
    words.iter().for_each(|word| bytes.extend_from_slice(word));
    let rounded = samples.iter().map(|x| (x * 32768.0).round().clamp(-32768.0, 32767.0) as i16);
    rounded.for_each(|sample| bytes.extend_from_slice(&sample.to_le_bytes()));
    bytes
}
