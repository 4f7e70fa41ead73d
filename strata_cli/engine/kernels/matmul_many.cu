// Products of quantized weights with many activation rows: bound by the tensor cores, for prompts.
//   x [T,K] f16 (as round_rows leaves it), N rows of K weights -> out [T,N] f32
//   2 * T*N*K floating-point operations over the tensor cores' rate; a block reads its weights once
//   and decodes them once per TOKEN_WARPS.
//
// A block makes a tile of 32 * ROW_WARPS weight rows and 64 * TOKEN_WARPS tokens. A warp decodes
// its own 32 rows straight into the registers that the tensor cores read, and multiplies them with
// 64 tokens that lie in shared memory. Raw rows and activations arrive by asynchronous copies, a
// few stages of 128 k ahead. Each sum is made of the same operations in the same order as in
// matmul_few.cu: slices from zero, totals in ascending order.
#include "mma.cuh"
#include "overlap.cuh"
#include "weights.cuh"

constexpr int STAGE = 128;        // k per stage of activations: four steps
constexpr int LANE_PITCH = 80;    // bytes of a lane's four octets, and 16 so that banks differ
constexpr int TOKEN_PITCH = 320;  // bytes of a token in a stage

// What all tiles of a launch share.
struct Product {
    const unsigned short *activations;
    float *out;
    int rows, cols, slice;
};

// One tile: matrix, first row, and the tokens, which are rows `first ...` of out.
struct Tile {
    const unsigned char *matrix;
    int first_row, first, count;
};

// WHOLE: tokens that a tile lacks are multiplied too, and not stored.
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS, int STAGES, bool WHOLE>
struct Many {
    using R = Rows<TYPE, LANE>;
    static constexpr int THREADS = 32 * ROW_WARPS * TOKEN_WARPS;
    static constexpr int ROWS = 32 * ROW_WARPS, TOKENS = 64 * TOKEN_WARPS;
    static constexpr int RAW = R::STEPS == 8 ? 256 : 128;  // k per stage of raw rows
    static constexpr int PER_RAW = RAW / STAGE, RAW_STAGES = PER_RAW == 2 ? 2 : STAGES;
    static constexpr int RAW_BYTES = R::bytes(RAW);
    // A raw stage is copied with its first stage of activations, over one that must be used up.
    static_assert(STAGES >= 2 && STAGES <= 1 + (RAW_STAGES - 1) * PER_RAW, "too many stages");
    // Rows begin anywhere in their first 16 bytes, as the alignment of rows and stages allows.
    static constexpr int STEP_ALIGN = stage_alignment(ALIGN, RAW_BYTES);
    static constexpr int CHUNKS = (RAW_BYTES + 16 - STEP_ALIGN + 15) / 16;
    static constexpr int PITCH = 16 * (CHUNKS | 1);
    // Behind the last row lies what a word that begins in it may reach: else a stage under way.
    static constexpr int RAW_STAGE_BYTES = ROWS * PITCH + 16, X_STAGE_BYTES = TOKENS * TOKEN_PITCH;
    static constexpr bool FULL =
        !R::IS_FLOAT && 4 * LANE >= STAGE;  // every stage lies within the row

    const Product product;
    unsigned char *raw;
    unsigned char *x;
    unsigned *sources;  // where the row of x of each token of the tile begins, in 16 bytes
    Book<1> book;

    __device__ Many(const Product &all, unsigned char *shared)
        : product(all),
          raw(shared),
          x(raw + RAW_STAGES * RAW_STAGE_BYTES),
          sources(reinterpret_cast<unsigned *>(x + STAGES * X_STAGE_BYTES)),
          book(load_book<TYPE, 1>(sources + TOKENS)) {}

    // Every thread calls it for its tokens of the next tile.
    __device__ void set_source(int token, int row) const {
        sources[token] = row * static_cast<unsigned>(product.cols / 8);
    }

    __device__ const unsigned char *row_at(const Tile &tile, int row, int raw_stage) const {
        const long long n = min(tile.first_row + row, product.rows - 1);
        return tile.matrix + n * R::bytes(product.cols) + raw_stage * RAW_BYTES;
    }

    __device__ static int phase_of(const unsigned char *row) {
        if (STEP_ALIGN == 16) return 0;
        const int phase = static_cast<int>(reinterpret_cast<unsigned long long>(row) & 15);
        return phase / STEP_ALIGN * STEP_ALIGN;
    }

    __device__ static int raw_slot(int stage, int slot) {
        return PER_RAW == 2 ? stage / 2 % 2 : slot;
    }

    // Four threads copy a row together, 64 bytes at a time.
    __device__ void copy_raw(const Tile &tile, int raw_stage, int slot) const {
        const int first = 16 * (threadIdx.x % 4);
#pragma unroll
        for (int pass = 0; pass < 4 * ROWS / THREADS; pass++) {
            const int row = threadIdx.x / 4 + THREADS / 4 * pass;
            const unsigned char *from = row_at(tile, row, raw_stage);
            const int phase = phase_of(from);
            const int length =
                FULL ? RAW_BYTES : R::bytes(min(RAW, product.cols - raw_stage * RAW));
            from += first - phase;
            unsigned char *to = raw + slot * RAW_STAGE_BYTES + row * PITCH + first;
#pragma unroll
            for (int at = 0; at < 16 * CHUNKS; at += 64) {
                if (FULL && (at + 64 <= RAW_BYTES || (STEP_ALIGN == 16 && first + at < RAW_BYTES)))
                    copy_async(to + at, from + at);
                else if (first + at < 16 * CHUNKS)
                    copy_async(to + at, from + at, max(0, min(16, phase + length - first - at)));
            }
        }
    }

    __device__ void copy_x(int stage, int slot) const {
        const int octet = threadIdx.x % 16, t = octet / 4, step = octet % 4;
        const int k = stage / PER_RAW * RAW + R::k_of(stage % PER_RAW * 4 + step, t);
        const int nbytes = FULL ? 16 : max(0, min(16, 2 * (product.cols - k)));
        const uint4 *from = reinterpret_cast<const uint4 *>(product.activations + k);
        unsigned char *to = x + slot * X_STAGE_BYTES + t * LANE_PITCH + 16 * step;
#pragma unroll
        for (int i = 0; i < 16 * TOKENS / THREADS; i++) {
            const int token = threadIdx.x / 16 + THREADS / 16 * i;
            if (FULL)
                copy_async(to + token * TOKEN_PITCH, from + sources[token]);
            else
                copy_async(to + token * TOKEN_PITCH, from + sources[token], nbytes);
        }
    }

    __device__ void copy_stage(const Tile &tile, int stage, int stages, int slot) const {
        if (stage < stages) {
            copy_x(stage, slot);
            if (stage % PER_RAW == 0) copy_raw(tile, stage / PER_RAW, raw_slot(stage, slot));
        }
        commit_copies();
    }

    // Four steps, FIRST ... of their raw stage.
    template <int FIRST>
    __device__ void multiply_stage(float (&sums)[2][8][4], RowScale (&scale)[2][2],
                                   const Tile &tile, int stage, int slot, int tokens) const {
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
        const int row_warp = threadIdx.x / 32 % ROW_WARPS;
        const int token_warp = threadIdx.x / 32 / ROW_WARPS;
        const unsigned char *own_raw =
            raw + raw_slot(stage, slot) * RAW_STAGE_BYTES + (32 * row_warp + g) * PITCH;
        const unsigned char *own_x =
            x + slot * X_STAGE_BYTES + (64 * token_warp + g) * TOKEN_PITCH + t * LANE_PITCH;
        int phase[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++)
            phase[i / 2][i % 2] =
                phase_of(row_at(tile, 32 * row_warp + 8 * i + g, stage / PER_RAW));
#pragma unroll
        for (int step = 0; step < 4; step++) {
            if (LANE < 32 && stage * STAGE + 32 * step >= product.cols) break;
            uint4 activations[8];
#pragma unroll
            for (int n = 0; n < 8; n++)
                activations[n] =
                    *reinterpret_cast<const uint4 *>(own_x + 8 * n * TOKEN_PITCH + 16 * step);
            Octet w[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i / 2][i % 2] =
                    decode<TYPE, LANE, STEP_ALIGN>({own_raw + 8 * i * PITCH, phase[i / 2][i % 2]},
                                                   FIRST + step, t, book, scale[i / 2][i % 2]);
            multiply_step(sums, w, activations, tokens);
        }
    }

    // The two products that a sum gets in a step are kept apart: the second waits for the first.
    __device__ static void multiply_step(float (&sums)[2][8][4], const Octet (&w)[2][2],
                                         const uint4 (&x)[8], int tokens) {
        constexpr int together = WHOLE ? 8 : 1;
#pragma unroll
        for (int n = 0; n < 8; n += together) {
            if (!WHOLE && 8 * n >= tokens) break;
#pragma unroll
            for (int i = n; i < n + together; i++) {
                multiply_half<0>(sums[0][i], w[0], x[i].x, x[i].y);
                multiply_half<0>(sums[1][i], w[1], x[i].x, x[i].y);
            }
#pragma unroll
            for (int i = n; i < n + together; i++) {
                multiply_half<2>(sums[0][i], w[0], x[i].z, x[i].w);
                multiply_half<2>(sums[1][i], w[1], x[i].z, x[i].w);
            }
        }
    }

    template <int PAIR>
    __device__ static void multiply_half(float (&sums)[4], const Octet (&w)[2], unsigned x0,
                                         unsigned x1) {
        multiply(sums, w[0].pair[PAIR], w[1].pair[PAIR], w[0].pair[PAIR + 1], w[1].pair[PAIR + 1],
                 x0, x1);
    }

    __device__ int num_stages() const { return (product.cols + STAGE - 1) / STAGE; }

    __device__ void run(const Tile &tile) const { run<true>(tile, 0, num_stages()); }

    // Stages begin .. stages, the first of a slice; IS_WHOLE: they are all, and the gain goes out.
    template <bool IS_WHOLE>
    __device__ void run(const Tile &tile, int begin, int stages) const {
        const int token_warp = threadIdx.x / 32 / ROW_WARPS;
        // The shuffle tells the compiler that a warp agrees on it.
        const int tokens = __shfl_sync(0xffffffffu, tile.count - 64 * token_warp, 0);
        float sums[2][8][4] = {}, totals[2][8][4] = {};
        RowScale scale[2][2];
        for (int i = 0; i < STAGES - 1; i++) copy_stage(tile, begin + i, stages, i);
        int slot = 0, left_of_slice = product.slice;
        for (int stage = begin; stage < stages; stage++) {
            wait_copies<STAGES - 2>();
            __syncthreads();
            copy_stage(tile, stage + STAGES - 1, stages, slot ? slot - 1 : STAGES - 1);
            if (PER_RAW == 2 && stage % 2)
                multiply_stage<PER_RAW == 2 ? 4 : 0>(sums, scale, tile, stage, slot, tokens);
            else
                multiply_stage<0>(sums, scale, tile, stage, slot, tokens);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
            left_of_slice -= STAGE;
            if (left_of_slice == 0 || stage + 1 == stages) {
                left_of_slice = product.slice;
#pragma unroll
                for (int i = 0; i < 64; i++) {
                    totals[i / 32][i / 4 % 8][i % 4] += sums[i / 32][i / 4 % 8][i % 4];
                    sums[i / 32][i / 4 % 8][i % 4] = 0.0f;
                }
            }
        }
        store<IS_WHOLE>(totals, tile, tokens);
        __syncthreads();
    }

    template <bool IS_WHOLE>
    __device__ void store(const float (&totals)[2][8][4], const Tile &tile, int tokens) const {
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
        const int row = tile.first_row + 32 * (threadIdx.x / 32 % ROW_WARPS) + g;
        const int token_warp = threadIdx.x / 32 / ROW_WARPS;
        float *to = product.out + row +
                    static_cast<long long>(tile.first + 64 * token_warp + 2 * t) * product.rows;
#pragma unroll
        for (int i = 0; i < 64; i++) {
            const int m = i / 32, n = i / 4 % 8, half = i / 2 % 2, token = 8 * n + i % 2;
            if (row + 16 * m + 8 * half < product.rows && 2 * t + token < tokens)
                to[static_cast<long long>(token) * product.rows + 16 * m + 8 * half] =
                    IS_WHOLE ? totals[m][n][i % 4] / GAIN<TYPE> : totals[m][n][i % 4];
        }
    }
};

// The tile of a block of a dense product; its tokens' rows are known afterwards.
template <class Block>
__device__ inline Tile dense_tile(const Block &block, const unsigned char *data, int num_tokens) {
    const int token_tiles = (num_tokens + Block::TOKENS - 1) / Block::TOKENS;
    const int first = blockIdx.x % token_tiles * Block::TOKENS;
    for (int i = threadIdx.x; i < Block::TOKENS; i += Block::THREADS)
        block.set_source(i, min(first + i, num_tokens - 1));
    __syncthreads();
    return {data, static_cast<int>(blockIdx.x) / token_tiles * Block::ROWS, first,
            min(Block::TOKENS, num_tokens - first)};
}

// matmul_many: grid (token tiles * row tiles), token tiles innermost
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS, int STAGES>
__global__ void __launch_bounds__(32 * ROW_WARPS * TOKEN_WARPS)
    matmul_many(const float *, const unsigned short *activations, const unsigned char *data,
                float *out, long long, long long tokens, long long rows, long long cols,
                long long slice) {
    using Block = Many<TYPE, LANE, ALIGN, ROW_WARPS, TOKEN_WARPS, STAGES, true>;
    extern __shared__ uint4 shared[];
    const Product product = {activations, out, static_cast<int>(rows), static_cast<int>(cols),
                             static_cast<int>(slice)};
    const Block block(product, reinterpret_cast<unsigned char *>(shared));
    start_early();
    block.run(dense_tile(block, data, static_cast<int>(tokens)));
}

// matmul_many_slices: as matmul_many, but a block makes one slice of a tile's sums, where tiles are
// few and rows long; join_slices adds them up
//   -> sums [slices,T,N] f32; grid (token tiles * row tiles, slices)
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS, int STAGES>
__global__ void __launch_bounds__(32 * ROW_WARPS * TOKEN_WARPS)
    matmul_many_slices(const unsigned short *activations, const unsigned char *data, float *sums,
                       long long tokens, long long rows, long long cols, long long slice) {
    using Block = Many<TYPE, LANE, ALIGN, ROW_WARPS, TOKEN_WARPS, STAGES, true>;
    extern __shared__ uint4 shared[];
    const Product product = {activations, sums + blockIdx.y * tokens * rows, static_cast<int>(rows),
                             static_cast<int>(cols), static_cast<int>(slice)};
    const Block block(product, reinterpret_cast<unsigned char *>(shared));
    start_early();
    const Tile tile = dense_tile(block, data, static_cast<int>(tokens));
    const int stages = static_cast<int>(slice) / STAGE, first = blockIdx.y * stages;
    block.template run<false>(tile, first, min(first + stages, block.num_stages()));
}

// join_slices: out = 0 + slice 0 + slice 1 + ..., as one block would have added them
//   sums [slices,T*N] f32 -> out [T*N] f32; grid (T*N / block), reads 4 * slices*T*N bytes
template <int TYPE>
__global__ void join_slices(const float *sums, float *out, long long slices, long long values) {
    start_early();
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= values) return;
    float total = 0.0f;
#pragma unroll 4
    for (long long slice = 0; slice < slices; slice++) total += sums[slice * values + i];
    out[i] = total / GAIN<TYPE>;
}

// Inclusive prefix sum over the experts of their token tiles, [experts + 1] from zero.
template <int TOKENS>
__device__ inline void count_tiles(int *prefix, const int *expert_start, int experts) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    __shared__ int warp_sums[32];
    if (threadIdx.x == 0) prefix[0] = 0;
    int done = 0;
    for (int first = 0; first < experts; first += blockDim.x) {
        const int e = first + threadIdx.x;
        int sum = e < experts ? (expert_start[e + 1] - expert_start[e] + TOKENS - 1) / TOKENS : 0;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int below = __shfl_up_sync(0xffffffffu, sum, distance);
            if (lane >= distance) sum += below;
        }
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        int before = done;
        for (int w = 0; w < warp; w++) before += warp_sums[w];
        if (e < experts) prefix[e + 1] = before + sum;
        for (int w = 0; w < warps; w++) done += warp_sums[w];
        __syncthreads();
    }
}

// grouped_many: pairs sorted by expert; any grid, whose blocks go round robin through the tiles of
// (expert, its tokens, weight rows), rows innermost.
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS, int STAGES>
__global__ void __launch_bounds__(32 * ROW_WARPS * TOKEN_WARPS)
    grouped_many(const float *, const unsigned short *activations, const long long *blobs,
                 const int *row_of, const int *expert_start, float *out, long long, long long rows,
                 long long cols, long long offset_bytes, long long experts, long long slice) {
    using Block = Many<TYPE, LANE, ALIGN, ROW_WARPS, TOKEN_WARPS, STAGES, false>;
    extern __shared__ uint4 shared[];
    const Product product = {activations, out, static_cast<int>(rows), static_cast<int>(cols),
                             static_cast<int>(slice)};
    const Block block(product, reinterpret_cast<unsigned char *>(shared));
    int *prefix = reinterpret_cast<int *>(block.sources + Block::TOKENS + Codec<TYPE>::BOOK);
    const int num_experts = experts;
    start_early();
    count_tiles<Block::TOKENS>(prefix, expert_start, num_experts);
    const int row_tiles = (static_cast<int>(rows) + Block::ROWS - 1) / Block::ROWS;
    const int tiles = prefix[num_experts] * row_tiles;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        const int token_tile = i / row_tiles;
        int low = 0, high = num_experts - 1;  // the last expert whose prefix is <= token_tile
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (prefix[middle] <= token_tile)
                low = middle;
            else
                high = middle - 1;
        }
        const int start = expert_start[low];
        const int first = start + (token_tile - prefix[low]) * Block::TOKENS;
        const int count = min(Block::TOKENS, expert_start[low + 1] - first);
        const Tile tile = {reinterpret_cast<const unsigned char *>(blobs[low]) + offset_bytes,
                           i % row_tiles * Block::ROWS, first, count};
        for (int j = threadIdx.x; j < Block::TOKENS; j += Block::THREADS)
            block.set_source(j, row_of[first + min(j, count - 1)]);
        __syncthreads();
        block.run(tile);
    }
}
