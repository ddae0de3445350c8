//! The parameter block of Hopper's kernels, laid out as `kernels/hopper/problem.cuh` lays it out: field for field.

/// The parameter block: laid out as `problem.cuh` lays it out.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Parameters {
    pub batch: i32,
    pub heads_q: i32,
    pub heads_k: i32,
    pub n: i32,
    pub m: i32,
    pub d: i32,
    pub dv: i32,
    pub offset: i32,
    pub left: i32,
    pub right: i32,
    pub section: i32,
    pub ordered: i32,
    pub scale: f32,
    pub softcap: f32,
    pub dropout_scale: f32,
    pub dropout_threshold: u32,
    pub seed: u64,
    pub out: u64,
    pub out_strides: [i64; 3],
    pub lse: u64,
    pub lengths: u64,
    pub segments_q: u64,
    pub segments_k: u64,
    pub plan_rows: u64,
    pub plan_tiles: u64,
    pub plan_bits: u64,
    pub plan_b: i32,
    pub plan_h: i32,
    pub bias: u64,
    pub bias_strides: [i64; 4],
    pub alibi: u64,
    pub sinks: u64,
    pub counter: u64,
    pub d_out: u64,
    pub d_out_strides: [i64; 3],
    pub d_lse: u64,
    pub dq: u64,
    pub dq_strides: [i64; 3],
    pub dk: u64,
    pub dk_strides: [i64; 3],
    pub d_v: u64,
    pub d_v_strides: [i64; 3],
    pub delta: u64,
    pub lse2: u64,
    pub dq_sum: u64,
    pub grain: u64,
    pub d_bias: u64,
    pub d_bias_strides: [i64; 4],
    pub d_sinks: u64,
    pub limits: u64,
    pub k: u64,
    pub k_strides: [i64; 3],
    pub v: u64,
    pub v_strides: [i64; 3],
    pub broken: u64,
    pub broken_q: u64,
    pub broken_k: u64,
    pub ranges: u64,
    pub extents: u64,
    pub order: u64,
    pub tickets: u64,
    pub whole: u64,
    /// Which results have a map: [`OUT`], [`DK`], [`DV`], [`DQ`].
    pub mapped: u32,
    pub plan_count: u32,
    pub stretches: u64,
    pub stretches_there: u64,
    /// Heads of keys that are prepared before the main kernel.
    pub first: i32,
    pub nothing: i32,
}

/// The bits of [`Parameters::mapped`].
pub(super) const OUT: u32 = 1;
pub(super) const DK: u32 = 2;
pub(super) const DV: u32 = 4;
pub(super) const DQ: u32 = 8;

impl Parameters {
    /// All zeros.
    pub fn none() -> Parameters {
        // SAFETY: every field is a number, for which zeros are one.
        unsafe { std::mem::zeroed() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn parameters_lie_where_the_kernels_look_for_them() {
        assert_eq!((size_of::<Parameters>(), offset_of!(Parameters, mapped)), (616, 584));
        assert_eq!((offset_of!(Parameters, plan_count), offset_of!(Parameters, stretches)), (588, 592));
        assert_eq!(offset_of!(Parameters, first), 608);
        assert_eq!((offset_of!(Parameters, limits), offset_of!(Parameters, v)), (448, 488));
        assert_eq!((offset_of!(Parameters, broken), offset_of!(Parameters, order)), (520, 560));
        assert_eq!((offset_of!(Parameters, tickets), offset_of!(Parameters, whole)), (568, 576));
        assert_eq!((offset_of!(Parameters, seed), offset_of!(Parameters, lse)), (64, 104));
        assert_eq!((offset_of!(Parameters, bias), offset_of!(Parameters, counter)), (168, 224));
        assert_eq!((offset_of!(Parameters, dq), offset_of!(Parameters, d_v)), (272, 336));
        assert_eq!((offset_of!(Parameters, delta), offset_of!(Parameters, d_sinks)), (368, 440));
    }
}
