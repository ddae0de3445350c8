// The gradients of a bias tensor, a relative table, a learned scale and sinks: sums of gradients of scores over whatever
// was shared. Scores are made again; every sum has one order.

// The gradients of one tile's scores, in registers: what backward_queries makes, without the products after it.
__device__ __forceinline__ void tile_gradients(const Job& job, const Head& head, const T* q, const T* d_out, const T* k,
                                               const T* v, int first, int j0, bool whole, float (&s)[PARTS][4]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = first + warp * 16 + g;
    Row row0 = row_of(job, head.b, head.h, row), row1 = row_of(job, head.b, head.h, row + 8);
    i64 p0 = place_of(job, head.b, row < job.n ? row : job.n - 1);
    i64 p1 = place_of(job, head.b, row + 8 < job.n ? row + 8 : job.n - 1);
    float d[PARTS][4];
    clear(s);
    clear(d);
    rows_by_rows(s, q + warp * 16 * LD, k, padded(job.d));
    rows_by_rows(d, d_out + warp * 16 * LD, v, padded(job.dv));
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int i = row + x / 2 * 8, j = j0 + 8 * part + 2 * t + x % 2;
            const Row& of_row = x < 2 ? row0 : row1;
            Made made = finish(job, head, s[part][x], i, j, x < 2 ? p0 : p1, whole);
            float p = weight_of(made.score, of_row.lse), d_weight = d[part][x];
            if (job.threshold) d_weight = made.score == -INFINITE ? 0.0f : d_weight * modulation(job, head, i, j);
            s[part][x] = score_gradient(of_row, p, made.score, d_weight);
        }
}

#ifdef BACKWARD_BIAS
// A block makes one tile of the bias as it was given, and goes over all that shares it.
extern "C" __global__ void __launch_bounds__(THREADS) backward_bias(const __grid_constant__ Job job) {
    SHARED(shared);
    T* q = (T*)shared;
    T* d_out = q + ROWS * LD;
    T* k = d_out + ROWS * LD;
    T* v = k + COLS * LD;
    float* sums = (float*)(v + COLS * LD); // [ROWS, COLS + 1]

    int row_tiles = job.bias_rows == 1 ? 1 : query_tiles(job), col_tiles = job.bias_cols == 1 ? 1 : key_tiles(job);
    i64 at = blockIdx.x;
    int col_tile = int(at % col_tiles), row_tile = int(at / col_tiles % row_tiles);
    int bias_head = int(at / col_tiles / row_tiles % job.bias_heads), bias_b = int(at / col_tiles / row_tiles / job.bias_heads);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float acc[PARTS][4];
    clear(acc);
    Extent extent;
    extent.query_tiles = query_tiles(job);
    extent.key_tiles = key_tiles(job);
    for (int b = bias_b; b < job.batch; b += job.bias_batch)
        for (int h = bias_head; h < job.heads; h += job.bias_heads) {
            Head head = head_of(job, b, h);
            int first_query = job.bias_rows == 1 ? 0 : row_tile, end_query = job.bias_rows == 1 ? extent.query_tiles : row_tile + 1;
            for (int tile = first_query; tile < end_query; tile++) {
                extent.query_tile = tile;
                places_of(job, b, tile * ROWS, ROWS, extent);
                __syncthreads();
                load_rows(q, ROWS, job.q, b, h, tile * ROWS, job.n, job.d, job.vectors & 1);
                load_rows(d_out, ROWS, job.d_out, b, h, tile * ROWS, job.n, job.dv, job.vectors >> 4 & 1);
                int first_key = job.bias_cols == 1 ? 0 : col_tile, end_key = job.bias_cols == 1 ? extent.key_tiles : col_tile + 1;
                for (int base = first_key; base < end_key; base += 32) {
                    u32 full, some = tiles_touched(job, b, extent, true, base, end_key, full);
                    while (some) {
                        int key_tile = base + __ffs(int(some)) - 1, j0 = key_tile * COLS;
                        bool whole = full >> (key_tile - base) & 1;
                        some &= some - 1;
                        __syncthreads();
                        load_rows(k, COLS, job.k, b, head.key_head, j0, job.m, job.d, job.vectors >> 1 & 1);
                        load_rows(v, COLS, job.v, b, head.key_head, j0, job.m, job.dv, job.vectors >> 2 & 1);
                        __syncthreads();
                        float s[PARTS][4];
                        tile_gradients(job, head, q, d_out, k, v, tile * ROWS, j0, whole, s);
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
    int rows = job.bias_rows == 1 ? 1 : ROWS, cols = job.bias_cols == 1 ? 1 : COLS;
    for (int cell = threadIdx.x; cell < rows * cols; cell += THREADS) {
        int r = cell / cols, c = cell % cols, i = row_tile * ROWS + r, j = col_tile * COLS + c;
        if (i >= job.bias_rows || j >= job.bias_cols) continue;
        float sum = 0.0f;
        for (int y = r; y < (rows == 1 ? ROWS : r + 1); y++)
            for (int x = c; x < (cols == 1 ? COLS : c + 1); x++) sum += sums[y * (COLS + 1) + x];
        job.d_bias.at[bias_b * job.d_bias.batch + bias_head * job.d_bias.head + i * job.d_bias.row + j * job.d_bias.col] =
            narrow(sum);
    }
}
#endif

#ifdef BACKWARD_TABLE
// A block goes over every parts-th tile of queries of the heads that share a row of the table, and adds up each entry in
// one order. `reduce_table` then adds up the parts.
extern "C" __global__ void __launch_bounds__(THREADS) backward_table(const __grid_constant__ Job job) {
    SHARED(shared);
    T* q = (T*)shared;
    T* d_out = q + ROWS * LD;
    T* k = d_out + ROWS * LD;
    T* v = k + COLS * LD;
    float* grads = (float*)(v + COLS * LD); // [ROWS, COLS + 1]
    float* below = grads + ROWS * (COLS + 1), *above = below + ROWS; // what each row adds to the two ends
    i64* places = (i64*)(above + ROWS);                              // [ROWS]

    int table_row = int(blockIdx.x) % job.table_rows, part_of = int(blockIdx.x) / job.table_rows;
    i64 entries = 2 * job.reach + 1;
    float* mine = job.table_parts + (i64(part_of) * job.table_rows + table_row) * entries;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (i64 e = threadIdx.x; e < entries; e += THREADS) mine[e] = 0.0f;
    Extent extent;
    extent.query_tiles = query_tiles(job);
    extent.key_tiles = key_tiles(job);
    int sharing = job.heads / job.table_rows;
    i64 items = i64(job.batch) * sharing * extent.query_tiles;
    for (i64 item = part_of; item < items; item += job.parts) {
        int tile = int(item % extent.query_tiles), h = table_row + int(item / extent.query_tiles % sharing) * job.table_rows;
        int b = int(item / extent.query_tiles / sharing);
        Head head = head_of(job, b, h);
        extent.query_tile = tile;
        places_of(job, b, tile * ROWS, ROWS, extent);
        __syncthreads();
        load_rows(q, ROWS, job.q, b, h, tile * ROWS, job.n, job.d, job.vectors & 1);
        load_rows(d_out, ROWS, job.d_out, b, h, tile * ROWS, job.n, job.dv, job.vectors >> 4 & 1);
        for (int r = threadIdx.x; r < ROWS; r += THREADS)
            places[r] = place_of(job, b, tile * ROWS + r < job.n ? tile * ROWS + r : job.n - 1);
        for (int base = 0; base < extent.key_tiles; base += 32) {
            u32 full, some = tiles_touched(job, b, extent, true, base, extent.key_tiles, full);
            while (some) {
                int key_tile = base + __ffs(int(some)) - 1, j0 = key_tile * COLS;
                bool whole = full >> (key_tile - base) & 1;
                some &= some - 1;
                __syncthreads();
                load_rows(k, COLS, job.k, b, head.key_head, j0, job.m, job.d, job.vectors >> 1 & 1);
                load_rows(v, COLS, job.v, b, head.key_head, j0, job.m, job.dv, job.vectors >> 2 & 1);
                __syncthreads();
                float s[PARTS][4];
                tile_gradients(job, head, q, d_out, k, v, tile * ROWS, j0, whole, s);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int x = 0; x < 4; x++)
                        grads[(warp * 16 + g + x / 2 * 8) * (COLS + 1) + 8 * part + 2 * t + x % 2] = s[part][x];
                __syncthreads();
                int rows = job.n - tile * ROWS < ROWS ? job.n - tile * ROWS : ROWS;
                // The two ends take whole stretches of a row: one thread a row first.
                for (int r = threadIdx.x; r < ROWS; r += THREADS) {
                    float low = 0.0f, high = 0.0f;
                    if (r < rows)
                        for (int c = 0; c < COLS; c++) {
                            i64 entry = table_entry(job, places[r], j0 + c);
                            if (entry == 0) low += grads[r * (COLS + 1) + c];
                            else if (entry == entries - 1) high += grads[r * (COLS + 1) + c];
                        }
                    below[r] = low;
                    above[r] = high;
                }
                __syncthreads();
                // Then the entries that this tile can touch, one thread each; a row has each of them once.
                i64 low = most(1, least(entries - 1, j0 - extent.p1 + job.reach));
                i64 high = least(entries - 2, most(0, j0 + COLS - 1 - extent.p0 + job.reach));
                for (i64 e = low + threadIdx.x; e <= high; e += THREADS) {
                    float sum = 0.0f;
                    for (int r = 0; r < rows; r++) {
                        i64 c = places[r] + e - job.reach - j0;
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

extern "C" __global__ void reduce_table(const __grid_constant__ Job job) {
    i64 entries = 2 * job.reach + 1, at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= entries * job.table_rows) return;
    float sum = 0.0f;
    for (int part = 0; part < job.parts; part++) sum += job.table_parts[part * entries * job.table_rows + at];
    job.d_table[at] = narrow(sum);
}
#endif

#ifdef BACKWARD_ROWS
// to[c] = Σ over the rows of every head h with h mod count = c, always in the same order.
__device__ __forceinline__ void reduce_heads(const Job& job, const float* from, T* to, int count) {
    SHARED(shared);
    float* sums = (float*)shared; // [256]
    int c = int(blockIdx.x);
    i64 rows = i64(job.batch) * (job.heads / count) * job.n;
    float sum = 0.0f;
    for (i64 at = threadIdx.x; at < rows; at += 256) {
        i64 i = at % job.n, h = c + at / job.n % (job.heads / count) * count, b = at / job.n / (job.heads / count);
        sum += from[(b * job.heads + h) * job.n + i];
    }
    sums[threadIdx.x] = sum;
    for (int by = 128; by > 0; by /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < by) sums[threadIdx.x] += sums[threadIdx.x + by];
    }
    if (threadIdx.x == 0) to[c] = narrow(sums[0]);
}

extern "C" __global__ void __launch_bounds__(256) reduce_scale(const __grid_constant__ Job job) {
    reduce_heads(job, job.scale_rows, job.d_learned, job.learned_count);
}

extern "C" __global__ void __launch_bounds__(256) reduce_sinks(const __grid_constant__ Job job) {
    reduce_heads(job, job.sink_rows, job.d_sinks, job.heads);
}
#endif
