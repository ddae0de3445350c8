//! The exponential and the hyperbolic tangent over lanes, accurate to the last bits and without branches.
//!
//! Both use one range reduction: `x = k·ln 2 + r` with `|r| ≤ ln 2 / 2`, so that `eˣ = 2ᵏ·eʳ` with a polynomial for
//! `eʳ`. `tanh` uses `eˣ − 1 = 2ᵏ·p + (2ᵏ − 1)` with the series of `p = eʳ − 1`, which is accurate near zero, where
//! subtracting one from the exponential would cancel.

use crate::lanes::Lanes;
use crate::number::Real;

/// The constants of the range reduction, by type.
#[doc(hidden)]
pub trait Constants: Sized + 'static {
    /// `1.5 · 2^(mantissa bits)`: adding it rounds to an integer, which is then in the low bits.
    const MAGIC: Self;
    /// log₂ e.
    const LOG2_E: Self;
    /// ln 2 in two parts; the first has so few bits that its product with any `k` is exact.
    const LN_2_HIGH: Self;
    /// The rest of ln 2.
    const LN_2_LOW: Self;
    /// Below this the exponential is 0 (it would be subnormal); above [`Self::HIGHEST`] it is infinite.
    const LOWEST: Self;
    /// See [`Self::LOWEST`].
    const HIGHEST: Self;
    /// Below this a weight is 0. `e` to this power is some 2⁻¹⁰⁰ of the largest weight (2⁻⁹⁰⁰ in `f64`), which no sum
    /// can tell from zero. Smaller weights, and their products with small values and gradients, would be subnormal,
    /// which cost some hundred cycles each.
    const LOWEST_WEIGHT: Self;
    /// Above this `tanh` is ±1 to the last bit.
    const TANH_IS_ONE: Self;
    /// `1/k!` from the highest power down to `1/2!`. One more term would be less than half a unit in the last place.
    const SERIES: &'static [Self];
    /// The coefficients of `eʳ` from the highest power down to `r²`, chosen for the smallest relative error: in `f32`
    /// below a thirtieth of a unit in the last place. The first two coefficients are 1.
    const ACCURATE: &'static [Self];
    /// Fewer coefficients, accurate to 17 bits: enough for weights that are rounded to bf16.
    const SHORT: &'static [Self];
}

const fn inverse_factorials<const N: usize>() -> [f64; N] {
    let (mut out, mut k, mut factorial) = ([0.0; N], 2, 2.0);
    while k < N + 2 {
        out[N + 1 - k] = 1.0 / factorial;
        k += 1;
        factorial *= k as f64;
    }
    out
}

const fn narrowed<const N: usize>(wide: [f64; N]) -> [f32; N] {
    let (mut out, mut k) = ([0.0; N], 0);
    while k < N {
        out[k] = wide[k] as f32;
        k += 1;
    }
    out
}

impl Constants for f32 {
    const MAGIC: f32 = 12_582_912.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN_2_HIGH: f32 = 0.693_359_4; // 355/512
    const LN_2_LOW: f32 = (std::f64::consts::LN_2 - 0.693_359_375) as f32;
    const LOWEST_WEIGHT: f32 = -69.3;
    const LOWEST: f32 = -87.3; // a little above ln of the smallest normal number
    const HIGHEST: f32 = 88.376; // (127.5) · ln 2
    const TANH_IS_ONE: f32 = 10.0;
    const SERIES: &'static [f32] = &narrowed(inverse_factorials::<6>());
    const ACCURATE: &'static [f32] = &[0.001_381_454, 0.008_368_745, 0.041_668_39, 0.166_665_2, 0.499_999_93];
    const SHORT: &'static [f32] = &[0.041_277_37, 0.167_536, 0.500_051_26];
}

impl Constants for f64 {
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    const LOG2_E: f64 = std::f64::consts::LOG2_E;
    const LN_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000); // ln 2 with its low 21 bits cleared
    const LN_2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76); // ln 2 − the above
    const LOWEST_WEIGHT: f64 = -623.8;
    const LOWEST: f64 = -708.3;
    const HIGHEST: f64 = 709.4;
    const TANH_IS_ONE: f64 = 20.0;
    const SERIES: &'static [f64] = &inverse_factorials::<12>();
    const ACCURATE: &'static [f64] = Self::SERIES;
    const SHORT: &'static [f64] = Self::SERIES;
}

/// `(2ᵏ, eʳ − 1)` of `x = k·ln 2 + r`, for `x` between the limits. NaN gives NaN in the second.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn parts<V: Lanes>(x: V) -> (V, V) {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let magic = V::splat(V::Scalar::MAGIC);
        let shifted = x.mul_add(V::splat(V::Scalar::LOG2_E), magic);
        let k = shifted.sub(magic);
        let r = k.mul_add(V::splat(-V::Scalar::LN_2_HIGH), x);
        let r = k.mul_add(V::splat(-V::Scalar::LN_2_LOW), r);
        let series = V::Scalar::SERIES;
        let mut q = V::splat(series[0]);
        for &c in &series[1..] {
            q = q.mul_add(r, V::splat(c));
        }
        (shifted.power_of_two(), q.mul(r).mul_add(r, r))
    }
}

/// `2ᵏ·eʳ` of `x = k·ln 2 + r`, with a polynomial for `eʳ`: 0 below `lowest`, accurate from there up to the highest,
/// NaN for NaN.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn power<V: Lanes, const ACCURATE: bool>(x: V, lowest: V::Scalar) -> V {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let magic = V::splat(V::Scalar::MAGIC);
        let shifted = x.mul_add(V::splat(V::Scalar::LOG2_E), magic);
        let k = shifted.sub(magic);
        let (r, series) = if ACCURATE {
            let r = k.mul_add(V::splat(-V::Scalar::LN_2_HIGH), x);
            (k.mul_add(V::splat(-V::Scalar::LN_2_LOW), r), V::Scalar::ACCURATE)
        } else {
            (k.mul_add(V::splat(-(V::Scalar::LN_2_HIGH + V::Scalar::LN_2_LOW)), x), V::Scalar::SHORT)
        };
        let mut y = V::splat(series[0]);
        for &c in &series[1..] {
            y = y.mul_add(r, V::splat(c));
        }
        let one = V::splat(V::Scalar::ONE);
        y.mul_add(r, one).mul_add(r, one).times_power_from(lowest, x, k, shifted)
    }
}

/// `eˣ`, within 1.5 units in the last place; 0 where the result would be subnormal, NaN for NaN.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(crate) unsafe fn exp<V: Lanes>(x: V) -> V {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let y = power::<V, true>(x, V::Scalar::LOWEST);
        V::splat(V::Scalar::HIGHEST).where_less(x, V::splat(V::Scalar::from_f64(f64::INFINITY)), y)
    }
}

/// The weight `eˣ` for an `x` of at most a little above 0, as scores relative to a maximum or a log-sum-exp are. Like
/// [`exp`], but 0 from 2⁻¹⁰⁰ down (2⁻⁹⁰⁰ in `f64`) and for −∞, and without a guard above. Accurate to 17 bits unless
/// `ACCURATE`.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(crate) unsafe fn weight<V: Lanes, const ACCURATE: bool>(x: V) -> V {
    // SAFETY: the caller guarantees the instruction set.
    unsafe { power::<V, ACCURATE>(x, V::Scalar::LOWEST_WEIGHT) }
}

/// `tanh x`, within three units in the last place; NaN for NaN.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
pub(crate) unsafe fn tanh<V: Lanes>(x: V) -> V {
    // SAFETY: the caller guarantees the instruction set.
    unsafe {
        let zero = V::splat(V::Scalar::ZERO);
        let size = x.where_less(zero, zero.sub(x), x);
        let limit = V::splat(V::Scalar::TANH_IS_ONE);
        let size = limit.where_less(size, limit, size);
        let (power, p) = parts(size.add(size));
        let one = V::splat(V::Scalar::ONE);
        let less_one = p.mul_add(power, power.sub(one)); // e^(2|x|) − 1
        let t = less_one.div(less_one.add(one.add(one)));
        x.where_less(zero, zero.sub(t), t)
    }
}
