// Backward's work that is linear in the sequence, done by one warp beside the products, which leave memory idle: it measures
// keys and values and prepares the queries of heads that come later, and rounds each tile of dq when the last of its parts
// has been added. What it reads is brought by the copy engine, ASIDE_STAGE bytes at a time.
#pragma once

struct Aside {
    const Problem& p;
    const Shared& shared;
    const TensorMap &map_k, &map_v, &map_out, &map_o;  // boxes of 32 rows
    u32 brought, taken;                                // stages, since the beginning

    // Two boxes of 32 rows of 64 columns.
    INLINE void bring(const TensorMap& a, const TensorMap& b, int column, int row, int head, int batch) {
        u32 place = brought % ASIDE_STAGES;
        brought++;
        if (lane_id() != 0) return;
        Barrier full = shared.aside_full(place);
        full.expect(ASIDE_STAGE);
        load_box(shared.aside(place), a, full, column, row, head, batch);
        load_box(shared.aside(place) + ASIDE_STAGE / 2, b, full, column, row, head, batch);
    }
    INLINE u32 take() {
        u32 place = taken % ASIDE_STAGES;
        shared.aside_full(place).wait(taken / ASIDE_STAGES & 1);
        taken++;
        return shared.aside(place);
    }
    // Unit `unit` of 16 bytes of the lane's row.
    INLINE uint4 unit(u32 box, int unit) const {
        uint4 x;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(box + lane_id() * 128 + (unit ^ (lane_id() & 7)) * 16) : "memory");
        return x;
    }

    // The largest |k| and |v| of 128 keys, as `attention_backward_measure` has them.
    INLINE void measure(int bh, int part) {
        int batch = bh / p.heads_k, head = bh - batch * p.heads_k, end = p.m, first = part * 128;
#if LENGTHS
        end = min(end, p.lengths[batch]);
#endif
        constexpr int COUNT = 4 * D / 64;
        u32 most_k = 0, most_v = 0;
        if (first < end) {
            auto ask = [&](int x) { bring(map_k, map_v, x % (D / 64) * 64, first + x / (D / 64) * 32, head, batch); };
#pragma unroll 1
            for (int x = 0; x < min(COUNT, ASIDE_STAGES); x++) ask(x);
#pragma unroll 1
            for (int x = 0; x < COUNT; x++) {
                u32 at = take(), here_k = 0, here_v = 0;
#pragma unroll 1
                for (int u = 0; u < 8; u++) {
                    uint4 y = unit(at, u), z = unit(at + ASIDE_STAGE / 2, u);
                    // Magnitudes of 16-bit floats compare as integers.
                    auto larger = [](u32 a, u32 two) { return max(a, max(two & 0x7fffu, two >> 16 & 0x7fffu)); };
                    here_k = larger(larger(larger(larger(here_k, y.x), y.y), y.z), y.w);
                    here_v = larger(larger(larger(larger(here_v, z.x), z.y), z.z), z.w);
                }
                bool there = first + x / (D / 64) * 32 + lane_id() < end;
                if (there || here_k >= INFINITE_BITS) most_k = max(most_k, here_k);
                if (there || here_v >= INFINITE_BITS) most_v = max(most_v, here_v);
                __syncwarp();
                if (x + ASIDE_STAGES < COUNT) ask(x + ASIDE_STAGES);
            }
            most_k = __reduce_max_sync(~0u, most_k), most_v = __reduce_max_sync(~0u, most_v);
        }
        if (lane_id() == 0)
            p.limits[(i64)bh * div_up(p.m, 128) + part] = make_float2(widen((u16)min(most_k, INFINITE_BITS)), widen((u16)min(most_v, INFINITE_BITS)));
        raise_flag(measured_of(p, bh));
    }

    // The statistics of the M rows of a query tile, and zeros to add its dq to.
    INLINE void prepare(int bh_k, int head, int tile) {
        int batch = bh_k / p.heads_k, bh = batch * p.heads_q + head, tiles = div_up(p.n, M);
        constexpr int COUNT = M / 32 * (D / 64);
        auto ask = [&](int x) { bring(map_out, map_o, x % (D / 64) * 64, tile * M + x / (D / 64) * 32, head, batch); };
#pragma unroll 1
        for (int x = 0; x < min(COUNT, ASIDE_STAGES); x++) ask(x);
        int awaited = visitors(p, batch, tile);
        if (lane_id() == 0) p.awaited[(i64)bh * tiles + tile] = awaited;
        clear_dq(p, bh, tile, awaited, lane_id(), 32);
#if !FREE_ORDER
        if (lane_id() == 0) wait_flag(measured_of(p, bh_k), div_up(p.m, 128));
        __syncwarp();
#endif
        float2 most = limits_of(p, bh_k);
        float sum = 0.f, square = 0.f;
#pragma unroll 1
        for (int x = 0; x < COUNT; x++) {
            u32 at = take();
            if (x % (D / 64) == 0) sum = square = 0.f;
#pragma unroll 1
            for (int u = 0; u < 8; u++) {
                uint4 a = unit(at, u), b = unit(at + ASIDE_STAGE / 2, u);
                add_products(sum, square, a.x, b.x), add_products(sum, square, a.y, b.y);
                add_products(sum, square, a.z, b.z), add_products(sum, square, a.w, b.w);
            }
            if (x % (D / 64) == D / 64 - 1) write_statistics(p, bh, tile * M + x / (D / 64) * 32 + lane_id(), sum, square, most);
            __syncwarp();
            if (x + ASIDE_STAGES < COUNT) ask(x + ASIDE_STAGES);
        }
        raise_flag(prepared_of(p, bh_k));
    }

    // Rounds a dq tile that nothing will be added to any more.
    INLINE void finish(int id) {
        int tiles = div_up(p.n, M), bh = id / tiles, tile = id - bh * tiles, batch = bh / p.heads_q, head = bh - batch * p.heads_q;
        bool wide = p.d % 8 == 0 && (p.dq_i | p.dq_h | p.dq_b) % 8 == 0 && ((u64)p.dq & 15) == 0;
        constexpr int COUNT = M * D * 4 / ASIDE_STAGE;
        auto ask = [&](int x) {
            u32 place = brought % ASIDE_STAGES;
            brought++;
            if (lane_id() != 0) return;
            shared.aside_full(place).expect(ASIDE_STAGE);
            load_bytes(shared.aside(place), p.dq_sum + (i64)id * (M * D) + x * (ASIDE_STAGE / 4), ASIDE_STAGE, shared.aside_full(place));
        };
        fence_all();
        __syncwarp();
#pragma unroll 1
        for (int x = 0; x < min(COUNT, ASIDE_STAGES); x++) ask(x);
#pragma unroll 1
        for (int x = 0; x < COUNT; x++) {
            // Half of a piece: 64 rows of 32 columns, as fragments of 128 threads.
            int row0 = tile * M + (M == 128 ? x / 2 * 64 : 0), column0 = (M == 128 ? 0 : x / 2 * 64) + x % 2 * 32;
            u32 at = take(), odd = 0;
#pragma unroll 1
            for (int y = 0; y < 4; y++) {
                // Two rows, 8 columns of each.
                int pair = (y * 32 + lane_id()) / 4, eight = lane_id() & 3, row = row0 + pair / 8 * 16 + pair % 8;
                float upper = p.scale, lower = p.scale;
#if !FREE_ORDER
                const float* grain = p.grain + (i64)bh * (div_up(p.n, STATISTICS_PAD) * STATISTICS_PAD) + row;
                upper /= grain[0], lower /= grain[8];
#endif
                u32 high[4], low[4];
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    int4 z;
                    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(z.x), "=r"(z.y), "=r"(z.z), "=r"(z.w) : "r"(at + eight * 2048 + (pair * 4 + t) * 16) : "memory");
                    auto number = [](int a) { return FREE_ORDER ? __int_as_float(a) : __int2float_rn(a); };
                    high[t] = pack(number(z.x) * upper, number(z.y) * upper), low[t] = pack(number(z.z) * lower, number(z.w) * lower);
                    odd |= overflow(high[t]) | overflow(low[t]);
                }
                u16* to = p.dq + batch * p.dq_b + head * p.dq_h + row * p.dq_i + column0 + eight * 8;
                write_eight(to, high, row < p.n ? p.d - column0 - eight * 8 : 0, wide);
                write_eight(to + 8 * p.dq_i, low, row + 8 < p.n ? p.d - column0 - eight * 8 : 0, wide);
            }
            if (MASKED && (odd & 0x80008000u) && row0 < p.n) tell_broken(p, p.broken_q, bh, div_up(p.n, 64), row0 / 64);
            __syncwarp();
            if (x + ASIDE_STAGES < COUNT) ask(x + ASIDE_STAGES);
        }
    }
    INLINE static void write_eight(u16* to, const u32 (&x)[4], int columns, bool wide) {
        if (columns <= 0) return;
        if (wide) {
            *(uint4*)to = make_uint4(x[0], x[1], x[2], x[3]);
            return;
        }
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < columns) to[e] = (u16)(x[e / 2] >> (e & 1) * 16);
    }

    // Chores of a head: its keys are measured; then the queries of the head before are prepared.
    INLINE void go() {
        int group = p.heads_q / p.heads_k, tiles = div_up(p.n, M), parts = FREE_ORDER ? 0 : div_up(p.m, 128), heads = p.batch * p.heads_k - p.ahead;
        int of_head = parts + group * tiles, total = heads > 0 ? (heads + 1) * of_head : 0;
        Ring<ASIDE_QUEUE> queue;
        int chore = __shfl_sync(~0u, claim(total > 0), 0);
        for (bool ended = false;;) {
            if (__any_sync(~0u, shared.done_full(queue.place).ready_now(queue.parity))) {
                int id = shared.get_done(queue.place);
                __syncwarp();
                if (lane_id() == 0) shared.done_empty(queue.place).arrive();
                queue.next();
                if (id < 0) ended = true;
                else finish(id);
            } else if (chore < total) {
                int following = claim(true), at = chore / of_head, rest = chore - at * of_head;
                if (rest < parts && at < heads) measure(p.ahead + at, rest);
                if (rest >= parts && at > 0) {
                    int bh = p.ahead + at - 1, h = (rest - parts) / tiles;
                    prepare(bh, bh % p.heads_k * group + h, rest - parts - h * tiles);
                }
                chore = __shfl_sync(~0u, following, 0);
            } else if (ended) {
                return;
            }
        }
    }
    // The next chore, known to the first lane when it looks at it.
    INLINE int claim(bool any) const { return any && lane_id() == 0 ? (int)atomicAdd(next_chore(p), 1) : 0; }
};
