//! Hopper's own kernels (`wgmma`, TMA, warp specialization): which calls they support, their workspace, and their
//! launches. `kernels/hopper/INTERFACE.md` describes the parameters, tensor maps and grids. Calls that do not qualify
//! run in the [`general`](crate::general) kernels, as do tiles that a mask makes non-finite here.

#[cfg(test)]
mod dq_tests;
mod mask_class;
mod overlapped_prep;
mod regions;
#[cfg(test)]
mod schedule_tests;

use crate::call::{Call, Sizes};
use crate::device::Stream;
use crate::driver::{Kernel, Module, TensorMap};
use crate::error::{Error, Result};
use crate::general::{GeneralBackward, GeneralForward, Recompute, Scope, TileScope};
use crate::general_params::GeneralParams;
use crate::hopper_params::HopperParams;
use crate::kernel_abi::{STORE_DK, STORE_DQ, STORE_DV, STORE_OUT};
use crate::memory::{Dtype, Strided};
use crate::program::{Kind, Program};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams};
use crate::tile_list::TileList;
use crate::workspace::Layout;
use mask_class::MaskClass;
use overlapped_prep::{PREP_BLOCKS, prepared_heads};
use regions::{BackwardRegions, CommonRegions};
use std::sync::Arc;

/// What a plan requests of these kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HopperOptions {
    pub backward: bool,
    /// dq summed as floats, in any order.
    pub any_order: bool,
}

/// Heads whose tiles are scheduled side by side when there are segments: forward, backward.
const HEADS_PER_SECTION: [usize; 2] = [16, 8];
/// L2 that a section may fill, in bytes.
const SECTION_BYTES: usize = 32 << 20;
/// Rows per TMA box when results are stored.
const STORE_ROWS: usize = 16;

/// A loaded module and the sizes that it reports.
#[derive(Debug)]
struct MainKernel {
    module: Arc<dyn Module>,
    kernel: Kernel,
    /// kBlockM and kBlockN.
    block_m: usize,
    block_n: usize,
    /// Whether preprocessing has to find the largest keys and values; then threads and shared memory of
    /// `overlapped_prep`.
    needs_absmax: bool,
    prep_threads: u32,
    prep_shared: u32,
    name: String,
}

impl MainKernel {
    fn new(call: &Call, forward: bool, defines: Vec<(&'static str, u32)>) -> Result<MainKernel> {
        let program = Program::Hopper { forward, defines };
        let module = call.driver.module(&program.source())?;
        let (variable, count) = if forward { ("forward_sizes", 5) } else { ("backward_sizes", 7) };
        let mut bytes = [0; 28];
        call.driver.global(&module, variable, &mut bytes[..4 * count])?;
        let size = |at: usize| i32::from_le_bytes(std::array::from_fn(|x| bytes[4 * at + x])).max(0) as usize;
        let name = if forward { "attention_forward" } else { "attention_backward" };
        let kernel = call.driver.kernel(&module, name, size(2) as u32, size(3) as u32)?;
        let defines = program.name();
        let defines = defines.split_once("HEAD_DIM=").map_or("", |(_, rest)| rest);
        Ok(MainKernel {
            module,
            kernel,
            block_m: size(0).max(1),
            block_n: size(1).max(1),
            needs_absmax: size(4) == 1,
            prep_threads: size(5) as u32,
            prep_shared: size(6) as u32,
            name: format!("hopper {} {defines}", call.dtype),
        })
    }

    fn helper(&self, call: &Call, name: &'static str, threads: u32, shared: u32) -> Result<Kernel> {
        call.driver.kernel(&self.module, name, threads, shared)
    }
}

#[derive(Debug)]
struct Forward {
    main: MainKernel,
    /// Finds the range of keys that each query sees in its segment.
    ranges: Option<Kernel>,
    list: Option<TileList>,
    regions: CommonRegions,
    /// For marked tiles; `None` without a mask.
    general: Option<GeneralForward>,
}

#[derive(Debug)]
struct Backward {
    main: MainKernel,
    /// Finds the range of queries that see each key.
    ranges: Option<Kernel>,
    list: Option<TileList>,
    /// Finds the largest |k| and |v|, if dq is summed in fixed point.
    absmax: Option<Kernel>,
    preprocess: Kernel,
    overlapped_prep: Kernel,
    sinks: Option<Kernel>,
    common: CommonRegions,
    regions: BackwardRegions,
    /// For marked tiles and the gradient of a bias tensor.
    general: Option<GeneralBackward>,
}

/// The kernels of a plan on Hopper.
#[derive(Debug)]
pub(crate) struct Hopper {
    forward: Forward,
    backward: Option<Backward>,
    mask: MaskClass,
    head_dim: usize,
    pack: Kernel,
    widen_sinks: Kernel,
    narrow_sinks: Kernel,
}

impl Hopper {
    /// `None` if the device or the call does not qualify.
    pub fn new(
        call: &Call,
        tensors: &Tensors,
        options: HopperOptions,
        forward_layout: &mut Layout,
        backward_layout: &mut Layout,
    ) -> Result<Option<Hopper>> {
        let Call { driver, attention, sizes, dtype, .. } = call;
        if !driver.device().is_hopper() {
            return Ok(None);
        }
        let Some(mask) = MaskClass::of_call(&call.mask, attention, call.place, sizes, *dtype) else { return Ok(None) };
        let head_dim = [64, 128, 256].into_iter().find(|&width| width >= sizes.d.max(sizes.dv)).unwrap_or(256);
        let mut defines = defines(call, tensors, &mask, head_dim);
        let main = MainKernel::new(call, true, defines.clone())?;
        let backward_main = match options.backward {
            true => {
                defines.extend(options.any_order.then_some(("FREE_ORDER", 1)));
                Some(MainKernel::new(call, false, defines)?)
            }
            false => None,
        };
        let mut lists = [None, None];
        if mask.tile_list {
            let Some((_, rest)) = call.mask.without_lengths() else { return Ok(None) };
            for (list, main, by_keys) in [(0, Some(&main), false), (1, backward_main.as_ref(), true)] {
                let Some(main) = main else { continue };
                let (blocks, heads) = ([main.block_m, main.block_n], if by_keys { sizes.hk } else { sizes.hq });
                let (place, len) = (call.place, [sizes.n, sizes.m]);
                lists[list] = TileList::new(driver, &rest, place, len, blocks, heads, by_keys)?;
                if lists[list].is_none() {
                    return Ok(None);
                }
            }
        }
        let [list, backward_list] = lists;
        let ranges = |main: &MainKernel| mask.segments.then(|| main.helper(call, "segment_ranges", 256, 0)).transpose();
        let is_masked = mask.is_masked();
        let forward = Forward {
            ranges: ranges(&main)?,
            regions: CommonRegions::forward(call, &mask, list.as_ref(), main.block_m, head_dim, forward_layout),
            general: is_masked
                .then(|| GeneralForward::new(call, TileScope::Marked, true, forward_layout))
                .transpose()?,
            list,
            main,
        };
        let backward = match backward_main {
            Some(main) => {
                let list = backward_list;
                let needs_general = is_masked || attention.bias.wants_tensor();
                Some(Backward {
                    ranges: ranges(&main)?,
                    absmax: main
                        .needs_absmax
                        .then(|| main.helper(call, "attention_backward_absmax", 256, 0))
                        .transpose()?,
                    preprocess: main.helper(call, "attention_backward_preprocess", 256, 0)?,
                    overlapped_prep: main.helper(
                        call,
                        "attention_backward_overlapped_prep",
                        main.prep_threads,
                        main.prep_shared,
                    )?,
                    sinks: attention.sinks.then(|| main.helper(call, "sink_gradient", 256, 0)).transpose()?,
                    common: CommonRegions::backward(
                        call,
                        &mask,
                        list.as_ref(),
                        main.block_n,
                        head_dim,
                        backward_layout,
                    ),
                    regions: BackwardRegions::new(call, main.block_m, head_dim, backward_layout),
                    general: needs_general
                        .then(|| GeneralBackward::new(call, TileScope::Marked, backward_layout))
                        .transpose()?,
                    list,
                    main,
                })
            }
            None => None,
        };
        let convert = Program::fixed(Kind::Convert, *dtype, 64, [64, 64]);
        let convert = driver.module(&convert.source())?;
        Ok(Some(Hopper {
            forward,
            backward,
            mask,
            head_dim,
            pack: driver.kernel(&convert, "pack", 256, 0)?,
            widen_sinks: driver.kernel(&convert, "widen_sinks", 128, 0)?,
            narrow_sinks: driver.kernel(&convert, "narrow_sinks", 128, 0)?,
        }))
    }

    /// Device memory of the tile lists.
    pub fn list_bytes(&self) -> usize {
        let lists = [self.forward.list.as_ref(), self.backward.as_ref().and_then(|backward| backward.list.as_ref())];
        lists.into_iter().flatten().map(TileList::bytes).sum()
    }

    pub fn forward_name(&self) -> String {
        self.forward.main.name.clone()
    }

    pub fn backward_name(&self) -> Option<String> {
        self.backward.as_ref().map(|backward| backward.main.name.clone())
    }

    pub fn forward(&self, call: &Call, tensors: &Tensors, out: &Outputs, base: u64, stream: Stream) -> Result<()> {
        let Forward { main, ranges, list, regions, general } = &self.forward;
        let Sizes { b, hq, hk, n, m, d, dv } = call.sizes;
        let mut params = self.params(call, tensors, out)?;
        let [q, k, v] = self.begin(call, tensors, regions, &mut params, base, stream)?;
        if self.mask.segments {
            // Whatever the order of the tiles, only a few of them read the same key at a time.
            params.heads_per_section = hq.min((hq / hk).max(HEADS_PER_SECTION[0])) as i32;
        } else if self.mask.band || self.mask.tile_list {
            let pairs = heads_in_l2(m, d + dv) * (hq / hk);
            (params.heads_per_section, params.lpt_order) = (pairs.clamp(1, b * hq) as i32, i32::from(self.mask.band));
        }
        set_list(list.as_ref(), &mut params);
        if let Some(kernel) = ranges {
            launch_ranges(call, kernel, n, &params, stream)?;
        }
        let maps = [
            call.tensor_map(&q, main.block_m)?,
            call.tensor_map(&k, main.block_n)?,
            call.tensor_map(&v, main.block_n)?,
            result_map(call, &out.values, STORE_OUT, &mut params)?,
        ];
        let work = b * hq * list.as_ref().map_or(n.div_ceil(main.block_m), |list| list.row_count);
        let blocks = work.min(call.driver.device().processors as usize) as u32;
        // SAFETY: these are the kernel's parameters; the pointers in them are valid by the contract of `Plan`'s passes.
        call.describe(unsafe { call.driver.launch(&main.kernel, [blocks, 1], stream, &arguments(&params, &maps)) })?;
        match general {
            Some(general) => general.launch(call, tensors, out, self.recompute(&params), base, stream),
            None => Ok(()),
        }
    }

    /// The marks of a launch, if there is a mask.
    fn recompute(&self, params: &HopperParams) -> Option<Recompute> {
        let HopperParams { recompute_any, recompute_q, recompute_k, .. } = *params;
        self.mask.is_masked().then_some(Recompute { any: recompute_any, queries: recompute_q, keys: recompute_k })
    }

    #[allow(clippy::too_many_arguments)]
    pub fn backward(
        &self,
        call: &Call,
        tensors: &Tensors,
        out: &Outputs,
        upstream: &Upstreams,
        into: &Gradients,
        base: u64,
        stream: Stream,
    ) -> Result<()> {
        let Some(backward) = &self.backward else {
            return Err(Error::memory("plan", "has no backward kernel"));
        };
        let params = self.launch_backward(backward, call, tensors, out, upstream, into, base, stream)?;
        let recompute = self.recompute(&params);
        match &backward.general {
            Some(general) if recompute.is_some() || into.bias.is_some() => {
                let scope = Scope::AfterHopper(recompute);
                general.launch(call, tensors, out, upstream, into, scope, base, stream)
            }
            _ => Ok(()),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn launch_backward(
        &self,
        backward: &Backward,
        call: &Call,
        tensors: &Tensors,
        out: &Outputs,
        upstream: &Upstreams,
        into: &Gradients,
        base: u64,
        stream: Stream,
    ) -> Result<HopperParams> {
        let Backward { main, ranges, list, regions, .. } = backward;
        let Sizes { b, hq, hk, n, m, d, dv } = call.sizes;
        let mut params = self.params(call, tensors, out)?;
        let [q, k, v] = self.begin(call, tensors, &backward.common, &mut params, base, stream)?;
        set_list(list.as_ref(), &mut params);
        if list.is_some() {
            // The long rows of as many heads as L2 holds come before the short ones.
            params.heads_per_section = heads_in_l2(n, d + dv).clamp(1, b * hk) as i32;
        }
        if let Some(kernel) = ranges {
            params.heads_per_section = hk.min(HEADS_PER_SECTION[1]) as i32;
            // The last quarter of the order, the short tiles of all heads, balances the load of the blocks at the end.
            params.lpt_order = (b * m.div_ceil(main.block_n) / 4) as i32;
            launch_ranges(call, kernel, m, &params, stream)?;
        }
        let d_out = self.tma_addressable(call, upstream.values, regions.d_out.ptr(base), stream)?;
        regions.set(&mut params, base);
        params.d_out = upstream.values.ptr;
        params.d_out_strides = unit_rows("d_out", &upstream.values).or_else(|_| {
            params.d_out = d_out.ptr;
            unit_rows("d_out", &d_out)
        })?;
        params.d_lse = upstream.lse.map_or(0, |lse| lse.ptr);
        (params.dq, params.dk, params.d_v) = (into.q.ptr, into.k.ptr, into.v.ptr);
        params.dq_strides = unit_rows("d_q", &into.q)?;
        params.dk_strides = unit_rows("d_k", &into.k)?;
        params.d_v_strides = unit_rows("d_v", &into.v)?;
        (params.k, params.v) = (k.ptr, v.ptr);
        (params.k_strides, params.v_strides) = (unit_rows("k", &k)?, unit_rows("v", &v)?);
        let maps = [
            call.tensor_map(&q, main.block_m)?,
            call.tensor_map(&k, main.block_n)?,
            call.tensor_map(&v, main.block_n)?,
            call.tensor_map(&d_out, main.block_m)?,
            result_map(call, &into.q, STORE_DQ, &mut params)?,
            result_map(call, &into.k, STORE_DK, &mut params)?,
            result_map(call, &into.v, STORE_DV, &mut params)?,
        ];
        let tiles = list.as_ref().map_or(m.div_ceil(main.block_n), |list| list.row_count);
        let addressable = out.values.is_tma_addressable() && upstream.values.is_tma_addressable();
        let prepared = self.prepared_heads(backward, call, &params, tiles, addressable);
        params.prepared_heads = prepared as i32;
        let box_rows = 2048 / self.head_dim;
        let prep_maps = match prepared < b * hk {
            true => Some([
                call.tensor_map(&k, box_rows)?,
                call.tensor_map(&v, box_rows)?,
                call.tensor_map(&out.values, box_rows)?,
                call.tensor_map(&d_out, box_rows)?,
                maps[4],
            ]),
            false => None,
        };
        let alone: [*const u8; 1] = [(&raw const params).cast()];
        let blocks = (b * hk * tiles).min(call.driver.device().processors as usize) as u32;
        // SAFETY: these are the kernels' parameters; the pointers in them are valid by the contract of `Plan`'s passes.
        unsafe {
            let launch = |kernel: &Kernel, blocks: usize, arguments: &[*const u8], dependent: bool| {
                let grid = [blocks as u32, 1];
                call.describe(match dependent {
                    true => call.driver.launch_dependent(kernel, grid, stream, arguments),
                    false => call.driver.launch(kernel, grid, stream, arguments),
                })
            };
            if let Some(absmax) = &backward.absmax {
                // It may overlap the ranges, unless a copy of d_out was launched after them.
                let dependent = ranges.is_some() && upstream.values.is_tma_addressable();
                launch(absmax, m.div_ceil(128) * prepared, &alone, dependent)?;
            }
            let rows = n.div_ceil(128) * prepared * (hq / hk);
            launch(&backward.preprocess, rows, &alone, backward.absmax.is_some())?;
            if let Some(prep_maps) = &prep_maps {
                let arguments = arguments(&params, prep_maps);
                launch(&backward.overlapped_prep, PREP_BLOCKS as usize, &arguments, true)?;
            }
            launch(&main.kernel, blocks as usize, &arguments(&params, &maps), true)?;
            if let (Some(kernel), Some(d_sinks)) = (&backward.sinks, into.sinks) {
                launch(kernel, hq, &alone, false)?;
                let (heads, result) = (hq as i32, params.d_sinks);
                let convert = GeneralParams { heads, result, d_sinks: d_sinks.ptr, ..GeneralParams::default() };
                launch(&self.narrow_sinks, hq.div_ceil(128), &[(&raw const convert).cast()], false)?;
            }
        }
        Ok(params)
    }

    /// How many key heads are preprocessed before the main kernel; the others are preprocessed beside it.
    fn prepared_heads(
        &self,
        backward: &Backward,
        call: &Call,
        params: &HopperParams,
        tiles: usize,
        addressable: bool,
    ) -> usize {
        let Sizes { b, hk, n, m, .. } = call.sizes;
        let Backward { main, ranges, list, .. } = backward;
        // With segments, or with long rows of a list, many heads are in progress at once; if most pairs are visible,
        // there is nothing to gain.
        let window = (self.mask.left + self.mask.right + 1) as usize;
        let narrow = self.mask.band && 2 * window < m;
        let by_heads = ranges.is_none() && if list.is_some() { params.lpt_order == 0 } else { narrow };
        if !by_heads || !addressable {
            return b * hk;
        }
        let pairs = list.as_ref().map_or(n * window, |list| list.kept * main.block_m * main.block_n);
        let processors = call.driver.device().processors as usize;
        prepared_heads(&call.sizes, pairs, tiles, params.heads_per_section as usize, processors)
    }

    /// The parameters that both passes share.
    fn params(&self, call: &Call, tensors: &Tensors, out: &Outputs) -> Result<HopperParams> {
        let Sizes { b, hq, hk, n, m, d, dv } = call.sizes;
        let bias = tensors.bias.map(|bias| bias.broadcast("bias", [b, hq, n, m])).transpose()?;
        let (segments_q, segments_k) = tensors.segments.map_or((0, 0), |(queries, keys)| (queries.ptr, keys.ptr));
        Ok(HopperParams {
            batch: b as i32,
            heads_q: hq as i32,
            heads_k: hk as i32,
            n: n as i32,
            m: m as i32,
            d: d as i32,
            dv: dv as i32,
            offset: call.scalars.offset as i32,
            left: self.mask.left as i32,
            right: self.mask.right as i32,
            heads_per_section: 1,
            scale: call.scalars.scale,
            softcap: call.scalars.softcap,
            dropout_scale: call.scalars.dropout_scale,
            dropout_threshold: call.scalars.dropout_threshold,
            seed: tensors.seed.unwrap_or(0),
            out: out.values.ptr,
            out_strides: unit_rows("out", &out.values)?,
            lse: out.lse.ptr,
            lengths: tensors.lengths.map_or(0, |lengths| lengths.ptr),
            segments_q,
            segments_k,
            bias: bias.map_or(0, |bias| bias.ptr),
            bias_strides: bias.map_or([0; 4], |bias| bias.strides),
            alibi: call.slopes(),
            ..HopperParams::default()
        })
    }

    /// Zeros the counters, converts the sinks to f32, and returns q, k and v in a form that TMA can address.
    fn begin(
        &self,
        call: &Call,
        tensors: &Tensors,
        regions: &CommonRegions,
        params: &mut HopperParams,
        base: u64,
        stream: Stream,
    ) -> Result<[Strided; 3]> {
        regions.set(params, base);
        call.driver.zero(regions.counters.ptr(base), regions.counters.bytes(), stream)?;
        if let Some(sinks) = tensors.sinks {
            let (heads, result) = (call.sizes.hq as i32, params.sinks);
            let convert = GeneralParams { heads, result, sinks: sinks.ptr, ..GeneralParams::default() };
            let grid = [call.sizes.hq.div_ceil(128) as u32, 1];
            // SAFETY: one number per head on both sides.
            unsafe { call.driver.launch(&self.widen_sinks, grid, stream, &[(&raw const convert).cast()]) }?;
        }
        Ok([
            self.tma_addressable(call, tensors.q, regions.q.ptr(base), stream)?,
            self.tma_addressable(call, tensors.k, regions.k.ptr(base), stream)?,
            self.tma_addressable(call, tensors.v, regions.v.ptr(base), stream)?,
        ])
    }

    /// The tensor itself if TMA can address it; otherwise a copy at `to`, with padded rows.
    fn tma_addressable(&self, call: &Call, tensor: Strided, to: u64, stream: Stream) -> Result<Strided> {
        if tensor.is_tma_addressable() {
            return Ok(tensor);
        }
        let [b, h, n, d] = tensor.shape;
        let row = d.next_multiple_of(8) as i64;
        let strides = [h as i64 * n as i64 * row, n as i64 * row, row, 1];
        let copy = Strided { ptr: to, shape: tensor.shape, strides };
        let axes = [b, h, n, d].map(|axis| axis as i32);
        let params = GeneralParams {
            q: tensor.into(),
            d_q: copy.into(),
            batch: axes[0],
            heads: axes[1],
            n: axes[2],
            d: axes[3],
            ..GeneralParams::default()
        };
        let grid = [(b * h * n * d).div_ceil(256) as u32, 1];
        // SAFETY: the region was sized for this tensor with padded rows.
        call.describe(unsafe { call.driver.launch(&self.pack, grid, stream, &[(&raw const params).cast()]) })?;
        Ok(copy)
    }
}

/// The defines that select features of the kernels.
fn defines(call: &Call, tensors: &Tensors, mask: &MaskClass, head_dim: usize) -> Vec<(&'static str, u32)> {
    let attention = &call.attention;
    let mut defines = vec![("ELEMENT", u32::from(call.dtype == Dtype::F16)), ("HEAD_DIM", head_dim as u32)];
    let features = [
        ("BAND", mask.band),
        ("SEGMENTS", mask.segments),
        ("TILE_LIST", mask.tile_list),
        ("LENGTHS", mask.lengths),
        ("SOFTCAP", attention.softcap.is_some()),
        ("ALIBI", attention.bias.has_alibi()),
        ("BIAS", tensors.bias.is_some()),
        ("SINKS", attention.sinks),
        ("DROPOUT", call.scalars.dropout_threshold > 0),
    ];
    defines.extend(features.into_iter().filter(|&(_, on)| on).map(|(feature, _)| (feature, 1)));
    defines
}

/// Computes the ranges of `rows` rows per sequence.
fn launch_ranges(call: &Call, kernel: &Kernel, rows: usize, params: &HopperParams, stream: Stream) -> Result<()> {
    let grid = [(rows.div_ceil(256) * call.sizes.b) as u32, 1];
    // SAFETY: the regions of ranges, extents and order are sized for this many rows.
    call.describe(unsafe { call.driver.launch(kernel, grid, stream, &[(&raw const *params).cast()]) })
}

/// The parameter block and the tensor maps of a launch, by address.
fn arguments(params: &HopperParams, maps: &[TensorMap]) -> Vec<*const u8> {
    let maps = maps.iter().map(|map| (&raw const *map).cast());
    [(&raw const *params).cast()].into_iter().chain(maps).collect()
}

/// How many heads fit in L2, each with `rows` rows of two tensors whose widths add up to `widths`: a power of two, or
/// 0.
fn heads_in_l2(rows: usize, widths: usize) -> usize {
    let heads = SECTION_BYTES / (rows * widths * 2).max(1);
    if heads == 0 { 0 } else { 1 << heads.ilog2() }
}

/// Sets the tile list, which all heads and sequences share.
fn set_list(list: Option<&TileList>, params: &mut HopperParams) {
    if let Some(TileList { rows, entries, bits, row_count, long_rows, .. }) = list {
        (params.list_rows, params.list_entries, params.list_bits) = (rows.ptr(), entries.ptr(), bits.ptr());
        (params.list_row_count, params.lpt_order) = (*row_count as u32, *long_rows as i32);
    }
}

/// The tensor map with which TMA stores a result. If it cannot, the map is empty, and the kernel stores element by
/// element.
fn result_map(call: &Call, result: &Strided, bit: u32, params: &mut HopperParams) -> Result<TensorMap> {
    if !result.is_tma_addressable() || !result.shape[3].is_multiple_of(8) {
        return Ok(TensorMap([0; 16]));
    }
    params.tma_stores |= bit;
    call.tensor_map(result, STORE_ROWS)
}

/// The strides of sequences, heads and rows of a tensor that a kernel accesses row by row; 0 for axes of length 1.
fn unit_rows(name: &'static str, tensor: &Strided) -> Result<[i64; 3]> {
    if tensor.strides[3] != 1 && tensor.shape[3] > 1 {
        return Err(Error::memory(name, "has rows with gaps: the elements of a row have to be contiguous"));
    }
    Ok(std::array::from_fn(|axis| if tensor.shape[axis] <= 1 { 0 } else { tensor.strides[axis] }))
}
