// Compiles the general kernels as C++, for machines without a GPU: each thread of a block is a fiber, and a fiber that
// waits at a barrier yields to the next. Slow, but the same source: errors in a kernel's logic show up here, too.

#define EMULATED 1
#include <stddef.h>
#include <stdint.h>

// The C library's functions by their declarations: the headers of C++ take as long to compile as a kernel.
extern "C" {
void* aligned_alloc(size_t, size_t);
void free(void*);
void* memcpy(void*, const void*, size_t);
void* memset(void*, int, size_t);
int strcmp(const char*, const char*);
double ceil(double);
double exp(double);
double log(double);
double sqrt(double);
float cosf(float);
float erff(float);
float expf(float);
float fabsf(float);
float fmaf(float, float, float);
float fmaxf(float, float);
float logf(float);
float sqrtf(float);
float tanhf(float);
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
    unsigned x, y, z;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }

static const int SHARED_BYTES = 232448;
alignas(128) static unsigned char shared_memory[SHARED_BYTES];
// What `extern __shared__ float4 shared[]` becomes.
#define __shared__ static
static float4* const shared_tile = (float4*)shared_memory;

static Index blockIdx, blockDim, gridDim;
static int current = 0, threads_here = 0;
struct Fiber {
    void* at; // its stack pointer
    bool done;
};
static const int MAX_FIBERS = 1024;
static Fiber fibers[MAX_FIBERS];
static int left; // fibers that have not returned
static void* scheduler;

// Switches stacks; callee-saved registers stay on the old one.
#ifdef __x86_64__
extern "C" void qkv_switch(void** from, void* to);
asm(R"(
.text
.type qkv_switch, @function
qkv_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#else
#error "fibers are written for x86-64"
#endif
struct ThreadIndex {
    struct {
        operator unsigned() const { return unsigned(current); }
    } x;
};
static ThreadIndex threadIdx;

// Goes on with the next fiber that has not returned.
static void yield() {
    void** mine = &fibers[current].at;
    do current = current + 1 < threads_here ? current + 1 : 0;
    while (fibers[current].done);
    if (&fibers[current].at != mine) qkv_switch(mine, fibers[current].at);
}

// A barrier of fibers: a fiber waits until its round is over. Fibers that have returned count as arrived.
struct FiberBarrier {
    int came = 0;
    unsigned long round = 0;
    int value = 0, result = 0;
};
static FiberBarrier block_barrier, warp_barriers[64];
static int ended_in_warp[64], ended_in_block;

static void arrive(FiberBarrier& barrier, int members) {
    unsigned long mine = barrier.round;
    barrier.came++;
    if (barrier.came == members) {
        barrier.came = 0;
        barrier.result = barrier.value;
        barrier.value = 0;
        barrier.round++;
        return;
    }
    while (barrier.round == mine) yield();
}
static int warp_size() { return threads_here - current / 32 * 32 < 32 ? threads_here - current / 32 * 32 : 32; }
static void __syncthreads() { arrive(block_barrier, threads_here - ended_in_block); }
static int __syncthreads_or(int x) {
    block_barrier.value |= x;
    arrive(block_barrier, threads_here - ended_in_block);
    return block_barrier.result;
}
static int __syncthreads_count(int x) {
    block_barrier.value += x != 0;
    arrive(block_barrier, threads_here - ended_in_block);
    return block_barrier.result;
}
static void __syncwarp() { arrive(warp_barriers[current / 32], warp_size() - ended_in_warp[current / 32]); }

// What a warp exchanges between barriers is in one of two places: a lane that is through with one exchange writes to the
// other place, and is back at the first only after a barrier that follows every reading of it. So an exchange takes one
// barrier.
static int exchange_place() { return warp_barriers[current / 32].round % 2; }
static float exchanged[2][64][32];
template <class X> static X __shfl_xor_sync(unsigned, X x, int by) {
    int lane = current % 32;
    float* lanes = exchanged[exchange_place()][current / 32];
    memcpy(&lanes[lane], &x, 4);
    __syncwarp();
    X got;
    memcpy(&got, &lanes[lane ^ by], 4);
    return got;
}
static unsigned balloted[2][64][32];
static unsigned __ballot_sync(unsigned, int x) {
    unsigned* lanes = balloted[exchange_place()][current / 32];
    lanes[current % 32] = x != 0;
    __syncwarp();
    unsigned bits = 0;
    for (int at = 0; at < 32; at++) bits |= lanes[at] << at;
    return bits;
}
static unsigned fragments[2][64][32][6];
template <class Widen>
static void emulated_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Widen widen) {
    int lane = current % 32, g = lane / 4, t = lane % 4;
    unsigned (*lanes)[6] = fragments[exchange_place()][current / 32];
    unsigned* mine = lanes[lane];
    for (int x = 0; x < 4; x++) mine[x] = a[x];
    mine[4] = b0;
    mine[5] = b1;
    __syncwarp();
    for (int x = 0; x < 4; x++) {
        int row = g + x / 2 * 8, column = 2 * t + x % 2;
        float sum = c[x];
        for (int k = 0; k < 16; k++) {
            unsigned left = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            unsigned right = lanes[column * 4 + k % 8 / 2][4 + k / 8];
            sum += widen(uint16_t(left >> (k % 2 * 16))) * widen(uint16_t(right >> (k % 2 * 16)));
        }
        c[x] = sum;
    }
}

static inline float emulated_from_half(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return float(half);
}
static inline uint16_t emulated_to_half(float x) {
    _Float16 half = _Float16(x);
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static inline float __int_as_float(int x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
static inline float __uint_as_float(unsigned x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
static inline unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    return y;
}
// The C library declares __expf, too.
#define __expf expf
#define __fdividef(x, y) ((x) / (y))
// Blocks run one after another, and a fiber yields only at barriers.
static inline void __threadfence() {}
static inline float __ldcg(const float* at) { return *at; }
static inline unsigned atomicAdd(unsigned* at, unsigned x) {
    unsigned before = *at;
    *at += x;
    return before;
}
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned by) {
    unsigned long long both = x | (unsigned long long)y << 32;
    unsigned out = 0;
    for (int at = 0; at < 4; at++) out |= unsigned(both >> ((by >> (4 * at) & 7) * 8) & 0xff) << (8 * at);
    return out;
}

static void (*body)(const void* const*);
static const void* const* arguments;
static void run_fiber() {
    body(arguments);
    fibers[current].done = true;
    left--;
    ended_in_warp[current / 32]++;
    ended_in_block++;
    // Barriers wait for one fiber fewer.
    FiberBarrier& warp = warp_barriers[current / 32];
    int others = warp_size() - ended_in_warp[current / 32];
    if (warp.came && warp.came == others) {
        warp.came = 0;
        warp.result = warp.value;
        warp.value = 0;
        warp.round++;
    }
    others = threads_here - ended_in_block;
    if (block_barrier.came && block_barrier.came == others) {
        block_barrier.came = 0;
        block_barrier.result = block_barrier.value;
        block_barrier.value = 0;
        block_barrier.round++;
    }
    if (left > 0) yield();
    qkv_switch(&fibers[current].at, scheduler);
}

// Stacks begin an odd number of cache lines apart: with a power of two between them, all would share the same few sets
// of the cache, and every switch would miss it.
static const size_t STACK = 256 * 1024 + 11 * 64;

static void run_block(int threads) {
    static char* stacks = nullptr;
    static int has_stacks = 0;
    if (has_stacks < threads) {
        free(stacks);
        stacks = (char*)aligned_alloc(64, STACK * threads);
        has_stacks = threads;
    }
    threads_here = left = threads;
    block_barrier = FiberBarrier();
    ended_in_block = 0;
    for (int warp = 0; warp < (threads + 31) / 32; warp++) {
        warp_barriers[warp] = FiberBarrier();
        ended_in_warp[warp] = 0;
    }
    memset(shared_memory, 0xff, SHARED_BYTES); // uninitialized memory reads as NaN
    for (int at = 0; at < threads; at++) {
        // As if it had yielded: a return address and six registers.
        void** top = (void**)(stacks + STACK * (at + 1));
        top[-1] = nullptr;
        top[-2] = (void*)run_fiber;
        for (int at = 3; at <= 8; at++) top[-at] = nullptr;
        fibers[at] = {top - 8, false};
    }
    current = 0;
    qkv_switch(&scheduler, fibers[0].at);
}

// Calls a kernel with arguments by their addresses, as the driver does.
template <class... A, class... Found>
static void call_kernel(void (*kernel)(A...), const void* const* values, Found... found) {
    if constexpr (sizeof...(Found) == sizeof...(A)) kernel(*(const A*)found...);
    else call_kernel(kernel, values, found..., values[sizeof...(Found)]);
}

// Writes the sizes of a kernel's arguments; returns how many there are.
template <class... A> static int argument_sizes(void (*)(A...), unsigned* sizes) {
    const unsigned all[] = {unsigned(sizeof(A))..., 0};
    for (size_t x = 0; x < sizeof...(A); x++) sizes[x] = all[x];
    return int(sizeof...(A));
}

struct Named {
    const char* name;
    void (*call)(const void* const*);
    int (*sizes)(unsigned*);
};

// Entry points of the host. `emulated_launch` returns 0 if there is no such kernel, `emulated_sizes` −1.
#define EMULATED_LAUNCH(...)                                                                  \
    static const Named all_kernels[] = {__VA_ARGS__};                                         \
    extern "C" int emulated_launch(const char* name, const unsigned* grid, unsigned threads,  \
                                   const void* const* values) {                               \
        for (const Named& one : all_kernels)                                                  \
            if (!strcmp(one.name, name)) {                                               \
                body = one.call;                                                              \
                arguments = values;                                                           \
                blockDim = {threads, 1, 1};                                                   \
                gridDim = {grid[0], grid[1], 1};                                              \
                for (unsigned y = 0; y < grid[1]; y++)                                        \
                    for (unsigned x = 0; x < grid[0]; x++) {                                  \
                        blockIdx = {x, y, 0};                                                 \
                        run_block(int(threads));                                              \
                    }                                                                         \
                return 1;                                                                     \
            }                                                                                 \
        return 0;                                                                             \
    }                                                                                         \
    extern "C" int emulated_sizes(const char* name, unsigned* sizes) {                        \
        for (const Named& one : all_kernels)                                                  \
            if (!strcmp(one.name, name)) return one.sizes(sizes);                        \
        return -1;                                                                            \
    }
#define EMULATED_KERNEL(name)                                                                 \
    {#name, [](const void* const* values) { call_kernel(name, values); },                     \
     [](unsigned* sizes) { return argument_sizes(name, sizes); }}
