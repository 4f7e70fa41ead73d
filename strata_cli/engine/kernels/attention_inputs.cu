// What attention needs of few tokens of one sequence, in one launch: head_norm_rope (rope.cu) of
// queries, keys and index queries, store_kv and store_rows (cache_rows.cu) of keys, values and
// index keys, pool_index_blocks (indexer.cu). The same bits; alone each takes little more than its
// start.
//   T tokens at consecutive positions, H query heads, KV key/value heads, N head width, at most
//   MOST_DIM; IH index heads of width IN
#include "lanes.cuh"
#include "overlap.cuh"
#include "pairs.cuh"
#include "rope.cuh"

constexpr int AT_ONCE = 16;  // elements of a lane
constexpr int MOST_DIM = 16 * AT_ONCE;
constexpr int WARPS = 2;

__device__ inline void load_head(float (&to)[AT_ONCE], const float *row, int dim) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
        to[n] = lane16() + 16 * n < dim ? row[lane16() + 16 * n] : 0.0f;
}

// A head of a token, by 16 lanes.
struct Head {
    int row, number, stride, dim;  // among all tokens' heads; among its token's
    long long token, position;
    bool is_there;  // a spare half warp takes part in the sums
    float values[AT_ONCE], weights[AT_ONCE];
    Turn turns[AT_ONCE];

    __device__ Head(int warp, int num_tokens, long long heads, long long stride, int dim)
        : stride(static_cast<int>(stride)), dim(dim) {
        const int own = 2 * warp + (threadIdx.x & 31) / 16, count = static_cast<int>(heads);
        row = min(own, num_tokens * count - 1);
        is_there = own == row;
        token = row / count;
        number = row % count;
    }

    // What does not depend on the launches ahead.
    __device__ void know(const float *weight, const float *table, const int *positions, int half) {
        position = positions[token];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = lane16() + 16 * n;
            weights[n] = i < dim ? weight[i] : 0.0f;
            turns[n] = i < 2 * half ? turn_of(table, position, half, i) : Turn{1.0f, 0.0f};
        }
    }

    __device__ void load(const float *src) {
        load_head(values, src + static_cast<long long>(row) * stride, dim);
    }

    // Puts the columns, normed and turned: put(n, i, value) for the lane's n-th, column i.
    template <class Put>
    __device__ void turn(float eps, float *head, int half, const Put &put) const {
        float squares = 0.0f;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) squares = fmaf(values[n], values[n], squares);
        const float scale = rms_factor(fold16(squares), dim, eps);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            if (lane16() + 16 * n < dim) head[lane16() + 16 * n] = values[n] * scale * weights[n];
        __syncwarp();
        if (!is_there) return;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int i = lane16() + 16 * n;
            if (i < dim) put(n, i, i < 2 * half ? turns[n].of(head, half, i) : head[i]);
        }
    }

    __device__ auto put_in(float *out) const {
        return [to = out + static_cast<long long>(row) * dim](int, int i, float v) { to[i] = v; };
    }
};

// The index key of a token to its place, by a warp; if that completes a block, also the block's.
__device__ inline void keep_index_key(const float *keys, const float *weight, const float *table,
                                      const int *positions, float eps, float *raw_keys,
                                      float *pooled, float *key, int token, int ratio, int dim,
                                      int half) {
    const int first = positions[0], position = positions[token];
    const bool writes = (threadIdx.x & 31) < 16;  // the other half does the same for itself
    wait_for_launches_ahead();
    for (int i = lane16(); i < dim && writes; i += 16)
        raw_keys[static_cast<long long>(position) * dim + i] = keys[token * dim + i];
    if ((position + 1) % ratio != 0) return;
    const int block = position / ratio;
    for (int i = lane16(); i < dim; i += 16) {
        float total = 0.0f;
#pragma unroll 8
        for (int r = 0; r < ratio; r++) {  // rows of this launch may not have been written yet
            const int own = block * ratio + r;
            total += own >= first ? keys[(own - first) * dim + i]
                                  : raw_keys[static_cast<long long>(own) * dim + i];
        }
        key[i] = total * (1.0f / static_cast<float>(ratio));
    }
    const float scale = rms_scale(key, dim, eps);
    for (int i = lane16(); i < dim; i += 16) key[i] = key[i] * scale * weight[i];
    __syncwarp();
    for (int i = lane16(); i < dim && writes; i += 16)
        pooled[static_cast<long long>(block) * dim + i] =
            turned(key, table, static_cast<long long>(block) * ratio, half, i);
}

// attention_inputs
//   q_src [T,H,stride], k_src [T,KV,N], v [T,KV*N], iq_src [T,IH,IN], ik [T,IN] f32; norms [N],
//   [IN]; table [context,half,2] f32, positions [T] i32
//   -> q [T,H,N], iq [T,IH,IN] f32; keys, values [context,KV*N] f16, raw_keys [context,IN] and
//   pooled [B,IN] f32, only the rows of these tokens
//   grid: a warp for two heads, then one for each index key; block 32 * WARPS. No index: IH and
//   ratio are 0. How long one load after another takes is the limit.
extern "C" __global__ void attention_inputs(
    const float *q_src, const float *q_norm, float *q, const float *k_src, const float *k_norm,
    const float *v, unsigned short *keys, unsigned short *values, const float *iq_src,
    const float *iq_norm, float *iq, const float *ik, const float *ik_norm, float *raw_keys,
    float *pooled, const float *table, const int *positions, float eps, long long tokens,
    long long q_heads, long long q_stride, long long kv_heads, long long dim, long long half,
    long long index_heads, long long index_dim, long long ratio) {
    __shared__ float heads[2 * WARPS][MOST_DIM];
    let_next_start();
    const int num_tokens = tokens, turned_pairs = half;
    float *const head = heads[threadIdx.x / 16];
    const int width = dim, index_width = index_dim;
    const auto warps_of = [&](long long per_token) {
        return (num_tokens * static_cast<int>(per_token) + 1) / 2;
    };
    const int keys_from = warps_of(q_heads), index_from = keys_from + warps_of(kv_heads);
    const int index_keys_from = index_from + warps_of(index_heads);
    const int warp = blockIdx.x * WARPS + threadIdx.x / 32;
    if (warp < keys_from || (index_from <= warp && warp < index_keys_from)) {
        const bool is_index = warp >= index_from;
        Head own(is_index ? warp - index_from : warp, num_tokens, is_index ? index_heads : q_heads,
                 is_index ? index_dim : q_stride, is_index ? index_width : width);
        own.know(is_index ? iq_norm : q_norm, table, positions, turned_pairs);
        wait_for_launches_ahead();
        own.load(is_index ? iq_src : q_src);
        own.turn(eps, head, turned_pairs, own.put_in(is_index ? iq : q));
    } else if (warp < index_from) {
        Head own(warp - keys_from, num_tokens, kv_heads, dim, width);
        own.know(k_norm, table, positions, turned_pairs);
        wait_for_launches_ahead();
        own.load(k_src);
        float of_value[AT_ONCE];
        load_head(of_value, v + static_cast<long long>(own.row) * width, width);
        bool is_number = true;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) is_number = is_number && of_value[n] == of_value[n];
        const unsigned all = __ballot_sync(ALL_LANES, is_number) >> (threadIdx.x & 16) & 0xffff;
        const unsigned short none = all == 0xffff ? 0 : 0x7fff;  // as store_kv
        const long long at = (own.position * kv_heads + own.number) * width;
        own.turn(eps, head, turned_pairs, [&](int n, int i, float value) {
            keys[at + i] = half_of(value) | none;
            values[at + i] = half_of(of_value[n] == of_value[n] ? of_value[n] : 0.0f);
        });
    } else if (ratio > 0 && warp - index_keys_from < num_tokens) {
        keep_index_key(ik, ik_norm, table, positions, eps, raw_keys, pooled, head,
                       warp - index_keys_from, static_cast<int>(ratio), index_width, turned_pairs);
    } else {
        wait_for_launches_ahead();  // as every block
    }
}
