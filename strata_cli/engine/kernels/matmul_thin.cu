// Products of a few rows of float32 weights with many activation rows, both as the sum of two f16.
//   x [T,K] f32, N <= 8 rows of K f32 weights -> out [T,N] f32
//   Reads 4 * T*K bytes of activations once; weights from the L2 cache. Memory is the limit.
//
// A block makes 8 * GROUPS tokens; its warps take slices in turns, whose sums meet in shared
// memory. Each sum is made of the same operations in the same order as in matmul_few.cu.
#include "mma.cuh"
#include "weights.cuh"

constexpr int WARPS = 8;
constexpr int GROUPS = 2;   // of eight tokens
constexpr int AT_ONCE = 4;  // steps whose loads are on their way together

// Eight values of a row from k on, zeros behind its end.
struct Eight {
    float v[8];

    __device__ void load(const float *row, int k, int cols) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool is_there = k + 4 * half < cols;
            const float4 own = is_there ? *reinterpret_cast<const float4 *>(row + k + 4 * half)
                                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            v[4 * half] = own.x, v[4 * half + 1] = own.y;
            v[4 * half + 2] = own.z, v[4 * half + 3] = own.w;
        }
    }
};

// Eight values times a factor as f16, and what that leaves of them.
struct Split {
    unsigned high[4], rest[4];

    __device__ Split(const Eight &eight, float factor) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a = eight.v[2 * i] * factor, b = eight.v[2 * i + 1] * factor;
            high[i] = pair_of(a, b);
            rest[i] = pair_of(a - float_of(high[i]), b - float_of(high[i] >> 16));
        }
    }
};

// matmul_thin: grid (T / 16), block 32 * WARPS, shared slices * N * 16 floats
template <int LANE>
__global__ void __launch_bounds__(32 * WARPS, 2)
    matmul_thin(const float *x, const float *weights, float *out, long long, long long num_tokens,
                long long num_rows, long long num_cols, long long slice_cols) {
    using R = Rows<F32, LANE>;
    constexpr int TOKENS = 8 * GROUPS;
    extern __shared__ float partial[];
    const int tokens = num_tokens, rows = num_rows, cols = num_cols, slice = slice_cols;
    const int warp = threadIdx.x / 32, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const int first_token = blockIdx.x * TOKENS, slices = (cols + slice - 1) / slice;
    const float *own_weights = weights + static_cast<long long>(min(g, rows - 1)) * cols;
    const float *own_x[GROUPS];
#pragma unroll
    for (int n = 0; n < GROUPS; n++)
        own_x[n] = x + static_cast<long long>(min(first_token + 8 * n + g, tokens - 1)) * cols;
    for (int own = warp; own < slices; own += WARPS) {
        float sums[GROUPS][4] = {};
        const int first = own * slice / 32, stop = min((own + 1) * slice, cols + 31) / 32;
#pragma unroll 1
        for (int step = first; step < stop; step += AT_ONCE) {
            Eight w[AT_ONCE], v[AT_ONCE][GROUPS];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int k = R::k_of(step + i, t), end = step + i < stop ? cols : 0;
                w[i].load(own_weights, k, end);
#pragma unroll
                for (int n = 0; n < GROUPS; n++) v[i][n].load(own_x[n], k, end);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (step + i >= stop) break;
                const Split a(w[i], GAIN<F32>);
#pragma unroll
                for (int n = 0; n < GROUPS; n++) {
                    const Split b(v[i][n], 1.0f);
#pragma unroll
                    for (int j = 0; j < 4; j += 2) {
                        multiply(sums[n], a.high[j], 0, a.high[j + 1], 0, b.high[j], b.high[j + 1]);
                        multiply(sums[n], a.high[j], 0, a.high[j + 1], 0, b.rest[j], b.rest[j + 1]);
                        multiply(sums[n], a.rest[j], 0, a.rest[j + 1], 0, b.high[j], b.high[j + 1]);
                    }
                }
            }
        }
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
