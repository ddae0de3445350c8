// Cross-entropy over rows of logits, which are replaced by their gradient, and the sums of its rows.

// One block of 1,024 threads a row, so that the rows at work at one time stay in the cache for their second pass.
// losses: [rows, 4], with label smoothing, without, whether the target had the highest logit, and whether the row
// counts. Rows of the class `ignore` do not, and have no gradient.
extern "C" __global__ void cross_entropy(T* logits, const float* bias, const u32* ids, float* losses, int classes,
                                         u32 ignore, float smoothing, float scale, int gradient) {
    __shared__ float scratch[32];
    u32 row = blockIdx.x, id = ids[row];
    T* scores = logits + u64(row) * classes;
    if (id == ignore) {
        float zeros[EIGHT] = {};
        for (int col = threadIdx.x * EIGHT; col < classes && gradient; col += blockDim.x * EIGHT)
            store_eight(scores, col, classes, zeros);
        if (threadIdx.x < 4) losses[4 * row + threadIdx.x] = 0.0f;
        return;
    }
    float x[EIGHT], b[EIGHT] = {};
    // One pass: the mass is relative to the largest score so far.
    float most = -INFINITE, mass = 0.0f, total = 0.0f;
    for (int col = threadIdx.x * EIGHT; col < classes; col += blockDim.x * EIGHT) {
        load_eight(scores, col, classes, x);
        if (bias) load_floats(bias, col, classes, b);
        float before = most;
#pragma unroll
        for (int at = 0; at < EIGHT; at++) {
            x[at] = col + at < classes ? x[at] + b[at] : -INFINITE;
            most = x[at] > most ? x[at] : most;
        }
        if (most == -INFINITE) continue;
        if (most > before) mass *= expf(before - most);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) {
            mass += expf(x[at] - most);
            total += col + at < classes ? x[at] : 0.0f;
        }
    }
    float own_most = most;
    most = block_max(most, scratch);
    mass = block_sum(own_most == -INFINITE ? 0.0f : mass * expf(own_most - most), scratch);
    total = block_sum(total, scratch);
    float right = widen(scores[id]) + (bias ? bias[id] : 0.0f);
    float lse = most + logf(mass), nll = lse - right;
    __syncthreads(); // `right` is read before its gradient is written
    if (threadIdx.x == 0) {
        losses[4 * row] = (1.0f - smoothing) * nll + smoothing * (lse - total / classes);
        losses[4 * row + 1] = nll;
        losses[4 * row + 2] = right == most ? 1.0f : 0.0f;
        losses[4 * row + 3] = 1.0f;
    }
    if (!gradient) return;
    float each = scale / mass, even = scale * smoothing / classes, own = scale * (1.0f - smoothing);
    for (int col = threadIdx.x * EIGHT; col < classes; col += blockDim.x * EIGHT) {
        load_eight(scores, col, classes, x);
        if (bias) load_floats(bias, col, classes, b);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) {
            float g = expf(x[at] + b[at] - most) * each - even;
            x[at] = u32(col + at) == id ? g - own : g;
        }
        store_eight(scores, col, classes, x);
    }
}

// totals[x] += Σ losses[r][x], in one order: a block of 256 threads.
extern "C" __global__ void sum_losses(const float* losses, double* totals, u32 rows) {
    __shared__ double sums[4 * 256];
    double sum[4] = {};
    u32 each = (rows + 255) / 256;
    for (u32 row = threadIdx.x * each; row < rows && row < (threadIdx.x + 1) * each; row++)
        for (int x = 0; x < 4; x++) sum[x] += losses[4 * row + x];
    for (int x = 0; x < 4; x++) sums[x * 256 + threadIdx.x] = sum[x];
    __syncthreads();
    if (threadIdx.x >= 4) return;
    double total = 0.0;
    for (int at = 0; at < 256; at++) total += sums[threadIdx.x * 256 + at];
    totals[threadIdx.x] += total;
}
