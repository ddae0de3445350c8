//! Every tile size and threshold of the CPU engine, each with its reason. What was measured to choose them is in
//! `LADDER.md`.

/// Keys in a tile. Frozen: the sums of a row are cut at these positions, so another size gives other bits. 128 keys of
/// width 64 are 32 KiB in `f32`, and a tile of scores with them fits the first-level cache together with a few rows of
/// either side.
pub const KEYS: usize = 128;

/// Queries in a tile. The bits do not depend on it, as long as it is a multiple of [`partial_sum_len`]. With 128 keys,
/// the scores of a tile are 32 KiB in `f32`.
pub const QUERIES: usize = 64;

/// Queries accumulated in a fresh partial sum before adding to dK and dV. Frozen like [`KEYS`]. A sum of `n` terms of
/// either sign in chains of `b` has an error of about √(n·b + n²/b) roundings, which is least at b = √n. From 2,048
/// queries on, 64 rounds no worse than 32, and loads and stores the sums half as often.
pub const fn partial_sum_len(queries: usize) -> usize {
    if queries < 2048 { 32 } else { 64 }
}

/// Queries that go through all passes of a tile together in bf16 and bf16x3 arithmetic: two AMX tiles high. Their
/// scores against a tile of keys are 16 KiB and stay in the first-level cache from one product to the next.
pub const BF16_ROWS: usize = 32;

/// Tiles of queries that are packed together in the backward pass in bf16 arithmetic, and whose contributions to a tile
/// of keys are added at once. The sums are then loaded and stored once per 256 queries, which otherwise costs as much
/// as the products.
pub const QUERY_TILES_PACKED: usize = 4;

/// Queries that share one span of keys in the products of a partially visible tile: two strips of a register tile.
/// Fewer would follow a diagonal more closely, but pay more often for starting a product.
pub const SPAN_ROWS: usize = 12;

/// Tiles of queries that a worker computes together, so that a tile of keys and values is loaded once per 256 queries.
/// In bf16 arithmetic, loading it once per 64 queries would take all of the third-level cache's bandwidth.
pub const QUERY_TILES_AT_ONCE: usize = 4;

/// Time to pack a tile of keys and values for the forward pass, relative to the time of a tile of queries against it: a
/// tenth for FMA, a fifth if each number is split in three.
pub const PACKING: f64 = 0.2;

/// Whether a worker takes whole heads through the backward pass: its buffers are reused and stay in its caches, and it
/// waits for no other worker's turn. If heads do not divide evenly by threads, some threads are idle at the end.
/// Sharing heads, a tile of keys at a time, avoids that, but then sums come from other cores' caches, which costs most
/// if rows are short or many threads share.
pub fn takes_whole_heads(heads: usize, keys: usize, threads: usize) -> bool {
    if heads >= 4 * threads || keys <= KEYS {
        return true;
    }
    // In tiles of keys, one after the other.
    let of_head = keys as f64 / KEYS as f64;
    let whole = heads.div_ceil(threads.max(1)) as f64 * of_head;
    let shared = (heads * (keys / KEYS)).div_ceil(threads.max(1)) as f64;
    let shared = shared.max(heads as f64 * of_head / threads.max(1) as f64);
    let sharing = if keys <= 2 * KEYS || threads >= 8 { 1.35 } else { 1.12 };
    whole <= sharing * shared
}

/// Keys in a piece of a cache that one thread takes while decoding (split-K). Frozen like [`KEYS`]. 4,096 keys are
/// enough work to hide the cost of a task, and a cache of 131,072 still keeps 32 threads busy.
pub const DECODE_SPLIT: usize = 4096;

/// Rows of queries (those of a group's heads together) up to which decoding reads keys and values in place. A few rows
/// are bound by memory bandwidth; more are bound by the products, for which packing pays from here on.
pub const GEMV_ROWS: usize = 32;

/// Below this many keys, a mask never reorders the sequence: gathering costs more than it saves.
pub const GATHER_FROM: usize = 4 * KEYS;

/// Scattered keys (or queries) are gathered if that touches at most one tile in this many.
pub const GATHER_GAIN: usize = 2;

/// Query-block and key-block pairs of a pattern that a verdict inspects before it settles for "partial".
pub const MAX_SCANNED_PAIRS: usize = 512;

/// Scores that a worker keeps for selections that read whole rows: 1 MiB in `f32`, half of a second-level cache. A
/// longer row is processed alone.
pub const SELECT_SCORES: usize = 1 << 18;

/// Keys in a chunk of linear attention. Frozen: the state is rounded at these positions. With 64 features and values of
/// width 64, the products within a chunk then cost as much as updating the state, which minimizes their sum.
pub const CHUNK: usize = 64;

/// Chunks in a span of linear attention, whose states are computed in parallel. Frozen for the same reason. 1,024 keys
/// are enough work to hide the cost of a task; one state per span of 64 features and values of width 64 is 4 numbers
/// per key.
pub const SPAN: usize = 16;
