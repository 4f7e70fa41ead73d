// Which tiles of a product with many activation rows a block makes: of one matrix, or of experts.
#pragma once

constexpr int ROWS = 128, TOKENS = 128;  // most of a tile

// One tile: matrix, first row, and the tokens, which are rows `first ...` of out.
struct Tile {
    const unsigned char *matrix;
    int first_row, first, count;
};

// How many of `tiles` a block makes that takes every gridDim.x-th, from blockIdx.x on.
__device__ inline int share_of(int tiles) {
    const int first = blockIdx.x, step = gridDim.x;
    return first < tiles ? (tiles - first + step - 1) / step : 0;
}

// The tiles of a block, of about equally many tokens; token tiles innermost.
struct DenseTiles {
    static constexpr bool IS_WHOLE = true;  // else one slice of the sums
    const unsigned char *matrix;
    int tokens, each, token_tiles, count;

    __device__ Tile tile(int i) const {
        const int all = blockIdx.x + i * gridDim.x, first = all % token_tiles * each;
        return {matrix, all / token_tiles * ROWS, first, min(each, tokens - first)};
    }
    __device__ unsigned row_of(int pair) const { return pair; }
};

// The one tile of a block, among those of a matrix; token tiles innermost.
struct OneTile {
    static constexpr bool IS_WHOLE = true;
    static constexpr int count = 1;
    const unsigned char *matrix;
    int tokens, each, token_tiles, index;

    __device__ Tile tile(int) const {
        const int first = index % token_tiles * each;
        return {matrix, index / token_tiles * ROWS, first, min(each, tokens - first)};
    }
    __device__ unsigned row_of(int pair) const { return pair; }
};

// The same, of one slice.
struct TileSlice : OneTile {
    static constexpr bool IS_WHOLE = false;
};

// The least multiple of eight that lets so many tiles hold the tokens.
__device__ inline int tokens_each(int tokens, int tiles) {
    return ((tokens + tiles - 1) / tiles + 7) / 8 * 8;
}

// Which token tiles, of up to MOST tokens, are which expert's, in shared memory: as few as there
// can be, of equal size.
template <int MOST>
struct ExpertTiles {
    int *start;              // [experts + 1], as the argument
    unsigned short *prefix;  // [experts + 1]: token tiles of the experts before
    int count;

    // By all threads of the block; ends with a barrier. scratch: a word for each warp.
    __device__ void load(const int *expert_start, int *scratch) const {
        const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
        if (threadIdx.x == 0) prefix[0] = 0, start[0] = expert_start[0];
        int done = 0;
        for (int first = 0; first < count; first += blockDim.x) {
            const int e = first + threadIdx.x;
            const int end = e < count ? expert_start[e + 1] : 0;
            int sum = e < count ? (end - expert_start[e] + MOST - 1) / MOST : 0;
            for (int distance = 1; distance < 32; distance *= 2) {
                const int below = __shfl_up_sync(0xffffffffu, sum, distance);
                if (lane >= distance) sum += below;
            }
            if (lane == 31) scratch[warp] = sum;
            __syncthreads();
            int before = done;
            for (int w = 0; w < warp; w++) before += scratch[w];
            if (e < count) prefix[e + 1] = before + sum, start[e + 1] = end;
            for (int w = 0; w < warps; w++) done += scratch[w];
            __syncthreads();
        }
    }

    // The last one whose tiles begin at or before a token tile; by whole warps.
    __device__ int of_tile(int token_tile) const {
        const int lane = threadIdx.x & 31;
        int low = 0, length = count;
        while (length > 1) {
            const int each = (length + 31) / 32, at = lane * each;
            const bool begins = at < length && prefix[low + at] <= token_tile;
            const int part = __popc(__ballot_sync(0xffffffffu, begins)) - 1;
            low += part * each;
            length = min(each, length - part * each);
        }
        return low;
    }
};

using Experts = ExpertTiles<TOKENS>;

// The tiles of a block, weight rows innermost.
struct GroupedTiles {
    static constexpr bool IS_WHOLE = true;
    Experts experts;
    const long long *blobs;
    const int *rows_of;
    long long offset;
    int row_tiles, count;

    __device__ Tile tile(int i) const {
        const int all = blockIdx.x + i * gridDim.x, token_tile = all / row_tiles;
        const int e = experts.of_tile(token_tile),
                  tiles = experts.prefix[e + 1] - experts.prefix[e];
        const int pairs = experts.start[e + 1] - experts.start[e];
        const int each = tokens_each(pairs, tiles);
        const int first = (token_tile - experts.prefix[e]) * each;
        return {reinterpret_cast<const unsigned char *>(blobs[e]) + offset, all % row_tiles * ROWS,
                experts.start[e] + first, min(each, pairs - first)};
    }
    __device__ unsigned row_of(int pair) const { return rows_of[pair]; }
};
