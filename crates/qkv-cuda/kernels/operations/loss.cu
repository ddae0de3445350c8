// Cross-entropy over rows of logits, which are replaced by their gradient, and the sum over rows.

// The sum of exponentials of some logits, relative to the highest of them, and the sum of the logits.
struct Mass {
    float most, sum, total;
};

// The mass of a row, from those of its block's threads, in a fixed order. `scratch` has three floats for each warp.
__device__ __forceinline__ Mass block_mass(Mass own, float* scratch) {
    float most = warp_max(own.most);
    float sum = warp_sum(own.most == -INFINITE ? 0.0f : own.sum * exponential(own.most - most));
    float total = warp_sum(own.total);
    if (threadIdx.x % 32 == 0) {
        float* of_warp = scratch + threadIdx.x / 32 * 3;
        of_warp[0] = most, of_warp[1] = sum, of_warp[2] = total;
    }
    __syncthreads();
    Mass all = {scratch[0], 0.0f, 0.0f};
    for (u32 warp = 1; warp < blockDim.x / 32; warp++)
        all.most = scratch[warp * 3] > all.most ? scratch[warp * 3] : all.most;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) {
        all.sum += scratch[warp * 3] == -INFINITE
            ? 0.0f
            : scratch[warp * 3 + 1] * exponential(scratch[warp * 3] - all.most);
        all.total += scratch[warp * 3 + 2];
    }
    return all;
}

// What a row needs besides its logits.
struct RowLoss {
    u32 id;
    float right;
    int classes;
    float smoothing, scale;
};

// losses: [rows, 4], with label smoothing, without, whether the target had the highest logit, and whether the row
// counts.
__device__ __forceinline__ void write_losses(float* losses, const RowLoss& row, const Mass& all) {
    float lse = all.most + logf(all.sum), nll = lse - row.right, smoothing = row.smoothing;
    losses[0] = (1.0f - smoothing) * nll + (smoothing != 0.0f ? smoothing * (lse - all.total / row.classes) : 0.0f);
    losses[1] = nll;
    losses[2] = row.right == all.most ? 1.0f : 0.0f;
    losses[3] = 1.0f;
}

// Turns exponentials of eight logits, times `factor`, into their gradient.
__device__ __forceinline__ void to_gradient(const RowLoss& row, int col, float factor, float (&x)[EIGHT]) {
    float even = row.scale * row.smoothing / row.classes;
#pragma unroll
    for (int at = 0; at < EIGHT; at++) x[at] = x[at] * factor - even;
    if (row.id - u32(col) >= EIGHT) return;
#pragma unroll
    for (int at = 0; at < EIGHT; at++)
        if (u32(col + at) == row.id) x[at] -= row.scale * (1.0f - row.smoothing);
}

// Adds the bias to eight logits; those beyond the classes become −∞.
__device__ __forceinline__ void finish_logits(const float* bias, int col, int classes, float (&x)[EIGHT]) {
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
}

// Accumulates the highest logit and, if labels are smoothed, the sum.
__device__ __forceinline__ void add_to(Mass& own, const RowLoss& row, int col, const float (&x)[EIGHT]) {
#pragma unroll
    for (int at = 0; at < EIGHT; at++) own.most = x[at] > own.most ? x[at] : own.most;
    if (row.smoothing == 0.0f) return;
#pragma unroll
    for (int at = 0; at < EIGHT; at++) own.total += col + at < row.classes ? x[at] : 0.0f;
}

// Rows of the class `ignore` have no loss and no gradient.
__device__ __forceinline__ void clear_row(T* scores, float* losses, int classes, int gradient) {
    float zeros[EIGHT] = {};
    for (int col = threadIdx.x * EIGHT; col < classes && gradient; col += blockDim.x * EIGHT)
        store_eight(scores, col, EIGHT, zeros);
    if (threadIdx.x < 4) losses[threadIdx.x] = 0.0f;
}

// Vectors of eight logits per thread when a row stays in registers.
#define PARTS 4

// One block of 256 threads per row of at most 8,192 classes, which stays in registers: one exponential per logit. Rows
// begin `stride` elements apart, a multiple of eight.
extern "C" __global__ void __launch_bounds__(256, 4)
    cross_entropy(T* logits, const float* bias, const u32* ids, float* losses, int classes, int stride, u32 ignore,
                  float smoothing, float scale, int gradient) {
    __shared__ float scratch[3 * 8];
    T* scores = logits + u64(blockIdx.x) * stride;
    losses += 4 * blockIdx.x;
    u32 id = ids[blockIdx.x];
    if (id == ignore) return clear_row(scores, losses, classes, gradient);
    int first = threadIdx.x * EIGHT, step = blockDim.x * EIGHT;
    Eight kept[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        if (first + part * step < classes) kept[part] = *(const Eight*)(scores + first + part * step);
    // Read before any thread has written its gradient.
    RowLoss row = {id, widen(scores[id]) + (bias ? bias[id] : 0.0f), classes, smoothing, scale};
    float x[PARTS][EIGHT];
    Mass own = {-INFINITE, 0.0f, 0.0f};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        int col = first + part * step;
        if (col >= classes) continue;
        widen_eight(kept[part], x[part]);
        finish_logits(bias, col, classes, x[part]);
        add_to(own, row, col, x[part]);
    }
    float base = own.most == -INFINITE ? 0.0f : own.most;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        if (first + part * step >= classes) continue;
#pragma unroll
        for (int at = 0; at < EIGHT; at++) own.sum += x[part][at] = exponential(x[part][at] - base);
    }
    Mass all = block_mass(own, scratch);
    if (threadIdx.x == 0) write_losses(losses, row, all);
    if (!gradient) return;
    float factor = exponential(own.most - all.most) * (scale / all.sum);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        int col = first + part * step;
        if (col >= classes) continue;
        to_gradient(row, col, factor, x[part]);
        store_eight(scores, col, EIGHT, x[part]);
    }
}

// Vectors of eight logits that a thread keeps as stored in memory; a row is read only once if they are enough.
#define KEPT (16 / int(sizeof(T)))

// Calls `f(col, x)` for each eight logits of this thread.
template <typename F>
__device__ __forceinline__ void for_logits(const Eight (&kept)[KEPT], const T* scores, const float* bias, int classes,
                                           F f) {
    int first = threadIdx.x * EIGHT, step = blockDim.x * EIGHT;
    float x[EIGHT];
#pragma unroll
    for (int part = 0; part < KEPT; part++) {
        int col = first + part * step;
        if (col >= classes) continue;
        widen_eight(kept[part], x);
        finish_logits(bias, col, classes, x);
        f(col, x);
    }
    for (int col = first + KEPT * step; col < classes; col += step) {
        load_eight(scores, col, EIGHT, x);
        finish_logits(bias, col, classes, x);
        f(col, x);
    }
}

// The same for any number of classes, in blocks of 1,024 threads: two exponentials per logit.
extern "C" __global__ void __launch_bounds__(1024)
    cross_entropy_wide(T* logits, const float* bias, const u32* ids, float* losses, int classes, int stride, u32 ignore,
                       float smoothing, float scale, int gradient) {
    __shared__ float scratch[3 * 32];
    T* scores = logits + u64(blockIdx.x) * stride;
    losses += 4 * blockIdx.x;
    u32 id = ids[blockIdx.x];
    if (id == ignore) return clear_row(scores, losses, classes, gradient);
    int first = threadIdx.x * EIGHT, step = blockDim.x * EIGHT;
    Eight kept[KEPT];
#pragma unroll
    for (int part = 0; part < KEPT; part++)
        if (first + part * step < classes) kept[part] = *(const Eight*)(scores + first + part * step);
    RowLoss row = {id, widen(scores[id]) + (bias ? bias[id] : 0.0f), classes, smoothing, scale};
    Mass own = {-INFINITE, 0.0f, 0.0f};
    for_logits(kept, scores, bias, classes, [&](int col, const float (&x)[EIGHT]) { add_to(own, row, col, x); });
    for_logits(kept, scores, bias, classes, [&](int, const float (&x)[EIGHT]) {
#pragma unroll
        for (int at = 0; at < EIGHT; at++) own.sum += exponential(x[at] - own.most);
    });
    Mass all = block_mass(own, scratch);
    if (threadIdx.x == 0) write_losses(losses, row, all);
    if (!gradient) return;
    float factor = scale / all.sum;
    for_logits(kept, scores, bias, classes, [&](int col, float (&x)[EIGHT]) {
#pragma unroll
        for (int at = 0; at < EIGHT; at++) x[at] = exponential(x[at] - all.most);
        to_gradient(row, col, factor, x);
        store_eight(scores, col, EIGHT, x);
    });
}

// totals[x] += Σ losses[r][x], in a fixed order: a block of 1,024 threads, each of which sums every 1,024th row.
extern "C" __global__ void __launch_bounds__(1024) sum_losses(const float* losses, double* totals, u32 rows) {
    __shared__ double sums[1024][4];
    double sum[4] = {};
#pragma unroll 8
    for (u32 row = threadIdx.x; row < rows; row += 1024) {
        float4 loss = ((const float4*)losses)[row];
        sum[0] += loss.x;
        sum[1] += loss.y;
        sum[2] += loss.z;
        sum[3] += loss.w;
    }
#pragma unroll
    for (int at = 0; at < 4; at++) sums[threadIdx.x][at] = sum[at];
    for (u32 half = 512; half > 0; half /= 2) {
        __syncthreads();
        for (int at = 0; threadIdx.x < half && at < 4; at++) sums[threadIdx.x][at] += sums[threadIdx.x + half][at];
    }
    if (threadIdx.x == 0)
        for (int at = 0; at < 4; at++) totals[at] += sums[0][at];
}
