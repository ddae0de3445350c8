// Rows by index: embeddings, gathers, and their gradients, which add rows in a fixed order and need no atomics.

// y[r] = scale · table[ids[r]] + positions[start + r mod length].
extern "C" __global__ void embedding(const u32* ids, const float* table, const float* positions, T* y, u32 rows,
                                     int width, float scale, u32 length, u32 start) {
    in_turn();
    FOR_EIGHTS(rows, width) {
        float x[EIGHT], p[EIGHT];
        load_floats(table + u64(ids[row]) * width, col, width, x);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) x[at] *= scale;
        if (positions) {
            load_floats(positions + u64(start + row % length) * width, col, width, p);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) x[at] += p[at];
        }
        store_eight(y + u64(row) * width, col, width, x);
    }
}

// y[r] = x[index[r]]; zeros if the index is negative.
extern "C" __global__ void gather_rows(const T* x, const int* index, T* y, u32 rows, int width) {
    FOR_EIGHTS(rows, width) {
        float v[EIGHT] = {};
        int from = index[row];
        if (from >= 0) load_eight(x + u64(from) * width, col, width, v);
        store_eight(y + u64(row) * width, col, width, v);
    }
}

template <class Sum>
__device__ __forceinline__ void scatter(const T* rows, const u32* order, const u32* starts, const u32* targets,
                                        Sum* sums, int width, float scale) {
    u32 target = targets[blockIdx.x], first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
    for (int col = (blockIdx.y * blockDim.x + threadIdx.x) * EIGHT; col < width;
         col += gridDim.y * blockDim.x * EIGHT) {
        float v[EIGHT], sum[EIGHT] = {};
        for (u32 at = first; at < last; at++) {
            load_eight(rows + u64(order[at]) * width, col, width, v);
#pragma unroll
            for (int x = 0; x < EIGHT; x++) sum[x] += v[x];
        }
        for (int x = 0; x < EIGHT && col + x < width; x++) {
            Sum* to = sums + u64(target) * width + col + x;
            if constexpr (sizeof(Sum) == 4) *(float*)to += sum[x] * scale;
            else *to = narrow(widen(*(T*)to) + sum[x] * scale);
        }
    }
}

// sums[targets[s]] += scale · Σ rows[order[starts[s] … starts[s + 1])], into f32.
extern "C" __global__ void scatter_rows(const T* rows, const u32* order, const u32* starts, const u32* targets,
                                        float* sums, int width, float scale) {
    scatter(rows, order, starts, targets, sums, width, scale);
}

// The same into activations.
extern "C" __global__ void scatter_same(const T* rows, const u32* order, const u32* starts, const u32* targets, T* sums,
                                        int width, float scale) {
    scatter(rows, order, starts, targets, sums, width, scale);
}

// Copies columns `from_at …` of rows of `from_width` into columns `to_at …` of rows of `to_width`; adds them with
// `add`.
extern "C" __global__ void copy_columns(const T* from, T* to, u32 rows, u32 width, u32 from_width, u32 from_at,
                                        u32 to_width, u32 to_at, int add) {
    FOR_EACH(rows * width) {
        u32 row = at / width, col = at % width;
        T* there = to + u64(row) * to_width + to_at + col;
        T x = from[u64(row) * from_width + from_at + col];
        *there = add ? narrow(widen(*there) + widen(x)) : x;
    }
}

// The mean of the first lengths[b] of `length` rows; one block per sequence.
extern "C" __global__ void mean_rows(const T* x, const u32* lengths, T* y, u32 length, int width) {
    u32 count = lengths[blockIdx.x];
    for (int col = threadIdx.x * EIGHT; col < width; col += blockDim.x * EIGHT) {
        float v[EIGHT], sum[EIGHT] = {};
        for (u32 row = 0; row < count; row++) {
            load_eight(x + (u64(blockIdx.x) * length + row) * width, col, width, v);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) sum[at] += v[at];
        }
        float share = 1.0f / float(count > 0 ? count : 1);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) sum[at] *= share;
        store_eight(y + u64(blockIdx.x) * width, col, width, sum);
    }
}

extern "C" __global__ void mean_gradient(const T* d_y, const u32* lengths, T* d_x, u32 rows, u32 length, int width) {
    FOR_EIGHTS(rows, width) {
        float v[EIGHT] = {};
        u32 b = row / length, count = lengths[b];
        if (row % length < count) load_eight(d_y + u64(b) * width, col, width, v);
        float share = 1.0f / float(count > 0 ? count : 1);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) v[at] *= share;
        store_eight(d_x + u64(row) * width, col, width, v);
    }
}
