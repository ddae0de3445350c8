//! The native matrix product of the exact engine: `C += A · B`.
//!
//! `B` comes in panels of `LANES` columns, either packed panel by panel or as the columns of padded rows; both are
//! described by the same two strides. `A` is read one element at a time with any strides, so its transpose costs
//! nothing. Every element of `C` is one chain of multiply-adds over `k` in ascending order: its bits do not depend on
//! how rows and panels were blocked. The chain starts from `C` or from zero, and in the latter case may be added to `C`
//! at its end.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::number::Real;
use crate::span;
use std::any::Any;

/// A matrix that is read one element at a time: element `(i, k)` is at `i·row + k·col`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, A> {
    /// The elements.
    pub data: &'a [A],
    /// The distance between rows.
    pub row: usize,
    /// The distance between columns.
    pub col: usize,
}

impl<'a, A> Matrix<'a, A> {
    /// Dense rows of `row` elements.
    pub fn rows(data: &'a [A], row: usize) -> Self {
        Matrix { data, row, col: 1 }
    }

    /// The transpose of such rows.
    pub fn transposed(data: &'a [A], row: usize) -> Self {
        Matrix { data, row: 1, col: row }
    }
}

/// A matrix that is read `LANES` columns at a time: row `k` of panel `p` is at `p·panel + k·row`.
#[derive(Clone, Copy, Debug)]
pub struct Panels<'a, A> {
    /// The elements.
    pub data: &'a [A],
    /// The distance between rows of a panel.
    pub row: usize,
    /// The distance between panels.
    pub panel: usize,
}

impl<'a, A: Real> Panels<'a, A> {
    /// Packed panels of `depth` rows each.
    pub fn packed(data: &'a [A], depth: usize) -> Self {
        Panels { data, row: A::LANES, panel: depth * A::LANES }
    }

    /// The columns of padded rows of `row` elements.
    pub fn rows(data: &'a [A], row: usize) -> Self {
        Panels { data, row, panel: A::LANES }
    }
}

/// How a product updates `C`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// `C = A · B`: the chain starts from zero.
    Overwrite,
    /// `C += A · B`, with the chain starting from `C`, so that cutting the depth anywhere does not change the bits.
    Accumulate,
    /// `C += A · B`, with the chain starting from zero and added to `C` at its end. This rounds far less if a long sum
    /// is cut into many products: a chain of `n` steps has an error of about √n roundings of the whole, `b` blocks only
    /// √(n/b) + √b. A longer depth is cut into chains of `every` steps, each added to `C` in turn.
    AddPartial {
        /// The longest chain.
        every: usize,
    },
}

/// The rows of `C` with stride `row`.
#[derive(Debug)]
pub struct Target<'a, A> {
    /// The elements.
    pub data: &'a mut [A],
    /// The distance between rows.
    pub row: usize,
    /// How they are updated.
    pub update: Update,
}

impl<'a, A> Target<'a, A> {
    /// Continues the chains that `C` holds.
    pub fn accumulate(data: &'a mut [A], row: usize) -> Self {
        Target { data, row, update: Update::Accumulate }
    }

    /// Adds partial sums that start from zero.
    pub fn add_partial(data: &'a mut [A], row: usize) -> Self {
        Target::add_partials(data, row, usize::MAX)
    }

    /// Adds partial sums that start from zero, each of at most `every` steps of the depth.
    pub fn add_partials(data: &'a mut [A], row: usize, every: usize) -> Self {
        Target { data, row, update: Update::AddPartial { every } }
    }

    /// Replaces `C`.
    pub fn overwrite(data: &'a mut [A], row: usize) -> Self {
        Target { data, row, update: Update::Overwrite }
    }
}

struct Product<'a, A> {
    c: Target<'a, A>,
    a: Matrix<'a, A>,
    b: Panels<'a, A>,
    rows: usize,
    panels: usize,
    depth: usize,
}

/// `C += A · B` or `C = A · B`, where `C` has `rows` rows and `panels` panels, over a depth of `depth`.
///
/// ```
/// use qkv_simd::{product, Isa, Matrix, Panels, Real, Target};
/// let a = [1.0f32, 2.0];                       // one row of two
/// let mut b = vec![0.0f32; 2 * f32::LANES];    // two rows, one panel
/// b[0] = 10.0;
/// b[f32::LANES] = 100.0;
/// let mut c = vec![7.0f32; f32::LANES];
/// product(Isa::best(), Target::overwrite(&mut c, f32::LANES), Matrix::rows(&a, 2), Panels::packed(&b, 2), 1, 1, 2);
/// assert_eq!(c[0], 210.0);
/// ```
///
/// # Panics
/// If a slice is too short.
#[allow(clippy::too_many_arguments)]
pub fn product<A: Real>(
    isa: Isa,
    c: Target<'_, A>,
    a: Matrix<'_, A>,
    b: Panels<'_, A>,
    rows: usize,
    panels: usize,
    depth: usize,
) {
    let mut product = Product { c, a, b, rows, panels, depth };
    if product.is_any() {
        for_type::<A>(f32_product, f64_product)(isa, product);
    }
}

/// Runs a product whose slices are checked.
type Run<A> = fn(Isa, Product<'_, A>);

/// Picks the function for this type. Neither is generic, so both are compiled in this crate; otherwise every caller
/// would compile all tiles again.
fn for_type<A: Real>(of_f32: Run<f32>, of_f64: Run<f64>) -> Run<A> {
    let both: [&dyn Any; 2] = [&of_f32, &of_f64];
    *both.iter().find_map(|run| run.downcast_ref()).expect("an accumulator is f32 or f64")
}

fn f32_product(isa: Isa, product: Product<'_, f32>) {
    dispatch(isa, product);
}

fn f64_product(isa: Isa, product: Product<'_, f64>) {
    dispatch(isa, product);
}

fn f32_product_skipping_zeros(isa: Isa, product: Product<'_, f32>) {
    dispatch(isa, Skipping(product));
}

fn f64_product_skipping_zeros(isa: Isa, product: Product<'_, f64>) {
    dispatch(isa, Skipping(product));
}

impl<A: Real> Product<'_, A> {
    /// Checks the slices and returns whether there is anything to multiply. If not, clears a `C` that is to be
    /// overwritten.
    fn is_any(&mut self) -> bool {
        let &mut Product { ref mut c, a, b, rows, panels, depth } = self;
        if rows == 0 || panels == 0 || depth == 0 && c.update != Update::Overwrite {
            return false;
        }
        assert!(c.update != Update::AddPartial { every: 0 }, "partial sums of no steps");
        let width = panels.saturating_mul(A::LANES);
        assert!(c.row >= width && c.data.len() >= span(rows, c.row, width), "C is too short");
        if depth == 0 {
            c.data.chunks_mut(c.row).take(rows).for_each(|row| row[..width].fill(A::ZERO));
            return false;
        }
        assert!(a.data.len() >= span(rows, a.row, span(depth, a.col, 1)), "A is too short");
        assert!(b.data.len() >= span(panels, b.panel, span(depth, b.row, A::LANES)), "B is too short");
        true
    }
}

impl<A: Real> Kernel<A> for Product<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(mut self) {
        // A few panels of B against all rows, so that they stay in the first-level cache while A is streamed. The
        // panels are divided evenly: five as three and two, because a tile of one panel waits for its sums or loads.
        // SAFETY: `product` checked that every row, panel and step below lies inside its slice; the caller guarantees
        // the instruction set.
        unsafe {
            let mut panel = 0;
            while panel < self.panels {
                let left = self.panels - panel;
                let next = left.div_ceil(left.div_ceil(V::TILE_PANELS));
                match next {
                    4 if V::TILE_PANELS >= 4 => self.column::<V, 4>(panel),
                    3 if V::TILE_PANELS >= 4 => self.column::<V, 3>(panel),
                    2 if V::TILE_PANELS >= 4 => self.column::<V, 2>(panel),
                    _ => self.column::<V, 1>(panel),
                }
                panel += next;
            }
        }
    }
}

impl<A: Real> Product<'_, A> {
    /// `PANELS` panels of C, all of their rows, in register tiles with about the same number of sums.
    #[inline(always)]
    unsafe fn column<V: Lanes<Scalar = A>, const PANELS: usize>(&mut self, panel: usize) {
        // With 32 registers: 6 × 4, 8 × 3, 12 × 2 or 12 × 1.
        let most = match (V::TILE_PANELS, PANELS) {
            (4, 3) => 8,
            (4, 1 | 2) => 12,
            _ => V::TILE_ROWS,
        };
        // SAFETY: as in `run`.
        unsafe {
            let mut row = 0;
            while row < self.rows {
                // Sixteen rows are two tiles of eight rather than twelve and four.
                let left = self.rows - row;
                let next = if left < 2 * most { left.div_ceil(left.div_ceil(most)) } else { most };
                row += match next {
                    12.. if most >= 12 => self.tile::<V, 12, PANELS>(row, panel),
                    8.. if most >= 8 => self.tile::<V, 8, PANELS>(row, panel),
                    6.. if most >= 6 => self.tile::<V, 6, PANELS>(row, panel),
                    4.. if most >= 4 => self.tile::<V, 4, PANELS>(row, panel),
                    2.. => self.tile::<V, 2, PANELS>(row, panel),
                    _ => self.tile::<V, 1, PANELS>(row, panel),
                }
            }
        }
    }

    /// One register tile over the whole depth. Returns its rows.
    #[inline(always)]
    unsafe fn tile<V: Lanes<Scalar = A>, const ROWS: usize, const PANELS: usize>(
        &mut self,
        row: usize,
        panel: usize,
    ) -> usize {
        // SAFETY: as in `run`; the pointer into C is the only access to it for the length of the call.
        unsafe {
            let c = self.c.data.as_mut_ptr().add(row * self.c.row + panel * A::LANES);
            let mut a = self.a.data.as_ptr().add(row * self.a.row);
            let mut b = self.b.data.as_ptr().add(panel * self.b.panel);
            let (mut left, chain) =
                (self.depth, if let Update::AddPartial { every } = self.c.update { every } else { self.depth });
            // All chains of a tile one after the other, while its part of C is in the first-level cache.
            while left > 0 {
                let mut acc = [[V::splat(A::ZERO); PANELS]; ROWS];
                if self.c.update == Update::Accumulate {
                    for (r, acc) in acc.iter_mut().enumerate() {
                        for (p, acc) in acc.iter_mut().enumerate() {
                            *acc = V::load(c.add(r * self.c.row + p * A::LANES));
                        }
                    }
                }
                let steps = chain.min(left);
                left -= steps;
                for _ in 0..steps {
                    let mut columns = [V::splat(A::ZERO); PANELS];
                    for (p, column) in columns.iter_mut().enumerate() {
                        *column = V::load(b.add(p * self.b.panel));
                    }
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let x = V::splat(*a.add(r * self.a.row));
                        for (acc, column) in acc.iter_mut().zip(columns) {
                            *acc = x.mul_add(column, *acc);
                        }
                    }
                    a = a.wrapping_add(self.a.col);
                    b = b.wrapping_add(self.b.row);
                }
                let adds = matches!(self.c.update, Update::AddPartial { .. });
                for (r, acc) in acc.iter_mut().enumerate() {
                    for (p, acc) in acc.iter_mut().enumerate() {
                        let c = c.add(r * self.c.row + p * A::LANES);
                        if adds {
                            *acc = V::load(c).add(*acc);
                        }
                        acc.store(c);
                    }
                }
            }
        }
        ROWS
    }
}

/// `C += A · B` where a zero in `A` marks an *absent* element: the row of `B` there has no effect, even if it is NaN or
/// infinite. The chain of additions is that of [`product`], so the results are the same where `B` is finite.
///
/// # Panics
/// If a slice is too short.
#[allow(clippy::too_many_arguments)]
pub fn product_skipping_zeros<A: Real>(
    isa: Isa,
    c: Target<'_, A>,
    a: Matrix<'_, A>,
    b: Panels<'_, A>,
    rows: usize,
    panels: usize,
    depth: usize,
) {
    let mut product = Product { c, a, b, rows, panels, depth };
    if product.is_any() {
        for_type::<A>(f32_product_skipping_zeros, f64_product_skipping_zeros)(isa, product);
    }
}

struct Skipping<'a, A>(Product<'a, A>);

impl<A: Real> Kernel<A> for Skipping<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        let Skipping(Product { c, a, b, rows, panels, depth }) = self;
        for r in 0..rows {
            for p in 0..panels {
                let c_at = &mut c.data[r * c.row + p * A::LANES..][..A::LANES];
                // SAFETY: `c_at`, and `b` from each step on, have as many lanes as are loaded and stored, as
                // `product_skipping_zeros` checked; the caller guarantees the instruction set.
                unsafe {
                    let mut start = 0;
                    while start < depth {
                        let every = if let Update::AddPartial { every } = c.update { every } else { depth };
                        let end = start.saturating_add(every).min(depth);
                        let there = V::load(c_at.as_ptr());
                        let mut sum = if c.update == Update::Accumulate { there } else { V::splat(A::ZERO) };
                        for k in start..end {
                            let x = a.data[r * a.row + k * a.col];
                            if x != A::ZERO {
                                sum = V::splat(x).mul_add(V::load(b.data[p * b.panel + k * b.row..].as_ptr()), sum);
                            }
                        }
                        let adds = matches!(c.update, Update::AddPartial { .. });
                        if adds { there.add(sum) } else { sum }.store(c_at.as_mut_ptr());
                        start = end;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_begin_as_asked_and_skipping_zeros_changes_no_bit_of_what_is_finite() {
        let (rows, depth) = (7, 33);
        for isa in Isa::available() {
            for panels in [1, 2, 3, 5] {
                let row = panels * f32::LANES + 3;
                let number = |x: usize| ((x * 2_654_435_761) % 1009) as f32 / 317.0 - 1.6;
                let a: Vec<f32> =
                    (0..rows * depth).map(|x: usize| if x.is_multiple_of(3) { 0.0 } else { number(x) }).collect();
                let b: Vec<f32> = (0..depth * panels * f32::LANES).map(|x| number(x + 7)).collect();
                let c: Vec<f32> = (0..rows * row).map(|x| number(x + 31)).collect();
                let run = |skipping: bool, update: Update| {
                    let mut c = c.clone();
                    let multiply = if skipping { product_skipping_zeros } else { product };
                    let target = Target { data: &mut c, row, update };
                    multiply(isa, target, Matrix::rows(&a, depth), Panels::packed(&b, depth), rows, panels, depth);
                    c
                };
                let whole = Update::AddPartial { every: usize::MAX };
                let [anew, onto, plus] =
                    [Update::Overwrite, Update::Accumulate, whole].map(|update| run(false, update));
                for (r, x) in (0..rows).flat_map(|r| (0..row).map(move |x| (r, x))) {
                    let at = r * row + x;
                    if x < panels * f32::LANES {
                        assert_eq!(plus[at], c[at] + anew[at], "{isa}");
                        assert!((plus[at] - onto[at]).abs() < 1e-4, "{isa}");
                    } else {
                        assert_eq!([anew[at], onto[at], plus[at]], [c[at]; 3], "{isa}");
                    }
                }
                for (update, expected) in [(Update::Overwrite, anew), (Update::Accumulate, onto), (whole, plus)] {
                    assert_eq!(run(true, update), expected, "{isa} {update:?}");
                }
                let parts = Update::AddPartial { every: 8 };
                assert_eq!(run(true, parts), run(false, parts), "{isa} {parts:?}");
            }
        }
    }
}
