// Experts of a step from host memory to the device's, over the link, before products read them.
//   addresses [E] of blobs of `bytes` bytes -> staged [E], the same or where in slots [S, stride]
//   Reads each wanted blob outside the cache once. The link is the limit: nine tenths of what the
//   copy engine reaches, where all lines of 128 bytes are read whole; products that read rows of
//   odd sizes over it reach half.
#include "overlap.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int LINE = 128;                 // bytes that the link carries together
constexpr int TOGETHER = 8;               // loads of a thread that are under way
constexpr int SPAN = TOGETHER * 32 * 16;  // bytes that a warp copies at once
constexpr int MOST_SLOTS = 64;

struct Blobs {
    long long source[MOST_SLOTS];
    int count;
};

// Where a blob goes: as far behind a line's begin as it comes from.
__device__ inline long long place_of(const unsigned char *slots, long long stride, int slot,
                                     long long source) {
    return reinterpret_cast<long long>(slots) + slot * stride + source % LINE;
}

// Lists the blobs to fetch, in the order of their experts, by all threads of a block; the first
// block writes the table.
__device__ inline void list_blobs(Blobs &blobs, const long long *addresses, const int *expert_start,
                                  long long first_cached, long long end_cached,
                                  const unsigned char *slots, long long *staged, long long experts,
                                  long long num_slots, long long stride) {
    __shared__ int wanted_of_warp[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int before = 0;
    for (long long base = 0; base < experts; base += THREADS) {
        const long long e = base + threadIdx.x;
        const long long address = e < experts ? addresses[e] : 0;
        const bool is_cached = address >= first_cached && address < end_cached;
        const bool is_wanted = address && !is_cached && expert_start[e + 1] > expert_start[e];
        const unsigned votes = __ballot_sync(0xffffffffu, is_wanted);
        if (lane == 0) wanted_of_warp[warp] = __popc(votes);
        __syncthreads();
        int slot = before + __popc(votes & ((1u << lane) - 1));
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) slot += wanted_of_warp[w];
            before += wanted_of_warp[w];
        }
        const bool is_fetched = is_wanted && slot < num_slots;
        if (is_fetched) blobs.source[slot] = address;
        if (blockIdx.x == 0 && e < experts)
            staged[e] = is_fetched ? place_of(slots, stride, slot, address) : address;
        __syncthreads();
    }
    if (threadIdx.x == 0) blobs.count = min(before, static_cast<int>(num_slots));
    __syncthreads();
}

// Copies 16 bytes at a time from the last multiple of 16 before a blob to the first behind it: no
// more than the memory's own granules, so that nothing outside its pages is touched.
extern "C" __global__ void __launch_bounds__(THREADS)
    fetch_blobs(const long long *addresses, const int *expert_start, long long first_cached,
                long long end_cached, unsigned char *slots, long long *staged, long long bytes,
                long long experts, long long num_slots, long long stride) {
    __shared__ Blobs blobs;
    start_early();
    list_blobs(blobs, addresses, expert_start, first_cached, end_cached, slots, staged, experts,
               num_slots, stride);
    const int lane = threadIdx.x & 31, warps = gridDim.x * WARPS;
    const int spans =
        static_cast<int>((bytes + LINE + SPAN - 1) / SPAN);  // of a blob, from its first line on
    for (int work = blockIdx.x * WARPS + threadIdx.x / 32; work < blobs.count * spans;
         work += warps) {
        const int slot = work / spans;
        const long long source = blobs.source[slot], skew = source % LINE;
        const long long begin = source - skew + static_cast<long long>(work % spans) * SPAN;
        const long long from = max(begin, source / 16 * 16);
        const long long to = min(begin + SPAN, (source + bytes + 15) / 16 * 16);
        const uint4 *in = reinterpret_cast<const uint4 *>(begin);
        uint4 *out =
            reinterpret_cast<uint4 *>(place_of(slots, stride, slot, source) + (begin - source));
        uint4 parts[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const long long at = begin + (32 * i + lane) * 16;
            if (from <= at && at < to) parts[i] = __ldcs(in + 32 * i + lane);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const long long at = begin + (32 * i + lane) * 16;
            if (from <= at && at < to) out[32 * i + lane] = parts[i];
        }
    }
}
