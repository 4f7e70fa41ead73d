// Codecs of the types whose codes are entries of a code book: blocks of 256 weights.
//   The book comes with the compilation as BOOK_ENTRIES: for each entry a hex digit per weight,
//   the index of its magnitude (or, for IQ1, its value plus one), first weight lowest.
//   Source of the layouts: ggml's block structs.
#pragma once
#include "codec.cuh"

#ifdef BOOK_ENTRIES
__device__ const unsigned BOOK[] = {BOOK_ENTRIES};
#else
__device__ const unsigned BOOK[] = {0};
#endif

// The signs of eight weights, spread for the upper bytes of two words.
struct Signs {
    unsigned first, second;

    __device__ static Signs of_eight(unsigned bits) {
        return {spread<7>(bits), spread<7>(bits >> 4)};
    }

    // From seven bits: the eighth makes the number of minus signs even.
    __device__ static Signs of_seven(unsigned bits) {
        return {spread<7>(bits), spread<7>((bits >> 4) + 8 * __popc(bits))};
    }
};

using Iq2Values = Values<8, 25, 43>;

// Eight weights from one entry.
__device__ inline Octet iq2_octet(unsigned entry, const Signs &signs) {
    return Iq2Values::look_up(entry, entry >> 16, signs.first, signs.second);
}

// f16 d; for each 32 weights 4 bytes of entries, then 4 x 7 signs and a 4-bit scale.
template <>
struct Codec<IQ2_XXS> {
    static constexpr int WEIGHTS = 256, BYTES = 66, RUN = 4, BIAS = 0, BOOK = 256;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book book) {
        const int at = 2 + 8 * (octet >> 2), i = octet & 3;
        const unsigned signs = b.u32(at + 4) >> 7 * i & 127;
        return iq2_octet(book[b.u8(at + i)], Signs::of_seven(signs));
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const unsigned scale = b.u32(6 + 8 * (octet >> 2)) >> 28;
        return {float_of(b.u16(0)) * (0.5f + static_cast<float>(scale)) * 0.25f, 0.0f};
    }
};

// f16 d; for each octet 9 bits of entry and 7 signs; eight bytes of 4-bit scales for 16 weights.
template <>
struct Codec<IQ2_XS> {
    static constexpr int WEIGHTS = 256, BYTES = 74, RUN = 2, BIAS = 0, BOOK = 512;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book book) {
        const unsigned code = b.u16(2 + 2 * octet);
        return iq2_octet(book[code & 511], Signs::of_seven(code >> 9));
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const unsigned scale = b.u8(66 + (octet >> 2)) >> 2 * (octet & 2) & 15;
        return {float_of(b.u16(0)) * (0.5f + static_cast<float>(scale)) * 0.25f, 0.0f};
    }
};

// f16 d, 32 bytes of entries, 32 of signs, eight of two more bits of four entries, eight of scales.
template <>
struct Codec<IQ2_S> {
    static constexpr int WEIGHTS = 256, BYTES = 82, RUN = 2, BIAS = 0, BOOK = 1024;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book book) {
        const unsigned high = b.u8(66 + (octet >> 2)) >> 2 * (octet & 3) & 3;
        return iq2_octet(book[b.u8(2 + octet) | high << 8], Signs::of_eight(b.u8(34 + octet)));
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const unsigned scale = b.u8(74 + (octet >> 2)) >> 2 * (octet & 2) & 15;
        return {float_of(b.u16(0)) * (0.5f + static_cast<float>(scale)) * 0.25f, 0.0f};
    }
};

// f16 d, 64 bytes of entries for four weights, for each 32 weights 4 x 7 signs and a 4-bit scale.
template <>
struct Codec<IQ3_XXS> {
    static constexpr int WEIGHTS = 256, BYTES = 98, RUN = 4, BIAS = 0, BOOK = 256;
    static constexpr bool HAS_MIN = false;
    using Magnitudes = Values<4, 12, 20, 28, 36, 44, 52, 62>;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book book) {
        const unsigned entries = b.u16(2 + 2 * octet);
        const Signs signs = Signs::of_seven(b.u32(66 + 4 * (octet >> 2)) >> 7 * (octet & 3) & 127);
        return Magnitudes::look_up(book[entries & 255], book[entries >> 8], signs.first,
                                   signs.second);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const unsigned scale = b.u32(66 + 4 * (octet >> 2)) >> 28;
        return {float_of(b.u16(0)) * (0.5f + static_cast<float>(scale)) * 0.5f, 0.0f};
    }
};

// f16 d, 64 bytes of entries for four weights, eight of their ninth bits, 32 of signs, four of
// 4-bit scales for 32 weights.
template <>
struct Codec<IQ3_S> {
    static constexpr int WEIGHTS = 256, BYTES = 110, RUN = 4, BIAS = 0, BOOK = 512;
    static constexpr bool HAS_MIN = false;
    using Magnitudes = Values<1, 3, 5, 7, 9, 11, 13, 15>;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book book) {
        const unsigned entries = b.u16(2 + 2 * octet);
        const Signs signs = Signs::of_eight(b.u8(74 + octet));
        const unsigned ninth = b.u8(66 + (octet >> 2)) >> 2 * (octet & 3);
        return Magnitudes::look_up(book[(entries & 255) | (ninth & 1) << 8],
                                   book[entries >> 8 | (ninth & 2) << 7], signs.first,
                                   signs.second);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const unsigned scale = b.u8(106 + (octet >> 3)) >> (octet & 4) & 15;
        return {float_of(b.u16(0)) * static_cast<float>(1 + 2 * scale), 0.0f};
    }
};

// Entries of -1, 0, 1, all moved up or down by an eighth: codes are eight times that.
using Iq1Values = Values<-7, 1, 9, -9, -1, 7>;

__device__ inline Octet iq1_octet(unsigned entry, bool down) {
    const unsigned codes = entry + (down ? 0x33333333u : 0u);
    return Iq1Values::look_up(codes, codes >> 16, 0, 0);
}

// f16 d, 32 bytes of entries; for each 32 weights 4 x 3 more bits, a 3-bit scale and the shift.
template <>
struct Codec<IQ1_S> {
    static constexpr int WEIGHTS = 256, BYTES = 50, RUN = 4, BIAS = 0, BOOK = 2048;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book book) {
        const unsigned more = b.u16(34 + 2 * (octet >> 2));
        const unsigned high = more >> 3 * (octet & 3) & 7;
        return iq1_octet(book[b.u8(2 + octet) | high << 8], more >> 15);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const unsigned scale = b.u16(34 + 2 * (octet >> 2)) >> 12 & 7;
        return {float_of(b.u16(0)) * static_cast<float>(1 + 2 * scale) * 0.125f, 0.0f};
    }
};

// 32 bytes of entries, 16 of 3 more bits and the shift for two octets, 16 3-bit scales for 16
// weights in 8 bytes, whose top 4 bits are f16 d.
template <>
struct Codec<IQ1_M> {
    static constexpr int WEIGHTS = 256, BYTES = 56, RUN = 2, BIAS = 0, BOOK = 2048;
    static constexpr bool HAS_MIN = false;
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book book) {
        const unsigned more = b.u8(32 + (octet >> 1)) >> 4 * (octet & 1);
        return iq1_octet(book[b.u8(octet) | (more & 7) << 8], more >> 3 & 1);
    }
    template <class Block>
    __device__ static Scale scale(const Block &b, int octet) {
        const unsigned first = b.u32(48), second = b.u32(52);
        const unsigned d = (first >> 12 & 15) | (first >> 24 & 0xf0) | (second >> 4 & 0xf00) |
                           (second >> 16 & 0xf000);
        const unsigned scale = b.u16(48 + 2 * (octet >> 3)) >> 3 * (octet >> 1 & 3) & 7;
        return {float_of(d) * static_cast<float>(1 + 2 * scale) * 0.125f, 0.0f};
    }
};
