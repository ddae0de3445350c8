// Decoding on Hopper: one query a head against many keys, limited by memory. A block takes pieces of 512 keys of a key head,
// one after the other, for all query heads that share it, packed as up to 16 rows of a tensor-core tile. One warp has the
// copy engine bring keys and values, 64 at a time, and never waits for the end of a piece; each of the other four computes
// with 16 of the 64. Masks, bias and the rest are those of score.cuh. WIDTH = D = DV: 64, 128 or 256.

#ifndef STAGES
#define STAGES (WIDTH >= 128 ? 3 : 5)
#endif
#define BLOCKS (WIDTH >= 256 ? 1 : 2) // on a multiprocessor
#define RING_BYTES (STAGES * 2 * SIDE_BYTES)
#define LD_OUT (WIDTH + 4)

// What a piece is about. Queries stand at place i0 of 1.
struct Piece {
    int number, row_tile, key_head, b, start, end;
    bool whole;
    __device__ __forceinline__ Piece(const Job& job, int work) {
        int row_tiles = (job.group * job.n + 15) / 16, at = work / job.pieces;
        number = work % job.pieces;
        row_tile = at % row_tiles, key_head = at / row_tiles % job.key_heads, b = at / row_tiles / job.key_heads;
        start = number * PIECE, end = start + PIECE < job.m ? start + PIECE : job.m;
        whole = true;
        if (job.ops) {
            Extent extent;
            extent.query_tiles = extent.key_tiles = 1;
            extent.query_tile = extent.key_tile = 0;
            places_of(job, b, 0, 1, extent);
            keys_of(job, start, PIECE, extent);
            int said = job.segments_q ? PARTIAL : verdict(job, b, extent);
            whole = said == FULL;
            if (said == EMPTY) end = start;
        }
    }
    __device__ __forceinline__ int steps() const { return (end - start + KEYS - 1) / KEYS; }
};

extern "C" __global__ void __launch_bounds__(160, BLOCKS)
decode(const __grid_constant__ Job job, const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v) {
    extern __shared__ u8 memory[];
    u32 ring = (u32(__cvta_generic_to_shared(memory)) + 1023) & ~1023u;
    float* out_of = (float*)(memory + (ring - u32(__cvta_generic_to_shared(memory))) + RING_BYTES); // [16, LD_OUT]
    float* most_of = out_of + 16 * LD_OUT;                                                          // [4, 16]
    float* sum_of = most_of + 64;
    float* inner_of = sum_of + 64;
    u32 gates = u32(__cvta_generic_to_shared(inner_of + 64));
    auto full = [&](u32 stage) { return Gate{gates + stage * 8}; };
    auto empty = [&](u32 stage) { return Gate{gates + (STAGES + stage) * 8}; };
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int at = 0; at < STAGES; at++) full(at).init(1), empty(at).init(4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    the_next_may_start();
    int works = (job.group * job.n + 15) / 16 * job.key_heads * job.batch * job.pieces;
    u32 stage = 0, parity = 0;
    if (warp == 4) {
        if (lane != 0) return;
        for (int work = int(blockIdx.x); work < works; work += int(gridDim.x)) {
            Piece piece(job, work);
            for (int j0 = piece.start; j0 < piece.end; j0 += KEYS) {
                empty(stage).wait(parity ^ 1);
                bring_both(ring + stage * 2 * SIDE_BYTES, map_k, map_v, full(stage), j0, piece.key_head, piece.b);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    int g = lane / 4, t = lane % 4, rows = job.group * job.n;
    i64 in_all = i64(job.batch) * job.heads * job.n;
    for (int work = int(blockIdx.x); work < works; work += int(gridDim.x)) {
        Piece piece(job, work);
        int b = piece.b, r0 = piece.row_tile * 16 + g, r1 = r0 + 8;
        bool there0 = r0 < rows, there1 = r1 < rows; // rows of the 16 that stand for a query
        int h0 = piece.key_head * job.group + (there0 ? r0 : 0), h1 = piece.key_head * job.group + (there1 ? r1 : 0);
        u32 q[WIDTH / 16][4]; // [16 rows, 16 columns] each
        const T* q0 = job.q.at + b * job.q.batch + h0 * job.q.head + 2 * t;
        const T* q1 = job.q.at + b * job.q.batch + h1 * job.q.head + 2 * t;
#pragma unroll
        for (int kk = 0; kk < WIDTH / 16; kk++) {
            q[kk][0] = there0 ? *(const u32*)(q0 + kk * 16) : 0;
            q[kk][1] = there1 ? *(const u32*)(q1 + kk * 16) : 0;
            q[kk][2] = there0 ? *(const u32*)(q0 + kk * 16 + 8) : 0;
            q[kk][3] = there1 ? *(const u32*)(q1 + kk * 16 + 8) : 0;
        }
        float scale0 = head_of(job, b, h0).scale, scale1 = head_of(job, b, h1).scale;
        float acc[SUMS][4];
        clear(acc);
        float most0 = -INFINITE, most1 = -INFINITE, sum0 = 0.0f, sum1 = 0.0f, inner0 = 0.0f, inner1 = 0.0f;
        for (int first = piece.start; first < piece.end; first += KEYS) {
            int j0 = first + warp * 16, end = piece.end;
            u32 keys = ring + stage * 2 * SIDE_BYTES, values = keys + SIDE_BYTES;
            full(stage).wait(parity);
            float s[2][4], more[2][4]; // [16 rows, 8 keys] each, even and odd parts of the sum
            clear(s);
            clear(more);
#pragma unroll
            for (int kk = 0; kk < WIDTH / 16; kk++) {
                u32 k[4];
                take(k, place_in(keys, warp * 16 + lane / 16 * 8 + lane % 8, 2 * kk + lane / 8 % 2));
                mma(kk % 2 ? more[0] : s[0], q[kk], k[0], k[1]);
                mma(kk % 2 ? more[1] : s[1], q[kk], k[2], k[3]);
            }
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) s[part][x] += more[part][x];
            u32 kept[2] = {0xffffffffu, 0xffffffffu};
            if (piece.whole && job.plain && j0 + 16 <= end) {
                // Rows that stand for no query are computed with zeros, and never looked at.
#pragma unroll
                for (int part = 0; part < 2; part++)
#pragma unroll
                    for (int x = 0; x < 4; x++) s[part][x] *= x < 2 ? scale0 : scale1;
            } else {
                Sixteens x;
                u32 of_keys[2] = {kept[0], kept[1]};
#pragma unroll
                for (int at = 0; at < 8; at++) x.s[at / 4][at % 4] = s[at / 4][at % 4];
                score_carefully(job, b, piece.key_head, piece.row_tile * 16, j0, end, piece.whole, x);
                absent_carefully(x, of_keys);
#pragma unroll
                for (int at = 0; at < 8; at++) s[at / 4][at % 4] = x.s[at / 4][at % 4];
                kept[0] = of_keys[0];
                kept[1] = of_keys[1];
            }
            float tile_most0 = -INFINITE, tile_most1 = -INFINITE;
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    if (x < 2) tile_most0 = fmaxf(tile_most0, s[part][x]);
                    else tile_most1 = fmaxf(tile_most1, s[part][x]);
                }
            float new0 = fmaxf(most0, quad_max(tile_most0)), new1 = fmaxf(most1, quad_max(tile_most1));
            float by0 = most0 == -INFINITE ? 0.0f : exponential(most0 - new0);
            float by1 = most1 == -INFINITE ? 0.0f : exponential(most1 - new1);
            if (job.entropy) {
                if (most0 != -INFINITE) inner0 = by0 * (inner0 + (most0 - new0) * sum0);
                if (most1 != -INFINITE) inner1 = by1 * (inner1 + (most1 - new1) * sum1);
            }
            sum0 *= by0;
            sum1 *= by1;
            bool grows = most0 != new0 || most1 != new1;
            most0 = new0;
            most1 = new1;
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    float from = s[part][x] - (x < 2 ? most0 : most1);
                    float e = s[part][x] == -INFINITE ? 0.0f : exponential(from);
                    if (x < 2) sum0 += e;
                    else sum1 += e;
                    if (x < 2) inner0 += e * (e != 0.0f ? from : 0.0f);
                    else inner1 += e * (e != 0.0f ? from : 0.0f);
                    s[part][x] = e;
                }
            if (job.threshold) {
                Sixteens x;
#pragma unroll
                for (int at = 0; at < 8; at++) x.s[at / 4][at % 4] = s[at / 4][at % 4];
                drop_carefully(job, b, piece.key_head, piece.row_tile * 16, j0, x);
#pragma unroll
                for (int at = 0; at < 8; at++) s[at / 4][at % 4] = x.s[at / 4][at % 4];
            }
            u32 a[4] = {pair_of(s[0][0], s[0][1]), pair_of(s[0][2], s[0][3]), pair_of(s[1][0], s[1][1]), pair_of(s[1][2], s[1][3])};
            if (__ballot_sync(FULL_WARP, grows)) {
#pragma unroll
                for (int c = 0; c < SUMS; c++) {
                    acc[c][0] *= by0;
                    acc[c][1] *= by0;
                    acc[c][2] *= by1;
                    acc[c][3] *= by1;
                }
            }
#pragma unroll
            for (int c = 0; c < SUMS; c += 2) {
                u32 v[4];
                take_turned(v, place_in(values, warp * 16 + lane % 16, c + lane / 16));
                mma(acc[c], a, v[0] & kept[0], v[1] & kept[1]);
                mma(acc[c + 1], a, v[2] & kept[0], v[3] & kept[1]);
            }
            __syncwarp();
            if (lane == 0) empty(stage).arrive();
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        // The four warps' parts are added one after the other, always in their order.
        sum0 = quad_sum(sum0);
        sum1 = quad_sum(sum1);
        inner0 = quad_sum(inner0);
        inner1 = quad_sum(inner1);
        if (t == 0) {
            most_of[warp * 16 + g] = most0;
            most_of[warp * 16 + g + 8] = most1;
            sum_of[warp * 16 + g] = sum0;
            sum_of[warp * 16 + g + 8] = sum1;
            inner_of[warp * 16 + g] = inner0;
            inner_of[warp * 16 + g + 8] = inner1;
        }
        meet();
        float all0 = fmaxf(fmaxf(most_of[g], most_of[16 + g]), fmaxf(most_of[32 + g], most_of[48 + g]));
        float all1 = fmaxf(fmaxf(most_of[g + 8], most_of[24 + g]), fmaxf(most_of[40 + g], most_of[56 + g]));
        float share0 = most0 == -INFINITE && sum0 == 0.0f ? 0.0f : expf(most0 - all0);
        float share1 = most1 == -INFINITE && sum1 == 0.0f ? 0.0f : expf(most1 - all1);
#pragma unroll 1
        for (int w = 0; w < 4; w++) {
            if (w == warp) {
#pragma unroll
                for (int c = 0; c < SUMS; c++)
#pragma unroll
                    for (int x = 0; x < 4; x += 2) {
                        if (!(x < 2 ? there0 : there1)) continue;
                        float2* to = (float2*)(out_of + (g + x * 4) * LD_OUT + 8 * c + 2 * t);
                        float share = x < 2 ? share0 : share1;
                        // A share of 0 is of nothing, whatever the sums hold.
                        float2 add = share == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(share * acc[c][x], share * acc[c][x + 1]);
                        if (w > 0) add.x += to->x, add.y += to->y;
                        *to = add;
                    }
            }
            meet();
        }
#pragma unroll 1
        for (int cell = threadIdx.x; cell < 16 * WIDTH; cell += 128) {
            int r = cell / WIDTH, c = cell % WIDTH, row = piece.row_tile * 16 + r;
            if (row >= rows) break;
            float most = fmaxf(fmaxf(most_of[r], most_of[16 + r]), fmaxf(most_of[32 + r], most_of[48 + r]));
            float sum = 0.0f, inner = 0.0f, x = out_of[r * LD_OUT + c];
            for (int w = 0; w < 4; w++) {
                float of_warp = most_of[w * 16 + r];
                if (of_warp == -INFINITE && sum_of[w * 16 + r] == 0.0f) continue;
                float share = expf(of_warp - most);
                sum += share * sum_of[w * 16 + r];
                inner += share * (inner_of[w * 16 + r] + (of_warp - most) * sum_of[w * 16 + r]);
            }
            int h = piece.key_head * job.group + row;
            i64 at_row = i64(b) * job.heads + h;
            float by = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (job.pieces > 1) {
                job.piece_out[(piece.number * in_all + at_row) * WIDTH + c] = x * by;
            } else {
                // One piece: the sink, if there is one, joins here.
                if (job.sinks) {
                    float sink = widen(job.sinks[h]), larger = fmaxf(most, sink);
                    float total = (sum == 0.0f ? 0.0f : sum * expf(most - larger)) + (sink == -INFINITE ? 0.0f : expf(sink - larger));
                    by = total == 0.0f || sum == 0.0f ? 0.0f : expf(most - larger) / total;
                    if (c == 0) {
                        float lse = total == 0.0f ? -INFINITE : larger + logf(total);
                        job.lse[at_row] = lse;
                        // −Σ p (s − lse), with s − lse = (s − most) + (most − lse)
                        if (job.entropy) job.entropy[at_row] = sum == 0.0f ? 0.0f : by * (-inner - (most - lse) * sum);
                    }
                }
                job.out.at[b * job.out.batch + h * job.out.head + c * job.out.col] = narrow(x * by);
                if (job.sinks) continue;
            }
            if (c == 0) {
                float lse = sum == 0.0f ? -INFINITE : most + logf(sum);
                (job.pieces > 1 ? job.piece_lse + piece.number * in_all : job.lse)[at_row] = lse;
                if (job.entropy)
                    (job.pieces > 1 ? job.piece_entropy + piece.number * in_all : job.entropy)[at_row] =
                        sum == 0.0f ? 0.0f : logf(sum) - inner * by;
            }
        }
        meet(); // the room is free for the next piece
    }
}
