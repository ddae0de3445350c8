// The index arithmetic of the Hopper kernels, compiled as C++: the scheduler's order, the key tiles of a query tile, the
// walk over the query tiles of a key tile, masks as bits, and segment ranges. Included after emulated.h and the headers
// of the kernels; schedule_tests.rs calls it.

// The tiles in the order in which blocks take them: (tile, head, sequence) each.
extern "C" void test_schedule(const HopperParams* params, int tiles, int heads, int last_first, int* out) {
    for (int index = 0; index < tiles * heads * params->batch; index++) {
        WorkTile w(*params, index, tiles, heads, last_first);
        *out++ = w.tile, *out++ = w.head, *out++ = w.batch;
    }
}

#ifdef TEST_FORWARD
// Writes the key tiles of a query tile, in order; returns their number.
extern "C" int test_key_tiles(const HopperParams* params, int batch, int tile, int* out) {
    WorkTile w;
    w.tile = tile, w.head = 0, w.batch = batch;
    KeyTiles visit(*params, w);
    for (int step = 0; step < visit.count; step++) out[step] = visit.from - step;
    return visit.count;
}
#else
// Writes the (query head, query tile) of each step of a key tile, with its flags for both warpgroups; returns how many.
extern "C" int test_query_tiles(const HopperParams* params, int batch, int head, int tile, int* out) {
    WorkTile w;
    w.tile = tile, w.head = head, w.batch = batch;
    int count = 0;
    for (QueryTileWalk walk(*params, w); walk.valid(); walk.next(), count++) {
        u32 bits = NO_BITS;
        *out++ = walk.head, *out++ = walk.tile(), *out++ = int(walk.partial(bits));
    }
    return count;
}
// The fixed-point scale of a row of dq.
extern "C" float test_dq_scale(float square, int width, float kept_scale, float key, float value, float sum,
                               float d_lse) {
    return dq_row_scale(square, width, kept_scale, make_float2(key, value), sum, d_lse);
}
#endif

// The bits of the columns low … high − 1 that the thread `t` of a quad holds, in fragment order.
extern "C" unsigned test_columns(int t, int low, int high) {
    current = t;
    return bits_between(columns_before(low), columns_before(high));
}

#if SEGMENTS
// Runs the kernel segment_ranges.
extern "C" void test_ranges(const HopperParams* params, unsigned blocks) {
#ifdef TEST_FORWARD
    body = [](const void* const* p) { compute_ranges<false, kBlockM, kBlockN>(*(const HopperParams*)*p); };
#else
    body = [](const void* const* p) { compute_ranges<true, kBlockN, kBlockM>(*(const HopperParams*)*p); };
#endif
    const void* values[] = {params};
    arguments = values;
    blockDim = {256, 1, 1};
    gridDim = {blocks, 1, 1};
    for (unsigned x = 0; x < blocks; x++) {
        blockIdx = {x, 0, 0};
        run_block(256);
    }
}
#endif
