//! The parameter block of the general kernels: one struct for all of them, passed by value. Letters: `B` sequences, `H`
//! query heads, `Hk` key heads, `N` queries, `M` keys, `D` and `DV` widths. Strides count elements; 0 broadcasts.

use crate::error::{Error, Result};
use crate::kernel_abi::parameter_block;
use crate::memory::Strided;
use qkv::engine::{CompiledMask, MAX_STEPS, MaskProgram, Step};

parameter_block! {
    /// A tensor as a kernel reads it.
    struct Tensor {
        data: u64 = "T*" ["data"];
        strides: [i64; 4] = "i64" ["batch", "head", "row", "col"];
    }
}

impl From<Strided> for Tensor {
    fn from(tensor: Strided) -> Tensor {
        Tensor { data: tensor.ptr, strides: tensor.strides }
    }
}

parameter_block! {
    /// One step of a mask program, in postfix order: `qkv::engine::Step` with an address. The opcode determines the
    /// meaning of `size`, `x`, `y`, `data` and `count`.
    struct MaskOp {
        code: i32 = "int" ["code"];
        size: i32 = "int" ["size"];
        x: i64 = "i64" ["x"];
        y: i64 = "i64" ["y"];
        data: u64 = "const void*" ["data"];
        count: i64 = "i64" ["count"];
    }
}

impl From<Step> for MaskOp {
    fn from(Step { code, size, x, y, data, count }: Step) -> MaskOp {
        MaskOp { code, size, x, y, data, count }
    }
}

/// The program of a mask, for the general kernels.
pub(crate) fn mask_program(mask: &CompiledMask) -> Result<MaskProgram> {
    mask.program().map_err(|error| Error::cpu_only(format!("this mask ({error})")))
}

parameter_block! {
    /// The parameters of a launch.
    struct GeneralParams {
        /// [B, H, N, D]
        q: Tensor = "Tensor" ["q"];
        /// [B, Hk, M, D]
        k: Tensor = "Tensor" ["k"];
        /// [B, Hk, M, DV]
        v: Tensor = "Tensor" ["v"];
        /// [B, H, N, DV]
        out: Tensor = "Tensor" ["out"];
        d_out: Tensor = "Tensor" ["d_out"];
        d_q: Tensor = "Tensor" ["d_q"];
        d_k: Tensor = "Tensor" ["d_k"];
        d_v: Tensor = "Tensor" ["d_v"];
        /// broadcast to [B, H, N, M]
        bias: Tensor = "Tensor" ["bias"];
        d_bias: Tensor = "Tensor" ["d_bias"];
        /// [1 or H]
        learned_scale: u64 = "T*" ["learned_scale"];
        /// the relative table, [1 or H, 2·reach + 1]
        table: u64 = "T*" ["table"];
        /// [H]
        sinks: u64 = "T*" ["sinks"];
        d_learned_scale: u64 = "T*" ["d_learned_scale"];
        d_table: u64 = "T*" ["d_table"];
        d_sinks: u64 = "T*" ["d_sinks"];
        /// [H]
        alibi_slopes: u64 = "const float*" ["alibi_slopes"];
        /// [B, N]
        positions: u64 = "const i64*" ["positions"];
        /// [B]
        lengths: u64 = "const int*" ["lengths"];
        /// [B, N]
        segments_q: u64 = "const int*" ["segments_q"];
        /// [B, M]
        segments_k: u64 = "const int*" ["segments_k"];
        /// broadcast to [B, H, N, M] by the strides below
        bits: u64 = "const u8*" ["bits"];
        /// [B, H, N, rounds]
        buckets_q: u64 = "const int*" ["buckets_q"];
        /// [B, Hk, M, rounds]
        buckets_k: u64 = "const int*" ["buckets_k"];
        /// smallest and largest segment of each query tile, [B, tiles, 2]
        extents_q: u64 = "int*" ["extents_q"];
        /// the same for each key tile
        extents_k: u64 = "int*" ["extents_k"];
        /// [B, H, N]
        lse: u64 = "float*" ["lse"];
        /// [B, H, N]
        entropy: u64 = "float*" ["entropy"];
        /// [B, H, N]
        d_lse: u64 = "const float*" ["d_lse"];
        /// [B, H, N]
        d_entropy: u64 = "const float*" ["d_entropy"];
        /// row sums of d_out ∘ out, less the gradients of lse and entropy, [B, H, N]
        delta: u64 = "float*" ["delta"];
        /// each row's share of the gradient of the learned scale, [B, H, N]
        scale_rows: u64 = "float*" ["scale_rows"];
        /// each row's share of the gradient of the sinks, [B, H, N]
        sink_rows: u64 = "float*" ["sink_rows"];
        /// [splits, B, H, N, DV]
        split_out: u64 = "float*" ["split_out"];
        /// [splits, B, H, N]
        split_lse: u64 = "float*" ["split_lse"];
        /// [splits, B, H, N]
        split_entropy: u64 = "float*" ["split_entropy"];
        /// [table_part_count, H or 1, 2·reach + 1]
        table_parts: u64 = "float*" ["table_parts"];
        /// weights, pooled weights, tile verdicts or converted sinks
        result: u64 = "float*" ["result"];
        /// weights pooled over rows, [height, cols]; or the tiles whose bits are to be filled
        pooled_columns: u64 = "float*" ["pooled_columns"];
        /// null, or whether any tile is marked for recomputation
        recompute_any: u64 = "const u32*" ["recompute_any"];
        /// null, or the marks, [B, H or Hk, tiles]
        recompute_tiles: u64 = "const u32*" ["recompute_tiles"];
        bits_strides: [i64; 4] = "i64" ["bits_batch", "bits_head", "bits_row", "bits_col"];
        /// position of query 0
        offset: i64 = "i64" ["offset"];
        /// largest distance the relative table has an entry for
        reach: i64 = "i64" ["reach"];
        table_row: i64 = "i64" ["table_row"];
        table_col: i64 = "i64" ["table_col"];
        seed: u64 = "u64" ["seed"];
        batch: i32 = "int" ["batch"];
        heads: i32 = "int" ["heads"];
        key_heads: i32 = "int" ["key_heads"];
        /// query heads per key head
        group: i32 = "int" ["group"];
        n: i32 = "int" ["n"];
        m: i32 = "int" ["m"];
        d: i32 = "int" ["d"];
        dv: i32 = "int" ["dv"];
        learned_scale_count: i32 = "int" ["learned_scale_count"];
        table_rows: i32 = "int" ["table_rows"];
        scale: f32 = "float" ["scale"];
        inverse_temperature: f32 = "float" ["inverse_temperature"];
        /// soft-cap, or 0
        cap: f32 = "float" ["cap"];
        dropout_scale: f32 = "float" ["dropout_scale"];
        /// a weight whose 16 random bits are below this is dropped
        dropout_threshold: u32 = "u32" ["dropout_threshold"];
        splits: i32 = "int" ["splits"];
        /// key tiles of a split
        split_tiles: i32 = "int" ["split_tiles"];
        /// the bias before broadcasting
        bias_shape: [i32; 4] = "int" ["bias_batch", "bias_heads", "bias_rows", "bias_cols"];
        at_batch: i32 = "int" ["at_batch"];
        at_head: i32 = "int" ["at_head"];
        first_row: i32 = "int" ["first_row"];
        rows: i32 = "int" ["rows"];
        first_col: i32 = "int" ["first_col"];
        cols: i32 = "int" ["cols"];
        height: i32 = "int" ["height"];
        width: i32 = "int" ["width"];
        /// 0: the largest weight of a cell, 1: the mean
        pool: i32 = "int" ["pool"];
        /// weights covered by a cell of the pooled result; 0: divided evenly among cells
        cell_rows: i32 = "int" ["cell_rows"];
        cell_cols: i32 = "int" ["cell_cols"];
        table_part_count: i32 = "int" ["table_part_count"];
        /// a bit for each of q, k, v, out, d_out, d_q, d_k, d_v: rows can be accessed 16 bytes at a time
        vectorized: i32 = "int" ["vectorized"];
        /// keys that a query sees before and after its position; only for short sequences
        band: [i32; 2] = "int" ["band_left", "band_right"];
        mask_ops: i32 = "int" ["mask_ops"];
        /// scores are scaled products: no cap, no bias
        plain_scores: i32 = "int" ["plain_scores"];
        mask: [MaskOp; MAX_STEPS] = "MaskOp" ["mask[MAX_MASK_STEPS]"];
    }
}

impl GeneralParams {
    /// Sets the mask, with its data at this address.
    pub fn set_mask(&mut self, program: &MaskProgram, address: u64) {
        for (to, step) in self.mask.iter_mut().zip(program.steps_at(address)) {
            *to = step.into();
        }
        self.mask_ops = program.steps.len() as i32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv::{Mask, Place};
    use std::mem::offset_of;

    #[test]
    fn a_step_has_the_layout_of_its_operation() {
        assert_eq!(size_of::<Step>(), size_of::<MaskOp>());
        assert_eq!(
            [offset_of!(Step, code), offset_of!(Step, size), offset_of!(Step, x), offset_of!(Step, y)],
            [offset_of!(MaskOp, code), offset_of!(MaskOp, size), offset_of!(MaskOp, x), offset_of!(MaskOp, y)]
        );
        assert_eq!(
            [offset_of!(Step, data), offset_of!(Step, count)],
            [offset_of!(MaskOp, data), offset_of!(MaskOp, count)]
        );
    }

    #[test]
    fn a_mask_that_is_too_long_names_the_cpu() {
        let long = (0..20).fold(Mask::causal(), |mask, at| mask | Mask::window(at, 0));
        let refused = mask_program(&CompiledMask::new(&long, 1, 1, Place::Start)).unwrap_err();
        assert!(refused.to_string().contains("CPU"), "{refused}");
    }
}
