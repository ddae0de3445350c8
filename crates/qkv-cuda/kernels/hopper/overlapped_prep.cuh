// Preprocessing beside the main kernel: for the other heads, a few blocks of a separate kernel do what preprocess.cuh
// does for the first ones, and convert dq of finished heads. One multiprocessor alone reads two to three times as fast
// as when all read, if enough is in flight: 24 warps each load 8 KB by TMA, and start the next load before they finish
// processing this one. Sizes are in backward.cu.
#pragma once

constexpr int BOX = PREP_BYTES / (4 * kHeadDim),
              BOX_BYTES = PREP_BYTES / 2; // rows of each of two tensors in flight

INLINE u32 max_u16x2(u32 a, u32 b) {
    u32 x;
    asm("max.u16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}
INLINE uint4 load_shared_u4(u32 at) {
    int4 x = load_shared4(at);
    return make_uint4(x.x, x.y, x.z, x.w);
}

// The work of a warp: parts of 128 rows, in boxes. The absmax of enough heads is computed ahead of the deltas that
// depend on it, so that no warp waits long. Work is taken from a counter, so that a part that others wait for belongs
// to a running warp.
struct PrepWork {
    const HopperParams& params;
    int group, heads, window, of_keys, of_queries;
    int number,
        next_number; // index among all parts; the next one is fetched early, by the first lane
    int from, at, box;
    bool prepares;
    int head_k, head, row; // sequence · heads + head: key head, head that is read; first row
    INLINE PrepWork(const HopperParams& params, int all)
        : params(params), group(params.heads_q / params.heads_k), heads(params.batch * params.heads_k) {
        of_keys = div_up(params.m, 128), of_queries = div_up(params.n, 128);
        window = div_up(all, of_keys), from = params.prepared_heads, number = at = 0, prepares = FREE_ORDER;
        ask();
        take();
    }
    INLINE bool valid() const { return from < heads + window; }
    INLINE void ask() { next_number = lane_id() == 0 ? atomicAdd(params.progress + prep_taken_at(params), 1) : 0; }
    INLINE void take() {
        int before = number;
        number = __shfl_sync(~0u, next_number, 0), at += number - before, box = 0;
        ask();
        settle();
    }
    INLINE void settle() {
        for (; valid(); prepares = FREE_ORDER || !prepares) {
            int first = prepares ? from - window : from, of_head = prepares ? group * of_queries : of_keys;
            int count = first < params.prepared_heads ? 0 : max(min(window, heads - first), 0) * of_head;
            if (at < count) {
                int place = at / of_head, chunk = at - place * of_head;
                head = head_k = first + place, row = chunk * 128;
                if (prepares) head = head_k * group + chunk / of_queries, row = chunk % of_queries * 128;
                return;
            }
            at -= count;
            if (prepares) from += window;
        }
    }
    INLINE void next() {
        row += BOX;
        if (++box == 128 / BOX) take();
    }
};

// The largest |k| and |v| of a box, two packed values at a time.
INLINE void absmax_box(const HopperParams& params, u32 from, int batch, int row, u32& key, u32& value) {
    int lane = lane_id(), end = sequence_keys(params, batch);
    auto absmax_of = [](uint4 x) {
        return max_u16x2(max_u16x2(x.x & 0x7fff7fffu, x.y & 0x7fff7fffu),
                         max_u16x2(x.z & 0x7fff7fffu, x.w & 0x7fff7fffu));
    };
#pragma unroll
    for (int i = 0; i < BOX_BYTES / 512; i++) {
        u32 k = absmax_of(load_shared_u4(from + i * 512 + lane * 16)),
            v = absmax_of(load_shared_u4(from + BOX_BYTES + i * 512 + lane * 16));
        // As in absmax_of: masked rows count only if not finite, and only in tiles that are multiplied.
        int here = row + (i * 4 + lane / 8) % BOX;
        if (LENGTHS && here >= end) {
            auto odd = [&](u32 x) {
                return here < div_up(end, 128) * 128 && max(x & 0xffffu, x >> 16) >= INFINITE_BITS;
            };
            k = odd(k) ? k : 0, v = odd(v) ? v : 0;
        }
        key = max_u16x2(key, k), value = max_u16x2(value, v);
    }
}
// Σ out · d_out and Σ d_out² of each row of a box, row 4r + lane / 8 over eight lanes, in the order of
// attention_backward_preprocess although boxes are swizzled.
INLINE void delta_box(u32 from, float (&sum)[BOX / 4], float (&square)[BOX / 4]) {
#pragma unroll
    for (int r = 0; r < BOX / 4; r++) {
        float a[kHeadDim / 64], b[kHeadDim / 64];
#pragma unroll
        for (int c = 0; c < kHeadDim / 64; c++) {
            u32 at = from + c * BOX * 128 + r * 512 + lane_id() * 16;
            a[c] = b[c] = 0.f;
            accumulate_dot(a[c], b[c], load_shared_u4(at), load_shared_u4(at + BOX_BYTES));
        }
#pragma unroll
        for (int s = kHeadDim / 128; s > 0; s /= 2)
#pragma unroll
            for (int c = 0; c < s; c++) a[c] += a[c + s], b[c] += b[c + s];
        sum[r] = a[0], square[r] = b[0];
    }
}
// Gathers the sums of each row in the lane with its number.
INLINE float2 reduce_box_rows(float (&sum)[BOX / 4], float (&square)[BOX / 4]) {
    int lane = lane_id();
    float2 mine = make_float2(0.f, 0.f);
#pragma unroll
    for (int r = 0; r < BOX / 4; r++) {
#pragma unroll
        for (int s = 4; s > 0; s /= 2)
            sum[r] += __shfl_xor_sync(~0u, sum[r], s), square[r] += __shfl_xor_sync(~0u, square[r], s);
        float a = __shfl_sync(~0u, sum[r], lane % 4 * 8), b = __shfl_sync(~0u, square[r], lane % 4 * 8);
        if (lane / 4 == r) mine = make_float2(a, b);
    }
    return mine;
}

// Converts quarters of dq tiles of heads that are already finished.
INLINE void convert_finished_dq(const HopperParams& params, const TensorMap& map_dq, u32 place, Barrier full,
                                u32 parity) {
    constexpr int EACH = 4; // tiles a warp takes at a time
    int quarter = warp_id() % 4, of_head = div_up(params.n, kBlockM) * (params.heads_q / params.heads_k),
        end = params.batch * params.heads_k * of_head;
    u32* taken = params.progress + params.batch * params.heads_k + quarter;
    for (;;) {
        int tile = 0, count = 0;
        if (lane_id() == 0) {
            for (tile = load_acquire(taken); tile < end;) {
                int bh_k = tile / of_head;
                // Never wait here: blocks of the main kernel may wait for this one.
                if (load_acquire(params.progress + bh_k) < (u32)work_per_head(params)) break;
                int until = min(tile + EACH, (bh_k + 1) * of_head), before = atomicCAS(taken, tile, until);
                if (before == tile) {
                    count = until - tile;
                    break;
                }
                tile = before;
            }
            fence_async_proxy();
        }
        __syncwarp();
        tile = __shfl_sync(~0u, tile, 0), count = __shfl_sync(~0u, count, 0);
        if (count == 0) break;
        for (int at = tile; at < tile + count; at++) {
            bool some = __ldcg(params.tickets + at) & STORED; // unclaimed tiles have no data
            int bh = at / div_up(params.n, kBlockM);
#pragma unroll 1
            for (int block = 0; block < DQ_BLOCKS; block += 2) {
                if (lane_id() == 0) {
                    // Wait until TMA has read the previous rows.
                    tma_store_wait_read();
                    full.expect(2 * 4096);
                    for (int e = 0; e < 2; e++)
                        tma_load_bytes(place + e * 4096,
                                       params.dq_sum + (i64)at * (kBlockM * kHeadDim) + (block + e) * 4096 +
                                           quarter * 1024,
                                       4096, full);
                }
                full.wait(parity);
                parity ^= 1;
#pragma unroll 1
                for (int e = 0; e < 2; e++) {
                    float x[32];
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        int4 y = load_shared4(place + e * 4096 + i * 512 + lane_id() * 16);
                        x[4 * i] = __int_as_float(y.x), x[4 * i + 1] = __int_as_float(y.y),
                              x[4 * i + 2] = __int_as_float(y.z), x[4 * i + 3] = __int_as_float(y.w);
                    }
                    __syncwarp();
                    convert_dq_block<true>(params, map_dq, x, bh, at % div_up(params.n, kBlockM), block + e, some,
                                           place + e * 4096 - quarter * 2048);
                }
                __syncwarp();
            }
        }
    }
    tma_store_wait_read();
}

extern "C" __global__ void __launch_bounds__(32 * PREP_WARPS, 1)
    attention_backward_overlapped_prep(const __grid_constant__ HopperParams params,
                                       const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                                       const __grid_constant__ TensorMap map_out,
                                       const __grid_constant__ TensorMap map_d_out,
                                       const __grid_constant__ TensorMap map_dq) {
    extern __shared__ u8 memory[];
    int warp = warp_id(), lane = lane_id(), padded = padded_len(params.n);
    u32 base = (shared_address(memory) + 1023) & ~1023u, place = base + warp * PREP_BYTES, parity = 0;
    Barrier full{base + PREP_WARPS * PREP_BYTES + warp * 8};
    if (lane == 0) full.init(1), publish_barriers(), fence_async_proxy_shared();
    __syncwarp();
    wait_on_dependency();
    // Release what the previous kernels wrote to whoever sees this count.
    if (threadIdx.x == 0) increment_release(params.progress + prep_started_at(params)), launch_dependents();
    PrepWork part(params, gridDim.x * PREP_WARPS);
    // Boxes of two tensors: keys and values, or out and d_out.
    auto load_boxes = [&]() {
        if (lane != 0 || !part.valid()) return;
        int heads = part.prepares ? params.heads_q : params.heads_k, batch = part.head / heads,
            head = part.head - batch * heads;
        full.expect(PREP_BYTES);
        tma_load_tile<BOX, kHeadDim>(place, part.prepares ? map_out : map_k, full, part.row, head, batch);
        tma_load_tile<BOX, kHeadDim>(place + BOX_BYTES, part.prepares ? map_d_out : map_v, full, part.row, head, batch);
    };
    load_boxes();
    u32 key = 0, value = 0;
    float2 most = make_float2(0.f, 0.f);
    while (part.valid()) {
        int bh_k = part.head_k, bh = part.head, row = part.row, mine = row + lane;
        bool prepares = part.prepares, first = part.box == 0, last = part.box == 128 / BOX - 1;
        float lse = MINUS_INFINITY, d_lse = 0.f;
        if (prepares && lane < BOX && mine < params.n) {
            lse = params.lse[(i64)bh * params.n + mine];
            if (params.d_lse) d_lse = params.d_lse[(i64)bh * params.n + mine];
        }
        if (prepares && first) {
            if (!FREE_ORDER && lane == 0)
                wait_until_at_least(params.progress + absmax_done_at(params) + bh_k, part.of_keys);
            __syncwarp();
            most = head_absmax<true>(params, bh_k);
        }
        full.wait(parity);
        parity ^= 1;
        part.next();
        if (!prepares) {
            if (first) key = value = 0;
            absmax_box(params, place, bh / params.heads_k, row, key, value);
            __syncwarp();
            load_boxes();
            if (!last) continue;
            u32 k = __reduce_max_sync(~0u, max(key & 0xffffu, key >> 16)),
                v = __reduce_max_sync(~0u, max(value & 0xffffu, value >> 16));
            if (lane != 0) continue;
            params.absmax[(i64)bh * div_up(params.m, 128) + row / 128] =
                make_float2(widen((u16)min(k, INFINITE_BITS)), widen((u16)min(v, INFINITE_BITS)));
            increment_release(params.progress + absmax_done_at(params) + bh);
        } else {
            float sum[BOX / 4], square[BOX / 4];
            delta_box(place, sum, square);
            __syncwarp();
            load_boxes();
            float2 sums = reduce_box_rows(sum, square);
            if (lane < BOX) write_row_stats(params, (i64)bh * padded + mine, lse, d_lse, sums.x, sums.y, most);
            if (!last) continue;
            // TMA will read these statistics.
            fence_async_proxy();
            __threadfence();
            __syncwarp();
            if (lane == 0) increment_release(params.progress + delta_done_at(params) + bh_k);
        }
    }
    convert_finished_dq(params, map_dq, place, full, parity);
}
