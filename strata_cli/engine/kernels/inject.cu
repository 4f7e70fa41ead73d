// The mix of the streams, and beside it their inject: few rows of float32 weights times the normed
// streams of few tokens. Alone, four rows of ten thousand columns would take longer than all else
// that is multiplied with these streams.
//   T tokens, S streams, D hidden_size, N rows of S*D weights, slices of the weights' columns
#include "mix.cuh"
#include "mma.cuh"
#include "overlap.cuh"
#include "thin.cuh"

constexpr int WARPS = 4;
constexpr int STEPS = 8;  // whose loads are on their way together: a slice of 256 columns

// stream_mix_inject: blocks of the first kind mix 4 * block columns of a token; those of the other
// make four slices of eight tokens' products, a warp each
//   gate, normed [T,S,D], weights [N,S*D] f32 -> out [T,D], parts [slices,T,N] f32, times 64; added
//   up in order and divided, they are what matmul_few.cu makes of them
//   grid (T * D / (4 * block) + slices / WARPS * T / 8), block 32 * WARPS; reads 4 * N * S*D bytes
//   of weights
template <int LANE>
__global__ void stream_mix_inject(const float *gate, const float *normed, const float *weights,
                                  float *out, float *parts, long long num_tokens,
                                  long long num_streams, long long size, long long num_rows,
                                  long long slice_cols) {
    const int width = num_streams * size, slice = slice_cols, tokens = num_tokens, rows = num_rows;
    const int slices = (width + slice - 1) / slice, slice_blocks = (slices + WARPS - 1) / WARPS;
    const int per_token = (static_cast<int>(size) + 4 * blockDim.x - 1) / (4 * blockDim.x);
    const int block = static_cast<int>(blockIdx.x) - per_token * tokens;
    if (block < 0) {
        start_early();
        const int token = static_cast<int>(blockIdx.x) / per_token;
        const long long first = 4 * (blockIdx.x % per_token * blockDim.x + threadIdx.x);
        if (first < size)
            mix_columns(gate + token * width, normed + token * width, out + token * size, nullptr,
                        first, num_streams, size, true);
        return;
    }
    let_next_start();
    const int own = block % slice_blocks * WARPS + static_cast<int>(threadIdx.x) / 32;
    const int first_token = block / slice_blocks * 8;
    const ThinRows all = {weights, rows, width, slice};
    int step = all.first_step(own);
    const int stop = all.first_step(own + 1);
    Eight w[STEPS];  // of the first steps: they do not depend on the launches ahead
    all.load_weights<LANE>(w, step, stop);
    wait_for_launches_ahead();
    if (own >= slices) return;
    const float *x[1] = {all.row(normed, first_token, tokens)};
    float sums[1][4] = {};
    for (;;) {
        all.multiply_steps<LANE>(sums, w, x, step, stop);
        if ((step += STEPS) >= stop) break;
        all.load_weights<LANE>(w, step, stop);
    }
    const int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    for (int i = 0; i < 2 && g < rows; i++) {
        const int token = first_token + 2 * t + i;
        if (token < tokens) parts[(own * num_tokens + token) * rows + g] = sums[0][i];
    }
}
