// Test kernels: each does one thing whose result shows what ran, and in which order.
//   one thread per item; integers arrive as long long, floats as float

// add: out = x + y, all [n] f32
extern "C" __global__ void add(const float *x, const float *y, float *out, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}

// scaled_add: out = alpha * x + y, rounded after the product and after the sum
extern "C" __global__ void scaled_add(float alpha, const float *x, const float *y, float *out,
                                      long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = alpha * x[i] + y[i];
}

// affine: x = x * factor + term in place, [n] i64; calls do not commute, so x tells their order
extern "C" __global__ void affine(long long *x, long long factor, long long term, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * factor + term;
}

// stand: tells that it runs (flag[0] = 1), waits until the host lets it pass (flag[1] != 0), and
// tells that it has left (flag[0] = 2)
//   flag [2] i32 in pinned memory; gives up after patience_ns, so that no test can hold a GPU; one
//   thread, which looks once a microsecond
extern "C" __global__ void stand(volatile int *flag, long long patience_ns) {
    flag[0] = 1;
    __threadfence_system();
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!flag[1] && now - start < patience_ns);
    flag[0] = 2;
}
