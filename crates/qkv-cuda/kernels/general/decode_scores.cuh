// Scores of decoding that are more than scaled products, or that a mask may take out: called, not put in place, and
// with everything by way of memory, so that the loops that call it keep their sums in registers. A warp's tile of 16
// rows (heads of a group, one query) and 16 keys from j0 on: lane 4g + t has, for parts of 8 keys, rows g and g + 8 and
// keys 2t, 2t + 1.

struct ScoreTile {
    float s[2][4];
};

// Products become scores, −∞ where there is no such row or key, or no such pair.
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

// Weights that dropout leaves.
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

// A value may be anything where its key is absent: NaN must not come in through a weight of 0. Heads of a group see the
// same keys, so a key that none sees is taken out whole. Masks of pairs of values, of the keys 2t, 2t + 1 of both
// parts.
__device__ __noinline__ void visible_values(const ScoreTile& x, u32 (&kept)[2]) {
    for (int part = 0; part < 2; part++)
        for (int e = 0; e < 2; e++) {
            float seen0 = x.s[part][e], seen1 = x.s[part][2 + e];
            float any = seen0 != seen0 || seen1 != seen1 ? 0.0f : fmaxf(seen0, seen1);
            for (int by = 4; by < 32; by *= 2) any = fmaxf(any, __shfl_xor_sync(FULL_WARP, any, by));
            if (any == -INFINITE) kept[part] &= e ? 0x0000ffffu : 0xffff0000u;
        }
}
