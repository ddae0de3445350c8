// Decoding where the device counts: the position of each sequence is in device memory, so that a step is the same
// launches for every token and can be recorded as one graph.

// Rotates the pairs (x[i], x[i + half]) of each head of row b by the angles of positions[b].
extern "C" __global__ void rotate_at(T* x, const float* cosines, const float* sines, const u32* positions, u32 rows,
                                     u32 heads, u32 half) {
    FOR_EACH(rows * heads * half) {
        u32 i = at % half, head = at / half % heads, row = at / half / heads, angle = positions[row] * half + i;
        T* first = x + (u64(row) * heads + head) * 2 * half + i;
        float a = widen(first[0]), b = widen(first[half]);
        float c = cosines[angle], s = sines[angle];
        first[0] = narrow(a * c - b * s);
        first[half] = narrow(b * c + a * s);
    }
}

// keys[b, positions[b]] = k[b] and values[b, positions[b]] = v[b], in caches with room for as many tokens.
extern "C" __global__ void append_at(const T* k, const T* v, T* keys, T* values, const u32* positions, u32 rows,
                                     u32 room, u32 k_width, u32 v_width) {
    u32 both = k_width + v_width;
    FOR_EACH(rows * both) {
        u32 row = at / both, col = at % both;
        u64 to = u64(row) * room + positions[row];
        if (col < k_width) keys[to * k_width + col] = k[u64(row) * k_width + col];
        else values[to * v_width + col - k_width] = v[u64(row) * v_width + col - k_width];
    }
}

// The highest of some logits: its class, or NONE; NOT_FINITE where one is not.
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

// The class with the highest of the logits [rows, classes], or NONE where one is not finite: the next token of each
// sequence, which stands one position further, and not beyond its room. A block a row.
extern "C" __global__ void next_token(const T* logits, u32* ids, u32* positions, long long* places, int* lengths,
                                      int classes, u32 room) {
    __shared__ Highest of_warps[32];
    const T* row = logits + u64(blockIdx.x) * classes;
    Highest best = {0.0f, NONE};
    for (int col = threadIdx.x; col < classes; col += blockDim.x) {
        float x = widen(row[col]);
        best = higher(best, Highest{x, x - x == 0.0f ? u32(col) : NOT_FINITE});
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
    u32 position = positions[blockIdx.x] + 1 < room ? positions[blockIdx.x] + 1 : room - 1;
    ids[blockIdx.x] = best.found == NOT_FINITE ? NONE : best.found;
    positions[blockIdx.x] = position;
    places[blockIdx.x] = position;
    lengths[blockIdx.x] = int(position) + 1;
}

// y[r, o] = Σᵢ x[r, i] · w[o, i] + bias[o] for at most ROWS rows: a warp an output, each weight read once. The order of
// a row's sum does not depend on the other rows.
template <int ROWS>
__device__ __forceinline__ void few_rows(const T* x, const T* w, const T* bias, T* y, u32 rows, int inner,
                                         int outputs) {
    int lane = threadIdx.x % 32, output = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (output >= outputs) return;
    const T* weights = w + u64(output) * inner;
    float sums[ROWS] = {};
    for (int col = lane * EIGHT; col < inner; col += 32 * EIGHT) {
        float a[EIGHT], b[EIGHT];
        load_eight(weights, col, inner, a);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            if (row >= int(rows)) continue;
            load_eight(x + u64(row) * inner, col, inner, b);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) sums[row] = fmaf(a[at], b[at], sums[row]);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        float sum = warp_sum(sums[row]);
        if (lane == 0 && row < int(rows))
            y[u64(row) * outputs + output] = narrow(sum + (bias ? widen(bias[output]) : 0.0f));
    }
}

#define FEW_ROWS(ROWS)                                                                                            \
    extern "C" __global__ void few_rows_##ROWS(const T* x, const T* w, const T* bias, T* y, u32 rows, int inner, \
                                               int outputs) {                                                     \
        few_rows<ROWS>(x, w, bias, y, rows, inner, outputs);                                                      \
    }

FEW_ROWS(1)
FEW_ROWS(2)
FEW_ROWS(4)
FEW_ROWS(8)
