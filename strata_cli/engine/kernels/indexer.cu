// QSA's block indexer: pooled keys of complete blocks, scores, and the best blocks of each query.
//   T tokens, B blocks that fit the cache, N index head width, ratio positions per block
#include "lanes.cuh"
#include "overlap.cuh"
#include "rope.cuh"
#include "segments.cuh"

// pool_index_blocks: the key of each block that one of T tokens completes: mean, norm, rotation
//   raw_keys [context,N] f32, positions [T] i32, weight [N] f32, table [context,half,2] f32
//   -> pooled [B,N] f32, only rows of completed blocks
//   grid (T / 8), 16 lanes per token, shared 4 * N bytes per token
template <class KeyAt>
__device__ inline void pool(const KeyAt &key_at, const int *positions, long long ratio,
                            const float *weight, const float *table, float eps, float *pooled,
                            long long num_tokens, long long dim, long long half) {
    extern __shared__ float keys[];
    const long long own = blockIdx.x * (blockDim.x / 16) + threadIdx.x / 16;
    const long long past_end = positions[min(own, num_tokens - 1)] + 1;
    const bool completes = own < num_tokens && past_end % ratio == 0;
    const long long block = completes ? past_end / ratio - 1 : 0;
    float *key = keys + threadIdx.x / 16 * dim;
    if (completes) {
        for (long long i = lane16(); i < dim; i += 16) {
            float total = 0.0f;
            for (long long r = 0; r < ratio; r++) total += key_at(block * ratio + r)[i];
            key[i] = total * (1.0f / static_cast<float>(ratio));
        }
    }
    const float scale = rms_scale(key, completes ? dim : 0, eps);
    if (completes)
        for (long long i = lane16(); i < dim; i += 16) key[i] = key[i] * scale * weight[i];
    __syncwarp();
    if (!completes) return;
    for (long long i = lane16(); i < dim; i += 16)
        pooled[block * dim + i] = turned(key, table, block * ratio, half, i);
}

extern "C" __global__ void pool_index_blocks(const float *raw_keys, const int *positions,
                                             long long ratio, const float *weight,
                                             const float *table, float eps, float *pooled,
                                             long long num_tokens, long long dim, long long half) {
    start_early();
    const auto key_at = [&](long long position) { return raw_keys + position * dim; };
    pool(key_at, positions, ratio, weight, table, eps, pooled, num_tokens, dim, half);
}

// pool_index_blocks_segments: each segment in its cache; grid (rows of the longest / 8, segments)
extern "C" __global__ void pool_index_blocks_segments(const CachedSegment *segments,
                                                      const int *positions, long long ratio,
                                                      const float *weight, const float *table,
                                                      float eps, long long dim, long long half) {
    start_early();
    const CachedSegment own = segments[blockIdx.y];
    const auto key_at = [&](long long position) { return own.index_key(position, dim); };
    pool(key_at, positions + own.first, ratio, weight, table, eps, own.own.pooled, own.count, dim,
         half);
}

// One level of the fold below: lanes l and l + HALF exchange the values that the other keeps.
template <int HALF>
__device__ inline void exchange(float (&values)[16]) {
    const bool upper = threadIdx.x & HALF;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float kept = upper ? values[i + HALF] : values[i];
        const float sent = upper ? values[i] : values[i + HALF];
        values[i] = kept + __shfl_xor_sync(ALL_LANES, sent, HALF);
    }
}

// Fold 16 values over the 16 lanes of a group at once, each in the order of fold16: lane l gets
// the total of value l.
__device__ inline float fold16_each(float (&values)[16]) {
    exchange<8>(values);
    exchange<4>(values);
    exchange<2>(values);
    exchange<1>(values);
    return values[0];
}

// score_blocks: the score of each complete block, the sum over heads of relu(query . key)
//   queries [T,HEADS,N] f32, pooled [B,N] f32, positions [T] i32 -> scores [T,B] f32; a token
//   whose complete blocks all fit the budget needs no scores and gets none
//   grid (any, T), block a multiple of 16, shared 4 * HEADS*N bytes; 16 lanes take 16 / HEADS
//   blocks at a time. Reads 4 * B*N bytes per token, from the L2 cache
template <int HEADS>
__global__ void score_blocks(const float *queries, const float *pooled, const int *positions,
                             long long ratio, long long budget, float *scores, long long num_blocks,
                             long long dim) {
    start_early();
    constexpr int BLOCKS = 16 / HEADS;
    extern __shared__ __align__(16) float query[];
    const long long token = blockIdx.y, complete = (positions[token] + 1) / ratio;
    if (complete <= budget) return;
    load_row(query, queries + token * HEADS * dim, HEADS * dim, false);
    __syncthreads();
    scores += token * num_blocks;
    const int groups = blockDim.x / 16, lane = lane16();
    // Both halves of a warp go round equally often, because they exchange values.
    const long long step = static_cast<long long>(gridDim.x) * groups * BLOCKS;
    for (long long base = blockIdx.x * groups * BLOCKS; base < complete; base += step) {
        const long long first = base + threadIdx.x / 16 * BLOCKS;
        float values[16] = {};
#pragma unroll 4
        for (long long i = lane; i < dim; i += 16) {
            float key[BLOCKS];
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
                key[b] = pooled[min(first + b, complete - 1) * dim + i];
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float q = query[h * dim + i];
#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
                    values[h * BLOCKS + b] = fmaf(q, key[b], values[h * BLOCKS + b]);
            }
        }
        const float product = fold16_each(values);
        float score = 0.0f;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float of_head = __shfl_sync(ALL_LANES, product, h * BLOCKS + lane % BLOCKS, 16);
            if (of_head > 0.0f) score += of_head;
        }
        if (lane < BLOCKS && first + lane < complete) scores[first + lane] = score;
    }
}

// A tile of tokens and blocks: threads, keys and tokens of a thread block.
constexpr int TILE_THREADS = 128;
constexpr int THREAD_KEYS = 4;                         // of a thread
constexpr int KEY_LANES = 16;                          // threads side by side over keys
constexpr int TILE_KEYS = THREAD_KEYS * KEY_LANES;     // of a tile
constexpr int TILE_TOKENS = TILE_THREADS / KEY_LANES;  // of a tile

// Rows of N elements in shared memory, elements l, l + 16, ... of each side by side, which are what
// lane l of 16 sums in turn; zeros up to QUADS * 4 of them.
template <int QUADS>
struct LaneRow {
    float4 of[16][QUADS];
    float4 pad;  // neighbouring rows start in other banks

    __device__ void put(int i, float v) { reinterpret_cast<float *>(&of[i % 16][0])[i / 16] = v; }
};

template <int QUADS, class RowAt>
__device__ inline void load_rows(LaneRow<QUADS> *to, const RowAt &row_at, long long num_rows,
                                 int rows, int dim) {
    for (int i = threadIdx.x; i < rows * 64 * QUADS; i += TILE_THREADS) {
        const int row = i / (64 * QUADS), at = i % (64 * QUADS);  // in shared memory
        const int d = at % (4 * QUADS) * 16 + at / (4 * QUADS);
        const bool is_there = d < dim && row < num_rows;
        to[row].put(d, is_there ? row_at(row)[d] : 0.0f);
    }
}

// Products of a thread's HEADS queries with its keys.
template <int HEADS>
struct Products {
    float of[HEADS][THREAD_KEYS];

    __device__ void add(const Products &other) {
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int b = 0; b < THREAD_KEYS; b++) of[h][b] += other.of[h][b];
    }
};

// What lanes l, l + STEP, ... of 16 sum up to, in the order of fold16: STEP 16 is lane l alone.
template <int HEADS, int QUADS, int STEP>
__device__ inline Products<HEADS> sum_of_lanes(const LaneRow<QUADS> *queries,
                                               const LaneRow<QUADS> *keys, int l) {
    if constexpr (STEP == 16) {
        Products<HEADS> sum = {};
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            float4 k[THREAD_KEYS];
#pragma unroll
            for (int b = 0; b < THREAD_KEYS; b++) k[b] = keys[b * KEY_LANES].of[l][i];
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float4 q = queries[h].of[l][i];
#pragma unroll
                for (int b = 0; b < THREAD_KEYS; b++) {
                    float &own = sum.of[h][b];
                    own = fmaf(q.x, k[b].x, own);
                    own = fmaf(q.y, k[b].y, own);
                    own = fmaf(q.z, k[b].z, own);
                    own = fmaf(q.w, k[b].w, own);
                }
            }
        }
        return sum;
    } else {
        Products<HEADS> sum = sum_of_lanes<HEADS, QUADS, 2 * STEP>(queries, keys, l);
        sum.add(sum_of_lanes<HEADS, QUADS, 2 * STEP>(queries, keys, l + STEP));
        return sum;
    }
}

// score_tiles: score_blocks for many tokens, the same bits: a tile of tokens shares the loads of a
// tile of keys
//   arguments as score_blocks'; N <= 64 * QUADS
//   grid (any, T / TILE_TOKENS), block TILE_THREADS, shared (HEADS * TILE_TOKENS + TILE_KEYS) rows
//   limit: HEADS * N multiply-adds per token and block; the loads of their operands take twice that
template <int HEADS, int QUADS, class KeyAt>
__device__ inline void score_tile(const float *queries, const KeyAt &key_at, const int *positions,
                                  long long ratio, long long budget, float *scores,
                                  long long num_blocks, long long dim, long long first_token,
                                  int tokens) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto *q = reinterpret_cast<LaneRow<QUADS> *>(memory), *keys = q + HEADS * TILE_TOKENS;
    const int lane = threadIdx.x % KEY_LANES, own = threadIdx.x / KEY_LANES;
    long long most = 0;  // complete blocks of any token that needs scores
    for (int t = 0; t < tokens; t++) {
        const long long complete = (positions[first_token + t] + 1) / ratio;
        if (complete > budget && complete > most) most = complete;
    }
    if (most == 0) return;
    const long long token = first_token + min(own, tokens - 1);
    const long long own_complete = (positions[token] + 1) / ratio;
    const bool is_scored = own < tokens && own_complete > budget;
    const float *own_queries = queries + first_token * HEADS * dim;
    const auto query_at = [&](int row) { return own_queries + row * dim; };
    load_rows(q, query_at, tokens * HEADS, HEADS * TILE_TOKENS, static_cast<int>(dim));
    const long long step = static_cast<long long>(gridDim.x) * TILE_KEYS;
    for (long long base = static_cast<long long>(blockIdx.x) * TILE_KEYS; base < most;
         base += step) {
        __syncthreads();
        const auto key_of = [&](int row) { return key_at(base + row); };
        load_rows(keys, key_of, most - base, TILE_KEYS, static_cast<int>(dim));
        __syncthreads();
        const Products<HEADS> products =
            sum_of_lanes<HEADS, QUADS, 1>(q + own * HEADS, keys + lane, 0);
#pragma unroll
        for (int b = 0; b < THREAD_KEYS; b++) {
            float score = 0.0f;
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                if (products.of[h][b] > 0.0f) score += products.of[h][b];
            const long long block = base + lane + b * KEY_LANES;
            if (is_scored && block < own_complete) scores[token * num_blocks + block] = score;
        }
    }
}

template <int HEADS, int QUADS>
__global__ void __launch_bounds__(TILE_THREADS)
    score_tiles(const float *queries, const float *pooled, const int *positions, long long ratio,
                long long budget, float *scores, long long num_blocks, long long dim,
                long long num_tokens) {
    start_early();
    const long long first = static_cast<long long>(blockIdx.y) * TILE_TOKENS;
    const int tokens = static_cast<int>(min(num_tokens - first, (long long)TILE_TOKENS));
    const auto key_at = [&](long long block) { return pooled + block * dim; };
    score_tile<HEADS, QUADS>(queries, key_at, positions, ratio, budget, scores, num_blocks, dim,
                             first, tokens);
}

// score_tiles_segments: each segment with the keys of its cache; queries and positions of all rows,
// scores from row `first_row` on; grid (any, rows of the longest / TILE_TOKENS, segments)
template <int HEADS, int QUADS>
__global__ void __launch_bounds__(TILE_THREADS)
    score_tiles_segments(const float *queries, const CachedSegment *segments, const int *positions,
                         long long ratio, long long budget, float *scores, long long first_row,
                         long long num_blocks, long long dim) {
    start_early();
    const CachedSegment own = segments[blockIdx.z];
    const long long before = static_cast<long long>(blockIdx.y) * TILE_TOKENS;
    if (before >= own.count) return;
    const int tokens = static_cast<int>(min(own.count - before, (long long)TILE_TOKENS));
    const auto key_at = [&](long long block) { return own.block_key(block, ratio, dim); };
    score_tile<HEADS, QUADS>(queries, key_at, positions, ratio, budget,
                             scores - first_row * num_blocks, num_blocks, dim, own.first + before,
                             tokens);
}

// Numbers that warps left, up to 32 of them: the sum of those of warps before the calling one, and
// of all. All at once: one after the other they would be most of the time that a selection takes.
struct OverWarps {
    int before, all;

    __device__ OverWarps(const int *of_warps, int num_warps) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
        int up_to = lane < num_warps ? of_warps[lane] : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(ALL_LANES, up_to, step);
            if (lane >= step) up_to += below;
        }
        all = __shfl_sync(ALL_LANES, up_to, 31);
        before = __shfl_sync(ALL_LANES, up_to, max(warp, 1) - 1);
        if (warp == 0) before = 0;
    }
};

constexpr int DIGIT_BITS = 11;
constexpr int BINS = 1 << DIGIT_BITS;

// Where the k-th largest of binned values is, 1 <= k <= their number: its bin, and how many values
// are in bins above. Every thread of the block takes part, and gets the same.
__device__ inline int2 find_bin(const int *bins, int k) {
    __shared__ int of_warps[32];
    __shared__ int2 found;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, per_thread = BINS / blockDim.x;
    const int last = BINS - 1 - static_cast<int>(threadIdx.x) * per_thread;  // bins go downwards
    int own = 0;
    for (int i = 0; i < per_thread; i++) own += bins[last - i];
    int up_to = own;
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(ALL_LANES, up_to, step);
        if (lane >= step) up_to += before;
    }
    if (lane == 31) of_warps[warp] = up_to;
    __syncthreads();
    up_to += OverWarps(of_warps, blockDim.x / 32).before;
    int above = up_to - own;
    if (above < k && k <= up_to) {
        int bin = last;
        while (above + bins[bin] < k) above += bins[bin--];
        found = make_int2(bin, above);
    }
    __syncthreads();
    return found;
}

// The k-th largest of count values, none negative: found digit by digit, the highest first.
__device__ inline int kth_largest(const int *values, int count, int k) {
    __shared__ int bins[BINS];
    int known = 0, matched = 31;  // the digits found, and the lowest of their bits
    while (matched > 0) {
        const int shift = max(matched - DIGIT_BITS, 0);
        for (int i = threadIdx.x; i < BINS; i += blockDim.x) bins[i] = 0;
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const int value = values[i];
            if ((value ^ known) >> matched == 0) atomicAdd(&bins[value >> shift & (BINS - 1)], 1);
        }
        __syncthreads();
        const int2 found = find_bin(bins, k);
        known |= found.x << shift;
        k -= found.y;
        matched = shift;
    }
    return known;
}

// select_blocks: the best complete blocks of each token, ascending; equal scores: the lower block
//   scores [T,B] f32 from score_blocks, read as integers; positions [T] i32 -> selected
//   [T,budget] i32 (the rest -1), num_selected [T] i32
//   grid (T), block whole warps up to 1024, shared 4 * staged bytes: so many scores are kept
//   there. Scores are not negative, so the bits of their floats order as they do. Integer counts
//   only: nothing depends on the order in which threads arrive.
extern "C" __global__ void select_blocks(const int *scores, const int *positions, long long ratio,
                                         int *selected, int *num_selected, long long num_blocks,
                                         long long budget, long long staged) {
    start_early();
    extern __shared__ int kept_scores[];
    __shared__ int above_of[32], ties_of[32];
    const long long token = blockIdx.x;
    const int complete = static_cast<int>((positions[token] + 1) / ratio);
    const int keep = static_cast<int>(min(static_cast<long long>(complete), budget));
    selected += token * budget;
    if (threadIdx.x == 0) num_selected[token] = keep;
    for (int i = keep + threadIdx.x; i < budget; i += blockDim.x) selected[i] = -1;
    if (complete <= budget) {
        for (int i = threadIdx.x; i < complete; i += blockDim.x) selected[i] = i;
        return;
    }
    const int *values = scores + token * num_blocks;
    if (complete <= staged) {
        for (int i = threadIdx.x; i < complete; i += blockDim.x) kept_scores[i] = values[i];
        values = kept_scores;
    }
    __syncthreads();
    const int threshold = kth_largest(values, complete, keep);

    // Each warp takes a run of blocks; what the warps before it keep decides where it writes.
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, num_warps = blockDim.x / 32;
    const int run = (complete + blockDim.x - 1) / blockDim.x * 32;
    const int first = warp * run, stop = min(first + run, complete);
    int above = 0, ties = 0;
    for (int i = first + lane; i < stop; i += 32) {
        above += values[i] > threshold;
        ties += values[i] == threshold;
    }
    above = sum_of_warp(above);
    ties = sum_of_warp(ties);
    if (lane == 0) {
        above_of[warp] = above;
        ties_of[warp] = ties;
    }
    __syncthreads();
    const OverWarps above_of_all(above_of, num_warps), ties_of_all(ties_of, num_warps);
    int above_before = above_of_all.before, ties_before = ties_of_all.before;
    const int wanted_ties = keep - above_of_all.all;
    const unsigned earlier_lanes = (1u << lane) - 1;
    for (int start = first; start < stop; start += 32) {
        const int i = start + lane;
        const unsigned is_above = __ballot_sync(ALL_LANES, i < stop && values[i] > threshold);
        const unsigned is_tie = __ballot_sync(ALL_LANES, i < stop && values[i] == threshold);
        const int lower_ties = ties_before + __popc(is_tie & earlier_lanes);
        const int lower = above_before + __popc(is_above & earlier_lanes);
        const bool keeps_tie = (is_tie >> lane & 1) && lower_ties < wanted_ties;
        if ((is_above >> lane & 1) || keeps_tie) selected[lower + min(lower_ties, wanted_ties)] = i;
        above_before += __popc(is_above);
        ties_before += __popc(is_tie);
    }
}
