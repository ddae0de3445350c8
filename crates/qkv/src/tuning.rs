//! Every tile size and threshold of the engine, each with its reason.

/// Keys in a block. Frozen: a row's sums are cut at these places, so another size is other bits. 128 keys of 64 numbers are
/// 32 kB in `f32`, and a tile of scores with them fits the first-level cache beside a few rows of either side.
pub const KEYS: usize = 128;

/// Queries in a tile. Bits do not depend on it, as long as it is a multiple of what is [`partial_sum_len`]. With 128 keys the scores of a
/// tile are 32 kB in `f32`.
pub const QUERIES: usize = 64;

/// Queries whose part in the gradient of a key or a value is summed from zero before it is added, of so many. Frozen like
/// [`KEYS`]. Terms of either sign leave an error of about √(n·b + n²/b) roundings in n of them summed by chains of b, which is least
/// at b = √n: with 64 the error at 128 queries was a tenth above PyTorch's. From 2,048 on 64 round no more than 32, and
/// load and store the sums half as often.
pub const fn partial_sum_len(queries: usize) -> usize {
    if queries < 2048 { 32 } else { 64 }
}

/// Queries that go through a tile together where products are made from bf16, pairs or thirds: two tiles of the matrix unit high.
/// Their scores against a block of keys are 16 kB and stay in the first-level cache from one product to the next.
pub const BF16_ROWS: usize = 32;

/// Tiles of queries whose part in the gradients of a tile of keys is added at once where products are made from pairs of bf16: sums
/// are then loaded and stored once for 256 queries, which would otherwise cost as much as the products.
pub const QUERY_TILES_PACKED: usize = 4;

/// Queries that share one span of keys in the products of a tile that is kept in part: two strips of a register tile. Fewer
/// would follow a diagonal more closely and pay more often for beginning.
pub const SPAN_ROWS: usize = 12;

/// Tiles of queries that a worker takes past the keys together, so that a block of keys and values comes from far away once for
/// 256 queries: with pairs of bf16 a stream for 64 of them would be all that the third-level cache can give.
pub const QUERY_TILES_AT_ONCE: usize = 4;

/// With so many heads for each thread, a worker takes whole heads through the backward pass: it uses its memory again, which then
/// stays in its caches, and waits for nobody's turn.
pub const WHOLE_HEADS: usize = 4;

/// Keys in a piece of a cache that one thread takes while decoding. Frozen for the same reason as [`KEYS`]; 4,096 keys are
/// enough work to hide handing them out, and a cache of 131,072 still keeps 32 threads busy.
pub const DECODE_SPLIT: usize = 4096;

/// Rows of queries (those of a group's heads together) up to which decoding reads keys and values as they lie. Memory is
/// what few rows wait for; with more the products are, and from some number on packing pays. With keys and values of 128 in
/// `f32`, 16 rows took a third of the time of packing, which hardly grows from there to 32 rows while this doubles.
pub const GEMV_ROWS: usize = 32;

/// Below this many keys a mask never brings its own order of the sequence: gathering costs more than it saves.
pub const GATHER_FROM: usize = 4 * KEYS;

/// Keys (or queries) that lie scattered are gathered if that touches at most one block in so many.
pub const GATHER_GAIN: usize = 2;

/// How many pairs of pattern blocks a verdict looks at before it settles for "partial".
pub const PAIRS_LOOKED_AT: usize = 512;

/// Numbers that whole rows of scores may take in a worker's cache, for selections that look at whole rows: 1 MiB in `f32`,
/// half a second-level cache. A row that is longer is looked at alone.
pub const SELECT_SCORES: usize = 1 << 18;

/// Keys in a chunk of linear attention. Frozen: the state is rounded at these places. With 64 features and values of 64, a
/// chunk's own products then cost as much as bringing the state forward, which is where the sum of both is least.
pub const CHUNK: usize = 64;

/// Chunks in a span of linear attention, whose states are made in parallel. Frozen for the same reason. 1,024 keys are
/// enough work to hide handing them out; a state for every span of 64 features and values of 64 is 4 numbers a key.
pub const SPAN: usize = 16;
