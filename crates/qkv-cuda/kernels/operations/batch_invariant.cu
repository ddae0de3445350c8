// Products for batch-invariant inference: the order of a row's sum depends on the width alone, not on the number of
// rows, and is that of the kernels for few rows.

// Outputs of a warp of `many_rows`.
#define OUTPUTS_EACH 4
// Its blocks on a multiprocessor.
#define MANY_ROWS_BLOCKS 2

// Adds up 2 · BY sums over the lanes of a warp that differ in the bits of BY and below; each gets the sum with the
// number that these bits are. Lanes are added in the pairs of `warp_sum`, so the bits are the same, but a lane keeps
// only half of its sums at each level.
template <int BY> __device__ __forceinline__ float scattered_warp_sum(const float (&sums)[2 * BY]) {
    bool upper = threadIdx.x & BY;
    float kept[BY];
#pragma unroll
    for (int at = 0; at < BY; at++) {
        float mine = upper ? sums[at + BY] : sums[at], given = upper ? sums[at] : sums[at + BY];
        kept[at] = mine + __shfl_xor_sync(FULL_WARP, given, BY);
    }
    if constexpr (BY == 1) return kept[0];
    else return scattered_warp_sum<BY / 2>(kept);
}

// y[r, o] = Σᵢ x[r, i] · w[o, i] + bias[o] + residual[r, o] for any number of rows, which are `x_stride` and `y_stride`
// elements apart: a block for eight rows. Blocks that read the same weights run side by side.
extern "C" __global__ void __launch_bounds__(256, MANY_ROWS_BLOCKS)
    many_rows(const T* x, const T* w, const T* bias, T* y, const T* residual, u32 rows, int inner, int outputs,
              u32 x_stride, u32 y_stride) {
    u32 groups = (rows + 7) / 8, first = blockIdx.x % groups * 8, here = rows - first < 8 ? rows - first : 8;
    int output = int(blockIdx.x / groups * (blockDim.x / 32) + threadIdx.x / 32) * OUTPUTS_EACH;
    const T* weights[OUTPUTS_EACH];
#pragma unroll
    for (int at = 0; at < OUTPUTS_EACH; at++) weights[at] = w + u64(output + at < outputs ? output + at : 0) * inner;
    float sums[OUTPUTS_EACH][8] = {}, all[OUTPUTS_EACH * 8];
    lane_products<8, OUTPUTS_EACH>(x + u64(first) * x_stride, x_stride, {nullptr, nullptr, 0.0f}, weights,
                                   output < outputs, here, inner, sums, [] {});
#pragma unroll
    for (int at = 0; at < OUTPUTS_EACH * 8; at++) all[at] = sums[at / 8][at % 8];
    float sum = scattered_warp_sum<16>(all);
    u32 row = threadIdx.x % 8;
    output += threadIdx.x % 32 / 8;
    if (row >= here || output >= outputs) return;
    y += u64(first) * y_stride;
    if (residual) residual += u64(first) * y_stride;
    end_output(sum, bias, residual, y, row, output, int(y_stride));
}

// The same for rows that are not aligned to 16 bytes: a thread for each element.
extern "C" __global__ void unaligned_rows(const T* x, const T* w, const T* bias, T* y, const T* residual, u32 rows,
                                          int inner, int outputs, u32 x_stride, u32 y_stride) {
    in_turn();
    FOR_EACH(rows * u32(outputs)) {
        u32 row = at / u32(outputs);
        int output = int(at % u32(outputs));
        float sum = 0.0f;
        for (int i = 0; i < inner; i++)
            sum = fmaf(widen(x[u64(row) * x_stride + i]), widen(w[u64(output) * inner + i]), sum);
        end_output(sum, bias, residual, y, row, output, int(y_stride));
    }
}
