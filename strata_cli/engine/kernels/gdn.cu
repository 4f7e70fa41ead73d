// Gated delta net around its delta rule: the causal convolution before, the gated norm behind.
//   T tokens of one sequence, nv value heads, N head width
#include "lanes.cuh"
#include "overlap.cuh"
#include "pairs.cuh"
#include "segments.cuh"
#include "special.cuh"

// causal_conv_silu: out[t] = silu(sum over taps j, in order, of weight[j] * row t - (TAPS-1) + j)
//   u, out [T,C] f32, history [TAPS-1,C] f32 (the rows before u; moves along), weight [C,TAPS] f32
//   grid (C / block, T / rows), a thread per channel and run of rows >= TAPS - 1
//   moves 8 * T*C bytes. Only the first run reads the history, and its threads rewrite it.
template <int TAPS>
__device__ inline void convolve(const float *u, const float *history, float *history_to,
                                const float *weight, float *out, long long num_tokens,
                                long long channels, long long rows) {
    constexpr int PAST = TAPS - 1, AT_ONCE = 8;
    const long long channel = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (channel >= channels) return;
    const long long first = blockIdx.y * rows, stop = min(first + rows, num_tokens);
    float taps[TAPS], window[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS; j++) taps[j] = weight[channel * TAPS + j];
#pragma unroll
    for (int j = 0; j < PAST; j++) {
        const long long t = first - PAST + j;
        window[j + 1] =
            t < 0 ? history[(t + PAST) * channels + channel] : u[t * channels + channel];
    }
    for (long long start = first; start < stop; start += AT_ONCE) {
        float next[AT_ONCE];  // loaded before any is written out
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            next[i] = start + i < stop ? u[(start + i) * channels + channel] : 0.0f;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (start + i >= stop) break;
#pragma unroll
            for (int j = 0; j < PAST; j++) window[j] = window[j + 1];
            window[PAST] = next[i];
            float total = 0.0f;
#pragma unroll
            for (int j = 0; j < TAPS; j++) total = fmaf(taps[j], window[j], total);
            out[(start + i) * channels + channel] = silu_fast(total);
        }
    }
    if (blockIdx.y == 0 && history_to != nullptr) {
        float last[TAPS];  // PAST of them, all loaded before any is overwritten
#pragma unroll
        for (int j = 0; j < PAST; j++) {
            const long long t = num_tokens - PAST + j;
            last[j] = t < 0 ? history[(t + PAST) * channels + channel] : u[t * channels + channel];
        }
#pragma unroll
        for (int j = 0; j < PAST; j++) history_to[j * channels + channel] = last[j];
    }
}

template <int TAPS>
__global__ void causal_conv_silu(const float *u, float *history, const float *weight, float *out,
                                 long long num_tokens, long long channels, long long rows) {
    let_next_start();
    const long long channel = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (blockIdx.y == 0 && channel < channels) {  // last used a token ago: no longer in the cache
        fetch_ahead(weight + channel * TAPS);
#pragma unroll
        for (int j = 0; j + 1 < TAPS; j++) fetch_ahead(history + j * channels + channel);
    }
    wait_for_launches_ahead();
    convolve<TAPS>(u, history, history, weight, out, num_tokens, channels, rows);
}

// causal_conv_silu_segments: each segment by itself, from and to the first parts of its running
// state; grid (C / block, rows of the longest / rows, segments)
template <int TAPS>
__global__ void causal_conv_silu_segments(const float *u, const RunningSegment *segments,
                                          const float *weight, float *out, long long channels,
                                          long long rows) {
    start_early();
    const RunningSegment own = segments[blockIdx.z];
    if (blockIdx.y * rows >= own.count) return;
    const long long begin = own.first * channels;
    convolve<TAPS>(u + begin, own.history, own.history_to, weight, out + begin, own.count, channels,
                   rows);
}

// gated_norm: out = o / rms(o) * weight * sigmoid(z), each value head on its own
//   o, z, out [R,N] f32 with R = T * nv, weight [N] f32
//   grid (R / 8), 16 lanes per row; moves 12 * R*N bytes
extern "C" __global__ void gated_norm(const float *o, const float *z, const float *weight,
                                      float eps, float *out, unsigned short *rounded,
                                      long long num_rows, long long dim, long long rounds) {
    start_early();
    constexpr int AT_ONCE = 8;
    const long long own = blockIdx.x * (blockDim.x / 16) + threadIdx.x / 16;
    const long long row = min(own, num_rows - 1);  // a spare half warp takes part in the sums
    o += row * dim;
    z += row * dim;
    out += row * dim;
    rounded += rounds ? row * dim : 0;
    float values[AT_ONCE], gates[AT_ONCE], weights[AT_ONCE];  // loaded together: all one latency
    const auto load = [&](long long first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const long long d = first + 16 * i;
            values[i] = d < dim ? o[d] : 0.0f;
            gates[i] = d < dim ? z[d] : 0.0f;
            weights[i] = d < dim ? weight[d] : 0.0f;
        }
    };
    load(lane16());
    float squares = 0.0f;
    for (long long first = lane16(); first < dim; first += 16 * AT_ONCE) {
        if (first >= 16 * AT_ONCE) load(first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) squares = fmaf(values[i], values[i], squares);
    }
    const float scale = rms_factor(fold16(squares), dim, eps);
    if (own >= num_rows) return;
    for (long long first = lane16(); first < dim; first += 16 * AT_ONCE) {
        if (dim > 16 * AT_ONCE) load(first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + 16 * i < dim) {
                const float v = values[i] * scale * weights[i] * sigmoid_fast(gates[i]);
                out[first + 16 * i] = v;
                if (rounds) rounded[first + 16 * i] = half_of(v);
            }
    }
}
