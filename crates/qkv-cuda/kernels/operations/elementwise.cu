// Conversions, sums, activations, dropout, gates and rotations: each element once.

extern "C" __global__ void from_floats(const float* x, T* y, u32 n) {
    FOR_EACH(n) y[at] = narrow(x[at]);
}

extern "C" __global__ void add(T* sum, const T* more, u32 n) {
    FOR_EIGHTS(1, n) {
        float x[EIGHT], y[EIGHT];
        load_eight(sum, col, n, x);
        load_eight(more, col, n, y);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) x[at] += y[at];
        store_eight(sum, col, n, x);
    }
}

extern "C" __global__ void add_floats(float* sum, const float* more, u32 n) {
    FOR_EACH(n) sum[at] += more[at];
}

// The same, of activations into f32.
extern "C" __global__ void add_widened(float* sum, const T* more, u32 n) {
    FOR_EACH(n) sum[at] += widen(more[at]);
}

extern "C" __global__ void scale_all(T* x, float factor, u32 n) {
    FOR_EACH(n) x[at] = narrow(widen(x[at]) * factor);
}

// Sequence b, of `each` elements, times factors[b].
extern "C" __global__ void scale_sequences(T* x, const float* factors, u32 each, u32 n) {
    FOR_EACH(n) x[at] = narrow(widen(x[at]) * factors[at / each]);
}

// out = dropout(activation(x + bias)). If `out` is not x, x keeps the sum.
extern "C" __global__ void activate(T* x, T* out, const float* bias, u32 rows, int width, int activation,
                                    Dropout dropout) {
    FOR_EIGHTS(rows, width) {
        float y[EIGHT], b[EIGHT];
        load_eight(x + u64(row) * width, col, width, y);
        if (bias) {
            load_floats(bias, col, width, b);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) y[at] += b[at];
        }
        if (out != x && bias) store_eight(x + u64(row) * width, col, width, y);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) y[at] = activated(y[at], activation);
        drop_eight(dropout, row, col, y);
        store_eight(out + u64(row) * width, col, width, y);
    }
}

// gradient ∘ dropout ∘ derivative, in place.
extern "C" __global__ void activation_gradient(T* gradient, const T* saved, u32 rows, int width, int activation,
                                               Dropout dropout) {
    FOR_EIGHTS(rows, width) {
        float g[EIGHT], s[EIGHT];
        load_eight(gradient + u64(row) * width, col, width, g);
        drop_eight(dropout, row, col, g);
        if (saved) {
            load_eight(saved + u64(row) * width, col, width, s);
            // The output before dropout.
            bool scaled = activation == ACTIVATION_TANH || activation == ACTIVATION_SIGMOID;
            float unscaled = scaled ? 1.0f / dropout.scale : 1.0f;
#pragma unroll
            for (int at = 0; at < EIGHT; at++) g[at] *= derivative(s[at] * unscaled, activation);
        }
        store_eight(gradient + u64(row) * width, col, width, g);
    }
}

// y = x + dropout(y), or just dropout(y).
extern "C" __global__ void residual(T* y, const T* x, u32 rows, int width, Dropout dropout) {
    FOR_EIGHTS(rows, width) {
        float a[EIGHT], b[EIGHT];
        load_eight(y + u64(row) * width, col, width, a);
        drop_eight(dropout, row, col, a);
        if (x) {
            load_eight(x + u64(row) * width, col, width, b);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) a[at] += b[at];
        }
        store_eight(y + u64(row) * width, col, width, a);
    }
}

// y = f(gate) · up.
extern "C" __global__ void gated(const T* gate, const T* up, T* y, u32 n, int of) {
    in_turn();
    FOR_EIGHTS(1, n) {
        float g[EIGHT], u[EIGHT], slope;
        load_eight(gate, col, n, g);
        load_eight(up, col, n, u);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) u[at] *= gate_of(g[at], of, &slope);
        store_eight(y, col, n, u);
    }
}

// Replaces the gradient of the output by that of `up` and writes that of `gate`.
extern "C" __global__ void gated_gradient(T* gradient, T* d_gate, const T* gate, const T* up, u32 n, int of) {
    FOR_EIGHTS(1, n) {
        float d[EIGHT], g[EIGHT], u[EIGHT], slope;
        load_eight(gradient, col, n, d);
        load_eight(gate, col, n, g);
        load_eight(up, col, n, u);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) {
            float open = gate_of(g[at], of, &slope);
            u[at] *= d[at] * slope;
            d[at] *= open;
        }
        store_eight(d_gate, col, n, u);
        store_eight(gradient, col, n, d);
    }
}

// Rotates the pairs (x[i], x[i + half]) of each head by the angles of row r mod length; a `sign` of −1 rotates back.
extern "C" __global__ void rotate(T* x, const float* cosines, const float* sines, u32 rows, u32 heads, u32 half,
                                  u32 length, float sign) {
    FOR_EACH(rows * heads * half) {
        u32 i = at % half, head = at / half % heads, row = at / half / heads;
        T* first = x + (u64(row) * heads + head) * 2 * half + i;
        float a = widen(first[0]), b = widen(first[half]);
        float c = cosines[row % length * half + i], s = sign * sines[row % length * half + i];
        // As `turn` of few_rows.cuh does it, so that both have the same bits.
        first[0] = narrow(fmaf(a, c, -(b * s)));
        first[half] = narrow(fmaf(b, c, a * s));
    }
}
