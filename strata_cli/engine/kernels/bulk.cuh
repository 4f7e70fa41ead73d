// Copies of whole runs of bytes to shared memory by the copy engine (sm_90), what to wait for them
// with, and barriers of a part of a block.
#pragma once

#ifndef BULK
#if __CUDA_ARCH__ >= 900
#define BULK 1
#else
#define BULK 0
#endif
#endif

// Waits for `threads` threads, whole warps of one block that use the same number, 1 to 15, and call
// it at the same place.
__device__ inline void team_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Waits for all threads of the block. Warps with different tasks may call it at different places:
// unlike __syncthreads and bar.sync, which are aligned and must be one instruction for all.
__device__ inline void block_barrier() {
    asm volatile("barrier.sync 0, %0;" ::"r"(blockDim.x) : "memory");
}

#if BULK
__device__ inline unsigned shared_address(const void *shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// A gate in shared memory: passed once `arrivals` threads have arrived and all bytes that they said
// they expect have landed; then it counts anew. What was stored before an arrival is seen after.
__device__ inline void open_gate(unsigned long long *gate, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(arrivals)
                 : "memory");
}

// After open_gate, before the copy engine uses them.
__device__ inline void publish_gates() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(unsigned long long *gate) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(gate)) : "memory");
}

__device__ inline void arrive_expecting(unsigned long long *gate, int nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(gate)),
                 "r"(nbytes)
                 : "memory");
}

// Starts a copy; both ends and the length are multiples of 16.
__device__ inline void copy_bulk(void *shared, const void *global, int nbytes,
                                 unsigned long long *gate) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(nbytes), "r"(shared_address(gate))
        : "memory");
}

// Between what copies into shared memory have brought and copies out of it.
__device__ inline void fence_async_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts a copy out of shared memory; both ends and the length are multiples of 16.
__device__ inline void store_bulk(void *global, const void *shared, int nbytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(nbytes)
                 : "memory");
}

// Behind a thread's stores that belong together.
__device__ inline void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all of a thread's stores but those that belong to the last end_stores() have read shared
// memory; or until all are where they go.
__device__ inline void await_reads_but_last() {
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

__device__ inline void await_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits until the gate was passed an odd (parity 0) or even number of times, which must be the
// next or the latest of them.
__device__ inline void pass_gate(unsigned long long *gate, unsigned parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(gate)),
        "r"(parity)
        : "memory");
}
#endif
