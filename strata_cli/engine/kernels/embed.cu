// Rows of quantized tables as float32: token embeddings and hashed n-grams. Exact: the values of
// model.quants.dequantize.
//
// A warp decodes one row, 256 weights at a time: it copies their bytes to shared memory, 16 at a
// time, because the table may lie in host memory, where every access is a trip over the link; then
// each lane decodes an octet.
#include "mma.cuh"
#include "weights.cuh"

constexpr int WARPS = 4;
constexpr int PIECE = 256;

template <int TYPE, int ALIGN>
__device__ inline void decode_floats(const Staged<ALIGN> &bytes, int octet, float (&v)[8]) {
    using R = Rows<TYPE, 8>;
    using Type = Codec<TYPE>;
    const Staged<ALIGN> block = {bytes.base, bytes.offset + octet / R::BLOCK_OCTETS * Type::BYTES};
    const int own = octet % R::BLOCK_OCTETS;
    if constexpr (R::IS_FLOAT && TYPE != F16) {
        Type::floats(block, own, v);
    } else {
        Octet codes = Type::codes(block, own, Book<1>{BOOK});
        Scale by = {1.0f, 0.0f};
        if constexpr (TYPE != F16) by = Type::scale(block, own);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            unsigned pair = codes.pair[i / 2];
            if constexpr (Type::BIAS != 0) pair = add2(pair, MINUS<Type::BIAS>);
            v[i] = float_of(pair >> 16 * (i & 1)) * by.scale;
            if constexpr (Type::HAS_MIN) v[i] -= by.minimum;
        }
    }
}

// Decodes a row of `width` weights to `copies` places, `width` floats apart.
template <int TYPE, int ALIGN>
__device__ inline void decode_row(const unsigned char *row, float *out, int width, int copies) {
    using R = Rows<TYPE, 8>;
    constexpr int room = R::bytes(PIECE) + 32;
    __shared__ uint4 shared[WARPS][(room + 15) / 16];
    const int lane = threadIdx.x & 31;
    unsigned char *staged = reinterpret_cast<unsigned char *>(shared[threadIdx.x / 32]);
    for (int first = 0; first < width; first += PIECE) {
        const int length = min(PIECE, width - first);
        const unsigned char *from = row + R::bytes(first);
        const int phase = static_cast<int>(reinterpret_cast<unsigned long long>(from) & 15);
        const int end = phase + R::bytes(length);
        for (int at = 16 * lane; at < end; at += 512)
            copy_async(staged + at, from - phase + at, min(16, end - at));
        commit_copies();
        wait_copies<0>();
        __syncwarp();
        float v[8];
        if (8 * lane < length) decode_floats<TYPE, ALIGN>({staged, phase}, lane, v);
        for (int copy = 0; copy < copies; copy++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (8 * lane + i < length)
                    out[static_cast<long long>(copy) * width + first + 8 * lane + i] = v[i];
        __syncwarp();
    }
}

// embed_streams: x[t, s] = row ids[t] of the table, for each of S streams
//   ids [T] i32, table V rows of D weights, x [T,S,D] f32; grid (T / 4), one warp per token
//   writes 4 * T*S*D bytes
template <int TYPE, int ALIGN>
__global__ void embed_streams(const int *ids, const unsigned char *table, float *x, long long,
                              long long tokens, long long streams, long long width) {
    const long long token = blockIdx.x * static_cast<long long>(WARPS) + threadIdx.x / 32;
    if (token >= tokens) return;
    const int size = static_cast<int>(width);
    decode_row<TYPE, ALIGN>(table + ids[token] * static_cast<long long>(Rows<TYPE, 8>::bytes(size)),
                            x + token * streams * width, size, static_cast<int>(streams));
}

// gather_rows: out[i] = row rows[i] of the table
//   rows [R] i64, table rows of W weights, out [R,W] f32; grid (R / 4), one warp per row
//   reads R * W / WEIGHTS * BYTES bytes at random rows, writes 4 * R*W
template <int TYPE, int ALIGN>
__global__ void gather_rows(const long long *rows, const unsigned char *table, float *out,
                            long long, long long count, long long width) {
    const long long i = blockIdx.x * static_cast<long long>(WARPS) + threadIdx.x / 32;
    if (i >= count) return;
    const int size = static_cast<int>(width);
    decode_row<TYPE, ALIGN>(table + rows[i] * Rows<TYPE, 8>::bytes(size), out + i * width, size, 1);
}
