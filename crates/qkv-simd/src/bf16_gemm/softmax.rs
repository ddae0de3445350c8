//! The online softmax whose weights are rounded to bf16 as they are made: what the tile unit takes next.
//!
//! It is bound by the two ports that add and multiply, so everything is counted: scores are turned into powers of two by one
//! multiply-add with the maximum, a fraction and a polynomial of four steps follow, and the whole part of the exponent is
//! applied by an instruction that also makes what is absent, −∞, exactly zero. Maxima and sums of sixteen rows are reduced
//! together, by half as many shuffles as a transpose takes.

// SAFETY, for the whole module: every function asks its caller for AVX-512 with bf16, and for slices that hold what the
// parent module checks before it calls.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use super::{DEPTH, SIDE};
use crate::lanes::avx512::{F32x16, greatest_each, sum_each};
use crate::math;
use crate::tile::{Exponential, Running};
use half::bf16;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// The coefficients of `2ʳ` for `r` from 0 to 1, from the highest power down to `r`; the last is 1. Its largest relative error
/// is 2⁻¹⁸, and none at either end, so that a score a little below or above the largest has a weight of 1 as that has. One step less
/// would do for weights in bf16, but not for the log-sum-exp, which is written in f32.
const POWER: [f32; 4] = [0.013_555_747, 0.052_032_37, 0.241_379_77, 0.693_032_15];

/// `2ˣ`, to 18 bits, where it is asked for, 0 elsewhere; 0 for −∞, NaN for NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn power_of_two(there: __mmask16, x: __m512) -> __m512 {
    // What is left of x above the whole number below it, without a word on what was rounded.
    const ABOVE_THE_WHOLE: i32 = 0b1001;
    let r = _mm512_reduce_ps::<ABOVE_THE_WHOLE>(x);
    let mut y = _mm512_set1_ps(POWER[0]);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER[1]));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER[2]));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(POWER[3]));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0));
    _mm512_maskz_scalef_ps(there, y, x)
}

/// Below it a weight is 0: 2 to it is nothing beside the largest, and less would be subnormal, of which a CPU makes one in a hundred cycles.
const LOWEST: f32 = -100.0;

/// The lanes whose weight `2ˣ` is not too small to count; NaN counts.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn counts(x: __m512) -> __mmask16 {
    _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(LOWEST))
}

/// All lanes.
const EVERYWHERE: __mmask16 = __mmask16::MAX;

/// Chunks in a whole tile of keys.
const CHUNKS: usize = 4;

/// Groups of [`SIDE`] rows that are taken through the passes together, so that the reductions of one run beside the passes of
/// another.
const GROUPS: usize = 2;

/// What is summed of each row of a group, lane by lane. Set where it is used: zeros would take as long as some rows.
type Each = [MaybeUninit<__m512>; SIDE];

/// What [`Group::top`] found out about the rows of a group, a lane each.
#[derive(Clone, Copy)]
struct Tops {
    /// The largest scores before and after these.
    old: __m512,
    new: __m512,
    /// What sums so far are multiplied by.
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

/// Rows of scores become bf16 weights at the start of their memory, zeros to the end of the chunk. `AWAKE` where the tile unit
/// is in use and not to fall asleep meanwhile.
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
        let mut tops = [Tops { old: zero, new: zero, shrink: zero }; GROUPS];
        for (group, tops) in groups.iter().zip(&mut tops).filter(|(group, _)| group.count > 0) {
            *tops = group.top(&how, max, factor);
        }
        let [mut sums, mut entropy_accs]: [[Each; GROUPS]; 2] = [[[MaybeUninit::uninit(); SIDE]; GROUPS]; 2];
        for (at, group) in groups.iter().enumerate() {
            group.weights::<ENTROPY, AWAKE>(&how, &tops[at], &mut sums[at], &mut entropy_accs[at]);
        }
        for (at, group) in groups.iter().enumerate().filter(|(_, group)| group.count > 0) {
            let (there, first) = (group.there(), group.first);
            let before = _mm512_maskz_loadu_ps(there, sum.as_ptr().add(first));
            let found = sum_each(all(&sums[at]));
            let after = _mm512_add_ps(_mm512_mul_ps(before, tops[at].shrink), found);
            if ENTROPY {
                let found = sum_each(all(&entropy_accs[at]));
                tops[at].update_entropy(before, found, &factor[first..], &mut entropy_acc[first..][..group.count]);
            }
            _mm512_mask_storeu_ps(sum.as_mut_ptr().add(first), there, after);
        }
    }
}

impl Tops {
    /// Brings the moments of a group forward, with its sums `before` and what these scores add.
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

/// What [`Group::weights`] has set.
unsafe fn all(each: &Each) -> &[__m512; SIDE] {
    &*each.as_ptr().cast()
}

impl Group {
    /// Whether all of a whole tile of keys is there, as mostly.
    fn is_whole(&self, how: &Exponential<'_, f32>) -> bool {
        how.spans.is_empty() && self.width == CHUNKS * DEPTH
    }

    /// The lanes of the rows that there are.
    fn there(&self) -> u16 {
        (u32::from(u16::MAX) >> (SIDE - self.count)) as u16
    }

    /// The largest score of each row so far, which `max` holds. Its weight is exactly 1.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn top(&self, how: &Exponential<'_, f32>, max: &mut [f32], factor: &mut [f32]) -> Tops {
        let (least, there) = (_mm512_set1_ps(f32::NEG_INFINITY), self.there());
        let data = self.data.add(self.first * self.row);
        let each: [__m512; SIDE] = if self.count == SIDE && self.is_whole(how) {
            std::array::from_fn(|r| greatest_of(data.add(r * self.row)))
        } else {
            std::array::from_fn(|r| {
                let (start, end) = if r < self.count { how.span(self.first + r, self.width) } else { (0, 0) };
                greatest(data.wrapping_add(r * self.row), start / SIDE, end / SIDE)
            })
        };
        let old = _mm512_mask_loadu_ps(least, there, max.as_ptr().add(self.first));
        let mut most = _mm512_mul_ps(greatest_each(&each), _mm512_set1_ps(how.scale));
        // A row of nothing but NaN and what is absent is NaN.
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
        // Nothing moves where the largest stays, −∞ included.
        let mut shrink = _mm512_set1_ps(1.0);
        if moved & there != 0 {
            let same = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(old, new);
            shrink = _mm512_mask_mov_ps(math::exp(F32x16(_mm512_sub_ps(old, new))).0, same, shrink);
        }
        _mm512_mask_storeu_ps(max.as_mut_ptr().add(self.first), there, new);
        _mm512_mask_storeu_ps(factor.as_mut_ptr().add(self.first), there, shrink);
        Tops { old, new, shrink }
    }

    /// Turns the scores of the rows into weights, and leaves the sum and the moment of each, lane by lane.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn weights<const ENTROPY: bool, const AWAKE: bool>(
        &self,
        how: &Exponential<'_, f32>,
        tops: &Tops,
        sums: &mut Each,
        entropy_accs: &mut Each,
    ) {
        let whole = self.is_whole(how);
        // Where nothing is there yet, −∞ less 0 stays what it is.
        let mut top = [0.0f32; SIDE];
        let absent = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(tops.new, _mm512_set1_ps(f32::NEG_INFINITY));
        _mm512_storeu_ps(top.as_mut_ptr(), _mm512_mask_mov_ps(tops.new, absent, _mm512_setzero_ps()));
        // Whether some weights may be too small to count. One panel of each row is looked at: where there are many such weights, some
        // are found soon, and the few before take their time.
        let mut wide = ENTROPY;
        for r in 0..self.count {
            if AWAKE && r % (SIDE / 2) == 0 {
                stay_awake();
            }
            let at = Row { data: self.data.add((self.first + r) * self.row), top: top[r], scale: how.scale };
            let (start, end) = how.span(self.first + r, self.width);
            let (start, end, chunks) = (start / SIDE, end / SIDE, self.width.div_ceil(DEPTH));
            wide = wide || start < end && at.is_wide(start);
            let (sum, entropy_acc) = match (whole, wide) {
                (true, false) => at.whole::<ENTROPY, false>(),
                (true, true) => at.whole::<ENTROPY, true>(),
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

/// A product whose result nobody looks at. The tile unit falls asleep when it has had nothing to do for some 1,000 cycles, and
/// takes 600 to 800 to wake up; this costs 60 to 100.
#[inline(always)]
pub(super) unsafe fn stay_awake() {
    std::arch::asm!("tdpbf16ps tmm0, tmm4, tmm5", out("tmm0") _, options(nostack, nomem));
}

/// The largest of some panels of a row, lane by lane; what is NaN does not count.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn greatest(row: *const f32, start: usize, end: usize) -> __m512 {
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

/// The same of a whole tile of keys.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn greatest_of(row: *const f32) -> __m512 {
    let least = _mm512_set1_ps(f32::NEG_INFINITY);
    let (mut even, mut odd) = (least, least);
    for chunk in 0..CHUNKS {
        even = _mm512_max_ps(_mm512_loadu_ps(row.add(2 * chunk * SIDE)), even);
        odd = _mm512_max_ps(_mm512_loadu_ps(row.add((2 * chunk + 1) * SIDE)), odd);
    }
    _mm512_max_ps(even, odd)
}

/// A row of scores, and what turns them into weights: `exp(score · scale − top)`.
struct Row {
    data: *mut f32,
    top: f32,
    scale: f32,
}

impl Row {
    /// Whether some weights of a panel are too small to count.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn is_wide(&self, panel: usize) -> bool {
        counts(self.exponent(_mm512_loadu_ps(self.data.add(panel * SIDE)))) != EVERYWHERE
    }

    /// Writes the weights of the panels `start..end`, zeros elsewhere in `chunks` chunks. Returns their sum and their
    /// moment, lane by lane: panels of even and of odd number are summed apart, so that no addition waits for the last.
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
                store(to.add(chunk * DEPTH), low, high);
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
            store(to.add(chunk * DEPTH), low, high);
            chunk += 1;
        }
        (_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(entropy_accs[0], entropy_accs[1]))
    }

    /// The same of a whole tile of keys.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn whole<const ENTROPY: bool, const WIDE: bool>(&self) -> (__m512, __m512) {
        let zero = _mm512_setzero_ps();
        let (mut sums, mut entropy_accs) = ([zero; 2], [zero; 2]);
        for chunk in 0..CHUNKS {
            let low = self.weight::<ENTROPY, WIDE>(2 * chunk, &mut sums[0], &mut entropy_accs[0]);
            let high = self.weight::<ENTROPY, WIDE>(2 * chunk + 1, &mut sums[1], &mut entropy_accs[1]);
            store(self.data.cast::<bf16>().add(chunk * DEPTH), low, high);
        }
        (_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(entropy_accs[0], entropy_accs[1]))
    }

    /// What a weight is a power of two by.
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
            // Rounded before it is subtracted, the largest becomes exactly 0, and so does the entropy of a row with one key.
            let scaled = _mm512_mul_ps(score, _mm512_set1_ps(self.scale));
            let x = _mm512_sub_ps(scaled, _mm512_set1_ps(self.top));
            let exponent = _mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E));
            let there = counts(exponent);
            let weight = power_of_two(there, exponent);
            *entropy_acc = _mm512_mask3_fmadd_ps(weight, x, *entropy_acc, there);
            *sum = _mm512_add_ps(*sum, weight);
            return weight;
        }
        let exponent = self.exponent(score);
        let weight = power_of_two(if WIDE { counts(exponent) } else { EVERYWHERE }, exponent);
        *sum = _mm512_add_ps(*sum, weight);
        weight
    }
}

/// Two panels, rounded, as a chunk.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn store(to: *mut bf16, low: __m512, high: __m512) {
    let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
    _mm512_storeu_si512(to.cast(), both);
}
