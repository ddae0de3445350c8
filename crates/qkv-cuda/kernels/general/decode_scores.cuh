// The slow path of decoding: scores that are masked or more than scaled products. Not inlined, and with operands in
// memory, so that the main loop keeps its accumulators in registers. A warp has a tile of 16 rows (the heads of a
// group) × 16 keys from j0 on: lane 4g + t holds, for each 8 keys, rows g and g + 8 and keys 2t, 2t + 1.

struct ScoreTile {
    float s[2][4];
};

// Turns products into scores; −∞ for rows and keys out of range and for masked pairs.
__device__ __noinline__ void score_slow_path(const GeneralParams& params, int b, int key_head, int first_row, int j0,
                                             int end, bool full_tile, ScoreTile& x) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    i64 p = position_of(params, b, 0);
    for (int half = 0; half < 2; half++) {
        int row = first_row + g + half * 8;
        Head head = head_of(params, b, key_head * params.group + (row < params.group ? row : 0));
        for (int part = 0; part < 2; part++)
            for (int e = 0; e < 2; e++) {
                int j = j0 + part * 8 + 2 * t + e;
                float& s = x.s[part][2 * half + e];
                s = row < params.group && j < end ? finish_score(params, head, s, 0, j, p, full_tile).score : -INFINITE;
            }
    }
}

// Applies dropout to weights.
__device__ __noinline__ void dropout_slow_path(const GeneralParams& params, int b, int key_head, int first_row, int j0,
                                               ScoreTile& x) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; half++) {
        int row = first_row + g + half * 8;
        Head head = head_of(params, b, key_head * params.group + (row < params.group ? row : 0));
        for (int part = 0; part < 2; part++)
            for (int e = 0; e < 2; e++)
                x.s[part][2 * half + e] *= dropout_factor(params, head, 0, j0 + part * 8 + 2 * t + e);
    }
}

// Bit masks of the values that any row sees, for keys 2t and 2t + 1 of both halves. A masked value may be NaN, and 0 ·
// NaN is NaN: values of keys that no row sees are zeroed. Heads of a group see the same keys.
__device__ __noinline__ void visible_values(const ScoreTile& x, u32 (&kept)[2]) {
    for (int part = 0; part < 2; part++)
        for (int e = 0; e < 2; e++) {
            float seen0 = x.s[part][e], seen1 = x.s[part][2 + e];
            float any = seen0 != seen0 || seen1 != seen1 ? 0.0f : fmaxf(seen0, seen1);
            for (int by = 4; by < 32; by *= 2) any = fmaxf(any, __shfl_xor_sync(FULL_WARP, any, by));
            if (any == -INFINITE) kept[part] &= e ? 0x0000ffffu : 0xffff0000u;
        }
}
