// The pieces of a row's keys put together, always in their order: one warp a row.

extern "C" __global__ void __launch_bounds__(128) merge(const __grid_constant__ Job job) {
    i64 rows = i64(job.batch) * job.heads * job.n, row = i64(blockIdx.x) * 4 + threadIdx.x / 32;
    if (row >= rows) return;
    int lane = threadIdx.x % 32, i = int(row % job.n), h = int(row / job.n % job.heads), b = int(row / job.n / job.heads);
    float sink = job.sinks ? widen(job.sinks[h]) : -INFINITE;
    float most = sink;
    bool nan = false;
    for (int piece = lane; piece < job.pieces; piece += 32) {
        float lse = job.piece_lse[piece * rows + row];
        nan |= lse != lse;
        most = fmaxf(most, lse);
    }
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, by));
    nan = __ballot_sync(FULL_WARP, nan) != 0;
    float sum = 0.0f;
    for (int piece = lane; piece < job.pieces; piece += 32) {
        float lse = job.piece_lse[piece * rows + row];
        sum += lse == -INFINITE ? 0.0f : expf(lse - most);
    }
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, by);
    if (sink != -INFINITE) sum += expf(sink - most);
    float lse = nan ? sum : sum == 0.0f ? -INFINITE : most + logf(sum), entropy = 0.0f;
    T* out = job.out.at + b * job.out.batch + h * job.out.head + i * job.out.row;
    for (int c = lane * 4; c < job.dv; c += 128) {
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        int there = job.dv - c < 4 ? job.dv - c : 4;
        for (int piece = 0; piece < job.pieces; piece++) {
            float of_piece = job.piece_lse[piece * rows + row];
            if (of_piece == -INFINITE) continue;
            float share = expf(of_piece - lse);
            const float* from = job.piece_out + (piece * rows + row) * job.dv + c;
            if (there == 4 && job.dv % 4 == 0) {
                float4 four = *(const float4*)from;
                x[0] += share * four.x;
                x[1] += share * four.y;
                x[2] += share * four.z;
                x[3] += share * four.w;
            } else {
                for (int y = 0; y < there; y++) x[y] += share * from[y];
            }
        }
        for (int y = 0; y < there; y++) out[(c + y) * job.out.col] = narrow(x[y]);
    }
    if (lane != 0) return;
    job.lse[row] = lse;
    if (!job.entropy) return;
    for (int piece = 0; piece < job.pieces; piece++) {
        float of_piece = job.piece_lse[piece * rows + row];
        if (of_piece == -INFINITE) continue;
        entropy += expf(of_piece - lse) * (job.piece_entropy[piece * rows + row] - (of_piece - lse));
    }
    job.entropy[row] = entropy;
}
