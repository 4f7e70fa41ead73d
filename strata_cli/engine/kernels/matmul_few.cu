// Products of quantized weights with few activation rows: memory-bound, for decode.
//   x [T,K] f32, N rows of K weights -> out [T,N] f32;  D[n, t] = sum over k of W[n, k] * x[t, k]
//   Reads N * K / WEIGHTS * BYTES bytes of weights once per eight rows of x: over the memory's
//   bandwidth that is the limit.
//
// Order of the sums, which matmul_many.cu repeats operation by operation: K is cut into slices;
// within a slice the products of weights.cuh, step after step, into float32 sums that start at
// zero; then total = 0 + slice 0 + slice 1 + ... . Activations are rounded to f16.
//
// A warp makes ROWS weight rows of one slice for up to eight tokens. Lanes (g, t) copy rows g and
// g + 8 of the slice to the warp's own shared memory, all at once, and then decode from there; so
// every load is 16 bytes and as much is in flight as fits. Warps of a block share a tile of rows,
// a slice each, or make several tiles.
#include "mma.cuh"
#include "overlap.cuh"
#include "weights.cuh"

// Lanes that copy a row together. Many make long requests, which memory behind a link needs; four
// make no lane idle in short rows.
#ifndef COPY_LANES
#define COPY_LANES 4
#endif

// With AHEAD a block goes through several groups of tiles and loads x and code book once; a warp
// has one slice. It is the number of groups whose rows are in shared memory or on their way there.
#ifndef AHEAD
#define AHEAD 0
#endif
constexpr int BUFFERS = AHEAD ? AHEAD : 1;

template <int TYPE>
constexpr int BOOK_BYTES = 4 * BOOK_COPIES<TYPE> * Codec<TYPE>::BOOK;

struct Shape {
    int rows, cols, slice, warps_per_tile;
    int chunks;   // of 16 bytes, from one row in shared memory to the next
    int columns;  // tokens at a time, at most eight

    // As a product, so that the compiler sees its alignment and can load 16 bytes at a time.
    __device__ int pitch() const { return 16 * chunks; }
};

// One matrix and the tokens it is multiplied with.
struct Job {
    const unsigned char *matrix;
    const int *row_of;  // row of x of each token; null: token i reads row i
    int first, count;   // tokens first .. first + count, which are also the rows of out
};

// The parts of a block's shared memory, in order: code book, each warp's rows and x, partial sums.
template <int TYPE, int ROWS>
struct Parts {
    static constexpr int PLANES = TYPE == F32 ? 2 : 1;
    unsigned char *rows;
    uint4 *x;
    float *sums;

    __device__ Parts(unsigned char *after_book, const Shape &shape, int warp, int warps) {
        const int row_bytes = BUFFERS * ROWS * shape.pitch();
        const int x_bytes = shape.slice / 32 * shape.columns * 64 * PLANES;
        rows = after_book + warp * (row_bytes + x_bytes);
        x = reinterpret_cast<uint4 *>(rows + row_bytes);
        sums = reinterpret_cast<float *>(after_book + warps * (row_bytes + x_bytes));
    }
};

// Where a row of a slice begins in its 16 bytes, as far as its type and alignment leave that open.
template <int TYPE, int LANE, int ALIGN>
__device__ inline int phase_of(const unsigned char *row) {
    using R = Rows<TYPE, LANE>;
    constexpr int align = stage_alignment(ALIGN, R::bytes(256));
    if constexpr (align == 16 && R::STEPS == 8) return 0;
    const int phase = static_cast<int>(reinterpret_cast<unsigned long long>(row) & 15);
    return phase / align * align;
}

template <int TYPE, int LANE>
__device__ inline const unsigned char *row_of_slice(const Shape &shape, const Job &job, int row,
                                                    int first_k) {
    using R = Rows<TYPE, LANE>;
    const long long row_bytes = R::bytes(shape.cols);
    return job.matrix + min(row, shape.rows - 1) * row_bytes + R::bytes(first_k);
}

// Starts the copies of ROWS rows of a slice.
template <int TYPE, int LANE, int ROWS, int ALIGN>
__device__ inline void copy_rows(unsigned char *shared, const Shape &shape, const Job &job,
                                 int first_row, int first_k) {
    using R = Rows<TYPE, LANE>;
    constexpr bool whole = stage_alignment(ALIGN, R::bytes(256)) == 16 && R::STEPS == 8;
    constexpr int COPY_UNROLL = COPY_LANES > 4 ? 1 : 4;  // long code is slow to arrive, too
    constexpr int at_once = 32 / COPY_LANES, stride = 16 * COPY_LANES;
    const int lane = threadIdx.x & 31, first = 16 * (lane % COPY_LANES);
    const int length = min(shape.slice, shape.cols - first_k);
#pragma unroll
    for (int pass = 0; pass < ROWS; pass += at_once) {
        const int row = pass + lane / COPY_LANES;
        const unsigned char *from = row_of_slice<TYPE, LANE>(shape, job, first_row + row, first_k);
        const int phase = phase_of<TYPE, LANE, ALIGN>(from);
        from -= phase;
        unsigned char *to = shared + row * shape.pitch();
        const int end = phase + R::bytes(length);
        if constexpr (whole) {
#pragma unroll COPY_UNROLL
            for (int at = first; at < end; at += stride) copy_async(to + at, from + at);
        } else {
            // Up to the end of a step of float weights, which may lie beyond the row.
            const int filled = R::IS_FLOAT ? phase + R::bytes((length + 31) / 32 * 32) : end;
#pragma unroll COPY_UNROLL
            for (int at = first; at < filled; at += stride)
                copy_async(to + at, at < end ? from + at : from, max(0, min(16, end - at)));
        }
    }
}

// Where the lane's rows g, g + 8 of a slice begin in their 16 bytes.
template <int TYPE, int LANE, int ROWS, int ALIGN>
__device__ inline void find_phases(int (&phase)[ROWS / 8], const Shape &shape, const Job &job,
                                   int first_row, int first_k) {
    const int g = (threadIdx.x & 31) / 4;
#pragma unroll
    for (int half = 0; half < ROWS / 8; half++)
        phase[half] = phase_of<TYPE, LANE, ALIGN>(
            row_of_slice<TYPE, LANE>(shape, job, first_row + 8 * half + g, first_k));
}

// Eight activations of a row, zeros beyond its end.
__device__ inline void load_eight(const float *row, int k, int cols, bool wide, float (&v)[8]) {
    if (wide && k + 8 <= cols) {
        const float4 a = *reinterpret_cast<const float4 *>(row + k);
        const float4 b = *reinterpret_cast<const float4 *>(row + k + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = k + i < cols ? row[k + i] : 0.0f;
    }
}

__device__ inline uint4 rounded(const float (&v)[8]) {
    return make_uint4(pair_of(v[0], v[1]), pair_of(v[2], v[3]), pair_of(v[4], v[5]),
                      pair_of(v[6], v[7]));
}

// What rounding to f16 left over.
__device__ inline void subtract(float (&v)[8], const uint4 &high) {
    const unsigned pairs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] -= float_of(pairs[i / 2] >> 16 * (i & 1));
}

#if AHEAD
// load_x of whole steps at aligned addresses: four octets of a lane are on their way at once,
// of one row or of several.
template <int TYPE, int LANE>
__device__ inline void load_whole_x(uint4 *shared, const Shape &shape, const Job &job,
                                    const float *x, int first_k, int steps) {
    using R = Rows<TYPE, LANE>;
    constexpr int together = 4;
    const int octets = 4 * steps, items = octets * job.count;
    for (int first = threadIdx.x & 31; first < items; first += 32 * together) {
        float v[together][8];
#pragma unroll
        for (int i = 0; i < together; i++) {
            const int item = min(first + 32 * i, items - 1), column = item / octets;
            const int token = job.first + column;
            const long long row = job.row_of ? job.row_of[token] : token;
            const float4 *from = reinterpret_cast<const float4 *>(x + row * shape.cols + first_k +
                                                                  8 * (item - column * octets));
            const float4 a = from[0], b = from[1];
            v[i][0] = a.x, v[i][1] = a.y, v[i][2] = a.z, v[i][3] = a.w;
            v[i][4] = b.x, v[i][5] = b.y, v[i][6] = b.z, v[i][7] = b.w;
        }
#pragma unroll
        for (int i = 0; i < together; i++) {
            const int item = first + 32 * i, column = item / octets;
            if (item >= items) break;
            const int octet = item - column * octets, in_span = octet % (4 * R::OCTETS);
            const int step = octet / (4 * R::OCTETS) * R::OCTETS + in_span % R::OCTETS;
            const int at = (step * job.count + column) * 4 + in_span / R::OCTETS;
            shared[at] = rounded(v[i]);
            if constexpr (TYPE == F32) {
                subtract(v[i], shared[at]);
                shared[at + steps * job.count * 4] = rounded(v[i]);
            }
        }
    }
}
#endif

// The slice of the job's activations as f16, as the lanes need it: [step][column][t] of 16 bytes.
template <int TYPE, int LANE>
__device__ inline void load_x(uint4 *shared, const Shape &shape, const Job &job, const float *x,
                              int first_k) {
    using R = Rows<TYPE, LANE>;
    const int length = min(shape.slice, shape.cols - first_k), steps = (length + 31) / 32;
    const bool wide = ((reinterpret_cast<unsigned long long>(x) | 4 * shape.cols) & 15) == 0;
#if AHEAD
    if (wide && length % 32 == 0) {
        load_whole_x<TYPE, LANE>(shared, shape, job, x, first_k, steps);
        return;
    }
#endif
    for (int column = 0; column < job.count; column++) {
        const int token = job.first + column;
        const long long row = job.row_of ? job.row_of[token] : token;
#pragma unroll 2
        for (int octet = threadIdx.x & 31; octet < 4 * steps; octet += 32) {
            const int in_span = octet % (4 * R::OCTETS);
            const int step = octet / (4 * R::OCTETS) * R::OCTETS + in_span % R::OCTETS;
            const int at = (step * job.count + column) * 4 + in_span / R::OCTETS;
            float v[8];
            load_eight(x + row * shape.cols, first_k + 8 * octet, shape.cols, wide, v);
            shared[at] = rounded(v);
            if constexpr (TYPE == F32) {
                subtract(v, shared[at]);
                shared[at + steps * job.count * 4] = rounded(v);
            }
        }
    }
}

template <int ROWS>
__device__ inline void multiply_step(float (&sums)[4], const Octet (&w)[ROWS / 8], const uint4 &x) {
    const Octet none = {{0, 0, 0, 0}};
    const Octet &low = w[0], &high = ROWS == 16 ? w[ROWS / 8 - 1] : none;
    multiply(sums, low.pair[0], high.pair[0], low.pair[1], high.pair[1], x.x, x.y);
    multiply(sums, low.pair[2], high.pair[2], low.pair[3], high.pair[3], x.z, x.w);
}

// A step of float32 weights: both operands as the sum of two f16, without the smallest product.
template <int ROWS>
__device__ inline void multiply_split(float (&sums)[4], const Octet (&w)[ROWS / 8],
                                      const Octet (&rest)[ROWS / 8], const uint4 &x,
                                      const uint4 &x_rest) {
    const Octet none = {{0, 0, 0, 0}};
    const Octet &wa = w[0], &wb = ROWS == 16 ? w[ROWS / 8 - 1] : none;
    const Octet &ra = rest[0], &rb = ROWS == 16 ? rest[ROWS / 8 - 1] : none;
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

// All steps of a slice whose rows and activations lie in shared memory.
template <int TYPE, int LANE, int ROWS, int ALIGN, class Book>
__device__ inline void multiply_slice(float (&sums)[4], const unsigned char *rows, const uint4 *x,
                                      const Shape &shape, int length, int count,
                                      const int (&phase)[ROWS / 8], Book book) {
    using R = Rows<TYPE, LANE>;
    const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3, steps = (length + 31) / 32;
    const uint4 *own_x = x + min(g, count - 1) * 4 + t;
    for (int first = 0; first < steps; first += R::STEPS) {
        RowScale scale[ROWS / 8];
        Staged<ALIGN> row[ROWS / 8];
#pragma unroll
        for (int half = 0; half < ROWS / 8; half++)
            row[half] = {rows + (8 * half + g) * shape.pitch(), phase[half] + R::bytes(32 * first)};
#pragma unroll
        for (int i = 0; i < R::STEPS; i++) {
            Octet w[ROWS / 8];
            const uint4 activations = own_x[(first + i) * count * 4];
#pragma unroll
            for (int half = 0; half < ROWS / 8; half++)
                w[half] = decode<TYPE, LANE, ALIGN>(row[half], i, t, book, scale[half]);
            if constexpr (TYPE == F32) {
                Octet rest[ROWS / 8];
#pragma unroll
                for (int half = 0; half < ROWS / 8; half++)
                    rest[half] = rest_of(row[half], R::k_of(i, t) / 8, w[half]);
                multiply_split<ROWS>(sums, w, rest, activations,
                                     own_x[(steps + first + i) * count * 4]);
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

// Adds up the slices of a group of tiles.
template <int TYPE, int ROWS>
__device__ inline void add_slices(const float *sums, const Shape &shape, const Job &job,
                                  int first_row, int tiles, int slices, float *out) {
    for (int i = threadIdx.x; i < tiles * ROWS * job.count; i += blockDim.x) {
        const int row = i % (tiles * ROWS), column = i / (tiles * ROWS);
        const int n = first_row + row;
        if (n >= shape.rows) continue;
        const float *part = sums + (row / ROWS * slices * ROWS + row % ROWS) * job.count + column;
        float total = 0.0f;
#pragma unroll 4
        for (int slice = 0; slice < slices; slice++) total += part[slice * ROWS * job.count];
        out[static_cast<long long>(job.first + column) * shape.rows + n] = total / GAIN<TYPE>;
    }
}

#if AHEAD
// Sums are kept twice, so that one barrier per group is enough.
template <int TYPE, int LANE, int ROWS, int ALIGN>
__device__ inline void few(const Shape &shape, const Job &job, const float *x, float *out,
                           unsigned *all_shared) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int tiles = warps / shape.warps_per_tile, tile = warp / shape.warps_per_tile;
    const int slices = shape.warps_per_tile, slice = warp % slices, first_k = slice * shape.slice;
    const int groups = (shape.rows + tiles * ROWS - 1) / (tiles * ROWS);
    const int length = min(shape.slice, shape.cols - first_k), buffer_bytes = ROWS * shape.pitch();
    const Parts<TYPE, ROWS> parts(reinterpret_cast<unsigned char *>(all_shared) + BOOK_BYTES<TYPE>,
                                  shape, warp, warps);
    const int own = tile * ROWS, all_sums = tiles * slices * ROWS * job.count;
#pragma unroll 1
    for (int i = 0; i < BUFFERS; i++) {
        const int group = blockIdx.y + i * gridDim.y;
        if (group < groups)
            copy_rows<TYPE, LANE, ROWS, ALIGN>(parts.rows + i * buffer_bytes, shape, job,
                                               group * tiles * ROWS + own, first_k);
        commit_copies();
    }
    const auto book = load_book<TYPE, BOOK_COPIES<TYPE>>(all_shared);
    wait_for_launches_ahead();  // weights may come earlier: no launch writes them
    load_x<TYPE, LANE>(parts.x, shape, job, x, first_k);
    if (Codec<TYPE>::BOOK) __syncthreads();
    int turn = 0;
    for (int group = blockIdx.y; group < groups; group += gridDim.y, turn ^= 1) {
        const int first_row = group * tiles * ROWS;
        unsigned char *rows = parts.rows + (BUFFERS == 2 ? turn * buffer_bytes : 0);
        float *all = parts.sums + turn * all_sums;
        int phase[ROWS / 8];
        find_phases<TYPE, LANE, ROWS, ALIGN>(phase, shape, job, first_row + own, first_k);
        wait_copies<BUFFERS - 1>();
        __syncwarp();
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_slice<TYPE, LANE, ROWS, ALIGN>(sums, rows, parts.x, shape, length, job.count,
                                                phase, book);
        store_sums<ROWS>(all + (tile * slices + slice) * ROWS * job.count, sums, job.count);
        __syncwarp();
        const int next = group + BUFFERS * gridDim.y;
        if (next < groups)
            copy_rows<TYPE, LANE, ROWS, ALIGN>(rows, shape, job, next * tiles * ROWS + own,
                                               first_k);
        commit_copies();
        __syncthreads();
        add_slices<TYPE, ROWS>(all, shape, job, first_row, tiles, slices, out);
    }
}
#else
template <int TYPE, int LANE, int ROWS, int ALIGN, class Book>
__device__ inline void few(const Shape &shape, const Job &job, const float *x, float *out,
                           unsigned char *shared, Book book) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int tiles = warps / shape.warps_per_tile, tile = warp / shape.warps_per_tile;
    const int first_row = (blockIdx.y * tiles + tile) * ROWS;
    const int slices = (shape.cols + shape.slice - 1) / shape.slice;
    const Parts<TYPE, ROWS> parts(shared, shape, warp, warps);
    const int tile_sums = slices * ROWS * job.count;
    for (int slice = warp % shape.warps_per_tile; slice < slices; slice += shape.warps_per_tile) {
        const int first_k = slice * shape.slice, length = min(shape.slice, shape.cols - first_k);
        int phase[ROWS / 8];
        find_phases<TYPE, LANE, ROWS, ALIGN>(phase, shape, job, first_row, first_k);
        copy_rows<TYPE, LANE, ROWS, ALIGN>(parts.rows, shape, job, first_row, first_k);
        commit_copies();
        wait_for_launches_ahead();  // weights may come earlier: no launch writes them
        load_x<TYPE, LANE>(parts.x, shape, job, x, first_k);
        wait_copies<0>();
        __syncwarp();
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_slice<TYPE, LANE, ROWS, ALIGN>(sums, parts.rows, parts.x, shape, length, job.count,
                                                phase, book);
        store_sums<ROWS>(parts.sums + tile * tile_sums + slice * ROWS * job.count, sums, job.count);
        __syncwarp();
    }
    __syncthreads();
    add_slices<TYPE, ROWS>(parts.sums, shape, job, blockIdx.y * tiles * ROWS, tiles, slices, out);
}
#endif

// matmul_few: grid (passes of `columns` tokens, row tiles / tiles per block): passes over the same
// rows run side by side, so all but one find them in the L2 cache
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void matmul_few(const float *x, const unsigned char *data, float *out, long long,
                           long long tokens, long long rows, long long cols, long long slice,
                           long long warps_per_tile, long long chunks, long long columns) {
    extern __shared__ uint4 shared[];
    const Shape shape = {static_cast<int>(rows),   static_cast<int>(cols),
                         static_cast<int>(slice),  static_cast<int>(warps_per_tile),
                         static_cast<int>(chunks), static_cast<int>(columns)};
#if AHEAD
    let_next_start();
#else
    const auto book = load_book<TYPE, BOOK_COPIES<TYPE>>(reinterpret_cast<unsigned *>(shared));
    let_next_start();
    if (Codec<TYPE>::BOOK) __syncthreads();
#endif
    const int first = shape.columns * blockIdx.x;
    const Job job = {data, nullptr, first, min(shape.columns, static_cast<int>(tokens) - first)};
#if AHEAD
    few<TYPE, LANE, ROWS, ALIGN>(shape, job, x, out, reinterpret_cast<unsigned *>(shared));
#else
    few<TYPE, LANE, ROWS, ALIGN>(
        shape, job, x, out, reinterpret_cast<unsigned char *>(shared) + BOOK_BYTES<TYPE>, book);
#endif
}

// grouped_few: pairs sorted by expert; grid (P, row tiles / tiles per block). Blocks x make the
// `columns` pairs from x on of an expert if x is its first pair or a multiple of `columns` after
// it, else nothing.
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void grouped_few(const float *x, const long long *blobs, const int *row_of,
                            const int *expert_start, float *out, long long, long long rows,
                            long long cols, long long offset_bytes, long long experts,
                            long long slice, long long warps_per_tile, long long chunks,
                            long long columns) {
    extern __shared__ uint4 shared[];
    __shared__ int found;
    const int pair = blockIdx.x;
    const Shape shape = {static_cast<int>(rows),   static_cast<int>(cols),
                         static_cast<int>(slice),  static_cast<int>(warps_per_tile),
                         static_cast<int>(chunks), static_cast<int>(columns)};
#if AHEAD == 0
    const auto book = load_book<TYPE, BOOK_COPIES<TYPE>>(reinterpret_cast<unsigned *>(shared));
#endif
    let_next_start();
    wait_for_launches_ahead();
    for (int e = threadIdx.x; e < experts; e += blockDim.x)
        if (expert_start[e] <= pair && pair < expert_start[e + 1]) found = e;
    __syncthreads();
    const int expert = found, start = expert_start[expert], end = expert_start[expert + 1];
    if ((pair - start) % shape.columns != 0) return;
    const unsigned char *matrix =
        reinterpret_cast<const unsigned char *>(blobs[expert]) + offset_bytes;
    const Job job = {matrix, row_of, pair, min(shape.columns, end - pair)};
#if AHEAD
    few<TYPE, LANE, ROWS, ALIGN>(shape, job, x, out, reinterpret_cast<unsigned *>(shared));
#else
    few<TYPE, LANE, ROWS, ALIGN>(
        shape, job, x, out, reinterpret_cast<unsigned char *>(shared) + BOOK_BYTES<TYPE>, book);
#endif
}
