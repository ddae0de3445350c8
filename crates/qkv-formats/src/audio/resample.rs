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
use std::sync::LazyLock;

/// Zero crossings of the sinc on either side: the transition band is 2.5 % of the lower rate wide.
const CROSSINGS: usize = 128;

/// Shape of the Kaiser window, for 100 dB between the pass band and what is folded into it.
const BETA: f64 = 10.06;

/// Width of the transition band over the lower rate; it ends where aliasing would begin.
const TRANSITION: f64 = (100.0 - 8.0) / (2.285 * 2.0 * PI * 2.0 * CROSSINGS as f64);

/// Points of the impulse response between two zero crossings. Straight lines between them are 115 dB from the curve.
const POINTS: usize = 512;

/// The most weights that are kept. Common rates need fewer; for the others a row is computed whenever it is needed.
const KEPT: usize = 1 << 20;

/// A resampler from one rate.
pub(super) struct Resampler {
    rate: usize,
    /// Output `n` lies at `n · step / phases`.
    step: u64,
    phases: u64,
    /// Number of inputs with a weight on either side of that time.
    reach: usize,
    /// Cut-off over the rate of the input.
    cutoff: f64,
    /// Half the length of the impulse response, in input samples.
    half: f64,
    /// Rows of all phases, or none.
    rows: Vec<f32>,
    /// The row of one phase, computed when it is needed.
    row: Vec<f32>,
    /// Inputs from number `from` on, counted from `reach` samples of silence before the first.
    waiting: Vec<f32>,
    from: u64,
    read: u64,
    written: u64,
}

/// One side of the impulse response, from its center to its end: a sinc under a Kaiser window.
static IMPULSE: LazyLock<Vec<f64>> = LazyLock::new(|| {
    let last = CROSSINGS * POINTS;
    let value = |at: usize| {
        let across = at as f64 / last as f64;
        let x = PI * (1.0 - TRANSITION) * CROSSINGS as f64 * across;
        let sinc = if x == 0.0 { 1.0 } else { x.sin() / x };
        sinc * bessel(BETA * (1.0 - across * across).sqrt()) / bessel(BETA)
    };
    (0..=last).map(value).collect()
});

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
        // Beyond, one row of weights would take megabytes, or an output would repeat an input hundreds of times.
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
            cutoff,
            half,
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

    /// Fills `row` with the weights of a phase: of the `reach` inputs up to its time, and of as many after it.
    fn compute_row(&mut self, phase: u64) {
        let first = (self.reach - 1) as f64 + phase as f64 / self.phases as f64;
        let points = (CROSSINGS * POINTS) as f64 / self.half;
        for (at, weight) in self.row.iter_mut().enumerate() {
            let place = (at as f64 - first).abs() * points;
            let impulse = match IMPULSE.get(place as usize..place as usize + 2) {
                Some(&[left, right]) => left + place.fract() * (right - left),
                _ => 0.0,
            };
            *weight = (2.0 * self.cutoff * impulse) as f32;
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
        // Rates whose weights are too many to be kept.
        for rate in [22_255, 44_101] {
            let found = resampled(rate, &tone(rate, 440.0, 0.1), 999);
            let expected = tone(SAMPLE_RATE, 440.0, 0.1);
            let off = (200..1400).map(|at| (found[at] - expected[at]).abs()).fold(0.0, f32::max);
            assert!(off < 2e-3, "from {rate}: {off}");
        }
        let above = resampled(48_000, &tone(48_000, 12_000.0, 0.5), 777);
        assert!(above[1000..7000].iter().all(|x| x.abs() < 1e-2));
    }

    #[test]
    fn the_pass_band_is_flat_and_the_stop_band_is_100_db_down() {
        let of = |hertz: f64| resampled(48_000, &tone(48_000, hertz, 0.25), 4_800)[1000..3000].to_vec();
        for hertz in [60.0, 4_000.0, 7_590.0] {
            let expected = &tone(SAMPLE_RATE, hertz, 0.25)[1000..3000];
            let off = of(hertz).iter().zip(expected).map(|(found, x)| (found - x).abs()).fold(0.0, f32::max);
            assert!(off < 2e-5, "{hertz} Hz: {off}");
        }
        for hertz in [8_010.0, 9_000.0, 15_000.0, 23_000.0] {
            let largest = of(hertz).iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            assert!(largest < 1.1e-5, "{hertz} Hz: {largest}");
        }
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
