// What a launch is told: one struct, the same for every general kernel, laid out as `job.rs` lays it out. Letters: B
// sequences, H query heads, N queries, M keys, D and DV widths. Strides count elements; 0 broadcasts.

struct Tensor {
    T* data;
    i64 batch, head, row, col;
};

// One step of a mask, in postfix order. What `x`, `y`, `data` and `count` mean depends on the code: see mask.cuh.
struct Op {
    int code;
    int size;
    i64 x, y;
    const void* data;
    i64 count;
};

#define MAX_MASK_OPS 32

struct GeneralParams {
    Tensor q, k, v, out, d_out, d_q, d_k, d_v, bias, d_bias; // [B, H or Hk, N or M, D or DV]; bias [B, H, N, M]
    T* learned_scale;                                        // the learned scale, [1 or H]
    T* table;                                                // the relative table, [1 or H, 2·reach + 1]
    T* sinks;                                                // [H]
    T* d_learned_scale;
    T* d_table;
    T* d_sinks;
    const float* alibi_slopes; // ALiBi's, [H]
    const i64* positions;      // [B, N]
    const int* lengths;        // [B]
    const int* segments_q;     // [B, N]
    const int* segments_k;     // [B, M]
    const u8* bits;            // any strides, below
    const int* buckets_q;      // [B, H, N, rounds]
    const int* buckets_k;      // [B, Hk, M, rounds]
    int* extents_q;            // the smallest and largest segment of each tile, [B, tiles, 2]
    int* extents_k;
    float* lse;     // [B, H, N]
    float* entropy; // [B, H, N]
    const float* d_lse;
    const float* d_entropy;
    float* delta;      // [B, H, N]: what backward subtracts from every gradient of a weight in a row
    float* scale_rows; // [B, H, N]: each row's part of the gradient of the learned scale
    float* sink_rows;  // [B, H, N]: each row's part of the gradient of the sinks
    float* split_out;  // [splits, B, H, N, DV]
    float* split_lse;  // [splits, B, H, N]
    float* split_entropy;
    float* table_parts; // [parts, H or 1, 2·reach + 1]
    float* result;      // weights or pictures of them
    float* pooled_columns;
    const u32* recompute_any;   // null, or whether there is anything to compute again
    const u32* recompute_tiles; // null, or which tiles: [B, H or Hk, tiles]
    i64 bits_batch, bits_head, bits_row, bits_col;
    i64 offset; // the place of query 0
    i64 reach;
    i64 table_row, table_col;
    u64 seed;
    int batch, heads, key_heads, group, n, m, d, dv;
    int learned_scale_count, table_rows;
    float scale, inverse_temperature, cap, dropout_scale;
    u32 dropout_threshold; // a weight whose 16 bits are below this is dropped
    int splits, split_tiles;
    int bias_batch, bias_heads, bias_rows, bias_cols; // the bias as it was given
    int at_batch, at_head, first_row, rows, first_col, cols, height, width, pool;
    int cell_rows, cell_cols; // weights that a cell of a picture covers; 0: the cells share them out
    int table_part_count;
    int vectorized; // bit t: tensor t of the list above can be read 16 bytes at a time
    int mask_ops;
    int plain_scores; // a score is a scaled product: no cap, no bias
    Op mask[MAX_MASK_OPS];
};
