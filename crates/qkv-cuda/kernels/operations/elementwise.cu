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

#define ACTIVATION_NONE 0
#define ACTIVATION_RELU 1
#define ACTIVATION_GELU 2
#define ACTIVATION_GELU_TANH 3
#define ACTIVATION_TANH 4
#define ACTIVATION_SIGMOID 5

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float gelu_argument(float x) { return 0.7978845608028654f * (x + 0.044715f * x * x * x); }

// tanh of that. Between 16-bit numbers an absolute error of 2⁻²³ is none, and tanhf costs as much as the memory.
__device__ __forceinline__ float gelu_tangent(float x) {
#if ELEMENT == F32
    return tanhf(gelu_argument(x));
#else
    return 1.0f - __fdividef(2.0f, exponential(2.0f * gelu_argument(x)) + 1.0f);
#endif
}

__device__ __forceinline__ float activated(float x, int activation) {
    switch (activation) {
        case ACTIVATION_RELU: return x > 0.0f ? x : 0.0f;
        case ACTIVATION_GELU: return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
        case ACTIVATION_GELU_TANH: return 0.5f * x * (1.0f + gelu_tangent(x));
        case ACTIVATION_TANH: return tanhf(x);
        case ACTIVATION_SIGMOID: return sigmoid(x);
        default: return x;
    }
}

// The derivative, from the input of GELU and from the output of the others.
__device__ __forceinline__ float derivative(float saved, int activation) {
    switch (activation) {
        case ACTIVATION_RELU: return saved > 0.0f ? 1.0f : 0.0f;
        case ACTIVATION_GELU: {
            float below = 0.5f * (1.0f + erff(saved * 0.7071067811865476f));
            return below + saved * 0.3989422804014327f * expf(-0.5f * saved * saved);
        }
        case ACTIVATION_GELU_TANH: {
            float y = gelu_tangent(saved);
            float slope = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * saved * saved);
            return 0.5f * (1.0f + y + saved * (1.0f - y * y) * slope);
        }
        case ACTIVATION_TANH: return 1.0f - saved * saved;
        case ACTIVATION_SIGMOID: return saved * (1.0f - saved);
        default: return 1.0f;
    }
}

// out = dropout(activation(x + bias)). Where `out` is elsewhere, x keeps the sum.
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

// y = x + dropout(y), or dropout(y) alone.
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

#define GATE_SILU 0
#define GATE_GELU 1
#define GATE_SIGMOID 2
#define GATE_GELU_TANH 3

// f(x), and in `slope` its derivative.
__device__ __forceinline__ float gate_of(float x, int of, float* slope) {
    if (of == GATE_GELU || of == GATE_GELU_TANH) {
        int activation = of == GATE_GELU ? ACTIVATION_GELU : ACTIVATION_GELU_TANH;
        *slope = derivative(x, activation);
        return activated(x, activation);
    }
    float open = sigmoid(x);
    if (of == GATE_SIGMOID) {
        *slope = open * (1.0f - open);
        return open;
    }
    *slope = open * (1.0f + x * (1.0f - open));
    return x * open;
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

// Rotates the pairs (x[i], x[i + half]) of each head by the angles of row r mod length; `sign` −1 turns back.
extern "C" __global__ void rotate(T* x, const float* cosines, const float* sines, u32 rows, u32 heads, u32 half,
                                  u32 length, float sign) {
    FOR_EACH(rows * heads * half) {
        u32 i = at % half, head = at / half % heads, row = at / half / heads;
        T* first = x + (u64(row) * heads + head) * 2 * half + i;
        float a = widen(first[0]), b = widen(first[half]);
        float c = cosines[row % length * half + i], s = sign * sines[row % length * half + i];
        first[0] = narrow(a * c - b * s);
        first[half] = narrow(b * c + a * s);
    }
}
