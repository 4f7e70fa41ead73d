// All segments of a pass in one launch: consecutive rows, each segment's of one sequence, or of a
// branch of it, which is read and forgotten. A layer has a table of int64, twelve to a segment, as
// forward/segments.py writes it.
#pragma once

// Of a layer with a running state. The rows go on from what lies in one place and leave what
// follows in another, which may be the same; null: nobody wants it.
struct RunningSegment {
    long long first, count, position;  // row, rows, position of the first
    const float *history, *state;
    float *history_to, *state_to;
    long long unused[5];
};

// A cache's rows, by position.
struct CacheRows {
    unsigned short *keys, *values;
    float *index_keys, *pooled;  // pooled by block of positions
};

// Of a layer with a cache. Rows of positions ahead of the segment lie in one place, its own in
// another, which may be the same.
struct CachedSegment {
    long long first, count, position;  // row, rows, position of the first
    CacheRows ahead, own;
    long long unused;

    // The raw index key of a position.
    __device__ const float *index_key(long long at, long long dim) const {
        return (at < position ? ahead : own).index_keys + at * dim;
    }
    // The key of a block of ratio positions.
    __device__ const float *block_key(long long block, long long ratio, long long dim) const {
        return (block < position / ratio ? ahead : own).pooled + block * dim;
    }
};

static_assert(sizeof(RunningSegment) == 96 && sizeof(CachedSegment) == 96, "twelve words each");
