//! Weights on demand, recomputed from q, k and the log-sum-exp by the general kernels: a rectangle of one head, either
//! in full or pooled to cells.

use crate::call::{Sizes, check_len};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::general::WeightsKernels;
use crate::general_params::GeneralParams;
use crate::plan::Plan;
use crate::tensors::{Tensors, Vector};
use crate::workspace::Workspace;
use qkv::Pool;
use std::ops::Range;

impl Plan {
    /// Enqueues the computation of the weights of one head in a rectangle: f32 `[rows, cols]`.
    ///
    /// # Safety
    /// As for [`forward`](Plan::forward); `lse` is what the forward pass wrote, and `into` is large enough.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn rectangle(
        &self,
        tensors: &Tensors,
        lse: Vector,
        [b, h]: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
        into: Vector,
        stream: Stream,
    ) -> Result<()> {
        let (weights, params) =
            self.weights_params(tensors, lse, [b, h], &rows, &cols, into, rows.len() * cols.len())?;
        if rows.is_empty() || cols.is_empty() {
            return Ok(());
        }
        let (row, col) = weights.tiles;
        self.call.launch(&weights.rectangle, [rows.len().div_ceil(row) * cols.len().div_ceil(col), 1], &params, stream)
    }

    /// Enqueues the computation of a rectangle of weights, pooled to f32 `[height, width]` cells: each cell is the
    /// largest of the weights it covers, or their mean. The workspace holds `height · cols` × f32.
    ///
    /// # Safety
    /// As for [`rectangle`](Plan::rectangle).
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn pooled(
        &self,
        tensors: &Tensors,
        lse: Vector,
        [b, h]: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
        [height, width]: [usize; 2],
        pool: Pool,
        into: Vector,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<()> {
        let shape = [height, width];
        // SAFETY: as the caller promises.
        unsafe { self.pool_cells(tensors, lse, [b, h], [rows, cols], shape, [0; 2], pool, into, workspace, stream) }
    }

    /// Like [`pooled`](Plan::pooled), with cells that each cover `[down, across]` weights; the last cells cover what is
    /// left, so that maps of adjacent rectangles fit together. `into` holds `[⌈rows / down⌉, ⌈cols / across⌉]` numbers,
    /// and the workspace `⌈rows / down⌉ · cols` × f32.
    ///
    /// # Safety
    /// As for [`rectangle`](Plan::rectangle).
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn map(
        &self,
        tensors: &Tensors,
        lse: Vector,
        [b, h]: [usize; 2],
        rows: Range<usize>,
        cols: Range<usize>,
        [down, across]: [usize; 2],
        pool: Pool,
        into: Vector,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<()> {
        let fits = |each: usize| each > 0 && i32::try_from(each).is_ok();
        if !fits(down) || !fits(across) {
            let found = format!("{:?}", [down, across]);
            let expected = "at least one weight each way".into();
            return Err(qkv::Error::Value { name: "cells", found, expected }.into());
        }
        let shape = [rows.len().div_ceil(down), cols.len().div_ceil(across)];
        // SAFETY: as the caller promises.
        unsafe {
            self.pool_cells(tensors, lse, [b, h], [rows, cols], shape, [down, across], pool, into, workspace, stream)
        }
    }

    /// `[height, width]` cells that each cover `[down, across]` weights, or, if these are 0, divide them evenly.
    #[allow(clippy::too_many_arguments)]
    unsafe fn pool_cells(
        &self,
        tensors: &Tensors,
        lse: Vector,
        head: [usize; 2],
        [rows, cols]: [Range<usize>; 2],
        [height, width]: [usize; 2],
        [down, across]: [usize; 2],
        pool: Pool,
        into: Vector,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<()> {
        let (weights, mut params) = self.weights_params(tensors, lse, head, &rows, &cols, into, height * width)?;
        workspace.check(height * cols.len() * 4)?;
        if height == 0 || width == 0 {
            return Ok(());
        }
        if rows.is_empty() || cols.is_empty() {
            return self.call.driver.zero(into.ptr, height * width * 4, stream);
        }
        (params.height, params.width, params.pooled_columns) = (height as i32, width as i32, workspace.ptr);
        (params.cell_rows, params.cell_cols) = (down as i32, across as i32);
        params.pool = i32::from(matches!(pool, Pool::Mean));
        self.call.launch(&weights.columns, [height * cols.len().div_ceil(weights.tiles.1), 1], &params, stream)?;
        self.call.launch(&weights.cells, [(height * width).div_ceil(128), 1], &params, stream)
    }

    #[allow(clippy::too_many_arguments)]
    fn weights_params(
        &self,
        tensors: &Tensors,
        lse: Vector,
        [b, h]: [usize; 2],
        rows: &Range<usize>,
        cols: &Range<usize>,
        into: Vector,
        needed: usize,
    ) -> Result<(&WeightsKernels, GeneralParams)> {
        let Some(weights) = &self.weights else {
            return Err(Error::memory("plan", "has no weights: set `PlanOptions::weights`"));
        };
        self.call.check_tensors(tensors)?;
        check_len("lse", lse, self.call.sizes.rows())?;
        check_len("weights", into, needed)?;
        let outside = |name, found: String, limit| {
            Err(qkv::Error::Value { name, found, expected: format!("within 0..{limit}") }.into())
        };
        let Sizes { b: batch, hq, n, m, .. } = self.call.sizes;
        match () {
            () if b >= batch => return outside("sequence", b.to_string(), batch),
            () if h >= hq => return outside("head", h.to_string(), hq),
            () if rows.start > rows.end || rows.end > n => return outside("rows", format!("{rows:?}"), n),
            () if cols.start > cols.end || cols.end > m => return outside("columns", format!("{cols:?}"), m),
            () => {}
        }
        let mut params = self.call.params(tensors)?;
        (params.lse, params.result) = (lse.ptr, into.ptr);
        (params.at_batch, params.at_head) = (b as i32, h as i32);
        (params.first_row, params.rows) = (rows.start as i32, rows.len() as i32);
        (params.first_col, params.cols) = (cols.start as i32, cols.len() as i32);
        Ok((weights, params))
    }
}
