// Two f16 values in one 32-bit register, and moving bytes between registers.
#ifndef PAIRS_CUH
#define PAIRS_CUH

__device__ inline unsigned add2(unsigned a, unsigned b) {
    unsigned d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ inline unsigned mul2(unsigned a, unsigned b) {
    unsigned d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ inline unsigned fma2(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Bytes of low (0..3) and high (4..7) that the four hex digits of the selector name, last first.
__device__ inline unsigned pick(unsigned low, unsigned high, unsigned selector) {
    unsigned d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
    return d;
}

// 32 bits of high:low from a bit on, 0 <= bit < 32.
__device__ inline unsigned window(unsigned low, unsigned high, int bit) {
    return __funnelshift_r(low, high, bit);
}

// Both values to f16, to nearest; beyond +-65504 that, not a number stays so.
__device__ inline unsigned pair_of(float low, float high) {
    unsigned d;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
#else
    low = low > 65504.0f ? 65504.0f : low < -65504.0f ? -65504.0f : low;
    high = high > 65504.0f ? 65504.0f : high < -65504.0f ? -65504.0f : high;
    asm("{ .reg .f16 l, h;\n cvt.rn.f16.f32 l, %1;\n cvt.rn.f16.f32 h, %2;\n mov.b32 %0, {l, h}; }"
        : "=r"(d)
        : "f"(low), "f"(high));
#endif
    return d;
}

// One value to f16, as pair_of.
__device__ inline unsigned short half_of(float v) {
    return static_cast<unsigned short>(pair_of(v, 0.0f));
}

// The float of the f16 in the low 16 bits.
__device__ inline float float_of(unsigned bits) {
    float f;
    asm("{ .reg .f16 l, h;\n mov.b32 {l, h}, %1;\n cvt.f32.f16 %0, l; }" : "=f"(f) : "r"(bits));
    return f;
}

__device__ inline float float_of_bits(unsigned bits) { return __uint_as_float(bits); }

#endif
