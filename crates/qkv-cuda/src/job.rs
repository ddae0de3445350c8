//! What a launch is told, laid out as `kernels/general/job.cuh` lays it out: field for field, in the same order.

use crate::memory::Strided;

/// A tensor, as a kernel sees it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Tensor {
    pub at: u64,
    pub strides: [i64; 4],
}

impl From<Strided> for Tensor {
    fn from(tensor: Strided) -> Tensor {
        Tensor { at: tensor.at, strides: tensor.strides }
    }
}

/// One step of a mask.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Op {
    pub code: i32,
    pub size: i32,
    pub x: i64,
    pub y: i64,
    pub data: u64,
    pub count: i64,
}

/// The most steps a mask can have.
pub(crate) const MOST_OPS: usize = 32;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Job {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub out: Tensor,
    pub d_out: Tensor,
    pub d_q: Tensor,
    pub d_k: Tensor,
    pub d_v: Tensor,
    pub bias: Tensor,
    pub d_bias: Tensor,
    pub learned: u64,
    pub table: u64,
    pub sinks: u64,
    pub d_learned: u64,
    pub d_table: u64,
    pub d_sinks: u64,
    pub slopes: u64,
    pub positions: u64,
    pub lengths: u64,
    pub segments_q: u64,
    pub segments_k: u64,
    pub bits: u64,
    pub buckets_q: u64,
    pub buckets_k: u64,
    pub extents_q: u64,
    pub extents_k: u64,
    pub lse: u64,
    pub entropy: u64,
    pub d_lse: u64,
    pub d_entropy: u64,
    pub row_terms: u64,
    pub scale_rows: u64,
    pub sink_rows: u64,
    pub piece_out: u64,
    pub piece_lse: u64,
    pub piece_entropy: u64,
    pub table_parts: u64,
    pub picture: u64,
    pub columns: u64,
    pub broken: u64,
    pub broken_tiles: u64,
    pub bits_strides: [i64; 4],
    pub offset: i64,
    pub reach: i64,
    pub table_row: i64,
    pub table_col: i64,
    pub seed: u64,
    pub batch: i32,
    pub heads: i32,
    pub key_heads: i32,
    pub group: i32,
    pub n: i32,
    pub m: i32,
    pub d: i32,
    pub dv: i32,
    pub learned_count: i32,
    pub table_rows: i32,
    pub scale: f32,
    pub inverse_temperature: f32,
    pub cap: f32,
    pub kept_scale: f32,
    pub threshold: u32,
    pub pieces: i32,
    pub piece_tiles: i32,
    pub bias_shape: [i32; 4],
    pub at_batch: i32,
    pub at_head: i32,
    pub first_row: i32,
    pub rows: i32,
    pub first_col: i32,
    pub cols: i32,
    pub height: i32,
    pub width: i32,
    pub pool: i32,
    pub parts: i32,
    pub vectors: i32,
    pub ops: i32,
    pub plain: i32,
    pub mask: [Op; MOST_OPS],
}

impl Default for Job {
    fn default() -> Job {
        // SAFETY: every field is a number, for which zeros are one.
        unsafe { std::mem::zeroed() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn a_job_fits_into_the_parameters_of_a_launch() {
        assert!(size_of::<Job>() <= 4096);
    }

    #[test]
    fn fields_lie_where_the_kernels_look_for_them() {
        // Ten tensors of five words, 31 pointers, nine words, then numbers of four bytes.
        assert_eq!(offset_of!(Job, learned), 10 * 40);
        assert_eq!(offset_of!(Job, bits_strides), 400 + 31 * 8);
        assert_eq!(offset_of!(Job, batch), 648 + 9 * 8);
        assert_eq!(offset_of!(Job, mask), 720 + 4 * 34);
        assert_eq!((size_of::<Op>(), size_of::<Job>()), (40, 856 + 32 * 40));
    }
}
