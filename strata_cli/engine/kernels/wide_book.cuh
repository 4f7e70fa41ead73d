// Codes of some types in fewer instructions than their codecs take.
//
// Code books whose entries are f16 already, for the types whose entries hold four weights. An entry
// is 8 bytes, so a half of a warp reads in one go; a lane reads a copy of its own, so that few meet
// in a bank. And tables of sixteen values that are looked up for eight weights at once.
#pragma once
#include "weights.cuh"

// How often the book is kept: 32 KiB in all; 0: the type has none.
template <int TYPE>
constexpr int WIDE_COPIES = TYPE == IQ3_XXS ? 16
                            : TYPE == IQ3_S ? 8
                                            : 0;

template <int TYPE>
constexpr int WIDE_BYTES = 8 * WIDE_COPIES<TYPE> * Codec<TYPE>::BOOK;

template <int COPIES>
struct WideBook {
    const uint2 *copy;

    __device__ uint2 operator[](unsigned i) const { return copy[i * COPIES]; }
};

template <int COPIES>
struct BookOf {
    using Type = WideBook<COPIES>;
};
template <>
struct BookOf<0> {
    using Type = Book<1>;
};
template <int TYPE>
using LoadedBook = typename BookOf<WIDE_COPIES<TYPE>>::Type;

// As load_book.
template <int TYPE>
__device__ inline WideBook<WIDE_COPIES<TYPE>> load_wide_book(uint2 *shared, int threads = 0) {
    constexpr int copies = WIDE_COPIES<TYPE>;
    if (threads == 0) threads = blockDim.x;
    for (int i = threadIdx.x; i < Codec<TYPE>::BOOK; i += threads) {
        const Octet w = Codec<TYPE>::Magnitudes::look_up(BOOK[i], 0, 0, 0);
#pragma unroll
        for (int j = 0; j < copies; j++)  // threads begin at different copies: in different banks
            shared[i * copies + (j + threadIdx.x) % copies] = make_uint2(w.pair[0], w.pair[1]);
    }
    return {shared + threadIdx.x % copies};
}

// The sign bits of weights 2i and 2i + 1 of eight, moved to where two f16 have theirs.
__device__ inline unsigned with_signs(unsigned pair, unsigned signs, int i) {
    // The two copies of the eight bits do not overlap.
    const unsigned moved = signs * ((1u << (15 - 2 * i)) + (1u << (30 - 2 * i)));
    return (moved & 0x80008000u) ^ pair;
}

// Entries and signs of an octet: the codes as Codec<TYPE>::codes gives them.
template <class Block, class Book>
__device__ inline Octet wide_codes(const Block &b, int octet, Book book, Codec<IQ3_XXS>) {
    const unsigned entries = b.u16(2 + 2 * octet);
    const unsigned seven = b.u32(66 + 4 * (octet >> 2)) >> 7 * (octet & 3) & 127;
    const unsigned signs = seven | (__popc(seven) & 1) << 7;
    const uint2 first = book[entries & 255], second = book[entries >> 8];
    return {with_signs(first.x, signs, 0), with_signs(first.y, signs, 1),
            with_signs(second.x, signs, 2), with_signs(second.y, signs, 3)};
}

template <class Block, class Book>
__device__ inline Octet wide_codes(const Block &b, int octet, Book book, Codec<IQ3_S>) {
    const unsigned entries = b.u16(2 + 2 * octet), signs = b.u8(74 + octet);
    const unsigned ninth = b.u8(66 + (octet >> 2)) >> 2 * (octet & 3);
    const uint2 first = book[(entries & 255) | (ninth & 1) << 8];
    const uint2 second = book[entries >> 8 | (ninth & 2) << 7];
    return {with_signs(first.x, signs, 0), with_signs(first.y, signs, 1),
            with_signs(second.x, signs, 2), with_signs(second.y, signs, 3)};
}

// Eight codes of one table: byte i of both words holds a code in the half that UPPER tells.
template <bool UPPER>
__device__ inline Octet look_up_eight(Sixteen table, unsigned w0, unsigned w1) {
    // Digits 2i and 2i + 1 are the codes of byte i of w0 and of w1.
    const unsigned codes = UPPER ? (w0 >> 4 & 0x0f0f0f0fu) | (w1 & 0xf0f0f0f0u)
                                 : (w0 & 0x0f0f0f0fu) | (w1 << 4 & 0xf0f0f0f0u);
    const unsigned low = codes & 0x77777777u, which = (codes >> 1 & 0x44444444u) | 0x32103210u;
    const unsigned first = table.look_up(low, which);
    const unsigned second = table.look_up(low >> 16, which >> 16);
    return {pick(first, ONE_K, 0x4240), pick(second, ONE_K, 0x4240), pick(first, ONE_K, 0x4341),
            pick(second, ONE_K, 0x4341)};
}

template <class Block>
__device__ inline Octet iq4_eight(const Block &b, int at, int octet) {
    const unsigned w0 = b.u32(at + 8 * (octet & 1)), w1 = b.u32(at + 8 * (octet & 1) + 4);
    return octet >> 1 ? look_up_eight<true>(iq4_values(), w0, w1)
                      : look_up_eight<false>(iq4_values(), w0, w1);
}

template <class Block, class Book>
__device__ inline Octet wide_codes(const Block &b, int octet, Book, Codec<IQ4_NL>) {
    return iq4_eight(b, 2, octet);
}

template <class Block, class Book>
__device__ inline Octet wide_codes(const Block &b, int octet, Book, Codec<IQ4_XS>) {
    return iq4_eight(b, 8 + 16 * (octet >> 2), octet & 3);
}

// The codec with such codes, for `decode`.
template <int TYPE>
struct WideCodec : Codec<TYPE> {
    template <class Block, class Book>
    __device__ static Octet codes(const Block &b, int octet, Book book) {
        if constexpr (WIDE_COPIES<TYPE> != 0 || TYPE == IQ4_NL || TYPE == IQ4_XS)
            return wide_codes(b, octet, book, Codec<TYPE>());
        else
            return Codec<TYPE>::codes(b, octet, book);
    }
};

// The book that a type is decoded with here, wide where it has one, and 4-byte words that it takes.
template <int TYPE>
constexpr int BOOK_WORDS = WIDE_COPIES<TYPE> ? WIDE_BYTES<TYPE> / 4 : Codec<TYPE>::BOOK;

template <int TYPE>
__device__ inline auto load_any_book(unsigned *shared) {
    if constexpr (WIDE_COPIES<TYPE> != 0)
        return load_wide_book<TYPE>(reinterpret_cast<uint2 *>(shared));
    else
        return load_book<TYPE, 1>(shared);
}
