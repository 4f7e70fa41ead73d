// Tensor core products and asynchronous copies to shared memory.
#ifndef MMA_CUH
#define MMA_CUH

// How much the L2 cache fetches ahead of a copy, such as ".L2::256B".
#ifndef COPY_HINT
#define COPY_HINT ""
#endif

// c += a * b for 16 weight rows, 8 tokens and the 16 k that the warp's quads hold: lane (g, t) has
// four k of row g in a0, a2, of row g + 8 in a1, a3, of token g in b0, b1, and the sums of rows g
// (c[0], c[1]) and g + 8 (c[2], c[3]) for tokens 2t and 2t + 1. Products are exact, sums float32.
__device__ inline void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a2), "r"(a3), "r"(b1));
#endif
}

// Copies the first nbytes (0..16) of 16 bytes and fills up with zeros; both ends 16-byte aligned.
// Nothing is read where nbytes is 0.
__device__ inline void copy_async(void *shared, const void *global, int nbytes) {
#if __CUDA_ARCH__ >= 800
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global" COPY_HINT " [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(global), "r"(nbytes)
                 : "memory");
#else
    unsigned words[4] = {0, 0, 0, 0};
    const unsigned *from = static_cast<const unsigned *>(global);
    for (int i = 0; i < 4; i++) {
        if (4 * i < nbytes) words[i] = from[i];
        if (4 * i + 4 > nbytes && 4 * i < nbytes) words[i] &= ~0u >> 8 * (4 * i + 4 - nbytes);
    }
    *static_cast<uint4 *>(shared) = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

// 16 bytes that are all there.
__device__ inline void copy_async(void *shared, const void *global) {
#if __CUDA_ARCH__ >= 800
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global" COPY_HINT " [%0], [%1], 16;" ::"r"(to), "l"(global)
                 : "memory");
#else
    *static_cast<uint4 *>(shared) = *static_cast<const uint4 *>(global);
#endif
}

// Closes a group of the thread's copies.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the latest PENDING groups of this thread have landed; other threads see them
// after the next barrier.
template <int PENDING>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

#endif
