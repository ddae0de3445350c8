//! Spectrograms for speech synthesis, and sound from spectrograms. A spectrogram has the log amplitudes in mel bands of
//! windows of 50 ms every 12.5 ms; the way back is the pseudo-inverse of the mel filters, then the algorithm of Griffin
//! and Lim (1984) with momentum (Perraudin et al. 2013).
//!
//! A mel band has an amplitude but no phase. Griffin and Lim search for a sound whose spectrum has these amplitudes:
//! the spectra of overlapping windows contradict each other unless their phases agree, so each round trip to sound and
//! back brings them closer to agreement.

use super::{MelFilters, SAMPLE_RATE};
use crate::draws::Draws;
use realfft::num_complex::Complex;
use realfft::{ComplexToReal, RealFftPlanner, RealToComplex};
use std::f32::consts::TAU;
use std::sync::Arc;

/// Samples per transform.
const TRANSFORM: usize = 1024;
/// Samples per window; the rest of a transform is zeros.
const WINDOW: usize = 800;
/// Samples from one window to the next.
pub const HOP: usize = 200;
/// Frames per second.
pub const FRAME_RATE: usize = SAMPLE_RATE / HOP;
/// Frequency bins per transform.
const FREQUENCIES: usize = TRANSFORM / 2 + 1;
/// Lower bound on amplitudes.
const FLOOR: f32 = 1e-5;
/// Log amplitudes are shifted and scaled by these, so that for speech the mean is about 0 and the spread about 1.
const MIDDLE: f32 = -5.0;
const SPREAD: f32 = 3.0;
/// RMS level to which recordings are scaled, so that all are equally loud.
const LEVEL: f64 = 0.08;
/// Parts this far below the loudest one count as silence at the start and the end: −40 dB.
const SILENCE: f32 = 1e-2;
/// Samples of silence kept at each end.
const MARGIN: usize = SAMPLE_RATE / 20;
/// Momentum: each step is extrapolated by this multiple of the last change.
const MOMENTUM: f32 = 0.99;
/// Number of iterations that fit the amplitudes of frequency bins to those of mel bands.
const FITS: usize = 30;
/// Purpose of random draws: initial phases.
const PHASES: u32 = 12;

/// Transforms for one set of mel filters.
#[derive(Clone)]
pub struct Vocoder {
    filters: MelFilters,
    /// The pseudo-inverse of the filters, `[FREQUENCIES, bands]`.
    inverse: Vec<f32>,
    forward: Arc<dyn RealToComplex<f32>>,
    backward: Arc<dyn ComplexToReal<f32>>,
    hann: Vec<f32>,
}

impl std::fmt::Debug for Vocoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vocoder({} bands)", self.filters.bands())
    }
}

/// Solves `A x = b` by elimination for every column of `b [n, m]`; `a [n, n]` is symmetric and positive definite.
fn solve(mut a: Vec<f64>, mut b: Vec<f64>, n: usize) -> Vec<f64> {
    let m = b.len() / n;
    for at in 0..n {
        let pivot = a[at * n + at];
        for row in at + 1..n {
            let factor = a[row * n + at] / pivot;
            if factor != 0.0 {
                (at..n).for_each(|column| a[row * n + column] -= factor * a[at * n + column]);
                (0..m).for_each(|column| b[row * m + column] -= factor * b[at * m + column]);
            }
        }
    }
    for at in (0..n).rev() {
        for column in 0..m {
            let known: f64 = (at + 1..n).map(|later| a[at * n + later] * b[later * m + column]).sum();
            b[at * m + column] = (b[at * m + column] - known) / a[at * n + at];
        }
    }
    b
}

impl Vocoder {
    /// A vocoder with `bands` mel bands between 0 and 8000 Hz.
    ///
    /// ```
    /// use qkv_formats::audio::Vocoder;
    /// let vocoder = Vocoder::new(80);
    /// let tone: Vec<f32> = (0..8000).map(|at| 0.1 * (at as f32 * 0.2).sin()).collect();
    /// let frames = vocoder.spectrogram(&tone);
    /// assert_eq!(frames.len(), 41 * 80);
    /// assert_eq!(vocoder.samples(&frames, 10, 1).len(), 8000);
    /// ```
    pub fn new(bands: usize) -> Vocoder {
        let filters = MelFilters::of_window(bands, TRANSFORM);
        let weights: Vec<f64> = filters.weights().iter().map(|&x| f64::from(x)).collect();
        let row = |band: usize| &weights[band * FREQUENCIES..][..FREQUENCIES];
        let mut square = vec![0.0; bands * bands];
        for (a, b) in (0..bands).flat_map(|a| (0..bands).map(move |b| (a, b))) {
            square[a * bands + b] = row(a).iter().zip(row(b)).map(|(x, y)| x * y).sum();
        }
        // A band that falls between two frequency bins has no weights; the small diagonal term keeps the matrix
        // invertible.
        let most = (0..bands).map(|at| square[at * bands + at]).fold(0.0, f64::max);
        (0..bands).for_each(|at| square[at * bands + at] += 1e-9 * most.max(1e-30));
        let solved = solve(square, weights, bands); // (bands, FREQUENCIES)
        let place = |at: usize| solved[at % bands * FREQUENCIES + at / bands] as f32;
        let inverse = (0..FREQUENCIES * bands).map(place).collect();
        let mut planner = RealFftPlanner::<f32>::new();
        let (forward, backward) = (planner.plan_fft_forward(TRANSFORM), planner.plan_fft_inverse(TRANSFORM));
        let hann = |at: usize| 0.5 - 0.5 * (TAU * at as f32 / WINDOW as f32).cos();
        Vocoder { filters, inverse, forward, backward, hann: (0..WINDOW).map(hann).collect() }
    }

    /// Number of mel bands.
    pub fn bands(&self) -> usize {
        self.filters.bands()
    }

    /// The spectra of the windows centered on every [`HOP`]th sample, `[frames, FREQUENCIES]`.
    fn transform(&self, samples: &[f32]) -> Vec<Complex<f32>> {
        let frames = samples.len() / HOP + 1;
        let (mut windowed, mut scratch) = (self.forward.make_input_vec(), self.forward.make_scratch_vec());
        let mut all = vec![Complex::default(); frames * FREQUENCIES];
        for (frame, spectrum) in all.chunks_exact_mut(FREQUENCIES).enumerate() {
            windowed.fill(0.0);
            for (at, (to, hann)) in windowed.iter_mut().zip(&self.hann).enumerate() {
                let there = (frame * HOP + at).checked_sub(WINDOW / 2).and_then(|at| samples.get(at));
                *to = there.copied().unwrap_or(0.0) * hann;
            }
            let done = self.forward.process_with_scratch(&mut windowed, spectrum, &mut scratch);
            done.expect("buffers of the sizes that it asked for");
        }
        all
    }

    /// The sound whose spectra are nearest to `spectra [frames, FREQUENCIES]`.
    fn sound(&self, spectra: &[Complex<f32>]) -> Vec<f32> {
        let length = (spectra.len() / FREQUENCIES).saturating_sub(1) * HOP;
        let (mut sum, mut weight) = (vec![0.0; length], vec![1e-8; length]);
        let (mut windowed, mut scratch) = (self.backward.make_output_vec(), self.backward.make_scratch_vec());
        let mut spectrum = self.backward.make_input_vec();
        for (frame, there) in spectra.chunks_exact(FREQUENCIES).enumerate() {
            spectrum.copy_from_slice(there);
            // Neither the mean nor the highest frequency of a real signal has a phase.
            (spectrum[0].im, spectrum[FREQUENCIES - 1].im) = (0.0, 0.0);
            let done = self.backward.process_with_scratch(&mut spectrum, &mut windowed, &mut scratch);
            done.expect("buffers of the sizes that it asked for");
            for (at, (&found, &hann)) in windowed.iter().zip(&self.hann).enumerate() {
                if let Some(at) = (frame * HOP + at).checked_sub(WINDOW / 2).filter(|&at| at < length) {
                    sum[at] += found / TRANSFORM as f32 * hann;
                    weight[at] += hann * hann;
                }
            }
        }
        sum.iter().zip(&weight).map(|(sum, weight)| sum / weight).collect()
    }

    /// The spectrogram of mono samples at 16 kHz, `[frames, bands]`: one frame per whole [`HOP`] and one more.
    pub fn spectrogram(&self, samples: &[f32]) -> Vec<f32> {
        let mut found = Vec::new();
        for spectrum in self.transform(samples).chunks_exact(FREQUENCIES) {
            let amplitudes: Vec<f32> = spectrum.iter().map(|x| x.norm()).collect();
            found.extend(self.filters.rows().map(|(first, weights)| {
                let sum: f32 = weights.iter().zip(&amplitudes[first..]).map(|(weight, x)| weight * x).sum();
                (sum.max(FLOOR).ln() - MIDDLE) / SPREAD
            }));
        }
        found
    }

    /// Amplitudes of frequency bins that match the mel bands of a spectrogram: the pseudo-inverse, then multiplicative
    /// updates, which keep them positive (Lee and Seung 2001).
    fn amplitudes(&self, spectrogram: &[f32]) -> Vec<f32> {
        let bands = self.bands();
        let mut all = Vec::with_capacity(spectrogram.len() / bands * FREQUENCIES);
        for frame in spectrogram.chunks_exact(bands) {
            let there: Vec<f32> = frame.iter().map(|x| (x * SPREAD + MIDDLE).clamp(-20.0, 20.0).exp()).collect();
            let row = |row: &[f32]| row.iter().zip(&there).map(|(a, b)| a * b).sum::<f32>().max(FLOOR);
            let mut found: Vec<f32> = self.inverse.chunks_exact(bands).map(row).collect();
            for _ in 0..FITS {
                let (mut above, mut below) = (vec![0.0; FREQUENCIES], vec![1e-12f32; FREQUENCIES]);
                for ((first, weights), expected) in self.filters.rows().zip(&there) {
                    let sum: f32 = weights.iter().zip(&found[first..]).map(|(weight, x)| weight * x).sum();
                    for (at, weight) in weights.iter().enumerate() {
                        above[first + at] += weight * expected;
                        below[first + at] += weight * sum;
                    }
                }
                found.iter_mut().zip(above.iter().zip(&below)).for_each(|(x, (above, below))| *x *= above / below);
            }
            all.extend(found);
        }
        all
    }

    /// The sound of a spectrogram, after `iterations` steps from random phases.
    ///
    /// # Panics
    /// If the spectrogram does not consist of whole frames.
    pub fn samples(&self, spectrogram: &[f32], iterations: usize, seed: u64) -> Vec<f32> {
        assert!(spectrogram.len().is_multiple_of(self.bands()), "frames of {} bands", self.bands());
        let amplitudes = self.amplitudes(spectrogram);
        let mut draws = Draws::new(seed, [PHASES, 0, 0]);
        let first = |&amplitude: &f32| Complex::from_polar(amplitude, draws.unit() as f32 * TAU);
        let mut spectra: Vec<Complex<f32>> = amplitudes.iter().map(first).collect();
        let mut before = vec![Complex::default(); spectra.len()];
        let share = MOMENTUM / (1.0 + MOMENTUM);
        for _ in 0..iterations {
            let agreed = self.transform(&self.sound(&spectra));
            for (((to, &amplitude), &now), &before) in spectra.iter_mut().zip(&amplitudes).zip(&agreed).zip(&before) {
                let phase = now - before * share;
                *to = phase * (amplitude / phase.norm().max(1e-12));
            }
            before = agreed;
        }
        self.sound(&spectra)
    }
}

/// A recording without the silence before and after the speech, scaled to the common loudness; empty if it is silent
/// throughout.
pub fn trimmed(samples: &[f32]) -> Vec<f32> {
    let there = &samples[spoken_range(samples)];
    let mean = there.iter().map(|&x| f64::from(x * x)).sum::<f64>() / there.len().max(1) as f64;
    let factor = (LEVEL / mean.sqrt().max(1e-12)) as f32;
    there.iter().map(|x| x * factor).collect()
}

/// The range of samples between the silence before and after the speech.
pub fn spoken_range(samples: &[f32]) -> std::ops::Range<usize> {
    let loud: Vec<f32> =
        samples.chunks(HOP).map(|part| part.iter().map(|x| x * x).sum::<f32>() / part.len() as f32).collect();
    let limit = loud.iter().copied().fold(0.0, f32::max) * SILENCE * SILENCE;
    let (Some(first), Some(last)) = (loud.iter().position(|&x| x > limit), loud.iter().rposition(|&x| x > limit))
    else {
        return 0..0;
    };
    (first * HOP).saturating_sub(MARGIN)..samples.len().min((last + 1) * HOP + MARGIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sound of several tones that come and go.
    fn melody() -> Vec<f32> {
        let tone = |at: usize, hertz: f32| (TAU * hertz * at as f32 / SAMPLE_RATE as f32).sin();
        let swell = |at: usize| 0.5 - 0.5 * (TAU * at as f32 / 4000.0).cos();
        let one = |at: usize| swell(at) * (tone(at, 220.0) + 0.5 * tone(at, 880.0 + (at / 4000) as f32 * 300.0));
        (0..16_000).map(|at| 0.1 * one(at)).collect()
    }

    #[test]
    fn transforms_and_back_give_the_same_sound() {
        let (vocoder, sound) = (Vocoder::new(80), melody());
        let again = vocoder.sound(&vocoder.transform(&sound));
        assert_eq!(again.len(), sound.len());
        assert!(again.iter().zip(&sound).all(|(a, b)| (a - b).abs() < 1e-5));
    }

    #[test]
    fn amplitudes_of_frequencies_have_the_bands_they_are_made_from() {
        let vocoder = Vocoder::new(80);
        let frames = vocoder.spectrogram(&melody());
        let amplitudes = vocoder.amplitudes(&frames);
        for (frame, found) in frames.chunks_exact(80).zip(amplitudes.chunks_exact(FREQUENCIES)) {
            let most = frame.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let most = (most * SPREAD + MIDDLE).exp();
            for (expected, (first, weights)) in frame.iter().zip(vocoder.filters.rows()) {
                let sum: f32 = weights.iter().zip(&found[first..]).map(|(weight, x)| weight * x).sum();
                let expected = (expected * SPREAD + MIDDLE).exp();
                assert!((sum - expected).abs() < 0.05 * expected + 0.03 * most + 1e-3, "{sum} and {expected}");
            }
        }
    }

    #[test]
    fn the_sound_of_a_spectrogram_has_that_spectrogram() {
        let vocoder = Vocoder::new(80);
        let frames = vocoder.spectrogram(&melody());
        let far = |iterations: usize| {
            let again = vocoder.spectrogram(&vocoder.samples(&frames, iterations, 3));
            let loud: Vec<usize> = (0..frames.len()).filter(|&at| frames[at] > 0.5).collect();
            loud.iter().map(|&at| (again[at] - frames[at]).abs()).sum::<f32>() / loud.len() as f32
        };
        let (few, many) = (far(1), far(60));
        assert!(many < 0.08 && many < few, "{few} after one step, {many} after 60");
        assert_eq!(vocoder.samples(&frames, 3, 3), vocoder.samples(&frames, 3, 3), "the seed decides");
    }

    #[test]
    fn silence_around_speech_is_cut_and_loudness_is_that_of_all() {
        let mut sound = vec![0.0; 8000];
        sound.extend(melody().iter().map(|x| x * 0.01));
        sound.extend(vec![0.0; 12_000]);
        let found = trimmed(&sound);
        assert!((16_000..=16_000 + 2 * MARGIN + 2 * HOP).contains(&found.len()), "{}", found.len());
        let mean = found.iter().map(|x| f64::from(x * x)).sum::<f64>() / found.len() as f64;
        assert!((mean.sqrt() - LEVEL).abs() < 1e-3);
        assert!(trimmed(&[0.0; 3000]).is_empty() && trimmed(&[]).is_empty());
        assert!(Vocoder::new(80).samples(&[], 3, 1).is_empty());
    }
}
