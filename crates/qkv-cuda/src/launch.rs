//! What a plan does when it is called: launches on the caller's stream, in order, and nothing else. No allocation, no
//! waiting, no copying to or from the host.

use crate::driver::{Kernel, Stream, TensorMap};
use crate::error::{Error, Result};
use crate::hopper::takes;
use crate::job::{Job, Tensor};
use crate::memory::{Dtype, Strided};
use crate::plan::{Backward, Forward, Plan, Sizes, TABLE_PARTS, Tiled};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams, Vector};
use crate::workspace::{Layout, Workspace};
use qkv::Pool;
use std::ops::Range;

impl Plan {
    /// Bytes of device memory that [`forward`](Plan::forward) needs beside the tensors.
    pub fn forward_workspace(&self) -> usize {
        let mut layout = Layout::new(0);
        match &self.hopper {
            Some(hopper) if hopper.forward_fits() => {
                hopper.forward_layout(self, &mut layout);
                self.general_forward(&mut Job::default(), &mut layout);
            }
            _ => self.general_forward(&mut Job::default(), &mut layout),
        };
        layout.bytes()
    }

    /// Bytes of device memory that [`backward`](Plan::backward) needs beside the tensors.
    pub fn backward_workspace(&self) -> usize {
        let mut layout = Layout::new(0);
        match &self.hopper {
            Some(hopper) if hopper.backward_fits() => {
                hopper.backward_layout(self, &mut layout);
                self.general_backward(&mut Job::default(), &mut layout);
            }
            _ => self.general_backward(&mut Job::default(), &mut layout),
        };
        layout.bytes()
    }

    /// Puts the forward pass on a stream.
    ///
    /// # Safety
    /// Every tensor, and the workspace, is device memory of this plan's card, as large as it says, that stays where it is
    /// until the work is done; outputs overlap nothing else.
    pub unsafe fn forward(&self, tensors: &Tensors, out: &Outputs, workspace: Workspace, stream: Stream) -> Result<()> {
        self.check(tensors, out)?;
        workspace.check(self.forward_workspace())?;
        if self.sizes.rows() == 0 {
            return Ok(());
        }
        let mut layout = Layout::new(workspace.at);
        let mut broken = None;
        if let Some(hopper) = self.hopper.as_ref().filter(|hopper| hopper.forward_fits()) {
            // SAFETY: as the caller promises.
            broken = unsafe { hopper.forward(self, tensors, out, &mut layout, stream) }?;
            if broken.is_none() {
                return Ok(());
            }
        }
        let mut job = self.job(tensors)?;
        job.out = out.values.into();
        (job.lse, job.entropy) = (out.lse.at, at(out.entropy));
        if let Some(broken) = broken {
            (job.broken, job.broken_tiles) = (broken.any, broken.queries);
        }
        self.general_forward(&mut job, &mut layout);
        let Sizes { b, hq, hk, n, .. } = self.sizes;
        let merged = self.sizes.rows();
        match &self.forward {
            Forward::General { forward, merge, pieces } => {
                self.extents(forward, &job, stream)?;
                job.pieces = *pieces as i32;
                job.piece_tiles = (PIECE_KEYS / forward.tiles.1) as i32;
                self.launch(
                    &forward.kernel,
                    [self.blocks(&job, b * hq * n.div_ceil(forward.tiles.0)), *pieces],
                    &job,
                    stream,
                )?;
                if *pieces > 1 { self.launch(merge, [merged, 1], &job, stream) } else { Ok(()) }
            }
            Forward::Decode { decode, merge, pieces, rows, copied } => {
                job.pieces = *pieces as i32;
                let tiles = b * hk * (hq / hk * n).div_ceil(*rows);
                if *copied {
                    self.decode_by_copies(decode, tensors, tiles * pieces, &job, stream)?;
                } else {
                    self.launch(decode, [tiles, *pieces], &job, stream)?;
                }
                if *pieces > 1 { self.launch_early(merge, [merged, 1], &job, stream) } else { Ok(()) }
            }
        }
    }

    /// Puts the backward pass on a stream: gradients of everything that `into` has room for.
    ///
    /// # Safety
    /// As for [`forward`](Plan::forward); `out` holds what the forward pass of these tensors wrote.
    pub unsafe fn backward(
        &self,
        tensors: &Tensors,
        out: &Outputs,
        upstream: &Upstreams,
        into: &Gradients,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<()> {
        let Some(backward) = &self.backward else {
            return Err(Error::memory("plan", "was not made for a backward pass: ask for it in `Uses`"));
        };
        self.check(tensors, out)?;
        self.check_backward(tensors, upstream, into)?;
        workspace.check(self.backward_workspace())?;
        let Sizes { b, hq, hk, n, m, .. } = self.sizes;
        if b * hq * n == 0 || m == 0 {
            return self.clear(into, stream);
        }
        let mut layout = Layout::new(workspace.at);
        let (mut broken, mut done) = (None, false);
        if let Some(hopper) = self.hopper.as_ref().filter(|hopper| hopper.backward_fits()) {
            // SAFETY: as the caller promises.
            broken = unsafe { hopper.backward(self, tensors, out, upstream, into, &mut layout, stream) }?;
            done = true;
            if broken.is_none() && into.bias.is_none() {
                return Ok(());
            }
        }
        let mut job = self.job(tensors)?;
        job.out = out.values.into();
        (job.lse, job.entropy) = (out.lse.at, at(out.entropy));
        (job.d_lse, job.d_entropy) = (at(upstream.lse), at(upstream.entropy));
        job.d_out = upstream.values.into();
        job.vectors |= i32::from(out.values.reads_sixteen(self.dtype)) << 3;
        job.vectors |= i32::from(upstream.values.reads_sixteen(self.dtype)) << 4;
        (job.d_q, job.d_k, job.d_v) = (into.q.into(), into.k.into(), into.v.into());
        job.d_bias = into.bias.map_or(Tensor::default(), Tensor::from);
        (job.d_table, job.d_learned, job.d_sinks) = (at(into.table), at(into.scale), at(into.sinks));
        self.general_backward(&mut job, &mut layout);
        if into.scale.is_none() {
            job.scale_rows = 0;
        }
        let Backward { row_terms, rows_tile, queries, keys, bias, table, scale, sinks } = backward;
        // What Hopper's kernels did is done again only where they say so; a bias is for these alone.
        let mut again = job;
        if let Some(broken) = broken {
            again.broken = broken.any;
        }
        let of_rows = if into.bias.is_some() { &job } else { &again };
        let rows = b * hq * n.div_ceil(*rows_tile);
        self.launch(row_terms, [self.blocks(of_rows, rows), 1], of_rows, stream)?;
        if !done || broken.is_some() {
            again.broken_tiles = broken.map_or(0, |broken| broken.queries);
            self.extents(queries, &again, stream)?;
            let tiles = b * hq * n.div_ceil(queries.tiles.0);
            self.launch(&queries.kernel, [self.blocks(&again, tiles), 1], &again, stream)?;
            again.broken_tiles = broken.map_or(0, |broken| broken.keys);
            for tiled in keys {
                self.extents(tiled, &again, stream)?;
                let tiles = b * hk * m.div_ceil(tiled.tiles.1);
                self.launch(&tiled.kernel, [self.blocks(&again, tiles), 1], &again, stream)?;
            }
        }
        if let (Some(bias), Some(_)) = (bias, into.bias) {
            self.extents(bias, &job, stream)?;
            let [bb, bh, bn, bm] = tensors.bias.map_or([1; 4], |bias| bias.shape);
            let tiles = |len: usize, tile: usize| if len == 1 { 1 } else { len.div_ceil(tile) };
            self.launch(&bias.kernel, [bb * bh * tiles(bn, bias.tiles.0) * tiles(bm, bias.tiles.1), 1], &job, stream)?;
        }
        if done {
            return Ok(());
        }
        if let (Some((tiled, reduce)), Some(_)) = (table, into.table) {
            self.extents(tiled, &job, stream)?;
            job.parts = TABLE_PARTS as i32;
            self.launch(&tiled.kernel, [TABLE_PARTS * job.table_rows as usize, 1], &job, stream)?;
            let entries = job.table_rows as usize * (2 * job.reach as usize + 1);
            self.launch(reduce, [entries.div_ceil(128), 1], &job, stream)?;
        }
        if let Some(given) = into.scale {
            self.launch(scale, [given.len, 1], &job, stream)?;
        }
        match into.sinks {
            Some(_) => self.launch(sinks, [hq, 1], &job, stream),
            None => Ok(()),
        }
    }

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
        let (weights, mut job) = self.looking(tensors, lse, [b, h], &rows, &cols, into, height * width)?;
        workspace.check(height * cols.len() * 4)?;
        if height == 0 || width == 0 {
            return Ok(());
        }
        if rows.is_empty() || cols.is_empty() {
            return self.driver.zero(into.at, height * width * 4, stream);
        }
        (job.height, job.width, job.columns) = (height as i32, width as i32, workspace.at);
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

    /// Lays the general forward pass out.
    fn general_forward(&self, job: &mut Job, layout: &mut Layout) {
        let (pieces, tiled) = match &self.forward {
            Forward::General { forward, pieces, .. } => (*pieces, Some(forward)),
            Forward::Decode { pieces, .. } => (*pieces, None),
        };
        if let Some(Tiled { extents: Some(_), tiles, .. }) = tiled {
            self.lay_extents(*tiles, job, layout);
        }
        if pieces > 1 {
            let rows = self.sizes.rows();
            job.piece_out = layout.take(pieces * rows * self.sizes.dv, 4);
            job.piece_lse = layout.take(pieces * rows, 4);
            job.piece_entropy = layout.take(if self.attention.entropy { pieces * rows } else { 0 }, 4);
        }
    }

    /// Lays the general backward pass out.
    fn general_backward(&self, job: &mut Job, layout: &mut Layout) {
        let Some(backward) = &self.backward else { return };
        let rows = self.sizes.rows();
        job.row_terms = layout.take(rows, 4);
        job.scale_rows = layout.take(if self.attention.scale == qkv::Scale::Learned { rows } else { 0 }, 4);
        job.sink_rows = layout.take(if self.attention.sinks { rows } else { 0 }, 4);
        if backward.queries.extents.is_some() {
            // The smallest tiles of all have the most of them; the passes take turns with this.
            let all =
                [Some(&backward.queries), backward.bias.as_ref(), backward.table.as_ref().map(|(tiled, _)| tiled)];
            let tiles = all.into_iter().flatten().chain(&backward.keys).map(|tiled| tiled.tiles);
            let smallest = tiles.fold((usize::MAX, usize::MAX), |a, b| (a.0.min(b.0), a.1.min(b.1)));
            self.lay_extents(smallest, job, layout);
        }
        if let Some(reach) = self.attention.bias.reach() {
            let heads = self.sizes.hq;
            job.table_parts = layout.take(TABLE_PARTS * heads * (2 * reach + 1), 4);
        }
    }

    fn lay_extents(&self, (query_tile, key_tile): (usize, usize), job: &mut Job, layout: &mut Layout) {
        let Sizes { b, n, m, .. } = self.sizes;
        job.extents_q = layout.take(2 * b * n.div_ceil(query_tile), 4);
        job.extents_k = layout.take(2 * b * m.div_ceil(key_tile), 4);
    }

    fn extents(&self, tiled: &Tiled, job: &Job, stream: Stream) -> Result<()> {
        let Some(extents) = &tiled.extents else { return Ok(()) };
        let Sizes { b, n, m, .. } = self.sizes;
        let tiles = b * (n.div_ceil(tiled.tiles.0) + m.div_ceil(tiled.tiles.1));
        self.launch(extents, [tiles.div_ceil(128).max(1), 1], job, stream)
    }

    /// Blocks for so many tiles: one each, or, where most likely none is to be computed again, a few that look.
    fn blocks(&self, job: &Job, tiles: usize) -> usize {
        if job.broken == 0 { tiles } else { tiles.min(2 * self.driver.card().processors as usize) }
    }

    fn launch(&self, kernel: &Kernel, grid: [usize; 2], job: &Job, stream: Stream) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let (grid, job) = (grid.map(|axis| axis as u32), &raw const *job);
        // SAFETY: the job is what a general kernel takes, and its pointers are what the callers of the passes promise.
        self.told(unsafe { self.driver.launch(kernel, grid, stream, &[job.cast()]) })
    }

    /// Decoding by the copy engine: as many blocks as the card holds at once, each with piece after piece.
    fn decode_by_copies(
        &self,
        kernel: &Kernel,
        tensors: &Tensors,
        pieces: usize,
        job: &Job,
        stream: Stream,
    ) -> Result<()> {
        if !takes(&tensors.k) || !takes(&tensors.v) {
            return Err(Error::memory(
                "k, v",
                "have strides that the plan was not made for: the copy engine cannot take them",
            ));
        }
        let maps = [self.tensor_map(&tensors.k, 64)?, self.tensor_map(&tensors.v, 64)?];
        // As many blocks as the card holds at once.
        let on_each = (233_472 / (kernel.shared as usize + 1024)).clamp(1, 3);
        let blocks = pieces.min(on_each * self.driver.card().processors as usize) as u32;
        let given: [*const u8; 3] =
            [(&raw const *job).cast(), (&raw const maps[0]).cast(), (&raw const maps[1]).cast()];
        // SAFETY: these are the parameters of the kernel, and their pointers are what the callers of the passes promise.
        self.told(unsafe { self.driver.launch(kernel, [blocks, 1], stream, &given) })
    }

    /// A map for the copy engine over a tensor, so many rows at a time.
    pub(crate) fn tensor_map(&self, tensor: &Strided, rows: usize) -> Result<TensorMap> {
        let [b, h, n, d] = tensor.shape;
        let axes = [d, n, h, b].map(|axis| axis as u64);
        // An axis of one is never stepped along.
        let stride = |axis: usize| if tensor.shape[axis] <= 1 { 16 } else { tensor.strides[axis] as u64 * 2 };
        let strides = [stride(2), stride(1), stride(0)];
        self.driver.tensor_map(tensor.at, self.dtype == Dtype::Bf16, axes, strides, rows as u32)
    }

    /// As [`launch`](Plan::launch), for a kernel that waits by itself for what was launched before it.
    fn launch_early(&self, kernel: &Kernel, grid: [usize; 2], job: &Job, stream: Stream) -> Result<()> {
        let (grid, job) = (grid.map(|axis| axis as u32), &raw const *job);
        // SAFETY: likewise.
        self.told(unsafe { self.driver.launch_early(kernel, grid, stream, &[job.cast()]) })
    }

    /// A refusal of the driver's with the shapes it was about.
    pub(crate) fn told(&self, result: Result<()>) -> Result<()> {
        result.map_err(|error| match error {
            Error::Driver { doing, words } => Error::Driver { doing: format!("{doing}, for {}", self.sizes), words },
            error => error,
        })
    }

    fn check_tensors(&self, tensors: &Tensors) -> Result<()> {
        let found = Sizes::of(tensors);
        if found != self.sizes {
            return Err(Error::memory("q, k, v", format!("are {found}, and the plan was made for {}", self.sizes)));
        }
        Ok(())
    }

    fn check(&self, tensors: &Tensors, out: &Outputs) -> Result<()> {
        self.check_tensors(tensors)?;
        let Sizes { b, hq, n, dv, .. } = self.sizes;
        check_shape("out", &out.values, [b, hq, n, dv])?;
        check_len("lse", out.lse, self.sizes.rows())?;
        match (out.entropy, self.attention.entropy) {
            (Some(entropy), true) => check_len("entropy", entropy, self.sizes.rows()),
            (None, false) => Ok(()),
            (None, true) => {
                Err(qkv::Error::Missing { tensor: "entropy", needed_by: "an attention with entropy" }.into())
            }
            (Some(_), false) => {
                let reason = "the attention was not asked for its entropy";
                Err(qkv::Error::Unused { tensor: "entropy", reason }.into())
            }
        }
    }

    fn check_backward(&self, tensors: &Tensors, upstream: &Upstreams, into: &Gradients) -> Result<()> {
        let Sizes { b, hq, hk, n, m, d, dv } = self.sizes;
        check_shape("d_out", &upstream.values, [b, hq, n, dv])?;
        for (tensor, vector) in [("d_lse", upstream.lse), ("d_entropy", upstream.entropy)] {
            vector.map_or(Ok(()), |vector| check_len(tensor, vector, self.sizes.rows()))?;
        }
        if upstream.entropy.is_some() && !self.attention.entropy {
            let needed_by = "its gradient (ask for it with `with_entropy`)";
            return Err(qkv::Error::Missing { tensor: "entropy", needed_by }.into());
        }
        check_shape("d_q", &into.q, [b, hq, n, d])?;
        check_shape("d_k", &into.k, [b, hk, m, d])?;
        check_shape("d_v", &into.v, [b, hk, m, dv])?;
        if let (Some(into), Some(bias)) = (&into.bias, &tensors.bias) {
            check_shape("d_bias", into, bias.shape)?;
        }
        for (tensor, into, len) in [
            ("d_table", into.table, tensors.table.map(|table| table.shape[2] * table.shape[3])),
            ("d_scale", into.scale, tensors.scale.map(|scale| scale.len)),
            ("d_sinks", into.sinks, tensors.sinks.map(|sinks| sinks.len)),
        ] {
            match (into, len) {
                (Some(into), Some(len)) => check_len(tensor, into, len)?,
                (Some(_), None) => return Err(qkv::Error::Unused { tensor, reason: "its tensor was not given" }.into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Nothing was seen: every gradient is 0.
    fn clear(&self, into: &Gradients, stream: Stream) -> Result<()> {
        let size = self.dtype.size();
        for tensor in [Some(into.q), Some(into.k), Some(into.v), into.bias].into_iter().flatten() {
            let dense = Strided::contiguous(tensor.at, tensor.shape);
            if dense.strides != tensor.strides && tensor.span() > 0 {
                return Err(Error::memory(
                    "a gradient",
                    "of an attention without keys or queries has to be without gaps",
                ));
            }
            self.driver.zero(tensor.at, tensor.span() * size, stream)?;
        }
        for vector in [into.table, into.scale, into.sinks].into_iter().flatten() {
            self.driver.zero(vector.at, vector.len * size, stream)?;
        }
        Ok(())
    }
}

const PIECE_KEYS: usize = 512;

fn at(vector: Option<Vector>) -> u64 {
    vector.map_or(0, |vector| vector.at)
}

fn check_shape(tensor: &'static str, found: &Strided, expected: [usize; 4]) -> Result<()> {
    if found.shape == expected {
        return Ok(());
    }
    Err(qkv::Error::Shape { tensor, found: found.shape.to_vec(), expected: format!("{expected:?}") }.into())
}

fn check_len(tensor: &'static str, found: Vector, expected: usize) -> Result<()> {
    if found.len >= expected {
        return Ok(());
    }
    Err(qkv::Error::Shape { tensor, found: vec![found.len], expected: format!("{expected} numbers") }.into())
}
