// Mixture of experts behind routing: the activation between an expert's products, and their sum.
//   T tokens, k experts per token, P = T * k pairs, D hidden_size, F expert width
#include "lanes.cuh"
#include "math32.cuh"
#include "mix.cuh"
#include "overlap.cuh"
#include "special.cuh"

// swiglu: out = silu(gate) * up; out may be gate or up
//   gate, up, out [n] f32
//   grid (n / (4 * block)), each thread 4 elements; moves 12 * n bytes
extern "C" __global__ void swiglu(const float *gate, const float *up, float *out, long long n) {
    start_early();
    const long long first = 4 * (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first + 4 <= n && is_wide(4, gate, up, out)) {
        const float4 g = load4(gate + first), u = load4(up + first);
        store4(out + first, make_float4(silu32(g.x) * u.x, silu32(g.y) * u.y, silu32(g.z) * u.z,
                                        silu32(g.w) * u.w));
    } else {
        for (long long i = first; i < min(first + 4, n); i++) out[i] = silu32(gate[i]) * up[i];
    }
}

// combine: out = sum over ranks, in order, of weight * its expert's row, then + the gated shared
// one
//   expert_out [P,D] f32, pair_of [T,k] i32, weights [T,k] f32, shared_out [T,D] f32,
//   shared_logit [T] f32 -> out [T,D] f32
//   grid (T, D / (4 * block)), each thread 4 columns; moves (k + 2) * 4 * T*D bytes
extern "C" __global__ void combine(const float *expert_out, const int *pair_of,
                                   const float *weights, const float *shared_out,
                                   const float *shared_logit, float *out, long long top_k,
                                   long long size) {
    start_early();
    const long long token = blockIdx.x;
    const long long first = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first >= size) return;
    pair_of += token * top_k;
    weights += token * top_k;
    shared_out += token * size;
    out += token * size;
    const float gate = sigmoid_fast(shared_logit[token]);
    if (is_wide(size, expert_out, shared_out, out)) {
        store4(out + first,
               combined(expert_out, pair_of, weights, top_k, shared_out, gate, size, first));
    } else {
        for (long long d = first; d < min(first + 4, size); d++) {
            float total = 0.0f;
            for (long long rank = 0; rank < top_k; rank++)
                total = fmaf(weights[rank], expert_out[pair_of[rank] * size + d], total);
            out[d] = fmaf(gate, shared_out[d], total);
        }
    }
}
