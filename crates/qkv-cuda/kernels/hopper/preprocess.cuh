// Backward's preprocessing kernels, linear in the sequence: the largest key and value of each head; delta, base-2 lse
// and fixed-point scale of each row. They run for the first heads before the main kernel; for the others,
// overlapped_prep.cuh does the same beside it. Also the gradient of the sinks.
#pragma once

// Threads per row: 16 bytes each.
constexpr int LANES = HEAD_DIM / 8;
constexpr u32 INFINITE_BITS = ELEMENT == 0 ? 0x7f80 : 0x7c00;

// The number of keys of a sequence.
INLINE int sequence_keys(const HopperParams& params, int batch) {
    return LENGTHS ? min(params.m, params.lengths[batch]) : params.m;
}

// The largest magnitude in rows 128 · part … of a matrix, as bits, over the elements this thread reads. Rows from `end`
// on are masked but still multiplied: they count only if they are not finite.
INLINE u32 absmax_of(const u16* x, i64 stride, int columns, int part, int rows, int end) {
    int first = part * 128 + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u32 most = 0;
    auto settle = [&](int row, u32 here) {
        if (row < end || here >= INFINITE_BITS) most = max(most, here);
    };
    if (columns % 8 == 0 && stride % 8 == 0 && ((u64)x & 15) == 0) {
        // Load everything before using the first.
        uint4 y[LANES / 2];
#pragma unroll
        for (int r = 0; r < LANES / 2; r++) {
            int row = first + r * (256 / LANES);
            y[r] = row < rows && lane * 8 < columns ? *(const uint4*)(x + row * stride + lane * 8)
                                                    : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int r = 0; r < LANES / 2; r++) {
            u32 here = 0;
            // Magnitudes of 16-bit floats compare as integers.
            auto take = [&](u32 two) { here = max(here, max(two & 0x7fffu, two >> 16 & 0x7fffu)); };
            take(y[r].x), take(y[r].y), take(y[r].z), take(y[r].w);
            settle(first + r * (256 / LANES), here);
        }
        return most;
    }
    for (int row = first; row < min(rows, (part + 1) * 128); row += 256 / LANES) {
        u32 here = 0;
        for (int c = lane; c < columns; c += LANES) here = max(here, (u32)x[row * stride + c] & 0x7fffu);
        settle(row, here);
    }
    return most;
}

// The largest |k| and |v| of 128 keys of a head; ∞ for NaN.
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_absmax(const __grid_constant__ HopperParams params) {
    launch_dependents();
    int parts = div_up(params.m, 128), bh = blockIdx.x / parts, part = blockIdx.x - bh * parts;
    int batch = bh / params.heads_k, head = bh - batch * params.heads_k, end = sequence_keys(params, batch);
    int rows = min(params.m, div_up(end, 128) * 128);
    u32 key = absmax_of(params.k + batch * params.k_b + head * params.k_h, params.k_j, params.d, part, rows, end);
    u32 value = absmax_of(params.v + batch * params.v_b + head * params.v_h, params.v_j, params.dv, part, rows, end);
    // Both have 15 bits.
    u32 most = __reduce_max_sync(~0u, key) << 16 | __reduce_max_sync(~0u, value);
    __shared__ u32 seen[8];
    if (lane_id() == 0) seen[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x != 0) return;
    // Nothing here depends on the previous kernel, but the next one relies on it having ended.
    wait_on_dependency();
    key = value = 0;
    for (int w = 0; w < 8; w++) key = max(key, seen[w] >> 16), value = max(value, seen[w] & 0xffffu);
    params.absmax[(i64)bh * parts + part] =
        make_float2(widen((u16)min(key, INFINITE_BITS)), widen((u16)min(value, INFINITE_BITS)));
}

// The largest key and value of a head, in every lane of a warp. OVERLAPPED: written by a concurrent kernel.
template <bool OVERLAPPED> INLINE float2 head_absmax(const HopperParams& params, int bh_k) {
    float2 most = make_float2(0.f, 0.f);
#if !FREE_ORDER
    int parts = div_up(params.m, 128);
    const float2* absmax = params.absmax + (i64)bh_k * parts;
#pragma unroll 4
    for (int x = lane_id(); x < parts; x += 32) {
        float2 y = OVERLAPPED ? __ldcg(absmax + x) : absmax[x];
        most.x = fmaxf(most.x, y.x), most.y = fmaxf(most.y, y.y);
    }
    for (int x = 16; x > 0; x /= 2)
        most.x = fmaxf(most.x, __shfl_xor_sync(~0u, most.x, x)),
        most.y = fmaxf(most.y, __shfl_xor_sync(~0u, most.y, x));
#endif
    return most;
}
// The dot product of out and d_out, and the sum of squares of d_out, two elements and 16 bytes at a time. Rounding is
// explicit, so that heads preprocessed before and beside the main kernel have the same bits.
INLINE void accumulate_dot(float& sum, float& square, u32 x, u32 y) {
    float a = widen_low(y), b = widen_high(y);
    sum = __fadd_rn(sum, fmaf(widen_low(x), a, __fmul_rn(widen_high(x), b))),
    square = __fadd_rn(square, fmaf(a, a, __fmul_rn(b, b)));
}
INLINE void accumulate_dot(float& sum, float& square, uint4 x, uint4 y) {
    accumulate_dot(sum, square, x.x, y.x), accumulate_dot(sum, square, x.y, y.y), accumulate_dot(sum, square, x.z, y.z),
        accumulate_dot(sum, square, x.w, y.w);
}
// Eight elements one by one, `count` of them in range, for rows that cannot be vectorized. Same order, same bits.
INLINE uint4 load_elementwise(const u16* x, int count) {
    auto two = [&](int c) { return (c < count ? (u32)x[c] : 0) | (c + 1 < count ? (u32)x[c + 1] << 16 : 0); };
    return make_uint4(two(0), two(2), two(4), two(6));
}
// Statistics of a row: delta (less the gradient of lse), base-2 lse, fixed-point scale of dq.
INLINE void write_row_stats(const HopperParams& params, i64 to, float lse, float d_lse, float sum, float square,
                            float2 most) {
    params.lse_log2[to] = lse == MINUS_INFINITY ? -MINUS_INFINITY : lse * LOG2E;
    params.delta[to] = sum - d_lse;
    params.dq_scale[to] = dq_row_scale(square, params.dv, DROPOUT ? params.dropout_scale : 1.f, most, sum, d_lse);
}

// Row statistics of the first heads; base-2 lse is +∞ for rows that see nothing and for padding. Also zeros tickets and
// progress counters of all heads.
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_preprocess(const __grid_constant__ HopperParams params) {
    launch_dependents();
    int group = params.heads_q / params.heads_k, tickets = params.batch * params.heads_q * div_up(params.n, kBlockM),
        all = tickets + progress_len(params);
    for (int x = blockIdx.x * 256 + threadIdx.x; x < all; x += gridDim.x * 256)
        *(x < tickets ? params.tickets + x : params.progress + (x - tickets)) = 0;
    // First heads last: they are in L2 when the main kernel begins.
    int parts = div_up(params.n, ROW_STATS_PAD), at = blockIdx.x / parts, part = blockIdx.x - at * parts,
        bh = gridDim.x / parts - 1 - at, bh_k = bh / group;
    int batch = bh / params.heads_q, head = bh - batch * params.heads_q, lane = threadIdx.x % LANES;
    const u16* out = params.out + batch * params.out_b + head * params.out_h;
    const u16* d_out = params.d_out + batch * params.d_out_b + head * params.d_out_h;
    bool wide =
        params.dv % 8 == 0 &&
        (params.out_i | params.out_h | params.out_b | params.d_out_i | params.d_out_h | params.d_out_b) % 8 == 0 &&
        (((u64)params.out | (u64)params.d_out) & 15) == 0;
    // Half of the threads finish a row each.
    int mine = part * ROW_STATS_PAD + threadIdx.x;
    float lse = MINUS_INFINITY, d_lse = 0.f;
    if (threadIdx.x < ROW_STATS_PAD && mine < params.n) {
        lse = params.lse[(i64)bh * params.n + mine];
        if (params.d_lse) d_lse = params.d_lse[(i64)bh * params.n + mine];
    }
    __shared__ float2 sums[ROW_STATS_PAD];
    constexpr int EACH = 4; // rows in flight per thread
    for (int r = 0; r < ROW_STATS_PAD * LANES / 256; r += EACH) {
        uint4 x[EACH], y[EACH];
        int first = r * (256 / LANES) + threadIdx.x / LANES;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            int i = part * ROW_STATS_PAD + first + e * (256 / LANES);
            const u16 *a = out + i * params.out_i + lane * 8, *b = d_out + i * params.d_out_i + lane * 8;
            int count = i < params.n ? params.dv - lane * 8 : 0;
            x[e] = y[e] = make_uint4(0, 0, 0, 0);
            if (wide && count > 0) x[e] = *(const uint4*)a, y[e] = *(const uint4*)b;
            if (!wide) x[e] = load_elementwise(a, count), y[e] = load_elementwise(b, count);
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            float sum = 0.f, square = 0.f;
            accumulate_dot(sum, square, x[e], y[e]);
#pragma unroll
            for (int s = LANES / 2; s > 0; s /= 2)
                sum += __shfl_xor_sync(~0u, sum, s), square += __shfl_xor_sync(~0u, square, s);
            if (lane == 0) sums[first + e * (256 / LANES)] = make_float2(sum, square);
        }
    }
    __syncthreads();
    // The largest keys and values come from the previous kernel; everything before does not depend on it.
    wait_on_dependency();
    if (threadIdx.x >= ROW_STATS_PAD) return;
    float2 most = head_absmax<false>(params, bh_k), sum = sums[threadIdx.x];
    write_row_stats(params, (i64)bh * padded_len(params.n) + mine, lse, d_lse, sum.x, sum.y, most);
}

// The sink of a head takes the mass exp(sink − lse) of each row.
extern "C" __global__ void __launch_bounds__(256) sink_gradient(const __grid_constant__ HopperParams params) {
    int head = blockIdx.x, padded = div_up(params.n, ROW_STATS_PAD) * ROW_STATS_PAD;
    float sink = params.sinks[head] * LOG2E, sum = 0.f;
    for (int b = 0; b < params.batch; b++)
        for (int i = threadIdx.x; i < params.n; i += 256) {
            i64 at = ((i64)b * params.heads_q + head) * padded + i;
            sum -= exp2_fast(sink - params.lse_log2[at]) * params.delta[at];
        }
    __shared__ float sums[256];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int x = 128; x > 0; x /= 2) {
        if (threadIdx.x < x) sums[threadIdx.x] += sums[threadIdx.x + x];
        __syncthreads();
    }
    if (threadIdx.x == 0) params.d_sinks[head] = sums[0];
}

#if SEGMENTS
extern "C" __global__ void __launch_bounds__(256) segment_ranges(const __grid_constant__ HopperParams params) {
    compute_ranges<true, kBlockN, kBlockM>(params);
}
#endif
