// What measuring the rate of tensor-core instructions takes: other work beside them, and times.
#pragma once
#include <cstdio>

// The j-th of some integer and f16 operations, in turns, on words that no product reads. Volatile,
// so that it stays where it is.
__device__ inline void other_work(unsigned (&words)[8], int j) {
    if (j % 2)
        asm volatile("prmt.b32 %0, %0, %1, 0x5140;" : "+r"(words[j % 8]) : "r"(words[(j + 1) % 8]));
    else
        asm volatile("fma.rn.f16x2 %0, %0, %1, %1;" : "+r"(words[j % 8]) : "r"(words[(j + 1) % 8]));
}

// Milliseconds of the last of three launches.
template <typename Launch>
float last_ms(Launch launch) {
    cudaEvent_t start, end;
    cudaEventCreate(&start), cudaEventCreate(&end);
    float ms = 0;
    for (int i = 0; i < 3; i++) {
        cudaEventRecord(start);
        launch();
        cudaEventRecord(end);
        cudaEventSynchronize(end);
        cudaEventElapsedTime(&ms, start, end);
    }
    cudaEventDestroy(start), cudaEventDestroy(end);
    return ms;
}

// One block for each multiprocessor writes here.
struct Output {
    int blocks;
    float *out;         // [blocks, threads]: keeps the work from being left out
    long long *clocks;  // [blocks]

    explicit Output(int threads) {
        cudaDeviceProp properties;
        cudaGetDeviceProperties(&properties, 0);
        blocks = properties.multiProcessorCount;
        cudaMalloc(&out, blocks * threads * sizeof *out);
        cudaMalloc(&clocks, blocks * sizeof *clocks);
    }

    // That the first block took.
    long long taken() const {
        long long first = 0;
        cudaMemcpy(&first, clocks, sizeof first, cudaMemcpyDeviceToHost);
        return first;
    }
};
