// Attention forward on Hopper. A block takes tiles of FWD_M queries of one head, one after the other; a warp of its first
// warpgroup brings queries, keys and values to shared memory, each other warpgroup owns 64 rows: scores, softmax and
// output stay in its registers. The scores of the next keys are multiplied while the softmax of these runs, those of the
// next tile while this one is written, and the warpgroups take turns, so that one multiplies while another is at its
// exponentials.
#ifndef SUMMED_OPERANDS
#define SUMMED_OPERANDS (HEAD_DIM == 64)
#endif
#include "problem.cuh"

#ifndef FWD_GROUPS  // warpgroups that compute
#define FWD_GROUPS (HEAD_DIM == 64 ? 3 : 2)
#endif
#ifndef FWD_N
#define FWD_N (HEAD_DIM == 256 ? (PLAN ? 64 : 80) : 128)
#endif
#ifndef FWD_STAGES
#define FWD_STAGES 2
#endif
#ifndef FWD_Q_STAGES
#define FWD_Q_STAGES (HEAD_DIM == 256 || FWD_N > 160 ? 1 : 2)
#endif
#ifndef FWD_TURNS  // warpgroups take turns at the matrix units: as measured, LADDER.md
#define FWD_TURNS (HEAD_DIM == 64 || HEAD_DIM == 256 && !BAND && !PLAN && !SEGMENTS)
#endif
#ifndef FWD_AHEAD  // the next tile's first scores are multiplied while this one is written, which takes registers
#define FWD_AHEAD (FWD_Q_STAGES == 2)
#endif
#ifndef FWD_BESIDE  // exponentials are taken while the weights before are multiplied, not after: as measured, LADDER.md
#define FWD_BESIDE (HEAD_DIM != 64)
#endif
#ifndef FWD_LATE  // the queries' place, by way of which results are written, is given back after the next tile's first softmax: as measured, LADDER.md
#define FWD_LATE (HEAD_DIM == 128 && MASKED)
#endif
#ifndef FWD_LAZY  // an output is scaled anew only when its maximum grew by more than 2^8
#define FWD_LAZY 1
#endif

constexpr int D = HEAD_DIM, GROUPS = FWD_GROUPS, M = GROUPS * 64, N = FWD_N;
constexpr int STAGES = FWD_STAGES, Q_STAGES = FWD_Q_STAGES, THREADS = 128 * (GROUPS + 1);
constexpr int Q_BYTES = M * D * 2, KV_BYTES = N * D * 2;
constexpr int Q_AT = 0, K_AT = Q_AT + Q_STAGES * Q_BYTES, V_AT = K_AT + STAGES * KV_BYTES, BARRIERS_AT = V_AT + STAGES * KV_BYTES;
constexpr int BARRIERS = 2 * Q_STAGES + 4 * STAGES + 4;
constexpr int WORK_AT = (BARRIERS_AT + BARRIERS * 8 + 15) / 16 * 16, STEP_AT = WORK_AT + 2 * 32, SHARED = STEP_AT + STAGES * 8 + 1024;
static_assert(FWD_AHEAD == (Q_STAGES == 2), "the next queries need a place of their own");
static_assert(!FWD_LATE || Q_STAGES == 2, "they come before the place is given back");
static_assert(N % 16 == 0 && D % 64 == 0 && SHARED <= 232448, "shared memory of a block");

extern "C" __device__ const int forward_sizes[5] = {M, N, THREADS, SHARED, 0};

// The barriers, and the place where the index of the next work lies.
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
    // The next work, as the producer found it: the tile, and the visit.
    INLINE void put_work(u32 i, int4 tile, int2 visit) const {
        u32 at = base + WORK_AT + i * 32;
        asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(tile.x), "r"(tile.y), "r"(tile.z), "r"(tile.w) : "memory");
        asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(at + 16), "r"(visit.x), "r"(visit.y) : "memory");
    }
    INLINE void get_work(u32 i, int4& tile, int2& visit) const {
        u32 at = base + WORK_AT + i * 32;
        asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(tile.x), "=r"(tile.y), "=r"(tile.z), "=r"(tile.w) : "r"(at) : "memory");
        asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(visit.x), "=r"(visit.y) : "r"(at + 16) : "memory");
    }
    // Which stretch of a row the work is, where the row is cut.
    INLINE void put_stretch(u32 i, u32 x) const { asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + WORK_AT + i * 32 + 24), "r"(x) : "memory"); }
    INLINE u32 get_stretch(u32 i) const {
        u32 x;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(base + WORK_AT + i * 32 + 24) : "memory");
        return x;
    }
    // What the plan says of the tile that a place of the keys holds.
    INLINE void put_step(u32 i, u32 tile, u32 bits) const {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(base + STEP_AT + i * 8), "r"(tile), "r"(bits) : "memory");
    }
    INLINE uint2 get_step(u32 i) const {
        uint2 x;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(base + STEP_AT + i * 8) : "memory");
        return x;
    }
};

// The key tiles that a query tile visits, and in which order: from the end, where the ragged and diagonal ones are.
struct Visit {
    int count, from;  // from: the last tile, or the first entry of the plan
    INLINE Visit(int count, int from) : count(count), from(from) {}
    INLINE Visit(const Problem& p, Work& w) {
#if PLAN
        // Rows come in an order of their own, and say which tile they are.
        PlanRow row(p, w.batch, w.head, w.tile);
        count = row.count, from = row.from, w.tile = row.tile, w.stretch = row.stretch;
#if LENGTHS
        // Key tiles rise along a row: those beyond the sequence are left out.
        for (int low = 0, end = p.lengths[w.batch]; low < count;) {
            int middle = (low + count) / 2;
            if (tile_of(p.plan_tiles[from + middle]) * N < end) low = middle + 1;
            else count = middle;
        }
#endif
#else
        Keys keys(p, w.batch, w.tile * M, min(w.tile * M + M, p.n) - 1);
        from = div_up(keys.high, N) - 1, count = keys.high > keys.low ? from + 1 - keys.low / N : 0;
#endif
    }
};

// Finds work, a tile or two ahead: what it takes are trips to device memory, one after the other.
INLINE void scout(const Problem& p, const Shared& shared, const TensorMap& map_q) {
    int tiles = PLAN ? p.plan_count : div_up(p.n, M), total = tiles * p.heads_q * p.batch;
    Ring<IN_LINE> next;
    for (bool first = true;; first = false) {
        shared.work_empty(next.place).wait(next.parity ^ 1);
        int index = first ? blockIdx.x : atomicAdd(p.counter, 1) + gridDim.x;
        bool more = index < total;
        Work w(p, more ? index : 0, tiles, p.heads_q, BAND && !SEGMENTS && p.ordered);
        if (!PLAN && more) announce_tile<D>(map_q, w.tile * M, w.head, w.batch);
        Visit visit(p, w);
        if (PLAN && more) announce_tile<D>(map_q, w.tile * M, w.head, w.batch);
        if (!more) visit.count = 0;
        shared.put_work(next.place, make_int4(w.tile, w.head, w.batch, more), make_int2(visit.count, visit.from));
#if PLAN
        shared.put_stretch(next.place, w.stretch);
#endif
        shared.work_full(next.place).arrive();
        next.next();
        if (!more) break;
    }
    // The last block out leaves the counters as they were found.
    __threadfence();
    if (atomicAdd(p.counter + 1, 1) == gridDim.x - 1) p.counter[0] = 0, p.counter[1] = 0;
}

INLINE void produce(const Problem& p, const Shared& shared, const TensorMap& map_q, const TensorMap& map_k, const TensorMap& map_v) {
    int group = p.heads_q / p.heads_k;
    Ring<Q_STAGES> q;
    Ring<STAGES> kv;
    Ring<IN_LINE> next;
    for (;;) {
        int4 tile;
        int2 tiles;
        shared.work_full(next.place).wait(next.parity);
        shared.get_work(next.place, tile, tiles);
        shared.work_empty(next.place).arrive();
        next.next();
        if (!tile.w) break;
        Work w;
        w.tile = tile.x, w.head = tile.y, w.batch = tile.z;
        Visit visit(tiles.x, tiles.y);
        int head_k = w.head / group;
        shared.q_empty(q.place).wait(q.parity ^ 1);
        shared.q_full(q.place).expect(Q_BYTES);
        load_tile<M, D>(shared.q(q.place), map_q, shared.q_full(q.place), w.tile * M, w.head, w.batch);
        q.next();
#if PLAN
        const uint4* entries = p.plan_tiles + visit.from;
        uint4 entry = visit.count > 0 ? entries[0] : make_uint4(0, 0, 0, 0);
#endif
#pragma unroll 1
        for (int step = 0; step < visit.count; step++) {
#if PLAN
            uint4 now = entry;
            if (step + 1 < visit.count) entry = entries[step + 1];
            int row = tile_of(now) * N;
#else
            int row = (visit.from - step) * N;
#endif
            shared.k_empty(kv.place).wait(kv.parity ^ 1);
#if PLAN
            shared.put_step(kv.place, now.x, now.y);
#endif
            shared.k_full(kv.place).expect(KV_BYTES);
            load_tile<N, D>(shared.k(kv.place), map_k, shared.k_full(kv.place), row, head_k, w.batch);
            shared.v_empty(kv.place).wait(kv.parity ^ 1);
            shared.v_full(kv.place).expect(KV_BYTES);
            load_tile<N, D>(shared.v(kv.place), map_v, shared.v_full(kv.place), row, head_k, w.batch);
            kv.next();
        }
    }
}

// The softmax of 64 rows as their keys pass by. `top` is what the exponents are taken against, in units of the scores.
struct Softmax {
    float top[2], sum[2], grown[2];
    bool any;
    float unit;  // from scores to log2
    INLINE Softmax(float unit) : unit(unit) { top[0] = top[1] = MINUS_INFINITY, sum[0] = sum[1] = 0.f; }

    // Turns scores into weights; `grown` is what the output and the sum so far have to be multiplied by. Both rows go side
    // by side, and each in two chains: it is latency that this takes, not work.
    INLINE void step(float (&s)[N / 2]) {
        float peak[4] = {s[0], s[1], s[2], s[3]}, against[2], part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 4; i < N / 2; i++) peak[i & 3] = fmaxf(peak[i & 3], s[i]);
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
            grows[r] = FWD_LAZY ? (high[r] - top[r]) * unit > 8.f : high[r] > top[r];
            grown[r] = grows[r] ? exp2_fast((top[r] - high[r]) * unit) : 1.f;
            if (grows[r]) top[r] = high[r];
            against[r] = top[r] == MINUS_INFINITY ? 0.f : top[r] * unit;
        }
        any = __any_sync(~0u, grows[0] || grows[1]);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
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

// The 64 rows of one warpgroup: what they are of, and what they keep of a tile of keys.
struct Rows {
    const Problem& p;
    int batch, head, first, row, column;
    Keys keys;
    Shape shape;
#if PLAN
    u32 stretch;
#endif
    // What they need from device memory, asked for before the rows before them are written: the range of keys of the
    // thread's two, and what all have in common; of a list, the bits of the first tile, which lies at `place`.
    struct Ahead {
#if SEGMENTS
        int2 range[2];
        int4 extent;
#endif
#if PLAN
        u32 bits[2];
#endif
    } ahead;
#if PLAN
    // Of the thread's two rows in a tile.
    INLINE static u32 bits_of(const Problem& p, uint2 entry, int group, int r) {
        return entry.x & PARTIAL ? bits_of_row<N>(p.plan_bits, (i64)entry.y * M + group * 64 + fragment_row() + 8 * r) : ~0u;
    }
#endif
    INLINE static void look_ahead(Ahead& ahead, const Problem& p, const Work& w, const Shared& shared, u32 place, bool some, int group) {
#if PLAN
        uint2 entry = shared.get_step(place);
        if (!some) entry.x = 0;
#pragma unroll
        for (int r = 0; r < 2; r++) ahead.bits[r] = bits_of(p, entry, group, r);
#endif
#if SEGMENTS
        int first = w.tile * M + group * 64;
#pragma unroll
        for (int r = 0; r < 2; r++) ahead.range[r] = p.ranges[(i64)w.batch * p.n + min(first + fragment_row() + 8 * r, p.n - 1)];
        ahead.extent = p.extents[(i64)w.batch * div_up(p.n, 64) + min(first / 64, div_up(p.n, 64) - 1)];
#endif
    }
    INLINE Rows(const Problem& p, const Work& w, int group, const Ahead& ahead)
        : p(p), batch(w.batch), head(w.head), first(w.tile * M + group * 64), row(first + fragment_row()), column(fragment_column()),
          keys(p, w.batch, first, first + 63, true), shape(p, w.batch, w.head), ahead(ahead) {
#if SEGMENTS
        keys.all_low = ahead.extent.z, keys.all_high = ahead.extent.w;
#endif
#if PLAN
        stretch = w.stretch;
#endif
    }

    // Whether a list says that these rows have no pair in a tile, though others have. By a vote, so that it is known to be the same for all threads
    // of a warp: else products are compiled as if lanes went their own ways. Bands and segments have few such tiles, and do not ask: it takes 4 %.
    INLINE static bool idle(const Shared& shared, u32 place, int group) { return PLAN && __any_sync(~0u, shared.get_step(place).x & IDLE << group); }

    // What is known of a tile before its scores are there; bits are on their way by then.
    struct Look {
        int tile;
        bool partial;
#if PLAN
        u32 bits[2];  // of the thread's two rows
#endif
    };
    template <bool FIRST = false> INLINE Look look(const Shared& shared, u32 place, const Visit& visit, int step, int group) const {
        Look look;
#if PLAN
        uint2 entry = shared.get_step(place);
        look.tile = entry.x & IDLE - 1, look.partial = entry.x & PARTIAL || look.tile * N + N > keys.end;
        if (look.partial) {
#pragma unroll
            for (int r = 0; r < 2; r++) look.bits[r] = FIRST ? ahead.bits[r] : bits_of(p, entry, group, r);
        }
#else
        look.tile = visit.from - step;
        look.partial = look.tile * N < keys.all_low || look.tile * N + N > keys.all_high;
#endif
        return look;
    }

    // Scores become what the softmax sees: shaped, and −∞ where a pair is absent.
    INLINE void refine(float (&s)[N / 2], Look& look) const {
#if SHAPED
        int j0 = look.tile * N + column;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            int r = row + (i & 2) * 4, j = j0 + (i / 4) * 8 + (i & 1);
            s[i] = shape(s[i], r, j, r < p.n && j < p.m);
        }
#endif
        if (look.partial) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // From the tile's first key on.
                int i = row + 8 * r, high = keys.end - look.tile * N, low = 0;
                (void)i;
#if SEGMENTS
                high = ahead.range[r].y - look.tile * N, low = ahead.range[r].x - look.tile * N;
#elif BAND
                high = min(high, i + p.offset + p.right + 1 - look.tile * N), low = i + p.offset - p.left - look.tile * N;
#endif
                low = columns_before(low), high = columns_before(high);
#pragma unroll
                for (int x = 0; x < N / 4; x += 32) {
                    u32 word = ~0u;
                    if (!PLAN || LENGTHS) word = bits_between(low - x, high - x);  // bits end where the keys end
#if PLAN
                    word &= look.bits[r];
#endif
#pragma unroll
                    for (int i = 0; i < min(32, N / 4 - x); i++)
                        if (!(word >> i & 1)) s[(x + i) / 2 * 4 + 2 * r + i % 2] = MINUS_INFINITY;
                }
            }
        }
    }

    // Weights that dropout leaves, grown by its scale.
    INLINE void drop(float (&s)[N / 2], int tile) const {
#if DROPOUT
        int t = threadIdx.x & 3;
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int c = 0; c < N / 8; c += 4) {
                // Each of the four threads of a row draws for 8 of 32 keys.
                u32 mine = dropout_keep(p.seed, batch, head, row + 8 * r, tile * (N / 8) + c + t, p.dropout_threshold);
#pragma unroll
                for (int g = 0; g < 4; g++) {
                    if (c + g >= N / 8) break;
                    u32 kept = __shfl_sync(~0u, mine, g, 4) >> (2 * t);
                    float* x = s + 4 * (c + g) + 2 * r;
                    x[0] = kept & 1 ? x[0] * p.dropout_scale : 0.f, x[1] = kept & 2 ? x[1] * p.dropout_scale : 0.f;
                }
            }
        }
#endif
    }

    // One tile of scores through the softmax.
    INLINE void soften(Softmax& softmax, float (&s)[N / 2], Look& look) const {
        refine(s, look);
        softmax.step(s);
        drop(s, look.tile);
    }

#if PLAN
    // Puts a stretch of rows that are cut where the others are; true for the last, which then has what all came to.
    INLINE bool join(Softmax& softmax, float (&o)[D / 2]) const {
        float top[2] = {softmax.top[0], softmax.top[1]}, sums[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])}, unit = softmax.unit;
        constexpr int UNITS = D / 8 + 1;
        Stretch<4 * GROUPS, UNITS> mine(p, stretch, batch, head, p.heads_q);
#pragma unroll
        for (int c = 0; c < D / 8; c++) mine.put(c, o[4 * c], o[4 * c + 1], o[4 * c + 2], o[4 * c + 3]);
        mine.put(UNITS - 1, top[0], top[1], sums[0], sums[1]);
        if (!mine.is_last()) return false;
        top[0] = top[1] = MINUS_INFINITY, sums[0] = sums[1] = 0.f;
#pragma unroll 1
        for (int of = 0; of < mine.count; of++) {
            float4 x = mine.get(of, UNITS - 1);
            top[0] = fmaxf(top[0], x.x), top[1] = fmaxf(top[1], x.y);
        }
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.f;
#pragma unroll 1
        for (int of = 0; of < mine.count; of++) {
            float4 x = mine.get(of, UNITS - 1);
            // One that saw nothing may hold anything.
            bool seen[2] = {x.z != 0.f, x.w != 0.f};
            float factor[2] = {seen[0] ? exp2_fast((x.x - top[0]) * unit) : 0.f, seen[1] ? exp2_fast((x.y - top[1]) * unit) : 0.f};
            sums[0] = fmaf(x.z, factor[0], sums[0]), sums[1] = fmaf(x.w, factor[1], sums[1]);
#pragma unroll
            for (int c = 0; c < D / 8; c++) {
                float4 y = mine.get(of, c);
                if (seen[0]) o[4 * c] = fmaf(y.x, factor[0], o[4 * c]), o[4 * c + 1] = fmaf(y.y, factor[0], o[4 * c + 1]);
                if (seen[1]) o[4 * c + 2] = fmaf(y.z, factor[1], o[4 * c + 2]), o[4 * c + 3] = fmaf(y.w, factor[1], o[4 * c + 3]);
            }
        }
        // As threads have it: the four of a row add their sums up.
        bool adds = (threadIdx.x & 3) == 0;
#pragma unroll
        for (int r = 0; r < 2; r++) softmax.top[r] = top[r], softmax.sum[r] = adds ? sums[r] : 0.f;
        return true;
    }
#endif

    // By way of `tile`, where the rows' queries were, which nobody reads any more.
    INLINE void finish(Softmax& softmax, float (&o)[D / 2], u32 tile, int group, const TensorMap& map_out) const {
        float factor[2];
#if PLAN
        if (is_cut(stretch) && !join(softmax, o)) {
            named_sync(4 + group, 128);
            return;
        }
#endif
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = quad_sum(softmax.sum[r]), top = softmax.top[r] * softmax.unit, lse;
#if SINKS
            float sink = p.sinks[head] * LOG2E, peak = fmaxf(top, sink);
            float shrink = exp2_fast(top - peak);
            float total = sum == 0.f ? exp2_fast(sink - peak) : sum * shrink + exp2_fast(sink - peak);
            bool none = peak == MINUS_INFINITY;
            factor[r] = sum == 0.f || none ? 0.f : shrink / total;
            lse = none ? MINUS_INFINITY : (peak + log2_fast(total)) * LN2;
#else
            factor[r] = sum == 0.f ? 0.f : 1.f / sum;
            lse = sum == 0.f ? MINUS_INFINITY : (top + log2_fast(sum)) * LN2;
#endif
            int i = row + 8 * r;
            if ((threadIdx.x & 3) == 0 && i < p.n) p.lse[((i64)batch * p.heads_q + head) * p.n + i] = lse;
        }
        u32 rounded[D / 4];
        round_scaled<false>(rounded, o, factor[0], factor[1]);
        named_sync(4 + group, 128);
        store_tile<D / 4, M>(tile, rounded);
        if (p.mapped & MAPPED_OUT) send_tile<D, M>(tile, map_out, 0, first, head, batch);
        else write_tile<D, M>(tile, p.out + batch * p.out_b + head * p.out_h + first * p.out_i, p.out_i, p.n - first, p.dv);
        if (MASKED && is_odd(rounded, p.n - first)) tell_broken(p, p.broken_q, batch * p.heads_q + head, div_up(p.n, 64), first / 64);
    }
};

INLINE void wait_turn(int group) {
    if (FWD_TURNS) named_sync(1 + group, 256);
}
INLINE void pass_turn(int group) {
    if (FWD_TURNS) named_arrive(1 + (group + 1 == GROUPS ? 0 : group + 1), 256);
}

INLINE void consume(const Problem& p, const Shared& shared, const TensorMap& map_out, int group) {
    bool speaks = speaks_for_warp();
    Ring<Q_STAGES> q;
    Ring<STAGES> k, v;
    Ring<IN_LINE> next;
    float o[D / 2], s[N / 2];  // [64, D], [64, N]
    u32 weights[N / 4];
    Work w;
    Visit visit(0, 0);
    Rows::Ahead ahead;
    bool more, first = true;
    // Takes the next tile and multiplies its first scores: where there is none, of nothing new, so that the matrix units'
    // pipeline has one shape.
    auto go_on = [&](bool in_turn) {
        int4 tile;
        int2 tiles;
        shared.work_full(next.place).wait(next.parity);
        shared.get_work(next.place, tile, tiles);
#if PLAN
        w.stretch = shared.get_stretch(next.place);
#endif
        __syncwarp();
        if (speaks) shared.work_empty(next.place).arrive();
        next.next();
        w.tile = tile.x, w.head = tile.y, w.batch = tile.z, more = tile.w;
        visit = Visit(tiles.x, tiles.y);
        if (more) shared.q_full(q.place).wait(q.parity);
        if (visit.count > 0) shared.k_full(k.place).wait(k.parity);
        if (in_turn) wait_turn(group);
        products_begin();
        product_rows<N, D, M>(s, shared.q(q.place) + group * 64 * 128, shared.k(k.place));
        products_commit();
        if (in_turn) pass_turn(group);
        if (more) Rows::look_ahead(ahead, p, w, shared, k.place, visit.count > 0, group);
    };
    if (group == GROUPS - 1) pass_turn(group);
    if (FWD_AHEAD) {
        go_on(false);
        products_wait<0>();
        pin(s);
    }
    for (;;) {
        if (!FWD_AHEAD) {
            go_on(true);
            products_wait<0>();
            pin(s);
        }
        if (!more) break;
        bool some = visit.count > 0, none = false;  // none: all weights are zero
        Rows rows(p, w, group, ahead);
        Softmax softmax(SHAPED ? 1.f : p.scale * LOG2E);
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.f;
        if (some) {
            Rows::Look look = rows.look<true>(shared, k.place, visit, 0, group);
            bool idle = Rows::idle(shared, k.place, group);
            __syncwarp();
            if (speaks) shared.k_empty(k.place).arrive();
            k.next();
            none = idle;
            if (idle) {
#pragma unroll
                for (int i = 0; i < N / 2; i++) s[i] = 0.f;
            } else {
                rows.soften(softmax, s, look);
            }
        }
        round_fragment(weights, s);
        if (FWD_LATE && !first) {
            // What was written of the tile before.
            wait_copies_read();
            __syncwarp();
            if (speaks) shared.q_empty(q.place ^ 1).arrive();
        }
        first = false;
        u32 mine = shared.q(q.place) + group * 64 * 128;
#pragma unroll 1
        for (int step = 1; step < visit.count; step++) {
            shared.k_full(k.place).wait(k.parity);
            if (Rows::idle(shared, k.place, group)) {
                // Only the weights before are multiplied, if there are any; there are none here.
                if (speaks) shared.k_empty(k.place).arrive();
                k.next();
                shared.v_full(v.place).wait(v.parity);
                wait_turn(group);
                if (!none) {
                    pin(o), pin(weights);
                    products_begin();
                    product_columns<D, N>(o, weights, shared.v(v.place));
                    products_commit();
                    pass_turn(group);
                    products_wait<0>();
                    pin(o), pin(weights);
#pragma unroll
                    for (int i = 0; i < N / 4; i++) weights[i] = 0;
                    none = true;
                } else {
                    pass_turn(group);
                    __syncwarp();
                }
                if (speaks) shared.v_empty(v.place).arrive();
                v.next();
                continue;
            }
            none = false;
            wait_turn(group);
            pin(o), pin(weights);
            products_begin();
            product_rows<N, D, M>(s, mine, shared.k(k.place));
            products_commit();
            shared.v_full(v.place).wait(v.parity);
            product_columns<D, N>(o, weights, shared.v(v.place));
            products_commit();
            pass_turn(group);
            Rows::Look look = rows.look(shared, k.place, visit, step, group);
            products_wait<1>();
            pin(s);
            if (speaks) shared.k_empty(k.place).arrive();
            k.next();
            rows.soften(softmax, s, look);
            if (FWD_BESIDE) hold_back(softmax.sum[0] + softmax.sum[1] < 0.f);
            products_wait<0>();
            pin(o), pin(weights);
            if (speaks) shared.v_empty(v.place).arrive();
            v.next();
            softmax.rescale(o);
            round_fragment(weights, s);
        }
        u32 at_q = q.place;
        q.next();
        if (some) shared.v_full(v.place).wait(v.parity);
        if (FWD_AHEAD) wait_turn(group);
        pin(o), pin(weights);
        products_begin();
        product_columns<D, N>(o, weights, shared.v(v.place));
        products_commit();
        if (FWD_AHEAD) {
            pass_turn(group);
            go_on(false);
        }
        products_wait<FWD_AHEAD>();
        pin(o), pin(weights);
        if (some) {
            if (speaks) shared.v_empty(v.place).arrive();
            v.next();
        }
        rows.finish(softmax, o, mine, group, map_out);
        if (FWD_AHEAD) {
            products_wait<0>();
            pin(s);
        }
        if (!FWD_LATE) {
            wait_copies_read();
            if (speaks) shared.q_empty(at_q).arrive();
        }
    }
    if (FWD_LATE) wait_copies_read();  // shared memory is there until then
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_forward(const __grid_constant__ Problem p, const __grid_constant__ TensorMap map_q,
                  const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_out) {
    extern __shared__ u8 memory[];
    Shared shared{(shared_address(memory) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        prefetch(map_q), prefetch(map_k), prefetch(map_v), prefetch(map_out);
        for (int i = 0; i < Q_STAGES; i++) shared.q_full(i).init(1), shared.q_empty(i).init(4 * GROUPS * SPEAKERS);
        for (int i = 0; i < STAGES; i++) {
            shared.k_full(i).init(1), shared.k_empty(i).init(4 * GROUPS * SPEAKERS);
            shared.v_full(i).init(1), shared.v_empty(i).init(4 * GROUPS * SPEAKERS);
        }
        for (int i = 0; i < 2; i++) shared.work_full(i).init(1), shared.work_empty(i).init(4 * GROUPS * SPEAKERS + 1);
        publish_barriers();
    }
    __syncthreads();
    int warpgroup = warpgroup_id();
    if (warpgroup == 0) {
        give_registers<GROUPS == 3 ? 32 : 24>();
        if (threadIdx.x == 0) produce(p, shared, map_q, map_k, map_v);
        else if (threadIdx.x == 32) scout(p, shared, map_q);
    } else {
        take_registers<GROUPS == 3 ? 160 : 240>();
        consume(p, shared, map_out, warpgroup - 1);
    }
}

#if SEGMENTS
extern "C" __global__ void __launch_bounds__(256) segment_ranges(const __grid_constant__ Problem p) { find_ranges<false, M, N>(p); }
#endif
