// Layer and RMS normalization, one warp per row; the gradients of gain and bias as partial sums over some rows each,
// which `add_partials` adds in order. Also sums of columns, for the gradients of biases.

// Sums N numbers per column over rows `first` … `last − 1`, in a fixed order: `add(row, col, sums)` adds those of eight
// columns of a row. Threads that would have no columns share the rows of others. to: [N, width].
template <int N, typename Add>
__device__ __forceinline__ void sum_columns(float* to, u32 first, u32 last, int width, Add add) {
    __shared__ float shared[256 * N * EIGHT];
    int groups = (width + EIGHT - 1) / EIGHT, lanes = int(blockDim.x) / groups;
    int lane = lanes > 1 ? int(threadIdx.x) / groups : 0;
    float* own = shared + threadIdx.x * N * EIGHT;
    for (int group = int(threadIdx.x) - lane * groups; group < groups && lane < (lanes > 1 ? lanes : 1);
         group += blockDim.x) {
        float sums[N][EIGHT] = {};
        for (u32 row = first + lane; row < last; row += lanes > 1 ? lanes : 1) add(row, group * EIGHT, sums);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int at = 0; at < EIGHT; at++) {
                if (lanes > 1) own[n * EIGHT + at] = sums[n][at];
                else if (group * EIGHT + at < width) to[n * width + group * EIGHT + at] = sums[n][at];
            }
    }
    if (lanes <= 1) return;
    __syncthreads();
    for (int at = threadIdx.x; at < N * width; at += blockDim.x) {
        int n = at / width, col = at % width;
        float total = 0.0f;
        for (int l = 0; l < lanes; l++)
            total += shared[(l * groups + col / EIGHT) * N * EIGHT + n * EIGHT + col % EIGHT];
        to[at] = total;
    }
}

extern "C" __global__ void layer_norm(const T* x, T* y, float* moments, const float* gain, const float* bias, u32 rows,
                                      int width, float epsilon) {
    in_turn();
    u32 step = gridDim.x * (blockDim.x / 32);
    for (u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += step) {
        float2 found = normalize_row<true>(x + u64(row) * width, y + u64(row) * width, gain, bias, width, epsilon);
        if (threadIdx.x % 32 > 0) continue;
        moments[2 * row] = found.x;
        moments[2 * row + 1] = found.y;
    }
}

// The gradients of `each` rows of at most CHUNKS · 256 columns, a multiple of eight, by a block of 256 threads: one
// warp per row, every element read once, the sums of columns in registers. If not CENTERED, this is RMS normalization.
// moments: mean and inverse deviation of each row, or only the latter. partial: [blocks, 1 or 2, width].
template <int CHUNKS, bool CENTERED>
__device__ __forceinline__ void norm_gradient(const T* x, const T* d_y, T* d_x, const float* moments, const float* gain,
                                              float* partial, u32 rows, u32 each, int width, int add) {
    __shared__ float shared[8 * 256];
    constexpr int SUMS = CENTERED ? 2 : 1;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * each;
    u32 last = first + each < rows ? first + each : rows;
    float sums[SUMS][CHUNKS][EIGHT] = {};
    for (u32 row = first + warp; row < last; row += 8) {
        Eight from[CHUNKS], above[CHUNKS], there[CHUNKS];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            int col = chunk * 256 + lane * EIGHT;
            from[chunk] = above[chunk] = there[chunk] = Eight{};
            if (col >= width) continue;
            from[chunk] = *(const Eight*)(x + u64(row) * width + col);
            above[chunk] = *(const Eight*)(d_y + u64(row) * width + col);
            if (add) there[chunk] = *(const Eight*)(d_x + u64(row) * width + col);
        }
        float mean = CENTERED ? moments[2 * row] : 0.0f, inverse = CENTERED ? moments[2 * row + 1] : moments[row];
        float v[EIGHT], d[EIGHT], g[EIGHT], flat = 0.0f, tilt = 0.0f;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            int col = chunk * 256 + lane * EIGHT;
            if (col >= width) continue;
            widen_eight(from[chunk], v);
            widen_eight(above[chunk], d);
            load_floats(gain, col, EIGHT, g);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) {
                float normal = (v[at] - mean) * inverse;
                sums[0][chunk][at] += d[at] * normal;
                if constexpr (CENTERED) sums[1][chunk][at] += d[at], flat += d[at] * g[at];
                tilt += d[at] * g[at] * normal;
            }
        }
        if constexpr (CENTERED) flat = warp_sum(flat) / width;
        tilt = warp_sum(tilt) / width;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            int col = chunk * 256 + lane * EIGHT;
            if (col >= width) continue;
            widen_eight(from[chunk], v);
            widen_eight(above[chunk], d);
            load_floats(gain, col, EIGHT, g);
#pragma unroll
            for (int at = 0; at < EIGHT; at++)
                d[at] = (d[at] * g[at] - flat - (v[at] - mean) * inverse * tilt) * inverse;
            widen_eight(there[chunk], v);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) d[at] += v[at];
            store_eight(d_x + u64(row) * width, col, EIGHT, d);
        }
    }
    partial += u64(blockIdx.x) * SUMS * width;
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            __syncthreads();
#pragma unroll
            for (int at = 0; at < EIGHT; at++) shared[warp * 256 + lane * EIGHT + at] = sums[sum][chunk][at];
            __syncthreads();
            float total = 0.0f;
            for (int at = 0; at < 8; at++) total += shared[at * 256 + threadIdx.x];
            int col = chunk * 256 + threadIdx.x;
            if (col < width) partial[sum * width + col] = total;
        }
    }
}

#define NORM_GRADIENT(NAME, CHUNKS, CENTERED)                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        NAME(const T* x, const T* d_y, T* d_x, const float* moments, const float* gain, float* partial, u32 rows,     \
             u32 each, int width, int add) {                                                                          \
        norm_gradient<CHUNKS, CENTERED>(x, d_y, d_x, moments, gain, partial, rows, each, width, add);                 \
    }
NORM_GRADIENT(layer_norm_gradient_256, 1, true)
NORM_GRADIENT(layer_norm_gradient_512, 2, true)
NORM_GRADIENT(layer_norm_gradient_768, 3, true)
NORM_GRADIENT(layer_norm_gradient_1024, 4, true)
NORM_GRADIENT(rms_norm_gradient_256, 1, false)
NORM_GRADIENT(rms_norm_gradient_512, 2, false)
NORM_GRADIENT(rms_norm_gradient_768, 3, false)
NORM_GRADIENT(rms_norm_gradient_1024, 4, false)

// The same for any number of columns, read twice: first for d_x, one warp per row, then for the sums of columns. With
// `add`, the gradient is added to d_x. partial: [blocks, 2, width].
extern "C" __global__ void layer_norm_gradient(const T* x, const T* d_y, T* d_x, const float* moments,
                                               const float* gain, float* partial, u32 rows, u32 each, int width,
                                               int add) {
    u32 lane = threadIdx.x % 32, first = blockIdx.x * each;
    u32 last = first + each < rows ? first + each : rows;
    for (u32 row = first + threadIdx.x / 32; row < last; row += blockDim.x / 32) {
        float mean = moments[2 * row], inverse = moments[2 * row + 1];
        float v[EIGHT], d[EIGHT], g[EIGHT];
        float flat = 0.0f, tilt = 0.0f;
        for (int col = lane * EIGHT; col < width; col += 32 * EIGHT) {
            load_eight(x + u64(row) * width, col, width, v);
            load_eight(d_y + u64(row) * width, col, width, d);
            load_floats(gain, col, width, g);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) {
                flat += d[at] * g[at];
                tilt += d[at] * g[at] * ((v[at] - mean) * inverse);
            }
        }
        flat = warp_sum(flat) / width;
        tilt = warp_sum(tilt) / width;
        for (int col = lane * EIGHT; col < width; col += 32 * EIGHT) {
            load_eight(x + u64(row) * width, col, width, v);
            load_eight(d_y + u64(row) * width, col, width, d);
            load_floats(gain, col, width, g);
#pragma unroll
            for (int at = 0; at < EIGHT; at++)
                d[at] = (d[at] * g[at] - flat - (v[at] - mean) * inverse * tilt) * inverse;
            if (add) {
                load_eight(d_x + u64(row) * width, col, width, v);
#pragma unroll
                for (int at = 0; at < EIGHT; at++) d[at] += v[at];
            }
            store_eight(d_x + u64(row) * width, col, width, d);
        }
    }
    sum_columns<2>(partial + u64(blockIdx.x) * 2 * width, first, last, width,
                   [&](u32 row, int col, float (&sums)[2][EIGHT]) {
                       float mean = moments[2 * row], inverse = moments[2 * row + 1], v[EIGHT], d[EIGHT];
                       load_eight(x + u64(row) * width, col, width, v);
                       load_eight(d_y + u64(row) * width, col, width, d);
#pragma unroll
                       for (int at = 0; at < EIGHT; at++) {
                           sums[0][at] += d[at] * ((v[at] - mean) * inverse);
                           sums[1][at] += d[at];
                       }
                   });
}

extern "C" __global__ void rms_norm(const T* x, T* y, float* inverses, const float* gain, u32 rows, int width,
                                    float epsilon) {
    in_turn();
    u32 step = gridDim.x * (blockDim.x / 32);
    for (u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += step) {
        float2 found = normalize_row<false>(x + u64(row) * width, y + u64(row) * width, gain, nullptr, width, epsilon);
        if (threadIdx.x % 32 == 0) inverses[row] = found.y;
    }
}

// partial: [blocks, width].
extern "C" __global__ void rms_norm_gradient(const T* x, const T* d_y, T* d_x, const float* inverses, const float* gain,
                                             float* partial, u32 rows, u32 each, int width, int add) {
    u32 lane = threadIdx.x % 32, first = blockIdx.x * each;
    u32 last = first + each < rows ? first + each : rows;
    for (u32 row = first + threadIdx.x / 32; row < last; row += blockDim.x / 32) {
        float inverse = inverses[row], tilt = 0.0f;
        float v[EIGHT], d[EIGHT], g[EIGHT];
        for (int col = lane * EIGHT; col < width; col += 32 * EIGHT) {
            load_eight(x + u64(row) * width, col, width, v);
            load_eight(d_y + u64(row) * width, col, width, d);
            load_floats(gain, col, width, g);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) tilt += d[at] * g[at] * v[at];
        }
        tilt = warp_sum(tilt) / width * inverse * inverse;
        for (int col = lane * EIGHT; col < width; col += 32 * EIGHT) {
            load_eight(x + u64(row) * width, col, width, v);
            load_eight(d_y + u64(row) * width, col, width, d);
            load_floats(gain, col, width, g);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) d[at] = (d[at] * g[at] - v[at] * tilt) * inverse;
            if (add) {
                load_eight(d_x + u64(row) * width, col, width, v);
#pragma unroll
                for (int at = 0; at < EIGHT; at++) d[at] += v[at];
            }
            store_eight(d_x + u64(row) * width, col, width, d);
        }
    }
    sum_columns<1>(partial + u64(blockIdx.x) * width, first, last, width,
                   [&](u32 row, int col, float (&sums)[1][EIGHT]) {
                       float v[EIGHT], d[EIGHT];
                       load_eight(x + u64(row) * width, col, width, v);
                       load_eight(d_y + u64(row) * width, col, width, d);
#pragma unroll
                       for (int at = 0; at < EIGHT; at++) sums[0][at] += d[at] * v[at] * inverses[row];
                   });
}

// Rows that a warp loads at once.
#define IN_FLIGHT 8

// to[c] += Σ x[r][c]. Block (x, y) sums the columns 256x … of the rows y · each …; the last block to arrive in a column
// of blocks adds the partial sums of all of them, in order. partial: [blocks, width]; arrived: a zero for each x, which
// the last block resets to zero.
extern "C" __global__ void column_sums(const T* x, float* partial, float* to, u32* arrived, u32 rows, u32 each,
                                       int width, int columns) {
    __shared__ float sums[8 * 256];
    __shared__ u32 before;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.y * each + warp;
    u32 last = blockIdx.y * each + each < rows ? blockIdx.y * each + each : rows;
    int first = blockIdx.x * 256, col = first + lane * EIGHT;
    float v[EIGHT], sum[EIGHT] = {};
    if (col >= width) last = 0;
    for (; width % EIGHT == 0 && row + 8 * (IN_FLIGHT - 1) < last; row += 8 * IN_FLIGHT) {
        Eight from[IN_FLIGHT];
#pragma unroll
        for (int at = 0; at < IN_FLIGHT; at++) from[at] = *(const Eight*)(x + u64(row + 8 * at) * width + col);
#pragma unroll
        for (int at = 0; at < IN_FLIGHT; at++) {
            widen_eight(from[at], v);
#pragma unroll
            for (int c = 0; c < EIGHT; c++) sum[c] += v[c];
        }
    }
    for (; row < last; row += 8) {
        load_eight(x + u64(row) * width, col, width, v);
#pragma unroll
        for (int c = 0; c < EIGHT; c++) sum[c] += v[c];
    }
#pragma unroll
    for (int c = 0; c < EIGHT; c++) sums[warp * 256 + lane * EIGHT + c] = sum[c];
    __syncthreads();
    col = first + threadIdx.x;
    float total = 0.0f;
    for (int at = 0; at < 8; at++) total += sums[at * 256 + threadIdx.x];
    if (col < width) partial[u64(blockIdx.y) * width + col] = total;
    __threadfence(); // writes are visible before they are counted
    __syncthreads();
    if (threadIdx.x == 0) before = atomicAdd(arrived + blockIdx.x, 1u);
    __syncthreads();
    if (before != gridDim.y - 1) return;
    __threadfence();
    if (threadIdx.x == 0) arrived[blockIdx.x] = 0;
    // Each warp adds a run of the partial sums of all columns, then the runs are added.
    u32 run = (gridDim.y + 7) / 8, end = (warp + 1) * run < gridDim.y ? (warp + 1) * run : gridDim.y;
#pragma unroll
    for (int c = 0; c < EIGHT; c++) sum[c] = 0.0f;
#pragma unroll 4
    for (u32 p = warp * run; p < end; p++) {
#pragma unroll
        for (int c = 0; c < EIGHT; c++) {
            col = first + c * 32 + lane;
            sum[c] += col < columns ? load_written(partial + u64(p) * width + col) : 0.0f;
        }
    }
#pragma unroll
    for (int c = 0; c < EIGHT; c++) sums[warp * 256 + c * 32 + lane] = sum[c];
    __syncthreads();
    col = first + threadIdx.x;
    if (col >= columns) return;
    total = 0.0f;
    for (int at = 0; at < 8; at++) total += sums[at * 256 + threadIdx.x];
    to[col] += total;
}

// sum[col] += Σ partial[p][col] over `count` partial sums in a fixed order: eight runs of them, then the runs. Columns
// from `width` on belong to `second`; unwanted sums are null.
extern "C" __global__ void add_partials(const float* partial, float* sum, float* second, u32 count, u32 stride,
                                        u32 width) {
    __shared__ float sums[256];
    u32 col = blockIdx.x * 32 + threadIdx.x % 32, run = threadIdx.x / 32, each = (count + 7) / 8;
    u32 columns = second ? 2 * width : width;
    float total = 0.0f;
    if (col < columns)
        for (u32 p = run * each; p < count && p < (run + 1) * each; p++) total += partial[u64(p) * stride + col];
    sums[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x >= 32 || col >= columns) return;
    for (int at = 1; at < 8; at++) total += sums[at * 32 + threadIdx.x];
    if (col >= width) second[col - width] += total;
    else if (sum) sum[col] += total;
}
