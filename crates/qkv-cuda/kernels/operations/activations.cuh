// Activations and gates, and their derivatives.

#define ACTIVATION_NONE 0
#define ACTIVATION_RELU 1
#define ACTIVATION_GELU 2
#define ACTIVATION_GELU_TANH 3
#define ACTIVATION_TANH 4
#define ACTIVATION_SIGMOID 5

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float gelu_argument(float x) { return 0.7978845608028654f * (x + 0.044715f * x * x * x); }

// tanh of that. For 16-bit elements an absolute error of 2⁻²³ is none, and tanhf costs as much as the memory traffic.
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

