//! Elementwise loops compiled for each instruction set: what the layers of a model do besides matrix products. A pass
//! is safe code that the compiler vectorizes.

use crate::isa::{Isa, Level};
use crate::number::Real;

/// A pass with its arguments. `run` must be `#[inline(always)]`, and so must every function called in its loops
/// (closures are not), or the loops are compiled without the instruction set.
///
/// ```
/// use qkv_simd::{Isa, pass::{Pass, run}};
/// struct Double<'a>(&'a mut [f32]);
/// impl Pass for Double<'_> {
///     type Output = ();
///     #[inline(always)]
///     fn run(self) {
///         for x in self.0 {
///             *x += *x;
///         }
///     }
/// }
/// let mut numbers = [1.0, 2.0];
/// run(Isa::best(), Double(&mut numbers));
/// assert_eq!(numbers, [2.0, 4.0]);
/// ```
pub trait Pass {
    /// The result.
    type Output;
    /// Runs the loops.
    fn run(self) -> Self::Output;
}

/// Runs a pass as compiled for `isa`.
#[inline]
pub fn run<P: Pass>(isa: Isa, pass: P) -> P::Output {
    match isa.level() {
        Level::Portable => pass.run(),
        // Every aarch64 has NEON, so the compiler uses it anyway.
        #[cfg(target_arch = "aarch64")]
        Level::Neon => pass.run(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` of this level exists only where the CPU has it.
        Level::Avx2 => unsafe { avx2(pass) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe { avx512(pass) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<P: Pass>(pass: P) -> P::Output {
    pass.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn avx512<P: Pass>(pass: P) -> P::Output {
    pass.run()
}

/// Branch-free functions of one number, so that loops over them vectorize. In `f32` accurate to a few units in the last
/// place; in `f64`, which is used to check gradients, those of the standard library and `libm`.
pub trait Smooth: Real {
    /// The exponential; 0 below −87.3 in `f32`.
    fn exponential(self) -> Self;

    /// `1 / (1 + e⁻ˣ)`.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exponential())
    }

    /// The hyperbolic tangent.
    fn hyperbolic_tangent(self) -> Self;

    /// The error function.
    fn error_function(self) -> Self;
}

/// 1.5 · 2²³: adding it rounds a number to an integer, which is then in the low bits.
pub(crate) const MAGIC: f32 = 12_582_912.0;

/// ln 2 in two parts; the first has so few bits that its product with any `k` is exact.
pub(crate) const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// Coefficients of `eʳ` from the highest power down to `r²`.
pub(crate) const EXPONENTIAL: [f32; 5] = [0.001_381_454, 0.008_368_745, 0.041_668_39, 0.166_665_2, 0.499_999_93];

/// `eʳ` of `x = k·ln 2 + r`, and `k + MAGIC`.
#[inline(always)]
fn reduced_exponential(x: f32) -> (f32, f32) {
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let k = shifted - MAGIC;
    let r = (x - k * LN_2[0]) - k * LN_2[1];
    let mut y = EXPONENTIAL[0];
    for coefficient in &EXPONENTIAL[1..] {
        y = y * r + coefficient;
    }
    ((y * r) * r + r + 1.0, shifted)
}

impl Smooth for f32 {
    #[inline(always)]
    fn exponential(self) -> f32 {
        let (y, shifted) = reduced_exponential(self.clamp(-88.0, 88.7));
        // 2ᵏ as two factors, so that neither overflows or underflows.
        let whole = shifted.to_bits().wrapping_sub(MAGIC.to_bits()) as i32;
        let half = whole >> 1;
        let power = |k: i32| f32::from_bits(((k + 127) as u32) << 23);
        let y = y * power(half) * power(whole - half);
        if self < -87.3 { 0.0 } else { y }
    }

    #[inline(always)]
    fn hyperbolic_tangent(self) -> f32 {
        // Near zero the quotient below cancels; a few terms of the series are accurate there.
        let (x, square) = (self, self * self);
        let small = x + x
            * square
            * (-0.333_333_34 + square * (0.133_333_34 + square * (-0.053_968_254 + square * 0.021_869_49)));
        let e = (-2.0 * x.abs()).exponential();
        let large = ((1.0 - e) / (1.0 + e)).copysign(x);
        if x.abs() < 0.25 { small } else { large }
    }

    /// Abramowitz and Stegun 7.1.26: accurate to 1.5e-7, plus rounding.
    #[inline(always)]
    fn error_function(self) -> f32 {
        let x = self.abs();
        let t = 1.0 / (1.0 + 0.327_591_1 * x);
        let poly = t * (0.254_829_6 + t * (-0.284_496_72 + t * (1.421_413_8 + t * (-1.453_152_1 + t * 1.061_405_4))));
        (1.0 - poly * (-x * x).exponential()).copysign(self)
    }
}

impl Smooth for f64 {
    #[inline(always)]
    fn exponential(self) -> f64 {
        self.exp()
    }

    #[inline(always)]
    fn hyperbolic_tangent(self) -> f64 {
        self.tanh()
    }

    fn error_function(self) -> f64 {
        libm::erf(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct All<'a>(&'a [f32], &'a mut [[f32; 4]]);

    impl Pass for All<'_> {
        type Output = ();
        #[inline(always)]
        fn run(self) {
            for (x, out) in self.0.iter().zip(self.1) {
                *out = [x.exponential(), x.sigmoid(), x.hyperbolic_tangent(), x.error_function()];
            }
        }
    }

    #[test]
    fn smooth_functions_are_accurate_on_every_instruction_set() {
        let numbers: Vec<f32> = (-90_000..=90_000).map(|x| x as f32 / 1000.0).collect();
        for isa in Isa::available() {
            let mut found = vec![[0.0; 4]; numbers.len()];
            run(isa, All(&numbers, &mut found));
            for (&x, [exp, sigmoid, tanh, erf]) in numbers.iter().zip(found) {
                let wide = f64::from(x);
                let close = |found: f32, expected: f64, relative: f64, absolute: f64| {
                    let error = (f64::from(found) - expected).abs();
                    error <= relative * expected.abs() + absolute || f64::from(found) == expected
                };
                let exp_expected = if x < -87.3 { 0.0 } else { wide.exp() };
                assert!(x > 88.3 || close(exp, exp_expected, 4e-7, 0.0), "{isa} exp {x} {exp} {exp_expected}");
                assert!(close(sigmoid, 1.0 / (1.0 + (-wide).exp()), 5e-7, 1e-37), "{isa} sigmoid {x} {sigmoid}");
                assert!(close(tanh, wide.tanh(), 4e-7, 0.0), "{isa} tanh {x} {tanh}");
                assert!(close(erf, wide.error_function(), 0.0, 1e-6), "{isa} erf {x} {erf}");
            }
        }
    }

    #[test]
    fn the_error_function_is_accurate_in_f64() {
        // To twenty digits from tables.
        let known = [(0.5, 0.520_499_877_813_046_5), (1.0, 0.842_700_792_949_714_9), (2.9, 0.999_958_902_121_900_5)];
        for (x, expected) in known {
            assert!((x.error_function() - expected).abs() < 1e-15, "{x}");
            assert!(((-x).error_function() + expected).abs() < 1e-15, "{x}");
        }
        assert!((2.999_999_9f64.error_function() - 3.000_000_1f64.error_function()).abs() < 1e-10);
    }
}
