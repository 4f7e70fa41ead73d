#include "overlap.cuh"
#include "pairs.cuh"

// round_rows: x [n] f32 -> f16, to nearest, at most 65504 in magnitude; moves 6 * n bytes
//   grid (n / (8 * block)), eight values per thread
extern "C" __global__ void round_rows(const float *x, unsigned *rounded, long long n) {
    start_early();
    const long long first = 8 * (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x);
    const bool wide =
        ((reinterpret_cast<unsigned long long>(x) | reinterpret_cast<unsigned long long>(rounded)) &
         15) == 0;
    if (wide && first + 8 <= n) {
        const float4 a = *reinterpret_cast<const float4 *>(x + first);
        const float4 b = *reinterpret_cast<const float4 *>(x + first + 4);
        *reinterpret_cast<uint4 *>(rounded + first / 2) =
            make_uint4(pair_of(a.x, a.y), pair_of(a.z, a.w), pair_of(b.x, b.y), pair_of(b.z, b.w));
    } else {
        unsigned short *to = reinterpret_cast<unsigned short *>(rounded);
        for (long long i = first; i < min(first + 8, n); i++) to[i] = half_of(x[i]);
    }
}
