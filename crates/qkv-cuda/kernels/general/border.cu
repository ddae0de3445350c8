// What stands between tensors as they come and kernels that want them otherwise.

// d_q = q, whatever the strides of either: [B, H, N, D]. One thread an element.
extern "C" __global__ void pack(const __grid_constant__ Job job) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= i64(job.batch) * job.heads * job.n * job.d) return;
    i64 c = at % job.d, i = at / job.d % job.n, h = at / job.d / job.n % job.heads, b = at / job.d / job.n / job.heads;
    job.d_q.at[b * job.d_q.batch + h * job.d_q.head + i * job.d_q.row + c * job.d_q.col] =
        job.q.at[b * job.q.batch + h * job.q.head + i * job.q.row + c * job.q.col];
}

// picture = sinks, as f32: one a head.
extern "C" __global__ void widen_sinks(const __grid_constant__ Job job) {
    int h = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (h < job.heads) job.picture[h] = widen(job.sinks[h]);
}

// d_sinks = picture, rounded: one a head.
extern "C" __global__ void narrow_sinks(const __grid_constant__ Job job) {
    int h = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (h < job.heads) job.d_sinks[h] = narrow(job.picture[h]);
}
