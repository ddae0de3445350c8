// Attention backward on Hopper: three kernels. `prepare` takes Σ out·d_out of each row and clears what is added to; the main
// one does the five products; `finish` rounds dq.
//
// In the main kernel a block owns BWD_N keys of a head and walks over the queries that see them, of every query head of
// the group, from the last tile to the first. Scores are kept turned, [keys, queries], so that weights and their
// gradients lie in registers as the left operands of dv and dk; only the gradient of the scores goes to shared memory,
// for dq. A dq tile is summed over blocks in device memory by the copy engine, in whatever order the blocks come.
//
// The result is the same bit for bit all the same, because what is added are whole numbers: dq in grains of a power of two
// that `prepare` gives each row. |dq| ≤ Σ|ds| · max|k| and Σ|ds| ≤ 2 · |d_out| · max|v| (+ |d_lse|), so a grain of 2^−30 of
// that never overflows, and is 2^−20 of the error that rounding a single weight to 16 bits makes. FREE_ORDER adds floats.
#include "problem.cuh"

#ifndef D_BIAS
#define D_BIAS 0
#endif
#ifndef FREE_ORDER
#define FREE_ORDER 0
#endif
#ifndef BWD_M
#define BWD_M (HEAD_DIM == 64 ? 128 : 64)
#endif
#ifndef BWD_N
#define BWD_N (HEAD_DIM == 256 ? 64 : 128)
#endif
#ifndef BWD_Q_STAGES
#define BWD_Q_STAGES 2
#endif
#ifndef BWD_O_STAGES
#define BWD_O_STAGES (HEAD_DIM == 256 ? 1 : 2)
#endif
#ifndef BWD_EARLY  // the next scores are multiplied before dq is handed on, which takes registers
#define BWD_EARLY (HEAD_DIM == 64 || FREE_ORDER)
#endif
#ifndef BWD_ROUNDED  // the gradient of a score from its rounded weight, which saves registers
#define BWD_ROUNDED (HEAD_DIM == 64)
#endif

constexpr int D = HEAD_DIM, M = BWD_M, N = BWD_N, GROUPS = 2, THREADS = 128 * (GROUPS + 1);
constexpr bool HALVES = D == 256;  // each warpgroup has half of the columns of dk and dv, not half of the keys
constexpr int COLUMNS = HALVES ? M / 2 : M;  // queries whose scores a warpgroup computes, for 64 keys
constexpr int Q_STAGES = BWD_Q_STAGES, O_STAGES = BWD_O_STAGES;
constexpr int PIECES = M * D / 4096;  // of a dq tile: 64 × 64 each
constexpr int ROUNDS = PIECES / GROUPS;
constexpr int KV_BYTES = N * D * 2, Q_BYTES = M * D * 2, S_BYTES = M * N * 2, ADD_BYTES = GROUPS * 4096 * 4;
constexpr int K_AT = 0, V_AT = K_AT + KV_BYTES, Q_AT = V_AT + KV_BYTES, O_AT = Q_AT + Q_STAGES * Q_BYTES;
constexpr int DS_AT = O_AT + O_STAGES * Q_BYTES, P_AT = DS_AT + 2 * S_BYTES, ADD_AT = P_AT + (HALVES ? 2 * S_BYTES : 0);
constexpr int LSE_AT = ADD_AT + ADD_BYTES, GRAIN_AT = LSE_AT + Q_STAGES * M * 4, DELTA_AT = GRAIN_AT + Q_STAGES * M * 4, DROP_AT = DELTA_AT + O_STAGES * M * 4;
constexpr int STEP_AT = DROP_AT + (DROPOUT ? GROUPS * COLUMNS * 8 : 0), WORK_AT = STEP_AT + Q_STAGES * 16, BARRIERS_AT = WORK_AT + 16;
constexpr int BARRIERS = 4 + 2 * Q_STAGES + 2 * O_STAGES + 2 + 4, SHARED = BARRIERS_AT + BARRIERS * 8 + 1024;
static_assert(SHARED <= 232448, "shared memory of a block");
static_assert((Q_STAGES & (Q_STAGES - 1)) == 0 && (O_STAGES & (O_STAGES - 1)) == 0, "places are counted in bits");

extern "C" __device__ const int backward_sizes[5] = {M, N, THREADS, SHARED, !FREE_ORDER};

struct Shared {
    u32 base;
    INLINE u32 k() const { return base + K_AT; }
    INLINE u32 v() const { return base + V_AT; }
    INLINE u32 q(u32 place) const { return base + Q_AT + place * Q_BYTES; }
    INLINE u32 o(u32 place) const { return base + O_AT + place * Q_BYTES; }
    INLINE u32 ds(u32 place) const { return base + DS_AT + place * S_BYTES; }
    INLINE u32 p(u32 place) const { return base + P_AT + place * S_BYTES; }
    INLINE u32 add(int group) const { return base + ADD_AT + group * 4096 * 4; }
    INLINE u32 lse(u32 place) const { return base + LSE_AT + place * M * 4; }
    INLINE u32 grain(u32 place) const { return base + GRAIN_AT + place * M * 4; }
    INLINE u32 delta(u32 place) const { return base + DELTA_AT + place * M * 4; }
    INLINE u32 drop(int group) const { return base + DROP_AT + group * COLUMNS * 8; }
    INLINE Barrier barrier(u32 index) const { return {base + BARRIERS_AT + index * 8}; }
    INLINE Barrier k_full() const { return barrier(0); }
    INLINE Barrier v_full() const { return barrier(1); }
    INLINE Barrier k_empty() const { return barrier(2); }
    INLINE Barrier v_empty() const { return barrier(3); }
    INLINE Barrier q_full(u32 i) const { return barrier(4 + i); }
    INLINE Barrier q_empty(u32 i) const { return barrier(4 + Q_STAGES + i); }
    INLINE Barrier o_full(u32 i) const { return barrier(4 + 2 * Q_STAGES + i); }
    INLINE Barrier o_empty(u32 i) const { return barrier(4 + 2 * Q_STAGES + O_STAGES + i); }
    INLINE Barrier add_full() const { return barrier(4 + 2 * Q_STAGES + 2 * O_STAGES); }
    INLINE Barrier add_empty() const { return barrier(5 + 2 * Q_STAGES + 2 * O_STAGES); }
    INLINE Barrier work_full(u32 i) const { return barrier(6 + 2 * Q_STAGES + 2 * O_STAGES + i); }
    INLINE Barrier work_empty(u32 i) const { return barrier(8 + 2 * Q_STAGES + 2 * O_STAGES + i); }
    // The next work: its index, and its key tile, doubled, with a bit for whether any query sees it.
    INLINE void put_work(u32 i, int index, int tile) const {
        asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(base + WORK_AT + i * 8), "r"(index), "r"(tile) : "memory");
    }
    INLINE int2 get_work(u32 i) const {
        int2 x;
        asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(base + WORK_AT + i * 8) : "memory");
        return x;
    }
    // What the step is that a place of the queries holds: the query tile, its head, which tile of the bits, flags.
    INLINE void put_step(u32 i, int tile, int head, u32 bits, u32 flags) const {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                     ::"r"(base + STEP_AT + i * 16), "r"(tile), "r"(head), "r"(bits), "r"(flags) : "memory");
    }
    INLINE int4 get_step(u32 i) const {
        int4 x;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(base + STEP_AT + i * 16) : "memory");
        return x;
    }
};
// Flags of a step: there is another; it is partial for the keys of warpgroup 0, 1.
constexpr u32 MORE = 1, PARTLY = 2;

// The query tiles that see a key tile: for each query head of the group, from the last tile to the first.
struct Walk {
    const Problem& p;
    int batch, at, key_tile, head, last_head;  // heads: head .. last_head; at: the row of the plan
    int step, count, high;
    const uint4* entries;
    INLINE Walk(const Problem& p, const Work& w) : p(p), batch(w.batch), at(w.tile), key_tile(w.tile) {
        int group = p.heads_q / p.heads_k;
        head = w.head * group, last_head = head + group - 1;
        enter();
    }
    INLINE void enter() {
        for (;; head++) {
            step = 0;
            int end = p.m;
#if LENGTHS && !SEGMENTS
            end = min(end, p.lengths[batch]);
#endif
#if PLAN
            PlanRow row(p, batch, head, at);
            count = row.count, key_tile = row.tile, entries = p.plan_tiles + row.from, high = 0;
            if (key_tile * N >= end) count = 0;
#else
            int low = 0;
            high = p.n;
#if SEGMENTS
            Extent x(p, batch, key_tile * N / 64, N / 64, p.m);
            low = x.low, high = x.high;
#elif BAND
            low = max(0, key_tile * N - p.offset - p.right), high = min(p.n, min(key_tile * N + N, end) - p.offset + p.left);
#endif
            if (key_tile * N >= end) high = 0;
            count = high > low ? div_up(high, M) - low / M : 0, high = div_up(high, M), entries = nullptr;
#endif
            if (count > 0 || head >= last_head) return;
        }
    }
    INLINE bool valid() const { return step < count; }
    INLINE void next() {
        if (++step == count && head < last_head) head++, enter();
    }
    INLINE int tile() const {
#if PLAN
        return entries[step].x & ~PARTIAL;
#else
        return high - 1 - step;
#endif
    }
    // Whether the step keeps only some pairs, for the keys of each warpgroup: flags. Of segments, the warpgroups know.
    INLINE u32 partial(u32& bits) const {
#if SEGMENTS
        return 0;
#endif
        int end = p.m, query = tile() * M;
        u32 flags = 0;
#if PLAN
        uint4 entry = entries[step];
        bits = entry.x & PARTIAL ? entry.y : NO_BITS;
        if (entry.x & PARTIAL) return 3 * PARTLY;
#endif
#if LENGTHS
        end = min(end, p.lengths[batch]);
#endif
        for (int g = 0; g < GROUPS; g++) {
            int key = key_tile * N + (HALVES ? 0 : g * 64);
            bool some = key + 64 > end;
#if BAND
            some |= key + 63 > query + p.offset + p.right || key < query + M - 1 + p.offset - p.left;
#endif
            flags |= some ? PARTLY << g : 0;
        }
        return flags;
    }
};

INLINE void load(const Problem& p, const Shared& shared, const TensorMap& map_q, const TensorMap& map_k, const TensorMap& map_v,
                 const TensorMap& map_o) {
    int tiles = div_up(p.m, N), total = tiles * p.heads_k * p.batch, padded = div_up(p.n, STATISTICS_PAD) * STATISTICS_PAD;
    Ring<Q_STAGES> q;
    Ring<O_STAGES> o;
    Ring<2> next;
    Ring<1> kv;
    for (int index = blockIdx.x;;) {
        Work w(min(index, total - 1), tiles, p.heads_k, p.batch, p.section, false);
        Walk walk(p, w);
        w.tile = walk.key_tile;
        shared.work_empty(next.place).wait(next.parity ^ 1);
        shared.put_work(next.place, index, w.tile * 2 + walk.valid());
        shared.work_full(next.place).arrive();
        next.next();
        if (index >= total) break;
        int following = atomicAdd(p.counter, 1) + gridDim.x;
        shared.k_empty().wait(kv.parity ^ 1);
        shared.k_full().expect(KV_BYTES);
        load_tile<N, D>(shared.k(), map_k, shared.k_full(), w.tile * N, w.head, w.batch);
        bool values = false;
        // The values come after the first queries: their place is free later than that of the keys.
        auto load_values = [&]() {
            if (values) return;
            values = true;
            shared.v_empty().wait(kv.parity ^ 1);
            kv.next();
            shared.v_full().expect(KV_BYTES);
            load_tile<N, D>(shared.v(), map_v, shared.v_full(), w.tile * N, w.head, w.batch);
        };
#pragma unroll 1
        for (bool more = walk.valid(); more;) {
            int tile = walk.tile(), row = tile * M, head = walk.head;
            u32 bits = NO_BITS, flags = walk.partial(bits);
            walk.next();
            more = walk.valid();
            i64 at = ((i64)w.batch * p.heads_q + head) * padded + row;
            shared.q_empty(q.place).wait(q.parity ^ 1);
            shared.put_step(q.place, tile, head, bits, flags | (more ? MORE : 0));
            shared.q_full(q.place).expect(Q_BYTES + 2 * M * 4);
            load_tile<M, D>(shared.q(q.place), map_q, shared.q_full(q.place), row, head, w.batch);
            load_bytes(shared.lse(q.place), p.lse2 + at, M * 4, shared.q_full(q.place));
            load_bytes(shared.grain(q.place), p.grain + at, M * 4, shared.q_full(q.place));
            q.next();
            load_values();
            shared.o_empty(o.place).wait(o.parity ^ 1);
            shared.o_full(o.place).expect(Q_BYTES + M * 4);
            load_tile<M, D>(shared.o(o.place), map_o, shared.o_full(o.place), row, head, w.batch);
            load_bytes(shared.delta(o.place), p.delta + at, M * 4, shared.o_full(o.place));
            o.next();
        }
        load_values();
        index = following;
    }
    __threadfence();
    if (atomicAdd(p.counter + 1, 1) == gridDim.x - 1) p.counter[0] = 0, p.counter[1] = 0;
}

// Adds the dq tiles up in device memory.
INLINE void add(const Problem& p, const Shared& shared) {
    int tiles = div_up(p.m, N), total = tiles * p.heads_k * p.batch, query_tiles = div_up(p.n, M);
    Ring<2> next;
    u32 count = 0;
    for (;;) {
        shared.work_full(next.place).wait(next.parity);
        int index = shared.get_work(next.place).x;
        shared.work_empty(next.place).arrive();
        next.next();
        if (index >= total) break;
        Work w(index, tiles, p.heads_k, p.batch, p.section, false);
#pragma unroll 1
        for (Walk walk(p, w); walk.valid(); walk.next()) {
            float* to = p.dq_sum + (((i64)w.batch * p.heads_q + walk.head) * query_tiles + walk.tile()) * (M * D);
#pragma unroll
            for (int round = 0; round < ROUNDS; round++) {
                shared.add_full().wait(count++ & 1);
                // Warpgroup g has the pieces g · ROUNDS ..
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    if (FREE_ORDER) add_floats(to + (g * ROUNDS + round) * 4096, shared.add(g), 4096 * 4);
                    else add_integers(to + (g * ROUNDS + round) * 4096, shared.add(g), 4096 * 4);
                }
                commit_copies();
                wait_copies_read();
                shared.add_empty().arrive();
            }
        }
    }
}

#if SEGMENTS
// Up to which query all keys of a warpgroup are seen: none, where some of them are not there.
INLINE int key_end(int all_high, int tile, int group, int m) { return tile * N + (HALVES ? 0 : group * 64) + 64 > m ? 0 : all_high; }
#endif

// One step of a warpgroup: 64 keys from `key` on, COLUMNS queries from `query` on.
struct Tile {
    const Problem& p;
    int batch, head, key, query, query_tile, key_tile;
    bool partial;
    u32 bits_of;
    // `whole`: the queries that see all keys of the warpgroup, where segments say so.
    INLINE Tile(const Problem& p, const Work& w, int4 step, int group, int2 whole) : p(p), batch(w.batch), head(step.y) {
        query_tile = step.x, key_tile = w.tile, bits_of = step.z, partial = step.w & (PARTLY << group);
        if (SEGMENTS) partial = query_tile * M < whole.x || min(query_tile * M + M, p.n) > whole.y;
        key = key_tile * N + (HALVES ? 0 : group * 64), query = query_tile * M + (HALVES ? group * COLUMNS : 0);
    }

    // What a partial step needs from device memory, asked for one step ahead: each lane has the bits of the queries `lane`,
    // `lane + 32` …, for the 16 keys of its warp.
    struct Look {
        u32 bits[PLAN ? COLUMNS / 32 : 1];
    };
    INLINE void look(Look& look) const {
#if PLAN
        int lane = lane_id(), of = key - key_tile * N + (threadIdx.x >> 5 & 3) * 16;
        if (!partial) return;
#pragma unroll
        for (int x = 0; x < COLUMNS / 32; x++) {
            int i = query + lane + 32 * x;
            look.bits[x] = bits_of == NO_BITS ? ~0u : p.plan_bits[((i64)bits_of * M + i - query_tile * M) * (N / 32) + of / 32];
        }
#endif
    }
    // Bit r of a lane's word: whether its query sees key r of the warp's 16.
    INLINE void settle(Look& look) const {
#if PLAN
        int of = key - key_tile * N + (threadIdx.x >> 5 & 3) * 16;
#pragma unroll
        for (int x = 0; x < COLUMNS / 32; x++) look.bits[x] >>= of & 31;
#endif
    }

    // Products become weights: exponentials of the shaped score against the log-sum, 0 where a pair is absent. `slope`
    // gets what the cap lets through.
    INLINE void weigh(float (&s)[COLUMNS / 2], float* slope, u32 lse, Look& look) const {
        int row = key + fragment_row(), column = query + fragment_column();
        float unit = p.scale * LOG2E;
#if SHAPED
        Shape shape(p, batch, head);
#endif
#pragma unroll
        for (int c = 0; c < COLUMNS / 8; c++) {
            float2 against = load_shared2(lse + (column - query + 8 * c) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = s[4 * c + e];
                float y = e & 1 ? against.y : against.x;
#if SHAPED
                int i = column + 8 * c + (e & 1), j = row + (e & 2) * 4;
                x = exp2_fast(shape(x, i, j, i < p.n && j < p.m, slope + 4 * c + e) - y);
#else
                x = exp2_fast(fmaf(x, unit, -y));
#endif
            }
        }
        if (partial) {
            settle(look);
            int end = p.m;
#if LENGTHS && !SEGMENTS
            end = min(end, p.lengths[batch]);
#endif
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int j = row + 8 * r;
                bool inside = j < end;
#if SEGMENTS
                int2 range = p.ranges[(i64)batch * p.m + min(j, p.m - 1)];
                int low = range.x - column, high = range.y - 1 - column;
#elif BAND
                int low = j - p.offset - p.right - column, high = j - p.offset + p.left - column;
#endif
#pragma unroll
                for (int c = 0; c < COLUMNS / 8; c++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        bool kept = inside;
                        int i = 8 * c + e;
                        (void)i;
#if BAND || SEGMENTS
                        kept = kept && i >= low && i <= high;
#endif
#if PLAN
                        u32 word = __shfl_sync(~0u, look.bits[c / 4], c % 4 * 8 + fragment_column() + e);
                        kept = kept && (word >> ((threadIdx.x >> 2 & 7) + 8 * r) & 1);
#endif
                        if (!kept) s[4 * c + 2 * r + e] = 0.f;
                    }
                }
            }
        }
    }

    // Draws which pairs dropout keeps: a byte for each query and 8 keys.
    INLINE void draw(u32 to, int group) const {
#if DROPOUT
        int t = threadIdx.x & 127;
#pragma unroll
        for (int r = 0; r < COLUMNS * 8 / 128; r++) {
            int at = r * 128 + t;
            store_shared(to + at, (u8)dropout_keep(p.seed, batch, head, query + at / 8, key / 8 + at % 8, p.dropout_threshold));
        }
        named_sync(2 + group, 128);
#endif
    }
    INLINE void drop(float (&x)[COLUMNS / 2], u32 from) const {
#if DROPOUT
#pragma unroll
        for (int c = 0; c < COLUMNS / 8; c++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 kept = load_shared_u16(from + (fragment_column() + 8 * c + e) * 8 + (threadIdx.x >> 5 & 3) * 2) >> (threadIdx.x >> 2 & 7);
                float &a = x[4 * c + e], &b = x[4 * c + 2 + e];
                a = kept & 1 ? a * p.dropout_scale : 0.f, b = kept & 256 ? b * p.dropout_scale : 0.f;
            }
        }
#endif
    }

    // The gradient of the bias is that of the scores.
    INLINE void give_bias(const float (&ds)[COLUMNS / 2]) const {
#if D_BIAS
#pragma unroll
        for (int x = 0; x < COLUMNS / 2; x++) {
            int i = query + fragment_column() + (x / 4) * 8 + (x & 1), j = key + fragment_row() + (x & 2) * 4;
            if (i < p.n && j < p.m) p.d_bias[batch * p.d_bias_b + head * p.d_bias_h + i * p.d_bias_i + j * p.d_bias_j] = ds[x];
        }
#endif
    }
};

// Hands a piece of dq to the thread that adds it up, in the grains of its rows.
INLINE void put_dq(const Shared& shared, const float (&dq)[32], u32 grain, int group, u32 count, bool speaks) {
    int row = fragment_row() + (M == 128 ? group * 64 : 0);
    float upper = load_shared(grain + row * 4), lower = load_shared(grain + (row + 8) * 4);
    shared.add_empty().wait(count & 1 ^ 1);
    u32 to = shared.add(group) + (threadIdx.x & 127) * 16;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float* x = dq + 4 * i;
        if (FREE_ORDER) store_shared(to + i * 2048, x[0], x[1], x[2], x[3]);
        else
            store_shared(to + i * 2048, __float2int_rn(x[0] * upper), __float2int_rn(x[1] * upper), __float2int_rn(x[2] * lower),
                         __float2int_rn(x[3] * lower));
    }
    fence_shared();
    __syncwarp();
    if (speaks) shared.add_full().arrive();
}

INLINE void consume(const Problem& p, const Shared& shared, int group) {
    constexpr int WIDE = HALVES ? 128 : D;  // columns of dk and dv that a warpgroup has
    int tiles = div_up(p.m, N), total = tiles * p.heads_k * p.batch;
    bool speaks = lane_id() == 0;
    u32 keys = shared.k() + (HALVES ? 0 : group * 64 * 128), values = shared.v() + (HALVES ? 0 : group * 64 * 128);
    u32 queries_from = HALVES ? group * COLUMNS * 128 : 0;
    u32 works = 0, step = 0, adds = 0;  // counted since the beginning: they say which place of a ring, and its parity
    for (;; works++) {
        shared.work_full(works & 1).wait(works >> 1 & 1);
        int2 work = shared.get_work(works & 1);
        __syncwarp();
        if (speaks) shared.work_empty(works & 1).arrive();
        if (work.x >= total) break;
        Work w(work.x, tiles, p.heads_k, p.batch, p.section, false);
        w.tile = work.y >> 1;
        int2 whole = make_int2(0, 0);
#if SEGMENTS
        Extent of_keys(p, w.batch, w.tile * (N / 64) + (HALVES ? 0 : group), 1, p.m);
        whole = make_int2(of_keys.all_low, key_end(of_keys.all_high, w.tile, group, p.m));
#endif
        float dk[WIDE / 2], dv[WIDE / 2];               // [64, WIDE]
        float s[COLUMNS / 2], dp[COLUMNS / 2], dq[32];  // [64 keys, COLUMNS], [64, 64]
        u32 weights[COLUMNS / 4], slopes[COLUMNS / 4];  // what s and dp are rounded to
#pragma unroll
        for (int i = 0; i < WIDE / 2; i++) dk[i] = dv[i] = 0.f;
        pin(dk), pin(dv);
        shared.k_full().wait(works & 1);
        if (work.y & 1) {
            shared.q_full(step % Q_STAGES).wait(step / Q_STAGES & 1);
            products_begin();
            product_rows<COLUMNS, D, N, M>(s, keys, shared.q(step % Q_STAGES) + queries_from);
            products_commit();
            products_wait<0>();
            pin(s);
            shared.v_full().wait(works & 1);
            bool more;
            Tile::Look look;
            Tile(p, w, shared.get_step(step % Q_STAGES), group, whole).look(look);
#pragma unroll 1
            do {
                // Nothing is multiplied yet; s has the scores of this step.
                u32 at_q = step % Q_STAGES, at_o = step % O_STAGES, at_s = step & 1;
                int4 about = shared.get_step(at_q);
                Tile tile(p, w, about, group, whole);
                more = about.w & MORE;
                // dp = v · d_outᵀ, under which the scores become weights.
                shared.o_full(at_o).wait(step / O_STAGES & 1);
                products_begin();
                product_rows<COLUMNS, D, N, M>(dp, values, shared.o(at_o) + queries_from);
                products_commit();
                tile.draw(shared.drop(group), group);
#if SOFTCAP
                float slope[COLUMNS / 2];
#else
                float* slope = nullptr;
#endif
                tile.weigh(s, slope, shared.lse(at_q) + (HALVES ? group * COLUMNS * 4 : 0), look);
#if DROPOUT
                float kept[COLUMNS / 2];
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i++) kept[i] = s[i];
                tile.drop(kept, shared.drop(group));
                round_fragment(weights, kept);
#else
                round_fragment(weights, s);
#endif
                if constexpr (HALVES) {
                    store_tile<COLUMNS / 4, N>(shared.p(at_s), weights, group * COLUMNS / 8);
                    products_wait<0>();
                } else {
                    // dv += pᵀ · d_out, under which ds is made.
                    pin(dv), pin(weights);
                    products_begin();
                    product_columns<WIDE, COLUMNS, M>(dv, weights, shared.o(at_o));
                    products_commit();
                    products_wait<1>();
                }
                pin(dp);
                // ds = p · (dp − Σ out · d_out)
                tile.drop(dp, shared.drop(group));
                u32 delta = shared.delta(at_o) + (fragment_column() + (HALVES ? group * COLUMNS : 0)) * 4;
#pragma unroll
                for (int c = 0; c < COLUMNS / 8; c++) {
                    float2 less = load_shared2(delta + 8 * c * 4);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& x = dp[4 * c + e];
                        float weight = s[4 * c + e];
                        if (BWD_ROUNDED && !DROPOUT) weight = e & 1 ? widen_high(weights[2 * c + e / 2]) : widen_low(weights[2 * c + e / 2]);
                        x = weight * (x - (e & 1 ? less.y : less.x));
                    }
                }
                tile.give_bias(dp);
#if SOFTCAP
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i++) dp[i] *= slope[i];
#endif
                round_fragment(slopes, dp);
                store_tile<COLUMNS / 4, N>(shared.ds(at_s) + (HALVES ? 0 : group * 64 * 128), slopes, HALVES ? group * COLUMNS / 8 : 0);
                fence_shared();
                named_sync(1, 256);
                // dq = ds · k; dk += dsᵀ · q; then the scores of the next step (after the last, of nothing new: the
                // matrix units' pipeline keeps one shape).
                if constexpr (HALVES) {
                    pin(dv), pin(dk);
                    products_begin();
                    product_mixed<WIDE, M, N>(dv, shared.p(at_s), shared.o(at_o) + group * 2 * M * 128);
                    product_turned<64, N>(dq, shared.ds(at_s), shared.k() + group * 2 * N * 128);
                    products_commit();
                    product_mixed<WIDE, M, N>(dk, shared.ds(at_s), shared.q(at_q) + group * 2 * M * 128);
                    products_commit();
                } else {
                    pin(dk), pin(slopes);
                    products_begin();
                    product_turned<64, N>(dq, shared.ds(at_s) + (M == 128 ? group * N * 128 : 0), shared.k() + (M == 128 ? 0 : group * N * 128));
                    products_commit();
                    product_columns<WIDE, COLUMNS, M>(dk, slopes, shared.q(at_q));
                    products_commit();
                }
                products_wait<1>();
                pin(dv), pin(weights), pin(dq);
                if (speaks) shared.o_empty(at_o).arrive();
                if (!BWD_EARLY) put_dq(shared, dq, shared.grain(at_q), group, adds++, speaks);
                u32 after = step + (more ? 1 : 0);
                shared.q_full(after % Q_STAGES).wait(after / Q_STAGES & 1);
                products_begin();
                product_rows<COLUMNS, D, N, M>(s, keys, shared.q(after % Q_STAGES) + queries_from);
                products_commit();
#if PLAN
                if (more) Tile(p, w, shared.get_step(after % Q_STAGES), group, whole).look(look);
#endif
                if (BWD_EARLY) put_dq(shared, dq, shared.grain(at_q), group, adds++, speaks);
                if constexpr (ROUNDS == 2) {
                    products_begin();
                    product_turned<64, N>(dq, shared.ds(at_s), shared.k() + (group * 2 + 1) * N * 128);
                    products_commit();
                }
                products_wait<0>();
                pin(s), pin(dk), pin(slopes);
                if constexpr (ROUNDS == 2) {
                    pin(dq);
                    put_dq(shared, dq, shared.grain(at_q), group, adds++, speaks);
                }
                __syncwarp();
                if (speaks) shared.q_empty(at_q).arrive();
                step++;
            } while (more);
        } else {
            shared.v_full().wait(works & 1);
        }
        if (speaks) shared.k_empty().arrive();
        int from = HALVES ? group * 128 : 0, key = w.tile * N + (HALVES ? 0 : group * 64);
        bool wide_k = p.d % 8 == 0 && (p.dk_j | p.dk_h | p.dk_b) % 8 == 0 && ((u64)p.dk & 15) == 0;
        bool wide_v = p.dv % 8 == 0 && (p.dv_j | p.dv_h | p.dv_b) % 8 == 0 && ((u64)p.dv_out & 15) == 0;
        u16* to_k = p.dk + w.batch * p.dk_b + w.head * p.dk_h + key * p.dk_j + from;
        u16* to_v = p.dv_out + w.batch * p.dv_b + w.head * p.dv_h + key * p.dv_j + from;
        // By way of the values' place, of which a warpgroup is the only reader, or else both have read.
        if (HALVES) named_sync(1, 256);
        else named_sync(4 + group, 128);
        u32 room = HALVES ? shared.v() + group * 2 * N * 128 : values;
        bool odd = write_fragment<N>(room, to_k, p.dk_j, dk, p.scale, p.scale, p.m - key, p.d - from, wide_k);
        __syncwarp();
        odd |= write_fragment<N>(room, to_v, p.dv_j, dv, 1.f, 1.f, p.m - key, p.dv - from, wide_v);
        if (MASKED && odd) tell_broken(p, p.broken_k, w.batch * p.heads_k + w.head, div_up(p.m, 64), key / 64);
        fence_shared();
        __syncwarp();
        if (speaks) shared.v_empty().arrive();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward(const __grid_constant__ Problem p, const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                   const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o) {
    extern __shared__ u8 memory[];
    Shared shared{(shared_address(memory) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        prefetch(map_q), prefetch(map_k), prefetch(map_v), prefetch(map_o);
        shared.k_full().init(1), shared.v_full().init(1), shared.k_empty().init(4 * GROUPS), shared.v_empty().init(4 * GROUPS);
        for (int i = 0; i < Q_STAGES; i++) shared.q_full(i).init(1), shared.q_empty(i).init(4 * GROUPS);
        for (int i = 0; i < O_STAGES; i++) shared.o_full(i).init(1), shared.o_empty(i).init(4 * GROUPS);
        shared.add_full().init(4 * GROUPS), shared.add_empty().init(1);
        for (int i = 0; i < 2; i++) shared.work_full(i).init(1), shared.work_empty(i).init(4 * GROUPS + 1);
        publish_barriers();
    }
    __syncthreads();
    int warpgroup = warpgroup_id();
    if (warpgroup == 0) {
        give_registers<24>();
        if (threadIdx.x == 0) load(p, shared, map_q, map_k, map_v, map_o);
        else if (threadIdx.x == 32) add(p, shared);
    } else {
        take_registers<240>();
        consume(p, shared, warpgroup - 1);
    }
}

// Threads that share a row of the statistics: 16 bytes each.
constexpr int LANES = HEAD_DIM / 8;
constexpr u32 INFINITE_BITS = ELEMENT == 0 ? 0x7f80 : 0x7c00;

// The largest absolute value of rows 128 · blockIdx.x .. of a matrix, for the whole block; ∞ where one is not a number. Rows
// from `end` on, which are multiplied though they are masked, count only where they are not finite.
INLINE float largest(const u16* x, i64 stride, int columns, int rows, int end) {
    int first = blockIdx.x * 128, lane = threadIdx.x % LANES;
    u32 most = 0;
    bool wide = columns % 8 == 0 && stride % 8 == 0 && ((u64)x & 15) == 0;
#pragma unroll
    for (int r = 0; r < LANES / 2; r++) {
        int row = first + r * (256 / LANES) + threadIdx.x / LANES;
        if (row >= rows) continue;
        u32 here = 0;
        if (wide) {
            int c = lane * 8;
            if (c < columns) {
                uint4 y = *(const uint4*)(x + row * stride + c);
                // Magnitudes of 16-bit floats compare as integers.
                auto take = [&](u32 two) { here = max(here, max(two & 0x7fffu, two >> 16 & 0x7fffu)); };
                take(y.x), take(y.y), take(y.z), take(y.w);
            }
        } else {
            for (int c = lane; c < columns; c += LANES) here = max(here, (u32)x[row * stride + c] & 0x7fffu);
        }
        if (row < end || here >= INFINITE_BITS) most = max(most, here);
    }
    __shared__ u32 seen[8];
    for (int s = 16; s > 0; s /= 2) most = max(most, __shfl_xor_sync(~0u, most, s));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) seen[threadIdx.x / 32] = most;
    __syncthreads();
    for (int w = 0; w < 8; w++) most = max(most, seen[w]);
    return widen((u16)min(most, INFINITE_BITS));
}

// The largest |k| and |v| of 128 keys of a head.
extern "C" __global__ void __launch_bounds__(256) attention_backward_measure(const __grid_constant__ Problem p) {
    int bh = blockIdx.y, batch = bh / p.heads_k, head = bh - batch * p.heads_k, end = p.m;
#if LENGTHS
    end = min(end, p.lengths[batch]);
#endif
    float2 most;
    int rows = min(p.m, div_up(end, 128) * 128);
    most.x = largest(p.k + batch * p.k_b + head * p.k_h, p.k_j, p.d, rows, end);
    most.y = largest(p.v + batch * p.v_b + head * p.v_h, p.v_j, p.dv, rows, end);
    if (threadIdx.x == 0) p.limits[(i64)bh * gridDim.x + blockIdx.x] = most;
}

// Σ out · d_out of each row, less the gradient of its lse; the lse in units of log2, +∞ where a row saw nothing or is padding;
// the grain of its dq; zeros to add dq to.
extern "C" __global__ void __launch_bounds__(256) attention_backward_prepare(const __grid_constant__ Problem p) {
    int bh = blockIdx.y, batch = bh / p.heads_q, head = bh - batch * p.heads_q;
    int padded = div_up(p.n, STATISTICS_PAD) * STATISTICS_PAD, lane = threadIdx.x % LANES;
    int tiles = div_up(p.n, M), mine = STATISTICS_PAD / M;
    for (int t = blockIdx.x * mine; t < min(tiles, (int)(blockIdx.x + 1) * mine); t++) {
        float4* zero = (float4*)(p.dq_sum + ((i64)bh * tiles + t) * (M * D));
        for (int x = threadIdx.x; x < M * D / 4; x += 256) zero[x] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float2 most = make_float2(0.f, 0.f);
#if !FREE_ORDER
    int parts = div_up(p.m, 128);
    const float2* limits = p.limits + ((i64)batch * p.heads_k + head / (p.heads_q / p.heads_k)) * parts;
    for (int x = threadIdx.x & 31; x < parts; x += 32) most.x = fmaxf(most.x, limits[x].x), most.y = fmaxf(most.y, limits[x].y);
    for (int x = 16; x > 0; x /= 2)
        most.x = fmaxf(most.x, __shfl_xor_sync(~0u, most.x, x)), most.y = fmaxf(most.y, __shfl_xor_sync(~0u, most.y, x));
#endif
    const u16* out = p.out + batch * p.out_b + head * p.out_h;
    const u16* d_out = p.d_out + batch * p.d_out_b + head * p.d_out_h;
    bool wide = p.dv % 8 == 0 && (p.out_i | p.out_h | p.out_b | p.d_out_i | p.d_out_h | p.d_out_b) % 8 == 0 && (((u64)p.out | (u64)p.d_out) & 15) == 0;
#pragma unroll 4
    for (int r = 0; r < STATISTICS_PAD * LANES / 256; r++) {
        int i = blockIdx.x * STATISTICS_PAD + r * (256 / LANES) + threadIdx.x / LANES;
        float sum = 0.f, square = 0.f;
        auto both = [&](u32 x, u32 y) {
            float a = widen_low(y), b = widen_high(y);
            sum += widen_low(x) * a + widen_high(x) * b, square += a * a + b * b;
        };
        if (i < p.n) {
            const u16 *a = out + i * p.out_i, *b = d_out + i * p.d_out_i;
            if (wide) {
                int c = lane * 8;
                if (c < p.dv) {
                    uint4 x = *(const uint4*)(a + c), y = *(const uint4*)(b + c);
                    both(x.x, y.x), both(x.y, y.y), both(x.z, y.z), both(x.w, y.w);
                }
            } else {
                for (int c = lane; c < p.dv; c += LANES) both(a[c], b[c]);
            }
        }
#pragma unroll
        for (int x = LANES / 2; x > 0; x /= 2) sum += __shfl_xor_sync(~0u, sum, x), square += __shfl_xor_sync(~0u, square, x);
        if (lane == 0) {
            i64 at = (i64)bh * p.n + i, to = (i64)bh * padded + i;
            float lse = i < p.n ? p.lse[at] : MINUS_INFINITY, d_lse = p.d_lse && i < p.n ? p.d_lse[at] : 0.f;
            p.lse2[to] = lse == MINUS_INFINITY ? -MINUS_INFINITY : lse * LOG2E;
            p.delta[to] = sum - d_lse;
            float largest = most.x * (2.f * (DROPOUT ? p.dropout_scale : 1.f) * sqrtf(square * p.dv) * most.y + fabsf(d_lse));
            // 2^(30 − ⌈log2 largest⌉), from the exponent of `largest`; a row without a bound has no numbers either.
            int exponent = (int)(__float_as_uint(fmaxf(largest, 1e-30f)) >> 23) - 126;
            p.grain[to] = largest < 1e37f ? __uint_as_float((u32)(min(30 - exponent, 126) + 127) << 23) : __uint_as_float(0x7fc00000);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) attention_backward_finish(const __grid_constant__ Problem p) {
    int bh = blockIdx.y, batch = bh / p.heads_q, head = bh - batch * p.heads_q, t = threadIdx.x & 127;
    bool wide = p.d % 8 == 0 && (p.dq_i | p.dq_h | p.dq_b) % 8 == 0 && ((u64)p.dq & 15) == 0;
    for (int piece = threadIdx.x / 128; piece < PIECES; piece += 2) {
        const float4* from = (const float4*)(p.dq_sum + ((i64)bh * gridDim.x + blockIdx.x) * (M * D) + piece * 4096) + t;
        int row = blockIdx.x * M + (M == 128 ? piece * 64 : 0), column = M == 128 ? 0 : piece * 64;
        float x[32], upper = p.scale, lower = p.scale;
#if !FREE_ORDER
        const float* grain = p.grain + (i64)bh * (div_up(p.n, STATISTICS_PAD) * STATISTICS_PAD) + row + fragment_row();
        upper /= grain[0], lower /= grain[8];
#endif
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float4 y = from[i * 128];
            x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
        }
#if !FREE_ORDER
#pragma unroll
        for (int i = 0; i < 32; i++) x[i] = __int2float_rn(__float_as_int(x[i]));
#endif
        if (MASKED) {
            float sum = 0.f;  // not a number where one of them is not finite
#pragma unroll
            for (int i = 0; i < 32; i++) sum += x[i] * (i & 2 ? lower : upper) * 0.f;
            // Rows from n on have grains like any other.
            if (sum != 0.f && row < p.n) tell_broken(p, p.broken_q, bh, div_up(p.n, 64), row / 64);
        }
        store_fragment(p.dq + batch * p.dq_b + head * p.dq_h + row * p.dq_i + column, p.dq_i, x, upper, lower, p.n - row, p.d - column, wide);
    }
}

// The sink of a head takes the mass exp(sink − lse) of each row.
extern "C" __global__ void __launch_bounds__(256) sink_gradient(const __grid_constant__ Problem p) {
    int head = blockIdx.x, padded = div_up(p.n, STATISTICS_PAD) * STATISTICS_PAD;
    float sink = p.sinks[head] * LOG2E, sum = 0.f;
    for (int b = 0; b < p.batch; b++)
        for (int i = threadIdx.x; i < p.n; i += 256) {
            i64 at = ((i64)b * p.heads_q + head) * padded + i;
            sum -= exp2_fast(sink - p.lse2[at]) * p.delta[at];
        }
    __shared__ float sums[256];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int x = 128; x > 0; x /= 2) {
        if (threadIdx.x < x) sums[threadIdx.x] += sums[threadIdx.x + x];
        __syncthreads();
    }
    if (threadIdx.x == 0) p.d_sinks[head] = sums[0];
}

#if SEGMENTS
extern "C" __global__ void __launch_bounds__(256) segment_ranges(const __grid_constant__ Problem p) { find_ranges<true>(p); }
#endif
