// Backward on Hopper. attention_backward_absmax finds the largest key and value of each head,
// attention_backward_preprocess computes delta and the other row statistics; the main kernel does the five products and
// converts dq at the end. Each may be a dependent launch, and itself waits for the preceding kernel. If it pays, absmax
// and preprocess handle only the first heads, and attention_backward_overlapped_prep handles all others beside the main
// kernel; it also converts dq of finished heads.
//
// In the main kernel a block owns kBlockN keys of a head and walks the query tiles that see them, in every query head
// of the group, from the last tile to the first. Scores are transposed, [keys, queries], so that P and dS are in
// registers as operands A of dV and dK; only dS goes to shared memory, for dQ. TMA adds dQ tiles of all blocks in
// global memory, in whatever order they arrive.
//
// The result is still deterministic, because dQ is added in fixed point: preprocessing gives each row a power-of-two
// scale, from a bound on its elements (dq_scale.cuh). A unit of 2^−30 of that bound never overflows, and is 2^−20 of
// the error of rounding a single weight to 16 bits. FREE_ORDER adds floats instead.
#ifndef ADD_TO_DESCRIPTOR
#define ADD_TO_DESCRIPTOR 1
#endif
#include "params.cuh"

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
#ifndef BWD_K_STAGES // 2: the first scores of the next tile are multiplied in the last step of this one
#define BWD_K_STAGES (HEAD_DIM == 64 ? 2 : 1)
#endif
#ifndef BWD_SCORES_BEFORE_DQ // the next scores are multiplied before dq is staged, which takes registers
#define BWD_SCORES_BEFORE_DQ (HEAD_DIM == 64 || FREE_ORDER)
#endif
#ifndef BWD_RELEASE_V_FIRST // the stage of the values is released before that of the keys: as measured, LADDER.md
#define BWD_RELEASE_V_FIRST (HEAD_DIM == 128 && !MASKED)
#endif
#ifndef BWD_SKIP_EMPTY // a warpgroup skips products of query tiles that see none of its keys
#define BWD_SKIP_EMPTY (HEAD_DIM == 128 && MASKED)
#endif
#ifndef BWD_ROUNDED_P // ds from the rounded weight, which saves registers
#define BWD_ROUNDED_P (HEAD_DIM == 64)
#endif

constexpr int kHeadDim = HEAD_DIM, kBlockM = BWD_M, kBlockN = BWD_N, CONSUMER_GROUPS = 2,
              THREADS = 128 * (CONSUMER_GROUPS + 1);
constexpr bool SPLIT_WIDTH =
    kHeadDim == 256; // each warpgroup has half of the columns of dk and dv, not half of the keys
constexpr int COLUMNS = SPLIT_WIDTH ? kBlockM / 2 : kBlockM; // queries whose scores a warpgroup computes, for 64 keys
constexpr int Q_STAGES = BWD_Q_STAGES, O_STAGES = BWD_O_STAGES, K_STAGES = BWD_K_STAGES;
constexpr int SPLIT_SLOTS = 4;                       // the current tile and those scheduled, rounded up
constexpr int DQ_BLOCKS = kBlockM * kHeadDim / 4096; // 64 × 64 blocks of a dq tile
constexpr int DQ_ROUNDS = DQ_BLOCKS / CONSUMER_GROUPS;
constexpr int KV_BYTES = kBlockN * kHeadDim * 2, Q_BYTES = kBlockM * kHeadDim * 2, S_BYTES = kBlockM * kBlockN * 2,
              ADD_BYTES = CONSUMER_GROUPS * 4096 * 4;
constexpr int K_AT = 0, V_AT = K_AT + K_STAGES * KV_BYTES, Q_AT = V_AT + KV_BYTES, O_AT = Q_AT + Q_STAGES * Q_BYTES;
constexpr int DS_AT = O_AT + O_STAGES * Q_BYTES, P_AT = DS_AT + 2 * S_BYTES,
              ADD_AT = P_AT + (SPLIT_WIDTH ? 2 * S_BYTES : 0);
constexpr int LSE_AT = ADD_AT + ADD_BYTES, DQ_SCALE_AT = LSE_AT + Q_STAGES * kBlockM * 4,
              DELTA_AT = DQ_SCALE_AT + Q_STAGES * kBlockM * 4, DROP_AT = DELTA_AT + O_STAGES * kBlockM * 4;
constexpr int STEP_AT = DROP_AT + (DROPOUT ? CONSUMER_GROUPS * COLUMNS * 8 : 0), WORK_AT = STEP_AT + Q_STAGES * 16,
              WORK_BYTES = SEGMENTS ? 48 : 16;
constexpr int SPLIT_AT = WORK_AT + 2 * WORK_BYTES, BARRIERS_AT = SPLIT_AT + (TILE_LIST ? SPLIT_SLOTS * 4 : 0);
constexpr int BARRIERS = 2 * K_STAGES + 2 + 2 * Q_STAGES + 2 * O_STAGES + 2 + 4,
              SHARED = BARRIERS_AT + BARRIERS * 8 + 1024;
static_assert(SHARED <= 232448, "shared memory of a block");
static_assert(SPLIT_WIDTH || S_BYTES % (kBlockN * 128) == 0, "where ds was, rows of a warp stay its own");
static_assert(!BWD_SKIP_EMPTY || kBlockM == 64 && kBlockN == 128 && DQ_ROUNDS == 1 && K_STAGES == 1,
              "its step is written for these");
static_assert((Q_STAGES & (Q_STAGES - 1)) == 0 && (O_STAGES & (O_STAGES - 1)) == 0, "places are counted in bits");

// The overlapped preprocessing kernel: its warps, and bytes in flight per warp.
constexpr int PREP_WARPS = 24, PREP_BYTES = 8192, PREP_SHARED = PREP_WARPS * (PREP_BYTES + 8) + 1024;

extern "C" __device__ const int backward_sizes[7] = {kBlockM,     kBlockN,         THREADS,    SHARED,
                                                     !FREE_ORDER, 32 * PREP_WARPS, PREP_SHARED};

#include "backward_producer.cuh"
#include "dq_accumulate.cuh"
#include "backward_tile.cuh"
#include "dq_scale.cuh"
#include "preprocess.cuh"
#include "overlapped_prep.cuh"

#if TILE_LIST
// Stores dk and dv of one split of a row. Returns true for the last split to arrive, which then has the combined
// result.
template <int COUNT> INLINE bool combine_splits(const HopperParams& params, const WorkTile& w, u32 split,
                                                float (&dk)[COUNT], float (&dv)[COUNT]) {
    constexpr int UNITS = COUNT / 4;
    RowSplit<4 * CONSUMER_GROUPS, 2 * UNITS> mine(params, split, w.batch, w.head, params.heads_k);
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

INLINE void consumer(const HopperParams& params, const Shared& shared, const TensorMap& map_dk, const TensorMap& map_dv,
                     int group) {
    constexpr int WIDE = SPLIT_WIDTH ? 128 : kHeadDim; // columns of dk and dv per warpgroup
    bool elected = is_elected();
    u32 keys_from = SPLIT_WIDTH ? 0 : group * 64 * 128, values = shared.v() + (SPLIT_WIDTH ? 0 : group * 64 * 128);
    u32 queries_from = SPLIT_WIDTH ? group * COLUMNS * 128 : 0;
    u32 works = 0, step = 0, adds = 0; // running counts: they give the slot of a ring and its parity
    bool ready = false;                // s has the first scores of the tile, and its mask is being loaded
    Tile::TileMask look;
    for (;; works++) {
        u32 at_k = works % K_STAGES, keys = shared.k(at_k) + keys_from;
        u32 in_line = works % SCHEDULER_STAGES;
        shared.work_full(in_line).wait(works / SCHEDULER_STAGES & 1);
        int4 work = shared.get_work(in_line);
        int4 seen = SEGMENTS ? shared.get_visible(in_line, group) : make_int4(0, 0, 0, 0);
        __syncwarp();
        if (elected) shared.work_empty(in_line).arrive();
        if (!(work.w & 1)) break;
        WorkTile w;
        w.tile = work.x >> 1, w.head = work.z, w.batch = work.w >> 1;
        look.look(params, w, group);
        float dk[WIDE / 2], dv[WIDE / 2];              // [64, WIDE]
        float s[COLUMNS / 2], dp[COLUMNS / 2], dq[32]; // [64 keys, COLUMNS], [64, 64]
        u32 weights[COLUMNS / 4], slopes[COLUMNS / 4]; // s and dp, rounded
#pragma unroll
        for (int i = 0; i < WIDE / 2; i++) dk[i] = dv[i] = 0.f;
        fence_registers(dk), fence_registers(dv);
        if (!ready) shared.k_full(at_k).wait(works / K_STAGES & 1);
        if (work.x & 1) {
            if (!ready) {
                shared.q_full(step % Q_STAGES).wait(step / Q_STAGES & 1);
                wgmma_fence();
                gemm_abt<COLUMNS, kHeadDim, kBlockN, kBlockM>(s, keys, shared.q(step % Q_STAGES) + queries_from);
                wgmma_commit();
                Tile(params, w, shared.get_step(step % Q_STAGES), group, seen).look(look);
                wgmma_wait<0>();
                fence_registers(s);
            }
            ready = false;
            shared.v_full().wait(works & 1);
            bool more;
#pragma unroll 1
            do {
                // No product is in flight; s has the scores of this step.
                u32 at_q = step % Q_STAGES, at_o = step % O_STAGES, at_s = step & 1;
                int4 about = shared.get_step(at_q);
                Tile tile(params, w, about, group, seen);
                more = about.w & MORE_STEPS;
                // This warpgroup has none of the pairs: only the other's part of dq is left to multiply. Decided by a
                // vote, so that the compiler knows it to be warp-uniform; otherwise products are serialized.
                if constexpr (BWD_SKIP_EMPTY) {
                    if (__any_sync(~0u, tile.nothing)) {
                        int other = 1 - group;
#pragma unroll
                        for (int i = 0; i < COLUMNS / 4; i++) slopes[i] = 0;
                        shared.o_full(at_o).wait(step / O_STAGES & 1);
                        tma_store_wait_read();
                        __syncwarp();
                        store_tile<COLUMNS / 4, kBlockN>(shared.ds(at_s) + group * 64 * 128, slopes);
                        fence_async_proxy_shared();
                        named_sync(1, 256);
                        wgmma_fence();
                        gemm_atb<64, 64, kBlockN, kBlockN>(dq, shared.ds(at_s) + other * 64 * 128,
                                                           shared.k(at_k) + group * kBlockN * 128 + other * 64 * 128);
                        wgmma_commit();
                        wgmma_wait<0>();
                        fence_registers(dq);
                        if (elected) shared.o_empty(at_o).arrive();
                        if (!more && elected) shared.k_empty(at_k).arrive(), shared.v_empty().arrive();
                        stage_dq(shared, dq, shared.dq_scale(at_q), group, adds++, elected);
                        step += more ? 1 : 0;
                        shared.q_full(step % Q_STAGES).wait(step / Q_STAGES & 1);
                        wgmma_fence();
                        gemm_abt<COLUMNS, kHeadDim, kBlockN, kBlockM>(s, keys,
                                                                      shared.q(step % Q_STAGES) + queries_from);
                        wgmma_commit();
#if TILE_LIST
                        if (more) Tile(params, w, shared.get_step(step % Q_STAGES), group, seen).look(look);
#endif
                        wgmma_wait<0>();
                        fence_registers(s);
                        __syncwarp();
                        if (elected) shared.q_empty(at_q).arrive();
                        step += more ? 0 : 1;
                        continue;
                    }
                }
                // dp = v · d_outᵀ, while the scores become weights.
                shared.o_full(at_o).wait(step / O_STAGES & 1);
                wgmma_fence();
                gemm_abt<COLUMNS, kHeadDim, kBlockN, kBlockM>(dp, values, shared.o(at_o) + queries_from);
                wgmma_commit();
                tile.draw_dropout(shared.drop(group), group);
#if SOFTCAP
                float slope[COLUMNS / 2];
#else
                float* slope = nullptr;
#endif
                tile.compute_weights(s, slope, shared.lse(at_q) + (SPLIT_WIDTH ? group * COLUMNS * 4 : 0), look);
#if DROPOUT
                float kept[COLUMNS / 2];
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i++) kept[i] = s[i];
                tile.apply_dropout(kept, shared.drop(group));
                round_fragment(weights, kept);
#else
                round_fragment(weights, s);
#endif
                if constexpr (SPLIT_WIDTH) {
                    store_tile<COLUMNS / 4, kBlockN>(shared.p(at_s), weights, group * COLUMNS / 8);
                    wgmma_wait<0>();
                } else {
                    // dv += pᵀ · d_out, while ds is computed.
                    fence_registers(dv), fence_registers(weights);
                    wgmma_fence();
                    gemm_rs<WIDE, COLUMNS, kBlockM>(dv, weights, shared.o(at_o));
                    wgmma_commit();
                    wgmma_wait<1>();
                    // Release the values.
                    if (BWD_RELEASE_V_FIRST && !more && elected) shared.v_empty().arrive();
                }
                fence_registers(dp);
                // ds = p · (dp − delta)
                tile.apply_dropout(dp, shared.drop(group));
                u32 delta = shared.delta(at_o) + (fragment_column() + (SPLIT_WIDTH ? group * COLUMNS : 0)) * 4;
#pragma unroll
                for (int c = 0; c < COLUMNS / 8; c++) {
                    float2 less = load_shared2(delta + 8 * c * 4);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& x = dp[4 * c + e];
                        float weight = s[4 * c + e];
                        if (BWD_ROUNDED_P && !DROPOUT)
                            weight = e & 1 ? widen_high(weights[2 * c + e / 2]) : widen_low(weights[2 * c + e / 2]);
                        x = weight * (x - (e & 1 ? less.y : less.x));
                    }
                }
                tile.store_d_bias(dp);
#if SOFTCAP
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i++) dp[i] *= slope[i];
#endif
                round_fragment(slopes, dp);
                // Wait until TMA has read the previous dk and dv from here.
                tma_store_wait_read();
                __syncwarp();
                store_tile<COLUMNS / 4, kBlockN>(shared.ds(at_s) + (SPLIT_WIDTH ? 0 : group * 64 * 128), slopes,
                                                 SPLIT_WIDTH ? group * COLUMNS / 8 : 0);
                fence_async_proxy_shared();
                named_sync(1, 256);
                // dq = ds · k; dk += dsᵀ · q; then the scores of the next step (after the last one, from stale data, so
                // that the wgmma pipeline keeps one shape).
                if constexpr (SPLIT_WIDTH) {
                    fence_registers(dv), fence_registers(dk);
                    wgmma_fence();
                    gemm_ss<WIDE, kBlockM, kBlockN>(dv, shared.p(at_s), shared.o(at_o) + group * 2 * kBlockM * 128);
                    gemm_atb<64, kBlockN>(dq, shared.ds(at_s), shared.k(at_k) + group * 2 * kBlockN * 128);
                    wgmma_commit();
                    gemm_ss<WIDE, kBlockM, kBlockN>(dk, shared.ds(at_s), shared.q(at_q) + group * 2 * kBlockM * 128);
                    wgmma_commit();
                } else {
                    fence_registers(dk), fence_registers(slopes);
                    wgmma_fence();
                    gemm_atb<64, kBlockN>(dq, shared.ds(at_s) + (kBlockM == 128 ? group * kBlockN * 128 : 0),
                                          shared.k(at_k) + (kBlockM == 128 ? 0 : group * kBlockN * 128));
                    wgmma_commit();
                    gemm_rs<WIDE, COLUMNS, kBlockM>(dk, slopes, shared.q(at_q));
                    wgmma_commit();
                }
                wgmma_wait<1>();
                fence_registers(dv), fence_registers(weights), fence_registers(dq);
                if (elected) shared.o_empty(at_o).arrive();
                // Release the keys.
                if (!SPLIT_WIDTH && !more && elected) {
                    shared.k_empty(at_k).arrive();
                    if (!BWD_RELEASE_V_FIRST) shared.v_empty().arrive();
                }
                if (!BWD_SCORES_BEFORE_DQ) stage_dq(shared, dq, shared.dq_scale(at_q), group, adds++, elected);
                u32 after = step + (more ? 1 : 0), keys_after = keys;
                if (K_STAGES == 2 && !more) {
                    u32 line = (works + 1) % SCHEDULER_STAGES;
                    shared.work_full(line).wait((works + 1) / SCHEDULER_STAGES & 1);
                    int4 following = shared.get_work(line);
                    ready = following.x & following.w & 1;
                    if (ready) {
                        after++, keys_after = shared.k(at_k ^ 1) + keys_from;
                        shared.k_full(at_k ^ 1).wait((works + 1) / K_STAGES & 1);
                    }
                }
                shared.q_full(after % Q_STAGES).wait(after / Q_STAGES & 1);
                wgmma_fence();
                gemm_abt<COLUMNS, kHeadDim, kBlockN, kBlockM>(s, keys_after, shared.q(after % Q_STAGES) + queries_from);
                wgmma_commit();
#if TILE_LIST
                if (more || ready) Tile(params, w, shared.get_step(after % Q_STAGES), group, seen).look(look);
#endif
                if (BWD_SCORES_BEFORE_DQ) stage_dq(shared, dq, shared.dq_scale(at_q), group, adds++, elected);
                if constexpr (DQ_ROUNDS == 2) {
                    wgmma_fence();
                    gemm_atb<64, kBlockN>(dq, shared.ds(at_s), shared.k(at_k) + (group * 2 + 1) * kBlockN * 128);
                    wgmma_commit();
                }
                wgmma_wait<0>();
                fence_registers(s), fence_registers(dk), fence_registers(slopes);
                if constexpr (DQ_ROUNDS == 2) {
                    fence_registers(dq);
                    stage_dq(shared, dq, shared.dq_scale(at_q), group, adds++, elected);
                }
                __syncwarp();
                if (elected) shared.q_empty(at_q).arrive();
                step++;
            } while (more);
        } else {
            shared.v_full().wait(works & 1);
            tma_store_wait_read();
            __syncwarp();
            if (!SPLIT_WIDTH && elected) shared.k_empty(at_k).arrive(), shared.v_empty().arrive();
        }
        // Epilogue: dk is stored through the buffer of ds or, at width 256, that of the values; dv likewise or, if
        // there is no space, through the staging buffer of dq once its last part is stored. Each warp uses only its own
        // rows.
        int from = SPLIT_WIDTH ? group * 128 : 0, key = w.tile * kBlockN + (SPLIT_WIDTH ? 0 : group * 64),
            warp = threadIdx.x >> 5 & 3;
        u32 room_k = SPLIT_WIDTH ? shared.v() + group * 2 * kBlockN * 128 : shared.ds(0) + group * 64 * 128;
        u32 room_v = kHeadDim == 64 ? room_k + kBlockN * 128 : shared.add(group) + warp * 2048;
        u32 rounded[WIDE / 4];
        bool whole = true;
#if TILE_LIST
        u32 split = shared.get_split(works);
        if (is_split(split)) whole = combine_splits(params, w, split, dk, dv);
#endif
        round_scaled<true>(rounded, dk, params.scale, params.scale);
        named_sync(1, 256);
        if (whole) {
            store_tile<WIDE / 4, kBlockN>(room_k, rounded);
            bool odd = MASKED && has_nonfinite(rounded, params.m - key);
            if (params.tma_stores & STORE_DK) tma_store_tile<WIDE, kBlockN>(room_k, map_dk, from, key, w.head, w.batch);
            else
                store_tile_elementwise<WIDE, kBlockN>(
                    room_k, params.dk + w.batch * params.dk_b + w.head * params.dk_h + key * params.dk_j + from,
                    params.dk_j, params.m - key, params.d - from);
            round_fragment(rounded, dv);
            if (kHeadDim != 64) shared.add_empty().wait(adds & 1 ^ 1);
            store_tile<WIDE / 4, 16>(room_v, rounded);
            odd |= MASKED && has_nonfinite(rounded, params.m - key);
            if (params.tma_stores & STORE_DV) tma_store_tile<WIDE, 16>(room_v, map_dv, from, key, w.head, w.batch);
            else
                store_tile_elementwise<WIDE, 16>(
                    room_v, params.dv_out + w.batch * params.dv_b + w.head * params.dv_h + key * params.dv_j + from,
                    params.dv_j, params.m - key, params.dv - from);
            if (odd)
                mark_for_recompute(params, params.recompute_k, w.batch * params.heads_k + w.head,
                                   div_up(TILE_LIST ? rematerialize(params.m) : params.m, 64), key / 64);
        }
        if (SPLIT_WIDTH) {
            tma_store_wait_read();
            if (elected) shared.k_empty(at_k).arrive(), shared.v_empty().arrive();
        }
    }
    // The staging buffer of dq is reused for the conversion.
    shared.add_empty().wait(adds & 1 ^ 1);
    tma_store_wait_read();
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward(const __grid_constant__ HopperParams params, const __grid_constant__ TensorMap map_q,
                       const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                       const __grid_constant__ TensorMap map_o, const __grid_constant__ TensorMap map_dq,
                       const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv) {
    extern __shared__ u8 memory[];
    Shared shared{(shared_address(memory) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        prefetch_tensor_map(map_q), prefetch_tensor_map(map_k), prefetch_tensor_map(map_v), prefetch_tensor_map(map_o),
            prefetch_tensor_map(map_dq), prefetch_tensor_map(map_dk), prefetch_tensor_map(map_dv);
        shared.v_full().init(1), shared.v_empty().init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP);
        for (int i = 0; i < K_STAGES; i++)
            shared.k_full(i).init(1), shared.k_empty(i).init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP);
        for (int i = 0; i < Q_STAGES; i++)
            shared.q_full(i).init(1), shared.q_empty(i).init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP);
        for (int i = 0; i < O_STAGES; i++)
            shared.o_full(i).init(1), shared.o_empty(i).init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP);
        shared.add_full().init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP), shared.add_empty().init(1);
        for (int i = 0; i < 2; i++)
            shared.work_full(i).init(1), shared.work_empty(i).init(4 * CONSUMER_GROUPS * ELECTED_PER_WARP + 2);
        publish_barriers();
    }
    __syncthreads();
    int warpgroup = warpgroup_id();
    if (warpgroup == 0) {
        setmaxnreg_dec<24>();
        if (threadIdx.x == 0) producer(params, shared, map_q, map_k, map_v, map_o);
        else if (threadIdx.x == 32) dq_accumulator(params, shared);
        else if (threadIdx.x == 64) scheduler(params, shared, map_k, map_v);
    } else {
        setmaxnreg_inc<240>();
        consumer(params, shared, map_dk, map_dv, warpgroup - 1);
        convert_dq(params, shared, map_dq);
    }
}
