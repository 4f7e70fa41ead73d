// Products of a warpgroup, four warps together, by wgmma (sm_90a), and what orders them.
//
// The tensor cores read the right operand from shared memory: a tile has a row of 64 k, 128 bytes,
// for each token, and begins at a multiple of 1,024 bytes; 16 bytes c of row r lie at place
// c ^ (r & 7).
#pragma once
#include "bulk.cuh"

constexpr int TILE_ROW_BYTES = 128;

// Names such a tile from an address in shared memory on; 32 bytes more are the next 16 k.
__device__ inline unsigned long long tile_descriptor(unsigned address) {
    constexpr unsigned long long eight_rows = 8 * TILE_ROW_BYTES / 16, swizzle_128 = 1;
    return address / 16 | 1ull << 16 | eight_rows << 32 | swizzle_128 << 62;
}

// Before the first product after registers that products read or write were changed.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the latest PENDING groups of products are done.
template <int PENDING>
__device__ inline void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// After a thread's stores, before others are told of them: tensor cores then see them.
__device__ inline void publish_to_tensor_cores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Registers of each thread of the calling warpgroup from here on.
template <int COUNT>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// 16 bytes that no one changes while the launch runs; volatile, so that loads stay ahead of stores.
__device__ inline uint4 load_ahead(const uint4 *from) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

// Word j of lanes 4r ... 4r + 3 becomes 16 bytes, at the address that lane 8j + r names.
__device__ inline void store_words(unsigned address, const uint4 &v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Arrives once all copies of copy_async that the thread started have landed.
__device__ inline void arrive_when_copied(unsigned long long *gate) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(gate))
                 : "memory");
}

#define SUMS8(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])

// Starts d = a * b, plus d where it adds, for 64 weight rows, TOKENS tokens and 16 k: warp w has
// rows 16w ..., operands and sums as in `multiply` (mma.cuh), d[4n ...] those of tokens 8n ... .
template <int TOKENS>
__device__ inline void multiply_async(float (&d)[TOKENS / 2], const unsigned (&a)[4],
                                      unsigned long long b, int adds);

template <>
__device__ inline void multiply_async<32>(float (&d)[16], const unsigned (&a)[4],
                                          unsigned long long b, int adds) {
    asm volatile(
        "{ .reg .pred adds;\n"
        "setp.ne.b32 adds, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, adds, 1, 1, 0; }"
        : SUMS8(0), SUMS8(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

template <>
__device__ inline void multiply_async<64>(float (&d)[32], const unsigned (&a)[4],
                                          unsigned long long b, int adds) {
    asm volatile(
        "{ .reg .pred adds;\n"
        "setp.ne.b32 adds, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, adds, 1, 1, 0; }"
        : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

template <>
__device__ inline void multiply_async<96>(float (&d)[48], const unsigned (&a)[4],
                                          unsigned long long b, int adds) {
    asm volatile(
        "{ .reg .pred adds;\n"
        "setp.ne.b32 adds, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "{%48, %49, %50, %51}, %52, adds, 1, 1, 0; }"
        : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24), SUMS8(32), SUMS8(40)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

template <>
__device__ inline void multiply_async<128>(float (&d)[64], const unsigned (&a)[4],
                                           unsigned long long b, int adds) {
    asm volatile(
        "{ .reg .pred adds;\n"
        "setp.ne.b32 adds, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, adds, 1, 1, 0; }"
        : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24), SUMS8(32), SUMS8(40), SUMS8(48), SUMS8(56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}
#undef SUMS8
