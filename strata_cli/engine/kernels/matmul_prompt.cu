// Products of quantized weights with many activation rows: bound by the tensor cores, for prompts.
//   x [T,K] f16 (as round_rows leaves it), N rows of K weights -> out [T,N] f32
//   2 * T*N*K floating-point operations over the tensor cores' rate; a tile reads its weights once
//   and decodes them once per TOKEN_WARPS.
//
// A block makes tiles of 32 * ROW_WARPS weight rows and 64 * TOKEN_WARPS tokens, one after the
// other in one stream of stages of 128 k that never runs dry: raw rows and activations arrive by
// asynchronous copies some stages ahead, across tiles. A warp decodes its own 32 rows straight into
// the registers that the tensor cores read, a step of 32 k ahead of their product with 64 tokens,
// whose activations it loads from shared memory a step ahead as well; so the tensor cores need not
// wait for either. Each sum is made of the same operations in the same order as in matmul_few.cu:
// slices from zero, totals in ascending order.
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
    long long offset;  // of the matrix from where a tile says
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

// WHOLE: tokens that a tile lacks are multiplied too, and not stored.
// X_SLOTS, RAW_SLOTS: stages of activations and of raw rows in shared memory.
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS, int X_SLOTS, int RAW_SLOTS,
          bool WHOLE>
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
    static constexpr bool FULL =
        !R::IS_FLOAT && 4 * LANE >= STAGE;  // every stage lies within the row
    // Stages between a copy's start and the stage that uses it.
    static constexpr int X_AHEAD = X_SLOTS - 1, RAW_AHEAD = PER_RAW * (RAW_SLOTS - 1);
    static constexpr int PENDING = (X_AHEAD < RAW_AHEAD ? X_AHEAD : RAW_AHEAD) - 2;
    // Copies of each thread in a stage: rows of weights, and 16 bytes of tokens this far apart.
    static constexpr int RAW_PASSES = 4 * ROWS / THREADS,
                         X_COPIES = (16 * TOKENS + THREADS - 1) / THREADS;
    static constexpr int X_PART = (X_COPIES + 3) / 4;
    static constexpr int X_EACH = THREADS / 16;  // even, so that a thread's tokens agree in parity
    static_assert(PENDING >= 0 && RAW_PASSES <= 4 && X_EACH % 2 == 0, "a shape that does not fit");
    // A tile is described by copies as well, and must have landed when others are begun for it.
    static constexpr int TILES_AHEAD = X_AHEAD > RAW_SLOTS - 1 ? X_AHEAD : RAW_SLOTS - 1;
    static_assert(RING - 2 - TILES_AHEAD > PENDING, "too many slots");

    const Product product;
    unsigned char *raw;
    unsigned char *x;
    Tile *ring;
    unsigned *sources;  // [RING][TOKENS]: the row of x of a token
    LoadedBook<TYPE> book;

    __device__ Many(const Product &all, unsigned char *shared)
        : product(all),
          raw(shared),
          x(raw + RAW_SLOTS * RAW_SLOT_BYTES),
          ring(reinterpret_cast<Tile *>(x + X_SLOTS * X_SLOT_BYTES)),
          sources(reinterpret_cast<unsigned *>(ring + RING)),
          book(load_any_book<TYPE>(sources + RING * TOKENS)) {}

    __device__ const unsigned char *row_at(const Tile &tile, int row, int raw_stage) const {
        const long long n = min(tile.first_row + row, product.rows - 1);
        return tile.matrix + product.offset + n * R::bytes(product.cols) + raw_stage * RAW_BYTES;
    }

    __device__ static int phase_of(const unsigned char *row) {
        if (STEP_ALIGN == 16) return 0;
        const int phase = static_cast<int>(reinterpret_cast<unsigned long long>(row) & 15);
        return phase / STEP_ALIGN * STEP_ALIGN;
    }

    // Four threads copy a row together, 64 bytes at a time.

    __device__ void copy_raw(const Cursor &at, int slot, int pass) const {
        const Tile tile = ring[at.tile % RING];
        const int first = 16 * (threadIdx.x % 4), raw_stage = at.stage / PER_RAW;
        const int row = threadIdx.x / 4 + THREADS / 4 * pass;
        const unsigned char *from = row_at(tile, row, raw_stage);
        const int phase = phase_of(from);
        const int length = FULL ? RAW_BYTES : R::bytes(min(RAW, product.cols - raw_stage * RAW));
        from += first - phase;
        unsigned char *to = raw + slot * RAW_SLOT_BYTES + row * PITCH + first;
#pragma unroll
        for (int i = 0; i < 16 * CHUNKS; i += 64) {
            if (FULL && (i + 64 <= RAW_BYTES || (STEP_ALIGN == 16 && first + i < RAW_BYTES)))
                copy_async(to + i, from + i);
            else if (first + i < 16 * CHUNKS)
                copy_async(to + i, from + i, max(0, min(16, phase + length - first - i)));
        }
    }

    // Octet `step` of lane t lies at place (4 * step + t) ^ 4 * (token % 2) of its token's 16: then
    // neither the eight threads that copy together nor the eight that load meet in a bank.
    // Copies FIRST ... FIRST + N of a thread; where their rows begin is loaded before.
    template <int FIRST, int N>
    __device__ void find_sources(const Cursor &at, unsigned (&from)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++)
            from[i] = sources[at.tile % RING * TOKENS + threadIdx.x / 16 + X_EACH * (FIRST + i)];
    }

    template <int FIRST, int N>
    __device__ void copy_x(const Cursor &at, int slot, const unsigned (&from)[N]) const {
        const int t = threadIdx.x % 4, step = threadIdx.x / 4 % 4, stage = at.stage;
        const int k = stage / PER_RAW * RAW + R::k_of(stage % PER_RAW * 4 + step, t);
        const int nbytes = FULL ? 16 : max(0, min(16, 2 * (product.cols - k)));
        const int own = threadIdx.x / 16, count = WHOLE ? TOKENS : ring[at.tile % RING].count;
        const unsigned row_bytes = 2 * product.cols;
        const unsigned char *first =
            reinterpret_cast<const unsigned char *>(product.activations + k);
        unsigned char *to =
            x + slot * X_SLOT_BYTES + own * TOKEN_BYTES + 16 * ((4 * step + t) ^ (4 * (own % 2)));
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int token = X_EACH * (FIRST + i);
            if (!WHOLE && own + token >= count) continue;
            if (token + X_EACH > TOKENS && own + token >= TOKENS) continue;
            const unsigned long long at_row = static_cast<unsigned long long>(row_bytes) * from[i];
            if (FULL)
                copy_async(to + token * TOKEN_BYTES, first + at_row);
            else
                copy_async(to + token * TOKEN_BYTES, first + at_row, nbytes);
        }
    }

    // Where this lane's four rows of a stage lie.
    __device__ void find_rows(Staged<STEP_ALIGN> (&rows)[4], const Cursor &at, int slot) const {
        const int row = threadIdx.x / 32 % ROW_WARPS * 32 + (threadIdx.x & 31) / 4;
        const Tile tile = ring[at.tile % RING];
        const unsigned char *own = raw + slot * RAW_SLOT_BYTES + row * PITCH;
#pragma unroll
        for (int i = 0; i < 4; i++)
            rows[i] = {own + 8 * i * PITCH,
                       phase_of(row_at(tile, row + 8 * i, at.stage / PER_RAW))};
    }

    // The first activations of this lane in a slot, for even steps and for odd ones.
    struct Columns {
        const unsigned char *even, *odd;

        __device__ uint4 load(int step, int n) const {
            const unsigned char *from = step % 2 ? odd : even;
            return *reinterpret_cast<const uint4 *>(from + 64 * step + 8 * n * TOKEN_BYTES);
        }
    };

    __device__ Columns columns_of(int slot) const {
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
        const unsigned char *own = x + slot * X_SLOT_BYTES +
                                   (64 * (threadIdx.x / 32 / ROW_WARPS) + g) * TOKEN_BYTES + 16 * t;
        return {own + 64 * (g % 2), own - 64 * (g % 2)};
    }

    // What is copied next and where to. The last stage of the stream is copied again and again, to
    // slots that are not used any more: cheaper than asking.
    struct Copies {
        Cursor x, raw;
        int x_left, raw_left, x_slot, raw_slot;  // left: stages after this one

        __device__ void advance_x(int stages) {
            x_slot = next_slot(x_slot, X_SLOTS);
            if (x_left > 0) x_left--, x.advance(stages);
        }

        __device__ void advance_raw(int stages) {
            raw_slot = next_slot(raw_slot, RAW_SLOTS);
            if (raw_left < PER_RAW) return;
            raw_left -= PER_RAW;
#pragma unroll
            for (int i = 0; i < PER_RAW; i++) raw.advance(stages);
        }
    };

    __device__ static int next_slot(int slot, int slots) {
        return slot + 1 == slots ? 0 : slot + 1;
    }

    // What a warp holds while it goes through the stream.
    struct State {
        float sums[2][8][4], totals[2][8][4];
        Octet w[2][2];  // of the step that is multiplied next
        uint4 x[8];     // the same
        RowScale scale[4];
        Staged<STEP_ALIGN> rows[4];
        int tokens, tokens_ahead;  // of this warp in the tile that is multiplied, and loaded
    };

    // A step with what is loaded, while step NEXT of a raw stage (0: of the next one) is loaded.
    // between(p, is_before) is called around the products with 16 tokens each.
    template <int NEXT, class Between>
    __device__ void make_step(State &now, const Columns &next, bool in_row,
                              const Between &between) const {
        Octet w[2][2];
        const int tokens = LANE >= 32 || in_row ? now.tokens : 0;
#pragma unroll
        for (int p = 0; p < 4; p++) {
            between(p, true);
            // The same on both ways, so that decoding goes between the products.
            if ((WHOLE && LANE >= 32) || 16 * p < tokens) {
                multiply_pair(now, p);
                load_next<NEXT>(now, next, p, w[p / 2][p % 2]);
            } else {
                load_next<NEXT>(now, next, p, w[p / 2][p % 2]);
            }
            between(p, false);
        }
#pragma unroll
        for (int p = 0; p < 4; p++) now.w[p / 2][p % 2] = w[p / 2][p % 2];
    }

    // The step's products with 16 tokens. The two that a sum gets are kept apart: the second waits
    // for the first.
    __device__ static void multiply_pair(State &now, int p) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int n = 2 * p + i / 2, m = i % 2;
                const Octet &low = now.w[m][0], &high = now.w[m][1];
                multiply(now.sums[m][n], low.pair[2 * half], high.pair[2 * half],
                         low.pair[2 * half + 1], high.pair[2 * half + 1],
                         half ? now.x[n].z : now.x[n].x, half ? now.x[n].w : now.x[n].y);
            }
    }

    // Activations of 16 tokens and weights of eight rows for step NEXT.
    template <int NEXT>
    __device__ void load_next(State &now, const Columns &next, int p, Octet &w) const {
#pragma unroll
        for (int n = 2 * p; n < 2 * p + 2; n++)
            if (WHOLE || 8 * n < now.tokens_ahead) now.x[n] = next.load(NEXT % 4, n);
        w = decode<TYPE, LANE, STEP_ALIGN, WideCodec<TYPE>>(now.rows[p], NEXT, threadIdx.x & 3,
                                                            book, now.scale[p]);
    }

    __device__ bool in_row(int stage, int step) const {
        return LANE >= 32 || stage * STAGE + 32 * step < product.cols;
    }

    // The whole stream of a block. describe(i) starts to write tile i of this block and its
    // sources.
    template <class Describe>
    __device__ void run(int tiles, const Describe &describe) const {
        const int stages = (product.cols + STAGE - 1) / STAGE;
        const int token_warp = threadIdx.x / 32 / ROW_WARPS;
        const int all = tiles * stages;
        int known = min(tiles, RING - 1);
        for (int i = 0; i < known; i++) describe(i);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        Copies copies = {{0, 0}, {0, 0}, all - 1, all - 1, 0, 0};
        for (int i = 0; i < RAW_SLOTS - 1; i++) {
            for (int pass = 0; pass < RAW_PASSES; pass++)
                copy_raw(copies.raw, copies.raw_slot, pass);
            copies.advance_raw(stages);
        }
        for (int i = 0; i < X_AHEAD; i++) {
            unsigned from[X_COPIES];
            find_sources<0>(copies.x, from);
            copy_x<0>(copies.x, copies.x_slot, from);
            copies.advance_x(stages);
        }
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        Cursor at = {0, 0}, ahead = {0, 0};
        State now;
#pragma unroll
        for (int i = 0; i < 64; i++)
            now.sums[i / 32][i / 4 % 8][i % 4] = now.totals[i / 32][i / 4 % 8][i % 4] = 0.0f;
        int x_used = 0, raw_used = 0;  // slots of the stage that is loaded
        now.tokens = now.tokens_ahead =
            __shfl_sync(0xffffffffu, ring[0].count - 64 * token_warp, 0);
        find_rows(now.rows, ahead, raw_used);
        Columns columns = columns_of(0);
#pragma unroll
        for (int n = 0; n < 8; n++) now.x[n] = columns.load(0, n);
#pragma unroll
        for (int p = 0; p < 4; p++)
            now.w[p / 2][p % 2] = decode<TYPE, LANE, STEP_ALIGN, WideCodec<TYPE>>(
                now.rows[p], 0, threadIdx.x & 3, book, now.scale[p]);
        int left_of_slice = product.slice;
        for (int s = 0; s < all; s++) {
            if (at.stage == 0 && known < tiles && at.tile + RING - 1 > known) {
                describe(known);
                known++;
            }
            const bool is_first = PER_RAW == 1 || at.stage % 2 == 0;
            if (is_first)
                three_steps<0>(now, columns, at);
            else
                three_steps<PER_RAW == 2 ? 4 : 0>(now, columns, at);
            wait_copies<PENDING>();
            __syncthreads();
            ahead.advance(stages);
            x_used = next_slot(x_used, X_SLOTS);
            columns = columns_of(x_used);
            const bool crosses = PER_RAW == 1 || !is_first;
            if (crosses && s + 1 < all) {
                raw_used = next_slot(raw_used, RAW_SLOTS);
                find_rows(now.rows, ahead, raw_used);
            }
            if (s + 1 < all)
                now.tokens_ahead =
                    __shfl_sync(0xffffffffu, ring[ahead.tile % RING].count - 64 * token_warp, 0);
            const bool is_in_row = in_row(at.stage, 3);
            if (PER_RAW == 1)
                last_step<0, true>(now, columns, is_in_row, copies);
            else if (is_first)
                last_step<4, true>(now, columns, is_in_row, copies);
            else
                last_step<0, false>(now, columns, is_in_row, copies);
            copies.advance_x(stages);
            if (is_first) copies.advance_raw(stages);
            commit_copies();
            left_of_slice -= STAGE;
            const bool is_last = at.stage + 1 == stages;
            if (left_of_slice == 0 || is_last) {
                left_of_slice = product.slice;
#pragma unroll
                for (int i = 0; i < 64; i++) {
                    now.totals[i / 32][i / 4 % 8][i % 4] += now.sums[i / 32][i / 4 % 8][i % 4];
                    now.sums[i / 32][i / 4 % 8][i % 4] = 0.0f;
                }
            }
            if (is_last) {
                store(now, ring[at.tile % RING]);
#pragma unroll
                for (int i = 0; i < 64; i++) now.totals[i / 32][i / 4 % 8][i % 4] = 0.0f;
                now.tokens = now.tokens_ahead;
            }
            at = ahead;
        }
        wait_copies<0>();
    }

    template <int FIRST>
    __device__ void three_steps(State &now, const Columns &columns, const Cursor &at) const {
        const auto nothing = [](int, bool) {};
        make_step<FIRST + 1>(now, columns, in_row(at.stage, 0), nothing);
        make_step<FIRST + 2>(now, columns, in_row(at.stage, 1), nothing);
        make_step<FIRST + 3>(now, columns, in_row(at.stage, 2), nothing);
    }

    // The last step of a stage, with the next copies between its products.
    template <int NEXT, bool WITH_RAW>
    __device__ void last_step(State &now, const Columns &columns, bool is_in_row,
                              const Copies &copies) const {
        constexpr int n = X_PART;
        unsigned from[n];
        make_step<NEXT>(now, columns, is_in_row, [&](int p, bool is_before) {
            if (is_before) {
                if (p == 0) find_sources<0>(copies.x, from);
                if (p == 1) find_sources<n>(copies.x, from);
                if (p == 2) find_sources<2 * n>(copies.x, from);
                if (p == 3) find_sources<3 * n>(copies.x, from);
                return;
            }
            if (p == 0) copy_x<0>(copies.x, copies.x_slot, from);
            if (p == 1) copy_x<n>(copies.x, copies.x_slot, from);
            if (p == 2) copy_x<2 * n>(copies.x, copies.x_slot, from);
            if (p == 3) copy_x<3 * n>(copies.x, copies.x_slot, from);
            if (WITH_RAW && p < RAW_PASSES) copy_raw(copies.raw, copies.raw_slot, p);
        });
    }

    __device__ void store(const State &now, const Tile &tile) const {
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
        const int row = tile.first_row + 32 * (threadIdx.x / 32 % ROW_WARPS) + g;
        const int token_warp = threadIdx.x / 32 / ROW_WARPS;
        float *to = product.out + row +
                    static_cast<long long>(tile.first + 64 * token_warp + 2 * t) * product.rows;
#pragma unroll
        for (int i = 0; i < 64; i++) {
            const int m = i / 32, n = i / 4 % 8, half = i / 2 % 2, token = 8 * n + i % 2;
            if (row + 16 * m + 8 * half < product.rows && 2 * t + token < now.tokens)
                to[static_cast<long long>(token) * product.rows + 16 * m + 8 * half] =
                    now.totals[m][n][i % 4] / GAIN<TYPE>;
        }
    }
};

// How many of `tiles` a block makes that takes every gridDim.x-th, from blockIdx.x on.
__device__ inline int share_of(int tiles) {
    const int first = blockIdx.x, step = gridDim.x;
    return first < tiles ? (tiles - first + step - 1) / step : 0;
}

// matmul_prompt: any grid, whose blocks go round robin through the tiles, token tiles innermost
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS, int X_SLOTS, int RAW_SLOTS>
__global__ void __launch_bounds__(32 * ROW_WARPS * TOKEN_WARPS)
    matmul_prompt(const float *, const unsigned short *activations, const unsigned char *data,
                  float *out, long long, long long tokens, long long rows, long long cols,
                  long long slice) {
    using Block = Many<TYPE, LANE, ALIGN, ROW_WARPS, TOKEN_WARPS, X_SLOTS, RAW_SLOTS, true>;
    extern __shared__ uint4 shared[];
    const Product product = {activations,
                             out,
                             static_cast<int>(rows),
                             static_cast<int>(cols),
                             static_cast<int>(slice),
                             0};
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

// Which token tiles are which expert's, in shared memory.
struct Experts {
    int *start;              // [experts + 1], as the argument
    unsigned short *prefix;  // [experts + 1]: token tiles of the experts before
    int count;

    // By all threads of the block; ends with a barrier.
    template <int TOKENS>
    __device__ void load(const int *expert_start) const {
        const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
        __shared__ int warp_sums[32];
        if (threadIdx.x == 0) prefix[0] = 0, start[0] = expert_start[0];
        int done = 0;
        for (int first = 0; first < count; first += blockDim.x) {
            const int e = first + threadIdx.x;
            const int end = e < count ? expert_start[e + 1] : 0;
            int sum = e < count ? (end - expert_start[e] + TOKENS - 1) / TOKENS : 0;
            for (int distance = 1; distance < 32; distance *= 2) {
                const int below = __shfl_up_sync(0xffffffffu, sum, distance);
                if (lane >= distance) sum += below;
            }
            if (lane == 31) warp_sums[warp] = sum;
            __syncthreads();
            int before = done;
            for (int w = 0; w < warp; w++) before += warp_sums[w];
            if (e < count) prefix[e + 1] = before + sum, start[e + 1] = end;
            for (int w = 0; w < warps; w++) done += warp_sums[w];
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

// grouped_prompt: pairs sorted by expert; any grid, whose blocks go round robin through the tiles
// of (expert, its tokens, weight rows), rows innermost.
template <int TYPE, int LANE, int ALIGN, int ROW_WARPS, int TOKEN_WARPS, int X_SLOTS, int RAW_SLOTS>
__global__ void __launch_bounds__(32 * ROW_WARPS * TOKEN_WARPS)
    grouped_prompt(const float *, const unsigned short *activations, const long long *blobs,
                   const int *row_of, const int *expert_start, float *out, long long,
                   long long rows, long long cols, long long offset_bytes, long long experts,
                   long long slice) {
    using Block = Many<TYPE, LANE, ALIGN, ROW_WARPS, TOKEN_WARPS, X_SLOTS, RAW_SLOTS, false>;
    extern __shared__ uint4 shared[];
    const Product product = {
        activations, out, static_cast<int>(rows), static_cast<int>(cols), static_cast<int>(slice),
        offset_bytes};
    const Block block(product, reinterpret_cast<unsigned char *>(shared));
    int *start = reinterpret_cast<int *>(block.sources + RING * Block::TOKENS) + BOOK_WORDS<TYPE>;
    const Experts all = {start, reinterpret_cast<unsigned short *>(start + experts + 1),
                         static_cast<int>(experts)};
    all.load<Block::TOKENS>(expert_start);
    const int row_tiles = (static_cast<int>(rows) + Block::ROWS - 1) / Block::ROWS;
    const int tiles = share_of(all.prefix[all.count] * row_tiles);
    if (tiles == 0) return;
    block.run(tiles, [&](int i) {
        if (threadIdx.x >= Block::TOKENS) return;
        const int tile = blockIdx.x + i * gridDim.x, token_tile = tile / row_tiles;
        const int expert = all.of_tile(token_tile), slot = i % RING;
        const int first = all.start[expert] + (token_tile - all.prefix[expert]) * Block::TOKENS;
        const int count = min(Block::TOKENS, all.start[expert + 1] - first);
        if (threadIdx.x == 0) {
            Tile &to = block.ring[slot];
            copy_word<8>(&to.matrix, blobs + expert);
            to.first_row = tile % row_tiles * Block::ROWS, to.first = first, to.count = count;
        }
        for (int token = threadIdx.x; token < Block::TOKENS; token += Block::THREADS)
            copy_word<4>(block.sources + slot * Block::TOKENS + token,
                         row_of + first + min(token, count - 1));
    });
}
