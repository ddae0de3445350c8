// Decoding on Hopper for the common case: the query sees all keys, or the first lengths[b] of them, and scores are
// scaled products. As in decode.cu, a producer warp loads 64 keys and values at a time by TMA, and four consumer warps
// compute with 16 of them each. Products are transposed: keys, then columns of the values, are the rows of the
// tensor-core tile, and 8 · HEADS query heads its columns. That halves products and registers. No function is called:
// the ring leaves too little L1 for a stack.

#ifndef HEADS // query heads of a group, in eights: 1 or 2
#define HEADS 1
#endif
#ifndef BLOCKS // per multiprocessor
#define BLOCKS (WIDTH >= 256 ? 1 : 2)
#endif
#ifndef STAGES
#define STAGES (WIDTH >= 128 ? 3 : 6)
#endif
#define RING_BYTES (STAGES * 2 * KV_TILE_BYTES)
#define ROWS_OUT (8 * HEADS)
#define LD_OUT (WIDTH + 4)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// Reductions over the eight lanes that share a column of a fragment.
__device__ __forceinline__ float column_max(float x) {
    for (int by = 4; by < 32; by *= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, by));
    return x;
}
__device__ __forceinline__ float column_sum(float x) {
    for (int by = 4; by < 32; by *= 2) x += __shfl_xor_sync(FULL_WARP, x, by);
    return x;
}

struct WorkTile {
    int number, row_tile, key_head, b, start, end;
    __device__ __forceinline__ WorkTile(const GeneralParams& params, int work) {
        int row_tiles = (params.group + ROWS_OUT - 1) / ROWS_OUT, at = work / params.splits;
        number = work - at * params.splits;
        int both = at / row_tiles;
        row_tile = at - both * row_tiles, b = both / params.key_heads, key_head = both - b * params.key_heads;
        int keys = params.lengths && params.lengths[b] < params.m ? params.lengths[b] : params.m;
        start = number * SPLIT_KEYS, end = start + SPLIT_KEYS < keys ? start + SPLIT_KEYS : keys;
    }
};

// A mask that keeps, of a pair of elements of two successive keys, those of the first `count` keys.
__device__ __forceinline__ u32 kept_of_pair(int count) {
    return count >= 2 ? 0xffffffffu : count == 1 ? 0xffffu : 0u;
}

extern "C" __global__ void __launch_bounds__(160, BLOCKS)
    decode(const __grid_constant__ GeneralParams params, const __grid_constant__ TensorMap map_k,
           const __grid_constant__ TensorMap map_v) {
    extern __shared__ u8 memory[];
    u32 ring = (u32(__cvta_generic_to_shared(memory)) + 1023) & ~1023u;
    float* out_of =
        (float*)(memory + (ring - u32(__cvta_generic_to_shared(memory))) + RING_BYTES); // [ROWS_OUT, LD_OUT]
    float* max_of = out_of + ROWS_OUT * LD_OUT;                                         // [4, ROWS_OUT]
    float* sum_of = max_of + 4 * ROWS_OUT;                                              // [4, ROWS_OUT]
    u32 barriers = u32(__cvta_generic_to_shared(sum_of + 4 * ROWS_OUT));
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
    int works = (params.group + ROWS_OUT - 1) / ROWS_OUT * params.key_heads * params.batch * params.splits;
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
    int g = lane / 4, t = lane % 4;
    i64 in_all = i64(params.batch) * params.heads;
    u32 q[HEADS][WIDTH / 16][2]; // head g of each eight: columns 16k + 2t, and 8 further on
    float scale_log2[HEADS][2];  // heads 2t, 2t + 1: from products to base-2 exponents
    auto load_queries = [&](const WorkTile& split) {
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            int row = split.row_tile * ROWS_OUT + n * 8 + g;
            bool there = row < params.group;
            int h = split.key_head * params.group + (there ? row : 0);
            const T* from = params.q.data + split.b * params.q.batch + h * params.q.head + 2 * t;
#pragma unroll
            for (int k = 0; k < WIDTH / 16; k++) {
                q[n][k][0] = there ? *(const u32*)(from + k * 16) : 0;
                q[n][k][1] = there ? *(const u32*)(from + k * 16 + 8) : 0;
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int row = split.row_tile * ROWS_OUT + n * 8 + 2 * t + e;
                scale_log2[n][e] =
                    head_of(params, split.b, split.key_head * params.group + (row < params.group ? row : 0)).scale *
                    LOG2_E;
            }
        }
    };
    if (int(blockIdx.x) < works) load_queries(WorkTile(params, int(blockIdx.x)));
    for (int work = int(blockIdx.x); work < works; work += int(gridDim.x)) {
        WorkTile split(params, work);
        float acc[WIDTH / 16][HEADS][4]; // [16 columns of the values, 8 heads] each
        float most[HEADS][2], sum[HEADS][2];
#pragma unroll
        for (int m = 0; m < WIDTH / 16; m++) clear(acc[m]);
#pragma unroll
        for (int n = 0; n < HEADS; n++) most[n][0] = most[n][1] = -INFINITE, sum[n][0] = sum[n][1] = 0.0f;
        for (int first = split.start; first < split.end; first += kBlockN) {
            u32 keys = ring + stage * 2 * KV_TILE_BYTES, values = keys + KV_TILE_BYTES;
            full(stage).wait(parity);
            float s[HEADS][4], more[HEADS][4]; // [16 keys, 8 heads] each: even and odd steps of the sum
            clear(s);
            clear(more);
#pragma unroll
            for (int k = 0; k < WIDTH / 16; k++) {
                u32 a[4];
                ldmatrix(a, swizzled(keys, warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
                for (int n = 0; n < HEADS; n++) mma(k % 2 ? more[n] : s[n], a, q[n][k][0], q[n][k][1]);
            }
            bool max_grew = false;
#pragma unroll
            for (int n = 0; n < HEADS; n++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    s[n][x] = (s[n][x] + more[n][x]) * scale_log2[n][x % 2];
                    if (first + warp * 16 + g + x / 2 * 8 >= split.end) s[n][x] = -INFINITE;
                    max_grew |= s[n][x] > most[n][x % 2] + 8.0f;
                }
            // Lazy rescaling: the running maximum moves only when a score exceeds it by 2^8.
            if (__ballot_sync(FULL_WARP, max_grew)) {
#pragma unroll
                for (int n = 0; n < HEADS; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float high = fmaxf(most[n][e], column_max(fmaxf(s[n][e], s[n][2 + e])));
                        float by = most[n][e] == -INFINITE ? 0.0f : power_of_two(most[n][e] - high);
                        most[n][e] = high;
                        sum[n][e] *= by;
#pragma unroll
                        for (int m = 0; m < WIDTH / 16; m++) acc[m][n][e] *= by, acc[m][n][2 + e] *= by;
                    }
            }
            u32 weights[HEADS][2]; // [keys, heads], transposed into the right operand
#pragma unroll
            for (int n = 0; n < HEADS; n++) {
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    float against = most[n][x % 2] == -INFINITE ? 0.0f : most[n][x % 2];
                    s[n][x] = power_of_two(s[n][x] - against);
                    sum[n][x % 2] += s[n][x];
                }
                weights[n][0] = transposed(pack_pair(s[n][0], s[n][1]));
                weights[n][1] = transposed(pack_pair(s[n][2], s[n][3]));
            }
            // A masked value may be anything: a weight of 0 does not remove a NaN.
            int left = split.end - (first + warp * 16 + 2 * t);
            u32 kept[2] = {kept_of_pair(left), kept_of_pair(left - 8)};
#pragma unroll
            for (int m = 0; m < WIDTH / 16; m++) {
                u32 a[4];
                ldmatrix_trans(a, swizzled(values, warp * 16 + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
#pragma unroll
                for (int x = 0; x < 4; x++) a[x] &= kept[x / 2];
#pragma unroll
                for (int n = 0; n < HEADS; n++) mma(acc[m][n], a, weights[n][0], weights[n][1]);
            }
            __syncwarp();
            if (lane == 0) empty(stage).arrive();
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        // Load the next queries before this split is combined.
        if (work + int(gridDim.x) < works) load_queries(WorkTile(params, work + int(gridDim.x)));
        // Combine the four warps, in order.
        float share[HEADS][2];
#pragma unroll
        for (int n = 0; n < HEADS; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                sum[n][e] = column_sum(sum[n][e]);
                if (g == 0) {
                    max_of[warp * ROWS_OUT + n * 8 + 2 * t + e] = most[n][e];
                    sum_of[warp * ROWS_OUT + n * 8 + 2 * t + e] = sum[n][e];
                }
            }
        consumer_sync();
#pragma unroll
        for (int n = 0; n < HEADS; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float* of = max_of + n * 8 + 2 * t + e;
                float all = fmaxf(fmaxf(of[0], of[ROWS_OUT]), fmaxf(of[2 * ROWS_OUT], of[3 * ROWS_OUT]));
                share[n][e] = most[n][e] == -INFINITE ? 0.0f : power_of_two(most[n][e] - all);
            }
#pragma unroll 1
        for (int w = 0; w < 4; w++) {
            if (w == warp) {
#pragma unroll
                for (int n = 0; n < HEADS; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        if (split.row_tile * ROWS_OUT + n * 8 + 2 * t + e >= params.group) continue;
                        float* to = out_of + (n * 8 + 2 * t + e) * LD_OUT + g;
#pragma unroll
                        for (int m = 0; m < WIDTH / 16; m++)
#pragma unroll
                            for (int half = 0; half < 2; half++) {
                                float add = share[n][e] * acc[m][n][2 * half + e];
                                float* at = to + m * 16 + half * 8;
                                *at = w == 0 ? add : *at + add;
                            }
                    }
            }
            consumer_sync();
        }
#pragma unroll 1
        for (int cell = threadIdx.x; cell < ROWS_OUT * (WIDTH / 4); cell += 128) {
            int r = cell / (WIDTH / 4), c = cell % (WIDTH / 4) * 4, row = split.row_tile * ROWS_OUT + r;
            if (row >= params.group) break;
            const float *of = max_of + r, *sums = sum_of + r;
            float all = fmaxf(fmaxf(of[0], of[ROWS_OUT]), fmaxf(of[2 * ROWS_OUT], of[3 * ROWS_OUT])), total = 0.0f;
#pragma unroll
            for (int w = 0; w < 4; w++)
                total +=
                    of[w * ROWS_OUT] == -INFINITE ? 0.0f : power_of_two(of[w * ROWS_OUT] - all) * sums[w * ROWS_OUT];
            float4 x = *(const float4*)(out_of + r * LD_OUT + c);
            int h = split.key_head * params.group + row;
            i64 at_row = i64(split.b) * params.heads + h;
            float by = total == 0.0f ? 0.0f : 1.0f / total,
                  lse = total == 0.0f ? -INFINITE : (all + log2f(total)) * LN_2;
            if (params.splits > 1) {
                x.x *= by, x.y *= by, x.z *= by, x.w *= by;
                *(float4*)(params.split_out + (split.number * in_all + at_row) * WIDTH + c) = x;
                if (c == 0) params.split_lse[split.number * in_all + at_row] = lse;
                continue;
            }
            if (params.sinks) {
                // With a single split, the sink is added here.
                float sink = widen(params.sinks[h]), larger = fmaxf(lse, sink);
                float in_all_of_it =
                    (lse == -INFINITE ? 0.0f : expf(lse - larger)) + (sink == -INFINITE ? 0.0f : expf(sink - larger));
                float with = in_all_of_it == 0.0f ? -INFINITE : larger + logf(in_all_of_it);
                by = lse == -INFINITE ? 0.0f : by * expf(lse - with);
                lse = with;
            }
            T* out = params.out.data + split.b * params.out.batch + h * params.out.head + c * params.out.col;
            out[0] = narrow(x.x * by);
            out[params.out.col] = narrow(x.y * by);
            out[2 * params.out.col] = narrow(x.z * by);
            out[3 * params.out.col] = narrow(x.w * by);
            if (c == 0) params.lse[at_row] = lse;
        }
        consumer_sync(); // shared memory is free for the next split
    }
}
