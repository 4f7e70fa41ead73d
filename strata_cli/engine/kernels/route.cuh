// Routing: the experts of a token, by a warp; and those of few tokens in order, by a block.
#pragma once
#include "lanes.cuh"
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

// route_few, by a whole block of a warp for each token or more; chosen: 2 * T*k words of its own.
template <int LOCAL>
__device__ inline void route_in_order(const float *logits, int *ids, float *weights,
                                      int *expert_start, int *row_of, int *pair_of,
                                      long long num_tokens, long long num_experts, long long top_k,
                                      int *chosen) {
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
