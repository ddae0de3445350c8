// The pieces of a row's keys put together, always in the same order: one block a row. Groups of 32 threads take every eighth
// piece each, 16 bytes of it a thread, and the groups' sums are added one after the other. What it takes is a few trips to
// memory, so the first pieces are asked for before their shares are known.

#define MERGERS 256 // threads
#define GROUPS 8    // of 32 threads
#define SHARES 256  // pieces whose shares are known at a time
#define AHEAD 8     // pieces of a group asked for at once

// The largest, or the sum, over a block, the same in every thread; `room` holds a number for each group.
__device__ __forceinline__ float over_block(float x, float* room, bool sum) {
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

// Four columns of a piece, from column c on: zeros where there is none.
__device__ __forceinline__ float4 columns_of(const Job& job, i64 rows, i64 row, int piece, int c) {
    float4 x;
    x.x = x.y = x.z = x.w = 0.0f;
    if (piece >= job.pieces || c >= job.dv) return x;
    const float* from = job.piece_out + (piece * rows + row) * job.dv + c;
    if (job.dv % 4 == 0) return *(const float4*)from;
    x.x = from[0];
    if (c + 1 < job.dv) x.y = from[1];
    if (c + 2 < job.dv) x.z = from[2];
    if (c + 3 < job.dv) x.w = from[3];
    return x;
}

__device__ __forceinline__ void add_share(float4& sum, float share, const float4& x) {
    sum.x += share * x.x;
    sum.y += share * x.y;
    sum.z += share * x.z;
    sum.w += share * x.w;
}

extern "C" __global__ void __launch_bounds__(MERGERS) merge(const __grid_constant__ Job job) {
    SHARED(shared);
    float4* sums = (float4*)shared;               // [GROUPS, 64]
    float* shares = (float*)(sums + GROUPS * 64); // [SHARES]
    float* room = shares + SHARES;                // [GROUPS]
    wait_for_the_last();
    i64 rows = i64(job.batch) * job.heads * job.n, row = blockIdx.x;
    int i = int(row % job.n), h = int(row / job.n % job.heads), b = int(row / job.n / job.heads);
    int group = threadIdx.x / 32, lane = threadIdx.x % 32, halves = job.dv > 128 ? 2 : 1; // 128 columns each
    const float* lses = job.piece_lse + row;
    float mine = int(threadIdx.x) < job.pieces ? lses[threadIdx.x * rows] : -INFINITE; // of the first SHARES pieces
    float4 ahead[AHEAD];
#pragma unroll
    for (int at = 0; at < AHEAD; at++) ahead[at] = columns_of(job, rows, row, group + at * GROUPS, lane * 4);
    float sink = job.sinks ? widen(job.sinks[h]) : -INFINITE, most = sink, sum = 0.0f, nan = 0.0f;
    for (int piece = threadIdx.x; piece < job.pieces; piece += MERGERS) {
        float lse = piece < SHARES ? mine : lses[piece * rows];
        if (lse != lse) nan = lse;
        most = fmaxf(most, lse);
    }
    most = over_block(most, room, false);
    for (int piece = threadIdx.x; piece < job.pieces; piece += MERGERS) {
        float lse = piece < SHARES ? mine : lses[piece * rows];
        sum += lse == -INFINITE ? 0.0f : expf(lse - most);
    }
    sum = over_block(sum + nan, room, true);
    if (sink != -INFINITE) sum += expf(sink - most);
    float lse = sum == 0.0f ? -INFINITE : most + logf(sum), entropy = 0.0f;
    float4 of_group[2];
    of_group[0].x = of_group[0].y = of_group[0].z = of_group[0].w = 0.0f;
    of_group[1] = of_group[0];
    for (int base = 0; base < job.pieces; base += SHARES) {
        int piece = base + int(threadIdx.x);
        float of_piece = base == 0 ? mine : piece < job.pieces ? lses[piece * rows] : -INFINITE;
        float share = of_piece == -INFINITE ? 0.0f : expf(of_piece - lse);
        if (job.entropy && share != 0.0f) entropy += share * (job.piece_entropy[piece * rows + row] - (of_piece - lse));
        __syncthreads();
        shares[threadIdx.x] = share;
        __syncthreads();
        int count = job.pieces - base < SHARES ? job.pieces - base : SHARES;
#pragma unroll
        for (int half = 0; half < 2; half++)
            for (int from = half < halves ? group : count; from < count; from += AHEAD * GROUPS) {
                if (base + from > group || half > 0)
#pragma unroll
                    for (int at = 0; at < AHEAD; at++)
                        ahead[at] = columns_of(job, rows, row, base + from + at * GROUPS, half * 128 + lane * 4);
#pragma unroll
                for (int at = 0; at < AHEAD; at++)
                    if (from + at * GROUPS < count) add_share(of_group[half], shares[from + at * GROUPS], ahead[at]);
            }
    }
    sums[group * 64 + lane] = of_group[0];
    sums[group * 64 + 32 + lane] = of_group[1];
    __syncthreads();
    T* out = job.out.at + b * job.out.batch + h * job.out.head + i * job.out.row;
    int c = int(threadIdx.x);
    if (c < job.dv) {
        const float* column = (const float*)sums + c;
        float x = column[0];
        for (int at = 1; at < GROUPS; at++) x += column[at * 256];
        out[c * job.out.col] = narrow(x);
    }
    if (job.entropy) entropy = over_block(entropy, room, true);
    if (threadIdx.x != 0) return;
    job.lse[row] = lse;
    if (job.entropy) job.entropy[row] = entropy;
}
