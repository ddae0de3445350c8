// Classifies every tile of a mask that does not depend on the data, when a plan is made: tile_list.rs turns the
// verdicts into the lists that Hopper's kernels walk. A block of 128 threads classifies one tile of QUERY_TILE ×
// KEY_TILE.

#define WORDS (QUERY_TILE * KEY_TILE / 32) // words of a tile's bits

// 32 pairs of a tile, [QUERY_TILE, KEY_TILE / 32] words: bit x is set if the query sees key x of the word.
__device__ __forceinline__ u32 bits_at(const GeneralParams& params, int query_tile, int key_tile, int word) {
    int i = query_tile * QUERY_TILE + word / (KEY_TILE / 32), j0 = key_tile * KEY_TILE + word % (KEY_TILE / 32) * 32;
    u32 bits = 0;
    if (i >= params.n) return 0;
    for (int x = 0; x < 32; x++)
        if (j0 + x < params.m && mask_allows(params, 0, 0, i, j0 + x, i + params.offset)) bits |= 1u << x;
    return bits;
}

__device__ __forceinline__ u64 mix64(u64 x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// result [query tiles, key tiles, 3] × u64. Two words are zeros for an empty tile, ones for a full tile, and otherwise
// a checksum that identifies its bits. The third has a bit for each 64 × 64 block of a partial tile that keeps any
// pair, [QUERY_TILE / 64, KEY_TILE / 64]. blockIdx: key tile, query tile.
extern "C" __global__ void __launch_bounds__(128) classify(const __grid_constant__ GeneralParams params) {
    SHARED(shared);
    u64* sums = (u64*)shared; // [128, 2]
    int* found =
        (int*)(sums + 128 * 2); // [128]: 1 some pair is kept, 2 some is masked; 4, 8 … the blocks with kept pairs
    int key_tile = int(blockIdx.x), query_tile = int(blockIdx.y), thread = int(threadIdx.x);
    TileExtent extent;
    extent.query_tiles = extent.key_tiles = 1;
    extent.query_tile = extent.key_tile = 0;
    query_extent(params, 0, query_tile * QUERY_TILE, QUERY_TILE, extent);
    key_extent(params, key_tile * KEY_TILE, KEY_TILE, extent);
    // The last key tile is never full if it is ragged: keys beyond the end have to be masked.
    bool ragged = (key_tile + 1) * KEY_TILE > params.m;
    int said = verdict(params, 0, extent);
    u64 first = 0, second = 0;
    int here = said == EMPTY ? 2 : said == FULL && !ragged ? 1 : 0;
    if (here == 0)
        for (int word = thread; word < WORDS; word += 128) {
            u32 bits = bits_at(params, query_tile, key_tile, word);
            bool inside =
                query_tile * QUERY_TILE + word / (KEY_TILE / 32) < params.n; // rows beyond the end do not matter
            here |= (bits ? 1 : 0) | (inside && bits != 0xffffffffu ? 2 : 0);
            if (bits) here |= 4 << (word / (KEY_TILE / 32) / 64 * (KEY_TILE / 64) + word % (KEY_TILE / 32) / 2);
            u64 both = u64(word) << 32 | bits;
            first += mix64(both + 0x9e3779b97f4a7c15ull);
            second += mix64(both * 0xd6e8feb86659fd93ull + 1);
        }
    sums[2 * thread] = first;
    sums[2 * thread + 1] = second;
    found[thread] = here;
    __syncthreads();
    if (thread != 0) return;
    for (int at = 1; at < 128; at++) {
        first += sums[2 * at];
        second += sums[2 * at + 1];
        here |= found[at];
    }
    // A checksum must not read as empty or full.
    if (first == 0 && second == 0) first = 1;
    if (~first == 0 && ~second == 0) first = 1;
    u64* to = (u64*)params.result + (i64(query_tile) * int(gridDim.x) + key_tile) * 3;
    int both = here & 3;
    to[0] = both == 2 ? 0 : both == 1 ? ~0ull : first;
    to[1] = both == 2 ? 0 : both == 1 ? ~0ull : second;
    to[2] = u64(here >> 2);
}

// result [tiles, WORDS]: the bits of the tiles that `pooled_columns` lists as (query tile, key tile). Rows of bits are
// queries, or keys if BY_KEYS. Columns are in fragment order: thread t of a quad holds columns 2t and 2t + 1 of each 8,
// and the bits of a thread are adjacent.
template <bool BY_KEYS> __device__ __forceinline__ void fill_tile(const GeneralParams& params) {
    constexpr int COLUMNS = BY_KEYS ? QUERY_TILE : KEY_TILE;
    const int* tile = (const int*)params.pooled_columns + 2 * blockIdx.x;
    u32* to = (u32*)params.result + i64(blockIdx.x) * WORDS;
    for (int word = int(threadIdx.x); word < WORDS; word += 128) {
        u32 bits = 0;
        for (int x = 0; x < 32; x++) {
            int row = word / (COLUMNS / 32), at = word % (COLUMNS / 32) * 32 + x, thread = at / (COLUMNS / 4),
                its = at % (COLUMNS / 4);
            int column = its / 2 * 8 + thread * 2 + its % 2;
            int i = tile[0] * QUERY_TILE + (BY_KEYS ? column : row), j = tile[1] * KEY_TILE + (BY_KEYS ? row : column);
            if (i < params.n && j < params.m && mask_allows(params, 0, 0, i, j, i + params.offset)) bits |= 1u << x;
        }
        to[word] = bits;
    }
}
extern "C" __global__ void __launch_bounds__(128) fill_queries(const __grid_constant__ GeneralParams params) {
    fill_tile<false>(params);
}
extern "C" __global__ void __launch_bounds__(128) fill_keys(const __grid_constant__ GeneralParams params) {
    fill_tile<true>(params);
}
