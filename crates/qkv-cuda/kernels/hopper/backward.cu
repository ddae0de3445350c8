// Attention backward on Hopper. `measure` finds the largest keys and values, `prepare` takes Σ out·d_out of each row; the main
// kernel does the five products, and rounds dq in the end. Each may be launched early, and waits for the one before by itself. Where that is worth
// it, `measure` and `prepare` do the first heads only, and `late` all others, beside the main kernel; it also rounds dq of heads that are done.
//
// In the main kernel a block owns BWD_N keys of a head and walks over the queries that see them, of every query head of
// the group, from the last tile to the first. Scores are kept turned, [keys, queries], so that weights and their
// gradients lie in registers as the left operands of dv and dk; only the gradient of the scores goes to shared memory,
// for dq. A dq tile is summed over blocks in device memory by the copy engine, in whatever order the blocks come.
//
// The result is the same bit for bit all the same, because what is added are whole numbers: dq in grains of a power of two
// that `prepare` gives each row. |dq| ≤ Σ|ds| · max|k| and Σ|ds| ≤ 2 · |d_out| · max|v| (+ |d_lse|), so a grain of 2^−30 of
// that never overflows, and is 2^−20 of the error that rounding a single weight to 16 bits makes. FREE_ORDER adds floats.
#ifndef SUMMED_OPERANDS
#define SUMMED_OPERANDS 1
#endif
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
#ifndef BWD_K_STAGES  // 2: the next work's first scores are multiplied in the last step of this one
#define BWD_K_STAGES (HEAD_DIM == 64 ? 2 : 1)
#endif
#ifndef BWD_EARLY  // the next scores are multiplied before dq is handed on, which takes registers
#define BWD_EARLY (HEAD_DIM == 64 || FREE_ORDER)
#endif
#ifndef BWD_SOON  // the values' place is given back before the keys': as measured, LADDER.md
#define BWD_SOON (HEAD_DIM == 128 && !MASKED)
#endif
#ifndef BWD_IDLES  // a warpgroup whose keys none of a tile's queries see multiplies nothing of its own
#define BWD_IDLES (HEAD_DIM == 128 && MASKED)
#endif
#ifndef BWD_ROUNDED  // the gradient of a score from its rounded weight, which saves registers
#define BWD_ROUNDED (HEAD_DIM == 64)
#endif

constexpr int D = HEAD_DIM, M = BWD_M, N = BWD_N, GROUPS = 2, THREADS = 128 * (GROUPS + 1);
constexpr bool HALVES = D == 256;  // each warpgroup has half of the columns of dk and dv, not half of the keys
constexpr int COLUMNS = HALVES ? M / 2 : M;  // queries whose scores a warpgroup computes, for 64 keys
constexpr int Q_STAGES = BWD_Q_STAGES, O_STAGES = BWD_O_STAGES, K_STAGES = BWD_K_STAGES;
constexpr int STRETCHES = 4;  // a work, those in line, rounded up
constexpr int PIECES = M * D / 4096;  // of a dq tile: 64 × 64 each
constexpr int ROUNDS = PIECES / GROUPS;
constexpr int KV_BYTES = N * D * 2, Q_BYTES = M * D * 2, S_BYTES = M * N * 2, ADD_BYTES = GROUPS * 4096 * 4;
constexpr int K_AT = 0, V_AT = K_AT + K_STAGES * KV_BYTES, Q_AT = V_AT + KV_BYTES, O_AT = Q_AT + Q_STAGES * Q_BYTES;
constexpr int DS_AT = O_AT + O_STAGES * Q_BYTES, P_AT = DS_AT + 2 * S_BYTES, ADD_AT = P_AT + (HALVES ? 2 * S_BYTES : 0);
constexpr int LSE_AT = ADD_AT + ADD_BYTES, GRAIN_AT = LSE_AT + Q_STAGES * M * 4, DELTA_AT = GRAIN_AT + Q_STAGES * M * 4, DROP_AT = DELTA_AT + O_STAGES * M * 4;
constexpr int STEP_AT = DROP_AT + (DROPOUT ? GROUPS * COLUMNS * 8 : 0), WORK_AT = STEP_AT + Q_STAGES * 16, WORK_BYTES = SEGMENTS ? 48 : 16;
constexpr int STRETCH_AT = WORK_AT + 2 * WORK_BYTES, BARRIERS_AT = STRETCH_AT + (PLAN ? STRETCHES * 4 : 0);
constexpr int BARRIERS = 2 * K_STAGES + 2 + 2 * Q_STAGES + 2 * O_STAGES + 2 + 4, SHARED = BARRIERS_AT + BARRIERS * 8 + 1024;
static_assert(SHARED <= 232448, "shared memory of a block");
static_assert(HALVES || S_BYTES % (N * 128) == 0, "where ds was, rows of a warp stay its own");
static_assert(!BWD_IDLES || M == 64 && N == 128 && ROUNDS == 1 && K_STAGES == 1, "its step is written for these");
static_assert((Q_STAGES & (Q_STAGES - 1)) == 0 && (O_STAGES & (O_STAGES - 1)) == 0, "places are counted in bits");

// Of the kernel beside the main one: its warps, and what each has on its way to a place of its own.
constexpr int LATE_WARPS = 24, LATE_BYTES = 8192, LATE_SHARED = LATE_WARPS * (LATE_BYTES + 8) + 1024;

extern "C" __device__ const int backward_sizes[7] = {M, N, THREADS, SHARED, !FREE_ORDER, 32 * LATE_WARPS, LATE_SHARED};

#include "walk.cuh"
#include "sum.cuh"
#include "step.cuh"
#include "rows.cuh"
#include "late.cuh"

#if PLAN
// Puts dk and dv of a stretch of a row that is cut where the others are; true for the last, which then has what all came to.
template <int COUNT> INLINE bool join(const Problem& p, const Work& w, u32 stretch, float (&dk)[COUNT], float (&dv)[COUNT]) {
    constexpr int UNITS = COUNT / 4;
    Stretch<4 * GROUPS, 2 * UNITS> mine(p, stretch, w.batch, w.head, p.heads_k);
#pragma unroll
    for (int c = 0; c < UNITS; c++) {
        mine.put(c, dk[4 * c], dk[4 * c + 1], dk[4 * c + 2], dk[4 * c + 3]);
        mine.put(UNITS + c, dv[4 * c], dv[4 * c + 1], dv[4 * c + 2], dv[4 * c + 3]);
    }
    if (!mine.is_last()) return false;
#pragma unroll
    for (int i = 0; i < COUNT; i++) dk[i] = dv[i] = 0.f;
#pragma unroll 1
    for (int of = 0; of < mine.count; of++) {
#pragma unroll
        for (int c = 0; c < UNITS; c++) {
            float4 x = mine.get(of, c), y = mine.get(of, UNITS + c);
            dk[4 * c] += x.x, dk[4 * c + 1] += x.y, dk[4 * c + 2] += x.z, dk[4 * c + 3] += x.w;
            dv[4 * c] += y.x, dv[4 * c + 1] += y.y, dv[4 * c + 2] += y.z, dv[4 * c + 3] += y.w;
        }
    }
    return true;
}
#endif

INLINE void consume(const Problem& p, const Shared& shared, const TensorMap& map_dk, const TensorMap& map_dv, int group) {
    constexpr int WIDE = HALVES ? 128 : D;  // columns of dk and dv that a warpgroup has
    bool speaks = speaks_for_warp();
    u32 keys_from = HALVES ? 0 : group * 64 * 128, values = shared.v() + (HALVES ? 0 : group * 64 * 128);
    u32 queries_from = HALVES ? group * COLUMNS * 128 : 0;
    u32 works = 0, step = 0, adds = 0;  // counted since the beginning: they say which place of a ring, and its parity
    bool ready = false;  // s has the first scores already, and what they need was asked for
    Tile::Look look;
    for (;; works++) {
        u32 at_k = works % K_STAGES, keys = shared.k(at_k) + keys_from;
        u32 in_line = works % IN_LINE;
        shared.work_full(in_line).wait(works / IN_LINE & 1);
        int4 work = shared.get_work(in_line);
        int4 seen = SEGMENTS ? shared.get_seen(in_line, group) : make_int4(0, 0, 0, 0);
        __syncwarp();
        if (speaks) shared.work_empty(in_line).arrive();
        if (!(work.w & 1)) break;
        Work w;
        w.tile = work.x >> 1, w.head = work.z, w.batch = work.w >> 1;
        look.look(p, w, group);
        float dk[WIDE / 2], dv[WIDE / 2];               // [64, WIDE]
        float s[COLUMNS / 2], dp[COLUMNS / 2], dq[32];  // [64 keys, COLUMNS], [64, 64]
        u32 weights[COLUMNS / 4], slopes[COLUMNS / 4];  // what s and dp are rounded to
#pragma unroll
        for (int i = 0; i < WIDE / 2; i++) dk[i] = dv[i] = 0.f;
        pin(dk), pin(dv);
        if (!ready) shared.k_full(at_k).wait(works / K_STAGES & 1);
        if (work.x & 1) {
            if (!ready) {
                shared.q_full(step % Q_STAGES).wait(step / Q_STAGES & 1);
                products_begin();
                product_rows<COLUMNS, D, N, M>(s, keys, shared.q(step % Q_STAGES) + queries_from);
                products_commit();
                Tile(p, w, shared.get_step(step % Q_STAGES), group, seen).look(look);
                products_wait<0>();
                pin(s);
            }
            ready = false;
            shared.v_full().wait(works & 1);
            bool more;
#pragma unroll 1
            do {
                // Nothing is multiplied yet; s has the scores of this step.
                u32 at_q = step % Q_STAGES, at_o = step % O_STAGES, at_s = step & 1;
                int4 about = shared.get_step(at_q);
                Tile tile(p, w, about, group, seen);
                more = about.w & MORE;
                // Where none of the pairs is this warpgroup's, there is only the other's dq to multiply. By a vote, so that it is known to be the same for
                // all threads of a warp: else products are compiled as if lanes went their own ways.
                if constexpr (BWD_IDLES) {
                    if (__any_sync(~0u, tile.nothing)) {
                        int other = 1 - group;
#pragma unroll
                        for (int i = 0; i < COLUMNS / 4; i++) slopes[i] = 0;
                        shared.o_full(at_o).wait(step / O_STAGES & 1);
                        wait_copies_read();
                        __syncwarp();
                        store_tile<COLUMNS / 4, N>(shared.ds(at_s) + group * 64 * 128, slopes);
                        fence_shared();
                        named_sync(1, 256);
                        products_begin();
                        product_turned<64, 64, N, N>(dq, shared.ds(at_s) + other * 64 * 128, shared.k(at_k) + group * N * 128 + other * 64 * 128);
                        products_commit();
                        products_wait<0>();
                        pin(dq);
                        if (speaks) shared.o_empty(at_o).arrive();
                        if (!more && speaks) shared.k_empty(at_k).arrive(), shared.v_empty().arrive();
                        put_dq(shared, dq, shared.grain(at_q), group, adds++, speaks);
                        step += more ? 1 : 0;
                        shared.q_full(step % Q_STAGES).wait(step / Q_STAGES & 1);
                        products_begin();
                        product_rows<COLUMNS, D, N, M>(s, keys, shared.q(step % Q_STAGES) + queries_from);
                        products_commit();
#if PLAN
                        if (more) Tile(p, w, shared.get_step(step % Q_STAGES), group, seen).look(look);
#endif
                        products_wait<0>();
                        pin(s);
                        __syncwarp();
                        if (speaks) shared.q_empty(at_q).arrive();
                        step += more ? 0 : 1;
                        continue;
                    }
                }
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
                    // The next values may come.
                    if (BWD_SOON && !more && speaks) shared.v_empty().arrive();
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
                // What of the dk and dv before lay there is on its way.
                wait_copies_read();
                __syncwarp();
                store_tile<COLUMNS / 4, N>(shared.ds(at_s) + (HALVES ? 0 : group * 64 * 128), slopes, HALVES ? group * COLUMNS / 8 : 0);
                fence_shared();
                named_sync(1, 256);
                // dq = ds · k; dk += dsᵀ · q; then the scores of the next step (after the last, of whatever lies there: the
                // matrix units' pipeline keeps one shape).
                if constexpr (HALVES) {
                    pin(dv), pin(dk);
                    products_begin();
                    product_mixed<WIDE, M, N>(dv, shared.p(at_s), shared.o(at_o) + group * 2 * M * 128);
                    product_turned<64, N>(dq, shared.ds(at_s), shared.k(at_k) + group * 2 * N * 128);
                    products_commit();
                    product_mixed<WIDE, M, N>(dk, shared.ds(at_s), shared.q(at_q) + group * 2 * M * 128);
                    products_commit();
                } else {
                    pin(dk), pin(slopes);
                    products_begin();
                    product_turned<64, N>(dq, shared.ds(at_s) + (M == 128 ? group * N * 128 : 0), shared.k(at_k) + (M == 128 ? 0 : group * N * 128));
                    products_commit();
                    product_columns<WIDE, COLUMNS, M>(dk, slopes, shared.q(at_q));
                    products_commit();
                }
                products_wait<1>();
                pin(dv), pin(weights), pin(dq);
                if (speaks) shared.o_empty(at_o).arrive();
                // The next keys may come.
                if (!HALVES && !more && speaks) {
                    shared.k_empty(at_k).arrive();
                    if (!BWD_SOON) shared.v_empty().arrive();
                }
                if (!BWD_EARLY) put_dq(shared, dq, shared.grain(at_q), group, adds++, speaks);
                u32 after = step + (more ? 1 : 0), keys_after = keys;
                if (K_STAGES == 2 && !more) {
                    u32 line = (works + 1) % IN_LINE;
                    shared.work_full(line).wait((works + 1) / IN_LINE & 1);
                    int4 following = shared.get_work(line);
                    ready = following.x & following.w & 1;
                    if (ready) {
                        after++, keys_after = shared.k(at_k ^ 1) + keys_from;
                        shared.k_full(at_k ^ 1).wait((works + 1) / K_STAGES & 1);
                    }
                }
                shared.q_full(after % Q_STAGES).wait(after / Q_STAGES & 1);
                products_begin();
                product_rows<COLUMNS, D, N, M>(s, keys_after, shared.q(after % Q_STAGES) + queries_from);
                products_commit();
#if PLAN
                if (more || ready) Tile(p, w, shared.get_step(after % Q_STAGES), group, seen).look(look);
#endif
                if (BWD_EARLY) put_dq(shared, dq, shared.grain(at_q), group, adds++, speaks);
                if constexpr (ROUNDS == 2) {
                    products_begin();
                    product_turned<64, N>(dq, shared.ds(at_s), shared.k(at_k) + (group * 2 + 1) * N * 128);
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
            wait_copies_read();
            __syncwarp();
            if (!HALVES && speaks) shared.k_empty(at_k).arrive(), shared.v_empty().arrive();
        }
        // By way of places of which this warp alone uses its rows, and which nobody reads any more: dk of where ds was, or at width 256 the
        // values; dv likewise, or, where that has no room, of where dq is handed on, once its last part is on its way.
        int from = HALVES ? group * 128 : 0, key = w.tile * N + (HALVES ? 0 : group * 64), warp = threadIdx.x >> 5 & 3;
        u32 room_k = HALVES ? shared.v() + group * 2 * N * 128 : shared.ds(0) + group * 64 * 128;
        u32 room_v = D == 64 ? room_k + N * 128 : shared.add(group) + warp * 2048;
        u32 rounded[WIDE / 4];
        bool whole = true;
#if PLAN
        u32 stretch = shared.get_stretch(works);
        if (is_cut(stretch)) whole = join(p, w, stretch, dk, dv);
#endif
        round_scaled<true>(rounded, dk, p.scale, p.scale);
        named_sync(1, 256);
        if (whole) {
            store_tile<WIDE / 4, N>(room_k, rounded);
            bool odd = MASKED && is_odd(rounded, p.m - key);
            if (p.mapped & MAPPED_DK) send_tile<WIDE, N>(room_k, map_dk, from, key, w.head, w.batch);
            else write_tile<WIDE, N>(room_k, p.dk + w.batch * p.dk_b + w.head * p.dk_h + key * p.dk_j + from, p.dk_j, p.m - key, p.d - from);
            round_fragment(rounded, dv);
            if (D != 64) shared.add_empty().wait(adds & 1 ^ 1);
            store_tile<WIDE / 4, 16>(room_v, rounded);
            odd |= MASKED && is_odd(rounded, p.m - key);
            if (p.mapped & MAPPED_DV) send_tile<WIDE, 16>(room_v, map_dv, from, key, w.head, w.batch);
            else write_tile<WIDE, 16>(room_v, p.dv_out + w.batch * p.dv_b + w.head * p.dv_h + key * p.dv_j + from, p.dv_j, p.m - key, p.dv - from);
            if (odd) tell_broken(p, p.broken_k, w.batch * p.heads_k + w.head, div_up(PLAN ? anew(p.m) : p.m, 64), key / 64);
        }
        if (HALVES) {
            wait_copies_read();
            if (speaks) shared.k_empty(at_k).arrive(), shared.v_empty().arrive();
        }
    }
    // Where dq was handed on, it is rounded.
    shared.add_empty().wait(adds & 1 ^ 1);
    wait_copies_read();
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_backward(const __grid_constant__ Problem p, const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                   const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o,
                   const __grid_constant__ TensorMap map_dq, const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv) {
    extern __shared__ u8 memory[];
    Shared shared{(shared_address(memory) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        prefetch(map_q), prefetch(map_k), prefetch(map_v), prefetch(map_o), prefetch(map_dq), prefetch(map_dk), prefetch(map_dv);
        shared.v_full().init(1), shared.v_empty().init(4 * GROUPS * SPEAKERS);
        for (int i = 0; i < K_STAGES; i++) shared.k_full(i).init(1), shared.k_empty(i).init(4 * GROUPS * SPEAKERS);
        for (int i = 0; i < Q_STAGES; i++) shared.q_full(i).init(1), shared.q_empty(i).init(4 * GROUPS * SPEAKERS);
        for (int i = 0; i < O_STAGES; i++) shared.o_full(i).init(1), shared.o_empty(i).init(4 * GROUPS * SPEAKERS);
        shared.add_full().init(4 * GROUPS * SPEAKERS), shared.add_empty().init(1);
        for (int i = 0; i < 2; i++) shared.work_full(i).init(1), shared.work_empty(i).init(4 * GROUPS * SPEAKERS + 2);
        publish_barriers();
    }
    __syncthreads();
    int warpgroup = warpgroup_id();
    if (warpgroup == 0) {
        give_registers<24>();
        if (threadIdx.x == 0) load(p, shared, map_q, map_k, map_v, map_o);
        else if (threadIdx.x == 32) add(p, shared);
        else if (threadIdx.x == 64) scout(p, shared, map_k, map_v);
    } else {
        take_registers<240>();
        consume(p, shared, map_dk, map_dv, warpgroup - 1);
        round_tiles(p, shared, map_dq);
    }
}
