// Rotary positions: the norm-then-rotate step of query and key heads.
#include "lanes.cuh"
#include "overlap.cuh"
#include "rope.cuh"

// Rows of heads, T * heads of them, N wide: src [R,stride] f32 (the first N of a row), weight [N]
// f32
// -> out [R,N] f32.
struct Heads {
    const float *src, *weight;
    float *out;
    long long rows, heads, stride, dim;

    // Blocks of so many threads that take the rows, 16 lanes each.
    __device__ int blocks() const {
        const int per_block = blockDim.x / 16;
        return (static_cast<int>(rows) + per_block - 1) / per_block;
    }

    // The block's rows: normed, then turned to their tokens' positions; shared: N floats per row.
    __device__ void norm_rope(int block, const float *table, const int *positions, float eps,
                              long long half, float *normed) const {
        constexpr int AT_ONCE = 16;  // elements of a lane that are loaded together: one latency
        const long long own = block * (blockDim.x / 16) + threadIdx.x / 16;
        const long long row = min(own, rows - 1);  // a spare half warp takes part in the sums
        float *head = normed + threadIdx.x / 16 * dim;
        const float *from = src + row * stride;
        const long long position = positions[row / heads];
        float values[AT_ONCE], weights[AT_ONCE], squares = 0.0f;
        const auto load = [&](long long first) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                values[i] = first + 16 * i < dim ? from[first + 16 * i] : 0.0f;
                weights[i] = first + 16 * i < dim ? weight[first + 16 * i] : 0.0f;
            }
        };
        load(lane16());
        for (long long first = lane16(); first < dim; first += 16 * AT_ONCE) {
            if (first >= 16 * AT_ONCE) load(first);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) squares = fmaf(values[i], values[i], squares);
        }
        const float scale = rms_factor(fold16(squares), dim, eps);
        for (long long first = lane16(); first < dim; first += 16 * AT_ONCE) {
            if (dim > 16 * AT_ONCE) load(first);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (first + 16 * i < dim) head[first + 16 * i] = values[i] * scale * weights[i];
        }
        __syncwarp();
        if (own >= rows) return;
#pragma unroll 16
        for (long long i = lane16(); i < dim; i += 16)
            out[row * dim + i] = turned(head, table, position, half, i);
    }
};

// head_norm_rope: each head normalised, then turned to its token's position
//   heads as Heads, table [context,half,2] f32, positions [T] i32
//   grid (R / 8), 16 lanes per row, shared 4 * N bytes per row; moves 8 * R*N bytes
extern "C" __global__ void head_norm_rope(const float *src, const float *weight, const float *table,
                                          const int *positions, float eps, float *out,
                                          long long num_rows, long long num_heads, long long stride,
                                          long long dim, long long half) {
    start_early();
    extern __shared__ float normed[];
    const Heads all = {src, weight, out, num_rows, num_heads, stride, dim};
    all.norm_rope(blockIdx.x, table, positions, eps, half, normed);
}

// head_norm_rope_three: the same for three kinds of heads, in one launch
//   grid (blocks of each kind), shared that of the widest
extern "C" __global__ void head_norm_rope_three(
    const float *src0, const float *weight0, float *out0, const float *src1, const float *weight1,
    float *out1, const float *src2, const float *weight2, float *out2, const float *table,
    const int *positions, float eps, long long rows0, long long heads0, long long stride0,
    long long dim0, long long rows1, long long heads1, long long stride1, long long dim1,
    long long rows2, long long heads2, long long stride2, long long dim2, long long half) {
    start_early();
    extern __shared__ float normed[];
    const Heads first = {src0, weight0, out0, rows0, heads0, stride0, dim0};
    const Heads second = {src1, weight1, out1, rows1, heads1, stride1, dim1};
    const Heads third = {src2, weight2, out2, rows2, heads2, stride2, dim2};
    const int block = blockIdx.x, behind_first = block - first.blocks();
    const int behind_second = behind_first - second.blocks();
    const Heads own = behind_first < 0 ? first : behind_second < 0 ? second : third;
    own.norm_rope(behind_first < 0    ? block
                  : behind_second < 0 ? behind_first
                                      : behind_second,
                  table, positions, eps, half, normed);
}
