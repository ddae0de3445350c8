// The backward pass, without an atomic: every number is summed by one block in one order. Two kernels make the scores
// again: one takes a tile of queries over all keys for dQ, the other a tile of keys over all queries, and over the query
// heads that share them, for dK and dV.

// The gradient of a score, from the gradient of its weight before dropout.
struct Row {
    float lse, term, entropy; // entropy: the gradient of the row's entropy
};

__device__ __forceinline__ Row row_of(const Job& job, int b, int h, int i) {
    Row row;
    row.lse = row.term = row.entropy = 0.0f;
    if (i < job.n) {
        i64 at = (i64(b) * job.heads + h) * job.n + i;
        row.lse = job.lse[at];
        row.term = job.row_terms[at];
        row.entropy = job.d_entropy ? job.d_entropy[at] : 0.0f;
    }
    return row;
}

__device__ __forceinline__ float score_gradient(const Row& row, float p, float score, float d_weight) {
    if (score == -INFINITE) return 0.0f;
    float of_entropy = row.entropy == 0.0f ? 0.0f : row.entropy * (score - row.lse + 1.0f);
    return p * (d_weight - row.term - of_entropy);
}

#ifdef BACKWARD_ROWS
// One number a row: Σ dO·O, less the gradients of lse and entropy. And each row's part of the gradient of its sink. The sum
// is made as dO·Vᵀ is made in the other kernels, bit for bit: a row that sees one key alone must get exactly 0.
__device__ __forceinline__ void row_terms_tile(const Job& job, int tile, int bh) {
    SHARED(shared);
    T* out = (T*)shared;        // [ROWS, LD]
    T* d_out = out + ROWS * LD; // [ROWS, LD]
    int b = bh / job.heads, h = bh % job.heads, first = tile * ROWS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    load_rows(out, ROWS, job.out, b, h, first, job.n, job.dv, job.vectors >> 3 & 1);
    load_rows(d_out, ROWS, job.d_out, b, h, first, job.n, job.dv, job.vectors >> 4 & 1);
    __syncthreads();
    float acc[2][4];
    clear(acc);
    rows_by_rows(acc, d_out + warp * 16 * LD, out + warp * 16 * LD, padded(job.dv));
    if (t != g / 2) return; // who holds the diagonal
    float sink = job.sinks ? widen(job.sinks[h]) : -INFINITE;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = first + warp * 16 + g + half * 8;
        if (i >= job.n) continue;
        i64 row = (i64(b) * job.heads + h) * job.n + i;
        float lse = job.lse[row], term = 0.0f;
        float of_sink = sink == -INFINITE || lse == -INFINITE ? 0.0f : expf(sink - lse);
        if (lse != -INFINITE) { // a row that sees nothing takes no gradient, whatever comes from above
            term = half ? (g % 2 ? acc[1][3] : acc[1][2]) : (g % 2 ? acc[0][1] : acc[0][0]);
            if (job.d_lse) term -= job.d_lse[row];
            if (job.d_entropy) term += job.d_entropy[row] * (job.entropy[row] - (1.0f - of_sink));
        }
        job.row_terms[row] = term;
        if (job.sinks) job.sink_rows[row] = of_sink == 0.0f ? 0.0f : -of_sink * term;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) row_terms(const __grid_constant__ Job job) {
    each_tile(job, query_tiles(job), job.batch * job.heads, false, [&](int tile, int bh) { row_terms_tile(job, tile, bh); });
}
#endif

#ifdef BACKWARD_QUERIES
__device__ __forceinline__ void queries_tile(const Job& job, int tile, int bh) {
    SHARED(shared);
    T* q = (T*)shared;          // [ROWS, LD]
    T* d_out = q + ROWS * LD;   // [ROWS, LD]
    T* k = d_out + ROWS * LD;   // [COLS, LD]
    T* v = k + COLS * LD;       // [COLS, LD]
    T* weights = v + COLS * LD; // [ROWS, LDP]

    int tiles = query_tiles(job), b = bh / job.heads, h = bh % job.heads;
    int first = tile * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int row = first + warp * 16 + g;
    Head head = head_of(job, b, h);
    Extent extent;
    extent.query_tiles = tiles;
    extent.key_tiles = key_tiles(job);
    extent.query_tile = tile;
    places_of(job, b, first, ROWS, extent);
    i64 p0 = place_of(job, b, row < job.n ? row : job.n - 1), p1 = place_of(job, b, row + 8 < job.n ? row + 8 : job.n - 1);
    Row row0 = row_of(job, b, h, row), row1 = row_of(job, b, h, row + 8);

    load_rows(q, ROWS, job.q, b, h, first, job.n, job.d, job.vectors & 1);
    load_rows(d_out, ROWS, job.d_out, b, h, first, job.n, job.dv, job.vectors >> 4 & 1);
    float acc[SUMS][4];
    clear(acc);
    float of_scale0 = 0.0f, of_scale1 = 0.0f;
    for (int base = 0; base < extent.key_tiles; base += 32) {
        u32 full, some = tiles_touched(job, b, extent, true, base, extent.key_tiles, full);
        while (some) {
            int key_tile = base + __ffs(int(some)) - 1, j0 = key_tile * COLS;
            bool whole = full >> (key_tile - base) & 1;
            some &= some - 1;
            __syncthreads();
            bool finite = load_rows(k, COLS, job.k, b, head.key_head, j0, job.m, job.d, job.vectors >> 1 & 1);
            load_rows(v, COLS, job.v, b, head.key_head, j0, job.m, job.dv, job.vectors >> 2 & 1);
            bool careful = __syncthreads_or(!finite);
            float s[PARTS][4], d[PARTS][4];
            clear(s);
            clear(d);
            rows_by_rows(s, q + warp * 16 * LD, k, padded(job.d));
            rows_by_rows(d, d_out + warp * 16 * LD, v, padded(job.dv));
            bool plain = is_plain(job, whole, first, ROWS, j0, COLS);
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    int i = row + x / 2 * 8, j = j0 + 8 * part + 2 * t + x % 2;
                    float raw = s[part][x];
                    const Row& of_row = x < 2 ? row0 : row1;
                    Made made = {raw * head.scale, 1.0f};
                    if (!plain) made = finish(job, head, raw, i, j, x < 2 ? p0 : p1, whole);
                    float p = weight_of(made.score, of_row.lse);
                    float d_weight = d[part][x];
                    if (job.threshold) d_weight = made.score == -INFINITE ? 0.0f : d_weight * modulation(job, head, i, j);
                    float d_scaled = score_gradient(of_row, p, made.score, d_weight) * made.slope;
                    if (job.scale_rows && made.score != -INFINITE) {
                        if (x < 2) of_scale0 += d_scaled * raw;
                        else of_scale1 += d_scaled * raw;
                    }
                    s[part][x] = made.score == -INFINITE ? 0.0f : d_scaled * head.scale;
                }
            keep(weights + warp * 16 * LDP, s);
            __syncwarp();
            add_product(acc, weights + warp * 16 * LDP, k, careful);
            __syncwarp();
        }
    }
    store_rows(job.d_q, b, h, first + warp * 16, job.n, job.d, acc, 1.0f, 1.0f);
    if (!job.scale_rows) return;
    of_scale0 = quad_sum(of_scale0) * job.inverse_temperature;
    of_scale1 = quad_sum(of_scale1) * job.inverse_temperature;
    i64 in_all = (i64(b) * job.heads + h) * job.n;
    if (t == 0 && row < job.n) job.scale_rows[in_all + row] = of_scale0;
    if (t == 0 && row + 8 < job.n) job.scale_rows[in_all + row + 8] = of_scale1;
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_queries(const __grid_constant__ Job job) {
    each_tile(job, query_tiles(job), job.batch * job.heads, true, [&](int tile, int bh) { queries_tile(job, tile, bh); });
}
#endif

#ifdef BACKWARD_KEYS
// FOR_K and FOR_V: which of the two gradients; both where the registers hold both.
__device__ __forceinline__ void keys_tile(const Job& job, int tile, int bk) {
    SHARED(shared);
    T* k = (T*)shared;            // [ROWS, LD]
    T* v = k + ROWS * LD;         // [ROWS, LD]
    T* q = v + ROWS * LD;         // [COLS, LD]
    T* d_out = q + COLS * LD;     // [COLS, LD]
    T* weights = d_out + COLS * LD; // [ROWS, LDP]
    Row* rows = (Row*)(weights + ROWS * LDP); // [COLS]
    i64* places = (i64*)(rows + COLS);        // [COLS]

    int tiles = key_tiles(job), b = bk / job.key_heads, key_head = bk % job.key_heads;
    int first = tile * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int key = first + warp * 16 + g;
    Extent extent;
    extent.query_tiles = query_tiles(job);
    extent.key_tiles = tiles;
    extent.key_tile = tile;
    keys_of(job, first, ROWS, extent);
    load_rows(k, ROWS, job.k, b, key_head, first, job.m, job.d, job.vectors >> 1 & 1);
    load_rows(v, ROWS, job.v, b, key_head, first, job.m, job.dv, job.vectors >> 2 & 1);
#if FOR_K
    float of_k[SUMS][4];
    clear(of_k);
#endif
#if FOR_V
    float of_v[SUMS][4];
    clear(of_v);
#endif
    for (int h = key_head * job.group; h < (key_head + 1) * job.group; h++) {
        Head head = head_of(job, b, h);
        for (int base = 0; base < extent.query_tiles; base += 32) {
            u32 full, some = tiles_touched(job, b, extent, false, base, extent.query_tiles, full);
            while (some) {
                int query_tile = base + __ffs(int(some)) - 1, i0 = query_tile * COLS;
                bool whole = full >> (query_tile - base) & 1;
                some &= some - 1;
                __syncthreads();
                bool finite_q = load_rows(q, COLS, job.q, b, h, i0, job.n, job.d, job.vectors & 1);
                bool finite_d = load_rows(d_out, COLS, job.d_out, b, h, i0, job.n, job.dv, job.vectors >> 4 & 1);
                for (int r = threadIdx.x; r < COLS; r += THREADS) {
                    rows[r] = row_of(job, b, h, i0 + r);
                    places[r] = place_of(job, b, i0 + r < job.n ? i0 + r : job.n - 1);
                }
                bool careful = __syncthreads_or(!finite_q || !finite_d);
                float s[PARTS][4]; // [keys, queries]
                clear(s);
                rows_by_rows(s, k + warp * 16 * LD, q, padded(job.d));
#if FOR_K
                float d[PARTS][4];
                clear(d);
                rows_by_rows(d, v + warp * 16 * LD, d_out, padded(job.dv));
#endif
                bool plain = is_plain(job, whole, i0, COLS, first, ROWS);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int x = 0; x < 4; x++) {
                        int at = 8 * part + 2 * t + x % 2, i = i0 + at, j = key + x / 2 * 8;
                        Row of_row = rows[at];
                        Made made = {s[part][x] * head.scale, 1.0f};
                        if (!plain) made = finish(job, head, s[part][x], i, j, places[at], whole);
                        float p = weight_of(made.score, of_row.lse);
                        float kept = 1.0f;
                        if (job.threshold && made.score != -INFINITE) kept = modulation(job, head, i, j);
#if FOR_K
                        float d_score = score_gradient(of_row, p, made.score, kept == 0.0f ? 0.0f : d[part][x] * kept);
                        d[part][x] = made.score == -INFINITE ? 0.0f : d_score * made.slope * head.scale;
#endif
                        s[part][x] = p * kept;
                    }
#if FOR_V
                keep(weights + warp * 16 * LDP, s);
                __syncwarp();
                add_product(of_v, weights + warp * 16 * LDP, d_out, careful);
                __syncwarp();
#endif
#if FOR_K
                keep(weights + warp * 16 * LDP, d);
                __syncwarp();
                add_product(of_k, weights + warp * 16 * LDP, q, careful);
                __syncwarp();
#endif
            }
        }
    }
#if FOR_K
    store_rows(job.d_k, b, key_head, first + warp * 16, job.m, job.d, of_k, 1.0f, 1.0f);
#endif
#if FOR_V
    store_rows(job.d_v, b, key_head, first + warp * 16, job.m, job.dv, of_v, 1.0f, 1.0f);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_keys(const __grid_constant__ Job job) {
    each_tile(job, key_tiles(job), job.batch * job.key_heads, false, [&](int tile, int bk) { keys_tile(job, tile, bk); });
}
#endif
