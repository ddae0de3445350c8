// The sum of dq over blocks: the thread that adds tiles in global memory by TMA, and their conversion to elements at
// the end. Sizes are in backward.cu.
//
// The memory is not zeroed. Each tile has a ticket, initially 0: the first block to arrive stores its part, the others
// wait for that and add. A block without further work converts tiles of finished heads until all are converted.
#pragma once

// Bits of a ticket: the tile is claimed; its first part is stored.
constexpr u32 CLAIMED = 1, STORED = 2;

// The accumulator thread: adds staged dq blocks in global memory.
INLINE void dq_accumulator(const HopperParams& params, const Shared& shared) {
    int query_tiles = div_up(params.n, kBlockM);
    Ring<SCHEDULER_STAGES> next;
    u32 count = 0;
    for (WorkTile w; shared.take_work(next, w);) {
        QueryTileWalk walk(params, w);
        int tile = 0;
        u32 ticket = 0;
        // Claim the ticket of the next step early: an atomic is slow alongside all the additions.
        auto claim = [&]() {
            if (!walk.valid()) return;
            tile = (w.batch * params.heads_q + walk.head) * query_tiles + walk.tile();
            ticket = atomicOr(params.tickets + tile, CLAIMED);
        };
        claim();
#pragma unroll 1
        while (walk.valid()) {
            int current = tile;
            float* to = params.dq_sum + (i64)current * (kBlockM * kHeadDim);
            bool first = false;
#pragma unroll
            for (int round = 0; round < DQ_ROUNDS; round++) {
                shared.add_full().wait(count++ & 1);
                if (round == 0) {
                    first = !(ticket & CLAIMED);
                    if (!first && !(ticket & STORED)) wait_until_at_least(params.tickets + current, STORED);
                    // TMA of another multiprocessor wrote what this one adds to.
                    if (!first) fence_async_proxy();
                }
                // Warpgroup g has the blocks g · DQ_ROUNDS …
#pragma unroll
                for (int g = 0; g < CONSUMER_GROUPS; g++) {
                    if (first) tma_store_bytes(to + (g * DQ_ROUNDS + round) * 4096, shared.add(g), 4096 * 4);
                    else if (FREE_ORDER)
                        tma_reduce_add_f32(to + (g * DQ_ROUNDS + round) * 4096, shared.add(g), 4096 * 4);
                    else tma_reduce_add_u32(to + (g * DQ_ROUNDS + round) * 4096, shared.add(g), 4096 * 4);
                }
                tma_store_commit();
                tma_store_wait_read();
                shared.add_empty().arrive();
            }
            walk.next();
            claim();
            if (first) {
                tma_store_wait<0>();
                or_release(params.tickets + current, STORED);
            }
        }
        tma_store_wait<0>();
        increment_release(params.progress + w.batch * params.heads_k + w.head);
    }
}

// Converts a warp's 16 rows of a dq block, and stores them through `room`, of which the warp uses its own 16 rows.
// OVERLAPPED: scales come from a concurrent kernel.
template <bool OVERLAPPED> INLINE void convert_dq_block(const HopperParams& params, const TensorMap& map_dq,
                                                        float (&x)[32], int bh, int tile, int block, bool some,
                                                        u32 room) {
    int batch = bh / params.heads_q, head = bh - batch * params.heads_q,
        row = tile * kBlockM + (kBlockM == 128 ? block * 64 : 0), column = kBlockM == 128 ? 0 : block * 64;
    float upper = params.scale, lower = params.scale;
#if !FREE_ORDER
    const float* dq_scale = params.dq_scale + (i64)bh * padded_len(params.n) + row + fragment_row();
    upper *= reciprocal(OVERLAPPED ? __ldcg(dq_scale) : dq_scale[0]),
        lower *= reciprocal(OVERLAPPED ? __ldcg(dq_scale + 8) : dq_scale[8]); // powers of two
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] = __int2float_rn(__float_as_int(x[i]));
#endif
    u32 rounded[16];
    round_scaled<false>(rounded, x, some ? upper : 0.f, some ? lower : 0.f);
    store_tile<16, 16>(room, rounded);
    if (params.tma_stores & STORE_DQ) tma_store_tile<64, 16>(room, map_dq, column, row, head, batch);
    else
        store_tile_elementwise<64, 16>(
            room, params.dq + batch * params.dq_b + head * params.dq_h + row * params.dq_i + column, params.dq_i,
            params.n - row, params.d - column);
    if (MASKED && has_nonfinite(rounded, params.n - row))
        mark_for_recompute(params, params.recompute_q, bh, div_up(params.n, 64), row / 64);
}

// Converts finished heads, first heads first: each warp takes 16 rows of one tile after another.
INLINE void convert_dq(const HopperParams& params, const Shared& shared, const TensorMap& map_dq) {
    // Computed here: if it were available earlier, the compiler would compile the products differently.
    int group = (int)(threadIdx.x >> 7) - 1, warp = threadIdx.x >> 5 & 3, tiles = div_up(params.n, kBlockM),
        all = params.batch * params.heads_q * tiles, whole = -1;
    auto take = [&]() {
        return lane_id() == 0 ? atomicAdd(params.progress + params.batch * params.heads_k + warp, 1) : 0;
    };
    int at = __shfl_sync(~0u, take(), 0);
    while (at < all) {
        int next = take();
        int bh = at / tiles, tile = at - bh * tiles, bh_k = bh / (params.heads_q / params.heads_k);
        if (whole != bh_k) {
            whole = bh_k;
            if (lane_id() == 0) wait_until_at_least(params.progress + bh_k, work_per_head(params));
            __syncwarp();
        }
        bool some = __ldcg(params.tickets + at) & STORED; // unclaimed tiles have no data
#pragma unroll 1
        for (int block = 0; block < DQ_BLOCKS; block += 2) {
            float x[2][32];
            const float4* from =
                (const float4*)(params.dq_sum + (i64)at * (kBlockM * kHeadDim) + block * 4096) + warp * 256 + lane_id();
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float4 y = __ldcg(from + i / 8 * 1024 + i % 8 * 32);
                float* to = x[i / 8] + i % 8 * 4;
                to[0] = y.x, to[1] = y.y, to[2] = y.z, to[3] = y.w;
            }
            // Wait until TMA has read the previous rows.
            tma_store_wait_read();
            __syncwarp();
#pragma unroll
            for (int e = 0; e < 2; e++)
                convert_dq_block<false>(params, map_dq, x[e], bh, tile, block + e, some,
                                        shared.add(group) + warp * 2048 + e * 2048);
        }
        at = __shfl_sync(~0u, next, 0);
    }
    tma_store_wait_read();
}
