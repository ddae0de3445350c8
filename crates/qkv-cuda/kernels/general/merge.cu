// Merges the splits of a row by their lse, always in the same order: one block per row. Groups of 32 threads each take
// every eighth split, 16 bytes per thread, and the sums of the groups are added in order. Memory latency dominates, so
// the first splits are loaded before their weights are known.

#define MERGE_THREADS 256
#define GROUPS 8            // warps
#define SPLITS_PER_PASS 256 // splits whose weights are in shared memory at a time
#define PREFETCH 8          // splits that a group loads at once

// The maximum or the sum over a block, in every thread. `room` holds one number per group.
__device__ __forceinline__ float block_reduce(float x, float* room, bool sum) {
    for (int by = 16; by > 0; by /= 2) {
        float other = __shfl_xor_sync(FULL_WARP, x, by);
        x = sum ? x + other : fmaxf(x, other);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    float y = room[0];
    for (int at = 1; at < GROUPS; at++) y = sum ? y + room[at] : fmaxf(y, room[at]);
    return y;
}

// Four columns of a split from column c on; zeros out of range.
__device__ __forceinline__ float4 load_split_columns(const GeneralParams& params, i64 rows, i64 row, int split, int c) {
    float4 x;
    x.x = x.y = x.z = x.w = 0.0f;
    if (split >= params.splits || c >= params.dv) return x;
    const float* from = params.split_out + (split * rows + row) * params.dv + c;
    if (params.dv % 4 == 0) return *(const float4*)from;
    x.x = from[0];
    if (c + 1 < params.dv) x.y = from[1];
    if (c + 2 < params.dv) x.z = from[2];
    if (c + 3 < params.dv) x.w = from[3];
    return x;
}

__device__ __forceinline__ void accumulate_scaled(float4& sum, float share, const float4& x) {
    sum.x += share * x.x;
    sum.y += share * x.y;
    sum.z += share * x.z;
    sum.w += share * x.w;
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge(const __grid_constant__ GeneralParams params) {
    SHARED(shared);
    float4* sums = (float4*)shared;               // [GROUPS, 64]
    float* shares = (float*)(sums + GROUPS * 64); // [SPLITS_PER_PASS]
    float* room = shares + SPLITS_PER_PASS;       // [GROUPS]
    wait_on_dependency();
    i64 rows = i64(params.batch) * params.heads * params.n, row = blockIdx.x;
    int i = int(row % params.n), h = int(row / params.n % params.heads), b = int(row / params.n / params.heads);
    int group = threadIdx.x / 32, lane = threadIdx.x % 32, halves = params.dv > 128 ? 2 : 1; // 128 columns each
    const float* lses = params.split_lse + row;
    float mine =
        int(threadIdx.x) < params.splits ? lses[threadIdx.x * rows] : -INFINITE; // of the first SPLITS_PER_PASS splits
    float4 prefetched[PREFETCH];
#pragma unroll
    for (int at = 0; at < PREFETCH; at++)
        prefetched[at] = load_split_columns(params, rows, row, group + at * GROUPS, lane * 4);
    float sink = params.sinks ? widen(params.sinks[h]) : -INFINITE, most = sink, sum = 0.0f, nan = 0.0f;
    for (int split = threadIdx.x; split < params.splits; split += MERGE_THREADS) {
        float lse = split < SPLITS_PER_PASS ? mine : lses[split * rows];
        if (lse != lse) nan = lse;
        most = fmaxf(most, lse);
    }
    most = block_reduce(most, room, false);
    for (int split = threadIdx.x; split < params.splits; split += MERGE_THREADS) {
        float lse = split < SPLITS_PER_PASS ? mine : lses[split * rows];
        sum += lse == -INFINITE ? 0.0f : expf(lse - most);
    }
    sum = block_reduce(sum + nan, room, true);
    if (sink != -INFINITE) sum += expf(sink - most);
    float lse = sum == 0.0f ? -INFINITE : most + logf(sum), entropy = 0.0f;
    float4 of_group[2];
    of_group[0].x = of_group[0].y = of_group[0].z = of_group[0].w = 0.0f;
    of_group[1] = of_group[0];
    for (int base = 0; base < params.splits; base += SPLITS_PER_PASS) {
        int split = base + int(threadIdx.x);
        float lse_of_split = base == 0 ? mine : split < params.splits ? lses[split * rows] : -INFINITE;
        float share = lse_of_split == -INFINITE ? 0.0f : expf(lse_of_split - lse);
        if (params.entropy && share != 0.0f)
            entropy += share * (params.split_entropy[split * rows + row] - (lse_of_split - lse));
        __syncthreads();
        shares[threadIdx.x] = share;
        __syncthreads();
        int count = params.splits - base < SPLITS_PER_PASS ? params.splits - base : SPLITS_PER_PASS;
#pragma unroll
        for (int half = 0; half < 2; half++)
            for (int from = half < halves ? group : count; from < count; from += PREFETCH * GROUPS) {
                if (base + from > group || half > 0)
#pragma unroll
                    for (int at = 0; at < PREFETCH; at++)
                        prefetched[at] =
                            load_split_columns(params, rows, row, base + from + at * GROUPS, half * 128 + lane * 4);
#pragma unroll
                for (int at = 0; at < PREFETCH; at++)
                    if (from + at * GROUPS < count)
                        accumulate_scaled(of_group[half], shares[from + at * GROUPS], prefetched[at]);
            }
    }
    sums[group * 64 + lane] = of_group[0];
    sums[group * 64 + 32 + lane] = of_group[1];
    __syncthreads();
    T* out = params.out.data + b * params.out.batch + h * params.out.head + i * params.out.row;
    int c = int(threadIdx.x);
    if (c < params.dv) {
        const float* column = (const float*)sums + c;
        float x = column[0];
        for (int at = 1; at < GROUPS; at++) x += column[at * 256];
        out[c * params.out.col] = narrow(x);
    }
    if (params.entropy) entropy = block_reduce(entropy, room, true);
    if (threadIdx.x != 0) return;
    params.lse[row] = lse;
    if (params.entropy) params.entropy[row] = entropy;
}
