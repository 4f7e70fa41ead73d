// Hyper-connections: norm, low-rank activation, mix and write of the residual streams.
//   T tokens, S streams, D hidden_size, R stream rank; a vector over all streams is stream-major
//   Every element is read and written about once: device memory bandwidth is the limit of all.
#include "lanes.cuh"
#include "math32.cuh"
#include "mix.cuh"
#include "overlap.cuh"
#include "streams.cuh"

// The row of f16 that starts at element first, if any is wanted. An odd start: rounded is no
// multiple of a word, so that only put1 may write there.
__device__ inline unsigned *rounded_row(unsigned short *rounded, bool wanted, long long first) {
    return wanted ? reinterpret_cast<unsigned *>(rounded + first) : nullptr;
}

// Every NORM_THREADS-th four elements of a row are a thread's, as its i-th.
__device__ inline long long quad(int i) { return 4 * (threadIdx.x + NORM_THREADS * i); }

// Elements of a row, and the norm's weights, in registers: all loads are one latency.
struct Quads {
    float4 v[MOST_QUADS], w[MOST_QUADS];

    __device__ void load(const float *row, const float *weight, long long size) {
        const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < MOST_QUADS; i++) {
            v[i] = quad(i) < size ? load4(row + quad(i)) : none;
            w[i] = quad(i) < size ? load4(weight + quad(i)) : none;
        }
    }

    // Adds factor times another row, and stores that.
    __device__ void write(float *row, const float4 (&added)[MOST_QUADS], float factor,
                          long long size) {
#pragma unroll
        for (int i = 0; i < MOST_QUADS; i++) {
            if (quad(i) >= size) continue;
            v[i].x = fmaf(factor, added[i].x, v[i].x);
            v[i].y = fmaf(factor, added[i].y, v[i].y);
            v[i].z = fmaf(factor, added[i].z, v[i].z);
            v[i].w = fmaf(factor, added[i].w, v[i].w);
            store4(row + quad(i), v[i]);
        }
    }

    // The norm of the row, by all threads of the block.
    __device__ void norm(float eps, float *out, unsigned *rounded, long long size) const {
        float own = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST_QUADS; i++) own = add_squares(v[i], own);
        const float factor = rms_factor(sum_of_block(own), size, eps);
#pragma unroll
        for (int i = 0; i < MOST_QUADS; i++)
            if (quad(i) < size) put4(out, rounded, quad(i), scaled(v[i], factor, w[i]));
    }
};

__device__ inline bool fits_quads(long long size, bool wide) {
    return wide && size <= 4 * NORM_THREADS * MOST_QUADS;
}

// The norm of a row that lies in shared memory, complete, by all threads of the block. The order
// of sums is that of Quads.
__device__ inline void norm_row(const float *row, const float *weight, float eps, float *out,
                                unsigned *rounded, long long size, bool wide) {
    float own = 0.0f;
    for (int i = 0; quad(i) < size; i++)
        for (long long d = quad(i); d < min(quad(i) + 4, size); d++)
            own = fmaf(row[d], row[d], own);
    const float factor = rms_factor(sum_of_block(own), size, eps);
    if (wide) {
        for (int i = 0; quad(i) < size; i++)
            put4(out, rounded, quad(i),
                 scaled(load4(row + quad(i)), factor, load4(weight + quad(i))));
    } else {
        for (long long d = threadIdx.x; d < size; d += blockDim.x)
            put1(out, rounded, d, row[d] * factor * weight[d]);
    }
}

// stream_norm: out = x / rms(x) * weight, each stream of a token on its own
//   x [T,S,D] f32, weight [S,D] f32 -> out [T,S,D] f32 and, if wanted, rounded [T,S,D] f16
//   grid (T*S), block NORM_THREADS, shared D floats; moves 8 (10) * T*S*D bytes
extern "C" __global__ void stream_norm(const float *x, const float *weight, float eps, float *out,
                                       unsigned short *rounded, long long num_streams,
                                       long long size, long long rounds) {
    start_early();
    extern __shared__ __align__(16) float row[];
    x += blockIdx.x * size;
    out += blockIdx.x * size;
    weight += blockIdx.x % num_streams * size;
    const bool wide = is_wide(size, x, out, weight) && is_wide(size, rounded);
    unsigned *half = rounded_row(rounded, rounds, blockIdx.x * size);
    if (fits_quads(size, wide)) {
        Quads quads;
        quads.load(x, weight, size);
        quads.norm(eps, out, half, size);
        return;
    }
    load_row(row, x, size, wide);
    __syncthreads();
    norm_row(row, weight, eps, out, half, size, wide);
}

// lowrank_silu: low = silu(low / S) in place
//   low [n] f32; grid (n / block), moves 8 * n bytes
extern "C" __global__ void lowrank_silu(float *low, long long num_streams, long long n) {
    start_early();
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i < n) low[i] = silu32(low[i] / static_cast<float>(num_streams));
}

// stream_mix: out[d] = (1 / S) * sum over s, in order, of sigmoid(gate[s,d]) * normed[s,d]
//   gate, normed [T,S,D] f32 -> out [T,D] f32 and, if wanted, rounded [T,D] f16
//   grid (T, D / (4 * block)), each thread 4 columns; moves (8 * S + 4) * T*D bytes
extern "C" __global__ void stream_mix(const float *gate, const float *normed, float *out,
                                      unsigned short *rounded, long long num_streams,
                                      long long size, long long rounds) {
    start_early();
    gate += blockIdx.x * num_streams * size;
    normed += blockIdx.x * num_streams * size;
    out += blockIdx.x * size;
    unsigned *half = rounded_row(rounded, rounds, blockIdx.x * size);
    const long long first = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first >= size) return;
    mix_columns(gate, normed, out, half, first, num_streams, size, is_wide(size, rounded));
}

// stream_write: x[s] += 2 sigmoid(inject[s] / S) * out, in place
//   x [T,S,D] f32, out [T,D] f32, inject as Inject
//   grid (T, D / (4 * block)), each thread 4 columns; moves (8 * S + 4) * T*D bytes
extern "C" __global__ void stream_write(float *x, const float *out, const float *injects,
                                        long long num_streams, long long size, long long parts,
                                        long long divisor) {
    start_early();
    const Inject inject = {injects, parts, divisor, num_streams, gridDim.x};
    x += blockIdx.x * num_streams * size;
    out += blockIdx.x * size;
    const long long first = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first >= size) return;
    if (is_wide(size, x, out)) {
        const float4 o = load4(out + first);
#pragma unroll 4
        for (long long s = 0; s < num_streams; s++) {
            const float weight = inject.weight(blockIdx.x, s);
            float4 v = load4(x + s * size + first);
            v.x = fmaf(weight, o.x, v.x);
            v.y = fmaf(weight, o.y, v.y);
            v.z = fmaf(weight, o.z, v.z);
            v.w = fmaf(weight, o.w, v.w);
            store4(x + s * size + first, v);
        }
    } else {
        for (long long s = 0; s < num_streams; s++) {
            const float weight = inject.weight(blockIdx.x, s);
            for (long long d = first; d < min(first + 4, size); d++)
                x[s * size + d] = fmaf(weight, out[d], x[s * size + d]);
        }
    }
}

// stream_write_norm: stream_write, then stream_norm of what was written, in one pass over x
//   x [T,S,D] f32 in place, out [T,D], weight [S,D] f32, inject as Inject -> normed [T,S,D] f32
//   and, if wanted, rounded [T,S,D] f16
//   grid (T*S), block NORM_THREADS, shared D floats; moves (12 * S (14 * S) + 4) * T*D bytes
extern "C" __global__ void stream_write_norm(float *x, const float *out, const float *injects,
                                             const float *weight, float eps, float *normed,
                                             unsigned short *rounded, long long num_streams,
                                             long long size, long long rounds, long long parts,
                                             long long divisor) {
    start_early();
    const Inject inject = {injects, parts, divisor, num_streams, gridDim.x / num_streams};
    const long long token = blockIdx.x / num_streams, s = blockIdx.x % num_streams;
    extern __shared__ __align__(16) float row[];
    x += blockIdx.x * size;
    normed += blockIdx.x * size;
    out += token * size;
    weight += s * size;
    const bool wide = is_wide(size, x, out, weight, normed) && is_wide(size, rounded);
    unsigned *half = rounded_row(rounded, rounds, blockIdx.x * size);
    if (fits_quads(size, wide)) {
        Quads quads;
        float4 added[MOST_QUADS];
        const float factor = inject.weight(token, s);
        quads.load(x, weight, size);
#pragma unroll
        for (int i = 0; i < MOST_QUADS; i++)
            if (quad(i) < size) added[i] = load4(out + quad(i));
        quads.write(x, added, factor, size);
        quads.norm(eps, normed, half, size);
        return;
    }
    const float factor = inject.weight(token, s);
    for (long long d = threadIdx.x; d < size; d += blockDim.x)
        x[d] = row[d] = fmaf(factor, out[d], x[d]);
    __syncthreads();
    norm_row(row, weight, eps, normed, half, size, wide);
}
