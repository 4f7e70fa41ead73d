// Gated delta net: causal convolution, delta rule over a recurrent state, gated output norm.
//   T tokens of one sequence, nk key heads, nv value heads, N head width; value head h uses key
//   head h % nk; kd = nk * N, vd = nv * N
#include "lanes.cuh"
#include "math32.cuh"
#include "mma.cuh"
#include "overlap.cuh"

// causal_conv_silu: out[t] = silu(sum over taps j, in order, of weight[j] * row t - (TAPS-1) + j)
//   u, out [T,C] f32, history [TAPS-1,C] f32 (the rows before u; moves along), weight [C,TAPS] f32
//   grid (C / block, T / rows), a thread per channel and run of rows >= TAPS - 1
//   moves 8 * T*C bytes. Only the first run reads the history, and its threads rewrite it.
template <int TAPS>
__global__ void causal_conv_silu(const float *u, float *history, const float *weight, float *out,
                                 long long num_tokens, long long channels, long long rows) {
    start_early();
    constexpr int PAST = TAPS - 1;
    const long long channel = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (channel >= channels) return;
    const long long first = blockIdx.y * rows, stop = min(first + rows, num_tokens);
    float taps[TAPS], window[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS; j++) taps[j] = weight[channel * TAPS + j];
#pragma unroll
    for (int j = 0; j < PAST; j++) {
        const long long t = first - PAST + j;
        window[j + 1] =
            t < 0 ? history[(t + PAST) * channels + channel] : u[t * channels + channel];
    }
#pragma unroll 4
    for (long long t = first; t < stop; t++) {
#pragma unroll
        for (int j = 0; j < PAST; j++) window[j] = window[j + 1];
        window[PAST] = u[t * channels + channel];
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS; j++) total = fmaf(taps[j], window[j], total);
        out[t * channels + channel] = silu32(total);
    }
    if (blockIdx.y == 0) {
        for (int j = 0; j < PAST; j++) {  // ascending: a row moves before it is overwritten
            const long long t = num_tokens - PAST + j;
            history[j * channels + channel] =
                t < 0 ? history[(t + PAST) * channels + channel] : u[t * channels + channel];
        }
    }
}

constexpr int STEPS = 16;            // tokens staged in shared memory at a time
constexpr int SLICES = 8;            // lanes that share a column of the state
constexpr int GROUPS = 32 / SLICES;  // groups of such lanes in a warp

// Sum over the lanes of a column: slice s with s + half.
__device__ inline float fold_slices(float v) {
#pragma unroll
    for (int half = SLICES / 2; half; half /= 2) v += __shfl_xor_sync(ALL_LANES, v, half * GROUPS);
    return v;
}

// What a block knows of STEPS tokens, for one head and its own columns.
template <int ROWS, int WIDTH>
struct Batch {
    static constexpr int DIM = ROWS * SLICES;
    float q[STEPS][DIM];
    float k[STEPS][DIM];
    float v[STEPS][WIDTH];
    float4 rates[STEPS];  // decay, write rate, q . k
};

// The block's place in the work, and the rows of c that it reads.
struct Head {
    const float *q, *k, *v;  // of token 0; v from the block's first column on
    long long stride;        // from token to token
    int dim, num_columns;    // valid elements of q and k, and of v
    bool wide;

    // Start copying tokens first .. first + count; zeros behind dim were put there before.
    template <int ROWS, int WIDTH>
    __device__ void stage(Batch<ROWS, WIDTH> &to, long long first, int count) const {
        const int step = wide ? 4 : 1, per_token = 2 * dim + num_columns;
        for (int at = step * threadIdx.x; at < count * per_token; at += step * blockDim.x) {
            const int t = at / per_token, i = at % per_token;
            const long long offset = (first + t) * stride;
            float *target = i < dim       ? &to.q[t][i]
                            : i < 2 * dim ? &to.k[t][i - dim]
                                          : &to.v[t][i - 2 * dim];
            const float *source = i < dim       ? q + offset + i
                                  : i < 2 * dim ? k + offset + i - dim
                                                : v + offset + i - 2 * dim;
            if (wide) {
                copy_async(target, source);
            } else {
                *target = *source;
            }
        }
        commit_copies();
    }
};

// l2-normalise q and k of one token (16 lanes), q also by 1 / sqrt(dim); returns their product.
template <int DIM>
__device__ inline float normalise(float *q, float *k, int dim, float eps) {
    const float q_squares = sum_squares16(q, DIM), k_squares = sum_squares16(k, DIM);
    const float q_scale = 1.0f / sqrtf(q_squares + eps) / sqrtf(static_cast<float>(dim));
    const float k_scale = 1.0f / sqrtf(k_squares + eps);
    float product = 0.0f;
#pragma unroll
    for (int i = lane16(); i < DIM; i += 16) {
        q[i] = q[i] * q_scale;
        k[i] = k[i] * k_scale;
        product = fmaf(q[i], k[i], product);
    }
    return fold16(product);
}

// delta_rule: one token after the other, per value head with state S [N keys, N values]:
//   recalled = S'k; change = rate * (v - decay * recalled); out = decay * S'q + (q . k) * change;
//   S = decay * S + k change'; decay = exp(a softplus(alpha + dt)), rate = sigmoid(beta)
//   c [T,2kd+vd] f32 (q heads, k heads, v heads, not normalised), alpha, beta [T,nv] f32, a, dt
//   [nv] f32, state [nv,N,N] f32 in place, out [T,nv*N] f32
//   grid (N / (columns of a block), nv); a column of S is shared by 8 lanes, lane s holding the
//   keys 32 i + 4 s + e in registers; each lane holds COLUMNS columns, N <= 8 * ROWS; block WARPS
//   order: a lane sums its keys in ascending order by fused multiply-add, then the 8 lanes fold
//   8 -> 4 -> 2 -> 1, lane s with s + half. WARPS, COLUMNS and the grid change no bit.
//   limit: 4 float operations per element of S and token, N*N*nv*4 / (128 lanes * SMs) cycles;
//   for one token, the state read and written: 8 * N*N*nv bytes
template <int ROWS, int WARPS, int COLUMNS>
__global__ void delta_rule(const float *c, const float *alpha, const float *beta, const float *a,
                           const float *dt, float *state, float *out, float eps,
                           long long num_tokens, long long num_keys, long long num_values,
                           long long dim) {
    start_early();
    constexpr int WIDTH = WARPS * GROUPS * COLUMNS, DIM = ROWS * SLICES;
    extern __shared__ __align__(16) unsigned char shared[];
    Batch<ROWS, WIDTH> *batches = reinterpret_cast<Batch<ROWS, WIDTH> *>(shared);
    const int lane = threadIdx.x & 31, slice = lane / GROUPS;
    const int column = threadIdx.x / 32 * GROUPS * COLUMNS + lane % GROUPS * COLUMNS;
    const long long head = blockIdx.y, first_column = blockIdx.x * WIDTH;
    const int valid = static_cast<int>(min(dim - first_column - column, (long long)COLUMNS));
    Head rows;
    rows.stride = (2 * num_keys + num_values) * dim;
    rows.q = c + head % num_keys * dim;
    rows.k = rows.q + num_keys * dim;
    rows.v = c + (2 * num_keys + head) * dim + first_column;
    rows.dim = static_cast<int>(dim);
    rows.num_columns = static_cast<int>(min(dim - first_column, (long long)WIDTH));
    rows.wide = is_wide(dim, c);
    for (int i = threadIdx.x; i < 2 * sizeof(Batch<ROWS, WIDTH>) / 4; i += blockDim.x)
        reinterpret_cast<float *>(shared)[i] = 0.0f;
    __syncthreads();
    rows.stage(batches[0], 0, static_cast<int>(min(num_tokens, (long long)STEPS)));

    float s[ROWS][COLUMNS];
    state += head * dim * dim + first_column + column;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int key = i / 4 * 32 + slice * 4 + i % 4;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            s[i][j] = key < dim && j < valid ? state[key * dim + j] : 0.0f;
    }

    // The rates of a batch are computed by its first threads, one token each, a batch ahead.
    const float own_a = a[head], own_dt = dt[head];
    float next_alpha = 0.0f, next_beta = 0.0f;
    if (threadIdx.x < STEPS && threadIdx.x < num_tokens) {
        next_alpha = alpha[threadIdx.x * num_values + head];
        next_beta = beta[threadIdx.x * num_values + head];
    }
    out += head * dim + first_column + column;
    int current = 0;
    for (long long first = 0; first < num_tokens; first += STEPS, current ^= 1) {
        const int count = static_cast<int>(min(num_tokens - first, (long long)STEPS));
        Batch<ROWS, WIDTH> &batch = batches[current];
        wait_copies<0>();
        __syncthreads();
        const long long next = first + STEPS;
        if (next < num_tokens)
            rows.stage(batches[current ^ 1], next,
                       static_cast<int>(min(num_tokens - next, (long long)STEPS)));
        if (threadIdx.x < STEPS) {
            batch.rates[threadIdx.x].x = exp32(own_a * softplus32(next_alpha + own_dt));
            batch.rates[threadIdx.x].y = sigmoid32(next_beta);
            if (next + threadIdx.x < num_tokens) {
                next_alpha = alpha[(next + threadIdx.x) * num_values + head];
                next_beta = beta[(next + threadIdx.x) * num_values + head];
            }
        }
#pragma unroll
        for (int t = threadIdx.x / 16; t < STEPS; t += 2 * WARPS) {
            const float product = normalise<DIM>(batch.q[t], batch.k[t], rows.dim, eps);
            if (lane16() == 0) batch.rates[t].z = product;
        }
        __syncthreads();
#pragma unroll 2
        for (int t = 0; t < count; t++) {
            float k[ROWS], recalled[COLUMNS] = {}, answered[COLUMNS] = {};
#pragma unroll
            for (int i = 0; i < ROWS; i += 4) {
                const int key = i / 4 * 32 + slice * 4;
                const float4 k4 = load4(&batch.k[t][key]), q4 = load4(&batch.q[t][key]);
                const float q[4] = {q4.x, q4.y, q4.z, q4.w};
                k[i] = k4.x, k[i + 1] = k4.y, k[i + 2] = k4.z, k[i + 3] = k4.w;
#pragma unroll
                for (int e = 0; e < 4; e++) {
#pragma unroll
                    for (int j = 0; j < COLUMNS; j++) {
                        recalled[j] = fmaf(s[i + e][j], k[i + e], recalled[j]);
                        answered[j] = fmaf(s[i + e][j], q[e], answered[j]);
                    }
                }
            }
            const float4 rate = batch.rates[t];
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const float decay = rate.x, known = fold_slices(recalled[j]);
                const float change = rate.y * (batch.v[t][column + j] - decay * known);
                answered[j] = fmaf(rate.z, change, decay * fold_slices(answered[j]));
#pragma unroll
                for (int i = 0; i < ROWS; i++) s[i][j] = fmaf(k[i], change, decay * s[i][j]);
            }
            if (slice == 0) {
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
                    if (j < valid) out[(first + t) * num_values * dim + j] = answered[j];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int key = i / 4 * 32 + slice * 4 + i % 4;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if (key < dim && j < valid) state[key * dim + j] = s[i][j];
    }
}

// gated_norm: out = o / rms(o) * weight * sigmoid(z), each value head on its own
//   o, z, out [R,N] f32 with R = T * nv, weight [N] f32
//   grid (R / 8), 16 lanes per row; moves 12 * R*N bytes
extern "C" __global__ void gated_norm(const float *o, const float *z, const float *weight,
                                      float eps, float *out, long long num_rows, long long dim) {
    start_early();
    const long long own = blockIdx.x * (blockDim.x / 16) + threadIdx.x / 16;
    const long long row = min(own, num_rows - 1);  // a spare half warp takes part in the sums
    const float scale = rms_scale(o + row * dim, dim, eps);
    if (own >= num_rows) return;
#pragma unroll 8
    for (long long i = lane16(); i < dim; i += 16) {
        const float normed = o[row * dim + i] * scale * weight[i];
        out[row * dim + i] = normed * sigmoid32(z[row * dim + i]);
    }
}
