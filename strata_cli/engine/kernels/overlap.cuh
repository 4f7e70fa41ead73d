// Starting before the launch ahead is done (Launch.early). Without that, these do nothing.
#pragma once

// The next launch of the stream may start now. It, too, waits before it touches results.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns when the launches ahead are done and their results can be seen.
__device__ inline void wait_for_launches_ahead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Brings the line of memory at an address into the L2 cache. Also before the launches ahead are
// done: what they write there later is seen all the same.
__device__ inline void fetch_ahead(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Four values, before the launches ahead are done: of what a launch wrote that was done when the
// one just ahead started. From the L2 cache, because a multiprocessor's own may hold what was there
// before.
__device__ inline float4 load4_early(const float *x) {
    return __ldcg(reinterpret_cast<const float4 *>(x));
}

// For a kernel that has nothing to do before those results. Comes first: a block that returned
// before would let later launches overtake the ones ahead.
__device__ inline void start_early() {
    let_next_start();
    wait_for_launches_ahead();
}
