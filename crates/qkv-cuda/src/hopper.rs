//! Hopper's own kernels: which descriptions they take, and how they are launched. `kernels/hopper/INTERFACE.md` is the
//! border: the parameter block, the maps of the copy engine, grids and workspace. Whatever does not fit runs in the general
//! kernels.

mod late;
mod parameters;
mod seen;

use crate::driver::{Kernel, Stream, TensorMap};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::memory::{Dtype, Strided};
use crate::plan::{Plan, Sizes};
use crate::program::{General, Program};
use crate::tensors::{Gradients, Outputs, Tensors, Upstreams};
use crate::tiles::{Tiles, without_data};
use crate::workspace::Layout;
use late::{LATE, first_heads};
use parameters::{DK, DQ, DV, OUT, Parameters};
use seen::{Seen, fits};

/// The most warps of a block that compute, each of which counts the stretches of a row that is cut.
const WARPS: usize = 12;
/// Heads whose tiles are taken side by side where segments say in which order: forward, backward.
const HEADS_ABREAST: [usize; 2] = [16, 8];

/// The text of a program, its headers put in where they are included.
pub(crate) fn source(forward: bool) -> String {
    let text = if forward {
        include_str!("../kernels/hopper/forward.cu")
    } else {
        include_str!("../kernels/hopper/backward.cu")
    };
    let headers = [
        ("problem.cuh", include_str!("../kernels/hopper/problem.cuh")),
        ("tile.cuh", include_str!("../kernels/hopper/tile.cuh")),
        ("ranges.cuh", include_str!("../kernels/hopper/ranges.cuh")),
        ("walk.cuh", include_str!("../kernels/hopper/walk.cuh")),
        ("sum.cuh", include_str!("../kernels/hopper/sum.cuh")),
        ("step.cuh", include_str!("../kernels/hopper/step.cuh")),
        ("rows.cuh", include_str!("../kernels/hopper/rows.cuh")),
        ("late.cuh", include_str!("../kernels/hopper/late.cuh")),
    ];
    let text = headers.into_iter().fold(text.to_string(), |text, (name, header)| {
        text.replace(&format!("#include \"{name}\""), &header.replace("#pragma once", ""))
    });
    // NVRTC knows this constant by another name.
    let infinity = "#define __builtin_huge_valf() __builtin_bit_cast(float, 0x7f800000)\n";
    format!("{infinity}{text}")
}

/// Where Hopper's kernels say which tiles have to be computed again: on the card, as the general kernels read it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Broken {
    /// Whether there are any.
    pub any: u64,
    /// `[B, Hq, tiles of 64 queries]`.
    pub queries: u64,
    /// `[B, Hk, tiles of 64 keys]`.
    pub keys: u64,
}

/// Kernels of one direction, with the sizes that their module tells.
#[derive(Debug)]
struct Pass {
    main: Kernel,
    /// Before it, backward.
    prepare: Option<Kernel>,
    /// Before all, where sums are made of whole grains.
    measure: Option<Kernel>,
    /// Beside it, backward.
    late: Option<Kernel>,
    sinks: Option<Kernel>,
    /// The tiles to visit, where the mask is none of those that the kernels know.
    list: Option<Tiles>,
    /// Finds the range of keys of each query's segment, or of queries of each key's.
    ranges: Option<Kernel>,
    tile_m: usize,
    tile_n: usize,
    name: String,
}

/// The kernels of a plan.
#[derive(Debug)]
pub(crate) struct Hopper {
    forward: Option<Pass>,
    backward: Option<Pass>,
    seen: Seen,
    head_dim: usize,
    pack: Kernel,
    widen_sinks: Kernel,
    narrow_sinks: Kernel,
}

impl Hopper {
    /// The kernels for a plan, where the card is a Hopper and the choices fit.
    pub fn of(plan: &Plan, tensors: &Tensors) -> Result<Option<Hopper>> {
        let Plan { driver, attention, sizes, dtype, uses, .. } = plan;
        if !driver.card().is_hopper() || uses.general_only {
            return Ok(None);
        }
        let Some(seen) = fits(attention, plan.place, sizes, *dtype) else { return Ok(None) };
        let head_dim = [64, 128, 256].into_iter().find(|&width| width >= sizes.d.max(sizes.dv)).unwrap_or(256);
        let dropout = attention.dropout.is_some_and(|dropout| dropout.threshold() > 0);
        let mut defines = vec![("ELEMENT", u32::from(*dtype == Dtype::F16)), ("HEAD_DIM", head_dim as u32)];
        for (define, on) in [
            ("BAND", seen.band),
            ("SEGMENTS", seen.segments),
            ("PLAN", seen.listed),
            ("LENGTHS", seen.lengths),
            ("SOFTCAP", attention.softcap.is_some()),
            ("ALIBI", attention.bias.has_alibi()),
            ("BIAS", tensors.bias.is_some()),
            ("SINKS", attention.sinks),
            ("DROPOUT", dropout),
        ] {
            if on {
                defines.push((define, 1));
            }
        }
        let border = Program::General { what: General::Border, dtype: *dtype, width: 64, rows: 64, cols: 64 };
        let border = driver.module(&border)?;
        let mut forward = pass(plan, true, defines.clone())?;
        let mut backward = if uses.backward {
            if uses.any_order {
                defines.push(("FREE_ORDER", 1));
            }
            Some(pass(plan, false, defines)?)
        } else {
            None
        };
        if seen.listed {
            let (_, mask) = without_data(&attention.mask).unwrap_or_default();
            for (pass, by_keys) in [(Some(&mut forward), false), (backward.as_mut(), true)] {
                let Some(pass) = pass else { continue };
                let (tiles, heads) = ([pass.tile_m, pass.tile_n], if by_keys { sizes.hk } else { sizes.hq });
                pass.list = Tiles::of(driver, &mask, plan.place, [sizes.n, sizes.m], tiles, heads, by_keys)?;
                if pass.list.is_none() {
                    return Ok(None);
                }
            }
        }
        Ok(Some(Hopper {
            forward: Some(forward),
            backward,
            seen,
            head_dim,
            pack: driver.kernel(&border, "pack", 256, 0)?,
            widen_sinks: driver.kernel(&border, "widen_sinks", 128, 0)?,
            narrow_sinks: driver.kernel(&border, "narrow_sinks", 128, 0)?,
        }))
    }

    pub fn forward_fits(&self) -> bool {
        self.forward.is_some()
    }

    pub fn backward_fits(&self) -> bool {
        self.backward.is_some()
    }

    pub fn forward_name(&self) -> String {
        self.forward.as_ref().map_or(String::new(), |pass| pass.name.clone())
    }

    pub fn backward_name(&self) -> String {
        self.backward.as_ref().map_or(String::new(), |pass| pass.name.clone())
    }

    /// Whether some pairs may be absent: then results may have to be computed again.
    fn masked(&self) -> bool {
        self.seen.band || self.seen.lengths || self.seen.segments || self.seen.listed
    }

    /// Numbers that begin at zero: two counters, whether anything is broken, and which tiles of queries and of keys are; how many stretches of rows
    /// that are cut have come.
    fn zeros(&self, plan: &Plan, backward: bool) -> usize {
        if self.masked() { 3 + self.broken_tiles(plan, backward) + self.stretches(plan, backward)[0] } else { 2 }
    }

    fn broken_tiles(&self, plan: &Plan, backward: bool) -> usize {
        let Sizes { b, hq, hk, n, m, .. } = plan.sizes;
        b * hq * n.div_ceil(64) + if backward { b * hk * m.div_ceil(64) } else { 0 }
    }

    /// What rows that are cut need: counts, and floats for their results.
    fn stretches(&self, plan: &Plan, backward: bool) -> [usize; 2] {
        let Sizes { b, hq, hk, .. } = plan.sizes;
        let pass = if backward { &self.backward } else { &self.forward };
        let Some(Pass { list: Some(list), tile_m, tile_n, .. }) = pass else { return [0; 2] };
        let (heads, floats) = match backward {
            true => (hk, 2 * tile_n * self.head_dim),
            false => (hq, tile_m * (self.head_dim + 8)),
        };
        [WARPS, floats].map(|each| list.slots * b * heads * each)
    }

    /// Lays the forward pass out.
    pub fn forward_layout(&self, plan: &Plan, layout: &mut Layout) {
        self.lay(plan, false, layout);
    }

    fn lay(&self, plan: &Plan, backward: bool, layout: &mut Layout) {
        let Sizes { b, hq, hk, n, m, d, dv } = plan.sizes;
        layout.take(self.zeros(plan, backward), 4);
        layout.take(hq, 4);
        // Room for copies of what the copy engine cannot take.
        for (h, len, width) in [(hq, n, d), (hk, m, d), (hk, m, dv)] {
            layout.take(b * h * len * width.next_multiple_of(8), 2);
        }
        layout.take(self.stretches(plan, backward)[1], 4);
        if self.seen.segments {
            let rows = if backward { m } else { n };
            layout.take(b * rows, 8);
            layout.take(b * rows.div_ceil(64), 16);
            layout.take(b * rows.div_ceil(64), 4);
        }
    }

    /// Finds the ranges of `rows` rows of each sequence, on the card.
    fn find_ranges(
        &self,
        plan: &Plan,
        kernel: &Kernel,
        rows: usize,
        parameters: &mut Parameters,
        layout: &mut Layout,
        stream: Stream,
    ) -> Result<()> {
        let b = plan.sizes.b;
        parameters.ranges = layout.take(b * rows, 8);
        parameters.extents = layout.take(b * rows.div_ceil(64), 16);
        parameters.order = layout.take(b * rows.div_ceil(64), 4);
        let alone: [*const u8; 1] = [(&raw const *parameters).cast()];
        let grid = [(rows.div_ceil(256) * b) as u32, 1];
        // SAFETY: the room was laid out for as many rows.
        told(unsafe { plan.driver.launch(kernel, grid, stream, &alone) }, plan)
    }

    /// Lays the backward pass out.
    pub fn backward_layout(&self, plan: &Plan, layout: &mut Layout) {
        let (Some(backward), Sizes { b, hq, hk, n, m, dv, .. }) = (&self.backward, plan.sizes) else { return };
        self.lay(plan, true, layout);
        layout.take(b * hq * n * dv.next_multiple_of(8), 2);
        let tiles = n.div_ceil(backward.tile_m);
        layout.take(b * hq * n.next_multiple_of(128), 4);
        layout.take(b * hq * n.next_multiple_of(128), 4);
        layout.take(b * hq * tiles * backward.tile_m * self.head_dim, 4);
        layout.take(b * hq * n.next_multiple_of(128), 4);
        layout.take(2 * b * hk * m.div_ceil(128), 4);
        layout.take(hq, 4);
        layout.take(b * hq * tiles, 4);
        layout.take(counts(b * hk), 4);
    }

    /// # Safety
    /// As for [`Plan::forward`].
    pub unsafe fn forward(
        &self,
        plan: &Plan,
        tensors: &Tensors,
        out: &Outputs,
        layout: &mut Layout,
        stream: Stream,
    ) -> Result<Option<Broken>> {
        let Some(pass) = &self.forward else { return Err(Error::memory("plan", "has no forward kernel")) };
        let mut parameters = self.parameters(plan, tensors, out)?;
        let [q, k, v] = self.begin(plan, tensors, false, &mut parameters, layout, stream)?;
        let Sizes { b, hq, hk, n, m, d, dv } = plan.sizes;
        if self.seen.segments {
            // A key is read by a few tiles at a time, whatever order they come in.
            parameters.section = hq.min((hq / hk).max(HEADS_ABREAST[0])) as i32;
        } else if self.seen.band || self.seen.listed {
            let pairs = heads_in_cache(m, d + dv) * (hq / hk);
            (parameters.section, parameters.ordered) = (pairs.clamp(1, b * hq) as i32, i32::from(self.seen.band));
        }
        put_list(pass.list.as_ref(), &mut parameters);
        if let Some(kernel) = &pass.ranges {
            self.find_ranges(plan, kernel, n, &mut parameters, layout, stream)?;
        }
        let maps = [
            plan.tensor_map(&q, pass.tile_m)?,
            plan.tensor_map(&k, pass.tile_n)?,
            plan.tensor_map(&v, pass.tile_n)?,
            result_map(plan, &out.values, OUT, &mut parameters)?,
        ];
        let work = b * hq * pass.list.as_ref().map_or(n.div_ceil(pass.tile_m), |list| list.count);
        let given: Vec<*const u8> = [(&raw const parameters).cast()]
            .into_iter()
            .chain(maps.iter().map(|map| (&raw const *map).cast()))
            .collect();
        let blocks = work.min(plan.driver.card().processors as usize) as u32;
        // SAFETY: these are the parameters of the interface, and their pointers are what the caller promises.
        told(unsafe { plan.driver.launch(&pass.main, [blocks, 1], stream, &given) }, plan)?;
        Ok(self.broken(&parameters))
    }

    fn broken(&self, parameters: &Parameters) -> Option<Broken> {
        let Parameters { broken, broken_q, broken_k, .. } = *parameters;
        self.masked().then_some(Broken { any: broken, queries: broken_q, keys: broken_k })
    }

    /// # Safety
    /// As for [`Plan::backward`].
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn backward(
        &self,
        plan: &Plan,
        tensors: &Tensors,
        out: &Outputs,
        upstream: &Upstreams,
        into: &Gradients,
        layout: &mut Layout,
        stream: Stream,
    ) -> Result<Option<Broken>> {
        let Some(Pass {
            main,
            prepare: Some(prepare),
            late: Some(late),
            measure,
            sinks,
            ranges,
            list,
            tile_m,
            tile_n,
            ..
        }) = &self.backward
        else {
            return Err(Error::memory("plan", "has no backward kernel"));
        };
        let Sizes { b, hq, hk, n, m, dv, .. } = plan.sizes;
        let mut parameters = self.parameters(plan, tensors, out)?;
        let [q, k, v] = self.begin(plan, tensors, true, &mut parameters, layout, stream)?;
        put_list(list.as_ref(), &mut parameters);
        if list.is_some() {
            // Long rows of as many heads as the cache holds come before the short ones.
            parameters.section = heads_in_cache(n, plan.sizes.d + plan.sizes.dv).clamp(1, b * hk) as i32;
        }
        if let Some(kernel) = ranges {
            parameters.section = hk.min(HEADS_ABREAST[1]) as i32;
            // A quarter of the tiles, the short ones of all heads, come last: then all blocks end alike.
            parameters.ordered = (b * m.div_ceil(*tile_n) / 4) as i32;
            self.find_ranges(plan, kernel, m, &mut parameters, layout, stream)?;
        }
        let room = layout.take(b * hq * n * dv.next_multiple_of(8), 2);
        let d_out = self.takeable(plan, upstream.values, room, stream)?;
        parameters.d_out = upstream.values.at;
        parameters.d_out_strides = rows_of("d_out", &upstream.values, &mut [&d_out], &mut parameters.d_out)?;
        parameters.d_lse = upstream.lse.map_or(0, |lse| lse.at);
        (parameters.dq, parameters.dk, parameters.d_v) = (into.q.at, into.k.at, into.v.at);
        parameters.dq_strides = unit_rows("d_q", &into.q)?;
        parameters.dk_strides = unit_rows("d_k", &into.k)?;
        parameters.d_v_strides = unit_rows("d_v", &into.v)?;
        let tiles = n.div_ceil(*tile_m);
        parameters.delta = layout.take(b * hq * n.next_multiple_of(128), 4);
        parameters.lse2 = layout.take(b * hq * n.next_multiple_of(128), 4);
        parameters.dq_sum = layout.take(b * hq * tiles * tile_m * self.head_dim, 4);
        parameters.grain = layout.take(b * hq * n.next_multiple_of(128), 4);
        parameters.limits = layout.take(2 * b * hk * m.div_ceil(128), 4);
        (parameters.k, parameters.v) = (k.at, v.at);
        (parameters.k_strides, parameters.v_strides) = (unit_rows("k", &k)?, unit_rows("v", &v)?);
        parameters.d_sinks = layout.take(hq, 4);
        parameters.tickets = layout.take(b * hq * tiles, 4);
        parameters.whole = layout.take(counts(b * hk), 4);
        let maps = [
            plan.tensor_map(&q, *tile_m)?,
            plan.tensor_map(&k, *tile_n)?,
            plan.tensor_map(&v, *tile_n)?,
            plan.tensor_map(&d_out, *tile_m)?,
            result_map(plan, &into.q, DQ, &mut parameters)?,
            result_map(plan, &into.k, DK, &mut parameters)?,
            result_map(plan, &into.v, DV, &mut parameters)?,
        ];
        let works = list.as_ref().map_or(m.div_ceil(*tile_n), |list| list.count);
        let processors = plan.driver.card().processors as usize;
        // Segments and long rows of a list are taken of many heads at once; where most pairs are kept, nothing is gained.
        let window = (self.seen.left + self.seen.right + 1) as usize;
        let narrow = self.seen.band && 2 * window < m;
        let by_heads = ranges.is_none() && if list.is_some() { parameters.ordered == 0 } else { narrow };
        let pairs = list.as_ref().map_or(n * window, |list| list.kept * tile_m * tile_n);
        let first = match by_heads && takes(&out.values) && takes(&upstream.values) {
            true => first_heads(&plan.sizes, pairs, works, parameters.section as usize, processors),
            false => b * hk,
        };
        parameters.first = first as i32;
        let rows = 2048 / self.head_dim;
        let late_maps = match first < b * hk {
            true => Some([
                plan.tensor_map(&k, rows)?,
                plan.tensor_map(&v, rows)?,
                plan.tensor_map(&out.values, rows)?,
                plan.tensor_map(&d_out, rows)?,
            ]),
            false => None,
        };
        let alone: [*const u8; 1] = [(&raw const parameters).cast()];
        let given: Vec<*const u8> = alone.into_iter().chain(maps.iter().map(|map| (&raw const *map).cast())).collect();
        let blocks = (b * hk * works).min(processors) as u32;
        // SAFETY: these are the parameters of the interface, and their pointers are what the caller promises.
        unsafe {
            if let Some(measure) = measure {
                let grid = [(m.div_ceil(128) * first) as u32, 1];
                // Beside the ranges, unless something else was launched after them.
                told(
                    match ranges.is_some() && takes(&upstream.values) {
                        true => plan.driver.launch_early(measure, grid, stream, &alone),
                        false => plan.driver.launch(measure, grid, stream, &alone),
                    },
                    plan,
                )?;
            }
            // The others wait by themselves for the one before.
            let grid = [(n.div_ceil(128) * first * (hq / hk)) as u32, 1];
            told(
                match measure {
                    Some(_) => plan.driver.launch_early(prepare, grid, stream, &alone),
                    None => plan.driver.launch(prepare, grid, stream, &alone),
                },
                plan,
            )?;
            if let Some(late_maps) = &late_maps {
                let dq = &maps[4];
                let given = late_maps.iter().chain([dq]).map(|map| (&raw const *map).cast());
                let given: Vec<*const u8> = alone.into_iter().chain(given).collect();
                told(plan.driver.launch_early(late, [LATE, 1], stream, &given), plan)?;
            }
            told(plan.driver.launch_early(main, [blocks, 1], stream, &given), plan)?;
            if let (Some(kernel), Some(d_sinks)) = (sinks, into.sinks) {
                told(plan.driver.launch(kernel, [hq as u32, 1], stream, &alone), plan)?;
                let job = Job { heads: hq as i32, picture: parameters.d_sinks, d_sinks: d_sinks.at, ..Job::default() };
                told(
                    plan.driver.launch(
                        &self.narrow_sinks,
                        [hq.div_ceil(128) as u32, 1],
                        stream,
                        &[(&raw const job).cast()],
                    ),
                    plan,
                )?;
            }
        }
        Ok(self.broken(&parameters))
    }

    /// What both passes are told alike.
    fn parameters(&self, plan: &Plan, tensors: &Tensors, out: &Outputs) -> Result<Parameters> {
        let Sizes { b, hq, hk, n, m, d, dv } = plan.sizes;
        let mut parameters = Parameters::none();
        let job = plan.job(tensors)?;
        (parameters.batch, parameters.heads_q, parameters.heads_k) = (b as i32, hq as i32, hk as i32);
        (parameters.n, parameters.m, parameters.d, parameters.dv) = (n as i32, m as i32, d as i32, dv as i32);
        (parameters.offset, parameters.left, parameters.right) =
            (job.offset as i32, self.seen.left as i32, self.seen.right as i32);
        parameters.section = 1;
        (parameters.scale, parameters.softcap) = (job.scale, job.cap);
        (parameters.dropout_scale, parameters.dropout_threshold, parameters.seed) =
            (job.kept_scale, job.threshold, job.seed);
        parameters.out = out.values.at;
        parameters.out_strides = unit_rows("out", &out.values)?;
        parameters.lse = out.lse.at;
        parameters.lengths = job.lengths;
        (parameters.segments_q, parameters.segments_k) = (job.segments_q, job.segments_k);
        (parameters.bias, parameters.bias_strides) = (job.bias.at, job.bias.strides);
        parameters.alibi = job.slopes;
        Ok(parameters)
    }

    /// What begins at zero, the sinks as f32, and q, k and v where the copy engine can take them.
    fn begin(
        &self,
        plan: &Plan,
        tensors: &Tensors,
        backward: bool,
        parameters: &mut Parameters,
        layout: &mut Layout,
        stream: Stream,
    ) -> Result<[Strided; 3]> {
        let Sizes { b, hq, hk, n, m, d, dv } = plan.sizes;
        let zeros = self.zeros(plan, backward);
        parameters.counter = layout.take(zeros, 4);
        plan.driver.zero(parameters.counter, 4 * zeros, stream)?;
        parameters.broken = parameters.counter + 8;
        parameters.broken_q = parameters.broken + 4;
        parameters.broken_k = parameters.broken_q + 4 * (b * hq * n.div_ceil(64)) as u64;
        parameters.stretches_there = parameters.broken_q + 4 * self.broken_tiles(plan, backward) as u64;
        parameters.sinks = layout.take(hq, 4);
        if let Some(sinks) = tensors.sinks {
            let job = Job { heads: hq as i32, picture: parameters.sinks, sinks: sinks.at, ..Job::default() };
            let grid = [hq.div_ceil(128) as u32, 1];
            // SAFETY: one number a head on either side.
            unsafe { plan.driver.launch(&self.widen_sinks, grid, stream, &[(&raw const job).cast()]) }?;
        }
        let mut room = |h: usize, len: usize, width: usize| layout.take(b * h * len * width.next_multiple_of(8), 2);
        let rooms = [room(hq, n, d), room(hk, m, d), room(hk, m, dv)];
        parameters.stretches = layout.take(self.stretches(plan, backward)[1], 4);
        Ok([
            self.takeable(plan, tensors.q, rooms[0], stream)?,
            self.takeable(plan, tensors.k, rooms[1], stream)?,
            self.takeable(plan, tensors.v, rooms[2], stream)?,
        ])
    }

    /// A tensor as the copy engine can take it: itself, or a copy in the workspace.
    fn takeable(&self, plan: &Plan, tensor: Strided, room: u64, stream: Stream) -> Result<Strided> {
        if takes(&tensor) {
            return Ok(tensor);
        }
        let [b, h, n, d] = tensor.shape;
        let row = d.next_multiple_of(8) as i64;
        let copy =
            Strided { at: room, shape: tensor.shape, strides: [h as i64 * n as i64 * row, n as i64 * row, row, 1] };
        let axes = [b, h, n, d].map(|axis| axis as i32);
        let job = Job {
            q: tensor.into(),
            d_q: copy.into(),
            batch: axes[0],
            heads: axes[1],
            n: axes[2],
            d: axes[3],
            ..Job::default()
        };
        let grid = [(b * h * n * d).div_ceil(256) as u32, 1];
        // SAFETY: the room was laid out for this tensor, with its rows padded.
        told(unsafe { plan.driver.launch(&self.pack, grid, stream, &[(&raw const job).cast()]) }, plan)?;
        Ok(copy)
    }
}

/// What backward's kernels count, of so many heads of keys.
fn counts(heads: usize) -> usize {
    3 * heads + 6
}

/// How many heads of so many rows of two tensors, of both widths together, the cache holds: a power of two, or none.
fn heads_in_cache(rows: usize, widths: usize) -> usize {
    let heads = (32usize << 20) / (rows * widths * 2).max(1);
    if heads == 0 { 0 } else { 1 << heads.ilog2() }
}

/// The list of tiles, which all heads and sequences share.
fn put_list(list: Option<&Tiles>, parameters: &mut Parameters) {
    if let Some(Tiles { rows, entries, bits, count, long, .. }) = list {
        (parameters.plan_rows, parameters.plan_tiles, parameters.plan_bits) = (rows.at(), entries.at(), bits.at());
        (parameters.plan_count, parameters.ordered) = (*count as u32, *long as i32);
    }
}

/// Compiles one direction and asks its module for its sizes.
fn pass(plan: &Plan, forward: bool, defines: Vec<(&'static str, u32)>) -> Result<Pass> {
    let driver = &plan.driver;
    let (has_sinks, by_ranges) = (defines.contains(&("SINKS", 1)), defines.contains(&("SEGMENTS", 1)));
    let program = Program::Hopper { forward, defines };
    let module = driver.module(&program)?;
    let mut bytes = [0; 28];
    let (sizes, count) = if forward { ("forward_sizes", 5) } else { ("backward_sizes", 7) };
    driver.global(&module, sizes, &mut bytes[..4 * count])?;
    let size = |at: usize| i32::from_le_bytes(std::array::from_fn(|x| bytes[4 * at + x])).max(0) as usize;
    let kernel = |name, threads, shared| driver.kernel(&module, name, threads, shared);
    let main = if forward { "attention_forward" } else { "attention_backward" };
    Ok(Pass {
        main: kernel(main, size(2) as u32, size(3) as u32)?,
        prepare: (!forward).then(|| kernel("attention_backward_prepare", 256, 0)).transpose()?,
        measure: (!forward && size(4) == 1).then(|| kernel("attention_backward_measure", 256, 0)).transpose()?,
        late: (!forward).then(|| kernel("attention_backward_late", size(5) as u32, size(6) as u32)).transpose()?,
        ranges: by_ranges.then(|| kernel("segment_ranges", 256, 0)).transpose()?,
        list: None,
        sinks: (!forward && has_sinks).then(|| kernel("sink_gradient", 256, 0)).transpose()?,
        tile_m: size(0).max(1),
        tile_n: size(1).max(1),
        name: format!("hopper {} {}", plan.dtype, program.name().split_once("HEAD_DIM=").map_or("", |(_, rest)| rest)),
    })
}

/// Whether the copy engine takes a tensor's strides: rows without gaps, all else in steps of 16 bytes.
pub(crate) fn takes(tensor: &Strided) -> bool {
    let step = |axis: usize| tensor.shape[axis] <= 1 || tensor.strides[axis] > 0 && tensor.strides[axis] % 8 == 0;
    tensor.at.is_multiple_of(16) && (tensor.strides[3] == 1 || tensor.shape[3] <= 1) && (0..3).all(step)
}

/// The map by which the copy engine writes a result, 16 rows at a time. Where it cannot, a map of nothing: the kernel then writes
/// element by element.
fn result_map(plan: &Plan, result: &Strided, bit: u32, parameters: &mut Parameters) -> Result<TensorMap> {
    if !takes(result) || !result.shape[3].is_multiple_of(8) {
        return Ok(TensorMap([0; 16]));
    }
    parameters.mapped |= bit;
    plan.tensor_map(result, 16)
}

/// The strides of rows, heads and sequences of what a kernel writes row by row. An axis of one is never stepped along, whatever its stride is.
fn unit_rows(name: &'static str, tensor: &Strided) -> Result<[i64; 3]> {
    if tensor.strides[3] != 1 && tensor.shape[3] > 1 {
        return Err(Error::memory(
            name,
            "has rows with gaps: give it as the kernel writes it, elements next to each other",
        ));
    }
    Ok(std::array::from_fn(|axis| if tensor.shape[axis] <= 1 { 0 } else { tensor.strides[axis] }))
}

/// As [`unit_rows`], but where rows have gaps, those of the copy.
fn rows_of(name: &'static str, tensor: &Strided, copies: &mut [&Strided], at: &mut u64) -> Result<[i64; 3]> {
    unit_rows(name, tensor).or_else(|error| match copies.first() {
        Some(copy) => {
            *at = copy.at;
            unit_rows(name, copy)
        }
        None => Err(error),
    })
}

fn told(result: Result<()>, plan: &Plan) -> Result<()> {
    plan.told(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_that_the_copy_engine_cannot_take_are_seen() {
        let dense = Strided::contiguous(4096, [2, 4, 100, 64]);
        assert!(takes(&dense));
        assert!(!takes(&Strided { at: 4098, ..dense }));
        assert!(!takes(&Strided::contiguous(4096, [2, 4, 100, 33])));
        assert!(!takes(&Strided { strides: [1, 100, 200, 2], ..dense }));
        // Heads next to each other, as a layer leaves them.
        assert!(takes(&Strided { strides: [100 * 256, 64, 256, 1], ..dense }));
        assert!(!takes(&Strided { strides: [0, 6400, 64, 1], ..dense }), "a broadcast axis is copied");
    }

    #[test]
    fn what_is_computed_again_comes_in_tiles_of_64_rows() {
        let of = |what, width| Program::general(what, Dtype::Bf16, width, width, 232_448).unwrap().tiles();
        for width in [16, 64, 128, 256] {
            assert_eq!((of(General::Forward, width).0, of(General::Queries, width).0), (64, 64));
            let (k, v) = (true, width <= 128);
            assert_eq!(of(General::Keys { k, v }, width).1, 64);
        }
    }

    #[test]
    fn headers_are_put_where_they_are_included() {
        for forward in [true, false] {
            let text = source(forward);
            assert!(!text.contains("#include \"") && !text.contains("#pragma once"));
            assert!(text.contains("struct Problem"));
        }
    }
}
