// The rotation of a head to a position, for the kernels that norm heads.
#pragma once

// Element i of a head x [dim] turned by row `position` of the table [.., half, 2] (cosine, sine):
// pairs (j, j + half), j < half, turn; the rest stays. Products are rounded before their sum.
__device__ inline float turned(const float *x, const float *table, long long position,
                               long long half, long long i) {
    if (i >= 2 * half) return x[i];
    const long long j = i < half ? i : i - half;
    const float cosine = table[(position * half + j) * 2];
    const float sine = table[(position * half + j) * 2 + 1];
    const float first = x[j], second = x[j + half];
    return i < half ? first * cosine - second * sine : second * cosine + first * sine;
}
