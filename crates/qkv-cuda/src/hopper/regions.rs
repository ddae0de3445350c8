//! The workspace of Hopper's kernels: one struct per pass, made with the plan, from which both the size and the
//! pointers of a launch are taken.

use super::mask_class::MaskClass;
use crate::call::{Call, Sizes};
use crate::hopper_params::HopperParams;
use crate::kernel_abi::{RECOMPUTE_ROWS, ROW_STATS_PAD};
use crate::tile_list::TileList;
use crate::workspace::{Layout, Region};

/// The most consumer warps per block, each of which counts the splits of a row.
const MAX_WARPS: usize = 12;
/// Words of the scheduler; the word that says whether any tile is marked, and then the marks, follow them.
const SCHEDULER_WORDS: usize = 2;

/// Regions that both passes use.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommonRegions {
    /// Zeroed before the launch: the scheduler's counters, marks for recomputation, arrivals of splits.
    pub counters: Region,
    /// Number of words: marks of query tiles, and all marks.
    query_marks: usize,
    marks: usize,
    sinks: Region,
    /// Copies of q, k and v that TMA can address.
    pub q: Region,
    pub k: Region,
    pub v: Region,
    split_results: Region,
    ranges: Region,
    range_extents: Region,
    tile_order: Region,
}

impl CommonRegions {
    pub fn forward(
        call: &Call,
        mask: &MaskClass,
        list: Option<&TileList>,
        block_m: usize,
        head_dim: usize,
        layout: &mut Layout,
    ) -> CommonRegions {
        let Sizes { hq, n, .. } = call.sizes;
        CommonRegions::new(call, mask, list, hq, block_m * (head_dim + 8), n, 0, layout)
    }

    pub fn backward(
        call: &Call,
        mask: &MaskClass,
        list: Option<&TileList>,
        block_n: usize,
        head_dim: usize,
        layout: &mut Layout,
    ) -> CommonRegions {
        let Sizes { b, hk, m, .. } = call.sizes;
        let key_marks = b * hk * m.div_ceil(RECOMPUTE_ROWS);
        CommonRegions::new(call, mask, list, hk, 2 * block_n * head_dim, m, key_marks, layout)
    }

    /// `heads` heads walk the rows of a list and keep `split_floats` floats per split; `rows` rows have ranges.
    #[allow(clippy::too_many_arguments)]
    fn new(
        call: &Call,
        mask: &MaskClass,
        list: Option<&TileList>,
        heads: usize,
        split_floats: usize,
        rows: usize,
        key_marks: usize,
        layout: &mut Layout,
    ) -> CommonRegions {
        let Sizes { b, hq, hk, n, m, d, dv } = call.sizes;
        let splits = list.map_or(0, |list| list.split_slots) * b * heads;
        let query_marks = b * hq * n.div_ceil(RECOMPUTE_ROWS);
        let marks = query_marks + key_marks;
        let masked_words = 1 + marks + splits * MAX_WARPS;
        let rows = if mask.segments { rows } else { 0 };
        let copied = |h: usize, len: usize, width: usize| b * h * len * width.next_multiple_of(8);
        CommonRegions {
            counters: layout.words(SCHEDULER_WORDS + if mask.is_masked() { masked_words } else { 0 }),
            query_marks,
            marks,
            sinks: layout.words(hq),
            q: layout.region(copied(hq, n, d), 2),
            k: layout.region(copied(hk, m, d), 2),
            v: layout.region(copied(hk, m, dv), 2),
            split_results: layout.words(splits * split_floats),
            ranges: layout.region(b * rows, 8),
            range_extents: layout.region(b * rows.div_ceil(64), 16),
            tile_order: layout.words(b * rows.div_ceil(64)),
        }
    }

    pub fn set(&self, params: &mut HopperParams, base: u64) {
        let word = |at: usize| self.counters.ptr(base) + 4 * at as u64;
        params.scheduler_counter = word(0);
        params.recompute_any = word(SCHEDULER_WORDS);
        params.recompute_q = word(SCHEDULER_WORDS + 1);
        params.recompute_k = word(SCHEDULER_WORDS + 1 + self.query_marks);
        params.split_arrivals = word(SCHEDULER_WORDS + 1 + self.marks);
        params.sinks = self.sinks.ptr(base);
        params.split_results = self.split_results.ptr(base);
        params.ranges = self.ranges.ptr(base);
        params.range_extents = self.range_extents.ptr(base);
        params.tile_order = self.tile_order.ptr(base);
    }
}

/// Additional regions of the backward pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct BackwardRegions {
    /// A copy of d_out that TMA can address.
    pub d_out: Region,
    delta: Region,
    lse_log2: Region,
    dq_sum: Region,
    dq_scale: Region,
    absmax: Region,
    d_sinks: Region,
    tickets: Region,
    progress: Region,
}

impl BackwardRegions {
    pub fn new(call: &Call, block_m: usize, head_dim: usize, layout: &mut Layout) -> BackwardRegions {
        let Sizes { b, hq, hk, n, m, dv, .. } = call.sizes;
        let (tiles, rows) = (n.div_ceil(block_m), b * hq * n.next_multiple_of(ROW_STATS_PAD));
        BackwardRegions {
            d_out: layout.region(b * hq * n * dv.next_multiple_of(8), 2),
            delta: layout.words(rows),
            lse_log2: layout.words(rows),
            dq_sum: layout.words(b * hq * tiles * block_m * head_dim),
            dq_scale: layout.words(rows),
            absmax: layout.region(b * hk * m.div_ceil(128), 8),
            d_sinks: layout.words(hq),
            tickets: layout.words(b * hq * tiles),
            progress: layout.words(3 * b * hk + 6),
        }
    }

    pub fn set(&self, params: &mut HopperParams, base: u64) {
        params.delta = self.delta.ptr(base);
        params.lse_log2 = self.lse_log2.ptr(base);
        params.dq_sum = self.dq_sum.ptr(base);
        params.dq_scale = self.dq_scale.ptr(base);
        params.absmax = self.absmax.ptr(base);
        params.d_sinks = self.d_sinks.ptr(base);
        params.tickets = self.tickets.ptr(base);
        params.progress = self.progress.ptr(base);
    }
}
