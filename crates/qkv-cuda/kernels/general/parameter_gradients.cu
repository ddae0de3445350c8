// Gradients of a bias tensor, a relative table, a learned scale and sinks: sums of score gradients over everything that
// shares a parameter. Scores are recomputed; every sum has a fixed order.

// The score gradients of one tile, in registers: backward_queries without the final product.
__device__ __forceinline__ void tile_gradients(const GeneralParams& params, const Head& head, const T* q,
                                               const T* d_out, const T* k, const T* v, int first, int j0,
                                               bool full_tile, float (&s)[PARTS][4]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = first + warp * 16 + g;
    Row row0 = row_of(params, head.b, head.h, row), row1 = row_of(params, head.b, head.h, row + 8);
    i64 p0 = position_of(params, head.b, row < params.n ? row : params.n - 1);
    i64 p1 = position_of(params, head.b, row + 8 < params.n ? row + 8 : params.n - 1);
    float d[PARTS][4];
    clear(s);
    clear(d);
    matmul_abt(s, q + warp * 16 * LD, k, padded(params.d));
    matmul_abt(d, d_out + warp * 16 * LD, v, padded(params.dv));
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int i = row + x / 2 * 8, j = j0 + 8 * part + 2 * t + x % 2;
            const Row& of_row = x < 2 ? row0 : row1;
            ModifiedScore made = finish_score(params, head, s[part][x], i, j, x < 2 ? p0 : p1, full_tile);
            float p = weight_of(made.score, of_row.lse), d_weight = d[part][x];
            if (params.dropout_threshold)
                d_weight = made.score == -INFINITE ? 0.0f : d_weight * dropout_factor(params, head, i, j);
            s[part][x] = score_gradient(of_row, p, made.score, d_weight);
        }
}

#ifdef BACKWARD_BIAS
// A block computes one tile of the bias before broadcasting, and walks everything that shares it.
extern "C" __global__ void __launch_bounds__(THREADS) backward_bias(const __grid_constant__ GeneralParams params) {
    SHARED(shared);
    T* q = (T*)shared;
    T* d_out = q + ROWS * LD;
    T* k = d_out + ROWS * LD;
    T* v = k + COLS * LD;
    float* sums = (float*)(v + COLS * LD); // [ROWS, COLS + 1]

    int row_tiles = params.bias_rows == 1 ? 1 : query_tiles(params),
        col_tiles = params.bias_cols == 1 ? 1 : key_tiles(params);
    i64 at = blockIdx.x;
    int col_tile = int(at % col_tiles), row_tile = int(at / col_tiles % row_tiles);
    int bias_head = int(at / col_tiles / row_tiles % params.bias_heads),
        bias_b = int(at / col_tiles / row_tiles / params.bias_heads);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float acc[PARTS][4];
    clear(acc);
    TileExtent extent;
    extent.query_tiles = query_tiles(params);
    extent.key_tiles = key_tiles(params);
    for (int b = bias_b; b < params.batch; b += params.bias_batch)
        for (int h = bias_head; h < params.heads; h += params.bias_heads) {
            Head head = head_of(params, b, h);
            int first_query = params.bias_rows == 1 ? 0 : row_tile,
                end_query = params.bias_rows == 1 ? extent.query_tiles : row_tile + 1;
            for (int tile = first_query; tile < end_query; tile++) {
                extent.query_tile = tile;
                query_extent(params, b, tile * ROWS, ROWS, extent);
                __syncthreads();
                load_rows(q, ROWS, params.q, b, h, tile * ROWS, params.n, params.d, params.vectorized & 1);
                load_rows(d_out, ROWS, params.d_out, b, h, tile * ROWS, params.n, params.dv,
                          params.vectorized >> 4 & 1);
                int first_key = params.bias_cols == 1 ? 0 : col_tile,
                    end_key = params.bias_cols == 1 ? extent.key_tiles : col_tile + 1;
                for (int base = first_key; base < end_key; base += 32) {
                    u32 full, some = classify_tiles(params, b, extent, true, base, end_key, full);
                    while (some) {
                        int key_tile = base + __ffs(int(some)) - 1, j0 = key_tile * COLS;
                        bool full_tile = full >> (key_tile - base) & 1;
                        some &= some - 1;
                        __syncthreads();
                        load_rows(k, COLS, params.k, b, head.key_head, j0, params.m, params.d,
                                  params.vectorized >> 1 & 1);
                        load_rows(v, COLS, params.v, b, head.key_head, j0, params.m, params.dv,
                                  params.vectorized >> 2 & 1);
                        __syncthreads();
                        float s[PARTS][4];
                        tile_gradients(params, head, q, d_out, k, v, tile * ROWS, j0, full_tile, s);
#pragma unroll
                        for (int part = 0; part < PARTS; part++)
#pragma unroll
                            for (int x = 0; x < 4; x++) acc[part][x] += s[part][x];
                    }
                }
            }
        }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            sums[(warp * 16 + g + x / 2 * 8) * (COLS + 1) + 8 * part + 2 * t + x % 2] = acc[part][x];
    __syncthreads();
    int rows = params.bias_rows == 1 ? 1 : ROWS, cols = params.bias_cols == 1 ? 1 : COLS;
    for (int cell = threadIdx.x; cell < rows * cols; cell += THREADS) {
        int r = cell / cols, c = cell % cols, i = row_tile * ROWS + r, j = col_tile * COLS + c;
        if (i >= params.bias_rows || j >= params.bias_cols) continue;
        float sum = 0.0f;
        for (int y = r; y < (rows == 1 ? ROWS : r + 1); y++)
            for (int x = c; x < (cols == 1 ? COLS : c + 1); x++) sum += sums[y * (COLS + 1) + x];
        params.d_bias.data[bias_b * params.d_bias.batch + bias_head * params.d_bias.head + i * params.d_bias.row +
                           j * params.d_bias.col] = narrow(sum);
    }
}
#endif

#ifdef BACKWARD_TABLE
// A block walks every table_part_count-th query tile of the heads that share a row of the table, and sums each entry in
// a fixed order. `reduce_table` adds the parts.
extern "C" __global__ void __launch_bounds__(THREADS) backward_table(const __grid_constant__ GeneralParams params) {
    SHARED(shared);
    T* q = (T*)shared;
    T* d_out = q + ROWS * LD;
    T* k = d_out + ROWS * LD;
    T* v = k + COLS * LD;
    float* grads = (float*)(v + COLS * LD);                          // [ROWS, COLS + 1]
    float *below = grads + ROWS * (COLS + 1), *above = below + ROWS; // sums of the two clamped ends, per row
    i64* places = (i64*)(above + ROWS);                              // [ROWS]

    int table_row = int(blockIdx.x) % params.table_rows, part_of = int(blockIdx.x) / params.table_rows;
    i64 entries = 2 * params.reach + 1;
    float* mine = params.table_parts + (i64(part_of) * params.table_rows + table_row) * entries;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (i64 e = threadIdx.x; e < entries; e += THREADS) mine[e] = 0.0f;
    TileExtent extent;
    extent.query_tiles = query_tiles(params);
    extent.key_tiles = key_tiles(params);
    int sharing = params.heads / params.table_rows;
    i64 items = i64(params.batch) * sharing * extent.query_tiles;
    for (i64 item = part_of; item < items; item += params.table_part_count) {
        int tile = int(item % extent.query_tiles),
            h = table_row + int(item / extent.query_tiles % sharing) * params.table_rows;
        int b = int(item / extent.query_tiles / sharing);
        Head head = head_of(params, b, h);
        extent.query_tile = tile;
        query_extent(params, b, tile * ROWS, ROWS, extent);
        __syncthreads();
        load_rows(q, ROWS, params.q, b, h, tile * ROWS, params.n, params.d, params.vectorized & 1);
        load_rows(d_out, ROWS, params.d_out, b, h, tile * ROWS, params.n, params.dv, params.vectorized >> 4 & 1);
        for (int r = threadIdx.x; r < ROWS; r += THREADS)
            places[r] = position_of(params, b, tile * ROWS + r < params.n ? tile * ROWS + r : params.n - 1);
        for (int base = 0; base < extent.key_tiles; base += 32) {
            u32 full, some = classify_tiles(params, b, extent, true, base, extent.key_tiles, full);
            while (some) {
                int key_tile = base + __ffs(int(some)) - 1, j0 = key_tile * COLS;
                bool full_tile = full >> (key_tile - base) & 1;
                some &= some - 1;
                __syncthreads();
                load_rows(k, COLS, params.k, b, head.key_head, j0, params.m, params.d, params.vectorized >> 1 & 1);
                load_rows(v, COLS, params.v, b, head.key_head, j0, params.m, params.dv, params.vectorized >> 2 & 1);
                __syncthreads();
                float s[PARTS][4];
                tile_gradients(params, head, q, d_out, k, v, tile * ROWS, j0, full_tile, s);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int x = 0; x < 4; x++)
                        grads[(warp * 16 + g + x / 2 * 8) * (COLS + 1) + 8 * part + 2 * t + x % 2] = s[part][x];
                __syncthreads();
                int rows = params.n - tile * ROWS < ROWS ? params.n - tile * ROWS : ROWS;
                // The two ends of the table collect whole ranges of a row: one thread per row.
                for (int r = threadIdx.x; r < ROWS; r += THREADS) {
                    float low = 0.0f, high = 0.0f;
                    if (r < rows)
                        for (int c = 0; c < COLS; c++) {
                            i64 entry = table_entry(params, places[r], j0 + c);
                            if (entry == 0) low += grads[r * (COLS + 1) + c];
                            else if (entry == entries - 1) high += grads[r * (COLS + 1) + c];
                        }
                    below[r] = low;
                    above[r] = high;
                }
                __syncthreads();
                // Then one thread per entry that this tile touches; each row has an entry once.
                i64 low = max_i64(1, min_i64(entries - 1, j0 - extent.p1 + params.reach));
                i64 high = min_i64(entries - 2, max_i64(0, j0 + COLS - 1 - extent.p0 + params.reach));
                for (i64 e = low + threadIdx.x; e <= high; e += THREADS) {
                    float sum = 0.0f;
                    for (int r = 0; r < rows; r++) {
                        i64 c = places[r] + e - params.reach - j0;
                        if (c >= 0 && c < COLS) sum += grads[r * (COLS + 1) + int(c)];
                    }
                    mine[e] += sum;
                }
                if (threadIdx.x < 2) {
                    float sum = 0.0f;
                    for (int r = 0; r < rows; r++) sum += threadIdx.x ? above[r] : below[r];
                    if (threadIdx.x == 0 || entries > 1) mine[threadIdx.x ? entries - 1 : 0] += sum;
                }
            }
        }
    }
}

extern "C" __global__ void reduce_table(const __grid_constant__ GeneralParams params) {
    i64 entries = 2 * params.reach + 1, at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= entries * params.table_rows) return;
    float sum = 0.0f;
    for (int part = 0; part < params.table_part_count; part++)
        sum += params.table_parts[part * entries * params.table_rows + at];
    params.d_table[at] = narrow(sum);
}
#endif

#ifdef BACKWARD_DELTA
// to[c] = sum over the rows of every head h with h mod count = c, in a fixed order.
__device__ __forceinline__ void reduce_heads(const GeneralParams& params, const float* from, T* to, int count) {
    SHARED(shared);
    float* sums = (float*)shared; // [256]
    int c = int(blockIdx.x);
    i64 rows = i64(params.batch) * (params.heads / count) * params.n;
    float sum = 0.0f;
    for (i64 at = threadIdx.x; at < rows; at += 256) {
        i64 i = at % params.n, h = c + at / params.n % (params.heads / count) * count,
            b = at / params.n / (params.heads / count);
        sum += from[(b * params.heads + h) * params.n + i];
    }
    sums[threadIdx.x] = sum;
    for (int by = 128; by > 0; by /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < by) sums[threadIdx.x] += sums[threadIdx.x + by];
    }
    if (threadIdx.x == 0) to[c] = narrow(sums[0]);
}

extern "C" __global__ void __launch_bounds__(256) reduce_scale(const __grid_constant__ GeneralParams params) {
    reduce_heads(params, params.scale_rows, params.d_learned_scale, params.learned_scale_count);
}

extern "C" __global__ void __launch_bounds__(256) reduce_sinks(const __grid_constant__ GeneralParams params) {
    reduce_heads(params, params.sink_rows, params.d_sinks, params.heads);
}
#endif
