// Backward's way through the tiles: what lies in shared memory, which query tiles a key tile visits, the thread that
// has the copy engine bring them, and the one that finds work. backward.cu says the sizes.
#pragma once

struct Shared {
    u32 base;
    INLINE u32 k(u32 place) const { return base + K_AT + place * KV_BYTES; }
    INLINE u32 v() const { return base + V_AT; }
    INLINE u32 q(u32 place) const { return base + Q_AT + place * Q_BYTES; }
    INLINE u32 o(u32 place) const { return base + O_AT + place * Q_BYTES; }
    INLINE u32 ds(u32 place) const { return base + DS_AT + place * S_BYTES; }
    INLINE u32 p(u32 place) const { return base + P_AT + place * S_BYTES; }
    INLINE u32 add(int group) const { return base + ADD_AT + group * 4096 * 4; }
    INLINE u32 lse(u32 place) const { return base + LSE_AT + place * kBlockM * 4; }
    INLINE u32 dq_scale(u32 place) const { return base + DQ_SCALE_AT + place * kBlockM * 4; }
    INLINE u32 delta(u32 place) const { return base + DELTA_AT + place * kBlockM * 4; }
    INLINE u32 drop(int group) const { return base + DROP_AT + group * COLUMNS * 8; }
    INLINE Barrier barrier(u32 index) const { return {base + BARRIERS_AT + index * 8}; }
    INLINE Barrier v_full() const { return barrier(0); }
    INLINE Barrier v_empty() const { return barrier(1); }
    INLINE Barrier add_full() const { return barrier(2); }
    INLINE Barrier add_empty() const { return barrier(3); }
    INLINE Barrier work_full(u32 i) const { return barrier(4 + i); }
    INLINE Barrier work_empty(u32 i) const { return barrier(6 + i); }
    INLINE Barrier q_full(u32 i) const { return barrier(8 + i); }
    INLINE Barrier q_empty(u32 i) const { return barrier(8 + Q_STAGES + i); }
    INLINE Barrier o_full(u32 i) const { return barrier(8 + 2 * Q_STAGES + i); }
    INLINE Barrier o_empty(u32 i) const { return barrier(8 + 2 * Q_STAGES + O_STAGES + i); }
    INLINE Barrier k_full(u32 i) const { return barrier(8 + 2 * Q_STAGES + 2 * O_STAGES + i); }
    INLINE Barrier k_empty(u32 i) const { return barrier(8 + 2 * Q_STAGES + 2 * O_STAGES + K_STAGES + i); }
    // The next work: its key tile, doubled, with a bit for whether any query sees it; its place in a list; its head;
    // its sequence, doubled, with a bit for whether there is any work at all.
    INLINE void put_work(u32 i, int tile, int place, int head, int batch) const {
        asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(base + WORK_AT + i * WORK_BYTES), "r"(tile),
                     "r"(place), "r"(head), "r"(batch)
                     : "memory");
    }
    INLINE int4 get_work(u32 i) const {
        int4 x;
        asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(base + WORK_AT + i * WORK_BYTES)
                     : "memory");
        return x;
    }
    // Which split of a row the n-th work is, where the row is cut. It stays until the work is done, so that no register
    // has to hold it.
    INLINE void put_split(u32 works, u32 x) const {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + SPLIT_AT + works % SPLIT_SLOTS * 4), "r"(x) : "memory");
    }
    INLINE u32 get_split(u32 works) const {
        u32 x;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(base + SPLIT_AT + works % SPLIT_SLOTS * 4) : "memory");
        return x;
    }
    // Of segments: the queries that see all keys of a warpgroup, and those that see some.
    INLINE void put_visible(u32 i, int group, int4 x) const {
        asm volatile(
            "st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(base + WORK_AT + i * WORK_BYTES + 16 + group * 16),
            "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
            : "memory");
    }
    INLINE int4 get_visible(u32 i, int group) const {
        return load_shared4(base + WORK_AT + i * WORK_BYTES + 16 + group * 16);
    }
    // The same, by one thread that has to know the place: false where there is no more.
    INLINE bool take_work(Ring<SCHEDULER_STAGES>& next, WorkTile& w) const {
        work_full(next.place).wait(next.parity);
        int4 x = get_work(next.place);
        work_empty(next.place).arrive();
        next.next();
        w.tile = x.y, w.head = x.z, w.batch = x.w >> 1;
        return x.w & 1;
    }
    // What the step is that a place of the queries holds: the query tile, its head, which tile of the bits, flags.
    INLINE void put_step(u32 i, int tile, int head, u32 bits, u32 flags) const {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(base + STEP_AT + i * 16), "r"(tile), "r"(head),
                     "r"(bits), "r"(flags)
                     : "memory");
    }
    INLINE int4 get_step(u32 i) const {
        int4 x;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(base + STEP_AT + i * 16)
                     : "memory");
        return x;
    }
};
// Flags of a step: there is another; it is partial for the keys of warpgroup 0, 1; it has no pair of theirs.
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

// The query tiles that see a key tile: for each query head of the group, from the last tile to the first.
struct QueryTileWalk {
    const HopperParams& params;
    int batch, at, key_tile, head, last_head; // heads: head .. last_head; at: the row of the plan
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
    // Whether the step keeps only some pairs, for the keys of each warpgroup: flags. Of segments, the warpgroups know.
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
// Up to which query all keys of a warpgroup are seen: none, where some of them are not there.
INLINE int full_query_end(int all_high, int tile, int group, int m) {
    return tile * kBlockN + (SPLIT_WIDTH ? 0 : group * 64) + 64 > m ? 0 : all_high;
}
#endif

// What others of this launch, or of one beside it, say in device memory.
INLINE u32 load_acquire(const u32* at) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
// These or_release to whoever sees the word afterwards what this thread knows to be in device memory.
INLINE void or_release(u32* at, u32 bits) {
    asm volatile("red.or.release.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(bits) : "memory");
}
INLINE void increment_release(u32* at) {
    asm volatile("red.add.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(1) : "memory");
}
// Waits until a word is no less.
INLINE void wait_until_at_least(const u32* at, u32 count) {
#if WATCHDOG
    for (u32 tries = 0; load_acquire(at) < count && tries < 20000; tries++) {}
#else
    while (load_acquire(at) < count) {}
#endif
}

// Counts at `whole`: of each head of keys, its key tiles that have been added; how many tiles' quarters, the first, the
// second, … are rounded; of each head, the parts of it that have been measured beside this kernel, and those that have
// been prepared; the blocks that do so; the parts that they have taken.
INLINE int absmax_done_at(const HopperParams& params) { return params.batch * params.heads_k + 4; }
INLINE int delta_done_at(const HopperParams& params) { return 2 * params.batch * params.heads_k + 4; }
INLINE int prep_started_at(const HopperParams& params) { return 3 * params.batch * params.heads_k + 4; }
INLINE int prep_taken_at(const HopperParams& params) { return 3 * params.batch * params.heads_k + 5; }
INLINE int progress_len(const HopperParams& params) { return 3 * params.batch * params.heads_k + 6; }

// Key tiles of a head; with a list, its rows, of which a tile may have several.
INLINE int work_per_head(const HopperParams& params) {
    return TILE_LIST ? params.list_row_count : div_up(params.m, kBlockN);
}

// Finds work, a tile or two ahead, and has its keys and values brought to the cache. It alone waits for the kernels
// before: all others wait for it.
INLINE void scheduler(const HopperParams& params, const Shared& shared, const TensorMap& map_k,
                      const TensorMap& map_v) {
    int tiles = work_per_head(params), total = tiles * params.heads_k * params.batch;
    // Where some heads are prepared beside this kernel, it begins when that does.
    if (params.prepared_heads < params.batch * params.heads_k)
        wait_until_at_least(params.progress + prep_started_at(params), 1), fence_async_proxy();
    else wait_on_dependency();
    Ring<SCHEDULER_STAGES> next;
    for (u32 works = 0;; works++) {
        shared.work_empty(next.place).wait(next.parity ^ 1);
        // Even the first is only taken by a block that runs: in the end, others wait for it.
        int index = atomicAdd(params.scheduler_counter, 1);
        bool more = index < total;
        WorkTile w(params, more ? index : 0, tiles, params.heads_k, false);
        QueryTileWalk walk(params, w);
        if (more)
            prefetch_tile<kHeadDim>(map_k, walk.key_tile * kBlockN, w.head, w.batch),
                prefetch_tile<kHeadDim>(map_v, walk.key_tile * kBlockN, w.head, w.batch);
        if (more && w.batch * params.heads_k + w.head >= params.prepared_heads) {
            // What is prepared beside this kernel, the copy engine will read.
            wait_until_at_least(params.progress + delta_done_at(params) + w.batch * params.heads_k + w.head,
                                params.heads_q / params.heads_k * div_up(params.n, ROW_STATS_PAD));
            fence_async_proxy();
        }
#if SEGMENTS
#pragma unroll 1
        for (int g = 0; g < CONSUMER_GROUPS; g++) {
            RangeExtent of_keys(params, w.batch, w.tile * (kBlockN / 64) + (SPLIT_WIDTH ? 0 : g), 1, params.m);
            shared.put_visible(next.place, g,
                               make_int4(of_keys.all_low, full_query_end(of_keys.all_high, w.tile, g, params.m),
                                         of_keys.low, of_keys.high));
        }
#endif
        shared.put_work(next.place, walk.key_tile * 2 + walk.valid(), w.tile, w.head, w.batch * 2 + more);
#if TILE_LIST
        shared.put_split(works, walk.split);
#endif
        shared.work_full(next.place).arrive();
        next.next();
        if (!more) break;
    }
    // By now it has nothing to wait for; but what comes after this kernel counts on the end of those before.
    wait_on_dependency();
    __threadfence();
    if (atomicAdd(params.scheduler_counter + 1, 1) == gridDim.x - 1)
        params.scheduler_counter[0] = 0, params.scheduler_counter[1] = 0;
}

INLINE void producer(const HopperParams& params, const Shared& shared, const TensorMap& map_q, const TensorMap& map_k,
                     const TensorMap& map_v, const TensorMap& map_o) {
    int padded = div_up(params.n, ROW_STATS_PAD) * ROW_STATS_PAD;
    Ring<Q_STAGES> q;
    Ring<O_STAGES> o;
    Ring<SCHEDULER_STAGES> next;
    u32 works = 0;
    for (WorkTile w; shared.take_work(next, w); works++) {
        QueryTileWalk walk(params, w);
        w.tile = walk.key_tile;
        auto load_keys = [&]() {
            u32 place = works % K_STAGES;
            shared.k_empty(place).wait(works / K_STAGES & 1 ^ 1);
            shared.k_full(place).expect(KV_BYTES);
            tma_load_tile<kBlockN, kHeadDim>(shared.k(place), map_k, shared.k_full(place), w.tile * kBlockN, w.head,
                                             w.batch);
        };
        auto load_values = [&]() {
            shared.v_empty().wait(works & 1 ^ 1);
            shared.v_full().expect(KV_BYTES);
            tma_load_tile<kBlockN, kHeadDim>(shared.v(), map_v, shared.v_full(), w.tile * kBlockN, w.head, w.batch);
        };
        // In the order in which their places become free: the first queries before the keys and values.
        bool first = walk.valid();
        if (!first) load_keys(), load_values();
#pragma unroll 1
        for (bool more = first; more; first = false) {
            int tile = walk.tile(), row = tile * kBlockM, head = walk.head;
            u32 bits = NO_BITS, flags = walk.partial(bits);
            walk.next();
            more = walk.valid();
            i64 at = ((i64)w.batch * params.heads_q + head) * padded + row;
            shared.q_empty(q.place).wait(q.parity ^ 1);
            shared.put_step(q.place, tile, head, bits, flags | (more ? MORE_STEPS : 0));
            shared.q_full(q.place).expect(Q_BYTES + 2 * kBlockM * 4);
            tma_load_tile<kBlockM, kHeadDim>(shared.q(q.place), map_q, shared.q_full(q.place), row, head, w.batch);
            tma_load_bytes(shared.lse(q.place), params.lse_log2 + at, kBlockM * 4, shared.q_full(q.place));
            tma_load_bytes(shared.dq_scale(q.place), params.dq_scale + at, kBlockM * 4, shared.q_full(q.place));
            q.next();
            shared.o_empty(o.place).wait(o.parity ^ 1);
            shared.o_full(o.place).expect(Q_BYTES + kBlockM * 4);
            tma_load_tile<kBlockM, kHeadDim>(shared.o(o.place), map_o, shared.o_full(o.place), row, head, w.batch);
            tma_load_bytes(shared.delta(o.place), params.delta + at, kBlockM * 4, shared.o_full(o.place));
            o.next();
            // Of both, that whose place becomes free first.
            if (BWD_RELEASE_V_FIRST && first) load_values(), load_keys();
            else if (first) load_keys(), load_values();
        }
    }
}
