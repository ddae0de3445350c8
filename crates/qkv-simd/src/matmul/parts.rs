//! Shared by products whose result is divided among tasks: packed blocks of an operand, and a matrix whose parts are
//! written by several threads.

use crate::aligned::Aligned;
use crate::bf16_gemm::RawTarget;
use crate::shared::{BlockStates, LazyBlocks};
use std::marker::PhantomData;
use std::ops::Range;

/// Blocks of one operand, each packed by the first task that needs it. They are aligned to cache lines if their size is
/// whole lines.
#[derive(Debug, Default)]
pub(super) struct PackBuffer<T> {
    memory: Aligned<T>,
    states: BlockStates,
}

impl<T: Copy + Default> PackBuffer<T> {
    pub fn blocks(&mut self, count: usize, size: usize) -> LazyBlocks<'_, T> {
        if self.memory.len() < count * size {
            self.memory = Aligned::new(count * size, T::default());
        }
        LazyBlocks::new(&mut self.memory, &mut self.states, count, size)
    }
}

/// A matrix whose columns are written by several threads.
pub(super) struct Columns<'a> {
    data: *mut f32,
    rows: usize,
    columns: usize,
    borrowed: PhantomData<&'a mut [f32]>,
}

// SAFETY: the caller of `part` guarantees that no two parts in use overlap.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    pub fn new(data: &'a mut [f32], columns: usize) -> Self {
        Columns { data: data.as_mut_ptr(), rows: data.len() / columns, columns, borrowed: PhantomData }
    }

    /// Columns of a row.
    ///
    /// # Safety
    /// No other part that is in use overlaps this one.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, row: usize, columns: &Range<usize>) -> &mut [f32] {
        assert!(row < self.rows && columns.start <= columns.end && columns.end <= self.columns);
        // SAFETY: inside the matrix, as just checked, and exclusive, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.columns + columns.start), columns.len()) }
    }

    /// A range of columns of a range of rows, all inside the matrix.
    pub fn target(&self, rows: Range<usize>, columns: &Range<usize>, add: bool) -> RawTarget {
        assert!(rows.start < rows.end && rows.end <= self.rows);
        assert!(columns.start < columns.end && columns.end <= self.columns);
        // SAFETY: inside the matrix, as just checked.
        let data = unsafe { self.data.add(rows.start * self.columns + columns.start) };
        RawTarget { data, row: self.columns, add }
    }
}
