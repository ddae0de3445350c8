//! Rows by index: embeddings, gathers and their gradients.

use super::launch::{Argument, count};
use super::{Array, Kind, MatrixRef, Operations};
use Argument::{F32, Ptr};

/// Which rows are added to which: for each target, its rows in ascending order, so that sums have a fixed order.
#[derive(Clone, Debug)]
pub struct RowSums {
    order: Array,
    starts: Array,
    targets: Array,
    rows: usize,
    /// One past the largest target.
    end: usize,
}

impl Operations {
    /// The sums for the given target of each row; rows without one are left out.
    pub fn row_sums(&self, target_of: impl Iterator<Item = Option<u32>> + Clone) -> RowSums {
        // A counting sort: the targets are few compared with the work done for them.
        let end = target_of.clone().flatten().max().map_or(0, |last| last as usize + 1);
        let mut place = vec![0u32; end + 1];
        let mut rows = 0;
        for target in target_of.clone() {
            rows += 1;
            target.into_iter().for_each(|target| place[target as usize + 1] += 1);
        }
        let (mut starts, mut targets) = (vec![0], Vec::new());
        for target in 0..end {
            if place[target + 1] > 0 {
                targets.push(target as u32);
                starts.push(starts[starts.len() - 1] + place[target + 1]);
            }
            place[target + 1] += place[target];
        }
        let mut order = vec![0u32; starts[starts.len() - 1] as usize];
        for (row, target) in target_of.enumerate() {
            let Some(target) = target else { continue };
            order[place[target as usize] as usize] = row as u32;
            place[target as usize] += 1;
        }
        let upload = |data: &[u32]| self.upload(Kind::U32, data, "numbers of rows");
        RowSums { order: upload(&order), starts: upload(&starts), targets: upload(&targets), rows, end }
    }

    /// `sums[target] += scale · Σ rows`, into f32 or into activations.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn scatter(&self, rows: &Array, by: &RowSums, sums: &Array, width: usize, scale: f32) {
        let name = if sums.kind() == Kind::F32 { "scatter_rows" } else { "scatter_same" };
        let pointers = [
            rows.expect(self.activation_kind(), by.rows * width),
            by.order.ptr(),
            by.starts.ptr(),
            by.targets.ptr(),
            sums.expect(sums.kind(), by.end * width),
        ];
        let grid = [by.targets.len(), width.div_ceil(8 * 256)];
        // SAFETY: both take these pointers, `int width` and `float scale`; every row and target is within its array.
        unsafe { self.launch(name, grid, &[&pointers.map(Ptr)[..], &[count(width), F32(scale)]].concat()) };
    }

    /// `y[r] = scale · table[ids[r]] + positions[start + r mod length]`. The ids are within the table.
    ///
    /// # Panics
    /// If an array is too short.
    #[allow(clippy::too_many_arguments)] // What an embedding has.
    pub fn embedding(
        &self,
        ids: &Array,
        table: MatrixRef<'_>,
        positions: Option<&Array>,
        y: &Array,
        width: usize,
        scale: f32,
        [length, start]: [usize; 2],
    ) {
        let table = match table {
            MatrixRef::Elements(table) => table,
            MatrixRef::Blocks(table) => {
                return self.rows_of_blocks(Some(ids), table, positions, y, scale, [length, start]);
            }
        };
        let rows = ids.len();
        let positions = positions.map_or(0, |at| at.expect(Kind::F32, (start + length.min(rows)) * width));
        let pointers = [
            ids.expect(Kind::U32, rows),
            table.expect(Kind::F32, 0),
            positions,
            y.expect(self.activation_kind(), rows * width),
        ];
        let numbers = [count(rows), count(width), F32(scale), count(length), count(start)];
        let grid = [self.blocks_of_eights(rows, width), 1];
        // SAFETY: `embedding(const u32*, const float*, const float*, T*, u32, int, float, u32, u32)`.
        unsafe { self.launch("embedding", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// `y[r] = x[index[r]]`, zeros if the index is `u32::MAX`. Indices are within `x`.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn gather(&self, x: &Array, index: &Array, y: &Array, width: usize) {
        let (kind, rows) = (self.activation_kind(), index.len());
        let pointers = [x.expect(kind, 0), index.expect(Kind::U32, rows), y.expect(kind, rows * width)];
        let grid = [self.blocks_of_eights(rows, width), 1];
        // SAFETY: `gather_rows(const T*, const int*, T*, u32, int)`; −1 has the bits of `u32::MAX`.
        unsafe {
            self.launch("gather_rows", grid, &[&pointers.map(Ptr)[..], &[count(rows), count(width)]].concat());
        }
    }

    /// Copies columns `from_at …` of rows of `from_width` into the columns `to_at …` of rows of `to_width`, or adds
    /// them.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn copy_columns(
        &self,
        from: (&Array, usize, usize),
        to: (&Array, usize, usize),
        [rows, width]: [usize; 2],
        add: bool,
    ) {
        let kind = self.activation_kind();
        let (from, from_width, from_at) = from;
        let (to, to_width, to_at) = to;
        assert!(from_at + width <= from_width && to_at + width <= to_width, "columns within their rows");
        let pointers = [from.expect(kind, rows * from_width), to.expect(kind, rows * to_width)];
        let numbers = [rows, width, from_width, from_at, to_width, to_at, usize::from(add)].map(count);
        let grid = [self.blocks(rows * width), 1];
        // SAFETY: `copy_columns(const T*, T*, u32 × 6, int)`.
        unsafe { self.launch("copy_columns", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }

    /// The mean of the first `lengths[b]` of `length` rows of each sequence.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn mean(&self, x: &Array, lengths: &Array, y: &Array, [batch, length, width]: [usize; 3]) {
        let kind = self.activation_kind();
        let pointers =
            [x.expect(kind, batch * length * width), lengths.expect(Kind::U32, batch), y.expect(kind, batch * width)];
        // SAFETY: `mean_rows(const T*, const u32*, T*, u32, int)`.
        unsafe {
            self.launch("mean_rows", [batch, 1], &[&pointers.map(Ptr)[..], &[count(length), count(width)]].concat());
        }
    }

    /// The gradient of [`mean`](Operations::mean).
    ///
    /// # Panics
    /// If an array is too short.
    pub fn mean_gradient(&self, d_y: &Array, lengths: &Array, d_x: &Array, [batch, length, width]: [usize; 3]) {
        let (kind, rows) = (self.activation_kind(), batch * length);
        let pointers =
            [d_y.expect(kind, batch * width), lengths.expect(Kind::U32, batch), d_x.expect(kind, rows * width)];
        let grid = [self.blocks_of_eights(rows, width), 1];
        let numbers = [count(rows), count(length), count(width)];
        // SAFETY: `mean_gradient(const T*, const u32*, T*, u32, u32, int)`.
        unsafe { self.launch("mean_gradient", grid, &[&pointers.map(Ptr)[..], &numbers].concat()) };
    }
}
