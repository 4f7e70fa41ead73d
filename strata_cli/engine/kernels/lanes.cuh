// Sums, dot products and norms in the host kernels' order (reduce.py), and row access.
//
// Lane l of 16 takes elements l, l + 16, ... in turn by fused multiply-add; the lanes are then
// folded 16 -> 8 -> 4 -> 2 -> 1, lane l with lane l + half. A warp holds two such groups of 16,
// its halves: they may work on two rows, or both on the same one. Every lane of a warp must take
// part; all 16 lanes of a group get the result.
#pragma once

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ inline int lane16() { return threadIdx.x & 15; }

__device__ inline float fold16(float v) {
    v += __shfl_xor_sync(ALL_LANES, v, 8);
    v += __shfl_xor_sync(ALL_LANES, v, 4);
    v += __shfl_xor_sync(ALL_LANES, v, 2);
    return v + __shfl_xor_sync(ALL_LANES, v, 1);
}

// Of a whole warp's integers, whose order does not matter.
__device__ inline int sum_of_warp(int v) {
    for (int half = 16; half; half /= 2) v += __shfl_xor_sync(ALL_LANES, v, half);
    return v;
}

// -inf: orders below every number.
__device__ inline float lowest() { return __int_as_float(0xff800000); }

// The larger of two; a where b is not a number.
__device__ inline float larger(float a, float b) { return b > a ? b : a; }

// Sum of n squares of x.
__device__ inline float sum_squares16(const float *x, long long n) {
    float total = 0.0f;
#pragma unroll 8
    for (long long i = lane16(); i < n; i += 16) total = fmaf(x[i], x[i], total);
    return fold16(total);
}

// Sum of a[i] * b[i] for i < n.
__device__ inline float dot16(const float *a, const float *b, long long n) {
    float total = 0.0f;
#pragma unroll 8
    for (long long i = lane16(); i < n; i += 16) total = fmaf(a[i], b[i], total);
    return fold16(total);
}

// 1 / sqrt(mean of squares + eps): the RMS norm's factor, from the sum of n squares.
__device__ inline float rms_factor(float sum_squares, long long n, float eps) {
    return 1.0f / sqrtf(sum_squares / static_cast<float>(n) + eps);
}

__device__ inline float rms_scale(const float *x, long long n, float eps) {
    return rms_factor(sum_squares16(x, n), n, eps);
}

// True when rows of n floats, one after the other from each address, can be moved 16 bytes at a
// time.
template <class... P>
__device__ inline bool is_wide(long long n, const P *...first) {
    const unsigned long long bits = (reinterpret_cast<unsigned long long>(first) | ...);
    return (n & 3) == 0 && (bits & 15) == 0;
}

__device__ inline float4 load4(const float *x) { return *reinterpret_cast<const float4 *>(x); }

__device__ inline void store4(float *x, float4 v) { *reinterpret_cast<float4 *>(x) = v; }

// Copy a row of n floats into shared memory by all threads of the block. Does not wait for them.
__device__ inline void load_row(float *to, const float *row, long long n, bool wide) {
    if (wide) {
        for (long long i = 4 * threadIdx.x; i < n; i += 4 * blockDim.x)
            store4(to + i, load4(row + i));
    } else {
        for (long long i = threadIdx.x; i < n; i += blockDim.x) to[i] = row[i];
    }
}
