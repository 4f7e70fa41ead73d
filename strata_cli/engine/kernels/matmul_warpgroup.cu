// Products of quantized weights with many activation rows on sm_90a: bound by its tensor cores.
//   x [T,K] f16 (as round_rows leaves it), N rows of K weights -> out [T,N] f32
//   2 * T*N*K floating-point operations over the tensor cores' rate; a tile reads its weights once
//   and decodes them once. Full tiles fetch T*N*K / 64 bytes of x from the L2 cache, which is what
//   bounds them.
//
// Each sum is made of the same operations in the same order as in matmul_few.cu: slices from zero,
// totals in ascending order.
#include "warpgroup_block.cuh"

// matmul_warpgroup: any grid, whose blocks go round robin through the tiles of up to NUM tokens
template <int TYPE, int LANE, int ALIGN, int X_SLOTS, int RAW_SLOTS, int NUM>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_warpgroup(const float *, const unsigned short *activations, const unsigned char *data,
                     float *out, long long, long long tokens, long long rows, long long cols,
                     long long slice) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Warpgroups<TYPE, LANE, ALIGN, X_SLOTS, RAW_SLOTS> block(
        {activations, out, static_cast<int>(rows), static_cast<int>(cols), static_cast<int>(slice)},
        shared);
    const int num_tokens = tokens, token_tiles = (num_tokens + NUM - 1) / NUM;
    const int row_tiles = (static_cast<int>(rows) + ROWS - 1) / ROWS;
    block.open_gates();
    const auto book = load_any_book<TYPE>(block.rest);
    start_early();
    __syncthreads();
    const DenseTiles all = {data, num_tokens, tokens_each(num_tokens, token_tiles), token_tiles,
                            share_of(token_tiles * row_tiles)};
    block.template run<NUM>(all, book);
}

// How a kind of matrices of warpgroup_several is compiled for.
template <int TYPE_, int LANE, int ALIGN, int X_SLOTS, int RAW_SLOTS>
struct Side {
    static constexpr int TYPE = TYPE_;
    using Block = Warpgroups<TYPE, LANE, ALIGN, X_SLOTS, RAW_SLOTS>;
};

// One of its matrices.
struct Member {
    const unsigned char *data;
    float *out;
    int rows, kind;
};

// A tile of a matrix whose kind is the first of these, or one that follows.
template <int NUM, class Own, class... Others>
__device__ inline void make_member(const Member &member, int kind, const unsigned short *x,
                                   int tokens, int cols, const int (&slices)[3], int index,
                                   unsigned char *shared) {
    if constexpr (sizeof...(Others) > 0) {
        if (member.kind > kind) {
            make_member<NUM, Others...>(member, kind + 1, x, tokens, cols, slices, index, shared);
            return;
        }
    }
    const typename Own::Block block({x, member.out, member.rows, cols, slices[kind]}, shared);
    block.open_gates();
    const auto book = load_any_book<Own::TYPE>(block.rest);
    start_early();
    __syncthreads();
    const int token_tiles = (tokens + NUM - 1) / NUM;
    const OneTile own = {member.data, tokens, tokens_each(tokens, token_tiles), token_tiles, index};
    block.template run<NUM>(own, book);
}

// warpgroup_several: up to six matrices of the same x, of up to three kinds, a block for each tile;
// those that are not there have no rows
template <int NUM, class... Sides>
__global__ void __launch_bounds__(THREADS, 1)
    warpgroup_several(const unsigned short *x, const unsigned char *data0, float *out0,
                      const unsigned char *data1, float *out1, const unsigned char *data2,
                      float *out2, const unsigned char *data3, float *out3,
                      const unsigned char *data4, float *out4, const unsigned char *data5,
                      float *out5, long long tokens, long long cols, long long rows0,
                      long long kind0, long long rows1, long long kind1, long long rows2,
                      long long kind2, long long rows3, long long kind3, long long rows4,
                      long long kind4, long long rows5, long long kind5, long long slice0,
                      long long slice1, long long slice2) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int token_tiles = (static_cast<int>(tokens) + NUM - 1) / NUM;
    int index = blockIdx.x;
    Member own = {nullptr, nullptr, 0, 0};
    const auto look = [&](const unsigned char *data, float *out, long long rows, long long kind) {
        const int tiles = (static_cast<int>(rows) + ROWS - 1) / ROWS * token_tiles;
        if (own.data != nullptr) return;
        if (index < tiles)
            own = {data, out, static_cast<int>(rows), static_cast<int>(kind)};
        else
            index -= tiles;
    };
    look(data0, out0, rows0, kind0);
    look(data1, out1, rows1, kind1);
    look(data2, out2, rows2, kind2);
    look(data3, out3, rows3, kind3);
    look(data4, out4, rows4, kind4);
    look(data5, out5, rows5, kind5);
    const int slices[3] = {static_cast<int>(slice0), static_cast<int>(slice1),
                           static_cast<int>(slice2)};
    make_member<NUM, Sides...>(own, 0, x, static_cast<int>(tokens), static_cast<int>(cols), slices,
                               index, shared);
}

// warpgroup_slices: as matmul_warpgroup, but a block makes one slice of a tile's sums, where tiles
// are few and rows long; join_slices (matmul_many.cu) adds them up. Slices are whole stages, all
// full.
//   -> sums [slices,T,N] f32; grid (token tiles * row tiles, slices)
template <int TYPE, int LANE, int ALIGN, int X_SLOTS, int RAW_SLOTS, int NUM>
__global__ void __launch_bounds__(THREADS, 1)
    warpgroup_slices(const unsigned short *activations, const unsigned char *data, float *sums,
                     long long tokens, long long rows, long long cols, long long slice) {
    extern __shared__ __align__(1024) unsigned char shared[];
    using Block = Warpgroups<TYPE, LANE, ALIGN, X_SLOTS, RAW_SLOTS>;
    static_assert(Block::FULL);
    const int first = blockIdx.y * static_cast<int>(slice);
    const int length = min(static_cast<int>(slice), static_cast<int>(cols) - first);
    const Block block({activations + first, sums + blockIdx.y * tokens * rows,
                       static_cast<int>(rows), static_cast<int>(cols), static_cast<int>(slice)},
                      shared, length / Block::STAGE);
    const int num_tokens = tokens, token_tiles = (num_tokens + NUM - 1) / NUM;
    block.open_gates();
    const auto book = load_any_book<TYPE>(block.rest);
    start_early();
    __syncthreads();
    const TileSlice own = {{data + Block::R::bytes(first), num_tokens,
                            tokens_each(num_tokens, token_tiles), token_tiles,
                            static_cast<int>(blockIdx.x)}};
    block.template run<NUM>(own, book);
}

// grouped_warpgroup: pairs sorted by expert; any grid, whose blocks go round robin through the
// tiles of (expert, its tokens, weight rows)
template <int TYPE, int LANE, int ALIGN, int X_SLOTS, int RAW_SLOTS>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_warpgroup(const float *, const unsigned short *activations, const long long *blobs,
                      const int *row_of, const int *expert_start, float *out, long long,
                      long long rows, long long cols, long long offset_bytes, long long experts,
                      long long slice) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Warpgroups<TYPE, LANE, ALIGN, X_SLOTS, RAW_SLOTS> block(
        {activations, out, static_cast<int>(rows), static_cast<int>(cols), static_cast<int>(slice)},
        shared);
    int *scratch = reinterpret_cast<int *>(block.rest) + BOOK_WORDS<TYPE>;
    int *start = scratch + THREADS / 32;
    const Experts all = {start, reinterpret_cast<unsigned short *>(start + experts + 1),
                         static_cast<int>(experts)};
    block.open_gates();
    const auto book = load_any_book<TYPE>(block.rest);
    start_early();
    all.load(expert_start, scratch);
    const int row_tiles = (static_cast<int>(rows) + ROWS - 1) / ROWS;
    const GroupedTiles tiles = {
        all, blobs, row_of, offset_bytes, row_tiles, share_of(all.prefix[all.count] * row_tiles)};
    block.template run<0>(tiles, book);
}
