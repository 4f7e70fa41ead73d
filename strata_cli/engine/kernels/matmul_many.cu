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
#include "weights.cuh"

constexpr int STAGE = 128;        // k per stage of activations: four steps
constexpr int LANE_PITCH = 80;    // bytes of a lane's four octets, and 16 so that banks differ
constexpr int TOKEN_PITCH = 320;  // bytes of a token in a stage

// One tile: matrix, first row, and the tokens, which are rows `first ...` of out.
struct Tile {
    const unsigned char *matrix;
    int first_row, first, count;
};

template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS, int STAGES, bool WHOLE>
struct Many {
    using R = Rows<TYPE, LANE>;
    static constexpr int THREADS = 32 * ROW_WARPS * TOKEN_WARPS;
    static constexpr int ROWS = 32 * ROW_WARPS, TOKENS = 64 * TOKEN_WARPS;
    static constexpr int RAW = LANE == 64 ? 256 : 128;  // k per stage of raw rows
    static constexpr int PER_RAW = RAW / STAGE, RAW_STAGES = PER_RAW == 2 ? 2 : STAGES;
    static constexpr int RAW_BYTES = R::bytes(RAW);
    // A raw stage is copied with its first stage of activations, over one that must be used up.
    static_assert(STAGES >= 2 && STAGES <= 1 + (RAW_STAGES - 1) * PER_RAW, "too many stages");
    // Rows begin anywhere in their first 16 bytes, as the alignment of rows and stages allows.
    static constexpr int STEP_ALIGN = stage_alignment(ALIGN, RAW_BYTES);
    static constexpr int CHUNKS = (RAW_BYTES + 16 - STEP_ALIGN + 15) / 16;
    static constexpr int PITCH = 16 * (CHUNKS | 1);
    static constexpr int RAW_STAGE_BYTES = ROWS * PITCH, X_STAGE_BYTES = TOKENS * TOKEN_PITCH;

    unsigned char *raw;
    unsigned char *x;
    int *sources;  // row of x of each token of the tile
    Book<1> book;

    __device__ Many(unsigned char *shared)
        : raw(shared),
          x(raw + RAW_STAGES * RAW_STAGE_BYTES),
          sources(reinterpret_cast<int *>(x + STAGES * X_STAGE_BYTES)),
          book(load_book<TYPE, 1>(reinterpret_cast<unsigned *>(sources + TOKENS))) {}

    __device__ static const unsigned char *row_at(const Tile &tile, int row, int rows, int cols,
                                                  int raw_stage) {
        const long long n = min(tile.first_row + row, rows - 1);
        return tile.matrix + n * R::bytes(cols) + static_cast<long long>(raw_stage) * RAW_BYTES;
    }

    __device__ static int phase_of(const unsigned char *row) {
        if (STEP_ALIGN == 16) return 0;
        const int phase = static_cast<int>(reinterpret_cast<unsigned long long>(row) & 15);
        return phase / STEP_ALIGN * STEP_ALIGN;
    }

    // Four threads copy a row together, 64 bytes at a time.
    __device__ void copy_raw(const Tile &tile, int rows, int cols, int raw_stage) const {
        unsigned char *to = raw + raw_stage % RAW_STAGES * RAW_STAGE_BYTES;
        const int length = min(RAW, cols - raw_stage * RAW), first = threadIdx.x % 4;
#pragma unroll
        for (int pass = 0; pass < 4 * ROWS / THREADS; pass++) {
            const int row = threadIdx.x / 4 + THREADS / 4 * pass;
            const unsigned char *from = row_at(tile, row, rows, cols, raw_stage);
            const int phase = phase_of(from), end = phase + R::bytes(length);
            from -= phase;
#pragma unroll
            for (int chunk = first; chunk < CHUNKS + first; chunk += 4) {
                const int left = end - 16 * chunk;
                if (chunk < CHUNKS)
                    copy_async(to + row * PITCH + 16 * chunk, left > 0 ? from + 16 * chunk : from,
                               max(0, min(16, left)));
            }
        }
    }

    __device__ void copy_x(const unsigned short *activations, int cols, int stage) const {
        unsigned char *to = x + stage % STAGES * X_STAGE_BYTES;
        const int octet = threadIdx.x % 16, t = octet / 4, step = octet % 4;
        const int k = stage / PER_RAW * RAW + R::k_of(stage % PER_RAW * 4 + step, t);
        const int nbytes = max(0, min(16, 2 * (cols - k)));
#pragma unroll 4
        for (int token = threadIdx.x / 16; token < TOKENS; token += THREADS / 16) {
            const unsigned short *row = activations + static_cast<long long>(sources[token]) * cols;
            copy_async(to + token * TOKEN_PITCH + t * LANE_PITCH + 16 * step,
                       nbytes ? row + k : row, nbytes);
        }
    }

    __device__ void copy_stage(const Tile &tile, const unsigned short *activations, int rows,
                               int cols, int stage, int stages) const {
        if (stage < stages) {
            copy_x(activations, cols, stage);
            if (stage % PER_RAW == 0) copy_raw(tile, rows, cols, stage / PER_RAW);
        }
        commit_copies();
    }

    // Four steps, FIRST ... of their raw stage.
    template <int FIRST>
    __device__ void multiply_stage(float (&sums)[2][8][4], RowScale (&scale)[2][2],
                                   const Tile &tile, int rows, int cols, int stage,
                                   int tokens) const {
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
        const int row_warp = threadIdx.x / 32 % ROW_WARPS;
        const int token_warp = threadIdx.x / 32 / ROW_WARPS;
        const unsigned char *own_raw =
            raw + stage / PER_RAW % RAW_STAGES * RAW_STAGE_BYTES + (32 * row_warp + g) * PITCH;
        const unsigned char *own_x = x + stage % STAGES * X_STAGE_BYTES +
                                     (64 * token_warp + g) * TOKEN_PITCH + t * LANE_PITCH;
        int phase[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++)
            phase[i / 2][i % 2] =
                phase_of(row_at(tile, 32 * row_warp + 8 * i + g, rows, cols, stage / PER_RAW));
#pragma unroll
        for (int step = 0; step < 4; step++) {
            if (LANE < 32 && stage * STAGE + 32 * step >= cols) break;
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
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                if (!WHOLE && 8 * n >= tokens) break;
                multiply_step(sums[0][n], w[0], activations[n]);
                multiply_step(sums[1][n], w[1], activations[n]);
                multiply_step(sums[0][n + 1], w[0], activations[n + 1]);
                multiply_step(sums[1][n + 1], w[1], activations[n + 1]);
            }
        }
    }

    __device__ static void multiply_step(float (&sums)[4], const Octet (&w)[2], const uint4 &x) {
        multiply(sums, w[0].pair[0], w[1].pair[0], w[0].pair[1], w[1].pair[1], x.x, x.y);
        multiply(sums, w[0].pair[2], w[1].pair[2], w[0].pair[3], w[1].pair[3], x.z, x.w);
    }

    __device__ void run(const Tile &tile, const unsigned short *activations, float *out, int rows,
                        int cols, int slice) const {
        const int stages = (cols + STAGE - 1) / STAGE;
        const int token_warp = threadIdx.x / 32 / ROW_WARPS;
        // The shuffle tells the compiler that a warp agrees on it.
        const int tokens = __shfl_sync(0xffffffffu, tile.count - 64 * token_warp, 0);
        float sums[2][8][4] = {}, totals[2][8][4] = {};
        RowScale scale[2][2];
        for (int stage = 0; stage < STAGES - 1; stage++)
            copy_stage(tile, activations, rows, cols, stage, stages);
        for (int stage = 0; stage < stages; stage++) {
            wait_copies<STAGES - 2>();
            __syncthreads();
            copy_stage(tile, activations, rows, cols, stage + STAGES - 1, stages);
            if (PER_RAW == 2 && stage % 2)
                multiply_stage<PER_RAW == 2 ? 4 : 0>(sums, scale, tile, rows, cols, stage, tokens);
            else
                multiply_stage<0>(sums, scale, tile, rows, cols, stage, tokens);
            if ((stage + 1) * STAGE % slice == 0 || stage + 1 == stages) {
#pragma unroll
                for (int i = 0; i < 64; i++) {
                    totals[i / 32][i / 4 % 8][i % 4] += sums[i / 32][i / 4 % 8][i % 4];
                    sums[i / 32][i / 4 % 8][i % 4] = 0.0f;
                }
            }
        }
        store(totals, tile, out, rows, tokens);
        __syncthreads();
    }

    __device__ static void store(const float (&totals)[2][8][4], const Tile &tile, float *out,
                                 int rows, int tokens) {
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
        const int row = tile.first_row + 32 * (threadIdx.x / 32 % ROW_WARPS) + g;
        const int first = 64 * (threadIdx.x / 32 / ROW_WARPS) + 2 * t;
#pragma unroll
        for (int i = 0; i < 64; i++) {
            const int m = i / 32, n = i / 4 % 8, half = i / 2 % 2, token = 8 * n + i % 2;
            const int own_row = row + 16 * m + 8 * half;
            if (own_row < rows && 2 * t + token < tokens)
                out[static_cast<long long>(tile.first + first + token) * rows + own_row] =
                    totals[m][n][i % 4] / GAIN<TYPE>;
        }
    }
};

// matmul_many: grid (token tiles * row tiles), token tiles innermost
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS, int STAGES>
__global__ void __launch_bounds__(32 * ROW_WARPS * TOKEN_WARPS)
    matmul_many(const float *, const unsigned short *activations, const unsigned char *data,
                float *out, long long, long long tokens, long long rows, long long cols,
                long long slice) {
    using Block = Many<TYPE, LANE, ALIGN, ROW_WARPS, TOKEN_WARPS, STAGES, true>;
    extern __shared__ uint4 shared[];
    const Block block(reinterpret_cast<unsigned char *>(shared));
    const int num_tokens = tokens, token_tiles = (num_tokens + Block::TOKENS - 1) / Block::TOKENS;
    const int first = blockIdx.x % token_tiles * Block::TOKENS;
    const Tile tile = {data, static_cast<int>(blockIdx.x) / token_tiles * Block::ROWS, first,
                       min(Block::TOKENS, num_tokens - first)};
    for (int i = threadIdx.x; i < Block::TOKENS; i += Block::THREADS)
        block.sources[i] = min(first + i, num_tokens - 1);
    __syncthreads();
    block.run(tile, activations, out, rows, cols, slice);
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
    const Block block(reinterpret_cast<unsigned char *>(shared));
    int *prefix = block.sources + Block::TOKENS + Codec<TYPE>::BOOK;
    const int num_experts = experts;
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
            block.sources[j] = row_of[first + min(j, count - 1)];
        __syncthreads();
        block.run(tile, activations, out, rows, cols, slice);
    }
}
