//! Products of a few rows with very many others, which are read in place and only once for all of the few: the
//! matrix-vector products of decoding. Nothing is packed or copied, so memory bandwidth is the limit; elements are
//! widened in registers.
//!
//! Rows come as a table of slices, so contiguous, strided, paged and gathered rows use the same kernel. Rows are
//! prefetched a few kilobytes ahead of their use, also past the end of a table into the rows that are needed next.
//!
//! Every sum has one order: a dot product is one chain of multiply-adds per lane, then the tree of [`Lanes::sum`]; a
//! weighted sum is one chain over as many rows as there are lanes, added to the previous ones. Neither depends on what
//! else is computed with it.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::number::{Element, Real};
use crate::prefetch::prefetch;
use crate::{padded, span};

/// How far ahead rows are prefetched, in bytes.
const AHEAD: usize = 4096;

/// Rows of one width, read in place.
#[derive(Clone, Copy, Debug)]
pub struct RowTable<'a, T> {
    /// The rows, followed by rows of any width that are needed next and may be prefetched.
    pub rows: &'a [&'a [T]],
    /// The number of rows.
    pub len: usize,
    /// Elements in a row.
    pub width: usize,
}

impl<T: Element> RowTable<'_, T> {
    /// Checks that every row has `width` elements.
    fn check(&self) {
        assert!(self.rows[..self.len].iter().all(|row| row.len() == self.width), "rows of {} numbers", self.width);
    }

    /// How many rows ahead to prefetch.
    fn distance(&self) -> usize {
        AHEAD.div_ceil((self.width * size_of::<T>()).max(1))
    }

    /// The row `distance` later, or the last.
    #[inline(always)]
    fn upcoming(&self, at: usize, distance: usize) -> *const T {
        self.rows[(at + distance).min(self.rows.len() - 1)].as_ptr()
    }
}

struct RowDotsInPlace<'a, T: Element> {
    out: &'a mut [T::Acc],
    out_row: usize,
    queries: &'a [T::Acc],
    query_row: usize,
    count: usize,
    keys: RowTable<'a, T>,
}

/// Dot products of `count` rows `queries`, with stride `query_row` and padded with zeros to whole panels, with every
/// row of a table: `out[r, j] = queries[r] · keys[j]`, where the rows of `out` have stride `out_row`. The rest of the
/// last panel of keys is 0.
///
/// ```
/// use qkv_simd::gemv::{RowTable, dots};
/// use qkv_simd::{Isa, Real};
/// let mut query = [0.0f32; f32::LANES];
/// query[..2].copy_from_slice(&[1.0, 2.0]);
/// let keys: [&[f32]; 2] = [&[10.0, 1.0], &[0.0, 3.0]];
/// let mut out = [f32::NAN; f32::LANES];
/// let table = RowTable { rows: &keys, len: 2, width: 2 };
/// dots(Isa::best(), &mut out, f32::LANES, &query, f32::LANES, 1, table);
/// assert_eq!(out[..3], [12.0, 6.0, 0.0]);
/// ```
///
/// # Panics
/// If a slice is too short, or a row has a different width.
pub fn dots<T: Element>(
    isa: Isa,
    out: &mut [T::Acc],
    out_row: usize,
    queries: &[T::Acc],
    query_row: usize,
    count: usize,
    keys: RowTable<'_, T>,
) {
    if count == 0 {
        return;
    }
    let (width, across) = (padded::<T::Acc>(keys.width), padded::<T::Acc>(keys.len));
    keys.check();
    assert!(query_row >= width && queries.len() >= span(count, query_row, width), "the queries are too short");
    assert!(out_row >= across && out.len() >= span(count, out_row, across), "the output is too short");
    dispatch(isa, RowDotsInPlace { out, out_row, queries, query_row, count, keys });
}

impl<T: Element> Kernel<T::Acc> for RowDotsInPlace<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = T::Acc>>(mut self) {
        let (keys, distance) = (self.keys.len, self.keys.distance());
        // SAFETY: `dots` checked every row and both sides; the caller guarantees the instruction set.
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

impl<T: Element> RowDotsInPlace<'_, T> {
    /// All queries with `KEYS` keys.
    #[inline(always)]
    unsafe fn across<V: Lanes<Scalar = T::Acc>, const KEYS: usize>(&mut self, key: usize, distance: usize) {
        // The first queries that use a row prefetch a later one. With a distance of 0 they prefetch the row itself,
        // which is already in the cache.
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
        let upcoming: [*const T; KEYS] = std::array::from_fn(|k| self.keys.upcoming(key + k, distance));
        // SAFETY: as in `run`: keys have `width` elements, and queries are padded to whole panels of that.
        unsafe {
            let queries = self.queries.as_ptr().add(query * self.query_row);
            let mut sums = [[V::splat(T::Acc::ZERO); KEYS]; ROWS];
            for panel in 0..whole {
                let at = panel * lanes;
                // A loop, since a closure may be compiled without the instruction set.
                let mut columns = [V::splat(T::Acc::ZERO); KEYS];
                for k in 0..KEYS {
                    if distance > 0 {
                        prefetch(upcoming[k].wrapping_add(at));
                    }
                    columns[k] = T::lanes::<V>(keys[k].add(at), lanes);
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let query = V::load(queries.add(r * self.query_row + at));
                    for (sum, key) in sums.iter_mut().zip(columns) {
                        *sum = query.mul_add(key, *sum);
                    }
                }
            }
            if left > 0 {
                let at = whole * lanes;
                for k in 0..KEYS {
                    prefetch(upcoming[k].wrapping_add(at));
                    let key = T::lanes::<V>(keys[k].add(at), left);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        sums[k] = V::load(queries.add(r * self.query_row + at)).mul_add(key, sums[k]);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                let out = &mut self.out[(query + r) * self.out_row + key..][..KEYS];
                if KEYS == 4 {
                    out.copy_from_slice(&V::sums([sums[0], sums[1 % KEYS], sums[2 % KEYS], sums[3 % KEYS]]));
                } else {
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out = sum.sum();
                    }
                }
            }
        }
    }
}

struct WeightedSum<'a, T: Element> {
    sums: &'a mut [T::Acc],
    sum_row: usize,
    weights: &'a [T::Acc],
    weight_row: usize,
    count: usize,
    values: RowTable<'a, T>,
}

/// `sums[r] += Σ weights[r, j] · values[j]` for `count` rows of sums, padded to whole panels. A weight of zero marks an
/// *absent* row, which has no effect even if it is NaN or infinite. A row that is absent for all is not read.
///
/// ```
/// use qkv_simd::gemv::{RowTable, weighted_sum};
/// use qkv_simd::{Isa, Real};
/// let values: [&[f32]; 3] = [&[1.0, 2.0], &[f32::NAN, 0.0], &[10.0, 20.0]];
/// let mut weights = [0.0f32; f32::LANES];
/// (weights[0], weights[2]) = (1.0, 0.5);
/// let mut sums = [0.0f32; f32::LANES];
/// let table = RowTable { rows: &values, len: 3, width: 2 };
/// weighted_sum(Isa::best(), &mut sums, f32::LANES, &weights, f32::LANES, 1, table);
/// assert_eq!(sums[..3], [6.0, 12.0, 0.0]);
/// ```
///
/// # Panics
/// If a slice is too short, or a row has a different width.
pub fn weighted_sum<T: Element>(
    isa: Isa,
    sums: &mut [T::Acc],
    sum_row: usize,
    weights: &[T::Acc],
    weight_row: usize,
    count: usize,
    values: RowTable<'_, T>,
) {
    if count == 0 {
        return;
    }
    let (width, across) = (padded::<T::Acc>(values.width), padded::<T::Acc>(values.len));
    values.check();
    assert!(sum_row >= width && sums.len() >= span(count, sum_row, width), "the sums are too short");
    assert!(weight_row >= across && weights.len() >= span(count, weight_row, across), "the weights are too short");
    dispatch(isa, WeightedSum { sums, sum_row, weights, weight_row, count, values });
}

/// The present rows of a block of up to 16 weights, as positions in the table.
struct PresentRows {
    at: [u8; 16],
    count: usize,
}

impl PresentRows {
    /// The positions of the set bits.
    #[inline(always)]
    fn new(bits: u32) -> Self {
        let mut live = PresentRows { at: std::array::from_fn(|at| at as u8), count: bits.count_ones() as usize };
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

impl<T: Element> Kernel<T::Acc> for WeightedSum<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = T::Acc>>(mut self) {
        let (lanes, distance) = (T::Acc::LANES, self.values.distance());
        for start in (0..self.values.len).step_by(lanes) {
            let there = u32::MAX >> (32 - lanes.min(self.values.len - start));
            // SAFETY: `weighted_sum` checked every row and both sides, padded to whole panels; the caller guarantees
            // the instruction set.
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
                // A row that is absent for some rows of sums but not for all may hold anything. If it is not finite,
                // each row of sums is computed separately.
                if any != all && !self.finite::<V>(start, any & !all) {
                    for r in 0..self.count {
                        self.strip::<V, 1>(r, start, &PresentRows::new(bits(r)), distance);
                    }
                } else {
                    self.strips::<V>(start, &PresentRows::new(any), distance);
                }
            }
        }
    }
}

impl<T: Element> WeightedSum<'_, T> {
    /// Whether the rows of values from `start` on whose bits are set are all finite.
    #[inline(always)]
    unsafe fn finite<V: Lanes<Scalar = T::Acc>>(&self, start: usize, bits: u32) -> bool {
        let (lanes, mut left) = (T::Acc::LANES, bits);
        let mut wrong = 0;
        while left != 0 {
            let row = self.values.rows[start + left.trailing_zeros() as usize];
            left &= left - 1;
            for part in row.chunks(lanes) {
                // SAFETY: the chunk has the length that is loaded; the caller guarantees the instruction set.
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
    unsafe fn strips<V: Lanes<Scalar = T::Acc>>(&mut self, start: usize, live: &PresentRows, distance: usize) {
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
        live: &PresentRows,
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

    /// One register tile of sums: a chain from zero over every present row of the block from `start`, added to the
    /// sums. The last panel has `count` elements.
    #[inline(always)]
    unsafe fn tile<V: Lanes<Scalar = T::Acc>, const ROWS: usize, const PANELS: usize>(
        &mut self,
        row: usize,
        [start, panel, count]: [usize; 3],
        live: &PresentRows,
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
                let upcoming = self.values.upcoming(start + at, distance);
                let mut values = [V::splat(T::Acc::ZERO); PANELS];
                for (p, value) in values.iter_mut().enumerate() {
                    let at = (panel + p) * lanes;
                    if distance > 0 {
                        prefetch(upcoming.wrapping_add(at));
                    }
                    *value = T::lanes::<V>(from.add(at), count);
                }
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

    /// Numbers between −2 and 2 that every type represents, different from row to row.
    fn noise<T: Element>(at: usize) -> T {
        T::of_f64(((at * 2_654_435_761 + at / 7) % 257) as f64 / 64.0 - 2.0)
    }

    /// `rows` rows of `width` elements, each in its own allocation.
    fn separate_rows<T: Element>(rows: usize, width: usize, seed: usize) -> Vec<Vec<T>> {
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
                        let separate_rows = separate_rows::<T>(keys, width, 5);
                        let (row, out_row) = (padded::<T::Acc>(width) + 3, padded::<T::Acc>(keys) + 1);
                        let mut queries = vec![T::Acc::ZERO; count * row];
                        for r in 0..count {
                            for x in 0..width {
                                queries[r * row + x] = noise(r * 31 + x * 3);
                            }
                        }
                        let rows = table(&separate_rows);
                        let mut out = vec![T::Acc::from_f64(f64::NAN); count * out_row];
                        let keys_of = RowTable { rows: &rows, len: keys, width };
                        dots(isa, &mut out, out_row, &queries, row, count, keys_of);
                        for r in 0..count {
                            for j in 0..padded::<T::Acc>(keys) {
                                let product = |x: usize| separate_rows[j][x].to_f64() * queries[r * row + x].to_f64();
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
    fn dot_products_are_sums_over_the_width() {
        products_are_sums::<f32>();
        products_are_sums::<f64>();
        products_are_sums::<bf16>();
        products_are_sums::<f16>();
    }

    /// Weights that are absent for all rows, for some, and for none.
    fn weight<A: Real>(r: usize, j: usize) -> A {
        let absent = j.is_multiple_of(5) || (r + j).is_multiple_of(3);
        if absent { A::ZERO } else { noise::<A>(r * 13 + j).abs() + A::ONE }
    }

    fn absent_rows_have_no_effect<T: Element>() {
        for width in WIDTHS {
            for keys in [0, 1, 16, 33, 128] {
                let clean = separate_rows::<T>(keys, width, 9);
                let mut dirty = clean.clone();
                for (j, row) in dirty.iter_mut().enumerate() {
                    if j.is_multiple_of(5) {
                        row.fill(T::of_f64(f64::NAN));
                    }
                }
                let truth = |at: usize| {
                    let (r, x) = (at / width.max(1), at % width.max(1));
                    let term = |(j, row): (usize, &Vec<T>)| weight::<T::Acc>(r, j).to_f64() * row[x].to_f64();
                    1.0 + clean.iter().enumerate().map(term).sum::<f64>()
                };
                let truths: Vec<f64> = (0..MOST_ROWS * width).map(truth).collect();
                for isa in Isa::available() {
                    for count in 1..=MOST_ROWS {
                        absent_rows_of_sums_have_no_effect(isa, width, count, &clean, &dirty, &truths);
                    }
                }
            }
        }
    }

    /// The most rows of sums.
    const MOST_ROWS: usize = 9;

    fn absent_rows_of_sums_have_no_effect<T: Element>(
        isa: Isa,
        width: usize,
        count: usize,
        clean: &[Vec<T>],
        dirty: &[Vec<T>],
        truths: &[f64],
    ) {
        let keys = clean.len();
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
            let rows = RowTable { rows: &rows, len: rows.len(), width };
            weighted_sum(isa, &mut sums, sum_row, weights, row, count, rows);
            sums
        };
        let sums = run(clean, count, &weights);
        assert!(sums == run(dirty, count, &weights), "{isa} {} {width}", T::NAME);
        for r in 0..count {
            let alone = run(clean, 1, &weights[r * row..]);
            assert!(alone == sums[r * sum_row..][..sum_row], "a row's bits are its own");
            for (found, truth) in alone.iter().zip(&truths[r * width..][..width]) {
                assert!((found.to_f64() - truth).abs() <= 1e-5 * (8.0 + 8.0 * keys as f64));
            }
        }
        // Absent for one row and present for another: only the other is affected.
        if count > 1 && keys > 2 && width > 0 {
            let mut infinite = clean.to_vec();
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

    #[test]
    fn a_weight_of_zero_marks_a_row_absent_for_each_row_of_sums_by_itself() {
        absent_rows_have_no_effect::<f32>();
        absent_rows_have_no_effect::<f64>();
        absent_rows_have_no_effect::<bf16>();
        absent_rows_have_no_effect::<f16>();
    }

    #[test]
    fn every_16_bit_element_is_widened_without_loss() {
        fn all<T: Element<Acc = f32>>(of: impl Fn(u16) -> T) {
            for isa in Isa::available() {
                for high in (0..=u16::MAX).step_by(13) {
                    let x = of(high);
                    let rows: [&[T]; 1] = [&[x; 17]];
                    let (mut sums, weights) = ([0.0f32; 32], [1.0f32; 16]);
                    weighted_sum(isa, &mut sums, 32, &weights, 16, 1, RowTable { rows: &rows, len: 1, width: 17 });
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
