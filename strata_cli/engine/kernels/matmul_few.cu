// Products of quantized weights with few activation rows, for decode.
//   x [T,K] f32, N rows of K weights -> out [T,N] f32;  D[n, t] = sum over k of W[n, k] * x[t, k]
//   Reads N * K / WEIGHTS * BYTES bytes of weights once per eight rows of x: over the memory's
//   bandwidth that is the limit.
//
// Order of the sums, which matmul_many.cu repeats operation by operation: K is cut into slices;
// within a slice the products of weights.cuh, step after step, into float32 sums that start at
// zero; then total = 0 + slice 0 + slice 1 + ... . Activations are rounded to f16.
//
// Few blocks per multiprocessor. One warp copies stage after stage into rings of slots (spans.cuh),
// the first ones early; teams of the other warps take tiles of up to ROWS weight rows in turns, a
// slice to a warp. The warps of a team wait for each other only once in many tiles, when they add
// up what all of them left. x is in shared memory once. One launch may make several matrices that
// share x, of up to three kinds. What bounds them is the instructions that decode, not memory.
#include "few_block.cuh"
#include "inject.cuh"
#include "normed_streams.cuh"
#include "overlap.cuh"
#include "route.cuh"

constexpr int MOST_REGISTERS = 64;   // two blocks of 16 warps then find room on a multiprocessor
constexpr int MORE_REGISTERS = 80;   // one block of 21 warps: six of them share a quarter of these
constexpr int FEWER_REGISTERS = 72;  // of one of 25 warps, or where the next block is to find room

// The pairs of a block, and where the matrices of their expert begin.
struct Found {
    long long blobs[2];
    int first, count;
    int source[8];  // the row of x of each pair

    __device__ const unsigned char *matrix(int i, long long offset_bytes) const {
        return reinterpret_cast<const unsigned char *>(blobs[i]) + offset_bytes;
    }
};

// Finds the pairs of these experts from the blockIdx.x-th on, by all threads; whether the block has
// any to make.
__device__ inline bool find_pairs(Found &found, const int *row_of, const int *expert_start,
                                  int experts, int columns, const long long *first_blobs,
                                  const long long *second_blobs) {
    constexpr int AT_ONCE = 2;  // experts of a thread; every load is on its way before one is used
    for (int e = 16 * threadIdx.x; e < experts; e += 16 * blockDim.x) {  // last read a token ago
        fetch_ahead(first_blobs + e);
        fetch_ahead(second_blobs + e);
    }
    wait_for_launches_ahead();
    const int before = expert_start[0], all_pairs = expert_start[experts];
    const int thread = threadIdx.x, first_pair = blockIdx.x, pairs = gridDim.x;
    const int own = min(first_pair + min(thread, columns - 1), pairs - 1);
    int source = row_of[own];  // the right one where these are the first experts
    const int pair = before + first_pair;
    for (int base = thread; base < experts; base += AT_ONCE * blockDim.x) {
        int start[AT_ONCE], end[AT_ONCE];
        long long first[AT_ONCE], second[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int e = min(base + i * static_cast<int>(blockDim.x), experts - 1);
            start[i] = expert_start[e], end[i] = expert_start[e + 1];
            first[i] = first_blobs[e], second[i] = second_blobs[e];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (start[i] > pair || pair >= end[i]) continue;
            found.blobs[0] = first[i], found.blobs[1] = second[i];
            found.first = pair;
            found.count = (pair - start[i]) % columns ? 0 : min(columns, end[i] - pair);
        }
    }
    if (thread < columns && pair + thread < all_pairs) {
        if (before || own != first_pair + thread) source = row_of[pair + thread];
        found.source[thread] = source;
    }
    if (pair >= all_pairs) return false;
    __syncthreads();
    return found.count > 0;
}

// few, of the tokens of the block's pass, which is the blockIdx.x-th.
template <class Gate, class Results = Written, class Work>
__device__ inline void few_of_pass(const Work &work, long long columns, long long tokens,
                                   const float *x, const Gate &gate, uint4 *shared,
                                   const Results &results = Results()) {
    const int first = static_cast<int>(columns) * blockIdx.x;
    const int count = min(static_cast<int>(columns), static_cast<int>(tokens) - first);
    few(work, {nullptr, first, count}, x, gate, shared, results);
}

// matmul_few: grid (passes of `columns` tokens, blocks): passes over the same rows run side by
//   side, so all but one find them in the L2 cache
//   streams [S,rows] f32 in place, inject: see StreamsWritten; then out is not written
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(WRITTEN_STREAMS ? MORE_REGISTERS : MOST_REGISTERS)
    matmul_few(const float *x, const unsigned char *data, float *out,
#if WRITTEN_STREAMS
               float *streams, const float *inject,
#endif
               long long, long long tokens, long long rows, long long cols,
#if WRITTEN_STREAMS
               long long inject_parts, long long divisor,
#endif
               long long columns, long long teams, long long team_warps, long long slots,
               long long slot_chunks, long long parts, long long sums, long long slice,
               long long slices, long long part_slices, long long tile_rows, long long span_shift,
               long long chunks) {
    extern __shared__ uint4 shared[];
    const auto work = work_of_one<ROWS, Kind<TYPE, LANE, ALIGN>>(
        data, out, rows, cols, plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks),
        layout_from(teams, team_warps, slots, slot_chunks, parts, sums), gridDim.y);
#if WRITTEN_STREAMS
    const StreamsWritten results = {streams, {inject, inject_parts, divisor, WRITTEN_STREAMS, 1}};
#else
    const Written results;
#endif
    few_of_pass(work, columns, tokens, x, Plain(), shared, results);
}

// matmul_few_inject: matmul_few, and beside it the inject of the same x, by more blocks
//   inject [streams,K] f32 -> parts [slices,T,streams], as make_inject; grid (passes, blocks +
//   those of the inject), whose first INJECT_WARPS warps make a slice each
template <int TYPE, int LANE, int ROWS, int ALIGN, int INJECT_LANE>
__global__ void __maxnreg__(MOST_REGISTERS)
    matmul_few_inject(const float *x, const unsigned char *data, float *out, const float *inject,
                      float *parts, long long, long long tokens, long long rows, long long cols,
                      long long streams, long long inject_slice, long long blocks,
                      long long columns, long long teams, long long team_warps, long long slots,
                      long long slot_chunks, long long stages, long long sums, long long slice,
                      long long slices, long long part_slices, long long tile_rows,
                      long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    const int others = static_cast<int>(blockIdx.y) - static_cast<int>(blocks);
    if (others >= 0) {
        const ThinRows all = {inject, static_cast<int>(streams), static_cast<int>(cols),
                              static_cast<int>(inject_slice)};
        make_inject<INJECT_LANE>(all, x, parts, static_cast<int>(tokens),
                                 others * static_cast<int>(gridDim.x) + blockIdx.x);
        return;
    }
    const auto work = work_of_one<ROWS, Kind<TYPE, LANE, ALIGN>>(
        data, out, rows, cols, plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks),
        layout_from(teams, team_warps, slots, slot_chunks, stages, sums), static_cast<int>(blocks));
    few_of_pass(work, columns, tokens, x, Plain(), shared);
}

// read_few: matmul_few_inject of the normed streams of one token, which the blocks norm themselves
//   x [S,D] f32, norm [S,D] f32 -> normed [S,D] f32 too; blocks of the inject keep them in shared
//   memory: 4 * S*D bytes
template <int TYPE, int LANE, int ROWS, int ALIGN, int INJECT_LANE>
__global__ void __maxnreg__(FEWER_REGISTERS)
    read_few(const float *x, const float *norm, float eps, float *normed, const unsigned char *data,
             float *out, const float *inject, float *parts, long long size, long long rows,
             long long cols, long long streams, long long inject_slice, long long blocks,
             long long columns, long long teams, long long team_warps, long long slots,
             long long slot_chunks, long long stages, long long sums, long long slice,
             long long slices, long long part_slices, long long tile_rows, long long span_shift,
             long long chunks) {
    extern __shared__ uint4 shared[];
    const NormedStreams gate = {norm, normed, eps, static_cast<int>(size),
                                static_cast<int>(blocks)};
    gate.fetch_weight(static_cast<int>(cols));
    const int others = static_cast<int>(blockIdx.y) - static_cast<int>(blocks);
    if (others >= 0) {
        const ThinRows all = {inject, static_cast<int>(streams), static_cast<int>(cols),
                              static_cast<int>(inject_slice)};
        float *const row = reinterpret_cast<float *>(shared);
        make_inject<INJECT_LANE>(all, row, parts, 1, others, [&] {
            gate.make(x, static_cast<int>(cols), blockDim.x / 32,
                      [&](int, int k, float4 v) { store4(row + k, v); });
            __syncthreads();
        });
        return;
    }
    const auto work = work_of_one<ROWS, Kind<TYPE, LANE, ALIGN>>(
        data, out, rows, cols, plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks),
        layout_from(teams, team_warps, slots, slot_chunks, stages, sums), static_cast<int>(blocks));
    few(work, {nullptr, 0, 1}, x, gate, shared);
}

// gated_few: as matmul_few, of silu(x / divisor), times up where that is not x itself
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MOST_REGISTERS)
    gated_few(const float *x, const float *up, const unsigned char *data, float *out, long long,
              long long tokens, long long rows, long long cols, long long divisor,
              long long columns, long long teams, long long team_warps, long long slots,
              long long slot_chunks, long long parts, long long sums, long long slice,
              long long slices, long long part_slices, long long tile_rows, long long span_shift,
              long long chunks) {
    extern __shared__ uint4 shared[];
    const auto work = work_of_one<ROWS, Kind<TYPE, LANE, ALIGN>>(
        data, out, rows, cols, plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks),
        layout_from(teams, team_warps, slots, slot_chunks, parts, sums), gridDim.y);
    const Gated gate = {up == x ? nullptr : up, static_cast<float>(divisor)};
    few_of_pass(work, columns, tokens, x, gate, shared);
}

// normed_few: as matmul_few, of gated_norm's output, which is made as activations are loaded
//   x, z [T,cols] f32, norm [dim] f32
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(WRITTEN_STREAMS ? FEWER_REGISTERS : MOST_REGISTERS)
    normed_few(const float *x, const float *z, const float *norm, float eps,
               const unsigned char *data, float *out,
#if WRITTEN_STREAMS
               float *streams, const float *inject,
#endif
               long long, long long tokens, long long rows, long long cols, long long dim,
#if WRITTEN_STREAMS
               long long inject_parts, long long divisor,
#endif
               long long columns, long long teams, long long team_warps, long long slots,
               long long slot_chunks, long long parts, long long sums, long long slice,
               long long slices, long long part_slices, long long tile_rows, long long span_shift,
               long long chunks) {
    extern __shared__ uint4 shared[];
    const auto work = work_of_one<ROWS, Kind<TYPE, LANE, ALIGN>>(
        data, out, rows, cols, plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks),
        layout_from(teams, team_warps, slots, slot_chunks, parts, sums), gridDim.y);
    const Normed gate = {z, norm, static_cast<int>(dim), eps};
#if WRITTEN_STREAMS
    const StreamsWritten results = {streams, {inject, inject_parts, divisor, WRITTEN_STREAMS, 1}};
#else
    const Written results;
#endif
    few_of_pass(work, columns, tokens, x, gate, shared, results);
}

#if MIXED_STREAMS
// gated_few_mix: the mix of the streams by gates that gated_few makes of silu(x / streams)
//   normed [T,rows] f32, rows of one stream after the other -> out [T,rows / MIXED_STREAMS]
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MORE_REGISTERS)
    gated_few_mix(const float *x, const unsigned char *data, const float *normed, float *out,
                  long long, long long tokens, long long rows, long long cols, long long columns,
                  long long teams, long long team_warps, long long slots, long long slot_chunks,
                  long long parts, long long sums, long long slice, long long slices,
                  long long part_slices, long long tile_rows, long long span_shift,
                  long long chunks) {
    extern __shared__ uint4 shared[];
    const auto work = work_of_one<ROWS, Kind<TYPE, LANE, ALIGN>>(
        data, out, rows, cols, plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks),
        layout_from(teams, team_warps, slots, slot_chunks, parts, sums), gridDim.y);
    const Gated gate = {nullptr, static_cast<float>(MIXED_STREAMS)};
    few_of_pass(work, columns, tokens, x, gate, shared, Mixed{normed});
}
#endif

// gated_few_route: gated_few, and beside it route_few, which neither waits for the other
//   grid (passes, blocks + 1): of the last blocks, the first pass's routes
template <int TYPE, int LANE, int ROWS, int ALIGN, int LOCAL>
__global__ void __maxnreg__(MOST_REGISTERS)
    gated_few_route(const float *x, const float *up, const unsigned char *data, float *out,
                    const float *logits, int *ids, float *weights, int *expert_start, int *row_of,
                    int *pair_of, long long, long long tokens, long long rows, long long cols,
                    long long num_experts, long long top_k, long long columns, long long teams,
                    long long team_warps, long long slots, long long slot_chunks, long long parts,
                    long long sums, long long slice, long long slices, long long part_slices,
                    long long tile_rows, long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    if (blockIdx.y + 1 == gridDim.y) {
        wait_for_launches_ahead();
        let_next_start();
        if (blockIdx.x == 0)
            route_in_order<LOCAL>(logits, ids, weights, expert_start, row_of, pair_of,
                                  static_cast<int>(tokens), static_cast<int>(num_experts),
                                  static_cast<int>(top_k), reinterpret_cast<int *>(shared));
        return;
    }
    const auto work = work_of_one<ROWS, Kind<TYPE, LANE, ALIGN>>(
        data, out, rows, cols, plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks),
        layout_from(teams, team_warps, slots, slot_chunks, parts, sums), gridDim.y - 1);
    few_of_pass(work, columns, tokens, x, Gated{up, 1.0f}, shared);
}

// matmul_several: the first MATRICES of six matrices, of up to three kinds; grid as matmul_few
//   taps [rows0,CONV_TAPS] f32, history [CONV_TAPS - 1,rows0] f32: see Convolved
template <int MATRICES, int ROWS, class... Kinds>
__global__ void __maxnreg__(CONV_TAPS ? MORE_REGISTERS : MOST_REGISTERS)
    matmul_several(const float *x, const unsigned char *data0, float *out0,
                   const unsigned char *data1, float *out1, const unsigned char *data2, float *out2,
                   const unsigned char *data3, float *out3, const unsigned char *data4, float *out4,
                   const unsigned char *data5, float *out5,
#if CONV_TAPS
                   const float *taps, float *history,
#endif
                   long long tokens, long long cols, long long rows0, long long kind0,
                   long long rows1, long long kind1, long long rows2, long long kind2,
                   long long rows3, long long kind3, long long rows4, long long kind4,
                   long long rows5, long long kind5, long long columns, long long teams,
                   long long team_warps, long long slots, long long slot_chunks, long long parts,
                   long long sums, long long slice0, long long slices0, long long part_slices0,
                   long long tile_rows0, long long span_shift0, long long chunks0, long long slice1,
                   long long slices1, long long part_slices1, long long tile_rows1,
                   long long span_shift1, long long chunks1, long long slice2, long long slices2,
                   long long part_slices2, long long tile_rows2, long long span_shift2,
                   long long chunks2) {
    extern __shared__ uint4 shared[];
    Work<ROWS, MATRICES, Kinds...> work;
    const auto set = [&](int i, const unsigned char *data, float *out, long long rows,
                         long long kind) {
        if (i < MATRICES)
            work.matrices[i] = {data, out, static_cast<int>(rows), static_cast<int>(kind), 0};
    };
    set(0, data0, out0, rows0, kind0);
    set(1, data1, out1, rows1, kind1);
    set(2, data2, out2, rows2, kind2);
    set(3, data3, out3, rows3, kind3);
    set(4, data4, out4, rows4, kind4);
    set(5, data5, out5, rows5, kind5);
    work.plans[0] = plan_from(slice0, slices0, part_slices0, tile_rows0, span_shift0, chunks0);
    if constexpr (sizeof...(Kinds) > 1)
        work.plans[1] = plan_from(slice1, slices1, part_slices1, tile_rows1, span_shift1, chunks1);
    if constexpr (sizeof...(Kinds) > 2)
        work.plans[2] = plan_from(slice2, slices2, part_slices2, tile_rows2, span_shift2, chunks2);
    work.layout = layout_from(teams, team_warps, slots, slot_chunks, parts, sums);
    work.cols = static_cast<int>(cols);
    work.number_tiles();
#if CONV_TAPS
    const Convolved results = {taps, history, static_cast<int>(rows0)};
    results.fetch_ahead_all();
#else
    const Written results;
#endif
    few_of_pass(work, columns, tokens, x, Plain(), shared, results);
}

// grouped_few: pairs sorted by expert; grid (pairs of these experts, blocks). Blocks x make the
// `columns` pairs from the x-th on of an expert if that is its first pair or a multiple of
// `columns` after it, else nothing.
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MOST_REGISTERS)
    grouped_few(const float *x, const long long *blobs, const int *row_of, const int *expert_start,
                float *out, long long, long long rows, long long cols, long long offset_bytes,
                long long experts, long long columns, long long teams, long long team_warps,
                long long slots, long long slot_chunks, long long parts, long long sums,
                long long slice, long long slices, long long part_slices, long long tile_rows,
                long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    __shared__ Found found;
    if (threadIdx.x + 32 < blockDim.x)
        Shared<ROWS, Kind<TYPE, LANE, ALIGN>>::Book::load(reinterpret_cast<unsigned *>(shared),
                                                          blockDim.x - 32);
    if (!find_pairs(found, row_of, expert_start, static_cast<int>(experts),
                    static_cast<int>(columns), blobs, blobs))
        return;
    const auto work = work_of_one<ROWS, Kind<TYPE, LANE, ALIGN>>(
        found.matrix(0, offset_bytes), out, rows, cols,
        plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks),
        layout_from(teams, team_warps, slots, slot_chunks, parts, sums), gridDim.y);
    few(work, {found.source, found.first, found.count}, x, Plain(), shared);
}

// gated_grouped_few: as grouped_few, of silu(x) * up
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MOST_REGISTERS)
    gated_grouped_few(const float *x, const float *up, const long long *blobs, const int *row_of,
                      const int *expert_start, float *out, long long, long long rows,
                      long long cols, long long offset_bytes, long long experts, long long columns,
                      long long teams, long long team_warps, long long slots, long long slot_chunks,
                      long long parts, long long sums, long long slice, long long slices,
                      long long part_slices, long long tile_rows, long long span_shift,
                      long long chunks) {
    extern __shared__ uint4 shared[];
    __shared__ Found found;
    if (threadIdx.x + 32 < blockDim.x)
        Shared<ROWS, Kind<TYPE, LANE, ALIGN>>::Book::load(reinterpret_cast<unsigned *>(shared),
                                                          blockDim.x - 32);
    if (!find_pairs(found, row_of, expert_start, static_cast<int>(experts),
                    static_cast<int>(columns), blobs, blobs))
        return;
    const auto work = work_of_one<ROWS, Kind<TYPE, LANE, ALIGN>>(
        found.matrix(0, offset_bytes), out, rows, cols,
        plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks),
        layout_from(teams, team_warps, slots, slot_chunks, parts, sums), gridDim.y);
    few(work, {found.source, found.first, found.count}, x, Gated{up, 1.0f}, shared);
}

// grouped_pair: as grouped_few with two matrices of one shape and type per expert, which may lie in
// different blobs
template <int TYPE, int LANE, int ROWS, int ALIGN>
__global__ void __maxnreg__(MOST_REGISTERS)
    grouped_pair(const float *x, const long long *blobs0, const long long *blobs1,
                 const int *row_of, const int *expert_start, float *out0, float *out1, long long,
                 long long rows, long long cols, long long offset0, long long offset1,
                 long long experts, long long columns, long long teams, long long team_warps,
                 long long slots, long long slot_chunks, long long parts, long long sums,
                 long long slice, long long slices, long long part_slices, long long tile_rows,
                 long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    __shared__ Found found;
    if (threadIdx.x + 32 < blockDim.x)
        Shared<ROWS, Kind<TYPE, LANE, ALIGN>>::Book::load(reinterpret_cast<unsigned *>(shared),
                                                          blockDim.x - 32);
    if (!find_pairs(found, row_of, expert_start, static_cast<int>(experts),
                    static_cast<int>(columns), blobs0, blobs1))
        return;
    Work<ROWS, 2, Kind<TYPE, LANE, ALIGN>> work;
    work.matrices[0] = {found.matrix(0, offset0), out0, static_cast<int>(rows), 0, 0};
    work.matrices[1] = {found.matrix(1, offset1), out1, static_cast<int>(rows), 0, 0};
    work.plans[0] = plan_from(slice, slices, part_slices, tile_rows, span_shift, chunks);
    work.layout = layout_from(teams, team_warps, slots, slot_chunks, parts, sums);
    work.cols = static_cast<int>(cols);
    work.number_tiles();
    few(work, {found.source, found.first, found.count}, x, Plain(), shared);
}
