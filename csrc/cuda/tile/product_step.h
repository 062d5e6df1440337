// One step of a warp's product, D (16 x 8) += A B, in the layout of mma_sync.h. 16-bit operands are one
// instruction. float32 has three, as tensor cores multiply 11 significant bits (3xTF32): each operand is
// split into x = big + small, and of the four products all but small * small, 2^-22 of the whole, are summed.
#pragma once

#include <cstdint>

#include "../ptx/mma_sync.h"

namespace flash::cuda {

// How much of k a step takes.
template <DType dtype>
constexpr int kStepDepth = dtype == DType::float32 ? 8 : 16;

struct SplitFloat {
    uint32_t big, small;
};

// big is x rounded to nearest (ties away from zero), so that small, exact, has at most 12 bits and either
// sign: cut off instead, small * small would be positive throughout, and the result too small on average.
// Where big would be infinite or x is NaN, big is a finite number with x's sign and small carries x: then an
// infinity meets big, which is zero only if the other operand is, and no infinity of the other sign.
__device__ __forceinline__ SplitFloat split(uint32_t x) {
    const bool rounds = fabsf(__uint_as_float(x)) < 0x1.ffep127f;
    // Without the exponent's highest bit infinity is 1.
    const uint32_t big = (x + 0x1000) & (rounds ? 0xffffe000 : 0xbf800000);
    return {big, __float_as_uint(__uint_as_float(x) - __uint_as_float(big))};
}

// Operands as floats. The tensor cores truncate sums, which over many
// steps would cost far more than the splitting: they only ever sum one step, smallest products first, and D
// is added up outside, rounded. An error of about 2^-21 of the summed magnitudes at most, mostly 2^-24.
__device__ __forceinline__ void multiply_split(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
    uint32_t big[4], small[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const SplitFloat x = split(a[i]);
        big[i] = x.big;
        small[i] = x.small;
    }
    const SplitFloat upper = split(b0), lower = split(b1);
    float sum[4] = {0, 0, 0, 0};
    mma_m16n8k8_tf32(sum, small, upper.big, lower.big);
    mma_m16n8k8_tf32(sum, big, upper.small, lower.small);
    mma_m16n8k8_tf32(sum, big, upper.big, lower.big);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += sum[i];
}

template <DType dtype>
__device__ __forceinline__ void multiply_step(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
    if constexpr (dtype == DType::float32)
        multiply_split(d, a, b0, b1);
    else
        mma_m16n8k16<dtype>(d, a, b0, b1);
}

}  // namespace flash::cuda
