// The forward pass: a block handles ROWS queries of a head and walks the key tiles that are not masked, with an online
// softmax. With splits, each block walks one split of the keys, and merge.cu combines them.

__device__ __forceinline__ void forward_tile(const GeneralParams& params, int tile, int bh) {
    SHARED(shared);
    T* q = (T*)shared;          // [ROWS, LD]
    T* k = q + ROWS * LD;       // [COLS, LD]
    T* v = k + COLS * LD;       // [COLS, LD]
    T* weights = v + COLS * LD; // [ROWS, LDP]

    int tiles = query_tiles(params), b = bh / params.heads, h = bh % params.heads;
    int first = tile * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int row = first + warp * 16 + g; // and row + 8
    Head head = head_of(params, b, h);
    TileExtent extent;
    extent.query_tiles = tiles;
    extent.key_tiles = key_tiles(params);
    extent.query_tile = tile;
    query_extent(params, b, first, ROWS, extent);
    i64 p0 = position_of(params, b, row < params.n ? row : params.n - 1),
        p1 = position_of(params, b, row + 8 < params.n ? row + 8 : params.n - 1);

    load_rows(q, ROWS, params.q, b, h, first, params.n, params.d, params.vectorized & 1);
    float acc[SUMS][4];
    clear(acc);
    bool sink = params.sinks && params.splits == 1;
    float max0 = sink ? widen(params.sinks[h]) : -INFINITE, max1 = max0; // running maximum
    float sum0 = max0 == -INFINITE || t != 0 ? 0.0f : 1.0f, sum1 = sum0; // Σ exp(score − max), this lane's share
    float entropy_acc0 = 0.0f, entropy_acc1 = 0.0f;                      // Σ exp(score − max)·(score − max) over keys
    float key_sum0 = 0.0f, key_sum1 = 0.0f;                              // the sum without the sink

    int start = int(blockIdx.y) * params.split_tiles;
    int end = params.splits == 1 ? extent.key_tiles : start + params.split_tiles;
    if (end > extent.key_tiles) end = extent.key_tiles;
    for (int base = start; base < end; base += 32) {
        u32 full, some = classify_tiles(params, b, extent, true, base, end, full);
        while (some) {
            int key_tile = base + __ffs(int(some)) - 1, j0 = key_tile * COLS;
            bool full_tile = full >> (key_tile - base) & 1;
            some &= some - 1;
            __syncthreads();
            load_rows(k, COLS, params.k, b, head.key_head, j0, params.m, params.d, params.vectorized >> 1 & 1);
            bool finite =
                load_rows(v, COLS, params.v, b, head.key_head, j0, params.m, params.dv, params.vectorized >> 2 & 1);
            bool nonfinite = __syncthreads_or(!finite);

            float s[PARTS][4];
            clear(s);
            matmul_abt(s, q + warp * 16 * LD, k, padded(params.d));
            if (is_plain(params, full_tile, first, ROWS, j0, COLS)) {
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int x = 0; x < 4; x++) s[part][x] *= head.scale;
            } else {
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int x = 0; x < 4; x++) {
                        int j = j0 + 8 * part + 2 * t + x % 2;
                        s[part][x] =
                            finish_score(params, head, s[part][x], row + x / 2 * 8, j, x < 2 ? p0 : p1, full_tile)
                                .score;
                    }
            }
            float tile_max0 = -INFINITE, tile_max1 = -INFINITE;
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    // fmaxf drops NaN here; it reaches the output through the weights.
                    if (x < 2) tile_max0 = fmaxf(tile_max0, s[part][x]);
                    else tile_max1 = fmaxf(tile_max1, s[part][x]);
                }
            float new_max0 = fmaxf(max0, quad_max(tile_max0)), new_max1 = fmaxf(max1, quad_max(tile_max1));
            float rescale0 = max0 == -INFINITE ? 0.0f : exponential(max0 - new_max0);
            float rescale1 = max1 == -INFINITE ? 0.0f : exponential(max1 - new_max1);
            if (params.entropy) {
                if (max0 != -INFINITE) entropy_acc0 = rescale0 * (entropy_acc0 + (max0 - new_max0) * key_sum0);
                if (max1 != -INFINITE) entropy_acc1 = rescale1 * (entropy_acc1 + (max1 - new_max1) * key_sum1);
                key_sum0 *= rescale0;
                key_sum1 *= rescale1;
            }
            sum0 *= rescale0;
            sum1 *= rescale1;
            max0 = new_max0;
            max1 = new_max1;
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    float shifted = s[part][x] - (x < 2 ? max0 : max1);
                    float e = s[part][x] == -INFINITE ? 0.0f : exponential(shifted);
                    if (x < 2) sum0 += e;
                    else sum1 += e;
                    if (params.entropy && e != 0.0f) {
                        if (x < 2) {
                            entropy_acc0 += e * shifted;
                            key_sum0 += e;
                        } else {
                            entropy_acc1 += e * shifted;
                            key_sum1 += e;
                        }
                    }
                    s[part][x] = e;
                }
            if (params.dropout_threshold) {
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        // The four lanes of a row draw the same block of random bits; each uses its own word.
                        u32 word = random_word(params.seed, j0 / 8 + part, row + r * 8, h, b, t);
                        s[part][2 * r] *= (word & 0xffff) < params.dropout_threshold ? 0.0f : params.dropout_scale;
                        s[part][2 * r + 1] *= (word >> 16) < params.dropout_threshold ? 0.0f : params.dropout_scale;
                    }
            }
#pragma unroll
            for (int part = 0; part < SUMS; part++) {
                acc[part][0] *= rescale0;
                acc[part][1] *= rescale0;
                acc[part][2] *= rescale1;
                acc[part][3] *= rescale1;
            }
            store_weights(weights + warp * 16 * LDP, s);
            __syncwarp();
            accumulate_ab(acc, weights + warp * 16 * LDP, v, nonfinite);
            __syncwarp();
        }
    }

    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    if (params.entropy) {
        entropy_acc0 = quad_sum(entropy_acc0);
        entropy_acc1 = quad_sum(entropy_acc1);
        key_sum0 = quad_sum(key_sum0);
        key_sum1 = quad_sum(key_sum1);
    }
    float rescale0 = sum0 == 0.0f ? 0.0f : 1.0f / sum0, rescale1 = sum1 == 0.0f ? 0.0f : 1.0f / sum1;
    float log0 = logf(sum0), log1 = logf(sum1);
    i64 rows = i64(params.batch) * params.heads * params.n, in_all = (i64(b) * params.heads + h) * params.n;
    if (params.splits > 1) {
        float* out = params.split_out + (i64(blockIdx.y) * rows + in_all) * params.dv;
#pragma unroll
        for (int part = 0; part < SUMS; part++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                int r = row + x / 2 * 8, c = 8 * part + 2 * t + x % 2;
                if (r < params.n && c < params.dv)
                    out[i64(r) * params.dv + c] = acc[part][x] * (x < 2 ? rescale0 : rescale1);
            }
    } else {
        store_rows(params.out, b, h, first + warp * 16, params.n, params.dv, acc, rescale0, rescale1);
    }
    float* lse = params.splits > 1 ? params.split_lse + blockIdx.y * rows : params.lse;
    float* entropy = params.splits > 1 ? params.split_entropy + blockIdx.y * rows : params.entropy;
    if (t == 0 && row < params.n) {
        lse[in_all + row] = sum0 == 0.0f ? -INFINITE : max0 + log0;
        if (params.entropy) entropy[in_all + row] = sum0 == 0.0f ? 0.0f : (key_sum0 * log0 - entropy_acc0) * rescale0;
    }
    if (t == 0 && row + 8 < params.n) {
        lse[in_all + row + 8] = sum1 == 0.0f ? -INFINITE : max1 + log1;
        if (params.entropy)
            entropy[in_all + row + 8] = sum1 == 0.0f ? 0.0f : (key_sum1 * log1 - entropy_acc1) * rescale1;
    }
}

// Last tiles first: with a causal mask they are the longest.
extern "C" __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ GeneralParams params) {
    for_each_tile(params, query_tiles(params), params.batch * params.heads, true,
                  [&](int tile, int bh) { forward_tile(params, tile, bh); });
}
