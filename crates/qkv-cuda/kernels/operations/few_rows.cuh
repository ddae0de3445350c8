// What products of few rows do before and after their sums, however their weights are stored: the norm of a row, bias
// and residual, gates, and rotated pairs appended to a cache.

// Normalizes a row with a warp: layer norm or, if not CENTERED, RMS norm. `to` may be `from`. Returns the mean and the
// inverse deviation.
template <bool CENTERED>
__device__ __forceinline__ float2 normalize_row(const T* from, T* to, const float* gain, const float* bias, int width,
                                                float epsilon) {
    int lane = threadIdx.x % 32;
    float v[EIGHT], g[EIGHT], b[EIGHT];
    float mean = 0.0f, square = 0.0f;
    if constexpr (CENTERED) {
        float sum = 0.0f;
        for (int col = lane * EIGHT; col < width; col += 32 * EIGHT) {
            load_eight(from, col, width, v);
#pragma unroll
            for (int at = 0; at < EIGHT; at++) sum += v[at];
        }
        mean = warp_sum(sum) / width;
    }
    for (int col = lane * EIGHT; col < width; col += 32 * EIGHT) {
        load_eight(from, col, width, v);
#pragma unroll
        for (int at = 0; at < EIGHT; at++)
            if (!CENTERED || col + at < width) square += (v[at] - mean) * (v[at] - mean);
    }
    float inverse = 1.0f / sqrtf(warp_sum(square) / width + epsilon);
    for (int col = lane * EIGHT; col < width; col += 32 * EIGHT) {
        load_eight(from, col, width, v);
        load_floats(gain, col, width, g);
        if constexpr (CENTERED) load_floats(bias, col, width, b);
#pragma unroll
        for (int at = 0; at < EIGHT; at++) {
            if constexpr (CENTERED) v[at] = (v[at] - mean) * inverse * g[at] + b[at];
            else v[at] *= inverse * g[at];
        }
        store_eight(to, col, width, v);
    }
    return make_float2(mean, inverse);
}

// Rotates the pair (x[i], x[i + half]) of a head by an angle. The fused multiply-add is written out, so that every
// kernel that calls this has the same bits.
__device__ __forceinline__ void turn(T a, T b, T* to, u32 half, float cosine, float sine) {
    to[0] = narrow(fmaf(widen(a), cosine, -(widen(b) * sine)));
    to[half] = narrow(fmaf(widen(b), cosine, widen(a) * sine));
}

// A norm of the rows before a product: layer norm, RMS norm if there is no bias, none if there is no gain.
struct RowNorm {
    const float *gain, *bias;
    float epsilon;
};

// Finishes an output of a product: y[r, o] = sum + bias[o] + residual[r, o].
__device__ __forceinline__ void end_output(float sum, const T* bias, const T* residual, T* y, u32 row, int output,
                                           int outputs) {
    u64 at = u64(row) * outputs + output;
    if (bias) sum += widen(bias[output]);
    if (residual) sum += widen(residual[at]);
    y[at] = narrow(sum);
}

// Finishes an output of a gated layer: y[r, o] = f(gate) · up, both rounded first.
__device__ __forceinline__ void end_gated(const float (&sums)[2], const T* const (&bias)[2], T* y, u32 row, int output,
                                          int outputs, int of) {
    float both[2], slope;
#pragma unroll
    for (int m = 0; m < 2; m++) both[m] = widen(narrow(bias[m] ? sums[m] + widen(bias[m][output]) : sums[m]));
    y[u64(row) * outputs + output] = narrow(both[1] * gate_of(both[0], of, &slope));
}

// Finishes two outputs of a token's queries, keys or values, as `append_at` does: `half` is the distance of two that
// are rotated together.
struct PairEnd {
    bool turns;
    int half;
    u32 position = 0;
    float cosine = 1.0f, sine = 0.0f;

    // Reads the angle of the first of them.
    __device__ __forceinline__ void prepare(u32 at, const float* cosines, const float* sines, int output) {
        position = at;
        if (!turns) return;
        cosine = cosines[position * half + output % (2 * half)];
        sine = sines[position * half + output % (2 * half)];
    }

    // Stores them, `apart` from each other, in the row `to`.
    __device__ __forceinline__ void store(float a, float b, const T* bias, T* to, int output, int apart) const {
        if (bias) a += widen(bias[output]), b += widen(bias[output + apart]);
        if (turns) {
            turn(narrow(a), narrow(b), to + output, half, cosine, sine);
        } else {
            to[output] = narrow(a);
            to[output + apart] = narrow(b);
        }
    }
};

