//! Tensors that are written: [`ViewMut`] over borrowed memory, and [`Unwritten`], which owns memory that a view fills.

use super::{ViewError, contiguous, disjoint, inside, offset_of, representable};
use crate::isa::Isa;
use crate::number::Element;
use crate::rows;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::AtomicUsize;

/// A mutably borrowed tensor `[batch, heads, length, width]`, in which no two elements overlap.
///
/// ```
/// use qkv_simd::ViewMut;
/// let mut data = vec![0.0f32; 6];
/// assert!(ViewMut::new(&mut data, [1, 2, 3, 1]).is_ok());
/// assert!(ViewMut::strided(&mut data, 0, [1, 2, 3, 1], [0, 0, 1, 1]).is_err());
/// ```
pub struct ViewMut<'a, T> {
    pub(super) data: *mut T,
    pub(super) shape: [usize; 4],
    pub(super) strides: [isize; 4],
    /// Counts the rows that were written, for [`Unwritten`].
    pub(crate) count: Option<&'a AtomicUsize>,
    pub(super) borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: an exclusive borrow of a slice's elements.
unsafe impl<T: Send> Send for ViewMut<'_, T> {}
// SAFETY: a shared reference gives access to the elements only through `shared::Rows`, which hands out each row once.
unsafe impl<T: Send> Sync for ViewMut<'_, T> {}

impl<T> fmt::Debug for ViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ViewMut({:?}, strides {:?})", self.shape, self.strides)
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// A slice in row-major order.
    pub fn new(data: &'a mut [T], shape: [usize; 4]) -> Result<Self, ViewError> {
        let strides = contiguous(shape).ok_or(ViewError::TooLarge { shape })?;
        ViewMut::strided(data, 0, shape, strides)
    }

    /// A slice with the first element at `offset`, and strides with which no two elements overlap.
    pub fn strided(
        data: &'a mut [T],
        offset: usize,
        shape: [usize; 4],
        strides: [isize; 4],
    ) -> Result<Self, ViewError> {
        inside(data.len(), offset, shape, strides)?;
        if !disjoint(shape, strides) {
            return Err(ViewError::Overlapping { shape, strides });
        }
        Ok(ViewMut { data: data.as_mut_ptr().wrapping_add(offset), shape, strides, count: None, borrowed: PhantomData })
    }

    /// A mutable view over memory that another library owns; `data` is the address of element `[0, 0, 0, 0]`. Fails if
    /// two elements overlap, or their offsets do not fit a machine word.
    ///
    /// ```
    /// use qkv_simd::{ViewMut, shared::Rows};
    /// let mut data = [0.0f32; 4];
    /// // SAFETY: four elements of an array that nothing else touches while the view lives.
    /// let view = unsafe { ViewMut::from_raw(data.as_mut_ptr(), [1, 1, 2, 2], [4, 4, 2, 1]) }.unwrap();
    /// Rows::new(view).write(0, 0, 1, &[3.0, 4.0]);
    /// assert_eq!(data, [0.0, 0.0, 3.0, 4.0]);
    /// ```
    ///
    /// # Safety
    /// For the lifetime `'a`, the element at offset `Σ index · stride` from `data` must be aligned, writable and
    /// accessed only through this view, for every index inside `shape`, and all of them must belong to one allocation.
    /// They need not be initialized. A view without elements touches no memory, so `data` may then be any pointer.
    pub unsafe fn from_raw(data: *mut T, shape: [usize; 4], strides: [isize; 4]) -> Result<Self, ViewError> {
        representable(size_of::<T>(), shape, strides)?;
        if !disjoint(shape, strides) {
            return Err(ViewError::Overlapping { shape, strides });
        }
        Ok(ViewMut { data, shape, strides, count: None, borrowed: PhantomData })
    }

    /// The same view with a shorter lifetime, so that it can be written again later.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        let ViewMut { data, shape, strides, count, .. } = *self;
        ViewMut { data, shape, strides, count, borrowed: PhantomData }
    }

    /// `[batch, heads, length, width]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }
}

/// Uninitialized memory for a tensor that is written row by row through its view, without clearing it first.
///
/// ```
/// use qkv_simd::{Unwritten, shared::Rows};
/// let mut memory = Unwritten::<f32>::new([1, 1, 2, 3]).unwrap();
/// let rows = Rows::new(memory.view());
/// rows.write(0, 0, 1, &[4.0, 5.0, 6.0]);
/// rows.write(0, 0, 0, &[1.0, 2.0, 3.0]);
/// drop(rows);
/// assert_eq!(memory.written(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
/// ```
#[derive(Debug)]
pub struct Unwritten<T> {
    data: Vec<T>,
    shape: [usize; 4],
    len: usize,
    rows: AtomicUsize,
}

impl<T: Copy> Unwritten<T> {
    /// Memory for this shape; `None` if it cannot be allocated.
    pub fn new(shape: [usize; 4]) -> Option<Self> {
        let len = shape.iter().try_fold(1usize, |len, &axis| len.checked_mul(axis))?;
        let data = match crate::kept_memory::take(len) {
            Some(data) => data,
            None => {
                let mut data = Vec::new();
                data.try_reserve_exact(len).ok()?;
                crate::huge_pages::advise_huge_pages(&mut data);
                data
            }
        };
        Some(Unwritten { data, shape, len, rows: AtomicUsize::new(0) })
    }

    /// The view through which it is written.
    pub fn view(&mut self) -> ViewMut<'_, T> {
        let [_, h, n, d] = self.shape;
        // Exact wherever there are elements; an empty shape may have axes whose product does not fit.
        let row = |axes: &[usize]| axes.iter().fold(1isize, |product, &len| product.saturating_mul(len as isize));
        let strides = [row(&[h, n, d]), row(&[n, d]), row(&[d]), 1];
        *self.rows.get_mut() = 0;
        // Nothing reads through a `ViewMut`; `shared::Rows` writes its rows and counts them.
        let data = self.data.as_mut_ptr();
        ViewMut { data, shape: self.shape, strides, count: Some(&self.rows), borrowed: PhantomData }
    }

    /// The written elements.
    ///
    /// # Panics
    /// If a row was not written.
    pub fn written(mut self) -> Vec<T> {
        let width = self.shape[3];
        let rows = self.len.checked_div(width).unwrap_or(0);
        assert!(width == 0 || *self.rows.get_mut() == rows, "a row was not written");
        // SAFETY: the capacity is at least `len`, and all of its rows were written, each once.
        unsafe { self.data.set_len(self.len) };
        self.data
    }
}

impl<T: Element> ViewMut<'_, T> {
    /// Rounds a row of accumulators into place.
    ///
    /// # Safety
    /// No other access to this row happens at the same time.
    pub(crate) unsafe fn store_row(&self, b: usize, h: usize, i: usize, row: &[T::Acc]) {
        let [batch, heads, length, width] = self.shape;
        assert!(b < batch && h < heads && i < length && row.len() >= width, "row [{b}, {h}, {i}] of {:?}", self.shape);
        // A row without elements has no address.
        if width == 0 {
            return;
        }
        let start = offset_of(self.strides, [b, h, i]);
        // SAFETY: every index is inside the shape, which lies inside the borrowed memory, and the caller guarantees
        // that nothing else accesses the row.
        unsafe {
            if self.strides[3] == 1 || width == 1 {
                return rows::narrow(Isa::best(), (row, width), 1, width, (self.data.offset(start), 0));
            }
            for (x, &value) in row[..width].iter().enumerate() {
                self.data.offset(start + x as isize * self.strides[3]).write(T::narrow(value));
            }
        }
    }

    /// Rounds `count` rows of accumulators with stride `row` into the rows from `i` on; in one pass if both are dense.
    ///
    /// # Safety
    /// No other access to these rows happens at the same time.
    pub(crate) unsafe fn store_rows(&self, [b, h, i]: [usize; 3], count: usize, data: &[T::Acc], row: usize) {
        let [batch, heads, length, width] = self.shape;
        assert!(
            b < batch && h < heads && i.saturating_add(count) <= length,
            "rows [{b}, {h}, {i}..] of {:?}",
            self.shape
        );
        assert!(row >= width && data.len() >= count.saturating_mul(row), "the rows are too short");
        if width == 0 || count == 0 {
            return;
        }
        let to = (self.data.wrapping_offset(offset_of(self.strides, [b, h, i])), self.strides[2]);
        let dense = row == width && self.strides[2..] == [width as isize, 1];
        // SAFETY: as in `store_row`, for each of the rows.
        unsafe {
            if dense {
                return rows::narrow(Isa::best(), (data, count * width), 1, count * width, (to.0, 0));
            }
            if self.strides[3] == 1 || width == 1 {
                return rows::narrow(Isa::best(), (data, row), count, width, to);
            }
            for r in 0..count {
                self.store_row(b, h, i + r, &data[r * row..][..row]);
            }
        }
    }

    /// Multiplies rows of accumulators with stride `row` by their factors, and rounds them into the rows from `i` on.
    ///
    /// # Safety
    /// No other access to these rows happens at the same time.
    pub(crate) unsafe fn store_scaled(&self, [b, h, i]: [usize; 3], factors: &[T::Acc], data: &[T::Acc], row: usize) {
        let [batch, heads, length, width] = self.shape;
        assert!(
            b < batch && h < heads && i.saturating_add(factors.len()) <= length,
            "rows [{b}, {h}, {i}..] of {:?}",
            self.shape
        );
        assert!(row >= width && data.len() >= factors.len().saturating_mul(row), "the rows are too short");
        if width == 0 || factors.is_empty() {
            return;
        }
        let start = offset_of(self.strides, [b, h, i]);
        // SAFETY: as in `store_row`, for each of the rows.
        unsafe {
            if self.strides[3] == 1 || width == 1 {
                let to = (self.data.offset(start), self.strides[2]);
                return rows::narrow_scaled(Isa::best(), (data, row), factors, width, to);
            }
            for (r, &factor) in factors.iter().enumerate() {
                let start = start + r as isize * self.strides[2];
                for (x, &value) in data[r * row..][..width].iter().enumerate() {
                    self.data.offset(start + x as isize * self.strides[3]).write(T::narrow(value * factor));
                }
            }
        }
    }
}
