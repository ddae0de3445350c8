//! `[batch, heads, length, width]` over memory that someone else owns: a pointer, a shape and strides, nothing more.
//! Zero strides broadcast; negative ones are fine. Made from slices here, from `ndarray` with the feature of that name.

use crate::isa::Isa;
use crate::number::Element;
use crate::rows;
use half::bf16;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::AtomicUsize;

/// Why a slice cannot be seen as the shape that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewError {
    /// The shape and strides reach outside the slice.
    OutOfBounds {
        /// The shape that was asked for.
        shape: [usize; 4],
        /// How many elements the slice holds.
        len: usize,
    },
    /// The number of elements or a reach in memory does not fit a machine word.
    TooLarge {
        /// The shape that was asked for.
        shape: [usize; 4],
    },
    /// Two elements to be written share a place in memory.
    Overlapping {
        /// The shape that was asked for.
        shape: [usize; 4],
        /// The strides that make them meet.
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

/// The strides of rows that lie one after the other, or `None` where they do not fit a machine word.
fn contiguous(shape: [usize; 4]) -> Option<[isize; 4]> {
    let mut strides = [0; 4];
    let mut step = 1isize;
    for axis in (0..4).rev() {
        strides[axis] = step;
        step = step.checked_mul(isize::try_from(shape[axis].max(1)).ok()?)?;
    }
    Some(strides)
}

/// The lowest and highest offset that a shape with strides reaches, from its first element.
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

/// Checks that a shape with strides, from `offset`, stays inside a slice of `len`.
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

/// Whether no two elements share a place: sorted by stride, each steps over all that the smaller ones reach.
fn disjoint(shape: [usize; 4], strides: [isize; 4]) -> bool {
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
    /// A slice, row by row.
    pub fn new(data: &'a [T], shape: [usize; 4]) -> Result<Self, ViewError> {
        let strides = contiguous(shape).ok_or(ViewError::TooLarge { shape })?;
        View::strided(data, 0, shape, strides)
    }

    /// A slice with the first element at `offset` and any strides that stay inside it.
    pub fn strided(data: &'a [T], offset: usize, shape: [usize; 4], strides: [isize; 4]) -> Result<Self, ViewError> {
        inside(data.len(), offset, shape, strides)?;
        Ok(View { data: data.as_ptr().wrapping_add(offset), shape, strides, borrowed: PhantomData })
    }

    /// `[batch, heads, length, width]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// From one element to the next along each axis, in elements.
    pub fn strides(&self) -> [isize; 4] {
        self.strides
    }

    /// How many elements it shows.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it shows none.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// The same numbers with axes of length 1 stretched to `shape`, or `None` where another axis differs.
    pub fn broadcast(self, shape: [usize; 4]) -> Option<Self> {
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
    /// Where there are fewer.
    pub fn truncate(self, length: usize) -> Self {
        assert!(length <= self.shape[2], "only {} rows", self.shape[2]);
        View { shape: [self.shape[0], self.shape[1], length, self.shape[3]], ..self }
    }

    fn offset(&self, b: usize, h: usize, i: usize) -> isize {
        let [batch, heads, length, _] = self.shape;
        assert!(b < batch && h < heads && i < length, "row [{b}, {h}, {i}] of {:?}", self.shape);
        b as isize * self.strides[0] + h as isize * self.strides[1] + i as isize * self.strides[2]
    }
}

impl<'a, T: Copy> View<'a, T> {
    /// One element.
    ///
    /// # Panics
    /// Where the index is outside the shape.
    #[inline]
    pub fn at(&self, b: usize, h: usize, i: usize, x: usize) -> T {
        let row = self.offset(b, h, i);
        assert!(x < self.shape[3], "element {x} of {:?}", self.shape);
        // SAFETY: the index is inside the shape, which was checked to lie inside the borrowed memory.
        unsafe { *self.data.offset(row + x as isize * self.strides[3]) }
    }

    /// A row as a slice, where its elements lie next to each other.
    #[inline]
    pub fn row(&self, b: usize, h: usize, i: usize) -> Option<&'a [T]> {
        let row = self.offset(b, h, i);
        if self.strides[3] != 1 && self.shape[3] != 1 {
            return None;
        }
        // SAFETY: with a stride of 1 (or one element) the row's elements are contiguous, inside the borrowed memory, and
        // live as long as the borrow.
        Some(unsafe { std::slice::from_raw_parts(self.data.offset(row), self.shape[3]) })
    }

    /// Rows from `i` on as one slice and the distance between them, where their elements lie next to each other and the rows
    /// one after the other.
    pub fn slab(&self, b: usize, h: usize, i: usize, count: usize) -> Option<(&'a [T], usize)> {
        let [.., width] = self.shape;
        let row = usize::try_from(self.strides[2]).ok()?;
        if count == 0 || width == 0 || self.strides[3] != 1 || row < width {
            return None;
        }
        let (first, _) = (self.offset(b, h, i), self.offset(b, h, i + count - 1));
        // SAFETY: the first and the last row are inside the shape, and with them all that lies between the first element of
        // the one and the last of the other, which lives as long as the borrow.
        Some((unsafe { std::slice::from_raw_parts(self.data.offset(first), (count - 1) * row + width) }, row))
    }

    /// Rows as slices, those from `i` on, one for each place of `out`; `false` where their elements lie apart.
    ///
    /// # Panics
    /// Where there are fewer.
    pub fn rows(&self, b: usize, h: usize, i: usize, out: &mut [&'a [T]]) -> bool {
        let Some(last) = out.len().checked_sub(1) else { return true };
        let (first, _) = (self.offset(b, h, i), self.offset(b, h, i + last));
        if self.strides[3] != 1 && self.shape[3] != 1 {
            return false;
        }
        for (at, row) in out.iter_mut().enumerate() {
            // SAFETY: as in `row`; every row between the first and the last is inside the shape.
            *row = unsafe {
                let start = self.data.offset(first + at as isize * self.strides[2]);
                std::slice::from_raw_parts(start, self.shape[3])
            };
        }
        true
    }

    /// Every element, row by row.
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
    /// Copies a row into sums' type, fills what is left of `out` with zeros, and says whether all of it was finite.
    ///
    /// # Panics
    /// Where `out` is shorter than the row.
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

    /// [`load_row`](View::load_row) for the rows from `i` on, each padded to `row`: as many as there is room for.
    ///
    /// # Panics
    /// Where there are fewer, or `row` is shorter than they are.
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

    /// Copies a part of a row, from `start` on, into sums' type.
    ///
    /// # Panics
    /// Where the row is shorter.
    pub fn load_part(&self, b: usize, h: usize, i: usize, start: usize, out: &mut [T::Acc]) {
        match self.row(b, h, i) {
            Some(row) => _ = rows::widen(Isa::best(), &row[start..][..out.len()], out),
            None => out.iter_mut().enumerate().for_each(|(x, out)| *out = self.at(b, h, i, start + x).widen()),
        }
    }

    /// Copies a row as bf16, pads it with zeros, and says whether all of it was finite.
    ///
    /// # Panics
    /// Where the row is not there, or `out` is shorter.
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
        // The exponent alone, without a branch: the compiler makes vectors of this.
        to.iter().fold(0, |full, x| full | u16::from(x.to_bits() & 0x7f80 == 0x7f80)) == 0
    }
}

/// A borrowed tensor to be written, `[batch, heads, length, width]`, whose elements all have their own place.
///
/// ```
/// use qkv_simd::ViewMut;
/// let mut data = vec![0.0f32; 6];
/// assert!(ViewMut::new(&mut data, [1, 2, 3, 1]).is_ok());
/// assert!(ViewMut::strided(&mut data, 0, [1, 2, 3, 1], [0, 0, 1, 1]).is_err());
/// ```
pub struct ViewMut<'a, T> {
    data: *mut T,
    shape: [usize; 4],
    strides: [isize; 4],
    /// Where to count the rows that are written, if anybody asks.
    pub(crate) count: Option<&'a AtomicUsize>,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: it is an exclusive borrow of a slice's elements.
unsafe impl<T: Send> Send for ViewMut<'_, T> {}
// SAFETY: a shared reference to it gives no access to the elements except through `shared::Rows`, which hands out each
// row once.
unsafe impl<T: Send> Sync for ViewMut<'_, T> {}

impl<T> fmt::Debug for ViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ViewMut({:?}, strides {:?})", self.shape, self.strides)
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// A slice, row by row.
    pub fn new(data: &'a mut [T], shape: [usize; 4]) -> Result<Self, ViewError> {
        let strides = contiguous(shape).ok_or(ViewError::TooLarge { shape })?;
        ViewMut::strided(data, 0, shape, strides)
    }

    /// A slice with the first element at `offset` and strides that give every element its own place.
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

    /// `[batch, heads, length, width]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }
}

/// Memory for a tensor that is still to be written, row by row, through its view: nothing has to be cleared first.
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
    rows: AtomicUsize,
}

impl<T: Copy> Unwritten<T> {
    /// Memory for this shape, or `None` where there is not as much.
    pub fn new(shape: [usize; 4]) -> Option<Self> {
        let len = shape.iter().try_fold(1usize, |len, &axis| len.checked_mul(axis))?;
        let mut data = Vec::new();
        data.try_reserve_exact(len).ok()?;
        crate::huge_pages::advise_huge_pages(&mut data);
        Some(Unwritten { data, shape, rows: AtomicUsize::new(0) })
    }

    /// The view through which it is written.
    pub fn view(&mut self) -> ViewMut<'_, T> {
        let [_, h, n, d] = self.shape;
        let strides = [h * n * d, n * d, d, 1].map(|stride| stride as isize);
        *self.rows.get_mut() = 0;
        // Nobody reads through a `ViewMut`; its rows are written through `shared::Rows`, which counts them.
        let data = self.data.as_mut_ptr();
        ViewMut { data, shape: self.shape, strides, count: Some(&self.rows), borrowed: PhantomData }
    }

    /// What was written.
    ///
    /// # Panics
    /// Where a row was not.
    pub fn written(mut self) -> Vec<T> {
        let [b, h, n, d] = self.shape;
        assert!(d == 0 || *self.rows.get_mut() == b * h * n, "a row was not written");
        // SAFETY: there is memory for as many elements, and every row of them was written, each once.
        unsafe { self.data.set_len(b * h * n * d) };
        self.data
    }
}

impl<T: Element> ViewMut<'_, T> {
    /// Rounds a row of sums into place.
    ///
    /// # Safety
    /// No other access to this row happens at the same time.
    pub(crate) unsafe fn store_row(&self, b: usize, h: usize, i: usize, row: &[T::Acc]) {
        let [batch, heads, length, width] = self.shape;
        assert!(b < batch && h < heads && i < length && row.len() >= width, "row [{b}, {h}, {i}] of {:?}", self.shape);
        let start = b as isize * self.strides[0] + h as isize * self.strides[1] + i as isize * self.strides[2];
        // SAFETY: every index is inside the shape, which was checked to lie inside the borrowed memory, and the caller vouches
        // that nobody else touches the row.
        unsafe {
            if self.strides[3] == 1 || width == 1 {
                return rows::narrow(Isa::best(), &row[..width], self.data.offset(start));
            }
            for (x, &value) in row[..width].iter().enumerate() {
                self.data.offset(start + x as isize * self.strides[3]).write(T::narrow(value));
            }
        }
    }

    /// Rounds rows of sums at distance `row` into the rows from `i` on, at once where both sides lie without gaps.
    ///
    /// # Safety
    /// No other access to these rows happens at the same time.
    pub(crate) unsafe fn store_rows(&self, [b, h, i]: [usize; 3], count: usize, data: &[T::Acc], row: usize) {
        let [batch, heads, length, width] = self.shape;
        let dense = row == width && self.strides[2..] == [width as isize, 1];
        if dense && count > 0 {
            assert!(
                b < batch && h < heads && i.saturating_add(count) <= length,
                "rows [{b}, {h}, {i}..] of {:?}",
                self.shape
            );
            let start = b as isize * self.strides[0] + h as isize * self.strides[1] + i as isize * self.strides[2];
            // SAFETY: as in `store_row`, for each of the rows, which follow one another.
            return unsafe { rows::narrow(Isa::best(), &data[..count * width], self.data.offset(start)) };
        }
        for r in 0..count {
            // SAFETY: the caller vouches for each of the rows.
            unsafe { self.store_row(b, h, i + r, &data[r * row..][..row]) };
        }
    }

    /// Multiplies rows of sums at distance `row` by their factors, and rounds them into the rows from `i` on.
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
        let start = b as isize * self.strides[0] + h as isize * self.strides[1] + i as isize * self.strides[2];
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

#[cfg(feature = "ndarray")]
mod from_ndarray {
    use super::{PhantomData, View, ViewMut};
    use ndarray::{ArrayBase, ArrayRef, Data, DataMut, Ix2, Ix3, Ix4};

    impl<'a, T, S: Data<Elem = T>> From<&'a ArrayBase<S, Ix4>> for View<'a, T> {
        fn from(array: &'a ArrayBase<S, Ix4>) -> Self {
            let array: &ArrayRef<T, Ix4> = array;
            let (b, h, n, d) = array.dim();
            let strides: [isize; 4] = array.strides().try_into().expect("four axes");
            // An `ndarray` borrow is a valid view: its pointer, shape and strides lie inside memory that it borrows.
            View { data: array.as_ptr(), shape: [b, h, n, d], strides, borrowed: PhantomData }
        }
    }

    impl<'a, T, S: Data<Elem = T>> From<&'a ArrayBase<S, Ix3>> for View<'a, T> {
        fn from(array: &'a ArrayBase<S, Ix3>) -> Self {
            let (h, n, d) = array.dim();
            let [s0, s1, s2]: [isize; 3] = array.strides().try_into().expect("three axes");
            View { data: array.as_ptr(), shape: [1, h, n, d], strides: [0, s0, s1, s2], borrowed: PhantomData }
        }
    }

    impl<'a, T, S: Data<Elem = T>> From<&'a ArrayBase<S, Ix2>> for View<'a, T> {
        fn from(array: &'a ArrayBase<S, Ix2>) -> Self {
            let (n, d) = array.dim();
            let [s0, s1]: [isize; 2] = array.strides().try_into().expect("two axes");
            View { data: array.as_ptr(), shape: [1, 1, n, d], strides: [0, 0, s0, s1], borrowed: PhantomData }
        }
    }

    impl<'a, T, S: DataMut<Elem = T>> From<&'a mut ArrayBase<S, Ix4>> for ViewMut<'a, T> {
        fn from(array: &'a mut ArrayBase<S, Ix4>) -> Self {
            let (b, h, n, d) = array.dim();
            let strides: [isize; 4] = array.strides().try_into().expect("four axes");
            ViewMut { data: array.as_mut_ptr(), shape: [b, h, n, d], strides, count: None, borrowed: PhantomData }
        }
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
    fn writing_needs_a_place_for_every_element() {
        let mut data = [0.0f32; 24];
        assert!(ViewMut::strided(&mut data, 0, [2, 3, 4, 1], [12, 1, 3, 1]).is_ok());
        assert!(ViewMut::strided(&mut data, 0, [2, 3, 4, 1], [12, 4, 2, 1]).is_err());
    }
}
