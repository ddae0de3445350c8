// One step of the backward mainloop for a warpgroup: from scores to weights under the mask, dropout, and staging of dq.
#pragma once

// 64 keys from `key` on, COLUMNS queries from `query` on.
struct Tile {
    const HopperParams& params;
    int batch, head, key, query, query_tile, key_tile;
    bool partial, nothing; // nothing: no pair is visible
    u32 bits_of;
    // `seen`: with segments, the queries that see all keys of the warpgroup, and those that see some.
    INLINE Tile(const HopperParams& params, const WorkTile& w, int4 step, int group, int4 seen)
        : params(params), batch(w.batch), head(step.y) {
        query_tile = step.x, key_tile = w.tile, bits_of = step.z, partial = step.w & (PARTIAL_FOR << group),
        nothing = step.w & (EMPTY_FOR << group);
        if (SEGMENTS) {
            partial = query_tile * kBlockM < seen.x || min(query_tile * kBlockM + kBlockM, params.n) > seen.y;
            nothing = query_tile * kBlockM + kBlockM <= seen.z || query_tile * kBlockM >= seen.w;
        }
        key = key_tile * kBlockN + (SPLIT_WIDTH ? 0 : group * 64),
        query = query_tile * kBlockM + (SPLIT_WIDTH ? group * COLUMNS : 0);
    }

    // What a partial step loads from global memory. With segments, once per tile: each lane has the range of one of its
    // warp's 16 keys. With a tile list, one step ahead: the bits of the thread's two keys.
    struct TileMask {
#if SEGMENTS
        int2 range;
#endif
#if TILE_LIST
        u32 bits[2];
#endif
        INLINE void look(const HopperParams& params, const WorkTile& w, int group) {
#if SEGMENTS
            int key =
                w.tile * kBlockN + (SPLIT_WIDTH ? 0 : group * 64) + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 15);
            range = params.ranges[(i64)w.batch * params.m + min(key, params.m - 1)];
#endif
        }
    };
    INLINE void look(TileMask& look) const {
#if TILE_LIST
        if (!partial) return;
        int row = key - key_tile * kBlockN + fragment_row();
#pragma unroll
        for (int r = 0; r < 2; r++)
            look.bits[r] = bits_of == NO_BITS
                               ? ~0u
                               : load_row_bits<kBlockM>(params.list_bits, (i64)bits_of * kBlockN + row + 8 * r) >>
                                     (query - query_tile * kBlockM) / 4;
#endif
    }

    // Turns scores into weights: exp(score − lse), 0 for masked pairs. `slope` receives the derivative of the soft-cap.
    INLINE void compute_weights(float (&s)[COLUMNS / 2], float* slope, u32 lse, TileMask& look) const {
        int row = key + fragment_row(), column = query + fragment_column();
        float unit = params.scale * LOG2E;
#if SCORE_MOD
        ScoreMod shape(params, batch, head);
#endif
#pragma unroll
        for (int c = 0; c < COLUMNS / 8; c++) {
            float2 against = load_shared2(lse + (column - query + 8 * c) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = s[4 * c + e];
                float y = e & 1 ? against.y : against.x;
#if SCORE_MOD
                int i = column + 8 * c + (e & 1), j = row + (e & 2) * 4;
                x = exp2_fast(shape(x, i, j, i < params.n && j < params.m, slope + 4 * c + e) - y);
#else
                x = exp2_fast(fmaf(x, unit, -y));
#endif
            }
        }
        if (partial) {
            int end = params.m;
#if LENGTHS && !SEGMENTS
            end = min(end, params.lengths[batch]);
#endif
#pragma unroll
            for (int r = 0; r < 2; r++) {
                bool inside = row + 8 * r < end;
                // The queries that see this key, relative to the first of this step.
#if SEGMENTS
                int lane = (threadIdx.x >> 2 & 7) + 8 * r;
                int low = __shfl_sync(~0u, look.range.x, lane) - query,
                    high = __shfl_sync(~0u, look.range.y, lane) - query;
#else
                int low = row + 8 * r - params.offset - params.right - query,
                    high = row + 8 * r - params.offset + params.left + 1 - query;
#endif
#if BAND || SEGMENTS
                u32 word = bits_between(columns_before(low), inside ? columns_before(high) : 0);
#elif TILE_LIST
                u32 word = inside ? look.bits[r] : 0;
#else
                u32 word = inside ? ~0u : 0;
#endif
                (void)low, (void)high;
#pragma unroll
                for (int i = 0; i < COLUMNS / 4; i++)
                    if (!(word >> i & 1)) s[i / 2 * 4 + 2 * r + i % 2] = 0.f;
            }
        }
    }

    // Draws the dropout mask: a byte for each query and 8 keys.
    INLINE void draw_dropout(u32 to, int group) const {
#if DROPOUT
        int t = threadIdx.x & 127;
#pragma unroll
        for (int r = 0; r < COLUMNS * 8 / 128; r++) {
            int at = r * 128 + t;
            store_shared(to + at, (u8)dropout_keep(params.seed, batch, head, query + at / 8, key / 8 + at % 8,
                                                   params.dropout_threshold));
        }
        named_sync(2 + group, 128);
#endif
    }
    INLINE void apply_dropout(float (&x)[COLUMNS / 2], u32 from) const {
#if DROPOUT
#pragma unroll
        for (int c = 0; c < COLUMNS / 8; c++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 kept = load_shared_u16(from + (fragment_column() + 8 * c + e) * 8 + (threadIdx.x >> 5 & 3) * 2) >>
                           (threadIdx.x >> 2 & 7);
                float &a = x[4 * c + e], &b = x[4 * c + 2 + e];
                a = kept & 1 ? a * params.dropout_scale : 0.f, b = kept & 256 ? b * params.dropout_scale : 0.f;
            }
        }
#endif
    }

    // The gradient of the bias is that of the scores.
    INLINE void store_d_bias(const float (&ds)[COLUMNS / 2]) const {
#if D_BIAS
#pragma unroll
        for (int x = 0; x < COLUMNS / 2; x++) {
            int i = query + fragment_column() + (x / 4) * 8 + (x & 1), j = key + fragment_row() + (x & 2) * 4;
            if (i < params.n && j < params.m)
                params.d_bias[batch * params.d_bias_b + head * params.d_bias_h + i * params.d_bias_i +
                              j * params.d_bias_j] = ds[x];
        }
#endif
    }
};

// Stages a 64 × 64 block of dq in fixed point for the accumulator thread; each warp has a quarter of the buffer.
INLINE void stage_dq(const Shared& shared, const float (&dq)[32], u32 dq_scale, int group, u32 count, bool elected) {
    int row = fragment_row() + (kBlockM == 128 ? group * 64 : 0);
    float upper = load_shared(dq_scale + row * 4), lower = load_shared(dq_scale + (row + 8) * 4);
    shared.add_empty().wait(count & 1 ^ 1);
    u32 to = shared.add(group) + (threadIdx.x >> 5 & 3) * 4096 + lane_id() * 16;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float* x = dq + 4 * i;
        if (FREE_ORDER) store_shared(to + i * 512, x[0], x[1], x[2], x[3]);
        else
            store_shared(to + i * 512, __float2int_rn(x[0] * upper), __float2int_rn(x[1] * upper),
                         __float2int_rn(x[2] * lower), __float2int_rn(x[3] * lower));
    }
    fence_async_proxy_shared();
    __syncwarp();
    if (elected) shared.add_full().arrive();
}
