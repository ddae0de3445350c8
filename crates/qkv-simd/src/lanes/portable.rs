//! Lanes as plain arrays: any architecture, vectorized by the compiler as far as its baseline allows.

use super::Lanes;

macro_rules! portable {
    ($name:ident, $t:ident, $n:literal, $mantissa:literal, $one:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(Clone, Copy)]
        pub struct $name([$t; $n]);

        impl $name {
            #[inline(always)]
            fn zip(self, b: Self, f: impl Fn($t, $t) -> $t) -> Self {
                $name(std::array::from_fn(|l| f(self.0[l], b.0[l])))
            }
        }

        impl Lanes for $name {
            type Scalar = $t;
            const TILE_ROWS: usize = 2;
            const TILE_PANELS: usize = 1;
            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                $name([x; $n])
            }
            #[inline(always)]
            unsafe fn load(from: *const $t) -> Self {
                $name(from.cast::<[$t; $n]>().read_unaligned())
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $t) {
                to.cast::<[$t; $n]>().write_unaligned(self.0)
            }
            #[inline(always)]
            unsafe fn add(self, b: Self) -> Self {
                self.zip(b, |x, y| x + y)
            }
            #[inline(always)]
            unsafe fn sub(self, b: Self) -> Self {
                self.zip(b, |x, y| x - y)
            }
            #[inline(always)]
            unsafe fn mul(self, b: Self) -> Self {
                self.zip(b, |x, y| x * y)
            }
            #[inline(always)]
            unsafe fn div(self, b: Self) -> Self {
                self.zip(b, |x, y| x / y)
            }
            #[inline(always)]
            unsafe fn mul_add(self, b: Self, c: Self) -> Self {
                self.mul(b).add(c)
            }
            #[inline(always)]
            unsafe fn max(self, b: Self) -> Self {
                self.zip(b, |x, y| if x > y { x } else { y })
            }
            #[inline(always)]
            unsafe fn where_less(self, limit: Self, then: Self, otherwise: Self) -> Self {
                $name(std::array::from_fn(|l| if self.0[l] < limit.0[l] { then.0[l] } else { otherwise.0[l] }))
            }
            #[inline(always)]
            unsafe fn where_equal(self, value: Self, then: Self, otherwise: Self) -> Self {
                $name(std::array::from_fn(|l| if self.0[l] == value.0[l] { then.0[l] } else { otherwise.0[l] }))
            }
            #[inline(always)]
            unsafe fn keep(self, bits: u32, otherwise: Self) -> Self {
                $name(std::array::from_fn(|l| if bits >> l & 1 == 1 { self.0[l] } else { otherwise.0[l] }))
            }
            #[inline(always)]
            unsafe fn power_of_two(self) -> Self {
                $name(self.0.map(|x| $t::from_bits((x.to_bits() << $mantissa).wrapping_add($one))))
            }
            #[inline(always)]
            unsafe fn sum(self) -> $t {
                let (mut lanes, mut width) = (self.0, $n / 2);
                while width > 0 {
                    for l in 0..width {
                        lanes[l] += lanes[l + width];
                    }
                    width /= 2;
                }
                lanes[0]
            }
            #[inline(always)]
            unsafe fn max_lane(self) -> $t {
                self.0.into_iter().fold($t::NEG_INFINITY, |a, b| if a > b { a } else { b })
            }
            #[inline(always)]
            unsafe fn not_zero(self) -> u32 {
                (0..$n).fold(0, |bits, l| bits | u32::from(self.0[l] != 0.0) << l)
            }
        }
    };
}

portable!(F32x16, f32, 16, 23, 0x3f80_0000, "Sixteen `f32` in an array.");
portable!(F64x8, f64, 8, 52, 0x3ff0_0000_0000_0000, "Eight `f64` in an array.");
