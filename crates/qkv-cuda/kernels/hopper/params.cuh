// Feature defines, the parameter block (generated/hopper.cuh), the tile scheduler's order, and which pairs of a tile
// are visible. INTERFACE.md describes what the host passes.
#pragma once
#include "ptx.cuh"

#ifndef HEAD_DIM // 64, 128 or 256: the width in shared memory, of which d and dv are used
#define HEAD_DIM 128
#endif
#ifndef BAND // keys from position − left to position + right: causal and windows
#define BAND 0
#endif
#ifndef LENGTHS // keys before lengths[b]
#define LENGTHS 0
#endif
#ifndef SEGMENTS // query and key of one segment; segments are runs, so a query has a range of keys
#define SEGMENTS 0
#endif
#ifndef TILE_LIST // tiles from a list, partial ones with bits; not with BAND or SEGMENTS
#define TILE_LIST 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef BIAS // 1: of elements, 2: of f32
#define BIAS 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif
// Scores are more than scaled products.
#define SCORE_MOD (SOFTCAP || ALIBI || BIAS)
// Some pairs may be masked.
#define MASKED (BAND || LENGTHS || SEGMENTS || TILE_LIST)

#include "generated/hopper.cuh"
static_assert(RECOMPUTE_ROWS == 64, "marks are for the 64 rows of a warpgroup");

// Tiles that the scheduler prepares in addition to the current one. With more, blocks would finish unevenly if tiles do
// not come longest first; with fewer, short rows would wait for the scheduler's loads.
constexpr int SCHEDULER_STAGES = SEGMENTS || TILE_LIST ? 2 : 1;

INLINE int div_up(int a, int b) { return (a + b - 1) / b; }
INLINE int padded_len(int n) { return div_up(n, ROW_STATS_PAD) * ROW_STATS_PAD; }

// The tile at index `index` of the schedule of persistent blocks. Sections of heads_per_section (sequence, head) pairs
// are scheduled tile by tile, heads innermost, so that their keys stay in L2. lpt_order (longest processing time
// first): with BAND, 1 takes the last tiles first; with TILE_LIST, that many leading rows, the long ones, are scheduled
// for all heads before everything else; with SEGMENTS, tiles come in tile_order, that many of its last entries after
// everything else.
struct WorkTile {
    int tile, head, batch;
#if TILE_LIST
    u32 split; // the row's split word, or 0
#endif
    INLINE WorkTile() {}
    INLINE WorkTile(const HopperParams& params, int index, int tiles, int heads, bool last_first) {
        int batches = params.batch, per_sequence = tiles, skipped = 0, section = params.heads_per_section;
        (void)per_sequence;
#if SEGMENTS
        // The last lpt_order entries, short tiles of all heads, come at the end, so that the blocks finish together.
        tiles = tiles * batches - params.lpt_order, batches = 1;
        bool end = index >= tiles * heads;
        if (end) index -= tiles * heads, skipped = tiles, tiles = params.lpt_order, section = heads;
#elif TILE_LIST
        int all = heads * batches, first = params.lpt_order * all;
        if (index < first) {
            tile = index / all, batch = (index - tile * all) / heads, head = index - tile * all - batch * heads;
            return;
        }
        index -= first, tiles -= params.lpt_order, skipped = params.lpt_order;
#endif
        int of_section = section * tiles, at = index / of_section, rest = index - at * of_section;
        int inside = min(section, heads * batches - at * section);
        tile = rest / inside;
        int both = at * section + rest - tile * inside;
        if (last_first) tile = tiles - 1 - tile;
        tile += skipped, batch = both / heads, head = both - batch * heads;
#if SEGMENTS
        int found = params.tile_order[tile];
        batch = found / per_sequence, tile = found - batch * per_sequence;
#endif
    }
};

#if SEGMENTS
// Bounds of 64 ranges: the lowest start and highest end of non-empty ones, then the highest start and lowest end of
// all.
struct RangeExtent {
    int low, high, all_low, all_high;
    INLINE RangeExtent() : low(0x7fffffff), high(0), all_low(0), all_high(0x7fffffff) {}
    // The bounds of at most `count` tiles of 64 rows from `tile` on.
    INLINE RangeExtent(const HopperParams& params, int batch, int tile, int count, int rows) : RangeExtent() {
        int tiles = div_up(rows, 64);
        for (int t = tile; t < min(tile + count, tiles); t++) {
            int4 x = params.range_extents[(i64)batch * tiles + t];
            low = min(low, x.x), high = max(high, x.y), all_low = max(all_low, x.z), all_high = min(all_high, x.w);
        }
    }
};
#endif

// The bits low … high − 1 of a word, clamped to it.
INLINE u32 bits_between(int low, int high) {
    u32 x, from = max(low, 0), count = max(high - max(low, 0), 0);
#ifdef EMULATED
    x = from > 31 ? 0 : u32((u64(1) << min(count, 32)) - 1) << from;
#else
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(x) : "r"(from), "r"(count));
#endif
    return x;
}

// A thread of a quad holds two columns of each 8 of a fragment row: column 8c + 2t + e is its (2c + e)-th. Returns how
// many of them come before a column, so that a range of columns is a run of bits; R2P turns bits into predicates seven
// at a time.
INLINE int columns_before(int column) {
    int from = column - fragment_column();
    return 2 * (from >> 3) + min(from & 7, 2);
}
// The bits of a thread's columns in a row of COLUMNS of a tile list: those of each thread of a quad are adjacent.
template <int COLUMNS> INLINE u32 load_row_bits(const u32* bits, i64 row) {
    static_assert(COLUMNS == 64 || COLUMNS == 128, "half a word or a word");
    i64 at = row * 4 + (threadIdx.x & 3);
    return COLUMNS == 128 ? bits[at] : ((const u16*)bits)[at];
}

// The keys that rows [first, last] may see, by band, lengths and segments.
struct KeyRange {
    int end;               // keys of the sequence
    int low, high;         // visible to some row: [low, high)
    int all_low, all_high; // visible to every row
    // `known`: skip the segments; the caller has their ranges.
    INLINE KeyRange(const HopperParams& params, int batch, int first, int last, bool known = false) {
        end = params.m;
#if LENGTHS && !SEGMENTS
        end = min(end, params.lengths[batch]);
#endif
        low = 0, high = end, all_low = 0, all_high = end;
#if SEGMENTS
        if (known) return;
        RangeExtent x(params, batch, first / 64, div_up(last + 1, 64) - first / 64, params.n);
        low = x.low, high = x.high, all_low = x.all_low, all_high = x.all_high;
#elif BAND
        low = max(0, first + params.offset - params.left), high = min(end, last + params.offset + params.right + 1);
        all_low = max(0, last + params.offset - params.left),
        all_high = min(end, first + params.offset + params.right + 1);
#endif
    }
};

// A row of the tile list.
struct ListRow {
    int from, count, tile;
    u32 split;
    INLINE ListRow(const HopperParams& params, int batch, int head, int at) {
        uint4 row = params.list_rows[(i64)batch * params.list_stride_b + (i64)head * params.list_stride_h + at];
        from = row.x, count = row.y, tile = row.z, split = row.w;
    }
};
// An entry: x is the tile with PARTIAL_TILE and EMPTY_GROUP flags, y the index of its bits or NO_BITS.
INLINE int entry_tile(uint4 entry) { return entry.x & EMPTY_GROUP - 1; }
INLINE u32 empty_groups_of(uint4 entry) { return entry.x / EMPTY_GROUP & 7; }

#if TILE_LIST
// One split of a row, per warp. Rows much longer than the others are split among blocks; each split stores its partial
// result in a slot, and the last to arrive combines them in order. Warps do this independently: a warp stores its
// fragments as its threads hold them, UNITS × float4 each, and the same threads of another block load them. A block has
// WARPS consumer warps.
template <int WARPS, int UNITS> struct RowSplit {
    float4* first; // of this lane, in the row's first slot
    i64 apart;     // from one slot to the next
    u32* there;
    int number, count;
    // `word`: slot, index of the split, number of splits.
    INLINE RowSplit(const HopperParams& params, u32 word, int batch, int head, int heads_of_sequence)
        : number(word >> SPLIT_INDEX_SHIFT & 255), count(word >> SPLIT_COUNT_SHIFT) {
        int heads = rematerialize(params.batch) * heads_of_sequence, bh = batch * heads_of_sequence + head;
        int thread = rematerialize(threadIdx.x) - 128; // the first warpgroup is the producer
        i64 at = ((i64)((word & ((1u << SPLIT_INDEX_SHIFT) - 1)) - number) * heads + bh) * WARPS + (thread >> 5);
        first = (float4*)params.split_results + at * (UNITS * 32) + (thread & 31), there = params.split_arrivals + at;
        apart = (i64)heads * (WARPS * UNITS * 32);
    }
    INLINE void put(int unit, float a, float b, float c, float d) const {
        first[number * apart + unit * 32] = make_float4(a, b, c, d);
    }
    INLINE float4 get(int of, int unit) const { return __ldcg(first + of * apart + unit * 32); }
    // Whether all other splits have arrived. The last one resets the count.
    INLINE bool is_last() const {
        __threadfence();
        __syncwarp();
        int before = 0;
        if (lane_id() == 0) {
            before = atomicAdd(there, 1);
            if (before == count - 1) *there = 0;
        }
        before = __shfl_sync(~0u, before, 0);
        __threadfence();
        return before == count - 1;
    }
};
// Whether a row is split, decided by a vote so that the compiler knows it to be warp-uniform.
INLINE bool is_split(u32 word) { return __any_sync(~0u, word); }
#endif

// From raw products to base-2 scores: scale, soft-cap, ALiBi, bias.
struct ScoreMod {
    float scale, cap, slope;
    const u8* bias;
    i64 bias_i, bias_j;
    int offset;
    INLINE ScoreMod(const HopperParams& params, int batch, int head)
        : scale(params.scale), cap(params.softcap), slope(0), bias(nullptr), offset(params.offset) {
#if ALIBI
        slope = params.alibi[head];
#endif
#if BIAS
        constexpr int SIZE = BIAS == 1 ? 2 : 4;
        bias = (const u8*)params.bias + (batch * params.bias_b + head * params.bias_h) * SIZE,
        bias_i = params.bias_i * SIZE, bias_j = params.bias_j * SIZE;
#endif
    }
    // `inside`: i and j are in range. `slope_of_cap` receives the derivative of the soft-cap.
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

// Marks 64 rows of a head for recomputation by the general kernels; `tiles` per head.
INLINE void mark_for_recompute(const HopperParams& params, u32* of, int bh, int tiles, int tile) {
    *params.recompute_any = 1, of[(i64)bh * tiles + tile] = 1;
}

#if SEGMENTS
#include "segment_ranges.cuh"
#endif
