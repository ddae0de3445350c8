// Decoding on Hopper: one query per head against many keys, bound by memory bandwidth. Persistent blocks process one
// split of a key head's keys after another, for all query heads that share it, packed into up to 16 rows of a
// tensor-core tile. One producer warp loads keys and values by TMA, 64 at a time, across the ends of splits; each of
// four consumer warps computes with 16 of the 64. Masks and biases come from score.cuh. WIDTH = D = DV: 64, 128 or 256.

#ifndef STAGES
#define STAGES (WIDTH >= 128 ? 3 : 5)
#endif
#define BLOCKS (WIDTH >= 256 ? 1 : 2) // per multiprocessor
#define RING_BYTES (STAGES * 2 * KV_TILE_BYTES)
#define LD_OUT (WIDTH + 4)

// One split of one key head.
struct WorkTile {
    int number, row_tile, key_head, b, start, end;
    bool full_tile;
    __device__ __forceinline__ WorkTile(const GeneralParams& params, int work) {
        int row_tiles = (params.group * params.n + 15) / 16, at = work / params.splits;
        number = work % params.splits;
        row_tile = at % row_tiles, key_head = at / row_tiles % params.key_heads, b = at / row_tiles / params.key_heads;
        start = number * SPLIT_KEYS, end = start + SPLIT_KEYS < params.m ? start + SPLIT_KEYS : params.m;
        full_tile = true;
        if (params.mask_ops) {
            TileExtent extent;
            extent.query_tiles = extent.key_tiles = 1;
            extent.query_tile = extent.key_tile = 0;
            query_extent(params, b, 0, 1, extent);
            key_extent(params, start, SPLIT_KEYS, extent);
            int said = params.segments_q ? PARTIAL : verdict(params, b, extent);
            full_tile = said == FULL;
            if (said == EMPTY) end = start;
        }
    }
    __device__ __forceinline__ int steps() const { return (end - start + kBlockN - 1) / kBlockN; }
};

extern "C" __global__ void __launch_bounds__(160, BLOCKS)
    decode(const __grid_constant__ GeneralParams params, const __grid_constant__ TensorMap map_k,
           const __grid_constant__ TensorMap map_v) {
    extern __shared__ u8 memory[];
    u32 ring = (u32(__cvta_generic_to_shared(memory)) + 1023) & ~1023u;
    float* out_of = (float*)(memory + (ring - u32(__cvta_generic_to_shared(memory))) + RING_BYTES); // [16, LD_OUT]
    float* max_of = out_of + 16 * LD_OUT;                                                           // [4, 16]
    float* sum_of = max_of + 64;
    float* entropy_of = sum_of + 64;
    u32 barriers = u32(__cvta_generic_to_shared(entropy_of + 64));
    auto full = [&](u32 stage) { return Barrier{barriers + stage * 8}; };
    auto empty = [&](u32 stage) { return Barrier{barriers + (STAGES + stage) * 8}; };
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int at = 0; at < STAGES; at++) full(at).init(1), empty(at).init(4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_dependents();
    wait_on_dependency();
    int works = (params.group * params.n + 15) / 16 * params.key_heads * params.batch * params.splits;
    u32 stage = 0, parity = 0;
    if (warp == 4) {
        if (lane != 0) return;
        for (int work = int(blockIdx.x); work < works; work += int(gridDim.x)) {
            WorkTile split(params, work);
            for (int j0 = split.start; j0 < split.end; j0 += kBlockN) {
                empty(stage).wait(parity ^ 1);
                tma_load_kv(ring + stage * 2 * KV_TILE_BYTES, map_k, map_v, full(stage), j0, split.key_head, split.b);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    int g = lane / 4, t = lane % 4, rows = params.group * params.n;
    i64 in_all = i64(params.batch) * params.heads * params.n;
    for (int work = int(blockIdx.x); work < works; work += int(gridDim.x)) {
        WorkTile split(params, work);
        int b = split.b, r0 = split.row_tile * 16 + g, r1 = r0 + 8;
        bool there0 = r0 < rows, there1 = r1 < rows; // whether these rows of the 16 are queries
        int h0 = split.key_head * params.group + (there0 ? r0 : 0),
            h1 = split.key_head * params.group + (there1 ? r1 : 0);
        u32 q[WIDTH / 16][4]; // [16 rows, 16 columns] each
        const T* q0 = params.q.data + b * params.q.batch + h0 * params.q.head + 2 * t;
        const T* q1 = params.q.data + b * params.q.batch + h1 * params.q.head + 2 * t;
#pragma unroll
        for (int kk = 0; kk < WIDTH / 16; kk++) {
            q[kk][0] = there0 ? *(const u32*)(q0 + kk * 16) : 0;
            q[kk][1] = there1 ? *(const u32*)(q1 + kk * 16) : 0;
            q[kk][2] = there0 ? *(const u32*)(q0 + kk * 16 + 8) : 0;
            q[kk][3] = there1 ? *(const u32*)(q1 + kk * 16 + 8) : 0;
        }
        float scale0 = head_of(params, b, h0).scale, scale1 = head_of(params, b, h1).scale;
        float acc[SUMS][4];
        clear(acc);
        float max0 = -INFINITE, max1 = -INFINITE, sum0 = 0.0f, sum1 = 0.0f, entropy_acc0 = 0.0f, entropy_acc1 = 0.0f;
        for (int first = split.start; first < split.end; first += kBlockN) {
            int j0 = first + warp * 16, end = split.end;
            u32 keys = ring + stage * 2 * KV_TILE_BYTES, values = keys + KV_TILE_BYTES;
            full(stage).wait(parity);
            float s[2][4],
                more[2][4]; // [16 rows, 8 keys] each: even and odd steps of the sum, for two independent chains
            clear(s);
            clear(more);
#pragma unroll
            for (int kk = 0; kk < WIDTH / 16; kk++) {
                u32 k[4];
                ldmatrix(k, swizzled(keys, warp * 16 + lane / 16 * 8 + lane % 8, 2 * kk + lane / 8 % 2));
                mma(kk % 2 ? more[0] : s[0], q[kk], k[0], k[1]);
                mma(kk % 2 ? more[1] : s[1], q[kk], k[2], k[3]);
            }
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) s[part][x] += more[part][x];
            u32 kept[2] = {0xffffffffu, 0xffffffffu};
            if (split.full_tile && params.plain_scores && j0 + 16 <= end) {
                // Rows that are not queries are computed with zeros, and never stored.
#pragma unroll
                for (int part = 0; part < 2; part++)
#pragma unroll
                    for (int x = 0; x < 4; x++) s[part][x] *= x < 2 ? scale0 : scale1;
            } else {
                ScoreTile x;
                u32 of_keys[2] = {kept[0], kept[1]};
#pragma unroll
                for (int at = 0; at < 8; at++) x.s[at / 4][at % 4] = s[at / 4][at % 4];
                score_slow_path(params, b, split.key_head, split.row_tile * 16, j0, end, split.full_tile, x);
                visible_values(x, of_keys);
#pragma unroll
                for (int at = 0; at < 8; at++) s[at / 4][at % 4] = x.s[at / 4][at % 4];
                kept[0] = of_keys[0];
                kept[1] = of_keys[1];
            }
            float tile_max0 = -INFINITE, tile_max1 = -INFINITE;
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    if (x < 2) tile_max0 = fmaxf(tile_max0, s[part][x]);
                    else tile_max1 = fmaxf(tile_max1, s[part][x]);
                }
            float new_max0 = fmaxf(max0, quad_max(tile_max0)), new_max1 = fmaxf(max1, quad_max(tile_max1));
            float rescale0 = max0 == -INFINITE ? 0.0f : exponential(max0 - new_max0);
            float rescale1 = max1 == -INFINITE ? 0.0f : exponential(max1 - new_max1);
            if (params.entropy) {
                if (max0 != -INFINITE) entropy_acc0 = rescale0 * (entropy_acc0 + (max0 - new_max0) * sum0);
                if (max1 != -INFINITE) entropy_acc1 = rescale1 * (entropy_acc1 + (max1 - new_max1) * sum1);
            }
            sum0 *= rescale0;
            sum1 *= rescale1;
            bool max_grew = max0 != new_max0 || max1 != new_max1;
            max0 = new_max0;
            max1 = new_max1;
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    float shifted = s[part][x] - (x < 2 ? max0 : max1);
                    float e = s[part][x] == -INFINITE ? 0.0f : exponential(shifted);
                    if (x < 2) sum0 += e;
                    else sum1 += e;
                    if (x < 2) entropy_acc0 += e * (e != 0.0f ? shifted : 0.0f);
                    else entropy_acc1 += e * (e != 0.0f ? shifted : 0.0f);
                    s[part][x] = e;
                }
            if (params.dropout_threshold) {
                ScoreTile x;
#pragma unroll
                for (int at = 0; at < 8; at++) x.s[at / 4][at % 4] = s[at / 4][at % 4];
                dropout_slow_path(params, b, split.key_head, split.row_tile * 16, j0, x);
#pragma unroll
                for (int at = 0; at < 8; at++) s[at / 4][at % 4] = x.s[at / 4][at % 4];
            }
            u32 a[4] = {pack_pair(s[0][0], s[0][1]), pack_pair(s[0][2], s[0][3]), pack_pair(s[1][0], s[1][1]),
                        pack_pair(s[1][2], s[1][3])};
            if (__ballot_sync(FULL_WARP, max_grew)) {
#pragma unroll
                for (int c = 0; c < SUMS; c++) {
                    acc[c][0] *= rescale0;
                    acc[c][1] *= rescale0;
                    acc[c][2] *= rescale1;
                    acc[c][3] *= rescale1;
                }
            }
#pragma unroll
            for (int c = 0; c < SUMS; c += 2) {
                u32 v[4];
                ldmatrix_trans(v, swizzled(values, warp * 16 + lane % 16, c + lane / 16));
                mma(acc[c], a, v[0] & kept[0], v[1] & kept[1]);
                mma(acc[c + 1], a, v[2] & kept[0], v[3] & kept[1]);
            }
            __syncwarp();
            if (lane == 0) empty(stage).arrive();
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        // Combine the four warps, in order.
        sum0 = quad_sum(sum0);
        sum1 = quad_sum(sum1);
        entropy_acc0 = quad_sum(entropy_acc0);
        entropy_acc1 = quad_sum(entropy_acc1);
        if (t == 0) {
            max_of[warp * 16 + g] = max0;
            max_of[warp * 16 + g + 8] = max1;
            sum_of[warp * 16 + g] = sum0;
            sum_of[warp * 16 + g + 8] = sum1;
            entropy_of[warp * 16 + g] = entropy_acc0;
            entropy_of[warp * 16 + g + 8] = entropy_acc1;
        }
        consumer_sync();
        float all0 = fmaxf(fmaxf(max_of[g], max_of[16 + g]), fmaxf(max_of[32 + g], max_of[48 + g]));
        float all1 = fmaxf(fmaxf(max_of[g + 8], max_of[24 + g]), fmaxf(max_of[40 + g], max_of[56 + g]));
        float share0 = max0 == -INFINITE && sum0 == 0.0f ? 0.0f : expf(max0 - all0);
        float share1 = max1 == -INFINITE && sum1 == 0.0f ? 0.0f : expf(max1 - all1);
#pragma unroll 1
        for (int w = 0; w < 4; w++) {
            if (w == warp) {
#pragma unroll
                for (int c = 0; c < SUMS; c++)
#pragma unroll
                    for (int x = 0; x < 4; x += 2) {
                        if (!(x < 2 ? there0 : there1)) continue;
                        float2* to = (float2*)(out_of + (g + x * 4) * LD_OUT + 8 * c + 2 * t);
                        float share = x < 2 ? share0 : share1;
                        // A weight of 0 contributes nothing, whatever the accumulator holds.
                        float2 add = share == 0.0f ? make_float2(0.0f, 0.0f)
                                                   : make_float2(share * acc[c][x], share * acc[c][x + 1]);
                        if (w > 0) add.x += to->x, add.y += to->y;
                        *to = add;
                    }
            }
            consumer_sync();
        }
#pragma unroll 1
        for (int cell = threadIdx.x; cell < 16 * WIDTH; cell += 128) {
            int r = cell / WIDTH, c = cell % WIDTH, row = split.row_tile * 16 + r;
            if (row >= rows) break;
            float most = fmaxf(fmaxf(max_of[r], max_of[16 + r]), fmaxf(max_of[32 + r], max_of[48 + r]));
            float sum = 0.0f, inner = 0.0f, x = out_of[r * LD_OUT + c];
            for (int w = 0; w < 4; w++) {
                float of_warp = max_of[w * 16 + r];
                if (of_warp == -INFINITE && sum_of[w * 16 + r] == 0.0f) continue;
                float share = expf(of_warp - most);
                sum += share * sum_of[w * 16 + r];
                inner += share * (entropy_of[w * 16 + r] + (of_warp - most) * sum_of[w * 16 + r]);
            }
            int h = split.key_head * params.group + row;
            i64 at_row = i64(b) * params.heads + h;
            float by = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (params.splits > 1) {
                params.split_out[(split.number * in_all + at_row) * WIDTH + c] = x * by;
            } else {
                // With a single split, the sink is added here.
                if (params.sinks) {
                    float sink = widen(params.sinks[h]), larger = fmaxf(most, sink);
                    float total = (sum == 0.0f ? 0.0f : sum * expf(most - larger)) +
                                  (sink == -INFINITE ? 0.0f : expf(sink - larger));
                    by = total == 0.0f || sum == 0.0f ? 0.0f : expf(most - larger) / total;
                    if (c == 0) {
                        float lse = total == 0.0f ? -INFINITE : larger + logf(total);
                        params.lse[at_row] = lse;
                        // −Σ p (s − lse), with s − lse = (s − max) + (max − lse)
                        if (params.entropy)
                            params.entropy[at_row] = sum == 0.0f ? 0.0f : by * (-inner - (most - lse) * sum);
                    }
                }
                params.out.data[b * params.out.batch + h * params.out.head + c * params.out.col] = narrow(x * by);
                if (params.sinks) continue;
            }
            if (c == 0) {
                float lse = sum == 0.0f ? -INFINITE : most + logf(sum);
                (params.splits > 1 ? params.split_lse + split.number * in_all : params.lse)[at_row] = lse;
                if (params.entropy)
                    (params.splits > 1 ? params.split_entropy + split.number * in_all : params.entropy)[at_row] =
                        sum == 0.0f ? 0.0f : logf(sum) - inner * by;
            }
        }
        consumer_sync(); // shared memory is free for the next split
    }
}
