// Few rows of float32 weights, both operands as the sum of two f16, by one warp a slice at a time.
#pragma once
#include "mma.cuh"
#include "overlap.cuh"
#include "weights.cuh"

constexpr int STEPS_AT_ONCE = 4;  // whose loads are on their way together

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
struct ThinSplit {
    unsigned high[4], rest[4];

    __device__ ThinSplit(const Eight &eight, float factor) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float a = eight.v[2 * i] * factor, b = eight.v[2 * i + 1] * factor;
            high[i] = pair_of(a, b);
            rest[i] = pair_of(a - float_of(high[i]), b - float_of(high[i] >> 16));
        }
    }
};

// At most 8 rows of weights, cut into slices; the products of a slice are those of matmul_few.cu,
// in the same order.
struct ThinRows {
    const float *weights;
    int rows, cols, slice;

    // The lane's row of activations among the eight from `first` on; beyond the last one, it again.
    __device__ const float *row(const float *x, int first, int count) const {
        const int g = (threadIdx.x & 31) / 4;
        return x + static_cast<long long>(min(first + g, count - 1)) * cols;
    }

    // Brings the slice's weights into the L2 cache.
    __device__ void fetch_slice_ahead(int own) const {
        const int first = own * slice, count = min(slice, cols - first), lane = threadIdx.x & 31;
        for (int row = 0; row < rows; row++)
            for (int k = 32 * lane; k < count; k += 32 * 32)
                fetch_ahead(weights + static_cast<long long>(row) * cols + first + k);
    }

    // Adds the products of a slice, for GROUPS times eight rows of activations.
    template <int LANE, int GROUPS>
    __device__ void multiply_slice(float (&sums)[GROUPS][4], const float *const (&x)[GROUPS],
                                   int own) const {
        using R = Rows<F32, LANE>;
        const int t = threadIdx.x & 3;
        const float *own_weights = row(weights, 0, rows);
        const int first = own * slice / 32, stop = (min((own + 1) * slice, cols) + 31) / 32;
#pragma unroll 1
        for (int step = first; step < stop; step += STEPS_AT_ONCE) {
            Eight w[STEPS_AT_ONCE], v[STEPS_AT_ONCE][GROUPS];
#pragma unroll
            for (int i = 0; i < STEPS_AT_ONCE; i++) {
                const int k = R::k_of(step + i, t), end = step + i < stop ? cols : 0;
                w[i].load(own_weights, k, end);
#pragma unroll
                for (int n = 0; n < GROUPS; n++) v[i][n].load(x[n], k, end);
            }
#pragma unroll
            for (int i = 0; i < STEPS_AT_ONCE; i++) {
                if (step + i >= stop) break;
                const ThinSplit a(w[i], GAIN<F32>);
#pragma unroll
                for (int n = 0; n < GROUPS; n++) {
                    const ThinSplit b(v[i][n], 1.0f);
#pragma unroll
                    for (int j = 0; j < 4; j += 2) {
                        multiply(sums[n], a.high[j], 0, a.high[j + 1], 0, b.high[j], b.high[j + 1]);
                        multiply(sums[n], a.high[j], 0, a.high[j + 1], 0, b.rest[j], b.rest[j + 1]);
                        multiply(sums[n], a.rest[j], 0, a.rest[j + 1], 0, b.high[j], b.high[j + 1]);
                    }
                }
            }
        }
    }
};
