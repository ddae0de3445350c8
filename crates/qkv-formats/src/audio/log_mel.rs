//! Log-mel spectrograms as Whisper reads them (Radford et al. 2022, arXiv:2212.04356): windows of 25 ms every 10 ms,
//! their power in mel bands, and its logarithm, clipped at a fixed distance below the loudest point of the whole
//! recording.
//!
//! The loudest point is known only at the end, so a recording is read twice. The first pass also finds any damage to a
//! file before any of it is used.

use super::{Recording, SAMPLE_RATE, Samples};
use crate::Result;
use realfft::num_complex::Complex;
use realfft::{RealFftPlanner, RealToComplex};
use std::sync::Arc;

/// Samples per window.
pub const WINDOW: usize = 400;
/// Samples from one window to the next.
pub const HOP: usize = 160;
/// Frequency bins per window.
pub const FREQUENCIES: usize = WINDOW / 2 + 1;
/// Frames per second.
pub const FRAME_RATE: usize = SAMPLE_RATE / HOP;
/// Samples of silence appended to a recording.
const PADDING: usize = HOP;
/// Lower bound on power.
const FLOOR: f32 = 1e-10;
/// Base-10 logarithms are clipped at this distance below the loudest.
const RANGE: f32 = 8.0;

/// Mel filters of unit area (Slaney 1998).
#[derive(Clone, PartialEq)]
pub struct MelFilters {
    bands: usize,
    /// `[bands, FREQUENCIES]`.
    weights: Vec<f32>,
    /// The frequency bins of each band, from the first to the last with a nonzero weight.
    ranges: Vec<std::ops::Range<usize>>,
}

impl std::fmt::Debug for MelFilters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MelFilters({})", self.bands)
    }
}

/// The frequency of a point on the mel scale: linear up to 1000 Hz, then logarithmic.
fn hertz(mel: f64) -> f64 {
    let linear = mel * 200.0 / 3.0;
    if mel < 15.0 { linear } else { 1000.0 * ((6.4f64).ln() / 27.0 * (mel - 15.0)).exp() }
}

/// 8000 Hz on the mel scale.
const HIGHEST_MEL: f64 = 45.245640471924965;

impl MelFilters {
    /// `bands` triangles between 0 and 8000 Hz, evenly spaced on the mel scale.
    ///
    /// ```
    /// use qkv_formats::audio::MelFilters;
    /// let filters = MelFilters::slaney(80);
    /// assert_eq!((filters.bands(), filters.weights().len()), (80, 80 * 201));
    /// ```
    pub fn slaney(bands: usize) -> MelFilters {
        MelFilters::of_window(bands, WINDOW)
    }

    /// The same for windows of another length, which have `window / 2 + 1` frequency bins.
    pub(super) fn of_window(bands: usize, window: usize) -> MelFilters {
        let frequencies = window / 2 + 1;
        let edge = |at: usize| hertz(HIGHEST_MEL * at as f64 / (bands + 1) as f64);
        let mut weights = vec![0.0; bands * frequencies];
        for (band, row) in weights.chunks_exact_mut(frequencies).enumerate() {
            let [low, middle, high] = [edge(band), edge(band + 1), edge(band + 2)];
            for (bin, weight) in row.iter_mut().enumerate() {
                let frequency = bin as f64 * SAMPLE_RATE as f64 / window as f64;
                let (up, down) = ((frequency - low) / (middle - low), (high - frequency) / (high - middle));
                *weight = (up.min(down).max(0.0) * 2.0 / (high - low)) as f32;
            }
        }
        MelFilters::of_weights(bands, frequencies, weights)
    }

    /// Filters with the given weights, `[bands, 201]`.
    ///
    /// # Panics
    /// If the number of weights is not `bands * 201`.
    pub fn new(bands: usize, weights: Vec<f32>) -> MelFilters {
        MelFilters::of_weights(bands, FREQUENCIES, weights)
    }

    fn of_weights(bands: usize, frequencies: usize, weights: Vec<f32>) -> MelFilters {
        assert_eq!(weights.len(), bands * frequencies, "weights of {bands} bands");
        let range = |row: &[f32]| {
            let first = row.iter().position(|&weight| weight != 0.0).unwrap_or(0);
            let end = row.iter().rposition(|&weight| weight != 0.0).map_or(first, |last| last + 1);
            first..end
        };
        let ranges = weights.chunks_exact(frequencies).map(range).collect();
        MelFilters { bands, weights, ranges }
    }

    /// Number of bands.
    pub fn bands(&self) -> usize {
        self.bands
    }

    /// The nonzero weights of each band, with the index of their first frequency bin.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, &[f32])> {
        let rows = self.weights.chunks_exact(self.weights.len() / self.bands.max(1));
        rows.zip(&self.ranges).map(|(row, range)| (range.start, &row[range.clone()]))
    }

    /// All weights, `[bands, 201]`.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }
}

/// The frames of a stream of samples: `log10` of the power in each band, before clipping.
struct Frames {
    samples: Samples,
    filters: MelFilters,
    transform: Arc<dyn RealToComplex<f32>>,
    hann: Vec<f32>,
    /// Samples that are still needed; the next window starts at `from`. The first sample is preceded by the mirrored
    /// start.
    buffer: Vec<f32>,
    from: usize,
    /// Number of samples of the recording, once its end is reached.
    total: Option<usize>,
    read: usize,
    frame: usize,
    windowed: Vec<f32>,
    spectrum: Vec<Complex<f32>>,
    scratch: Vec<Complex<f32>>,
    power: Vec<f32>,
}

impl Frames {
    fn new(recording: &Recording, filters: &MelFilters) -> Result<Frames> {
        let transform = RealFftPlanner::<f32>::new().plan_fft_forward(WINDOW);
        let hann = |at: usize| 0.5 - 0.5 * (std::f64::consts::TAU * at as f64 / WINDOW as f64).cos();
        let mut frames = Frames {
            samples: recording.samples()?,
            filters: filters.clone(),
            hann: (0..WINDOW).map(|at| hann(at) as f32).collect(),
            buffer: Vec::new(),
            from: 0,
            total: None,
            read: 0,
            frame: 0,
            windowed: transform.make_input_vec(),
            spectrum: transform.make_output_vec(),
            scratch: transform.make_scratch_vec(),
            power: vec![0.0; FREQUENCIES],
            transform,
        };
        let half = WINDOW / 2;
        frames.fill(half + 1)?;
        // The recording is followed by `PADDING` zeros, and the whole is mirrored at both ends.
        let length = frames.total.map_or(usize::MAX / 4, |total| total + PADDING);
        let mirrored = |at: usize| match at % (2 * (length - 1)) {
            at if at < length => at,
            at => 2 * (length - 1) - at,
        };
        let at = |index: usize| frames.buffer.get(index).copied().unwrap_or(0.0);
        let mut before: Vec<f32> = (1..=half).rev().map(|index| at(mirrored(index))).collect();
        before.append(&mut frames.buffer);
        frames.buffer = before;
        Ok(frames)
    }

    /// Reads until the buffer has `count` samples after `from`, or the recording ends.
    fn fill(&mut self, count: usize) -> Result<()> {
        while self.buffer.len() - self.from < count && self.total.is_none() {
            match self.samples.next().transpose()? {
                Some(piece) => {
                    self.buffer.drain(..self.from);
                    self.from = 0;
                    self.read += piece.len();
                    self.buffer.extend_from_slice(&piece);
                }
                None => self.total = Some(self.read),
            }
        }
        Ok(())
    }

    /// The next frame, `[bands]`; `None` at the end. There is one frame per whole hop, and one more.
    fn next(&mut self, out: &mut [f32]) -> Result<Option<()>> {
        self.fill(WINDOW)?;
        if self.total.is_some_and(|total| self.frame > total / HOP) {
            return Ok(None);
        }
        let there = &self.buffer[self.from.min(self.buffer.len())..];
        for (at, (to, hann)) in self.windowed.iter_mut().zip(&self.hann).enumerate() {
            *to = there.get(at).copied().unwrap_or(0.0) * hann;
        }
        let transformed =
            self.transform.process_with_scratch(&mut self.windowed, &mut self.spectrum, &mut self.scratch);
        transformed.expect("buffers of the sizes that it asked for");
        self.power.iter_mut().zip(&self.spectrum).for_each(|(power, x)| *power = x.norm_sqr());
        let rows = self.filters.weights.chunks_exact(FREQUENCIES).zip(&self.filters.ranges);
        for (out, (row, range)) in out.iter_mut().zip(rows) {
            let pairs = row[range.clone()].iter().zip(&self.power[range.clone()]);
            let power: f32 = pairs.map(|(weight, power)| weight * power).sum();
            *out = power.max(FLOOR).log10();
        }
        self.from += HOP;
        self.frame += 1;
        Ok(Some(()))
    }
}

/// The log-mel spectrogram of a recording, window by window. Holds the frames of one window at a time.
pub struct Spectrogram<'a> {
    recording: &'a Recording,
    filters: &'a MelFilters,
    frames: Frames,
    /// Frames that were read and may be needed again, from frame `first` on, `[.., bands]`.
    held: Vec<f32>,
    first: usize,
    /// Number of frames of the whole recording.
    count: usize,
    samples: usize,
    loudest: f32,
}

impl std::fmt::Debug for Spectrogram<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Spectrogram({} frames)", self.count)
    }
}

impl<'a> Spectrogram<'a> {
    /// Reads a recording once from start to end, and opens it again.
    ///
    /// # Errors
    /// If anything is wrong with the recording, at any point of it.
    pub fn new(recording: &'a Recording, filters: &'a MelFilters) -> Result<Spectrogram<'a>> {
        let mut frames = Frames::new(recording, filters)?;
        let mut frame = vec![0.0; filters.bands];
        let mut loudest = f32::NEG_INFINITY;
        while frames.next(&mut frame)?.is_some() {
            loudest = frame.iter().fold(loudest, |most, &x| most.max(x));
        }
        let samples = frames.total.unwrap_or(frames.read);
        let frames = Frames::new(recording, filters)?;
        let count = samples / HOP;
        Ok(Spectrogram { recording, filters, frames, held: Vec::new(), first: 0, count, samples, loudest })
    }

    /// Number of frames of the whole recording, without the last one, which comes from the padding.
    pub fn frames(&self) -> usize {
        self.count
    }

    /// Its length in seconds.
    pub fn seconds(&self) -> f64 {
        self.samples as f64 / SAMPLE_RATE as f64
    }

    /// Frames `from .. from + content`, then zeros, `[length, bands]`. Reading windows in ascending order takes one
    /// pass.
    ///
    /// # Errors
    /// If the file can no longer be read.
    pub fn window(&mut self, from: usize, content: usize, length: usize) -> Result<Vec<f32>> {
        let bands = self.filters.bands;
        if from < self.first {
            self.frames = Frames::new(self.recording, self.filters)?;
            self.held.clear();
            self.first = 0;
        }
        let behind = (from - self.first).min(self.held.len() / bands);
        self.held.drain(..behind * bands);
        self.first += behind;
        let mut frame = vec![0.0; bands];
        while self.first + self.held.len() / bands < from + content && self.frames.next(&mut frame)?.is_some() {
            if self.frames.frame > from {
                self.held.extend_from_slice(&frame);
            } else {
                self.first += 1;
            }
        }
        let lowest = self.loudest - RANGE;
        let there = &self.held[..self.held.len().min(content * bands)];
        let mut window: Vec<f32> = there.iter().map(|x| (x.max(lowest) + 4.0) / 4.0).collect();
        window.resize(length * bands, 0.0);
        Ok(window)
    }
}
