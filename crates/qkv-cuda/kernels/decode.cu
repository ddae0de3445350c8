// Decoding: a few queries against many keys, bound by memory bandwidth. A block takes one split of the keys of a key
// head, for all query rows that share it: the heads of a group and their queries are packed into up to 16 rows of a
// tensor-core tile. The width may be summed in any order, and result columns may be in any order, so each lane copies
// 16 contiguous bytes at a time into shared memory that only it reads. Copies of the next keys are in flight during the
// products, and no lane waits for another. For bf16 and f16, WIDTH = D = DV of 64, 128 or 256. Masks and biases come
// from score.cuh.

#define CHUNKS (WIDTH / 32)            // 16-byte loads per lane for 8 keys
#define STEPS (WIDTH / 64)             // 16-byte loads per lane for one row of values
#define SLOTS (2 * CHUNKS + 4 * STEPS) // 16-byte slots per lane for 16 keys and values
#ifndef STAGES                         // stages of 16 keys per warp in flight
#define STAGES (WIDTH >= 256 ? 2 : WIDTH >= 128 ? 3 : 4)
#endif

__device__ __forceinline__ void cp_async_16(Vec16* to, const T* from) {
#ifdef EMULATED
    *to = *(const Vec16*)from;
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(to))), "l"(from)
                 : "memory");
#endif
}

__device__ __forceinline__ void cp_async_commit() {
#ifndef EMULATED
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most LEFT groups of copies are in flight.
template <int LEFT> __device__ __forceinline__ void cp_async_wait() {
#ifndef EMULATED
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

__device__ __forceinline__ u32 word(const Vec16& x, int at) { return x.words[at]; }

// Whether a query sees every key of a split.
__device__ __forceinline__ bool split_is_full(const GeneralParams& params, int b, int i, int first) {
    TileExtent extent;
    extent.query_tiles = extent.key_tiles = 1;
    extent.query_tile = extent.key_tile = 0;
    query_extent(params, b, i, 1, extent);
    key_extent(params, first, SPLIT_KEYS, extent);
    return !params.segments_q && verdict(params, b, extent) == FULL;
}

extern "C" __global__ void __launch_bounds__(128) decode(const __grid_constant__ GeneralParams params) {
    SHARED(shared);
    float* max_of = (float*)shared;  // [4, 16]
    float* sum_of = max_of + 64;     // [4, 16]
    float* entropy_of = sum_of + 64; // [4, 16]
    float* out_of = entropy_of + 64; // [4, 16, WIDTH + 4]
    int row_tiles = (params.group * params.n + 15) / 16;
    int at = int(blockIdx.x), split = int(blockIdx.y);
    int row_tile = at % row_tiles, key_head = at / row_tiles % params.key_heads, b = at / row_tiles / params.key_heads;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int rows = params.group * params.n, r0 = row_tile * 16 + g, r1 = r0 + 8;
    // Row r is query r mod N of head r / N of the group.
    int i0 = r0 < rows ? r0 % params.n : params.n, i1 = r1 < rows ? r1 % params.n : params.n;
    int h0 = key_head * params.group + (r0 < rows ? r0 / params.n : 0),
        h1 = key_head * params.group + (r1 < rows ? r1 / params.n : 0);
    const T* keys = params.k.data + b * params.k.batch + key_head * params.k.head + t * 8;
    const T* values = params.v.data + b * params.v.batch + key_head * params.v.head + g * 8;

    float acc[SUMS][4];
    clear(acc);
    float max0 = -INFINITE, max1 = -INFINITE, sum0 = 0.0f, sum1 = 0.0f, entropy_acc0 = 0.0f, entropy_acc1 = 0.0f;
    int start = split * SPLIT_KEYS, end = start + SPLIT_KEYS < params.m ? start + SPLIT_KEYS : params.m;
    // The warp's ring, [STAGES][SLOTS][32 lanes]: keys first, then values.
    Vec16* ring = (Vec16*)shared + warp * STAGES * SLOTS * 32 + lane;
    auto copy = [&](int j0, int stage) {
        Vec16* to = ring + stage * SLOTS * 32;
        if (j0 < end) {
#pragma unroll
            for (int part = 0; part < 2; part++) {
                int j = j0 + part * 8 + g < end ? j0 + part * 8 + g : end - 1;
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; chunk++)
                    cp_async_16(to + (part * CHUNKS + chunk) * 32, keys + j * params.k.row + chunk * 32);
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                int j = j0 + 2 * t + r % 2 + r / 2 * 8;
                j = j < end ? j : end - 1;
#pragma unroll
                for (int step = 0; step < STEPS; step++)
                    cp_async_16(to + (2 * CHUNKS + r * STEPS + step) * 32, values + j * params.v.row + step * 64);
            }
        }
        cp_async_commit();
    };
    int stage = 0;
#pragma unroll
    for (int prefetched = 0; prefetched < STAGES - 1; prefetched++)
        copy(start + warp * 16 + prefetched * 64, prefetched);
    launch_dependents();

    // The queries, in the order in which a lane's 16 bytes of a key are multiplied. Copies are in flight.
    u32 q[CHUNKS][2][4];
    const T* q0 = params.q.data + b * params.q.batch + h0 * params.q.head + (i0 < params.n ? i0 : 0) * params.q.row;
    const T* q1 = params.q.data + b * params.q.batch + h1 * params.q.head + (i1 < params.n ? i1 : 0) * params.q.row;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        Vec16 x = *(const Vec16*)(q0 + chunk * 32 + t * 8), y = *(const Vec16*)(q1 + chunk * 32 + t * 8);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            q[chunk][half][0] = i0 < params.n ? word(x, 2 * half) : 0;
            q[chunk][half][1] = i1 < params.n ? word(y, 2 * half) : 0;
            q[chunk][half][2] = i0 < params.n ? word(x, 2 * half + 1) : 0;
            q[chunk][half][3] = i1 < params.n ? word(y, 2 * half + 1) : 0;
        }
    }
    Head head0 = head_of(params, b, h0), head1 = head_of(params, b, h1);
    float scale0 = head0.scale, scale1 = head1.scale; // copies that stay in registers
    i64 p0 = position_of(params, b, i0 < params.n ? i0 : 0), p1 = position_of(params, b, i1 < params.n ? i1 : 0);
    bool unmasked = params.mask_ops == 0 || split_is_full(params, b, i0 < params.n ? i0 : 0, split * SPLIT_KEYS);
    for (int j0 = start + warp * 16; j0 < end; j0 += 64) {
        copy(j0 + (STAGES - 1) * 64, stage == 0 ? STAGES - 1 : stage - 1);
        cp_async_wait<STAGES - 1>();
        const Vec16* here = ring + stage * SLOTS * 32;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        Vec16 v[4][STEPS];
        float s[2][4];
        clear(s);
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                Vec16 k = here[(part * CHUNKS + chunk) * 32];
#pragma unroll
                for (int half = 0; half < 2; half++)
                    mma(s[part], q[chunk][half], word(k, 2 * half), word(k, 2 * half + 1));
            }
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int step = 0; step < STEPS; step++) v[r][step] = here[(2 * CHUNKS + r * STEPS + step) * 32];
        bool plain_scores = unmasked && params.plain_scores && j0 + 16 <= end;
        float tile_max0 = -INFINITE, tile_max1 = -INFINITE;
        bool odd = false;
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                int j = j0 + part * 8 + 2 * t + x % 2;
                float score = -INFINITE;
                bool there = (x < 2 ? i0 : i1) < params.n; // whether this row of the 16 is a query
                if (there && plain_scores) score = s[part][x] * (x < 2 ? scale0 : scale1);
                else if (there && j < end)
                    score = finish_score(params, x < 2 ? head0 : head1, s[part][x], x < 2 ? i0 : i1, j, x < 2 ? p0 : p1,
                                         unmasked)
                                .score;
                s[part][x] = score;
                if (x < 2) tile_max0 = fmaxf(tile_max0, score);
                else tile_max1 = fmaxf(tile_max1, score);
                odd |= there && score == -INFINITE;
            }
        // The value of a masked pair may be NaN, and 0 · NaN is NaN.
        if (__ballot_sync(FULL_WARP, odd)) {
            bool bad = false;
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int step = 0; step < STEPS; step++)
#pragma unroll
                    for (int x = 0; x < 8; x++) {
                        T value;
                        value.bits = u16(v[r][step].words[x / 2] >> (x % 2 * 16));
                        bad |= !all_finite(value);
                    }
            if (__ballot_sync(FULL_WARP, bad)) {
                // Rare: zero the values of keys that no row sees.
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    // Whether any row sees the key of this lane's value row r. Its scores are in the lanes with the
                    // same t.
                    float seen0 = r / 2 == 0 ? s[0][r % 2] : s[1][r % 2],
                          seen1 = r / 2 == 0 ? s[0][2 + r % 2] : s[1][2 + r % 2];
                    float largest = fmaxf(seen0, seen1);
                    bool nan = seen0 != seen0 || seen1 != seen1;
                    float any = nan ? 0.0f : largest;
                    for (int by = 4; by < 32; by *= 2) any = fmaxf(any, __shfl_xor_sync(FULL_WARP, any, by));
                    if (any == -INFINITE)
#pragma unroll
                        for (int step = 0; step < STEPS; step++)
#pragma unroll
                            for (int x = 0; x < 4; x++) v[r][step].words[x] = 0;
                }
            }
        }
        float new_max0 = fmaxf(max0, quad_max(tile_max0)), new_max1 = fmaxf(max1, quad_max(tile_max1));
        float rescale0 = max0 == -INFINITE ? 0.0f : exponential(max0 - new_max0);
        float rescale1 = max1 == -INFINITE ? 0.0f : exponential(max1 - new_max1);
        if (params.entropy) {
            if (max0 != -INFINITE) entropy_acc0 = rescale0 * (entropy_acc0 + (max0 - new_max0) * sum0);
            if (max1 != -INFINITE) entropy_acc1 = rescale1 * (entropy_acc1 + (max1 - new_max1) * sum1);
        }
        sum0 *= rescale0;
        sum1 *= rescale1;
        max0 = new_max0;
        max1 = new_max1;
#pragma unroll
        for (int part = 0; part < 2; part++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                float shifted = s[part][x] - (x < 2 ? max0 : max1);
                float e = s[part][x] == -INFINITE ? 0.0f : exponential(shifted);
                if (x < 2) sum0 += e;
                else sum1 += e;
                if (params.entropy && e != 0.0f) {
                    if (x < 2) entropy_acc0 += e * shifted;
                    else entropy_acc1 += e * shifted;
                }
                if (params.dropout_threshold && e != 0.0f)
                    e *= dropout_factor(params, x < 2 ? head0 : head1, x < 2 ? i0 : i1, j0 + part * 8 + 2 * t + x % 2);
                s[part][x] = e;
            }
        u32 a[4] = {pack_pair(s[0][0], s[0][1]), pack_pair(s[0][2], s[0][3]), pack_pair(s[1][0], s[1][1]),
                    pack_pair(s[1][2], s[1][3])};
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int x = 0; x < 8; x++) {
                // Column 64·step + 8g + x of the values is column g of part 8·step + x.
                float (&c)[4] = acc[8 * step + x];
                c[0] *= rescale0;
                c[1] *= rescale0;
                c[2] *= rescale1;
                c[3] *= rescale1;
                u32 low = x % 2 ? 0x7632 : 0x5410; // the high or the low halves of two words
                u32 b0 = __byte_perm(word(v[0][step], x / 2), word(v[1][step], x / 2), low);
                u32 b1 = __byte_perm(word(v[2][step], x / 2), word(v[3][step], x / 2), low);
                mma(c, a, b0, b1);
            }
    }
    __syncthreads(); // the ring is reused for the partial results of the warps
    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    entropy_acc0 = quad_sum(entropy_acc0);
    entropy_acc1 = quad_sum(entropy_acc1);
    if (t == 0) {
        max_of[warp * 16 + g] = max0;
        max_of[warp * 16 + g + 8] = max1;
        sum_of[warp * 16 + g] = sum0;
        sum_of[warp * 16 + g + 8] = sum1;
        entropy_of[warp * 16 + g] = entropy_acc0;
        entropy_of[warp * 16 + g + 8] = entropy_acc1;
    }
    const int ld = WIDTH + 4;
#pragma unroll
    for (int part = 0; part < SUMS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            // Column 2t + x mod 2 of part 8·step + y is column 64·step + 8·(2t + x mod 2) + y of the values.
            int column = part / 8 * 64 + 8 * (2 * t + x % 2) + part % 8;
            out_of[(warp * 16 + g + x / 2 * 8) * ld + column] = acc[part][x];
        }
    __syncthreads();
    // Combine the four warps, in order.
    i64 in_all = i64(params.batch) * params.heads * params.n;
    for (int cell = threadIdx.x; cell < 16 * WIDTH; cell += 128) {
        int r = cell / WIDTH, c = cell % WIDTH, row = row_tile * 16 + r;
        if (row >= rows) continue;
        float most = fmaxf(fmaxf(max_of[r], max_of[16 + r]), fmaxf(max_of[32 + r], max_of[48 + r]));
        float sum = 0.0f, x = 0.0f, inner = 0.0f;
        for (int w = 0; w < 4; w++) {
            float of_warp = max_of[w * 16 + r];
            if (of_warp == -INFINITE && sum_of[w * 16 + r] == 0.0f) continue;
            float share = expf(of_warp - most);
            sum += share * sum_of[w * 16 + r];
            x += share * out_of[(w * 16 + r) * ld + c];
            inner += share * (entropy_of[w * 16 + r] + (of_warp - most) * sum_of[w * 16 + r]);
        }
        i64 at_row = (i64(b) * params.heads + key_head * params.group + row / params.n) * params.n + row % params.n;
        float by = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (params.splits > 1) {
            params.split_out[(split * in_all + at_row) * WIDTH + c] = x * by;
        } else {
            // With a single split, the sink is added here.
            int h = key_head * params.group + row / params.n;
            if (params.sinks) {
                float sink = widen(params.sinks[h]), larger = fmaxf(most, sink);
                float total =
                    (sum == 0.0f ? 0.0f : sum * expf(most - larger)) + (sink == -INFINITE ? 0.0f : expf(sink - larger));
                by = total == 0.0f || sum == 0.0f ? 0.0f : expf(most - larger) / total;
                if (c == 0) {
                    float lse = total == 0.0f ? -INFINITE : larger + logf(total);
                    params.lse[at_row] = lse;
                    // −Σ p (s − lse), with s − lse = (s − max) + (max − lse)
                    if (params.entropy)
                        params.entropy[at_row] = sum == 0.0f ? 0.0f : by * (-inner - (most - lse) * sum);
                }
            }
            params.out.data[b * params.out.batch + h * params.out.head + row % params.n * params.out.row +
                            c * params.out.col] = narrow(x * by);
            if (params.sinks) continue;
        }
        if (c == 0) {
            float lse = sum == 0.0f ? -INFINITE : most + logf(sum);
            (params.splits > 1 ? params.split_lse + split * in_all : params.lse)[at_row] = lse;
            if (params.entropy)
                (params.splits > 1 ? params.split_entropy + split * in_all : params.entropy)[at_row] =
                    sum == 0.0f ? 0.0f : logf(sum) - inner * by;
        }
    }
}
