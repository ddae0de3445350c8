// The interpreter of mask programs (postfix): for one pair (`mask_allows`) and for a whole tile (`verdict`). Each
// operation means what it means in `Mask::allows` of qkv. A verdict is conservative: a tile that is empty or full may
// be called partial, never the reverse.

__device__ __forceinline__ i64 floor_div(i64 a, i64 b) {
    i64 q = a / b;
    return q - (a % b != 0 && (a < 0) != (b < 0));
}

__device__ __forceinline__ i64 floor_mod(i64 a, i64 b) { return a - floor_div(a, b) * b; }
__device__ __forceinline__ i64 min_i64(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 max_i64(i64 a, i64 b) { return a > b ? a : b; }
__device__ __forceinline__ i64 distance(i64 a, i64 b) { return a < b ? b - a : a - b; }

// The first index of an ascending set whose element is not below `low`.
__device__ __noinline__ i64 lower_bound(const i64* set, i64 count, i64 low) {
    i64 start = 0, end = count;
    while (start < end) {
        i64 middle = (start + end) / 2;
        if (set[middle] < low) start = middle + 1;
        else end = middle;
    }
    return start;
}

// How many elements of an ascending set are in low … high.
__device__ __forceinline__ i64 members_in(const i64* set, i64 count, i64 low, i64 high) {
    return lower_bound(set, count, high + 1) - lower_bound(set, count, low);
}

// Whether BigBird lets positions of block `row` see keys of block `col`. Data: number of key blocks, blocks drawn per
// row, rows listed, seed (two words), then the lists. Rows beyond the list are drawn here by the rule of qkv.
__device__ __noinline__ bool bigbird_allows(const MaskOp& op, i64 row, i64 col) {
    if (distance(row, col) <= op.y || (row >= 0 && row < op.size) || col < op.size) return true;
    if (row < 0) return false;
    const int* data = (const int*)op.data;
    int blocks = data[0], random = data[1], listed = data[2];
    if (row < listed) {
        const int* drawn = data + 5 + row * random;
        for (int at = 0; at < random; at++)
            if (drawn[at] == col) return true;
        return false;
    }
    u64 seed = u64(u32(data[3])) | u64(u32(data[4])) << 32;
    int taken[MAX_BIGBIRD_DRAWN];
    for (int last = blocks - random, at = 0; last < blocks; last++, at++) {
        u32 words[4] = {u32(last), u32(row), 0x62696721u, 0};
        philox(words, seed);
        int pick = int((u64(words[0]) * (u64(last) + 1)) >> 32);
        for (int before = 0; before < at; before++)
            if (taken[before] == pick) {
                pick = last;
                break;
            }
        taken[at] = pick;
        if (pick == col) return true;
    }
    return false;
}

__device__ __forceinline__ i64 position_of(const GeneralParams& params, int b, int i) {
    return params.positions ? params.positions[i64(b) * params.n + i] : i + params.offset;
}

__device__ __noinline__ bool mask_allows(const GeneralParams& params, int b, int h, int i, int j, i64 p) {
    u32 stack = 1; // bit 0 is the top
    for (int at = 0; at < params.mask_ops; at++) {
        const MaskOp& op = params.mask[at];
        bool yes = true;
        switch (op.code) {
        case OP_BAND: yes = p - op.x <= j && j <= p + op.y; break;
        case OP_LENGTHS: yes = j < params.lengths[b]; break;
        case OP_SEGMENTS:
            yes = params.segments_q[i64(b) * params.n + i] == params.segments_k[i64(b) * params.m + j];
            break;
        case OP_BITS:
            yes =
                params.bits[b * params.bits_batch + h * params.bits_head + i * params.bits_row + j * params.bits_col] !=
                0;
            break;
        case OP_RESIDUE: yes = floor_mod(p - j, op.x) == 0; break;
        case OP_SAME_BLOCK: yes = floor_div(j, op.x) == floor_div(p, op.x); break;
        case OP_SUMMARY: yes = floor_mod(j, op.x) >= op.x - op.y; break;
        case OP_KEY_IN: yes = members_in((const i64*)op.data, op.count, j, j) > 0; break;
        case OP_QUERY_IN: yes = members_in((const i64*)op.data, op.count, p, p) > 0; break;
        case OP_BIGBIRD: yes = bigbird_allows(op, floor_div(p, op.x), j / op.x); break;
        case OP_BLOCKS: yes = ((const u8*)op.data)[(i / op.x) * op.count + j / op.x] != 0; break;
        case OP_BUCKETS: {
            const int* q = params.buckets_q + ((i64(b) * params.heads + h) * params.n + i) * op.size;
            const int* k = params.buckets_k + ((i64(b) * params.key_heads + h / params.group) * params.m + j) * op.size;
            yes = false;
            for (int round = 0; round < op.size; round++) yes |= q[round] == k[round];
            break;
        }
        case OP_AND:
            yes = (stack & 3) == 3;
            stack >>= 2;
            break;
        case OP_OR:
            yes = (stack & 3) != 0;
            stack >>= 2;
            break;
        case OP_NOT:
            yes = !(stack & 1);
            stack >>= 1;
            break;
        default: break;
        }
        stack = stack << 1 | u32(yes);
    }
    return stack & 1;
}

// A tile, bounds included: positions p0 … p1 of queries i0 … i1, and keys j0 … j1.
struct TileExtent {
    i64 p0, p1;
    int i0, i1, j0, j1, query_tile, key_tile, query_tiles, key_tiles;
};

__device__ __forceinline__ int to_verdict(bool empty, bool full) { return empty ? EMPTY : full ? FULL : PARTIAL; }

__device__ __noinline__ int verdict(const GeneralParams& params, int b, const TileExtent& e) {
    u32 any = 1, all = 1;
    for (int at = 0; at < params.mask_ops; at++) {
        const MaskOp& op = params.mask[at];
        int found = PARTIAL;
        bool some = true, every = true;
        i64 low = e.p0 - e.j1, high = e.p1 - e.j0; // p − j
        switch (op.code) {
        case OP_ALL: found = FULL; break;
        case OP_BAND:
            found = to_verdict(e.j1 < e.p0 - op.x || e.j0 > e.p1 + op.y, e.j0 >= e.p1 - op.x && e.j1 <= e.p0 + op.y);
            break;
        case OP_LENGTHS: found = to_verdict(e.j0 >= params.lengths[b], e.j1 < params.lengths[b]); break;
        case OP_SEGMENTS: {
            const int* q = params.extents_q + (i64(b) * e.query_tiles + e.query_tile) * 2;
            const int* k = params.extents_k + (i64(b) * e.key_tiles + e.key_tile) * 2;
            found = to_verdict(q[1] < k[0] || k[1] < q[0], q[0] == q[1] && k[0] == k[1] && q[0] == k[0]);
            break;
        }
        case OP_RESIDUE: found = to_verdict(floor_div(high, op.x) * op.x < low, op.x == 1); break;
        case OP_SAME_BLOCK: {
            i64 q0 = floor_div(e.p0, op.x), q1 = floor_div(e.p1, op.x), k0 = e.j0 / op.x, k1 = e.j1 / op.x;
            found = to_verdict(q1 < k0 || k1 < q0, q0 == q1 && q0 == k0 && k0 == k1);
            break;
        }
        case OP_SUMMARY: {
            bool one_block = e.j0 / op.x == e.j1 / op.x;
            bool some_key = !one_block || floor_mod(e.j1, op.x) >= op.x - op.y;
            found = to_verdict(!some_key, op.x == op.y || (one_block && floor_mod(e.j0, op.x) >= op.x - op.y));
            break;
        }
        case OP_KEY_IN:
        case OP_QUERY_IN: {
            bool keys = op.code == OP_KEY_IN;
            i64 from = keys ? e.j0 : e.p0, to = keys ? e.j1 : e.p1;
            i64 members = members_in((const i64*)op.data, op.count, from, to);
            found = to_verdict(members == 0, members == to - from + 1);
            break;
        }
        case OP_BIGBIRD:
        case OP_BLOCKS: {
            bool blocks = op.code == OP_BLOCKS;
            i64 r0 = blocks ? e.i0 / op.x : floor_div(e.p0, op.x), r1 = blocks ? e.i1 / op.x : floor_div(e.p1, op.x);
            i64 c0 = e.j0 / op.x, c1 = e.j1 / op.x;
            if ((r1 - r0 + 1) > 64 || (r1 - r0 + 1) * (c1 - c0 + 1) > 64) break;
            some = false;
            for (i64 r = r0; r <= r1; r++)
                for (i64 c = c0; c <= c1; c++) {
                    bool seen = blocks ? ((const u8*)op.data)[r * op.count + c] != 0 : bigbird_allows(op, r, c);
                    some |= seen;
                    every &= seen;
                }
            found = to_verdict(!some, every);
            break;
        }
        case OP_AND:
            found = to_verdict(!(any & 1 && any & 2), all & 1 && all & 2);
            any >>= 2;
            all >>= 2;
            break;
        case OP_OR:
            found = to_verdict(!(any & 3), (all & 3) != 0);
            any >>= 2;
            all >>= 2;
            break;
        case OP_NOT: {
            bool was_any = any & 1, was_all = all & 1;
            found = to_verdict(was_all, !was_any);
            any >>= 1;
            all >>= 1;
            break;
        }
        default: break;
        }
        any = any << 1 | u32(found != EMPTY);
        all = all << 1 | u32(found == FULL);
    }
    return to_verdict(!(any & 1), all & 1);
}

// The smallest and largest segment of each query tile and each key tile: one thread per tile.
extern "C" __global__ void segment_extents(const __grid_constant__ GeneralParams params) {
    int query_tiles = (params.n + QUERY_TILE - 1) / QUERY_TILE, key_tiles = (params.m + KEY_TILE - 1) / KEY_TILE;
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x, of_queries = i64(params.batch) * query_tiles;
    bool queries = at < of_queries;
    if (!queries) at -= of_queries;
    if (!queries && at >= i64(params.batch) * key_tiles) return;
    int tiles = queries ? query_tiles : key_tiles, len = queries ? params.n : params.m,
        size = queries ? QUERY_TILE : KEY_TILE;
    int b = int(at / tiles), first = int(at % tiles) * size;
    const int* segments = (queries ? params.segments_q : params.segments_k) + i64(b) * len;
    int low = segments[first], high = low;
    for (int i = first + 1; i < first + size && i < len; i++) {
        low = segments[i] < low ? segments[i] : low;
        high = segments[i] > high ? segments[i] : high;
    }
    int* extent = (queries ? params.extents_q : params.extents_k) + at * 2;
    extent[0] = low;
    extent[1] = high;
}
