// Tiles of f16 in shared memory that ldmatrix can read without bank conflicts, as operands of
// mma.sync (mma.cuh).
//
// A tile has rows of WIDTH values, eight to a chunk of 16 bytes. Chunk c of row r lies at place
// c ^ (r & 7), so that eight rows of one chunk, or eight chunks of one row, are in different banks.
#pragma once

template <int WIDTH>
struct TileRow {
    static constexpr int CHUNKS = WIDTH / 8;
    uint4 chunks[CHUNKS];

    __device__ static int place(int row, int chunk) {
        return chunk ^ (row & (CHUNKS < 8 ? CHUNKS - 1 : 7));
    }
};

template <int WIDTH>
__device__ inline uint4 *chunk_at(TileRow<WIDTH> *tile, int row, int chunk) {
    return &tile[row].chunks[TileRow<WIDTH>::place(row, chunk)];
}

// Four 8 x 8 matrices: lane l names row l % 8 of matrix l / 8 and gets, of each matrix, columns
// 2t and 2t + 1 of row g (l = 4g + t).
__device__ inline void load_matrices(unsigned (&to)[4], const uint4 *row) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}

// The same, each matrix transposed: rows 2t and 2t + 1 of column g.
__device__ inline void load_transposed(unsigned (&to)[4], const uint4 *row) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}
