// A warp's part of a tile of matmul_few.cu: rows of one or more slices, decoded from shared memory
// and multiplied by tensor cores.
#pragma once
#include "activations.cuh"
#include "few_work.cuh"
#include "mma.cuh"
#include "wide_book.cuh"

#ifndef SLICES_TOGETHER
#define SLICES_TOGETHER 0  // 1: slices of short tiles are multiplied together
#endif

// A type's code book, several times over: of f16 where there is such a one, else in 16 KiB.
template <int TYPE>
struct FewBook {
    static constexpr bool IS_WIDE = WIDE_COPIES<TYPE> != 0;
    static constexpr int CHUNKS = IS_WIDE ? WIDE_BYTES<TYPE> / 16 : Codec<TYPE>::BOOK ? 1024 : 0;

    __device__ static void load(unsigned *shared, int threads) {
        if constexpr (IS_WIDE)
            load_wide_book<TYPE>(reinterpret_cast<uint2 *>(shared), threads);
        else
            load_book<TYPE, BOOK_COPIES<TYPE>>(shared, threads);
    }
    __device__ static auto of_lane(const unsigned *shared) {
        if constexpr (IS_WIDE)
            return LoadedBook<TYPE>{reinterpret_cast<const uint2 *>(shared) +
                                    threadIdx.x % WIDE_COPIES<TYPE>};
        else
            return Book<BOOK_COPIES<TYPE>>{shared + threadIdx.x % BOOK_COPIES<TYPE>};
    }
};

template <int ROWS>
__device__ inline void multiply_step(float (&sums)[4], const Octet (&w)[ROWS / 8], const uint4 &x) {
    const Octet none = {{0, 0, 0, 0}};
    const Octet &low = w[0], &high = ROWS == 16 ? w[ROWS / 8 - 1] : none;
    multiply(sums, low.pair[0], high.pair[0], low.pair[1], high.pair[1], x.x, x.y);
    multiply(sums, low.pair[2], high.pair[2], low.pair[3], high.pair[3], x.z, x.w);
}

// A step of float32 weights: both operands as the sum of two f16, without the smallest product.
template <int ROWS>
__device__ inline void multiply_split(float (&sums)[4], const Octet (&w)[ROWS / 8],
                                      const Octet (&rest)[ROWS / 8], const uint4 &x,
                                      const uint4 &x_rest) {
    const Octet none = {{0, 0, 0, 0}};
    const Octet &wa = w[0], &wb = ROWS == 16 ? w[ROWS / 8 - 1] : none;
    const Octet &ra = rest[0], &rb = ROWS == 16 ? rest[ROWS / 8 - 1] : none;
    multiply(sums, wa.pair[0], wb.pair[0], wa.pair[1], wb.pair[1], x.x, x.y);
    multiply(sums, wa.pair[0], wb.pair[0], wa.pair[1], wb.pair[1], x_rest.x, x_rest.y);
    multiply(sums, ra.pair[0], rb.pair[0], ra.pair[1], rb.pair[1], x.x, x.y);
    multiply(sums, wa.pair[2], wb.pair[2], wa.pair[3], wb.pair[3], x.z, x.w);
    multiply(sums, wa.pair[2], wb.pair[2], wa.pair[3], wb.pair[3], x_rest.z, x_rest.w);
    multiply(sums, ra.pair[2], rb.pair[2], ra.pair[3], rb.pair[3], x.z, x.w);
}

// What f16 leaves of eight float32 weights times the gain.
template <int ALIGN>
__device__ inline Octet rest_of(const Staged<ALIGN> &row, int octet, const Octet &high) {
    float w[8];
    Codec<F32>::floats(row, octet, w);
    Octet rest;
#pragma unroll
    for (int i = 0; i < 4; i++)
        rest.pair[i] = pair_of(w[2 * i] * GAIN<F32> - float_of(high.pair[i]),
                               w[2 * i + 1] * GAIN<F32> - float_of(high.pair[i] >> 16));
    return rest;
}

// What a ring's slot holds: the kind of its matrix, the stage's place (tile), and where each of its
// spans begins behind the lines of memory that were copied.
struct Held {
    int kind, before[16];
};

// Where row `row` of a stage begins, but for its span's own beginning.
__device__ inline int row_place(const Cut &cut, int row) {
    const int span = row >> cut.span_shift;
    return span * cut.chunks * 16 + (row - (span << cut.span_shift)) * cut.row;
}

// All steps of a slice whose rows and activations lie in shared memory. The loop is short: a block
// goes round few times, and its code is as cold as its weights.
template <int ROWS, class Kind, class Book>
__device__ inline void multiply_slice(float (&sums)[4], const Staged<Kind::ALIGN> (&rows)[ROWS / 8],
                                      const uint4 *x, int rest, int steps, int count, Book book) {
    using R = typename Kind::R;
    constexpr int TYPE = Kind::TYPE, LANE = Kind::LANE, ALIGN = Kind::ALIGN;
    const int t = threadIdx.x & 3;
#pragma unroll 1
    for (int first = 0; first < steps; first += R::STEPS) {
        RowScale scale[ROWS / 8];
        Staged<ALIGN> row[ROWS / 8];
#pragma unroll
        for (int half = 0; half < ROWS / 8; half++)
            row[half] = {rows[half].base, rows[half].offset + R::bytes(32 * first)};
#pragma unroll
        for (int i = 0; i < R::STEPS; i++) {
            Octet w[ROWS / 8];
            const uint4 *own_x = x + (first + i) * count * 4;
            const uint4 activations = *own_x;
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++)
                w[half] =
                    decode<TYPE, LANE, ALIGN, WideCodec<TYPE>>(row[half], i, t, book, scale[half]);
            if constexpr (TYPE == F32) {
                Octet rests[ROWS / 8];
#pragma unroll
                for (int half = 0; half < ROWS / 8; half++)
                    rests[half] = rest_of(row[half], R::k_of(i, t) / 8, w[half]);
                multiply_split<ROWS>(sums, w, rests, activations, own_x[rest]);
            } else {
                multiply_step<ROWS>(sums, w, activations);
            }
        }
    }
}

// Partial sums are [slice][row][column]; the columns of a lane are 2t and 2t + 1.
template <int ROWS>
__device__ inline void store_sums(float *to, const float (&sums)[4], int count) {
    const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const int column = 2 * t + (i & 1);
        if (column < count) to[(8 * (i / 2) + g) * count + column] = sums[i];
    }
}

// What a lane has: a row of a tile, a slice and a column of x among those of its warp.
struct Share {
    int slices = 1, row, slice = 0, column = 0;

    __device__ Share(const Plan &plan, int cols, int count) : row((threadIdx.x & 31) / 4) {
        if (SLICES_TOGETHER) {
            const int shift = together_shift(plan, cols, count);
            slices = 1 << shift;
            column = min(row, slices - 1);
            slice = row >> 3 - shift;
            row -= slice << 3 - shift;
        }
    }
};

// All slices of a stage that are the calling warp's.
template <int ROWS, class Own, class Places, class Shared, class Book>
__device__ inline void multiply_stage(const Shared &shared, const Plan &plan, const Cut &cut,
                                      const Team &team, int cols, int count, const Held &held,
                                      const unsigned char *slot, int part, float *sums, Book book) {
    constexpr int own = Places::of(Own::LANE);
    constexpr int align = stage_alignment(Own::ALIGN, Own::R::bytes(256));
    const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const int begin = part * plan.part_slices, end = min(begin + plan.part_slices, plan.slices);
    const Share share(plan, cols, count);
#pragma unroll 1
    for (int first = begin + team.warp * share.slices; first < end;
         first += team.warps * share.slices) {
        const int slice = min(first + share.slice, end - 1);
        Staged<Own::ALIGN> rows[ROWS / 8];
#pragma unroll
        for (int half = 0; half < ROWS / 8; half++) {
            // Rows that the last tile lacks are made of what was there before, and left out.
            const int row = min(8 * half + share.row, plan.tile_rows - 1);
            const int offset = held.before[row >> cut.span_shift] + row_place(cut, row) +
                               (slice - begin) * cut.slice;
            rows[half] = {slot, offset / align * align};
        }
        float part_sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const int first_k = min(first + share.column, end - 1) * plan.slice;
        const int length = min(plan.slice, cols - first_k);
        const int at = (first_k / 32 * count + min(g, count - 1)) * 4 + t;
        multiply_slice<ROWS, Own>(part_sums, rows, shared.planes + own * shared.plane + at,
                                  (Places::REST - own) * shared.plane, (length + 31) / 32, count,
                                  book);
        if (share.slices == 1)
            store_sums<ROWS>(sums + slice * ROWS * count, part_sums, count);
        else if (t == share.slice / 2 && first + share.slice < end)
            sums[slice * ROWS + share.row] = share.slice % 2 ? part_sums[1] : part_sums[0];
    }
}
