// The element type T of the tensors (ELEMENT: 0 f32, 1 bf16, 2 f16), its conversions to and from f32, and the warp's
// matrix product. No headers: NVRTC has none.

#define F32 0
#define BF16 1
#define F16 2

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifdef EMULATED
#define SHARED(name) float4* name = shared_tile
#else
#define SHARED(name) extern __shared__ float4 name[]
#endif
#define FULL_WARP 0xffffffffu
#define INFINITE __int_as_float(0x7f800000)

#if ELEMENT == F32
typedef float T;
#define PAD 4
__device__ __forceinline__ float widen(T x) { return x; }
__device__ __forceinline__ T narrow(float x) { return x; }
__device__ __forceinline__ float exponential(float x) { return expf(x); }
#else
struct T {
    u16 bits;
};
#define PAD 8
__device__ __forceinline__ float exponential(float x) { return __expf(x); }
#if ELEMENT == BF16
__device__ __forceinline__ float widen(T x) { return __uint_as_float(u32(x.bits) << 16); }
#ifdef EMULATED
__device__ __forceinline__ u16 bits_of(float x) {
    u32 u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return u16((u >> 16) | 0x40);
    return u16((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
#else
__device__ __forceinline__ u16 bits_of(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
#endif
#else
#ifdef EMULATED
__device__ __forceinline__ float widen(T x) { return emulated_from_half(x.bits); }
__device__ __forceinline__ u16 bits_of(float x) { return emulated_to_half(x); }
#else
__device__ __forceinline__ float widen(T x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
    return r;
}
__device__ __forceinline__ u16 bits_of(float x) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
#endif
#endif
__device__ __forceinline__ T narrow(float x) {
    T r;
    r.bits = bits_of(x);
    return r;
}
__device__ __forceinline__ u32 pack_pair(float low, float high) { return u32(bits_of(low)) | u32(bits_of(high)) << 16; }
// Whether both elements of a pair are finite.
__device__ __forceinline__ bool pair_is_finite(u32 pair) {
    const u32 exponent = ELEMENT == BF16 ? 0x7f80u : 0x7c00u;
    return (pair & exponent) != exponent && (pair >> 16 & exponent) != exponent;
}

// c[16×8] += a[16×16] · b[16×8] on the tensor cores, accumulated in f32.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef EMULATED
    emulated_mma(c, a, b0, b1, [](u16 bits) {
        T x;
        x.bits = bits;
        return widen(x);
    });
#elif ELEMENT == BF16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
#endif

// Programmatic dependent launch: the first kernel lets the second one start; the second waits for the results of the
// first. Before Hopper the kernels run one after the other.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_on_dependency() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
