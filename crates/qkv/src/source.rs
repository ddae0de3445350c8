//! Storage of keys and values: strided rows, or the pages of a paged cache. Engines read keys and values through
//! [`Source`] only, so everything that works on rows works on pages, with the same bits.

use crate::error::{Error, Result};
use half::bf16;
use qkv_simd::{Element, View};

/// Keys or values, `[B, Hk, M, width]`.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a, T> {
    /// Rows in memory, with any strides.
    Rows(View<'a, T>),
    /// Pages (Kwon et al. 2023, "PagedAttention", arXiv:2309.06180).
    Pages(Pages<'a, T>),
}

impl<'a, T, V: Into<View<'a, T>>> From<V> for Source<'a, T> {
    fn from(view: V) -> Self {
        Source::Rows(view.into())
    }
}

impl<'a, T> From<Pages<'a, T>> for Source<'a, T> {
    fn from(pages: Pages<'a, T>) -> Self {
        Source::Pages(pages)
    }
}

/// Keys (or values) in pages of one size, anywhere in a pool; a page table maps each sequence to its pages.
///
/// ```
/// use qkv::{Pages, Tensor, View};
/// // A pool of four pages of two tokens; the sequence is in pages 3 and 0.
/// let pool = Tensor::from_fn([4, 1, 2, 1], |[page, _, i, _]| (page * 10 + i) as f32); // [pages, Hk, size, width]
/// let keys = Pages::new(&pool, &[3, 0], 1, 3)?;                                       // one sequence, three tokens
/// assert_eq!([0, 1, 2].map(|j| keys.at(0, 0, j, 0)), [30.0, 31.0, 0.0]);
/// # Ok::<(), qkv::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a, T> {
    pool: View<'a, T>,
    table: &'a [u32],
    batch: usize,
    length: usize,
}

impl<'a, T> Pages<'a, T> {
    /// A pool `[pages, Hk, size, width]`, a table `[batch, pages of a sequence]`, and the length of the longest
    /// sequence. Every entry up to that length must be a page of the pool. Shorter sequences are declared by
    /// [`Inputs::lengths`](crate::Inputs::lengths); beyond their length any page may be named.
    pub fn new(pool: impl Into<View<'a, T>>, table: &'a [u32], batch: usize, length: usize) -> Result<Self> {
        let pool = pool.into();
        let [pages, _, size, _] = pool.shape();
        let per_sequence = table.len().checked_div(batch).unwrap_or(0);
        if per_sequence.checked_mul(batch) != Some(table.len()) {
            return Err(Error::shape("page table", &[table.len()], format!("[{batch}, pages of a sequence]")));
        }
        if batch > 0 && length > 0 && (size == 0 || length.div_ceil(size) > per_sequence) {
            let found = format!("{per_sequence} pages of {size} a sequence");
            return Err(Error::value("page table", found, format!("room for {length} tokens")));
        }
        let reached = if length == 0 { 0 } else { length.div_ceil(size) };
        for row in table.chunks_exact(per_sequence.max(1)) {
            if let Some(page) = row[..reached].iter().find(|&&page| page as usize >= pages) {
                return Err(Error::value("page table", format!("page {page}"), format!("a page below {pages}")));
            }
        }
        Ok(Pages { pool, table, batch, length })
    }

    /// `[B, Hk, M, width]`.
    pub fn shape(&self) -> [usize; 4] {
        let [_, heads, _, width] = self.pool.shape();
        [self.batch, heads, self.length, width]
    }

    /// The page of a token, and its row in the page.
    #[inline]
    fn place(&self, b: usize, j: usize) -> (usize, usize) {
        let size = self.pool.shape()[2];
        (self.table[b * (self.table.len() / self.batch) + j / size] as usize, j % size)
    }
}

impl<T: Copy> Pages<'_, T> {
    /// One element.
    ///
    /// # Panics
    /// If the index is outside the shape.
    pub fn at(&self, b: usize, h: usize, j: usize, x: usize) -> T {
        assert!(b < self.batch && j < self.length, "token {j} of sequence {b} in {:?}", self.shape());
        let (page, row) = self.place(b, j);
        self.pool.at(page, h, row, x)
    }
}

impl<'a, T: Element> Source<'a, T> {
    /// Whether the elements of a row are contiguous.
    pub(crate) fn rows_are_slices(&self) -> bool {
        let (Source::Rows(view) | Source::Pages(Pages { pool: view, .. })) = self;
        view.strides()[3] == 1 || view.shape()[3] <= 1
    }

    /// Whether the first `count` rows of two sequences are the same memory.
    pub(crate) fn is_shared(&self, a: usize, b: usize, count: usize) -> bool {
        match self {
            Source::Rows(view) => a == b || view.strides()[0] == 0,
            Source::Pages(pages) => {
                let (table, each) = (pages.table, pages.table.len() / pages.batch);
                let reached = count.div_ceil(pages.pool.shape()[2].max(1));
                // From the last page backward: sequences that diverged differ there.
                table[a * each..][..reached].iter().rev().eq(table[b * each..][..reached].iter().rev())
            }
        }
    }

    /// Borrows the rows from `j` on, one for each slot of `out`; rows must be [contiguous](Source::rows_are_slices).
    pub(crate) fn rows(&self, b: usize, h: usize, j: usize, out: &mut [&'a [T]]) {
        let slices = match self {
            Source::Rows(view) => view.rows(b, h, j, out),
            // Pages of one token, as in a beam search, are handled without a division for each.
            Source::Pages(pages) if pages.pool.shape()[2] == 1 => {
                let from = b * (pages.table.len() / pages.batch) + j;
                let pages_of = &pages.table[from..][..out.len()];
                let row = |(out, &page): (&mut &'a [T], &u32)| {
                    pages.pool.rows(page as usize, h, 0, std::slice::from_mut(out))
                };
                out.iter_mut().zip(pages_of).map(row).fold(true, |all, slice| all & slice)
            }
            Source::Pages(pages) => {
                let size = pages.pool.shape()[2];
                let (mut slices, mut done) = (true, 0);
                while done < out.len() {
                    let (page, row) = pages.place(b, j + done);
                    let end = out.len().min(done + size - row);
                    slices &= pages.pool.rows(page, h, row, &mut out[done..end]);
                    done = end;
                }
                slices
            }
        };
        assert!(slices, "rows that are slices");
    }

    /// `[B, Hk, M, width]`.
    pub fn shape(&self) -> [usize; 4] {
        match self {
            Source::Rows(view) => view.shape(),
            Source::Pages(pages) => pages.shape(),
        }
    }

    /// One element.
    pub fn at(&self, b: usize, h: usize, j: usize, x: usize) -> T {
        match self {
            Source::Rows(view) => view.at(b, h, j, x),
            Source::Pages(pages) => pages.at(b, h, j, x),
        }
    }

    /// The elements in row-major order, copied row by row.
    ///
    /// ```
    /// use qkv::{Pages, Source, Tensor};
    /// // [pages, Hk, size, width]
    /// let pool = Tensor::from_fn([2, 1, 2, 3], |[page, _, i, x]| (page * 100 + i * 10 + x) as f32);
    /// let keys = Source::from(Pages::new(&pool, &[1, 0], 1, 3)?);
    /// assert_eq!(keys.to_vec(), [100.0, 101.0, 102.0, 110.0, 111.0, 112.0, 0.0, 1.0, 2.0]);
    /// # Ok::<(), qkv::Error>(())
    /// ```
    pub fn to_vec(&self) -> Vec<T> {
        let pages = match self {
            Source::Rows(view) => return view.to_vec(),
            Source::Pages(pages) => pages,
        };
        let [batch, heads, length, width] = pages.shape();
        let mut out = Vec::with_capacity(batch * heads * length * width);
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for j in 0..length {
                let (page, row) = pages.place(b, j);
                match pages.pool.row(page, h, row) {
                    Some(row) => out.extend_from_slice(row),
                    None => out.extend((0..width).map(|x| pages.pool.at(page, h, row, x))),
                }
            }
        }
        out
    }

    /// Copies a row, pads it with zeros, and returns whether all elements were finite.
    #[inline]
    pub(crate) fn load_row(&self, b: usize, h: usize, j: usize, out: &mut [T::Acc]) -> bool {
        match self {
            Source::Rows(view) => view.load_row(b, h, j, out),
            Source::Pages(pages) => {
                let (page, row) = pages.place(b, j);
                pages.pool.load_row(page, h, row, out)
            }
        }
    }

    /// Copies as many rows from `j` on as fit, pads each with zeros to `row`, and returns whether all elements were
    /// finite.
    pub(crate) fn load_rows(&self, b: usize, h: usize, j: usize, out: &mut [T::Acc], row: usize) -> bool {
        match self {
            Source::Rows(view) => view.load_rows(b, h, j, out, row),
            Source::Pages(_) => out
                .chunks_exact_mut(row.max(1))
                .enumerate()
                .fold(true, |finite, (r, out)| self.load_row(b, h, j + r, out) && finite),
        }
    }

    /// The rows from `j` on as one slice with a row stride, if they are laid out so.
    pub(crate) fn slab(&self, b: usize, h: usize, j: usize, count: usize) -> Option<(&[T], usize)> {
        match self {
            Source::Rows(view) => view.slab(b, h, j, count),
            Source::Pages(_) => None,
        }
    }

    /// Copies a row as bf16, pads it with zeros, and returns whether all elements were finite.
    #[inline]
    pub(crate) fn load_bf16(&self, b: usize, h: usize, j: usize, out: &mut [bf16]) -> bool {
        match self {
            Source::Rows(view) => view.load_bf16(b, h, j, out),
            Source::Pages(pages) => {
                let (page, row) = pages.place(b, j);
                pages.pool.load_bf16(page, h, row, out)
            }
        }
    }
}
