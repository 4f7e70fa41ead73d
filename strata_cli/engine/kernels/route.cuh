// Routing: the experts of a token, by a warp; and those of few tokens in order, by a block.
#pragma once
#include "bulk.cuh"
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

// The top_k best experts one after the other, by a warp: of lower logits than the one before, or of
// the same one and higher ids, the first.
__device__ inline void choose_in_turn(const float *logits, int num_experts, int top_k,
                                      int *own_ids) {
    int order = 0x7fffffff, id = -1;
#pragma unroll 1
    for (int rank = 0; rank < top_k; rank++) {
        int best = LEAST, best_id = 0x7fffffff;
#pragma unroll 1
        for (int e = threadIdx.x & 31; e < num_experts; e += 32) {
            const int own = order_of(logits[e]);
            const bool comes_later = own < order || (own == order && e > id);
            if (comes_later && own > best) best = own, best_id = e;
        }
        order = max_of_warp(best);
        id = -max_of_warp(best == order ? -best_id : LEAST);
        if ((threadIdx.x & 31) == 0) own_ids[rank] = id;
    }
    __syncwarp();
}

// How many lanes' values come before the calling lane's: larger ones, and equal ones of lower
// lanes.
__device__ inline int rank_in_warp(int order) {
    const int lane = threadIdx.x & 31;
    int before = 0;
#pragma unroll 8
    for (int other = 0; other < 32; other++) {
        const int value = __shfl_sync(ALL_LANES, order, other);
        before += value > order || (value == order && other < lane);
    }
    return before;
}

constexpr int MOST_CANDIDATES = 32;  // a lane each
constexpr int CANDIDATE_WORDS = 2 * MOST_CANDIDATES;

// The top_k best of at most 32 * LOCAL experts all at once, best first, by a warp whose lane l owns
// experts l, l + 32, ...; candidates [CANDIDATE_WORDS] is scratch. The best of lanes: the top_k-th
// of them is a bound, which few experts reach. False, and nothing done, where too many do.
template <int LOCAL>
__device__ inline bool choose_at_once(const float *logits, int num_experts, int top_k, int *own_ids,
                                      int *candidates) {
    const int lane = threadIdx.x & 31;
    int orders[LOCAL], best = LEAST;
#pragma unroll
    for (int i = 0; i < LOCAL; i++)
        orders[i] = lane + 32 * i < num_experts ? order_of(logits[lane + 32 * i]) : LEAST;
#pragma unroll
    for (int i = 0; i < LOCAL; i++) best = max(best, orders[i]);
    const unsigned last = __ballot_sync(ALL_LANES, rank_in_warp(best) == top_k - 1);
    const int bound = __shfl_sync(ALL_LANES, best, __ffs(last) - 1);
    int count = 0;
#pragma unroll
    for (int i = 0; i < LOCAL; i++) {
        const bool is_one = orders[i] >= bound && orders[i] > LEAST;
        const unsigned ones = __ballot_sync(ALL_LANES, is_one);
        const int place = count + __popc(ones & (1u << lane) - 1);
        if (is_one && place < MOST_CANDIDATES) {
            candidates[place] = orders[i];
            candidates[MOST_CANDIDATES + place] = lane + 32 * i;
        }
        count += __popc(ones);
    }
    if (count > MOST_CANDIDATES) return false;
    __syncwarp();
    const int rank = rank_in_warp(lane < count ? candidates[lane] : LEAST);  // in order of ids
    if (lane < count && rank < top_k) own_ids[rank] = candidates[MOST_CANDIDATES + lane];
    __syncwarp();  // a barrier of the block that follows counts whole warps
    return true;
}

// One warp chooses a token's experts, own_ids [k] in shared memory, best first. LOCAL is 0: of any
// number.
template <int LOCAL>
__device__ inline void choose_experts(const float *logits, int *own_ids, int *candidates,
                                      int num_experts, int top_k) {
    if constexpr (LOCAL > 0)
        if (top_k <= 32 && choose_at_once<LOCAL>(logits, num_experts, top_k, own_ids, candidates))
            return;
    choose_in_turn(logits, num_experts, top_k, own_ids);
}

// What a token's probabilities are measured by.
struct Softmax {
    float largest, total;  // the sum over all experts of exp(logit - largest)
};

// By a warp: each lane its own logits in turn, then folded.
template <int LOCAL>
__device__ inline Softmax softmax_of(const float *logits, int num_experts) {
    const int lane = threadIdx.x & 31;
    Softmax softmax;
    float total = 0.0f;
    int best = LEAST;
    if constexpr (LOCAL > 0) {
        float own[LOCAL];
#pragma unroll
        for (int i = 0; i < LOCAL; i++)
            own[i] = lane + 32 * i < num_experts ? logits[lane + 32 * i] : lowest();
#pragma unroll
        for (int i = 0; i < LOCAL; i++) best = max(best, order_of(own[i]));
        softmax.largest = logit_of(max_of_warp(best));
#pragma unroll
        for (int i = 0; i < LOCAL; i++)
            if (lane + 32 * i < num_experts) total += exp_fast(own[i] - softmax.largest);
    } else {
        for (int e = lane; e < num_experts; e += 32) best = max(best, order_of(logits[e]));
        softmax.largest = logit_of(max_of_warp(best));
#pragma unroll 16
        for (int e = lane; e < num_experts; e += 32) total += exp_fast(logits[e] - softmax.largest);
    }
    total += __shfl_xor_sync(ALL_LANES, total, 16);
    softmax.total = fold16(total);
    return softmax;
}

// One warp writes the ids and weights [k] of a token whose experts were chosen; own [k] is scratch.
__device__ inline void weigh_experts(const float *logits, const Softmax &softmax,
                                     const int *own_ids, float *own, int *ids, float *weights,
                                     int top_k) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int rank = lane; rank < top_k; rank += 32)
        own[rank] = exp_fast(logits[own_ids[rank]] - softmax.largest) / softmax.total;
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 10
    for (int rank = 0; rank < top_k; rank++) sum += own[rank];
    sum = sum < 0x1p-14f ? 0x1p-14f : sum;
#pragma unroll 1
    for (int rank = lane; rank < top_k; rank += 32) {
        ids[rank] = own_ids[rank];
        weights[rank] = own[rank] / sum;
    }
}

// route_few, by a whole block of a warp for each token or more: one chooses while another adds up.
//   chosen: T * (2 * k + ROUTE_WORDS) words of its own
constexpr int ROUTE_WORDS = CANDIDATE_WORDS + 2;

template <int LOCAL>
__device__ inline void route_in_order(const float *logits, int *ids, float *weights,
                                      int *expert_start, int *row_of, int *pair_of, int tokens,
                                      int num_experts, int top_k, int *chosen) {
    const int warp = threadIdx.x / 32, threads = blockDim.x, num_pairs = tokens * top_k;
    // Candidates are done with before the barrier: loads of the experts chosen, several in one, may
    // reach a few words behind them.
    int *const candidates = chosen + num_pairs;
    Softmax *const softmax = reinterpret_cast<Softmax *>(candidates + tokens * CANDIDATE_WORDS);
    float *const scratch = reinterpret_cast<float *>(softmax + tokens);
    const auto row_at = [&](int token) {
        return logits + static_cast<long long>(token) * num_experts;
    };
    if (warp < tokens)
        choose_experts<LOCAL>(row_at(warp), chosen + warp * top_k,
                              candidates + warp * CANDIDATE_WORDS, num_experts, top_k);
    const int added = threads >= 64 * tokens ? warp - tokens : warp;
    if (0 <= added && added < tokens) {
        const Softmax own = softmax_of<LOCAL>(row_at(added), num_experts);
        if ((threadIdx.x & 31) == 0) softmax[added] = own;
        __syncwarp();
    }
    block_barrier();
    if (warp < tokens)
        weigh_experts(row_at(warp), softmax[warp], chosen + warp * top_k, scratch + warp * top_k,
                      ids + warp * top_k, weights + warp * top_k, top_k);
    // The first threads weigh: the last ones have more experts than they.
#pragma unroll 1
    for (int expert = threads - 1 - threadIdx.x; expert <= num_experts; expert += threads) {
        int below = 0;
#pragma unroll 10
        for (int pair = 0; pair < num_pairs; pair++) below += chosen[pair] < expert;
        expert_start[expert] = below;
    }
    // Those behind the ones that weigh place pairs.
    const int weighing = min(32 * tokens, threads - 32);
#pragma unroll 1
    for (int pair = (threadIdx.x + threads - weighing) % threads; pair < num_pairs;
         pair += threads) {
        const int expert = chosen[pair];
        int before = 0;
#pragma unroll 10
        for (int other = 0; other < num_pairs; other++)
            before += chosen[other] < expert || (chosen[other] == expert && other < pair);
        row_of[before] = pair / top_k;
        pair_of[pair] = before;
    }
}
