// The hashed n-gram embedding around its table: rows of each token, gate, dilated convolution.
//   T tokens of one sequence, S streams, D hidden_size, H hash heads; a vector over all streams is
//   stream-major
#include "lanes.cuh"
#include "math32.cuh"
#include "overlap.cuh"

using u64 = unsigned long long;

// ngram_rows: table rows of each token's n-grams, exact in unsigned 64-bit arithmetic
//   ids [T] i32, history [L] i32 (the ids before; moves along), multipliers [L+1] i64, offsets,
//   sizes [H] i64 -> rows_out [T,H] i64
//   grid (T / block), block > L: the first block alone reads the history, then rewrites it
extern "C" __global__ void ngram_rows(const int *ids, int *history, const u64 *multipliers,
                                      const u64 *offsets, const u64 *sizes, long long eos,
                                      long long *rows_out, long long num_tokens,
                                      long long look_back, long long num_heads) {
    start_early();
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
    if (blockIdx.x > 0) return;
    const bool moves = threadIdx.x < look_back;
    const long long at = num_tokens - look_back + threadIdx.x;
    const int id = !moves ? 0 : at >= 0 ? ids[at] : history[look_back + at];
    __syncthreads();
    if (moves) history[threadIdx.x] = id;
}

// ngram_gate: gated[s] = sigmoid(signed root of key[s] . query[s] / sqrt(D)) * value, key and
// query (the residual stream) RMS-normalised per stream
//   key [T,S,D], value [T,D], x [T,S,D], w_key, w_query [S,D] f32 -> gated [T,S,D] f32
//   grid (T*S), shared 8 * D bytes; moves 16 * T*S*D bytes
extern "C" __global__ void ngram_gate(const float *key, const float *value, const float *x,
                                      const float *w_key, const float *w_query, float eps,
                                      float *gated, long long num_streams, long long size) {
    start_early();
    extern __shared__ float rows[];
    __shared__ float scales[2], weight;
    float *keys = rows, *queries = rows + size;
    const long long at = blockIdx.x * size, column = blockIdx.x % num_streams * size;
    load_row(keys, key + at, size, false);
    load_row(queries, x + at, size, false);
    __syncthreads();
    const int half = threadIdx.x / 16;
    if (threadIdx.x < 32) {
        const float scale = rms_scale(half ? queries : keys, size, eps);
        if (lane16() == 0) scales[half] = scale;
    }
    __syncthreads();
    for (long long i = threadIdx.x; i < size; i += blockDim.x) {
        keys[i] = keys[i] * scales[0] * w_key[column + i];
        queries[i] = queries[i] * scales[1] * w_query[column + i];
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const float product = dot16(keys, queries, size) / sqrtf(static_cast<float>(size));
        const float magnitude = fabsf(product);
        const float root = sqrtf(magnitude > 1e-6f ? magnitude : 1e-6f);
        const float sign = product > 0.0f ? 1.0f : product < 0.0f ? -1.0f : product;
        if (threadIdx.x == 0) weight = sigmoid32(sign * root);
    }
    __syncthreads();
    for (long long i = threadIdx.x; i < size; i += blockDim.x)
        gated[at + i] = value[blockIdx.x / num_streams * size + i] * weight;
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

// Factors of rows begin .. end of a stream to shared memory, 16 lanes each; then waits.
__device__ inline void find_scales(float *scales, const float *gated, long long channels,
                                   long long begin, long long end, long long size, float eps) {
    const int groups = blockDim.x / 16;
    for (long long first = begin; first < end; first += groups) {
        const long long row = first + threadIdx.x / 16;
        const float scale = rms_scale(gated + min(row, end - 1) * channels, size, eps);
        if (row < end && lane16() == 0) scales[row - begin] = scale;
    }
    __syncthreads();
}

// ngram_conv: x += gated + silu(conv(rms(gated) * w_conv)), taps dilation rows apart
//   gated [T,S,D] f32, w_conv [S,D] f32, history [(K-1)*dilation,S,D] f32 (normalised rows before;
//   moves along), weight [S,D,K] f32, x [T,S,D] f32 in place
//   grid (S, T / run), run >= past = (K-1)*dilation, shared 4 * (run + past) bytes; moves
//   12 * T*S*D bytes. Only the first run reads the history, and its threads rewrite it.
extern "C" __global__ void ngram_conv(const float *gated, const float *w_conv, float *history,
                                      const float *weight, long long dilation, float eps, float *x,
                                      long long num_tokens, long long num_streams, long long size,
                                      long long num_taps, long long run) {
    start_early();
    extern __shared__ float scales[];
    const long long channels = num_streams * size, past = (num_taps - 1) * dilation;
    const long long column = blockIdx.x * size;
    const long long first = blockIdx.y * run, stop = min(first + run, num_tokens);
    gated += column;
    history += column;
    x += column;
    weight += column * num_taps;
    NormedRows rows = {gated, w_conv, scales, history, channels, past, max(first - past, 0LL)};
    rows.w_conv += column;
    find_scales(scales, gated, channels, rows.first_scale, stop, size, eps);
    for (long long d = threadIdx.x; d < size; d += blockDim.x) {
        for (long long t = first; t < stop; t++) {
            float total = 0.0f;
            for (long long j = 0; j < num_taps; j++)
                total = fmaf(weight[d * num_taps + j], rows.at(t - past + j * dilation, d), total);
            x[t * channels + d] += silu32(total) + gated[t * channels + d];
        }
    }
    if (blockIdx.y > 0) return;
    __syncthreads();
    rows.first_scale = max(num_tokens - past, 0LL);
    find_scales(scales, gated, channels, rows.first_scale, num_tokens, size, eps);
    for (long long d = threadIdx.x; d < size; d += blockDim.x)
        for (long long j = 0; j < past; j++)  // ascending: a row moves before it is overwritten
            history[j * channels + d] = rows.at(num_tokens - past + j, d);
}
