// The streams of a token normed by every block that multiplies them: that takes less than waiting
// for another launch to have done it.
#pragma once
#include "activations.cuh"
#include "bulk.cuh"
#include "overlap.cuh"
#include "streams.cuh"

constexpr int MOST_STREAMS = 6;
constexpr int STREAM_WARPS = NORM_THREADS / 32;  // whose sums are a stream's; a warp makes some
constexpr int MOST_EACH = 2;                     // sums of warps that a warp makes
constexpr int NORM_BARRIER = 15;                 // no team's

// A token's streams, one after the other, each normed on its own.
struct NormedStreams {
    const float *weight;  // [S,D]
    float *normed;        // [S,D]
    float eps;
    int size, blocks;  // D; blocks that write normed, a part each

    // Last read a token ago: no longer in the cache.
    __device__ void fetch_weight(int cols) const {
        const int own = 32 * (blockIdx.y * blockDim.x + threadIdx.x);
        if (own < cols) fetch_ahead(weight + own);
    }

    // Quads of normed streams, by the first `warps` warps: put(k, v), for element k on. The order
    // of sums is that of Quads (hyper.cu).
    template <class Put>
    __device__ void make(const float *x, int cols, int warps, const Put &put) const {
        __shared__ float sums[MOST_STREAMS * STREAM_WARPS];
        const int lane = threadIdx.x & 31, warp = threadIdx.x / 32,
                  all = cols / size * STREAM_WARPS;
        float4 v[MOST_EACH][MOST_QUADS];
        const auto place = [&](int each, int i) {  // of a quad in its stream
            return 4 * ((warp + each * warps) % STREAM_WARPS * 32 + lane + NORM_THREADS * i);
        };
#pragma unroll
        for (int each = 0; each < MOST_EACH; each++) {
            const int own = warp + each * warps, stream = own / STREAM_WARPS;
#pragma unroll
            for (int i = 0; i < MOST_QUADS; i++) {
                const bool is_there = own < all && place(each, i) < size;
                v[each][i] = is_there ? load4(x + stream * size + place(each, i))
                                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
        }
#pragma unroll
        for (int each = 0; each < MOST_EACH; each++) {
            float own = 0.0f;
#pragma unroll
            for (int i = 0; i < MOST_QUADS; i++) own = add_squares(v[each][i], own);
            own = fold16(own + __shfl_xor_sync(ALL_LANES, own, 16));
            if (lane == 0 && warp + each * warps < all) sums[warp + each * warps] = own;
        }
        team_barrier(NORM_BARRIER, 32 * warps);
#pragma unroll
        for (int each = 0; each < MOST_EACH; each++) {
            const int own = warp + each * warps, stream = own / STREAM_WARPS;
            if (own >= all) continue;
            float total = sums[stream * STREAM_WARPS];
#pragma unroll
            for (int other = 1; other < STREAM_WARPS; other++)
                total += sums[stream * STREAM_WARPS + other];
            const float factor = rms_factor(total, size, eps);
#pragma unroll
            for (int i = 0; i < MOST_QUADS; i++) {
                if (place(each, i) >= size) continue;
                const int k = stream * size + place(each, i);
                put(own, k, scaled(v[each][i], factor, load4(weight + k)));
            }
        }
    }
};

template <class... Kinds>
__device__ inline void load_activations(uint4 *planes, const float *x, int cols, const Columns &,
                                        const NormedStreams &gate, int warps) {
    const int plane = (cols + 31) / 32 * 4;
    gate.make(x, cols, warps, [&](int part, int k, float4 v) {
        store_two<Kinds...>(planes, plane, k, 0, 1, v.x, v.y);
        store_two<Kinds...>(planes, plane, k + 2, 0, 1, v.z, v.w);
        if (part % gate.blocks == blockIdx.y) store4(gate.normed + k, v);
    });
}
