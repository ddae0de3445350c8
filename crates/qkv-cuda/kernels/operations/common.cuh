// What the operations of models share: eight elements at a time, sums over a warp and a block, dropout. Activations are
// of type T; parameters, their gradients and every sum are f32.

// Columns that a thread processes at once: a vector of 16 bytes in bf16, two of them in f32.
#define EIGHT 8

struct alignas(16) Words {
    u32 word[4];
};

// Eight elements as stored in memory.
struct Eight {
    Words words[EIGHT * sizeof(T) / 16];
};

__device__ __forceinline__ void widen_eight(const Eight& from, float (&x)[EIGHT]) {
#pragma unroll
    for (int at = 0; at < EIGHT; at++) x[at] = widen(((const T*)&from)[at]);
}

// Reads columns `col … col + 7` of a row of `width`; columns beyond are 0.
__device__ __forceinline__ void load_eight(const T* row, int col, int width, float (&x)[EIGHT]) {
    if (width % EIGHT == 0) {
        const T* from = row + col;
        constexpr int each = 16 / int(sizeof(T));
#pragma unroll
        for (int part = 0; part < EIGHT / each; part++) {
            Words words = ((const Words*)from)[part];
            const T* elements = (const T*)&words;
#pragma unroll
            for (int at = 0; at < each; at++) x[part * each + at] = widen(elements[at]);
        }
    } else {
#pragma unroll
        for (int at = 0; at < EIGHT; at++) x[at] = col + at < width ? widen(row[col + at]) : 0.0f;
    }
}

__device__ __forceinline__ void store_eight(T* row, int col, int width, const float (&x)[EIGHT]) {
    if (width % EIGHT == 0) {
        T* to = row + col;
        constexpr int each = 16 / int(sizeof(T));
#pragma unroll
        for (int part = 0; part < EIGHT / each; part++) {
            Words words;
            T* elements = (T*)&words;
#pragma unroll
            for (int at = 0; at < each; at++) elements[at] = narrow(x[part * each + at]);
            ((Words*)to)[part] = words;
        }
    } else {
#pragma unroll
        for (int at = 0; at < EIGHT; at++)
            if (col + at < width) row[col + at] = narrow(x[at]);
    }
}

// Reads eight parameters.
__device__ __forceinline__ void load_floats(const float* row, int col, int width, float (&x)[EIGHT]) {
    if (width % EIGHT == 0) {
        float4 low = ((const float4*)(row + col))[0], high = ((const float4*)(row + col))[1];
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
#pragma unroll
        for (int at = 0; at < EIGHT; at++) x[at] = col + at < width ? row[col + at] : 0.0f;
    }
}

// For kernels that `launch.rs` may start before the preceding launch has ended: lets the next launch start, then waits
// for the results of the preceding one.
__device__ __forceinline__ void in_turn() {
    launch_dependents();
    wait_on_dependency();
}

// Starts loading memory into the L2 cache.
__device__ __forceinline__ void prefetch(const void* at) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// Items of eight columns, each by one thread: `row`, `col`.
#define FOR_EIGHTS(rows, width)                                                                     \
    for (u32 item = blockIdx.x * blockDim.x + threadIdx.x, across = (u32(width) + EIGHT - 1) / EIGHT, \
             row = item / across, col = item % across * EIGHT;                                       \
         item < (rows)*across;                                                                       \
         item += gridDim.x * blockDim.x, row = item / across, col = item % across * EIGHT)

#define FOR_EACH(n) for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < (n); at += gridDim.x * blockDim.x)

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(FULL_WARP, x, by);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        float other = __shfl_xor_sync(FULL_WARP, x, by);
        x = other > x ? other : x;
    }
    return x;
}

// The sum over a block, in a fixed order, for every thread. `scratch` has a float for each warp.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) sum += scratch[warp];
    return sum;
}

__device__ __forceinline__ float block_max(float x, float* scratch) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float most = scratch[0];
    for (u32 warp = 1; warp < blockDim.x / 32; warp++) most = scratch[warp] > most ? scratch[warp] : most;
    return most;
}

// Which elements of a tensor are dropped: the bits of the CPU's Philox, with the counter (⌊column/8⌋, row, 0, 0) and
// the key `stream`. A threshold of 0 drops nothing.
struct Dropout {
    u64 stream;
    u32 threshold;
    float scale;
};

__device__ __forceinline__ void drop_eight(const Dropout& dropout, u32 row, int col, float (&x)[EIGHT]) {
    if (dropout.threshold == 0) return;
    u32 words[4] = {u32(col / EIGHT), row, 0, 0};
    philox(words, dropout.stream);
#pragma unroll
    for (int at = 0; at < EIGHT; at++) {
        u32 drawn = at % 2 ? words[at / 2] >> 16 : words[at / 2] & 0xffff;
        x[at] = drawn < dropout.threshold ? 0.0f : x[at] * dropout.scale;
    }
}

// Loads what another block of this launch has written, bypassing this multiprocessor's own cache.
__device__ __forceinline__ float load_written(const float* at) { return __ldcg(at); }
