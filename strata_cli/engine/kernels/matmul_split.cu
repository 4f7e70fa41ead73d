// Products of float32 weights with many activation rows, both as the sum of two f16: for routers.
//   x [T,K] f32, N rows of K f32 weights -> out [T,N] f32
//   6 * T*N*K floating-point operations over the tensor cores' rate
//
// A block makes a tile of 32 * ROW_WARPS weight rows and 32 * TOKEN_WARPS tokens. Weights and
// activations are alike: rows of float32 that arrive by asynchronous copies, two steps of 32 k at a
// time, some stages ahead, and are split by the warp that multiplies them. Each sum is made of the
// same operations in the same order as in matmul_few.cu.
#include "mma.cuh"
#include "overlap.cuh"
#include "weights.cuh"

constexpr int STAGES = 3;
constexpr int ROW_BYTES = 256;  // of a row in a stage: eight octets of float32

// Eight values as f16, and what that leaves of them.
struct Split {
    Octet high, rest;

    __device__ explicit Split(const float (&v)[8]) {
        float left[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            high.pair[i] = pair_of(v[2 * i], v[2 * i + 1]);
            left[2 * i] = v[2 * i] - float_of(high.pair[i]);
            left[2 * i + 1] = v[2 * i + 1] - float_of(high.pair[i] >> 16);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) rest.pair[i] = pair_of(left[2 * i], left[2 * i + 1]);
    }
};

// The two halves of an octet of 32 bytes lie at places (2 * t + half) ^ (row % 2) of eight: then
// neither the eight threads that copy together nor the eight that load meet in a bank.
template <int FACTOR>
__device__ inline Split load_split(const unsigned char *stage, int row, int step) {
    const int t = threadIdx.x & 3;
    const unsigned char *own = stage + row * ROW_BYTES + 128 * step;
    const float4 a = *reinterpret_cast<const float4 *>(own + 16 * (2 * t ^ (row & 1)));
    const float4 b = *reinterpret_cast<const float4 *>(own + 16 * ((2 * t + 1) ^ (row & 1)));
    const float v[8] = {a.x * FACTOR, a.y * FACTOR, a.z * FACTOR, a.w * FACTOR,
                        b.x * FACTOR, b.y * FACTOR, b.z * FACTOR, b.w * FACTOR};
    return Split(v);
}

// Rows of float32 in memory; beyond the last one, it again.
struct Source {
    const float *first;
    int rows;
};

template <int LANE, int ROWS, int THREADS>
__device__ inline void copy_rows(unsigned char *stage, const Source &from, int first_row, int cols,
                                 int step) {
    using R = Rows<F32, LANE>;
    const int piece = threadIdx.x % 16, t = piece / 2 % 4;
    const int k = R::k_of(step + piece / 8, t) + 4 * (piece % 2);
    const int nbytes = max(0, min(16, 4 * (cols - k)));
#pragma unroll
    for (int i = 0; i < 16 * ROWS / THREADS; i++) {
        const int row = threadIdx.x / 16 + THREADS / 16 * i;
        const long long n = min(first_row + row, from.rows - 1);
        copy_async(stage + row * ROW_BYTES + 16 * (piece ^ (row & 1)),
                   nbytes ? from.first + n * cols + k : from.first, nbytes);
    }
}

// Half HALF of a step: weights times activations, then each times what the other's f16 leave.
template <int HALF>
__device__ inline void multiply_half(float (&sums)[4], const Octet &low, const Octet &high,
                                     const Octet &x) {
    multiply(sums, low.pair[2 * HALF], high.pair[2 * HALF], low.pair[2 * HALF + 1],
             high.pair[2 * HALF + 1], x.pair[2 * HALF], x.pair[2 * HALF + 1]);
}

// Stages begin ... end of a tile, by all threads of the block. IS_WHOLE: they are all of the row;
// else one slice, whose sums are left as they are.
template <int LANE, int ROW_WARPS, int TOKEN_WARPS, bool IS_WHOLE>
__device__ inline void make_tile(const Source &x, const Source &weights, float *out,
                                 int first_token, int first_row, int cols, int slice, int begin,
                                 int end) {
    constexpr int THREADS = 32 * ROW_WARPS * TOKEN_WARPS;
    constexpr int ROWS = 32 * ROW_WARPS, TOKENS = 32 * TOKEN_WARPS;
    constexpr int STAGE_BYTES = (ROWS + TOKENS) * ROW_BYTES;
    extern __shared__ uint4 all_shared[];
    unsigned char *shared = reinterpret_cast<unsigned char *>(all_shared);
    const int tokens = x.rows, rows = weights.rows;
    const int warp = threadIdx.x / 32, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const int own_row = warp % ROW_WARPS * 32 + g, own_token = warp / ROW_WARPS * 32 + g;
    const int steps = (cols + 31) / 32;
    auto copy = [&](int stage, int slot) {
        unsigned char *to = shared + slot * STAGE_BYTES;
        if (stage < end) {
            copy_rows<LANE, ROWS, THREADS>(to, weights, first_row, cols, 2 * stage);
            copy_rows<LANE, TOKENS, THREADS>(to + ROWS * ROW_BYTES, x, first_token, cols,
                                             2 * stage);
        }
        commit_copies();
    };
    start_early();
    for (int i = 0; i < STAGES - 1; i++) copy(begin + i, i);
    float sums[2][4][4] = {}, totals[2][4][4] = {};
    int slot = 0;
    for (int stage = begin; stage < end; stage++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        copy(stage + STAGES - 1, slot ? slot - 1 : STAGES - 1);
        const unsigned char *w_stage = shared + slot * STAGE_BYTES;
        const unsigned char *x_stage = w_stage + ROWS * ROW_BYTES;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (2 * stage + j >= steps) break;
            constexpr int gain = static_cast<int>(GAIN<F32>);
            const Split w[2][2] = {
                {load_split<gain>(w_stage, own_row, j), load_split<gain>(w_stage, own_row + 8, j)},
                {load_split<gain>(w_stage, own_row + 16, j),
                 load_split<gain>(w_stage, own_row + 24, j)}};
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const Split v = load_split<1>(x_stage, own_token + 8 * n, j);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    multiply_half<0>(sums[m][n], w[m][0].high, w[m][1].high, v.high);
                    multiply_half<0>(sums[m][n], w[m][0].high, w[m][1].high, v.rest);
                    multiply_half<0>(sums[m][n], w[m][0].rest, w[m][1].rest, v.high);
                    multiply_half<1>(sums[m][n], w[m][0].high, w[m][1].high, v.high);
                    multiply_half<1>(sums[m][n], w[m][0].high, w[m][1].high, v.rest);
                    multiply_half<1>(sums[m][n], w[m][0].rest, w[m][1].rest, v.high);
                }
            }
        }
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        if (IS_WHOLE && ((stage + 1) * 64 % slice == 0 || stage + 1 == end)) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                totals[i / 16][i / 4 % 4][i % 4] += sums[i / 16][i / 4 % 4][i % 4];
                sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int row = first_row + own_row + 16 * (i / 16) + 8 * (i / 2 % 2);
        const int token = first_token + own_token - g + 2 * t + 8 * (i / 4 % 4) + i % 2;
        if (row < rows && token < tokens)
            out[static_cast<long long>(token) * rows + row] =
                IS_WHOLE ? totals[i / 16][i / 4 % 4][i % 4] / GAIN<F32>
                         : sums[i / 16][i / 4 % 4][i % 4];
    }
}

// matmul_split: grid (token tiles, row tiles)
template <int LANE, int ROW_WARPS, int TOKEN_WARPS>
__global__ void __launch_bounds__(32 * ROW_WARPS * TOKEN_WARPS)
    matmul_split(const float *x, const float *weights, float *out, long long, long long tokens,
                 long long rows, long long num_cols, long long slice) {
    const int cols = num_cols, stages = (cols + 63) / 64;
    make_tile<LANE, ROW_WARPS, TOKEN_WARPS, true>(
        {x, static_cast<int>(tokens)}, {weights, static_cast<int>(rows)}, out,
        blockIdx.x * 32 * TOKEN_WARPS, blockIdx.y * 32 * ROW_WARPS, cols, static_cast<int>(slice),
        0, stages);
}

// split_pair: two matrices of the same x, a block for each slice of a tile; join_route adds them up
//   -> sums [slices,T,rows0] f32, then [slices,T,rows1]; grid (token tiles, row tiles of both,
//   slices)
template <int LANE, int ROW_WARPS, int TOKEN_WARPS>
__global__ void __launch_bounds__(32 * ROW_WARPS * TOKEN_WARPS)
    split_pair(const float *x, const float *weights0, const float *weights1, float *sums,
               long long num_tokens, long long rows0, long long rows1, long long num_cols,
               long long slice) {
    constexpr int ROWS = 32 * ROW_WARPS;
    const int cols = num_cols, tiles0 = (static_cast<int>(rows0) + ROWS - 1) / ROWS;
    const int tile = blockIdx.y, stages = (cols + 63) / 64, of_slice = static_cast<int>(slice) / 64;
    const int begin = blockIdx.z * of_slice;
    const bool is_first = tile < tiles0;
    const long long rows = is_first ? rows0 : rows1;
    float *own = sums + (is_first ? 0 : gridDim.z * num_tokens * rows0);
    make_tile<LANE, ROW_WARPS, TOKEN_WARPS, false>(
        {x, static_cast<int>(num_tokens)}, {is_first ? weights0 : weights1, static_cast<int>(rows)},
        own + blockIdx.z * num_tokens * rows, blockIdx.x * 32 * TOKEN_WARPS,
        (is_first ? tile : tile - tiles0) * ROWS, cols, static_cast<int>(slice), begin,
        min(begin + of_slice, stages));
}
