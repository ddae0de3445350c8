//! The one matrix product of the exact engine: `C += A · B`.
//!
//! `B` comes in panels of `LANES` columns, either packed panel by panel or as the columns of padded rows: both are the
//! same two strides. `A` is read one number at a time and may be strided any way, so its transpose costs nothing. Every
//! element of `C` is loaded, extended by one chain of multiply-adds over `k` in ascending order, and stored: its bits do
//! not depend on how rows and panels were blocked.

use crate::isa::Isa;
use crate::kernel::{Kernel, dispatch};
use crate::lanes::Lanes;
use crate::number::Real;

/// A matrix that is read one number at a time: element `(i, k)` lies at `i·row + k·col`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, A> {
    /// The numbers.
    pub data: &'a [A],
    /// From one row to the next.
    pub row: usize,
    /// From one column to the next.
    pub col: usize,
}

impl<'a, A> Matrix<'a, A> {
    /// Rows of `row` numbers, one after the other.
    pub fn rows(data: &'a [A], row: usize) -> Self {
        Matrix { data, row, col: 1 }
    }

    /// The transpose of such rows.
    pub fn transposed(data: &'a [A], row: usize) -> Self {
        Matrix { data, row: 1, col: row }
    }
}

/// A matrix that is read `LANES` columns at a time: row `k` of panel `p` lies at `p·panel + k·row`.
#[derive(Clone, Copy, Debug)]
pub struct Panels<'a, A> {
    /// The numbers.
    pub data: &'a [A],
    /// From one row to the next within a panel.
    pub row: usize,
    /// From one panel to the next.
    pub panel: usize,
}

impl<'a, A: Real> Panels<'a, A> {
    /// Packed panels of `depth` rows each.
    pub fn packed(data: &'a [A], depth: usize) -> Self {
        Panels { data, row: A::LANES, panel: depth * A::LANES }
    }

    /// The columns of padded rows of `row` numbers.
    pub fn rows(data: &'a [A], row: usize) -> Self {
        Panels { data, row, panel: A::LANES }
    }
}

/// Rows of sums at distance `row`, to be extended or begun.
#[derive(Debug)]
pub struct Target<'a, A> {
    /// The numbers.
    pub data: &'a mut [A],
    /// From one row to the next.
    pub row: usize,
    /// Whether to begin from what is there, or from zero.
    pub add: bool,
}

impl<'a, A> Target<'a, A> {
    /// Extends what is there.
    pub fn onto(data: &'a mut [A], row: usize) -> Self {
        Target { data, row, add: true }
    }

    /// Begins from zero, whatever is there.
    pub fn anew(data: &'a mut [A], row: usize) -> Self {
        Target { data, row, add: false }
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

/// `C += A · B` or `C = A · B`, with `C` of `rows` rows and `panels` panels wide, over `depth`.
///
/// ```
/// use qkv_simd::{product, Isa, Matrix, Panels, Real, Target};
/// let a = [1.0f32, 2.0];                       // one row of two
/// let mut b = vec![0.0f32; 2 * f32::LANES];    // two rows, one panel
/// b[0] = 10.0;
/// b[f32::LANES] = 100.0;
/// let mut c = vec![7.0f32; f32::LANES];
/// product(Isa::best(), Target::anew(&mut c, f32::LANES), Matrix::rows(&a, 2), Panels::packed(&b, 2), 1, 1, 2);
/// assert_eq!(c[0], 210.0);
/// ```
///
/// # Panics
/// Where a slice is too short for what is asked.
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
    if rows == 0 || panels == 0 || depth == 0 && c.add {
        return;
    }
    let width = panels * A::LANES;
    assert!(c.row >= width && c.data.len() >= (rows - 1) * c.row + width, "C is too short");
    if depth == 0 {
        c.data.chunks_mut(c.row).take(rows).for_each(|row| row[..width].fill(A::ZERO));
        return;
    }
    assert!(a.data.len() > (rows - 1) * a.row + (depth - 1) * a.col, "A is too short");
    assert!(b.data.len() >= (panels - 1) * b.panel + (depth - 1) * b.row + A::LANES, "B is too short");
    dispatch(isa, Product { c, a, b, rows, panels, depth });
}

impl<A: Real> Kernel<A> for Product<'_, A> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes<Scalar = A>>(self) {
        // A few panels of B against all rows, so that they stay in the first-level cache while A goes by.
        // SAFETY: `product` checked that every row, panel and step below lies inside its slice; the caller vouches for
        // the instruction set.
        unsafe {
            let mut panel = 0;
            while panel < self.panels {
                let left = self.panels - panel;
                if V::TILE_PANELS >= 4 && left >= 4 {
                    self.column::<V, 4>(panel);
                    panel += 4;
                } else if V::TILE_PANELS >= 2 && left >= 2 {
                    self.column::<V, 2>(panel);
                    panel += 2;
                } else {
                    self.column::<V, 1>(panel);
                    panel += 1;
                }
            }
        }
    }
}

impl<A: Real> Product<'_, A> {
    /// `PANELS` panels of C, all their rows.
    #[inline(always)]
    unsafe fn column<V: Lanes<Scalar = A>, const PANELS: usize>(&self, panel: usize) {
        // SAFETY: as in `run`.
        unsafe {
            let mut row = 0;
            while row < self.rows {
                let left = self.rows - row;
                if V::TILE_ROWS >= 6 && left >= 6 {
                    self.tile::<V, 6, PANELS>(row, panel);
                    row += 6;
                } else if V::TILE_ROWS >= 4 && left >= 4 {
                    self.tile::<V, 4, PANELS>(row, panel);
                    row += 4;
                } else if left >= 2 {
                    self.tile::<V, 2, PANELS>(row, panel);
                    row += 2;
                } else {
                    self.tile::<V, 1, PANELS>(row, panel);
                    row += 1;
                }
            }
        }
    }

    /// One register tile: loaded, extended over the whole depth, stored.
    #[inline(always)]
    unsafe fn tile<V: Lanes<Scalar = A>, const ROWS: usize, const PANELS: usize>(&self, row: usize, panel: usize) {
        // SAFETY: as in `run`; the pointer into C is the only one to it for the length of the call.
        unsafe {
            let c = self.c.data.as_ptr().cast_mut().add(row * self.c.row + panel * A::LANES);
            let mut a = self.a.data.as_ptr().add(row * self.a.row);
            let mut b = self.b.data.as_ptr().add(panel * self.b.panel);
            let mut acc = [[V::splat(A::ZERO); PANELS]; ROWS];
            if self.c.add {
                for (r, acc) in acc.iter_mut().enumerate() {
                    for (p, acc) in acc.iter_mut().enumerate() {
                        *acc = V::load(c.add(r * self.c.row + p * A::LANES));
                    }
                }
            }
            for _ in 0..self.depth {
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
            for (r, acc) in acc.iter().enumerate() {
                for (p, acc) in acc.iter().enumerate() {
                    acc.store(c.add(r * self.c.row + p * A::LANES));
                }
            }
        }
    }
}

/// `C += A · B` where a zero of `A` means *absent*: what `B` holds there, NaN and infinities included, has no effect.
/// The chain of additions is that of [`product`], so where `B` is finite the results are the same.
///
/// # Panics
/// Where a slice is too short for what is asked.
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
    for r in 0..rows {
        let row = &mut c.data[r * c.row..];
        if !c.add {
            row[..panels * A::LANES].fill(A::ZERO);
        }
        for k in 0..depth {
            let at = r * a.row + k * a.col;
            if a.data[at] != A::ZERO {
                let step = Panels { data: &b.data[k * b.row..], ..b };
                product(isa, Target::onto(row, c.row), Matrix::rows(&a.data[at..=at], 1), step, 1, panels, 1);
            }
        }
    }
}
