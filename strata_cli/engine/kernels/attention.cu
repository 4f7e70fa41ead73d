// Attention of prompts. The order of sums: attention.cuh.
//   T tokens, H query heads, KV key/value heads (H / KV query heads share one), N head width
#include "attention.cuh"
#include "overlap.cuh"
#include "segments.cuh"

constexpr int MOST_TOKENS = 32;  // of a block

// A block's shared memory. Rows are (token, head) pairs. STAGES of K and V: 2, and the copies of
// the next part go on beside the products; 1; or 0, and K and V of a part take turns.
template <int DIM, int WARPS, int STAGES>
struct Shared {
    static constexpr int BUFFERS = STAGES == 0 ? 1 : 2 * STAGES;
    TileRow<DIM> cache[BUFFERS][PART];
    TileRow<DIM> q[16 * WARPS];
    unsigned seen[MOST_TOKENS][2 * UNIT];  // positions of the unit that each token sees, as bits
    unsigned seen_by_any[2 * UNIT];
    int parts[UNIT];  // seen by any token, ascending
    int num_parts;

    __device__ TileRow<DIM> *keys(int turn) { return cache[STAGES == 2 ? turn % 2 * 2 : 0]; }
    __device__ TileRow<DIM> *values(int turn) {
        return cache[STAGES == 2 ? turn % 2 * 2 + 1 : STAGES];
    }
};

// Sums of a warp's 16 rows: a lane has columns 8 n + 2 t and + 1 of rows g and g + 8 (lane 4g + t),
// relative to the largest score of each row.
template <int DIM>
struct Sums {
    float of[DIM / 8][4];
    float largest[2], weight[2];

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) of[n][i] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            largest[h] = lowest();
            weight[h] = 0.0f;
        }
    }
};

// One of the two halves of a cache, and how far away its rows that lie elsewhere are.
struct Half {
    const unsigned short *cache;
    Elsewhere elsewhere;
};

template <int DIM, int WARPS, int STAGES, bool SPLIT>
struct Block {
    using Memory = Shared<DIM, WARPS, STAGES>;
    const Attention &all;
    Memory &shared;
    Half keys, values;
    long long first_token, kv_head;
    int first_head, heads;  // of the group
    int tokens;             // rows are tokens x heads
    bool wide;

    __device__ int num_rows() const { return tokens * heads; }
    __device__ int lane() const { return threadIdx.x & 31; }
    __device__ int warp_row() const { return threadIdx.x / 32 * 16; }
    __device__ bool has_rows() const { return warp_row() < num_rows(); }

    // The head of a row among all rows [T * H] of q.
    __device__ long long query(int row) const {
        const int token = row / heads, head = first_head + row % heads;
        return (first_token + token) * all.num_heads + kv_head * all.group() + head;
    }

    __device__ void load_queries() {
        const bool is_q_wide = is_wide(all.dim, all.q);
        for (int i = threadIdx.x; i < 16 * WARPS * DIM / 8; i += 32 * WARPS) {
            const int row = i / (DIM / 8), chunk = i % (DIM / 8);
            uint4 v = make_uint4(0, 0, 0, 0);
            if (row < num_rows())
                v = query_chunk(all.q + query(row) * all.dim, chunk, static_cast<int>(all.dim),
                                is_q_wide);
            *chunk_at(shared.q, row, chunk) = v;
        }
    }

    // Which positions of a unit each token sees, and which parts any of them does.
    __device__ void find_parts(int unit) {
        const int base = unit * UNIT_POSITIONS;
        for (int i = threadIdx.x; i < tokens * 2 * UNIT; i += 32 * WARPS) {
            const Allowed own = Allowed::of(all, first_token + i / (2 * UNIT));
            const int word = i % (2 * UNIT);
            shared.seen[i / (2 * UNIT)][word] = bits_of(own.tail, own.stop, base + 32 * word);
        }
        __syncthreads();
        for (int token = threadIdx.x / 32; token < tokens; token += WARPS) {
            const Allowed own = Allowed::of(all, first_token + token);
#pragma unroll 4
            for (int i = lane(); i < own.num_blocks; i += 32) {
                const int first = own.blocks[i] * own.ratio;
                mark(shared.seen[token], 2 * UNIT, base, first, first + own.ratio);
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) {  // a word each
            unsigned any = 0;
            for (int token = 0; token < tokens; token++) any |= shared.seen[token][lane()];
            shared.seen_by_any[lane()] = any;
            any |= __shfl_xor_sync(ALL_LANES, any, 1);
            const unsigned first_words = __ballot_sync(ALL_LANES, any != 0) & 0x55555555u;
            const bool is_own = first_words >> lane() & 1;
            if (is_own) shared.parts[__popc(first_words & ((1u << lane()) - 1))] = lane() / 2;
            if (lane() == 0) shared.num_parts = __popc(first_words);
        }
        __syncthreads();
    }

    __device__ void load(TileRow<DIM> *tile, const Half &half, int unit, int turn) {
        const int part = shared.parts[turn];
        load_part<DIM, 32 * WARPS, SPLIT>(tile, half.cache + kv_head * all.dim,
                                          all.num_kv_heads * all.dim, static_cast<int>(all.dim),
                                          unit * UNIT + part, shared.seen_by_any[2 * part],
                                          shared.seen_by_any[2 * part + 1], wide, half.elsewhere);
        commit_copies();
    }

    // Scores of the warp's rows and all positions of a part.
    __device__ void score(float (&scores)[8][4], TileRow<DIM> *keys) {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
#pragma unroll 4
        for (int d = 0; d < DIM / 8; d += 2) {
            unsigned q[4];
            load_matrices(q, chunk_at(shared.q, warp_row() + lane() % 16, d + lane() / 16));
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                unsigned k[4];
                load_matrices(
                    k, chunk_at(keys, 8 * n + lane() / 16 * 8 + lane() % 8, d + lane() / 8 % 2));
                multiply(scores[n], q[0], q[1], q[2], q[3], k[0], k[1]);
                multiply(scores[n + 1], q[0], q[1], q[2], q[3], k[2], k[3]);
            }
        }
    }

    // Weights of a part's scores as operands; the largest score of each row.
    __device__ void weigh(float (&scores)[8][4], int part, unsigned (&weights)[4][4],
                          float (&largest)[2]) {
        const float scale = all.scale();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = warp_row() + lane() / 4 + 8 * h;
            const bool is_row = row < num_rows();
            const unsigned *seen = shared.seen[is_row ? row / heads : 0] + 2 * part;
            const unsigned low = is_row ? seen[0] >> lane() % 4 * 2 : 0;
            const unsigned high = is_row ? seen[1] >> lane() % 4 * 2 : 0;
            float most = lowest();
#pragma unroll
            for (int n = 0; n < 8; n++) {
                mask(scores[n][2 * h], scores[n][2 * h + 1], (n < 4 ? low : high) >> n % 4 * 8,
                     scale);
                most = fmaxf(most, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
            }
            largest[h] = largest_of_quad(most);
#pragma unroll
            for (int n = 0; n < 8; n++)
                weights[n / 2][n % 2 * 2 + h] =
                    pair_of(weight_of(scores[n][2 * h], largest[h]),
                            weight_of(scores[n][2 * h + 1], largest[h]));
        }
    }

    // Add a part, as weights and values, to its unit.
    __device__ void add_part(Sums<DIM> &unit, const unsigned (&weights)[4][4],
                             const float (&largest)[2], TileRow<DIM> *values) {
        const Scales scales[2] = {Scales::of(unit.largest[0], largest[0]),
                                  Scales::of(unit.largest[1], largest[1])};
        float sums[4] = {};
        add_weights(sums, weights);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            unit.weight[h] = joined(unit.weight[h], scales[h].keep, sums[2 * h], scales[h].add);
            unit.largest[h] = scales[h].largest;
        }
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
            float part[4] = {};
            add_values(part, weights, values, n);
#pragma unroll
            for (int i = 0; i < 4; i++)
                unit.of[n][i] =
                    joined(unit.of[n][i], scales[i / 2].keep, part[i], scales[i / 2].add);
        }
    }

    // Add the parts that find_parts found. Every thread of the block takes part.
    __device__ void add_parts(Sums<DIM> &sums, int unit) {
        const int num_parts = shared.num_parts;
        if (STAGES == 2) {
            load(shared.keys(0), keys, unit, 0);
            load(shared.values(0), values, unit, 0);
        }
        for (int turn = 0; turn < num_parts; turn++) {
            if (STAGES < 2) {
                __syncthreads();
                load(shared.keys(0), keys, unit, turn);
                if (STAGES == 1) load(shared.values(0), values, unit, turn);
            }
            wait_copies<0>();
            __syncthreads();
            if (STAGES == 2 && turn + 1 < num_parts) {
                load(shared.keys(turn + 1), keys, unit, turn + 1);
                load(shared.values(turn + 1), values, unit, turn + 1);
            }
            unsigned weights[4][4];
            float largest[2];
            if (has_rows()) {
                float scores[8][4];
                score(scores, shared.keys(turn));
                weigh(scores, shared.parts[turn], weights, largest);
            }
            if (STAGES == 0) {
                __syncthreads();
                load(shared.values(0), values, unit, turn);
                wait_copies<0>();
                __syncthreads();
            }
            if (has_rows()) add_part(sums, weights, largest, shared.values(turn));
        }
    }

    // The head of a lane's row g + 8 h; -1 where there is none.
    __device__ long long own_query(int h) const {
        const int row = warp_row() + lane() / 4 + 8 * h;
        return row < num_rows() ? query(row) : -1;
    }

    // Call f(first value, second, column) for each pair that this thread holds of row g + 8 h.
    template <class F>
    __device__ void for_each(Sums<DIM> &sums, int h, F f) const {
        const int first = lane() % 4 * 2, dim = static_cast<int>(all.dim);
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
            if (first + 8 * n < dim) f(sums.of[n][2 * h], sums.of[n][2 * h + 1], first + 8 * n);
    }
};

// Which block of query heads that share a key head, of so many heads each.
template <int DIM, int WARPS, int STAGES, bool SPLIT>
__device__ inline Block<DIM, WARPS, STAGES, SPLIT> block_of(const Attention &all, long long heads) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto &shared = *reinterpret_cast<Shared<DIM, WARPS, STAGES> *>(memory);
    const int chunks = (all.group() + static_cast<int>(heads) - 1) / static_cast<int>(heads);
    Block<DIM, WARPS, STAGES, SPLIT> block = {all, shared, {all.keys, {}}, {all.values, {}}};
    block.kv_head = blockIdx.x / chunks;
    block.first_head = blockIdx.x % chunks * static_cast<int>(heads);
    block.heads = min(static_cast<int>(heads), all.group() - block.first_head);
    block.wide = all.is_cache_wide();
    return block;
}

// The work of a block whose tokens are set.
template <bool CUT, int DIM, int WARPS, int STAGES, bool SPLIT>
__device__ inline void attend_tile(Block<DIM, WARPS, STAGES, SPLIT> &block, float *sums, float *out,
                                   long long num_tokens) {
    const Attention &all = block.all;
    auto &shared = block.shared;
    const float *gate = all.gate;
    const long long num_heads = all.num_heads, dim = all.dim;
    int stop = 0;
    for (int token = 0; token < block.tokens; token++)
        stop = max(stop, all.positions[block.first_token + token] + 1);
    const int end = (stop + UNIT_POSITIONS - 1) / UNIT_POSITIONS;
    block.load_queries();
    const int width = static_cast<int>(dim);
    const bool even = is_even(dim, CUT ? sums : out, gate);

    Sums<DIM> state;
    state.clear();
    float largest[2] = {lowest(), lowest()}, weight[2] = {0.0f, 0.0f};  // of all units so far
    bool has_sums = false;
    const int first_unit = CUT ? static_cast<int>(blockIdx.z) : 0;
    for (int unit = first_unit; unit < (CUT ? min(first_unit + 1, end) : end); unit++) {
        block.find_parts(unit);
        if (shared.num_parts == 0) continue;
        if (has_sums) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const long long query = block.own_query(h);
                if (query < 0) continue;
                float *row = out + query * dim;
                block.for_each(state, h, [&](float a, float b, int column) {
                    store_pair(row, column, width, even, make_float2(a, b));
                });
            }
            state.clear();
        }
        block.add_parts(state, unit);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Scales scales = Scales::of(largest[h], state.largest[h]);
            weight[h] = joined(weight[h], scales.keep, state.weight[h], scales.add);
            largest[h] = scales.largest;
            const long long query = block.own_query(h);
            if (!has_sums || query < 0) continue;
            const float *row = out + query * dim;
            block.for_each(state, h, [&](float &a, float &b, int column) {
                const float2 before = load_pair(row, column, width, even);
                a = joined(before.x, scales.keep, a, scales.add);
                b = joined(before.y, scales.keep, b, scales.add);
            });
        }
        has_sums = true;
        __syncthreads();  // until all have read what find_parts writes anew
    }
    const long long num_units = gridDim.z, num_rows = num_tokens * num_units * num_heads;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const long long query = block.own_query(h);
        if (query < 0) continue;
        if (!CUT) {
            float *row = out + query * dim;
            const float *gates = gate + (2 * query + 1) * dim;
            const float inverse = inverse_fast(weight[h]);
            block.for_each(state, h, [&](float a, float b, int column) {
                const float2 own = load_pair(gates, column, width, even);
                store_pair(row, column, width, even,
                           make_float2(gated(a, inverse, own.x), gated(b, inverse, own.y)));
            });
            continue;
        }
        const long long token = query / num_heads;
        const long long at = query + (token * (num_units - 1) + first_unit) * num_heads;
        if (block.lane() % 4 == 0) {
            sums[num_rows * dim + 2 * at] = largest[h];
            sums[num_rows * dim + 2 * at + 1] = weight[h];
        }
        float *row = sums + at * dim;
        if (has_sums)
            block.for_each(state, h, [&](float a, float b, int column) {
                store_pair(row, column, width, even, make_float2(a, b));
            });
    }
}

// attend: a tile of tokens and the query heads that share a key head, per block; all positions, or
// one unit of them, for join_units to go on with
//   q [T,H,N] f32, gate [T,H,2N] f32 (the second half of a head), keys, values [context,KV*N] f16,
//   positions [T] i32, selected [T,budget] i32, num_selected [T] i32 -> out [T,H*N] f32; between
//   units, out holds the sums so far. Where CUT: sums [T,units,H,N], then largest score and sum of
//   weights [T,units,H,2] f32
//   grid (KV * (H / KV / heads), T / tokens, 1 or units), block 32 * WARPS, shared Shared<...>
//   limit: 4 * H*N float operations per token and position of any part that the tile sees, on
//   tensor cores; the cache's parts, 4 * KV*N bytes a position, from the L2 cache once per tile
template <int DIM, int WARPS, int STAGES, bool CUT>
__global__ void __launch_bounds__(32 * WARPS, 1)
    attend(const float *q, const float *gate, const unsigned short *keys,
           const unsigned short *values, const int *positions, const int *selected,
           const int *num_selected, long long ratio, float *sums, float *out, long long num_tokens,
           long long num_heads, long long num_kv_heads, long long dim, long long budget,
           long long heads, long long tokens) {
    start_early();
    const Attention all = {q,         gate,         keys,         values,
                           positions, selected,     num_selected, ratio,
                           num_heads, num_kv_heads, dim,          budget};
    auto block = block_of<DIM, WARPS, STAGES, false>(all, heads);
    // Late tokens cost most: they go first.
    block.first_token = (gridDim.y - 1 - blockIdx.y) * tokens;
    block.tokens = static_cast<int>(min(num_tokens - block.first_token, tokens));
    attend_tile<CUT>(block, sums, out, num_tokens);
}

// attend_segments: each segment over its cache, all positions of a tile
//   arguments as attend's, of all rows
//   grid (KV * (H / KV / heads), rows of the longest / tokens, segments)
template <int DIM, int WARPS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS, 1)
    attend_segments(const float *q, const float *gate, const CachedSegment *segments,
                    const int *positions, const int *selected, const int *num_selected,
                    long long ratio, float *out, long long num_heads, long long num_kv_heads,
                    long long dim, long long budget, long long heads, long long tokens) {
    start_early();
    const CachedSegment own = segments[blockIdx.z];
    const long long before = (gridDim.y - 1 - blockIdx.y) * tokens;
    if (before >= own.count) return;
    const Attention all = {q,        gate,         own.ahead.keys, own.ahead.values, positions,
                           selected, num_selected, ratio,          num_heads,        num_kv_heads,
                           dim,      budget};
    auto block = block_of<DIM, WARPS, STAGES, true>(all, heads);
    const int first = static_cast<int>(own.position);
    block.keys.elsewhere = {first, own.own.keys - own.ahead.keys};
    block.values.elsewhere = {first, own.own.values - own.ahead.values};
    block.wide = block.wide && all.is_wide_cache(own.own.keys, own.own.values);
    block.first_token = own.first + before;
    block.tokens = static_cast<int>(min(own.count - before, tokens));
    attend_tile<false>(block, nullptr, out, 0);
}
