// What happens to logits: log-softmax over the whole vocabulary.
//   T rows, V vocabulary size; the vocabulary is summed in parts of 4096 tokens, then part by part
#include "lanes.cuh"
#include "math32.cuh"
#include "overlap.cuh"

constexpr int PART_TOKENS = 4096;

// Largest value over a block of whole warps, what is not a number passed over.
__device__ inline float largest_of_block(float v) {
    __shared__ float of_warp[32];
    for (int half = 16; half; half /= 2) v = larger(v, __shfl_xor_sync(ALL_LANES, v, half));
    if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; warp++) v = larger(v, of_warp[warp]);
    return v;
}

// log_softmax: out = logits - largest - log(sum of exp(logits - largest)); out may be logits
//   logits, out [T,V] f32; grid (T), block a multiple of 32, shared 4 * (V / 4096 + 1) bytes;
//   reads 12 * T*V bytes, two thirds from the caches, and writes 4 * T*V
extern "C" __global__ void log_softmax(const float *logits, float *out, long long vocab_size) {
    start_early();
    extern __shared__ float sums[];
    logits += blockIdx.x * vocab_size;
    out += blockIdx.x * vocab_size;
    float largest = lowest();
#pragma unroll 8
    for (long long v = threadIdx.x; v < vocab_size; v += blockDim.x)
        largest = larger(largest, logits[v]);
    largest = largest_of_block(largest);
    const long long num_parts = (vocab_size + PART_TOKENS - 1) / PART_TOKENS;
    const int at_once = blockDim.x / 16;
    for (long long base = 0; base < num_parts; base += at_once) {
        const long long part = base + threadIdx.x / 16;
        const long long stop = min((part + 1) * PART_TOKENS, vocab_size);
        float total = 0.0f;
#pragma unroll 8
        for (long long v = part * PART_TOKENS + lane16(); v < stop; v += 16)
            total += exp32(logits[v] - largest);
        total = fold16(total);
        if (part < num_parts && lane16() == 0) sums[part] = total;
    }
    __syncthreads();
    float total = 0.0f;
    for (long long part = 0; part < num_parts; part++) total += sums[part];
    // log32 reads bits and would make a number of NaN.
    const float log_total = total == total ? log32(total) : total;
    for (long long v = threadIdx.x; v < vocab_size; v += blockDim.x)
        out[v] = logits[v] - largest - log_total;
}
