//! Tensors `[batch, heads, length, width]` over borrowed memory: a pointer, a shape and strides.
//!
//! Zero strides broadcast, negative strides are allowed. Views are built from slices, from raw parts
//! ([`View::from_raw`], [`ViewMut::from_raw`]) for adapters to other tensor libraries, and from `ndarray` arrays with
//! the feature of that name. Writing through a [`ViewMut`] is left to [`shared::Rows`](crate::shared::Rows).

#[cfg(feature = "ndarray")]
mod from_ndarray;
mod mutable;

pub use mutable::{Unwritten, ViewMut};

use crate::isa::Isa;
use crate::number::Element;
use crate::rows;
use half::bf16;
use std::fmt;
use std::marker::PhantomData;

/// Why memory cannot be viewed with a shape and strides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewError {
    /// The shape and strides reach outside the slice.
    OutOfBounds {
        /// The requested shape.
        shape: [usize; 4],
        /// Elements in the slice.
        len: usize,
    },
    /// The number of elements, or an offset in memory, does not fit a machine word.
    TooLarge {
        /// The requested shape.
        shape: [usize; 4],
    },
    /// Two elements of a mutable view share an address.
    Overlapping {
        /// The requested shape.
        shape: [usize; 4],
        /// The strides that overlap.
        strides: [isize; 4],
    },
}

impl fmt::Display for ViewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ViewError::OutOfBounds { shape, len } => {
                write!(f, "shape {shape:?} reaches outside a slice of {len} elements")
            }
            ViewError::TooLarge { shape } => {
                write!(f, "shape {shape:?} is too large for this machine")
            }
            ViewError::Overlapping { shape, strides } => {
                write!(f, "shape {shape:?} with strides {strides:?} writes one element twice")
            }
        }
    }
}

impl std::error::Error for ViewError {}

/// A borrowed tensor `[batch, heads, length, width]` with any strides.
///
/// ```
/// use qkv_simd::View;
/// let data: Vec<f32> = (0..6).map(|x| x as f32).collect();
/// let rows = View::new(&data, [1, 1, 3, 2]).unwrap();
/// assert_eq!(rows.at(0, 0, 2, 1), 5.0);
/// // The same row for every head: a zero stride.
/// let shared = View::strided(&data, 0, [1, 8, 3, 2], [0, 0, 2, 1]).unwrap();
/// assert_eq!(shared.at(0, 7, 2, 1), 5.0);
/// assert!(View::new(&data, [1, 1, 4, 2]).is_err());
/// ```
pub struct View<'a, T> {
    data: *const T,
    shape: [usize; 4],
    strides: [isize; 4],
    borrowed: PhantomData<&'a [T]>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

// SAFETY: a view is a shared borrow of a slice's elements.
unsafe impl<T: Sync> Send for View<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for View<'_, T> {}

impl<T> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({:?}, strides {:?})", self.shape, self.strides)
    }
}

/// A mask of `bool`, read as bytes: `false` is 0 and `true` is 1.
impl<'a> From<View<'a, bool>> for View<'a, u8> {
    fn from(view: View<'a, bool>) -> Self {
        // A `bool` is one byte, 0 or 1, so the same memory is a view of `u8`.
        View { data: view.data.cast(), shape: view.shape, strides: view.strides, borrowed: PhantomData }
    }
}

/// Row-major strides, or `None` if they do not fit a machine word.
fn contiguous(shape: [usize; 4]) -> Option<[isize; 4]> {
    let mut strides = [0; 4];
    let mut step = 1isize;
    for axis in (0..4).rev() {
        strides[axis] = step;
        step = step.checked_mul(isize::try_from(shape[axis].max(1)).ok()?)?;
    }
    Some(strides)
}

/// The lowest and highest offset of an element from the first one.
fn reach(shape: [usize; 4], strides: [isize; 4]) -> Option<(isize, isize)> {
    let (mut low, mut high) = (0isize, 0isize);
    for (&len, stride) in shape.iter().zip(strides) {
        let last = stride.checked_mul(isize::try_from(len).ok()?.checked_sub(1)?.max(0))?;
        if last < 0 {
            low = low.checked_add(last)?;
        } else {
            high = high.checked_add(last)?;
        }
    }
    Some((low, high))
}

/// Checks that every element of a view from `offset` on lies inside a slice of `len`.
fn inside(len: usize, offset: usize, shape: [usize; 4], strides: [isize; 4]) -> Result<(), ViewError> {
    let too_large = ViewError::TooLarge { shape };
    let count = shape.iter().try_fold(1usize, |count, &len| count.checked_mul(len));
    let out = ViewError::OutOfBounds { shape, len };
    match count {
        None => return Err(too_large),
        Some(0) => return Ok(()),
        Some(_) => {}
    }
    let (low, high) = reach(shape, strides).ok_or(too_large)?;
    let first = isize::try_from(offset).ok().and_then(|at| at.checked_add(low));
    let last = isize::try_from(offset).ok().and_then(|at| at.checked_add(high));
    match (first, last) {
        (Some(first), Some(last)) if first >= 0 && (last as usize) < len => Ok(()),
        _ => Err(out),
    }
}

/// Checks that the number of elements and every offset, in elements and in bytes, fit a machine word.
fn representable(size: usize, shape: [usize; 4], strides: [isize; 4]) -> Result<(), ViewError> {
    let too_large = ViewError::TooLarge { shape };
    let Some(count) = shape.iter().try_fold(1usize, |count, &len| count.checked_mul(len)) else {
        return Err(too_large);
    };
    if count == 0 {
        return Ok(());
    }
    let size = isize::try_from(size).map_err(|_| too_large.clone())?;
    let (low, high) = reach(shape, strides).ok_or(too_large.clone())?;
    match high.checked_sub(low).and_then(|extent| extent.checked_add(1)?.checked_mul(size)) {
        Some(_) => Ok(()),
        None => Err(too_large),
    }
}

/// Whether no two elements share an address: in order of stride, each axis steps over the extent of the smaller ones.
fn disjoint(shape: [usize; 4], strides: [isize; 4]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut axes: Vec<(usize, usize)> =
        shape.iter().zip(strides).filter(|(len, _)| **len > 1).map(|(&len, s)| (s.unsigned_abs(), len)).collect();
    axes.sort_unstable();
    let mut reach = 0usize;
    axes.iter().all(|&(stride, len)| {
        let free = stride > reach;
        reach = reach.saturating_add(stride.saturating_mul(len - 1));
        free
    })
}

impl<'a, T> View<'a, T> {
    /// A slice in row-major order.
    pub fn new(data: &'a [T], shape: [usize; 4]) -> Result<Self, ViewError> {
        let strides = contiguous(shape).ok_or(ViewError::TooLarge { shape })?;
        View::strided(data, 0, shape, strides)
    }

    /// A slice with the first element at `offset`, and any strides that stay inside the slice.
    pub fn strided(data: &'a [T], offset: usize, shape: [usize; 4], strides: [isize; 4]) -> Result<Self, ViewError> {
        inside(data.len(), offset, shape, strides)?;
        Ok(View { data: data.as_ptr().wrapping_add(offset), shape, strides, borrowed: PhantomData })
    }

    /// A view over memory that another library owns; `data` is the address of element `[0, 0, 0, 0]`. Fails if the
    /// offsets of the elements do not fit a machine word.
    ///
    /// ```
    /// use qkv_simd::View;
    /// let data = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    /// // SAFETY: six elements of a live array, read with strides that stay inside it.
    /// let view = unsafe { View::from_raw(data.as_ptr(), [1, 1, 3, 2], [0, 0, 2, 1]) }.unwrap();
    /// assert_eq!(view.row(0, 0, 1), Some(&[3.0, 4.0][..]));
    /// ```
    ///
    /// # Safety
    /// For the lifetime `'a`, the element at offset `Σ index · stride` from `data` must be initialized, aligned and not
    /// written to, for every index inside `shape`, and all of them must belong to one allocation. A view without
    /// elements reads no memory, so `data` may then be any pointer.
    pub unsafe fn from_raw(data: *const T, shape: [usize; 4], strides: [isize; 4]) -> Result<Self, ViewError> {
        representable(size_of::<T>(), shape, strides)?;
        Ok(View { data, shape, strides, borrowed: PhantomData })
    }

    /// `[batch, heads, length, width]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The strides of the four axes, in elements.
    pub fn strides(&self) -> [isize; 4] {
        self.strides
    }

    /// The number of elements, broadcast ones included.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Broadcasts axes of length 1 to `shape`; `None` if another axis differs or the number of elements does not fit a
    /// machine word.
    pub fn broadcast(self, shape: [usize; 4]) -> Option<Self> {
        shape.iter().try_fold(1usize, |count, &len| count.checked_mul(len))?;
        let mut strides = self.strides;
        for axis in 0..4 {
            if self.shape[axis] != shape[axis] {
                if self.shape[axis] != 1 {
                    return None;
                }
                strides[axis] = 0;
            }
        }
        Some(View { shape, strides, ..self })
    }

    /// The first `length` rows of every head.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn truncate(self, length: usize) -> Self {
        assert!(length <= self.shape[2], "only {} rows", self.shape[2]);
        View { shape: [self.shape[0], self.shape[1], length, self.shape[3]], ..self }
    }

    fn offset(&self, b: usize, h: usize, i: usize) -> isize {
        let [batch, heads, length, _] = self.shape;
        assert!(b < batch && h < heads && i < length, "row [{b}, {h}, {i}] of {:?}", self.shape);
        offset_of(self.strides, [b, h, i])
    }
}

/// The offset of a row's first element. It is exact for every row of a view that has elements; a view without elements
/// may have any strides, so the arithmetic wraps, and its rows must not be turned into pointers.
fn offset_of(strides: [isize; 4], index: [usize; 3]) -> isize {
    let terms = index.iter().zip(strides).map(|(&at, stride)| (at as isize).wrapping_mul(stride));
    terms.fold(0, isize::wrapping_add)
}

impl<'a, T: Copy> View<'a, T> {
    /// One element.
    ///
    /// # Panics
    /// If the index is outside the shape.
    #[inline]
    pub fn at(&self, b: usize, h: usize, i: usize, x: usize) -> T {
        let row = self.offset(b, h, i);
        assert!(x < self.shape[3], "element {x} of {:?}", self.shape);
        // SAFETY: the index is inside the shape, and every element of the shape lies inside the borrowed memory.
        unsafe { *self.data.offset(row + x as isize * self.strides[3]) }
    }

    /// A row as a slice; `None` if its elements are not contiguous.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row(&self, b: usize, h: usize, i: usize) -> Option<&'a [T]> {
        let row = self.offset(b, h, i);
        if self.strides[3] != 1 && self.shape[3] != 1 {
            return None;
        }
        // A row without elements has no address: the memory behind the view may be empty, and its strides are
        // unchecked.
        if self.shape[3] == 0 {
            return Some(&[]);
        }
        // SAFETY: with a stride of 1 (or a single element) the row is contiguous; it is not empty and lies inside the
        // borrowed memory, which lives for `'a`.
        Some(unsafe { std::slice::from_raw_parts(self.data.offset(row), self.shape[3]) })
    }

    /// `count` rows from `i` on as one slice, and their stride; `None` if a row is not contiguous, or the rows overlap
    /// or descend.
    ///
    /// # Panics
    /// If there are fewer rows.
    pub fn slab(&self, b: usize, h: usize, i: usize, count: usize) -> Option<(&'a [T], usize)> {
        let [.., width] = self.shape;
        let row = usize::try_from(self.strides[2]).ok()?;
        if count == 0 || width == 0 || self.strides[3] != 1 || row < width {
            return None;
        }
        // Saturating: a count near the largest number must not wrap around to a row that exists.
        let (first, _) = (self.offset(b, h, i), self.offset(b, h, i.saturating_add(count - 1)));
        // SAFETY: the first and the last row are inside the shape, and with an ascending stride so is everything
        // between the first element of the one and the last element of the other.
        Some((unsafe { std::slice::from_raw_parts(self.data.offset(first), (count - 1) * row + width) }, row))
    }

    /// Fills `out` with slices of the rows from `i` on; returns `false` if they are not contiguous.
    ///
    /// # Panics
    /// If there are fewer rows.
    pub fn rows(&self, b: usize, h: usize, i: usize, out: &mut [&'a [T]]) -> bool {
        let Some(last) = out.len().checked_sub(1) else { return true };
        let (first, _) = (self.offset(b, h, i), self.offset(b, h, i.saturating_add(last)));
        if self.strides[3] != 1 && self.shape[3] != 1 {
            return false;
        }
        if self.shape[3] == 0 {
            out.fill(&[]);
            return true;
        }
        for (at, row) in out.iter_mut().enumerate() {
            // SAFETY: as in `row`: not empty, and every row between the first and the last is inside the shape.
            *row = unsafe {
                let start = self.data.offset(first + at as isize * self.strides[2]);
                std::slice::from_raw_parts(start, self.shape[3])
            };
        }
        true
    }

    /// Copies every element in row-major order.
    pub fn to_vec(&self) -> Vec<T> {
        let [batch, heads, length, width] = self.shape;
        let mut out = Vec::with_capacity(self.len());
        for b in 0..batch {
            for h in 0..heads {
                for i in 0..length {
                    match self.row(b, h, i) {
                        Some(row) => out.extend_from_slice(row),
                        None => out.extend((0..width).map(|x| self.at(b, h, i, x))),
                    }
                }
            }
        }
        out
    }
}

impl<T: Element> View<'_, T> {
    /// Widens a row to the accumulator type and pads `out` with zeros. Returns whether the whole row is finite.
    ///
    /// # Panics
    /// If there is no such row, or `out` is shorter than it.
    #[inline]
    pub fn load_row(&self, b: usize, h: usize, i: usize, out: &mut [T::Acc]) -> bool {
        let width = self.shape[3];
        let (to, rest) = out.split_at_mut(width);
        rest.fill(T::Acc::of_f64(0.0));
        let mut finite = true;
        if let Some(row) = self.row(b, h, i) {
            finite = rows::widen(Isa::best(), row, to);
        } else {
            for (x, to) in to.iter_mut().enumerate() {
                let from = self.at(b, h, i, x);
                *to = from.widen();
                finite &= from.is_finite();
            }
        }
        finite
    }

    /// [`load_row`](View::load_row) for the rows from `i` on, each padded to `row`: as many as fit into `out`.
    ///
    /// # Panics
    /// If there are fewer rows, or `row` is shorter than the width.
    pub fn load_rows(&self, b: usize, h: usize, i: usize, out: &mut [T::Acc], row: usize) -> bool {
        let count = out.len().checked_div(row).unwrap_or(0);
        match self.slab(b, h, i, count) {
            Some((rows, distance)) => rows::widen_rows(Isa::best(), (rows, distance), self.shape[3], (out, row)),
            None => out
                .chunks_exact_mut(row.max(1))
                .enumerate()
                .fold(true, |finite, (r, out)| self.load_row(b, h, i + r, out) && finite),
        }
    }

    /// Widens a part of a row, from `start` on, into all of `out`.
    ///
    /// # Panics
    /// If the row is shorter.
    pub fn load_part(&self, b: usize, h: usize, i: usize, start: usize, out: &mut [T::Acc]) {
        match self.row(b, h, i) {
            Some(row) => _ = rows::widen(Isa::best(), &row[start..][..out.len()], out),
            None => out.iter_mut().enumerate().for_each(|(x, out)| *out = self.at(b, h, i, start + x).widen()),
        }
    }

    /// Copies a row as bf16 and pads `out` with zeros. Returns whether the whole row is finite.
    ///
    /// # Panics
    /// If there is no such row, or `out` is shorter than it.
    #[inline]
    pub fn load_bf16(&self, b: usize, h: usize, i: usize, out: &mut [bf16]) -> bool {
        let (to, rest) = out.split_at_mut(self.shape[3]);
        rest.fill(bf16::ZERO);
        match self.row(b, h, i) {
            Some(row) => match T::as_bf16(row) {
                Some(row) => to.copy_from_slice(row),
                None => to.iter_mut().zip(row).for_each(|(to, from)| *to = from.to_bf16()),
            },
            None => to.iter_mut().enumerate().for_each(|(x, to)| *to = self.at(b, h, i, x).to_bf16()),
        }
        // Tests the exponent bits without a branch, so that the loop vectorizes.
        to.iter().fold(0, |full, x| full | u16::from(x.to_bits() & 0x7f80 == 0x7f80)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_never_reaches_outside_its_slice() {
        let data = [0u8; 10];
        assert!(View::strided(&data, 9, [1, 1, 10, 1], [0, 0, -1, 1]).is_ok());
        assert!(View::strided(&data, 8, [1, 1, 10, 1], [0, 0, -1, 1]).is_err());
        assert!(View::strided(&data, 0, [1, 1, 2, 6], [0, 0, 5, 1]).is_err());
        assert!(View::new(&data, [usize::MAX, 2, 1, 1]).is_err());
        assert!(View::new(&data, [1 << 40, 1 << 40, 1, 1]).is_err());
        assert!(View::new(&data, [5, 0, 7, 9]).is_ok());
    }

    #[test]
    fn rows_without_elements_touch_no_memory() {
        // No memory behind the view, and strides whose offsets do not fit a machine word.
        let nothing: [f32; 0] = [];
        for strides in [[0, 0, 0, 1], [isize::MAX, isize::MIN, isize::MAX, 1], [5, 5, 5, isize::MAX]] {
            let view = View::strided(&nothing, usize::MAX, [2, 3, 5, 0], strides).unwrap();
            let expected = (strides[3] == 1).then_some(&[][..]);
            assert_eq!(view.row(1, 2, 4), expected);
            let mut rows: [&[f32]; 2] = [&[1.0]; 2];
            assert_eq!(view.rows(1, 2, 3, &mut rows), expected.is_some());
            assert_eq!(view.slab(1, 2, 3, 2), None);
            assert!(view.load_row(1, 2, 4, &mut [1.0; 3]) && view.load_rows(1, 2, 3, &mut [1.0; 32], 16));
            assert!(view.load_bf16(1, 2, 4, &mut [bf16::ONE; 3]));
            assert!(view.to_vec().is_empty());
        }
        assert!(View::new(&nothing, [1, 1, 5, 0]).unwrap().row(0, 0, 4).unwrap().is_empty());
        for strides in [[0, 0, 0, 1], [isize::MAX, isize::MIN, isize::MAX, 1]] {
            let mut nothing: [f32; 0] = [];
            let rows =
                crate::shared::Rows::new(ViewMut::strided(&mut nothing, usize::MAX, [2, 3, 5, 0], strides).unwrap());
            rows.write(1, 2, 4, &[]);
            rows.write_all(1, 2, 0, 2, &[], 0);
            rows.write_scaled(1, 2, 2, &[1.0; 2], &[1.0; 32], 16);
        }
        // SAFETY: views without elements read and write nothing.
        unsafe {
            let (read, write) = (std::ptr::null::<f32>(), std::ptr::null_mut::<f32>());
            assert!(View::from_raw(read, [1, 1, 5, 0], [0, 0, 0, 1]).unwrap().row(0, 0, 4).unwrap().is_empty());
            let rows = crate::shared::Rows::new(ViewMut::from_raw(write, [1, 1, 5, 0], [0, 0, 0, 1]).unwrap());
            rows.write(0, 0, 4, &[]);
        }
    }

    #[test]
    #[should_panic(expected = "row [0, 0, ")]
    fn a_count_that_wraps_around_is_no_slab() {
        let data = [0.0f32; 8];
        let view = View::new(&data, [1, 1, 4, 2]).unwrap();
        view.slab(0, 0, 2, usize::MAX);
    }

    #[test]
    fn raw_parts_are_read_and_written_like_slices() {
        let mut data: Vec<f32> = (0..24).map(|x| x as f32).collect();
        // The rows of each head in descending order.
        // SAFETY: the elements of a live vector, with strides that stay inside it.
        let view = unsafe { View::from_raw(data.as_ptr().add(9), [1, 2, 4, 3], [0, 12, -3, 1]) }.unwrap();
        assert_eq!(view.row(0, 1, 0), Some(&[21.0, 22.0, 23.0][..]));
        assert_eq!(view.at(0, 0, 3, 2), 2.0);
        // SAFETY: as above, and nothing else uses the vector while the view lives.
        let view = unsafe { ViewMut::from_raw(data.as_mut_ptr().add(9), [1, 2, 4, 3], [0, 12, -3, 1]) }.unwrap();
        crate::shared::Rows::new(view).write(0, 1, 3, &[7.0, 8.0, 9.0]);
        assert_eq!(data[12..15], [7.0, 8.0, 9.0]);
        let (read, write) = (data.as_ptr(), data.as_mut_ptr());
        // SAFETY: refused before anything is read or written.
        unsafe {
            let huge = [1, 1, 3, 1];
            let offsets = [0, 0, isize::MAX / 2, 1];
            assert!(matches!(View::from_raw(read, huge, offsets), Err(ViewError::TooLarge { .. })));
            assert!(matches!(View::from_raw(read, [usize::MAX, 2, 1, 1], [0; 4]), Err(ViewError::TooLarge { .. })));
            assert!(matches!(ViewMut::from_raw(write, huge, offsets), Err(ViewError::TooLarge { .. })));
            let shared = ViewMut::from_raw(write, [1, 2, 3, 1], [0, 0, 1, 1]);
            assert!(matches!(shared, Err(ViewError::Overlapping { .. })));
        }
    }

    #[test]
    fn broadcasting_to_more_elements_than_can_be_counted_is_refused() {
        let view = View::new(&[1.0f32], [1, 1, 1, 1]).unwrap();
        assert!(view.broadcast([2, 3, 4, 1]).is_some());
        assert!(view.broadcast([usize::MAX, 2, 1, 1]).is_none());
    }

    #[test]
    fn writing_needs_a_place_for_every_element() {
        let mut data = [0.0f32; 24];
        assert!(ViewMut::strided(&mut data, 0, [2, 3, 4, 1], [12, 1, 3, 1]).is_ok());
        assert!(ViewMut::strided(&mut data, 0, [2, 3, 4, 1], [12, 4, 2, 1]).is_err());
    }
}
