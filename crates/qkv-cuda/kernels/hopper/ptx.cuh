// PTX wrappers: barriers, TMA, wgmma, and the register fragments of wgmma. Everything here is one instruction or a few.
//
// A tile in shared memory is [width / 64][rows][64 elements]: rows of 128 bytes with TMA's 128-byte swizzle.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef ELEMENT // 0: bf16, 1: f16
#define ELEMENT 0
#endif
#ifndef WATCHDOG // 1: a wait that takes too long continues, wrongly, instead of hanging: for checks only
#define WATCHDOG 0
#endif

#ifndef ADD_TO_DESCRIPTOR // descriptors of parts of a tile by addition to that of its start
#define ADD_TO_DESCRIPTOR 0
#endif
#ifndef EVERY_LANE // 1: every lane arrives at barriers, since racecheck does not follow one arrival per warp: for
                   // checks only
#define EVERY_LANE 0
#endif

#define INLINE __device__ __forceinline__
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
#define MINUS_INFINITY __uint_as_float(0xff800000u)

struct alignas(64) TensorMap {
    u64 opaque[16];
};

// ---------------------------------------------------------------------------------------------- threads

INLINE int lane_id() { return threadIdx.x & 31; }
// The same number, opaque to the compiler: what is derived from it is computed here, not hoisted out of a loop into
// registers.
INLINE int rematerialize(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
// One elected lane arrives at a barrier for its warp, after __syncwarp or a barrier of the block.
constexpr int ELECTED_PER_WARP = EVERY_LANE ? 32 : 1;
INLINE bool is_elected() { return EVERY_LANE || lane_id() == 0; }
INLINE int warp_id() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }
// Uniform over a warpgroup, and known to the compiler to be so.
INLINE int warpgroup_id() { return __shfl_sync(~0u, threadIdx.x >> 7, 0); }

template <int REGISTERS> INLINE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> INLINE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
INLINE void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
INLINE void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---------------------------------------------------------------------------------------------- barriers

INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Makes plain stores to shared memory visible to wgmma and TMA (the async proxy).
INLINE void fence_async_proxy_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An mbarrier, by its address in shared memory.
struct Barrier {
    u32 at;
    INLINE void init(int arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals));
    }
    INLINE void arrive() const { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
    // One arrival, and `bytes` that TMA will write.
    INLINE void expect(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    }
    INLINE bool ready(u32 phase) const {
        u32 done;
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(at), "r"(phase)
                     : "memory");
        return done;
    }
    INLINE void wait(u32 phase) const {
#if WATCHDOG
        for (u32 tries = 0; !ready(phase) && tries < 20000; tries++) {}
#else
        while (!ready(phase)) {}
#endif
    }
};
INLINE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Programmatic dependent launch: waits for the previous kernel and its results; lets the next kernel start.
#ifdef EMULATED
INLINE void wait_on_dependency() {}
INLINE void launch_dependents() {}
#else
INLINE void wait_on_dependency() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

// A ring of STAGES slots: the slot and the phase parity of the next use.
template <int STAGES> struct Ring {
    u32 place = 0, parity = 0;
    INLINE void next() {
        if (++place == STAGES) place = 0, parity ^= 1;
    }
};

// ---------------------------------------------------------------------------------------------- TMA

INLINE void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Data written by other blocks of this launch: bypasses L1.
INLINE int4 load_l2(const int4* at) {
#ifdef EMULATED
    return *at;
#else
    int4 x;
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at)
                 : "memory");
    return x;
#endif
}

// Loads a box of a [batch, head, row, column] tensor.
INLINE void tma_load_box(u32 to, const TensorMap& map, Barrier done, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6}], [%2];" ::"r"(to),
                 "l"(&map), "r"(done.at), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
// Loads all columns of a tile of rows: one box per 64.
template <int ROWS, int WIDTH>
INLINE void tma_load_tile(u32 to, const TensorMap& map, Barrier done, int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < WIDTH / 64; c++) tma_load_box(to + c * ROWS * 128, map, done, c * 64, row, head, batch);
}
// Prefetches a tile into L2.
template <int WIDTH> INLINE void prefetch_tile(const TensorMap& map, int row, int head, int batch) {
#pragma unroll
    for (int c = 0; c < WIDTH; c += 64)
        asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(c),
                     "r"(row), "r"(head), "r"(batch)
                     : "memory");
}
INLINE void tma_load_bytes(u32 to, const void* from, int bytes, Barrier done) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(done.at)
                 : "memory");
}
// Adds words in shared memory to words in global memory.
INLINE void tma_reduce_add_f32(float* to, u32 from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
INLINE void tma_reduce_add_u32(float* to, u32 from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
// Copies words from shared to global memory.
INLINE void tma_store_bytes(float* to, u32 from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
// Stores a box from shared memory; elements outside the tensor are skipped.
INLINE void tma_store_box(u32 from, const TensorMap& map, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
INLINE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
INLINE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until at most PENDING groups of stores are incomplete, as seen by the whole device.
template <int PENDING> INLINE void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Orders this thread's view of global memory before later TMA accesses.
INLINE void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------- numbers

INLINE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
INLINE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
INLINE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// tanh from one exponential and one reciprocal: error 1e-7 of the largest value, unlike tanh.approx.
INLINE float tanh_exact(float x) { return 1.f - 2.f * reciprocal(1.f + exp2_fast(2.f * LOG2E * x)); }

// Two floats as two elements, the first in the low half.
INLINE u32 pack(float low, float high) {
    u32 x;
#if ELEMENT == 0
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
    return x;
}
INLINE float widen(u16 bits) {
#if ELEMENT == 0
    return __uint_as_float((u32)bits << 16);
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#endif
}
INLINE float widen_low(u32 two) { return widen((u16)two); }
INLINE float widen_high(u32 two) {
#if ELEMENT == 0
    return __uint_as_float(two & 0xffff0000u);
#else
    return widen((u16)(two >> 16));
#endif
}

// sum += 0 · x for two elements: sum stays 0 until an x is not finite, then it is NaN.
INLINE void accumulate_nonfinite(u32& sum, u32 two) {
#if ELEMENT == 0
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(two), "r"(0));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(two), "r"(0));
#endif
}

// Reductions over the four threads that share a row of a fragment.
INLINE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
INLINE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Philox-4x32-10: four random words for a counter.
INLINE void philox(u32 (&word)[4], u64 seed) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 first = (u64)word[0] * 0xd2511f53u, second = (u64)word[2] * 0xcd9e8d57u;
        u32 a = (u32)(second >> 32) ^ word[1] ^ k0, c = (u32)(first >> 32) ^ word[3] ^ k1;
        word[1] = (u32)second, word[3] = (u32)first, word[0] = a, word[2] = c;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
}
// A bit for each key 8·group … 8·group + 7 of a query: set if dropout keeps it.
INLINE u32 dropout_keep(u64 seed, int sequence, int head, int i, int group, u32 threshold) {
    u32 word[4] = {(u32)group, (u32)i, (u32)head, (u32)sequence}, kept = 0;
    philox(word, seed);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        kept |= (u32)((word[w] & 0xffff) >= threshold) << (2 * w);
        kept |= (u32)((word[w] >> 16) >= threshold) << (2 * w + 1);
    }
    return kept;
}

// ---------------------------------------------------------------------------------------------- wgmma

// The wgmma descriptor of an operand in shared memory. `across`: bytes between columns of 64 elements, used where rows
// run along the summed dimension.
INLINE u64 smem_descriptor(u32 at, int across = 16) {
    return (u64)(at >> 4 & 0x3fff) | (u64)(across >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// The descriptor of a part at a constant offset: by adding to the descriptor of the start, or computed anew. Which is
// faster depends on the kernel, as measured: LADDER.md.
template <bool ADDED = ADD_TO_DESCRIPTOR> INLINE u64 smem_descriptor_at(u32 at, int bytes, int across = 16) {
    return ADDED ? smem_descriptor(at, across) + (bytes >> 4) : smem_descriptor(at + bytes, across);
}

INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING committed groups are running.
template <int PENDING> INLINE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Forces what `never` depends on to be computed before the next wait: otherwise the compiler moves the wait up, and the
// work that should overlap the product comes after it. `never` is never true, and harmless if it were.
INLINE void finish_before_wait(bool never) {
    if (__any_sync(~0u, never)) asm volatile("nanosleep.u32 1;");
}
// Registers that a product reads or writes stay in place across this point.
template <int COUNT> INLINE void fence_registers(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int COUNT> INLINE void fence_registers(u32 (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(x[i])::"memory");
}

#if ELEMENT == 0
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif
// The registers of an accumulator, as text and as operands, eight at a time.
#define TEXT_8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define TEXT_16 TEXT_8(0, 1, 2, 3, 4, 5, 6, 7) "," TEXT_8(8, 9, 10, 11, 12, 13, 14, 15)
#define TEXT_32 TEXT_16 "," TEXT_8(16, 17, 18, 19, 20, 21, 22, 23) "," TEXT_8(24, 25, 26, 27, 28, 29, 30, 31)
#define TEXT_40 TEXT_32 "," TEXT_8(32, 33, 34, 35, 36, 37, 38, 39)
#define TEXT_48 TEXT_40 "," TEXT_8(40, 41, 42, 43, 44, 45, 46, 47)
#define TEXT_64 TEXT_48 "," TEXT_8(48, 49, 50, 51, 52, 53, 54, 55) "," TEXT_8(56, 57, 58, 59, 60, 61, 62, 63)
#define TEXT_80 TEXT_64 "," TEXT_8(64, 65, 66, 67, 68, 69, 70, 71) "," TEXT_8(72, 73, 74, 75, 76, 77, 78, 79)
#define TEXT_88 TEXT_80 "," TEXT_8(80, 81, 82, 83, 84, 85, 86, 87)
#define TEXT_96 TEXT_88 "," TEXT_8(88, 89, 90, 91, 92, 93, 94, 95)
#define TEXT_128                                                                                                  \
    TEXT_96                                                                                                       \
    "," TEXT_8(96, 97, 98, 99, 100, 101, 102, 103) "," TEXT_8(104, 105, 106, 107, 108, 109, 110, 111) "," TEXT_8( \
        112, 113, 114, 115, 116, 117, 118, 119) "," TEXT_8(120, 121, 122, 123, 124, 125, 126, 127)
#define FLOATS_8(c, x, o) \
    c(x[o]), c(x[o + 1]), c(x[o + 2]), c(x[o + 3]), c(x[o + 4]), c(x[o + 5]), c(x[o + 6]), c(x[o + 7])
#define FLOATS_16(c, x) FLOATS_8(c, x, 0), FLOATS_8(c, x, 8)
#define FLOATS_32(c, x) FLOATS_16(c, x), FLOATS_8(c, x, 16), FLOATS_8(c, x, 24)
#define FLOATS_40(c, x) FLOATS_32(c, x), FLOATS_8(c, x, 32)
#define FLOATS_48(c, x) FLOATS_40(c, x), FLOATS_8(c, x, 40)
#define FLOATS_64(c, x) FLOATS_48(c, x), FLOATS_8(c, x, 48), FLOATS_8(c, x, 56)
#define FLOATS_80(c, x) FLOATS_64(c, x), FLOATS_8(c, x, 64), FLOATS_8(c, x, 72)
#define FLOATS_88(c, x) FLOATS_80(c, x), FLOATS_8(c, x, 80)
#define FLOATS_96(c, x) FLOATS_88(c, x), FLOATS_8(c, x, 88)
#define FLOATS_128(c, x) \
    FLOATS_96(c, x), FLOATS_8(c, x, 96), FLOATS_8(c, x, 104), FLOATS_8(c, x, 112), FLOATS_8(c, x, 120)

// One wgmma: 64 rows × N columns, depth 16. R = N / 2 registers; i0 … are the numbers of the operands after them.
// `fresh` overwrites the accumulator, so that its registers are free until then.
template <int N> struct Wgmma;
#define DEFINE_WGMMA(N, R, i0, i1, i2, i3, i4, i5)                                                                \
    template <> struct Wgmma<N> {                                                                                 \
        template <int TRANS_A, int TRANS_B> INLINE static void fresh(float (&x)[R], u64 a, u64 b) {               \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #N              \
                         "k16." WGMMA_TYPES " {" TEXT_##R "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i2 ", %" #i3 "; }" \
                         : FLOATS_##R("=f", x)                                                                    \
                         : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));                                           \
        }                                                                                                         \
        template <int TRANS_A, int TRANS_B> INLINE static void shared(float (&x)[R], u64 a, u64 b) {              \
            asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #N              \
                         "k16." WGMMA_TYPES " {" TEXT_##R "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i2 ", %" #i3 "; }" \
                         : FLOATS_##R("+f", x)                                                                    \
                         : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));                                           \
        }                                                                                                         \
        template <int TRANS_B> INLINE static void registers(float (&x)[R], const u32* a, u64 b) {                 \
            asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #N              \
                         "k16." WGMMA_TYPES " {" TEXT_##R "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4       \
                                                          ", p, 1, 1, %" #i5 "; }"                                \
                         : FLOATS_##R("+f", x)                                                                    \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANS_B));                     \
        }                                                                                                         \
    };
DEFINE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
DEFINE_WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
DEFINE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
DEFINE_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
DEFINE_WGMMA(176, 88, 88, 89, 90, 91, 92, 93)
DEFINE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
DEFINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

// ADD: accumulate; otherwise the first step overwrites x.
template <int N, bool ADD, int TRANS_A, int TRANS_B> INLINE void wgmma_step(float (&x)[N / 2], u64 a, u64 b, int k) {
    if (!ADD && k == 0) Wgmma<N>::template fresh<TRANS_A, TRANS_B>(x, a, b);
    else Wgmma<N>::template shared<TRANS_A, TRANS_B>(x, a, b);
}
// x = A · Bᵀ: A is 64 rows of a tile of A_ROWS rows, B a tile of N rows; DEPTH runs along the rows of both.
template <int N, int DEPTH, int A_ROWS, int B_ROWS = N> INLINE void gemm_abt(float (&x)[N / 2], u32 a, u32 b) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        wgmma_step<N, false, 0, 0>(x, smem_descriptor_at(a, (k / 4) * A_ROWS * 128 + k % 4 * 32),
                                   smem_descriptor_at(b, (k / 4) * B_ROWS * 128 + k % 4 * 32), k);
}
// x += A · B: A in registers, B a tile of DEPTH rows, N of its columns from a multiple of 64.
template <int N, int DEPTH, int B_ROWS = DEPTH>
INLINE void gemm_rs(float (&x)[N / 2], const u32 (&a)[DEPTH / 4], u32 b) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        Wgmma<N>::template registers<1>(x, a + 4 * k, smem_descriptor_at(b, k * 2048, B_ROWS * 128));
}
// x = Aᵀ · B: both tiles have DEPTH rows; 64 columns of A are the rows of x.
template <int N, int DEPTH, int A_ROWS = DEPTH, int B_ROWS = DEPTH>
INLINE void gemm_atb(float (&x)[N / 2], u32 a, u32 b) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        wgmma_step<N, false, 1, 1>(x, smem_descriptor_at(a, k * 2048, A_ROWS * 128),
                                   smem_descriptor_at(b, k * 2048, B_ROWS * 128), k);
}
// x += A · B: A is 64 rows with DEPTH along their elements, B a tile of DEPTH rows.
template <int N, int DEPTH, int A_ROWS, int B_ROWS = DEPTH> INLINE void gemm_ss(float (&x)[N / 2], u32 a, u32 b) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        wgmma_step<N, true, 0, 1>(x, smem_descriptor_at(a, (k / 4) * A_ROWS * 128 + k % 4 * 32),
                                  smem_descriptor_at(b, k * 2048, B_ROWS * 128), k);
}

// ---------------------------------------------------------------------------------------------- fragments

// A wgmma fragment of 64 rows × N columns: thread t of the warpgroup holds, for each 8 columns c, x[4c] and x[4c + 1]
// of row `fragment_row()` and columns 8c + 2(t mod 4), + 1, and x[4c + 2] and x[4c + 3] of the row 8 below.
INLINE int fragment_row() { return (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7); }
INLINE int fragment_column() { return (threadIdx.x & 3) * 2; }

// Rounds a fragment to elements, as the register operand A of a product over its columns.
template <int COUNT> INLINE void round_fragment(u32 (&to)[COUNT / 2], const float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) to[i] = pack(x[2 * i], x[2 * i + 1]);
}

// Stores a rounded fragment into a swizzled tile of ROWS rows, from column group `first` (of 8) on; `to` is the address
// of its 64 rows.
template <int COUNT, int ROWS> INLINE void store_tile(u32 to, const u32 (&x)[COUNT], int first = 0) {
    int lane = lane_id(), warp = threadIdx.x >> 5 & 3;
    // stmatrix.x4: lanes 8q … 8q + 7 give the row addresses of matrix q.
    int row = warp * 16 + (lane & 15), half = lane >> 4;
#pragma unroll
    for (int c = 0; c < COUNT / 4; c++) {
        int column = first + 2 * c + half; // in groups of 8 elements
        u32 at = to + (column >> 3) * ROWS * 128 + row * 128 + ((column & 7) ^ (row & 7)) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[4 * c]),
                     "r"(x[4 * c + 1]), "r"(x[4 * c + 2]), "r"(x[4 * c + 3])
                     : "memory");
    }
}

INLINE void store_shared(u32 at, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
INLINE void store_shared(u32 at, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
INLINE int4 load_shared4(u32 at) {
    int4 x;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}
INLINE float load_shared(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
INLINE void store_shared(u32 at, u8 x) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"((u32)x) : "memory"); }
INLINE float2 load_shared2(u32 at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
    return x;
}
INLINE u32 load_shared_u16(u32 at) {
    u16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
    return x;
}

// Scales the thread's two rows of a fragment and rounds them. Unless SURE, a factor of 0 gives 0 even for NaN.
template <bool SURE, int COUNT>
INLINE void round_scaled(u32 (&to)[COUNT / 2], const float (&x)[COUNT], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        float factor = i & 1 ? lower : upper;
        to[i] = !SURE && factor == 0.f ? 0 : pack(x[2 * i] * factor, x[2 * i + 1] * factor);
    }
}
// Whether one of the thread's two rows, if below `rows`, has a non-finite element.
template <int COUNT> INLINE bool has_nonfinite(const u32 (&x)[COUNT], int rows) {
    u32 upper = 0, lower = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) accumulate_nonfinite(i & 1 ? lower : upper, x[i]);
    int row = fragment_row();
    return row < rows && upper & 0x7fff7fffu || row + 8 < rows && lower & 0x7fff7fffu;
}
// Each warp's 16 rows of a tile of ROWS rows are stored by TMA, WIDTH columns, in boxes of 16 rows; `row` is that of
// the tile's first. Few instructions: code that runs once per tile is not in the instruction cache.
template <int WIDTH, int ROWS>
INLINE void tma_store_tile(u32 tile, const TensorMap& map, int column, int row, int head, int batch) {
    int first = (threadIdx.x >> 5 & 3) * 16;
    fence_async_proxy_shared();
    __syncwarp();
    if (lane_id() != 0) return;
#pragma unroll
    for (int c = 0; c < WIDTH / 64; c++)
        tma_store_box(tile + c * ROWS * 128 + first * 128, map, column + 64 * c, row + first, head, batch);
    tma_store_commit();
}
// Each warp stores its 16 rows of a tile element by element: rows below `rows`, columns below `columns`, any stride.
template <int WIDTH, int ROWS>
INLINE void store_tile_elementwise(u32 tile, u16* to, i64 stride, int rows, int columns) {
    int warp = threadIdx.x >> 5 & 3;
    __syncwarp();
#pragma unroll 1
    for (int at = lane_id(); at < 16 * WIDTH; at += 32) {
        int row = warp * 16 + at / WIDTH, column = at % WIDTH;
        u32 x = load_shared_u16(tile + (column >> 6) * ROWS * 128 + row * 128 + ((column >> 3 & 7) ^ (row & 7)) * 16 +
                                (column & 7) * 2);
        if (row < rows && column < columns) to[row * stride + column] = (u16)x;
    }
    // TMA may write there next.
    fence_async_proxy_shared();
    __syncwarp();
}
