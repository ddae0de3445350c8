// From the product of a query and a key to the score that the softmax sees: scale, temperature, soft-cap, bias, mask.
// One pair at a time.

// What all scores of a head share.
struct Head {
    int b, h, key_head;
    float scale, slope; // slope: ALiBi
};

__device__ __forceinline__ Head head_of(const GeneralParams& params, int b, int h) {
    Head head;
    head.b = b;
    head.h = h;
    head.key_head = h / params.group;
    head.scale = params.learned_scale
                     ? widen(params.learned_scale[h % params.learned_scale_count]) * params.inverse_temperature
                     : params.scale;
    head.slope = params.alibi_slopes ? params.alibi_slopes[h] : 0.0f;
    return head;
}

struct ModifiedScore {
    float score; // −∞ for a masked pair
    float slope; // derivative of the soft-cap
};

__device__ __forceinline__ i64 table_entry(const GeneralParams& params, i64 p, int j) {
    return max_i64(-params.reach, min_i64(params.reach, j - p)) + params.reach;
}

// `full`: no pair of the tile is masked. Not inlined: it is long, and full tiles with plain scores take the fast path.
__device__ __noinline__ ModifiedScore finish_score(const GeneralParams& params, const Head& head, float raw, int i,
                                                   int j, i64 p, bool full) {
    ModifiedScore made;
    made.slope = 1.0f;
    made.score = raw * head.scale;
    if (params.cap != 0.0f) {
        float t = tanhf(made.score / params.cap);
        made.score = params.cap * t;
        made.slope = 1.0f - t * t;
    }
    if (i >= params.n || j >= params.m) {
        made.score = -INFINITE;
        return made;
    }
    if (params.alibi_slopes) made.score -= head.slope * float(distance(p, j));
    if (params.bias.data)
        made.score += widen(params.bias.data[head.b * params.bias.batch + head.h * params.bias.head +
                                             i * params.bias.row + j * params.bias.col]);
    if (params.table)
        made.score += widen(
            params.table[head.h % params.table_rows * params.table_row + table_entry(params, p, j) * params.table_col]);
    if (!full && !mask_allows(params, head.b, head.h, i, j, p)) made.score = -INFINITE;
    return made;
}

// The dropout factor of a weight: 1 without dropout, else 0 or dropout_scale. The random bits are those of qkv's
// Philox: the pair (i, j) has 16 bits of word (j mod 8) / 2 of the block (⌊j/8⌋, i, h, b), low half first.
__device__ __noinline__ float dropout_factor(const GeneralParams& params, const Head& head, int i, int j) {
    if (params.dropout_threshold == 0) return 1.0f;
    u32 words[4] = {u32(j / 8), u32(i), u32(head.h), u32(head.b)};
    philox(words, params.seed);
    u32 word = j % 8 < 2 ? words[0] : j % 8 < 4 ? words[1] : j % 8 < 6 ? words[2] : words[3];
    u32 drawn = j % 2 ? word >> 16 : word & 0xffff;
    return drawn < params.dropout_threshold ? 0.0f : params.dropout_scale;
}

__device__ __forceinline__ float weight_of(float score, float lse) {
    return score == -INFINITE ? 0.0f : exponential(score - lse);
}

// Word `at` of the block of random bits for eight keys of a query.
__device__ __noinline__ u32 random_word(u64 seed, int group, int i, int h, int b, int at) {
    u32 words[4] = {u32(group), u32(i), u32(h), u32(b)};
    philox(words, seed);
    return at == 0 ? words[0] : at == 1 ? words[1] : at == 2 ? words[2] : words[3];
}

// Whether a tile takes the fast path: full, in range, and with plain scores.
__device__ __forceinline__ bool is_plain(const GeneralParams& params, bool full_tile, int first, int queries, int j0,
                                         int keys) {
    return full_tile && params.plain_scores && first + queries <= params.n && j0 + keys <= params.m;
}

// The queries from `first` on, at most `count`, and their smallest and largest position.
__device__ __forceinline__ void query_extent(const GeneralParams& params, int b, int first, int count,
                                             TileExtent& extent) {
    int last = first + count - 1 < params.n ? first + count - 1 : params.n - 1;
    extent.i0 = first;
    extent.i1 = last;
    extent.p0 = extent.p1 = position_of(params, b, first);
    if (!params.positions) {
        extent.p1 = position_of(params, b, last);
        return;
    }
    for (int i = first + 1; i <= last; i++) {
        i64 p = position_of(params, b, i);
        extent.p0 = min_i64(extent.p0, p);
        extent.p1 = max_i64(extent.p1, p);
    }
}

__device__ __forceinline__ void key_extent(const GeneralParams& params, int first, int count, TileExtent& extent) {
    extent.j0 = first;
    extent.j1 = first + count - 1 < params.m ? first + count - 1 : params.m - 1;
}

// Classifies up to 32 tiles from `base` on against a tile of the other side, one per lane: returns a bit for each tile
// that keeps any pair, and in `full` a bit for each that keeps all. All warps of a block get the same result.
__device__ __forceinline__ u32 classify_tiles(const GeneralParams& params, int b, TileExtent extent, bool of_keys,
                                              int base, int end, u32& full) {
    int tile = base + int(threadIdx.x % 32);
    int found = EMPTY;
    if (tile < end) {
        if (of_keys) {
            key_extent(params, tile * KEY_TILE, KEY_TILE, extent);
            extent.key_tile = tile;
        } else {
            query_extent(params, b, tile * QUERY_TILE, QUERY_TILE, extent);
            extent.query_tile = tile;
        }
        found = verdict(params, b, extent);
    }
    full = __ballot_sync(FULL_WARP, found == FULL);
    return __ballot_sync(FULL_WARP, found != EMPTY);
}

__device__ __forceinline__ int query_tiles(const GeneralParams& params) {
    return (params.n + QUERY_TILE - 1) / QUERY_TILE;
}
__device__ __forceinline__ int key_tiles(const GeneralParams& params) { return (params.m + KEY_TILE - 1) / KEY_TILE; }

// Calls `work(tile, bh)` for this block's share of `tiles` tiles in each of `heads` heads: all of them, or those marked
// for recomputation.
template <class Work> __device__ __forceinline__ void for_each_tile(const GeneralParams& params, int tiles, int heads,
                                                                    bool last_first, Work work) {
    if (params.recompute_any && !*params.recompute_any) return;
    for (int at = int(blockIdx.x); at < tiles * heads; at += int(gridDim.x)) {
        int bh = at / tiles, tile = last_first ? tiles - 1 - at % tiles : at % tiles;
        if (params.recompute_tiles && !params.recompute_tiles[i64(bh) * tiles + tile]) continue;
        __syncthreads();
        work(tile, bh);
    }
}
