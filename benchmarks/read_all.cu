// read_all: reads n times 16 bytes and keeps nothing; grid any, four reads in flight per thread
extern "C" __global__ void read_all(const uint4 *data, unsigned *out, long long n) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    unsigned all = 0;
#pragma unroll 8
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < n;
         i += step) {
        const uint4 v = data[i];
        all |= v.x | v.y | v.z | v.w;
    }
    if (all == 0x12345678u) *out = all;
}
