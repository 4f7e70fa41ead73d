// What mma.sync m16n8k16 reaches beside other instructions: the limits of the many-row products.
//   nvcc -std=c++17 -O3 -arch=sm_90 -o mma_rate benchmarks/mma_rate.cu && ./mma_rate
// One block per multiprocessor; a warp has 32 sums of 16 x 8 and makes TURNS times 64 products,
// with WIDE loads of 16 bytes and NARROW of 4 from shared memory (no two lanes in one bank) and ALU
// integer and f16 operations between them. Prints clocks of a scheduler per product, and TFLOP/s.
#include "rate.cuh"

constexpr int TURNS = 2000;

__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two f16 with random signs and mantissas, between 1/4 and 2 in magnitude.
__device__ inline unsigned halves(unsigned seed) {
    seed = (seed + 1) * 2654435761u;
    seed = (seed ^ seed >> 15) * 2246822519u;
    return ((seed ^ seed >> 13) & 0x87ff87ffu) | 0x34003400u;
}

// KINDS: left operands that take turns. SUMS accumulators per warp: 32 is a tile of 64 x 64. Loads
// and operations are volatile, so they stay where they are: spread evenly over the 64 products.
template <int SUMS, int WIDE, int NARROW, int ALU, bool MATRIX, int KINDS>
__global__ void __launch_bounds__(SUMS == 32 ? 256 : 512) rate(float *out, long long *clocks) {
    extern __shared__ uint4 shared[];
    for (int i = threadIdx.x; i < 4096; i += blockDim.x)
        shared[i] =
            make_uint4(halves(4 * i), halves(4 * i + 1), halves(4 * i + 2), halves(4 * i + 3));
    __syncthreads();
    const int lane = threadIdx.x & 31;
    const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    const unsigned wide = base + 16 * lane, narrow = base + 4 * lane;
    float sums[SUMS][4] = {};
    unsigned a[KINDS][4], b[8][4], words[8], loaded[4] = {};
#pragma unroll
    for (int i = 0; i < 32; i++) b[i / 4][i % 4] = halves(threadIdx.x + 999 * i);
#pragma unroll
    for (int i = 0; i < 4 * KINDS; i++) a[i / 4][i % 4] = halves(threadIdx.x + 77 * i);
#pragma unroll
    for (int i = 0; i < 8; i++) words[i] = halves(threadIdx.x + 55 * i);
    const long long start = clock64();
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
        const unsigned row = (turn & 7) << 9;
#pragma unroll
        for (int i = 0; i < 64; i++) {
            if (WIDE && i * WIDE / 64 != (i + 1) * WIDE / 64) {
                unsigned (&to)[4] = b[i * WIDE / 64 % 8];
                const unsigned at = wide + row + (i * 512 & 0x3fff);
                if (MATRIX)
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                                 : "r"(at));
                else
                    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                                 : "r"(at));
            }
#pragma unroll
            for (int j = i * NARROW / 64; j < (i + 1) * NARROW / 64; j++) {
                asm volatile("ld.shared.u32 %0, [%1];"
                             : "=r"(loaded[j % 4])
                             : "r"(narrow + row + 128 * j));
            }
#pragma unroll
            for (int j = i * ALU / 64; j < (i + 1) * ALU / 64; j++) other_work(words, j);
            multiply(sums[i % SUMS], a[i % KINDS], b[i / 2 % 8][i % 2 * 2],
                     b[i / 2 % 8][i % 2 * 2 + 1]);
        }
    }
    const long long end = clock64();
    unsigned mixed = loaded[0] ^ loaded[1] ^ loaded[2] ^ loaded[3];
#pragma unroll
    for (int i = 0; i < 8; i++) mixed ^= words[i];
    float total = __uint_as_float(mixed);
#pragma unroll
    for (int i = 0; i < 4 * SUMS; i++) total += sums[i / 4][i % 4];
    out[blockIdx.x * blockDim.x + threadIdx.x] = total;
    if (threadIdx.x == 0) clocks[blockIdx.x] = end - start;
}

template <int SUMS, int WIDE, int NARROW, int ALU, bool MATRIX = false, int KINDS = 1>
void measure(int warps, const Output &to) {
    auto kernel = rate<SUMS, WIDE, NARROW, ALU, MATRIX, KINDS>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    const float ms = last_ms([&] { kernel<<<to.blocks, 32 * warps, 65536>>>(to.out, to.clocks); });
    const double products = 64.0 * TURNS * warps;
    printf(
        "warps %2d sums %2d per 64 products: %2d %s %2d narrow %3d alu: %5.2f clocks, %4.0f "
        "TFLOP/s, %s\n",
        warps, SUMS, WIDE, MATRIX ? "ldmatrix" : "wide    ", NARROW, ALU,
        to.taken() / (products / 4), products * to.blocks * 4096 / ms / 1e9,
        cudaGetErrorString(cudaGetLastError()));
}

int main() {
    const Output to(512);
    for (int warps : {4, 8}) {
        measure<32, 0, 0, 0>(warps, to);
        measure<32, 8, 0, 0>(warps, to);
        measure<32, 16, 0, 0>(warps, to);
        measure<32, 16, 0, 0, true>(warps, to);
        measure<32, 32, 0, 0>(warps, to);
        measure<32, 8, 32, 0>(warps, to);
        measure<32, 0, 0, 64>(warps, to);
        measure<32, 0, 0, 128>(warps, to);
        measure<32, 0, 0, 192>(warps, to);
        measure<32, 0, 0, 256>(warps, to);
        measure<32, 0, 0, 320>(warps, to);
        measure<32, 8, 32, 128>(warps, to);
        measure<32, 8, 32, 256>(warps, to);
        measure<32, 16, 32, 128>(warps, to);
        measure<32, 8, 64, 192>(warps, to);
        measure<32, 0, 0, 0, false, 2>(warps, to);
        measure<32, 0, 0, 0, false, 4>(warps, to);
        measure<32, 16, 0, 0, false, 4>(warps, to);
        measure<32, 16, 0, 64, false, 4>(warps, to);
        measure<32, 16, 0, 128, false, 4>(warps, to);
        measure<32, 16, 32, 128, false, 2>(warps, to);
        measure<16, 0, 0, 0>(warps, to);
        measure<16, 16, 32, 128>(warps, to);
    }
    for (int warps : {12, 16}) {
        measure<16, 0, 0, 0>(warps, to);
        measure<16, 16, 32, 128>(warps, to);
        measure<16, 16, 32, 256>(warps, to);
        measure<16, 32, 64, 256>(warps, to);
    }
    return cudaGetLastError() != cudaSuccess;
}
