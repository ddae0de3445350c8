// Weights on demand, recomputed from q, k and the log-sum-exp: a rectangle of one head, or a picture of it.

__device__ __forceinline__ void tile_weights(const Job& job, const Head& head, const T* q, const T* k, int first, int j0,
                                             float (&s)[PARTS][4]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = first + warp * 16 + g;
    clear(s);
    rows_by_rows(s, q + warp * 16 * LD, k, padded(job.d));
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int i = row + x / 2 * 8, j = j0 + 8 * part + 2 * t + x % 2;
            if (i >= job.first_row + job.rows || j >= job.first_col + job.cols) {
                s[part][x] = 0.0f;
                continue;
            }
            float score = finish(job, head, s[part][x], i, j, place_of(job, head.b, i), false).score;
            float lse = job.lse[(i64(head.b) * job.heads + head.h) * job.n + i];
            s[part][x] = weight_of(score, lse);
            if (job.threshold && s[part][x] != 0.0f) s[part][x] *= modulation(job, head, i, j);
        }
}

// picture [rows, cols]: one block a tile of it.
extern "C" __global__ void __launch_bounds__(THREADS) weights(const __grid_constant__ Job job) {
    SHARED(shared);
    T* q = (T*)shared;
    T* k = q + ROWS * LD;
    int col_tiles = (job.cols + COLS - 1) / COLS, tile = int(blockIdx.x) / col_tiles;
    int first = job.first_row + tile * ROWS, j0 = job.first_col + int(blockIdx.x) % col_tiles * COLS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Head head = head_of(job, job.at_batch, job.at_head);
    load_rows(q, ROWS, job.q, head.b, head.h, first, job.n, job.d, job.vectors & 1);
    load_rows(k, COLS, job.k, head.b, head.key_head, j0, job.m, job.d, job.vectors >> 1 & 1);
    __syncthreads();
    float s[PARTS][4];
    tile_weights(job, head, q, k, first, j0, s);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int r = first - job.first_row + warp * 16 + g + x / 2 * 8, c = j0 - job.first_col + 8 * part + 2 * t + x % 2;
            if (r < job.rows && c < job.cols) job.picture[i64(r) * job.cols + c] = s[part][x];
        }
}

// The rows (or columns) of a rectangle of `len` that a cell of a grid of `cells` covers: `each`, the last what is left, or, where
// that is 0, its share of them, at least one.
__device__ __forceinline__ void cell_of(i64 at, i64 len, i64 cells, i64 each, i64& start, i64& end) {
    start = each ? at * each : at * len / cells;
    end = each ? least(start + each, len) : most((at + 1) * len / cells, start + 1);
}

__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

// columns [height, cols]: of each column, the largest or the sum over the rows that a row of the picture covers.
extern "C" __global__ void __launch_bounds__(THREADS) weights_columns(const __grid_constant__ Job job) {
    SHARED(shared);
    T* q = (T*)shared;
    T* k = q + ROWS * LD;
    float* found = (float*)(k + COLS * LD); // [ROWS, COLS + 1]
    int col_tiles = (job.cols + COLS - 1) / COLS, y = int(blockIdx.x) / col_tiles;
    int j0 = job.first_col + int(blockIdx.x) % col_tiles * COLS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Head head = head_of(job, job.at_batch, job.at_head);
    load_rows(k, COLS, job.k, head.b, head.key_head, j0, job.m, job.d, job.vectors >> 1 & 1);
    i64 start, end;
    cell_of(y, job.rows, job.height, job.down, start, end);
    float acc[PARTS][4];
    clear(acc);
    for (i64 at = start; at < end; at += ROWS) {
        int first = job.first_row + int(at);
        __syncthreads();
        load_rows(q, ROWS, job.q, head.b, head.h, first, job.n, job.d, job.vectors & 1);
        __syncthreads();
        float s[PARTS][4];
        tile_weights(job, head, q, k, first, j0, s);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                bool covered = at + warp * 16 + g + x / 2 * 8 < end;
                if (covered) acc[part][x] = job.pool ? acc[part][x] + s[part][x] : larger(acc[part][x], s[part][x]);
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
        for (int r = 0; r < ROWS; r++) x = job.pool ? x + found[r * (COLS + 1) + c] : larger(x, found[r * (COLS + 1) + c]);
        int at = j0 - job.first_col + c;
        if (at < job.cols) job.columns[i64(y) * job.cols + at] = x;
    }
}

// picture [height, width], from the columns: one thread a cell.
extern "C" __global__ void weights_cells(const __grid_constant__ Job job) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= i64(job.height) * job.width) return;
    i64 y = at / job.width, top, bottom, start, end;
    cell_of(y, job.rows, job.height, job.down, top, bottom);
    cell_of(at % job.width, job.cols, job.width, job.across, start, end);
    float x = 0.0f;
    for (i64 c = start; c < end; c++) {
        float of_column = job.columns[y * job.cols + c];
        x = job.pool ? x + of_column : larger(x, of_column);
    }
    job.picture[at] = job.pool ? x / float((end - start) * (bottom - top)) : x;
}
