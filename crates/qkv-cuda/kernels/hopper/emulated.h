// What the index arithmetic of the Hopper kernels needs beyond emulated.h: vector types, shuffles, atomics.

struct uint2 { unsigned x, y; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
static inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
static inline int __any_sync(unsigned, int x) { return __ballot_sync(~0u, x) != 0; }
template <class X> static X __shfl_sync(unsigned, X x, int from, int width = 32) {
    int lane = current % 32;
    float* lanes = exchanged[exchange_place()][current / 32];
    memcpy(&lanes[lane], &x, 4);
    __syncwarp();
    X got;
    memcpy(&got, &lanes[lane / width * width + from % width], 4);
    return got;
}
template <class X> static X __shfl_up_sync(unsigned, X x, int by) {
    int lane = current % 32;
    return __shfl_sync(~0u, x, lane >= by ? lane - by : lane);
}
static inline int atomicAdd(int* at, int x) { int old = *at; *at += x; return old; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float4 __ldcg(const float4* at) { return *at; }
