// The pieces of a row's keys put together, always in their order: one block a row, one thread a column or two.

#define SHARES 256 // pieces whose shares are known at a time

// The largest, or the sum, over a block of 128, the same in every thread; `room` holds four numbers.
__device__ __forceinline__ float over_block(float x, float* room, bool sum) {
    for (int by = 16; by > 0; by /= 2) {
        float other = __shfl_xor_sync(FULL_WARP, x, by);
        x = sum ? x + other : fmaxf(x, other);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    return sum ? (room[0] + room[1]) + (room[2] + room[3]) : fmaxf(fmaxf(room[0], room[1]), fmaxf(room[2], room[3]));
}

extern "C" __global__ void __launch_bounds__(128) merge(const __grid_constant__ Job job) {
    SHARED(shared);
    float* shares = (float*)shared;     // [SHARES]
    float* room = shares + SHARES;      // [4]
    i64 rows = i64(job.batch) * job.heads * job.n, row = blockIdx.x;
    int i = int(row % job.n), h = int(row / job.n % job.heads), b = int(row / job.n / job.heads);
    const float* lses = job.piece_lse + row;
    float sink = job.sinks ? widen(job.sinks[h]) : -INFINITE, most = sink, sum = 0.0f, nan = 0.0f;
    for (int piece = threadIdx.x; piece < job.pieces; piece += 128) {
        float lse = lses[piece * rows];
        if (lse != lse) nan = lse;
        most = fmaxf(most, lse);
    }
    most = over_block(most, room, false);
    for (int piece = threadIdx.x; piece < job.pieces; piece += 128) {
        float lse = lses[piece * rows];
        sum += lse == -INFINITE ? 0.0f : expf(lse - most);
    }
    sum = over_block(sum + nan, room, true);
    if (sink != -INFINITE) sum += expf(sink - most);
    float lse = sum == 0.0f ? -INFINITE : most + logf(sum);
    float x[2] = {0.0f, 0.0f}, entropy = 0.0f;
    for (int base = 0; base < job.pieces; base += SHARES) {
        int count = job.pieces - base < SHARES ? job.pieces - base : SHARES;
        __syncthreads();
        for (int piece = threadIdx.x; piece < count; piece += 128) {
            float of_piece = lses[(base + piece) * rows];
            float share = of_piece == -INFINITE ? 0.0f : expf(of_piece - lse);
            shares[piece] = share;
            if (job.entropy && share != 0.0f)
                entropy += share * (job.piece_entropy[(base + piece) * rows + row] - (of_piece - lse));
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int c = int(threadIdx.x) + half * 128;
            if (c >= job.dv) break;
            const float* from = job.piece_out + (base * rows + row) * job.dv + c;
#pragma unroll 8
            for (int piece = 0; piece < count; piece++) x[half] += shares[piece] * from[piece * rows * job.dv];
        }
    }
    T* out = job.out.at + b * job.out.batch + h * job.out.head + i * job.out.row;
    for (int half = 0; half < 2; half++) {
        int c = int(threadIdx.x) + half * 128;
        if (c < job.dv) out[c * job.out.col] = narrow(half ? x[1] : x[0]);
    }
    if (job.entropy) entropy = over_block(entropy, room, true);
    if (threadIdx.x != 0) return;
    job.lse[row] = lse;
    if (job.entropy) job.entropy[row] = entropy;
}
