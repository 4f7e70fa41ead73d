// A block of matmul_warpgroup.cu: warps that copy, and two warpgroups that multiply what came.
//
// It makes tiles of 128 weight rows and up to 128 tokens, one after the other, in stages of 256 k,
// or 128 where rows of a type are cut finer. Four warps copy raw rows. Four copy activations by way
// of registers, whence stmatrix puts them in the order that the tensor cores want. In the
// warpgroups a warp decodes 16 rows straight into the registers that wgmma takes, a step ahead of
// the products, which run beside it.
#pragma once
#include "mma.cuh"
#include "overlap.cuh"
#include "tiles.cuh"
#include "warpgroup.cuh"
#include "wide_book.cuh"

// The warps of a block: those that copy activations, two warpgroups that multiply, those that copy
// raw rows.
constexpr int X_WARPS = 4, MULTIPLYING_WARPS = 8, RAW_WARPS = 4;
constexpr int FIRST_MULTIPLYING = X_WARPS, FIRST_RAW = FIRST_MULTIPLYING + MULTIPLYING_WARPS;
constexpr int THREADS = 32 * (FIRST_RAW + RAW_WARPS);
constexpr int X_REGISTERS = 104, RAW_REGISTERS = 40, MULTIPLYING_REGISTERS = 184;
constexpr int BATCH = 8;                             // loads of a lane that start together
constexpr int TILE_BYTES = TOKENS * TILE_ROW_BYTES;  // of 64 k
constexpr int GROUPS = TOKENS / (4 * X_WARPS);       // of four tokens, of a warp

// What all tiles of a launch share.
struct Product {
    const unsigned short *activations;
    float *out;
    int rows, cols, slice;
};

// A place in a ring of slots, and how often the ring was gone through before, even or odd.
template <int SLOTS>
struct Turn {
    int slot = 0;
    unsigned parity = 0;

    __device__ void go_on() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

template <int TYPE, int LANE, int ALIGN, int X_SLOTS, int RAW_SLOTS>
struct Warpgroups {
    using R = Rows<TYPE, LANE>;
    static constexpr int STAGE = R::STEPS == 8 ? 256 : 128, STEPS = STAGE / 32;
    static constexpr int RAW_BYTES = R::bytes(STAGE);
    // Rows begin anywhere in their first 16 bytes, as the alignment of rows and stages allows.
    static constexpr int STEP_ALIGN = stage_alignment(ALIGN, RAW_BYTES);
    static constexpr int CHUNKS = (RAW_BYTES + 16 - STEP_ALIGN + 15) / 16;
    static constexpr int PITCH = 16 * (CHUNKS | 1);
    static constexpr int RAW_SLOT_BYTES = ROWS * PITCH + 16;
    static constexpr bool FULL =
        !R::IS_FLOAT && 4 * LANE >= 128;  // every stage lies within the row
    // Activations of a stage: so many tiles of 64 k, in batches of so many groups of tokens.
    static constexpr int TILES = STAGE / 64, TOGETHER = BATCH / TILES, BATCHES = GROUPS / TOGETHER;
    static constexpr int X_SLOT_BYTES = TILES * TILE_BYTES;

    struct Gates {
        unsigned long long x_full[X_SLOTS], x_free[X_SLOTS], raw_full[RAW_SLOTS],
            raw_free[RAW_SLOTS];
    };

    const Product product;
    const int stages;
    unsigned char *x;
    unsigned char *raw;
    Gates *gates;
    unsigned *rest;  // code book, then what the launch keeps

    // num_stages: of a row; 0: all of them.
    __device__ Warpgroups(const Product &all, unsigned char *shared, int num_stages = 0)
        : product(all),
          stages(num_stages ? num_stages : (all.cols + STAGE - 1) / STAGE),
          x(shared),
          raw(x + X_SLOTS * X_SLOT_BYTES),
          gates(reinterpret_cast<Gates *>(raw + RAW_SLOTS * RAW_SLOT_BYTES)),
          rest(reinterpret_cast<unsigned *>(gates + 1)) {}

    __device__ void open_gates() const {
        if (threadIdx.x != 0) return;
        for (int i = 0; i < X_SLOTS; i++) {
            open_gate(&gates->x_full[i], X_WARPS);
            open_gate(&gates->x_free[i], MULTIPLYING_WARPS);
        }
        for (int i = 0; i < RAW_SLOTS; i++) {
            open_gate(&gates->raw_full[i], 32 * RAW_WARPS);
            open_gate(&gates->raw_free[i], MULTIPLYING_WARPS);
        }
        publish_gates();
    }

    __device__ const unsigned char *row_at(const Tile &tile, int row) const {
        const long long n = min(tile.first_row + row, product.rows - 1);
        return tile.matrix + n * R::bytes(product.cols);
    }

    // Of a row's stage, from the lower bits of its address.
    __device__ static int phase_of(unsigned address) {
        return STEP_ALIGN == 16 ? 0 : static_cast<int>(address & 15) / STEP_ALIGN * STEP_ALIGN;
    }
    __device__ static unsigned lower_bits(const unsigned char *address) {
        return static_cast<unsigned>(reinterpret_cast<unsigned long long>(address));
    }

    // -- raw rows --------------------------------------------------------------------------------

    // Four threads copy a row's stage, 64 bytes at a time; zeros follow where the row ends within.
    __device__ void copy_rows(const Tile &tile, int stage, int slot) const {
        const int first = 16 * (threadIdx.x % 4);
        const int length = FULL ? RAW_BYTES : R::bytes(min(STAGE, product.cols - stage * STAGE));
#pragma unroll 1
        for (int i = 0; i < ROWS / (8 * RAW_WARPS); i++) {
            const int row = (threadIdx.x - 32 * FIRST_RAW) / 4 + 8 * RAW_WARPS * i;
            if (tile.first_row + row >= product.rows) break;  // whatever is there is not stored
            const unsigned char *from = row_at(tile, row) + stage * RAW_BYTES;
            const int phase = phase_of(lower_bits(from));
            from += first - phase;
            unsigned char *to = raw + slot * RAW_SLOT_BYTES + row * PITCH + first;
#pragma unroll
            for (int at = 0; at < 16 * CHUNKS; at += 64) {
                if (FULL && (at + 64 <= RAW_BYTES || (STEP_ALIGN == 16 && first + at < RAW_BYTES)))
                    copy_async(to + at, from + at);
                else if (first + at < 16 * CHUNKS)
                    copy_async(to + at, from + at, max(0, min(16, phase + length - first - at)));
            }
        }
        arrive_when_copied(&gates->raw_full[slot]);
    }

    template <class Tiles>
    __device__ void copy_raw(const Tiles &tiles) const {
        Turn<RAW_SLOTS> turn;
        for (int i = 0; i < tiles.count; i++) {
            const Tile tile = tiles.tile(i);
            for (int stage = 0; stage < stages; stage++) {
                pass_gate(&gates->raw_free[turn.slot], turn.parity ^ 1);
                copy_rows(tile, stage, turn.slot);
                turn.go_on();
            }
        }
    }

    // -- activations -----------------------------------------------------------------------------

    // Where the stream of loads is: the next batch, and where the rows of x begin, in 16 bytes, of
    // this lane's token in each group of its warp.
    struct Source {
        int tile, stage;
        unsigned rows[GROUPS];
        int groups;  // that the tile has
    };

    // A batch of loads that is on its way.
    struct Batch {
        uint4 octets[TOGETHER][TILES];
        int groups;
    };

    // Lane 8u + 4i + t has token u of each group, of all its steps 2q + i octet t.
    template <class Tiles>
    __device__ void begin_tile(Source &source, const Tiles &tiles) const {
        const Tile tile = tiles.tile(source.tile);
        const int warp = threadIdx.x / 32, first = 4 * warp + (threadIdx.x & 31) / 8;
        source.groups = ((tile.count + 3) / 4 - warp + X_WARPS - 1) / X_WARPS;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const int token = min(first + 4 * X_WARPS * i, tile.count - 1);
            source.rows[i] = tiles.row_of(tile.first + token) * (product.cols / 8);
        }
    }

    __device__ void load(Batch &batch, const Source &source, int number) const {
        const int own_k = source.stage * STAGE + R::k_of(threadIdx.x / 4 & 1, threadIdx.x & 3);
        const uint4 *from = reinterpret_cast<const uint4 *>(product.activations) + own_k / 8;
        batch.groups = source.groups - number * TOGETHER;
#pragma unroll
        for (int g = 0; g < TOGETHER; g++) {
            if (g >= batch.groups) break;
            const uint4 *row = from + source.rows[number * TOGETHER + g];
#pragma unroll
            for (int q = 0; q < TILES; q++) {
                const int k = R::k_of(2 * q, 0);
                batch.octets[g][q] = FULL || own_k + k < product.cols ? load_ahead(row + k / 8)
                                                                      : make_uint4(0, 0, 0, 0);
            }
        }
    }

    // Each word of four lanes' octets becomes 16 bytes of a tile's row: the order of mma.cuh.
    __device__ void store(const Batch &batch, unsigned slot, int number) const {
        const int lane = threadIdx.x & 31, token = threadIdx.x / 32 * 4 + (lane & 7) / 2;
        const int chunk = 4 * (lane & 1) + lane / 8;
        const unsigned to = slot + token * TILE_ROW_BYTES + 16 * (chunk ^ (token & 7));
#pragma unroll
        for (int g = 0; g < TOGETHER; g++) {
            if (g >= batch.groups) break;
            const int row = 4 * X_WARPS * (number * TOGETHER + g);
#pragma unroll
            for (int q = 0; q < TILES; q++)
                store_words(to + row * TILE_ROW_BYTES + q * TILE_BYTES, batch.octets[g][q]);
        }
    }

    // After the last batch of a stage.
    template <class Tiles>
    __device__ void go_on(Source &source, const Tiles &tiles) const {
        if (++source.stage < stages) return;
        source.stage = 0;
        if (++source.tile < tiles.count) begin_tile(source, tiles);
    }

    template <class Tiles>
    __device__ void copy_x(const Tiles &tiles) const {
        if (tiles.count == 0) return;
        Source source = {0, 0};
        begin_tile(source, tiles);
        Batch batches[2];
        load(batches[0], source, 0);
        Turn<X_SLOTS> turn;
#pragma unroll 1
        for (int left = tiles.count * stages; left > 0; left--) {
            const unsigned slot = shared_address(x + turn.slot * X_SLOT_BYTES);
            pass_gate(&gates->x_free[turn.slot], turn.parity ^ 1);
#pragma unroll
            for (int i = 0; i < BATCHES; i++) {
                if (i + 1 == BATCHES) go_on(source, tiles);
                if (i + 1 < BATCHES || left > 1)
                    load(batches[(i + 1) % 2], source, (i + 1) % BATCHES);
                store(batches[i % 2], slot, i);
            }
            publish_to_tensor_cores();
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(&gates->x_full[turn.slot]);
            turn.go_on();
        }
    }

    // -- products --------------------------------------------------------------------------------

    struct Rings {
        Turn<X_SLOTS> x;
        Turn<RAW_SLOTS> raw;
    };

    __device__ static void free_slot(unsigned long long *gate) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(gate);
    }

    template <int NUM>
    struct Sums {
        float of[NUM / 2], totals[NUM / 2];
    };

    // The lane's two rows: what tells where they begin in a stage, and their scales.
    struct Own {
        unsigned address[2];
        RowScale scale[2];
    };

    // The first of the two rows, counted from the tile's first one.
    __device__ static int own_row() {
        return (threadIdx.x / 32 - FIRST_MULTIPLYING) * 16 + (threadIdx.x & 31) / 4;
    }

    // A stage of raw rows that is decoded: where this lane's begin.
    struct Raw {
        const unsigned char *from;
        int phase[2], number;
    };

    __device__ Raw raw_of(const Own &own, int number, const Rings &rings) const {
        const unsigned char *slot = raw + rings.raw.slot * RAW_SLOT_BYTES;
        const unsigned at = number * RAW_BYTES;
        pass_gate(&gates->raw_full[rings.raw.slot], rings.raw.parity);
        return {slot + own_row() * PITCH,
                {phase_of(own.address[0] + at), phase_of(own.address[1] + at)},
                number};
    }

    // The weights of a step, as wgmma takes them.
    template <int STEP, class Book>
    __device__ void decode_step(unsigned (&w)[2][4], Own &own, const Raw &stage, Book book) const {
        Octet o[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            o[i] = decode<TYPE, LANE, STEP_ALIGN, WideCodec<TYPE>>(
                {stage.from + 8 * i * PITCH, stage.phase[i]}, STEP, threadIdx.x & 3, book,
                own.scale[i]);
            if (LANE < 32 && stage.number * STAGE + 32 * STEP >= product.cols)
                o[i] = {{0, 0, 0, 0}};
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) w[half][i] = o[i % 2].pair[2 * half + i / 2];
    }

    // Decoded weights of PACE steps, and of as many that are multiplied: with few tokens a step's
    // products are done before one step is decoded, and two together hide what each waits for.
    template <int NUM>
    struct Weights {
        static constexpr int PACE = NUM <= 96 ? 2 : 1;
        unsigned of[2][PACE][2][4];
    };

    template <int STEP, int NUM, class Book>
    __device__ void decode_steps(Weights<NUM> &w, Own &own, const Raw &stage, Book book) const {
        constexpr int pace = Weights<NUM>::PACE;
        decode_step<STEP>(w.of[STEP / pace % 2][0], own, stage, book);
        if constexpr (pace == 2) decode_step<STEP + 1>(w.of[STEP / pace % 2][1], own, stage, book);
    }

    // Multiplies the steps from STEP on whose weights are decoded, and the following ones of the
    // stage: weights are decoded while the products of the steps before run.
    template <int STEP, int NUM, class Book>
    __device__ void multiply_steps(Sums<NUM> &sums, Own &own, Weights<NUM> &w, const Raw &stage,
                                   unsigned long long b, bool adds, Book book) const {
        constexpr int pace = Weights<NUM>::PACE;
        begin_products();
#pragma unroll
        for (int i = 0; i < pace; i++) {
            const unsigned (&own_w)[2][4] = w.of[STEP / pace % 2][i];
            const int at = (STEP + i) / 2 * TILE_BYTES + (STEP + i) % 2 * 64;
            multiply_async<NUM>(sums.of, own_w[0], b + at / 16, STEP + i > 0 || adds);
            multiply_async<NUM>(sums.of, own_w[1], b + (at + 32) / 16, 1);
        }
        commit_products();
        wait_products<1>();
        if constexpr (STEP + pace < STEPS) {
            decode_steps<STEP + pace>(w, own, stage, book);
            multiply_steps<STEP + pace>(sums, own, w, stage, b, adds, book);
        }
    }

    template <int NUM, bool IS_WHOLE, class Book>
    __device__ void multiply_tile(const Tile &tile, Rings &rings, Book book) const {
        Sums<NUM> sums;
        Own own;
        Weights<NUM> w;
#pragma unroll
        for (int i = 0; i < 2; i++) own.address[i] = lower_bits(row_at(tile, own_row() + 8 * i));
#pragma unroll
        for (int i = 0; i < NUM / 2; i++) sums.of[i] = sums.totals[i] = 0.0f;
        int left_of_slice = product.slice;
        Raw stage = raw_of(own, 0, rings);
        decode_steps<0>(w, own, stage, book);
#pragma unroll 1
        for (int number = 0; number < stages; number++) {
            pass_gate(&gates->x_full[rings.x.slot], rings.x.parity);
            multiply_steps<0>(sums, own, w, stage,
                              tile_descriptor(shared_address(x + rings.x.slot * X_SLOT_BYTES)),
                              left_of_slice != product.slice, book);
            free_slot(&gates->raw_free[rings.raw.slot]);
            rings.raw.go_on();
            if (number + 1 < stages) {
                stage = raw_of(own, number + 1, rings);
                decode_steps<0>(w, own, stage, book);
            }
            wait_products<0>();
            free_slot(&gates->x_free[rings.x.slot]);
            rings.x.go_on();
            left_of_slice -= STAGE;
            if (left_of_slice == 0 || number + 1 == stages) {
                left_of_slice = product.slice;
#pragma unroll
                for (int i = 0; i < NUM / 2; i++) sums.totals[i] += sums.of[i];
            }
        }
        store<IS_WHOLE>(sums.totals, tile);
    }

    template <bool IS_WHOLE, int SIZE>
    __device__ void store(const float (&totals)[SIZE], const Tile &tile) const {
        const int t = threadIdx.x & 3, row = tile.first_row + own_row();
        float *to = product.out + row + static_cast<long long>(tile.first + 2 * t) * product.rows;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const int half = i / 2 % 2, token = 8 * (i / 4) + i % 2;
            if (row + 8 * half < product.rows && 2 * t + token < tile.count)
                to[static_cast<long long>(token) * product.rows + 8 * half] =
                    IS_WHOLE ? totals[i] / GAIN<TYPE> : totals[i];
        }
    }

    template <int NUM, class Tiles, class Book>
    __device__ void multiply_tiles(const Tiles &tiles, Book book) const {
        Rings rings;
        for (int i = 0; i < tiles.count; i++) {
            const Tile tile = tiles.tile(i);
            if constexpr (NUM != 0)
                multiply_tile<NUM, Tiles::IS_WHOLE>(tile, rings, book);
            else if (tile.count > 96)
                multiply_tile<128, Tiles::IS_WHOLE>(tile, rings, book);
            else if (tile.count > 64)
                multiply_tile<96, Tiles::IS_WHOLE>(tile, rings, book);
            else if (tile.count > 32)
                multiply_tile<64, Tiles::IS_WHOLE>(tile, rings, book);
            else
                multiply_tile<32, Tiles::IS_WHOLE>(tile, rings, book);
        }
    }

    // All threads of the block, after a barrier that follows open_gates and the book's loading.
    // NUM: for so many tokens of every tile, whether it has them or not; 0: as it has them.
    template <int NUM, class Tiles, class Book>
    __device__ void run(const Tiles &tiles, Book book) const {
        const int warp = threadIdx.x / 32;
        if (warp < FIRST_MULTIPLYING) {
            give_registers<X_REGISTERS>();
            copy_x(tiles);
        } else if (warp < FIRST_RAW) {
            take_registers<MULTIPLYING_REGISTERS>();
            multiply_tiles<NUM>(tiles, book);
        } else {
            give_registers<RAW_REGISTERS>();
            copy_raw(tiles);
        }
    }
};
