// Which pairs of a window the device computes, which the host's processor, and which nobody.
//   T tokens, E experts, k experts per token, P = T * k pairs, D hidden_size
#include "overlap.cuh"

constexpr int SHARES = 1024;  // a share of misses is a whole number of such parts

// How many of those listed are there or come. The list was written before its first part was
// claimed.
__device__ inline int count_coming(const int *claimed, const int *count, int parts) {
    int some;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(some) : "l"(claimed) : "memory");
    return some > 0 ? min(__ldcg(count), (some + parts - 1) / parts) : 0;
}

// split_pairs: each pair's place: its expert's id where the device computes it, E where the host's
// processor does, E + 1 where nobody does. A thread for each pair.
//   ids [T,k] i32, blobs [E] i64 addresses, link_share [1] i32; claimed, count [1] i32, coming
//   [room] i32: who comes ahead, see Coming; others may write that meanwhile -> places [T,k] i32
//   grid 1, block P rounded up to whole warps, shared 8 * P bytes; reads 4 * P bytes P times from
//   shared memory, which is nothing: the launch bounds it
extern "C" __global__ void split_pairs(const int *ids, const long long *blobs,
                                       const int *link_share, const int *claimed, const int *count,
                                       const int *coming, long long first_slot, long long end_slots,
                                       long long least_dropped, long long parts, long long room,
                                       int *places, long long num_pairs, long long top_k,
                                       long long num_experts) {
    start_early();
    extern __shared__ int expert_of[];
    const int pairs = static_cast<int>(num_pairs), k = static_cast<int>(top_k);
    int *counts_at = expert_of + pairs;  // 1 where a pair is the first of a kept miss
    const int pair = static_cast<int>(threadIdx.x);
    const bool is_pair = pair < pairs;
    const int num_coming = room ? count_coming(claimed, count, static_cast<int>(parts)) : 0;
    const int expert = is_pair ? ids[pair] : -1;
    bool is_hit = true;
    if (is_pair) {
        expert_of[pair] = expert;
        const long long address = blobs[expert];
        is_hit = address >= first_slot && address < end_slots;
    }
    bool is_coming = false;
    for (int i = 0; i < num_coming; i++) is_coming |= __ldcg(coming + i) == expert;
    __syncthreads();
    int best = k, first = pair;
    for (int other = 0; is_pair && other < pairs; other++) {
        if (expert_of[other] != expert) continue;
        best = min(best, other % k);
        first = min(first, other);
    }
    const bool is_dropped = !is_hit && best >= least_dropped;
    const bool is_kept = is_pair && !is_hit && !is_dropped && !is_coming;
    if (is_pair) counts_at[pair] = is_kept && first == pair;
    __syncthreads();
    if (!is_pair) return;
    int place = is_dropped ? static_cast<int>(num_experts) + 1 : expert;
    if (is_kept) {
        int before = 0, misses = 0;
        for (int other = 0; other < pairs; other++) {
            before += other < first ? counts_at[other] : 0;
            misses += counts_at[other];
        }
        if (before >= (misses * link_share[0] + SHARES / 2) / SHARES)
            place = static_cast<int>(num_experts);
    }
    places[pair] = place;
}

// clear_rows: rows bounds[0] .. bounds[1] become zero
//   bounds [2] i32, rows [P,D] f32
//   grid (P, D / (4 * block)), each thread 4 columns; writes 4 * D bytes for each row
extern "C" __global__ void clear_rows(const int *bounds, float *rows, long long size) {
    start_early();
    const int row = static_cast<int>(blockIdx.x);
    if (row < bounds[0] || row >= bounds[1]) return;
    const long long first = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    rows += row * size;
    for (long long d = first; d < min(first + 4, size); d++) rows[d] = 0.0f;
}
