// A block of matmul_some.cu: one warp copies tiles into a ring, teams of the others multiply them.
//
// A tile is 16 weight rows: of one matrix, or eight of each of the two, whose sums then meet in one
// lane, or four of each stream, whose sums meet in two lanes. One warp copies tile after tile into
// a ring of slots (spans.cuh); teams of the others take tiles in turns, a slice to a warp, and the
// first warp of a team adds the slices up. All pairs of a group have their activations in shared
// memory once. Each sum is made of the same operations in the same order as in matmul_few.cu.
#pragma once
#include "few_multiply.cuh"
#include "math32.cuh"
#include "overlap.cuh"
#include "special.cuh"
#include "tiles.cuh"

constexpr int TILE_ROWS = 16;
constexpr int MOST_THREADS = 672;   // of a block: twenty warps that multiply, and one that copies
constexpr int LOADS_AT_ONCE = 8;    // of a thread
constexpr int PLANES_BARRIER = 15;  // of all warps that multiply; teams have those below

// What the host chose for a launch: teams, warps of each (as many as a row has slices), slots of
// the ring, 16 bytes of each, gates of a team that say what has come: so many that slots are at
// most teams * depth, for then whoever waits at a gate knows of each time it was passed.
struct Ring {
    int teams, team_warps, slots, slot_chunks, depth;
};

// Pairs whose activations a block has at once: the first, and how many.
struct Group {
    int first, count;
};

// Group `number` of `all` of so many rows, which are shared out about equally.
__device__ inline Group part_of(int first, int rows, int all, int number) {
    const int each = tokens_each(rows, all);
    return {first + number * each, min(each, rows - number * each)};
}

// The pairs of experts, in groups of up to MOST, and where their matrices are.
template <int MATRICES, int MOST>
struct OfExperts {
    const long long *blobs[MATRICES];
    long long offsets[MATRICES];
    const int *expert_start, *rows;  // rows: null: x has one for each pair
    ExpertTiles<MOST> experts;

    // Takes memory from a word on; scratch: a word for each warp. By all threads of the block.
    __device__ void load(int *shared, int *scratch) {
        experts.start = shared;
        experts.prefix = reinterpret_cast<unsigned short *>(shared + experts.count + 1);
        experts.load(expert_start, scratch);
    }
    __device__ int groups() const { return experts.prefix[experts.count]; }

    // Of a group; by whole warps.
    __device__ Group group(int number) const {
        const int e = experts.of_tile(number), before = experts.prefix[e];
        return part_of(experts.start[e], experts.start[e + 1] - experts.start[e],
                       experts.prefix[e + 1] - before, number - before);
    }
    __device__ const unsigned char *data(int number, int matrix) const {
        const int e = experts.of_tile(number);
        long long address = blobs[0][e] + offsets[0];
        if (MATRICES > 1 && matrix > 0) address = blobs[MATRICES - 1][e] + offsets[MATRICES - 1];
        return reinterpret_cast<const unsigned char *>(address);
    }
    __device__ long long row_of(int pair) const { return rows ? rows[pair] : pair; }
};

// Rows of x that share their matrices, in groups of up to MOST.
template <int MATRICES, int MOST>
struct OfAll {
    const unsigned char *matrices[MATRICES];
    int tokens;

    __device__ void load(int *, int *) { __syncthreads(); }
    __device__ int groups() const { return (tokens + MOST - 1) / MOST; }
    __device__ Group group(int number) const { return part_of(0, tokens, groups(), number); }
    __device__ const unsigned char *data(int, int matrix) const {
        const unsigned char *found = matrices[0];
#pragma unroll
        for (int i = 1; i < MATRICES; i++)
            if (matrix == i) found = matrices[i];
        return found;
    }
    __device__ long long row_of(int pair) const { return pair; }
};

template <int TYPE, int LANE, int ALIGN, int GROUPS, int MATRICES,
          template <int, int> class SourceOf>
struct Some {
    using Own = Kind<TYPE, LANE, ALIGN>;
    using R = typename Own::R;
    using Book = FewBook<Codec<TYPE>::BOOK ? TYPE : 0>;
    using Source = SourceOf<MATRICES, 8 * GROUPS>;
    static constexpr int MATRIX_ROWS = TILE_ROWS / MATRICES;
    static constexpr int ALIGNMENT = stage_alignment(ALIGN, R::bytes(256));
    typedef float Sums[GROUPS][4];

    Source source;
    const unsigned short *x;
    void *out;
    const float *normed;      // the streams [P,4,N] that gates open
    unsigned short *rounded;  // their mix as f16
    int rows, cols, tiles;    // of a matrix; tiles of a group
    Plan plan;
    Cut cut;
    Ring ring;
    // Shared memory, in this order: the book, slots, x in the lanes' order, the slices' sums of
    // every team, gates of slots and of teams, what slots hold, what the source keeps.
    unsigned *book;
    unsigned char *slots;
    uint4 *planes;
    float4 *sums;
    unsigned long long *empty, *full;
    Held *held;
    int begin, end;  // the block's tiles

    __device__ void lay_out(uint4 *shared) {
        book = reinterpret_cast<unsigned *>(shared);
        slots = reinterpret_cast<unsigned char *>(shared + Book::CHUNKS);
        planes = shared + Book::CHUNKS + ring.slots * ring.slot_chunks;
        sums = reinterpret_cast<float4 *>(planes + cols / 8 * (8 * GROUPS));
        const int set = (ring.team_warps - 1) * GROUPS * 32;
        empty = reinterpret_cast<unsigned long long *>(sums + ring.teams * set);
        full = empty + ring.slots;
        held = reinterpret_cast<Held *>(full + ring.teams * ring.depth);
    }

    __device__ int spans() const { return MATRIX_ROWS >> plan.span_shift; }  // of a matrix

    __device__ void open_gates() const {
        if (threadIdx.x != 0) return;
        for (int i = 0; i < ring.slots; i++) open_gate(empty + i, ring.team_warps);
        for (int i = 0; i < ring.teams * ring.depth; i++) open_gate(full + i, MATRICES * spans());
        publish_gates();
    }

    // -- the warp that copies --------------------------------------------------------------------

    __device__ void copy_tiles() const {
        const int lane = threadIdx.x & 31, own_spans = spans();
        const int matrix = lane / own_spans, index = lane - matrix * own_spans;
        const unsigned char *data = nullptr;
        int number = -1, slot = 0, team = 0, turn = 0;
        unsigned parity = 1;  // of a slot's next emptying: at first it is free
#pragma unroll 1
        for (int unit = begin; unit < end; unit++) {
            if (unit / tiles != number) {
                number = unit / tiles;
                data = source.data(number, matrix);
            }
            if (unit - begin >= ring.slots) pass_gate(empty + slot, parity);
            if (lane < MATRICES * own_spans) {
                const int row = (unit - number * tiles) * MATRIX_ROWS;
                const Stage stage = {data, rows, row, min(MATRIX_ROWS, rows - row), 0};
                held[slot].before[lane] = before_span(cut, stage, index);
                start_span(slots + (slot * ring.slot_chunks + lane * cut.chunks) * 16,
                           span_of(cut, stage, index), full + team * ring.depth + turn);
            }
            __syncwarp();
            if (++slot == ring.slots) slot = 0, parity ^= 1;
            if (++team == ring.teams) {
                team = 0;
                if (++turn == ring.depth) turn = 0;
            }
        }
        let_next_start();
    }

    // -- the warps that multiply -----------------------------------------------------------------

    // Activations of a group, by all these warps.
    __device__ void load_planes(const Group &own, int threads) const {
        const uint4 *from = reinterpret_cast<const uint4 *>(x);
        const int octets = cols / 8, all = octets * own.count;
#pragma unroll 1
        for (int base = threadIdx.x; base < all; base += LOADS_AT_ONCE * threads) {
            uint4 v[LOADS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < LOADS_AT_ONCE; i++) {
                const int at = min(base + i * threads, all - 1), column = at / octets;
                const long long row = source.row_of(own.first + column);
                v[i] = from[row * octets + (at - column * octets)];
            }
#pragma unroll
            for (int i = 0; i < LOADS_AT_ONCE; i++) {
                const int at = base + i * threads, column = at / octets;
                if (at < all)
                    planes[place_of<LANE>(at - column * octets, column, own.count)] = v[i];
            }
        }
    }

    // All steps of a slice for 8 * USED columns of x; x: the lane's first octets.
    template <int USED, class OwnBook>
    __device__ static void multiply_slice(Sums &sums, const Staged<ALIGN> (&rows)[2],
                                          const uint4 *x, const int (&column)[GROUPS], int steps,
                                          int count, OwnBook book) {
        const int t = threadIdx.x & 3;
#pragma unroll 1
        for (int first = 0; first < steps; first += R::STEPS) {
            RowScale scale[2];
            Staged<ALIGN> row[2];
#pragma unroll
            for (int half = 0; half < 2; half++)
                row[half] = {rows[half].base, rows[half].offset + R::bytes(32 * first)};
#pragma unroll
            for (int i = 0; i < R::STEPS; i++) {
                Octet w[2];
#pragma unroll
                for (int half = 0; half < 2; half++)
                    w[half] = decode<TYPE, LANE, ALIGN, WideCodec<TYPE>>(row[half], i, t, book,
                                                                         scale[half]);
                const uint4 *own_x = x + (first + i) * count * 4;
#pragma unroll
                for (int j = 0; j < USED; j++)
                    multiply_step<TILE_ROWS>(sums[j], w, own_x[4 * column[j]]);
            }
        }
    }

    // The sums of one slice of a tile.
    template <class OwnBook>
    __device__ void make_slice(Sums &own, const Held &what, const unsigned char *slot, int slice,
                               int count, OwnBook own_book) const {
        const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
        Staged<ALIGN> lines[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // Rows that the last tile lacks are made of what was there before, and left out.
            const int row = 8 * half + g, span = row >> plan.span_shift;
            const int offset = what.before[span] + row_place(cut, row) + slice * cut.slice;
            lines[half] = {slot, offset / ALIGNMENT * ALIGNMENT};
        }
        int column[GROUPS];
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            column[j] = min(8 * j + g, count - 1);
#pragma unroll
            for (int i = 0; i < 4; i++) own[j][i] = 0.0f;
        }
        const int first_k = slice * plan.slice, length = min(plan.slice, cols - first_k);
        const uint4 *from = planes + first_k / 8 * count + t;
        const int steps = length / 32;
        if (GROUPS > 2 && count > 16)
            multiply_slice<GROUPS>(own, lines, from, column, steps, count, own_book);
        else if (GROUPS > 1 && count > 8)
            multiply_slice<(GROUPS < 2 ? GROUPS : 2)>(own, lines, from, column, steps, count,
                                                      own_book);
        else
            multiply_slice<1>(own, lines, from, column, steps, count, own_book);
    }

    // Writes a tile; the columns of a lane are 2t and 2t + 1 of each eight.
    __device__ void write(const Sums &totals, int tile, const Group &own) const {
        if constexpr (MATRICES == 4) {
            mix(totals, tile, own);
            return;
        }
        constexpr float inverse_gain = 1.0f / GAIN<TYPE>;  // a power of two
        const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
        const int n = tile * MATRIX_ROWS + g;
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int column = 8 * j + 2 * t + i;
                if (column >= own.count) continue;
                const long long to = static_cast<long long>(own.first + column) * rows + n;
                const float a = totals[j][i] * inverse_gain, b = totals[j][2 + i] * inverse_gain;
                if constexpr (MATRICES == 2) {
                    if (n < rows) static_cast<unsigned short *>(out)[to] = half_of(silu32(a) * b);
                } else {
                    if (n < rows) static_cast<float *>(out)[to] = a;
                    if (n + 8 < rows) static_cast<float *>(out)[to + 8] = b;
                }
            }
    }

    // Opens the streams by a tile of gates. A lane has those of streams 0 and 2, or 1 and 3, of two
    // columns; it takes one of these columns, and has the other two gates from lane ^ 16.
    __device__ void mix(const Sums &totals, int tile, const Group &own) const {
        constexpr float inverse_gain = 1.0f / GAIN<TYPE>;
        const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3, odd = g / 4;
        const int n = tile * MATRIX_ROWS + g % 4;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            float gates[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float first = totals[j][2 * half], second = totals[j][2 * half + 1];
                const float kept = odd ? second : first;
                const float other = __shfl_xor_sync(ALL_LANES, odd ? first : second, 16);
                gates[2 * half] = odd ? other : kept;
                gates[2 * half + 1] = odd ? kept : other;
            }
            const int column = 8 * j + 2 * t + odd;
            if (column >= own.count || n >= rows) continue;
            const long long pair = own.first + column;
            float total = 0.0f;
#pragma unroll
            for (int s = 0; s < 4; s++)
                total = fmaf(sigmoid_fast(gates[s] * inverse_gain),
                             normed[(4 * pair + s) * rows + n], total);
            const float mixed = total * 0.25f;
            static_cast<float *>(out)[pair * rows + n] = mixed;
            rounded[pair * rows + n] = half_of(mixed);
        }
    }

    __device__ static void store(float4 *to, const Sums &own) {
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
            to[32 * j + (threadIdx.x & 31)] =
                make_float4(own[j][0], own[j][1], own[j][2], own[j][3]);
    }

    __device__ static void add(Sums &totals, const float4 *from) {
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            const float4 more = from[32 * j + (threadIdx.x & 31)];
            totals[j][0] += more.x, totals[j][1] += more.y;
            totals[j][2] += more.z, totals[j][3] += more.w;
        }
    }

    // The block's tile `local` by the calling team.
    template <class OwnBook>
    __device__ void make_tile(const Team &team, int local, int tile, const Group &own,
                              OwnBook own_book) const {
        const int round = local / ring.teams, slot = local % ring.slots;
        const int turns = round / ring.depth, gate = round - turns * ring.depth;
        const unsigned char *from = slots + slot * ring.slot_chunks * 16;
        float4 *const own_sums = sums + team.number * (team.warps - 1) * GROUPS * 32;
        pass_gate(full + team.number * ring.depth + gate, turns & 1);
        Sums totals;
        make_slice(totals, held[slot], from, team.warp, own.count, own_book);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) arrive(empty + slot);
        team.wait();  // the first warp has added up the tile before
        if (team.warp > 0) store(own_sums + (team.warp - 1) * GROUPS * 32, totals);
        team.wait();
        if (team.warp > 0) return;
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) totals[j][i] = 0.0f + totals[j][i];
#pragma unroll 1
        for (int slice = 1; slice < team.warps; slice++)
            add(totals, own_sums + (slice - 1) * GROUPS * 32);
        write(totals, tile, own);
    }

    __device__ void make_tiles(const Team &team) const {
        const auto own_book = Book::of_lane(book);
        const int threads = 32 * ring.teams * ring.team_warps;
#pragma unroll 1
        for (int unit = begin; unit < end;) {
            const int number = unit / tiles, stop = min(end, (number + 1) * tiles) - begin;
            const Group own = source.group(number);
            team_barrier(PLANES_BARRIER, threads);  // nobody needs the planes of the group before
            load_planes(own, threads);
            team_barrier(PLANES_BARRIER, threads);
            const int late = (unit - begin) % ring.teams;
            int local = unit - begin - late + team.number;
            if (team.number < late) local += ring.teams;
#pragma unroll 1
            for (; local < stop; local += ring.teams)
                make_tile(team, local, begin + local - number * tiles, own, own_book);
            unit = begin + stop;
        }
    }

    __device__ void run(uint4 *shared) {
        const int warps = ring.teams * ring.team_warps;
        lay_out(shared);
        open_gates();
        Book::load(book, blockDim.x);
        wait_for_launches_ahead();
        source.load(reinterpret_cast<int *>(held + ring.slots), reinterpret_cast<int *>(held));
        const long long all = static_cast<long long>(source.groups()) * tiles;
        begin = static_cast<int>(all * blockIdx.x / gridDim.x);
        end = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
        if (threadIdx.x / 32 == warps)
            copy_tiles();
        else
            make_tiles(Team({ring.teams, ring.team_warps, 0, 0, 1, 0}));
    }
};
