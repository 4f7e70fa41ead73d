// The delta rule of gated delta nets: a recurrence over a state, one token after the other.
//   T tokens of one sequence, nk key heads, nv value heads, N head width; value head h uses key
//   head h % nk; kd = nk * N, vd = nv * N
#include "lanes.cuh"
#include "math32.cuh"
#include "mma.cuh"
#include "overlap.cuh"
#include "segments.cuh"

constexpr int STEPS = 16;   // tokens staged in shared memory at a time
constexpr int SLICES = 16;  // lanes that share the columns of a group
constexpr int COLUMNS = 2;  // of the state, per lane
constexpr int WARP_COLUMNS = 32 / SLICES * COLUMNS;

// What a block knows of STEPS tokens, for one head and its own columns.
template <int DIM, int WIDTH>
struct Batch {
    float q[STEPS][DIM];
    float k[STEPS][DIM];
    float v[STEPS][WIDTH];
    float decay[STEPS], rate[STEPS];
};

// The block's place in the work, and the rows of c that it reads.
struct Head {
    const float *q, *k, *v;  // of token 0; v from the block's first column on
    long long stride;        // from token to token
    int dim, num_columns;    // valid elements of q and k, and of v
    bool wide;

    // Start copying n elements of rows first .. first + count, 4 at a time.
    template <int WIDTH>
    __device__ void stage(float (*to)[WIDTH], const float *row, int n, long long first,
                          int count) const {
        constexpr int CHUNKS = WIDTH / 4;
        const int i = threadIdx.x % CHUNKS * 4, step = blockDim.x / CHUNKS;
        const float *source = row + (first + threadIdx.x / CHUNKS) * stride + i;
        for (int t = threadIdx.x / CHUNKS; t < count; t += step, source += step * stride) {
            if (wide) {
                if (i < n) copy_async(&to[t][i], source);
            } else {
                for (int e = 0; e < 4; e++)
                    if (i + e < n) to[t][i + e] = source[e];
            }
        }
    }

    // Start copying tokens first .. first + count; zeros behind dim were put there before.
    template <int DIM, int WIDTH>
    __device__ void stage(Batch<DIM, WIDTH> &to, long long first, int count) const {
        stage(to.q, q, dim, first, count);
        stage(to.k, k, dim, first, count);
        stage(to.v, v, num_columns, first, count);
        commit_copies();
    }
};

// l2-normalise q and k of one token (16 lanes), q also by 1 / sqrt(dim).
__device__ inline void normalise(float *q, float *k, long long dim, float eps) {
    const float q_squares = sum_squares16(q, dim), k_squares = sum_squares16(k, dim);
    const float q_scale = 1.0f / sqrtf(q_squares + eps) / sqrtf(static_cast<float>(dim));
    const float k_scale = 1.0f / sqrtf(k_squares + eps);
#pragma unroll 8
    for (long long i = lane16(); i < dim; i += 16) {
        q[i] = q[i] * q_scale;
        k[i] = k[i] * k_scale;
    }
}

__device__ inline float decay_of(float alpha, float a, float dt) {
    return exp32(a * softplus32(alpha + dt));
}

// prepare_delta_rule: what delta_rule<..., true> takes: q and k normalised, decay and write rate
//   c [T,2kd+vd] f32 (q and k heads in place), alpha (becomes the decay), beta (the rate) [T,nv]
//   f32, a, dt [nv] f32
//   grid (T * nk / 8), 16 lanes per token and key head; moves 16 * T*kd bytes
extern "C" __global__ void prepare_delta_rule(float *c, float *alpha, float *beta, const float *a,
                                              const float *dt, float eps, long long num_tokens,
                                              long long num_keys, long long num_values,
                                              long long dim) {
    start_early();
    const long long own = blockIdx.x * (blockDim.x / 16) + threadIdx.x / 16;
    const bool is_row = own < num_tokens * num_keys;
    const long long token = is_row ? own / num_keys : 0, head = is_row ? own % num_keys : 0;
    float *q = c + (token * (2 * num_keys + num_values) + head) * dim;
    normalise(q, q + num_keys * dim, is_row ? dim : 0, eps);
    if (!is_row) return;
    for (long long h = head + lane16() * num_keys; h < num_values; h += 16 * num_keys) {
        const long long at = token * num_values + h;
        alpha[at] = decay_of(alpha[at], a[h], dt[h]);
        beta[at] = sigmoid32(beta[at]);
    }
}

// Lanes l and l + HALF exchange values: the lower one gets the sum of both first values, the upper
// that of the second.
template <int HALF>
__device__ inline float exchange(float first, float second) {
    const bool upper = threadIdx.x & HALF;
    return (upper ? second : first) + __shfl_xor_sync(ALL_LANES, upper ? first : second, HALF);
}

// Sums over the 16 lanes of a group: lane l gets the first (l & 4 ? answered : recalled) of column
// l / 8.
__device__ inline float fold_each(const float (&recalled)[COLUMNS],
                                  const float (&answered)[COLUMNS]) {
    const float of_k = exchange<8>(recalled[0], recalled[1]);
    const float of_q = exchange<8>(answered[0], answered[1]);
    float v = exchange<4>(of_k, of_q);
    v += __shfl_xor_sync(ALL_LANES, v, 2);
    return v + __shfl_xor_sync(ALL_LANES, v, 1);
}

// A lane's keys of a row: 4 (or 2) at a time, 16 lanes side by side.
template <int KEYS>
struct Slice {
    static constexpr int AT_ONCE = KEYS < 4 ? KEYS : 4;
    float of[KEYS];

    __device__ static int key(int i) {
        return (i / AT_ONCE * 16 + lane16()) * AT_ONCE + i % AT_ONCE;
    }
    __device__ void load(const float *row) {
#pragma unroll
        for (int i = 0; i < KEYS; i += AT_ONCE) {
            if (AT_ONCE == 4) {
                const float4 v = load4(row + key(i));
                of[i] = v.x, of[i + 1] = v.y, of[i + 2] = v.z, of[i + 3] = v.w;
            } else {
                const float2 v = *reinterpret_cast<const float2 *>(row + key(i));
                of[i] = v.x, of[i + 1] = v.y;
            }
        }
    }
};

// delta_rule: one token after the other, per value head with state S [N keys, N values]:
//   recalled = S'k; change = rate * (v - decay * recalled); S = decay * S + k change'; out = S'q;
//   decay = exp(a softplus(alpha + dt)), rate = sigmoid(beta)
//   c [T,2kd+vd] f32 (q heads, k heads, v heads, not normalised), alpha, beta [T,nv] f32, a, dt
//   [nv] f32, state [nv,N,N] f32 in place, out [T,nv*N] f32; PREPARED: prepare_delta_rule was here
//   grid (N / (4 * WARPS), nv), block 32 * WARPS, shared 2 batches; 16 lanes share two columns of
//   S, lane s holding the keys 64 i + 4 s + e in registers, N <= 16 * KEYS. S'q of a token is taken
//   together with S'k of the next.
//   order: a lane sums its keys in ascending order by fused multiply-add, then the 16 lanes fold
//   16 -> 8 -> 4 -> 2 -> 1, lane s with s + half. WARPS, PREPARED and the grid change no bit.
//   limit: 4 float operations per element of S and token, N*N*nv*4 / (128 lanes * SMs) cycles; the
//   keys and queries from shared memory take as long. For one token, the state read and written:
//   8 * N*N*nv bytes
template <int KEYS, int WARPS, bool PREPARED>
__device__ inline void go_through(const float *c, const float *alpha, const float *beta,
                                  const float *a, const float *dt, const float *state,
                                  float *state_to, float *out, float eps, long long num_tokens,
                                  long long num_keys, long long num_values, long long dim) {
    constexpr int WIDTH = WARPS * WARP_COLUMNS, DIM = KEYS * SLICES;
    extern __shared__ __align__(16) unsigned char shared[];
    Batch<DIM, WIDTH> *batches = reinterpret_cast<Batch<DIM, WIDTH> *>(shared);
    const int column = threadIdx.x / SLICES * COLUMNS;  // of the block's
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
    if (dim < DIM || rows.num_columns < WIDTH) {
        for (int i = threadIdx.x; i < 2 * sizeof(Batch<DIM, WIDTH>) / 4; i += blockDim.x)
            reinterpret_cast<float *>(shared)[i] = 0.0f;
        __syncthreads();
    }
    rows.stage(batches[0], 0, static_cast<int>(min(num_tokens, (long long)STEPS)));

    float s[KEYS][COLUMNS];
    const long long corner = head * dim * dim + first_column + column;
    state += corner;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        const int key = Slice<KEYS>::key(i);
        if (COLUMNS == 2 && rows.wide && is_wide(4, state - column % 4)) {
            const float2 v = key < dim && valid > 0
                                 ? *reinterpret_cast<const float2 *>(state + key * dim)
                                 : make_float2(0.0f, 0.0f);
            s[i][0] = v.x, s[i][1] = v.y;
        } else {
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                s[i][j] = key < dim && j < valid ? state[key * dim + j] : 0.0f;
        }
    }

    // The rates of a batch are loaded by its first threads, one token each, a batch ahead.
    const float own_a = PREPARED ? 0.0f : a[head], own_dt = PREPARED ? 0.0f : dt[head];
    float next_alpha = 0.0f, next_beta = 0.0f;
    const auto load_rates = [&](long long token) {
        if (threadIdx.x >= STEPS || token >= num_tokens) return;
        next_alpha = alpha[token * num_values + head];
        next_beta = beta[token * num_values + head];
    };
    load_rates(threadIdx.x);

    // Lane l of 16 keeps the books of column l / 8 of its two: the answer's where l & 4.
    const int own_column = lane16() / 8;
    const bool writes = (lane16() & 7) == 4 && own_column < valid;
    const long long out_stride = num_values * dim;
    float *answer = out + head * dim + first_column + column + own_column - out_stride;
    Slice<KEYS> q = {};
    int current = 0;
    for (long long first = 0; first < num_tokens; first += STEPS, current ^= 1) {
        const int count = static_cast<int>(min(num_tokens - first, (long long)STEPS));
        Batch<DIM, WIDTH> &batch = batches[current];
        if (threadIdx.x < STEPS) {
            batch.decay[threadIdx.x] = PREPARED ? next_alpha : decay_of(next_alpha, own_a, own_dt);
            batch.rate[threadIdx.x] = PREPARED ? next_beta : sigmoid32(next_beta);
        }
        wait_copies<0>();
        __syncthreads();
        const long long next = first + STEPS;
        if (next < num_tokens)
            rows.stage(batches[current ^ 1], next,
                       static_cast<int>(min(num_tokens - next, (long long)STEPS)));
        load_rates(next + threadIdx.x);
        if (!PREPARED) {
            for (int t = threadIdx.x / 16; t < STEPS; t += 2 * WARPS)
                normalise(batch.q[t], batch.k[t], t < count ? dim : 0, eps);
            __syncthreads();
        }
#pragma unroll 2
        for (int t = 0; t < count; t++) {
            Slice<KEYS> k;
            k.load(batch.k[t]);
            float recalled[COLUMNS] = {}, answered[COLUMNS] = {};
#pragma unroll
            for (int i = 0; i < KEYS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
                    recalled[j] = fmaf(s[i][j], k.of[i], recalled[j]);
                    answered[j] = fmaf(s[i][j], q.of[i], answered[j]);
                }
            q.load(batch.q[t]);
            const float decay = batch.decay[t], folded = fold_each(recalled, answered);
            const float own_change =
                batch.rate[t] * (batch.v[t][column + own_column] - decay * folded);
            if (writes && first + t > 0) *answer = folded;
            answer += out_stride;
            float change[COLUMNS];
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                change[j] = __shfl_sync(ALL_LANES, own_change, 8 * j, SLICES);
#pragma unroll
            for (int i = 0; i < KEYS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
                    s[i][j] = fmaf(k.of[i], change[j], decay * s[i][j]);
        }
    }
    const float none[COLUMNS] = {};
    float answered[COLUMNS] = {};
#pragma unroll
    for (int i = 0; i < KEYS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) answered[j] = fmaf(s[i][j], q.of[i], answered[j]);
    const float folded = fold_each(none, answered);
    if (writes) *answer = folded;
    if (state_to == nullptr) return;
    state_to += corner;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        const int key = Slice<KEYS>::key(i);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if (key < dim && j < valid) state_to[key * dim + j] = s[i][j];
    }
}

template <int KEYS, int WARPS, bool PREPARED>
__global__ void delta_rule(const float *c, const float *alpha, const float *beta, const float *a,
                           const float *dt, float *state, float *out, float eps,
                           long long num_tokens, long long num_keys, long long num_values,
                           long long dim) {
    start_early();
    go_through<KEYS, WARPS, PREPARED>(c, alpha, beta, a, dt, state, state, out, eps, num_tokens,
                                      num_keys, num_values, dim);
}

// delta_rule_segments: each segment by itself, all of them prepared, from and to the second parts
// of its running state; grid (N / (4 * WARPS), nv, segments)
template <int KEYS, int WARPS>
__global__ void delta_rule_segments(const float *c, const float *decay, const float *rate,
                                    const RunningSegment *segments, float *out, long long num_keys,
                                    long long num_values, long long dim) {
    start_early();
    const RunningSegment own = segments[blockIdx.z];
    const long long row = own.first * num_values;
    go_through<KEYS, WARPS, true>(c + own.first * (2 * num_keys + num_values) * dim, decay + row,
                                  rate + row, nullptr, nullptr, own.state, own.state_to,
                                  out + row * dim, 0.0f, own.count, num_keys, num_values, dim);
}

constexpr int STEP_COLUMNS = 32;  // of the state, per block of delta_step
constexpr int STEP_QUADS = STEP_COLUMNS / 4;
constexpr int STEP_THREADS = SLICES * STEP_QUADS;
constexpr int STEP_WARPS = STEP_THREADS / 32;

// Sums over the slices, in the order of fold_each: the first two levels within a warp, whose lanes
// 8 j + quad have the slices warp + 4 j; then over the warps. Every thread gets its four columns'.
struct StepSums {
    float4 of[STEP_WARPS][STEP_QUADS];

    __device__ float4 fold(float4 v) {
        const int quad = threadIdx.x % STEP_QUADS;
#pragma unroll
        for (int lanes = 16; lanes >= STEP_QUADS; lanes /= 2) {
            v.x += __shfl_xor_sync(ALL_LANES, v.x, lanes);
            v.y += __shfl_xor_sync(ALL_LANES, v.y, lanes);
            v.z += __shfl_xor_sync(ALL_LANES, v.z, lanes);
            v.w += __shfl_xor_sync(ALL_LANES, v.w, lanes);
        }
        if ((threadIdx.x & 31) < STEP_QUADS) of[threadIdx.x / 32][quad] = v;
        __syncthreads();
        const float4 a = of[0][quad], b = of[1][quad], c = of[2][quad], d = of[3][quad];
        return make_float4((a.x + c.x) + (b.x + d.x), (a.y + c.y) + (b.y + d.y),
                           (a.z + c.z) + (b.z + d.z), (a.w + c.w) + (b.w + d.w));
    }
};

// Add x times the thread's part of a column, four columns side by side.
template <int KEYS>
__device__ inline float4 times_state(const float4 (&s)[KEYS], const float (&x)[KEYS]) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        sum.x = fmaf(s[i].x, x[i], sum.x);
        sum.y = fmaf(s[i].y, x[i], sum.y);
        sum.z = fmaf(s[i].z, x[i], sum.z);
        sum.w = fmaf(s[i].w, x[i], sum.w);
    }
    return sum;
}

// delta_step: delta_rule<KEYS, ..., false> for one token, the same bits in a quarter of the code
//   arguments as delta_rule's with T = 1 and N = 16 * KEYS; rows of c and of the state at multiples
//   of 16 bytes
//   grid (N / 32, nv), block 128; 16 threads share four columns of S, each with KEYS keys of them
//   moves 8 * N*N*nv bytes, of which half are loaded before the launches ahead are done
template <int KEYS>
__device__ inline void go_one_step(const float *c, const float *alpha, const float *beta,
                                   const float *a, const float *dt, float *state, float *out,
                                   float eps, int num_keys) {
    constexpr int DIM = KEYS * SLICES, AT_ONCE = KEYS < 4 ? KEYS : 4;
    using Keys = float[KEYS];
    __shared__ StepSums recalled, answered;
    __shared__ float scales[2], decay_and_rate[2];
    const int head = blockIdx.y;
    const int quad = threadIdx.x % STEP_QUADS, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int slice = warp + STEP_WARPS * (lane / STEP_QUADS);
    const int column = blockIdx.x * STEP_COLUMNS + 4 * quad;
    const auto key = [&](int i) { return (i / AT_ONCE * 16 + slice) * AT_ONCE + i % AT_ONCE; };
    state += (head * DIM) * DIM + column;
    let_next_start();
    float4 s[KEYS];  // written a token ago: long done, whatever runs ahead
#pragma unroll
    for (int i = 0; i < KEYS; i++) s[i] = load4_early(state + key(i) * DIM);
    const float own_a = a[head], own_dt = dt[head];
    wait_for_launches_ahead();

    const float *q = c + head % num_keys * DIM, *k = q + num_keys * DIM;
    const auto load_keys = [&](Keys &to, const float *row) {
#pragma unroll
        for (int i = 0; i < KEYS; i += AT_ONCE) {
            if constexpr (AT_ONCE == 4) {
                const float4 v = load4(row + key(i));
                to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
            } else {
                const float2 v = *reinterpret_cast<const float2 *>(row + key(i));
                to[i] = v.x, to[i + 1] = v.y;
            }
        }
    };
    const float4 v = load4(c + (2 * num_keys + head) * DIM + column);
    Keys own_q, own_k;
    load_keys(own_q, q);
    load_keys(own_k, k);
    if (warp == 0) {  // lanes 0 .. 15 for q, 16 .. 31 for k
        const float root = sqrtf(sum_squares16(lane < 16 ? q : k, DIM) + eps);
        const float scale = 1.0f / root, by = lane < 16 ? sqrtf(static_cast<float>(DIM)) : 1.0f;
        if (lane % 16 == 0) scales[lane / 16] = scale / by;
    } else if (threadIdx.x == 32) {
        decay_and_rate[0] = decay_of(alpha[head], own_a, own_dt);
    } else if (threadIdx.x == 64) {
        decay_and_rate[1] = sigmoid32(beta[head]);
    }
    __syncthreads();
    const float decay = decay_and_rate[0], rate = decay_and_rate[1];
#pragma unroll
    for (int i = 0; i < KEYS; i++) own_q[i] = own_q[i] * scales[0], own_k[i] = own_k[i] * scales[1];
    const float4 of_k = recalled.fold(times_state(s, own_k));
    const float4 change = make_float4(rate * (v.x - decay * of_k.x), rate * (v.y - decay * of_k.y),
                                      rate * (v.z - decay * of_k.z), rate * (v.w - decay * of_k.w));
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        s[i].x = fmaf(own_k[i], change.x, decay * s[i].x);
        s[i].y = fmaf(own_k[i], change.y, decay * s[i].y);
        s[i].z = fmaf(own_k[i], change.z, decay * s[i].z);
        s[i].w = fmaf(own_k[i], change.w, decay * s[i].w);
        store4(state + key(i) * DIM, s[i]);
    }
    const float4 of_q = answered.fold(times_state(s, own_q));
    if (threadIdx.x < STEP_QUADS) store4(out + head * DIM + column, of_q);
}

template <int KEYS>
__global__ void __launch_bounds__(STEP_THREADS)
    delta_step(const float *c, const float *alpha, const float *beta, const float *a,
               const float *dt, float *state, float *out, float eps, long long num_keys) {
    go_one_step<KEYS>(c, alpha, beta, a, dt, state, out, eps, static_cast<int>(num_keys));
}

// delta_step_segments: one token of each segment, in the second part of its running state, which
// lay in the table before the launch ahead was enqueued; grid (N / 32, nv, segments)
template <int KEYS>
__global__ void __launch_bounds__(STEP_THREADS)
    delta_step_segments(const float *c, const float *alpha, const float *beta, const float *a,
                        const float *dt, const RunningSegment *segments, float *out, float eps,
                        long long num_keys, long long num_values) {
    constexpr int DIM = KEYS * SLICES;
    const long long row = segments[blockIdx.z].first, values = row * num_values;
    go_one_step<KEYS>(c + row * (2 * num_keys + num_values) * DIM, alpha + values, beta + values, a,
                      dt, segments[blockIdx.z].state_to, out + values * DIM, eps,
                      static_cast<int>(num_keys));
}
