// Writing to the residual streams of few tokens, or some, and normalising them, perhaps behind the
// sum of a token's experts: the bits of combine (moe.cu) and stream_write_norm (hyper.cu), in one
// launch.
//   T tokens, S streams, D hidden_size, a multiple of 4, at most 4 * MOST_THREADS
//   A thread has four columns of a row, so that a launch is few latencies one after the other:
//   they, not the 12 * S * T*D bytes, are the limit.
#include "bulk.cuh"
#include "mix.cuh"
#include "overlap.cuh"
#include "streams.cuh"

constexpr int MOST_THREADS = NORM_THREADS * MOST_QUADS;
constexpr int MOST_PARTS = NORM_THREADS;  // of an inject: one for a thread

// A row of a stream, and what a block knows of it together.
struct Row {
    float4 quads[MOST_THREADS];
    float parts[MOST_PARTS], of_warps[NORM_THREADS / 32];
};

// The part of an inject that a thread brings.
__device__ inline const float *own_part(const Inject &inject, int token, int s) {
    const int part = min(static_cast<int>(threadIdx.x), static_cast<int>(inject.parts) - 1);
    return inject.values + (part * inject.num_tokens + token) * inject.num_streams + s;
}

// Streams and inject were written some launches ago: the cache may have lost them to weights.
__device__ inline void fetch_ahead(const float *row, const float *part, int size) {
    if (4 * static_cast<int>(threadIdx.x) < size) fetch_ahead(row + 4 * threadIdx.x);
    if (threadIdx.x < MOST_PARTS) fetch_ahead(part);
}

// Writes factor times `added` to the thread's columns of a row, normalises the row. Quads of
// hyper.cu have the same order of sums.
// ROUNDS: to f16 as well.
template <bool ROUNDS>
__device__ inline void write_norm(Row &row, const Inject &inject, float part, float4 v,
                                  float4 added, float4 w, float eps, float *x, float *normed,
                                  unsigned short *rounded, int size) {
    const int own = threadIdx.x, lane = own & 31;
    const int first = 4 * own;
    if (own < MOST_PARTS) row.parts[own] = part;
    __syncthreads();
    const float factor = inject.weight_of([&](int part) { return row.parts[part]; });
    v = add_scaled(factor, added, v);
    row.quads[own] = v;
    if (first < size) store4(x + first, v);
    __syncthreads();
    if (own < NORM_THREADS) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST_QUADS; i++)
            if (own + NORM_THREADS * i < size / 4)
                total = add_squares(row.quads[own + NORM_THREADS * i], total);
        total = fold16(total + __shfl_xor_sync(ALL_LANES, total, 16));
        if (lane == 0) row.of_warps[own / 32] = total;
    }
    __syncthreads();
    float total = row.of_warps[0];
#pragma unroll
    for (int warp = 1; warp < NORM_THREADS / 32; warp++) total += row.of_warps[warp];
    if (first < size)
        put4(normed, ROUNDS ? reinterpret_cast<unsigned *>(rounded) : nullptr, first,
             scaled(v, rms_factor(total, size, eps), w));
}

// `combined` of mix.cuh, all of whose loads are two latencies.
__device__ inline float4 combined_at_once(const float *expert_out, const int *pair_of,
                                          const float *weights, int top_k, float4 shared,
                                          float logit, int size, int first) {
    constexpr int AT_ONCE = 10;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int base = 0; base < top_k; base += AT_ONCE) {
        int pairs[AT_ONCE];
        float shares[AT_ONCE];
        float4 rows[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int rank = min(base + i, top_k - 1);
            pairs[i] = pair_of[rank], shares[i] = weights[rank];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            rows[i] = load4(expert_out + static_cast<long long>(pairs[i]) * size + first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (base + i < top_k) total = add_scaled(shares[i], rows[i], total);
    }
    return add_scaled(sigmoid_fast(logit), shared, total);
}

__device__ inline float4 load4_below(const float *row, int first, long long size) {
    return first < size ? load4(row + first) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

template <bool ROUNDS>
__device__ inline void write_norm_rows(float *x, const float *out, const float *injects,
                                       const float *weight, float eps, float *normed,
                                       unsigned short *rounded, long long num_streams,
                                       long long size, long long parts, long long divisor) {
    __shared__ Row row;
    let_next_start();
    const Inject inject = {injects, parts, divisor, num_streams,
                           gridDim.x / static_cast<unsigned>(num_streams)};
    const int token = blockIdx.x / static_cast<unsigned>(num_streams);
    const int s = blockIdx.x - token * static_cast<int>(num_streams), first = 4 * threadIdx.x;
    const float4 w = load4_below(weight + s * size, first, size);
    x += blockIdx.x * size;
    const float *source = own_part(inject, token, s);
    fetch_ahead(x, source, static_cast<int>(size));
    wait_for_launches_ahead();
    const float4 v = load4_below(x, first, size);
    const float4 added = load4_below(out + token * size, first, size);
    const float part = *source;
    write_norm<ROUNDS>(row, inject, part, v, added, w, eps, x, normed + blockIdx.x * size,
                       rounded + blockIdx.x * size, size);
}

// combine_write: combine, then stream_write of what it gives; the norm is left to the next read
//   as combine_write_norm's; grid (D / (4 * columns), T), block columns threads of four columns
//   each and a warp more, which finds what streams are written by
template <int STREAMS>
__global__ void combine_write(const float *expert_out, const int *pair_of, const float *weights,
                              const float *shared_out, const float *shared_logit, float *x,
                              const float *injects, long long top_k, long long size,
                              long long parts, long long divisor) {
    __shared__ float own_parts[MOST_INJECT_FLOATS], factors[STREAMS];
    let_next_start();
    const int token = blockIdx.y, columns = blockDim.x - 32, width = static_cast<int>(size);
    const Inject inject = {injects, parts, divisor, STREAMS, gridDim.y};
    if (static_cast<int>(threadIdx.x) >= columns) {
        wait_for_launches_ahead();
        inject.weights_of_token<STREAMS>(token, own_parts, factors);
        block_barrier();
        return;
    }
    const int first = 4 * (static_cast<int>(blockIdx.x) * columns + threadIdx.x);
    x += static_cast<long long>(token) * STREAMS * width;
    const bool is_there = first < width;
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
        if (is_there) fetch_ahead(x + s * width + first);
    wait_for_launches_ahead();
    float4 v[STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; s++) v[s] = load4_below(x + s * width, first, width);
    const float logit = shared_logit[token];
    const float4 shared = load4_below(shared_out + token * size, first, width);
    const float4 added =
        combined_at_once(expert_out, pair_of + token * top_k, weights + token * top_k,
                         static_cast<int>(top_k), shared, logit, width, is_there ? first : 0);
    block_barrier();
#pragma unroll
    for (int s = 0; s < STREAMS; s++)
        if (is_there) store4(x + s * width + first, add_scaled(factors[s], added, v[s]));
}

// write_norm_few: stream_write_norm
//   x [T,S,D] f32 in place, out [T,D], injects as Inject, weight [S,D] f32 -> normed [T,S,D] f32
//   grid (T*S), block D / 4 and at least NORM_THREADS, whole warps
extern "C" __global__ void write_norm_few(float *x, const float *out, const float *injects,
                                          const float *weight, float eps, float *normed,
                                          long long num_streams, long long size, long long parts,
                                          long long divisor) {
    write_norm_rows<false>(x, out, injects, weight, eps, normed, nullptr, num_streams, size, parts,
                           divisor);
}

// write_norm_some: as write_norm_few, also -> rounded [T,S,D] f16
extern "C" __global__ void write_norm_some(float *x, const float *out, const float *injects,
                                           const float *weight, float eps, float *normed,
                                           unsigned short *rounded, long long num_streams,
                                           long long size, long long parts, long long divisor) {
    write_norm_rows<true>(x, out, injects, weight, eps, normed, rounded, num_streams, size, parts,
                          divisor);
}

template <bool ROUNDS>
__device__ inline void combine_write_rows(const float *expert_out, const int *pair_of,
                                          const float *weights, const float *shared_out,
                                          const float *shared_logit, float *x, const float *injects,
                                          const float *weight, float eps, float *normed,
                                          unsigned short *rounded, long long top_k,
                                          long long num_streams, long long size, long long parts,
                                          long long divisor) {
    __shared__ Row row;
    let_next_start();
    const Inject inject = {injects, parts, divisor, num_streams,
                           gridDim.x / static_cast<unsigned>(num_streams)};
    const int token = blockIdx.x / static_cast<unsigned>(num_streams);
    const int s = blockIdx.x - token * static_cast<int>(num_streams), first = 4 * threadIdx.x;
    const float4 w = load4_below(weight + s * size, first, size);
    x += blockIdx.x * size;
    const float *source = own_part(inject, token, s);
    fetch_ahead(x, source, static_cast<int>(size));
    wait_for_launches_ahead();
    const float4 v = load4_below(x, first, size);
    const float part = *source;
    const float logit = shared_logit[token];
    const float4 shared = load4_below(shared_out + token * size, first, size);
    const float4 added =
        combined_at_once(expert_out, pair_of + token * top_k, weights + token * top_k, top_k,
                         shared, logit, size, first < size ? first : 0);
    write_norm<ROUNDS>(row, inject, part, v, added, w, eps, x, normed + blockIdx.x * size,
                       rounded + blockIdx.x * size, size);
}

// combine_write_norm: combine, then write_norm_few of what it gives
//   expert_out [P,D], pair_of [T,k] i32, weights [T,k], shared_out [T,D], shared_logit [T] f32; x
//   and the others as write_norm_few's
//   grid, block the same; each stream of a token combines again: a launch takes longer
extern "C" __global__ void combine_write_norm(const float *expert_out, const int *pair_of,
                                              const float *weights, const float *shared_out,
                                              const float *shared_logit, float *x,
                                              const float *injects, const float *weight, float eps,
                                              float *normed, long long top_k, long long num_streams,
                                              long long size, long long parts, long long divisor) {
    combine_write_rows<false>(expert_out, pair_of, weights, shared_out, shared_logit, x, injects,
                              weight, eps, normed, nullptr, top_k, num_streams, size, parts,
                              divisor);
}

// combine_write_some: as combine_write_norm, also -> rounded [T,S,D] f16
extern "C" __global__ void combine_write_some(const float *expert_out, const int *pair_of,
                                              const float *weights, const float *shared_out,
                                              const float *shared_logit, float *x,
                                              const float *injects, const float *weight, float eps,
                                              float *normed, unsigned short *rounded,
                                              long long top_k, long long num_streams,
                                              long long size, long long parts, long long divisor) {
    combine_write_rows<true>(expert_out, pair_of, weights, shared_out, shared_logit, x, injects,
                             weight, eps, normed, rounded, top_k, num_streams, size, parts,
                             divisor);
}
