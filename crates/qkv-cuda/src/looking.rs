//! Weights on demand, recomputed from what the forward pass kept: a rectangle of one head, a picture of it, a map. All by the
//! general kernels, on the caller's stream.

use crate::driver::Stream;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::launch::check_len;
use crate::plan::{Plan, Sizes};
use crate::tensors::{Tensors, Vector};
use crate::workspace::Workspace;
use qkv::Pool;
use std::ops::Range;

impl Plan {
    /// Puts the weights of a rectangle of one head, recomputed, on a stream: f32 `[rows, cols]`.
    ///
    /// # Safety
    /// As for [`forward`](Plan::forward); `lse` is what the forward pass wrote, and `into` has room.
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
        let (weights, job) = self.looking(tensors, lse, [b, h], &rows, &cols, into, rows.len() * cols.len())?;
        if rows.is_empty() || cols.is_empty() {
            return Ok(());
        }
        let (row, col) = weights.tiles;
        self.launch(&weights.rectangle, [rows.len().div_ceil(row) * cols.len().div_ceil(col), 1], &job, stream)
    }

    /// Puts a picture of a rectangle of weights on a stream: f32 `[height, width]` cells, each the largest or the mean of
    /// what it covers. The workspace holds `height · cols` numbers of f32.
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
        unsafe { self.picture(tensors, lse, [b, h], [rows, cols], shape, [0; 2], pool, into, workspace, stream) }
    }

    /// Puts a map of a rectangle of weights on a stream: as [`pooled`](Plan::pooled), of cells that each cover `[down, across]`
    /// weights, the last ones what is left, so that maps fit together whatever rectangle they were cut from. `into` has room
    /// for `[⌈rows / down⌉, ⌈cols / across⌉]` numbers, and the workspace for a row of cells of whole columns each.
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
            self.picture(tensors, lse, [b, h], [rows, cols], shape, [down, across], pool, into, workspace, stream)
        }
    }

    /// A picture of `[height, width]` cells that cover so many weights each, or share them out.
    #[allow(clippy::too_many_arguments)]
    unsafe fn picture(
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
        let (weights, mut job) = self.looking(tensors, lse, head, &rows, &cols, into, height * width)?;
        workspace.check(height * cols.len() * 4)?;
        if height == 0 || width == 0 {
            return Ok(());
        }
        if rows.is_empty() || cols.is_empty() {
            return self.driver.zero(into.at, height * width * 4, stream);
        }
        (job.height, job.width, job.columns) = (height as i32, width as i32, workspace.at);
        (job.down, job.across) = (down as i32, across as i32);
        job.pool = i32::from(matches!(pool, Pool::Mean));
        self.launch(&weights.columns, [height * cols.len().div_ceil(weights.tiles.1), 1], &job, stream)?;
        self.launch(&weights.cells, [(height * width).div_ceil(128), 1], &job, stream)
    }

    #[allow(clippy::too_many_arguments)]
    fn looking(
        &self,
        tensors: &Tensors,
        lse: Vector,
        [b, h]: [usize; 2],
        rows: &Range<usize>,
        cols: &Range<usize>,
        into: Vector,
        needed: usize,
    ) -> Result<(&crate::plan::Weights, Job)> {
        let Some(weights) = &self.weights else {
            return Err(Error::memory("plan", "was not made for weights: ask for them in `Uses`"));
        };
        self.check_tensors(tensors)?;
        check_len("lse", lse, self.sizes.rows())?;
        check_len("weights", into, needed)?;
        let outside = |name, found: String, limit| {
            Err(qkv::Error::Value { name, found, expected: format!("within 0..{limit}") }.into())
        };
        let Sizes { b: batch, hq, n, m, .. } = self.sizes;
        match () {
            () if b >= batch => return outside("sequence", b.to_string(), batch),
            () if h >= hq => return outside("head", h.to_string(), hq),
            () if rows.start > rows.end || rows.end > n => return outside("rows", format!("{rows:?}"), n),
            () if cols.start > cols.end || cols.end > m => return outside("columns", format!("{cols:?}"), m),
            () => {}
        }
        let mut job = self.job(tensors)?;
        (job.lse, job.picture) = (lse.at, into.at);
        (job.at_batch, job.at_head) = (b as i32, h as i32);
        (job.first_row, job.rows) = (rows.start as i32, rows.len() as i32);
        (job.first_col, job.cols) = (cols.start as i32, cols.len() as i32);
        Ok((weights, job))
    }
}
