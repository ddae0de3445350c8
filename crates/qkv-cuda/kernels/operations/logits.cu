// What a search reads of rows of logits, one block per row: the highest of them, the sum of their exponentials, and a
// token drawn from them. Equal logits are ordered by their class, so that results have the same bits from run to run.

// The most logits collected in search of the highest, of which there are at most MOST_HIGHEST (`program.rs`).
#define MOST_COLLECTED 2048

// Returned instead of a drawn token if the highest logits are too small a part of all.
#define TOO_FLAT 0xfffffffeu

struct RowOfLogits {
    float highest;
    // Σ exp((x − highest) / temperature)
    float sum;
    // Whether every logit is finite.
    bool is_finite;
    // How many of the highest logits were found.
    int count;
};

struct HighestLogits {
    u64 collected[MOST_COLLECTED];
    // Logits and classes, the highest first: see `key_of`.
    u64 sorted[MOST_HIGHEST];
    u32 length;
};

// Keys in the order of logits and, for equal ones, in the reverse order of their classes.
__device__ __forceinline__ u64 key_of(float logit, u32 index) {
    u32 bits = __float_as_uint(logit);
    u32 ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return u64(ordered) << 32 | (0xffffffffu - index);
}
__device__ __forceinline__ u32 class_of(u64 key) { return 0xffffffffu - u32(key); }
__device__ __forceinline__ float logit_of(u64 key) {
    u32 ordered = u32(key >> 32);
    return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

// Calls f(class, logit) for the classes of a row from `first` to `end`, eight of every `step`.
template <class F>
__device__ __forceinline__ void for_each_logit(const T* row, int classes, int first, int end, int step, F f) {
    for (int col = first; col < end; col += step) {
        float x[EIGHT];
        load_eight(row, col, classes, x);
#pragma unroll
        for (int at = 0; at < EIGHT; at++)
            if (col + at < end) f(col + at, x[at]);
    }
}

// The same for all classes.
template <class F> __device__ __forceinline__ void for_each_logit(const T* row, int classes, F f) {
    for_each_logit(row, classes, threadIdx.x * EIGHT, classes, blockDim.x * EIGHT, f);
}

// Consecutive classes per thread if each thread takes a contiguous part: a multiple of eight.
__device__ __forceinline__ int classes_each(int classes) {
    int eights = (classes + EIGHT - 1) / EIGHT, threads = blockDim.x;
    return (eights + threads - 1) / threads * EIGHT;
}

// A bound that at least `count` logits are not below, from the highest logit of each thread.
__device__ __forceinline__ u32 lower_bound(u32 mine, int count) {
    u32 bound = 0;
    // A widened bf16 has no information in its lower half.
    for (int bit = 31; bit >= 32 - 8 * int(sizeof(T)); bit--) {
        u32 higher = bound | 1u << bit;
        if (__syncthreads_count(mine >= higher) >= count) bound = higher;
    }
    return bound;
}

// Finds the highest logits one by one: for when more are equal than can be collected.
__device__ __forceinline__ void find_one_by_one(const T* row, int classes, int count, HighestLogits& found) {
    u64 below = ~0ull;
    for (int at = 0; at < count; at++) {
        u64 best = 0;
        for_each_logit(row, classes, [&](int col, float x) {
            u64 key = key_of(x, col);
            if (key < below && key > best) best = key;
        });
        found.collected[threadIdx.x] = best;
        __syncthreads();
        for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
            u64 other = threadIdx.x < half ? found.collected[threadIdx.x + half] : 0;
            if (threadIdx.x < half && other > found.collected[threadIdx.x]) found.collected[threadIdx.x] = other;
            __syncthreads();
        }
        below = found.collected[0];
        if (threadIdx.x == 0) found.sorted[at] = below;
        __syncthreads();
    }
}

// Surveys a row, with the `count` highest of its logits. Every thread of the block must call this, and gets the result.
__device__ __forceinline__ RowOfLogits survey_row(const T* row, int classes, int count, float by_temperature,
                                                  HighestLogits& found) {
    __shared__ float scratch[32];
    float mine = __int_as_float(0xff800000);
    int odd = 0;
    for_each_logit(row, classes, [&](int, float x) {
        odd |= !(x - x == 0.0f);
        mine = x > mine ? x : mine;
    });
    RowOfLogits survey;
    survey.is_finite = !__syncthreads_or(odd);
    survey.highest = block_max(mine, scratch);
    survey.count = count < classes ? count : classes;
    // Threads with nothing to read are below all others; if too few have something, all logits are collected.
    u32 bound = lower_bound(int(threadIdx.x) * EIGHT < classes ? u32(key_of(mine, 0) >> 32) : 0, survey.count);
    if (threadIdx.x == 0) found.length = 0;
    __syncthreads();
    float sum = 0.0f;
    for_each_logit(row, classes, [&](int col, float x) {
        sum += __expf((x - survey.highest) * by_temperature);
        u64 key = key_of(x, col);
        if (survey.count > 0 && u32(key >> 32) >= bound) {
            u32 at = atomicAdd(&found.length, 1u);
            if (at < MOST_COLLECTED) found.collected[at] = key;
        }
    });
    survey.sum = block_sum(sum, scratch);
    __syncthreads();
    u32 length = found.length;
    if (length > MOST_COLLECTED) {
        __syncthreads();
        find_one_by_one(row, classes, survey.count, found);
        return survey;
    }
    for (u32 at = threadIdx.x; at < length; at += blockDim.x) {
        u64 key = found.collected[at];
        int higher = 0;
        for (u32 other = 0; other < length; other++) higher += found.collected[other] > key;
        if (higher < survey.count) found.sorted[higher] = key;
    }
    __syncthreads();
    return survey;
}

// For each row of the logits [rows, classes]: how many were found, or NONE if one is not finite; ln Σ eˣ; then class
// and logit of the `count` highest, best first. If positions of sequences are given, each advances by one.
extern "C" __global__ void survey_logits(const T* logits, u32* surveys, u32* positions, long long* places, int* lengths,
                                         int classes, int count, u32 room) {
    __shared__ HighestLogits found;
    const T* row = logits + u64(blockIdx.x) * classes;
    RowOfLogits survey = survey_row(row, classes, count, 1.0f, found);
    u32* out = surveys + u64(blockIdx.x) * (2 + 2 * count);
    if (threadIdx.x == 0) {
        out[0] = survey.is_finite ? u32(survey.count) : NONE;
        out[1] = __float_as_uint(survey.highest + logf(survey.sum));
        if (positions) advance(positions, places, lengths, room);
    }
    for (int at = threadIdx.x; at < survey.count; at += blockDim.x) {
        out[2 + 2 * at] = class_of(found.sorted[at]);
        out[3 + 2 * at] = __float_as_uint(logit_of(found.sorted[at]));
    }
}

// How tokens are drawn: `Sampling` of the models.
struct Drawing {
    double by_temperature, top_p, min_p;
    u64 seed;
    u32 top_k;
};
static_assert(sizeof(Drawing) == 40, "size of Drawing");

// Draws from all classes in their order: the first at which the running sum of weights reaches `share` of the total.
__device__ __forceinline__ u32 draw_from_all(const T* row, int classes, float highest, double by_temperature,
                                             double share) {
    __shared__ double of_threads[1024], of_warps[32];
    auto weight = [&](float x) { return exp((x - highest) * by_temperature); };
    int each = classes_each(classes), first = threadIdx.x * each, end = first + each < classes ? first + each : classes;
    double sum = 0.0;
    for_each_logit(row, classes, first, end, EIGHT, [&](int, float x) { sum += weight(x); });
    of_threads[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        double of_warp = 0.0;
        for (int lane = 0; lane < 32; lane++) of_warp += of_threads[threadIdx.x + lane];
        of_warps[threadIdx.x / 32] = of_warp;
    }
    __syncthreads();
    if (threadIdx.x > 0) return 0;
    double total = 0.0;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) total += of_warps[warp];
    double left = share * total;
    u32 warp = 0;
    for (; warp < blockDim.x / 32 - 1 && left > of_warps[warp]; warp++) left -= of_warps[warp];
    u32 thread = warp * 32;
    for (; thread < warp * 32 + 31 && left > of_threads[thread]; thread++) left -= of_threads[thread];
    // If rounding leads beyond the end, the last one.
    for (int col = thread * each; col < classes; col++) {
        left -= weight(widen(row[col]));
        if (left <= 0.0) return col;
    }
    return classes - 1;
}

// Draws from the highest logits, by their weights, the highest first; TOO_FLAT if others might be drawn as well.
__device__ __forceinline__ u32 draw_from_highest(const RowOfLogits& survey, const HighestLogits& found,
                                                 const double* weights, const Drawing& drawing, int classes,
                                                 double share) {
    int candidates = drawing.top_k > 0 && drawing.top_k < u32(classes) ? drawing.top_k : classes;
    double total = survey.sum;
    if (candidates < classes) {
        if (survey.count < candidates) return TOO_FLAT;
        total = 0.0;
        for (int at = 0; at < survey.count; at++) total += weights[at];
    }
    // Top-p keeps as many as together have that share, and min-p those that are at least that likely.
    int kept = 0;
    double mass = 0.0;
    bool enough = false;
    while (kept < survey.count && !enough) {
        mass += weights[kept++];
        enough = mass >= drawing.top_p * total;
    }
    if (!enough && survey.count < candidates && weights[survey.count - 1] >= drawing.min_p) return TOO_FLAT;
    while (kept > 1 && weights[kept - 1] < drawing.min_p) kept--;
    total = 0.0;
    for (int at = 0; at < kept; at++) total += weights[at];
    double left = share * total;
    for (int at = 0; at < kept; at++) {
        left -= weights[at];
        if (left <= 0.0) return class_of(found.sorted[at]);
    }
    return class_of(found.sorted[kept - 1]);
}

// A prefix of the classes in the order of their logits: all above a level, and `ties` of those at it.
struct Prefix {
    u32 level;
    double ties;
};

// The sum of f(logit, level of the logit) over all classes, by a block.
template <class F> __device__ __forceinline__ float sum_over(const T* row, int classes, F f) {
    __shared__ float scratch[32];
    float sum = 0.0f;
    for_each_logit(row, classes, [&](int, float x) { sum += f(x, u32(key_of(x, 0) >> 32)); });
    return block_sum(sum, scratch);
}

// The shortest prefix over which the sum of f, a positive function, reaches `target`.
template <class F> __device__ __forceinline__ Prefix prefix_of(const T* row, int classes, double target, F f) {
    u32 level = 0;
    for (int bit = 31; bit >= 32 - 8 * int(sizeof(T)); bit--) {
        u32 higher = level | 1u << bit;
        float sum = sum_over(row, classes, [&](float x, u32 at) { return at >= higher ? f(x, at) : 0.0f; });
        if (sum >= target) level = higher;
    }
    float above = sum_over(row, classes, [&](float x, u32 at) { return at > level ? f(x, at) : 0.0f; });
    float each = f(logit_of(u64(level) << 32), level);
    return Prefix{level, ceil((target - above) / each)};
}

// The class of the n-th logit at a level, counted from 1; of the last one if there are fewer.
__device__ __forceinline__ u32 class_at_level(const T* row, int classes, u32 level, double n) {
    __shared__ u32 before[1024];
    int each = classes_each(classes), first = threadIdx.x * each, end = first + each < classes ? first + each : classes;
    u32 mine = 0;
    for_each_logit(row, classes, first, end, EIGHT, [&](int, float x) { mine += u32(key_of(x, 0) >> 32) == level; });
    before[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x > 0) return 0;
    double left = n < 1.0 ? 1.0 : n;
    u32 thread = 0, last = 0;
    for (u32 at = 0; at < blockDim.x; at++) {
        if (before[at] == 0) continue;
        last = at;
        thread = at;
        if (left <= before[at]) break;
        left -= before[at];
        thread = NONE;
    }
    u32 found = 0;
    for (int col = (thread == NONE ? last : thread) * each; col < classes; col++) {
        if (u32(key_of(widen(row[col]), 0) >> 32) != level) continue;
        found = col;
        left -= 1.0;
        if (left < 0.5 && thread != NONE) break;
    }
    return found;
}

// Draws like `draw_from_highest` when too many classes may be drawn to sort them: levels are found by bisection.
__device__ __forceinline__ u32 draw_by_levels(const T* row, int classes, const RowOfLogits& survey,
                                              const Drawing& drawing, double share) {
    float highest = survey.highest, by = float(drawing.by_temperature);
    auto weight = [&](float x, u32) { return __expf((x - highest) * by); };
    Prefix kept = {0, double(classes)};
    double total = survey.sum;
    if (drawing.top_k > 0 && drawing.top_k < u32(classes)) {
        kept = prefix_of(row, classes, drawing.top_k, [](float, u32) { return 1.0f; });
        total = kept.ties * weight(logit_of(u64(kept.level) << 32), 0) +
                sum_over(row, classes, [&](float x, u32 at) { return at > kept.level ? weight(x, at) : 0.0f; });
    }
    if (drawing.top_p < 1.0) {
        Prefix likely = prefix_of(row, classes, drawing.top_p * total, weight);
        bool is_shorter = likely.level > kept.level || (likely.level == kept.level && likely.ties < kept.ties);
        if (is_shorter) kept = likely;
    }
    float least = float(drawing.min_p);
    auto above = [&](float x, u32 at) {
        float w = weight(x, at);
        return at > kept.level && w >= least ? w : 0.0f;
    };
    float at_level = kept.level > 0 ? weight(logit_of(u64(kept.level) << 32), 0) : 0.0f;
    double of_ties = at_level >= least ? kept.ties * at_level : 0.0;
    float sum = sum_over(row, classes, above);
    double target = share * (sum + of_ties);
    if (target > sum && of_ties > 0.0) return class_at_level(row, classes, kept.level, ceil((target - sum) / at_level));
    Prefix drawn = prefix_of(row, classes, target, above);
    return class_at_level(row, classes, drawn.level, drawn.ties);
}

// Draws the next token of each sequence by its logits [rows, classes]; NONE if one is not finite. Each sequence
// advances by one position, but not beyond its room. Random numbers are those of the CPU for text `texts[row]` and its
// token `drawn[row]`, which then counts one more.
extern "C" __global__ void draw_token(const T* logits, u32* ids, u32* positions, long long* places, int* lengths,
                                      const u32* texts, u32* drawn, int classes, u32 room, Drawing drawing) {
    __shared__ HighestLogits found;
    __shared__ double weights[MOST_HIGHEST];
    in_turn();
    const T* row = logits + u64(blockIdx.x) * classes;
    bool from_all = drawing.top_k == 0 && drawing.top_p >= 1.0 && drawing.min_p <= 0.0;
    int count = drawing.top_k > 0 && drawing.top_k < MOST_HIGHEST ? drawing.top_k : MOST_HIGHEST;
    RowOfLogits survey = survey_row(row, classes, from_all ? 0 : count, float(drawing.by_temperature), found);
    u32 words[4] = {texts[blockIdx.x], 0, drawn[blockIdx.x], 0x73616d70};
    philox(words, drawing.seed);
    double share = (double(words[0]) + 0.5) / 4294967296.0;
    u32 token = 0;
    if (survey.is_finite && from_all) {
        token = draw_from_all(row, classes, survey.highest, drawing.by_temperature, share);
    } else if (survey.is_finite) {
        for (int at = threadIdx.x; at < survey.count; at += blockDim.x)
            weights[at] = exp((logit_of(found.sorted[at]) - survey.highest) * drawing.by_temperature);
        __syncthreads();
        if (threadIdx.x == 0) token = draw_from_highest(survey, found, weights, drawing, classes, share);
        if (__syncthreads_or(token == TOO_FLAT)) token = draw_by_levels(row, classes, survey, drawing, share);
    }
    if (threadIdx.x > 0) return;
    ids[blockIdx.x] = survey.is_finite ? token : NONE;
    drawn[blockIdx.x] += 1;
    advance(positions, places, lengths, room);
}
