// Float32 exp, sigmoid, silu, softplus and log as the fixed sequences of IEEE operations that
// math32.py states for the host: the same bits there and on every GPU. A fused multiply-add is
// written as fmaf, division and square root round to nearest. Not a number stays one.
#pragma once

// e**x, about 1 ulp; saturates outside [-87, 88] (no infinities, no denormals).
__device__ inline float exp32(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = floorf(fmaf(x, 1.4426950408889634f, 0.5f));
    float r = fmaf(n, -0.693145751953125f, x);  // 15 significant bits: n times it is exact
    r = fmaf(n, -1.4286068203094173e-06f, r);
    float p = 1.0f / 5040.0f;
    p = fmaf(p, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return p * __int_as_float((static_cast<int>(n) + 127) << 23);
}

// Natural logarithm of a positive normal float32, about 2 ulp.
__device__ inline float log32(float x) {
    const int bits = __float_as_int(x);
    int exponent = (bits >> 23) - 127;
    float m = __int_as_float((bits & 0x7FFFFF) | 0x3F800000);
    if (m > 1.4142135f) {
        m = m * 0.5f;
        exponent += 1;
    }
    const float s = (m - 1.0f) / (m + 1.0f);  // log(m) = 2 artanh(s), |s| < 0.1716
    const float z = s * s;
    float p = static_cast<float>(2.0 / 11.0);
    p = fmaf(p, z, static_cast<float>(2.0 / 9.0));
    p = fmaf(p, z, static_cast<float>(2.0 / 7.0));
    p = fmaf(p, z, static_cast<float>(2.0 / 5.0));
    p = fmaf(p, z, static_cast<float>(2.0 / 3.0));
    p = fmaf(p * z, s, 2.0f * s);
    const float e = static_cast<float>(exponent);
    return fmaf(e, 0.693145751953125f, fmaf(e, 1.4286068203094173e-06f, p));
}

// 1 / (1 + e**-x)
__device__ inline float sigmoid32(float x) { return 1.0f / (1.0f + exp32(-x)); }

// x * sigmoid(x)
__device__ inline float silu32(float x) { return x / (1.0f + exp32(-x)); }

// log(1 + e**x), without overflow and without loss for very negative x.
__device__ inline float softplus32(float x) {
    const float y = exp32(-fabsf(x));
    const float s = y / (2.0f + y);  // log(1 + y) = 2 artanh(s), s <= 1/3
    const float z = s * s;
    float p = static_cast<float>(2.0 / 17.0);
    p = fmaf(p, z, static_cast<float>(2.0 / 15.0));
    p = fmaf(p, z, static_cast<float>(2.0 / 13.0));
    p = fmaf(p, z, static_cast<float>(2.0 / 11.0));
    p = fmaf(p, z, static_cast<float>(2.0 / 9.0));
    p = fmaf(p, z, static_cast<float>(2.0 / 7.0));
    p = fmaf(p, z, static_cast<float>(2.0 / 5.0));
    p = fmaf(p, z, static_cast<float>(2.0 / 3.0));
    const float tail = fmaf(p * z, s, 2.0f * s);
    return (x < 0.0f ? 0.0f : x) + tail;
}
