// Generated from src/kernel_abi.rs and the parameter blocks in src: do not edit.
#ifdef __CUDACC_RTC__
#define OFFSET_OF(type, member) __INTADDR__(&((type*)0)->member)
#else
#define OFFSET_OF(type, member) __builtin_offsetof(type, member)
#endif
// Keys per split when the keys of a few queries are divided among blocks (Flash-Decoding). It must not depend on
// the device or the batch, because it determines the order in which a row is summed.
#define SPLIT_KEYS 512
// Rows of the tiles that Hopper's kernels mark for recomputation by the general kernels.
#define RECOMPUTE_ROWS 64
// Per-row statistics of the backward pass are padded to this many rows.
#define ROW_STATS_PAD 128
// Bits of `tma_stores`: which results TMA can write.
#define STORE_OUT 1u
#define STORE_DK 2u
#define STORE_DV 4u
#define STORE_DQ 8u
// Tile list entry, first word: the tile is partially masked; the second word is the index of its bits.
#define PARTIAL_TILE 2147483648u
// Tile list entry, first word, shifted by the warpgroup: its 64 rows have no visible pair in the partial tile.
#define EMPTY_GROUP 268435456u
// Tile list entry, second word: the tile is full and has no bits.
#define NO_BITS 4294967295u
// Tile list row, fourth word: bit positions of a split's index and of its row's number of splits.
#define SPLIT_INDEX_SHIFT 16u
#define SPLIT_COUNT_SHIFT 24u
struct HopperParams {
    int batch;
    int heads_q;
    int heads_k;
    int n;
    int m;
    int d;
    int dv;
    int offset; // position of query 0
    int left; // the band: keys from position − left to position + right
    int right;
    int heads_per_section; // (sequence, head) pairs scheduled side by side, so that their keys stay in L2
    int lpt_order; // longest first: see WorkTile in params.cuh
    float scale;
    float softcap;
    float dropout_scale;
    u32 dropout_threshold;
    u64 seed;
    u16* out;
    i64 out_b, out_h, out_i;
    float* lse; // [batch, heads_q, n]
    const int* lengths; // [batch]
    const int* segments_q; // [batch, n]
    const int* segments_k; // [batch, m]
    const uint4* list_rows; // rows of the tile list: first entry, count, tile, split
    const uint4* list_entries; // entries of the tile list: tile with flags, index of bits, 0, 0
    const u32* list_bits; // tile list: bits of the partial tiles
    int list_stride_b; // rows of the tile list from one sequence to the next, 0 if all share them
    int list_stride_h;
    const void* bias;
    i64 bias_b, bias_h, bias_i, bias_j;
    const float* alibi; // ALiBi slopes, [heads_q]
    const float* sinks; // [heads_q]
    u32* scheduler_counter; // two words, zero before and after the launch
    const u16* d_out;
    i64 d_out_b, d_out_h, d_out_i;
    const float* d_lse; // [batch, heads_q, n] or null
    u16* dq;
    i64 dq_b, dq_h, dq_i;
    u16* dk;
    i64 dk_b, dk_h, dk_j;
    u16* dv_out;
    i64 dv_b, dv_h, dv_j;
    float* delta; // [batch · heads_q, padded n]
    float* lse_log2; // lse in units of log2, [batch · heads_q, padded n]
    float* dq_sum; // dq in fixed point, [batch · heads_q, query tiles, kBlockM · HEAD_DIM]
    float* dq_scale; // fixed-point scale of each row of dq, [batch · heads_q, padded n]
    float* d_bias;
    i64 d_bias_b, d_bias_h, d_bias_i, d_bias_j;
    float* d_sinks; // [heads_q]
    float2* absmax; // largest |k| and |v|, [batch · heads_k, blocks of 128 keys]
    const u16* k;
    i64 k_b, k_h, k_j;
    const u16* v;
    i64 v_b, v_h, v_j;
    u32* recompute_any; // [1]: whether any tile is marked for recomputation
    u32* recompute_q; // [batch · heads_q, tiles of RECOMPUTE_ROWS queries]
    u32* recompute_k; // [batch · heads_k, tiles of RECOMPUTE_ROWS keys]
    int2* ranges; // keys visible to each query, [batch, n]; backward: queries that see each key, [batch, m]
    int4* range_extents; // bounds of 64 ranges, [batch, tiles of 64]
    int* tile_order; // all tiles, longest first, [batch · tiles]
    u32* tickets; // claims on tiles of dq_sum, [batch · heads_q, query tiles]
    u32* progress; // progress counters, [3 · batch · heads_k + 6]: backward_producer.cuh
    u32 tma_stores; // STORE_* bits: results with a valid tensor map
    int list_row_count; // number of rows in the tile list, per sequence and head
    float* split_results; // partial results of split rows, [slots, batch · heads, …]
    u32* split_arrivals; // arrivals at a split row, counted at its first slot, [slots, batch · heads, warps]
    int prepared_heads; // key heads preprocessed before the main kernel; the others are preprocessed beside it
    int padding;
};
static_assert(sizeof(HopperParams) == 616, "size of HopperParams");
static_assert(OFFSET_OF(HopperParams, batch) == 0, "batch");
static_assert(OFFSET_OF(HopperParams, heads_q) == 4, "heads_q");
static_assert(OFFSET_OF(HopperParams, heads_k) == 8, "heads_k");
static_assert(OFFSET_OF(HopperParams, n) == 12, "n");
static_assert(OFFSET_OF(HopperParams, m) == 16, "m");
static_assert(OFFSET_OF(HopperParams, d) == 20, "d");
static_assert(OFFSET_OF(HopperParams, dv) == 24, "dv");
static_assert(OFFSET_OF(HopperParams, offset) == 28, "offset");
static_assert(OFFSET_OF(HopperParams, left) == 32, "left");
static_assert(OFFSET_OF(HopperParams, right) == 36, "right");
static_assert(OFFSET_OF(HopperParams, heads_per_section) == 40, "heads_per_section");
static_assert(OFFSET_OF(HopperParams, lpt_order) == 44, "lpt_order");
static_assert(OFFSET_OF(HopperParams, scale) == 48, "scale");
static_assert(OFFSET_OF(HopperParams, softcap) == 52, "softcap");
static_assert(OFFSET_OF(HopperParams, dropout_scale) == 56, "dropout_scale");
static_assert(OFFSET_OF(HopperParams, dropout_threshold) == 60, "dropout_threshold");
static_assert(OFFSET_OF(HopperParams, seed) == 64, "seed");
static_assert(OFFSET_OF(HopperParams, out) == 72, "out");
static_assert(OFFSET_OF(HopperParams, out_b) == 80, "out_b");
static_assert(OFFSET_OF(HopperParams, out_h) == 88, "out_h");
static_assert(OFFSET_OF(HopperParams, out_i) == 96, "out_i");
static_assert(OFFSET_OF(HopperParams, lse) == 104, "lse");
static_assert(OFFSET_OF(HopperParams, lengths) == 112, "lengths");
static_assert(OFFSET_OF(HopperParams, segments_q) == 120, "segments_q");
static_assert(OFFSET_OF(HopperParams, segments_k) == 128, "segments_k");
static_assert(OFFSET_OF(HopperParams, list_rows) == 136, "list_rows");
static_assert(OFFSET_OF(HopperParams, list_entries) == 144, "list_entries");
static_assert(OFFSET_OF(HopperParams, list_bits) == 152, "list_bits");
static_assert(OFFSET_OF(HopperParams, list_stride_b) == 160, "list_stride_b");
static_assert(OFFSET_OF(HopperParams, list_stride_h) == 164, "list_stride_h");
static_assert(OFFSET_OF(HopperParams, bias) == 168, "bias");
static_assert(OFFSET_OF(HopperParams, bias_b) == 176, "bias_b");
static_assert(OFFSET_OF(HopperParams, bias_h) == 184, "bias_h");
static_assert(OFFSET_OF(HopperParams, bias_i) == 192, "bias_i");
static_assert(OFFSET_OF(HopperParams, bias_j) == 200, "bias_j");
static_assert(OFFSET_OF(HopperParams, alibi) == 208, "alibi");
static_assert(OFFSET_OF(HopperParams, sinks) == 216, "sinks");
static_assert(OFFSET_OF(HopperParams, scheduler_counter) == 224, "scheduler_counter");
static_assert(OFFSET_OF(HopperParams, d_out) == 232, "d_out");
static_assert(OFFSET_OF(HopperParams, d_out_b) == 240, "d_out_b");
static_assert(OFFSET_OF(HopperParams, d_out_h) == 248, "d_out_h");
static_assert(OFFSET_OF(HopperParams, d_out_i) == 256, "d_out_i");
static_assert(OFFSET_OF(HopperParams, d_lse) == 264, "d_lse");
static_assert(OFFSET_OF(HopperParams, dq) == 272, "dq");
static_assert(OFFSET_OF(HopperParams, dq_b) == 280, "dq_b");
static_assert(OFFSET_OF(HopperParams, dq_h) == 288, "dq_h");
static_assert(OFFSET_OF(HopperParams, dq_i) == 296, "dq_i");
static_assert(OFFSET_OF(HopperParams, dk) == 304, "dk");
static_assert(OFFSET_OF(HopperParams, dk_b) == 312, "dk_b");
static_assert(OFFSET_OF(HopperParams, dk_h) == 320, "dk_h");
static_assert(OFFSET_OF(HopperParams, dk_j) == 328, "dk_j");
static_assert(OFFSET_OF(HopperParams, dv_out) == 336, "dv_out");
static_assert(OFFSET_OF(HopperParams, dv_b) == 344, "dv_b");
static_assert(OFFSET_OF(HopperParams, dv_h) == 352, "dv_h");
static_assert(OFFSET_OF(HopperParams, dv_j) == 360, "dv_j");
static_assert(OFFSET_OF(HopperParams, delta) == 368, "delta");
static_assert(OFFSET_OF(HopperParams, lse_log2) == 376, "lse_log2");
static_assert(OFFSET_OF(HopperParams, dq_sum) == 384, "dq_sum");
static_assert(OFFSET_OF(HopperParams, dq_scale) == 392, "dq_scale");
static_assert(OFFSET_OF(HopperParams, d_bias) == 400, "d_bias");
static_assert(OFFSET_OF(HopperParams, d_bias_b) == 408, "d_bias_b");
static_assert(OFFSET_OF(HopperParams, d_bias_h) == 416, "d_bias_h");
static_assert(OFFSET_OF(HopperParams, d_bias_i) == 424, "d_bias_i");
static_assert(OFFSET_OF(HopperParams, d_bias_j) == 432, "d_bias_j");
static_assert(OFFSET_OF(HopperParams, d_sinks) == 440, "d_sinks");
static_assert(OFFSET_OF(HopperParams, absmax) == 448, "absmax");
static_assert(OFFSET_OF(HopperParams, k) == 456, "k");
static_assert(OFFSET_OF(HopperParams, k_b) == 464, "k_b");
static_assert(OFFSET_OF(HopperParams, k_h) == 472, "k_h");
static_assert(OFFSET_OF(HopperParams, k_j) == 480, "k_j");
static_assert(OFFSET_OF(HopperParams, v) == 488, "v");
static_assert(OFFSET_OF(HopperParams, v_b) == 496, "v_b");
static_assert(OFFSET_OF(HopperParams, v_h) == 504, "v_h");
static_assert(OFFSET_OF(HopperParams, v_j) == 512, "v_j");
static_assert(OFFSET_OF(HopperParams, recompute_any) == 520, "recompute_any");
static_assert(OFFSET_OF(HopperParams, recompute_q) == 528, "recompute_q");
static_assert(OFFSET_OF(HopperParams, recompute_k) == 536, "recompute_k");
static_assert(OFFSET_OF(HopperParams, ranges) == 544, "ranges");
static_assert(OFFSET_OF(HopperParams, range_extents) == 552, "range_extents");
static_assert(OFFSET_OF(HopperParams, tile_order) == 560, "tile_order");
static_assert(OFFSET_OF(HopperParams, tickets) == 568, "tickets");
static_assert(OFFSET_OF(HopperParams, progress) == 576, "progress");
static_assert(OFFSET_OF(HopperParams, tma_stores) == 584, "tma_stores");
static_assert(OFFSET_OF(HopperParams, list_row_count) == 588, "list_row_count");
static_assert(OFFSET_OF(HopperParams, split_results) == 592, "split_results");
static_assert(OFFSET_OF(HopperParams, split_arrivals) == 600, "split_arrivals");
static_assert(OFFSET_OF(HopperParams, prepared_heads) == 608, "prepared_heads");
static_assert(OFFSET_OF(HopperParams, padding) == 612, "padding");
