// Mixture of experts around the expert products: routing, ordering, activation, combination.
//   T tokens, E experts, k experts per token, P = T * k pairs, D hidden_size, F expert width
#include "lanes.cuh"
#include "math32.cuh"
#include "overlap.cuh"
#include "pairs.cuh"
#include "special.cuh"

constexpr int LEAST = -2147483647 - 1;  // orders below every logit

__device__ inline int max_of_warp(int v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL_LANES, v);
#else
    for (int half = 16; half; half /= 2) v = max(v, __shfl_xor_sync(ALL_LANES, v, half));
    return v;
#endif
}

__device__ inline int sum_of_warp(int v) {
    for (int half = 16; half; half /= 2) v += __shfl_xor_sync(ALL_LANES, v, half);
    return v;
}

// An integer that orders as the logit does. Not a number counts as -inf, -0 as 0.
__device__ inline int order_of(float logit) {
    const int bits = __float_as_int((logit > lowest() ? logit : lowest()) + 0.0f);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ inline float logit_of(int order) {
    return __int_as_float(order ^ ((order >> 31) & 0x7fffffff));
}

// A warp's view of one token's logits: lane l owns experts l, l + 32, ...; LOCAL of them are kept
// in registers, or, where LOCAL is 0, any number is read again each time.
template <int LOCAL>
struct Logits {
    const float *row;
    long long count;
    int orders[LOCAL > 0 ? LOCAL : 1];

    __device__ void load() {
#pragma unroll
        for (int i = 0; i < LOCAL; i++) {
            const long long e = (threadIdx.x & 31) + 32 * i;
            orders[i] = e < count ? order_of(row[e]) : LEAST;
        }
    }

    __device__ static void choose(int order, int e, int before, int before_id, int &best, int &id) {
        const bool comes_later = order < before || (order == before && e > before_id);
        if (comes_later && order > best) {
            best = order;
            id = e;
        }
    }

    // A lane's best expert among its own that was not taken yet, where they are in registers: pairs
    // of neighbours, then pairs of those, the lower one where they are equal.
    __device__ void best_of_lane(int &order, int &id) const {
        int orders_of[LOCAL > 0 ? LOCAL : 1], indices[LOCAL > 0 ? LOCAL : 1];
#pragma unroll
        for (int i = 0; i < LOCAL; i++) {
            orders_of[i] = orders[i];
            indices[i] = i;
        }
#pragma unroll
        for (int step = 1; step < LOCAL; step *= 2) {
#pragma unroll
            for (int i = 0; i + step < LOCAL; i += 2 * step) {
                const bool is_lower_best = orders_of[i] >= orders_of[i + step];
                orders_of[i] = is_lower_best ? orders_of[i] : orders_of[i + step];
                indices[i] = is_lower_best ? indices[i] : indices[i + step];
            }
        }
        order = orders_of[0];
        id = (threadIdx.x & 31) + 32 * indices[0];
    }

    // The first expert, in descending logit and ascending id, after the one given.
    __device__ void next(int &order, int &id) {
        int best = LEAST, best_id = 0x7fffffff;
        if (LOCAL > 0) {
            best_of_lane(best, best_id);
        } else {
            for (long long e = threadIdx.x & 31; e < count; e += 32)
                choose(order_of(row[e]), static_cast<int>(e), order, id, best, best_id);
        }
        order = max_of_warp(best);
        id = -max_of_warp(best == order ? -best_id : LEAST);
#pragma unroll
        for (int i = 0; i < LOCAL; i++)  // taken
            if (id == (threadIdx.x & 31) + 32 * i) orders[i] = LEAST;
    }

    // Sum over all experts of exp(logit - largest): each lane its own in turn, then folded.
    __device__ float sum_exp(float largest) const {
        float total = 0.0f;
#pragma unroll 16
        for (long long e = threadIdx.x & 31; e < count; e += 32)
            total += exp_fast(row[e] - largest);
        total += __shfl_xor_sync(ALL_LANES, total, 16);
        return fold16(total);
    }
};

// One warp chooses a token's experts: ids and weights [k] to global memory, ids also to own_ids
// [k] in shared memory, where own [k] is scratch.
template <int LOCAL>
__device__ inline void route_token(const float *logits, int *ids, float *weights, int *own_ids,
                                   float *own, long long num_experts, long long top_k) {
    const int lane = threadIdx.x & 31;
    Logits<LOCAL> all = {logits, num_experts};
    all.load();
    int order = 0x7fffffff, id = -1;
    float largest = 0.0f;
    for (int rank = 0; rank < top_k; rank++) {
        all.next(order, id);
        if (rank == 0) largest = logit_of(order);
        if (lane == 0) own_ids[rank] = id;
    }
    const float total = all.sum_exp(largest);
    __syncwarp();
    for (int rank = lane; rank < top_k; rank += 32)
        own[rank] = exp_fast(logits[own_ids[rank]] - largest) / total;
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 10
    for (int rank = 0; rank < static_cast<int>(top_k); rank++) sum += own[rank];
    sum = sum < 0x1p-14f ? 0x1p-14f : sum;
    for (int rank = lane; rank < top_k; rank += 32) {
        ids[rank] = own_ids[rank];
        weights[rank] = own[rank] / sum;
    }
}

// route: softmax over all experts, the k best by logit (ties: lower id), renormalised
//   logits [T,E] f32 -> ids [T,k] i32 best first, weights [T,k] f32
//   grid (T / warps), one warp per token, shared 8 * k bytes per warp; reads 4 * T*E bytes, and
//   takes k rounds over the logits, which is what bounds it
template <int LOCAL>
__global__ void route(const float *logits, int *ids, float *weights, long long num_tokens,
                      long long num_experts, long long top_k) {
    start_early();
    extern __shared__ int chosen[];
    const int warp = threadIdx.x / 32;
    const long long token = blockIdx.x * (blockDim.x / 32) + warp;
    if (token >= num_tokens) return;
    int *own_ids = chosen + 2 * top_k * warp;
    route_token<LOCAL>(logits + token * num_experts, ids + token * top_k, weights + token * top_k,
                       own_ids, reinterpret_cast<float *>(own_ids + top_k), num_experts, top_k);
}

// route_few: route and order_by_expert of few tokens, in one block with a warp for each
//   grid 1, block 32 * T or more, shared 8 * T*k bytes
template <int LOCAL>
__global__ void route_few(const float *logits, int *ids, float *weights, int *expert_start,
                          int *row_of, int *pair_of, long long num_tokens, long long num_experts,
                          long long top_k) {
    start_early();
    extern __shared__ int chosen[];
    const int token = threadIdx.x / 32, num_pairs = static_cast<int>(num_tokens * top_k);
    float *scratch = reinterpret_cast<float *>(chosen + num_pairs);
    if (token < num_tokens)
        route_token<LOCAL>(logits + token * num_experts, ids + token * top_k,
                           weights + token * top_k, chosen + token * top_k, scratch + token * top_k,
                           num_experts, top_k);
    __syncthreads();
    for (int expert = threadIdx.x; expert <= num_experts; expert += blockDim.x) {
        int below = 0;
#pragma unroll 10
        for (int pair = 0; pair < num_pairs; pair++) below += chosen[pair] < expert;
        expert_start[expert] = below;
    }
    // The last threads, which have least to do above, each place pairs.
    for (int pair = blockDim.x - 1 - threadIdx.x; pair < num_pairs; pair += blockDim.x) {
        const int expert = chosen[pair];
        int before = 0;
#pragma unroll 10
        for (int other = 0; other < num_pairs; other++)
            before += chosen[other] < expert || (chosen[other] == expert && other < pair);
        row_of[before] = pair / static_cast<int>(top_k);
        pair_of[pair] = before;
    }
}

// A lane's four neighbouring pairs' experts; behind the last pair an expert above all.
__device__ inline int4 experts_at(const int *ids, long long pair, long long num_pairs) {
    constexpr int NONE = 0x7fffffff;
    const bool is_aligned = (reinterpret_cast<unsigned long long>(ids) & 15) == 0;
    if (is_aligned && pair + 4 <= num_pairs) return *reinterpret_cast<const int4 *>(ids + pair);
    return make_int4(
        pair < num_pairs ? ids[pair] : NONE, pair + 1 < num_pairs ? ids[pair + 1] : NONE,
        pair + 2 < num_pairs ? ids[pair + 2] : NONE, pair + 3 < num_pairs ? ids[pair + 3] : NONE);
}

constexpr int ORDER_WARPS = 8;  // of a block, each with a run of pairs

// order_by_expert: stable counting sort of the pairs by expert, without atomics
//   ids [P] i32 -> expert_start [E+1] i32, row_of [P] i32, pair_of [P] i32
//   grid (E), block 32 * ORDER_WARPS: a block per expert, which reads all ids twice, 128 at a time:
//   8 * E*P bytes from the L1 and L2 caches
extern "C" __global__ void order_by_expert(const int *ids, int *expert_start, int *row_of,
                                           int *pair_of, long long num_experts, long long num_pairs,
                                           long long top_k) {
    start_early();
    constexpr int AT_ONCE = 4;  // loads in flight
    __shared__ int below_of[ORDER_WARPS], own_of[ORDER_WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, own = static_cast<int>(blockIdx.x);
    const int pairs = static_cast<int>(num_pairs);
    const int run = (pairs + 128 * ORDER_WARPS - 1) / (128 * ORDER_WARPS) * 128;
    const int begin = warp * run, end = min(begin + run, pairs);
    int below = 0, count = 0;
#pragma unroll AT_ONCE
    for (int pair = begin + 4 * lane; pair < end; pair += 128) {
        const int4 v = experts_at(ids, pair, pairs);
        below += (v.x < own) + (v.y < own) + (v.z < own) + (v.w < own);
        count += (v.x == own) + (v.y == own) + (v.z == own) + (v.w == own);
    }
    below = sum_of_warp(below);
    count = sum_of_warp(count);
    if (lane == 0) {
        below_of[warp] = below;
        own_of[warp] = count;
    }
    __syncthreads();
    int place = 0;  // of the run's first pair of this expert
    for (int other = 0; other < ORDER_WARPS; other++) {
        place += below_of[other];
        if (other < warp) place += own_of[other];
    }
    if (threadIdx.x == 0) {
        expert_start[own] = place;
        if (own == 0) expert_start[num_experts] = pairs;
    }
    if (count == 0) return;
    const unsigned earlier_lanes = (1u << lane) - 1;
    for (int start = begin; start < end; start += AT_ONCE * 128) {
        int4 next[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int pair = start + 128 * i + 4 * lane;
            next[i] = experts_at(ids, pair < end ? pair : num_pairs, num_pairs);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool is_own[4] = {next[i].x == own, next[i].y == own, next[i].z == own,
                                    next[i].w == own};
            if (!__any_sync(ALL_LANES, is_own[0] || is_own[1] || is_own[2] || is_own[3])) continue;
            int at = place;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const unsigned lanes = __ballot_sync(ALL_LANES, is_own[e]);
                at += __popc(lanes & earlier_lanes);
                place += __popc(lanes);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (!is_own[e]) continue;
                const int pair = start + 128 * i + 4 * lane + e;
                row_of[at] = pair / static_cast<int>(top_k);
                pair_of[pair] = at++;
            }
        }
    }
}

// relabel: the rank of each pair's expert
//   ids [P] i32, rank_of [E] i32 -> ranks [P] i32, which may be ids
//   grid (P / block); moves 8 * P bytes
extern "C" __global__ void relabel(const int *ids, const int *rank_of, int *ranks,
                                   long long num_pairs) {
    start_early();
    const long long pair = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (pair < num_pairs) ranks[pair] = rank_of[ids[pair]];
}

// swiglu: out = silu(gate) * up; out may be gate or up
//   gate, up, out [n] f32 and, if wanted, rounded [n] f16
//   grid (n / (4 * block)), each thread 4 elements; moves 12 (14) * n bytes
extern "C" __global__ void swiglu(const float *gate, const float *up, float *out,
                                  unsigned short *rounded, long long n, long long rounds) {
    start_early();
    const long long first = 4 * (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first + 4 <= n && is_wide(4, gate, up, out) && is_wide(4, rounded)) {
        const float4 g = load4(gate + first), u = load4(up + first);
        const float4 v =
            make_float4(silu32(g.x) * u.x, silu32(g.y) * u.y, silu32(g.z) * u.z, silu32(g.w) * u.w);
        store4(out + first, v);
        if (rounds)
            *reinterpret_cast<uint2 *>(rounded + first) =
                make_uint2(pair_of(v.x, v.y), pair_of(v.z, v.w));
    } else {
        for (long long i = first; i < min(first + 4, n); i++) {
            const float v = silu32(gate[i]) * up[i];
            out[i] = v;
            if (rounds) rounded[i] = half_of(v);
        }
    }
}

__device__ inline float4 add_scaled(float weight, float4 v, float4 total) {
    return make_float4(fmaf(weight, v.x, total.x), fmaf(weight, v.y, total.y),
                       fmaf(weight, v.z, total.z), fmaf(weight, v.w, total.w));
}

// combine: out = sum over ranks, in order, of weight * its expert's row, then + the gated shared
// one
//   expert_out [P,D] f32, pair_of [T,k] i32, weights [T,k] f32, shared_out [T,D] f32,
//   shared_logit [T] f32 -> out [T,D] f32
//   grid (T, D / (4 * block)), each thread 4 columns; moves (k + 2) * 4 * T*D bytes
extern "C" __global__ void combine(const float *expert_out, const int *pair_of,
                                   const float *weights, const float *shared_out,
                                   const float *shared_logit, float *out, long long top_k,
                                   long long size) {
    start_early();
    const long long token = blockIdx.x;
    const long long first = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first >= size) return;
    pair_of += token * top_k;
    weights += token * top_k;
    shared_out += token * size;
    out += token * size;
    const float gate = sigmoid_fast(shared_logit[token]);
    if (is_wide(size, expert_out, shared_out, out)) {
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 10
        for (int rank = 0; rank < static_cast<int>(top_k); rank++)
            total =
                add_scaled(weights[rank], load4(expert_out + pair_of[rank] * size + first), total);
        store4(out + first, add_scaled(gate, load4(shared_out + first), total));
    } else {
        for (long long d = first; d < min(first + 4, size); d++) {
            float total = 0.0f;
            for (long long rank = 0; rank < top_k; rank++)
                total = fmaf(weights[rank], expert_out[pair_of[rank] * size + d], total);
            out[d] = fmaf(gate, shared_out[d], total);
        }
    }
}
