// Backward's sum of dq: the thread that has the copy engine add tiles up in device memory, and what rounds them in the end.
// backward.cu says the sizes.
//
// Nobody clears what is added to. Each tile has a ticket, 0 before: the first block to come puts its part there, the others wait
// until it is there, and add to it. A block that finds no more work rounds tiles of heads that are whole, until all are.
#pragma once

// Of a ticket: one has begun; what it put is there.
constexpr u32 BEGUN = 1, THERE = 2;

// Adds the dq tiles up in device memory.
INLINE void add(const Problem& p, const Shared& shared) {
    int query_tiles = div_up(p.n, M);
    Ring<IN_LINE> next;
    u32 count = 0;
    for (Work w; shared.take_work(next, w);) {
        Walk walk(p, w);
        int tile = 0;
        u32 ticket = 0;
        // A trip to a ticket takes a while beside all that is added: it is begun a step before its answer is looked at.
        auto claim = [&]() {
            if (!walk.valid()) return;
            tile = (w.batch * p.heads_q + walk.head) * query_tiles + walk.tile();
            ticket = atomicOr(p.tickets + tile, BEGUN);
        };
        claim();
#pragma unroll 1
        while (walk.valid()) {
            int now = tile;
            float* to = p.dq_sum + (i64)now * (M * D);
            bool first = false;
#pragma unroll
            for (int round = 0; round < ROUNDS; round++) {
                shared.add_full().wait(count++ & 1);
                if (round == 0) {
                    first = !(ticket & BEGUN);
                    if (!first && !(ticket & THERE)) await_count(p.tickets + now, THERE);
                    // The copy engine of another multiprocessor wrote what this one's adds to.
                    if (!first) fence_all();
                }
                // Warpgroup g has the pieces g · ROUNDS ..
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    if (first) store_bytes(to + (g * ROUNDS + round) * 4096, shared.add(g), 4096 * 4);
                    else if (FREE_ORDER) add_floats(to + (g * ROUNDS + round) * 4096, shared.add(g), 4096 * 4);
                    else add_integers(to + (g * ROUNDS + round) * 4096, shared.add(g), 4096 * 4);
                }
                commit_copies();
                wait_copies_read();
                shared.add_empty().arrive();
            }
            walk.next();
            claim();
            if (first) {
                wait_copies<0>();
                show(p.tickets + now, THERE);
            }
        }
        wait_copies<0>();
        show_one_more(p.whole + w.batch * p.heads_k + w.head);
    }
}

// Rounds a warp's 16 rows of a piece of dq, and has them written by way of `room`, of which 16 rows from the warp's number in its warpgroup on are used.
// BESIDE: what blocks that run have prepared.
template <bool BESIDE>
INLINE void round_piece(const Problem& p, const TensorMap& map_dq, float (&x)[32], int bh, int tile, int piece, bool some, u32 room) {
    int batch = bh / p.heads_q, head = bh - batch * p.heads_q, row = tile * M + (M == 128 ? piece * 64 : 0), column = M == 128 ? 0 : piece * 64;
    float upper = p.scale, lower = p.scale;
#if !FREE_ORDER
    const float* grain = p.grain + (i64)bh * of_pad(p.n) + row + fragment_row();
    upper *= reciprocal(BESIDE ? __ldcg(grain) : grain[0]), lower *= reciprocal(BESIDE ? __ldcg(grain + 8) : grain[8]);  // powers of two
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] = __int2float_rn(__float_as_int(x[i]));
#endif
    u32 rounded[16];
    round_scaled<false>(rounded, x, some ? upper : 0.f, some ? lower : 0.f);
    store_tile<16, 16>(room, rounded);
    if (p.mapped & MAPPED_DQ) send_tile<64, 16>(room, map_dq, column, row, head, batch);
    else write_tile<64, 16>(room, p.dq + batch * p.dq_b + head * p.dq_h + row * p.dq_i + column, p.dq_i, p.n - row, p.d - column);
    if (MASKED && is_odd(rounded, p.n - row)) tell_broken(p, p.broken_q, bh, div_up(p.n, 64), row / 64);
}

// Rounds what is whole: each warp for itself takes its 16 rows of the pieces of tile after tile of all, the first heads first.
INLINE void round_tiles(const Problem& p, const Shared& shared, const TensorMap& map_dq) {
    // Found anew: known from before, it would change how the products are compiled.
    int group = (int)(threadIdx.x >> 7) - 1, warp = threadIdx.x >> 5 & 3, tiles = div_up(p.n, M), all = p.batch * p.heads_q * tiles, whole = -1;
    auto take = [&]() { return lane_id() == 0 ? atomicAdd(p.whole + p.batch * p.heads_k + warp, 1) : 0; };
    int at = __shfl_sync(~0u, take(), 0);
    while (at < all) {
        int next = take();
        int bh = at / tiles, tile = at - bh * tiles, bh_k = bh / (p.heads_q / p.heads_k);
        if (whole != bh_k) {
            whole = bh_k;
            if (lane_id() == 0) await_count(p.whole + bh_k, works_of_head(p));
            __syncwarp();
        }
        bool some = __ldcg(p.tickets + at) & THERE;  // where nobody came, nothing is there
#pragma unroll 1
        for (int piece = 0; piece < PIECES; piece += 2) {
            float x[2][32];
            const float4* from = (const float4*)(p.dq_sum + (i64)at * (M * D) + piece * 4096) + warp * 256 + lane_id();
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float4 y = __ldcg(from + i / 8 * 1024 + i % 8 * 32);
                float* to = x[i / 8] + i % 8 * 4;
                to[0] = y.x, to[1] = y.y, to[2] = y.z, to[3] = y.w;
            }
            // What was there before is on its way.
            wait_copies_read();
            __syncwarp();
#pragma unroll
            for (int e = 0; e < 2; e++) round_piece<false>(p, map_dq, x[e], bh, tile, piece + e, some, shared.add(group) + warp * 2048 + e * 2048);
        }
        at = __shfl_sync(~0u, next, 0);
    }
    wait_copies_read();
}
