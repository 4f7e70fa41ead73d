// Routing of tokens to experts, and their pairs in the order of the experts.
//   T tokens, E experts, k experts per token, P = T * k pairs
#include "lanes.cuh"
#include "overlap.cuh"
#include "route.cuh"

// route: softmax over all experts, the k best by logit (ties: lower id), renormalised
//   logits [T,E] f32 -> ids [T,k] i32 best first, weights [T,k] f32
//   grid (T / warps), one warp per token, shared 4 * (2 * k + CANDIDATE_WORDS) bytes per warp;
//   reads 4 * T*E bytes
template <int LOCAL>
__global__ void route(const float *logits, int *ids, float *weights, long long num_tokens,
                      long long num_experts, long long top_k) {
    start_early();
    extern __shared__ int chosen[];
    const int warp = threadIdx.x / 32;
    const long long token = blockIdx.x * (blockDim.x / 32) + warp;
    if (token >= num_tokens) return;
    int *own_ids = chosen + (2 * top_k + CANDIDATE_WORDS) * warp;
    float *own = reinterpret_cast<float *>(own_ids + top_k);
    const int experts = static_cast<int>(num_experts), count = static_cast<int>(top_k);
    logits += token * num_experts;
    choose_experts<LOCAL>(logits, own_ids, own_ids + 2 * count, experts, count);
    const Softmax softmax = softmax_of<LOCAL>(logits, experts);
    __syncwarp();
    weigh_experts(logits, softmax, own_ids, own, ids + token * top_k, weights + token * top_k,
                  count);
}

// route_few: route and order_by_expert of few tokens, in one block with a warp for each
//   grid 1, block 32 * T or more, shared 4 * T * (2 * k + ROUTE_WORDS) bytes
template <int LOCAL>
__global__ void route_few(const float *logits, int *ids, float *weights, int *expert_start,
                          int *row_of, int *pair_of, long long num_tokens, long long num_experts,
                          long long top_k) {
    start_early();
    extern __shared__ int chosen[];
    route_in_order<LOCAL>(logits, ids, weights, expert_start, row_of, pair_of,
                          static_cast<int>(num_tokens), static_cast<int>(num_experts),
                          static_cast<int>(top_k), chosen);
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
