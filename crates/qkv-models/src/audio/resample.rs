//! Mono samples of any rate to 16 kHz, in pieces: a windowed-sinc interpolator (Smith and Gossett 1984), without its
//! delay.
//!
//! Output sample `n` lies at time `n · step / phases` of the input, in samples, with `step / phases` the ratio of the
//! two rates in lowest terms. So the fraction of that time repeats every `phases` outputs, and the weights with it: the
//! filter is one row of weights for each phase. An output is a dot product of a row with the input around its time,
//! whatever pieces the input came in.

use super::SAMPLE_RATE;
use qkv_simd::resample::weighted_sum;
use std::f64::consts::PI;

/// Zero crossings of the sinc on either side: the transition band is 2.5 % of the lower rate wide.
const CROSSINGS: usize = 128;

/// Shape of the Kaiser window, for 100 dB between the pass band and what is folded into it.
const BETA: f64 = 10.06;

/// Width of the transition band over the lower rate; it ends where aliasing would begin.
const TRANSITION: f64 = (100.0 - 8.0) / (2.285 * 2.0 * PI * 2.0 * CROSSINGS as f64);

/// Weights that are kept. The rates of sound files need fewer; of others, rows are computed whenever they are needed.
const KEPT: usize = 1 << 20;

/// A resampler from one rate.
pub(super) struct Resampler {
    rate: usize,
    /// Output `n` lies at `n · step / phases`.
    step: u64,
    phases: u64,
    /// Inputs on either side of that time with a weight.
    reach: usize,
    filter: Filter,
    /// Rows of all phases, or none.
    rows: Vec<f32>,
    /// One that is computed when it is needed.
    row: Vec<f32>,
    /// Inputs from number `from` on, counted from `reach` samples of silence before the first.
    waiting: Vec<f32>,
    from: u64,
    read: u64,
    written: u64,
}

/// The impulse response as a function of time.
struct Filter {
    /// Cut-off over the rate of the input.
    cutoff: f64,
    /// Half of its length, in input samples.
    half: f64,
}

impl Filter {
    /// Weight of an input that is `time` samples from the output.
    fn weight(&self, time: f64) -> f32 {
        let across = time / self.half;
        if across.abs() >= 1.0 {
            return 0.0;
        }
        let x = 2.0 * PI * self.cutoff * time;
        let sinc = if x == 0.0 { 1.0 } else { x.sin() / x };
        let window = bessel(BETA * (1.0 - across * across).sqrt()) / bessel(BETA);
        (2.0 * self.cutoff * sinc * window) as f32
    }
}

/// The modified Bessel function I₀, by its power series.
fn bessel(x: f64) -> f64 {
    let (mut sum, mut term, mut k) = (1.0, 1.0, 1.0);
    while term > sum * f64::EPSILON {
        term *= (x / (2.0 * k)).powi(2);
        sum += term;
        k += 1.0;
    }
    sum
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
        // Below, a single output would reach over more inputs than it has weight for; above, no file has been seen.
        if !(100..=10_000_000).contains(&rate) {
            return Err(format!("{rate} samples a second cannot be converted: 100 to 10,000,000 can"));
        }
        let common = gcd(rate, SAMPLE_RATE);
        let (step, phases) = ((rate / common) as u64, (SAMPLE_RATE / common) as u64);
        // Of the lower rate, over that of the input.
        let lower = SAMPLE_RATE.min(rate) as f64 / rate as f64;
        let cutoff = lower * (0.5 - TRANSITION / 2.0);
        let half = CROSSINGS as f64 / lower;
        let reach = half.ceil() as usize;
        let mut made = Resampler {
            rate,
            step,
            phases,
            reach,
            filter: Filter { cutoff, half },
            rows: Vec::new(),
            row: vec![0.0; 2 * reach],
            waiting: vec![0.0; reach],
            from: 0,
            read: 0,
            written: 0,
        };
        if phases as usize * made.row.len() <= KEPT {
            let mut rows = Vec::with_capacity(phases as usize * made.row.len());
            for phase in 0..phases {
                made.compute_row(phase);
                rows.extend_from_slice(&made.row);
            }
            made.rows = rows;
        }
        Ok(made)
    }

    /// Makes `row` the weights of a phase: of the `reach` inputs up to the time, and of as many after it.
    fn compute_row(&mut self, phase: u64) {
        let fraction = phase as f64 / self.phases as f64;
        for (at, weight) in self.row.iter_mut().enumerate() {
            *weight = self.filter.weight(at as f64 - (self.reach - 1) as f64 - fraction);
        }
    }

    /// Output samples of the input so far.
    fn due(&self) -> u64 {
        (self.read * self.phases).div_ceil(self.step)
    }

    pub fn push(&mut self, samples: &[f32]) -> Vec<f32> {
        self.read += samples.len() as u64;
        self.waiting.extend_from_slice(samples);
        self.outputs()
    }

    /// The rest, behind which there is silence.
    pub fn finish(&mut self) -> Vec<f32> {
        self.waiting.extend(std::iter::repeat_n(0.0, self.reach));
        self.outputs()
    }

    /// All outputs whose inputs are there.
    fn outputs(&mut self) -> Vec<f32> {
        let (mut out, length) = (Vec::new(), self.row.len());
        while self.written < self.due() {
            let time = self.written * self.step;
            let (whole, phase) = (time / self.phases, time % self.phases);
            let row = if self.rows.is_empty() {
                self.compute_row(phase);
                &self.row
            } else {
                &self.rows[phase as usize * length..][..length]
            };
            // With the silence, input `whole - reach + 1` is number `whole + 1`.
            let first = (whole + 1 - self.from) as usize;
            let Some(inputs) = self.waiting.get(first..first + length) else { break };
            out.push(weighted_sum(inputs, row));
            self.written += 1;
        }
        let needed = (self.written * self.step / self.phases + 1).saturating_sub(self.from);
        let done = (needed as usize).min(self.waiting.len());
        self.waiting.drain(..done);
        self.from += done as u64;
        out
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
            // The ends have silence beyond them.
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
