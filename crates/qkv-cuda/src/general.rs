//! The general kernels, forward and backward: which programs a call needs, their workspace, and their launches. They
//! run on every supported GPU and compute every description the crate supports; [`decode`](crate::decode) and
//! [`hopper`](crate::hopper) are faster where they apply, and leave the rest to these.

use crate::call::{Call, Sizes, ptr};
use crate::device::Stream;
use crate::driver::{Kernel, Module};
use crate::error::{Error, Result};
use crate::general_params::{GeneralParams, Tensor};
use crate::kernel_abi::{FEW_QUERIES, SPLIT_KEYS};
use crate::program::{Kind, Program};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams};
use crate::workspace::{Layout, Region};
use std::sync::Arc;

/// Partial sums of the gradient of a relative table.
const TABLE_PARTS: usize = 64;

/// A kernel whose tiles the mask classifies.
#[derive(Clone, Debug)]
pub(crate) struct Tiled {
    kernel: Kernel,
    /// Finds the segments of each tile, if the mask has segments.
    extents: Option<Kernel>,
    /// Rows of query tiles and of key tiles.
    tiles: (usize, usize),
}

impl Tiled {
    fn new(call: &Call, kind: Kind, scope: TileScope, name: &'static str) -> Result<Tiled> {
        let program = program(call, kind, scope)?;
        let module = call.driver.module(&program.source())?;
        let kernel = call.driver.kernel(&module, name, program.threads(), program.shared())?;
        let segments = call.mask.needs_segments();
        let extents = segments.then(|| call.driver.kernel(&module, "segment_extents", 128, 0)).transpose()?;
        Ok(Tiled { kernel, extents, tiles: program.tiles() })
    }

    fn launch_extents(&self, call: &Call, params: &GeneralParams, stream: Stream) -> Result<()> {
        let Some(extents) = &self.extents else { return Ok(()) };
        let Sizes { b, n, m, .. } = call.sizes;
        let tiles = b * (n.div_ceil(self.tiles.0) + m.div_ceil(self.tiles.1));
        call.launch(extents, [tiles.div_ceil(128).max(1), 1], params, stream)
    }
}

/// The tiles that a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TileScope {
    /// All of them: they are no larger than the sequences.
    All,
    /// Those that Hopper's kernels mark, which have a fixed size.
    Marked,
}

/// The program of a kind for this call's sizes and this device.
fn program(call: &Call, kind: Kind, scope: TileScope) -> Result<Program> {
    let Sizes { n, m, d, dv, .. } = call.sizes;
    let shared = call.driver.device().shared_bytes;
    let lengths = if scope == TileScope::All { [n, m] } else { [usize::MAX; 2] };
    Program::general(kind, call.dtype, [d, dv], lengths, shared)
        .ok_or_else(|| Error::cpu_only(format!("a head width of {} in {shared} bytes of shared memory", d.max(dv))))
}

/// Smallest and largest segment of each tile of queries and of keys.
#[derive(Clone, Copy, Debug)]
struct ExtentRegions {
    queries: Region,
    keys: Region,
}

impl ExtentRegions {
    fn new(call: &Call, (query_tile, key_tile): (usize, usize), layout: &mut Layout) -> ExtentRegions {
        let Sizes { b, n, m, .. } = call.sizes;
        ExtentRegions {
            queries: layout.words(2 * b * n.div_ceil(query_tile)),
            keys: layout.words(2 * b * m.div_ceil(key_tile)),
        }
    }

    fn set(self, params: &mut GeneralParams, base: u64) {
        (params.extents_q, params.extents_k) = (self.queries.ptr(base), self.keys.ptr(base));
    }
}

/// Splits of the keys of a few queries, each computed by its own blocks, and the kernel that merges them by lse.
#[derive(Clone, Debug)]
pub(crate) struct Splits {
    pub count: usize,
    merge: Kernel,
    out: Region,
    lse: Region,
    entropy: Region,
}

impl Splits {
    /// One split, or several if that is `allowed` and there are few queries. `module` has the kernel `merge`.
    pub fn new(call: &Call, module: &Arc<dyn Module>, allowed: bool, layout: &mut Layout) -> Result<Splits> {
        let Sizes { n, m, dv, .. } = call.sizes;
        let count = if allowed && n <= FEW_QUERIES { m.div_ceil(SPLIT_KEYS).max(1) } else { 1 };
        let rows = if count > 1 { count * call.sizes.rows() } else { 0 };
        // Sums of eight groups of 32 threads, the weights of 256 splits, and one number per group.
        let merge = call.driver.kernel(module, "merge", 256, 8 * 64 * 16 + (256 + 8) * 4)?;
        let entropy = if call.attention.entropy { rows } else { 0 };
        Ok(Splits {
            count,
            merge,
            out: layout.words(rows * dv),
            lse: layout.words(rows),
            entropy: layout.words(entropy),
        })
    }

    pub fn set(&self, params: &mut GeneralParams, base: u64) {
        params.splits = self.count as i32;
        if self.count > 1 {
            (params.split_out, params.split_lse) = (self.out.ptr(base), self.lse.ptr(base));
            params.split_entropy = self.entropy.ptr(base);
        }
    }

    /// Merges the splits, if there are several. `dependent`: the preceding launch lets this one start early.
    pub fn merge(&self, call: &Call, params: &GeneralParams, dependent: bool, stream: Stream) -> Result<()> {
        let grid = [call.sizes.rows(), 1];
        match self.count {
            1 => Ok(()),
            _ if dependent => call.launch_dependent(&self.merge, grid, params, stream),
            _ => call.launch(&self.merge, grid, params, stream),
        }
    }
}

/// Marks of tiles that Hopper's kernels leave to the general ones, by their addresses on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recompute {
    /// Whether any tile is marked.
    pub any: u64,
    /// `[B, Hq, tiles of 64 queries]`.
    pub queries: u64,
    /// `[B, Hk, tiles of 64 keys]`.
    pub keys: u64,
}

/// Blocks for a grid of tiles: one per tile, or a few that scan for marks, of which there are usually none.
fn blocks(call: &Call, params: &GeneralParams, tiles: usize) -> usize {
    if params.recompute_any == 0 { tiles } else { tiles.min(2 * call.driver.device().processors as usize) }
}

/// The forward pass.
#[derive(Clone, Debug)]
pub(crate) struct GeneralForward {
    tiled: Tiled,
    splits: Splits,
    extents: Option<ExtentRegions>,
}

impl GeneralForward {
    /// `splits`: whether the keys of a few queries are split among blocks.
    pub fn new(call: &Call, scope: TileScope, splits: bool, layout: &mut Layout) -> Result<GeneralForward> {
        let tiled = Tiled::new(call, Kind::Forward, scope, "forward")?;
        let extents = tiled.extents.as_ref().map(|_| ExtentRegions::new(call, tiled.tiles, layout));
        let splits = Splits::new(call, &tiled.kernel.module, splits, layout)?;
        Ok(GeneralForward { tiled, splits, extents })
    }

    pub fn name(&self, call: &Call) -> String {
        match self.splits.count {
            1 => format!("general {}", call.dtype),
            count => format!("general {} in {count} splits", call.dtype),
        }
    }

    /// Computes all rows, or those of marked tiles.
    pub fn launch(
        &self,
        call: &Call,
        tensors: &Tensors,
        out: &Outputs,
        recompute: Option<Recompute>,
        base: u64,
        stream: Stream,
    ) -> Result<()> {
        let mut params = forward_params(call, tensors, out)?;
        if let Some(recompute) = recompute {
            (params.recompute_any, params.recompute_tiles) = (recompute.any, recompute.queries);
        }
        if let Some(extents) = self.extents {
            extents.set(&mut params, base);
        }
        self.splits.set(&mut params, base);
        params.split_tiles = (SPLIT_KEYS / self.tiled.tiles.1) as i32;
        self.tiled.launch_extents(call, &params, stream)?;
        let Sizes { b, hq, n, .. } = call.sizes;
        let tiles = b * hq * n.div_ceil(self.tiled.tiles.0);
        call.launch(&self.tiled.kernel, [blocks(call, &params, tiles), self.splits.count], &params, stream)?;
        self.splits.merge(call, &params, false, stream)
    }
}

/// The parameters of a forward pass.
pub(crate) fn forward_params(call: &Call, tensors: &Tensors, out: &Outputs) -> Result<GeneralParams> {
    let mut params = call.params(tensors)?;
    params.out = out.values.into();
    params.vectorized |= i32::from(out.values.is_vectorized(call.dtype)) << 3;
    (params.lse, params.entropy) = (out.lse.ptr, ptr(out.entropy));
    Ok(params)
}

/// The parameters of a backward pass that computes the gradients of queries, keys and values.
pub(crate) fn backward_params(
    call: &Call,
    tensors: &Tensors,
    out: &Outputs,
    upstream: &Upstreams,
    into: &Gradients,
) -> Result<GeneralParams> {
    let mut params = forward_params(call, tensors, out)?;
    (params.d_lse, params.d_entropy) = (ptr(upstream.lse), ptr(upstream.entropy));
    params.d_out = upstream.values.into();
    (params.d_q, params.d_k, params.d_v) = (into.q.into(), into.k.into(), into.v.into());
    for (bit, tensor) in [(4, &upstream.values), (5, &into.q), (6, &into.k), (7, &into.v)] {
        params.vectorized |= i32::from(tensor.is_vectorized(call.dtype)) << bit;
    }
    Ok(params)
}

/// Which part of the backward pass the general kernels compute.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scope {
    /// All gradients.
    All,
    /// After Hopper's kernels: the tiles they marked, and the gradient of the bias tensor.
    AfterHopper(Option<Recompute>),
}

/// The backward pass. Two kernels recompute the scores: one for dQ, by tiles of queries, and one for dK and dV, by
/// tiles of keys, so that every sum has a fixed order and needs no atomics. The gradients of bias and table recompute
/// the scores again.
#[derive(Clone, Debug)]
pub(crate) struct GeneralBackward {
    delta: Kernel,
    /// Rows of a block of `delta`.
    delta_rows: usize,
    queries: Tiled,
    /// dK and dV in one kernel, or in two if the registers cannot hold both.
    keys: Vec<Tiled>,
    bias: Option<Tiled>,
    table: Option<(Tiled, Kernel)>,
    scale: Kernel,
    sinks: Kernel,
    regions: BackwardRegions,
}

#[derive(Clone, Copy, Debug)]
struct BackwardRegions {
    delta: Region,
    scale_rows: Region,
    sink_rows: Region,
    /// Sized for the smallest tiles of all kernels, which use it in turn.
    extents: Option<ExtentRegions>,
    table_parts: Region,
}

impl GeneralBackward {
    pub fn new(call: &Call, scope: TileScope, layout: &mut Layout) -> Result<GeneralBackward> {
        let (attention, driver) = (&call.attention, &call.driver);
        let program = program(call, Kind::Delta, scope)?;
        let module = driver.module(&program.source())?;
        let wide = call.sizes.d.max(call.sizes.dv) > 128;
        let keys = if wide { &[(true, false), (false, true)][..] } else { &[(true, true)] };
        let keys = keys.iter().map(|&(k, v)| Tiled::new(call, Kind::Keys { k, v }, scope, "backward_keys"));
        let keys = keys.collect::<Result<Vec<_>>>()?;
        let queries = Tiled::new(call, Kind::Queries, scope, "backward_queries")?;
        let wants_bias = attention.bias.wants_tensor();
        let bias = wants_bias.then(|| Tiled::new(call, Kind::Bias, scope, "backward_bias")).transpose()?;
        let table = match attention.bias.reach() {
            Some(_) => {
                let tiled = Tiled::new(call, Kind::Table, scope, "backward_table")?;
                let reduce = driver.kernel(&tiled.kernel.module, "reduce_table", 128, 0)?;
                Some((tiled, reduce))
            }
            None => None,
        };
        let rows = call.sizes.rows();
        let has_segments = queries.extents.is_some();
        let all = [Some(&queries), bias.as_ref(), table.as_ref().map(|(tiled, _)| tiled)];
        let tiles = all.into_iter().flatten().chain(&keys).map(|tiled| tiled.tiles);
        let smallest = tiles.fold((usize::MAX, usize::MAX), |a, b| (a.0.min(b.0), a.1.min(b.1)));
        let entries = attention.bias.reach().map_or(0, |reach| 2 * reach + 1);
        let regions = BackwardRegions {
            delta: layout.words(rows),
            scale_rows: layout.words(if attention.scale == qkv::Scale::Learned { rows } else { 0 }),
            sink_rows: layout.words(if attention.sinks { rows } else { 0 }),
            extents: has_segments.then(|| ExtentRegions::new(call, smallest, layout)),
            table_parts: layout.words(TABLE_PARTS * call.sizes.hq * entries),
        };
        Ok(GeneralBackward {
            delta: driver.kernel(&module, "compute_delta", program.threads(), program.shared())?,
            delta_rows: program.tiles().0,
            queries,
            keys,
            bias,
            table,
            scale: driver.kernel(&module, "reduce_scale", 256, 1024)?,
            sinks: driver.kernel(&module, "reduce_sinks", 256, 1024)?,
            regions,
        })
    }

    #[allow(clippy::too_many_arguments)]
    pub fn launch(
        &self,
        call: &Call,
        tensors: &Tensors,
        out: &Outputs,
        upstream: &Upstreams,
        into: &Gradients,
        scope: Scope,
        base: u64,
        stream: Stream,
    ) -> Result<()> {
        let params = self.params(call, tensors, out, upstream, into, base)?;
        let (after_hopper, recompute) = match scope {
            Scope::All => (false, None),
            Scope::AfterHopper(recompute) => (true, recompute),
        };
        let mut marked = params;
        marked.recompute_any = recompute.map_or(0, |recompute| recompute.any);
        // The gradient of the bias needs delta of every row.
        let delta_params = if into.bias.is_some() { &params } else { &marked };
        let Sizes { b, hq, hk, n, m, .. } = call.sizes;
        let tiles = b * hq * n.div_ceil(self.delta_rows);
        call.launch(&self.delta, [blocks(call, delta_params, tiles), 1], delta_params, stream)?;
        if !after_hopper || recompute.is_some() {
            marked.recompute_tiles = recompute.map_or(0, |recompute| recompute.queries);
            self.queries.launch_extents(call, &marked, stream)?;
            let tiles = b * hq * n.div_ceil(self.queries.tiles.0);
            call.launch(&self.queries.kernel, [blocks(call, &marked, tiles), 1], &marked, stream)?;
            marked.recompute_tiles = recompute.map_or(0, |recompute| recompute.keys);
            for tiled in &self.keys {
                tiled.launch_extents(call, &marked, stream)?;
                let tiles = b * hk * m.div_ceil(tiled.tiles.1);
                call.launch(&tiled.kernel, [blocks(call, &marked, tiles), 1], &marked, stream)?;
            }
        }
        if let (Some(bias), Some(_)) = (&self.bias, into.bias) {
            bias.launch_extents(call, &params, stream)?;
            let [bb, bh, bn, bm] = tensors.bias.map_or([1; 4], |bias| bias.shape);
            let tiles = |len: usize, tile: usize| if len == 1 { 1 } else { len.div_ceil(tile) };
            let grid = [bb * bh * tiles(bn, bias.tiles.0) * tiles(bm, bias.tiles.1), 1];
            call.launch(&bias.kernel, grid, &params, stream)?;
        }
        if after_hopper { Ok(()) } else { self.launch_reductions(call, params, into, stream) }
    }

    /// Gradients of the table, the learned scale and the sinks.
    fn launch_reductions(
        &self,
        call: &Call,
        mut params: GeneralParams,
        into: &Gradients,
        stream: Stream,
    ) -> Result<()> {
        if let (Some((tiled, reduce)), Some(_)) = (&self.table, into.table) {
            tiled.launch_extents(call, &params, stream)?;
            params.table_part_count = TABLE_PARTS as i32;
            call.launch(&tiled.kernel, [TABLE_PARTS * params.table_rows as usize, 1], &params, stream)?;
            let entries = params.table_rows as usize * (2 * params.reach as usize + 1);
            call.launch(reduce, [entries.div_ceil(128), 1], &params, stream)?;
        }
        if let Some(scale) = into.scale {
            call.launch(&self.scale, [scale.len, 1], &params, stream)?;
        }
        match into.sinks {
            Some(_) => call.launch(&self.sinks, [call.sizes.hq, 1], &params, stream),
            None => Ok(()),
        }
    }

    fn params(
        &self,
        call: &Call,
        tensors: &Tensors,
        out: &Outputs,
        upstream: &Upstreams,
        into: &Gradients,
        base: u64,
    ) -> Result<GeneralParams> {
        let mut params = backward_params(call, tensors, out, upstream, into)?;
        params.d_bias = into.bias.map_or(Tensor::default(), Tensor::from);
        (params.d_table, params.d_learned_scale, params.d_sinks) = (ptr(into.table), ptr(into.scale), ptr(into.sinks));
        let BackwardRegions { delta, scale_rows, sink_rows, extents, table_parts } = self.regions;
        params.delta = delta.ptr(base);
        params.scale_rows = if into.scale.is_some() { scale_rows.ptr(base) } else { 0 };
        params.sink_rows = sink_rows.ptr(base);
        params.table_parts = table_parts.ptr(base);
        if let Some(extents) = extents {
            extents.set(&mut params, base);
        }
        Ok(params)
    }
}

/// Recomputed weights.
#[derive(Clone, Debug)]
pub(crate) struct WeightsKernels {
    pub rectangle: Kernel,
    pub columns: Kernel,
    pub cells: Kernel,
    pub tiles: (usize, usize),
}

impl WeightsKernels {
    pub fn new(call: &Call) -> Result<WeightsKernels> {
        let program = program(call, Kind::Weights, TileScope::All)?;
        let module = call.driver.module(&program.source())?;
        let kernel = |name, threads, shared| call.driver.kernel(&module, name, threads, shared);
        Ok(WeightsKernels {
            rectangle: kernel("weights", program.threads(), program.shared())?,
            columns: kernel("weights_columns", program.threads(), program.shared())?,
            cells: kernel("weights_cells", 128, 0)?,
            tiles: program.tiles(),
        })
    }
}
