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
