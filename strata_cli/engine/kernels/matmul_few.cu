// Products of quantized weights with few activation rows: memory-bound, for decode.
//   x [T,K] f32, N rows of K weights -> out [T,N] f32;  D[n, t] = sum over k of W[n, k] * x[t, k]
//   Reads N * K / WEIGHTS * BYTES bytes of weights once per eight rows of x: over the memory's
//   bandwidth that is the limit.
//
// Order of the sums, which matmul_many.cu repeats operation by operation: K is cut into slices;
// within a slice the products of weights.cuh, step after step, into float32 sums that start at
// zero; then total = 0 + slice 0 + slice 1 + ... . Activations are rounded to f16.
//
// Few blocks per multiprocessor. One warp copies stage after stage into rings of slots (spans.cuh),
// the first ones early; teams of the other warps take tiles of up to ROWS weight rows in turns, a
// slice to a warp. The warps of a team wait for each other only once in many tiles, when they add
// up what all of them left. x is in shared memory once. One launch may make several matrices that
// share x, of up to three kinds. Bound by the instructions of decoding, not by memory.
#include "activations.cuh"
#include "mma.cuh"
#include "overlap.cuh"
#include "route.cuh"
#include "spans.cuh"
#include "weights.cuh"
#include "wide_book.cuh"

constexpr int MOST_REGISTERS = 64;  // two blocks of 16 warps then find room on a multiprocessor

#ifndef SLICES_TOGETHER
#define SLICES_TOGETHER 0  // 1: slices of short tiles are multiplied together
#endif

// How a matrix is compiled for: its type, the weights a lane owns, what divides its rows'
// addresses.
template <int TYPE_, int LANE_, int ALIGN_>
struct Kind {
    static constexpr int TYPE = TYPE_, LANE = LANE_, ALIGN = ALIGN_;
    using R = Rows<TYPE, LANE>;
};

// Calls todo with the kind of that index.
template <class First, class... Others, class Todo>
__device__ inline void with_kind(int kind, const Todo &todo) {
    if constexpr (sizeof...(Others) == 0)
        todo(First());
    else if (kind == 0)
        todo(First());
    else
        with_kind<Others...>(kind - 1, todo);
}

template <class... Kinds>
constexpr int KINDS_OF = sizeof...(Kinds);

struct Matrix {
    const unsigned char *data;
    float *out;
    int rows, kind, first_tile;
};

// How a kind's rows are cut: weights of a slice, slices of a row, rows of a tile (ROWS, or fewer of
// heavy ones); the rest as in Cut.
struct Plan {
    int slice, slices, part_slices, tile_rows, span_shift, chunks;
};

__device__ inline Plan plan_from(long long slice, long long slices, long long part_slices,
                                 long long tile_rows, long long span_shift, long long chunks) {
    return {static_cast<int>(slice),       static_cast<int>(slices),
            static_cast<int>(part_slices), static_cast<int>(tile_rows),
            static_cast<int>(span_shift),  static_cast<int>(chunks)};
}

// What the host chose for a launch: teams, warps of each, slots of its ring and 16 bytes of each,
// stages of a tile, tiles of a team whose sums there is room for. Warps beside the teams' only load
// activations.
struct Layout {
    int teams, team_warps, slots, slot_chunks, parts, sums;
};

__device__ inline Layout layout_from(long long teams, long long team_warps, long long slots,
                                     long long slot_chunks, long long parts, long long sums) {
    return {static_cast<int>(teams),       static_cast<int>(team_warps), static_cast<int>(slots),
            static_cast<int>(slot_chunks), static_cast<int>(parts),      static_cast<int>(sums)};
}

// Slices of a tile of half of eight rows, or fewer, that a warp multiplies together where there is
// one column of x: each slice has rows and a column of x of its own; of the products, those that
// cross are left out. 1 << this.
__device__ inline int together_shift(const Plan &plan, int cols, int count) {
    const bool fits = count == 1 && plan.slices * plan.slice == cols;
    return fits ? 3 - (31 - __clz(plan.tile_rows)) : 0;
}

// The matrices of a launch.
template <int ROWS, int MATRICES, class... Kinds>
struct Work {
    static constexpr int KINDS = sizeof...(Kinds);
    Matrix matrices[MATRICES];
    Plan plans[KINDS];
    Layout layout;
    int cols, tiles;

    // After all else.
    __device__ void number_tiles() {
        tiles = 0;
#pragma unroll
        for (int i = 0; i < MATRICES; i++) {
            matrices[i].first_tile = tiles;
            const int tile_rows = plan_of(matrices[i].kind).tile_rows;
            tiles += (matrices[i].rows + tile_rows - 1) / tile_rows;
        }
    }

    __device__ Matrix matrix_of(int tile) const {
        Matrix found = matrices[0];
#pragma unroll
        for (int i = 1; i < MATRICES; i++)
            if (tile >= matrices[i].first_tile) found = matrices[i];
        return found;
    }

    __device__ Plan plan_of(int kind) const {
        Plan plan = plans[0];
#pragma unroll
        for (int i = 1; i < KINDS; i++)
            if (kind == i) plan = plans[i];
        return plan;
    }

    __device__ int most_slices() const {
        int most = plans[0].slices;
#pragma unroll
        for (int i = 1; i < KINDS; i++) most = max(most, plans[i].slices);
        return most;
    }

    // Spans of a stage, the most of all kinds: 1 << this.
    __device__ int most_spans_shift() const {
        int most = 0;
#pragma unroll
        for (int i = 0; i < KINDS; i++) {
            const int spans = plans[i].tile_rows >> plans[i].span_shift;
            most = max(most, 31 - __clz(spans));
        }
        return most;
    }

    __device__ Cut cut_of(int kind) const {
        const Plan plan = plan_of(kind);
        Cut cut;
        with_kind<Kinds...>(kind, [&](auto as) {
            using R = typename decltype(as)::R;
            cut.row = R::bytes(cols);
            cut.slice = R::bytes(plan.slice);
            cut.fill = R::IS_FLOAT ? R::bytes((cols + 31) / 32 * 32 - cols) : 0;
        });
        cut.part_slices = plan.part_slices;
        cut.parts = layout.parts;
        cut.span_shift = plan.span_shift;
        cut.chunks = plan.chunks;
        return cut;
    }
};

// Warps of a block that make a tile together.
struct Team {
    int warps, number, warp, count;  // warp: of the calling thread, in the team; count: of teams

    __device__ explicit Team(const Layout &layout)
        : warps(layout.team_warps),
          number(threadIdx.x / 32 / layout.team_warps),
          warp(threadIdx.x / 32 % layout.team_warps),
          count(layout.teams) {}
    __device__ int threads() const { return 32 * warps; }
    __device__ int thread() const { return 32 * warp + (threadIdx.x & 31); }
    __device__ void wait() const {
        if (warps == 1)
            __syncwarp();
        else
            team_barrier(1 + number, threads());
    }
};

// A place in a team's ring, and how often the ring was gone through before, even or odd. Rings are
// a team's own: whoever waits at a gate then knows of each time it was passed, so that even and odd
// are enough to tell the times apart, in whatever order copies land.
struct Turn {
    int slot;
    unsigned parity;

    __device__ void go_on(int slots) {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

// Operands of the rows that tiles of eight do not have: whatever lies in some register, so that
// none is moved; nobody reads these rows' sums.
__device__ inline Octet anything() {
    Octet any;
#pragma unroll
    for (int i = 0; i < 4; i++) asm("" : "=r"(any.pair[i]));
    return any;
}

template <int ROWS>
__device__ inline void multiply_step(float (&sums)[4], const Octet (&w)[ROWS / 8], const uint4 &x) {
    const Octet &low = w[0], high = ROWS == 16 ? w[ROWS / 8 - 1] : anything();
    multiply(sums, low.pair[0], high.pair[0], low.pair[1], high.pair[1], x.x, x.y);
    multiply(sums, low.pair[2], high.pair[2], low.pair[3], high.pair[3], x.z, x.w);
}

// A step of float32 weights: both operands as the sum of two f16, without the smallest product.
template <int ROWS>
__device__ inline void multiply_split(float (&sums)[4], const Octet (&w)[ROWS / 8],
                                      const Octet (&rest)[ROWS / 8], const uint4 &x,
                                      const uint4 &x_rest) {
    const Octet &wa = w[0], wb = ROWS == 16 ? w[ROWS / 8 - 1] : anything();
    const Octet &ra = rest[0], rb = ROWS == 16 ? rest[ROWS / 8 - 1] : anything();
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

// The pairs of a block, and where the matrices of their expert begin.
struct Found {
    long long blobs[2];
    int first, count;
    int source[8];  // the row of x of each pair
};

// Finds the pairs of these experts from the blockIdx.x-th on, by all threads; whether the block has
// any to make.
__device__ inline bool find_pairs(Found &found, const int *row_of, const int *expert_start,
                                  int experts, int columns, const long long *first_blobs,
                                  const long long *second_blobs) {
    constexpr int AT_ONCE = 2;  // experts of a thread; every load is on its way before one is used
    for (int e = 16 * threadIdx.x; e < experts; e += 16 * blockDim.x) {  // last read a token ago
        fetch_ahead(first_blobs + e);
        fetch_ahead(second_blobs + e);
    }
    wait_for_launches_ahead();
    const int before = expert_start[0], all_pairs = expert_start[experts];
    const int thread = threadIdx.x, first_pair = blockIdx.x, pairs = gridDim.x;
    const int own = min(first_pair + min(thread, columns - 1), pairs - 1);
    int source = row_of[own];  // the right one where these are the first experts
    const int pair = before + first_pair;
    for (int base = thread; base < experts; base += AT_ONCE * blockDim.x) {
        int start[AT_ONCE], end[AT_ONCE];
        long long first[AT_ONCE], second[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int e = min(base + i * static_cast<int>(blockDim.x), experts - 1);
            start[i] = expert_start[e], end[i] = expert_start[e + 1];
            first[i] = first_blobs[e], second[i] = second_blobs[e];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (start[i] > pair || pair >= end[i]) continue;
            found.blobs[0] = first[i], found.blobs[1] = second[i];
            found.first = pair;
            found.count = (pair - start[i]) % columns ? 0 : min(columns, end[i] - pair);
        }
    }
    if (thread < columns && pair + thread < all_pairs) {
        if (before || own != first_pair + thread) source = row_of[pair + thread];
        found.source[thread] = source;
    }
    if (pair >= all_pairs) return false;
    __syncthreads();
    return found.count > 0;
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
            const uint4 activations = x[(first + i) * count * 4];
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++)
                w[half] =
                    decode<TYPE, LANE, ALIGN, WideCodec<TYPE>>(row[half], i, t, book, scale[half]);
            if constexpr (TYPE == F32) {
                Octet rests[ROWS / 8];
#pragma unroll
                for (int half = 0; half < ROWS / 8; half++)
                    rests[half] = rest_of(row[half], R::k_of(i, t) / 8, w[half]);
                multiply_split<ROWS>(sums, w, rests, activations,
                                     x[rest + (first + i) * count * 4]);
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

// Adds up the slices of tiles first, first + apart, ..., by a team's threads; their sums lie one
// after the other.
template <int ROWS, int MATRICES, class... Kinds>
__device__ inline void add_slices(const Work<ROWS, MATRICES, Kinds...> &work, const float *sums,
                                  int set, const Team &team, const Columns &columns, int first,
                                  int apart, int tiles) {
    const int values = ROWS * columns.count;
#pragma unroll 1
    for (int i = team.thread(); i < tiles * values; i += team.threads()) {
        const int place = i / values, rest = i - place * values;
        const int row = rest % ROWS, column = rest / ROWS, tile = first + place * apart;
        const Matrix matrix = work.matrix_of(tile);
        const Plan plan = work.plan_of(matrix.kind);
        const int n = (tile - matrix.first_tile) * plan.tile_rows + row;
        if (row >= plan.tile_rows || n >= matrix.rows) continue;
        const float *part = sums + place * set + row * columns.count + column;
        float total = 0.0f;
#pragma unroll 5
        for (int slice = 0; slice < plan.slices; slice++) total += part[slice * values];
        float inverse_gain = 1.0f;  // of a power of two, so that the product is the quotient
        with_kind<Kinds...>(matrix.kind,
                            [&](auto as) { inverse_gain = 1.0f / GAIN<decltype(as)::TYPE>; });
        const long long token = columns.first + column;
        matrix.out[token * matrix.rows + n] = total * inverse_gain;
    }
}

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

// Shared memory of a block: code book, slots, planes of x, sets of partial sums of every team,
// gates of every slot, what it holds.
template <int ROWS, class... Kinds>
struct Shared {
    static constexpr int BOOK_TYPE = (0 | ... | (Codec<Kinds::TYPE>::BOOK ? Kinds::TYPE : 0));
    using Book = FewBook<BOOK_TYPE>;
    unsigned *book;
    unsigned char *slots;
    uint4 *planes;
    float *sums;
    int plane, set;  // 16 bytes of a plane, floats of a set
    unsigned long long *full, *empty;
    Held *held;

    __device__ Shared(uint4 *shared, const Layout &layout, int cols, int columns, int slices,
                      int teams) {
        book = reinterpret_cast<unsigned *>(shared);
        slots = reinterpret_cast<unsigned char *>(shared + Book::CHUNKS);
        planes = shared + Book::CHUNKS + teams * layout.slots * layout.slot_chunks;
        plane = (cols + 31) / 32 * 4 * columns;
        sums = reinterpret_cast<float *>(planes + Planes<Kinds...>::COUNT * plane);
        set = slices * ROWS * columns;
        full = reinterpret_cast<unsigned long long *>(sums + teams * layout.sums * set);
        empty = full + teams * layout.slots;
        held = reinterpret_cast<Held *>(empty + teams * layout.slots);
    }
};

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

#if !BULK
// Copies a stage, by all threads of a team, and waits for it.
template <int ROWS, int MATRICES, class... Kinds>
__device__ inline void start_team_stage(const Work<ROWS, MATRICES, Kinds...> &work,
                                        const Team &team, unsigned char *slot, Held &held, int tile,
                                        int part) {
    const Matrix matrix = work.matrix_of(tile);
    const Cut cut = work.cut_of(matrix.kind);
    const int tile_rows = work.plan_of(matrix.kind).tile_rows;
    const int row = (tile - matrix.first_tile) * tile_rows;
    const Stage stage = {matrix.data, matrix.rows, row, min(tile_rows, matrix.rows - row), part};
    start_stage<ROWS>(slot, cut, stage, team.thread(), team.threads());
    if (team.thread() < ROWS) held.before[team.thread()] = before_span(cut, stage, team.thread());
    if (team.thread() == 0) held.kind = matrix.kind;
    commit_copies();
    wait_copies<0>();
    team.wait();
}
#endif

// The tiles of one team: multiplies what has come, and writes the results.
template <class Shared, int ROWS, int MATRICES, class... Kinds>
__device__ inline void make_tiles(const Work<ROWS, MATRICES, Kinds...> &work, const Shared &shared,
                                  const Columns &columns, const Team &team) {
    const Layout &layout = work.layout;
    const auto book = Shared::Book::of_lane(shared.book);
    const int apart = gridDim.y * team.count, begin = blockIdx.y + gridDim.y * team.number;
    const int own_tiles = begin < work.tiles ? (work.tiles - begin + apart - 1) / apart : 0;
    // Where sums fill their room more than once, half of it is added up beside the other half.
    const int most_tiles = (work.tiles + apart - 1) / apart;
    const bool is_once = most_tiles <= layout.sums;
    const int at_once = is_once ? layout.sums : layout.sums / 2;
    float *const own_sums = shared.sums + team.number * layout.sums * shared.set;
    const int own_slots = team.number * layout.slots;
    Turn turn = {0, 0};
    int flip = 0;
#pragma unroll 1
    for (int done = 0; done < own_tiles; done += at_once, flip ^= !is_once) {
        const int tiles = min(at_once, own_tiles - done), first = begin + done * apart;
        float *const sums = own_sums + flip * at_once * shared.set;
#pragma unroll 1
        for (int i = 0; i < tiles; i++) {
#pragma unroll 1
            for (int part = 0; part < layout.parts; part++) {
                const int own_slot = own_slots + turn.slot;
                unsigned char *slot = shared.slots + own_slot * layout.slot_chunks * 16;
                Held &held = shared.held[own_slot];
#if BULK
                pass_gate(shared.full + own_slot, turn.parity);
#else
                start_team_stage(work, team, slot, held, first + i * apart, part);
#endif
                const int kind = KINDS_OF<Kinds...> == 1 ? 0 : held.kind;
                const Plan plan = work.plan_of(kind);
                const Cut cut = work.cut_of(kind);
                with_kind<Kinds...>(kind, [&](auto as) {
                    multiply_stage<ROWS, decltype(as), Planes<Kinds...>>(
                        shared, plan, cut, team, work.cols, columns.count, held, slot, part,
                        sums + i * shared.set, book);
                });
#if BULK
                __syncwarp();
                if ((threadIdx.x & 31) == 0) arrive(shared.empty + own_slot);
                turn.go_on(layout.slots);
#else
                team.wait();
#endif
            }
        }
        team.wait();
        add_slices(work, sums, shared.set, team, columns, first, apart, tiles);
    }
}

#if BULK
// A span of a stage, where it goes, and how often the slot was used before.
struct OwnSpan {
    Span span;
    int slot, uses, before;
};

// Span `index` of the stages of all tiles of the block, in order; teams take tiles in turns.
template <int ROWS, int MATRICES, class... Kinds>
__device__ inline OwnSpan own_span(const Work<ROWS, MATRICES, Kinds...> &work, const Team &team,
                                   int stage_number, int index, int2 &place) {
    const Layout &layout = work.layout;
    const int own_tile = stage_number / layout.parts;
    const int part = stage_number - own_tile * layout.parts;
    const int round = own_tile / team.count, number = own_tile - round * team.count;
    const int turn = round * layout.parts + part, uses = turn / layout.slots;
    const int tile = blockIdx.y + own_tile * gridDim.y;
    const Matrix matrix = work.matrix_of(tile);
    const Cut cut = work.cut_of(matrix.kind);
    const int tile_rows = work.plan_of(matrix.kind).tile_rows;
    const int row = (tile - matrix.first_tile) * tile_rows;
    const Stage stage = {matrix.data, matrix.rows, row, min(tile_rows, matrix.rows - row), part};
    place = {matrix.kind, cut.chunks};
    return {span_of(cut, stage, index), number * layout.slots + turn - uses * layout.slots, uses,
            before_span(cut, stage, index)};
}

// The stages of all tiles of the block, one after the other, each into its team's ring; by one
// warp, whose lanes find the spans of several stages at once. Those that the rings hold start
// before the block's first barrier. Behind the last one, the next launch may start: then no launch
// but the next holds room beside this one.
template <class Shared, int ROWS, int MATRICES, class... Kinds>
__device__ inline void copy_stages(const Work<ROWS, MATRICES, Kinds...> &work, const Shared &shared,
                                   const Team &team) {
    const Layout &layout = work.layout;
    const int span_shift = work.most_spans_shift(), at_once = 32 >> span_shift;
    const int lane = threadIdx.x & 31, own = lane >> span_shift;
    const int index = lane - (own << span_shift);
    if (lane == 0) {
        for (int i = 0; i < team.count * layout.slots; i++) {
            open_gate(shared.full + i, 1 << span_shift);
            open_gate(shared.empty + i, team.warps);
        }
        publish_gates();
    }
    __syncwarp();
    const int own_tiles = (work.tiles - static_cast<int>(blockIdx.y) + gridDim.y - 1) / gridDim.y;
    const int stages = own_tiles * layout.parts;
    bool is_first = true;
#pragma unroll 1
    for (int base = 0; base < stages; base += at_once) {
        int2 kind_and_chunks;
        const OwnSpan place =
            own_span(work, team, min(base + own, stages - 1), index, kind_and_chunks);
        // Those whose slots are used for the first time start together, others one by one.
        const bool is_there = base + own < stages;
        bool starts = is_there && place.uses == 0;
        unsigned others = __ballot_sync(ALL_LANES, is_there && place.uses > 0 && index == 0);
#pragma unroll 1
        for (;;) {
            if (starts) {
                Held &held = shared.held[place.slot];
                held.before[index] = place.before;
                if (index == 0) held.kind = kind_and_chunks.x;
                const int at = place.slot * layout.slot_chunks + index * kind_and_chunks.y;
                start_span(shared.slots + at * 16, place.span, shared.full + place.slot);
            }
            __syncwarp();
            if (others == 0) break;
            if (is_first) {
                is_first = false;
                block_barrier();
            }
            const int first = __ffs(others) - 1;  // lane of the next stage
            others &= others - 1;
            const int slot = __shfl_sync(ALL_LANES, place.slot, first);
            const int uses = __shfl_sync(ALL_LANES, place.uses, first);
            pass_gate(shared.empty + slot, uses + 1 & 1);
            starts = own == first >> span_shift;
        }
    }
    if (is_first) block_barrier();
    let_next_start();
}
#endif

template <class Gate, int ROWS, int MATRICES, class... Kinds>
__device__ inline void few(const Work<ROWS, MATRICES, Kinds...> &work, const Columns &columns,
                           const float *x, const Gate &gate, uint4 *all_shared) {
    const int warps = blockDim.x / 32 - 1;  // all but the one that copies
    const Team team(work.layout);
    const Shared<ROWS, Kinds...> shared(all_shared, work.layout, work.cols, columns.count,
                                        work.most_slices(), team.count);
    if (threadIdx.x / 32 == warps) {
#if BULK
        copy_stages(work, shared, team);
#else
        block_barrier();
        let_next_start();
#endif
        return;
    }
    if (!columns.source) Shared<ROWS, Kinds...>::Book::load(shared.book, 32 * warps);
    wait_for_launches_ahead();  // weights may come earlier: no launch writes them
    load_activations<Kinds...>(shared.planes, x, work.cols, columns, gate, warps);
    block_barrier();
    if (team.number >= team.count) return;
    make_tiles(work, shared, columns, team);
}

// matmul_few: grid (passes of `columns` tokens, blocks): passes over the same rows run side by
// side, so all but one find them in the L2 cache
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MOST_REGISTERS)
    matmul_few(const float *x, const unsigned char *data, float *out, long long, long long tokens,
               long long rows, long long cols, long long columns, long long teams,
               long long team_warps, long long slots, long long slot_chunks, long long parts,
               long long sums, long long slice, long long slices, long long part_slices,
               long long tile_rows, long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    Work<ROWS, 1, Kind<TYPE, LANE, ALIGN>> work;
    work.matrices[0] = {data, out, static_cast<int>(rows), 0, 0};
    work.plans[0] = plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks);
    work.layout = layout_from(teams, team_warps, slots, slot_chunks, parts, sums);
    work.cols = static_cast<int>(cols);
    work.number_tiles();
    const int first = static_cast<int>(columns) * blockIdx.x;
    const int count = min(static_cast<int>(columns), static_cast<int>(tokens) - first);
    few(work, {nullptr, first, count}, x, Plain(), shared);
}

// gated_few: as matmul_few, of silu(x / divisor), times up where that is not x itself
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MOST_REGISTERS)
    gated_few(const float *x, const float *up, const unsigned char *data, float *out, long long,
              long long tokens, long long rows, long long cols, long long divisor,
              long long columns, long long teams, long long team_warps, long long slots,
              long long slot_chunks, long long parts, long long sums, long long slice,
              long long slices, long long part_slices, long long tile_rows, long long span_shift,
              long long chunks) {
    extern __shared__ uint4 shared[];
    Work<ROWS, 1, Kind<TYPE, LANE, ALIGN>> work;
    work.matrices[0] = {data, out, static_cast<int>(rows), 0, 0};
    work.plans[0] = plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks);
    work.layout = layout_from(teams, team_warps, slots, slot_chunks, parts, sums);
    work.cols = static_cast<int>(cols);
    work.number_tiles();
    const Gated gate = {up == x ? nullptr : up, static_cast<float>(divisor)};
    const int first = static_cast<int>(columns) * blockIdx.x;
    const int count = min(static_cast<int>(columns), static_cast<int>(tokens) - first);
    few(work, {nullptr, first, count}, x, gate, shared);
}

// gated_few_route: gated_few, and beside it route_few, which neither waits for the other
//   grid (passes + 1, blocks): of the last passes, block 0 routes
template <int TYPE, int LANE, int ROWS, int ALIGN, int LOCAL>
__global__ void __maxnreg__(MOST_REGISTERS)
    gated_few_route(const float *x, const float *up, const unsigned char *data, float *out,
                    const float *logits, int *ids, float *weights, int *expert_start, int *row_of,
                    int *pair_of, long long, long long tokens, long long rows, long long cols,
                    long long num_experts, long long top_k, long long columns, long long teams,
                    long long team_warps, long long slots, long long slot_chunks, long long parts,
                    long long sums, long long slice, long long slices, long long part_slices,
                    long long tile_rows, long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    if (blockIdx.x + 1 == gridDim.x) {
        wait_for_launches_ahead();
        let_next_start();
        if (blockIdx.y == 0)
            route_in_order<LOCAL>(logits, ids, weights, expert_start, row_of, pair_of, tokens,
                                  num_experts, top_k, reinterpret_cast<int *>(shared));
        return;
    }
    Work<ROWS, 1, Kind<TYPE, LANE, ALIGN>> work;
    work.matrices[0] = {data, out, static_cast<int>(rows), 0, 0};
    work.plans[0] = plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks);
    work.layout = layout_from(teams, team_warps, slots, slot_chunks, parts, sums);
    work.cols = static_cast<int>(cols);
    work.number_tiles();
    const int first = static_cast<int>(columns) * blockIdx.x;
    const int count = min(static_cast<int>(columns), static_cast<int>(tokens) - first);
    few(work, {nullptr, first, count}, x, Gated{up, 1.0f}, shared);
}

// matmul_several: the first MATRICES of six matrices, of up to three kinds; grid as matmul_few
template <int MATRICES, int ROWS, class... Kinds>
__global__ void __maxnreg__(MOST_REGISTERS)
    matmul_several(const float *x, const unsigned char *data0, float *out0,
                   const unsigned char *data1, float *out1, const unsigned char *data2, float *out2,
                   const unsigned char *data3, float *out3, const unsigned char *data4, float *out4,
                   const unsigned char *data5, float *out5, long long tokens, long long cols,
                   long long rows0, long long kind0, long long rows1, long long kind1,
                   long long rows2, long long kind2, long long rows3, long long kind3,
                   long long rows4, long long kind4, long long rows5, long long kind5,
                   long long columns, long long teams, long long team_warps, long long slots,
                   long long slot_chunks, long long parts, long long sums, long long slice0,
                   long long slices0, long long part_slices0, long long tile_rows0,
                   long long span_shift0, long long chunks0, long long slice1, long long slices1,
                   long long part_slices1, long long tile_rows1, long long span_shift1,
                   long long chunks1, long long slice2, long long slices2, long long part_slices2,
                   long long tile_rows2, long long span_shift2, long long chunks2) {
    extern __shared__ uint4 shared[];
    Work<ROWS, MATRICES, Kinds...> work;
    const auto set = [&](int i, const unsigned char *data, float *out, long long rows,
                         long long kind) {
        if (i < MATRICES)
            work.matrices[i] = {data, out, static_cast<int>(rows), static_cast<int>(kind), 0};
    };
    set(0, data0, out0, rows0, kind0);
    set(1, data1, out1, rows1, kind1);
    set(2, data2, out2, rows2, kind2);
    set(3, data3, out3, rows3, kind3);
    set(4, data4, out4, rows4, kind4);
    set(5, data5, out5, rows5, kind5);
    work.plans[0] = plan_from(slice0, slices0, part_slices0, tile_rows0, span_shift0, chunks0);
    if constexpr (sizeof...(Kinds) > 1)
        work.plans[1] = plan_from(slice1, slices1, part_slices1, tile_rows1, span_shift1, chunks1);
    if constexpr (sizeof...(Kinds) > 2)
        work.plans[2] = plan_from(slice2, slices2, part_slices2, tile_rows2, span_shift2, chunks2);
    work.layout = layout_from(teams, team_warps, slots, slot_chunks, parts, sums);
    work.cols = static_cast<int>(cols);
    work.number_tiles();
    const int first = static_cast<int>(columns) * blockIdx.x;
    const int count = min(static_cast<int>(columns), static_cast<int>(tokens) - first);
    few(work, {nullptr, first, count}, x, Plain(), shared);
}

// grouped_few: pairs sorted by expert; grid (pairs of these experts, blocks). Blocks x make the
// `columns` pairs from the x-th on of an expert if that is its first pair or a multiple of
// `columns` after it, else nothing.
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MOST_REGISTERS)
    grouped_few(const float *x, const long long *blobs, const int *row_of, const int *expert_start,
                float *out, long long, long long rows, long long cols, long long offset_bytes,
                long long experts, long long columns, long long teams, long long team_warps,
                long long slots, long long slot_chunks, long long parts, long long sums,
                long long slice, long long slices, long long part_slices, long long tile_rows,
                long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    __shared__ Found found;
    if (threadIdx.x + 32 < blockDim.x)
        Shared<ROWS, Kind<TYPE, LANE, ALIGN>>::Book::load(reinterpret_cast<unsigned *>(shared),
                                                          blockDim.x - 32);
    if (!find_pairs(found, row_of, expert_start, static_cast<int>(experts),
                    static_cast<int>(columns), blobs, blobs))
        return;
    Work<ROWS, 1, Kind<TYPE, LANE, ALIGN>> work;
    work.matrices[0] = {reinterpret_cast<const unsigned char *>(found.blobs[0]) + offset_bytes, out,
                        static_cast<int>(rows), 0, 0};
    work.plans[0] = plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks);
    work.layout = layout_from(teams, team_warps, slots, slot_chunks, parts, sums);
    work.cols = static_cast<int>(cols);
    work.number_tiles();
    few(work, {found.source, found.first, found.count}, x, Plain(), shared);
}

// gated_grouped_few: as grouped_few, of silu(x) * up
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MOST_REGISTERS)
    gated_grouped_few(const float *x, const float *up, const long long *blobs, const int *row_of,
                      const int *expert_start, float *out, long long, long long rows,
                      long long cols, long long offset_bytes, long long experts, long long columns,
                      long long teams, long long team_warps, long long slots, long long slot_chunks,
                      long long parts, long long sums, long long slice, long long slices,
                      long long part_slices, long long tile_rows, long long span_shift,
                      long long chunks) {
    extern __shared__ uint4 shared[];
    __shared__ Found found;
    if (threadIdx.x + 32 < blockDim.x)
        Shared<ROWS, Kind<TYPE, LANE, ALIGN>>::Book::load(reinterpret_cast<unsigned *>(shared),
                                                          blockDim.x - 32);
    if (!find_pairs(found, row_of, expert_start, static_cast<int>(experts),
                    static_cast<int>(columns), blobs, blobs))
        return;
    Work<ROWS, 1, Kind<TYPE, LANE, ALIGN>> work;
    work.matrices[0] = {reinterpret_cast<const unsigned char *>(found.blobs[0]) + offset_bytes, out,
                        static_cast<int>(rows), 0, 0};
    work.plans[0] = plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks);
    work.layout = layout_from(teams, team_warps, slots, slot_chunks, parts, sums);
    work.cols = static_cast<int>(cols);
    work.number_tiles();
    few(work, {found.source, found.first, found.count}, x, Gated{up, 1.0f}, shared);
}

// grouped_pair: as grouped_few with two matrices of one shape and type per expert, which may lie in
// different blobs
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MOST_REGISTERS)
    grouped_pair(const float *x, const long long *blobs0, const long long *blobs1,
                 const int *row_of, const int *expert_start, float *out0, float *out1, long long,
                 long long rows, long long cols, long long offset0, long long offset1,
                 long long experts, long long columns, long long teams, long long team_warps,
                 long long slots, long long slot_chunks, long long parts, long long sums,
                 long long slice, long long slices, long long part_slices, long long tile_rows,
                 long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    __shared__ Found found;
    if (threadIdx.x + 32 < blockDim.x)
        Shared<ROWS, Kind<TYPE, LANE, ALIGN>>::Book::load(reinterpret_cast<unsigned *>(shared),
                                                          blockDim.x - 32);
    if (!find_pairs(found, row_of, expert_start, static_cast<int>(experts),
                    static_cast<int>(columns), blobs0, blobs1))
        return;
    Work<ROWS, 2, Kind<TYPE, LANE, ALIGN>> work;
    work.matrices[0] = {reinterpret_cast<const unsigned char *>(found.blobs[0]) + offset0, out0,
                        static_cast<int>(rows), 0, 0};
    work.matrices[1] = {reinterpret_cast<const unsigned char *>(found.blobs[1]) + offset1, out1,
                        static_cast<int>(rows), 0, 0};
    work.plans[0] = plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks);
    work.layout = layout_from(teams, team_warps, slots, slot_chunks, parts, sums);
    work.cols = static_cast<int>(cols);
    work.number_tiles();
    few(work, {found.source, found.first, found.count}, x, Plain(), shared);
}
