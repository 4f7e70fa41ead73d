// Hyper-connections: norm, low-rank activation, mix and write of the residual streams.
//   T tokens, S streams, D hidden_size, R stream rank; a vector over all streams is stream-major
//   Every element is read and written about once: device memory bandwidth is the limit of all.
#include "lanes.cuh"
#include "math32.cuh"

// stream_norm: out = x / rms(x) * weight, each stream of a token on its own
//   x [T,S,D] f32, weight [S,D] f32 -> out [T,S,D] f32
//   grid (T*S), block any multiple of 32, shared D floats; moves 8 * T*S*D bytes
extern "C" __global__ void stream_norm(const float *x, const float *weight, float eps, float *out,
                                       long long num_streams, long long size) {
    extern __shared__ __align__(16) float row[];
    __shared__ float scale;
    x += blockIdx.x * size;
    out += blockIdx.x * size;
    weight += blockIdx.x % num_streams * size;
    const bool wide = is_wide(size, x, out, weight);
    load_row(row, x, size, wide);
    __syncthreads();
    if (threadIdx.x < 32) {
        const float factor = rms_scale(row, size, eps);
        if (threadIdx.x == 0) scale = factor;
    }
    __syncthreads();
    const float factor = scale;
    if (wide) {
        for (long long d = 4 * threadIdx.x; d < size; d += 4 * blockDim.x) {
            const float4 v = load4(row + d), w = load4(weight + d);
            store4(out + d, make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z,
                                        v.w * factor * w.w));
        }
    } else {
        for (long long d = threadIdx.x; d < size; d += blockDim.x)
            out[d] = row[d] * factor * weight[d];
    }
}

// lowrank_silu: low = silu(low / S) in place
//   low [n] f32; grid (n / block), moves 8 * n bytes
extern "C" __global__ void lowrank_silu(float *low, long long num_streams, long long n) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i < n) low[i] = silu32(low[i] / static_cast<float>(num_streams));
}

// stream_mix: out[d] = (1 / S) * sum over s, in order, of sigmoid(gate[s,d]) * normed[s,d]
//   gate, normed [T,S,D] f32 -> out [T,D] f32
//   grid (T, D / (4 * block)), each thread 4 columns; moves (8 * S + 4) * T*D bytes
extern "C" __global__ void stream_mix(const float *gate, const float *normed, float *out,
                                      long long num_streams, long long size) {
    gate += blockIdx.x * num_streams * size;
    normed += blockIdx.x * num_streams * size;
    out += blockIdx.x * size;
    const long long first = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first >= size) return;
    const float count = static_cast<float>(num_streams);
    if (is_wide(size, gate, normed, out)) {
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (long long s = 0; s < num_streams; s++) {
            const float4 g = load4(gate + s * size + first), n = load4(normed + s * size + first);
            total.x = fmaf(sigmoid32(g.x), n.x, total.x);
            total.y = fmaf(sigmoid32(g.y), n.y, total.y);
            total.z = fmaf(sigmoid32(g.z), n.z, total.z);
            total.w = fmaf(sigmoid32(g.w), n.w, total.w);
        }
        store4(out + first,
               make_float4(total.x / count, total.y / count, total.z / count, total.w / count));
    } else {
        for (long long d = first; d < min(first + 4, size); d++) {
            float total = 0.0f;
            for (long long s = 0; s < num_streams; s++)
                total = fmaf(sigmoid32(gate[s * size + d]), normed[s * size + d], total);
            out[d] = total / count;
        }
    }
}

__device__ inline float write_weight(float inject, long long num_streams) {
    return 2.0f * sigmoid32(inject / static_cast<float>(num_streams));
}

// stream_write: x[s] += 2 sigmoid(inject[s] / S) * out, in place
//   x [T,S,D] f32, out [T,D] f32, inject [T,S] f32
//   grid (T, D / (4 * block)), each thread 4 columns; moves (8 * S + 4) * T*D bytes
extern "C" __global__ void stream_write(float *x, const float *out, const float *inject,
                                        long long num_streams, long long size) {
    x += blockIdx.x * num_streams * size;
    out += blockIdx.x * size;
    inject += blockIdx.x * num_streams;
    const long long first = 4 * (blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x);
    if (first >= size) return;
    if (is_wide(size, x, out)) {
        const float4 o = load4(out + first);
#pragma unroll 4
        for (long long s = 0; s < num_streams; s++) {
            const float weight = write_weight(inject[s], num_streams);
            float4 v = load4(x + s * size + first);
            v.x = fmaf(weight, o.x, v.x);
            v.y = fmaf(weight, o.y, v.y);
            v.z = fmaf(weight, o.z, v.z);
            v.w = fmaf(weight, o.w, v.w);
            store4(x + s * size + first, v);
        }
    } else {
        for (long long s = 0; s < num_streams; s++) {
            const float weight = write_weight(inject[s], num_streams);
            for (long long d = first; d < min(first + 4, size); d++)
                x[s * size + d] = fmaf(weight, out[d], x[s * size + d]);
        }
    }
}
