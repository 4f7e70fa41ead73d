// Products of quantized weights with many activation rows: bound by the tensor cores, for prompts.
//   x [T,K] f16 (as round_rows leaves it), N rows of K weights -> out [T,N] f32
//   2 * T*N*K floating-point operations over the tensor cores' rate; a tile reads its weights once
//   and decodes them once per TOKEN_WARPS.
//
// A block makes tiles of 32 * ROW_WARPS weight rows and up to 64 * TOKEN_WARPS tokens, one after
// the other in one stream of stages of 128 k that never runs dry. Raw rows and activations arrive
// by asynchronous copies, a stage or more ahead, across tiles. All warps together decode the
// weights of the next stage to f16 in shared memory, in the order that the tensor cores want them,
// while they multiply this one: so that a weight is decoded once per tile, and no product waits for
// it. Each sum is made of the same operations in the same order as in matmul_few.cu: slices from
// zero, totals in ascending order.
#include "mma.cuh"
#include "wide_book.cuh"

constexpr int STAGE = 128;        // k per stage of activations: four steps
constexpr int TOKEN_BYTES = 256;  // of a token in a stage
constexpr int RING = 6;           // tiles known at a time: more than copies run ahead

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

// A stage of the stream: which of the block's tiles, and which stage of that.
struct Cursor {
    int tile, stage;

    __device__ void advance(int stages) {
        if (++stage == stages) stage = 0, tile++;
    }
};

// Tokens that a tile lacks are multiplied too, and not stored.
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS>
struct Many {
    using R = Rows<TYPE, LANE>;
    static constexpr int THREADS = 32 * ROW_WARPS * TOKEN_WARPS;
    static constexpr int ROWS = 32 * ROW_WARPS, TOKENS = 64 * TOKEN_WARPS;
    static constexpr int RAW = R::STEPS == 8 ? 256 : 128;  // k per stage of raw rows
    static constexpr int PER_RAW = RAW / STAGE;
    static constexpr int RAW_BYTES = R::bytes(RAW);
    // Rows begin anywhere in their first 16 bytes, as the alignment of rows and stages allows.
    static constexpr int STEP_ALIGN = stage_alignment(ALIGN, RAW_BYTES);
    static constexpr int CHUNKS = (RAW_BYTES + 16 - STEP_ALIGN + 15) / 16;
    static constexpr int PITCH = 16 * (CHUNKS | 1);
    static constexpr int RAW_SLOT_BYTES = ROWS * PITCH + 16, X_SLOT_BYTES = TOKENS * TOKEN_BYTES;
    static constexpr int W_SLOT_BYTES = ROWS * 2 * STAGE;
    static constexpr bool FULL =
        !R::IS_FLOAT && 4 * LANE >= STAGE;  // every stage lies within the row
    // Groups of eight rows that a warp decodes.
    static constexpr int GROUPS = 4 / TOKEN_WARPS;
    // Copies of each thread in a stage: 16 bytes of tokens this far apart.
    static constexpr int X_COPIES = (16 * TOKENS + THREADS - 1) / THREADS;
    static constexpr int X_EACH = THREADS / 16;  // even, so that a thread's tokens agree in parity
    static_assert(X_EACH % 2 == 0, "a shape that does not fit");

    const Product product;
    unsigned char *raw;  // two slots each
    unsigned char *x;
    unsigned char *w;  // [tiles of 16 rows][steps][halves][lanes] of 16 bytes, operands
    Tile *ring;
    unsigned *sources;  // [RING][TOKENS]: the row of x of a token
    LoadedBook<TYPE> book;

    __device__ Many(const Product &all, unsigned char *shared)
        : product(all),
          raw(shared),
          x(raw + 2 * RAW_SLOT_BYTES),
          w(x + 2 * X_SLOT_BYTES),
          ring(reinterpret_cast<Tile *>(w + 2 * W_SLOT_BYTES)),
          sources(reinterpret_cast<unsigned *>(ring + RING)),
          book(load_any_book<TYPE>(sources + RING * TOKENS)) {}

    __device__ const unsigned char *row_at(const Tile &tile, int row, int raw_stage) const {
        const long long n = min(tile.first_row + row, product.rows - 1);
        return tile.matrix + n * R::bytes(product.cols) + raw_stage * RAW_BYTES;
    }

    __device__ static int phase_of(const unsigned char *row) {
        if (STEP_ALIGN == 16) return 0;
        const int phase = static_cast<int>(reinterpret_cast<unsigned long long>(row) & 15);
        return phase / STEP_ALIGN * STEP_ALIGN;
    }

    // The rows that this warp decodes; four threads copy one together, 64 bytes at a time.
    __device__ void copy_raw(const Cursor &at, int slot) const {
        const Tile tile = ring[at.tile % RING];
        const int first = 16 * (threadIdx.x % 4), raw_stage = at.stage / PER_RAW;
        const int length = FULL ? RAW_BYTES : R::bytes(min(RAW, product.cols - raw_stage * RAW));
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const int row = own_row(i);
            const unsigned char *from = row_at(tile, row, raw_stage);
            const int phase = phase_of(from);
            from += first - phase;
            unsigned char *to = raw + slot * RAW_SLOT_BYTES + row * PITCH + first;
#pragma unroll
            for (int j = 0; j < 16 * CHUNKS; j += 64) {
                if (FULL && (j + 64 <= RAW_BYTES || (STEP_ALIGN == 16 && first + j < RAW_BYTES)))
                    copy_async(to + j, from + j);
                else if (first + j < 16 * CHUNKS)
                    copy_async(to + j, from + j, max(0, min(16, phase + length - first - j)));
            }
        }
    }

    // Row of this lane in group i of those that its warp decodes.
    __device__ static int own_row(int i) {
        return 8 * (threadIdx.x / 32 * GROUPS + i) + (threadIdx.x & 31) / 4;
    }

    // Octet `step` of lane t lies at place (4 * step + t) ^ 4 * (token % 2) of its token's 16: then
    // neither the eight threads that copy together nor the eight that load meet in a bank.
    __device__ void copy_x(const Cursor &at, int slot) const {
        const int t = threadIdx.x % 4, step = threadIdx.x / 4 % 4, stage = at.stage;
        const int k = stage / PER_RAW * RAW + R::k_of(stage % PER_RAW * 4 + step, t);
        const int nbytes = FULL ? 16 : max(0, min(16, 2 * (product.cols - k)));
        const int own = threadIdx.x / 16;
        const unsigned *own_sources = sources + at.tile % RING * TOKENS + own;
        const unsigned row_bytes = 2 * product.cols;
        const unsigned char *first =
            reinterpret_cast<const unsigned char *>(product.activations + k);
        unsigned char *to =
            x + slot * X_SLOT_BYTES + own * TOKEN_BYTES + 16 * ((4 * step + t) ^ (4 * (own % 2)));
        unsigned from[X_COPIES];  // all addresses before the first copy
#pragma unroll
        for (int i = 0; i < X_COPIES; i++) from[i] = own_sources[X_EACH * i];
#pragma unroll
        for (int i = 0; i < X_COPIES; i++) {
            const int token = X_EACH * i;
            if (token + X_EACH > TOKENS && own + token >= TOKENS) continue;
            const unsigned long long at_row = static_cast<unsigned long long>(row_bytes) * from[i];
            if (FULL)
                copy_async(to + token * TOKEN_BYTES, first + at_row);
            else
                copy_async(to + token * TOKEN_BYTES, first + at_row, nbytes);
        }
    }

    // Where the rows that this lane decodes lie in a stage.
    __device__ void find_rows(Staged<STEP_ALIGN> (&rows)[GROUPS], const Cursor &at,
                              int slot) const {
        const Tile tile = ring[at.tile % RING];
        const unsigned char *own = raw + slot * RAW_SLOT_BYTES;
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
            rows[i] = {own + own_row(i) * PITCH,
                       phase_of(row_at(tile, own_row(i), at.stage / PER_RAW))};
    }

    // Half of a step of 16 weight rows, as the tensor cores take it.
    __device__ uint4 *operand_at(int slot, int tile, int step, int half) const {
        return reinterpret_cast<uint4 *>(w + slot * W_SLOT_BYTES) +
               ((4 * tile + step) * 2 + half) * 32 + (threadIdx.x & 31);
    }

    // Step STEP of a raw stage to shared memory: part i of GROUPS, the second of two stores both.
    template <int STEP>
    __device__ void decode_part(const Staged<STEP_ALIGN> (&rows)[GROUPS], RowScale (&scale)[GROUPS],
                                int slot, int i, Octet &low) const {
        const Octet o = decode<TYPE, LANE, STEP_ALIGN, WideCodec<TYPE>>(
            rows[i], STEP, threadIdx.x & 3, book, scale[i]);
        if (i % 2 == 0) {
            low = o;
            return;
        }
        const int tile = (threadIdx.x / 32 * GROUPS + i) / 2;
#pragma unroll
        for (int half = 0; half < 2; half++)
            *operand_at(slot, tile, STEP % 4, half) = make_uint4(
                low.pair[2 * half], o.pair[2 * half], low.pair[2 * half + 1], o.pair[2 * half + 1]);
    }

    __device__ static uint4 load_x(const unsigned char *own, int step, int n) {
        const int odd = 64 * ((threadIdx.x & 31) / 4 % 2);
        return *reinterpret_cast<const uint4 *>(own + (step % 2 ? -odd : odd) + 64 * step +
                                                n * 8 * TOKEN_BYTES);
    }

    struct Sums {
        float of[2][8][4];
    };

    // What a warp needs while it multiplies a stage and decodes the next one.
    struct Stage {
        int slot, steps;                  // steps within the row
        Staged<STEP_ALIGN> rows[GROUPS];  // to decode
        RowScale scale[GROUPS];
    };

    // Step STEP of the first stage of all.
    template <int STEP>
    __device__ void decode_all(Stage &stage) const {
        Octet low;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) decode_part<STEP>(stage.rows, stage.scale, 0, i, low);
    }

    // FIRST is the next stage's first step in its raw stage.
    template <int FIRST>
    __device__ void make_stage(Sums &sums, Stage &stage) const {
        const int lane = threadIdx.x & 31, tile = threadIdx.x / 32 % ROW_WARPS * 2;
        const int token_warp = threadIdx.x / 32 / ROW_WARPS;
        const unsigned char *own = x + stage.slot * X_SLOT_BYTES +
                                   (64 * token_warp + lane / 4) * TOKEN_BYTES + 16 * (lane & 3);
        uint4 w[2][2], v[8];
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i / 2][i % 2] = *operand_at(stage.slot, tile + i / 2, 0, i % 2);
#pragma unroll
        for (int n = 0; n < 8; n++) v[n] = load_x(own, 0, n);
        make_step<FIRST, 0>(sums, stage, own, w, v);
        make_step<FIRST, 1>(sums, stage, own, w, v);
        make_step<FIRST, 2>(sums, stage, own, w, v);
        make_step<FIRST, 3>(sums, stage, own, w, v);
    }

    // Operands of the next step are loaded behind their last use. Weights stay for many products:
    // the tensor cores keep them.
    template <int FIRST, int STEP>
    __device__ void make_step(Sums &sums, Stage &stage, const unsigned char *own, uint4 (&w)[2][2],
                              uint4 (&v)[8]) const {
        const int tile = threadIdx.x / 32 % ROW_WARPS * 2;
        const bool in_row = LANE >= 32 || STEP < stage.steps;
        Octet low;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int half = i / 2, m = i % 2;
            const uint4 a = w[m][half];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                if (in_row)
                    multiply(sums.of[m][n], a.x, a.y, a.z, a.w, half ? v[n].z : v[n].x,
                             half ? v[n].w : v[n].y);
                if (i == 3 && STEP < 3) v[n] = load_x(own, STEP + 1, n);
            }
            if (STEP < 3) w[m][half] = *operand_at(stage.slot, tile + m, STEP + 1, half);
            if (i < GROUPS)
                decode_part<FIRST + STEP>(stage.rows, stage.scale, stage.slot ^ 1, i, low);
        }
    }

    // What is copied next. The last stage of the stream is copied again and again, to slots that
    // are not used any more: cheaper than asking.
    struct Copies {
        Cursor at;
        int left;  // stages after this one

        __device__ void advance(int stages, int count) {
            for (int i = 0; i < count && left > 0; i++) left--, at.advance(stages);
        }
    };

    // The whole stream of a block. describe(i) starts to write tile i of this block and its
    // sources.
    template <class Describe>
    __device__ void run(int tiles, const Describe &describe) const {
        const int stages = (product.cols + STAGE - 1) / STAGE, all = tiles * stages;
        int known = min(tiles, RING - 1);
        for (int i = 0; i < known; i++) describe(i);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        Copies x_next = {{0, 0}, all - 1}, raw_next = x_next, decoded = x_next;
        copy_x(x_next.at, 0);
        x_next.advance(stages, 1);
        int raw_slot = 0;  // of the next copies
        for (int i = 0; i < 2; i++) {
            copy_raw(raw_next.at, i);
            raw_next.advance(stages, PER_RAW);
        }
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        Stage stage;
        find_rows(stage.rows, decoded.at, 0);
        decode_all<0>(stage);
        decode_all<1>(stage);
        decode_all<2>(stage);
        decode_all<3>(stage);
        Cursor at = {0, 0};
        int left_of_slice = product.slice;
        Sums sums = {}, totals = {};
        for (int s = 0; s < all; s++) {
            wait_copies<0>();
            __syncthreads();
            const bool is_first = PER_RAW == 1 || at.stage % 2 == 0;
            copy_x(x_next.at, ~s & 1);
            x_next.advance(stages, 1);
            if (PER_RAW == 1 || !is_first) {
                copy_raw(raw_next.at, raw_slot);
                raw_next.advance(stages, PER_RAW);
                raw_slot ^= 1;
            }
            if (at.stage == 0 && known < tiles && at.tile + RING - 1 > known) describe(known++);
            commit_copies();
            decoded.advance(stages, 1);
            if (PER_RAW == 1 || !is_first)
                find_rows(stage.rows, decoded.at, PER_RAW == 1 ? ~s & 1 : ~(s / 2) & 1);
            const Tile &tile = ring[at.tile % RING];
            stage.slot = s & 1;
            stage.steps = (product.cols - at.stage * STAGE + 31) / 32;
            if (PER_RAW == 2 && is_first)
                make_stage<PER_RAW == 2 ? 4 : 0>(sums, stage);
            else
                make_stage<0>(sums, stage);
            left_of_slice -= STAGE;
            const bool is_last = at.stage + 1 == stages;
            if (left_of_slice == 0 || is_last) {
                left_of_slice = product.slice;
#pragma unroll
                for (int i = 0; i < 64; i++) {
                    totals.of[i / 32][i / 4 % 8][i % 4] += sums.of[i / 32][i / 4 % 8][i % 4];
                    sums.of[i / 32][i / 4 % 8][i % 4] = 0.0f;
                }
            }
            if (is_last) {
                store(totals, tile);
#pragma unroll
                for (int i = 0; i < 64; i++) totals.of[i / 32][i / 4 % 8][i % 4] = 0.0f;
            }
            at.advance(stages);
        }
        wait_copies<0>();
    }

    __device__ void store(const Sums &totals, const Tile &tile) const {
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
        const int row = tile.first_row + 32 * (threadIdx.x / 32 % ROW_WARPS) + g;
        const int first = 64 * (threadIdx.x / 32 / ROW_WARPS) + 2 * t;
        float *to = product.out + row + static_cast<long long>(tile.first + first) * product.rows;
#pragma unroll
        for (int i = 0; i < 64; i++) {
            const int m = i / 32, n = i / 4 % 8, half = i / 2 % 2, token = 8 * n + i % 2;
            if (row + 16 * m + 8 * half < product.rows && first + token < tile.count)
                to[static_cast<long long>(token) * product.rows + 16 * m + 8 * half] =
                    totals.of[m][n][i % 4] / GAIN<TYPE>;
        }
    }
};

// How many of `tiles` a block makes that takes every gridDim.x-th, from blockIdx.x on.
__device__ inline int share_of(int tiles) {
    const int first = blockIdx.x, step = gridDim.x;
    return first < tiles ? (tiles - first + step - 1) / step : 0;
}

// matmul_prompt: any grid, whose blocks go round robin through the tiles, token tiles innermost
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS>
__global__ void __launch_bounds__(32 * ROW_WARPS * TOKEN_WARPS)
    matmul_prompt(const float *, const unsigned short *activations, const unsigned char *data,
                  float *out, long long, long long tokens, long long rows, long long cols,
                  long long slice) {
    using Block = Many<TYPE, LANE, ALIGN, ROW_WARPS, TOKEN_WARPS>;
    extern __shared__ uint4 shared[];
    const Product product = {activations, out, static_cast<int>(rows), static_cast<int>(cols),
                             static_cast<int>(slice)};
    const Block block(product, reinterpret_cast<unsigned char *>(shared));
    const int num_tokens = tokens, token_tiles = (num_tokens + Block::TOKENS - 1) / Block::TOKENS;
    const int row_tiles = (static_cast<int>(rows) + Block::ROWS - 1) / Block::ROWS;
    const int tiles = share_of(token_tiles * row_tiles);
    if (tiles == 0) return;
    block.run(tiles, [&](int i) {
        const int tile = blockIdx.x + i * gridDim.x, slot = i % RING;
        const int first = tile % token_tiles * Block::TOKENS;
        if (threadIdx.x == 0)
            block.ring[slot] = {data, tile / token_tiles * Block::ROWS, first,
                                min(Block::TOKENS, num_tokens - first)};
        for (int token = threadIdx.x; token < Block::TOKENS; token += Block::THREADS)
            block.sources[slot * Block::TOKENS + token] = min(first + token, num_tokens - 1);
    });
}
