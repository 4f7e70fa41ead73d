// Products of some activation rows, and of experts with some each: passes of about a hundred tokens
// (sm_90).
//   x [R,K] f16; matrices are N rows of K quantized weights; pairs are sorted by expert
//   matmul_some, grouped_some:   x, a row for each pair -> out [P,N] f32
//   matmul_swiglu, grouped_swiglu: x, or its rows row_of -> out [P,N] f16 = silu(gate) * up of two
//   matmul_mix: x -> out [P,N] = stream_mix (hyper.cu) by the gates that 4 * N rows make
//   grid (blocks): each makes as many tiles as the others, one after the other, whosever they are.
//   A matrix's weights are read and decoded once for up to 8 * GROUPS of its pairs. Decoding is
//   what bounds this, at about 20 weights of a multiprocessor per clock.
#include "some_block.cuh"

// Numbers that every function takes behind its own.
struct Shape {
    long long rows, cols, teams, team_warps, slots, slot_chunks, depth, slice, span_shift, chunks;

    template <class Work>
    __device__ void set(Work &work) const {
        work.rows = static_cast<int>(rows), work.cols = static_cast<int>(cols);
        work.tiles = (work.rows + Work::MATRIX_ROWS - 1) / Work::MATRIX_ROWS;
        work.plan = plan_from(slice, team_warps, team_warps, Work::MATRIX_ROWS, span_shift, chunks);
        work.cut = {Work::R::bytes(work.cols),
                    Work::R::bytes(work.plan.slice),
                    work.plan.slices,
                    1,
                    work.plan.span_shift,
                    work.plan.chunks,
                    0};
        work.ring = {static_cast<int>(teams), static_cast<int>(team_warps), static_cast<int>(slots),
                     static_cast<int>(slot_chunks), static_cast<int>(depth)};
    }
};

template <int TYPE, int LANE, int ALIGN, int GROUPS>
__global__ void __launch_bounds__(MOST_THREADS, 1)
    matmul_some(const unsigned short *x, const unsigned char *data, float *out, long long,
                long long tokens, long long rows, long long cols, long long teams,
                long long team_warps, long long slots, long long slot_chunks, long long depth,
                long long slice, long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    Some<TYPE, LANE, ALIGN, GROUPS, 1, OfAll> work;
    work.x = x, work.out = out;
    work.source = {{data}, static_cast<int>(tokens)};
    Shape({rows, cols, teams, team_warps, slots, slot_chunks, depth, slice, span_shift, chunks})
        .set(work);
    work.run(shared);
}

template <int TYPE, int LANE, int ALIGN, int GROUPS>
__global__ void __launch_bounds__(MOST_THREADS, 1)
    matmul_swiglu(const unsigned short *x, const unsigned char *gate, const unsigned char *up,
                  unsigned short *out, long long, long long tokens, long long rows, long long cols,
                  long long teams, long long team_warps, long long slots, long long slot_chunks,
                  long long depth, long long slice, long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    Some<TYPE, LANE, ALIGN, GROUPS, 2, OfAll> work;
    work.x = x, work.out = out;
    work.source = {{gate, up}, static_cast<int>(tokens)};
    Shape({rows, cols, teams, team_warps, slots, slot_chunks, depth, slice, span_shift, chunks})
        .set(work);
    work.run(shared);
}

template <int TYPE, int LANE, int ALIGN, int GROUPS>
__global__ void __launch_bounds__(MOST_THREADS, 1)
    grouped_some(const unsigned short *x, const long long *blobs, const int *expert_start,
                 float *out, long long, long long rows, long long cols, long long offset,
                 long long experts, long long teams, long long team_warps, long long slots,
                 long long slot_chunks, long long depth, long long slice, long long span_shift,
                 long long chunks) {
    extern __shared__ uint4 shared[];
    Some<TYPE, LANE, ALIGN, GROUPS, 1, OfExperts> work;
    work.x = x, work.out = out;
    work.source = {
        {blobs}, {offset}, expert_start, nullptr, {nullptr, nullptr, static_cast<int>(experts)}};
    Shape({rows, cols, teams, team_warps, slots, slot_chunks, depth, slice, span_shift, chunks})
        .set(work);
    work.run(shared);
}

template <int TYPE, int LANE, int ALIGN, int GROUPS>
__global__ void __launch_bounds__(MOST_THREADS, 1)
    grouped_swiglu(const unsigned short *x, const long long *gates, const long long *ups,
                   const int *row_of, const int *expert_start, unsigned short *out, long long,
                   long long rows, long long cols, long long gate_offset, long long up_offset,
                   long long experts, long long teams, long long team_warps, long long slots,
                   long long slot_chunks, long long depth, long long slice, long long span_shift,
                   long long chunks) {
    extern __shared__ uint4 shared[];
    Some<TYPE, LANE, ALIGN, GROUPS, 2, OfExperts> work;
    work.x = x, work.out = out;
    work.source = {{gates, ups},
                   {gate_offset, up_offset},
                   expert_start,
                   row_of,
                   {nullptr, nullptr, static_cast<int>(experts)}};
    Shape({rows, cols, teams, team_warps, slots, slot_chunks, depth, slice, span_shift, chunks})
        .set(work);
    work.run(shared);
}

template <int TYPE, int LANE, int ALIGN, int GROUPS>
__global__ void __launch_bounds__(MOST_THREADS, 1)
    matmul_mix(const unsigned short *x, const unsigned char *data, const float *normed, float *out,
               unsigned short *rounded, long long, long long tokens, long long rows, long long cols,
               long long teams, long long team_warps, long long slots, long long slot_chunks,
               long long depth, long long slice, long long span_shift, long long chunks) {
    extern __shared__ uint4 shared[];
    Some<TYPE, LANE, ALIGN, GROUPS, 4, OfAll> work;
    work.x = x, work.out = out, work.normed = normed, work.rounded = rounded;
    const long long apart = rows * Rows<TYPE, LANE>::bytes(static_cast<int>(cols));
    work.source = {{data, data + apart, data + 2 * apart, data + 3 * apart},
                   static_cast<int>(tokens)};
    Shape({rows, cols, teams, team_warps, slots, slot_chunks, depth, slice, span_shift, chunks})
        .set(work);
    work.run(shared);
}
