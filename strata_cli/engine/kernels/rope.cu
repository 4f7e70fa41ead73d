// Rotary positions: the norm-then-rotate step of query and key heads.
#include "lanes.cuh"
#include "overlap.cuh"
#include "rope.cuh"

// head_norm_rope: each head normalised, then turned to its token's position
//   R = T * heads rows, N width; src [R,stride] f32 (the first N of a row), weight [N] f32,
//   table [context,half,2] f32, positions [T] i32 -> out [R,N] f32
//   grid (R / 8), 16 lanes per row, shared 4 * N bytes per row; moves 8 * R*N bytes
extern "C" __global__ void head_norm_rope(const float *src, const float *weight, const float *table,
                                          const int *positions, float eps, float *out,
                                          long long num_rows, long long num_heads, long long stride,
                                          long long dim, long long half) {
    start_early();
    constexpr int AT_ONCE = 16;  // elements of a lane that are loaded together: one latency
    extern __shared__ float normed[];
    const long long own = blockIdx.x * (blockDim.x / 16) + threadIdx.x / 16;
    const long long row = min(own, num_rows - 1);  // a spare half warp takes part in the sums
    float *head = normed + threadIdx.x / 16 * dim;
    src += row * stride;
    const long long position = positions[row / num_heads];
    float values[AT_ONCE], weights[AT_ONCE], squares = 0.0f;
    const auto load = [&](long long first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            values[i] = first + 16 * i < dim ? src[first + 16 * i] : 0.0f;
            weights[i] = first + 16 * i < dim ? weight[first + 16 * i] : 0.0f;
        }
    };
    load(lane16());
    Turn turns[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        turns[i] = lane16() + 16 * i < 2 * half ? turn_of(table, position, half, lane16() + 16 * i)
                                                : Turn{1.0f, 0.0f};
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
    if (own >= num_rows) return;
    out += row * dim;
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const long long i = lane16() + 16 * n;
        if (i < dim) out[i] = i < 2 * half ? turns[n].of(head, half, i) : head[i];
    }
    for (long long i = lane16() + 16 * AT_ONCE; i < dim; i += 16)
        out[i] = turned(head, table, position, half, i);
}
