// Codecs of types whose blocks hold one scale (or one for each 16 weights) and plain codes.
//   Source of the layouts: ggml's block structs.
#pragma once
#include "codec.cuh"

// 2 bytes: an f16.
template <>
struct Codec<F16> {
    static constexpr int WEIGHTS = 1, BYTES = 2, RUN = 32, BIAS = 0, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const int at = 16 * octet;
        return {b.u32(at), b.u32(at + 4), b.u32(at + 8), b.u32(at + 12)};
    }
};

// 2 bytes: the upper half of a float32. Decoded with the gain, so that small ones stay exact.
template <>
struct Codec<BF16> {
    static constexpr int WEIGHTS = 1, BYTES = 2, RUN = 32, BIAS = 0, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block>
    __device__ static void floats(const Block &b, int octet, float (&w)[8]) {
        for (int i = 0; i < 4; i++) {
            const unsigned pair = b.u32(16 * octet + 4 * i);
            w[2 * i] = float_of_bits(pair << 16);
            w[2 * i + 1] = float_of_bits(pair & 0xffff0000u);
        }
    }
};

template <>
struct Codec<F32> {
    static constexpr int WEIGHTS = 1, BYTES = 4, RUN = 32, BIAS = 0, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block>
    __device__ static void floats(const Block &b, int octet, float (&w)[8]) {
        for (int i = 0; i < 8; i++) w[i] = float_of_bits(b.u32(32 * octet + 4 * i));
    }
};

// A 4-bit code for each of 32 weights: weights 0..15 in the lower halves of 16 bytes, 16..31 in
// the upper ones. The codes of an octet as the bytes of two words.
template <class Block>
__device__ inline void nibbles(const Block &b, int at, int octet, unsigned &first,
                               unsigned &second) {
    const int shift = 4 * (octet >> 1);
    first = (b.u32(at + 8 * (octet & 1)) >> shift) & 0x0f0f0f0f;
    second = (b.u32(at + 8 * (octet & 1) + 4) >> shift) & 0x0f0f0f0f;
}

// f16 d, 16 bytes of two codes.
template <>
struct Codec<Q4_0> {
    static constexpr int WEIGHTS = 32, BYTES = 18, RUN = 4, BIAS = 1024 + 8, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        unsigned first, second;
        nibbles(b, 2, octet, first, second);
        return octet_of_bytes(first, second);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(0)), 0.0f};
    }
};

// f16 d, f16 m, 16 bytes of two codes.
template <>
struct Codec<Q4_1> {
    static constexpr int WEIGHTS = 32, BYTES = 20, RUN = 4, BIAS = 1024, BOOK = 0;
    static constexpr bool HAS_MIN = true;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        unsigned first, second;
        nibbles(b, 4, octet, first, second);
        return octet_of_bytes(first, second);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(0)), -float_of(b.u16(2))};
    }
};

// f16 d, 32 fifth bits, 16 bytes of two codes.
template <>
struct Codec<Q5_0> {
    static constexpr int WEIGHTS = 32, BYTES = 22, RUN = 4, BIAS = 1024 + 16, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        unsigned first, second;
        nibbles(b, 6, octet, first, second);
        const unsigned fifth = b.u8(2 + octet);
        return octet_of_bytes(first | spread<4>(fifth), second | spread<4>(fifth >> 4));
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(0)), 0.0f};
    }
};

// f16 d, f16 m, 32 fifth bits, 16 bytes of two codes.
template <>
struct Codec<Q5_1> {
    static constexpr int WEIGHTS = 32, BYTES = 24, RUN = 4, BIAS = 1024, BOOK = 0;
    static constexpr bool HAS_MIN = true;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        unsigned first, second;
        nibbles(b, 8, octet, first, second);
        const unsigned fifth = b.u8(4 + octet);
        return octet_of_bytes(first | spread<4>(fifth), second | spread<4>(fifth >> 4));
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(0)), -float_of(b.u16(2))};
    }
};

// f16 d, 32 signed bytes.
template <>
struct Codec<Q8_0> {
    static constexpr int WEIGHTS = 32, BYTES = 34, RUN = 4, BIAS = 1024 + 128, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const int at = 2 + 8 * octet;
        return octet_of_bytes(b.u32(at) ^ 0x80808080u, b.u32(at + 4) ^ 0x80808080u);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(0)), 0.0f};
    }
};

// f16 d, 128 bits: set means d, clear means -d.
template <>
struct Codec<Q1_0> {
    static constexpr int WEIGHTS = 128, BYTES = 18, RUN = 16, BIAS = 0, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        constexpr unsigned ones = 0x3c3c3c3cu;  // the upper byte of f16 1.0, four times
        const unsigned clear = ~b.u8(2 + octet);
        const unsigned first = spread<7>(clear) | ones, second = spread<7>(clear >> 4) | ones;
        return octet_of_halves(0, first, 0, second);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(0)), 0.0f};
    }
};

// f16 d, 64 codes of two bits in order: 0..3 mean -d, 0, d, 2d.
template <>
struct Codec<Q2_0> {
    static constexpr int WEIGHTS = 64, BYTES = 18, RUN = 8, BIAS = 0, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const unsigned packed = b.u16(2 + 2 * octet);
        // Codes 2i and 2i + 1 are two bits apart: a copy 14 bits up puts them 16 bits apart. Where
        // they lie within the f16 decides what they count; fma2 makes that one, and takes one off.
        const unsigned pairs = packed | packed << 14;
        return {add2(at<0>(pairs), MINUS<1025>), fma2(at<4>(pairs), SIXTEENTH, MINUS<65>),
                fma2(at<8>(pairs), PER_256, MINUS<5>), fma2(at<8>(pairs >> 4), PER_256, MINUS<5>)};
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(0)), 0.0f};
    }

   private:
    static constexpr unsigned SIXTEENTH = 0x2c002c00u, PER_256 = 0x1c001c00u;  // 1/16, 1/256 twice

    template <int BIT>
    __device__ static unsigned at(unsigned pairs) {
        return (pairs & (0x00030003u << BIT)) | 0x64006400u;
    }
};

// 48 bytes of five base-3 digits, 4 bytes of four, f16 d; digit by digit. Digits mean -d, 0, d.
template <>
struct Codec<TQ1_0> {
    static constexpr int WEIGHTS = 256, BYTES = 54, RUN = 32, BIAS = 1024 + 1, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        int at = 8 * (octet & 3), digit = octet >> 2, digit_of_second = digit, step = 4;
        if (octet >= 30) {
            at = 48, digit = 2 * (octet - 30), digit_of_second = digit + 1, step = 0;
        } else if (octet >= 20) {
            at = 32 + 8 * (octet & 1), digit = digit_of_second = (octet - 20) >> 1;
        }
        return octet_of_bytes(digits(b.u32(at), digit), digits(b.u32(at + step), digit_of_second));
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(52)), 0.0f};
    }

   private:
    // One digit of each byte: the byte is a fraction of 256 in base 3.
    __device__ static unsigned digits(unsigned word, int digit) {
        const unsigned power = digit == 0   ? 1
                               : digit == 1 ? 3
                               : digit == 2 ? 9
                               : digit == 3 ? 27
                                            : 81;
        const unsigned even = (word & 0x00ff00ffu) * power & 0x00ff00ffu;
        const unsigned odd = (word >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
        return (even * 3 >> 8 & 0x00030003u) | (odd * 3 & 0x03000300u);
    }
};

// 64 bytes of four two-bit codes, f16 d. Codes mean -d, 0, d, 2d.
template <>
struct Codec<TQ2_0> {
    static constexpr int WEIGHTS = 256, BYTES = 66, RUN = 32, BIAS = 1024 + 1, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const int at = 32 * (octet >> 4) + 8 * (octet & 3), shift = 2 * (octet >> 2 & 3);
        return octet_of_bytes(b.u32(at) >> shift & 0x03030303u,
                              b.u32(at + 4) >> shift & 0x03030303u);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int) {
        return {float_of(b.u16(64)), 0.0f};
    }
};
