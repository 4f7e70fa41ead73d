// What every codec (how a tensor type stores its weights) is built from, and what it provides.
//
// Codec<TYPE> decodes eight consecutive weights, an octet, of one block:
//   WEIGHTS, BYTES  the block
//   RUN             octets that share a scale
//   BIAS, HAS_MIN   weight = (code - BIAS) * scale - minimum, the minimum only with HAS_MIN
//   BOOK            entries of its code book, 0: none
//   codes(block, octet, book)  the codes as f16, exactly
//   scale(block, octet)        scale and minimum in float32
// A block is read through a source: u8, u16 (even offsets) and u32 at any byte offset.
#pragma once
#include "pairs.cuh"

enum QuantType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    Q1_0 = 41,
    Q2_0 = 42
};

template <int TYPE>
struct Codec;

// Eight values of consecutive k as f16: pair i holds 2i and 2i + 1.
struct Octet {
    unsigned pair[4];
};

struct Scale {
    float scale, minimum;
};

constexpr unsigned ONE_K = 0x64646464;  // the upper byte of f16 1024 + byte, four times

__device__ inline unsigned both(float value) { return pair_of(value, value); }

// 1024 + byte for each byte of two words.
__device__ inline Octet octet_of_bytes(unsigned first, unsigned second) {
    return {pick(first, ONE_K, 0x4140), pick(first, ONE_K, 0x4342), pick(second, ONE_K, 0x4140),
            pick(second, ONE_K, 0x4342)};
}

// f16 values given as their upper and lower bytes.
__device__ inline Octet octet_of_halves(unsigned low0, unsigned high0, unsigned low1,
                                        unsigned high1) {
    return {pick(low0, high0, 0x5140), pick(low0, high0, 0x7362), pick(low1, high1, 0x5140),
            pick(low1, high1, 0x7362)};
}

// Bit i of four bits moved to bit 8 * i + PLACE.
template <int PLACE>
__device__ inline unsigned spread(unsigned bits) {
    // Bit i times 2^(7j + PLACE) lands at 8i + PLACE for j = i, and elsewhere for every other j.
    constexpr unsigned factor = 0x00204081u << PLACE;
    return (bits & 15) * factor & (0x01010101u << PLACE);
}

// Bits of f16(value) for integers of magnitude below 2048.
constexpr unsigned f16_bits(int value) {
    const unsigned sign = value < 0 ? 0x8000u : 0u;
    unsigned magnitude = value < 0 ? -value : value, exponent = 25;
    if (magnitude == 0) return sign;
    while (magnitude < 1024) {
        magnitude *= 2;
        exponent--;
    }
    return sign | exponent << 10 | (magnitude & 1023);
}

// f16 -VALUE, twice.
template <int VALUE>
constexpr unsigned MINUS = f16_bits(-VALUE) * 0x00010001u;

// One byte of the f16 of each of four integers; byte 1 is the upper one.
constexpr unsigned f16_bytes(int byte, int a, int b, int c, int d) {
    return (f16_bits(a) >> 8 * byte & 255) | (f16_bits(b) >> 8 * byte & 255) << 8 |
           (f16_bits(c) >> 8 * byte & 255) << 16 | (f16_bits(d) >> 8 * byte & 255) << 24;
}

// Up to eight integers as tables of upper and lower f16 bytes, looked up by digits 0..7 in hex.
template <int A, int B, int C, int D = 0, int E = 0, int F = 0, int G = 0, int H = 0>
struct Values {
    // The values that eight digits of codes name; a bit of signs (as of spread<7>) flips a sign.
    __device__ static Octet look_up(unsigned first, unsigned second, unsigned signs0,
                                    unsigned signs1) {
        return octet_of_halves(lower(first), upper(first) ^ signs0, lower(second),
                               upper(second) ^ signs1);
    }

   private:
    __device__ static unsigned upper(unsigned codes) {
        constexpr unsigned low = f16_bytes(1, A, B, C, D), high = f16_bytes(1, E, F, G, H);
        return pick(low, high, codes);
    }
    __device__ static unsigned lower(unsigned codes) {
        constexpr unsigned low = f16_bytes(0, A, B, C, D), high = f16_bytes(0, E, F, G, H);
        if constexpr ((low | high) == 0) return 0;
        return pick(low, high, codes);
    }
};

// Entries of a code book, kept COPIES times side by side so that fewer lanes of a warp meet in one
// bank of shared memory; a lane reads its own copy.
template <int COPIES>
struct Book {
    const unsigned *copy;

    __device__ unsigned operator[](unsigned i) const { return copy[i * COPIES]; }
};
