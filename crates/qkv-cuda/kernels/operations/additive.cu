// Additive attention (Bahdanau et al. 2014) of one head: the score of query i and key j is v · tanh(q_i + k_j), over
// the first lengths[b] keys. Queries and keys are projected to `width`; weights are kept for the backward pass. Hard
// attention takes the value of one key: that of the largest score, or one that is drawn.

// Gumbel noise, the same as on the CPU: the key with the largest sum of score and noise is a draw from the softmax.
__device__ __forceinline__ float gumbel(u64 seed, u32 b, u32 i, u32 j) {
    u32 words[4] = {j / 4, i, 0, b};
    philox(words, seed ^ (0xffffffffull << 32));
    return float(-log(-log((double(words[j % 4]) + 0.5) / 4294967296.0)));
}

// One block per query. weights: [B, N, M], 0 beyond the length; a query without keys gives zeros. chosen: [B, N], m if
// there is no key; null for soft attention.
extern "C" __global__ void additive_attention(const T* q, const T* k, const T* values, const float* v,
                                              const u32* lengths, T* out, float* weights, u32* chosen, u32 n, u32 m,
                                              u32 width, u32 value_width, u32 sample, u32 seed_low, u32 seed_high) {
    __shared__ float scratch[32];
    u32 row = blockIdx.x, b = row / n, count = lengths ? lengths[b] : m;
    const T* query = q + u64(row) * width;
    float* p = weights + u64(row) * m;
    u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (u32 j = threadIdx.x / 32; j < count; j += warps) {
        const T* key = k + (u64(b) * m + j) * width;
        float score = 0.0f;
        for (u32 a = lane; a < width; a += 32) score += v[a] * tanhf(widen(query[a]) + widen(key[a]));
        score = warp_sum(score);
        if (lane == 0) p[j] = score;
    }
    __syncthreads();
    u32 choice = m;
    if (chosen) {
        u64 seed = u64(seed_high) << 32 | seed_low;
        float best = -INFINITE, at = INFINITE;
        for (u32 j = threadIdx.x; j < count; j += blockDim.x) {
            float score = p[j] + (sample ? gumbel(seed, b, row % n, j) : 0.0f);
            if (score > best) best = score, at = float(j);
        }
        // Of equal scores, the first.
        bool is_best = best == block_max(best, scratch);
        float first = -block_max(is_best ? -at : -INFINITE, scratch);
        choice = count > 0 && first < float(m) ? u32(first) : m;
        if (threadIdx.x == 0) chosen[row] = choice;
    }
    float most = -INFINITE, mass = 0.0f;
    for (u32 j = threadIdx.x; j < count; j += blockDim.x) most = p[j] > most ? p[j] : most;
    most = block_max(most, scratch);
    for (u32 j = threadIdx.x; j < count; j += blockDim.x) mass += expf(p[j] - most);
    mass = block_sum(mass, scratch);
    for (u32 j = threadIdx.x; j < m; j += blockDim.x) p[j] = j < count ? expf(p[j] - most) / mass : 0.0f;
    __syncthreads();
    for (u32 c = threadIdx.x; c < value_width; c += blockDim.x) {
        float sum = 0.0f;
        if (choice < m) sum = widen(values[(u64(b) * m + choice) * value_width + c]);
        else if (!chosen)
            for (u32 j = 0; j < count; j++) sum += p[j] * widen(values[(u64(b) * m + j) * value_width + c]);
        out[u64(row) * value_width + c] = narrow(sum);
    }
}

// One block per query: d_scores, [B, N, M], d_q, and its contribution to the gradient of v, [B·N, width]. If there are
// gradients of the log-probabilities of choices, d_chosen [B, N], scores get only those.
extern "C" __global__ void additive_gradient_queries(const T* q, const T* k, const T* values, const float* v,
                                                     const u32* lengths, const float* weights, const T* d_out,
                                                     const u32* chosen, const float* d_chosen, float* d_scores,
                                                     T* d_q, float* partial, u32 n, u32 m, u32 width,
                                                     u32 value_width) {
    __shared__ float scratch[32];
    u32 row = blockIdx.x, b = row / n, count = lengths ? lengths[b] : m;
    const T* query = q + u64(row) * width;
    const T* upstream = d_out + u64(row) * value_width;
    const float* p = weights + u64(row) * m;
    float* ds = d_scores + u64(row) * m;
    u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (u32 j = threadIdx.x / 32; j < count && !d_chosen; j += warps) {
        const T* value = values + (u64(b) * m + j) * value_width;
        float product = 0.0f;
        for (u32 c = lane; c < value_width; c += 32) product += widen(upstream[c]) * widen(value[c]);
        product = warp_sum(product);
        if (lane == 0) ds[j] = product;
    }
    __syncthreads();
    float delta = 0.0f;
    for (u32 j = threadIdx.x; j < count && !d_chosen; j += blockDim.x) delta += p[j] * ds[j];
    delta = block_sum(delta, scratch);
    for (u32 j = threadIdx.x; j < m; j += blockDim.x) {
        float d = d_chosen ? d_chosen[row] * ((j == chosen[row] ? 1.0f : 0.0f) - p[j]) : p[j] * (ds[j] - delta);
        ds[j] = j < count ? d : 0.0f;
    }
    __syncthreads();
    for (u32 a = threadIdx.x; a < width; a += blockDim.x) {
        float of_q = 0.0f, of_v = 0.0f;
        for (u32 j = 0; j < count; j++) {
            float t = tanhf(widen(query[a]) + widen(k[(u64(b) * m + j) * width + a]));
            of_q += ds[j] * (1.0f - t * t);
            of_v += ds[j] * t;
        }
        d_q[u64(row) * width + a] = narrow(of_q * v[a]);
        partial[u64(row) * width + a] = of_v;
    }
}

// One block per key: d_k and d_values.
extern "C" __global__ void additive_gradient_keys(const T* q, const T* k, const float* v, const float* weights,
                                                  const T* d_out, const u32* chosen, const float* d_scores, T* d_k,
                                                  T* d_values, u32 n, u32 m, u32 width, u32 value_width) {
    u32 key = blockIdx.x, b = key / m, j = key % m;
    for (u32 a = threadIdx.x; a < width; a += blockDim.x) {
        float sum = 0.0f, at_key = widen(k[u64(key) * width + a]);
        for (u32 i = 0; i < n; i++) {
            float t = tanhf(widen(q[(u64(b) * n + i) * width + a]) + at_key);
            sum += d_scores[(u64(b) * n + i) * m + j] * (1.0f - t * t);
        }
        d_k[u64(key) * width + a] = narrow(sum * v[a]);
    }
    for (u32 c = threadIdx.x; c < value_width; c += blockDim.x) {
        float sum = 0.0f;
        for (u32 i = 0; i < n; i++) {
            u64 row = u64(b) * n + i;
            float weight = chosen ? (chosen[row] == j ? 1.0f : 0.0f) : weights[row * m + j];
            sum += weight * widen(d_out[row * value_width + c]);
        }
        d_values[u64(key) * value_width + c] = narrow(sum);
    }
}
