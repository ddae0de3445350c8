// Primitives of decoding by TMA: mbarriers, tile loads, and ldmatrix on swizzled tiles. A tile in shared memory is
// [WIDTH / 64][kBlockN][64 elements], rows of 128 bytes with TMA's 128-byte swizzle.

#define kBlockN 64                          // keys per stage
#define KV_TILE_BYTES (kBlockN * WIDTH * 2) // bytes of the keys, and of the values, of a stage

struct alignas(64) TensorMap {
    u64 opaque[16];
};

// An mbarrier, by its address in shared memory.
struct Barrier {
    u32 at;
    __device__ __forceinline__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals));
    }
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
    }
    __device__ __forceinline__ void expect(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    }
    __device__ __forceinline__ void wait(u32 phase) const {
        u32 done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done)
                         : "r"(at), "r"(phase)
                         : "memory");
    }
};

__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, Barrier done, int column, int row, int head,
                                         int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6}], [%2];" ::"r"(to),
                 "l"(&map), "r"(done.at), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// The address of 16-byte unit `unit` of a row.
__device__ __forceinline__ u32 swizzled(u32 tile, int row, int scale_log2) {
    return tile + scale_log2 / 8 * (kBlockN * 128) + row * 128 + ((scale_log2 % 8) ^ (row % 8)) * 16;
}

// Four 8 × 8 matrices, as stored or transposed.
__device__ __forceinline__ void ldmatrix(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
// Synchronizes the four consumer warps.
__device__ __forceinline__ void consumer_sync() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// Loads the keys and values of a head from j0 on into a stage.
__device__ __forceinline__ void tma_load_kv(u32 to, const TensorMap& map_k, const TensorMap& map_v, Barrier done,
                                            int j0, int head, int batch) {
    done.expect(2 * KV_TILE_BYTES);
#pragma unroll
    for (int c = 0; c < WIDTH / 64; c++) {
        tma_load(to + c * kBlockN * 128, map_k, done, c * 64, j0, head, batch);
        tma_load(to + KV_TILE_BYTES + c * kBlockN * 128, map_v, done, c * 64, j0, head, batch);
    }
}
