//! The number types of attention: the elements of tensors ([`Element`]) and the accumulators of sums ([`Real`]).

use crate::lanes::Lanes;
use half::{bf16, f16};
use std::fmt;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// An accumulator type: `f32` or `f64`.
pub trait Real:
    Element<Acc = Self>
    + crate::math::Constants
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
    + std::iter::Sum
{
    /// Elements in a panel. The same for every instruction set, so that sums have one order.
    const LANES: usize;
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// −∞: the score of an absent pair.
    const NEG_INFINITY: Self;
    /// ∞.
    const INFINITY: Self;

    #[doc(hidden)]
    type Portable: Lanes<Scalar = Self>;
    #[doc(hidden)]
    #[cfg(target_arch = "x86_64")]
    type Avx2: Lanes<Scalar = Self>;
    #[doc(hidden)]
    #[cfg(target_arch = "x86_64")]
    type Avx512: Lanes<Scalar = Self>;
    #[doc(hidden)]
    #[cfg(target_arch = "aarch64")]
    type Neon: Lanes<Scalar = Self>;

    /// From an `f64`, rounded.
    fn from_f64(x: f64) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The exponential.
    fn exp(self) -> Self;
    /// The hyperbolic tangent.
    fn tanh(self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
    /// The absolute value.
    fn abs(self) -> Self;
    /// Whether it is NaN.
    fn is_nan(self) -> bool {
        self.partial_cmp(&self).is_none()
    }
}

/// An element type of tensors: `f32`, `f64`, `bf16` or `f16`.
pub trait Element:
    sealed::Sealed + Copy + Default + PartialEq + PartialOrd + fmt::Debug + Send + Sync + 'static
{
    /// The accumulator type: `f64` for `f64`, otherwise `f32`.
    type Acc: Real;
    /// Its name: `"f32"`, `"f64"`, `"bf16"`, `"f16"`.
    const NAME: &'static str;
    /// The distance from 1 to the next larger number.
    const EPSILON: f64;
    /// Whether this is `bf16`, whose products the bf16 units compute without rounding an operand.
    const IS_BF16: bool = false;

    /// Converts to the accumulator type, without loss.
    fn widen(self) -> Self::Acc;
    /// Rounds an accumulator to nearest even.
    fn narrow(x: Self::Acc) -> Self;
    /// Converts to `f64`, without loss.
    fn to_f64(self) -> f64;
    /// Rounds an `f64` to the accumulator type, then to this one.
    fn of_f64(x: f64) -> Self {
        Self::narrow(Self::Acc::from_f64(x))
    }
    /// Whether it is neither infinite nor NaN.
    fn is_finite(self) -> bool;
    /// Rounds to bf16; the identity for bf16.
    #[inline(always)]
    fn to_bf16(self) -> bf16 {
        bf16::from_f64(self.to_f64())
    }
    /// The same slice, if the elements are bf16.
    #[inline(always)]
    fn as_bf16(_row: &[Self]) -> Option<&[bf16]> {
        None
    }
    /// Loads and widens `count` elements; the other lanes are zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `V`, and `count` elements, at most as many as there are lanes, can be read.
    #[doc(hidden)]
    unsafe fn lanes<V: Lanes<Scalar = Self::Acc>>(from: *const Self, count: usize) -> V;
    /// Rounds and stores the first `count` lanes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `V`, and `count` elements, at most as many as there are lanes, can be
    /// written.
    #[doc(hidden)]
    unsafe fn store_lanes<V: Lanes<Scalar = Self::Acc>>(lanes: V, to: *mut Self, count: usize);
}

macro_rules! real {
    ($t:ident, $lanes:literal, $lanes_of:ident) => {
        impl Real for $t {
            const LANES: usize = $lanes;
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;
            const INFINITY: Self = $t::INFINITY;
            type Portable = crate::lanes::portable::$lanes_of;
            #[cfg(target_arch = "x86_64")]
            type Avx2 = crate::lanes::avx2::$lanes_of;
            #[cfg(target_arch = "x86_64")]
            type Avx512 = crate::lanes::avx512::$lanes_of;
            #[cfg(target_arch = "aarch64")]
            type Neon = crate::lanes::neon::$lanes_of;
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            fn ln(self) -> Self {
                self.ln()
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn tanh(self) -> Self {
                self.tanh()
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn abs(self) -> Self {
                self.abs()
            }
        }

        impl Element for $t {
            type Acc = $t;
            const NAME: &'static str = stringify!($t);
            const EPSILON: f64 = $t::EPSILON as f64;
            #[inline(always)]
            fn widen(self) -> $t {
                self
            }
            #[inline(always)]
            fn narrow(x: $t) -> $t {
                x
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn is_finite(self) -> bool {
                self.is_finite()
            }
            #[inline(always)]
            unsafe fn lanes<V: Lanes<Scalar = $t>>(from: *const $t, count: usize) -> V {
                // SAFETY: the caller guarantees the elements and the instruction set.
                unsafe { if count >= $lanes { V::load(from) } else { V::load_first(from, count) } }
            }
            #[inline(always)]
            unsafe fn store_lanes<V: Lanes<Scalar = $t>>(lanes: V, to: *mut $t, count: usize) {
                // SAFETY: the caller guarantees the elements and the instruction set.
                unsafe { if count >= $lanes { lanes.store(to) } else { lanes.store_first(to, count) } }
            }
        }
    };
}

real!(f32, 16, F32x16);
real!(f64, 8, F64x8);

macro_rules! half {
    ($t:ident, $is_bf16:literal, $load:ident, $store:ident, $to_bf16:expr, $as_bf16:expr) => {
        impl Element for $t {
            type Acc = f32;
            const NAME: &'static str = stringify!($t);
            const EPSILON: f64 = $t::EPSILON.to_f64_const();
            const IS_BF16: bool = $is_bf16;
            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(x: f32) -> $t {
                $t::from_f32(x)
            }
            fn to_f64(self) -> f64 {
                $t::to_f64(self)
            }
            #[inline(always)]
            fn is_finite(self) -> bool {
                $t::is_finite(self)
            }
            #[inline(always)]
            fn to_bf16(self) -> bf16 {
                $to_bf16(self)
            }
            #[inline(always)]
            fn as_bf16(row: &[$t]) -> Option<&[bf16]> {
                $as_bf16(row)
            }
            #[inline(always)]
            unsafe fn lanes<V: Lanes<Scalar = f32>>(from: *const $t, count: usize) -> V {
                // SAFETY: the caller guarantees the elements and the instruction set.
                unsafe { V::$load(from, count) }
            }
            #[inline(always)]
            unsafe fn store_lanes<V: Lanes<Scalar = f32>>(lanes: V, to: *mut $t, count: usize) {
                // SAFETY: the caller guarantees the elements and the instruction set.
                unsafe { lanes.$store(to, count) }
            }
        }
    };
}

half!(bf16, true, load_bf16, store_bf16, std::convert::identity, Some);
half!(f16, false, load_f16, store_f16, |x: f16| bf16::from_f32(x.to_f32()), |_| None);
