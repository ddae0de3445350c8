// Weights on demand, recomputed from q, k and the log-sum-exp: a rectangle of one head, either in full or pooled to
// cells.

__device__ __forceinline__ void tile_weights(const GeneralParams& params, const Head& head, const T* q, const T* k,
                                             int first, int j0, float (&s)[PARTS][4]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = first + warp * 16 + g;
    clear(s);
    matmul_abt(s, q + warp * 16 * LD, k, padded(params.d));
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int i = row + x / 2 * 8, j = j0 + 8 * part + 2 * t + x % 2;
            if (i >= params.first_row + params.rows || j >= params.first_col + params.cols) {
                s[part][x] = 0.0f;
                continue;
            }
            float score = finish_score(params, head, s[part][x], i, j, position_of(params, head.b, i), false).score;
            float lse = params.lse[(i64(head.b) * params.heads + head.h) * params.n + i];
            s[part][x] = weight_of(score, lse);
            if (params.dropout_threshold && s[part][x] != 0.0f) s[part][x] *= dropout_factor(params, head, i, j);
        }
}

// result [rows, cols]: one block per tile.
extern "C" __global__ void __launch_bounds__(THREADS) weights(const __grid_constant__ GeneralParams params) {
    SHARED(shared);
    T* q = (T*)shared;
    T* k = q + ROWS * LD;
    int col_tiles = (params.cols + COLS - 1) / COLS, tile = int(blockIdx.x) / col_tiles;
    int first = params.first_row + tile * ROWS, j0 = params.first_col + int(blockIdx.x) % col_tiles * COLS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Head head = head_of(params, params.at_batch, params.at_head);
    load_rows(q, ROWS, params.q, head.b, head.h, first, params.n, params.d, params.vectorized & 1);
    load_rows(k, COLS, params.k, head.b, head.key_head, j0, params.m, params.d, params.vectorized >> 1 & 1);
    __syncthreads();
    float s[PARTS][4];
    tile_weights(params, head, q, k, first, j0, s);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int r = first - params.first_row + warp * 16 + g + x / 2 * 8,
                c = j0 - params.first_col + 8 * part + 2 * t + x % 2;
            if (r < params.rows && c < params.cols) params.result[i64(r) * params.cols + c] = s[part][x];
        }
}

// The rows (or columns) of a range of `len` that cell `at` of `cells` covers: `each` of them, or what is left for the
// last cell; if `each` is 0, an even share of at least one.
__device__ __forceinline__ void cell_of(i64 at, i64 len, i64 cells, i64 each, i64& start, i64& end) {
    start = each ? at * each : at * len / cells;
    end = each ? min_i64(start + each, len) : max_i64((at + 1) * len / cells, start + 1);
}

__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

// pooled_columns [height, cols]: the maximum or the sum of each column over the rows of a cell.
extern "C" __global__ void __launch_bounds__(THREADS) weights_columns(const __grid_constant__ GeneralParams params) {
    SHARED(shared);
    T* q = (T*)shared;
    T* k = q + ROWS * LD;
    float* found = (float*)(k + COLS * LD); // [ROWS, COLS + 1]
    int col_tiles = (params.cols + COLS - 1) / COLS, y = int(blockIdx.x) / col_tiles;
    int j0 = params.first_col + int(blockIdx.x) % col_tiles * COLS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Head head = head_of(params, params.at_batch, params.at_head);
    load_rows(k, COLS, params.k, head.b, head.key_head, j0, params.m, params.d, params.vectorized >> 1 & 1);
    i64 start, end;
    cell_of(y, params.rows, params.height, params.cell_rows, start, end);
    float acc[PARTS][4];
    clear(acc);
    for (i64 at = start; at < end; at += ROWS) {
        int first = params.first_row + int(at);
        __syncthreads();
        load_rows(q, ROWS, params.q, head.b, head.h, first, params.n, params.d, params.vectorized & 1);
        __syncthreads();
        float s[PARTS][4];
        tile_weights(params, head, q, k, first, j0, s);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                bool covered = at + warp * 16 + g + x / 2 * 8 < end;
                if (covered) acc[part][x] = params.pool ? acc[part][x] + s[part][x] : larger(acc[part][x], s[part][x]);
            }
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            found[(warp * 16 + g + x / 2 * 8) * (COLS + 1) + 8 * part + 2 * t + x % 2] = acc[part][x];
    __syncthreads();
    for (int c = threadIdx.x; c < COLS; c += THREADS) {
        float x = 0.0f;
        for (int r = 0; r < ROWS; r++)
            x = params.pool ? x + found[r * (COLS + 1) + c] : larger(x, found[r * (COLS + 1) + c]);
        int at = j0 - params.first_col + c;
        if (at < params.cols) params.pooled_columns[i64(y) * params.cols + at] = x;
    }
}

// result [height, width] from the pooled columns: one thread per cell.
extern "C" __global__ void weights_cells(const __grid_constant__ GeneralParams params) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= i64(params.height) * params.width) return;
    i64 y = at / params.width, top, bottom, start, end;
    cell_of(y, params.rows, params.height, params.cell_rows, top, bottom);
    cell_of(at % params.width, params.cols, params.width, params.cell_cols, start, end);
    float x = 0.0f;
    for (i64 c = start; c < end; c++) {
        float of_column = params.pooled_columns[y * params.cols + c];
        x = params.pool ? x + of_column : larger(x, of_column);
    }
    params.result[at] = params.pool ? x / float((end - start) * (bottom - top)) : x;
}
