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

    // First step of a slice, or of the next one, which may be behind the last.
    __device__ int first_step(int own) const {
        return own * slice < cols ? own * slice / 32 : (cols + 31) / 32;
    }

    // The lane's weights of AT_ONCE steps; zeros from step `stop` on.
    template <int LANE, int AT_ONCE>
    __device__ void load_weights(Eight (&w)[AT_ONCE], int step, int stop) const {
        const float *own = row(weights, 0, rows);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            w[i].load(own, Rows<F32, LANE>::k_of(step + i, threadIdx.x & 3),
                      step + i < stop ? cols : 0);
    }

    // Adds the products of steps whose weights are there, for GROUPS times eight rows of
    // activations.
    template <int LANE, int AT_ONCE, int GROUPS>
    __device__ void multiply_steps(float (&sums)[GROUPS][4], const Eight (&w)[AT_ONCE],
                                   const float *const (&x)[GROUPS], int step, int stop) const {
        Eight v[AT_ONCE][GROUPS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int n = 0; n < GROUPS; n++)
                v[i][n].load(x[n], Rows<F32, LANE>::k_of(step + i, threadIdx.x & 3),
                             step + i < stop ? cols : 0);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
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

    // Adds the products of a slice.
    template <int LANE, int GROUPS>
    __device__ void multiply_slice(float (&sums)[GROUPS][4], const float *const (&x)[GROUPS],
                                   int own) const {
        const int stop = first_step(own + 1);
#pragma unroll 1
        for (int step = first_step(own); step < stop; step += STEPS_AT_ONCE) {
            Eight w[STEPS_AT_ONCE];
            load_weights<LANE>(w, step, stop);
            multiply_steps<LANE>(sums, w, x, step, stop);
        }
    }
};
