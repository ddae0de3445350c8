// The optimizer over all parameters at once: one block per slice of a parameter. Norm, clipping and the step follow
// each other on the device; the host reads the norm afterwards.

// Consecutive elements of one parameter. `half` is its copy in T, for products; null if there is none.
struct Slice {
    float* value;
    const float* gradient;
    float* first;
    float* second;
    T* half;
    u32 len;
    // Factor of the learning rate, and weight decay.
    float rate;
    float decay;
};

// What changes from step to step.
struct StepFactors {
    float rate;      // of the schedule
    float mean;      // 1 / (1 − β₁ᵗ)
    float root;      // 1 / √(1 − β₂ᵗ)
    float beta1;
    float beta2;
    float epsilon;
    float clip;      // 0: none
};

// squares[s] = Σ gradient² of slice s.
extern "C" __global__ void gradient_squares(const Slice* slices, double* squares) {
    __shared__ double sums[256];
    Slice slice = slices[blockIdx.x];
    double sum = 0.0;
    for (u32 at = threadIdx.x; at < slice.len; at += blockDim.x)
        sum += double(slice.gradient[at]) * double(slice.gradient[at]);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    double total = 0.0;
    for (u32 at = 0; at < blockDim.x; at++) total += sums[at];
    squares[blockIdx.x] = total;
}

// *norm = √Σ squares: one block of 256 threads.
extern "C" __global__ void gradient_norm(const double* squares, double* norm, u32 count) {
    __shared__ double sums[256];
    u32 each = (count + 255) / 256;
    double sum = 0.0;
    for (u32 at = threadIdx.x * each; at < count && at < (threadIdx.x + 1) * each; at++) sum += squares[at];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    double total = 0.0;
    for (int at = 0; at < 256; at++) total += sums[at];
    *norm = sqrt(total);
}

// One step of AdamW along the clipped gradient. A norm that is not finite changes nothing.
extern "C" __global__ void adamw(const Slice* slices, const StepFactors* factors, const double* norm) {
    Slice slice = slices[blockIdx.x];
    StepFactors f = *factors;
    float length = float(*norm);
    if (!is_finite(length)) return;
    float factor = f.clip > 0.0f && length > f.clip ? f.clip / length : 1.0f;
    float rate = f.rate * slice.rate, keep = 1.0f - rate * slice.decay;
    for (u32 at = threadIdx.x; at < slice.len; at += blockDim.x) {
        float g = slice.gradient[at] * factor;
        float m = slice.first[at] * f.beta1 + g * (1.0f - f.beta1);
        float v = slice.second[at] * f.beta2 + g * g * (1.0f - f.beta2);
        float x = slice.value[at] * keep - rate * f.mean * m / (sqrtf(v) * f.root + f.epsilon);
        slice.first[at] = m;
        slice.second[at] = v;
        slice.value[at] = x;
        if (slice.half) slice.half[at] = narrow(x);
    }
}

// own = decay · own + (1 − decay) · other.
extern "C" __global__ void moving_average(float* own, const float* other, float decay, u32 n) {
    FOR_EACH(n) own[at] = decay * own[at] + (1.0f - decay) * other[at];
}
