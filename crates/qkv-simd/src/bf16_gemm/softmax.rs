//! Online softmax that rounds its weights to bf16 in the same pass, as the left operand of the next product.
//!
//! The pass is bound by the two floating-point ports, so every instruction counts: one multiply-add turns a score into
//! an exponent of two relative to the maximum, a polynomial of degree four is evaluated at its fractional part, and
//! `VSCALEFPS` applies the integer part and turns absent scores, −∞, into exact zeros. Maxima and sums of sixteen rows
//! are reduced together, with half the shuffles of a transpose.

// SAFETY, for the whole module: every function requires AVX-512 with bf16, and slices of the lengths that the parent
// module checks before it calls.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use super::{DEPTH, SIDE};
use crate::lanes::avx512::{F32x16, max_each, sum_each};
use crate::math;
use crate::tile::{Exponential, Running};
use half::bf16;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// The coefficients of `2ʳ` for `r` in [0, 1], highest power first, without the constant 1. The largest relative error
/// is 2⁻¹⁸. It is zero at both ends, so that scores close to the largest have a weight of 1 as well. One degree less
/// would do for weights in bf16, but not for the log-sum-exp, which is f32.
const POWER: [f32; 4] = [0.013_555_747, 0.052_032_37, 0.241_379_77, 0.693_032_15];

/// `2ˣ` to 18 bits in the lanes of `there`, 0 elsewhere; 0 for −∞, NaN for NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn power_of_two(there: __mmask16, x: __m512) -> __m512 {
    // `x − ⌊x⌋`, with exceptions suppressed.
    const FRACTION: i32 = 0b1001;
    let r = _mm512_reduce_ps::<FRACTION>(x);
    let mut y = _mm512_set1_ps(POWER[0]);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER[1]));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER[2]));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER[3]));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0));
    _mm512_maskz_scalef_ps(there, y, x)
}

/// Exponents below this give a weight of 0: the weight is negligible beside the largest, and smaller ones would be
/// subnormal, which take some hundred cycles each.
const LOWEST_EXPONENT: f32 = -100.0;

/// The lanes whose weight `2ˣ` is not negligible; NaN counts.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn not_negligible(x: __m512) -> __mmask16 {
    _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(LOWEST_EXPONENT))
}

/// All lanes.
const ALL_LANES: __mmask16 = __mmask16::MAX;

/// Chunks in a full tile of keys.
const CHUNKS: usize = 4;

/// Groups of [`SIDE`] rows that go through the passes together, so that the reductions of one group overlap the passes
/// of another.
const GROUPS: usize = 2;

/// A vector per row of a group. Uninitialized until it is used: clearing them would take as long as several rows.
type PerRow = [MaybeUninit<__m512>; SIDE];

/// The maxima of a group, one lane per row, from [`Group::update_max`].
#[derive(Clone, Copy)]
struct GroupMax {
    /// The largest scores before and after this tile.
    old: __m512,
    new: __m512,
    /// The factors that rescale the sums so far.
    shrink: __m512,
}

/// Up to [`SIDE`] rows of a tile.
struct Group {
    data: *mut f32,
    row: usize,
    first: usize,
    count: usize,
    width: usize,
}

/// Turns rows of scores into bf16 weights at the start of their memory, with zeros to the end of the chunk. `AWAKE`
/// keeps AMX from powering down meanwhile.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn softmax<const ENTROPY: bool, const AWAKE: bool>(
    tile: &mut [f32],
    row: usize,
    rows: usize,
    width: usize,
    how: Exponential<'_, f32>,
    running: Running<'_, f32>,
) {
    let Running { max, sum, entropy_acc, factor } = running;
    let zero = _mm512_setzero_ps();
    for start in (0..rows).step_by(GROUPS * SIDE) {
        let groups: [Group; GROUPS] = std::array::from_fn(|group| {
            let first = (start + group * SIDE).min(rows);
            Group { data: tile.as_mut_ptr(), row, first, count: (rows - first).min(SIDE), width }
        });
        let mut maxima = [GroupMax { old: zero, new: zero, shrink: zero }; GROUPS];
        for (group, maxima) in groups.iter().zip(&mut maxima).filter(|(group, _)| group.count > 0) {
            *maxima = group.update_max(&how, max, factor);
        }
        let [mut sums, mut entropy_accs]: [[PerRow; GROUPS]; 2] = [[[MaybeUninit::uninit(); SIDE]; GROUPS]; 2];
        for (at, group) in groups.iter().enumerate() {
            group.weights::<ENTROPY, AWAKE>(&how, &maxima[at], &mut sums[at], &mut entropy_accs[at]);
        }
        for (at, group) in groups.iter().enumerate().filter(|(_, group)| group.count > 0) {
            let (there, first) = (group.there(), group.first);
            let before = _mm512_maskz_loadu_ps(there, sum.as_ptr().add(first));
            let found = sum_each(assume_init(&sums[at]));
            let after = _mm512_add_ps(_mm512_mul_ps(before, maxima[at].shrink), found);
            if ENTROPY {
                let found = sum_each(assume_init(&entropy_accs[at]));
                maxima[at].update_entropy(before, found, &factor[first..], &mut entropy_acc[first..][..group.count]);
            }
            _mm512_mask_storeu_ps(sum.as_mut_ptr().add(first), there, after);
        }
    }
}

impl GroupMax {
    /// Updates the entropy accumulators of a group from its sums `before` and the terms that these scores add.
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn update_entropy(&self, before: __m512, found: __m512, factor: &[f32], entropy_acc: &mut [f32]) {
        let mut lanes = [[0.0f32; SIDE]; 4];
        for (lanes, of) in lanes.iter_mut().zip([self.old, self.new, before, found]) {
            _mm512_storeu_ps(lanes.as_mut_ptr(), of);
        }
        let [old, new, before, found] = lanes;
        for (r, entropy_acc) in entropy_acc.iter_mut().enumerate() {
            let moved = if old[r] == new[r] { 0.0 } else { (old[r] - new[r]) * before[r] };
            let kept = if old[r] == f32::NEG_INFINITY { 0.0 } else { factor[r] * (*entropy_acc + moved) };
            *entropy_acc = kept + found[r];
        }
    }
}

/// The vectors that [`Group::weights`] initialized.
unsafe fn assume_init(each: &PerRow) -> &[__m512; SIDE] {
    &*each.as_ptr().cast()
}

impl Group {
    /// Whether every row sees a full tile of keys, the common case.
    fn is_full(&self, how: &Exponential<'_, f32>) -> bool {
        how.spans.is_empty() && self.width == CHUNKS * DEPTH
    }

    /// One bit per row of the group.
    fn there(&self) -> u16 {
        (u32::from(u16::MAX) >> (SIDE - self.count)) as u16
    }

    /// Updates the running maximum of each row in `max`. The largest score has a weight of exactly 1.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn update_max(&self, how: &Exponential<'_, f32>, max: &mut [f32], factor: &mut [f32]) -> GroupMax {
        let (least, there) = (_mm512_set1_ps(f32::NEG_INFINITY), self.there());
        let data = self.data.add(self.first * self.row);
        let each: [__m512; SIDE] = if self.count == SIDE && self.is_full(how) {
            std::array::from_fn(|r| max_of_full_tile(data.add(r * self.row)))
        } else {
            std::array::from_fn(|r| {
                let (start, end) = if r < self.count { how.span(self.first + r, self.width) } else { (0, 0) };
                max_of_panels(data.wrapping_add(r * self.row), start / SIDE, end / SIDE)
            })
        };
        let old = _mm512_mask_loadu_ps(least, there, max.as_ptr().add(self.first));
        let mut most = _mm512_mul_ps(max_each(&each), _mm512_set1_ps(how.scale));
        // A row with only NaN and absent scores is NaN.
        let mut none = _mm512_mask_cmp_ps_mask::<_CMP_EQ_OQ>(there, most, least);
        while none != 0 {
            let r = none.trailing_zeros() as usize;
            none &= none - 1;
            let (start, end) = how.span(self.first + r, self.width);
            let scores = std::slice::from_raw_parts(self.data.add((self.first + r) * self.row), self.width);
            if scores[start..end].iter().any(|s| s.is_nan()) {
                most = _mm512_mask_mov_ps(most, 1 << r, _mm512_set1_ps(f32::NAN));
            }
        }
        let moved = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(most, old) | _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(most, most);
        let new = _mm512_mask_mov_ps(old, moved, most);
        // No rescaling where the maximum stays the same, −∞ included.
        let mut shrink = _mm512_set1_ps(1.0);
        if moved & there != 0 {
            let same = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(old, new);
            shrink = _mm512_mask_mov_ps(math::exp(F32x16(_mm512_sub_ps(old, new))).0, same, shrink);
        }
        _mm512_mask_storeu_ps(max.as_mut_ptr().add(self.first), there, new);
        _mm512_mask_storeu_ps(factor.as_mut_ptr().add(self.first), there, shrink);
        GroupMax { old, new, shrink }
    }

    /// Turns the scores of the rows into weights, and accumulates the sum and the entropy term of each row lane by
    /// lane.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn weights<const ENTROPY: bool, const AWAKE: bool>(
        &self,
        how: &Exponential<'_, f32>,
        maxima: &GroupMax,
        sums: &mut PerRow,
        entropy_accs: &mut PerRow,
    ) {
        let full = self.is_full(how);
        // Rows without a maximum yet use 0, since −∞ − 0 stays −∞.
        let mut top = [0.0f32; SIDE];
        let absent = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(maxima.new, _mm512_set1_ps(f32::NEG_INFINITY));
        _mm512_storeu_ps(top.as_mut_ptr(), _mm512_mask_mov_ps(maxima.new, absent, _mm512_setzero_ps()));
        // Whether some weights may be negligible. One panel of each row is tested: where there are many such weights,
        // some are found soon, and the few rows before that take the slow path of subnormals.
        let mut wide = ENTROPY;
        for r in 0..self.count {
            if AWAKE && r % (SIDE / 2) == 0 {
                keep_amx_awake();
            }
            let at = Row { data: self.data.add((self.first + r) * self.row), top: top[r], scale: how.scale };
            let (start, end) = how.span(self.first + r, self.width);
            let (start, end, chunks) = (start / SIDE, end / SIDE, self.width.div_ceil(DEPTH));
            wide = wide || start < end && at.has_negligible(start);
            let (sum, entropy_acc) = match (full, wide) {
                (true, false) => at.full_tile::<ENTROPY, false>(),
                (true, true) => at.full_tile::<ENTROPY, true>(),
                (false, false) => at.weights::<ENTROPY, false>(start, end, chunks),
                (false, true) => at.weights::<ENTROPY, true>(start, end, chunks),
            };
            sums[r].write(sum);
            if ENTROPY {
                entropy_accs[r].write(entropy_acc);
            }
        }
        for of in sums[self.count..].iter_mut().chain(&mut entropy_accs[self.count..]) {
            of.write(_mm512_setzero_ps());
        }
    }
}

/// A product whose result is discarded. AMX powers down after some 1,000 idle cycles and takes 600 to 800 cycles to
/// power up again; this costs 60 to 100.
#[inline(always)]
pub(super) unsafe fn keep_amx_awake() {
    std::arch::asm!("tdpbf16ps tmm0, tmm4, tmm5", out("tmm0") _, options(nostack, nomem));
}

/// The lane-wise maximum of some panels of a row, ignoring NaN.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn max_of_panels(row: *const f32, start: usize, end: usize) -> __m512 {
    let least = _mm512_set1_ps(f32::NEG_INFINITY);
    let (mut even, mut odd) = (least, least);
    let mut panel = start;
    while panel + 1 < end {
        even = _mm512_max_ps(_mm512_loadu_ps(row.add(panel * SIDE)), even);
        odd = _mm512_max_ps(_mm512_loadu_ps(row.add((panel + 1) * SIDE)), odd);
        panel += 2;
    }
    if panel < end {
        even = _mm512_max_ps(_mm512_loadu_ps(row.add(panel * SIDE)), even);
    }
    _mm512_max_ps(even, odd)
}

/// [`max_of_panels`] for a full tile of keys.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn max_of_full_tile(row: *const f32) -> __m512 {
    let least = _mm512_set1_ps(f32::NEG_INFINITY);
    let (mut even, mut odd) = (least, least);
    for chunk in 0..CHUNKS {
        even = _mm512_max_ps(_mm512_loadu_ps(row.add(2 * chunk * SIDE)), even);
        odd = _mm512_max_ps(_mm512_loadu_ps(row.add((2 * chunk + 1) * SIDE)), odd);
    }
    _mm512_max_ps(even, odd)
}

/// A row of scores, and the parameters of its weights `exp(score · scale − top)`.
struct Row {
    data: *mut f32,
    top: f32,
    scale: f32,
}

impl Row {
    /// Whether some weights of a panel are negligible.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn has_negligible(&self, panel: usize) -> bool {
        not_negligible(self.exponent(_mm512_loadu_ps(self.data.add(panel * SIDE)))) != ALL_LANES
    }

    /// Writes the weights of the panels `start..end`, and zeros elsewhere in `chunks` chunks. Returns their sum and
    /// entropy term lane by lane: even and odd panels are summed separately, to shorten the dependency chain.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn weights<const ENTROPY: bool, const WIDE: bool>(
        &self,
        start: usize,
        end: usize,
        chunks: usize,
    ) -> (__m512, __m512) {
        let zero = _mm512_setzero_ps();
        let (mut sums, mut entropy_accs) = ([zero; 2], [zero; 2]);
        let to = self.data.cast::<bf16>();
        let mut chunk = 0;
        if start == 0 {
            while 2 * chunk + 1 < end {
                let low = self.weight::<ENTROPY, WIDE>(2 * chunk, &mut sums[0], &mut entropy_accs[0]);
                let high = self.weight::<ENTROPY, WIDE>(2 * chunk + 1, &mut sums[1], &mut entropy_accs[1]);
                store_chunk(to.add(chunk * DEPTH), low, high);
                chunk += 1;
            }
        }
        while chunk < chunks {
            let (mut low, mut high) = (zero, zero);
            if (start..end).contains(&(2 * chunk)) {
                low = self.weight::<ENTROPY, WIDE>(2 * chunk, &mut sums[0], &mut entropy_accs[0]);
            }
            if (start..end).contains(&(2 * chunk + 1)) {
                high = self.weight::<ENTROPY, WIDE>(2 * chunk + 1, &mut sums[1], &mut entropy_accs[1]);
            }
            store_chunk(to.add(chunk * DEPTH), low, high);
            chunk += 1;
        }
        (_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(entropy_accs[0], entropy_accs[1]))
    }

    /// [`weights`](Row::weights) for a full tile of keys.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn full_tile<const ENTROPY: bool, const WIDE: bool>(&self) -> (__m512, __m512) {
        let zero = _mm512_setzero_ps();
        let (mut sums, mut entropy_accs) = ([zero; 2], [zero; 2]);
        for chunk in 0..CHUNKS {
            let low = self.weight::<ENTROPY, WIDE>(2 * chunk, &mut sums[0], &mut entropy_accs[0]);
            let high = self.weight::<ENTROPY, WIDE>(2 * chunk + 1, &mut sums[1], &mut entropy_accs[1]);
            store_chunk(self.data.cast::<bf16>().add(chunk * DEPTH), low, high);
        }
        (_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(entropy_accs[0], entropy_accs[1]))
    }

    /// The base-2 logarithm of a weight.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn exponent(&self, score: __m512) -> __m512 {
        let log2_e = std::f32::consts::LOG2_E;
        _mm512_fmsub_ps(score, _mm512_set1_ps(self.scale * log2_e), _mm512_set1_ps(self.top * log2_e))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn weight<const ENTROPY: bool, const WIDE: bool>(
        &self,
        panel: usize,
        sum: &mut __m512,
        entropy_acc: &mut __m512,
    ) -> __m512 {
        let score = _mm512_loadu_ps(self.data.add(panel * SIDE));
        if ENTROPY {
            // Rounding before subtracting makes the largest exactly 0, and with it the entropy of a row with one key.
            let scaled = _mm512_mul_ps(score, _mm512_set1_ps(self.scale));
            let x = _mm512_sub_ps(scaled, _mm512_set1_ps(self.top));
            let exponent = _mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E));
            let there = not_negligible(exponent);
            let weight = power_of_two(there, exponent);
            *entropy_acc = _mm512_mask3_fmadd_ps(weight, x, *entropy_acc, there);
            *sum = _mm512_add_ps(*sum, weight);
            return weight;
        }
        let exponent = self.exponent(score);
        let weight = power_of_two(if WIDE { not_negligible(exponent) } else { ALL_LANES }, exponent);
        *sum = _mm512_add_ps(*sum, weight);
        weight
    }
}

/// Rounds two panels to one chunk of bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn store_chunk(to: *mut bf16, low: __m512, high: __m512) {
    let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
    _mm512_storeu_si512(to.cast(), both);
}
