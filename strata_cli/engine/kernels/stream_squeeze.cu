// The low-rank product of the normed streams of some tokens: its slices added up and activated, and
// beside that the inject's slices.
//   T tokens, S streams, D hidden_size, R stream rank
#include "inject.cuh"
#include "math32.cuh"

// join_squeeze: low = silu(x / S) of what join_slices (matmul_many.cu) makes, as f16
//   sums [slices,T,R] f32 -> low [T,R] f16; normed [T,S*D] f32, weights [rows,S*D] f32 -> parts
//   [slices of these,T,rows] f32; grid (blocks that join + blocks of slices of the inject)
//   reads 4 * slices * T*R and 4 * T*S*D bytes: a few latencies are the limit
template <int TYPE, int LANE>
__global__ void __launch_bounds__(32 * INJECT_WARPS)
    join_squeeze(const float *sums, unsigned short *low, const float *normed, const float *weights,
                 float *parts, long long slices, long long values, long long num_streams,
                 long long joining, long long tokens, long long rows, long long cols,
                 long long slice) {
    const int block = static_cast<int>(blockIdx.x) - static_cast<int>(joining);
    if (block >= 0) {
        const ThinRows all = {weights, static_cast<int>(rows), static_cast<int>(cols),
                              static_cast<int>(slice)};
        make_inject<LANE, STEPS_AT_ONCE>(all, normed, parts, static_cast<int>(tokens), block);
        return;
    }
    start_early();
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= values) return;
    float total = 0.0f;
#pragma unroll 10
    for (long long own = 0; own < slices; own++) total += sums[own * values + i];
    low[i] = half_of(silu32(total / GAIN<TYPE> / static_cast<float>(num_streams)));
}
