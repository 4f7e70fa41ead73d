// How a recorded window hands pairs to the host's processor and gets their rows back, through
// pinned memory that both see.
//   T tokens, E experts, k experts per token, P = T * k pairs, D hidden_size
#include "overlap.cuh"

constexpr int STOP = 0, FAILED = 1;  // in the mailbox's state

__device__ inline int load_acquire_of_system(const int *flag) {
    int v;
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
    return v;
}

__device__ inline void store_release_to_system(int *flag, int v) {
    asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(flag), "r"(v) : "memory");
}

__device__ inline unsigned long long now_ns() {
    unsigned long long v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}

// post_pairs: expert and token of each of the host's pairs, and all activations, into pinned
// memory; then the window's number behind them
//   ids, pair_of [T,k] i32, expert_start [E+3] i32, x [T,D] f32, current [2] i32 -> count [1],
//   experts, rows [P] i32, copy [T,D] f32, posted [1] i32
//   grid 1, block 512; writes 4 * T*D bytes over the link, if there are pairs of the host
extern "C" __global__ void post_pairs(const int *ids, const int *pair_of, const int *expert_start,
                                      const float *x, const int *current, int *count, int *experts,
                                      int *rows, float *copy, int *posted, long long num_pairs,
                                      long long top_k, long long num_experts, long long floats) {
    start_early();
    const int first = expert_start[num_experts], end = expert_start[num_experts + 1];
    for (int pair = static_cast<int>(threadIdx.x); pair < num_pairs;
         pair += static_cast<int>(blockDim.x)) {
        const int at = pair_of[pair];
        if (at < first || at >= end) continue;
        experts[at - first] = ids[pair];
        rows[at - first] = pair / static_cast<int>(top_k);
    }
    if (end > first)
        for (long long i = threadIdx.x; i < floats; i += blockDim.x) copy[i] = x[i];
    if (threadIdx.x == 0) *count = end - first;
    __threadfence_system();  // each thread's own writes, before the one that says they are there
    __syncthreads();
    if (threadIdx.x == 0) store_release_to_system(posted, current[0]);
}

// await_rows: returns when the host has written the window's number, or says why it will not
//   expert_start [E+3] i32, current [2] i32, done [1] i32 -> state [16] i32
//   grid 1, block 32; reads 4 bytes over the link now and then
extern "C" __global__ void await_rows(const int *expert_start, const int *current, const int *done,
                                      int *state, long long patience_ns, long long layer,
                                      long long num_experts) {
    start_early();
    if (threadIdx.x != 0 || expert_start[num_experts] == expert_start[num_experts + 1]) return;
    const unsigned long long start = now_ns();
    while (load_acquire_of_system(done) != current[0]) {
        const bool is_late = now_ns() - start > static_cast<unsigned long long>(patience_ns);
        if (is_late || load_acquire_of_system(state + STOP) != 0) {
            store_release_to_system(state + FAILED, static_cast<int>(layer) + 1);
            return;
        }
        __nanosleep(200);
    }
}

// take_rows: the host's rows to their pairs, and zeros to pairs that were left out
//   expert_start [E+3] i32, place [P] i32, out [P,D] f32 -> expert_out [P,D] f32
//   grid (P, D / (4 * block)), each thread 4 columns; reads 4 * D bytes over the link for each of
//   the host's pairs
extern "C" __global__ void take_rows(const int *expert_start, const int *place, const float *out,
                                     float *expert_out, long long num_experts, long long size) {
    start_early();
    const int row = static_cast<int>(blockIdx.x), first = expert_start[num_experts];
    if (row < first || row >= expert_start[num_experts + 2]) return;
    const bool is_hosts = row < expert_start[num_experts + 1];
    const long long column = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    const float *source = is_hosts ? out + __ldcv(place + (row - first)) * size : out;
    for (long long d = column; d < min(column + 4, size); d++)
        expert_out[row * size + d] = is_hosts ? __ldcv(source + d) : 0.0f;
}
