// The rotation of a head to a position, for the kernels that norm heads.
#pragma once

// The cosine and sine that turn an element.
struct Turn {
    float cosine, sine;

    // Element i of a head x, i < 2 * half. Products are rounded before their sum.
    __device__ float of(const float *x, long long half, long long i) const {
        const long long j = i < half ? i : i - half;
        const float first = x[j], second = x[j + half];
        return i < half ? first * cosine - second * sine : second * cosine + first * sine;
    }
};

__device__ inline Turn turn_of(const float *table, long long position, long long half,
                               long long i) {
    const float *own = table + (position * half + (i < half ? i : i - half)) * 2;
    return {own[0], own[1]};
}

// Element i of a head x [dim] turned by row `position` of the table [.., half, 2] (cosine, sine):
// pairs (j, j + half), j < half, turn; the rest stays.
__device__ inline float turned(const float *x, const float *table, long long position,
                               long long half, long long i) {
    if (i >= 2 * half) return x[i];
    const Turn turn = turn_of(table, position, half, i);
    return turn.of(x, half, i);
}
