// What the mix of the streams and of experts do with a few columns, and writing a row twice.
#pragma once
#include "lanes.cuh"
#include "pairs.cuh"
#include "special.cuh"

// Four values, or one, to a row and, where there is one, to its copy as f16 for the products.
__device__ inline void put4(float *out, unsigned *rounded, long long d, float4 v) {
    store4(out + d, v);
    if (rounded != nullptr)
        *reinterpret_cast<uint2 *>(rounded + d / 2) =
            make_uint2(pair_of(v.x, v.y), pair_of(v.z, v.w));
}

__device__ inline void put1(float *out, unsigned *rounded, long long d, float v) {
    out[d] = v;
    if (rounded != nullptr) reinterpret_cast<unsigned short *>(rounded)[d] = half_of(v);
}

// Columns first .. first + 4 of a token: out = (1 / S) * sum over s of sigmoid(gate[s]) *
// normed[s].
__device__ inline void mix_columns(const float *gate, const float *normed, float *out,
                                   unsigned *half, long long first, long long num_streams,
                                   long long size, bool wide) {
    const float share = 1.0f / static_cast<float>(num_streams);
    if (wide && is_wide(size, gate, normed, out)) {
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (long long s = 0; s < num_streams; s++) {
            const float4 g = load4(gate + s * size + first), n = load4(normed + s * size + first);
            total.x = fmaf(sigmoid_fast(g.x), n.x, total.x);
            total.y = fmaf(sigmoid_fast(g.y), n.y, total.y);
            total.z = fmaf(sigmoid_fast(g.z), n.z, total.z);
            total.w = fmaf(sigmoid_fast(g.w), n.w, total.w);
        }
        put4(out, half, first,
             make_float4(total.x * share, total.y * share, total.z * share, total.w * share));
    } else {
        for (long long d = first; d < min(first + 4, size); d++) {
            float total = 0.0f;
            for (long long s = 0; s < num_streams; s++)
                total = fmaf(sigmoid_fast(gate[s * size + d]), normed[s * size + d], total);
            put1(out, half, d, total * share);
        }
    }
}

__device__ inline float4 add_scaled(float weight, float4 v, float4 total) {
    return make_float4(fmaf(weight, v.x, total.x), fmaf(weight, v.y, total.y),
                       fmaf(weight, v.z, total.z), fmaf(weight, v.w, total.w));
}

// Four columns of a token's experts, in the order of their ranks, then of the gated shared one.
__device__ inline float4 combined(const float *expert_out, const int *pair_of, const float *weights,
                                  long long top_k, const float *shared_out, float gate,
                                  long long size, long long first) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 10
    for (int rank = 0; rank < static_cast<int>(top_k); rank++)
        total = add_scaled(weights[rank], load4(expert_out + pair_of[rank] * size + first), total);
    return add_scaled(gate, load4(shared_out + first), total);
}
