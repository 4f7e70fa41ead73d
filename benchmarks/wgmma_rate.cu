// wgmma m64nNk16 with weights in registers: whether it makes the bits of mma.sync m16n8k16, and its
// rate beside other instructions. For compute capability 9.0.
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I strata_cli/engine/kernels \
//       -o wgmma_rate benchmarks/wgmma_rate.cu && ./wgmma_rate
// Bits: chains of 32 products of 16 k, operands of several kinds. Rates: one block of two
// warpgroups per multiprocessor, ALU integer and f16 operations per product and thread.

#define BULK 1  // when compiling for the host too
#include "mma.cuh"
#include "rate.cuh"
#include "warpgroup.cuh"

constexpr int COLS = 512, TOKENS = 64, TURNS = 1000;
const char *const KINDS[] = {"even", "any finite", "subnormal", "near cancellations", "far apart"};

__device__ unsigned mixed(unsigned a, unsigned b) {
    unsigned s = a * 2654435761u ^ (b + 0x9e3779b9u) * 2246822519u;
    s = (s ^ s >> 15) * 2246822519u;
    s = (s ^ s >> 13) * 3266489917u;
    return s ^ s >> 16;
}

__device__ unsigned finite(unsigned bits) {
    return (bits & 0x7c00) == 0x7c00 ? (bits & 0x83ff) | 0x3c00 : bits & 0xffff;
}

// Bits of the f16 of operand `side` at a row and k.
__device__ unsigned short value(int kind, unsigned seed, int side, int row, int k) {
    const unsigned own = mixed(2 * seed + side, row * COLS + k);
    const unsigned pair = finite(mixed(2 * seed + side, row * COLS + (k & ~1)));
    if (kind == 0) return (own & 0x87ff) | 0x3400;
    if (kind == 1) return finite(own);
    if (kind == 2) return own & 0x8fff;
    if (kind == 3) return (side && k % 2 ? pair ^ 0x8000 : pair) ^ (own >> 16 & 7 ? 0 : 1);
    return (own & 0x83ff) | (1 + 7 * ((own >> 16) % 5)) << 10;
}

// Where 64 rows of COLS k lie as tiles that wgmma reads, in f16.
__device__ int place(int row, int k) {
    return (k / 64 * 64 + row) * 64 + ((k % 64 / 8 ^ row % 8) * 8 + k % 8);
}

__global__ void __launch_bounds__(128) bits(int kind, unsigned seed, unsigned *differing) {
    extern __shared__ __align__(1024) unsigned short shared[];
    unsigned short *a = shared, *b = shared + 64 * COLS;
    for (int i = threadIdx.x; i < 64 * COLS; i += blockDim.x) {
        const int row = i / COLS, k = i % COLS, at = place(row, k);
        a[at] = value(kind, seed + blockIdx.x, 0, row, k);
        b[at] = value(kind, seed + blockIdx.x, 1, row, k);
    }
    publish_to_tensor_cores();
    __syncthreads();
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane & 3;
    float sums[TOKENS / 2], expected[TOKENS / 8][4] = {};
    for (int i = 0; i < TOKENS / 2; i++) sums[i] = -0.0f;  // ignored by the first product
    for (int k = 0; k < COLS; k += 16) {
        unsigned w[4];
        for (int i = 0; i < 4; i++) {
            const int row = 16 * (threadIdx.x / 32) + g + 8 * (i % 2);
            w[i] = *reinterpret_cast<unsigned *>(&a[place(row, k + 2 * t + 8 * (i / 2))]);
        }
        for (int n = 0; n < TOKENS / 8; n++) {
            const unsigned x0 = *reinterpret_cast<unsigned *>(&b[place(8 * n + g, k + 2 * t)]);
            const unsigned x1 = *reinterpret_cast<unsigned *>(&b[place(8 * n + g, k + 2 * t + 8)]);
            multiply(expected[n], w[0], w[1], w[2], w[3], x0, x1);
        }
        begin_products();
        const unsigned at = shared_address(b) + k / 64 * 64 * TILE_ROW_BYTES;
        multiply_async<TOKENS>(sums, w, tile_descriptor(at) + k % 64 * 2 / 16, k > 0);
        commit_products();
        wait_products<0>();
    }
    unsigned count = 0;
    for (int i = 0; i < TOKENS / 2; i++)
        count += __float_as_uint(sums[i]) != __float_as_uint(expected[i / 4][i % 4]);
    atomicAdd(differing, count);
}

template <int NUM, int ALU>
__global__ void __launch_bounds__(256) rate(float *out, long long *clocks) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    for (int i = threadIdx.x; i < 128 * TILE_ROW_BYTES / 4; i += blockDim.x)
        reinterpret_cast<unsigned *>(tiles)[i] = (mixed(i, 1) & 0x87ff87ffu) | 0x34003400u;
    publish_to_tensor_cores();
    __syncthreads();
    float sums[NUM / 2] = {};
    unsigned w[4][4], words[8];
    for (int i = 0; i < 16; i++)
        w[i / 4][i % 4] = (mixed(i, threadIdx.x) & 0x87ff87ffu) | 0x34003400u;
    for (int i = 0; i < 8; i++) words[i] = mixed(i, threadIdx.x);
    const unsigned long long b = tile_descriptor(shared_address(tiles));
    const long long start = clock64();
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            begin_products();
            multiply_async<NUM>(sums, w[i], b + 2 * i, 1);
            commit_products();
#pragma unroll
            for (int j = 0; j < ALU; j++) other_work(words, j);
            wait_products<1>();
        }
    }
    wait_products<0>();
    const long long end = clock64();
    float total = 0;
    for (int i = 0; i < 8; i++) total += __uint_as_float(words[i]);
    for (int i = 0; i < NUM / 2; i++) total += sums[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = total;
    if (threadIdx.x == 0) clocks[blockIdx.x] = end - start;
}

template <int NUM, int ALU>
void measure(const Output &to) {
    const float ms = last_ms(
        [&] { rate<NUM, ALU><<<to.blocks, 256, 128 * TILE_ROW_BYTES>>>(to.out, to.clocks); });
    const double products = 2 * 4.0 * TURNS;
    printf("64 x %3d x 16, %2d alu: %5.1f clocks of at least %2d, %3.0f TFLOP/s, %s\n", NUM, ALU,
           to.taken() / products, NUM / 2, products * to.blocks * 64 * NUM * 16 * 2 / ms / 1e9,
           cudaGetErrorString(cudaGetLastError()));
}

int main() {
    const Output to(256);
    const int nbytes = 2 * 64 * COLS * 2, chains = 200 * to.blocks;
    cudaFuncSetAttribute(bits, cudaFuncAttributeMaxDynamicSharedMemorySize, nbytes);
    unsigned *differing;
    cudaMalloc(&differing, sizeof *differing);
    for (int kind = 0; kind < 5; kind++) {
        unsigned count = 0;
        cudaMemset(differing, 0, sizeof *differing);
        bits<<<chains, 128, nbytes>>>(kind, kind * chains, differing);
        cudaMemcpy(&count, differing, sizeof count, cudaMemcpyDeviceToHost);
        printf("%s operands: %u of %d sums differ, %s\n", KINDS[kind], count, chains * 64 * TOKENS,
               cudaGetErrorString(cudaGetLastError()));
    }
    measure<128, 0>(to), measure<128, 16>(to);
    measure<128, 32>(to), measure<128, 64>(to);
    measure<64, 0>(to), measure<64, 32>(to);
    measure<32, 0>(to), measure<32, 32>(to);
    return cudaGetLastError() != cudaSuccess;
}
