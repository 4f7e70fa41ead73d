// Products of a few rows of float32 weights with many activation rows, both as the sum of two f16.
//   x [T,K] f32, N <= 8 rows of K f32 weights -> out [T,N] f32
//   Reads 4 * T*K bytes of activations once; weights from the L2 cache. Memory is the limit.
//
// A block makes 8 * GROUPS tokens; its warps take slices in turns, whose sums meet in shared
// memory. Each sum is made of the same operations in the same order as in matmul_few.cu.
#include "thin.cuh"

// matmul_thin: grid (T / (8 * GROUPS)), block 32 * WARPS, shared slices * N * 8 * GROUPS floats;
// WARPS and GROUPS change no bit
template <int LANE, int WARPS, int GROUPS>
__global__ void __launch_bounds__(32 * WARPS, GROUPS)
    matmul_thin(const float *x, const float *weights, float *out, long long, long long num_tokens,
                long long num_rows, long long num_cols, long long slice_cols) {
    constexpr int TOKENS = 8 * GROUPS;
    extern __shared__ float partial[];
    start_early();
    const int tokens = num_tokens, rows = num_rows, cols = num_cols, slice = slice_cols;
    const int warp = threadIdx.x / 32, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const int first_token = blockIdx.x * TOKENS, slices = (cols + slice - 1) / slice;
    const ThinRows all = {weights, rows, cols, slice};
    const float *own_x[GROUPS];
#pragma unroll
    for (int n = 0; n < GROUPS; n++) own_x[n] = all.row(x, first_token + 8 * n, tokens);
    for (int own = warp; own < slices; own += WARPS) {
        float sums[GROUPS][4] = {};
        all.multiply_slice<LANE>(sums, own_x, own);
        if (g >= rows) continue;
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
            for (int i = 0; i < 2; i++)
                partial[(own * rows + g) * TOKENS + 8 * n + 2 * t + i] = sums[n][i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * TOKENS; i += 32 * WARPS) {
        const int row = i % rows, token = i / rows;
        if (first_token + token >= tokens) continue;
        float total = 0.0f;
        for (int own = 0; own < slices; own++)
            total += partial[(own * rows + row) * TOKENS + token];
        out[static_cast<long long>(first_token + token) * rows + row] = total / GAIN<F32>;
    }
}
