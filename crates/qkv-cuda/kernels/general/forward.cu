// The forward pass: a block takes ROWS queries of a head and goes over the key tiles that the mask leaves, with an online
// softmax. One launch does it all, or, where there are pieces, each block one piece of the keys, for merge.cu.

__device__ __forceinline__ void forward_tile(const Job& job, int tile, int bh) {
    SHARED(shared);
    T* q = (T*)shared;         // [ROWS, LD]
    T* k = q + ROWS * LD;      // [COLS, LD]
    T* v = k + COLS * LD;      // [COLS, LD]
    T* weights = v + COLS * LD; // [ROWS, LDP]

    int tiles = query_tiles(job), b = bh / job.heads, h = bh % job.heads;
    int first = tile * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int row = first + warp * 16 + g; // and row + 8
    Head head = head_of(job, b, h);
    Extent extent;
    extent.query_tiles = tiles;
    extent.key_tiles = key_tiles(job);
    extent.query_tile = tile;
    places_of(job, b, first, ROWS, extent);
    i64 p0 = place_of(job, b, row < job.n ? row : job.n - 1), p1 = place_of(job, b, row + 8 < job.n ? row + 8 : job.n - 1);

    load_rows(q, ROWS, job.q, b, h, first, job.n, job.d, job.vectors & 1);
    float acc[SUMS][4];
    clear(acc);
    bool sink = job.sinks && job.pieces == 1;
    float most0 = sink ? widen(job.sinks[h]) : -INFINITE, most1 = most0; // the largest score so far
    float sum0 = most0 == -INFINITE || t != 0 ? 0.0f : 1.0f, sum1 = sum0; // Σ exp(score − most), this lane's part
    float inner0 = 0.0f, inner1 = 0.0f;                                   // Σ exp(score − most)·(score − most), of keys
    float keys0 = 0.0f, keys1 = 0.0f;                                     // as the sum, without the sink

    int start = int(blockIdx.y) * job.piece_tiles;
    int end = job.pieces == 1 ? extent.key_tiles : start + job.piece_tiles;
    if (end > extent.key_tiles) end = extent.key_tiles;
    for (int base = start; base < end; base += 32) {
        u32 full, some = tiles_touched(job, b, extent, true, base, end, full);
        while (some) {
            int key_tile = base + __ffs(int(some)) - 1, j0 = key_tile * COLS;
            bool whole = full >> (key_tile - base) & 1;
            some &= some - 1;
            __syncthreads();
            load_rows(k, COLS, job.k, b, head.key_head, j0, job.m, job.d, job.vectors >> 1 & 1);
            bool finite = load_rows(v, COLS, job.v, b, head.key_head, j0, job.m, job.dv, job.vectors >> 2 & 1);
            bool careful = __syncthreads_or(!finite);

            float s[PARTS][4];
            clear(s);
            rows_by_rows(s, q + warp * 16 * LD, k, padded(job.d));
            if (is_plain(job, whole, first, ROWS, j0, COLS)) {
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
                        s[part][x] = finish(job, head, s[part][x], row + x / 2 * 8, j, x < 2 ? p0 : p1, whole).score;
                    }
            }
            float tile_most0 = -INFINITE, tile_most1 = -INFINITE;
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    // NaN goes on to the weights, and with them into the output.
                    if (x < 2) tile_most0 = fmaxf(tile_most0, s[part][x]);
                    else tile_most1 = fmaxf(tile_most1, s[part][x]);
                }
            float new0 = fmaxf(most0, quad_max(tile_most0)), new1 = fmaxf(most1, quad_max(tile_most1));
            float by0 = most0 == -INFINITE ? 0.0f : exponential(most0 - new0);
            float by1 = most1 == -INFINITE ? 0.0f : exponential(most1 - new1);
            if (job.entropy) {
                if (most0 != -INFINITE) inner0 = by0 * (inner0 + (most0 - new0) * keys0);
                if (most1 != -INFINITE) inner1 = by1 * (inner1 + (most1 - new1) * keys1);
                keys0 *= by0;
                keys1 *= by1;
            }
            sum0 *= by0;
            sum1 *= by1;
            most0 = new0;
            most1 = new1;
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    float from = s[part][x] - (x < 2 ? most0 : most1);
                    float e = s[part][x] == -INFINITE ? 0.0f : exponential(from);
                    if (x < 2) sum0 += e;
                    else sum1 += e;
                    if (job.entropy && e != 0.0f) {
                        if (x < 2) { inner0 += e * from; keys0 += e; }
                        else { inner1 += e * from; keys1 += e; }
                    }
                    s[part][x] = e;
                }
            if (job.threshold) {
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        // The four lanes of a row draw the same block, and each has its own word of it.
                        u32 word = random_word(job.seed, j0 / 8 + part, row + r * 8, h, b, t);
                        s[part][2 * r] *= (word & 0xffff) < job.threshold ? 0.0f : job.kept_scale;
                        s[part][2 * r + 1] *= (word >> 16) < job.threshold ? 0.0f : job.kept_scale;
                    }
            }
#pragma unroll
            for (int part = 0; part < SUMS; part++) {
                acc[part][0] *= by0;
                acc[part][1] *= by0;
                acc[part][2] *= by1;
                acc[part][3] *= by1;
            }
            keep(weights + warp * 16 * LDP, s);
            __syncwarp();
            add_product(acc, weights + warp * 16 * LDP, v, careful);
            __syncwarp();
        }
    }

    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    if (job.entropy) {
        inner0 = quad_sum(inner0);
        inner1 = quad_sum(inner1);
        keys0 = quad_sum(keys0);
        keys1 = quad_sum(keys1);
    }
    float by0 = sum0 == 0.0f ? 0.0f : 1.0f / sum0, by1 = sum1 == 0.0f ? 0.0f : 1.0f / sum1;
    float log0 = logf(sum0), log1 = logf(sum1);
    i64 rows = i64(job.batch) * job.heads * job.n, in_all = (i64(b) * job.heads + h) * job.n;
    if (job.pieces > 1) {
        float* out = job.piece_out + (i64(blockIdx.y) * rows + in_all) * job.dv;
#pragma unroll
        for (int part = 0; part < SUMS; part++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                int r = row + x / 2 * 8, c = 8 * part + 2 * t + x % 2;
                if (r < job.n && c < job.dv) out[i64(r) * job.dv + c] = acc[part][x] * (x < 2 ? by0 : by1);
            }
    } else {
        store_rows(job.out, b, h, first + warp * 16, job.n, job.dv, acc, by0, by1);
    }
    float* lse = job.pieces > 1 ? job.piece_lse + blockIdx.y * rows : job.lse;
    float* entropy = job.pieces > 1 ? job.piece_entropy + blockIdx.y * rows : job.entropy;
    if (t == 0 && row < job.n) {
        lse[in_all + row] = sum0 == 0.0f ? -INFINITE : most0 + log0;
        if (job.entropy) entropy[in_all + row] = sum0 == 0.0f ? 0.0f : (keys0 * log0 - inner0) * by0;
    }
    if (t == 0 && row + 8 < job.n) {
        lse[in_all + row + 8] = sum1 == 0.0f ? -INFINITE : most1 + log1;
        if (job.entropy) entropy[in_all + row + 8] = sum1 == 0.0f ? 0.0f : (keys1 * log1 - inner1) * by1;
    }
}

// The longest causal tiles first.
extern "C" __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ Job job) {
    each_tile(job, query_tiles(job), job.batch * job.heads, true, [&](int tile, int bh) { forward_tile(job, tile, bh); });
}
