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
// Generated from qkv's table of opcodes (qkv::engine::mask_constants).
#define OP_ALL 0 // every pair
#define OP_BAND 1 // p − x ≤ j ≤ p + y
#define OP_LENGTHS 2 // j is below the length of the sequence
#define OP_SEGMENTS 3 // the same segment
#define OP_BITS 4 // the bit of the pair
#define OP_RESIDUE 5 // (p − j) mod x = 0
#define OP_SAME_BLOCK 6 // ⌊p / x⌋ = ⌊j / x⌋
#define OP_SUMMARY 7 // j mod x ≥ x − y
#define OP_KEY_IN 8 // j is one of `count` positions
#define OP_QUERY_IN 9 // p is one of `count` positions
#define OP_BIGBIRD 10 // blocks of x: a window of y blocks each way, `size` global blocks, drawn blocks
#define OP_BLOCKS 11 // the bit of (i / x, j / x) in a table of `count` columns
#define OP_BUCKETS 12 // the same hash bucket in any of `size` rounds
#define OP_AND 13 // both of the two on top
#define OP_OR 14 // either of the two on top
#define OP_NOT 15 // not the one on top
#define MAX_MASK_STEPS 32
#define MAX_BIGBIRD_DRAWN 64
#define EMPTY 0
#define PARTIAL 1
#define FULL 2
struct Tensor {
    T* data;
    i64 batch, head, row, col;
};
static_assert(sizeof(Tensor) == 40, "size of Tensor");
static_assert(OFFSET_OF(Tensor, data) == 0, "data");
static_assert(OFFSET_OF(Tensor, batch) == 8, "batch");
static_assert(OFFSET_OF(Tensor, head) == 16, "head");
static_assert(OFFSET_OF(Tensor, row) == 24, "row");
static_assert(OFFSET_OF(Tensor, col) == 32, "col");
struct MaskOp {
    int code;
    int size;
    i64 x;
    i64 y;
    const void* data;
    i64 count;
};
static_assert(sizeof(MaskOp) == 40, "size of MaskOp");
static_assert(OFFSET_OF(MaskOp, code) == 0, "code");
static_assert(OFFSET_OF(MaskOp, size) == 4, "size");
static_assert(OFFSET_OF(MaskOp, x) == 8, "x");
static_assert(OFFSET_OF(MaskOp, y) == 16, "y");
static_assert(OFFSET_OF(MaskOp, data) == 24, "data");
static_assert(OFFSET_OF(MaskOp, count) == 32, "count");
struct GeneralParams {
    Tensor q; // [B, H, N, D]
    Tensor k; // [B, Hk, M, D]
    Tensor v; // [B, Hk, M, DV]
    Tensor out; // [B, H, N, DV]
    Tensor d_out;
    Tensor d_q;
    Tensor d_k;
    Tensor d_v;
    Tensor bias; // broadcast to [B, H, N, M]
    Tensor d_bias;
    T* learned_scale; // [1 or H]
    T* table; // the relative table, [1 or H, 2·reach + 1]
    T* sinks; // [H]
    T* d_learned_scale;
    T* d_table;
    T* d_sinks;
    const float* alibi_slopes; // [H]
    const i64* positions; // [B, N]
    const int* lengths; // [B]
    const int* segments_q; // [B, N]
    const int* segments_k; // [B, M]
    const u8* bits; // broadcast to [B, H, N, M] by the strides below
    const int* buckets_q; // [B, H, N, rounds]
    const int* buckets_k; // [B, Hk, M, rounds]
    int* extents_q; // smallest and largest segment of each query tile, [B, tiles, 2]
    int* extents_k; // the same for each key tile
    float* lse; // [B, H, N]
    float* entropy; // [B, H, N]
    const float* d_lse; // [B, H, N]
    const float* d_entropy; // [B, H, N]
    float* delta; // row sums of d_out ∘ out, less the gradients of lse and entropy, [B, H, N]
    float* scale_rows; // each row's share of the gradient of the learned scale, [B, H, N]
    float* sink_rows; // each row's share of the gradient of the sinks, [B, H, N]
    float* split_out; // [splits, B, H, N, DV]
    float* split_lse; // [splits, B, H, N]
    float* split_entropy; // [splits, B, H, N]
    float* table_parts; // [table_part_count, H or 1, 2·reach + 1]
    float* result; // weights, pooled weights, tile verdicts or converted sinks
    float* pooled_columns; // weights pooled over rows, [height, cols]; or the tiles whose bits are to be filled
    const u32* recompute_any; // null, or whether any tile is marked for recomputation
    const u32* recompute_tiles; // null, or the marks, [B, H or Hk, tiles]
    i64 bits_batch, bits_head, bits_row, bits_col;
    i64 offset; // position of query 0
    i64 reach; // largest distance the relative table has an entry for
    i64 table_row;
    i64 table_col;
    u64 seed;
    int batch;
    int heads;
    int key_heads;
    int group; // query heads per key head
    int n;
    int m;
    int d;
    int dv;
    int learned_scale_count;
    int table_rows;
    float scale;
    float inverse_temperature;
    float cap; // soft-cap, or 0
    float dropout_scale;
    u32 dropout_threshold; // a weight whose 16 random bits are below this is dropped
    int splits;
    int split_tiles; // key tiles of a split
    int bias_batch, bias_heads, bias_rows, bias_cols; // the bias before broadcasting
    int at_batch;
    int at_head;
    int first_row;
    int rows;
    int first_col;
    int cols;
    int height;
    int width;
    int pool; // 0: the largest weight of a cell, 1: the mean
    int cell_rows; // weights covered by a cell of the pooled result; 0: divided evenly among cells
    int cell_cols;
    int table_part_count;
    int vectorized; // a bit for each of q, k, v, out, d_out, d_q, d_k, d_v: rows can be accessed 16 bytes at a time
    int band_left, band_right; // keys that a query sees before and after its position; only for short sequences
    int mask_ops;
    int plain_scores; // scores are scaled products: no cap, no bias
    MaskOp mask[MAX_MASK_STEPS];
};
static_assert(sizeof(GeneralParams) == 2152, "size of GeneralParams");
static_assert(OFFSET_OF(GeneralParams, q) == 0, "q");
static_assert(OFFSET_OF(GeneralParams, k) == 40, "k");
static_assert(OFFSET_OF(GeneralParams, v) == 80, "v");
static_assert(OFFSET_OF(GeneralParams, out) == 120, "out");
static_assert(OFFSET_OF(GeneralParams, d_out) == 160, "d_out");
static_assert(OFFSET_OF(GeneralParams, d_q) == 200, "d_q");
static_assert(OFFSET_OF(GeneralParams, d_k) == 240, "d_k");
static_assert(OFFSET_OF(GeneralParams, d_v) == 280, "d_v");
static_assert(OFFSET_OF(GeneralParams, bias) == 320, "bias");
static_assert(OFFSET_OF(GeneralParams, d_bias) == 360, "d_bias");
static_assert(OFFSET_OF(GeneralParams, learned_scale) == 400, "learned_scale");
static_assert(OFFSET_OF(GeneralParams, table) == 408, "table");
static_assert(OFFSET_OF(GeneralParams, sinks) == 416, "sinks");
static_assert(OFFSET_OF(GeneralParams, d_learned_scale) == 424, "d_learned_scale");
static_assert(OFFSET_OF(GeneralParams, d_table) == 432, "d_table");
static_assert(OFFSET_OF(GeneralParams, d_sinks) == 440, "d_sinks");
static_assert(OFFSET_OF(GeneralParams, alibi_slopes) == 448, "alibi_slopes");
static_assert(OFFSET_OF(GeneralParams, positions) == 456, "positions");
static_assert(OFFSET_OF(GeneralParams, lengths) == 464, "lengths");
static_assert(OFFSET_OF(GeneralParams, segments_q) == 472, "segments_q");
static_assert(OFFSET_OF(GeneralParams, segments_k) == 480, "segments_k");
static_assert(OFFSET_OF(GeneralParams, bits) == 488, "bits");
static_assert(OFFSET_OF(GeneralParams, buckets_q) == 496, "buckets_q");
static_assert(OFFSET_OF(GeneralParams, buckets_k) == 504, "buckets_k");
static_assert(OFFSET_OF(GeneralParams, extents_q) == 512, "extents_q");
static_assert(OFFSET_OF(GeneralParams, extents_k) == 520, "extents_k");
static_assert(OFFSET_OF(GeneralParams, lse) == 528, "lse");
static_assert(OFFSET_OF(GeneralParams, entropy) == 536, "entropy");
static_assert(OFFSET_OF(GeneralParams, d_lse) == 544, "d_lse");
static_assert(OFFSET_OF(GeneralParams, d_entropy) == 552, "d_entropy");
static_assert(OFFSET_OF(GeneralParams, delta) == 560, "delta");
static_assert(OFFSET_OF(GeneralParams, scale_rows) == 568, "scale_rows");
static_assert(OFFSET_OF(GeneralParams, sink_rows) == 576, "sink_rows");
static_assert(OFFSET_OF(GeneralParams, split_out) == 584, "split_out");
static_assert(OFFSET_OF(GeneralParams, split_lse) == 592, "split_lse");
static_assert(OFFSET_OF(GeneralParams, split_entropy) == 600, "split_entropy");
static_assert(OFFSET_OF(GeneralParams, table_parts) == 608, "table_parts");
static_assert(OFFSET_OF(GeneralParams, result) == 616, "result");
static_assert(OFFSET_OF(GeneralParams, pooled_columns) == 624, "pooled_columns");
static_assert(OFFSET_OF(GeneralParams, recompute_any) == 632, "recompute_any");
static_assert(OFFSET_OF(GeneralParams, recompute_tiles) == 640, "recompute_tiles");
static_assert(OFFSET_OF(GeneralParams, bits_batch) == 648, "bits_batch");
static_assert(OFFSET_OF(GeneralParams, bits_head) == 656, "bits_head");
static_assert(OFFSET_OF(GeneralParams, bits_row) == 664, "bits_row");
static_assert(OFFSET_OF(GeneralParams, bits_col) == 672, "bits_col");
static_assert(OFFSET_OF(GeneralParams, offset) == 680, "offset");
static_assert(OFFSET_OF(GeneralParams, reach) == 688, "reach");
static_assert(OFFSET_OF(GeneralParams, table_row) == 696, "table_row");
static_assert(OFFSET_OF(GeneralParams, table_col) == 704, "table_col");
static_assert(OFFSET_OF(GeneralParams, seed) == 712, "seed");
static_assert(OFFSET_OF(GeneralParams, batch) == 720, "batch");
static_assert(OFFSET_OF(GeneralParams, heads) == 724, "heads");
static_assert(OFFSET_OF(GeneralParams, key_heads) == 728, "key_heads");
static_assert(OFFSET_OF(GeneralParams, group) == 732, "group");
static_assert(OFFSET_OF(GeneralParams, n) == 736, "n");
static_assert(OFFSET_OF(GeneralParams, m) == 740, "m");
static_assert(OFFSET_OF(GeneralParams, d) == 744, "d");
static_assert(OFFSET_OF(GeneralParams, dv) == 748, "dv");
static_assert(OFFSET_OF(GeneralParams, learned_scale_count) == 752, "learned_scale_count");
static_assert(OFFSET_OF(GeneralParams, table_rows) == 756, "table_rows");
static_assert(OFFSET_OF(GeneralParams, scale) == 760, "scale");
static_assert(OFFSET_OF(GeneralParams, inverse_temperature) == 764, "inverse_temperature");
static_assert(OFFSET_OF(GeneralParams, cap) == 768, "cap");
static_assert(OFFSET_OF(GeneralParams, dropout_scale) == 772, "dropout_scale");
static_assert(OFFSET_OF(GeneralParams, dropout_threshold) == 776, "dropout_threshold");
static_assert(OFFSET_OF(GeneralParams, splits) == 780, "splits");
static_assert(OFFSET_OF(GeneralParams, split_tiles) == 784, "split_tiles");
static_assert(OFFSET_OF(GeneralParams, bias_batch) == 788, "bias_batch");
static_assert(OFFSET_OF(GeneralParams, bias_heads) == 792, "bias_heads");
static_assert(OFFSET_OF(GeneralParams, bias_rows) == 796, "bias_rows");
static_assert(OFFSET_OF(GeneralParams, bias_cols) == 800, "bias_cols");
static_assert(OFFSET_OF(GeneralParams, at_batch) == 804, "at_batch");
static_assert(OFFSET_OF(GeneralParams, at_head) == 808, "at_head");
static_assert(OFFSET_OF(GeneralParams, first_row) == 812, "first_row");
static_assert(OFFSET_OF(GeneralParams, rows) == 816, "rows");
static_assert(OFFSET_OF(GeneralParams, first_col) == 820, "first_col");
static_assert(OFFSET_OF(GeneralParams, cols) == 824, "cols");
static_assert(OFFSET_OF(GeneralParams, height) == 828, "height");
static_assert(OFFSET_OF(GeneralParams, width) == 832, "width");
static_assert(OFFSET_OF(GeneralParams, pool) == 836, "pool");
static_assert(OFFSET_OF(GeneralParams, cell_rows) == 840, "cell_rows");
static_assert(OFFSET_OF(GeneralParams, cell_cols) == 844, "cell_cols");
static_assert(OFFSET_OF(GeneralParams, table_part_count) == 848, "table_part_count");
static_assert(OFFSET_OF(GeneralParams, vectorized) == 852, "vectorized");
static_assert(OFFSET_OF(GeneralParams, band_left) == 856, "band_left");
static_assert(OFFSET_OF(GeneralParams, band_right) == 860, "band_right");
static_assert(OFFSET_OF(GeneralParams, mask_ops) == 864, "mask_ops");
static_assert(OFFSET_OF(GeneralParams, plain_scores) == 868, "plain_scores");
static_assert(OFFSET_OF(GeneralParams, mask) == 872, "mask");
