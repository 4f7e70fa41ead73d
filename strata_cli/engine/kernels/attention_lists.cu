// Gated attention over a K/V cache: dense causal, or the index blocks chosen for each token.
//   T tokens, H query heads, KV key/value heads (H / KV query heads share one), N head width
//
// One order for every launch. A token's allowed positions, ascending, are cut into parts of 64;
// UNIT parts make a unit. Within a part: scores q . k / sqrt(N) by tensor cores, 16 columns of N
// after another; weights exp(score - the part's largest), rounded to f16, summed as float32 8
// positions at a time; weights times values by tensor cores, 16 positions after another. A part
// joins its unit, and a unit the whole, in ascending order, each rescaled to the largest score so
// far. Queries, keys, values and weights are rounded to f16, all sums are float32.
#include "fragments.cuh"
#include "lanes.cuh"
#include "math32.cuh"
#include "mma.cuh"
#include "overlap.cuh"
#include "pairs.cuh"

constexpr int PART = 64;  // positions
constexpr int WARPS = 8;  // of a block: each scores 8 positions, then sums a share of the columns
constexpr int THREADS = 32 * WARPS;

// store_rows: cache[positions[t]] = src[t]
//   src [T,W] f32, positions [T] i32, cache [context,W] f32; grid (T, W / (4 * block))
extern "C" __global__ void store_rows(const float *src, const int *positions, float *cache,
                                      long long width) {
    start_early();
    const long long first = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first >= width) return;
    src += blockIdx.x * width;
    cache += positions[blockIdx.x] * width;
    if (is_wide(width, src, cache)) {
        store4(cache + first, load4(src + first));
    } else {
        for (long long i = first; i < min(first + 4, width); i++) cache[i] = src[i];
    }
}

// What a launch is about, for all its blocks.
struct Attention {
    const float *q, *gate, *keys, *values;
    const int *positions, *selected, *num_selected;
    long long ratio, num_tokens, num_heads, num_kv_heads, dim, budget;

    // Query heads that share a key head.
    __device__ int group() const { return static_cast<int>(num_heads / num_kv_heads); }
};

// The positions that a token sees, ascending: its chosen blocks, then those after the last
// complete block; or all up to its own.
struct Allowed {
    const int *blocks;
    int chosen, tail, count;  // positions in chosen blocks, first position after them, all
    int ratio;

    __device__ static Allowed of(const Attention &all, long long token) {
        const int stop = all.positions[token] + 1, ratio = static_cast<int>(all.ratio);
        const int complete = ratio > 0 ? stop / ratio : 0;
        const int blocks = ratio > 0 ? all.num_selected[token] : 0;
        if (blocks >= complete) return {nullptr, 0, 0, stop, ratio};
        const int chosen = blocks * ratio, tail = complete * ratio;
        return {all.selected + token * all.budget, chosen, tail, chosen + stop - tail, ratio};
    }

    __device__ bool is_dense() const { return chosen == 0 && tail == 0; }

    // Position number index of the list, or -1 behind its end.
    __device__ int position(int index) const {
        if (index >= count) return -1;
        if (index >= chosen) return tail + index - chosen;
        return blocks[index / ratio] * ratio + index % ratio;
    }
};

// A block's shared memory. Rows are (token, head) pairs; K and V of a part take turns.
template <int DIM, int TILES>
struct Shared {
    TileRow<DIM> kv[PART];
    TileRow<DIM> q[16 * TILES];
    TileRow<PART> weights[16 * TILES];
    float of_warps[WARPS][16 * TILES];  // largest scores, then sums of weights
    float largest[16 * TILES], keep[16 * TILES], add[16 * TILES];
    int places[PART];
};

// Four floats of a row from column d on as f16; zeros behind dim.
__device__ inline uint2 halves(const float *row, int d, int dim, bool wide) {
    if (wide && d + 4 <= dim) {
        const float4 v = load4(row + d);
        return make_uint2(pair_of(v.x, v.y), pair_of(v.z, v.w));
    }
    float v[4];
    for (int i = 0; i < 4; i++) v[i] = d + i < dim ? row[d + i] : 0.0f;
    return make_uint2(pair_of(v[0], v[1]), pair_of(v[2], v[3]));
}

template <int DIM>
__device__ inline void put_halves(TileRow<DIM> *tile, int row, int d, uint2 v) {
    reinterpret_cast<uint2 *>(chunk_at(tile, row, d / 8))[d / 4 % 2] = v;
}

// The state of rows while positions are added: sums of weights times values, relative to the
// largest score so far. Thread r < 16 * TILES keeps largest score and sum of weights of row r.
template <int DIM, int TILES>
struct Sums {
    static constexpr int COLUMN_TILES = DIM >= 64 ? DIM / 64 : 1;  // of 8 columns, per warp
    float of[TILES][COLUMN_TILES][4];
    float largest, weight;

    __device__ void clear() {
        largest = lowest();
        weight = 0.0f;
#pragma unroll
        for (int r = 0; r < TILES; r++)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) of[r][n][i] = 0.0f;
    }
};

// Factors that bring two states to one scale; the larger score is the new one.
struct Scales {
    float keep, add, largest;

    __device__ static Scales of(float largest, float other) {
        const float both = larger(largest, other), base = both > lowest() ? both : 0.0f;
        return {exp32(largest - base), exp32(other - base), both};
    }
};

__device__ inline float joined(float own, float keep, float other, float add) {
    return fmaf(own, keep, other * add);
}

template <int DIM, int TILES>
struct Block {
    using Memory = Shared<DIM, TILES>;
    using State = Sums<DIM, TILES>;
    const Attention &all;
    Memory &shared;
    long long first_token, kv_head;
    int first_head, heads;  // of the group
    int tokens;             // rows are tokens x heads
    int first_count;        // positions that the first token sees
    Allowed last;           // what the last one sees; the first sees the beginning of it
    bool wide;

    __device__ int num_rows() const { return tokens * heads; }
    __device__ int num_tiles() const { return (num_rows() + 15) / 16; }

    // The head of a row among all rows [T * H] of q.
    __device__ long long query(int row) const {
        const int token = row / heads, head = first_head + row % heads;
        return (first_token + token) * all.num_heads + kv_head * all.group() + head;
    }

    __device__ int allowed_count(int row) const { return row < heads ? first_count : last.count; }

    __device__ void load_queries() {
        for (int i = threadIdx.x; i < num_tiles() * 16 * DIM / 4; i += THREADS) {
            const int row = i / (DIM / 4), d = i % (DIM / 4) * 4;
            uint2 v = make_uint2(0, 0);
            if (row < num_rows())
                v = halves(all.q + query(row) * all.dim, d, static_cast<int>(all.dim), wide);
            put_halves(shared.q, row, d, v);
        }
    }

    // Where the part's positions lie in the cache; several tokens see the same ones.
    __device__ void find_places(int part) {
        if (threadIdx.x < PART)
            shared.places[threadIdx.x] = last.position(part * PART + threadIdx.x);
    }

    __device__ void load_part(const float *cache) {
        constexpr int AT_ONCE = 8, STEPS = PART * DIM / 4 / THREADS;
        const long long stride = all.num_kv_heads * all.dim;
        cache += kv_head * all.dim;
#pragma unroll 1
        for (int step = 0; step < STEPS; step += AT_ONCE) {
            uint2 v[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int i = (step + j) * THREADS + threadIdx.x, d = i % (DIM / 4) * 4;
                const int place = step + j < STEPS ? shared.places[i / (DIM / 4)] : -1;
                v[j] = make_uint2(0, 0);
                if (place >= 0)
                    v[j] = halves(cache + place * stride, d, static_cast<int>(all.dim), wide);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int i = (step + j) * THREADS + threadIdx.x;
                if (step + j < STEPS) put_halves(shared.kv, i / (DIM / 4), i % (DIM / 4) * 4, v[j]);
            }
        }
    }

    // Scores of all rows and the warp's 8 positions.
    __device__ void score(float (&scores)[TILES][4]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll
        for (int r = 0; r < TILES; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[r][i] = 0.0f;
#pragma unroll 2
        for (int d = 0; d < DIM / 8; d += 4) {
            unsigned k[4];
            load_matrices(k, chunk_at(shared.kv, warp * 8 + lane % 8, d + lane / 8));
#pragma unroll
            for (int r = 0; r < TILES; r++) {
                if (r >= num_tiles()) break;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned q[4];
                    load_matrices(q,
                                  chunk_at(shared.q, r * 16 + lane % 16, d + 2 * half + lane / 16));
                    multiply(scores[r], q[0], q[1], q[2], q[3], k[2 * half], k[2 * half + 1]);
                }
            }
        }
    }

    // The warp's scores masked and scaled; the largest of each row to shared memory.
    __device__ void find_largest(float (&scores)[TILES][4], int part) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
        const float scale = 1.0f / sqrtf(static_cast<float>(all.dim));
        const int first = part * PART + warp * 8 + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = r * 16 + half * 8 + lane / 4, count = allowed_count(row);
                float &a = scores[r][2 * half], &b = scores[r][2 * half + 1];
                a = first < count ? a * scale : lowest();
                b = first + 1 < count ? b * scale : lowest();
                float largest = larger(a, b);
                largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
                largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
                if (lane % 4 == 0) shared.of_warps[warp][row] = largest;
            }
        }
    }

    // Row by row: the part's largest score, and how part and state come to one scale.
    __device__ void find_scales(State &state) {
        const int row = threadIdx.x;
        if (row >= 16 * TILES) return;
        float largest = lowest();
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            largest = larger(largest, shared.of_warps[warp][row]);
        const Scales scales = Scales::of(state.largest, largest);
        shared.largest[row] = largest;
        shared.keep[row] = scales.keep;
        shared.add[row] = scales.add;
        state.largest = scales.largest;
    }

    // Weights of the warp's positions as f16, and their sums, to shared memory.
    __device__ void weigh(const float (&scores)[TILES][4]) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll
        for (int r = 0; r < TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = r * 16 + half * 8 + lane / 4;
                const float largest = shared.largest[row];
                const float a = scores[r][2 * half], b = scores[r][2 * half + 1];
                const float wa = a > lowest() ? exp32(a - largest) : a == a ? 0.0f : a;
                const float wb = b > lowest() ? exp32(b - largest) : b == b ? 0.0f : b;
                unsigned *chunk = reinterpret_cast<unsigned *>(chunk_at(shared.weights, row, warp));
                chunk[lane % 4] = pair_of(wa, wb);
                float sum = wa + wb;
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
                if (lane % 4 == 0) shared.of_warps[warp][row] = sum;
            }
        }
    }

    // state = state * keep + (weights x values of the part) * add, on the warp's columns.
    __device__ void add_part(State &state) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
        const int row = threadIdx.x;
        if (row < 16 * TILES) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += shared.of_warps[w][row];
            state.weight = joined(state.weight, shared.keep[row], sum, shared.add[row]);
        }
        if (warp * State::COLUMN_TILES * 8 >= DIM) return;
#pragma unroll
        for (int n = 0; n < State::COLUMN_TILES; n++) {
            float part[TILES][4] = {};
#pragma unroll
            for (int at = 0; at < PART; at += 32) {
                unsigned v[4];
                load_transposed(v, chunk_at(shared.kv, at + lane, warp * State::COLUMN_TILES + n));
#pragma unroll
                for (int r = 0; r < TILES; r++) {
                    if (r >= num_tiles()) break;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        unsigned w[4];
                        load_matrices(w, chunk_at(shared.weights, r * 16 + lane % 16,
                                                  at / 8 + 2 * half + lane / 16));
                        multiply(part[r], w[0], w[1], w[2], w[3], v[2 * half], v[2 * half + 1]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < TILES; r++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int of_row = r * 16 + i / 2 * 8 + lane / 4;
                    state.of[r][n][i] = joined(state.of[r][n][i], shared.keep[of_row], part[r][i],
                                               shared.add[of_row]);
                }
            }
        }
    }

    // Add parts begin .. end to a state. Every thread of the block takes part.
    __device__ void add_parts(State &state, int begin, int end) {
        find_places(begin);
        __syncthreads();
        for (int part = begin; part < end; part++) {
            float scores[TILES][4];
            load_part(all.keys);
            __syncthreads();
            score(scores);
            find_largest(scores, part);
            __syncthreads();
            find_scales(state);
            __syncthreads();
            weigh(scores);
            load_part(all.values);
            __syncthreads();
            add_part(state);
            find_places(part + 1);
            __syncthreads();
        }
    }

    // Add a finished unit to the whole, as a part is added to a unit.
    __device__ void join(State &whole, const State &unit) {
        const int row = threadIdx.x, lane = threadIdx.x & 31;
        if (row < 16 * TILES) {
            const Scales scales = Scales::of(whole.largest, unit.largest);
            whole.weight = joined(whole.weight, scales.keep, unit.weight, scales.add);
            whole.largest = scales.largest;
            shared.keep[row] = scales.keep;
            shared.add[row] = scales.add;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < TILES; r++)
#pragma unroll
            for (int n = 0; n < State::COLUMN_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int of_row = r * 16 + i / 2 * 8 + lane / 4;
                    whole.of[r][n][i] = joined(whole.of[r][n][i], shared.keep[of_row],
                                               unit.of[r][n][i], shared.add[of_row]);
                }
        __syncthreads();
    }

    // Call f(row, column, value) for every element of the sums that this thread holds.
    template <class F>
    __device__ void for_each(const State &state, F f) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll
        for (int r = 0; r < TILES; r++)
#pragma unroll
            for (int n = 0; n < State::COLUMN_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int row = r * 16 + i / 2 * 8 + lane / 4;
                    const int column = (warp * State::COLUMN_TILES + n) * 8 + lane % 4 * 2 + i % 2;
                    if (row < num_rows() && column < all.dim) f(row, column, state.of[r][n][i]);
                }
    }
};

// The factor of a finished element: sum / weight * sigmoid(gate).
__device__ inline float gated(float sum, float weight, float gate) {
    return sum / weight * sigmoid32(gate);
}

// attend: all positions of one or two tokens and the query heads that share a key head, per block
//   q [T,H,N] f32, gate [T,H,2N] f32 (the second half of a head), keys, values [context,KV*N] f32,
//   positions [T] i32, selected [T,budget] i32, num_selected [T] i32 -> out [T,H*N] f32
//   grid (KV * (H / KV / heads), T / 2), block 256, shared Shared<DIM, TILES>; two tokens share
//   the loads of K and V where they see the same positions, else they go one after the other.
//   limit: 2 * 4 * KV*N bytes of K/V per allowed position and token (or two), from the L2 cache
template <int DIM, int TILES, int UNIT>
__global__ void __launch_bounds__(THREADS, 2)
    attend(const float *q, const float *gate, const float *keys, const float *values,
           const int *positions, const int *selected, const int *num_selected, long long ratio,
           float *, float *out, long long num_tokens, long long num_heads, long long num_kv_heads,
           long long dim, long long budget, long long heads) {
    start_early();
    extern __shared__ __align__(16) unsigned char memory[];
    auto &shared = *reinterpret_cast<Shared<DIM, TILES> *>(memory);
    const Attention all = {
        q,     gate,       keys,      values,       positions, selected, num_selected,
        ratio, num_tokens, num_heads, num_kv_heads, dim,       budget};
    const int chunks = (all.group() + static_cast<int>(heads) - 1) / static_cast<int>(heads);
    Block<DIM, TILES> block = {all, shared};
    block.kv_head = blockIdx.x / chunks;
    block.first_head = blockIdx.x % chunks * static_cast<int>(heads);
    block.heads = min(static_cast<int>(heads), all.group() - block.first_head);
    block.wide = is_wide(dim, q, keys, values);
    // Late tokens cost most: they go first.
    const long long first = (gridDim.y - 1 - blockIdx.y) * 2LL;
    const int present = static_cast<int>(min(num_tokens - first, 2LL));
    const bool together = present == 2 && Allowed::of(all, first).is_dense() &&
                          Allowed::of(all, first + 1).is_dense() && 2 * block.heads <= 16 * TILES;
    block.tokens = together ? 2 : 1;
    for (int token = 0; token < present; token += block.tokens) {
        block.first_token = first + token;
        block.last = Allowed::of(all, first + token + block.tokens - 1);
        block.first_count = together ? Allowed::of(all, first).count : block.last.count;
        __syncthreads();
        block.load_queries();
        Sums<DIM, TILES> whole, unit;
        whole.clear();
        const int num_parts = (block.last.count + PART - 1) / PART;
        if (UNIT == 1) {
            block.add_parts(whole, 0, num_parts);
        } else {
            for (int part = 0; part < num_parts; part += UNIT) {
                unit.clear();
                block.add_parts(unit, part, min(part + UNIT, num_parts));
                block.join(whole, unit);
            }
        }
        if (threadIdx.x < 16 * TILES) shared.largest[threadIdx.x] = whole.weight;
        __syncthreads();
        block.for_each(whole, [&](int row, int column, float sum) {
            const long long head = block.query(row);
            out[head * dim + column] =
                gated(sum, shared.largest[row], gate[(2 * head + 1) * dim + column]);
        });
    }
}

// attend_units: one unit of one token, so that few tokens fill the GPU; join_units does the rest
//   arguments as attend's; sums: float32, T * units * H rows of N sums, then as many of
//   (largest score, sum of weights)
//   grid (units, KV * (H / KV / heads), T), block 256; reads 2 * 4 * KV*N bytes of K/V per
//   allowed position and token, once
template <int DIM, int TILES, int UNIT>
__global__ void __launch_bounds__(THREADS, 2)
    attend_units(const float *q, const float *gate, const float *keys, const float *values,
                 const int *positions, const int *selected, const int *num_selected,
                 long long ratio, float *sums, float *, long long num_tokens, long long num_heads,
                 long long num_kv_heads, long long dim, long long budget, long long heads) {
    start_early();
    extern __shared__ __align__(16) unsigned char memory[];
    auto &shared = *reinterpret_cast<Shared<DIM, TILES> *>(memory);
    const Attention all = {
        q,     gate,       keys,      values,       positions, selected, num_selected,
        ratio, num_tokens, num_heads, num_kv_heads, dim,       budget};
    const int chunks = (all.group() + static_cast<int>(heads) - 1) / static_cast<int>(heads);
    Block<DIM, TILES> block = {all, shared};
    block.kv_head = blockIdx.y / chunks;
    block.first_head = blockIdx.y % chunks * static_cast<int>(heads);
    block.heads = min(static_cast<int>(heads), all.group() - block.first_head);
    block.wide = is_wide(dim, q, keys, values);
    block.first_token = blockIdx.z;
    block.tokens = 1;
    block.last = Allowed::of(all, blockIdx.z);
    block.first_count = block.last.count;
    const int num_parts = (block.last.count + PART - 1) / PART;
    const int part = blockIdx.x * UNIT;
    if (part >= num_parts) return;
    block.load_queries();
    Sums<DIM, TILES> unit;
    unit.clear();
    block.add_parts(unit, part, min(part + UNIT, num_parts));
    const long long num_units = gridDim.x, rows = num_tokens * num_units * num_heads;
    const long long first = (blockIdx.z * num_units + blockIdx.x) * num_heads;
    const long long of_token = blockIdx.z * num_heads;
    if (threadIdx.x < block.num_rows()) {
        const long long row = first + block.query(threadIdx.x) - of_token;
        sums[rows * dim + 2 * row] = unit.largest;
        sums[rows * dim + 2 * row + 1] = unit.weight;
    }
    block.for_each(unit, [&](int row, int column, float sum) {
        sums[(first + block.query(row) - of_token) * dim + column] = sum;
    });
}

// join_units: a token's units, in ascending order, then the division and the gate
//   arguments as attend's; grid (H, T), a thread per column; reads 4 * N*H bytes per unit and token
template <int UNIT>
__global__ void join_units(const float *, const float *gate, const float *, const float *,
                           const int *positions, const int *selected, const int *num_selected,
                           long long ratio, const float *sums, float *out, long long num_tokens,
                           long long num_heads, long long dim, long long budget,
                           long long num_units) {
    start_early();
    Attention all = {};
    all.positions = positions;
    all.selected = selected;
    all.num_selected = num_selected;
    all.ratio = ratio;
    all.budget = budget;
    const long long token = blockIdx.y, head = blockIdx.x;
    const int count = Allowed::of(all, token).count;
    const int units = (count + PART * UNIT - 1) / (PART * UNIT);
    const float *scores = sums + num_tokens * num_units * num_heads * dim;
    for (long long column = threadIdx.x; column < dim; column += blockDim.x) {
        float largest = lowest(), weight = 0.0f, sum = 0.0f;
#pragma unroll 4
        for (int unit = 0; unit < units; unit++) {
            const long long row = (token * num_units + unit) * num_heads + head;
            const Scales scales = Scales::of(largest, scores[2 * row]);
            weight = joined(weight, scales.keep, scores[2 * row + 1], scales.add);
            sum = joined(sum, scales.keep, sums[row * dim + column], scales.add);
            largest = scales.largest;
        }
        const long long at = token * num_heads + head;
        out[at * dim + column] = gated(sum, weight, gate[(2 * at + 1) * dim + column]);
    }
}
