// Experts of a step from host memory to the device's, over the link, before products read them.
//   addresses [E] of blobs of `bytes` bytes -> staged [E], the same or where in slots [S, stride]
//   Reads each wanted blob outside the cache once. The link is the limit: nine tenths of what the
//   copy engine reaches, where all lines of 128 bytes are read whole; products that read rows of
//   odd sizes over it reach half.
#include "carrying.cuh"
#include "overlap.cuh"
#include "route.cuh"

constexpr int THREADS = 512, MOST_WARPS = THREADS / 32;
constexpr int TOGETHER = SPAN / (32 * 16);  // loads of a thread that are under way

// What is brought ahead of a layer's routing, into slots of its own, in spans that warps claim:
// the blobs listed, in turn. Whoever fetches what routing wants ends that, and takes over.
constexpr int MOST_AHEAD = 16;
constexpr unsigned ENDED = 1u << 31;  // added to claimed
struct Ahead {
    unsigned claimed;  // spans, and claims that came too late
    unsigned final;    // claimed when it was ended, and 1
    int count;         // of blobs
    unsigned go;  // LIST once the layer before is routed, BRING once most of its blobs are here
    int experts[MOST_AHEAD];
    int done[MOST_AHEAD];  // spans that are in each slot
};
#if BULK
constexpr unsigned LIST = 1, BRING = 2;
#endif

// How far the blocks of a fetch are; all zero between fetches.
struct Turn {
    unsigned claimed;  // spans
    unsigned arrived;  // blocks that have copied what they claimed
};

// A warp copies one span of a blob, 16 bytes a lane at a time.
__device__ inline void copy_span(const Piece &piece) {
    const int lane = threadIdx.x & 31;
    const uint4 *in = reinterpret_cast<const uint4 *>(piece.source);
    uint4 *out = reinterpret_cast<uint4 *>(piece.place);
    uint4 parts[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
        if ((32 * i + lane) * 16 < piece.bytes) parts[i] = __ldcs(in + 32 * i + lane);
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
        if ((32 * i + lane) * 16 < piece.bytes) out[32 * i + lane] = parts[i];
}

// Whoever sees it sees all that was there before. Blocks may tell in any order: the most counts.
__device__ inline void tell(unsigned *flag, unsigned value) {
    __threadfence();
    atomicMax(flag, value);
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
    if (threadIdx.x < MOST_AHEAD) {
        own.experts[threadIdx.x] = __ldcg(ahead->experts + threadIdx.x);
        own.done[threadIdx.x] = 0;
    }
    if (threadIdx.x == MOST_AHEAD) own.count = claimed ? __ldcg(&ahead->count) : 0;
    __syncthreads();
    return claimed;
}

// Experts of a thread, from any one on, as many of the block's later: where they are, their pairs.
struct Looked {
    static constexpr int AT_ONCE = 2;
    long long address[AT_ONCE];
    int start[AT_ONCE], end[AT_ONCE];

    __device__ static long long expert(long long base, int i) {
        return base + i * static_cast<long long>(blockDim.x) + threadIdx.x;
    }
    __device__ void load(const long long *addresses, const int *expert_start, long long base,
                         long long experts) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const long long e = expert(base, i);
            address[i] = e < experts ? addresses[e] : 0;
            start[i] = expert_start[min(e, experts)];
            end[i] = expert_start[min(e + 1, experts)];
        }
    }
};

// Lists the blobs to fetch, in the order of their experts, by all threads of a block, which have
// loaded their first ones; the first block writes the table. What of them was brought ahead already
// stays where it is: so many spans must be done.
__device__ inline void list_blobs(Blobs &blobs, Looked &looked, const long long *addresses,
                                  const int *expert_start, long long first_cached,
                                  long long end_cached, const unsigned char *slots,
                                  long long *staged, Ahead &ahead, const unsigned char *ahead_slots,
                                  int claimed, int spans, long long experts, long long num_slots,
                                  long long stride) {
    constexpr int AT_ONCE = Looked::AT_ONCE;
    __shared__ int wanted_of_warp[AT_ONCE * MOST_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, warps = blockDim.x / 32;
    int before = 0;
    for (long long base = 0; base < experts; base += AT_ONCE * blockDim.x) {
        if (base) {
            __syncthreads();
            looked.load(addresses, expert_start, base, experts);
        }
        unsigned votes[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const long long address = looked.address[i];
            const bool is_cached = address >= first_cached && address < end_cached;
            votes[i] = __ballot_sync(0xffffffffu,
                                     address && !is_cached && looked.end[i] > looked.start[i]);
            if (lane == 0) wanted_of_warp[i * warps + warp] = __popc(votes[i]);
        }
        __syncthreads();
        int slot[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            slot[i] = before + __popc(votes[i] & ((1u << lane) - 1));
            for (int w = 0; w < warps; w++) {
                const int wanted = wanted_of_warp[i * warps + w];
                if (w < warp) slot[i] += wanted;
                before += wanted;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const long long e = Looked::expert(base, i), address = looked.address[i];
            long long place = address;
            if ((votes[i] >> lane & 1) && slot[i] < num_slots) {
                int first = 0;
                place = place_of(slots, stride, slot[i], address);
                for (int own = 0; own < ahead.count && own * spans < claimed; own++)
                    if (ahead.experts[own] == e) {
                        place = place_of(ahead_slots, stride, own, address);
                        ahead.done[own] = first = min(claimed - own * spans, spans);
                    }
                blobs.source[slot[i]] = address;
                blobs.place[slot[i]] = place;
                blobs.first[slot[i]] = first;
                blobs.carried[slot[i]] = 0;
            }
            if (blockIdx.x == 0 && e < experts) staged[e] = place;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const int count = min(before, static_cast<int>(num_slots));
        for (int slot = 0, end = 0; slot < count; slot++)
            blobs.end[slot] = end += spans - blobs.first[slot];
        blobs.count = count;
    }
    __syncthreads();
}

// ahead, and ahead_slots [num_ahead, stride]: what was brought ahead for this routing; next: what
// is to be for the next one, which is told how far this one is
//   shared stages * SPAN bytes where the copy engine copies: then one thread of a block does
extern "C" __global__ void __launch_bounds__(THREADS)
    fetch_blobs(const long long *addresses, const int *expert_start, long long first_cached,
                long long end_cached, unsigned char *slots, long long *staged, Ahead *ahead,
                const unsigned char *ahead_slots, Ahead *next, Turn *turn, long long num_ahead,
                long long has_next, long long bytes, long long num_stages, long long experts,
                long long num_slots, long long stride) {
    __shared__ Blobs blobs;
    __shared__ Ahead own;
    let_next_start();
    for (long long e = 16 * threadIdx.x; e < experts; e += 16 * blockDim.x)
        fetch_ahead(addresses + e);  // last read a token ago
    if (threadIdx.x == 0) own.count = 0;
#if BULK
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ Held held;
    Ring ring = {stages, held.gates, held.pieces, static_cast<int>(num_stages)};
    if (threadIdx.x == 0) ring.open();
    wait_for_launches_ahead();
    if (has_next && blockIdx.x == 0 && threadIdx.x == 32) tell(&next->go, LIST);
#else
    wait_for_launches_ahead();
#endif
    Looked looked;
    looked.load(addresses, expert_start, 0, experts);
    __syncthreads();
    const int spans = spans_of(bytes), found = num_ahead ? end_ahead(ahead, own) : 0;
    const int claimed = min(found, own.count * spans);
    list_blobs(blobs, looked, addresses, expert_start, first_cached, end_cached, slots, staged, own,
               ahead_slots, claimed, spans, experts, num_slots, stride);
#if BULK
    if (threadIdx.x == 0 && !blobs.total()) {
        if (has_next && blockIdx.x == 0) tell(&next->go, BRING);
    } else if (threadIdx.x == 0) {
        Claims claims(&turn->claimed, blockIdx.x, gridDim.x);
        carry(ring, claims, blobs, bytes);
        const unsigned before = atomicAdd(&turn->arrived, 1u);
        if (has_next && before == gridDim.x / 2) tell(&next->go, BRING);
        if (before == gridDim.x - 1) turn->claimed = turn->arrived = 0;  // nobody claims any more
    }
#else
    const int warps = gridDim.x * blockDim.x / 32, total = blobs.total();
    Finder finder = {blobs, 0};
    for (int work = (blockIdx.x * blockDim.x + threadIdx.x) / 32; work < total; work += warps)
        copy_span(finder.find(work, bytes));
#endif
    const int slot = threadIdx.x - 32;  // of the second warp, which does not copy meanwhile
    if (blockIdx.x == 0 && slot >= 0 && slot < own.count)
        while (atomicAdd(ahead->done + slot, 0) < own.done[slot]) {
        }
}

// keys [E]: what orders experts by how likely they are: by the largest logit of any token, with
// what routing was found to add to it. sources [E]: their addresses; 0: in the cache, or nowhere.
__device__ inline void rate_experts(int *keys, long long *sources, const float *logits,
                                    const float *errors, const long long *addresses,
                                    long long first_cached, long long end_cached, long long tokens,
                                    long long experts) {
#pragma unroll 4
    for (long long e = threadIdx.x; e < experts; e += blockDim.x) {
        const long long address = addresses[e];
        float largest = lowest();
        for (long long token = 0; token < tokens; token++)
            largest = fmaxf(largest, __ldcg(logits + token * experts + e));
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
        copy_span(piece_of(source, place_of(slots, stride, slot, source), bytes, span));
        __threadfence();
        __syncwarp();
        if ((threadIdx.x & 31) == 0) atomicAdd(ahead->done + slot, 1);
    }
}

#if BULK
// Where those that are brought ahead go, in the order in which they come; by one warp.
__device__ inline void place_ahead(Blobs &blobs, int count, const unsigned char *slots,
                                   long long stride, int spans) {
    const int slot = threadIdx.x;
    if (slot < count) {
        blobs.place[slot] = place_of(slots, stride, slot, blobs.source[slot]);
        blobs.first[slot] = blobs.carried[slot] = 0;
        blobs.end[slot] = (slot + 1) * spans;
    }
    if (slot == 0) blobs.count = count;
    __syncwarp();
}

__device__ inline unsigned long long now_ns() {
    unsigned long long v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}

// Until the layer before is so far, or this one was ended; false: nobody got on for too long. A
// device may run this before what it waits for.
__device__ inline bool await_turn(Ahead *ahead, unsigned wanted, long long patience_ns) {
    const unsigned long long since = now_ns();
    while (atomicAdd(&ahead->go, 0u) < wanted && !(atomicAdd(&ahead->claimed, 0u) & ENDED)) {
        __nanosleep(100);
        if (now_ns() - since > patience_ns) return false;
    }
    __threadfence();
    return true;
}

// Until all that was claimed for a layer is in its slots, wanted or not, by one warp. They are
// filled anew.
__device__ inline void await_slots(Ahead *ahead, int spans) {
    const int slot = threadIdx.x % MOST_AHEAD;
    const int claimed = static_cast<int>(__ldcg(&ahead->final)) - 1 - slot * spans;
    const int own = slot < __ldcg(&ahead->count) ? min(claimed, spans) : 0;
    while (atomicAdd(ahead->done + slot, 0) < own) {
    }
    __syncwarp();
}
#endif

// A quarter of a multiprocessor has 16,384 registers. Six warps of 80 a thread leave these to one
// more, and a product whose blocks find no room beside this one's takes nearly twice as long.
constexpr int BRING_REGISTERS = 32;

// bring_layers: what bring_ahead does, for all layers but the first, one after the other, beside
// the whole pass: a layer's begin when the one before has fetched what it fetches
//   foreseen [L,room,E], errors [L,E] f32, addresses [L,E], blob_bytes [L] -> slots [2, S, stride],
//   states [L]; block 32, shared 12 * E or stages * SPAN bytes, whichever is more
//   One thread of a block copies: four such blocks reach what the link gives, and take no place
//   that others need.
extern "C" __global__ void __maxnreg__(BRING_REGISTERS)
    bring_layers(const float *foreseen, const float *errors, const long long *addresses,
                 const long long *blob_bytes, long long first_cached, long long end_cached,
                 unsigned char *slots, Ahead *states, long long num_likely, long long patience_ns,
                 long long num_stages, long long layers, long long room, long long tokens,
                 long long experts, long long num_slots, long long stride) {
#if BULK
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ Blobs blobs;
    __shared__ Ahead own;
    __shared__ Held held;
    long long *sources = reinterpret_cast<long long *>(stages);  // between one layer's and the next
    int *keys = reinterpret_cast<int *>(sources + experts);
    Ring ring = {stages, held.gates, held.pieces, static_cast<int>(num_stages)};
    if (threadIdx.x == 0) ring.open();
    __syncwarp();
    for (long long layer = 1; layer < layers; layer++) {
        Ahead *ahead = states + layer;
        for (long long e = 16 * threadIdx.x; e < experts; e += 16 * 32) {  // used a token ago
            fetch_ahead(addresses + layer * experts + e);
            fetch_ahead(errors + layer * experts + e);
        }
        const bool goes_on = threadIdx.x || await_turn(ahead, LIST, patience_ns);
        if (!__shfl_sync(ALL_LANES, goes_on, 0)) return;
        const bool is_over = threadIdx.x == 0 && atomicAdd(&ahead->claimed, 0u) & ENDED;
        if (__shfl_sync(ALL_LANES, is_over, 0)) continue;
        rate_experts(keys, sources, foreseen + layer * room * experts, errors + layer * experts,
                     addresses + layer * experts, first_cached, end_cached, tokens, experts);
        list_ahead(own, blobs, keys, sources, experts, num_likely, num_slots);
        fence_async_copies();  // stages lie where that was
        if (threadIdx.x < own.count) ahead->experts[threadIdx.x] = own.experts[threadIdx.x];
        if (threadIdx.x == 0) ahead->count = own.count;
        __threadfence();
        __syncwarp();
        if (layer > 2) await_slots(states + layer - 2, spans_of(blob_bytes[layer - 2]));
        const long long bytes = blob_bytes[layer];
        place_ahead(blobs, own.count, slots + layer % 2 * num_slots * stride, stride,
                    spans_of(bytes));
        if (threadIdx.x == 0 && own.count && await_turn(ahead, BRING, patience_ns)) {
            Claims claims(&ahead->claimed);
            carry(ring, claims, blobs, bytes);
            for (int slot = 0; slot < own.count; slot++)
                if (blobs.carried[slot]) atomicAdd(ahead->done + slot, blobs.carried[slot]);
        }
        __syncwarp();
    }
#endif
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
