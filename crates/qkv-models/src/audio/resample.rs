//! Resamples mono audio of any rate to 16 kHz, piece by piece: `rubato`'s band-limited resampler with its delay
//! removed.

use super::SAMPLE_RATE;
use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Indexing, Resampler as _, WindowFunction};

/// Minimum number of input samples per step. The filter is as long, which gives a sharp cutoff below half the lower
/// rate.
const CHUNK: usize = 4096;

/// A resampler from one rate.
pub(super) struct Resampler {
    inner: Fft<f32>,
    rate: usize,
    /// Samples that are not yet enough for a step.
    waiting: Vec<f32>,
    /// Output samples still to be dropped: the delay of the filter.
    delay: usize,
    read: u64,
    written: u64,
}

impl std::fmt::Debug for Resampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Resampler({} Hz)", self.rate)
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Resampler {
    pub fn new(rate: usize) -> Result<Resampler, String> {
        let (window, fixed) = (WindowFunction::BlackmanHarris2, FixedSync::Input);
        // The delay is half a step; a step has an even number of output samples, so the delay is a whole number of
        // them.
        let block = rate / gcd(rate, SAMPLE_RATE);
        let chunk = 2 * block * CHUNK.div_ceil(2 * block);
        let inner = Fft::new_custom(rate, SAMPLE_RATE, chunk, 1, 1, window, fixed)
            .map_err(|error| format!("{rate} samples a second cannot be converted: {error}"))?;
        let delay = inner.output_delay();
        Ok(Resampler { inner, rate, waiting: Vec::new(), delay, read: 0, written: 0 })
    }

    /// Number of output samples for the input so far.
    fn due(&self) -> u64 {
        (self.read * SAMPLE_RATE as u64).div_ceil(self.rate as u64)
    }

    pub fn push(&mut self, samples: &[f32]) -> Vec<f32> {
        self.read += samples.len() as u64;
        self.waiting.extend_from_slice(samples);
        let (mut from, mut out) = (0, Vec::new());
        while self.waiting.len() - from >= self.inner.input_frames_next() {
            let count = self.inner.input_frames_next();
            self.step(from, count, &mut out);
            from += count;
        }
        self.waiting.drain(..from);
        out
    }

    /// The rest of the output, as if silence followed the input.
    pub fn finish(&mut self) -> Vec<f32> {
        let mut out = Vec::new();
        while self.written < self.due() {
            let count = self.waiting.len();
            self.step(0, count, &mut out);
            self.waiting.clear();
        }
        out
    }

    /// Runs one step on `count` waiting samples, followed by silence if those are too few.
    fn step(&mut self, from: usize, count: usize, out: &mut Vec<f32>) {
        let input = InterleavedSlice::new(&self.waiting[from..from + count], 1, count).expect("as long as it says");
        let mut block = vec![0.0; self.inner.output_frames_next()];
        let frames = block.len();
        let mut output = InterleavedSlice::new_mut(&mut block, 1, frames).expect("as long as it says");
        let indexing = Indexing::new().partial_len(count);
        let made = self.inner.process_into_buffer(&input, &mut output, Some(&indexing));
        let (_, made) = made.expect("buffers of the sizes that it asked for");
        let dropped = self.delay.min(made);
        self.delay -= dropped;
        let kept = usize::try_from(self.due() - self.written).unwrap_or(usize::MAX).min(made - dropped);
        out.extend_from_slice(&block[dropped..dropped + kept]);
        self.written += kept as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tone of `hertz`, sampled at `rate`.
    fn tone(rate: usize, hertz: f64, seconds: f64) -> Vec<f32> {
        let phase = |at: usize| at as f64 / rate as f64 * hertz * std::f64::consts::TAU;
        (0..(seconds * rate as f64) as usize).map(|at| phase(at).sin() as f32).collect()
    }

    fn resampled(rate: usize, samples: &[f32], piece: usize) -> Vec<f32> {
        let mut resampler = Resampler::new(rate).unwrap();
        let mut out: Vec<f32> = samples.chunks(piece).flat_map(|piece| resampler.push(piece)).collect();
        out.extend(resampler.finish());
        out
    }

    #[test]
    fn a_tone_stays_the_tone_at_its_time_and_one_above_the_band_vanishes() {
        for rate in [8_000, 22_050, 44_100, 48_000, 96_000] {
            let found = resampled(rate, &tone(rate, 440.0, 1.0), 1000);
            assert_eq!(found.len(), SAMPLE_RATE, "from {rate}");
            let expected = tone(SAMPLE_RATE, 440.0, 1.0);
            // The ends differ, because there is silence beyond them.
            let off = (1000..15_000).map(|at| (found[at] - expected[at]).abs()).fold(0.0, f32::max);
            assert!(off < 2e-3, "from {rate}: {off}");
        }
        let above = resampled(48_000, &tone(48_000, 12_000.0, 0.5), 777);
        assert!(above[1000..7000].iter().all(|x| x.abs() < 1e-2));
    }

    #[test]
    fn pieces_of_any_length_give_the_same_samples() {
        let samples = tone(44_100, 300.0, 0.31);
        let whole = resampled(44_100, &samples, samples.len());
        assert_eq!(whole.len(), (samples.len() * 160).div_ceil(441));
        for piece in [1, 977, 5000] {
            assert_eq!(resampled(44_100, &samples, piece), whole);
        }
        assert_eq!(resampled(44_101, &samples[..50], 7).len(), 19);
    }
}
