// Backward's shared memory, the walk over the query tiles of a key tile, the producer thread that loads them, and the
// scheduler thread. Sizes are in backward.cu.
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
    // A scheduled tile: key tile · 2 + (any query sees it), row of the tile list, head, sequence · 2 + (valid).
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
    // The split word of the n-th tile. It stays in shared memory until the tile is done, to save a register.
    INLINE void put_split(u32 works, u32 x) const {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + SPLIT_AT + works % SPLIT_SLOTS * 4), "r"(x) : "memory");
    }
    INLINE u32 get_split(u32 works) const {
        u32 x;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(base + SPLIT_AT + works % SPLIT_SLOTS * 4) : "memory");
        return x;
    }
    // With segments: the queries that see all keys of a warpgroup, and those that see some.
    INLINE void put_visible(u32 i, int group, int4 x) const {
        asm volatile(
            "st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(base + WORK_AT + i * WORK_BYTES + 16 + group * 16),
            "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
            : "memory");
    }
    INLINE int4 get_visible(u32 i, int group) const {
        return load_shared4(base + WORK_AT + i * WORK_BYTES + 16 + group * 16);
    }
    // Takes the next tile, for single threads, which need the row of the list; false if there are no more tiles.
    INLINE bool take_work(Ring<SCHEDULER_STAGES>& next, WorkTile& w) const {
        work_full(next.place).wait(next.parity);
        int4 x = get_work(next.place);
        work_empty(next.place).arrive();
        next.next();
        w.tile = x.y, w.head = x.z, w.batch = x.w >> 1;
        return x.w & 1;
    }
    // A step: the query tile in a stage, its head, the index of its bits, flags.
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
#include "query_tiles.cuh"

// Loads a word that other blocks, or a concurrent kernel, release.
INLINE u32 load_acquire(const u32* at) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
// Release: whoever sees the word afterwards also sees what this thread wrote before.
INLINE void or_release(u32* at, u32 bits) {
    asm volatile("red.or.release.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(bits) : "memory");
}
INLINE void increment_release(u32* at) {
    asm volatile("red.add.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(1) : "memory");
}
// Spins until a word is at least `count`.
INLINE void wait_until_at_least(const u32* at, u32 count) {
#if WATCHDOG
    for (u32 tries = 0; load_acquire(at) < count && tries < 20000; tries++) {}
#else
    while (load_acquire(at) < count) {}
#endif
}

// Offsets in `progress`: per key head, its key tiles already added to dq (at 0); four counters of converted quarter
// tiles; per head, blocks whose absmax is done, and blocks whose delta is done; preprocessing blocks started; work they
// have taken.
INLINE int absmax_done_at(const HopperParams& params) { return params.batch * params.heads_k + 4; }
INLINE int delta_done_at(const HopperParams& params) { return 2 * params.batch * params.heads_k + 4; }
INLINE int prep_started_at(const HopperParams& params) { return 3 * params.batch * params.heads_k + 4; }
INLINE int prep_taken_at(const HopperParams& params) { return 3 * params.batch * params.heads_k + 5; }
INLINE int progress_len(const HopperParams& params) { return 3 * params.batch * params.heads_k + 6; }

// Key tiles of a head; with a tile list its rows, of which a split tile has several.
INLINE int work_per_head(const HopperParams& params) {
    return TILE_LIST ? params.list_row_count : div_up(params.m, kBlockN);
}

// The scheduler: finds tiles ahead of the producer, and prefetches their keys and values. Only it waits for the
// previous kernels; all other threads wait for it.
INLINE void scheduler(const HopperParams& params, const Shared& shared, const TensorMap& map_k,
                      const TensorMap& map_v) {
    int tiles = work_per_head(params), total = tiles * params.heads_k * params.batch;
    // If preprocessing overlaps this kernel, start once it has started.
    if (params.prepared_heads < params.batch * params.heads_k)
        wait_until_at_least(params.progress + prep_started_at(params), 1), fence_async_proxy();
    else wait_on_dependency();
    Ring<SCHEDULER_STAGES> next;
    for (u32 works = 0;; works++) {
        shared.work_empty(next.place).wait(next.parity ^ 1);
        // Even the first tile is taken from the counter: only running blocks may own one, since others wait for it at
        // the end.
        int index = atomicAdd(params.scheduler_counter, 1);
        bool more = index < total;
        WorkTile w(params, more ? index : 0, tiles, params.heads_k, false);
        QueryTileWalk walk(params, w);
        if (more)
            prefetch_tile<kHeadDim>(map_k, walk.key_tile * kBlockN, w.head, w.batch),
                prefetch_tile<kHeadDim>(map_v, walk.key_tile * kBlockN, w.head, w.batch);
        if (more && w.batch * params.heads_k + w.head >= params.prepared_heads) {
            // TMA will read what the overlapped kernel prepared.
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
    // Nothing here is left to wait for, but the next kernel relies on the previous ones having ended.
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
        // Load in the order in which stages become free: the first queries before the keys and values.
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
            // Of keys and values, first the one whose stage is released first.
            if (BWD_RELEASE_V_FIRST && first) load_values(), load_keys();
            else if (first) load_keys(), load_values();
        }
    }
}
