// One step of the gated recurrent unit, for all sequences, and its gradient.

// x: [B, N, 3C] at step `step`; recurrent: [B, 3C]; gates: [B, 4C] (r, z, n and W_n h + b_n); before, after: [B, C];
// out: [B, N, C]. A sequence that has ended keeps its state and gives zeros.
extern "C" __global__ void gru_cell(const T* x, const T* recurrent, const float* bias, const T* before, T* gates,
                                    T* after, T* out, const u32* lengths, u32 batch, u32 steps, u32 step, u32 width) {
    FOR_EACH(batch * width) {
        u32 b = at / width, j = at % width;
        u64 place = (u64(b) * steps + step) * width + j;
        if (lengths && step >= lengths[b]) {
            after[at] = before[at];
            out[place] = narrow(0.0f);
            continue;
        }
        const T* in = x + (u64(b) * steps + step) * 3 * width + j;
        const T* h = recurrent + u64(b) * 3 * width + j;
        float r = sigmoid(widen(in[0]) + widen(h[0]) + bias[j]);
        float z = sigmoid(widen(in[width]) + widen(h[width]) + bias[width + j]);
        float inner = widen(h[2 * width]) + bias[2 * width + j];
        float n = tanhf(widen(in[2 * width]) + r * inner);
        T* g = gates + u64(b) * 4 * width + j;
        g[0] = narrow(r);
        g[width] = narrow(z);
        g[2 * width] = narrow(n);
        g[3 * width] = narrow(inner);
        T state = narrow((1.0f - z) * n + z * widen(before[at]));
        after[at] = state;
        out[place] = state;
    }
}

// d_h: [B, C], first the gradient of the state after the step, and then that of the state before it, without the path
// through the product, which follows from d_recurrent: [B, 3C].
extern "C" __global__ void gru_cell_gradient(const T* upstream, T* d_h, const T* before, const T* gates, T* d_x,
                                             T* d_recurrent, const u32* lengths, u32 batch, u32 steps, u32 step,
                                             u32 width) {
    FOR_EACH(batch * width) {
        u32 b = at / width, j = at % width;
        T* dx = d_x + (u64(b) * steps + step) * 3 * width + j;
        T* dr = d_recurrent + u64(b) * 3 * width + j;
        if (lengths && step >= lengths[b]) {
            for (u32 part = 0; part < 3; part++) dx[part * width] = dr[part * width] = narrow(0.0f);
            continue;
        }
        const T* g = gates + u64(b) * 4 * width + j;
        float r = widen(g[0]), z = widen(g[width]), n = widen(g[2 * width]), inner = widen(g[3 * width]);
        float d = widen(d_h[at]) + widen(upstream[(u64(b) * steps + step) * width + j]);
        float d_n = d * (1.0f - z) * (1.0f - n * n), d_r = d_n * inner * r * (1.0f - r);
        float d_z = d * (widen(before[at]) - n) * z * (1.0f - z);
        dx[0] = dr[0] = narrow(d_r);
        dx[width] = dr[width] = narrow(d_z);
        dx[2 * width] = narrow(d_n);
        dr[2 * width] = narrow(d_n * r);
        d_h[at] = narrow(d * z);
    }
}
