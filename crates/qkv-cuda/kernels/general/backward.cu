// The backward pass, without atomics: every number is summed by one block in a fixed order. Two kernels recompute the
// scores: one walks the keys of a query tile for dQ, the other walks the queries of a key tile, over all query heads of
// the group, for dK and dV.

// Statistics of a row. `entropy` is the gradient of the row's entropy.
struct Row {
    float lse, delta, entropy;
};

__device__ __forceinline__ Row row_of(const GeneralParams& params, int b, int h, int i) {
    Row row;
    row.lse = row.delta = row.entropy = 0.0f;
    if (i < params.n) {
        i64 at = (i64(b) * params.heads + h) * params.n + i;
        row.lse = params.lse[at];
        row.delta = params.delta[at];
        row.entropy = params.d_entropy ? params.d_entropy[at] : 0.0f;
    }
    return row;
}

__device__ __forceinline__ float score_gradient(const Row& row, float p, float score, float d_weight) {
    if (score == -INFINITE) return 0.0f;
    float of_entropy = row.entropy == 0.0f ? 0.0f : row.entropy * (score - row.lse + 1.0f);
    return p * (d_weight - row.delta - of_entropy);
}

#ifdef BACKWARD_DELTA
// delta: row sums of dO ∘ O, less the gradients of lse and entropy; and each row's share of the gradient of its sink.
// The sum is computed like dO·Vᵀ in the other kernels, bit for bit, so that a row that sees a single key gets a
// gradient of exactly 0.
__device__ __forceinline__ void delta_tile(const GeneralParams& params, int tile, int bh) {
    SHARED(shared);
    T* out = (T*)shared;        // [ROWS, LD]
    T* d_out = out + ROWS * LD; // [ROWS, LD]
    int b = bh / params.heads, h = bh % params.heads, first = tile * ROWS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    load_rows(out, ROWS, params.out, b, h, first, params.n, params.dv, params.vectorized >> 3 & 1);
    load_rows(d_out, ROWS, params.d_out, b, h, first, params.n, params.dv, params.vectorized >> 4 & 1);
    __syncthreads();
    float acc[2][4];
    clear(acc);
    matmul_abt(acc, d_out + warp * 16 * LD, out + warp * 16 * LD, padded(params.dv));
    if (t != g / 2) return; // the lane that holds the diagonal
    float sink = params.sinks ? widen(params.sinks[h]) : -INFINITE;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = first + warp * 16 + g + half * 8;
        if (i >= params.n) continue;
        i64 row = (i64(b) * params.heads + h) * params.n + i;
        float lse = params.lse[row], delta = 0.0f;
        float of_sink = sink == -INFINITE || lse == -INFINITE ? 0.0f : expf(sink - lse);
        if (lse != -INFINITE) { // a row that sees nothing has no gradient
            delta = half ? (g % 2 ? acc[1][3] : acc[1][2]) : (g % 2 ? acc[0][1] : acc[0][0]);
            if (params.d_lse) delta -= params.d_lse[row];
            if (params.d_entropy) delta += params.d_entropy[row] * (params.entropy[row] - (1.0f - of_sink));
        }
        params.delta[row] = delta;
        if (params.sinks) params.sink_rows[row] = of_sink == 0.0f ? 0.0f : -of_sink * delta;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) compute_delta(const __grid_constant__ GeneralParams params) {
    for_each_tile(params, query_tiles(params), params.batch * params.heads, false,
                  [&](int tile, int bh) { delta_tile(params, tile, bh); });
}
#endif

#ifdef BACKWARD_QUERIES
__device__ __forceinline__ void queries_tile(const GeneralParams& params, int tile, int bh) {
    SHARED(shared);
    T* q = (T*)shared;          // [ROWS, LD]
    T* d_out = q + ROWS * LD;   // [ROWS, LD]
    T* k = d_out + ROWS * LD;   // [COLS, LD]
    T* v = k + COLS * LD;       // [COLS, LD]
    T* weights = v + COLS * LD; // [ROWS, LDP]

    int tiles = query_tiles(params), b = bh / params.heads, h = bh % params.heads;
    int first = tile * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int row = first + warp * 16 + g;
    Head head = head_of(params, b, h);
    TileExtent extent;
    extent.query_tiles = tiles;
    extent.key_tiles = key_tiles(params);
    extent.query_tile = tile;
    query_extent(params, b, first, ROWS, extent);
    i64 p0 = position_of(params, b, row < params.n ? row : params.n - 1),
        p1 = position_of(params, b, row + 8 < params.n ? row + 8 : params.n - 1);
    Row row0 = row_of(params, b, h, row), row1 = row_of(params, b, h, row + 8);

    load_rows(q, ROWS, params.q, b, h, first, params.n, params.d, params.vectorized & 1);
    load_rows(d_out, ROWS, params.d_out, b, h, first, params.n, params.dv, params.vectorized >> 4 & 1);
    float acc[SUMS][4];
    clear(acc);
    float of_scale0 = 0.0f, of_scale1 = 0.0f;
    for (int base = 0; base < extent.key_tiles; base += 32) {
        u32 full, some = classify_tiles(params, b, extent, true, base, extent.key_tiles, full);
        while (some) {
            int key_tile = base + __ffs(int(some)) - 1, j0 = key_tile * COLS;
            bool full_tile = full >> (key_tile - base) & 1;
            some &= some - 1;
            __syncthreads();
            bool finite =
                load_rows(k, COLS, params.k, b, head.key_head, j0, params.m, params.d, params.vectorized >> 1 & 1);
            load_rows(v, COLS, params.v, b, head.key_head, j0, params.m, params.dv, params.vectorized >> 2 & 1);
            bool nonfinite = __syncthreads_or(!finite);
            float s[PARTS][4], d[PARTS][4];
            clear(s);
            clear(d);
            matmul_abt(s, q + warp * 16 * LD, k, padded(params.d));
            matmul_abt(d, d_out + warp * 16 * LD, v, padded(params.dv));
            bool plain_scores = is_plain(params, full_tile, first, ROWS, j0, COLS);
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    int i = row + x / 2 * 8, j = j0 + 8 * part + 2 * t + x % 2;
                    float raw = s[part][x];
                    const Row& of_row = x < 2 ? row0 : row1;
                    ModifiedScore made = {raw * head.scale, 1.0f};
                    if (!plain_scores) made = finish_score(params, head, raw, i, j, x < 2 ? p0 : p1, full_tile);
                    float p = weight_of(made.score, of_row.lse);
                    float d_weight = d[part][x];
                    if (params.dropout_threshold)
                        d_weight = made.score == -INFINITE ? 0.0f : d_weight * dropout_factor(params, head, i, j);
                    float d_scaled = score_gradient(of_row, p, made.score, d_weight) * made.slope;
                    if (params.scale_rows && made.score != -INFINITE) {
                        if (x < 2) of_scale0 += d_scaled * raw;
                        else of_scale1 += d_scaled * raw;
                    }
                    s[part][x] = made.score == -INFINITE ? 0.0f : d_scaled;
                }
            store_weights(weights + warp * 16 * LDP, s);
            __syncwarp();
            accumulate_ab(acc, weights + warp * 16 * LDP, k, nonfinite);
            __syncwarp();
        }
    }
    store_rows(params.d_q, b, h, first + warp * 16, params.n, params.d, acc, head.scale, head.scale);
    if (!params.scale_rows) return;
    of_scale0 = quad_sum(of_scale0) * params.inverse_temperature;
    of_scale1 = quad_sum(of_scale1) * params.inverse_temperature;
    i64 in_all = (i64(b) * params.heads + h) * params.n;
    if (t == 0 && row < params.n) params.scale_rows[in_all + row] = of_scale0;
    if (t == 0 && row + 8 < params.n) params.scale_rows[in_all + row + 8] = of_scale1;
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_queries(const __grid_constant__ GeneralParams params) {
    for_each_tile(params, query_tiles(params), params.batch * params.heads, true,
                  [&](int tile, int bh) { queries_tile(params, tile, bh); });
}
#endif

#ifdef BACKWARD_KEYS
// FOR_K and FOR_V select dK and dV; both, if the registers hold both accumulators.
__device__ __forceinline__ void keys_tile(const GeneralParams& params, int tile, int bk) {
    SHARED(shared);
    T* k = (T*)shared;                        // [ROWS, LD]
    T* v = k + ROWS * LD;                     // [ROWS, LD]
    T* q = v + ROWS * LD;                     // [COLS, LD]
    T* d_out = q + COLS * LD;                 // [COLS, LD]
    T* weights = d_out + COLS * LD;           // [ROWS, LDP]
    Row* rows = (Row*)(weights + ROWS * LDP); // [COLS]
    i64* places = (i64*)(rows + COLS);        // [COLS]

    int tiles = key_tiles(params), b = bk / params.key_heads, key_head = bk % params.key_heads;
    int first = tile * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int key = first + warp * 16 + g;
    TileExtent extent;
    extent.query_tiles = query_tiles(params);
    extent.key_tiles = tiles;
    extent.key_tile = tile;
    key_extent(params, first, ROWS, extent);
    load_rows(k, ROWS, params.k, b, key_head, first, params.m, params.d, params.vectorized >> 1 & 1);
    load_rows(v, ROWS, params.v, b, key_head, first, params.m, params.dv, params.vectorized >> 2 & 1);
#if FOR_K
    float of_k[SUMS][4];
    clear(of_k);
#endif
#if FOR_V
    float of_v[SUMS][4];
    clear(of_v);
#endif
    for (int h = key_head * params.group; h < (key_head + 1) * params.group; h++) {
        Head head = head_of(params, b, h);
#if FOR_K
        float own_scale = params.learned_scale ? head.scale : 1.0f;
#endif
        for (int base = 0; base < extent.query_tiles; base += 32) {
            u32 full, some = classify_tiles(params, b, extent, false, base, extent.query_tiles, full);
            while (some) {
                int query_tile = base + __ffs(int(some)) - 1, i0 = query_tile * COLS;
                bool full_tile = full >> (query_tile - base) & 1;
                some &= some - 1;
                __syncthreads();
                bool finite_q = load_rows(q, COLS, params.q, b, h, i0, params.n, params.d, params.vectorized & 1);
                bool finite_d =
                    load_rows(d_out, COLS, params.d_out, b, h, i0, params.n, params.dv, params.vectorized >> 4 & 1);
                for (int r = threadIdx.x; r < COLS; r += THREADS) {
                    rows[r] = row_of(params, b, h, i0 + r);
                    places[r] = position_of(params, b, i0 + r < params.n ? i0 + r : params.n - 1);
                }
                bool nonfinite = __syncthreads_or(!finite_q || !finite_d);
                float s[PARTS][4]; // [keys, queries]
                clear(s);
                matmul_abt(s, k + warp * 16 * LD, q, padded(params.d));
#if FOR_K
                float d[PARTS][4];
                clear(d);
                matmul_abt(d, v + warp * 16 * LD, d_out, padded(params.dv));
#endif
                bool plain_scores = is_plain(params, full_tile, i0, COLS, first, ROWS);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int x = 0; x < 4; x++) {
                        int at = 8 * part + 2 * t + x % 2, i = i0 + at, j = key + x / 2 * 8;
                        Row of_row = rows[at];
                        ModifiedScore made = {s[part][x] * head.scale, 1.0f};
                        if (!plain_scores) made = finish_score(params, head, s[part][x], i, j, places[at], full_tile);
                        float p = weight_of(made.score, of_row.lse);
                        float kept = 1.0f;
                        if (params.dropout_threshold && made.score != -INFINITE)
                            kept = dropout_factor(params, head, i, j);
#if FOR_K
                        float d_score = score_gradient(of_row, p, made.score, kept == 0.0f ? 0.0f : d[part][x] * kept);
                        d[part][x] = made.score == -INFINITE ? 0.0f : d_score * made.slope * own_scale;
#endif
                        s[part][x] = p * kept;
                    }
#if FOR_V
                store_weights(weights + warp * 16 * LDP, s);
                __syncwarp();
                accumulate_ab(of_v, weights + warp * 16 * LDP, d_out, nonfinite);
                __syncwarp();
#endif
#if FOR_K
                store_weights(weights + warp * 16 * LDP, d);
                __syncwarp();
                accumulate_ab(of_k, weights + warp * 16 * LDP, q, nonfinite);
                __syncwarp();
#endif
            }
        }
    }
#if FOR_K
    // The scale comes last, so that a small gradient does not get even smaller before it is rounded to f16, unless the
    // heads that share these keys have different scales.
    float shared_scale = params.learned_scale ? 1.0f : params.scale;
    store_rows(params.d_k, b, key_head, first + warp * 16, params.m, params.d, of_k, shared_scale, shared_scale);
#endif
#if FOR_V
    store_rows(params.d_v, b, key_head, first + warp * 16, params.m, params.dv, of_v, 1.0f, 1.0f);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_keys(const __grid_constant__ GeneralParams params) {
    for_each_tile(params, key_tiles(params), params.batch * params.key_heads, false,
                  [&](int tile, int bk) { keys_tile(params, tile, bk); });
}
#endif
