// Cross-entropy over rows of logits, which are replaced by their gradient, and the sums of its rows.

// Vectors of eight logits that a thread keeps in registers; a row is read once where they are enough.
#define KEPT (16 / int(sizeof(T)))

struct Eight {
    Words words[EIGHT * sizeof(T) / 16];
};

// Calls `f(col, x)` with every eight logits of this thread, plus their bias; beyond the classes they are −∞.
template <typename F>
__device__ __forceinline__ void for_logits(const Eight (&kept)[KEPT], const T* scores, const float* bias, int classes,
                                           F f) {
    int first = threadIdx.x * EIGHT, step = blockDim.x * EIGHT;
    float x[EIGHT];
    auto finish = [&](int col) {
        if (bias) {
#pragma unroll
            for (int at = 0; at < EIGHT; at++)
                if (col + at < classes) x[at] += bias[col + at];
        }
        if (col + EIGHT > classes) {
#pragma unroll
            for (int at = 0; at < EIGHT; at++)
                if (col + at >= classes) x[at] = -INFINITE;
        }
        f(col, x);
    };
#pragma unroll
    for (int part = 0; part < KEPT; part++) {
        int col = first + part * step;
        if (col >= classes) continue;
#pragma unroll
        for (int at = 0; at < EIGHT; at++) x[at] = widen(((const T*)&kept[part])[at]);
        finish(col);
    }
    for (int col = first + KEPT * step; col < classes; col += step) {
        load_eight(scores, col, EIGHT, x);
        finish(col);
    }
}

// One block a row; rows begin `stride` elements apart, a multiple of eight. losses: [rows, 4], with label smoothing,
// without, whether the target had the highest logit, and whether the row counts. Rows of the class `ignore` do not, and
// have no gradient.
__device__ __forceinline__ void cross_entropy_row(T* logits, const float* bias, const u32* ids, float* losses,
                                                  int classes, int stride, u32 ignore, float smoothing, float scale,
                                                  int gradient) {
    __shared__ float scratch[32];
    u32 row = blockIdx.x, id = ids[row];
    T* scores = logits + u64(row) * stride;
    int first = threadIdx.x * EIGHT, step = blockDim.x * EIGHT;
    if (id == ignore) {
        float zeros[EIGHT] = {};
        for (int col = first; col < classes && gradient; col += step) store_eight(scores, col, EIGHT, zeros);
        if (threadIdx.x < 4) losses[4 * row + threadIdx.x] = 0.0f;
        return;
    }
    Eight kept[KEPT];
#pragma unroll
    for (int part = 0; part < KEPT; part++)
        if (first + part * step < classes) kept[part] = *(const Eight*)(scores + first + part * step);
    float most = -INFINITE, mass = 0.0f, total = 0.0f;
    for_logits(kept, scores, bias, classes, [&](int, const float (&x)[EIGHT]) {
#pragma unroll
        for (int at = 0; at < EIGHT; at++) most = x[at] > most ? x[at] : most;
    });
    most = block_max(most, scratch);
    for_logits(kept, scores, bias, classes, [&](int, const float (&x)[EIGHT]) {
#pragma unroll
        for (int at = 0; at < EIGHT; at++) mass += exponential(x[at] - most);
    });
    mass = block_sum(mass, scratch);
    if (smoothing != 0.0f) {
        for_logits(kept, scores, bias, classes, [&](int col, const float (&x)[EIGHT]) {
#pragma unroll
            for (int at = 0; at < EIGHT; at++) total += col + at < classes ? x[at] : 0.0f;
        });
        total = block_sum(total, scratch);
    }
    float right = widen(scores[id]) + (bias ? bias[id] : 0.0f);
    float lse = most + logf(mass), nll = lse - right;
    __syncthreads(); // `right` is read before its gradient is written
    if (threadIdx.x == 0) {
        losses[4 * row] = (1.0f - smoothing) * nll + (smoothing != 0.0f ? smoothing * (lse - total / classes) : 0.0f);
        losses[4 * row + 1] = nll;
        losses[4 * row + 2] = right == most ? 1.0f : 0.0f;
        losses[4 * row + 3] = 1.0f;
    }
    if (!gradient) return;
    float each = scale / mass, even = scale * smoothing / classes, own = scale * (1.0f - smoothing);
    for_logits(kept, scores, bias, classes, [&](int col, float (&x)[EIGHT]) {
#pragma unroll
        for (int at = 0; at < EIGHT; at++) x[at] = exponential(x[at] - most) * each - even;
        if (id - u32(col) < EIGHT) {
#pragma unroll
            for (int at = 0; at < EIGHT; at++)
                if (u32(col + at) == id) x[at] -= own;
        }
        store_eight(scores, col, EIGHT, x);
    });
}

// Blocks of 256 threads.
extern "C" __global__ void cross_entropy(T* logits, const float* bias, const u32* ids, float* losses, int classes,
                                         int stride, u32 ignore, float smoothing, float scale, int gradient) {
    cross_entropy_row(logits, bias, ids, losses, classes, stride, ignore, smoothing, scale, gradient);
}

// Blocks of 1,024 threads, for many classes.
extern "C" __global__ void __launch_bounds__(1024)
    cross_entropy_wide(T* logits, const float* bias, const u32* ids, float* losses, int classes, int stride, u32 ignore,
                       float smoothing, float scale, int gradient) {
    cross_entropy_row(logits, bias, ids, losses, classes, stride, ignore, smoothing, scale, gradient);
}

// totals[x] += Σ losses[r][x], in one order: a block of 256 threads, each for every 256th row.
extern "C" __global__ void sum_losses(const float* losses, double* totals, u32 rows) {
    __shared__ double sums[4][256];
    double sum[4] = {};
#pragma unroll 8
    for (u32 row = threadIdx.x; row < rows; row += 256) {
        float4 loss = ((const float4*)losses)[row];
        sum[0] += loss.x;
        sum[1] += loss.y;
        sum[2] += loss.z;
        sum[3] += loss.w;
    }
#pragma unroll
    for (int at = 0; at < 4; at++) sums[at][threadIdx.x] = sum[at];
    __syncthreads();
    if (threadIdx.x >= 4) return;
    double total = 0.0;
    for (int at = 0; at < 256; at++) total += sums[threadIdx.x][at];
    totals[threadIdx.x] += total;
}
