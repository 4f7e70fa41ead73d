// Codecs of the k-quants: blocks of 256 weights, scales for runs of 16 or 32.
//   Source of the layouts: ggml's block structs.
#pragma once
#include "codec.cuh"

// Where an octet lies in types that keep 128 weights in 32 bytes of two-bit fields: weights
// 32r .. 32r + 31 of a half have bits 2r and 2r + 1 of bytes 0..31.
struct Place {
    int half, row, column;
    __device__ explicit Place(int octet)
        : half(octet >> 4), row(octet >> 2 & 3), column(8 * (octet & 3)) {}
};

// 16 bytes of scale and minimum (4 bits each), 64 bytes of four codes, f16 d, f16 dmin.
template <>
struct Codec<Q2_K> {
    static constexpr int WEIGHTS = 256, BYTES = 84, RUN = 2, BIAS = 1024, BOOK = 0;
    static constexpr bool HAS_MIN = true;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const Place p(octet);
        const int at = 16 + 32 * p.half + p.column, shift = 2 * p.row;
        return octet_of_bytes(b.u32(at) >> shift & 0x03030303u,
                              b.u32(at + 4) >> shift & 0x03030303u);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const unsigned packed = b.u8(octet >> 1);
        return {float_of(b.u16(80)) * static_cast<float>(packed & 15),
                float_of(b.u16(82)) * static_cast<float>(packed >> 4)};
    }
};

// 32 bytes of third bits, 64 bytes of four codes, 12 bytes of 6-bit scales, f16 d.
template <>
struct Codec<Q3_K> {
    static constexpr int WEIGHTS = 256, BYTES = 110, RUN = 2, BIAS = 1024 + 4, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const Place p(octet);
        return octet_of_bytes(four(b, p, p.column), four(b, p, p.column + 4));
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const int run = octet >> 1;
        const int low = b.u8(96 + (run & 7)) >> 4 * (run >> 3) & 15;
        const int high = b.u8(104 + (run & 3)) >> 2 * (run >> 2) & 3;
        return {float_of(b.u16(108)) * static_cast<float>((low | high << 4) - 32), 0.0f};
    }

   private:
    template <class Block>
    __device__ static unsigned four(const Block &b, const Place &p, int column) {
        const unsigned low = b.u32(32 + 32 * p.half + column) >> 2 * p.row & 0x03030303u;
        return low | (b.u32(column) >> (4 * p.half + p.row) & 0x01010101u) << 2;
    }
};

// f16 d, f16 dmin, 12 bytes of eight 6-bit scales and minimums: how Q4_K and Q5_K begin.
template <class Block>
__device__ inline Scale scale_and_minimum(const Block &b, int group) {
    const int i = group & 3;
    const unsigned scales = b.u8(4 + i), minimums = b.u8(8 + i), low = b.u8(12 + i);
    const bool first = group < 4;
    const unsigned scale = first ? scales & 63 : (low & 15) | (scales >> 2 & 48);
    const unsigned minimum = first ? minimums & 63 : low >> 4 | (minimums >> 2 & 48);
    return {float_of(b.u16(0)) * static_cast<float>(scale),
            float_of(b.u16(2)) * static_cast<float>(minimum)};
}

// Scales, then 128 bytes of two codes: weights 0..31 of each 64 in the lower halves of 32 bytes.
template <>
struct Codec<Q4_K> {
    static constexpr int WEIGHTS = 256, BYTES = 144, RUN = 4, BIAS = 1024, BOOK = 0;
    static constexpr bool HAS_MIN = true;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const int at = 16 + 32 * (octet >> 3) + 8 * (octet & 3), shift = octet & 4;
        return octet_of_bytes(b.u32(at) >> shift & 0x0f0f0f0fu,
                              b.u32(at + 4) >> shift & 0x0f0f0f0fu);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        return scale_and_minimum(b, octet >> 2);
    }
};

// As Q4_K, with 32 bytes of fifth bits before the codes.
template <>
struct Codec<Q5_K> {
    static constexpr int WEIGHTS = 256, BYTES = 176, RUN = 4, BIAS = 1024, BOOK = 0;
    static constexpr bool HAS_MIN = true;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const int column = 8 * (octet & 3);
        return octet_of_bytes(four(b, octet, column), four(b, octet, column + 4));
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        return scale_and_minimum(b, octet >> 2);
    }

   private:
    template <class Block>
    __device__ static unsigned four(const Block &b, int octet, int column) {
        const unsigned low = b.u32(48 + 32 * (octet >> 3) + column) >> (octet & 4) & 0x0f0f0f0fu;
        return low | (b.u32(16 + column) >> (octet >> 2) & 0x01010101u) << 4;
    }
};

// 128 bytes of four low bits, 64 bytes of two high bits, 16 signed scales, f16 d.
template <>
struct Codec<Q6_K> {
    static constexpr int WEIGHTS = 256, BYTES = 210, RUN = 2, BIAS = 1024 + 32, BOOK = 0;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book) {
        const Place p(octet);
        return octet_of_bytes(four(b, p, p.column), four(b, p, p.column + 4));
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const int scale = static_cast<signed char>(b.u8(192 + (octet >> 1)));
        return {float_of(b.u16(208)) * static_cast<float>(scale), 0.0f};
    }

   private:
    template <class Block>
    __device__ static unsigned four(const Block &b, const Place &p, int column) {
        const unsigned low = b.u32(64 * p.half + 32 * (p.row & 1) + column) >> 4 * (p.row >> 1);
        const unsigned high = b.u32(128 + 32 * p.half + column) >> 2 * p.row;
        return (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
    }
};
