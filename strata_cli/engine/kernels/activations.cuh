// Activations of a few rows in shared memory as f16, in the order in which lanes multiply them.
#pragma once
#include "lanes.cuh"
#include "math32.cuh"
#include "special.cuh"
#include "weights.cuh"

// What is multiplied: x itself; silu(x / divisor), times `up` where that is not null; or x whose
// heads were normed and gated.
struct Plain {};
struct Gated {
    const float *up;  // as x
    float divisor;
};
struct Normed {
    const float *z, *weight;  // as x; [dim]
    int dim;                  // of a head, at most MOST_NORMED_DIM
    float eps;
};
constexpr int MOST_NORMED_DIM = 128;

#ifndef ONE_COLUMN
#define ONE_COLUMN 0  // 1: blocks have one row of x each
#endif

// The rows of x that a block multiplies, in the order of its columns.
struct Columns {
    const int *source;  // the row of each; null: first, first + 1, ...
    int first, given;

    __device__ int count() const { return ONE_COLUMN ? 1 : given; }
};

// Eight activations of a row: at an aligned address and all there, or zeros beyond its end.
template <bool WHOLE>
__device__ inline void load_eight(const float *row, int k, int cols, float (&v)[8]) {
    if constexpr (WHOLE) {
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

// Where the octet of a column lies for lanes that own LANE weights: [step][column][t].
template <int LANE>
__device__ inline int place_of(int octet, int column, int count) {
    constexpr int octets = LANE / 8;
    const int in_span = octet % (4 * octets);
    const int step = octet / (4 * octets) * octets + in_span % octets;
    return (step * count + column) * 4 + in_span / octets;
}

// Copies of x that kinds of matrices need: one for each length of lane, one of what rounding
// leaves.
template <class... Kinds>
struct Planes {
    static constexpr bool has(int lane) { return ((Kinds::LANE == lane) || ...); }
    static constexpr bool HAS_REST = ((Kinds::TYPE == F32) || ...);
    static constexpr int COUNT = has(8) + has(16) + has(32) + has(64) + HAS_REST;
    static constexpr int REST = COUNT - 1;

    static constexpr int of(int lane) {
        return (lane > 8 && has(8)) + (lane > 16 && has(16)) + (lane > 32 && has(32));
    }
};

// The lane length of float32 matrices among the kinds: the rest is in their order.
template <class... Kinds>
constexpr int REST_LANE = ((Kinds::TYPE == F32 ? Kinds::LANE : 0) | ... | 0);

template <int LANE, class Places>
__device__ inline void store_plane(uint4 *planes, int plane, int octet, int column, int count,
                                   const uint4 &value) {
    if constexpr (Places::has(LANE))
        planes[Places::of(LANE) * plane + place_of<LANE>(octet, column, count)] = value;
}

// One octet of a column in all planes.
template <class... Kinds>
__device__ inline void store_octet(uint4 *planes, int plane, int octet, int column, int count,
                                   float (&v)[8]) {
    using Places = Planes<Kinds...>;
    const uint4 high = rounded(v);
    store_plane<8, Places>(planes, plane, octet, column, count, high);
    store_plane<16, Places>(planes, plane, octet, column, count, high);
    store_plane<32, Places>(planes, plane, octet, column, count, high);
    store_plane<64, Places>(planes, plane, octet, column, count, high);
    if constexpr (Places::HAS_REST) {
        subtract(v, high);
        planes[Places::REST * plane + place_of<REST_LANE<Kinds...>>(octet, column, count)] =
            rounded(v);
    }
}

// Two neighbouring activations in all planes.
template <int LANE, class Places>
__device__ inline void store_pair_in(uint4 *planes, int plane, int octet, int word, int column,
                                     int count, unsigned value) {
    if constexpr (Places::has(LANE)) {
        uint4 *own = planes + Places::of(LANE) * plane + place_of<LANE>(octet, column, count);
        reinterpret_cast<unsigned *>(own)[word] = value;
    }
}

template <class... Kinds>
__device__ inline void store_two(uint4 *planes, int plane, int k, int column, int count, float a,
                                 float b) {
    using Places = Planes<Kinds...>;
    const int octet = k / 8, word = k % 8 / 2;
    const unsigned high = pair_of(a, b);
    store_pair_in<8, Places>(planes, plane, octet, word, column, count, high);
    store_pair_in<16, Places>(planes, plane, octet, word, column, count, high);
    store_pair_in<32, Places>(planes, plane, octet, word, column, count, high);
    store_pair_in<64, Places>(planes, plane, octet, word, column, count, high);
    if constexpr (Places::HAS_REST) {
        uint4 *own =
            planes + Places::REST * plane + place_of<REST_LANE<Kinds...>>(octet, column, count);
        reinterpret_cast<unsigned *>(own)[word] =
            pair_of(a - float_of(high), b - float_of(high >> 16));
    }
}

// All planes of gated x by the first `warps` warps: two activations a thread, because the gates
// take longer than the loads.
template <class... Kinds>
__device__ inline void load_gated(uint4 *planes, const float *x, int cols, const Columns &columns,
                                  const Gated &gate, int warps) {
    const int pairs = (cols + 31) / 32 * 16, count = columns.count(), threads = 32 * warps;
    const auto load = [&](int i, float (&v)[2], float (&times)[2]) {
        if (i >= pairs * count) return;
        const int column = count == 1 ? 0 : i / pairs, k = 2 * (i - column * pairs);
        const long long row = columns.source ? columns.source[column] : columns.first + column;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const bool is_there = k + e < cols;
            v[e] = is_there ? x[row * cols + k + e] : 0.0f;
            times[e] = is_there && gate.up ? gate.up[row * cols + k + e] : 1.0f;
        }
    };
    float next[2], next_times[2];
    load(threadIdx.x, next, next_times);
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs * count; i += threads) {
        const int column = count == 1 ? 0 : i / pairs, k = 2 * (i - column * pairs);
        float v[2] = {next[0], next[1]};
        const float times[2] = {next_times[0], next_times[1]};
        load(i + threads, next, next_times);
#pragma unroll
        for (int e = 0; e < 2; e++) v[e] = silu32(v[e] / gate.divisor) * times[e];
        store_two<Kinds...>(planes, pairs / 4 * count, k, column, count, v[0], v[1]);
    }
}

// All planes of x / rms(x) * weight * sigmoid(z), each head on its own, by the first `warps` warps:
// 16 lanes a head. The order of all sums is that of gated_norm (gdn.cu).
template <class... Kinds>
__device__ inline void load_normed(uint4 *planes, const float *x, int cols, const Columns &columns,
                                   const Normed &gate, int warps) {
    constexpr int EACH = MOST_NORMED_DIM / 16;
    const int heads = cols / gate.dim, count = columns.count(), all = heads * count;
    const int octets = (cols + 31) / 32 * 4;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 2; first < all; first += 2 * warps) {
        const int wanted = first + (threadIdx.x & 31) / 16;
        const int own = min(wanted, all - 1);  // a spare half warp takes part in the sums
        const int column = count == 1 ? 0 : own / heads, head = own - column * heads;
        const long long row = columns.source ? columns.source[column] : columns.first + column;
        const int begin = head * gate.dim + lane16();
        float v[EACH], z[EACH], weights[EACH], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const bool is_there = lane16() + 16 * i < gate.dim;
            v[i] = is_there ? x[row * cols + begin + 16 * i] : 0.0f;
            z[i] = is_there ? gate.z[row * cols + begin + 16 * i] : 0.0f;
            weights[i] = is_there ? gate.weight[lane16() + 16 * i] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) squares = fmaf(v[i], v[i], squares);
        const float scale = rms_factor(fold16(squares), gate.dim, gate.eps);
#pragma unroll
        for (int i = 0; i < EACH; i++) v[i] = v[i] * scale * weights[i] * sigmoid_fast(z[i]);
        // Neighbours exchange every other value: then each has pairs.
        const bool is_odd = threadIdx.x & 1;
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            const float other = __shfl_xor_sync(ALL_LANES, is_odd ? v[i] : v[i + 1], 1);
            const int mine = i + is_odd;
            if (lane16() + 16 * mine < gate.dim && own == wanted)
                store_two<Kinds...>(planes, octets * count, begin - is_odd + 16 * mine, column,
                                    count, is_odd ? other : v[i], is_odd ? v[i + 1] : other);
        }
    }
}

// All planes of x by the first `warps` warps: 32 octets of a column at a time, TOGETHER of them on
// their way at once.
template <int TOGETHER, class... Kinds>
__device__ inline void load_octets(uint4 *planes, const float *x, int cols, const Columns &columns,
                                   int warps) {
    const int lane = threadIdx.x & 31, count = columns.count();
    const int octets = (cols + 31) / 32 * 4;
    int column = threadIdx.x / 32, first = lane;
    const auto next = [&] {
        if (count == 1) {  // no loop: its turns would cost as much as the loads
            first += 32 * column;
            column = 0;
        }
        for (; column >= count; column -= count) first += 32;
    };
#pragma unroll 1
    for (next(); first - lane < octets;) {
        float v[TOGETHER][8];
        int own_column[TOGETHER], own_octet[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            own_column[i] = column, own_octet[i] = first;
            if (first < octets) {
                const long long row =
                    columns.source ? columns.source[column] : columns.first + column;
                load_eight<(TOGETHER > 1)>(x + row * cols, 8 * first, cols, v[i]);
            }
            column += warps;
            next();
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (own_octet[i] < octets)
                store_octet<Kinds...>(planes, octets * count, own_octet[i], own_column[i], count,
                                      v[i]);
    }
}

// All planes of x by the first `warps` warps. Does not wait for the other threads.
template <class... Kinds>
__device__ inline void load_activations(uint4 *planes, const float *x, int cols,
                                        const Columns &columns, const Plain &, int warps) {
    const unsigned long long places = reinterpret_cast<unsigned long long>(x) | 4 * cols;
    if (places % 16 == 0 && cols % 32 == 0)
        load_octets<2, Kinds...>(planes, x, cols, columns, warps);
    else
        load_octets<1, Kinds...>(planes, x, cols, columns, warps);
}

template <class... Kinds>
__device__ inline void load_activations(uint4 *planes, const float *x, int cols,
                                        const Columns &columns, const Gated &gate, int warps) {
    load_gated<Kinds...>(planes, x, cols, columns, gate, warps);
}

template <class... Kinds>
__device__ inline void load_activations(uint4 *planes, const float *x, int cols,
                                        const Columns &columns, const Normed &gate, int warps) {
    load_normed<Kinds...>(planes, x, cols, columns, gate, warps);
}
