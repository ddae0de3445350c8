// Tiles in shared memory and the two matrix products of a warp. A block has ROWS rows, 16 per warp, against COLS rows
// of the other side. Fragments have the layout of mma.m16n8k16 for every type: lane 4g + t holds rows g and g + 8 and
// columns 2t and 2t + 1 of each 16 × 8 part. Widths are zero-padded to WIDTH.

#ifndef THREADS
#define THREADS (ROWS * 2)
#endif
#define LD (WIDTH + PAD) // leading dimension of a tile of rows
#define LDP (COLS + PAD) // leading dimension of a tile of weights
#define PARTS (COLS / 8) // 16 × 8 parts of a warp's scores
#define SUMS (WIDTH / 8) // 16 × 8 parts of a warp's accumulator

struct alignas(16) Vec16 {
    u32 words[4];
};

__device__ __forceinline__ bool all_finite(T x) { return is_finite(widen(x)); }

// Loads rows from `first` on into shared memory, zero-padded. Returns whether everything this thread read is finite.
__device__ __forceinline__ bool load_rows(T* to, int rows, const Tensor& from, int b, int h, int first, int len,
                                          int width, bool vectorized) {
    const T* head = from.data + b * from.batch + h * from.head;
    bool finite = true;
    const int each = 16 / int(sizeof(T));
    for (int at = threadIdx.x; at < rows * (WIDTH / each); at += THREADS) {
        int r = at / (WIDTH / each), c = at % (WIDTH / each) * each;
        T* into = to + r * LD + c;
        const T* row = head + (first + r) * from.row;
        bool there = first + r < len;
        if (vectorized && there && c + each <= width) {
            *(Vec16*)into = *(const Vec16*)(row + c);
        } else {
            for (int x = 0; x < each; x++) into[x] = there && c + x < width ? row[(c + x) * from.col] : narrow(0.0f);
        }
        for (int x = 0; x < each; x++) finite &= all_finite(into[x]);
    }
    return finite;
}

#if ELEMENT == F32
// acc += A · Bᵀ over `depth`: A has the warp's 16 rows, B has 8N rows.
template <int N> __device__ __forceinline__ void matmul_abt(float (&acc)[N][4], const T* a, const T* b, int depth) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int k = 0; k < depth; k += 4) {
        float4 a0 = *(const float4*)(a + g * LD + k), a1 = *(const float4*)(a + (g + 8) * LD + k);
#pragma unroll
        for (int part = 0; part < N; part++) {
            float4 b0 = *(const float4*)(b + (8 * part + 2 * t) * LD + k);
            float4 b1 = *(const float4*)(b + (8 * part + 2 * t + 1) * LD + k);
            float (&c)[4] = acc[part];
            c[0] = fmaf(a0.w, b0.w, fmaf(a0.z, b0.z, fmaf(a0.y, b0.y, fmaf(a0.x, b0.x, c[0]))));
            c[1] = fmaf(a0.w, b1.w, fmaf(a0.z, b1.z, fmaf(a0.y, b1.y, fmaf(a0.x, b1.x, c[1]))));
            c[2] = fmaf(a1.w, b0.w, fmaf(a1.z, b0.z, fmaf(a1.y, b0.y, fmaf(a1.x, b0.x, c[2]))));
            c[3] = fmaf(a1.w, b1.w, fmaf(a1.z, b1.z, fmaf(a1.y, b1.y, fmaf(a1.x, b1.x, c[3]))));
        }
    }
}

// acc += A · B: A is the warp's 16 rows of weights, B has COLS rows and 8N columns.
template <int N> __device__ __forceinline__ void matmul_ab(float (&acc)[N][4], const T* a, const T* b) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 2
    for (int k = 0; k < COLS; k++) {
        float a0 = a[g * LDP + k], a1 = a[(g + 8) * LDP + k];
#pragma unroll
        for (int part = 0; part < N; part++) {
            float2 x = *(const float2*)(b + k * LD + 8 * part + 2 * t);
            acc[part][0] = fmaf(a0, x.x, acc[part][0]);
            acc[part][1] = fmaf(a0, x.y, acc[part][1]);
            acc[part][2] = fmaf(a1, x.x, acc[part][2]);
            acc[part][3] = fmaf(a1, x.y, acc[part][3]);
        }
    }
}
#else
__device__ __forceinline__ u32 load_pair(const T* at) { return *(const u32*)at; }

// The four registers of a 16 × 16 operand with leading dimension `ld`.
__device__ __forceinline__ void load_a_fragment(u32 (&a)[4], const T* at, int ld) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    a[0] = load_pair(at + g * ld + 2 * t);
    a[1] = load_pair(at + (g + 8) * ld + 2 * t);
    a[2] = load_pair(at + g * ld + 2 * t + 8);
    a[3] = load_pair(at + (g + 8) * ld + 2 * t + 8);
}

// acc += A · Bᵀ over `depth`: A has the warp's 16 rows, B has 8N rows.
template <int N> __device__ __forceinline__ void matmul_abt(float (&acc)[N][4], const T* a, const T* b, int depth) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int k = 0; k < depth; k += 16) {
        u32 x[4];
        load_a_fragment(x, a + k, LD);
#pragma unroll
        for (int part = 0; part < N; part++) {
            const T* row = b + (8 * part + g) * LD + k + 2 * t;
            mma(acc[part], x, load_pair(row), load_pair(row + 8));
        }
    }
}

// acc += x · B: x is an operand of 16 rows and columns, B has 16 rows and 8N columns.
template <int N> __device__ __forceinline__ void multiply_columns(float (&acc)[N][4], const u32 (&x)[4], const T* b) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < N; part += 2) {
        u32 y[4];
#ifdef EMULATED
        int g = lane / 4, t = lane % 4;
        for (int r = 0; r < 4; r++) {
            const T* at = b + (2 * t + r % 2 * 8) * LD + 8 * (part + r / 2) + g;
            y[r] = u32(at[0].bits) | u32(at[LD].bits) << 16;
        }
#else
        u32 at = u32(__cvta_generic_to_shared(b + lane % 16 * LD + 8 * (part + lane / 16)));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                     : "r"(at));
#endif
        mma(acc[part], x, y[0], y[1]);
        mma(acc[part + 1], x, y[2], y[3]);
    }
}

// acc += A · B: A is the warp's 16 rows of weights with leading dimension LDA, B has DEPTH rows and 8N columns.
template <int DEPTH = COLS, int LDA = LDP, int N>
__device__ __forceinline__ void matmul_ab(float (&acc)[N][4], const T* a, const T* b) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        u32 x[4];
        load_a_fragment(x, a + k, LDA);
        multiply_columns(acc, x, b + k * LD);
    }
}
#endif

// The same for B with non-finite elements: a weight of 0 contributes nothing, instead of 0 · NaN. Row r, column k of A
// is a[r · row + k · column].
template <int N> __device__ __forceinline__ void matmul_ab_skip_zeros(float (&acc)[N][4], const T* a, int row,
                                                                      int column, int depth, const T* b) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int k = 0; k < depth; k++) {
        float a0 = widen(a[g * row + k * column]), a1 = widen(a[(g + 8) * row + k * column]);
#pragma unroll
        for (int part = 0; part < N; part++) {
            float x = widen(b[k * LD + 8 * part + 2 * t]), y = widen(b[k * LD + 8 * part + 2 * t + 1]);
            if (a0 != 0.0f) {
                acc[part][0] += a0 * x;
                acc[part][1] += a0 * y;
            }
            if (a1 != 0.0f) {
                acc[part][2] += a1 * x;
                acc[part][3] += a1 * y;
            }
        }
    }
}

template <int N>
__device__ __forceinline__ void accumulate_ab(float (&acc)[N][4], const T* a, const T* b, bool nonfinite) {
    if (nonfinite) matmul_ab_skip_zeros(acc, a, LDP, 1, COLS, b);
    else matmul_ab(acc, a, b);
}

// Stores a warp's 16 rows from registers to a tile of weights.
__device__ __forceinline__ void store_weights(T* to, const float (&from)[PARTS][4]) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        T* at = to + g * LDP + 8 * part + 2 * t;
#if ELEMENT == F32
        *(float2*)at = make_float2(from[part][0], from[part][1]);
        *(float2*)(at + 8 * LDP) = make_float2(from[part][2], from[part][3]);
#else
        *(u32*)at = pack_pair(from[part][0], from[part][1]);
        *(u32*)(at + 8 * LDP) = pack_pair(from[part][2], from[part][3]);
#endif
    }
}

// Stores a warp's 16 accumulator rows to rows `first` … of a head, scaled by one factor per row.
template <int N> __device__ __forceinline__ void store_rows(const Tensor& to, int b, int h, int first, int len,
                                                            int width, const float (&from)[N][4], float rescale0,
                                                            float rescale1) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    T* head = to.data + b * to.batch + h * to.head;
#pragma unroll
    for (int part = 0; part < N; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            int r = first + g + x / 2 * 8, c = 8 * part + 2 * t + x % 2;
            if (r < len && c < width)
                head[r * to.row + c * to.col] = narrow(from[part][x] * (x < 2 ? rescale0 : rescale1));
        }
}

template <int N> __device__ __forceinline__ void clear(float (&acc)[N][4]) {
#pragma unroll
    for (int part = 0; part < N; part++)
#pragma unroll
        for (int x = 0; x < 4; x++) acc[part][x] = 0.0f;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

__device__ __forceinline__ int padded(int width) { return (width + 15) / 16 * 16; }
