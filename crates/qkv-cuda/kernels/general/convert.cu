// Copies to aligned strides, and conversions of sinks between the element type and f32.

// d_q = q for any strides, [B, H, N, D]. One thread per element.
extern "C" __global__ void pack(const __grid_constant__ GeneralParams params) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= i64(params.batch) * params.heads * params.n * params.d) return;
    i64 c = at % params.d, i = at / params.d % params.n, h = at / params.d / params.n % params.heads,
        b = at / params.d / params.n / params.heads;
    params.d_q.data[b * params.d_q.batch + h * params.d_q.head + i * params.d_q.row + c * params.d_q.col] =
        params.q.data[b * params.q.batch + h * params.q.head + i * params.q.row + c * params.q.col];
}

// result = sinks in f32, [H].
extern "C" __global__ void widen_sinks(const __grid_constant__ GeneralParams params) {
    int h = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (h < params.heads) params.result[h] = widen(params.sinks[h]);
}

// d_sinks = result, rounded, [H].
extern "C" __global__ void narrow_sinks(const __grid_constant__ GeneralParams params) {
    int h = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (h < params.heads) params.d_sinks[h] = narrow(params.result[h]);
}
