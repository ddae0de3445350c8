// Which query tiles the backward pass visits, and which of their pairs are masked. Without PTX, so that it is also
// tested on the CPU (src/hopper/schedule_tests.rs).
#pragma once

// Flags of a step: another step follows; it is partial for the keys of warpgroup 0, 1; it is empty for them.
constexpr u32 MORE_STEPS = 1, PARTIAL_FOR = 2, EMPTY_FOR = 8;

#if !TILE_LIST
// The query tiles [low, high) that see a key tile, in each head of its group.
struct QueryTiles {
    int low, high;
    INLINE QueryTiles(const HopperParams& params, int batch, int key_tile) {
        int end = params.m;
#if LENGTHS && !SEGMENTS
        end = min(end, params.lengths[batch]);
#endif
        low = 0, high = params.n;
#if SEGMENTS
        RangeExtent x(params, batch, key_tile * kBlockN / 64, kBlockN / 64, params.m);
        low = x.low, high = x.high;
#elif BAND
        low = max(0, key_tile * kBlockN - params.offset - params.right),
        high = min(params.n, min(key_tile * kBlockN + kBlockN, end) - params.offset + params.left);
#endif
        if (key_tile * kBlockN >= end || high <= low) low = high = 0;
        low /= kBlockM, high = div_up(high, kBlockM);
    }
};
#endif

// The walk over the query tiles that see a key tile: every query head of the group, last tile first.
struct QueryTileWalk {
    const HopperParams& params;
    int batch, at, key_tile, head, last_head; // heads: head … last_head; at: row of the tile list
    int step, count, high;
    const uint4* entries;
#if TILE_LIST
    u32 split;
#endif
    INLINE QueryTileWalk(const HopperParams& params, const WorkTile& w)
        : params(params), batch(w.batch), at(w.tile), key_tile(w.tile) {
        int group = params.heads_q / params.heads_k;
        head = w.head * group, last_head = head + group - 1;
        enter();
    }
    INLINE void enter() {
        for (;; head++) {
            step = 0;
#if TILE_LIST
            ListRow row(params, batch, head, at);
            count = row.count, key_tile = row.tile, entries = params.list_entries + row.from, high = 0,
            split = row.split;
#if LENGTHS
            if (key_tile * kBlockN >= params.lengths[batch]) count = 0;
#endif
#else
            QueryTiles queries(params, batch, key_tile);
            count = queries.high - queries.low, high = queries.high, entries = nullptr;
#endif
            if (count > 0 || head >= last_head) return;
        }
    }
    INLINE bool valid() const { return step < count; }
    INLINE void next() {
        if (++step == count && head < last_head) head++, enter();
    }
    INLINE int tile() const {
#if TILE_LIST
        return entry_tile(entries[step]);
#else
        return high - 1 - step;
#endif
    }
    // The partial and empty flags of a step. With segments, the warpgroups find out themselves.
    INLINE u32 partial(u32& bits) const {
#if SEGMENTS
        return 0;
#endif
        int end = params.m, query = tile() * kBlockM;
        u32 flags = 0;
#if TILE_LIST
        uint4 entry = entries[step];
        bits = entry.x & PARTIAL_TILE ? entry.y : NO_BITS;
        if (entry.x & PARTIAL_TILE) return 3 * PARTIAL_FOR | (empty_groups_of(entry) & 3) * EMPTY_FOR;
#endif
#if LENGTHS
        end = min(end, params.lengths[batch]);
#endif
        for (int g = 0; g < CONSUMER_GROUPS; g++) {
            int key = key_tile * kBlockN + (SPLIT_WIDTH ? 0 : g * 64);
            bool some = key + 64 > end, zero_weights = key >= end;
#if BAND
            some |= key + 63 > query + params.offset + params.right ||
                    key < query + kBlockM - 1 + params.offset - params.left;
            zero_weights |= key > query + kBlockM - 1 + params.offset + params.right ||
                            key + 63 < query + params.offset - params.left;
#endif
            flags |= (some ? PARTIAL_FOR << g : 0) | (zero_weights ? EMPTY_FOR << g : 0);
        }
        return flags;
    }
};

#if SEGMENTS
// The end of the queries that see all keys of a warpgroup; 0 if some keys are out of range.
INLINE int full_query_end(int all_high, int tile, int group, int m) {
    return tile * kBlockN + (SPLIT_WIDTH ? 0 : group * 64) + 64 > m ? 0 : all_high;
}
#endif
