// What writing to the residual streams and normalising them share: the order of a norm's sums, and
// the inject.
#pragma once
#include "lanes.cuh"
#include "special.cuh"

constexpr int NORM_THREADS = 256;  // of a block that norms a row: the order of sums hangs on it
constexpr int MOST_INJECT_FLOATS = 192;  // parts of a token's inject, times streams, that fit
constexpr int MOST_QUADS = 3;  // of a row of at most 4 * NORM_THREADS * MOST_QUADS elements

// Sum over the block of one value of each thread: lanes 16 -> 8 -> ... -> 1, then warps in turn.
__device__ inline float sum_of_block(float own) {
    __shared__ float of_warps[NORM_THREADS / 32];
    own = fold16(own + __shfl_xor_sync(ALL_LANES, own, 16));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    float total = of_warps[0];
#pragma unroll
    for (int warp = 1; warp < NORM_THREADS / 32; warp++) total += of_warps[warp];
    return total;
}

__device__ inline float add_squares(float4 v, float total) {
    total = fmaf(v.x, v.x, total);
    total = fmaf(v.y, v.y, total);
    total = fmaf(v.z, v.z, total);
    return fmaf(v.w, v.w, total);
}

__device__ inline float4 scaled(float4 v, float factor, float4 w) {
    return make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z,
                       v.w * factor * w.w);
}

// Where the inject of the streams comes from: of each token and stream, the sum of parts
// [parts,T,S] in order, divided by a power of two; one part that is divided by one is the inject
// itself.
struct Inject {
    const float *values;
    long long parts, divisor, num_streams, num_tokens;

    // load(part): of one token and stream.
    template <class Load>
    __device__ float weight_of(const Load &load) const {
        float total = 0.0f;
#pragma unroll 20
        for (int part = 0; part < static_cast<int>(parts); part++) total += load(part);
        const float inject = total / static_cast<float>(divisor);
        return 2.0f * sigmoid_fast(inject / static_cast<float>(num_streams));
    }
    // Of all STREAMS streams of a token, by one warp: its parts are brought together, to shared
    // memory of MOST_INJECT_FLOATS.
    template <int STREAMS>
    __device__ void weights_of_token(int token, float *own_parts, float *weights) const {
        constexpr int AT_ONCE = 5;
        const int lane = threadIdx.x & 31, count = static_cast<int>(parts) * STREAMS;
        const auto place = [&](int i) {
            return (i / STREAMS * num_tokens + token) * STREAMS + i % STREAMS;
        };
#pragma unroll 1
        for (int first = lane; first < count; first += 32 * AT_ONCE) {
            float own[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                own[i] = values[place(min(first + 32 * i, count - 1))];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (first + 32 * i < count) own_parts[first + 32 * i] = own[i];
        }
        __syncwarp();
        if (lane < STREAMS)
            weights[lane] = weight_of([&](int part) { return own_parts[part * STREAMS + lane]; });
        __syncwarp();
    }
    __device__ float weight(long long token, long long s) const {
        return weight_of(
            [&](int part) { return values[(part * num_tokens + token) * num_streams + s]; });
    }
};
