//! The parameter block of Hopper's kernels, passed by value. `kernels/hopper/INTERFACE.md` lists what each kernel
//! reads; members of disabled features are not read.

use crate::kernel_abi::parameter_block;

parameter_block! {
    /// The parameters of a launch.
    struct HopperParams {
        batch: i32 = "int" ["batch"];
        heads_q: i32 = "int" ["heads_q"];
        heads_k: i32 = "int" ["heads_k"];
        n: i32 = "int" ["n"];
        m: i32 = "int" ["m"];
        d: i32 = "int" ["d"];
        dv: i32 = "int" ["dv"];
        /// position of query 0
        offset: i32 = "int" ["offset"];
        /// the band: keys from position − left to position + right
        left: i32 = "int" ["left"];
        right: i32 = "int" ["right"];
        /// (sequence, head) pairs scheduled side by side, so that their keys stay in L2
        heads_per_section: i32 = "int" ["heads_per_section"];
        /// longest first: see WorkTile in params.cuh
        lpt_order: i32 = "int" ["lpt_order"];
        scale: f32 = "float" ["scale"];
        softcap: f32 = "float" ["softcap"];
        dropout_scale: f32 = "float" ["dropout_scale"];
        dropout_threshold: u32 = "u32" ["dropout_threshold"];
        seed: u64 = "u64" ["seed"];
        out: u64 = "u16*" ["out"];
        out_strides: [i64; 3] = "i64" ["out_b", "out_h", "out_i"];
        /// [batch, heads_q, n]
        lse: u64 = "float*" ["lse"];
        /// [batch]
        lengths: u64 = "const int*" ["lengths"];
        /// [batch, n]
        segments_q: u64 = "const int*" ["segments_q"];
        /// [batch, m]
        segments_k: u64 = "const int*" ["segments_k"];
        /// rows of the tile list: first entry, count, tile, split
        list_rows: u64 = "const uint4*" ["list_rows"];
        /// entries of the tile list: tile with flags, index of bits, 0, 0
        list_entries: u64 = "const uint4*" ["list_entries"];
        /// tile list: bits of the partial tiles
        list_bits: u64 = "const u32*" ["list_bits"];
        /// rows of the tile list from one sequence to the next, 0 if all share them
        list_stride_b: i32 = "int" ["list_stride_b"];
        list_stride_h: i32 = "int" ["list_stride_h"];
        bias: u64 = "const void*" ["bias"];
        bias_strides: [i64; 4] = "i64" ["bias_b", "bias_h", "bias_i", "bias_j"];
        /// ALiBi slopes, [heads_q]
        alibi: u64 = "const float*" ["alibi"];
        /// [heads_q]
        sinks: u64 = "const float*" ["sinks"];
        /// two words, zero before and after the launch
        scheduler_counter: u64 = "u32*" ["scheduler_counter"];
        d_out: u64 = "const u16*" ["d_out"];
        d_out_strides: [i64; 3] = "i64" ["d_out_b", "d_out_h", "d_out_i"];
        /// [batch, heads_q, n] or null
        d_lse: u64 = "const float*" ["d_lse"];
        dq: u64 = "u16*" ["dq"];
        dq_strides: [i64; 3] = "i64" ["dq_b", "dq_h", "dq_i"];
        dk: u64 = "u16*" ["dk"];
        dk_strides: [i64; 3] = "i64" ["dk_b", "dk_h", "dk_j"];
        d_v: u64 = "u16*" ["dv_out"];
        d_v_strides: [i64; 3] = "i64" ["dv_b", "dv_h", "dv_j"];
        /// [batch · heads_q, padded n]
        delta: u64 = "float*" ["delta"];
        /// lse in units of log2, [batch · heads_q, padded n]
        lse_log2: u64 = "float*" ["lse_log2"];
        /// dq in fixed point, [batch · heads_q, query tiles, kBlockM · HEAD_DIM]
        dq_sum: u64 = "float*" ["dq_sum"];
        /// fixed-point scale of each row of dq, [batch · heads_q, padded n]
        dq_scale: u64 = "float*" ["dq_scale"];
        d_bias: u64 = "float*" ["d_bias"];
        d_bias_strides: [i64; 4] = "i64" ["d_bias_b", "d_bias_h", "d_bias_i", "d_bias_j"];
        /// [heads_q]
        d_sinks: u64 = "float*" ["d_sinks"];
        /// largest |k| and |v|, [batch · heads_k, blocks of 128 keys]
        absmax: u64 = "float2*" ["absmax"];
        k: u64 = "const u16*" ["k"];
        k_strides: [i64; 3] = "i64" ["k_b", "k_h", "k_j"];
        v: u64 = "const u16*" ["v"];
        v_strides: [i64; 3] = "i64" ["v_b", "v_h", "v_j"];
        /// [1]: whether any tile is marked for recomputation
        recompute_any: u64 = "u32*" ["recompute_any"];
        /// [batch · heads_q, tiles of RECOMPUTE_ROWS queries]
        recompute_q: u64 = "u32*" ["recompute_q"];
        /// [batch · heads_k, tiles of RECOMPUTE_ROWS keys]
        recompute_k: u64 = "u32*" ["recompute_k"];
        /// keys visible to each query, [batch, n]; backward: queries that see each key, [batch, m]
        ranges: u64 = "int2*" ["ranges"];
        /// bounds of 64 ranges, [batch, tiles of 64]
        range_extents: u64 = "int4*" ["range_extents"];
        /// all tiles, longest first, [batch · tiles]
        tile_order: u64 = "int*" ["tile_order"];
        /// claims on tiles of dq_sum, [batch · heads_q, query tiles]
        tickets: u64 = "u32*" ["tickets"];
        /// progress counters, [3 · batch · heads_k + 6]: backward_producer.cuh
        progress: u64 = "u32*" ["progress"];
        /// STORE_* bits: results with a valid tensor map
        tma_stores: u32 = "u32" ["tma_stores"];
        /// number of rows in the tile list, per sequence and head
        list_row_count: u32 = "int" ["list_row_count"];
        /// partial results of split rows, [slots, batch · heads, …]
        split_results: u64 = "float*" ["split_results"];
        /// arrivals at a split row, counted at its first slot, [slots, batch · heads, warps]
        split_arrivals: u64 = "u32*" ["split_arrivals"];
        /// key heads preprocessed before the main kernel; the others are preprocessed beside it
        prepared_heads: i32 = "int" ["prepared_heads"];
        padding: i32 = "int" ["padding"];
    }
}
