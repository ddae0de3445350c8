// Images, [B, H, W, C]: windows side by side, which make a convolution a matrix product, the maximum over windows, and
// group normalization. Gradients are sums over the windows that see a pixel, in a fixed order.

struct Windows2d {
    u32 kernel[2], stride[2], before[2];
    u32 rows, columns, height, width;
};

// y: [B, rows, columns, K·L·C], zeros beyond the image. `count` is B · rows · columns · K · L.
extern "C" __global__ void unfold2d(const T* x, T* y, Windows2d w, u32 count, int channels) {
    FOR_EIGHTS(count, channels) {
        u32 kx = row % w.kernel[1], ky = row / w.kernel[1] % w.kernel[0], window = row / (w.kernel[0] * w.kernel[1]);
        u32 c = window % w.columns, r = window / w.columns % w.rows, b = window / (w.columns * w.rows);
        int from_y = int(r * w.stride[0] + ky) - int(w.before[0]);
        int from_x = int(c * w.stride[1] + kx) - int(w.before[1]);
        float v[EIGHT] = {};
        if (from_y >= 0 && from_y < int(w.height) && from_x >= 0 && from_x < int(w.width))
            load_eight(x + ((u64(b) * w.height + from_y) * w.width + from_x) * channels, col, channels, v);
        store_eight(y + u64(row) * channels, col, channels, v);
    }
}

// `count` is B · H · W; with `add`, the gradient is added to d_x.
extern "C" __global__ void unfold2d_gradient(const T* d_y, T* d_x, Windows2d w, u32 count, int channels, int add) {
    FOR_EIGHTS(count, channels) {
        u32 x = row % w.width, y = row / w.width % w.height, b = row / (w.width * w.height);
        float v[EIGHT], sum[EIGHT] = {};
        if (add) load_eight(d_x + u64(row) * channels, col, channels, sum);
        for (u32 ky = 0; ky < w.kernel[0]; ky++) {
            u32 down = y + w.before[0] - ky;
            if (y + w.before[0] < ky || down % w.stride[0] || down / w.stride[0] >= w.rows) continue;
            for (u32 kx = 0; kx < w.kernel[1]; kx++) {
                u32 right = x + w.before[1] - kx;
                if (x + w.before[1] < kx || right % w.stride[1] || right / w.stride[1] >= w.columns) continue;
                u64 window = (u64(b) * w.rows + down / w.stride[0]) * w.columns + right / w.stride[1];
                u64 from = (window * w.kernel[0] + ky) * w.kernel[1] + kx;
                load_eight(d_y + from * channels, col, channels, v);
#pragma unroll
                for (int at = 0; at < EIGHT; at++) sum[at] += v[at];
            }
        }
        store_eight(d_x + u64(row) * channels, col, channels, sum);
    }
}

// places: for each output, the place of its maximum in its image; the first of equal ones.
extern "C" __global__ void max_pool2d(const T* x, T* y, u32* places, Windows2d w, u32 count, u32 channels) {
    FOR_EACH(count) {
        u32 c = at % channels, column = at / channels % w.columns, r = at / channels / w.columns % w.rows;
        u32 b = at / channels / w.columns / w.rows;
        const T* image = x + u64(b) * w.height * w.width * channels;
        float best = -INFINITE;
        u32 place = 0;
        bool found = false;
        for (u32 ky = 0; ky < w.kernel[0]; ky++)
            for (u32 kx = 0; kx < w.kernel[1]; kx++) {
                int from_y = int(r * w.stride[0] + ky) - int(w.before[0]);
                int from_x = int(column * w.stride[1] + kx) - int(w.before[1]);
                if (from_y < 0 || from_y >= int(w.height) || from_x < 0 || from_x >= int(w.width)) continue;
                u32 from = (u32(from_y) * w.width + u32(from_x)) * channels + c;
                float v = widen(image[from]);
                if (!found || v > best) {
                    best = v;
                    place = from;
                }
                found = true;
            }
        y[at] = narrow(best);
        places[at] = place;
    }
}

extern "C" __global__ void max_pool2d_gradient(const T* d_y, const u32* places, T* d_x, Windows2d w, u32 count,
                                               u32 channels, int add) {
    FOR_EACH(count) {
        u32 inside = at % (w.height * w.width * channels), b = at / (w.height * w.width * channels);
        u32 c = inside % channels, x = inside / channels % w.width, y = inside / channels / w.width;
        float sum = add ? widen(d_x[at]) : 0.0f;
        for (u32 ky = 0; ky < w.kernel[0]; ky++) {
            u32 down = y + w.before[0] - ky;
            if (y + w.before[0] < ky || down % w.stride[0] || down / w.stride[0] >= w.rows) continue;
            for (u32 kx = 0; kx < w.kernel[1]; kx++) {
                u32 right = x + w.before[1] - kx;
                if (x + w.before[1] < kx || right % w.stride[1] || right / w.stride[1] >= w.columns) continue;
                u64 window = (u64(b) * w.rows + down / w.stride[0]) * w.columns + right / w.stride[1];
                if (places[window * channels + c] == inside) sum += widen(d_y[window * channels + c]);
            }
        }
        d_x[at] = narrow(sum);
    }
}

// One block per group of channels of an image. moments: [B, groups, 2].
extern "C" __global__ void group_norm(const T* x, T* y, float* moments, const float* gain, const float* bias,
                                      u32 pixels, u32 channels, u32 groups, float epsilon) {
    __shared__ float scratch[32];
    u32 b = blockIdx.x / groups, group = blockIdx.x % groups, each = channels / groups, count = pixels * each;
    const T* image = x + u64(b) * pixels * channels + group * each;
    T* to = y + u64(b) * pixels * channels + group * each;
    float sum = 0.0f, square = 0.0f;
    for (u32 at = threadIdx.x; at < count; at += blockDim.x) sum += widen(image[u64(at / each) * channels + at % each]);
    float mean = block_sum(sum, scratch) / count;
    for (u32 at = threadIdx.x; at < count; at += blockDim.x) {
        float v = widen(image[u64(at / each) * channels + at % each]) - mean;
        square += v * v;
    }
    float inverse = 1.0f / sqrtf(block_sum(square, scratch) / count + epsilon);
    for (u32 at = threadIdx.x; at < count; at += blockDim.x) {
        u64 place = u64(at / each) * channels + at % each;
        u32 c = group * each + at % each;
        to[place] = narrow((widen(image[place]) - mean) * inverse * gain[c] + bias[c]);
    }
    if (threadIdx.x == 0) {
        moments[2 * blockIdx.x] = mean;
        moments[2 * blockIdx.x + 1] = inverse;
    }
}

// partial: [B, 2, channels], the contribution of each image to the gradients of gain and bias.
extern "C" __global__ void group_norm_gradient(const T* x, const T* d_y, T* d_x, const float* moments,
                                               const float* gain, float* partial, u32 pixels, u32 channels, u32 groups,
                                               int add) {
    __shared__ float scratch[32];
    u32 b = blockIdx.x / groups, group = blockIdx.x % groups, each = channels / groups, count = pixels * each;
    u64 first = u64(b) * pixels * channels + group * each;
    float mean = moments[2 * blockIdx.x], inverse = moments[2 * blockIdx.x + 1], flat = 0.0f, tilt = 0.0f;
    for (u32 c = 0; c < each; c++) {
        float of_gain = 0.0f, of_bias = 0.0f;
        for (u32 pixel = threadIdx.x; pixel < pixels; pixel += blockDim.x) {
            float d = widen(d_y[first + u64(pixel) * channels + c]);
            of_gain += d * ((widen(x[first + u64(pixel) * channels + c]) - mean) * inverse);
            of_bias += d;
        }
        of_gain = block_sum(of_gain, scratch);
        of_bias = block_sum(of_bias, scratch);
        u32 channel = group * each + c;
        flat += of_bias * gain[channel];
        tilt += of_gain * gain[channel];
        if (threadIdx.x == 0) {
            partial[u64(b) * 2 * channels + channel] = of_gain;
            partial[(u64(b) * 2 + 1) * channels + channel] = of_bias;
        }
    }
    flat /= count;
    tilt /= count;
    for (u32 at = threadIdx.x; at < count; at += blockDim.x) {
        u64 place = first + u64(at / each) * channels + at % each;
        float normal = (widen(x[place]) - mean) * inverse;
        float d = (widen(d_y[place]) * gain[group * each + at % each] - flat - normal * tilt) * inverse;
        d_x[place] = narrow(add ? widen(d_x[place]) + d : d);
    }
}
