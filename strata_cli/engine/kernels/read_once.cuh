// Copies of what is not read again before all else: weights, which would drive code and small
// tensors out of the L2 cache if they were kept like these.
#pragma once
#include "bulk.cuh"

#if BULK
// As copy_bulk; what was read is the first to be forgotten.
__device__ inline void copy_bulk_once(void *shared, const void *global, int nbytes,
                                      unsigned long long *gate) {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
        "l"(global), "r"(nbytes), "r"(shared_address(gate)), "l"(policy)
        : "memory");
}
#endif
