// The hashed n-gram embedding around its table: rows of each token, gate, dilated convolution.
//   T tokens of one sequence, S streams, D hidden_size, H hash heads; a vector over all streams is
//   stream-major
#include "lanes.cuh"
#include "math32.cuh"
#include "overlap.cuh"
#include "segments.cuh"

using u64 = unsigned long long;

// ngram_rows: table rows of each token's n-grams, exact in unsigned 64-bit arithmetic
//   ids [T] i32, history [L] i32 (the ids before; moves along), multipliers [L+1] i64, offsets,
//   sizes [H] i64 -> rows_out [T,H] i64
//   grid (T / block), block > L: the first block alone reads the history, then rewrites it
__device__ inline void find_rows(const int *ids, const int *history, int *history_to,
                                 const u64 *multipliers, const u64 *offsets, const u64 *sizes,
                                 long long eos, long long *rows_out, long long num_tokens,
                                 long long look_back, long long num_heads) {
    const long long token = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (token < num_tokens) {
        const long long per_n = num_heads / look_back;
        u64 mixed = static_cast<u64>(ids[token]) * multipliers[0];
        bool is_cut = false;
        for (long long distance = 1; distance <= look_back; distance++) {
            const long long at = token - distance;
            const long long predecessor = at >= 0 ? ids[at] : history[look_back + at];
            is_cut = is_cut || predecessor == eos;
            mixed ^= static_cast<u64>(is_cut ? eos : predecessor) * multipliers[distance];
            for (long long head = (distance - 1) * per_n; head < distance * per_n; head++)
                rows_out[token * num_heads + head] = mixed % sizes[head] + offsets[head];
        }
    }
    if (blockIdx.x > 0 || history_to == nullptr) return;
    const bool moves = threadIdx.x < look_back;
    const long long at = num_tokens - look_back + threadIdx.x;
    const int id = !moves ? 0 : at >= 0 ? ids[at] : history[look_back + at];
    __syncthreads();
    if (moves) history_to[threadIdx.x] = id;
}

extern "C" __global__ void ngram_rows(const int *ids, int *history, const u64 *multipliers,
                                      const u64 *offsets, const u64 *sizes, long long eos,
                                      long long *rows_out, long long num_tokens,
                                      long long look_back, long long num_heads) {
    start_early();
    find_rows(ids, history, history, multipliers, offsets, sizes, eos, rows_out, num_tokens,
              look_back, num_heads);
}

// ngram_rows_segments: each segment by itself, from and to the first parts of its running state
//   grid (rows of the longest / block, segments)
extern "C" __global__ void ngram_rows_segments(const int *ids, const RunningSegment *segments,
                                               const u64 *multipliers, const u64 *offsets,
                                               const u64 *sizes, long long eos, long long *rows_out,
                                               long long look_back, long long num_heads) {
    start_early();
    const RunningSegment own = segments[blockIdx.y];
    find_rows(ids + own.first, reinterpret_cast<const int *>(own.history),
              reinterpret_cast<int *>(own.history_to), multipliers, offsets, sizes, eos,
              rows_out + own.first * num_heads, own.count, look_back, num_heads);
}

constexpr int GATE_THREADS = 256;  // of a block: the order of its sums hangs on it

// Sums over the block of one value of each thread: lanes 16 -> 8 -> ... -> 1, then the warps in
// turn.
__device__ inline float3 sums_of_block(float3 own) {
    __shared__ float3 of_warps[GATE_THREADS / 32];
    own.x = fold16(own.x + __shfl_xor_sync(ALL_LANES, own.x, 16));
    own.y = fold16(own.y + __shfl_xor_sync(ALL_LANES, own.y, 16));
    own.z = fold16(own.z + __shfl_xor_sync(ALL_LANES, own.z, 16));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    float3 total = of_warps[0];
    for (int warp = 1; warp < GATE_THREADS / 32; warp++) {
        total.x += of_warps[warp].x;
        total.y += of_warps[warp].y;
        total.z += of_warps[warp].z;
    }
    return total;
}

// ngram_gate: gated[s] = sigmoid(signed root of key[s] . query[s] / sqrt(D)) * value, key and
// query (the residual stream) RMS-normalised per stream
//   key [T,S,D], value [T,D], x [T,S,D], w_key, w_query [S,D] f32 -> gated [T,S,D] f32
//   grid (T*S), block GATE_THREADS; moves 16 * T*S*D bytes. The norms' factors are applied to the
//   finished product.
extern "C" __global__ void ngram_gate(const float *key, const float *value, const float *x,
                                      const float *w_key, const float *w_query, float eps,
                                      float *gated, long long num_streams, long long size) {
    start_early();
    const long long at = blockIdx.x * size, column = blockIdx.x % num_streams * size;
    float3 own = make_float3(0.0f, 0.0f, 0.0f);  // squares of key and query, weighted product
#pragma unroll 5
    for (long long d = threadIdx.x; d < size; d += GATE_THREADS) {
        const float k = key[at + d], q = x[at + d];
        own.x = fmaf(k, k, own.x);
        own.y = fmaf(q, q, own.y);
        own.z = fmaf(k * w_key[column + d], q * w_query[column + d], own.z);
    }
    const float3 total = sums_of_block(own);
    const float scale = rms_factor(total.x, size, eps) * rms_factor(total.y, size, eps);
    const float product = total.z * scale / sqrtf(static_cast<float>(size));
    const float magnitude = fabsf(product);
    const float root = sqrtf(magnitude > 1e-6f ? magnitude : 1e-6f);
    const float sign = product > 0.0f ? 1.0f : product < 0.0f ? -1.0f : product;
    const float weight = sigmoid32(sign * root);
#pragma unroll 5
    for (long long d = threadIdx.x; d < size; d += GATE_THREADS)
        gated[at + d] = value[blockIdx.x / num_streams * size + d] * weight;
}

// One stream of one sequence, its rows normalised: rows -past .. -1 come from the history.
struct NormedRows {
    const float *gated, *w_conv, *scales;  // of the stream; scales[0] belongs to row first_scale
    const float *history;
    long long channels, past, first_scale;

    __device__ float at(long long row, long long d) const {
        if (row < 0) return history[(row + past) * channels + d];
        return gated[row * channels + d] * scales[row - first_scale] * w_conv[d];
    }
};

// Factors of rows begin .. end of a stream to shared memory, a warp each; then waits.
__device__ inline void find_scales(float *scales, const float *gated, long long channels,
                                   long long begin, long long end, long long size, float eps) {
    const int lane = threadIdx.x & 31;
    for (long long row = begin + threadIdx.x / 32; row < end; row += blockDim.x / 32) {
        const float *values = gated + row * channels;
        float squares = 0.0f;
#pragma unroll 8
        for (long long d = lane; d < size; d += 32) squares = fmaf(values[d], values[d], squares);
        squares = fold16(squares + __shfl_xor_sync(ALL_LANES, squares, 16));
        if (lane == 0) scales[row - begin] = rms_factor(squares, size, eps);
    }
    __syncthreads();
}

constexpr int ROWS_AT_ONCE = 4;  // of the history, that a thread moves

// ngram_conv: x += gated + silu(conv(rms(gated) * w_conv)), taps dilation rows apart
//   gated [T,S,D] f32, w_conv [S,D] f32, history [(K-1)*dilation,S,D] f32 (normalised rows before;
//   moves along), weight [S,D,K] f32, x [T,S,D] f32 in place
//   grid (S, T / run, D / columns), run >= past = (K-1)*dilation, shared 4 * (run + past) bytes;
//   moves 12 * T*S*D bytes and reads gated once more per block of columns. Only the first run reads
//   the history, and its threads rewrite it.
struct Columns {
    long long first, end;  // of a stream
};

__device__ inline void convolve(const float *gated, const float *w_conv, const float *history,
                                float *history_to, const float *weight, long long dilation,
                                float eps, float *x, long long num_tokens, long long num_streams,
                                long long size, long long num_taps, long long run,
                                const Columns &columns) {
    extern __shared__ float scales[];
    const long long channels = num_streams * size, past = (num_taps - 1) * dilation;
    const long long column = blockIdx.x * size, begin = columns.first + threadIdx.x;
    const long long end = columns.end;
    const long long first = blockIdx.y * run, stop = min(first + run, num_tokens);
    gated += column;
    history += column;
    x += column;
    weight += column * num_taps;
    NormedRows rows = {gated, w_conv, scales, history, channels, past, max(first - past, 0LL)};
    rows.w_conv += column;
    find_scales(scales, gated, channels, rows.first_scale, stop, size, eps);
    for (long long d = begin; d < end; d += blockDim.x) {
        for (long long t = first; t < stop; t++) {
            float total = 0.0f;
#pragma unroll 4
            for (long long j = 0; j < num_taps; j++)
                total = fmaf(weight[d * num_taps + j], rows.at(t - past + j * dilation, d), total);
            x[t * channels + d] += silu32(total) + gated[t * channels + d];
        }
    }
    if (blockIdx.y > 0 || history_to == nullptr) return;
    __syncthreads();
    history_to += column;
    rows.first_scale = max(num_tokens - past, 0LL);
    find_scales(scales, gated, channels, rows.first_scale, num_tokens, size, eps);
    for (long long d = begin; d < end; d += blockDim.x) {
        for (long long j = 0; j < past;
             j += ROWS_AT_ONCE) {  // ascending: rows move ahead of writes
            float next[ROWS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++)
                next[i] = j + i < past ? rows.at(num_tokens - past + j + i, d) : 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++)
                if (j + i < past) history_to[(j + i) * channels + d] = next[i];
        }
    }
}

extern "C" __global__ void ngram_conv(const float *gated, const float *w_conv, float *history,
                                      const float *weight, long long dilation, float eps, float *x,
                                      long long num_tokens, long long num_streams, long long size,
                                      long long num_taps, long long run, long long columns) {
    start_early();
    const Columns own = {blockIdx.z * columns, min((blockIdx.z + 1) * columns, size)};
    convolve(gated, w_conv, history, history, weight, dilation, eps, x, num_tokens, num_streams,
             size, num_taps, run, own);
}

// ngram_conv_segments: each segment by itself, from and to the second parts of its running state
//   grid (S, rows of the longest / run, segments)
extern "C" __global__ void ngram_conv_segments(const float *gated, const float *w_conv,
                                               const RunningSegment *segments, const float *weight,
                                               long long dilation, float eps, float *x,
                                               long long num_streams, long long size,
                                               long long num_taps, long long run) {
    start_early();
    const RunningSegment own = segments[blockIdx.z];
    if (blockIdx.y * run >= own.count) return;
    const long long begin = own.first * num_streams * size;
    convolve(gated + begin, w_conv, own.state, own.state_to, weight, dilation, eps, x + begin,
             own.count, num_streams, size, num_taps, run, {0, size});
}
