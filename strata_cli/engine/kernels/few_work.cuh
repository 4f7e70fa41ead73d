// What a launch of matmul_few.cu works on: matrices of some kinds, how they are cut into tiles, and
// the warps that make them.
#pragma once
#include "spans.cuh"
#include "weights.cuh"

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
    static constexpr int KINDS = sizeof...(Kinds), TILE_ROWS = ROWS;
    Matrix matrices[MATRICES];
    Plan plans[KINDS];
    Layout layout;
    int cols, tiles, blocks;  // blocks: that share the tiles

    // After all else.
    __device__ void number_tiles(int num_blocks = gridDim.y) {
        tiles = 0;
        blocks = num_blocks;
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

    // Of a power of two, so that a product with it is the quotient.
    __device__ float inverse_gain(int kind) const {
        float inverse = 1.0f;
        with_kind<Kinds...>(kind, [&](auto as) { inverse = 1.0f / GAIN<decltype(as)::TYPE>; });
        return inverse;
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

// That of one matrix, by so many blocks.
template <int ROWS, class Kind>
__device__ inline Work<ROWS, 1, Kind> work_of_one(const unsigned char *data, float *out,
                                                  long long rows, long long cols, const Plan &plan,
                                                  const Layout &layout, int blocks) {
    Work<ROWS, 1, Kind> work;
    work.matrices[0] = {data, out, static_cast<int>(rows), 0, 0};
    work.plans[0] = plan;
    work.layout = layout;
    work.cols = static_cast<int>(cols);
    work.number_tiles(blocks);
    return work;
}

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
