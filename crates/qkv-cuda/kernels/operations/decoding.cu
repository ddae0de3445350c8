// Decoding that keeps positions on the device: the position of each sequence is in device memory, so that a step makes
// the same launches for every token and can be recorded as one graph.

// Stores the new token of each sequence: rotates the pairs (x[i], x[i + half]) of the heads of q and k by the angles of
// positions[b], unless half is 0; then keys[b, positions[b]] = k[b] and values[b, positions[b]] = v[b]. Caches have
// room for `room` tokens per sequence.
extern "C" __global__ void append_at(T* q, const T* k, const T* v, T* keys, T* values, const float* cosines,
                                     const float* sines, const u32* positions, u32 rows, u32 room, u32 half,
                                     u32 q_width, u32 k_width, u32 v_width) {
    in_turn();
    u32 q_items = half ? q_width / 2 : 0, k_items = half ? k_width / 2 : k_width, all = q_items + k_items + v_width;
    FOR_EACH(rows * all) {
        u32 row = at / all, item = at % all, position = positions[row];
        u64 to = u64(row) * room + position;
        if (item >= q_items + k_items) {
            u32 col = item - q_items - k_items;
            values[to * v_width + col] = v[u64(row) * v_width + col];
        } else if (half == 0) {
            keys[to * k_width + item] = k[u64(row) * k_width + item];
        } else {
            u32 pair = item < q_items ? item : item - q_items, i = pair % half, col = pair / half * 2 * half + i;
            float c = cosines[position * half + i], s = sines[position * half + i];
            const T* from = item < q_items ? q + u64(row) * q_width + col : k + u64(row) * k_width + col;
            T* into = item < q_items ? q + u64(row) * q_width + col : keys + to * k_width + col;
            turn(from[0], from[half], into, half, c, s);
        }
    }
}

// Continues sequences from others: the first positions[s] rows of sequence s of a cache [sequences, room, width] become
// those of parents[s], by way of `scratch`, which has the same shape: one launch copies there, another `back`. Rows
// that stay in place are not copied.
extern "C" __global__ void reorder_rows(T* cache, T* scratch, const u32* parents, const u32* positions, u32 sequences,
                                        u32 room, int width, int back) {
    FOR_EIGHTS(sequences * room, width) {
        u32 sequence = row / room, position = row % room, parent = parents[sequence];
        if (parent == sequence || position >= positions[sequence]) continue;
        const T* from = back ? scratch + u64(row) * width : cache + (u64(parent) * room + position) * width;
        T* to = (back ? cache : scratch) + u64(row) * width;
        float x[EIGHT];
        load_eight(from, col, width, x);
        store_eight(to, col, width, x);
    }
}

// Advances the sequence of this block by one position, but not beyond its room.
__device__ __forceinline__ void advance(u32* positions, long long* places, int* lengths, u32 room) {
    u32 position = positions[blockIdx.x] + 1 < room ? positions[blockIdx.x] + 1 : room - 1;
    positions[blockIdx.x] = position;
    places[blockIdx.x] = position;
    lengths[blockIdx.x] = int(position) + 1;
}

// The highest of some logits: its class, or NONE; NOT_FINITE if one is not finite.
struct Highest {
    float logit;
    u32 found;
};
#define NONE 0xffffffffu
#define NOT_FINITE 0xfffffffeu

// Of two, the higher one, and of equals the one with the lower class.
__device__ __forceinline__ Highest higher(const Highest& a, const Highest& b) {
    if (a.found == NOT_FINITE || b.found == NONE) return a;
    if (b.found == NOT_FINITE || a.found == NONE) return b;
    bool second = b.logit > a.logit || (b.logit == a.logit && b.found < a.found);
    return second ? b : a;
}

// The class with the highest of the logits [rows, classes], or NONE if one is not finite: the next token of each
// sequence, which advances by one position, but not beyond its room. One block per row.
extern "C" __global__ void next_token(const T* logits, u32* ids, u32* positions, long long* places, int* lengths,
                                      int classes, u32 room) {
    __shared__ Highest of_warps[32];
    in_turn();
    const T* row = logits + u64(blockIdx.x) * classes;
    Highest best = {0.0f, NONE};
    for (int col = threadIdx.x * EIGHT; col < classes; col += blockDim.x * EIGHT) {
        float x[EIGHT];
        load_eight(row, col, classes, x);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) {
            bool is_finite = x[at] - x[at] == 0.0f;
            if (col + at < classes) best = higher(best, Highest{x[at], is_finite ? u32(col + at) : NOT_FINITE});
        }
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        Highest other;
        other.logit = __shfl_xor_sync(FULL_WARP, best.logit, by);
        other.found = __shfl_xor_sync(FULL_WARP, best.found, by);
        best = higher(best, other);
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (u32 warp = 1; warp < blockDim.x / 32; warp++) best = higher(best, of_warps[warp]);
    ids[blockIdx.x] = best.found == NOT_FINITE ? NONE : best.found;
    advance(positions, places, lengths, room);
}

// sums[r] += Σ x[r, col + i] · w[i] for eight columns.
template <int ROWS>
__device__ __forceinline__ void add_products(const Eight& w, const T* x, int col, int width, float (&sums)[ROWS]) {
    float a[EIGHT], b[EIGHT];
    widen_eight(w, a);
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        load_eight(x + row * width, col, EIGHT, b);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) sums[row] = fmaf(a[at], b[at], sums[row]);
    }
}

// Each lane's share of sums[m][r] = Σᵢ x[r, i] · weights[m][i] for at most ROWS rows, `stride` elements apart, by a
// warp, with x staged through STAGED elements of shared memory: each weight is read once. Rows that are normalized
// first are staged as a whole. The order of a row's sum depends neither on the other rows nor on ROWS or N. Every
// thread of a block must call this, even if its warp has nothing to sum. `meanwhile` is called once the preceding
// launches are done: its loads are in flight while x is staged.
template <int ROWS, int N, class F>
__device__ __forceinline__ void lane_products(const T* x, u32 stride, const RowNorm& norm,
                                              const T* const (&weights)[N], bool is_there, u32 rows, int inner,
                                              float (&sums)[N][ROWS], F meanwhile) {
    constexpr int TILE = STAGED / ROWS, STEP = 32 * EIGHT;
    constexpr int EARLY = 6 / N < TILE / STEP ? 6 / N : TILE / STEP;
    launch_dependents();
    __shared__ Words staged[STAGED * sizeof(T) / 16];
    const T* tile = (const T*)staged;
    int first = threadIdx.x % 32 * EIGHT;
    // The first weights, which are all of a short row, are in flight while the preceding launch ends and x is staged.
    Eight early[N][EARLY] = {};
#pragma unroll
    for (int part = 0; part < N * EARLY; part++) {
        int m = part / EARLY, col = first + part % EARLY * STEP;
        if (is_there && col < inner) early[m][part % EARLY] = *(const Eight*)(weights[m] + col);
    }
    u32 warp = threadIdx.x / 32;
    for (int col = first; norm.gain && warp < rows && col < inner; col += STEP) {
        prefetch(norm.gain + col);
        if (norm.bias) prefetch(norm.bias + col);
    }
    wait_on_dependency();
    meanwhile();
    for (int base = 0; base < inner; base += TILE) {
        int width = inner - base < TILE ? inner - base : TILE;
        __syncthreads();
        for (int at = threadIdx.x * EIGHT; at < ROWS * width; at += blockDim.x * EIGHT) {
            int row = at / width, col = at % width;
            Eight from = {};
            if (row < int(rows)) from = *(const Eight*)(x + u64(row) * stride + base + col);
            *(Eight*)(tile + at) = from;
        }
        __syncthreads();
        if (norm.gain) {
            T* row = (T*)staged + warp * inner;
            if (warp < rows && norm.bias) normalize_row<true>(row, row, norm.gain, norm.bias, inner, norm.epsilon);
            if (warp < rows && !norm.bias) normalize_row<false>(row, row, norm.gain, norm.bias, inner, norm.epsilon);
            __syncthreads();
        }
        if (!is_there) continue;
        int col = first;
        if (base == 0) {
#pragma unroll
            for (int part = 0; part < EARLY; part++, col += STEP) {
                if (col >= width) continue;
#pragma unroll
                for (int m = 0; m < N; m++) add_products(early[m][part], tile, col, width, sums[m]);
            }
        }
#pragma unroll(N > 2 ? 1 : 4)
        for (; col < width; col += STEP) {
#pragma unroll
            for (int m = 0; m < N; m++)
                add_products(*(const Eight*)(weights[m] + base + col), tile, col, width, sums[m]);
        }
    }
}

// The whole sums, in every lane, over rows that follow each other.
template <int ROWS, int N, class F>
__device__ __forceinline__ void warp_products(const T* x, const RowNorm& norm, const T* const (&weights)[N],
                                              bool is_there, u32 rows, int inner, float (&sums)[N][ROWS],
                                              F meanwhile) {
    lane_products(x, u32(inner), norm, weights, is_there, rows, inner, sums, meanwhile);
#pragma unroll
    for (int m = 0; m < N; m++)
#pragma unroll
        for (int row = 0; row < ROWS; row++) sums[m][row] = warp_sum(sums[m][row]);
}

// y[r, o] = Σᵢ norm(x)[r, i] · w[o, i] + bias[o] for at most ROWS rows and up to three matrices: one warp per output.
// With a residual, which takes a single matrix, y += residual.
template <int ROWS>
__device__ __forceinline__ void few_rows(const T* x, const RowNorm& norm, const T* const (&w)[3],
                                         const T* const (&bias)[3], T* const (&y)[3], const T* residual, u32 rows,
                                         int inner, const int (&outputs)[3]) {
    int output = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, which = 0;
    if (output >= outputs[0]) output -= outputs[0], which = 1;
    if (which == 1 && output >= outputs[1]) output -= outputs[1], which = 2;
    int across = which == 0 ? outputs[0] : which == 1 ? outputs[1] : outputs[2];
    bool is_there = output < across;
    const T* weights = (which == 0 ? w[0] : which == 1 ? w[1] : w[2]) + u64(is_there ? output : 0) * inner;
    const T* added = which == 0 ? bias[0] : which == 1 ? bias[1] : bias[2];
    T* to = which == 0 ? y[0] : which == 1 ? y[1] : y[2];
    float sums[1][ROWS] = {};
    warp_products<ROWS, 1>(x, norm, {weights}, is_there, rows, inner, sums, [] {});
    if (!is_there || threadIdx.x % 32 > 0) return;
#pragma unroll
    for (int row = 0; row < ROWS; row++)
        if (row < int(rows)) end_output(sums[0][row], added, residual, to, row, output, across);
}

// y[r, o] = f(gate) · up of the two products Σᵢ norm(x)[r, i] · w[o, i] + bias[o], each rounded: one warp per output.
template <int ROWS>
__device__ __forceinline__ void few_rows_gated(const T* x, const RowNorm& norm, const T* const (&w)[2],
                                               const T* const (&bias)[2], T* y, u32 rows, int inner, int outputs,
                                               int of) {
    int output = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    bool is_there = output < outputs;
    u64 start = u64(is_there ? output : 0) * inner;
    float sums[2][ROWS] = {};
    warp_products<ROWS, 2>(x, norm, {w[0] + start, w[1] + start}, is_there, rows, inner, sums, [] {});
    if (!is_there || threadIdx.x % 32 > 0) return;
#pragma unroll
    for (int row = 0; row < ROWS; row++)
        if (row < int(rows)) end_gated({sums[0][row], sums[1][row]}, bias, y, row, output, outputs, of);
}

// The new token of each of at most ROWS sequences: queries, keys and values, Σᵢ norm(x)[r, i] · w[o, i] + bias[o], are
// rounded, then rotated and stored as by `append_at`, the queries in y. A warp computes the pair of outputs that is
// rotated together (for values, and if nothing is rotated, two neighbors), and its lane r finishes row r.
template <int ROWS>
__device__ __forceinline__ void few_rows_appended(const T* x, const RowNorm& norm, const T* const (&w)[3],
                                                  const T* const (&bias)[3], T* const (&y)[3], const float* cosines,
                                                  const float* sines, const u32* positions, u32 rows, u32 room,
                                                  u32 half, int inner, const int (&outputs)[3]) {
    int pair = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, which = 0;
    if (pair >= outputs[0] / 2) pair -= outputs[0] / 2, which = 1;
    if (which == 1 && pair >= outputs[1] / 2) pair -= outputs[1] / 2, which = 2;
    int across = which == 0 ? outputs[0] : which == 1 ? outputs[1] : outputs[2];
    bool is_there = pair < across / 2, turns = which < 2 && half > 0;
    int apart = turns ? int(half) : 1, output = is_there ? pair / apart * 2 * apart + pair % apart : 0;
    const T* weights = (which == 0 ? w[0] : which == 1 ? w[1] : w[2]) + u64(output) * inner;
    const T* added = which == 0 ? bias[0] : which == 1 ? bias[1] : bias[2];
    T* to = which == 0 ? y[0] : which == 1 ? y[1] : y[2];
    bool ends_row = is_there && lane < int(rows);
    PairEnd end = {turns, int(half)};
    float sums[2][ROWS] = {};
    warp_products<ROWS, 2>(x, norm, {weights, weights + u64(is_there ? apart : 0) * inner}, is_there, rows, inner, sums,
                           [&] {
                               if (ends_row) end.prepare(positions[lane], cosines, sines, output);
                           });
    if (!ends_row) return;
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int row = 0; row < ROWS; row++)
        if (row == lane) a = sums[0][row], b = sums[1][row];
    end.store(a, b, added, to + (which == 0 ? u64(lane) : u64(lane) * room + end.position) * across, output, apart);
}

#define FEW_ROWS(ROWS)                                                                                               \
    extern "C" __global__ void few_rows_##ROWS(const T* x, const float* gain, const float* shift, const T* w0,       \
                                               const T* w1, const T* w2, const T* b0, const T* b1, const T* b2,      \
                                               T* y0, T* y1, T* y2, const T* residual, u32 rows, int inner, int o0,  \
                                               int o1, int o2, float epsilon) {                                      \
        few_rows<ROWS>(x, {gain, shift, epsilon}, {w0, w1, w2}, {b0, b1, b2}, {y0, y1, y2}, residual, rows, inner,   \
                       {o0, o1, o2});                                                                                \
    }

#define FEW_ROWS_GATED(ROWS)                                                                                         \
    extern "C" __global__ void few_rows_gated_##ROWS(const T* x, const float* gain, const float* shift, const T* w0, \
                                                     const T* w1, const T* b0, const T* b1, T* y, u32 rows,          \
                                                     int inner, int outputs, int of, float epsilon) {                \
        few_rows_gated<ROWS>(x, {gain, shift, epsilon}, {w0, w1}, {b0, b1}, y, rows, inner, outputs, of);            \
    }

#define FEW_ROWS_APPENDED(ROWS)                                                                                      \
    extern "C" __global__ void few_rows_appended_##ROWS(                                                             \
        const T* x, const float* gain, const float* shift, const T* w0, const T* w1, const T* w2, const T* b0,       \
        const T* b1, const T* b2, T* q, T* keys, T* values, const float* cosines, const float* sines,                \
        const u32* positions, u32 rows, u32 room, u32 half, int inner, int o0, int o1, int o2, float epsilon) {      \
        few_rows_appended<ROWS>(x, {gain, shift, epsilon}, {w0, w1, w2}, {b0, b1, b2}, {q, keys, values}, cosines,   \
                                sines, positions, rows, room, half, inner, {o0, o1, o2});                            \
    }

FEW_ROWS(1)
FEW_ROWS(2)
FEW_ROWS(4)
FEW_ROWS(8)
FEW_ROWS_GATED(1)
FEW_ROWS_GATED(2)
FEW_ROWS_GATED(4)
FEW_ROWS_GATED(8)
FEW_ROWS_APPENDED(1)
FEW_ROWS_APPENDED(2)
FEW_ROWS_APPENDED(4)
FEW_ROWS_APPENDED(8)
