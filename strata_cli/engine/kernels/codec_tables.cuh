// Codecs of types whose 4-bit codes name one of sixteen values.
//   Source of the layouts: ggml's block structs.
#pragma once
#include "codec.cuh"

// A table of sixteen bytes.
struct Sixteen {
    unsigned entries[4];

    // The bytes that four codes name, the lower four hex digits of `low` (the codes' lower three
    // bits) and `which` (their top bit, which chooses between digit i and i + 4, over 3210).
    __device__ unsigned look_up(unsigned low, unsigned which) const {
        return pick(pick(entries[0], entries[1], low), pick(entries[2], entries[3], low), which);
    }
};

// The bytes that the codes of 4 bytes name: of the lower halves, or of the upper ones.
__device__ inline unsigned look_up_half(Sixteen table, unsigned word, bool upper) {
    const unsigned low = word & 0x77777777u, which = (word >> 1 & 0x44444444u) | 0x32103210u;
    const unsigned first = table.look_up(low, which),
                   second = table.look_up(low >> 16, which >> 16);
    return upper ? pick(first, second, 0x7531) : pick(first, second, 0x6420);
}

// 16 integers of magnitude below 128, each with 128 added.
__device__ inline Sixteen iq4_values() {
    return {{0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u}};
}

// The upper bytes of the f16 of twice the e2m1 values; their lower bytes are zero.
__device__ inline Sixteen e2m1_doubled() {
    constexpr unsigned a = f16_bytes(1, 0, 1, 2, 3), b = f16_bytes(1, 4, 6, 8, 12);
    return {{a, b, a | 0x80808080u, b | 0x80808080u}};
}

// An octet of 32 codes in 16 bytes, weights 0..15 in the lower halves.
template <class Block>
__device__ inline Octet iq4_octet(const Block &b, int at, int octet) {
    const unsigned w0 = b.u32(at + 8 * (octet & 1)), w1 = b.u32(at + 8 * (octet & 1) + 4);
    const bool upper = octet >> 1;
    return octet_of_bytes(look_up_half(iq4_values(), w0, upper),
                          look_up_half(iq4_values(), w1, upper));
}

__device__ inline Octet e2m1_octet(unsigned w0, unsigned w1, bool upper) {
    return octet_of_halves(0, look_up_half(e2m1_doubled(), w0, upper), 0,
                           look_up_half(e2m1_doubled(), w1, upper));
}

// f16 d, 16 bytes of two codes.
template <>
struct Codec<IQ4_NL> {
    static constexpr int WEIGHTS = 32, BYTES = 18, RUN = 4, BIAS = 1024 + 128, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        return iq4_octet(b, 2, octet);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(0)), 0.0f};
    }
};

// f16 d, eight 6-bit scales in 2 + 4 bytes, 128 bytes of two codes.
template <>
struct Codec<IQ4_XS> {
    static constexpr int WEIGHTS = 256, BYTES = 136, RUN = 4, BIAS = 1024 + 128, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        return iq4_octet(b, 8 + 16 * (octet >> 2), octet & 3);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const int group = octet >> 2;
        const int low = b.u8(4 + (group >> 1)) >> 4 * (group & 1) & 15;
        const int high = b.u16(2) >> 2 * group & 3;
        return {float_of(b.u16(0)) * static_cast<float>((low | high << 4) - 32), 0.0f};
    }
};

// An e8m0 exponent, 16 bytes of two e2m1 codes; half the scale times doubled values.
template <>
struct Codec<MXFP4> {
    static constexpr int WEIGHTS = 32, BYTES = 17, RUN = 4, BIAS = 0, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const int at = 1 + 8 * (octet & 1);
        return e2m1_octet(b.u32(at), b.u32(at + 4), octet >> 1);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        const unsigned exponent = b.u8(0);
        // 2 ** (exponent - 128), a denormal for the two smallest.
        const unsigned bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
        return {float_of_bits(bits), 0.0f};
    }
};

// Four unsigned e4m3 scales for 16 weights each, then for each 8 bytes of two e2m1 codes.
template <>
struct Codec<NVFP4> {
    static constexpr int WEIGHTS = 64, BYTES = 36, RUN = 2, BIAS = 0, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const int at = 4 + 8 * (octet >> 1);
        return e2m1_octet(b.u32(at), b.u32(at + 4), octet & 1);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const unsigned code = b.u8(octet >> 1), exponent = code >> 3 & 15, mantissa = code & 7;
        // Half of (1 + mantissa / 8) * 2 ** (exponent - 7), or of mantissa * 2 ** -9.
        const float normal = float_of_bits((exponent + 119) << 23 | mantissa << 20);
        const float tiny = static_cast<float>(mantissa) * 0x1p-10f;
        return {code == 0x7f ? 0.0f : exponent ? normal : tiny, 0.0f};
    }
};
