// A block of matmul_few.cu: one warp copies stages into rings, all others load activations, and
// teams of them multiply tile after tile.
#pragma once
#include "few_multiply.cuh"
#include "few_results.cuh"
#include "overlap.cuh"

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

// The tiles of one team: multiplies what has come; results finish what comes of that.
template <class Shared, class Results, int ROWS, int MATRICES, class... Kinds>
__device__ inline void make_tiles(const Work<ROWS, MATRICES, Kinds...> &work, const Shared &shared,
                                  const Columns &columns, const Team &team,
                                  const Results &results) {
    const Layout &layout = work.layout;
    const auto book = Shared::Book::of_lane(shared.book);
    const int apart = work.blocks * team.count, begin = blockIdx.y + work.blocks * team.number;
    const int own_tiles = begin < work.tiles ? (work.tiles - begin + apart - 1) / apart : 0;
    // Where sums fill their room more than once, half of it is added up beside the other half.
    const int most_tiles = (work.tiles + apart - 1) / apart;
    const bool is_once = most_tiles <= layout.sums;
    const int at_once = is_once ? layout.sums : layout.sums / 2;
    float *const own_sums = shared.sums + team.number * layout.sums * shared.set;
    const int own_slots = team.number * layout.slots;
    Turn turn = {0, 0};
    int flip = 0;
    auto ahead = load_first(results, work, columns, team, begin, apart, min(at_once, own_tiles));
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
                        shared, plan, cut, team, work.cols, columns.count(), held, slot, part,
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
        finish_tiles(work, {sums, shared.set, first, apart, tiles}, team, columns, results, ahead,
                     done == 0);
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
    const int tile = blockIdx.y + own_tile * work.blocks;
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
template <class Shared, class Results, int ROWS, int MATRICES, class... Kinds>
__device__ inline void copy_stages(const Work<ROWS, MATRICES, Kinds...> &work, const Shared &shared,
                                   const Team &team, const Results &results) {
    const auto meet = [&] {
        results.prepare();
        block_barrier();
    };
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
    const int own_tiles =
        (work.tiles - static_cast<int>(blockIdx.y) + work.blocks - 1) / work.blocks;
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
                meet();
            }
            const int first = __ffs(others) - 1;  // lane of the next stage
            others &= others - 1;
            const int slot = __shfl_sync(ALL_LANES, place.slot, first);
            const int uses = __shfl_sync(ALL_LANES, place.uses, first);
            pass_gate(shared.empty + slot, uses + 1 & 1);
            starts = own == first >> span_shift;
        }
    }
    if (is_first) meet();
    let_next_start();
}
#endif

template <class Gate, class Results = Written, int ROWS, int MATRICES, class... Kinds>
__device__ inline void few(const Work<ROWS, MATRICES, Kinds...> &work, const Columns &columns,
                           const float *x, const Gate &gate, uint4 *all_shared,
                           const Results &results = Results()) {
    const int warps = blockDim.x / 32 - 1;  // all but the one that copies
    const Team team(work.layout);
    const Shared<ROWS, Kinds...> shared(all_shared, work.layout, work.cols, columns.count(),
                                        work.most_slices(), team.count);
    if (threadIdx.x / 32 == warps) {
#if BULK
        copy_stages(work, shared, team, results);
#else
        results.prepare();
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
    make_tiles(work, shared, columns, team, results);
}
