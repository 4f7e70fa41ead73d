// Slices of a router's product and of a gate's row added up, and the tokens routed by what they
// make.
//   T tokens, E experts, k experts per token; the sums are those of split_pair (matmul_split.cu)
#include "overlap.cuh"
#include "route.cuh"
#include "weights.cuh"

// join_route: (0 + slice 0 + slice 1 + ...) / the gain, as one block of matmul_split.cu would have
// added them up, then route (route.cu)
//   sums [slices,T,E] f32, then [slices,T,R] -> logits [T,E] f32, others [T,R] f32, ids [T,k] i32
//   best first, weights [T,k] f32
//   grid (T), shared 4 * (E + 2 * k + CANDIDATE_WORDS) bytes; reads 4 * slices * T * (E + R) bytes
template <int LOCAL>
__global__ void join_route(const float *sums, float *logits, float *others, int *ids,
                           float *weights, long long slices, long long num_experts, long long rows,
                           long long top_k) {
    start_early();
    extern __shared__ float own[];
    const long long token = blockIdx.x, num_tokens = gridDim.x;
    const int experts = static_cast<int>(num_experts), all = experts + static_cast<int>(rows);
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        const bool is_expert = i < experts;
        const long long width = is_expert ? num_experts : rows;
        const long long at = token * width + (is_expert ? i : i - experts);
        const float *from = sums + (is_expert ? 0 : slices * num_tokens * num_experts) + at;
        float total = 0.0f;
#pragma unroll 10
        for (long long slice = 0; slice < slices; slice++)
            total += from[slice * num_tokens * width];
        total /= GAIN<F32>;
        if (is_expert) own[i] = total;
        (is_expert ? logits : others)[at] = total;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const int count = static_cast<int>(top_k);
    int *own_ids = reinterpret_cast<int *>(own + experts);
    float *scratch = reinterpret_cast<float *>(own_ids + count);
    choose_experts<LOCAL>(own, own_ids, own_ids + 2 * count, experts, count);
    const Softmax softmax = softmax_of<LOCAL>(own, experts);
    __syncwarp();
    weigh_experts(own, softmax, own_ids, scratch, ids + token * top_k, weights + token * top_k,
                  count);
}
