// Rows of quantized weights in shared memory, decoded to f16 for the tensor cores.
//
// The order of k in a product. A row is cut into spans of 4 * LANE weights; lane t of a quad owns
// weights t * LANE ... of each, and takes eight of them, an octet, per step: step i of a span takes
// octet i of all four lanes, so a step is 32 k. LANE is 64, 32, 16 or 8, the largest that suits the
// type and whose spans divide the row; so a lane decodes a scale once for many weights. A step is
// two products of 16 k: the first four of each octet, then the last four.
#pragma once
#include "codec_grid.cuh"
#include "codec_k.cuh"
#include "codec_small.cuh"
#include "codec_tables.cuh"

// Scales are rounded to f16 after multiplication with this, so that the small ones of small weights
// are not subnormal; sums are divided by it, which is exact.
template <int TYPE>
constexpr float GAIN = TYPE == F16 ? 1.0f : 64.0f;

// Bytes in shared memory at an offset, a multiple of ALIGN, from a place aligned to 16 bytes. Up to
// seven bytes beyond what is asked for may be read, and are ignored.
template <int ALIGN>
struct Staged {
    const unsigned char *base;
    int offset;

    __device__ unsigned u8(int at) const { return base[offset + at]; }
    __device__ unsigned u16(int at) const {
        if constexpr (ALIGN == 1) return u32(at) & 0xffff;
        return *reinterpret_cast<const unsigned short *>(base + offset + at);
    }
    // What is known of `at` modulo 4 is kept out of the sum with the offset, of which little is:
    // the compiler then sees that most reads share their alignment.
    __device__ unsigned u32(int at) const {
        const int rest = at & 3, start = offset + rest, bit = 8 * (start & 3);
        const unsigned *words =
            reinterpret_cast<const unsigned *>(base + (start & ~3) + (at - rest));
        return window(words[0], words[1], bit);
    }
};

// How a type's rows lie in memory and are cut into steps.
template <int TYPE, int LANE>
struct Rows {
    using Type = Codec<TYPE>;
    static constexpr int OCTETS = LANE / 8;
    static constexpr int SPAN = 4 * LANE;
    static constexpr bool IS_FLOAT = Type::WEIGHTS == 1;
    static constexpr int BLOCK_OCTETS = IS_FLOAT ? 1 << 20 : Type::WEIGHTS / 8;
    // Steps after which both a span and a block end.
    static constexpr int STEPS = SPAN > Type::WEIGHTS ? OCTETS : Type::WEIGHTS / 32;

    // Bytes of a row's first k weights, k a multiple of the block.
    __host__ __device__ static constexpr int bytes(int k) {
        return k / Type::WEIGHTS * Type::BYTES;
    }

    // The k of octet step % OCTETS of lane t, counted from the start of step 0.
    __device__ static int k_of(int step, int t) {
        return step / OCTETS * SPAN + (t * LANE | 8 * (step % OCTETS));
    }
};

// The power of two that surely divides where a stage of `bytes` begins in a row aligned to ALIGN.
constexpr int stage_alignment(int align, int bytes) {
    while (bytes % align) align /= 2;
    return align;
}

// A lane's scale and minimum in one row, twice each as f16.
struct RowScale {
    unsigned scale, minimum;
};

// Codes of Q8_0 that begin amid a word: halves of whole words, so that no bits move.
template <class Block>
__device__ inline Octet codes_amid_words(const Block &block, int at) {
    constexpr unsigned signs = 0x80808080u;
    const unsigned a = block.u32(at - 2) ^ signs, b = block.u32(at + 2) ^ signs;
    return {pick(a, ONE_K, 0x4342), pick(b, ONE_K, 0x4140), pick(b, ONE_K, 0x4342),
            pick(block.u32(at + 6) ^ signs, ONE_K, 0x4140)};
}

// The octet of lane t at a step, times the gain. `row` begins at step 0; `step` should be known at
// compile time. Call it for each step in turn with the same `scale`. Type may have other ways to
// make the same codes.
template <int TYPE, int LANE, int ALIGN, class Type = Codec<TYPE>, class Book>
__device__ inline Octet decode(const Staged<ALIGN> &row, int step, int t, Book book,
                               RowScale &scale) {
    using R = Rows<TYPE, LANE>;
    const int octet = R::k_of(step, t) / 8;
    const Staged<ALIGN> block = {row.base, row.offset + octet / R::BLOCK_OCTETS * Type::BYTES};
    const int own = octet % R::BLOCK_OCTETS;
    if constexpr (TYPE == F16) {
        return Type::codes(block, own, book);
    } else if constexpr (R::IS_FLOAT) {
        float w[8];
        Type::floats(block, own, w);
        Octet result;
        for (int i = 0; i < 4; i++)
            result.pair[i] = pair_of(w[2 * i] * GAIN<TYPE>, w[2 * i + 1] * GAIN<TYPE>);
        return result;
    } else {
        if (step % (Type::RUN < R::OCTETS ? Type::RUN : R::OCTETS) == 0) {
            const Scale now = Type::scale(block, own);
            scale.scale = both(now.scale * GAIN<TYPE>);
            if constexpr (Type::HAS_MIN) scale.minimum = both(now.minimum * -GAIN<TYPE>);
        }
        Octet w;
        // Of a lane's two blocks of 34 bytes, the first one's codes begin amid a word.
        if (TYPE == Q8_0 && LANE == 64 && ALIGN % 4 == 0 && step % R::OCTETS < R::OCTETS / 2)
            w = codes_amid_words(block, 2 + 8 * own);
        else
            w = Type::codes(block, own, book);
        for (int i = 0; i < 4; i++) {
            if constexpr (Type::BIAS != 0) w.pair[i] = add2(w.pair[i], MINUS<Type::BIAS>);
            w.pair[i] = Type::HAS_MIN ? fma2(w.pair[i], scale.scale, scale.minimum)
                                      : mul2(w.pair[i], scale.scale);
        }
        return w;
    }
}

// How often the few-row function keeps a type's code book: 16 KiB.
template <int TYPE>
constexpr int BOOK_COPIES = Codec<TYPE>::BOOK ? 4096 / Codec<TYPE>::BOOK : 1;

// Copies the code book of the compilation to shared memory by the block's first threads, all where
// none are named; returns the calling lane's copy. Does not wait for the others.
template <int TYPE, int COPIES>
__device__ inline Book<COPIES> load_book(unsigned *shared, int threads = 0) {
    if constexpr (Codec<TYPE>::BOOK != 0) {
        if (threads == 0) threads = blockDim.x;
        for (int i = threadIdx.x; i < Codec<TYPE>::BOOK * COPIES; i += threads)
            shared[i] = BOOK[i / COPIES];
    }
    return {shared + threadIdx.x % COPIES};
}
