//! Products with rows as they lie in memory: few rows on one side, very many on the other, each of which is read once and
//! used for all of the few. Nothing is packed or copied, so the memory's bandwidth is the limit; numbers narrower than
//! their sums are widened in registers.
//!
//! Rows come as a table of slices: one after the other, at any distance, in pages or gathered, it is the same kernel.
//! While a row is used, one that comes a few kilobytes later is fetched, also across the end of a table into what
//! will be asked for next.
//!
//! A sum has one order: a dot product is one chain of multiply-adds a lane and then the tree of [`Lanes::sum`]; a weighted
//! sum is one chain over as many rows as there are lanes, added to those before. Neither depends on what else is computed
//! beside it.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::number::{Element, Real};
use crate::prefetch::prefetch;
use crate::{padded, span};

/// How far ahead of its use a row is fetched, in bytes. From memory, two cores of a Xeon were fastest with this (without
/// fetching they had two thirds of the speed); from the third-level cache anything from 2 to 8 kB is alike.
const AHEAD: usize = 4096;

/// Rows of one width, where they lie.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a, T> {
    /// The rows, and after them those that will be asked for next, of any width.
    pub rows: &'a [&'a [T]],
    /// How many of them are meant.
    pub len: usize,
    /// Numbers in a row.
    pub width: usize,
}

impl<T: Element> Table<'_, T> {
    /// Checks the rows, so that all of each can be read.
    fn check(&self) {
        assert!(self.rows[..self.len].iter().all(|row| row.len() == self.width), "rows of {} numbers", self.width);
    }

    /// How many rows ahead to fetch.
    fn distance(&self) -> usize {
        AHEAD.div_ceil((self.width * size_of::<T>()).max(1))
    }

    /// The row that comes `distance` later, or the last.
    #[inline(always)]
    fn later(&self, at: usize, distance: usize) -> *const T {
        self.rows[(at + distance).min(self.rows.len() - 1)].as_ptr()
    }
}

struct Dots<'a, T: Element> {
    out: &'a mut [T::Acc],
    out_row: usize,
    queries: &'a [T::Acc],
    query_row: usize,
    count: usize,
    keys: Table<'a, T>,
}

/// The products of `count` rows `queries`, at distance `query_row` and padded with zeros to whole panels, with every row of
/// a table: `out[r, j] = queries[r] · keys[j]`, rows of `out` at distance `out_row`. What fills the last panel of keys is 0.
///
/// ```
/// use qkv_simd::gemv::{Table, dots};
/// use qkv_simd::{Isa, Real};
/// let mut query = [0.0f32; f32::LANES];
/// query[..2].copy_from_slice(&[1.0, 2.0]);
/// let keys: [&[f32]; 2] = [&[10.0, 1.0], &[0.0, 3.0]];
/// let mut out = [f32::NAN; f32::LANES];
/// let table = Table { rows: &keys, len: 2, width: 2 };
/// dots(Isa::best(), &mut out, f32::LANES, &query, f32::LANES, 1, table);
/// assert_eq!(out[..3], [12.0, 6.0, 0.0]);
/// ```
///
/// # Panics
/// Where a slice is too short for what is asked, or a row has another width.
pub fn dots<T: Element>(
    isa: Isa,
    out: &mut [T::Acc],
    out_row: usize,
    queries: &[T::Acc],
    query_row: usize,
    count: usize,
    keys: Table<'_, T>,
) {
    if count == 0 {
        return;
    }
    let (width, across) = (padded::<T::Acc>(keys.width), padded::<T::Acc>(keys.len));
    keys.check();
    assert!(query_row >= width && queries.len() >= span(count, query_row, width), "the queries are too short");
    assert!(out_row >= across && out.len() >= span(count, out_row, across), "the output is too short");
    dispatch(isa, Dots { out, out_row, queries, query_row, count, keys });
}

impl<T: Element> Kernel<T::Acc> for Dots<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = T::Acc>>(mut self) {
        let (keys, distance) = (self.keys.len, self.keys.distance());
        // SAFETY: `dots` checked every row and both sides; the caller vouches for the instruction set.
        unsafe {
            for key in (0..keys / 4 * 4).step_by(4) {
                self.across::<V, 4>(key, distance);
            }
            for key in keys / 4 * 4..keys {
                self.across::<V, 1>(key, distance);
            }
        }
        for r in 0..self.count {
            self.out[r * self.out_row..][keys..padded::<T::Acc>(keys)].fill(T::Acc::ZERO);
        }
    }
}

impl<T: Element> Dots<'_, T> {
    /// All queries with `KEYS` keys.
    #[inline(always)]
    unsafe fn across<V: Lanes<Scalar = T::Acc>, const KEYS: usize>(&mut self, key: usize, distance: usize) {
        // The first queries that use a row fetch the later one; where nothing is to be fetched, the row itself is, which
        // by then is there.
        let (mut query, mut distance) = (0, distance);
        while query < self.count {
            let left = self.count - query;
            // SAFETY: as in `run`.
            unsafe {
                if V::TILE_PANELS >= 4 && left >= 4 {
                    self.block::<V, 4, KEYS>(query, key, distance);
                    query += 4;
                } else if V::TILE_PANELS >= 4 && left >= 2 {
                    self.block::<V, 2, KEYS>(query, key, distance);
                    query += 2;
                } else {
                    self.block::<V, 1, KEYS>(query, key, distance);
                    query += 1;
                }
            }
            distance = 0;
        }
    }

    /// `ROWS` queries with `KEYS` keys.
    #[inline(always)]
    unsafe fn block<V: Lanes<Scalar = T::Acc>, const ROWS: usize, const KEYS: usize>(
        &mut self,
        query: usize,
        key: usize,
        distance: usize,
    ) {
        let lanes = T::Acc::LANES;
        let (whole, left) = (self.keys.width / lanes, self.keys.width % lanes);
        let keys: [*const T; KEYS] = std::array::from_fn(|k| self.keys.rows[key + k].as_ptr());
        let later: [*const T; KEYS] = std::array::from_fn(|k| self.keys.later(key + k, distance));
        // SAFETY: as in `run`: keys are `width` long, queries that and padded.
        unsafe {
            let queries = self.queries.as_ptr().add(query * self.query_row);
            let mut sums = [[V::splat(T::Acc::ZERO); KEYS]; ROWS];
            for panel in 0..whole {
                let at = panel * lanes;
                let keys: [V; KEYS] = std::array::from_fn(|k| {
                    if distance > 0 {
                        prefetch(later[k].wrapping_add(at));
                    }
                    T::lanes::<V>(keys[k].add(at), lanes)
                });
                for (r, sums) in sums.iter_mut().enumerate() {
                    let query = V::load(queries.add(r * self.query_row + at));
                    for (sum, key) in sums.iter_mut().zip(keys) {
                        *sum = query.mul_add(key, *sum);
                    }
                }
            }
            if left > 0 {
                let at = whole * lanes;
                for k in 0..KEYS {
                    prefetch(later[k].wrapping_add(at));
                    let key = T::lanes::<V>(keys[k].add(at), left);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        sums[k] = V::load(queries.add(r * self.query_row + at)).mul_add(key, sums[k]);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                let out = &mut self.out[(query + r) * self.out_row + key..][..KEYS];
                if KEYS == 4 {
                    out.copy_from_slice(&V::sums(std::array::from_fn(|k| sums[k % KEYS])));
                } else {
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out = sum.sum();
                    }
                }
            }
        }
    }
}

struct Weigh<'a, T: Element> {
    sums: &'a mut [T::Acc],
    sum_row: usize,
    weights: &'a [T::Acc],
    weight_row: usize,
    count: usize,
    values: Table<'a, T>,
}

/// `sums[r] += Σ weights[r, j] · values[j]` for `count` rows of sums, padded to whole panels. A weight of zero means
/// *absent*: what the row holds there, NaN and infinities included, has no effect; one that is absent for all is not read.
///
/// ```
/// use qkv_simd::gemv::{Table, weigh};
/// use qkv_simd::{Isa, Real};
/// let values: [&[f32]; 3] = [&[1.0, 2.0], &[f32::NAN, 0.0], &[10.0, 20.0]];
/// let mut weights = [0.0f32; f32::LANES];
/// (weights[0], weights[2]) = (1.0, 0.5);
/// let mut sums = [0.0f32; f32::LANES];
/// let table = Table { rows: &values, len: 3, width: 2 };
/// weigh(Isa::best(), &mut sums, f32::LANES, &weights, f32::LANES, 1, table);
/// assert_eq!(sums[..3], [6.0, 12.0, 0.0]);
/// ```
///
/// # Panics
/// Where a slice is too short for what is asked, or a row has another width.
pub fn weigh<T: Element>(
    isa: Isa,
    sums: &mut [T::Acc],
    sum_row: usize,
    weights: &[T::Acc],
    weight_row: usize,
    count: usize,
    values: Table<'_, T>,
) {
    if count == 0 {
        return;
    }
    let (width, across) = (padded::<T::Acc>(values.width), padded::<T::Acc>(values.len));
    values.check();
    assert!(sum_row >= width && sums.len() >= span(count, sum_row, width), "the sums are too short");
    assert!(weight_row >= across && weights.len() >= span(count, weight_row, across), "the weights are too short");
    dispatch(isa, Weigh { sums, sum_row, weights, weight_row, count, values });
}

/// The rows that a block of weights is for, of which those count that are there: up to 16 places in the table.
struct Live {
    at: [u8; 16],
    count: usize,
}

impl Live {
    /// Those whose bit is set.
    #[inline(always)]
    fn new(bits: u32) -> Self {
        let mut live = Live { at: std::array::from_fn(|at| at as u8), count: bits.count_ones() as usize };
        if bits & (bits + 1) != 0 {
            let mut left = bits;
            for at in &mut live.at[..live.count] {
                *at = left.trailing_zeros() as u8;
                left &= left - 1;
            }
        }
        live
    }
}

impl<T: Element> Kernel<T::Acc> for Weigh<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = T::Acc>>(mut self) {
        let (lanes, distance) = (T::Acc::LANES, self.values.distance());
        for start in (0..self.values.len).step_by(lanes) {
            let there = u32::MAX >> (32 - lanes.min(self.values.len - start));
            // SAFETY: `weigh` checked every row and both sides, padded to whole panels; the caller vouches for the
            // instruction set.
            unsafe {
                let (weights, row) = (self.weights.as_ptr().add(start), self.weight_row);
                let bits = |r: usize| V::load(weights.add(r * row)).not_zero() & there;
                let (mut any, mut all) = (0, there);
                for r in 0..self.count {
                    let bits = bits(r);
                    any |= bits;
                    all &= bits;
                }
                if any == 0 {
                    continue;
                }
                // A row that is absent for some, but not for all, may hold anything: where it is not finite, each row
                // of sums goes its own way.
                if any != all && !self.finite::<V>(start, any & !all) {
                    for r in 0..self.count {
                        self.strip::<V, 1>(r, start, &Live::new(bits(r)), distance);
                    }
                } else {
                    self.strips::<V>(start, &Live::new(any), distance);
                }
            }
        }
    }
}

impl<T: Element> Weigh<'_, T> {
    /// Whether all rows of values from `start` whose bit is set are finite.
    #[inline(always)]
    unsafe fn finite<V: Lanes<Scalar = T::Acc>>(&self, start: usize, bits: u32) -> bool {
        let (lanes, mut left) = (T::Acc::LANES, bits);
        let mut wrong = 0;
        while left != 0 {
            let row = self.values.rows[start + left.trailing_zeros() as usize];
            left &= left - 1;
            for part in row.chunks(lanes) {
                // SAFETY: the chunk is as long as it says; the caller vouches for the instruction set.
                unsafe {
                    let x = T::lanes::<V>(part.as_ptr(), part.len());
                    wrong |= x.sub(x).not_zero();
                }
            }
        }
        wrong == 0
    }

    /// All rows of sums.
    #[inline(always)]
    unsafe fn strips<V: Lanes<Scalar = T::Acc>>(&mut self, start: usize, live: &Live, distance: usize) {
        let (mut row, mut distance) = (0, distance);
        while row < self.count {
            let left = self.count - row;
            // SAFETY: as in `run`.
            unsafe {
                if V::TILE_ROWS >= 4 && left >= 4 {
                    self.strip::<V, 4>(row, start, live, distance);
                    row += 4;
                } else if left >= 2 {
                    self.strip::<V, 2>(row, start, live, distance);
                    row += 2;
                } else {
                    self.strip::<V, 1>(row, start, live, distance);
                    row += 1;
                }
            }
            distance = 0;
        }
    }

    /// `ROWS` rows of sums, all their panels.
    #[inline(always)]
    unsafe fn strip<V: Lanes<Scalar = T::Acc>, const ROWS: usize>(
        &mut self,
        row: usize,
        start: usize,
        live: &Live,
        distance: usize,
    ) {
        let lanes = T::Acc::LANES;
        let (whole, left) = (self.values.width / lanes, self.values.width % lanes);
        let mut panel = 0;
        // SAFETY: as in `run`.
        unsafe {
            while panel < whole {
                if V::TILE_PANELS >= 4 && whole - panel >= 4 {
                    self.tile::<V, ROWS, 4>(row, [start, panel, lanes], live, distance);
                    panel += 4;
                } else {
                    self.tile::<V, ROWS, 1>(row, [start, panel, lanes], live, distance);
                    panel += 1;
                }
            }
            if left > 0 {
                self.tile::<V, ROWS, 1>(row, [start, whole, left], live, distance);
            }
        }
    }

    /// One register tile of sums: from zero over every live row of the block from `start`, then added to what is there.
    /// `count` numbers of its last panel are there.
    #[inline(always)]
    unsafe fn tile<V: Lanes<Scalar = T::Acc>, const ROWS: usize, const PANELS: usize>(
        &mut self,
        row: usize,
        [start, panel, count]: [usize; 3],
        live: &Live,
        distance: usize,
    ) {
        let lanes = T::Acc::LANES;
        // SAFETY: as in `run`.
        unsafe {
            let to = self.sums.as_mut_ptr().add(row * self.sum_row + panel * lanes);
            let weights = self.weights.as_ptr().add(row * self.weight_row + start);
            let mut sums = [[V::splat(T::Acc::ZERO); PANELS]; ROWS];
            for &at in &live.at[..live.count] {
                let at = usize::from(at);
                let from = self.values.rows.get_unchecked(start + at).as_ptr();
                let later = self.values.later(start + at, distance);
                let values: [V; PANELS] = std::array::from_fn(|p| {
                    let at = (panel + p) * lanes;
                    if distance > 0 {
                        prefetch(later.wrapping_add(at));
                    }
                    T::lanes::<V>(from.add(at), count)
                });
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weight = V::splat(*weights.add(r * self.weight_row + at));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = weight.mul_add(value, *sum);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (p, sum) in sums.iter().enumerate() {
                    let to = to.add(r * self.sum_row + p * lanes);
                    V::load(to).add(*sum).store(to);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Numbers between −2 and 2 that every type holds, and that differ from row to row.
    fn noise<T: Element>(at: usize) -> T {
        T::of_f64(((at * 2_654_435_761 + at / 7) % 257) as f64 / 64.0 - 2.0)
    }

    /// `rows` rows of `width` numbers, at some distance from one another.
    fn lying<T: Element>(rows: usize, width: usize, seed: usize) -> Vec<Vec<T>> {
        (0..rows).map(|r| (0..width).map(|x| noise(seed + r * 977 + x)).collect()).collect()
    }

    fn table<T>(rows: &[Vec<T>]) -> Vec<&[T]> {
        rows.iter().map(|row| row.as_slice()).collect()
    }

    const WIDTHS: [usize; 12] = [0, 1, 7, 8, 15, 16, 20, 64, 65, 100, 128, 130];

    fn products_are_sums<T: Element>() {
        for isa in Isa::available() {
            for width in WIDTHS {
                for count in 1..10 {
                    for keys in [0, 1, 3, 4, 17, 33] {
                        let lying = lying::<T>(keys, width, 5);
                        let (row, out_row) = (padded::<T::Acc>(width) + 3, padded::<T::Acc>(keys) + 1);
                        let mut queries = vec![T::Acc::ZERO; count * row];
                        for r in 0..count {
                            for x in 0..width {
                                queries[r * row + x] = noise(r * 31 + x * 3);
                            }
                        }
                        let rows = table(&lying);
                        let mut out = vec![T::Acc::from_f64(f64::NAN); count * out_row];
                        let keys_of = Table { rows: &rows, len: keys, width };
                        dots(isa, &mut out, out_row, &queries, row, count, keys_of);
                        for r in 0..count {
                            for j in 0..padded::<T::Acc>(keys) {
                                let product = |x: usize| lying[j][x].to_f64() * queries[r * row + x].to_f64();
                                let truth: f64 = if j < keys { (0..width).map(product).sum() } else { 0.0 };
                                let found = out[r * out_row + j].to_f64();
                                let bound = 1e-5 * (1.0 + width as f64);
                                assert!((found - truth).abs() <= bound, "{isa} {} {width}: {found} {truth}", T::NAME);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn products_with_rows_as_they_lie_are_sums_over_the_width() {
        products_are_sums::<f32>();
        products_are_sums::<f64>();
        products_are_sums::<bf16>();
        products_are_sums::<f16>();
    }

    /// Weights of which some are absent: for all rows, for some, and for none.
    fn weight<A: Real>(r: usize, j: usize) -> A {
        let absent = j.is_multiple_of(5) || (r + j).is_multiple_of(3);
        if absent { A::ZERO } else { noise::<A>(r * 13 + j).abs() + A::ONE }
    }

    fn what_is_absent_has_no_effect<T: Element>() {
        for isa in Isa::available() {
            for width in WIDTHS {
                for count in 1..10 {
                    for keys in [0, 1, 16, 33, 128] {
                        let clean = lying::<T>(keys, width, 9);
                        let mut dirty = clean.clone();
                        for (j, row) in dirty.iter_mut().enumerate() {
                            if j.is_multiple_of(5) {
                                row.fill(T::of_f64(f64::NAN));
                            }
                        }
                        let (sum_row, row) = (padded::<T::Acc>(width), padded::<T::Acc>(keys) + 2);
                        let mut weights = vec![T::Acc::ZERO; count * row];
                        for r in 0..count {
                            for j in 0..keys {
                                weights[r * row + j] = weight(r, j);
                            }
                        }
                        let run = |values: &[Vec<T>], count: usize, weights: &[T::Acc]| {
                            let rows = table(values);
                            let mut sums = vec![T::Acc::ONE; count * sum_row];
                            weigh(
                                isa,
                                &mut sums,
                                sum_row,
                                weights,
                                row,
                                count,
                                Table { rows: &rows, len: rows.len(), width },
                            );
                            sums
                        };
                        let sums = run(&clean, count, &weights);
                        assert!(sums == run(&dirty, count, &weights), "{isa} {} {width}", T::NAME);
                        for r in 0..count {
                            let alone = run(&clean, 1, &weights[r * row..]);
                            assert!(alone == sums[r * sum_row..][..sum_row], "a row's bits are its own");
                            for x in 0..width {
                                let term = |j: usize| weight::<T::Acc>(r, j).to_f64() * clean[j][x].to_f64();
                                let truth = 1.0 + (0..keys).map(term).sum::<f64>();
                                let found = sums[r * sum_row + x].to_f64();
                                assert!((found - truth).abs() <= 1e-5 * (8.0 + 8.0 * keys as f64));
                            }
                        }
                        // Absent for one row and there for another: only the other feels it.
                        if count > 1 && keys > 2 && width > 0 {
                            let mut infinite = clean.clone();
                            infinite[2][width - 1] = T::of_f64(f64::INFINITY);
                            let felt = run(&infinite, count, &weights);
                            for r in 0..count {
                                let there = weight::<T::Acc>(r, 2) != T::Acc::ZERO;
                                let at = r * sum_row + width - 1;
                                assert_eq!(felt[at].is_finite(), !there);
                                assert!(there || felt[at] == sums[at]);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_weight_of_zero_means_absent_for_each_row_of_its_own() {
        what_is_absent_has_no_effect::<f32>();
        what_is_absent_has_no_effect::<f64>();
        what_is_absent_has_no_effect::<bf16>();
        what_is_absent_has_no_effect::<f16>();
    }

    #[test]
    fn every_number_of_sixteen_bits_is_widened_without_loss() {
        fn all<T: Element<Acc = f32>>(of: impl Fn(u16) -> T) {
            for isa in Isa::available() {
                for high in (0..=u16::MAX).step_by(13) {
                    let x = of(high);
                    let rows: [&[T]; 1] = [&[x; 17]];
                    let (mut sums, weights) = ([0.0f32; 32], [1.0f32; 16]);
                    weigh(isa, &mut sums, 32, &weights, 16, 1, Table { rows: &rows, len: 1, width: 17 });
                    for sum in &sums[..17] {
                        assert!(*sum == x.widen() || x.widen().is_nan() && sum.is_nan(), "{isa}: {sum} of {x:?}");
                    }
                    assert_eq!(sums[17..], [0.0; 15]);
                }
            }
        }
        all(bf16::from_bits);
        all(f16::from_bits);
    }
}
