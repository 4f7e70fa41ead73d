// Experts of a step from host memory to the device's, over the link, before products read them.
//   addresses [E] of blobs of `bytes` bytes -> staged [E], the same or where in slots [S, stride]
//   Reads each wanted blob outside the cache once. The link is the limit: nine tenths of what the
//   copy engine reaches, where all lines of 128 bytes are read whole; products that read rows of
//   odd sizes over it reach half.
#include "overlap.cuh"
#include "route.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int LINE = 128;                 // bytes that the link carries together
constexpr int TOGETHER = 8;               // loads of a thread that are under way
constexpr int SPAN = TOGETHER * 32 * 16;  // bytes that a warp copies at once
constexpr int MOST_SLOTS = 64;

struct Blobs {
    long long source[MOST_SLOTS];
    long long place[MOST_SLOTS];
    int first[MOST_SLOTS];  // span that is not there yet
    int count;
};

// What is brought ahead of a layer's routing, into slots of its own, in spans that warps claim one
// by one: the blobs listed, in turn. Whoever fetches what routing wants ends that, and takes over.
constexpr int MOST_AHEAD = 16;
constexpr unsigned ENDED = 1u << 31;  // added to claimed
struct Ahead {
    unsigned claimed;  // spans, and claims that came too late
    unsigned done;     // of the claimed ones
    unsigned final;    // claimed when it was ended, and 1
    int count;         // of blobs
    int experts[MOST_AHEAD];
};

__device__ inline int spans_of(long long bytes) {  // of a blob, from its first line on
    return static_cast<int>((bytes + LINE + SPAN - 1) / SPAN);
}

// Where a blob goes: as far behind a line's begin as it comes from.
__device__ inline long long place_of(const unsigned char *slots, long long stride, int slot,
                                     long long source) {
    return reinterpret_cast<long long>(slots) + slot * stride + source % LINE;
}

// A warp copies one span of a blob, 16 bytes at a time from the last multiple of 16 before the blob
// to the first behind it: no more than the memory's own granules, so that nothing outside its pages
// is touched.
__device__ inline void copy_span(long long source, long long place, long long bytes, int span) {
    const int lane = threadIdx.x & 31;
    const long long begin = source - source % LINE + static_cast<long long>(span) * SPAN;
    const long long from = max(begin, source / 16 * 16);
    const long long to = min(begin + SPAN, (source + bytes + 15) / 16 * 16);
    const uint4 *in = reinterpret_cast<const uint4 *>(begin);
    uint4 *out = reinterpret_cast<uint4 *>(place + (begin - source));
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

// Ends what is brought ahead, by the first thread of a block that gets here; returns, to all
// threads of every block, how many of its spans are there or on their way, and makes a copy of its
// list.
__device__ inline int end_ahead(Ahead *ahead, Ahead &own) {
    if (threadIdx.x == 0) {
        const unsigned before = atomicOr(&ahead->claimed, ENDED);
        if (before & ENDED)
            while (!(own.final = atomicAdd(&ahead->final, 0u))) {
            }
        else
            atomicExch(&ahead->final, own.final = before + 1);
        __threadfence();  // the list was there before the first claim
    }
    __syncthreads();
    const int claimed = static_cast<int>(own.final) - 1;
    if (threadIdx.x < MOST_AHEAD) own.experts[threadIdx.x] = __ldcg(ahead->experts + threadIdx.x);
    if (threadIdx.x == MOST_AHEAD) own.count = claimed ? __ldcg(&ahead->count) : 0;
    __syncthreads();
    return claimed;
}

// Lists the blobs to fetch, in the order of their experts, by all threads of a block; the first
// block writes the table. What of them was brought ahead already stays where it is.
__device__ inline void list_blobs(Blobs &blobs, const long long *addresses, const int *expert_start,
                                  long long first_cached, long long end_cached,
                                  const unsigned char *slots, long long *staged, const Ahead &ahead,
                                  const unsigned char *ahead_slots, int claimed, int spans,
                                  long long experts, long long num_slots, long long stride) {
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
        long long place = address;
        if (is_fetched) {
            int first = 0;
            place = place_of(slots, stride, slot, address);
            for (int i = 0; i < ahead.count && i * spans < claimed; i++)
                if (ahead.experts[i] == e) {
                    place = place_of(ahead_slots, stride, i, address);
                    first = min(claimed - i * spans, spans);
                }
            blobs.source[slot] = address;
            blobs.place[slot] = place;
            blobs.first[slot] = first;
        }
        if (blockIdx.x == 0 && e < experts) staged[e] = place;
        __syncthreads();
    }
    if (threadIdx.x == 0) blobs.count = min(before, static_cast<int>(num_slots));
    __syncthreads();
}

// ahead, and ahead_slots [num_ahead, stride]: what was brought ahead for this routing
extern "C" __global__ void __launch_bounds__(THREADS)
    fetch_blobs(const long long *addresses, const int *expert_start, long long first_cached,
                long long end_cached, unsigned char *slots, long long *staged, Ahead *ahead,
                const unsigned char *ahead_slots, long long num_ahead, long long bytes,
                long long experts, long long num_slots, long long stride) {
    __shared__ Blobs blobs;
    __shared__ Ahead own;
    start_early();
    if (threadIdx.x == 0) own.count = 0;
    __syncthreads();
    const int spans = spans_of(bytes), found = num_ahead ? end_ahead(ahead, own) : 0;
    const int claimed = min(found, own.count * spans);
    list_blobs(blobs, addresses, expert_start, first_cached, end_cached, slots, staged, own,
               ahead_slots, claimed, spans, experts, num_slots, stride);
    const int warps = gridDim.x * WARPS;
    for (int work = blockIdx.x * WARPS + threadIdx.x / 32; work < blobs.count * spans;
         work += warps) {
        const int slot = work / spans, span = work % spans;
        if (span >= blobs.first[slot])
            copy_span(blobs.source[slot], blobs.place[slot], bytes, span);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)  // what others still copy is there when this is done
        while (atomicAdd(&ahead->done, 0) < claimed) {
        }
}

// keys [E]: what orders experts by how likely they are: by the largest logit of any token, with
// what routing was found to add to it. sources [E]: their addresses; 0: in the cache, or nowhere.
__device__ inline void rate_experts(int *keys, long long *sources, const float *logits,
                                    const float *errors, const long long *addresses,
                                    long long first_cached, long long end_cached, long long tokens,
                                    long long experts) {
    for (long long e = threadIdx.x; e < experts; e += blockDim.x) {
        const long long address = addresses[e];
        float largest = lowest();
        for (long long token = 0; token < tokens; token++)
            largest = fmaxf(largest, logits[token * experts + e]);
        keys[e] = max(order_of(largest + errors[e]), LEAST + 1);
        sources[e] = address >= first_cached && address < end_cached ? 0 : address;
    }
    __syncthreads();
}

// Those of the likeliest that have a source, as many as there are slots, by one warp; uses the keys
// up.
__device__ inline void list_ahead(Ahead &own, Blobs &blobs, int *keys, const long long *sources,
                                  long long experts, long long num_likely, long long num_slots) {
    if (threadIdx.x < 32) {
        int count = 0;
        for (long long looked = 0; looked < min(num_likely, experts) && count < num_slots;
             looked++) {
            int best = LEAST, id = 0;
            for (int e = threadIdx.x; e < experts; e += 32)
                if (keys[e] > best) {
                    best = keys[e];
                    id = e;
                }
            const int key = max_of_warp(best);
            id = -max_of_warp(best == key ? -id : LEAST);
            __syncwarp();
            if (threadIdx.x == id % 32) keys[id] = LEAST;
            if (!sources[id]) continue;
            if (threadIdx.x == 0) {
                own.experts[count] = id;
                blobs.source[count] = sources[id];
            }
            count++;
        }
        if (threadIdx.x == 0) own.count = count;
    }
    __syncthreads();
}

// bring_ahead: blobs of a layer that is not routed yet, the likeliest first, until it is
//   logits [T,E] f32, errors [E] f32, addresses [E] -> slots [S, stride], ahead; shared 12 * E
//   bytes Reads S blobs at most. The link is the limit; few warps keep it busy, and what is under
//   way when it is ended is what they hold.
extern "C" __global__ void bring_ahead(const float *logits, const float *errors,
                                       const long long *addresses, long long first_cached,
                                       long long end_cached, unsigned char *slots, Ahead *ahead,
                                       long long num_likely, long long bytes, long long tokens,
                                       long long experts, long long num_slots, long long stride) {
    extern __shared__ long long sources[];
    __shared__ Blobs blobs;
    __shared__ Ahead own;
    int *keys = reinterpret_cast<int *>(sources + experts);
    rate_experts(keys, sources, logits, errors, addresses, first_cached, end_cached, tokens,
                 experts);
    list_ahead(own, blobs, keys, sources, experts, num_likely, num_slots);
    // Every block writes the same, so that it is there before the first span is claimed.
    if (threadIdx.x < own.count) ahead->experts[threadIdx.x] = own.experts[threadIdx.x];
    if (threadIdx.x == 0) ahead->count = own.count;
    __threadfence();
    __syncthreads();
    const int spans = spans_of(bytes), total = own.count * spans;
    while (true) {
        unsigned work = 0;
        if ((threadIdx.x & 31) == 0) work = atomicAdd(&ahead->claimed, 1u);
        work = __shfl_sync(ALL_LANES, work, 0);
        if (work >= static_cast<unsigned>(total)) break;
        const int slot = static_cast<int>(work) / spans, span = static_cast<int>(work) % spans;
        const long long source = blobs.source[slot];
        copy_span(source, place_of(slots, stride, slot, source), bytes, span);
        __threadfence();
        __syncwarp();
        if ((threadIdx.x & 31) == 0) atomicAdd(&ahead->done, 1u);
    }
}

// learn_errors: errors [L,E] follow what logits lack of those that were foreseen, by a part
//   foreseen, logits [L,T,E] f32, of which the first tokens count
//   grid (L * E / block); moves 8 * (tokens + 1) * L*E bytes
extern "C" __global__ void learn_errors(const float *foreseen, const float *logits, float *errors,
                                        float part, long long tokens, long long all,
                                        long long experts, long long room) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= all) return;
    const long long first = i / experts * room * experts + i % experts;
    float lacking = 0.0f;
    for (long long token = 0; token < tokens; token++)
        lacking += logits[first + token * experts] - foreseen[first + token * experts];
    const float error = errors[i] + part * (lacking / static_cast<float>(tokens) - errors[i]);
    errors[i] = fabsf(error) <= 3.0e38f ? error : 0.0f;
}
