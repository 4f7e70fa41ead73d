// Attention of few tokens, such as a step's: parts go to different blocks, so that they fill the
// GPU; a second launch joins them. The order of sums: attention.cuh.
//   T tokens, H query heads, KV key/value heads (H / KV query heads share one), N head width
#include "attention.cuh"
#include "overlap.cuh"

constexpr int WARPS = 8;  // each scores 8 positions, then sums a share of the columns
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16;        // query heads of a block
constexpr int MOST_PARTS = 16;  // of a block, one after the other

template <int DIM, int STAGES>
struct Shared {
    TileRow<DIM> cache[STAGES + 1][PART];  // K, and V where it does not take its place
    TileRow<DIM> q[ROWS];
    TileRow<PART> weights[ROWS];
    float largest[WARPS][ROWS];
    unsigned seen[MOST_PARTS][2];  // positions of each of the block's parts, as bits
    int parts[MOST_PARTS];
    int fresh[WARPS];
    int num_parts;  // of the token
};

// Inclusive sum over the threads of the block; every thread of it takes part.
__device__ inline int sum_up_to(int v, int *of_warps, int &total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, v, step);
        if (lane >= step) v += below;
    }
    if (lane == 31) of_warps[warp] = v;
    __syncthreads();
    total = 0;
    for (int other = 0; other < WARPS; other++) {
        if (other < warp) v += of_warps[other];
        total += of_warps[other];
    }
    __syncthreads();
    return v;
}

// Which of the parts that a token sees are the block's: every gridDim.x-th.
template <int DIM, int STAGES>
__device__ inline void find_parts(Shared<DIM, STAGES> &shared, const Allowed &own) {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    if (own.num_blocks == 0) {  // one run of positions, perhaps long
        const int first = own.tail / PART;
        const int rank = block + static_cast<int>(threadIdx.x) * blocks,
                  base = (first + rank) * PART;
        if (threadIdx.x == 0) shared.num_parts = (own.stop + PART - 1) / PART - first;
        if (threadIdx.x < MOST_PARTS) {
            shared.parts[threadIdx.x] = first + rank;
            for (int half = 0; half < 2; half++)
                shared.seen[threadIdx.x][half] = bits_of(own.tail, own.stop, base + 32 * half);
        }
        __syncthreads();
        return;
    }
    for (int i = threadIdx.x; i < 2 * MOST_PARTS; i += THREADS) shared.seen[i / 2][i % 2] = 0;
    __syncthreads();
    int before = 0;  // parts of the runs so far
    for (int start = 0; start <= own.num_blocks; start += THREADS) {
        const int i = start + static_cast<int>(threadIdx.x);
        const bool is_tail = i == own.num_blocks;
        const bool is_run = i < own.num_blocks || (is_tail && own.tail < own.stop);
        const int first = !is_run ? 0 : is_tail ? own.tail : own.blocks[i] * own.ratio;
        const int last = is_tail ? own.stop : first + own.ratio;
        const int seen_up_to =
            is_run && i > 0 ? ((own.blocks[i - 1] + 1) * own.ratio - 1) / PART : -1;
        const int first_new = max(first / PART, seen_up_to + 1), end = (last - 1) / PART + 1;
        const int fresh = is_run ? max(end - first_new, 0) : 0;
        int total;
        const int rank_of_new = before + sum_up_to(fresh, shared.fresh, total) - fresh;
        for (int part = first / PART; is_run && part < end; part++) {
            const int rank = rank_of_new + part - first_new;
            if (rank % blocks != block || rank / blocks >= MOST_PARTS) continue;
            shared.parts[rank / blocks] = part;
            mark(shared.seen[rank / blocks], 2, part * PART, first, last);
        }
        before += total;
    }
    if (threadIdx.x == 0) shared.num_parts = before;
    __syncthreads();
}

// Scores of all rows and the warp's 8 positions.
template <int DIM>
__device__ inline void score(float (&scores)[4], TileRow<DIM> *queries, TileRow<DIM> *keys) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4; i++) scores[i] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < DIM / 8; d += 4) {
        unsigned k[4];
        load_matrices(k, chunk_at(keys, warp * 8 + lane % 8, d + lane / 8));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned q[4];
            load_matrices(q, chunk_at(queries, lane % 16, d + 2 * half + lane / 16));
            multiply(scores, q[0], q[1], q[2], q[3], k[2 * half], k[2 * half + 1]);
        }
    }
}

// Weights of the warp's scores to shared memory; the largest score of rows g and g + 8.
template <int DIM, int STAGES>
__device__ inline void weigh(float (&scores)[4], Shared<DIM, STAGES> &shared, int turn, float scale,
                             float (&largest)[2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const unsigned seen = shared.seen[turn][warp / 4] >> (warp % 4 * 8 + lane % 4 * 2);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        mask(scores[2 * h], scores[2 * h + 1], seen, scale);
        const float most = largest_of_quad(fmaxf(scores[2 * h], scores[2 * h + 1]));
        if (lane % 4 == 0) shared.largest[warp][lane / 4 + 8 * h] = most;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = lane / 4 + 8 * h;
        largest[h] = lowest();
#pragma unroll
        for (int w = 0; w < WARPS; w++) largest[h] = fmaxf(largest[h], shared.largest[w][row]);
        reinterpret_cast<unsigned *>(chunk_at(shared.weights, row, warp))[lane % 4] =
            pair_of(weight_of(scores[2 * h], largest[h]), weight_of(scores[2 * h + 1], largest[h]));
    }
}

// Where the sums of parts lie: [T,parts,H,N] f32, then [T,parts,H] times largest score and sum of
// weights, then [T,parts] numbers of parts, then [T] how many parts a token has, i32.
struct PartSums {
    float *sums;
    long long num_tokens, most_parts, num_heads, dim;

    __device__ long long row(long long token, int part, long long head) const {
        return (token * most_parts + part) * num_heads + head;
    }
    __device__ long long num_rows() const { return num_tokens * most_parts * num_heads; }
    __device__ float *scores() const { return sums + num_rows() * dim; }
    __device__ int *numbers() const { return reinterpret_cast<int *>(scores() + 2 * num_rows()); }
    __device__ int *counts() const { return numbers() + num_tokens * most_parts; }
};

// attend_parts: every gridDim.x-th part of one token, and up to 16 query heads that share a key
// head
//   arguments as attend's; sums as PartSums
//   grid (any, KV * (H / KV / heads), T), block 256, shared Shared<...>
//   limit: 4 * KV*N bytes of K/V per position and token; at 33 parts, how long one takes
template <int DIM, int STAGES>
__global__ void __launch_bounds__(THREADS, 2)
    attend_parts(const float *q, const float *, const unsigned short *keys,
                 const unsigned short *values, const int *positions, const int *selected,
                 const int *num_selected, long long ratio, float *sums, float *,
                 long long num_tokens, long long num_heads, long long num_kv_heads, long long dim,
                 long long budget, long long heads, long long most_parts) {
    start_early();
    extern __shared__ __align__(16) unsigned char memory[];
    auto &shared = *reinterpret_cast<Shared<DIM, STAGES> *>(memory);
    const Attention all = {q,         nullptr,      keys,         values,
                           positions, selected,     num_selected, ratio,
                           num_heads, num_kv_heads, dim,          budget};
    const PartSums to = {sums, num_tokens, most_parts, num_heads, dim};
    const long long token = blockIdx.z;
    const int chunks = (all.group() + static_cast<int>(heads) - 1) / static_cast<int>(heads);
    const long long kv_head = blockIdx.y / chunks, skipped = blockIdx.y % chunks * heads;
    const long long first_head = kv_head * all.group() + skipped;
    const int num_rows = static_cast<int>(min(heads, all.group() - skipped));
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, width = static_cast<int>(dim);
    const bool wide = all.is_cache_wide(), is_q_wide = is_wide(dim, q);

    find_parts(shared, Allowed::of(all, token));
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0)
        to.counts()[token] = shared.num_parts;
    const int first_rank = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
    const int turns = (shared.num_parts - first_rank + step - 1) / step;
    const auto load = [&](TileRow<DIM> *tile, const unsigned short *cache, int turn) {
        if (turn < turns)
            load_part<DIM, THREADS>(tile, cache + kv_head * dim, num_kv_heads * dim, width,
                                    shared.parts[turn], shared.seen[turn][0], shared.seen[turn][1],
                                    wide);
        commit_copies();
    };
    load(shared.cache[0], keys, 0);
    if (STAGES == 1) load(shared.cache[1], values, 0);
    for (int i = threadIdx.x; i < ROWS * DIM / 8; i += THREADS) {
        const int row = i / (DIM / 8), chunk = i % (DIM / 8);
        const float *query = q + (token * num_heads + first_head + row) * dim;
        *chunk_at(shared.q, row, chunk) =
            row < num_rows ? query_chunk(query, chunk, width, is_q_wide) : make_uint4(0, 0, 0, 0);
    }
    for (int turn = 0; turn < turns; turn++) {
        const int rank = first_rank + turn * step, part = shared.parts[turn];
        wait_copies<STAGES>();
        __syncthreads();
        float scores[4], largest[2];
        score(scores, shared.q, shared.cache[0]);
        weigh(scores, shared, turn, all.scale(), largest);
        if (STAGES == 0) {
            load(shared.cache[0], values, turn);
            wait_copies<0>();
        } else {
            load(shared.cache[0], keys, turn + 1);  // weigh waited: nobody scores any more
            wait_copies<1>();
        }
        __syncthreads();
        unsigned weights[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            load_matrices(weights[i], chunk_at(shared.weights, lane % 16, 2 * i + lane / 16));
        float total[4] = {};
        add_weights(total, weights);
        if (threadIdx.x == 0 && blockIdx.y == 0) to.numbers()[token * most_parts + rank] = part;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = lane / 4 + 8 * h;
            if (warp || lane % 4 || row >= num_rows) continue;
            const long long at = to.row(token, rank, first_head + row);
            to.scores()[2 * at] = largest[h];
            to.scores()[2 * at + 1] = total[2 * h];
        }
#pragma unroll
        for (int n = warp; n < DIM / 8; n += WARPS) {
            float part_sums[4] = {};
            add_values(part_sums, weights, shared.cache[STAGES], n);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + i / 2 * 8, column = 8 * n + lane % 4 * 2 + i % 2;
                if (row < num_rows && column < width)
                    sums[to.row(token, rank, first_head + row) * dim + column] = part_sums[i];
            }
        }
        __syncthreads();  // until all have read values and weights
        load(shared.cache[STAGES], STAGES == 0 ? keys : values, turn + 1);
    }
}

// Sums of one column and head: of a part, of a unit, of all.
struct Column {
    float largest, weight, sum;

    __device__ static Column none() { return {lowest(), 0.0f, 0.0f}; }
    __device__ void join(const Column &other) {
        const Scales scales = Scales::of(largest, other.largest);
        weight = joined(weight, scales.keep, other.weight, scales.add);
        sum = joined(sum, scales.keep, other.sum, scales.add);
        largest = scales.largest;
    }
};

// The column of a part, or of a unit, and its number.
struct Piece {
    Column column;
    int number;
};

// Join count pieces, get(0), get(1), ..., of ascending numbers: of each PER_UNIT of them first,
// then these. AT_ONCE pieces are on their way while others are joined; nothing that get loads may
// be used before that.
template <int PER_UNIT, int AT_ONCE, class F>
__device__ inline Column join_all(int count, F get) {
    Column whole = Column::none(), unit = Column::none();
    int current = 0;
    Piece pieces[2][AT_ONCE];
    const auto load = [&](Piece(&to)[AT_ONCE], int start) {
        if (start >= count) return;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) to[i] = get(min(start + i, count - 1));
    };
    const auto use = [&](const Piece(&from)[AT_ONCE], int start) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (start + i >= count) break;
            Column own = from[i].column;
            if (own.weight == 0.0f) own.sum = 0.0f;  // nothing was seen, and nothing written
            if (from[i].number / PER_UNIT != current) {
                whole.join(unit);
                unit = Column::none();
                current = from[i].number / PER_UNIT;
            }
            unit.join(own);
        }
    };
    load(pieces[0], 0);
    for (int start = 0; start < count; start += 2 * AT_ONCE) {
        load(pieces[1], start + AT_ONCE);
        use(pieces[0], start);
        load(pieces[0], start + 2 * AT_ONCE);
        use(pieces[1], start + AT_ONCE);
    }
    whole.join(unit);
    return whole;
}

__device__ inline float gated(const Column &whole, float gate) {
    return gated(whole.sum, inverse_fast(whole.weight), gate);
}

constexpr int JOIN_THREADS = 64;  // a thread for each of a round's parts, and for each column
constexpr int ROUND = JOIN_THREADS;

// How a round's parts join, which is the same for all columns. Their units, scores and the largest
// up to each lie behind those of the UNIT parts before the round.
struct Joints {
    int unit[UNIT + ROUND];
    float largest[UNIT + ROUND], up_to[UNIT + ROUND];
    // What a unit and the next of its parts are scaled by, and what the whole and a unit that the
    // part ends are; a part's weight; 1 where it ends one.
    float4 scales[ROUND];
    float2 weights[ROUND];
    alignas(16) float sums[ROUND][JOIN_THREADS];

    // Starts copying the block's columns of a round's parts, `apart` floats from one to the next.
    __device__ void bring(const float *from, long long apart, int parts, int columns) {
        constexpr int CHUNKS = JOIN_THREADS / 4;
        if (is_wide(columns, from) && apart % 4 == 0) {
            for (int i = threadIdx.x; i < parts * CHUNKS; i += JOIN_THREADS) {
                const int part = i / CHUNKS, column = i % CHUNKS * 4;
                if (column < columns) copy_async(&sums[part][column], from + part * apart + column);
            }
        } else if (static_cast<int>(threadIdx.x) < columns) {
#pragma unroll 8
            for (int part = 0; part < parts; part++)
                sums[part][threadIdx.x] = from[part * apart + threadIdx.x];
        }
        commit_copies();
    }

    // The largest of all parts up to the thread's own, whose score that is.
    __device__ float largest_up_to(float own) {
        const int lane = threadIdx.x & 31;
        for (int step = 1; step < 32; step *= 2) {
            const float below = __shfl_up_sync(ALL_LANES, own, step);
            if (lane >= step) own = fmaxf(own, below);
        }
        __shared__ float of_warps[JOIN_THREADS / 32];
        if (lane == 31) of_warps[threadIdx.x / 32] = own;
        __syncthreads();
        for (int warp = 0; warp < static_cast<int>(threadIdx.x) / 32; warp++)
            own = fmaxf(own, of_warps[warp]);
        return fmaxf(own, up_to[UNIT - 1]);
    }

    // Before the first round: no part has been.
    __device__ void begin() {
        if (threadIdx.x >= UNIT) return;
        unit[threadIdx.x] = -1;
        largest[threadIdx.x] = up_to[threadIdx.x] = lowest();
    }

    // The thread's own part of the round: its number, that of the next one or -1, its largest score
    // and its weights' sum.
    __device__ void join(int number, int next, float score, float own_weight) {
        const int own = UNIT + static_cast<int>(threadIdx.x), own_unit = number / UNIT;
        unit[own] = own_unit, largest[own] = score;
        __syncthreads();
        up_to[own] = largest_up_to(score);
        float before = lowest();  // the largest of the unit's parts ahead of this one
        int first = own;          // the unit's first part
#pragma unroll
        for (int back = 1; back < UNIT; back++) {
            if (unit[own - back] != own_unit) continue;
            before = fmaxf(before, largest[own - back]);
            first = own - back;
        }
        const Scales of_part = Scales::of(before, score);
        const bool ends_unit = next < 0 || next / UNIT != own_unit;
        __syncthreads();
        const Scales of_unit = Scales::of(up_to[first - 1], of_part.largest);
        scales[threadIdx.x] = make_float4(of_part.keep, of_part.add, of_unit.keep, of_unit.add);
        weights[threadIdx.x] = make_float2(own_weight, ends_unit ? 1.0f : 0.0f);
    }

    // Behind a round: its last parts are those before the next one.
    __device__ void go_on() {
        __syncthreads();
        if (threadIdx.x < UNIT) {
            unit[threadIdx.x] = unit[ROUND + threadIdx.x];
            largest[threadIdx.x] = largest[ROUND + threadIdx.x];
            up_to[threadIdx.x] = up_to[ROUND + threadIdx.x];
        }
        __syncthreads();
    }
};

// join_parts: a token's parts to units and these to the whole, in ascending order, then the
// division and the gate
//   arguments as attend's; sums as PartSums
//   grid (H, N / JOIN_THREADS, T), block JOIN_THREADS; reads 4 * N*H bytes per part and token. What
//   each part is scaled by is found at once, so that but two multiply-adds depend on those before.
extern "C" __global__ void join_parts(const float *, const float *gate, const unsigned short *,
                                      const unsigned short *, const int *, const int *, const int *,
                                      long long, float *sums, float *out, long long num_tokens,
                                      long long num_heads, long long dim, long long most_parts) {
    __shared__ Joints joints;
    start_early();
    const long long head = blockIdx.x, token = blockIdx.z, at = token * num_heads + head;
    const int own = threadIdx.x, first_column = blockIdx.y * JOIN_THREADS;
    const int column = min(first_column + own, static_cast<int>(dim) - 1);
    const int parts = static_cast<int>(most_parts);
    const float own_gate = gate[(2 * at + 1) * dim + column];
    const PartSums from = {sums, num_tokens, most_parts, num_heads, dim};
    const int *numbers = from.numbers() + token * most_parts;
    const float *scores = from.scores();
    float weight = 0.0f, sum = 0.0f, whole_weight = 0.0f, whole = 0.0f;  // of the unit; of all
    // Also those of parts that the token does not have: not to wait for their number.
    const auto bring = [&](int base) {
        joints.bring(sums + from.row(token, base, head) * dim + first_column, num_heads * dim,
                     min(ROUND, parts - base), static_cast<int>(dim) - first_column);
    };
    bring(0);
    const int count = from.counts()[token];
    joints.begin();
    for (int base = 0;;) {
        const int part = min(base + own, parts - 1), next = min(part + 1, parts - 1);
        const long long row = from.row(token, part, head);
        const int number = numbers[part], next_number = numbers[next];
        const float score = scores[2 * row], own_weight = scores[2 * row + 1];
        joints.join(number, base + own + 1 < count ? next_number : -1, score, own_weight);
        wait_copies<0>();
        __syncthreads();
        const int joined_parts = min(ROUND, count - base);
#pragma unroll 8
        for (int i = 0; i < joined_parts; i++) {  // without a branch: no load waits for one
            const float4 scales = joints.scales[i];
            const float2 other = joints.weights[i];
            const float value = joints.sums[i][own];
            weight = joined(weight, scales.x, other.x, scales.y);
            // Of a part of which nothing was seen, nothing was written.
            sum = joined(sum, scales.x, other.x == 0.0f ? 0.0f : value, scales.y);
            const float with_weight = joined(whole_weight, scales.z, weight, scales.w);
            const float with_unit = joined(whole, scales.z, sum, scales.w);
            const bool ends_unit = other.y != 0.0f;
            whole_weight = ends_unit ? with_weight : whole_weight;
            whole = ends_unit ? with_unit : whole;
            weight = ends_unit ? 0.0f : weight;
            sum = ends_unit ? 0.0f : sum;
        }
        if ((base += ROUND) >= count) break;
        joints.go_on();
        bring(base);
    }
    if (first_column + own < dim)
        out[at * dim + column] = gated(whole, inverse_fast(whole_weight), own_gate);
}

// join_units: a token's units as attend<..., true> left them, as above
//   grid (H, N / block, T), a thread per column; reads 4 * N*H bytes per unit and token
extern "C" __global__ void join_units(const float *, const float *gate, const unsigned short *,
                                      const unsigned short *, const int *positions, const int *,
                                      const int *, long long, const float *sums, float *out,
                                      long long num_tokens, long long num_heads, long long dim,
                                      long long num_units) {
    start_early();
    const long long head = blockIdx.x, token = blockIdx.z, at = token * num_heads + head;
    const long long column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= dim) return;
    const float own_gate = gate[(2 * at + 1) * dim + column];
    const float *scores = sums + num_tokens * num_units * num_heads * dim;
    const int count = (positions[token] + UNIT_POSITIONS) / UNIT_POSITIONS;
    const Column whole = join_all<1, 8>(count, [&](int unit) -> Piece {
        const long long row = (token * num_units + unit) * num_heads + head;
        return {{scores[2 * row], scores[2 * row + 1], sums[row * dim + column]}, unit};
    });
    out[at * dim + column] = gated(whole, own_gate);
}
