// Which key tiles the forward pass visits. Without PTX, so that it is also tested on the CPU
// (src/hopper/schedule_tests.rs).
#pragma once

// The key tiles of a query tile, visited from the last one, since ragged and diagonal tiles are at the end.
struct KeyTiles {
    int count, from; // from: the last tile, or the first entry of the tile list
    INLINE KeyTiles(int count, int from) : count(count), from(from) {}
    INLINE KeyTiles(const HopperParams& params, WorkTile& w) {
#if TILE_LIST
        // Rows of the list are sorted by length, and name their tile.
        ListRow row(params, w.batch, w.head, w.tile);
        count = row.count, from = row.from, w.tile = row.tile, w.split = row.split;
#if LENGTHS
        // Key tiles ascend along a row: skip those beyond the sequence.
        for (int low = 0, end = params.lengths[w.batch]; low < count;) {
            int middle = (low + count) / 2;
            if (entry_tile(params.list_entries[from + middle]) * kBlockN < end) low = middle + 1;
            else count = middle;
        }
#endif
#else
        KeyRange keys(params, w.batch, w.tile * kBlockM, min(w.tile * kBlockM + kBlockM, params.n) - 1);
        from = div_up(keys.high, kBlockN) - 1, count = keys.high > keys.low ? from + 1 - keys.low / kBlockN : 0;
#endif
    }
};
