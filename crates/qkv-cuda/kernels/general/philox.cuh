// Philox-4x32-10: four words from a counter and a key.
__device__ __forceinline__ void philox(u32 (&c)[4], u64 seed) {
    u32 k0 = u32(seed), k1 = u32(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 first = u64(c[0]) * 0xd2511f53u, second = u64(c[2]) * 0xcd9e8d57u;
        u32 a = u32(second >> 32) ^ c[1] ^ k0, b = u32(second);
        u32 cc = u32(first >> 32) ^ c[3] ^ k1, d = u32(first);
        c[0] = a;
        c[1] = b;
        c[2] = cc;
        c[3] = d;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}
