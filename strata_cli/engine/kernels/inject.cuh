// The inject of the streams of few tokens, beside a product of the same normed streams: few rows of
// float32 weights, whose ten thousand columns as part of that product would take longer than all
// else.
#pragma once
#include "overlap.cuh"
#include "thin.cuh"

constexpr int INJECT_WARPS = 4;  // of a block, a slice each; fewer where it has fewer
constexpr int INJECT_STEPS = 2;  // whose loads are on their way together: registers are few

struct XIsThere {
    __device__ void operator()() const {}
};

// A slice of eight tokens' products, by each of the block's first warps; blocks are numbered.
//   x [T,K] -> parts [slices,T,rows] f32, times 64; added up in order and divided, they are what
//   matmul_few.cu makes of them
//   make_x: by all threads, behind the launches ahead, where they have not left x
template <int LANE, int STEPS = INJECT_STEPS, class MakeX = XIsThere>
__device__ inline void make_inject(const ThinRows &all, const float *x, float *parts, int tokens,
                                   int block, const MakeX &make_x = MakeX()) {
    let_next_start();
    const int slices = (all.cols + all.slice - 1) / all.slice, lane = threadIdx.x & 31;
    const int warps = min(INJECT_WARPS, static_cast<int>(blockDim.x) / 32);
    const int job = block * warps + static_cast<int>(threadIdx.x) / 32;
    const int own = job % slices, first_token = job / slices * 8;
    const bool is_mine = static_cast<int>(threadIdx.x) < 32 * warps && first_token < tokens;
    const int lines = all.slice / 32;  // of a row: 128 bytes each
    for (int i = lane; i < all.rows * lines && is_mine; i += 32)
        if (own * all.slice + i % lines * 32 < all.cols)  // last read a token ago
            fetch_ahead(all.weights + static_cast<long long>(i / lines) * all.cols +
                        own * all.slice + i % lines * 32);
    wait_for_launches_ahead();
    make_x();
    if (!is_mine) return;
    const float *row[1] = {all.row(x, first_token, tokens)};
    float sums[1][4] = {};
    const int stop = all.first_step(own + 1);
#pragma unroll 1
    for (int step = all.first_step(own); step < stop; step += STEPS) {
        Eight w[STEPS];
        all.load_weights<LANE>(w, step, stop);
        all.multiply_steps<LANE>(sums, w, row, step, stop);
    }
    const int g = lane / 4, t = lane & 3;
    for (int i = 0; i < 2 && g < all.rows; i++) {
        const int token = first_token + 2 * t + i;
        if (token < tokens) parts[(own * tokens + token) * all.rows + g] = sums[0][i];
    }
}
