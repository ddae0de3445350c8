// What a launch is about: the parameter block that every Hopper kernel takes, the tile sizes, and which pairs of query and
// key a tile keeps. The layout of `Problem` is the border to the host (INTERFACE.md): 8-byte fields at multiples of 8.
#pragma once
#include "tile.cuh"

#ifndef HEAD_DIM  // 64, 128 or 256: the width in shared memory, of which d and dv are used
#define HEAD_DIM 128
#endif
#ifndef BAND  // keys p − left .. p + right: causal and windows
#define BAND 0
#endif
#ifndef LENGTHS  // keys before lengths[b]
#define LENGTHS 0
#endif
#ifndef SEGMENTS  // query and key of one segment
#define SEGMENTS 0
#endif
#ifndef PLAN  // tiles from a list, some of them by bits
#define PLAN 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef BIAS  // 1: of elements, 2: of f32
#define BIAS 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif
// Scores are more than a scaled product.
#define SHAPED (SOFTCAP || ALIBI || BIAS)

struct Problem {
    int batch, heads_q, heads_k, n, m, d, dv, offset;  // 0
    int left, right, section, ordered;                 // 32
    float scale, softcap, dropout_scale;               // 48
    u32 dropout_threshold;                             // 60
    u64 seed;                                          // 64
    u16* out;                                          // 72
    i64 out_b, out_h, out_i;                           // 80
    float* lse;                                        // 104  [batch, heads_q, n]
    const int* lengths;                                // 112  [batch]
    const int *segments_q, *segments_k;                // 120  [batch, n], [batch, m]
    const uint2* plan_rows;                            // 136
    const uint4* plan_tiles;                           // 144
    const u32* plan_bits;                              // 152
    int plan_b, plan_h;                                // 160  rows of the plan from one sequence, head to the next
    const void* bias;                                  // 168
    i64 bias_b, bias_h, bias_i, bias_j;                // 176
    const float *alibi, *sinks;                        // 208  [heads_q]
    u32* counter;                                      // 224  two words, zero before the first launch
    // Backward only.
    const u16* d_out;                                  // 232
    i64 d_out_b, d_out_h, d_out_i;                     // 240
    const float* d_lse;                                // 264  [batch, heads_q, n] or null
    u16* dq;                                           // 272
    i64 dq_b, dq_h, dq_i;                              // 280
    u16* dk;                                           // 304
    i64 dk_b, dk_h, dk_j;                              // 312
    u16* dv_out;                                       // 336
    i64 dv_b, dv_h, dv_j;                              // 344
    float *delta, *lse2;                               // 368  [batch · heads_q, padded n]
    float* dq_sum;                                     // 384  [batch · heads_q, query tiles, tile · HEAD_DIM]
    float* grain;                                      // 392  [batch · heads_q, padded n]
    float* d_bias;                                     // 400
    i64 d_bias_b, d_bias_h, d_bias_i, d_bias_j;        // 408
    float* d_sinks;                                    // 440  [heads_q]
    float2* limits;                                    // 448  [batch · heads_k, key tiles of 128]
    const u16* k;                                      // 456
    i64 k_b, k_h, k_j;                                 // 464
    const u16* v;                                      // 488
    i64 v_b, v_h, v_j;                                 // 496
};                                                     // 520
static_assert(sizeof(Problem) == 520, "the host counts on it");

// Rows of the statistics of the backward pass are padded to this.
constexpr int STATISTICS_PAD = 128;

INLINE int div_up(int a, int b) { return (a + b - 1) / b; }

// Which work a persistent block takes: `index` counts (sequence · head) × tiles, `section` heads at a time, the tiles of a
// section one after the other with its heads inside, so that what a section reads stays in the cache.
struct Work {
    int tile, head, batch;
    INLINE Work() {}
    INLINE Work(int index, int tiles, int heads, int batches, int section, bool last_first) {
        int of_section = section * tiles, at = index / of_section, rest = index - at * of_section;
        int inside = min(section, heads * batches - at * section);
        tile = rest / inside;
        int both = at * section + rest - tile * inside;
        if (last_first) tile = tiles - 1 - tile;
        batch = both / heads, head = both - batch * heads;
    }
};

// The keys that the rows [first, last] of a sequence's queries may see, before plans and segments.
struct Keys {
    int end;              // keys of the sequence
    int low, high;        // seen by some row: [low, high)
    int all_low, all_high;  // seen by every row
    INLINE Keys(const Problem& p, int batch, int first, int last) {
        end = p.m;
#if LENGTHS
        end = min(end, p.lengths[batch]);
#endif
        low = 0, high = end, all_low = 0, all_high = end;
#if BAND
        low = max(0, first + p.offset - p.left), high = min(end, last + p.offset + p.right + 1);
        all_low = max(0, last + p.offset - p.left), all_high = min(end, first + p.offset + p.right + 1);
#endif
    }
};

// Tiles of the plan that one row of tiles keeps.
struct PlanRow {
    int from, count;
    INLINE PlanRow(const Problem& p, int batch, int head, int tile) {
        uint2 row = p.plan_rows[(i64)batch * p.plan_b + (i64)head * p.plan_h + tile];
        from = row.x, count = row.y;
    }
};
// x: the tile; bit 31 set where it is not kept whole. y: which tile of the bits, or NO_BITS. z, w: free.
constexpr u32 PARTIAL = 1u << 31, NO_BITS = ~0u;

// Scores as they enter the softmax, in units of log2, from raw products: scale, cap, bias.
struct Shape {
    float scale, cap, slope;
    const u8* bias;
    i64 bias_i, bias_j;
    int offset;
    INLINE Shape(const Problem& p, int batch, int head) : scale(p.scale), cap(p.softcap), slope(0), bias(nullptr), offset(p.offset) {
#if ALIBI
        slope = p.alibi[head];
#endif
#if BIAS
        constexpr int SIZE = BIAS == 1 ? 2 : 4;
        bias = (const u8*)p.bias + (batch * p.bias_b + head * p.bias_h) * SIZE, bias_i = p.bias_i * SIZE, bias_j = p.bias_j * SIZE;
#endif
    }
    // `inside`: i and j are of the sequence. `slope_of_cap` gets d(capped) / d(product · scale).
    INLINE float operator()(float x, int i, int j, bool inside, float* slope_of_cap = nullptr) const {
        x *= scale;
#if SOFTCAP
        float t = tanh_exact(x / cap);
        x = cap * t;
        if (slope_of_cap) *slope_of_cap = 1.f - t * t;
#endif
#if ALIBI
        x -= slope * fabsf((float)(i + offset - j));
#endif
#if BIAS == 1
        if (inside) x += widen(*(const u16*)(bias + i * bias_i + j * bias_j));
#elif BIAS == 2
        if (inside) x += *(const float*)(bias + i * bias_i + j * bias_j);
#endif
        return x * LOG2E;
    }
};

#if PLAN && SEGMENTS
// The lowest and the highest segment of some positions.
INLINE int2 segment_extent(const int* segments, int from, int to) {
    int2 x = make_int2(0x7fffffff, -0x7fffffff - 1);
    for (int i = from; i < to; i++) x.x = min(x.x, segments[i]), x.y = max(x.y, segments[i]);
    return x;
}
// A row of the plan of packed sequences, by one block of 128 threads: the tiles of M queries (of N keys where BY_KEYS) are the
// rows, blockIdx.x; those of the other side that share a segment with it, or may, are listed. A sequence is blockIdx.y.
template <int M, int N, bool BY_KEYS> INLINE void plan_segments(const Problem& p) {
    __shared__ int ends[4];
    int batch = blockIdx.y, tile = blockIdx.x, row = batch * gridDim.x + tile, thread = threadIdx.x;
    int others = BY_KEYS ? div_up(p.n, M) : div_up(p.m, N), count = 0;
    const int *of_q = p.segments_q + (i64)batch * p.n, *of_k = p.segments_k + (i64)batch * p.m;
    uint4* to = (uint4*)p.plan_tiles + (i64)row * others;
    int2 mine = BY_KEYS ? segment_extent(of_k, tile * N, min(tile * N + N, p.m)) : segment_extent(of_q, tile * M, min(tile * M + M, p.n));
    for (int base = 0; base < others; base += 128) {
        int other = base + thread;
        bool kept = other < others, whole = false;
        if (kept) {
            int q = (BY_KEYS ? other : tile) * M, k = (BY_KEYS ? tile : other) * N;
            Keys keys(p, batch, q, min(q + M, p.n) - 1);
            int2 its = BY_KEYS ? segment_extent(of_q, q, min(q + M, p.n)) : segment_extent(of_k, k, min(k + N, p.m));
            kept = k < keys.high && k + N > keys.low && max(mine.x, its.x) <= min(mine.y, its.y);
            whole = k >= keys.all_low && k + N <= keys.all_high && mine.x == mine.y && its.x == its.y;
        }
        u32 votes = __ballot_sync(~0u, kept);
        __syncthreads();
        if ((thread & 31) == 0) ends[thread / 32] = __popc(votes);
        __syncthreads();
        int at = count + __popc(votes & ((1u << (thread & 31)) - 1));
        for (int w = 0; w < 4; w++) at += w < thread / 32 ? ends[w] : 0, count += ends[w];
        if (kept) to[at] = make_uint4(other | (whole ? 0 : PARTIAL), NO_BITS, 0, 0);
    }
    if (thread == 0) ((uint2*)p.plan_rows)[row] = make_uint2(row * others, count);
}
#endif
