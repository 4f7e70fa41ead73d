// The special function unit: the same bits at every place of a GPU, not those of another one.
#pragma once

// 2**x, within 2 units of the last place. 2**0 is exactly 1, 2**-inf exactly 0; not a number stays.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, within 1 unit of the last place; 0 of infinity.
__device__ inline float inverse_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e**x
__device__ inline float exp_fast(float x) { return exp2_fast(x * 1.4426950408889634f); }

// 1 / (1 + e**-x)
__device__ inline float sigmoid_fast(float x) { return inverse_fast(1.0f + exp_fast(-x)); }

// x * sigmoid(x)
__device__ inline float silu_fast(float x) { return x * sigmoid_fast(x); }
