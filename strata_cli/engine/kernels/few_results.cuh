// What comes of the partial sums of tiles of matmul_few.cu: slices are added up in order, and what
// they make is written, or used up at once.
#pragma once
#include "activations.cuh"
#include "few_work.cuh"
#include "overlap.cuh"
#include "special.cuh"
#include "streams.cuh"

#ifndef WRITTEN_STREAMS
#define WRITTEN_STREAMS 0  // else results, of one token, are written to so many streams
#endif
#ifndef CONV_TAPS
#define CONV_TAPS 0  // else the first matrix's results, of one token, are convolved
#endif

// Partial sums of a team's tiles first, first + apart, ...: [tile][slice][row][column], `set`
// floats from tile to tile.
struct TileSums {
    const float *values;
    int set, first, apart, tiles;
};

// A result of a tile: its row, among those of the kind of results, and its column.
struct Result {
    int tile, row, column;
};

// The i-th result of tiles, so many `rows` of each.
__device__ inline Result result_at(int i, int rows, int count, int first, int apart) {
    const int values = rows * count, place = i / values, rest = i - place * values;
    return {first + place * apart, rest % rows, rest / rows};
}

// One of a tile's rows of weights times a column: its slices added up.
template <class Work>
__device__ inline float sum_of(const Work &work, const Plan &plan, int kind, const float *part,
                               int step) {
    float total = 0.0f;
#pragma unroll 5
    for (int slice = 0; slice < plan.slices; slice++) total += part[slice * step];
    return total * work.inverse_gain(kind);
}

// All results of some tiles, by a team's threads. ahead: what results loaded for the thread's first
// one, if is_loaded.
template <class Results, int ROWS, int MATRICES, class... Kinds>
__device__ inline void finish_tiles(const Work<ROWS, MATRICES, Kinds...> &work,
                                    const TileSums &sums, const Team &team, const Columns &columns,
                                    const Results &results, typename Results::Ahead &ahead,
                                    bool is_loaded) {
    const int rows = results.rows(work), count = columns.count();
#pragma unroll 1
    for (int i = team.thread(); i < sums.tiles * rows * count; i += team.threads()) {
        const Result own = result_at(i, rows, count, sums.first, sums.apart);
        if (!is_loaded) ahead = results.load(work, columns, own);
        is_loaded = false;
        const float *tile = sums.values + i / (rows * count) * sums.set + own.column;
        results.finish(work, columns, own, ahead, [&](const Plan &plan, int kind, int row) {
            return sum_of(work, plan, kind, tile + row * count, ROWS * count);
        });
    }
}

// Results as they are, to where their matrices' go.
struct Written {
    struct Ahead {};

    // By one warp, before any result is finished.
    __device__ void prepare() const {}

    template <class Work>
    __device__ int rows(const Work &) const {
        return Work::TILE_ROWS;
    }
    template <class... All>
    __device__ Ahead load(const All &...) const {
        return {};
    }
    template <class Work, class Sum>
    __device__ void finish(const Work &work, const Columns &columns, const Result &own,
                           const Ahead &, const Sum &sum) const {
        const Matrix matrix = work.matrix_of(own.tile);
        const Plan plan = work.plan_of(matrix.kind);
        const int n = (own.tile - matrix.first_tile) * plan.tile_rows + own.row;
        if (own.row >= plan.tile_rows || n >= matrix.rows) return;
        const long long token = columns.first + own.column;
        matrix.out[token * matrix.rows + n] = sum(plan, matrix.kind, own.row);
    }
};

// What the thread that finishes a team's first result loads for it, or one that has none for
// another.
template <class Results, class Work>
__device__ inline typename Results::Ahead load_first(const Results &results, const Work &work,
                                                     const Columns &columns, const Team &team,
                                                     int first, int apart, int tiles) {
    const int rows = results.rows(work), count = columns.count(), all = tiles * rows * count;
    if (all == 0) return {};
    const int own = min(team.thread(), all - 1);
    return results.load(work, columns, result_at(own, rows, count, first, apart));
}

#if MIXED_STREAMS
// Results are gates: the mix of the streams that they open, as mix_columns (mix.cuh).
struct Mixed {
    const float *normed;  // [T,MIXED_STREAMS,D]
    struct Ahead {
        float normed[MIXED_STREAMS];
    };

    __device__ void prepare() const {}
    template <class Work>
    __device__ int rows(const Work &work) const {
        return work.plans[0].tile_rows / MIXED_STREAMS;
    }
    template <class Work>
    __device__ Ahead load(const Work &work, const Columns &columns, const Result &own) const {
        const int size = work.matrices[0].rows / MIXED_STREAMS;
        const long long token = columns.first + own.column;
        const float *row = normed + token * work.matrices[0].rows + own.tile * rows(work) + own.row;
        Ahead ahead;
#pragma unroll
        for (int s = 0; s < MIXED_STREAMS; s++) ahead.normed[s] = row[s * size];
        return ahead;
    }
    template <class Work, class Sum>
    __device__ void finish(const Work &work, const Columns &columns, const Result &own,
                           const Ahead &ahead, const Sum &sum) const {
        const int size = work.matrices[0].rows / MIXED_STREAMS, own_rows = rows(work);
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < MIXED_STREAMS; s++) {
            const float gate = sum(work.plans[0], 0, s * own_rows + own.row);
            total = fmaf(sigmoid_fast(gate), ahead.normed[s], total);
        }
        const long long token = columns.first + own.column;
        work.matrices[0].out[token * size + own.tile * own_rows + own.row] =
            total * (1.0f / static_cast<float>(MIXED_STREAMS));
    }
};
#endif

#if CONV_TAPS
// Results of the first matrix are a token's row of a causal convolution, whose silu is written: the
// thread that has one knows all that its channel needs. The others as they are.
struct Convolved {
    const float *weight;  // [channels,CONV_TAPS]
    float *history;       // [CONV_TAPS - 1,channels], the rows before; moves along
    int channels;
    static constexpr int PAST = CONV_TAPS - 1;
    struct Ahead {
        float taps[CONV_TAPS], past[PAST];
    };

    // Last used a token ago: no longer in the cache.
    __device__ void fetch_ahead_all() const {
        const int own = 32 * (blockIdx.y * blockDim.x + threadIdx.x);
        if (own < channels * CONV_TAPS) fetch_ahead(weight + own);
        if (own < channels * PAST) fetch_ahead(history + own);
    }
    template <class Work>
    __device__ int rows(const Work &) const {
        return Work::TILE_ROWS;
    }
    __device__ void prepare() const {}
    // The row of the first matrix that a result is, or one behind its end.
    template <class Work>
    __device__ int channel(const Work &work, const Result &own) const {
        const int tile_rows = work.plan_of(work.matrices[0].kind).tile_rows;
        return own.row < tile_rows ? min(own.tile * tile_rows + own.row, channels) : channels;
    }
    template <class Work>
    __device__ Ahead load(const Work &work, const Columns &, const Result &own) const {
        const int n = min(channel(work, own), channels - 1);
        Ahead ahead;
#pragma unroll
        for (int j = 0; j < CONV_TAPS; j++) ahead.taps[j] = weight[n * CONV_TAPS + j];
#pragma unroll
        for (int j = 0; j < PAST; j++) ahead.past[j] = history[j * channels + n];
        return ahead;
    }
    template <class Work, class Sum>
    __device__ void finish(const Work &work, const Columns &columns, const Result &own,
                           const Ahead &ahead, const Sum &sum) const {
        const int n = channel(work, own);
        if (n == channels) return Written().finish(work, columns, own, {}, sum);
        const int kind = work.matrices[0].kind;
        const float u = sum(work.plan_of(kind), kind, own.row);
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < PAST; j++) total = fmaf(ahead.taps[j], ahead.past[j], total);
        total = fmaf(ahead.taps[PAST], u, total);
#pragma unroll
        for (int j = 0; j < PAST; j++)
            history[j * channels + n] = j + 1 < PAST ? ahead.past[j + 1] : u;
        work.matrices[0].out[n] = silu_fast(total);
    }
};
#endif

#if WRITTEN_STREAMS
// Results are a token's output, which is written to its streams by the weights of its inject.
struct StreamsWritten {
    float *x;       // [WRITTEN_STREAMS,D], in place
    Inject inject;  // of one token
    struct Ahead {
        float x[WRITTEN_STREAMS];
    };

    __device__ static float *weights() {
        __shared__ float of_streams[WRITTEN_STREAMS];
        return of_streams;
    }
    __device__ void prepare() const {
        __shared__ float parts[MOST_INJECT_FLOATS];
        wait_for_launches_ahead();
        inject.weights_of_token<WRITTEN_STREAMS>(0, parts, weights());
    }
    template <class Work>
    __device__ int rows(const Work &) const {
        return Work::TILE_ROWS;
    }
    // A result's place in the row, or one behind its end.
    template <class Work>
    __device__ int column(const Work &work, const Result &own) const {
        const int tile_rows = work.plans[0].tile_rows, size = work.matrices[0].rows;
        return own.row < tile_rows ? min(own.tile * tile_rows + own.row, size) : size;
    }
    template <class Work>
    __device__ Ahead load(const Work &work, const Columns &, const Result &own) const {
        const int size = work.matrices[0].rows, n = min(column(work, own), size - 1);
        Ahead ahead;
#pragma unroll
        for (int s = 0; s < WRITTEN_STREAMS; s++) ahead.x[s] = x[s * size + n];
        return ahead;
    }
    template <class Work, class Sum>
    __device__ void finish(const Work &work, const Columns &, const Result &own, const Ahead &ahead,
                           const Sum &sum) const {
        const int size = work.matrices[0].rows, n = column(work, own);
        if (n == size) return;
        const float out = sum(work.plans[0], 0, own.row);
#pragma unroll
        for (int s = 0; s < WRITTEN_STREAMS; s++)
            x[s * size + n] = fmaf(weights()[s], out, ahead.x[s]);
    }
};
#endif
