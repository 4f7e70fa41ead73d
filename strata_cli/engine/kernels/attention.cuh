// Gated attention over a K/V cache of f16: what prompts (attention.cu) and few tokens
// (attention_few.cu) share.
//   T tokens, H query heads, KV key/value heads (H / KV query heads share one), N head width
//
// One order for every launch, so that a token's bits depend on nothing but the token. Positions are
// cut into parts of 64, counted from position 0, and parts into units of UNIT. Of a part, only the
// positions that the token may see count; a part without any is left out. Within a part: scores
// q . k by tensor cores, 16 columns of N after another; weights 2**(score - the part's largest),
// rounded to f16; their sum, and weights times values, by tensor cores, 16 positions after another.
// A part joins its unit, and a unit the whole, in ascending order, each rescaled to the largest
// score so far. Queries, keys, values and weights are f16, all sums float32.
#pragma once
#include "fragments.cuh"
#include "lanes.cuh"
#include "mma.cuh"
#include "pairs.cuh"
#include "special.cuh"

constexpr int PART = 64;  // positions
constexpr int UNIT = 16;  // parts
constexpr int UNIT_POSITIONS = PART * UNIT;
constexpr unsigned TWO_ONES = 0x3c003c00;  // of f16

// What a launch is about, for all its blocks.
struct Attention {
    const float *q, *gate;
    const unsigned short *keys, *values;  // f16
    const int *positions, *selected, *num_selected;
    long long ratio, num_heads, num_kv_heads, dim, budget;

    // Query heads that share a key head.
    __device__ int group() const { return static_cast<int>(num_heads / num_kv_heads); }

    // Of q . k, for weights as powers of two.
    __device__ float scale() const { return 1.4426950408889634f / sqrtf(static_cast<float>(dim)); }

    // True when rows of the cache can be copied 16 bytes at a time.
    __device__ bool is_cache_wide() const { return is_wide_cache(keys, values); }

    __device__ bool is_wide_cache(const unsigned short *k, const unsigned short *v) const {
        const unsigned long long bits =
            reinterpret_cast<unsigned long long>(k) | reinterpret_cast<unsigned long long>(v);
        return dim % 8 == 0 && (bits & 15) == 0;
    }
};

// The positions that a token sees: those of its chosen blocks, and tail .. stop. All up to its own
// where the cache has no blocks, or the token chose every complete one.
struct Allowed {
    const int *blocks;
    int num_blocks, ratio, tail, stop;

    __device__ static Allowed of(const Attention &all, long long token) {
        const int stop = all.positions[token] + 1, ratio = static_cast<int>(all.ratio);
        const int complete = ratio > 0 ? stop / ratio : 0;
        const int chosen = ratio > 0 ? all.num_selected[token] : 0;
        if (chosen >= complete) return {nullptr, 0, ratio, 0, stop};
        return {all.selected + token * all.budget, chosen, ratio, complete * ratio, stop};
    }
};

// Bits of the positions first .. last among the 32 from base on.
__device__ inline unsigned bits_of(int first, int last, int base) {
    const int from = max(first - base, 0), count = min(last - base, 32) - from;
    return count > 0 ? ~0u >> (32 - count) << from : 0;
}

// Set the bits of positions first .. last in words of 32 positions from base on.
__device__ inline void mark(unsigned *words, int num_words, int base, int first, int last) {
    const int begin = max(first - base, 0) / 32, end = min((last - base + 31) / 32, num_words);
    for (int word = begin; word < end; word++)
        atomicOr(&words[word], bits_of(first, last, base + 32 * word));
}

// Up to 8 values of a row, zeros behind them.
__device__ inline uint4 some_of_row(const unsigned short *row, int count) {
    unsigned v[8];
#pragma unroll
    for (int e = 0; e < 8; e++) v[e] = e < count ? row[e] : 0;
    return make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}

// Where SPLIT: rows of positions from `first` on lie so many f16 behind their usual place.
struct Elsewhere {
    int first = 0;
    long long distance = 0;
};

// Start copying a part's rows of the cache, those of the positions in the bits; zeros elsewhere.
template <int DIM, int THREADS, bool SPLIT = false>
__device__ inline void load_part(TileRow<DIM> *tile, const unsigned short *cache, long long stride,
                                 int dim, int part, unsigned low, unsigned high, bool wide,
                                 const Elsewhere &elsewhere = {}) {
    constexpr int CHUNKS = DIM / 8, STEP = THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    const int count = min(dim - 8 * chunk, 8);
    const unsigned short *source = cache + (part * PART + first) * stride + 8 * chunk;
    const auto at = [&](int row, const unsigned short *usual) {
        if constexpr (!SPLIT) return usual;
        return part * PART + row < elsewhere.first ? usual : usual + elsewhere.distance;
    };
    if (wide) {
#pragma unroll 4
        for (int row = first; row < PART; row += STEP, source += STEP * stride) {
            if (count > 0 && (row < 32 ? low : high) >> (row & 31) & 1) {
                copy_async(chunk_at(tile, row, chunk), at(row, source));
            } else {
                *chunk_at(tile, row, chunk) = make_uint4(0, 0, 0, 0);
            }
        }
    } else {
#pragma unroll 1
        for (int row = first; row < PART; row += STEP, source += STEP * stride) {
            const bool is_seen = (row < 32 ? low : high) >> (row & 31) & 1;
            *chunk_at(tile, row, chunk) = some_of_row(at(row, source), is_seen ? count : 0);
        }
    }
}

// Two queries from column d on as f16; zeros behind dim.
__device__ inline unsigned query_pair(const float *row, int d, int dim) {
    return pair_of(d < dim ? row[d] : 0.0f, d + 1 < dim ? row[d + 1] : 0.0f);
}

// A query's chunk of 8 columns as f16.
__device__ inline uint4 query_chunk(const float *row, int chunk, int dim, bool wide) {
    const int d = 8 * chunk;
    if (wide && d + 8 <= dim) {
        const float4 a = load4(row + d), b = load4(row + d + 4);
        return make_uint4(pair_of(a.x, a.y), pair_of(a.z, a.w), pair_of(b.x, b.y),
                          pair_of(b.z, b.w));
    }
    return make_uint4(query_pair(row, d, dim), query_pair(row, d + 2, dim),
                      query_pair(row, d + 4, dim), query_pair(row, d + 6, dim));
}

// Factors that bring two states to one scale; the larger score is the new one.
struct Scales {
    float keep, add, largest;

    __device__ static Scales of(float largest, float other) {
        const float both = fmaxf(largest, other), base = both > lowest() ? both : 0.0f;
        return {exp2_fast(largest - base), exp2_fast(other - base), both};
    }
};

__device__ inline float joined(float own, float keep, float other, float add) {
    return fmaf(own, keep, other * add);
}

// The two scores of a tile of 8 positions that a lane has of a row: scaled, or -inf where not seen.
__device__ inline void mask(float &a, float &b, unsigned bits, float scale) {
    a = bits & 1 ? a * scale : lowest();
    b = bits & 2 ? b * scale : lowest();
}

// The weight of a score, relative to the part's largest.
__device__ inline float weight_of(float score, float largest) {
    return exp2_fast(score - (largest > lowest() ? largest : 0.0f));
}

// The largest of a row's four lanes.
__device__ inline float largest_of_quad(float v) {
    v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 1));
    return fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 2));
}

// sums += weights times values of 8 columns, all positions of a part in turn.
template <int DIM>
__device__ inline void add_values(float (&sums)[4], const unsigned (&weights)[4][4],
                                  TileRow<DIM> *values, int chunk) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unsigned v[4];
        load_transposed(v, chunk_at(values, 32 * half + (threadIdx.x & 31), chunk));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned (&w)[4] = weights[2 * half + i];
            multiply(sums, w[0], w[1], w[2], w[3], v[2 * i], v[2 * i + 1]);
        }
    }
}

// Sums of a part's weights: of row g in [0], of row g + 8 in [2].
__device__ inline void add_weights(float (&sums)[4], const unsigned (&weights)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        multiply(sums, weights[i][0], weights[i][1], weights[i][2], weights[i][3], TWO_ONES,
                 TWO_ONES);
}

// True when rows of n floats, one after the other from each address, can be moved in pairs.
__device__ inline bool is_even(long long n, const float *a, const float *b) {
    const unsigned long long bits =
        reinterpret_cast<unsigned long long>(a) | reinterpret_cast<unsigned long long>(b);
    return n % 2 == 0 && (bits & 7) == 0;
}

// Two neighbouring columns of a row of n; even: n is, and rows are aligned to pairs.
__device__ inline float2 load_pair(const float *row, int column, int n, bool even) {
    if (even) return *reinterpret_cast<const float2 *>(row + column);
    return make_float2(row[column], column + 1 < n ? row[column + 1] : 0.0f);
}

__device__ inline void store_pair(float *row, int column, int n, bool even, float2 v) {
    if (even) {
        *reinterpret_cast<float2 *>(row + column) = v;
    } else {
        row[column] = v.x;
        if (column + 1 < n) row[column + 1] = v.y;
    }
}

// A finished element: sum / weight * sigmoid(gate). Adding zero leaves one zero.
__device__ inline float gated(float sum, float inverse_weight, float gate) {
    return (sum + 0.0f) * inverse_weight * sigmoid_fast(gate);
}
