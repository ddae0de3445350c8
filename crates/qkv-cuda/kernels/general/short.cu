// Short sequences: a block holds all queries and keys of a head, at most ROWS and COLS of them, so there are no tiles
// to walk and there is no running maximum. The mask is a band and a number of keys; scores are scaled products. The
// backward pass computes the weights once, and all three gradients from them.

#define LDT (ROWS + PAD) // leading dimension of a transposed tile of weights
#define VECTOR 8         // elements of 16 bytes

// A tile of TILE rows in flight from global to shared memory: the loads of several tiles overlap.
template <int TILE> struct TileLoad {
    static const int VECTORS = TILE * (WIDTH / VECTOR);
    static const int EACH = (VECTORS + THREADS - 1) / THREADS;
    Vec16 loaded[EACH];

    __device__ __forceinline__ TileLoad(const Tensor& from, int b, int h, int len, int width, bool vectorized) {
        const T* head = from.data + b * from.batch + h * from.head;
#pragma unroll
        for (int at = 0; at < EACH; at++) {
            int vector = at * THREADS + int(threadIdx.x), r = vector / (WIDTH / VECTOR);
            int c = vector % (WIDTH / VECTOR) * VECTOR;
            const T* row = head + r * from.row;
            bool there = vector < VECTORS && r < len;
            if (vectorized && there && c + VECTOR <= width) {
                loaded[at] = *(const Vec16*)(row + c);
            } else {
#pragma unroll
                for (int x = 0; x < VECTOR; x += 2) {
                    u32 low = there && c + x < width ? row[(c + x) * from.col].bits : 0;
                    u32 high = there && c + x + 1 < width ? row[(c + x + 1) * from.col].bits : 0;
                    loaded[at].words[x / 2] = low | high << 16;
                }
            }
        }
    }

    // Returns whether everything this thread read is finite.
    __device__ __forceinline__ bool store(T* to) const {
        bool finite = true;
#pragma unroll
        for (int at = 0; at < EACH; at++) {
            int vector = at * THREADS + int(threadIdx.x);
            if (VECTORS % THREADS != 0 && vector >= VECTORS) break;
            *(Vec16*)(to + vector / (WIDTH / VECTOR) * LD + vector % (WIDTH / VECTOR) * VECTOR) = loaded[at];
#pragma unroll
            for (int word = 0; word < 4; word++) finite &= pair_is_finite(loaded[at].words[word]);
        }
        return finite;
    }
};

// Stores a warp's 16 accumulator rows through its rows `stage` of shared memory, 16 bytes at a time if `vectorized`.
template <int N> __device__ __forceinline__ void store_staged(const Tensor& to, T* stage, int b, int h, int first,
                                                              int len, int width, bool vectorized,
                                                              const float (&from)[N][4], float rescale0,
                                                              float rescale1) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int part = 0; part < N; part++) {
        T* at = stage + g * LD + 8 * part + 2 * t;
        *(u32*)at = pack_pair(from[part][0] * rescale0, from[part][1] * rescale0);
        *(u32*)(at + 8 * LD) = pack_pair(from[part][2] * rescale1, from[part][3] * rescale1);
    }
    __syncwarp();
    T* head = to.data + b * to.batch + h * to.head;
#pragma unroll
    for (int at = lane; at < 16 * (WIDTH / VECTOR); at += 32) {
        int r = at / (WIDTH / VECTOR), c = at % (WIDTH / VECTOR) * VECTOR;
        if (first + r >= len) continue;
        T* row = head + (first + r) * to.row;
        const T* staged = stage + r * LD + c;
        if (vectorized && c + VECTOR <= width) *(Vec16*)(row + c) = *(const Vec16*)staged;
        else
            for (int x = 0; x < VECTOR && c + x < width; x++) row[(c + x) * to.col] = staged[x];
    }
}

// The keys that a query sees.
struct Visible {
    int first, last;
    __device__ __forceinline__ bool has(int j) const { return j >= first && j <= last; }
};

__device__ __forceinline__ Visible visible_keys(const GeneralParams& params, int keys, int i) {
    int p = i + int(params.offset);
    Visible visible;
    visible.first = p - params.band_left;
    visible.last = p + params.band_right < keys ? p + params.band_right : keys - 1;
    if (i >= params.n) visible.last = -1;
    return visible;
}

__device__ __forceinline__ int key_count(const GeneralParams& params, int b) {
    int keys = params.lengths ? params.lengths[b] : params.m;
    return keys < params.m ? keys : params.m;
}

__device__ __forceinline__ u32 select_word(const u32 (&words)[4], int at) {
    u32 low = at & 1 ? words[1] : words[0], high = at & 1 ? words[3] : words[2];
    return at & 2 ? high : low;
}

// The dropout factors of a warp's weights, in their layout. A block of random bits covers eight keys of a query, and
// each of the four lanes that share the row uses one of its words: every lane draws one block, then the lanes exchange
// words.
__device__ __forceinline__ void dropout_factors(const GeneralParams& params, int b, int h, int row,
                                                float (&factors)[PARTS][4]) {
    int t = threadIdx.x % 4;
#pragma unroll
    for (int pair = 0; pair < PARTS; pair += 2) {
        u32 drawn[4] = {u32(pair + t % 2), u32(row + t / 2 * 8), u32(h), u32(b)}, received[4];
        philox(drawn, params.seed);
#pragma unroll
        for (int by = 0; by < 4; by++) received[by] = __shfl_xor_sync(FULL_WARP, select_word(drawn, t ^ by), by);
#pragma unroll
        for (int block = 0; block < 4; block++) { // of part pair + block % 2, of the first or second row
            u32 word = select_word(received, t ^ block);
            float* into = &factors[pair + block % 2][block / 2 * 2];
            into[0] = (word & 0xffff) < params.dropout_threshold ? 0.0f : params.dropout_scale;
            into[1] = (word >> 16) < params.dropout_threshold ? 0.0f : params.dropout_scale;
        }
    }
}

// acc += A · B, for a warp's 16 rows A of weights in registers: a result has the layout of an operand.
template <int N> __device__ __forceinline__ void accumulate_registers(float (&acc)[N][4], const float (&a)[PARTS][4],
                                                                      const T* b) {
#pragma unroll
    for (int k = 0; k < COLS; k += 16) {
        const float (&low)[4] = a[k / 8], (&high)[4] = a[k / 8 + 1];
        u32 x[4] = {pack_pair(low[0], low[1]), pack_pair(low[2], low[3]), pack_pair(high[0], high[1]),
                    pack_pair(high[2], high[3])};
        multiply_columns(acc, x, b + k * LD);
    }
}

#ifdef SHORT_FORWARD
extern "C" __global__ void __launch_bounds__(THREADS) short_forward(const __grid_constant__ GeneralParams params) {
    SHARED(shared);
    T* q = (T*)shared;          // [ROWS, LD]
    T* k = q + ROWS * LD;       // [COLS, LD]
    T* v = k + COLS * LD;       // [COLS, LD]
    T* weights = v + COLS * LD; // [ROWS, LDP], used for values that are not finite
    int b = int(blockIdx.x) / params.heads, h = int(blockIdx.x) % params.heads, key_head = h / params.group;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = warp * 16 + g;
    int keys = key_count(params, b);
    TileLoad<ROWS> load_q(params.q, b, h, params.n, params.d, params.vectorized & 1);
    TileLoad<COLS> load_k(params.k, b, key_head, keys, params.d, params.vectorized >> 1 & 1);
    TileLoad<COLS> load_v(params.v, b, key_head, keys, params.dv, params.vectorized >> 2 & 1);
    load_q.store(q);
    load_k.store(k);
    bool nonfinite = __syncthreads_or(!load_v.store(v));
    if (warp >= ROWS / 16) return; // these warps only load

    float s[PARTS][4];
    clear(s);
    matmul_abt(s, q + warp * 16 * LD, k, padded(params.d));
    Visible visible0 = visible_keys(params, keys, row), visible1 = visible_keys(params, keys, row + 8);
    float max0 = -INFINITE, max1 = -INFINITE;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            bool visible = (x < 2 ? visible0 : visible1).has(8 * part + 2 * t + x % 2);
            s[part][x] = visible ? s[part][x] * params.scale : -INFINITE;
            // fmaxf drops NaN here; it reaches the output through the weights.
            if (x < 2) max0 = fmaxf(max0, s[part][x]);
            else max1 = fmaxf(max1, s[part][x]);
        }
    max0 = quad_max(max0);
    max1 = quad_max(max1);
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            float e = s[part][x] == -INFINITE ? 0.0f : exponential(s[part][x] - (x < 2 ? max0 : max1));
            if (x < 2) sum0 += e;
            else sum1 += e;
            s[part][x] = e;
        }
    sum0 = quad_sum(sum0);
    sum1 = quad_sum(sum1);
    if (params.dropout_threshold) {
        float factors[PARTS][4];
        dropout_factors(params, b, h, row, factors);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int x = 0; x < 4; x++) s[part][x] *= factors[part][x];
    }
    float acc[SUMS][4];
    clear(acc);
    if (nonfinite) {
        store_weights(weights + warp * 16 * LDP, s);
        __syncwarp();
        matmul_ab_skip_zeros(acc, weights + warp * 16 * LDP, LDP, 1, COLS, v);
    } else {
        accumulate_registers(acc, s, v);
    }
    float rescale0 = sum0 == 0.0f ? 0.0f : 1.0f / sum0, rescale1 = sum1 == 0.0f ? 0.0f : 1.0f / sum1;
    store_staged(params.out, q + warp * 16 * LD, b, h, warp * 16, params.n, params.dv, params.vectorized >> 3 & 1, acc,
                 rescale0, rescale1);
    float* lse = params.lse + (i64(b) * params.heads + h) * params.n;
    if (t == 0 && row < params.n) lse[row] = sum0 == 0.0f ? -INFINITE : max0 + logf(sum0);
    if (t == 0 && row + 8 < params.n) lse[row + 8] = sum1 == 0.0f ? -INFINITE : max1 + logf(sum1);
}
#endif

#ifdef SHORT_BACKWARD
// lse and delta, the row sum of dO ∘ O less the gradient of lse, of two rows of a warp. The sum is computed like dO·Vᵀ,
// bit for bit, so that a row that sees a single key gets a gradient of exactly 0.
__device__ __forceinline__ void row_statistics(const GeneralParams& params, int b, int h, int row, const T* d_out,
                                               const T* out, float (&lse)[2], float (&delta)[2]) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float product[2][4];
    clear(product);
    matmul_abt(product, d_out, out, padded(params.dv));
    bool diagonal = t == g / 2;
    delta[0] = quad_sum(!diagonal ? 0.0f : g % 2 ? product[0][1] : product[0][0]);
    delta[1] = quad_sum(!diagonal ? 0.0f : g % 2 ? product[1][3] : product[1][2]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = row + half * 8;
        i64 at = (i64(b) * params.heads + h) * params.n + i;
        lse[half] = i < params.n ? params.lse[at] : -INFINITE;
        if (i < params.n && params.d_lse) delta[half] -= params.d_lse[at];
    }
}

// Computes dQ of a warp's 16 queries, and stores their weights and score gradients, transposed, for the keys.
__device__ __forceinline__ void short_queries(const GeneralParams& params, int b, int h, int keys, const T* q,
                                              const T* k, const T* v, const T* d_out, T* out, T* weights, T* d_scores,
                                              bool nonfinite_k) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = warp * 16 + g;
    q += warp * 16 * LD;
    d_out += warp * 16 * LD;
    out += warp * 16 * LD;
    float lse[2], delta[2];
    row_statistics(params, b, h, row, d_out, out, lse, delta);
    float s[PARTS][4], d[PARTS][4];
    clear(s);
    clear(d);
    matmul_abt(s, q, k, padded(params.d));
    matmul_abt(d, d_out, v, padded(params.dv));
    float factors[PARTS][4];
    if (params.dropout_threshold) dropout_factors(params, b, h, row, factors);
    Visible visible0 = visible_keys(params, keys, row), visible1 = visible_keys(params, keys, row + 8);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int j = 8 * part + 2 * t + x % 2;
            float score = (x < 2 ? visible0 : visible1).has(j) ? s[part][x] * params.scale : -INFINITE;
            float p = weight_of(score, lse[x / 2]), factor = params.dropout_threshold ? factors[part][x] : 1.0f;
            float d_weight = factor == 0.0f ? 0.0f : d[part][x] * factor;
            d[part][x] = score == -INFINITE ? 0.0f : p * (d_weight - delta[x / 2]);
            int at = j * LDT + row + x / 2 * 8;
            weights[at] = narrow(p * factor);
            d_scores[at] = narrow(d[part][x]);
        }
    float acc[SUMS][4];
    clear(acc);
    if (nonfinite_k) {
        __syncwarp();
        matmul_ab_skip_zeros(acc, d_scores + warp * 16, 1, LDT, COLS, k);
    } else {
        accumulate_registers(acc, d, k);
    }
    // The scale comes last, so that a small gradient does not get even smaller before it is rounded.
    store_staged(params.d_q, out, b, h, warp * 16, params.n, params.d, params.vectorized >> 5 & 1, acc, params.scale,
                 params.scale);
}

// For a warp's 16 keys, stores `a`, [COLS, LDT], times rows of the queries to `to` through `stage`.
__device__ __forceinline__ void short_keys(const GeneralParams& params, const Tensor& to, int b, int h, const T* a,
                                           const T* rows, T* stage, int width, bool vectorized, float scale,
                                           bool nonfinite) {
    int warp = threadIdx.x / 32;
    a += warp * 16 * LDT;
    float acc[SUMS][4];
    clear(acc);
    if (nonfinite) matmul_ab_skip_zeros(acc, a, LDT, 1, ROWS, rows);
    else matmul_ab<ROWS, LDT>(acc, a, rows);
    store_staged(to, stage + warp * 16 * LD, b, h, warp * 16, params.m, width, vectorized, acc, scale, scale);
}

extern "C" __global__ void __launch_bounds__(THREADS) short_backward(const __grid_constant__ GeneralParams params) {
    SHARED(shared);
    T* q = (T*)shared;                  // [ROWS, LD]
    T* d_out = q + ROWS * LD;           // [ROWS, LD]
    T* out = d_out + ROWS * LD;         // [ROWS, LD]
    T* k = out + ROWS * LD;             // [COLS, LD]
    T* v = k + COLS * LD;               // [COLS, LD]
    T* weights = v + COLS * LD;         // [COLS, LDT]
    T* d_scores = weights + COLS * LDT; // [COLS, LDT]
    int b = int(blockIdx.x) / params.heads, h = int(blockIdx.x) % params.heads, warp = threadIdx.x / 32;
    int keys = key_count(params, b);
    bool finite_q, finite_k;
    {
        TileLoad<ROWS> load_q(params.q, b, h, params.n, params.d, params.vectorized & 1);
        TileLoad<COLS> load_k(params.k, b, h, keys, params.d, params.vectorized >> 1 & 1);
        TileLoad<COLS> load_v(params.v, b, h, keys, params.dv, params.vectorized >> 2 & 1);
        TileLoad<ROWS> load_out(params.out, b, h, params.n, params.dv, params.vectorized >> 3 & 1);
        TileLoad<ROWS> load_d_out(params.d_out, b, h, params.n, params.dv, params.vectorized >> 4 & 1);
        finite_q = load_q.store(q);
        finite_k = load_k.store(k);
        load_v.store(v);
        load_out.store(out);
        finite_q &= load_d_out.store(d_out);
    }
    bool nonfinite_k = __syncthreads_or(!finite_k), nonfinite_q = __syncthreads_or(!finite_q);
    if (warp < ROWS / 16)
        short_queries(params, b, h, keys, q, k, v, d_out, out, weights, d_scores, nonfinite_k);
    __syncthreads();
    if (warp >= COLS / 16) return;
    short_keys(params, params.d_k, b, h, d_scores, q, k, params.d, params.vectorized >> 6 & 1, params.scale,
               nonfinite_q);
    short_keys(params, params.d_v, b, h, weights, d_out, v, params.dv, params.vectorized >> 7 & 1, 1.0f, nonfinite_q);
}
#endif
