// Tiles of weight rows brought to shared memory ahead of their use.
//
// A stage is ROWS rows of a matrix, whole or some slices of them. Rows lie one after the other in
// memory, so a stage of whole rows is copied as spans of several rows, one contiguous run each, and
// in whole lines of memory: requests that are neither cut nor repeated, which memory behind a link
// needs. Spans begin 16 * chunks bytes apart in shared memory, chosen so that eight rows begin in
// different banks.
#pragma once
#include "bulk.cuh"
#include "mma.cuh"
#include "read_once.cuh"

constexpr int LINE_BYTES = 128;

#ifndef MIXED_STREAMS
#define MIXED_STREAMS 0  // else the matrix has rows of so many streams, and a tile a span of each
#endif

// How a matrix's rows are cut, in bytes unless said.
struct Cut {
    int row, slice;          // a row; a slice of one
    int part_slices, parts;  // slices of a stage; stages of a row
    int span_shift, chunks;  // 1 << span_shift rows; 16 bytes from one span in shared memory on
    int fill;                // zeros after a row, up to the end of a step of float weights
};

// Rows of a matrix; part: which of the stages of these rows.
struct Stage {
    const unsigned char *data;
    int matrix_rows, first_row, rows, part;
};

// The first row of span `index` of a stage.
__device__ inline int span_row(const Cut &cut, const Stage &stage, int index) {
    constexpr int streams = MIXED_STREAMS ? MIXED_STREAMS : 1;
    return MIXED_STREAMS ? stage.first_row / streams + index * (stage.matrix_rows / streams)
                         : stage.first_row + (index << cut.span_shift);
}

// Where span `index` of a stage begins in its matrix.
__device__ inline unsigned span_offset(const Cut &cut, const Stage &stage, int index) {
    return static_cast<unsigned>(span_row(cut, stage, index)) * cut.row +
           stage.part * cut.part_slices * cut.slice;
}

// Bytes copied before that: from the beginning of its line, but not from before the matrix's first
// 16 bytes.
__device__ inline int before_span(const Cut &cut, const Stage &stage, int index) {
    const unsigned first = static_cast<unsigned>(reinterpret_cast<unsigned long long>(stage.data));
    const unsigned offset = span_offset(cut, stage, index);
    return static_cast<int>(min((first + offset) % LINE_BYTES, first % 16 + offset));
}

struct Span {
    const unsigned char *from;  // a multiple of 16
    int nbytes, tail, fill;     // whole 16 bytes; bytes after them; zeros after those
};

// Span `index` of a stage; nothing where it has fewer.
__device__ inline Span span_of(const Cut &cut, const Stage &stage, int index) {
    const int rows = min(1 << cut.span_shift, stage.rows - (index << cut.span_shift));
    if (rows <= 0) return {stage.data, 0, 0, 0};
    const int before = before_span(cut, stage, index);
    const unsigned char *from = stage.data + span_offset(cut, stage, index) - before;
    const int part = stage.part * cut.part_slices * cut.slice;
    const int length =
        before + (rows - 1) * cut.row + min(cut.part_slices * cut.slice, cut.row - part);
    const int fill = stage.part + 1 == cut.parts ? cut.fill : 0;
    // It ends with its line, but not in the zeros, nor behind the matrix.
    const int over =
        static_cast<int>(-(reinterpret_cast<unsigned long long>(from) + length) & (LINE_BYTES - 1));
    const long long left =
        stage.data + static_cast<long long>(stage.matrix_rows) * cut.row - (from + length);
    const int end = length + (fill ? 0 : static_cast<int>(min(static_cast<long long>(over), left)));
    return {from, end / 16 * 16, max(0, length - end / 16 * 16), fill};
}

__device__ inline void finish_span(unsigned char *to, const Span &span) {
#pragma unroll 1
    for (int i = 0; i < span.tail; i++) to[span.nbytes + i] = span.from[span.nbytes + i];
#pragma unroll 1
    for (int i = 0; i < span.fill; i++) to[span.nbytes + span.tail + i] = 0;
}

#if BULK
// Starts the copy of a span; arrives at the gate.
__device__ inline void start_span(unsigned char *slot, const Span &span, unsigned long long *gate) {
    finish_span(slot, span);
    arrive_expecting(gate, span.nbytes);
    if (span.nbytes) copy_bulk_once(slot, span.from, span.nbytes, gate);
}
#else
// Starts the copies of a stage, by so many threads together.
template <int ROWS>
__device__ inline void start_stage(unsigned char *slot, const Cut &cut, const Stage &stage,
                                   int thread, int threads) {
    for (int index = 0; index << cut.span_shift < ROWS; index++, slot += cut.chunks * 16) {
        const Span span = span_of(cut, stage, index);
#pragma unroll 4
        for (int at = 16 * thread; at < span.nbytes; at += 16 * threads)
            copy_async(slot + at, span.from + at);
        if (thread == 0) finish_span(slot, span);
    }
}
#endif
