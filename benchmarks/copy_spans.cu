// copy_spans: every warp copies spans of weights to its own slots of shared memory and looks at
// a word of each, after it has read x; no product is made. What copying alone can reach.
//   data [nbytes], x [floats] f32; span, piece: bytes; depth: slots of a warp, at most 8
//   BULK: one copy of `piece` bytes after the other by one lane, else 16 bytes by each lane
//   AHEAD_L2: bytes of a warp's later spans asked into the L2 cache before x is there
//   grid any, block any; shared memory warps * depth * (span + 8) bytes
#ifndef BULK
#define BULK 1
#endif
#ifndef AHEAD_L2
#define AHEAD_L2 0
#endif

__device__ inline unsigned shared_at(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ inline void start_span(unsigned char *to, const unsigned char *from, int span, int piece,
                                  unsigned long long *full) {
#if BULK
    if (threadIdx.x % 32 != 0) return;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_at(full)),
                 "r"(span)
                 : "memory");
    for (int at = 0; at < span; at += piece)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(shared_at(to + at)),
            "l"(from + at), "r"(min(piece, span - at)), "r"(shared_at(full))
            : "memory");
#else
#pragma unroll 4
    for (int at = 16 * (threadIdx.x % 32); at < span; at += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_at(to + at)),
                     "l"(from + at)
                     : "memory");
#endif
}

__device__ inline void wait_span(unsigned long long *full, unsigned parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_at(full)),
        "r"(parity)
        : "memory");
}

extern "C" __global__ void copy_spans(const unsigned char *data, const float *x, unsigned *out,
                                      long long nbytes, long long floats, long long span,
                                      long long piece, long long depth) {
    extern __shared__ uint4 shared[];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int size = static_cast<int>(span), slots = static_cast<int>(depth);
    unsigned char *own = reinterpret_cast<unsigned char *>(shared) + warp * slots * size;
    unsigned long long *full =
        reinterpret_cast<unsigned long long *>(reinterpret_cast<unsigned char *>(shared) +
                                               warps * slots * size) +
        warp * slots;
    const long long spans = nbytes / span, step = static_cast<long long>(gridDim.x) * warps;
    const long long first = blockIdx.x + static_cast<long long>(gridDim.x) * warp;
#if BULK
    if (lane == 0)
        for (int i = 0; i < slots; i++)
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_at(full + i)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
#endif
    for (int i = 0; i < slots; i++) {
        const long long s = first + i * step;
        if (s < spans)
            start_span(own + i * size, data + s * span, size,
                       size < piece ? size : static_cast<int>(piece), full + i);
#if !BULK
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
#if AHEAD_L2
    if (lane == 0)
        for (long long s = first + slots * step, n = 0; s < spans && n < AHEAD_L2;
             s += step, n += span)
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(data + s * span),
                         "r"(size)
                         : "memory");
#endif
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float all = 0.0f;
    for (int i = threadIdx.x; i < floats; i += blockDim.x) all += x[i];
    __syncthreads();
    unsigned seen = 0;
    int slot = 0, turn = 0;
    for (long long s = first; s < spans; s += step) {
#if BULK
        wait_span(full + slot, turn);
#else
        if (slots == 1)
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        else if (slots == 2)
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        else
            asm volatile("cp.async.wait_group 3;" ::: "memory");
#endif
        __syncwarp();
        seen |= *reinterpret_cast<unsigned *>(own + slot * size + 4 * lane);
        __syncwarp();
        const long long next = s + slots * step;
        if (next < spans)
            start_span(own + slot * size, data + next * span, size,
                       size < piece ? size : static_cast<int>(piece), full + slot);
#if !BULK
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
        if (++slot == slots) slot = 0, turn ^= 1;
    }
    out[blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x] =
        seen + __float_as_uint(all);
}
