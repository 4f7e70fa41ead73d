// Blobs on their way from host memory to slots of the device's, span after span.
//
// One thread keeps as many spans on their way as a ring in shared memory has stages; the copy
// engine of its multiprocessor brings them there and on to their slots. No registers hold them: a
// few such threads reach what the link gives, and leave other launches their place.
#pragma once
#include "bulk.cuh"

constexpr int LINE = 128;   // bytes that the link carries together
constexpr int SPAN = 4096;  // bytes that are copied at once
constexpr int MOST_SLOTS = 64;

struct Blobs {
    long long source[MOST_SLOTS];
    long long place[MOST_SLOTS];
    int first[MOST_SLOTS];    // span that is not there yet
    int end[MOST_SLOTS];      // how many spans are to come of this one and of those before
    int carried[MOST_SLOTS];  // spans, by this block
    int count;

    __device__ int total() const { return count ? end[count - 1] : 0; }
};

__device__ inline int spans_of(long long bytes) {  // of a blob, from its first line on
    return static_cast<int>((bytes + LINE + SPAN - 1) / SPAN);
}

// Where a blob goes: as far behind a line's begin as it comes from.
__device__ inline long long place_of(const unsigned char *slots, long long stride, int slot,
                                     long long source) {
    return reinterpret_cast<long long>(slots) + slot * stride + source % LINE;
}

// The part of a blob that is in one span: from the last multiple of 16 before the blob to the first
// behind it, no more than the memory's own granules, so that nothing outside its pages is touched.
struct Piece {
    long long source, place;
    int bytes;
};

__device__ inline Piece piece_of(long long source, long long place, long long bytes, int span) {
    const long long begin = source - source % LINE + static_cast<long long>(span) * SPAN;
    const long long from = max(begin, source / 16 * 16);
    const long long to = min(begin + SPAN, (source + bytes + 15) / 16 * 16);
    return {from, place + (from - source), static_cast<int>(max(to - from, 0ll))};
}

// Finds spans by their number of all that are to come, which never falls.
struct Finder {
    const Blobs &blobs;
    int slot;

    __device__ Piece find(int work, long long bytes) {
        while (work >= blobs.end[slot]) slot++;
        const int before = slot ? blobs.end[slot - 1] : 0;
        return piece_of(blobs.source[slot], blobs.place[slot], bytes,
                        blobs.first[slot] + work - before);
    }
};

#if BULK
constexpr int MOST_STAGES = 16, CLAIM = 2;  // spans: on their way; that a thread claims at a time

// What a block keeps of its ring beside the stages.
struct Held {
    unsigned long long gates[MOST_STAGES];
    Piece pieces[MOST_STAGES];
};

// One thread's ring of stages, SPAN bytes of shared memory each, at least two.
struct Ring {
    unsigned char *stages;
    unsigned long long *gates;
    Piece *pieces;
    int count;
    unsigned parities;  // of the gates

    __device__ void open() {
        parities = 0;
        for (int stage = 0; stage < count; stage++) open_gate(gates + stage, 1);
        publish_gates();
    }

    __device__ int after(int stage) const { return stage + 1 < count ? stage + 1 : 0; }

    __device__ void load(int stage, const Piece &piece) {
        pieces[stage] = piece;
        arrive_expecting(gates + stage, piece.bytes);
        if (piece.bytes)
            copy_bulk(stages + stage * SPAN, reinterpret_cast<const void *>(piece.source),
                      piece.bytes, gates + stage);
    }

    __device__ void store(int stage) {
        pass_gate(gates + stage, parities >> stage & 1);
        parities ^= 1u << stage;
        fence_async_copies();
        const Piece piece = pieces[stage];
        if (piece.bytes)
            store_bulk(reinterpret_cast<void *>(piece.place), stages + stage * SPAN, piece.bytes);
        end_stores();
    }
};

// Spans that a thread claims of those that others claim, too; the next ones while it has some.
struct Claims {
    unsigned *claimed;
    unsigned given;  // to threads without a claim, before all others
    unsigned now, next;
    int left;

    __device__ explicit Claims(unsigned *claimed) : claimed(claimed), given(0), left(CLAIM) {
        now = claim();
        next = claim();
    }

    // By thread `index` of so many that begin with what they are given.
    __device__ Claims(unsigned *claimed, unsigned index, unsigned threads)
        : claimed(claimed), given(threads * CLAIM), now(index * CLAIM), left(CLAIM) {
        next = claim();
    }

    __device__ unsigned claim() { return atomicAdd(claimed, static_cast<unsigned>(CLAIM)); }

    __device__ unsigned take() {
        if (!left) {
            now = given + next;  // not before: it may still be on its way
            next = claim();
            left = CLAIM;
        }
        left--;
        return now++;
    }
};

// Copies the spans that a thread claims until there are no more, or others end it by adding to what
// is claimed. Returns when they are in their slots; they are added to what is carried.
__device__ inline void carry(Ring &ring, Claims &claims, Blobs &blobs, long long bytes) {
    const unsigned total = blobs.total();
    Finder finder = {blobs, 0};
    unsigned work = claims.take();
    int loaded = 0, stored = 0, full = 0;  // the next stages of either kind; how many are loaded
    auto load = [&] {
        ring.load(loaded, finder.find(static_cast<int>(work), bytes));
        blobs.carried[finder.slot]++;
        loaded = ring.after(loaded);
        full++;
        work = claims.take();
    };
    while (full < ring.count && work < total) load();
    for (bool is_first = true; full; is_first = false) {
        ring.store(stored);
        stored = ring.after(stored);
        full--;
        if (is_first || work >= total) continue;
        await_reads_but_last();  // so that the stage before is free
        load();
    }
    await_stores();
    __threadfence();
}
#endif
