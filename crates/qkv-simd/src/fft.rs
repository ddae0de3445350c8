//! Fast Fourier transforms of real signals, for spectrograms of sound.
//!
//! A signal of `n` real samples is transformed as `n / 2` complex numbers, its even samples as real parts and its odd
//! ones as imaginary parts; their spectra are then taken apart. The complex transform is Stockham's: one pass for each
//! factor of the length, from one buffer to another and back, with the output in order. Passes of 4 and 2 are written
//! out, other factors follow the definition. Nothing is fused, so every CPU computes the same bits.

use std::f64::consts::TAU;
use std::ops::{Add, Mul, Sub};

/// A complex number.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Complex {
    /// The real part.
    pub re: f32,
    /// The imaginary part.
    pub im: f32,
}

impl Complex {
    /// A number of this amplitude and phase.
    pub fn from_polar(amplitude: f32, phase: f32) -> Complex {
        Complex { re: amplitude * phase.cos(), im: amplitude * phase.sin() }
    }

    /// The square of the amplitude.
    pub fn norm_sqr(self) -> f32 {
        self.re * self.re + self.im * self.im
    }

    /// The amplitude.
    pub fn norm(self) -> f32 {
        self.norm_sqr().sqrt()
    }

    fn conj(self) -> Complex {
        Complex { re: self.re, im: -self.im }
    }

    /// `e^(-2πi · at / n)`.
    fn root(at: usize, n: usize) -> Complex {
        let (sin, cos) = (-TAU * at as f64 / n as f64).sin_cos();
        Complex { re: cos as f32, im: sin as f32 }
    }
}

impl Add for Complex {
    type Output = Complex;

    fn add(self, other: Complex) -> Complex {
        Complex { re: self.re + other.re, im: self.im + other.im }
    }
}

impl Sub for Complex {
    type Output = Complex;

    fn sub(self, other: Complex) -> Complex {
        Complex { re: self.re - other.re, im: self.im - other.im }
    }
}

impl Mul for Complex {
    type Output = Complex;

    fn mul(self, other: Complex) -> Complex {
        Complex { re: self.re * other.re - self.im * other.im, im: self.re * other.im + self.im * other.re }
    }
}

impl Mul<f32> for Complex {
    type Output = Complex;

    fn mul(self, factor: f32) -> Complex {
        Complex { re: self.re * factor, im: self.im * factor }
    }
}

/// A transform of real signals of one length.
///
/// ```
/// use qkv_simd::fft::{Complex, RealFft};
/// let (fft, mut work) = (RealFft::new(4), Vec::new());
/// let mut spectrum = [Complex::default(); 3];
/// fft.forward(&[1.0, 0.0, -1.0, 0.0], &mut spectrum, &mut work);
/// assert_eq!(spectrum.map(|x| [x.re, x.im]), [[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]);
/// let mut samples = [0.0; 4];
/// fft.inverse(&spectrum, &mut samples, &mut work);
/// assert_eq!(samples, [4.0, 0.0, -4.0, 0.0]);
/// ```
#[derive(Clone, Debug)]
pub struct RealFft {
    stages: Vec<Stage>,
    /// `e^(-2πik/n)` for `k` up to `n / 2`.
    roots: Vec<Complex>,
}

/// A pass of the complex transform: `groups · stride` transforms of `radix` numbers each.
#[derive(Clone, Debug)]
struct Stage {
    radix: usize,
    groups: usize,
    stride: usize,
    /// The factors of the outputs, `[groups, radix]`.
    twiddles: Vec<Complex>,
    /// The roots of unity of the radix.
    roots: Vec<Complex>,
}

/// Real and imaginary parts.
type Parts<'a> = [&'a mut [f32]; 2];

impl RealFft {
    /// A transform of signals of `n` samples.
    ///
    /// # Panics
    /// If `n` is zero or odd.
    pub fn new(n: usize) -> RealFft {
        assert!(n > 0 && n.is_multiple_of(2), "a transform of {n} samples");
        let half = n / 2;
        let (mut stages, mut left, mut stride) = (Vec::new(), half, 1);
        while left > 1 {
            let radix = [4, 2].into_iter().chain(3..).find(|&radix| left.is_multiple_of(radix)).expect("itself");
            let groups = left / radix;
            let twiddle = |at: usize| Complex::root(at / radix * (at % radix), left);
            let twiddles = (0..left).map(twiddle).collect();
            let roots = (0..radix).map(|at| Complex::root(at, radix)).collect();
            stages.push(Stage { radix, groups, stride, twiddles, roots });
            (left, stride) = (groups, stride * radix);
        }
        RealFft { stages, roots: (0..=half).map(|at| Complex::root(at, n)).collect() }
    }

    /// Number of samples.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        2 * self.half()
    }

    fn half(&self) -> usize {
        self.roots.len() - 1
    }

    /// Transforms samples to the first half of their spectrum, `X[k] = Σ x[t] e^(-2πikt/n)` for `k` from 0 to `n / 2`;
    /// the other half is its conjugate. `work` is memory for calls to reuse.
    ///
    /// # Panics
    /// If there are not `n` samples, or the spectrum does not have `n / 2 + 1` numbers.
    pub fn forward(&self, samples: &[f32], spectrum: &mut [Complex], work: &mut Vec<f32>) {
        let half = self.half();
        assert!(samples.len() == 2 * half && spectrum.len() == half + 1, "not of the transform's length");
        let [mut re, mut im, other_re, other_im] = buffers(work, half);
        for (pair, (re, im)) in samples.chunks_exact(2).zip(re.iter_mut().zip(im.iter_mut())) {
            (*re, *im) = (pair[0], pair[1]);
        }
        [re, im] = self.transform([re, im], [other_re, other_im]);
        let at = |k: usize| Complex { re: re[k % half], im: im[k % half] };
        for (k, (x, &root)) in spectrum.iter_mut().zip(&self.roots).enumerate() {
            let (z, mirrored) = (at(k), at(half - k).conj());
            let (even, odd) = (z + mirrored, z - mirrored);
            *x = (even + Complex { re: odd.im, im: -odd.re } * root) * 0.5;
        }
    }

    /// The way back, times `n`. The imaginary parts of the first and the last number, zero in every spectrum of a real
    /// signal, are not read.
    ///
    /// # Panics
    /// If there is no memory for `n` samples, or the spectrum does not have `n / 2 + 1` numbers.
    pub fn inverse(&self, spectrum: &[Complex], samples: &mut [f32], work: &mut Vec<f32>) {
        let half = self.half();
        assert!(samples.len() == 2 * half && spectrum.len() == half + 1, "not of the transform's length");
        let [mut re, mut im, other_re, other_im] = buffers(work, half);
        let at = |k: usize| match k {
            k if k == 0 || k == half => Complex { im: 0.0, ..spectrum[k] },
            k => spectrum[k],
        };
        for (k, (re, im)) in re.iter_mut().zip(im.iter_mut()).enumerate() {
            let (x, mirrored) = (at(k), at(half - k).conj());
            let (even, odd) = (x + mirrored, (x - mirrored) * self.roots[k].conj());
            (*re, *im) = (even.re - odd.im, even.im + odd.re);
        }
        // With real and imaginary parts exchanged, the same transform goes the other way.
        [im, re] = self.transform([im, re], [other_im, other_re]);
        for (pair, (&re, &im)) in samples.chunks_exact_mut(2).zip(re.iter().zip(im.iter())) {
            (pair[0], pair[1]) = (re, im);
        }
    }

    /// The complex transform; returns the buffer that has the results.
    fn transform<'b>(&self, mut from: Parts<'b>, mut to: Parts<'b>) -> Parts<'b> {
        for stage in &self.stages {
            stage.run(&from, &mut to);
            std::mem::swap(&mut from, &mut to);
        }
        from
    }
}

/// Four buffers of `len` numbers.
fn buffers(work: &mut Vec<f32>, len: usize) -> [&mut [f32]; 4] {
    work.resize(4 * len, 0.0);
    let mut parts = work.chunks_exact_mut(len);
    [(); 4].map(|()| parts.next().expect("four buffers"))
}

impl Stage {
    /// Output `j` of group `p` is `Σ x[p + k · groups] e^(-2πijk/radix)` times its twiddle, for `stride` neighbors.
    fn run(&self, [from_re, from_im]: &Parts<'_>, [to_re, to_im]: &mut Parts<'_>) {
        let &Stage { radix, groups, stride, ref twiddles, ref roots } = self;
        let block = radix * stride;
        let to = to_re.chunks_exact_mut(block).zip(to_im.chunks_exact_mut(block));
        for (p, ((to_re, to_im), twiddles)) in to.zip(twiddles.chunks_exact(radix)).enumerate() {
            let input = |k: usize, q: usize| {
                let at = (p + k * groups) * stride + q;
                Complex { re: from_re[at], im: from_im[at] }
            };
            let mut output = |j: usize, q: usize, x: Complex| {
                let x = if j == 0 { x } else { x * twiddles[j] };
                (to_re[j * stride + q], to_im[j * stride + q]) = (x.re, x.im);
            };
            for q in 0..stride {
                match radix {
                    2 => {
                        let [a, b] = [input(0, q), input(1, q)];
                        output(0, q, a + b);
                        output(1, q, a - b);
                    }
                    4 => {
                        let [a, b, c, d] = [input(0, q), input(1, q), input(2, q), input(3, q)];
                        let (even, odd, middle, turned) = (a + c, b + d, a - c, b - d);
                        let turned = Complex { re: turned.im, im: -turned.re };
                        output(0, q, even + odd);
                        output(1, q, middle + turned);
                        output(2, q, even - odd);
                        output(3, q, middle - turned);
                    }
                    _ => {
                        for j in 0..radix {
                            let term = |k: usize| input(k, q) * roots[j * k % radix];
                            output(j, q, (1..radix).fold(input(0, q), |sum, k| sum + term(k)));
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The spectrum by its definition.
    fn defined(samples: &[f32]) -> Vec<[f64; 2]> {
        let n = samples.len();
        let term = |k: usize, t: usize| (-TAU * (k * t % n) as f64 / n as f64).sin_cos();
        let sum = |k: usize| {
            samples.iter().enumerate().fold([0.0; 2], |[re, im], (t, &x)| {
                let (sin, cos) = term(k, t);
                [re + f64::from(x) * cos, im + f64::from(x) * sin]
            })
        };
        (0..=n / 2).map(sum).collect()
    }

    #[test]
    fn a_spectrum_is_as_defined_and_goes_back_to_its_samples() {
        let mut work = Vec::new();
        for n in [2, 4, 6, 8, 10, 14, 16, 30, 44, 98, 128, 360, 400, 1024] {
            let samples: Vec<f32> = (0..n).map(|t| ((t * 2_654_435_761) % 1009) as f32 / 317.0 - 1.6).collect();
            let energy = samples.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
            let fft = RealFft::new(n);
            assert_eq!(fft.len(), n);
            let mut found = vec![Complex::default(); n / 2 + 1];
            fft.forward(&samples, &mut found, &mut work);
            // A number of the spectrum is a sum over the signal, whose rounding errors add up at random.
            let bound = 4.0 * f64::from(f32::EPSILON) * energy * (n as f64).log2().max(1.0).sqrt();
            for (k, (x, [re, im])) in found.iter().zip(defined(&samples)).enumerate() {
                let off = (f64::from(x.re) - re).hypot(f64::from(x.im) - im);
                assert!(off <= bound, "number {k} of {n} is off by {off}, bound {bound}");
            }
            let mut again = vec![0.0; n];
            fft.inverse(&found, &mut again, &mut work);
            let off = samples.iter().zip(&again).map(|(a, b)| (a - b / n as f32).abs()).fold(0.0, f32::max);
            assert!(off < 4e-6, "{off} after {n} samples came back");
        }
    }

    #[test]
    fn what_a_real_signal_cannot_have_is_not_read() {
        let fft = RealFft::new(8);
        let (mut work, mut clean, mut found) = (Vec::new(), [0.0; 8], [0.0; 8]);
        let mut spectrum = [Complex { re: 1.0, im: 0.0 }; 5];
        fft.inverse(&spectrum, &mut clean, &mut work);
        (spectrum[0].im, spectrum[4].im) = (f32::NAN, 7.0);
        fft.inverse(&spectrum, &mut found, &mut work);
        assert_eq!(found, clean);
    }
}
