// Forward mainloop and epilogue on Hopper. Persistent blocks process query tiles of kBlockM rows. In the producer
// warpgroup one thread loads queries, keys and values by TMA and another schedules tiles; each consumer warpgroup owns
// 64 rows, with scores, softmax and output in its registers. The scores of the next key tile are multiplied during the
// softmax of this one, and those of the next query tile during the epilogue. With ping-pong scheduling, one warpgroup
// multiplies while another computes exponentials.
#ifndef ADD_TO_DESCRIPTOR
#define ADD_TO_DESCRIPTOR (HEAD_DIM == 64)
#endif
#include "params.cuh"

#ifndef FWD_CONSUMER_GROUPS // consumer warpgroups
#define FWD_CONSUMER_GROUPS (HEAD_DIM == 64 ? 3 : 2)
#endif
#ifndef FWD_N
#define FWD_N (HEAD_DIM == 256 ? (TILE_LIST ? 64 : 80) : 128)
#endif
#ifndef FWD_STAGES
#define FWD_STAGES 2
#endif
#ifndef FWD_Q_STAGES
#define FWD_Q_STAGES (HEAD_DIM == 256 || FWD_N > 160 ? 1 : 2)
#endif
#ifndef FWD_PINGPONG // ping-pong scheduling of the consumers: as measured, LADDER.md
#define FWD_PINGPONG (HEAD_DIM == 64 || HEAD_DIM == 256 && !BAND && !TILE_LIST && !SEGMENTS)
#endif
#ifndef FWD_OVERLAP_TILES // the next tile's first scores overlap this tile's epilogue, which takes registers
#define FWD_OVERLAP_TILES (FWD_Q_STAGES == 2)
#endif
#ifndef FWD_OVERLAP_SOFTMAX // exponentials overlap the previous P·V product: as measured, LADDER.md
#define FWD_OVERLAP_SOFTMAX (HEAD_DIM != 64)
#endif
#ifndef FWD_DEFER_Q_RELEASE // release the query stage after the next tile's first softmax: as measured, LADDER.md
#define FWD_DEFER_Q_RELEASE (HEAD_DIM == 128 && MASKED)
#endif
#ifndef FWD_LAZY_RESCALE // rescale an output only when its maximum grew by more than 2^8
#define FWD_LAZY_RESCALE 1
#endif

constexpr int kHeadDim = HEAD_DIM, CONSUMER_GROUPS = FWD_CONSUMER_GROUPS, kBlockM = CONSUMER_GROUPS * 64,
              kBlockN = FWD_N;
constexpr int STAGES = FWD_STAGES, Q_STAGES = FWD_Q_STAGES, THREADS = 128 * (CONSUMER_GROUPS + 1);
constexpr int Q_BYTES = kBlockM * kHeadDim * 2, KV_BYTES = kBlockN * kHeadDim * 2;
constexpr int Q_AT = 0, K_AT = Q_AT + Q_STAGES * Q_BYTES, V_AT = K_AT + STAGES * KV_BYTES,
              BARRIERS_AT = V_AT + STAGES * KV_BYTES;
constexpr int BARRIERS = 2 * Q_STAGES + 4 * STAGES + 4;
constexpr int WORK_AT = (BARRIERS_AT + BARRIERS * 8 + 15) / 16 * 16, STEP_AT = WORK_AT + 2 * 32,
              SHARED = STEP_AT + STAGES * 8 + 1024;
static_assert(FWD_OVERLAP_TILES == (Q_STAGES == 2), "the next queries need a place of their own");
static_assert(!FWD_DEFER_Q_RELEASE || Q_STAGES == 2, "they come before the place is given back");
static_assert(kBlockN % 16 == 0 && kHeadDim % 64 == 0 && SHARED <= 232448, "shared memory of a block");

extern "C" __device__ const int forward_sizes[5] = {kBlockM, kBlockN, THREADS, SHARED, 0};

// Addresses in shared memory: tiles, barriers, and the scheduler's slots.
struct Shared {
    u32 base;
    INLINE u32 q(u32 place) const { return base + Q_AT + place * Q_BYTES; }
    INLINE u32 k(u32 place) const { return base + K_AT + place * KV_BYTES; }
    INLINE u32 v(u32 place) const { return base + V_AT + place * KV_BYTES; }
    INLINE Barrier barrier(u32 index) const { return {base + BARRIERS_AT + index * 8}; }
    INLINE Barrier q_full(u32 i) const { return barrier(i); }
    INLINE Barrier q_empty(u32 i) const { return barrier(Q_STAGES + i); }
    INLINE Barrier k_full(u32 i) const { return barrier(2 * Q_STAGES + i); }
    INLINE Barrier k_empty(u32 i) const { return barrier(2 * Q_STAGES + STAGES + i); }
    INLINE Barrier v_full(u32 i) const { return barrier(2 * Q_STAGES + 2 * STAGES + i); }
    INLINE Barrier v_empty(u32 i) const { return barrier(2 * Q_STAGES + 3 * STAGES + i); }
    INLINE Barrier work_full(u32 i) const { return barrier(2 * Q_STAGES + 4 * STAGES + i); }
    INLINE Barrier work_empty(u32 i) const { return barrier(2 * Q_STAGES + 4 * STAGES + 2 + i); }
    // A scheduled tile: (tile, head, sequence, valid), and its key tiles.
    INLINE void put_work(u32 i, int4 tile, int2 visit) const {
        u32 at = base + WORK_AT + i * 32;
        asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(tile.x), "r"(tile.y), "r"(tile.z),
                     "r"(tile.w)
                     : "memory");
        asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at + 16), "r"(visit.x), "r"(visit.y) : "memory");
    }
    INLINE void get_work(u32 i, int4& tile, int2& visit) const {
        u32 at = base + WORK_AT + i * 32;
        asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(tile.x), "=r"(tile.y), "=r"(tile.z), "=r"(tile.w)
                     : "r"(at)
                     : "memory");
        asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(visit.x), "=r"(visit.y) : "r"(at + 16) : "memory");
    }
    // Which split of a row the tile is; 0 if the row is not split.
    INLINE void put_split(u32 i, u32 x) const {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + WORK_AT + i * 32 + 24), "r"(x) : "memory");
    }
    INLINE u32 get_split(u32 i) const {
        u32 x;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(base + WORK_AT + i * 32 + 24) : "memory");
        return x;
    }
    // The tile list's entry of the key tile in a stage.
    INLINE void put_step(u32 i, u32 tile, u32 bits) const {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(base + STEP_AT + i * 8), "r"(tile), "r"(bits) : "memory");
    }
    INLINE uint2 get_step(u32 i) const {
        uint2 x;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(x.x), "=r"(x.y)
                     : "r"(base + STEP_AT + i * 8)
                     : "memory");
        return x;
    }
};

#include "key_tiles.cuh"

// The scheduler: finds tiles ahead of the producer, to hide the latency of its loads.
INLINE void scheduler(const HopperParams& params, const Shared& shared, const TensorMap& map_q) {
    int tiles = TILE_LIST ? params.list_row_count : div_up(params.n, kBlockM),
        total = tiles * params.heads_q * params.batch;
    Ring<SCHEDULER_STAGES> next;
    for (bool first = true;; first = false) {
        shared.work_empty(next.place).wait(next.parity ^ 1);
        int index = first ? blockIdx.x : atomicAdd(params.scheduler_counter, 1) + gridDim.x;
        bool more = index < total;
        WorkTile w(params, more ? index : 0, tiles, params.heads_q, BAND && !SEGMENTS && params.lpt_order);
        if (!TILE_LIST && more) prefetch_tile<kHeadDim>(map_q, w.tile * kBlockM, w.head, w.batch);
        KeyTiles visit(params, w);
        if (TILE_LIST && more) prefetch_tile<kHeadDim>(map_q, w.tile * kBlockM, w.head, w.batch);
        if (!more) visit.count = 0;
        shared.put_work(next.place, make_int4(w.tile, w.head, w.batch, more), make_int2(visit.count, visit.from));
#if TILE_LIST
        shared.put_split(next.place, w.split);
#endif
        shared.work_full(next.place).arrive();
        next.next();
        if (!more) break;
    }
    // The last block resets the counters.
    __threadfence();
    if (atomicAdd(params.scheduler_counter + 1, 1) == gridDim.x - 1)
        params.scheduler_counter[0] = 0, params.scheduler_counter[1] = 0;
}

INLINE void producer(const HopperParams& params, const Shared& shared, const TensorMap& map_q, const TensorMap& map_k,
                     const TensorMap& map_v) {
    int group = params.heads_q / params.heads_k;
    Ring<Q_STAGES> q;
    Ring<STAGES> kv;
    Ring<SCHEDULER_STAGES> next;
    for (;;) {
        int4 tile;
        int2 tiles;
        shared.work_full(next.place).wait(next.parity);
        shared.get_work(next.place, tile, tiles);
        shared.work_empty(next.place).arrive();
        next.next();
        if (!tile.w) break;
        WorkTile w;
        w.tile = tile.x, w.head = tile.y, w.batch = tile.z;
        KeyTiles visit(tiles.x, tiles.y);
        int head_k = w.head / group;
        shared.q_empty(q.place).wait(q.parity ^ 1);
        shared.q_full(q.place).expect(Q_BYTES);
        tma_load_tile<kBlockM, kHeadDim>(shared.q(q.place), map_q, shared.q_full(q.place), w.tile * kBlockM, w.head,
                                         w.batch);
        q.next();
#if TILE_LIST
        const uint4* entries = params.list_entries + visit.from;
        uint4 entry = visit.count > 0 ? entries[0] : make_uint4(0, 0, 0, 0);
#endif
#pragma unroll 1
        for (int step = 0; step < visit.count; step++) {
#if TILE_LIST
            uint4 current = entry;
            if (step + 1 < visit.count) entry = entries[step + 1];
            int row = entry_tile(current) * kBlockN;
#else
            int row = (visit.from - step) * kBlockN;
#endif
            shared.k_empty(kv.place).wait(kv.parity ^ 1);
#if TILE_LIST
            shared.put_step(kv.place, current.x, current.y);
#endif
            shared.k_full(kv.place).expect(KV_BYTES);
            tma_load_tile<kBlockN, kHeadDim>(shared.k(kv.place), map_k, shared.k_full(kv.place), row, head_k, w.batch);
            shared.v_empty(kv.place).wait(kv.parity ^ 1);
            shared.v_full(kv.place).expect(KV_BYTES);
            tma_load_tile<kBlockN, kHeadDim>(shared.v(kv.place), map_v, shared.v_full(kv.place), row, head_k, w.batch);
            kv.next();
        }
    }
}

// Online softmax of 64 rows. `top` is the running maximum, in units of the scores.
struct Softmax {
    float top[2], sum[2], grown[2];
    bool any;
    float unit; // from scores to base-2 exponents
    INLINE Softmax(float unit) : unit(unit) { top[0] = top[1] = MINUS_INFINITY, sum[0] = sum[1] = 0.f; }

    // Turns scores into weights; `grown` is the factor for output and sum so far. Both rows of a thread advance
    // together, each in two chains: this is bound by latency, not by throughput.
    INLINE void step(float (&s)[kBlockN / 2]) {
        float peak[4] = {s[0], s[1], s[2], s[3]}, against[2], part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 4; i < kBlockN / 2; i++) peak[i & 3] = fmaxf(peak[i & 3], s[i]);
        float high[2] = {fmaxf(peak[0], peak[1]), fmaxf(peak[2], peak[3])};
#pragma unroll
        for (int x = 1; x <= 2; x *= 2) {
            float other[2] = {__shfl_xor_sync(~0u, high[0], x), __shfl_xor_sync(~0u, high[1], x)};
            high[0] = fmaxf(high[0], other[0]), high[1] = fmaxf(high[1], other[1]);
        }
        bool grows[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            high[r] = fmaxf(top[r], high[r]);
            grows[r] = FWD_LAZY_RESCALE ? (high[r] - top[r]) * unit > 8.f : high[r] > top[r];
            grown[r] = grows[r] ? exp2_fast((top[r] - high[r]) * unit) : 1.f;
            if (grows[r]) top[r] = high[r];
            against[r] = top[r] == MINUS_INFINITY ? 0.f : top[r] * unit;
        }
        any = __any_sync(~0u, grows[0] || grows[1]);
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i++) {
            s[i] = exp2_fast(fmaf(s[i], unit, -against[i >> 1 & 1]));
            part[i & 3] += s[i];
        }
        sum[0] = fmaf(sum[0], grown[0], part[0] + part[1]), sum[1] = fmaf(sum[1], grown[1], part[2] + part[3]);
    }
    template <int COUNT> INLINE void rescale(float (&o)[COUNT]) const {
        if (any) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) o[i] *= grown[i >> 1 & 1];
        }
    }
};

// The 64 rows of one warpgroup.
struct Rows {
    const HopperParams& params;
    int batch, head, first, row, column;
    KeyRange keys;
    ScoreMod shape;
#if TILE_LIST
    u32 split;
#endif
    // Loaded ahead, before the epilogue of the previous rows: the key ranges of the thread's two rows and their bounds;
    // with a tile list, the bits of the first tile, whose entry is at `place`.
    struct PrefetchedMask {
#if SEGMENTS
        int2 range[2];
        int4 extent;
#endif
#if TILE_LIST
        u32 bits[2];
#endif
    } ahead;
#if TILE_LIST
    // The bits of the thread's two rows in a tile.
    INLINE static u32 bits_of(const HopperParams& params, uint2 entry, int group, int r) {
        return entry.x & PARTIAL_TILE ? load_row_bits<kBlockN>(params.list_bits, (i64)entry.y * kBlockM + group * 64 +
                                                                                     fragment_row() + 8 * r)
                                      : ~0u;
    }
#endif
    INLINE static void prefetch_mask(PrefetchedMask& ahead, const HopperParams& params, const WorkTile& w,
                                     const Shared& shared, u32 place, bool some, int group) {
#if TILE_LIST
        uint2 entry = shared.get_step(place);
        if (!some) entry.x = 0;
#pragma unroll
        for (int r = 0; r < 2; r++) ahead.bits[r] = bits_of(params, entry, group, r);
#endif
#if SEGMENTS
        int first = w.tile * kBlockM + group * 64;
#pragma unroll
        for (int r = 0; r < 2; r++)
            ahead.range[r] = params.ranges[(i64)w.batch * params.n + min(first + fragment_row() + 8 * r, params.n - 1)];
        ahead.extent =
            params.range_extents[(i64)w.batch * div_up(params.n, 64) + min(first / 64, div_up(params.n, 64) - 1)];
#endif
    }
    INLINE Rows(const HopperParams& params, const WorkTile& w, int group, const PrefetchedMask& ahead)
        : params(params), batch(w.batch), head(w.head), first(w.tile * kBlockM + group * 64),
          row(first + fragment_row()), column(fragment_column()), keys(params, w.batch, first, first + 63, true),
          shape(params, w.batch, w.head), ahead(ahead) {
#if SEGMENTS
        keys.all_low = ahead.extent.z, keys.all_high = ahead.extent.w;
#endif
#if TILE_LIST
        split = w.split;
#endif
    }

    // Whether, by the tile list, these rows keep no pair of the tile. Decided by a vote, so that the compiler knows the
    // condition to be warp-uniform; otherwise products are serialized. Bands and segments have few such tiles and do
    // not check, which would cost 4 %.
    INLINE static bool is_empty_group(const Shared& shared, u32 place, int group) {
        return TILE_LIST && __any_sync(~0u, shared.get_step(place).x & EMPTY_GROUP << group);
    }

    // What is known about a tile before its scores; the loads of the bits are in flight.
    struct TileMask {
        int tile;
        bool partial;
#if TILE_LIST
        u32 bits[2]; // of the thread's two rows
#endif
    };
    template <bool FIRST = false>
    INLINE TileMask look(const Shared& shared, u32 place, const KeyTiles& visit, int step, int group) const {
        TileMask look;
#if TILE_LIST
        uint2 entry = shared.get_step(place);
        look.tile = entry.x & EMPTY_GROUP - 1,
        look.partial = entry.x & PARTIAL_TILE || look.tile * kBlockN + kBlockN > keys.end;
        if (look.partial) {
#pragma unroll
            for (int r = 0; r < 2; r++) look.bits[r] = FIRST ? ahead.bits[r] : bits_of(params, entry, group, r);
        }
#else
        look.tile = visit.from - step;
        look.partial = look.tile * kBlockN < keys.all_low || look.tile * kBlockN + kBlockN > keys.all_high;
#endif
        return look;
    }

    // Soft-cap and biases, and −∞ for masked pairs.
    INLINE void score_and_mask(float (&s)[kBlockN / 2], TileMask& look) const {
#if SCORE_MOD
        int j0 = look.tile * kBlockN + column;
#pragma unroll
        for (int i = 0; i < kBlockN / 2; i++) {
            int r = row + (i & 2) * 4, j = j0 + (i / 4) * 8 + (i & 1);
            s[i] = shape(s[i], r, j, r < params.n && j < params.m);
        }
#endif
        if (look.partial) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // Relative to the first key of the tile.
                int i = row + 8 * r, high = keys.end - look.tile * kBlockN, low = 0;
                (void)i;
#if SEGMENTS
                high = ahead.range[r].y - look.tile * kBlockN, low = ahead.range[r].x - look.tile * kBlockN;
#elif BAND
                high = min(high, i + params.offset + params.right + 1 - look.tile * kBlockN),
                low = i + params.offset - params.left - look.tile * kBlockN;
#endif
                low = columns_before(low), high = columns_before(high);
#pragma unroll
                for (int x = 0; x < kBlockN / 4; x += 32) {
                    u32 word = ~0u;
                    if (!TILE_LIST || LENGTHS)
                        word = bits_between(low - x, high - x); // bits of a list end with the keys
#if TILE_LIST
                    word &= look.bits[r];
#endif
#pragma unroll
                    for (int i = 0; i < min(32, kBlockN / 4 - x); i++)
                        if (!(word >> i & 1)) s[(x + i) / 2 * 4 + 2 * r + i % 2] = MINUS_INFINITY;
                }
            }
        }
    }

    // Applies dropout to weights.
    INLINE void apply_dropout(float (&s)[kBlockN / 2], int tile) const {
#if DROPOUT
        int t = threadIdx.x & 3;
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int c = 0; c < kBlockN / 8; c += 4) {
                // Each of the four threads of a row draws for 8 of 32 keys.
                u32 mine = dropout_keep(params.seed, batch, head, row + 8 * r, tile * (kBlockN / 8) + c + t,
                                        params.dropout_threshold);
#pragma unroll
                for (int g = 0; g < 4; g++) {
                    if (c + g >= kBlockN / 8) break;
                    u32 kept = __shfl_sync(~0u, mine, g, 4) >> (2 * t);
                    float* x = s + 4 * (c + g) + 2 * r;
                    x[0] = kept & 1 ? x[0] * params.dropout_scale : 0.f,
                    x[1] = kept & 2 ? x[1] * params.dropout_scale : 0.f;
                }
            }
        }
#endif
    }

    // Mask and softmax of one tile.
    INLINE void softmax_tile(Softmax& softmax, float (&s)[kBlockN / 2], TileMask& look) const {
        score_and_mask(s, look);
        softmax.step(s);
        apply_dropout(s, look.tile);
    }

#if TILE_LIST
    // Stores the partial result of a split row. Returns true for the last split to arrive, which then has the combined
    // result.
    INLINE bool combine_splits(Softmax& softmax, float (&o)[kHeadDim / 2]) const {
        float top[2] = {softmax.top[0], softmax.top[1]}, sums[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])},
              unit = softmax.unit;
        constexpr int UNITS = kHeadDim / 8 + 1;
        RowSplit<4 * CONSUMER_GROUPS, UNITS> mine(params, split, batch, head, params.heads_q);
#pragma unroll
        for (int c = 0; c < kHeadDim / 8; c++) mine.put(c, o[4 * c], o[4 * c + 1], o[4 * c + 2], o[4 * c + 3]);
        mine.put(UNITS - 1, top[0], top[1], sums[0], sums[1]);
        if (!mine.is_last()) return false;
        top[0] = top[1] = MINUS_INFINITY, sums[0] = sums[1] = 0.f;
#pragma unroll 1
        for (int of = 0; of < mine.count; of++) {
            float4 x = mine.get(of, UNITS - 1);
            top[0] = fmaxf(top[0], x.x), top[1] = fmaxf(top[1], x.y);
        }
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; i++) o[i] = 0.f;
#pragma unroll 1
        for (int of = 0; of < mine.count; of++) {
            float4 x = mine.get(of, UNITS - 1);
            // A split that saw nothing may hold anything.
            bool seen[2] = {x.z != 0.f, x.w != 0.f};
            float factor[2] = {seen[0] ? exp2_fast((x.x - top[0]) * unit) : 0.f,
                               seen[1] ? exp2_fast((x.y - top[1]) * unit) : 0.f};
            sums[0] = fmaf(x.z, factor[0], sums[0]), sums[1] = fmaf(x.w, factor[1], sums[1]);
#pragma unroll
            for (int c = 0; c < kHeadDim / 8; c++) {
                float4 y = mine.get(of, c);
                if (seen[0])
                    o[4 * c] = fmaf(y.x, factor[0], o[4 * c]), o[4 * c + 1] = fmaf(y.y, factor[0], o[4 * c + 1]);
                if (seen[1])
                    o[4 * c + 2] = fmaf(y.z, factor[1], o[4 * c + 2]),
                              o[4 * c + 3] = fmaf(y.w, factor[1], o[4 * c + 3]);
            }
        }
        // The four threads of a row add their sums in the epilogue, so only one of them keeps it.
        bool adds = (threadIdx.x & 3) == 0;
#pragma unroll
        for (int r = 0; r < 2; r++) softmax.top[r] = top[r], softmax.sum[r] = adds ? sums[r] : 0.f;
        return true;
    }
#endif

    // Epilogue: normalizes, writes lse, and stores the output through `tile`, the rows' query tile in shared memory.
    INLINE void epilogue(Softmax& softmax, float (&o)[kHeadDim / 2], u32 tile, int group,
                         const TensorMap& map_out) const {
        float factor[2];
#if TILE_LIST
        if (is_split(split) && !combine_splits(softmax, o)) {
            named_sync(4 + group, 128);
            return;
        }
#endif
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = quad_sum(softmax.sum[r]), top = softmax.top[r] * softmax.unit, lse;
#if SINKS
            float sink = params.sinks[head] * LOG2E, peak = fmaxf(top, sink);
            float shrink = exp2_fast(top - peak);
            float total = sum == 0.f ? exp2_fast(sink - peak) : sum * shrink + exp2_fast(sink - peak);
            bool zero_weights = peak == MINUS_INFINITY;
            factor[r] = sum == 0.f || zero_weights ? 0.f : shrink / total;
            lse = zero_weights ? MINUS_INFINITY : (peak + log2_fast(total)) * LN2;
#else
            factor[r] = sum == 0.f ? 0.f : 1.f / sum;
            lse = sum == 0.f ? MINUS_INFINITY : (top + log2_fast(sum)) * LN2;
#endif
            int i = row + 8 * r;
            if ((threadIdx.x & 3) == 0 && i < params.n)
                params.lse[((i64)batch * params.heads_q + head) * params.n + i] = lse;
        }
        u32 rounded[kHeadDim / 4];
        round_scaled<false>(rounded, o, factor[0], factor[1]);
        named_sync(4 + group, 128);
        store_tile<kHeadDim / 4, kBlockM>(tile, rounded);
        if (params.tma_stores & STORE_OUT) tma_store_tile<kHeadDim, kBlockM>(tile, map_out, 0, first, head, batch);
        else
            store_tile_elementwise<kHeadDim, kBlockM>(
                tile, params.out + batch * params.out_b + head * params.out_h + first * params.out_i, params.out_i,
                params.n - first, params.dv);
        if (MASKED && has_nonfinite(rounded, params.n - first))
            mark_for_recompute(params, params.recompute_q, batch * params.heads_q + head, div_up(params.n, 64),
                               first / 64);
    }
};

INLINE void pingpong_wait(int group) {
    if (FWD_PINGPONG) named_sync(1 + group, 256);
}
INLINE void pingpong_pass(int group) {
    if (FWD_PINGPONG) named_arrive(1 + (group + 1 == CONSUMER_GROUPS ? 0 : group + 1), 256);
}

INLINE void consumer(const HopperParams& params, const Shared& shared, const TensorMap& map_out, int group) {
    bool elected = is_elected();
    Ring<Q_STAGES> q;
    Ring<STAGES> k, v;
    Ring<SCHEDULER_STAGES> next;
    float o[kHeadDim / 2], s[kBlockN / 2]; // [64, D], [64, N]
    u32 weights[kBlockN / 4];
    WorkTile w;
    KeyTiles visit(0, 0);
    Rows::PrefetchedMask ahead;
    bool more, first = true;
    // Takes the next tile and starts its first scores. Without a next tile, the product uses stale data, so that the
    // wgmma pipeline keeps one shape.
    auto next_tile = [&](bool in_turn) {
        int4 tile;
        int2 tiles;
        shared.work_full(next.place).wait(next.parity);
        shared.get_work(next.place, tile, tiles);
#if TILE_LIST
        w.split = shared.get_split(next.place);
#endif
        __syncwarp();
        if (elected) shared.work_empty(next.place).arrive();
        next.next();
        w.tile = tile.x, w.head = tile.y, w.batch = tile.z, more = tile.w;
        visit = KeyTiles(tiles.x, tiles.y);
        if (more) shared.q_full(q.place).wait(q.parity);
        if (visit.count > 0) shared.k_full(k.place).wait(k.parity);
        if (in_turn) pingpong_wait(group);
        wgmma_fence();
        gemm_abt<kBlockN, kHeadDim, kBlockM>(s, shared.q(q.place) + group * 64 * 128, shared.k(k.place));
        wgmma_commit();
        if (in_turn) pingpong_pass(group);
        if (more) Rows::prefetch_mask(ahead, params, w, shared, k.place, visit.count > 0, group);
    };
    if (group == CONSUMER_GROUPS - 1) pingpong_pass(group);
    if (FWD_OVERLAP_TILES) {
        next_tile(false);
        wgmma_wait<0>();
        fence_registers(s);
    }
    for (;;) {
        if (!FWD_OVERLAP_TILES) {
            next_tile(true);
            wgmma_wait<0>();
            fence_registers(s);
        }
        if (!more) break;
        bool some = visit.count > 0, zero_weights = false;
        Rows rows(params, w, group, ahead);
        Softmax softmax(SCORE_MOD ? 1.f : params.scale * LOG2E);
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; i++) o[i] = 0.f;
        if (some) {
            Rows::TileMask look = rows.look<true>(shared, k.place, visit, 0, group);
            bool empty_group = Rows::is_empty_group(shared, k.place, group);
            __syncwarp();
            if (elected) shared.k_empty(k.place).arrive();
            k.next();
            zero_weights = empty_group;
            if (empty_group) {
#pragma unroll
                for (int i = 0; i < kBlockN / 2; i++) s[i] = 0.f;
            } else {
                rows.softmax_tile(softmax, s, look);
            }
        }
        round_fragment(weights, s);
        if (FWD_DEFER_Q_RELEASE && !first) {
            // Wait until the output of the previous tile has been read from shared memory.
            tma_store_wait_read();
            __syncwarp();
            if (elected) shared.q_empty(q.place ^ 1).arrive();
        }
        first = false;
        u32 mine = shared.q(q.place) + group * 64 * 128;
#pragma unroll 1
        for (int step = 1; step < visit.count; step++) {
            shared.k_full(k.place).wait(k.parity);
            if (Rows::is_empty_group(shared, k.place, group)) {
                // Nothing of this tile is visible to these rows: compute only the pending product with the previous
                // values, if any.
                if (elected) shared.k_empty(k.place).arrive();
                k.next();
                shared.v_full(v.place).wait(v.parity);
                pingpong_wait(group);
                if (!zero_weights) {
                    fence_registers(o), fence_registers(weights);
                    wgmma_fence();
                    gemm_rs<kHeadDim, kBlockN>(o, weights, shared.v(v.place));
                    wgmma_commit();
                    pingpong_pass(group);
                    wgmma_wait<0>();
                    fence_registers(o), fence_registers(weights);
#pragma unroll
                    for (int i = 0; i < kBlockN / 4; i++) weights[i] = 0;
                    zero_weights = true;
                } else {
                    pingpong_pass(group);
                    __syncwarp();
                }
                if (elected) shared.v_empty(v.place).arrive();
                v.next();
                continue;
            }
            zero_weights = false;
            pingpong_wait(group);
            fence_registers(o), fence_registers(weights);
            wgmma_fence();
            gemm_abt<kBlockN, kHeadDim, kBlockM>(s, mine, shared.k(k.place));
            wgmma_commit();
            shared.v_full(v.place).wait(v.parity);
            gemm_rs<kHeadDim, kBlockN>(o, weights, shared.v(v.place));
            wgmma_commit();
            pingpong_pass(group);
            Rows::TileMask look = rows.look(shared, k.place, visit, step, group);
            wgmma_wait<1>();
            fence_registers(s);
            if (elected) shared.k_empty(k.place).arrive();
            k.next();
            rows.softmax_tile(softmax, s, look);
            if (FWD_OVERLAP_SOFTMAX) finish_before_wait(softmax.sum[0] + softmax.sum[1] < 0.f);
            wgmma_wait<0>();
            fence_registers(o), fence_registers(weights);
            if (elected) shared.v_empty(v.place).arrive();
            v.next();
            softmax.rescale(o);
            round_fragment(weights, s);
        }
        u32 at_q = q.place;
        q.next();
        if (some) shared.v_full(v.place).wait(v.parity);
        if (FWD_OVERLAP_TILES) pingpong_wait(group);
        fence_registers(o), fence_registers(weights);
        wgmma_fence();
        gemm_rs<kHeadDim, kBlockN>(o, weights, shared.v(v.place));
        wgmma_commit();
        if (FWD_OVERLAP_TILES) {
            pingpong_pass(group);
            next_tile(false);
        }
        wgmma_wait<FWD_OVERLAP_TILES>();
        fence_registers(o), fence_registers(weights);
        if (some) {
            if (elected) shared.v_empty(v.place).arrive();
            v.next();
        }
        rows.epilogue(softmax, o, mine, group, map_out);
        if (FWD_OVERLAP_TILES) {
            wgmma_wait<0>();
            fence_registers(s);
        }
        if (!FWD_DEFER_Q_RELEASE) {
            tma_store_wait_read();
            if (elected) shared.q_empty(at_q).arrive();
        }
    }
    if (FWD_DEFER_Q_RELEASE) tma_store_wait_read(); // shared memory must stay valid until TMA has read it
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_forward(const __grid_constant__ HopperParams params, const __grid_constant__ TensorMap map_q,
                      const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                      const __grid_constant__ TensorMap map_out) {
    extern __shared__ u8 memory[];
    Shared shared{(shared_address(memory) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        prefetch_tensor_map(map_q), prefetch_tensor_map(map_k), prefetch_tensor_map(map_v),
            prefetch_tensor_map(map_out);
        for (int i = 0; i < Q_STAGES; i++)
            shared.q_full(i).init(1), shared.q_empty(i).init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP);
        for (int i = 0; i < STAGES; i++) {
            shared.k_full(i).init(1), shared.k_empty(i).init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP);
            shared.v_full(i).init(1), shared.v_empty(i).init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP);
        }
        for (int i = 0; i < 2; i++)
            shared.work_full(i).init(1), shared.work_empty(i).init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP + 1);
        publish_barriers();
    }
    __syncthreads();
    int warpgroup = warpgroup_id();
    if (warpgroup == 0) {
        setmaxnreg_dec<CONSUMER_GROUPS == 3 ? 32 : 24>();
        if (threadIdx.x == 0) producer(params, shared, map_q, map_k, map_v);
        else if (threadIdx.x == 32) scheduler(params, shared, map_q);
    } else {
        setmaxnreg_inc<CONSUMER_GROUPS == 3 ? 160 : 240>();
        consumer(params, shared, map_out, warpgroup - 1);
    }
}

#if SEGMENTS
extern "C" __global__ void __launch_bounds__(256) segment_ranges(const __grid_constant__ HopperParams params) {
    compute_ranges<false, kBlockM, kBlockN>(params);
}
#endif
