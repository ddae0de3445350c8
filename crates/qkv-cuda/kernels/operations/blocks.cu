// Matrices in quantized blocks, as files store them: products of few rows, which read only the blocks of a matrix, and
// widened rows. A weight is scale · (code − zero) + least. Products multiply the codes exactly, as integers, on the
// tensor cores; the sum of a block is then scaled in f32, in which a block's scale and least value are exact. So
// weights are not rounded at all: the error of a product is that of its sums in f32, over 32 columns, the blocks of a
// warp and eight warps, (44 + blocks) · 2⁻²⁴ of the sum of |x| · (|scale · code| + |least|).
//
// A matrix is a list of tiles of eight rows and 128 columns, with tiles of the same rows one after another; elements
// beyond the matrix have scales of 0. A warp holds a tile in registers: lane 4g + t holds columns 16h + 4t … 16h + 4t +
// 3 of row g, for h = 0 … 7. Word w of its low bits holds those of h = 2w and 2w + 1, four bits each: the columns of a
// pair are 16 bits apart. The bits above them follow as a second such list, then the scales, those of eight rows side
// by side.

// How scales are stored: RECORD words per row and tile.
#define PLAIN 0  // a half for each 32 columns
#define LEAST 1  // two, the second is the least value
#define SUPER 2  // two halves, the scale and minus the least value, times two bytes for each 32 columns
#define HALVES 3 // a half, times a byte with a sign for each 16 columns

__device__ __forceinline__ float from_half(u32 bits) {
#ifdef EMULATED
    return emulated_from_half(u16(bits));
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(u16(bits)));
    return x;
#endif
}

// A number that is exact in bf16, twice.
__device__ __forceinline__ u32 twice(float x) { return __float_as_uint(x) >> 16 | (__float_as_uint(x) & 0xffff0000u); }

// a · b + c of pairs of bf16, whose results must be exact.
__device__ __forceinline__ u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
#ifdef EMULATED
    auto part = [](u32 x, int at) { return __uint_as_float(at ? x & 0xffff0000u : x << 16); };
    float low = part(a, 0) * part(b, 0) + part(c, 0), high = part(a, 1) * part(b, 1) + part(c, 1);
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xffff0000u);
#else
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#endif
}

// c[16×8] += a[16×16] · b[16×8] of bf16, whatever T is.
__device__ __forceinline__ void mma_of_codes(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef EMULATED
    emulated_mma(c, a, b[0], b[1], [](u16 bits) { return __uint_as_float(u32(bits) << 16); });
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// A lane's part of a tile. HIGH: bits of a code above the low four.
template <int HIGH, int SCALES> struct BlockTile {
    static constexpr bool HAS_LEAST = SCALES == LEAST || SCALES == SUPER, IN_HALVES = SCALES == HALVES;
    static constexpr int RECORD = SCALES == PLAIN ? 2 : SCALES == LEAST ? 4 : 3, SCALES_AT = 128 + 32 * HIGH;
    static constexpr int WORDS = SCALES_AT + 8 * RECORD;
    static constexpr float ZERO = HAS_LEAST ? 0.0f : IN_HALVES ? 32.0f : HIGH == 0 ? 8.0f : HIGH == 2 ? 16.0f : 128.0f;

    alignas(16) u32 low[4];
    alignas(16) u32 high[HIGH ? HIGH : 1];
    u32 scales[RECORD];

    __device__ __forceinline__ void load(const u32* tile) {
        int lane = threadIdx.x % 32;
        *(Words*)low = ((const Words*)tile)[lane];
        if constexpr (HIGH == 4) *(Words*)high = ((const Words*)(tile + 128))[lane];
        if constexpr (HIGH == 2) *(u64*)high = ((const u64*)(tile + 128))[lane];
#pragma unroll
        for (int at = 0; at < RECORD; at++) scales[at] = tile[SCALES_AT + 8 * at + lane / 4];
    }

    // Codes minus their zero, of the two columns of pair 0 … 3 of a word, one of them in the low half. Bits become a
    // number as the lowest bits of 128.
    static __device__ __forceinline__ u32 codes(u32 low, u32 high, int pair) {
        u32 numbers = (low >> (4 * pair) & 0x000f000fu) | 0x43004300u;
        if constexpr (HIGH == 0) return multiply_add_pairs(numbers, twice(1.0f), twice(-128.0f - ZERO));
        constexpr u32 MASK = HIGH == 4 ? 0x000f000fu : 0x00030003u;
        u32 above = (high >> (HIGH * pair) & MASK) | 0x43004300u;
        above = multiply_add_pairs(above, twice(16.0f), twice(-2048.0f - 128.0f - ZERO));
        return multiply_add_pairs(numbers, twice(1.0f), above);
    }
    __device__ __forceinline__ u32 codes(int word, int pair) const {
        return codes(low[word], HIGH == 0 ? 0 : HIGH == 4 ? high[word] : high[word / 2] >> (8 * (word % 2)), pair);
    }

    // The same for a tile in memory.
    static __device__ __forceinline__ u32 codes(const u32* tile, int lane, int word, int pair) {
        u32 low = tile[4 * lane + word], high = 0;
        if (HIGH == 4) high = tile[128 + 4 * lane + word];
        if (HIGH == 2) high = tile[128 + 2 * lane + word / 2] >> (8 * (word % 2));
        return codes(low, high, pair);
    }

    // The scale of the 32 columns of a word, or of one half of them, from words of a row that are `apart` apart.
    static __device__ __forceinline__ float scale(const u32* scales, int apart, int word, int half) {
        if constexpr (SCALES == PLAIN) return from_half(scales[word / 2 * apart] >> (word % 2 * 16) & 0xffff);
        if constexpr (SCALES == LEAST) return from_half(scales[word * apart] & 0xffff);
        u32 bytes = scales[(1 + word / 2) * apart] >> (word % 2 * 16);
        float factor = SCALES == SUPER ? float(bytes & 0xff) : float(int((signed char)(bytes >> (8 * half) & 0xff)));
        return from_half(scales[0] & 0xffff) * factor;
    }

    // Their least value.
    static __device__ __forceinline__ float least(const u32* scales, int apart, int word) {
        if constexpr (SCALES == LEAST) return from_half(scales[word * apart] >> 16);
        if constexpr (SCALES != SUPER) return 0.0f;
        return -from_half(scales[0] >> 16) * float(scales[(1 + word / 2) * apart] >> (word % 2 * 16 + 8) & 0xff);
    }
};

// Four numbers of a row as operands of a product: in bf16, or f32 as an exact sum of three bf16.
#define PIECES (sizeof(T) == 4 ? 3 : 1)
__device__ __forceinline__ void load_operands(const T* from, u32 (&to)[PIECES][2]) {
    if constexpr (PIECES == 1) {
        u64 four = *(const u64*)from;
        to[0][0] = u32(four), to[0][1] = u32(four >> 32);
    } else {
        float4 four = *(const float4*)from;
        float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int piece = 0; piece < int(PIECES); piece++) {
            u32 bits[4];
#pragma unroll
            for (int at = 0; at < 4; at++) {
                bits[at] = __float_as_uint(x[at]) & 0xffff0000u;
                x[at] -= __uint_as_float(bits[at]);
            }
            to[piece][0] = bits[0] >> 16 | bits[1];
            to[piece][1] = bits[2] >> 16 | bits[3];
        }
    }
}

// sums += the product of the 16 rows of two tiles with eight rows of x, over 128 columns: `x` points to those of this
// lane's row, if it has one.
template <class Tile>
__device__ __forceinline__ void add_tiles(const Tile& a, const Tile& b, const T* x, bool has_row, float (&sums)[4]) {
    constexpr u32 ONE = 0x3f803f80u;
#pragma unroll
    for (int word = 0; word < 4; word++) {
        // The products of 32 columns with the codes, and their sums.
        float products[4] = {}, plain[4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 operands[PIECES][2] = {};
            if (has_row) load_operands(x + 32 * word + 16 * half, operands);
            u32 codes[4] = {a.codes(word, 2 * half), b.codes(word, 2 * half), a.codes(word, 2 * half + 1),
                            b.codes(word, 2 * half + 1)};
#pragma unroll
            for (int piece = 0; piece < int(PIECES); piece++) {
                mma_of_codes(products, codes, operands[piece]);
                if constexpr (Tile::HAS_LEAST) mma_of_codes(plain, {ONE, ONE, ONE, ONE}, operands[piece]);
            }
            if (!Tile::IN_HALVES && half == 0) continue;
            float scales[2] = {Tile::scale(a.scales, 1, word, half), Tile::scale(b.scales, 1, word, half)};
#pragma unroll
            for (int at = 0; at < 4; at++) {
                sums[at] = fmaf(scales[at / 2], products[at], sums[at]);
                products[at] = 0.0f;
            }
        }
        if constexpr (Tile::HAS_LEAST) {
            float least[2] = {Tile::least(a.scales, 1, word), Tile::least(b.scales, 1, word)};
#pragma unroll
            for (int at = 0; at < 4; at++) sums[at] = fmaf(least[at / 2], plain[at % 2], sums[at]);
        }
    }
}

// Elements by which rows of x in shared memory are padded, to avoid bank conflicts.
#define BLOCKS_PAD 16
// Shared memory of a product with blocks.
struct BlocksMemory {
    Words staged[(STAGED + 8 * BLOCKS_PAD) * sizeof(T) / 16];
    float partial[8][16][8]; // (warp, output, row)
};
__shared__ BlocksMemory blocks_memory;

// Tiles of each octet that a warp has in flight: with one, a product of 200 blocks has 3 MB in flight, too little for
// an H200's memory.
#define AHEAD 2

// The matrix rows of a product with blocks: two octets of rows, each by its matrix and its number.
struct Octets {
    const u32* w[2];
    int octet[2];
};

// The pair of outputs that a thread finishes, and what it reads to rotate them while it multiplies.
struct PairAngle {
    PairEnd end;
    const u32* position;
    const float *cosines, *sines;
    int output;
};

// The products of 16 rows of matrices with at most eight rows of x, by a block of eight warps, which take turns with
// the tiles of 128 columns: thread 8o + r, of 64, gets those of rows o of both octets with row r of x. The order of a
// sum depends only on the width. A separate function, so that it is optimized once for each format.
template <class Tile>
__device__ __noinline__ float2 octet_products(const T* x, const RowNorm& norm, const Octets& octets, u32 rows,
                                              int inner, PairAngle* angle) {
    constexpr int COLUMNS = 128;
    launch_dependents();
    T* staged = (T*)blocks_memory.staged;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int tiles = (inner + COLUMNS - 1) / COLUMNS, tile = warp;
    const u32* from[2];
#pragma unroll
    for (int m = 0; m < 2; m++) from[m] = octets.w[m] + (u64(octets.octet[m]) * tiles + warp) * Tile::WORDS;
    // A warp's next tiles are in flight while it multiplies, and its first ones while the preceding launch ends.
    Tile ahead[AHEAD][2];
#pragma unroll
    for (int at = 0; at < AHEAD; at++) {
        if (tile + 8 * at >= tiles) continue;
        ahead[at][0].load(from[0] + 8 * at * Tile::WORDS);
        ahead[at][1].load(from[1] + 8 * at * Tile::WORDS);
    }
    RowNorm by = norm;
    wait_on_dependency();
    if (angle) angle->end.prepare(*angle->position, angle->cosines, angle->sines, angle->output);
    int columns = rows > 4 ? STAGED / 8 : rows > 2 ? STAGED / 4 : rows > 1 ? STAGED / 2 : STAGED;
    float sums[4] = {};
    for (int base = 0; base < inner; base += columns) {
        int width = inner - base < columns ? inner - base : columns;
        int padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS, stride = padded + BLOCKS_PAD;
        __syncthreads();
        for (int at = threadIdx.x * EIGHT; at < int(rows) * padded; at += blockDim.x * EIGHT) {
            int row = at / padded, col = at % padded;
            Eight eight = {};
            if (col < width) eight = *(const Eight*)(x + u64(row) * inner + base + col);
            *(Eight*)(staged + row * stride + col) = eight;
        }
        __syncthreads();
        if (by.gain) {
            T* row = staged + warp * stride;
            if (warp < int(rows) && by.bias) normalize_row<true>(row, row, by.gain, by.bias, inner, by.epsilon);
            if (warp < int(rows) && !by.bias) normalize_row<false>(row, row, by.gain, by.bias, inner, by.epsilon);
            __syncthreads();
        }
        for (; tile < (base + padded) / COLUMNS; tile += 8) {
            Tile a = ahead[0][0], b = ahead[0][1];
#pragma unroll
            for (int at = 1; at < AHEAD; at++) ahead[at - 1][0] = ahead[at][0], ahead[at - 1][1] = ahead[at][1];
            if (tile + 8 * AHEAD < tiles) {
                ahead[AHEAD - 1][0].load(from[0] + 8 * AHEAD * Tile::WORDS);
                ahead[AHEAD - 1][1].load(from[1] + 8 * AHEAD * Tile::WORDS);
            }
            from[0] += 8 * Tile::WORDS, from[1] += 8 * Tile::WORDS;
            add_tiles(a, b, staged + g * stride + tile * COLUMNS - base + 4 * t, g < int(rows), sums);
        }
    }
    auto& partial = blocks_memory.partial;
#pragma unroll
    for (int at = 0; at < 4; at++) partial[warp][g + at / 2 * 8][2 * t + at % 2] = sums[at];
    __syncthreads();
    float found[2] = {};
    int output = threadIdx.x / 8 % 8, row = threadIdx.x % 8;
#pragma unroll
    for (int part = 0; part < 8; part++) {
        found[0] += partial[part][output][row];
        found[1] += partial[part][output + 8][row];
    }
    return make_float2(found[0], found[1]);
}

// Calls `body` with the tile of a format, by its number here and in `blocks.rs`.
template <class F> __device__ __forceinline__ auto with_format(u32 format, F body) {
    switch (format) {
    case 0: return body(BlockTile<0, PLAIN>());   // Q4_0
    case 1: return body(BlockTile<0, LEAST>());   // Q4_1
    case 2: return body(BlockTile<2, PLAIN>());   // Q5_0
    case 3: return body(BlockTile<2, LEAST>());   // Q5_1
    case 4: return body(BlockTile<4, PLAIN>());   // Q8_0
    case 5: return body(BlockTile<0, SUPER>());   // Q4_K
    case 6: return body(BlockTile<2, SUPER>());   // Q5_K
    default: return body(BlockTile<2, HALVES>()); // Q6_K
    }
}
__device__ __forceinline__ float2 products_of(u32 format, const T* x, const RowNorm& norm, const Octets& octets,
                                              u32 rows, int inner, PairAngle* angle = nullptr) {
    return with_format(format, [&](auto tile) {
        return octet_products<decltype(tile)>(x, norm, octets, rows, inner, angle);
    });
}

// Like `few_rows`, for any number of rows: one block per 16 outputs of eight rows of x.
extern "C" __global__ void few_rows_blocks(const T* x, const float* gain, const float* shift, const u32* w0,
                                           const u32* w1, const u32* w2, const T* b0, const T* b1, const T* b2, T* y0,
                                           T* y1, T* y2, const T* residual, u32 rows, int inner, int o0, int o1, int o2,
                                           u32 f0, u32 f1, u32 f2, float epsilon) {
    // Blocks that read the same weights run side by side.
    u32 groups = (rows + 7) / 8, first = blockIdx.x % groups * 8, here = rows - first < 8 ? rows - first : 8;
    int strip = blockIdx.x / groups, which = 0;
    if (strip >= (o0 + 15) / 16) strip -= (o0 + 15) / 16, which = 1;
    if (which == 1 && strip >= (o1 + 15) / 16) strip -= (o1 + 15) / 16, which = 2;
    int across = which == 0 ? o0 : which == 1 ? o1 : o2;
    const u32* w = which == 0 ? w0 : which == 1 ? w1 : w2;
    // If there is no second octet, the first one is used twice.
    Octets octets = {{w, w}, {2 * strip, 16 * strip + 8 < across ? 2 * strip + 1 : 2 * strip}};
    u32 format = which == 0 ? f0 : which == 1 ? f1 : f2;
    float2 found = products_of(format, x + u64(first) * inner, {gain, shift, epsilon}, octets, here, inner);
    u32 row = first + threadIdx.x % 8;
    if (threadIdx.x >= 64 || row >= rows) return;
    const T* added = which == 0 ? b0 : which == 1 ? b1 : b2;
    T* y = which == 0 ? y0 : which == 1 ? y1 : y2;
    int output = 16 * strip + threadIdx.x / 8;
    if (output < across) end_output(found.x, added, residual, y, row, output, across);
    if (output + 8 < across) end_output(found.y, added, residual, y, row, output + 8, across);
}

// Like `few_rows_gated`, with two matrices of one format.
extern "C" __global__ void few_rows_blocks_gated(const T* x, const float* gain, const float* shift, const u32* w0,
                                                 const u32* w1, const T* b0, const T* b1, T* y, u32 rows, int inner,
                                                 int outputs, u32 format, int of, float epsilon) {
    u32 groups = (rows + 7) / 8, first = blockIdx.x % groups * 8, here = rows - first < 8 ? rows - first : 8;
    int octet = blockIdx.x / groups, output = 8 * octet + threadIdx.x / 8;
    Octets octets = {{w0, w1}, {octet, octet}};
    float2 found = products_of(format, x + u64(first) * inner, {gain, shift, epsilon}, octets, here, inner);
    u32 row = first + threadIdx.x % 8;
    if (threadIdx.x >= 64 || row >= rows || output >= outputs) return;
    end_gated({found.x, found.y}, {b0, b1}, y, row, output, outputs, of);
}

// Like `few_rows_appended`, with outputs that are multiples of 16 and, if heads are rotated, half a head's width a
// multiple of 8.
extern "C" __global__ void few_rows_blocks_appended(
    const T* x, const float* gain, const float* shift, const u32* w0, const u32* w1, const u32* w2, const T* b0,
    const T* b1, const T* b2, T* q, T* keys, T* values, const float* cosines, const float* sines, const u32* positions,
    u32 rows, u32 room, u32 half, int inner, int o0, int o1, int o2, u32 f0, u32 f1, u32 f2, float epsilon) {
    int strip = blockIdx.x, which = 0;
    if (strip >= o0 / 16) strip -= o0 / 16, which = 1;
    if (which == 1 && strip >= o1 / 16) strip -= o1 / 16, which = 2;
    int across = which == 0 ? o0 : which == 1 ? o1 : o2;
    const u32* w = which == 0 ? w0 : which == 1 ? w1 : w2;
    bool turns = which < 2 && half > 0;
    // Octets whose rows are rotated together; for values, and if nothing is rotated, two neighbors.
    int apart = turns ? int(half) / 8 : 1, octet = strip / apart * 2 * apart + strip % apart;
    u32 row = threadIdx.x % 8, format = which == 0 ? f0 : which == 1 ? f1 : f2;
    int output = 8 * octet + threadIdx.x / 8 % 8;
    PairAngle angle = {{turns, int(half)}, positions + (row < rows ? row : 0), cosines, sines, output};
    Octets octets = {{w, w}, {octet, octet + apart}};
    float2 found = products_of(format, x, {gain, shift, epsilon}, octets, rows, inner, &angle);
    if (threadIdx.x >= 64 || row >= rows) return;
    const T* added = which == 0 ? b0 : which == 1 ? b1 : b2;
    T* to = which == 0 ? q : which == 1 ? keys : values;
    to += (which == 0 ? u64(row) : u64(row) * room + angle.end.position) * across;
    angle.end.store(found.x, found.y, added, to, output, 8 * apart);
}

// y[r] = scale · W[ids[r]] + positions[start + r mod length], like `embedding`; row r of W if there are no ids.
extern "C" __global__ void embedding_blocks(const u32* ids, const u32* w, const float* positions, T* y, u32 rows,
                                            int width, float scale, u32 length, u32 start, u32 format) {
    in_turn();
    with_format(format, [&](auto tile) {
        using Tile = decltype(tile);
        FOR_EIGHTS(rows, width) {
            u32 from = ids ? ids[row] : row;
            const u32* at = w + (u64(from / 8) * ((width + 127) / 128) + col / 128) * Tile::WORDS;
            int word = col % 128 / 32, half = col % 32 / 16, lane = from % 8 * 4 + col % 16 / 4;
            const u32* scales = at + Tile::SCALES_AT + from % 8;
            float factor = Tile::scale(scales, 8, word, half), least = Tile::least(scales, 8, word);
            float x[EIGHT], p[EIGHT];
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                u32 codes = Tile::codes(at, lane + pair / 2, word, 2 * half + pair % 2);
                x[2 * pair] = scale * fmaf(factor, __uint_as_float(codes << 16), least);
                x[2 * pair + 1] = scale * fmaf(factor, __uint_as_float(codes & 0xffff0000u), least);
            }
            if (positions) {
                load_floats(positions + u64(start + row % length) * width, col, width, p);
#pragma unroll
                for (int one = 0; one < EIGHT; one++) x[one] += p[one];
            }
            store_eight(y + u64(row) * width, col, width, x);
        }
    });
}
