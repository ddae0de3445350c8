// What speech models are trained with: the distance of spectrograms from their targets, and waves over the places of
// tokens, which guided attention is made of. Sums have a fixed order.

// |x − there| + (x − there)², averaged over the width; one warp per row. d_x: its gradient times `scale`, or null.
// losses: [rows, 4], like those of `cross_entropy`. Rows that are not counted have neither loss nor gradient.
extern "C" __global__ void distance(const T* x, const float* there, const u32* counted, T* d_x, float* losses, u32 rows,
                                    int width, float scale) {
    u32 lane = threadIdx.x % 32, step = gridDim.x * (blockDim.x / 32);
    for (u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += step) {
        float counts = counted[row] ? 1.0f : 0.0f, each = scale / width, sum = 0.0f;
        float v[EIGHT], wanted[EIGHT];
        for (int col = lane * EIGHT; col < width; col += 32 * EIGHT) {
            load_eight(x + u64(row) * width, col, width, v);
            load_floats(there + u64(row) * width, col, width, wanted);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) {
                float apart = counts != 0.0f ? v[at] - wanted[at] : 0.0f;
                sum += fabsf(apart) + apart * apart;
                float sign = apart > 0.0f ? 1.0f : apart < 0.0f ? -1.0f : 0.0f;
                v[at] = each * (sign + 2.0f * apart);
            }
            if (d_x) store_eight(d_x + u64(row) * width, col, width, v);
        }
        sum = warp_sum(sum) / width;
        if (lane == 0) {
            losses[4 * row] = losses[4 * row + 1] = sum;
            losses[4 * row + 2] = 0.0f;
            losses[4 * row + 3] = counts;
        }
    }
}

// y [B, N, H, width]: factor · cos(frequency · place − phase), where the place of a token is its middle as a fraction
// of its sequence, or given by places [B, N] if not null; zeros past the end. waves: [3, width], frequencies, phases
// and factors.
extern "C" __global__ void place_waves(T* y, const u32* lengths, const float* places, const float* waves, u32 rows,
                                       u32 length, u32 heads, int width) {
    FOR_EIGHTS(rows, width) {
        u32 token = row / heads % length, count = lengths[row / heads / length];
        float place = places ? places[row / heads] : (token + 0.5f) / (count > 0 ? count : 1);
        float v[EIGHT] = {};
#pragma unroll
        for (int at = 0; at < EIGHT; at++) {
            int c = col + at;
            if (token < count && c < width) v[at] = waves[2 * width + c] * cosf(waves[c] * place - waves[width + c]);
        }
        store_eight(y + u64(row) * width, col, width, v);
    }
}

// losses [rows, 4]: Σ x·y of each row, and zeros; one warp per row.
extern "C" __global__ void row_products(const T* x, const T* y, float* losses, u32 rows, int width) {
    u32 lane = threadIdx.x % 32, step = gridDim.x * (blockDim.x / 32);
    for (u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += step) {
        float a[EIGHT], b[EIGHT], sum = 0.0f;
        for (int col = lane * EIGHT; col < width; col += 32 * EIGHT) {
            load_eight(x + u64(row) * width, col, width, a);
            load_eight(y + u64(row) * width, col, width, b);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) sum += a[at] * b[at];
        }
        sum = warp_sum(sum);
        if (lane < 4) losses[4 * row + lane] = lane == 0 ? sum : 0.0f;
    }
}
