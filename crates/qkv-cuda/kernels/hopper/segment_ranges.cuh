// Segments as ranges: the keys of each query (or, backward, the queries of each key), bounds of 64 ranges, and the
// order of tiles, longest first. A separate kernel, before the main one.
#pragma once

// Segments must be runs of rising ids, of which the last runs may wrap around to lower ids (padding). Returns where
// they wrap, 0 if they do not, −1 if they are not such runs. Ids are cached in `held` if they fit.
constexpr int HELD_IDS = 8192;
INLINE int wrap_point(const int*& x, int count, int (&held)[HELD_IDS]) {
    __shared__ int falls, where;
    if (threadIdx.x == 0) falls = where = 0;
    if (count <= HELD_IDS) {
#pragma unroll 16
        for (int i = threadIdx.x; i < count; i += 256) held[i] = x[i];
        x = held;
    }
    __syncthreads();
    int mine = 0, at = 0;
#pragma unroll 8
    for (int i = threadIdx.x + 1; i < count; i += 256) {
        bool falls_here = x[i] < x[i - 1];
        mine += falls_here, at = falls_here ? i : at;
    }
    if (mine) atomicAdd(&falls, mine), where = at;
    __syncthreads();
    int found = falls == 0 ? 0 : falls == 1 && x[count - 1] < x[0] ? where : -1;
    __syncthreads();
    return found;
}
// The first index of ascending x[from … to) not below (OVER: above) a number.
template <bool OVER> INLINE int bound(const int* x, int from, int to, int number) {
    while (from < to) {
        int middle = (from + to) / 2;
        if (OVER ? x[middle] <= number : x[middle] < number) from = middle + 1;
        else to = middle;
    }
    return from;
}
// Sorts all tiles of TILE rows, longest first, by a counting sort into 256 buckets. One block.
template <int TILE, int OTHER> INLINE void sort_tiles(const HopperParams& params, int rows, int others) {
    __shared__ int from[256], of_warp[8];
    int tiles = div_up(rows, TILE), parts = div_up(rows, 64), most = div_up(others, OTHER), t = threadIdx.x;
    auto bucket = [&](int at) {
        int batch = at / tiles, first = (at - batch * tiles) * (TILE / 64), low = 0x7fffffff, high = 0;
#pragma unroll
        for (int x = 0; x < TILE / 64; x++) {
            if (first + x >= parts) break;
            int4 y = load_l2(params.range_extents + (i64)batch * parts + first + x);
            low = min(low, y.x), high = max(high, y.y);
        }
        int steps = high > low ? div_up(high, OTHER) - low / OTHER : 0;
        return 255 - (int)((i64)steps * 255 / most);
    };
    from[t] = 0;
    int first = t < tiles * params.batch ? bucket(t) : 0;
    __syncthreads();
    for (int at = t; at < tiles * params.batch; at += 256) atomicAdd(&from[at == t ? first : bucket(at)], 1);
    __syncthreads();
    int mine = from[t], sum = mine;
    for (int by = 1; by < 32; by *= 2) {
        int other = __shfl_up_sync(~0u, sum, by);
        if ((t & 31) >= by) sum += other;
    }
    if ((t & 31) == 31) of_warp[t / 32] = sum;
    __syncthreads();
    for (int w = 0; w < t / 32; w++) sum += of_warp[w];
    from[t] = sum - mine;
    __syncthreads();
    for (int at = t; at < tiles * params.batch; at += 256)
        params.tile_order[atomicAdd(&from[at == t ? first : bucket(at)], 1)] = at;
}
// The range of keys of each query by segment, band and length, or, BY_KEYS, of queries of each key; and bounds of 64
// ranges. A block takes 256 rows of a sequence. A sequence whose segments are not such runs gets empty ranges, and is
// marked for the general kernels. The last block sorts the tiles of TILE rows by how many tiles of OTHER they visit.
template <bool BY_KEYS, int TILE, int OTHER> INLINE void compute_ranges(const HopperParams& params) {
    launch_dependents();
    int rows = BY_KEYS ? params.m : params.n, others = BY_KEYS ? params.n : params.m, parts = div_up(rows, 256),
        batch = blockIdx.x / parts, part = blockIdx.x - batch * parts;
    const int* mine = (BY_KEYS ? params.segments_k : params.segments_q) + (i64)batch * rows;
    const int* its = (BY_KEYS ? params.segments_q : params.segments_k) + (i64)batch * others;
    __shared__ int held[HELD_IDS];
    int turn = wrap_point(its, others, held), tiles = div_up(rows, 64), row = part * 256 + threadIdx.x, end = params.m;
    if (turn < 0) {
        // Mark all rows of both sides, a share per block.
        int of_q = div_up(params.n, 64), of_k = div_up(params.m, 64), all = parts * 256;
        for (int t = row; t < of_q * params.heads_q; t += all)
            mark_for_recompute(params, params.recompute_q, batch * params.heads_q + t / of_q, of_q, t % of_q);
        if (BY_KEYS)
            for (int t = row; t < of_k * params.heads_k; t += all)
                mark_for_recompute(params, params.recompute_k, batch * params.heads_k + t / of_k, of_k, t % of_k);
    }
#if LENGTHS
    end = min(end, params.lengths[batch]);
#endif
    int2 range = make_int2(0, 0);
    if (row < rows && turn >= 0 && (!BY_KEYS || row < end)) {
        int number = mine[row];
        // Ids after the wrap are below the first id.
        bool after = turn > 0 && number < its[0];
        int from = after ? turn : 0, to = after || turn == 0 ? others : turn;
        range.x = bound<false>(its, from, to, number), range.y = bound<true>(its, range.x, to, number);
#if BAND
        int low = BY_KEYS ? row - params.offset - params.right : row + params.offset - params.left;
        int high = BY_KEYS ? row - params.offset + params.left + 1 : row + params.offset + params.right + 1;
        range.x = max(range.x, low), range.y = min(range.y, high);
#endif
        if (!BY_KEYS) range.y = min(range.y, end);
        if (range.x >= range.y) range = make_int2(0, 0);
    }
    if (row < rows) params.ranges[(i64)batch * rows + row] = range;
    // Rows out of range must not change the bounds.
    bool some = range.x < range.y, there = row < rows;
    int4 x = make_int4(some ? range.x : 0x7fffffff, range.y, range.x, there ? range.y : 0x7fffffff);
    for (int by = 16; by > 0; by /= 2) {
        x.x = min(x.x, __shfl_xor_sync(~0u, x.x, by)), x.y = max(x.y, __shfl_xor_sync(~0u, x.y, by));
        x.z = max(x.z, __shfl_xor_sync(~0u, x.z, by)), x.w = min(x.w, __shfl_xor_sync(~0u, x.w, by));
    }
    __shared__ int4 halves[8];
    if ((threadIdx.x & 31) == 0) halves[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 4 && part * 4 + (int)threadIdx.x < tiles) {
        int4 a = halves[2 * threadIdx.x], b = halves[2 * threadIdx.x + 1];
        params.range_extents[(i64)batch * tiles + part * 4 + threadIdx.x] =
            make_int4(min(a.x, b.x), max(a.y, b.y), max(a.z, b.z), min(a.w, b.w));
        __threadfence();
    }
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(params.scheduler_counter, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    sort_tiles<TILE, OTHER>(params, rows, others);
    if (threadIdx.x == 0) params.scheduler_counter[0] = 0;
}
