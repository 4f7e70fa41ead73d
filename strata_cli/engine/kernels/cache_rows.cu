// Rows of a K/V cache: each token's keys and values, and its index keys, at its position.
//   T tokens, KV key/value heads, N head width
#include "lanes.cuh"
#include "overlap.cuh"
#include "pairs.cuh"
#include "segments.cuh"

// A row of floats to its place, 4 by a thread.
__device__ inline void store_row(const float *src, float *to, long long width) {
    const long long first = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first >= width) return;
    if (is_wide(width, src, to)) {
        store4(to + first, load4(src + first));
    } else {
        for (long long i = first; i < min(first + 4, width); i++) to[i] = src[i];
    }
}

// store_rows: cache[positions[t]] = src[t]
//   src [T,W] f32, positions [T] i32, cache [context,W] f32; grid (T, W / (4 * block))
extern "C" __global__ void store_rows(const float *src, const int *positions, float *cache,
                                      long long width) {
    start_early();
    store_row(src + blockIdx.x * width, cache + positions[blockIdx.x] * width, width);
}

// store_rows_segments: index keys of each segment to its cache; nothing where they already lie
// there; grid (rows of the longest, W / (4 * block), segments)
extern "C" __global__ void store_rows_segments(const float *src, const int *positions,
                                               const CachedSegment *segments, long long width) {
    start_early();
    const CachedSegment own = segments[blockIdx.z];
    if (blockIdx.x >= own.count) return;
    const long long row = own.first + blockIdx.x;
    float *to = own.own.index_keys + positions[row] * width;
    if (to != src + row * width) store_row(src + row * width, to, width);
}

// store_kv: rows of keys and values to their positions of the cache, as f16
//   k, v [T,KV*N] f32, positions [T] i32 -> keys, values [context,KV*N] f16
//   grid (T*KV / warps), a warp per token and head; moves 12 * T*KV*N bytes. Blocks of attention
//   multiply values that a token does not see by zero. So they must be numbers: where one is not,
//   the key of its row is made not a number instead, and only who sees the row gets none.
__device__ inline void store_head(const float *k, const float *v, const int *positions,
                                  unsigned short *keys, unsigned short *values, long long row,
                                  long long num_kv_heads, long long dim) {
    const int lane = threadIdx.x & 31;
    const long long position = positions[row / num_kv_heads];
    const long long at = (position * num_kv_heads + row % num_kv_heads) * dim;
    const unsigned long long caches =
        reinterpret_cast<unsigned long long>(keys) | reinterpret_cast<unsigned long long>(values);
    const bool is_wide_row = dim % 8 == 0 && dim <= 256 && is_wide(dim, k, v) && (caches & 15) == 0;
    if (is_wide_row) {  // a chunk of 8 columns per lane
        const bool has_chunk = 8 * lane < dim;
        const float *from_k = k + row * dim + 8 * lane, *from_v = v + row * dim + 8 * lane;
        float own_k[8], own_v[8];
        bool is_number = true;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const float4 a = has_chunk ? load4(from_k + i) : none;
            const float4 b = has_chunk ? load4(from_v + i) : none;
            own_k[i] = a.x, own_k[i + 1] = a.y, own_k[i + 2] = a.z, own_k[i + 3] = a.w;
            own_v[i] = b.x, own_v[i + 1] = b.y, own_v[i + 2] = b.z, own_v[i + 3] = b.w;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            is_number = is_number && own_v[i] == own_v[i];
            own_v[i] = own_v[i] == own_v[i] ? own_v[i] : 0.0f;
        }
        const unsigned none = __all_sync(ALL_LANES, is_number) ? 0 : 0x7fff7fff;
        if (!has_chunk) return;
        unsigned to_k[4], to_v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to_k[i] = pair_of(own_k[2 * i], own_k[2 * i + 1]) | none;
            to_v[i] = pair_of(own_v[2 * i], own_v[2 * i + 1]);
        }
        const long long first = at + 8 * lane;
        *reinterpret_cast<uint4 *>(keys + first) = make_uint4(to_k[0], to_k[1], to_k[2], to_k[3]);
        *reinterpret_cast<uint4 *>(values + first) = make_uint4(to_v[0], to_v[1], to_v[2], to_v[3]);
        return;
    }
    bool is_number = true;
    for (long long d = lane; d < dim; d += 32) {
        const float value = v[row * dim + d];
        is_number = is_number && value == value;
        values[at + d] = half_of(value == value ? value : 0.0f);
    }
    is_number = __all_sync(ALL_LANES, is_number);
    for (long long d = lane; d < dim; d += 32)
        keys[at + d] = is_number ? half_of(k[row * dim + d]) : 0x7fff;
}

extern "C" __global__ void store_kv(const float *k, const float *v, const int *positions,
                                    unsigned short *keys, unsigned short *values,
                                    long long num_tokens, long long num_kv_heads, long long dim) {
    start_early();
    const long long row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row < num_tokens * num_kv_heads)
        store_head(k, v, positions, keys, values, row, num_kv_heads, dim);
}

// store_kv_segments: each segment's to its cache; grid (rows of the longest * KV / warps, segments)
extern "C" __global__ void store_kv_segments(const float *k, const float *v, const int *positions,
                                             const CachedSegment *segments, long long num_kv_heads,
                                             long long dim) {
    start_early();
    const CachedSegment own = segments[blockIdx.y];
    const long long row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row < own.count * num_kv_heads)
        store_head(k, v, positions, own.own.keys, own.own.values, own.first * num_kv_heads + row,
                   num_kv_heads, dim);
}
