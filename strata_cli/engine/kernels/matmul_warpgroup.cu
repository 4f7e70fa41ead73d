// Products of quantized weights with many activation rows on sm_90a: bound by its tensor cores.
//   x [T,K] f16 (as round_rows leaves it), N rows of K weights -> out [T,N] f32
//   2 * T*N*K floating-point operations over the tensor cores' rate; a tile reads its weights once
//   and decodes them once.
//
// A block makes tiles of 128 weight rows and up to 128 tokens, one after the other. Four warps
// copy: raw rows asynchronously, activations by way of registers, which puts them in the order that
// the tensor cores want. Two warpgroups multiply: a warp decodes 16 rows straight into the
// registers that wgmma takes, a step ahead of the products, which run beside it. Each sum is made
// of the same operations in the same order as in matmul_few.cu: slices from zero, totals in
// ascending order.
#include "mma.cuh"
#include "warpgroup.cuh"
#include "wide_book.cuh"

constexpr int STAGE = 128;               // k per stage of activations: four steps
constexpr int ROWS = 128, TOKENS = 128;  // most of a tile
constexpr int COPYING = 128, THREADS = COPYING + 256;
constexpr int MULTIPLYING_WARPS = 8;
constexpr int COPYING_REGISTERS = 104, MULTIPLYING_REGISTERS = 200;
constexpr int HALF_BYTES = TOKENS * TILE_ROW_BYTES;  // of 64 k: half a stage
constexpr int X_SLOT_BYTES = 2 * HALF_BYTES;
constexpr int COPIES = TOKENS / 16;  // of 16 bytes, of a lane that copies, in half a stage

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
    static constexpr int RAW = R::STEPS == 8 ? 256 : 128;  // k per stage of raw rows
    static constexpr int PER_RAW = RAW / STAGE;
    static constexpr int RAW_BYTES = R::bytes(RAW);
    // Rows begin anywhere in their first 16 bytes, as the alignment of rows and stages allows.
    static constexpr int STEP_ALIGN = stage_alignment(ALIGN, RAW_BYTES);
    static constexpr int CHUNKS = (RAW_BYTES + 16 - STEP_ALIGN + 15) / 16;
    static constexpr int PITCH = 16 * (CHUNKS | 1);
    static constexpr int RAW_SLOT_BYTES = ROWS * PITCH + 16;
    static constexpr bool FULL =
        !R::IS_FLOAT && 4 * LANE >= STAGE;  // every stage lies within the row

    struct Gates {
        unsigned long long x_full[X_SLOTS], x_free[X_SLOTS], raw_full[RAW_SLOTS],
            raw_free[RAW_SLOTS];
    };

    const Product product;
    const int stages;
    unsigned char *x;  // slots of two tiles of 64 k each
    unsigned char *raw;
    Gates *gates;
    unsigned *rest;  // code book, then what the launch keeps

    __device__ Warpgroups(const Product &all, unsigned char *shared)
        : product(all),
          stages((all.cols + STAGE - 1) / STAGE),
          x(shared),
          raw(x + X_SLOTS * X_SLOT_BYTES),
          gates(reinterpret_cast<Gates *>(raw + RAW_SLOTS * RAW_SLOT_BYTES)),
          rest(reinterpret_cast<unsigned *>(gates + 1)) {}

    __device__ void open_gates() const {
        if (threadIdx.x != 0) return;
        for (int i = 0; i < X_SLOTS; i++) {
            open_gate(&gates->x_full[i], COPYING / 32);
            open_gate(&gates->x_free[i], MULTIPLYING_WARPS);
        }
        for (int i = 0; i < RAW_SLOTS; i++) {
            open_gate(&gates->raw_full[i], COPYING);
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

    // -- copying ---------------------------------------------------------------------------------

    // Four threads copy a row together, 64 bytes at a time.
    __device__ void copy_raw(const Tile &tile, int raw_stage, int slot) const {
        const int first = 16 * (threadIdx.x % 4);
        const int length = FULL ? RAW_BYTES : R::bytes(min(RAW, product.cols - raw_stage * RAW));
#pragma unroll 1
        for (int row = threadIdx.x / 4; row < ROWS; row += COPYING / 4) {
            const unsigned char *from = row_at(tile, row) + raw_stage * RAW_BYTES;
            const int phase =
                phase_of(static_cast<unsigned>(reinterpret_cast<unsigned long long>(from)));
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
    }

    // Half a stage of a tile's activations on their way. Lane 4r + t has, of every 16th token from
    // 4 * warp + r / 2 on, octet t of the half's step r % 2.
    struct Half {
        uint4 octets[COPIES];
        int groups;  // of 16 tokens
    };

    // Where the stream of halves is, and the tile's tokens.
    struct Source {
        int tile, stage, half;
        unsigned rows[COPIES];  // where the rows of x begin, in 16 bytes
        int groups;
    };

    template <class Tiles>
    __device__ void begin_tile(Source &source, const Tiles &tiles) const {
        const Tile tile = tiles.tile(source.tile);
        const int own = threadIdx.x / 32 * 4 + (threadIdx.x & 31) / 8;
        source.groups = (tile.count + 15) / 16;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int token = min(own + 16 * i, tile.count - 1);
            source.rows[i] = tiles.row_of(tile.first + token) * (product.cols / 8);
        }
    }

    template <class Tiles>
    __device__ void advance(Source &source, const Tiles &tiles) const {
        source.half ^= 1;
        if (source.half) return;
        if (++source.stage < stages) return;
        source.stage = 0;
        if (++source.tile < tiles.count) begin_tile(source, tiles);
    }

    __device__ void load_half(Half &half, const Source &source) const {
        const int t = threadIdx.x & 3,
                  step = source.stage % PER_RAW * 4 + 2 * source.half + (threadIdx.x / 4 & 1);
        const int k = source.stage / PER_RAW * RAW + R::k_of(step, t);
        const bool in_row = FULL || k < product.cols;
        const uint4 *from = reinterpret_cast<const uint4 *>(product.activations) + k / 8;
        half.groups = source.groups;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            if (i >= source.groups) break;
            uint4 &to = half.octets[i];
            to = in_row ? load_ahead(from + source.rows[i]) : make_uint4(0, 0, 0, 0);
        }
    }

    // Each word of four lanes' octets becomes 16 bytes of a row: the order of mma.cuh.
    __device__ void store_half(const Half &half, unsigned place) const {
        const int lane = threadIdx.x & 31, token = threadIdx.x / 32 * 4 + (lane & 7) / 2;
        const int chunk = 4 * (lane & 1) + lane / 8;
        const unsigned to = place + token * TILE_ROW_BYTES + 16 * (chunk ^ (token & 7));
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            if (i >= half.groups) break;
            store_words(to + 16 * i * TILE_ROW_BYTES, half.octets[i]);
        }
    }

    template <class Tiles>
    __device__ void copy_tiles(const Tiles &tiles) const {
        if (tiles.count == 0) return;
        Turn<X_SLOTS> x_turn;
        Turn<RAW_SLOTS> raw_turn;
        Source source = {0, 0, 0};
        begin_tile(source, tiles);
        Half halves[2];
        load_half(halves[0], source);
        for (int i = 0; i < tiles.count; i++) {
            const Tile tile = tiles.tile(i);
            for (int stage = 0; stage < stages; stage++) {
                if (stage % PER_RAW == 0) {
                    pass_gate(&gates->raw_free[raw_turn.slot], raw_turn.parity ^ 1);
                    copy_raw(tile, stage / PER_RAW, raw_turn.slot);
                    arrive_when_copied(&gates->raw_full[raw_turn.slot]);
                    raw_turn.go_on();
                }
                const unsigned place = shared_address(x + x_turn.slot * X_SLOT_BYTES);
                advance(source, tiles);
                load_half(halves[1], source);
                pass_gate(&gates->x_free[x_turn.slot], x_turn.parity ^ 1);
                store_half(halves[0], place);
                advance(source, tiles);
                if (source.tile < tiles.count) load_half(halves[0], source);
                store_half(halves[1], place + HALF_BYTES);
                publish_to_tensor_cores();
                __syncwarp();
                if (threadIdx.x % 32 == 0) arrive(&gates->x_full[x_turn.slot]);
                x_turn.go_on();
            }
        }
    }

    // -- multiplying -----------------------------------------------------------------------------

    // Where a warpgroup is in the rings; a slot of activations is free a step after its last one.
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

    // The weights of a step, FIRST + STEP of the raw stage, as wgmma takes them.
    template <int STEP, class Book>
    __device__ void decode_step(unsigned (&w)[2][4], Own &own, const unsigned char *from,
                                const int (&phase)[2], bool in_row, Book book) const {
        Octet o[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            o[i] = decode<TYPE, LANE, STEP_ALIGN, WideCodec<TYPE>>(
                {from + 8 * i * PITCH, phase[i]}, STEP, threadIdx.x & 3, book, own.scale[i]);
            if (LANE < 32 && !in_row) o[i] = {{0, 0, 0, 0}};
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) w[half][i] = o[i % 2].pair[2 * half + i / 2];
    }

    // Four steps, FIRST ... of their raw stage. Products of the stage before may still run.
    template <int FIRST, int NUM, class Book>
    __device__ void multiply_stage(Sums<NUM> &sums, Own &own, int stage, Rings &rings, bool adds,
                                   Book book) const {
        const int row = (threadIdx.x / 32 - COPYING / 32) * 16 + (threadIdx.x & 31) / 4;
        const unsigned char *from = raw + rings.raw.slot * RAW_SLOT_BYTES + row * PITCH;
        int phase[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            phase[i] = phase_of(own.address[i] + stage / PER_RAW * RAW_BYTES);
        if (FIRST == 0) pass_gate(&gates->raw_full[rings.raw.slot], rings.raw.parity);
        const unsigned long long b =
            tile_descriptor(shared_address(x + rings.x.slot * X_SLOT_BYTES));
        unsigned w[2][2][4];
        multiply_one<FIRST, 0>(sums, own, w, from, phase, b, stage, rings, adds, book);
        multiply_one<FIRST, 1>(sums, own, w, from, phase, b, stage, rings, adds, book);
        multiply_one<FIRST, 2>(sums, own, w, from, phase, b, stage, rings, adds, book);
        multiply_one<FIRST, 3>(sums, own, w, from, phase, b, stage, rings, adds, book);
        if (FIRST + 4 == 4 * PER_RAW) {
            free_slot(&gates->raw_free[rings.raw.slot]);
            rings.raw.go_on();
        }
        wait_products<0>();
        free_slot(&gates->x_free[rings.x.slot]);
        rings.x.go_on();
    }

    template <int FIRST, int STEP, int NUM, class Book>
    __device__ void multiply_one(Sums<NUM> &sums, Own &own, unsigned (&w)[2][2][4],
                                 const unsigned char *from, const int (&phase)[2],
                                 unsigned long long b, int stage, const Rings &rings, bool adds,
                                 Book book) const {
        const bool in_row = LANE >= 32 || stage * STAGE + 32 * STEP < product.cols;
        if (STEP >= 2) wait_products<1>();
        unsigned (&own_w)[2][4] = w[STEP % 2];
        decode_step<FIRST + STEP>(own_w, own, from, phase, in_row, book);
        if (STEP == 0) pass_gate(&gates->x_full[rings.x.slot], rings.x.parity);
        const unsigned long long at = b + (STEP / 2 * HALF_BYTES + STEP % 2 * 64) / 16;
        begin_products();
        multiply_async<NUM>(sums.of, own_w[0], at, STEP > 0 || adds);
        multiply_async<NUM>(sums.of, own_w[1], at + 2, 1);
        commit_products();
    }

    template <int NUM, class Book>
    __device__ void multiply_tile(const Tile &tile, Rings &rings, Book book) const {
        Sums<NUM> sums;
        Own own;
        const int row = (threadIdx.x / 32 - COPYING / 32) * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
        for (int i = 0; i < 2; i++)
            own.address[i] = static_cast<unsigned>(
                reinterpret_cast<unsigned long long>(row_at(tile, row + 8 * i)));
#pragma unroll
        for (int i = 0; i < NUM / 2; i++) sums.of[i] = sums.totals[i] = 0.0f;
        int left_of_slice = product.slice;
#pragma unroll 1
        for (int stage = 0; stage < stages; stage++) {
            const bool adds = left_of_slice != product.slice;
            if (PER_RAW == 2 && stage % 2)
                multiply_stage<PER_RAW == 2 ? 4 : 0>(sums, own, stage, rings, adds, book);
            else
                multiply_stage<0>(sums, own, stage, rings, adds, book);
            left_of_slice -= STAGE;
            if (left_of_slice == 0 || stage + 1 == stages) {
                left_of_slice = product.slice;
#pragma unroll
                for (int i = 0; i < NUM / 2; i++) sums.totals[i] += sums.of[i];
            }
        }
        // A row may end after the first half of its last raw stage.
        if (PER_RAW == 2 && stages % 2) {
            free_slot(&gates->raw_free[rings.raw.slot]);
            rings.raw.go_on();
        }
        store(sums.totals, tile);
    }

    template <int SIZE>
    __device__ void store(const float (&totals)[SIZE], const Tile &tile) const {
        const int lane = threadIdx.x & 31, t = lane & 3;
        const int row = tile.first_row + (threadIdx.x / 32 - COPYING / 32) * 16 + lane / 4;
        float *to = product.out + row + static_cast<long long>(tile.first + 2 * t) * product.rows;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const int half = i / 2 % 2, token = 8 * (i / 4) + i % 2;
            if (row + 8 * half < product.rows && 2 * t + token < tile.count)
                to[static_cast<long long>(token) * product.rows + 8 * half] =
                    totals[i] / GAIN<TYPE>;
        }
    }

    // Tiles have `num` tokens or fewer; WHOLE: as good as always as many as fit.
    template <bool WHOLE, class Tiles, class Book>
    __device__ void multiply_tiles(const Tiles &tiles, Book book) const {
        Rings rings;
        for (int i = 0; i < tiles.count; i++) {
            const Tile tile = tiles.tile(i);
            if (WHOLE || tile.count > 96)
                multiply_tile<128>(tile, rings, book);
            else if (tile.count > 64)
                multiply_tile<96>(tile, rings, book);
            else if (tile.count > 32)
                multiply_tile<64>(tile, rings, book);
            else
                multiply_tile<32>(tile, rings, book);
        }
    }

    // All threads of the block, after a barrier that follows open_gates and the book's loading.
    template <bool WHOLE, class Tiles, class Book>
    __device__ void run(const Tiles &tiles, Book book) const {
        if (threadIdx.x < COPYING) {
            give_registers<COPYING_REGISTERS>();
            copy_tiles(tiles);
        } else {
            take_registers<MULTIPLYING_REGISTERS>();
            multiply_tiles<WHOLE>(tiles, book);
        }
    }
};

// How many of `tiles` a block makes that takes every gridDim.x-th, from blockIdx.x on.
__device__ inline int share_of(int tiles) {
    const int first = blockIdx.x, step = gridDim.x;
    return first < tiles ? (tiles - first + step - 1) / step : 0;
}

// The tiles of a block, token tiles innermost.
struct DenseTiles {
    const unsigned char *matrix;
    int tokens, token_tiles, count;

    __device__ Tile tile(int i) const {
        const int all = blockIdx.x + i * gridDim.x, first = all % token_tiles * TOKENS;
        return {matrix, all / token_tiles * ROWS, first, min(TOKENS, tokens - first)};
    }
    __device__ unsigned row_of(int pair) const { return pair; }
};

// Which token tiles are which expert's, in shared memory: as few as there can be, of equal size.
struct Experts {
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
            int sum = e < count ? (end - expert_start[e] + TOKENS - 1) / TOKENS : 0;
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

// The tiles of a block, weight rows innermost.
struct GroupedTiles {
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
        const int each = ((pairs + tiles - 1) / tiles + 7) / 8 * 8;
        const int first = (token_tile - experts.prefix[e]) * each;
        return {reinterpret_cast<const unsigned char *>(blobs[e]) + offset, all % row_tiles * ROWS,
                experts.start[e] + first, min(each, pairs - first)};
    }
    __device__ unsigned row_of(int pair) const { return rows_of[pair]; }
};

// matmul_warpgroup: any grid, whose blocks go round robin through the tiles
template <int TYPE, int LANE, int ALIGN, int X_SLOTS, int RAW_SLOTS>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_warpgroup(const float *, const unsigned short *activations, const unsigned char *data,
                     float *out, long long, long long tokens, long long rows, long long cols,
                     long long slice) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Warpgroups<TYPE, LANE, ALIGN, X_SLOTS, RAW_SLOTS> block(
        {activations, out, static_cast<int>(rows), static_cast<int>(cols), static_cast<int>(slice)},
        shared);
    const int token_tiles = (static_cast<int>(tokens) + TOKENS - 1) / TOKENS;
    const int row_tiles = (static_cast<int>(rows) + ROWS - 1) / ROWS;
    block.open_gates();
    const auto book = load_any_book<TYPE>(block.rest);
    __syncthreads();
    const DenseTiles all = {data, static_cast<int>(tokens), token_tiles,
                            share_of(token_tiles * row_tiles)};
    block.template run<true>(all, book);
}

// grouped_warpgroup: pairs sorted by expert; any grid, whose blocks go round robin through the
// tiles of (expert, its tokens, weight rows)
template <int TYPE, int LANE, int ALIGN, int X_SLOTS, int RAW_SLOTS>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_warpgroup(const float *, const unsigned short *activations, const long long *blobs,
                      const int *row_of, const int *expert_start, float *out, long long,
                      long long rows, long long cols, long long offset_bytes, long long experts,
                      long long slice) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Warpgroups<TYPE, LANE, ALIGN, X_SLOTS, RAW_SLOTS> block(
        {activations, out, static_cast<int>(rows), static_cast<int>(cols), static_cast<int>(slice)},
        shared);
    int *scratch = reinterpret_cast<int *>(block.rest) + BOOK_WORDS<TYPE>;
    int *start = scratch + THREADS / 32;
    const Experts all = {start, reinterpret_cast<unsigned short *>(start + experts + 1),
                         static_cast<int>(experts)};
    block.open_gates();
    const auto book = load_any_book<TYPE>(block.rest);
    all.load(expert_start, scratch);
    const int row_tiles = (static_cast<int>(rows) + ROWS - 1) / ROWS;
    const GroupedTiles tiles = {
        all, blobs, row_of, offset_bytes, row_tiles, share_of(all.prefix[all.count] * row_tiles)};
    block.template run<false>(tiles, book);
}
