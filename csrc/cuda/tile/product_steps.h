// The steps of a warp's product and their order. A step is D (16 x 8) += A B in the layout of mma_sync.h. For
// 16-bit operands it is one instruction, for float32 three, as tensor cores multiply 11 significant bits
// (3xTF32): each operand is split into x = big + small, and of the four products all but small * small, 2^-22
// of the whole, are summed.
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

// Operands as floats. The tensor cores truncate sums, which over many steps would cost far more than the
// splitting (measured in a model of them: 4 to 40 times the error of float additions): they only ever sum one
// step, smallest products first, and D is added up outside, rounded. At most about 2^-21 of the summed
// magnitudes are lost, mostly 2^-24.
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

// The order of a product's steps: along k by kStepDepth, along D's columns in 16s within. Operands are loaded
// this many steps before the multiplications that use them; ptxas moves them further as registers allow.
constexpr int kAhead = 2;

// load_a(a, k) fills a[row tile][4], load_b(b, k, n) fills b for columns n .. n + 15.
template <DType dtype, int kDepth, class Accumulators, class LoadA, class LoadB>
__device__ __forceinline__ void multiply(Accumulators& d, const LoadA& load_a, const LoadB& load_b) {
    constexpr int step = kStepDepth<dtype>;
    constexpr int columns = Accumulators::column_tiles / 2, steps = kDepth / step * columns;
    // A is kept for this k and the next one, so no step may run further ahead than a row of columns.
    constexpr int ahead = kAhead < columns ? kAhead : columns;
    uint32_t a[2][Accumulators::row_tiles][4], b[ahead + 1][4];
#pragma unroll
    for (int i = 0; i < steps + ahead; ++i) {
        if (i < steps) {
            if (i % columns == 0) load_a(a[i / columns % 2], i / columns * step);
            load_b(b[i % (ahead + 1)], i / columns * step, i % columns * 16);
        }
        if (i >= ahead) {
            const int done = i - ahead, n = done % columns * 2;
            const auto& left = a[done / columns % 2];
            const auto& right = b[done % (ahead + 1)];
#pragma unroll
            for (int m = 0; m < Accumulators::row_tiles; ++m) {
                multiply_step<dtype>(d.value[m][n], left[m], right[0], right[1]);
                multiply_step<dtype>(d.value[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// The same with operands in shared memory. Steps of float32 are long: unrolled altogether they fill the
// instruction cache, and ptxas starts so many of them at once that registers run out.
template <DType dtype, int kDepth, class Accumulators, class LoadA, class LoadB>
__device__ __forceinline__ void multiply_tiles(Accumulators& d, const LoadA& load_a, const LoadB& load_b) {
    if constexpr (dtype == DType::float32) {
        constexpr int unrolled = 16;
#pragma unroll 1
        for (int k0 = 0; k0 < kDepth; k0 += unrolled)
            multiply<dtype, unrolled>(
                d, [&](uint32_t (&a)[Accumulators::row_tiles][4], int k) { load_a(a, k0 + k); },
                [&](uint32_t (&b)[4], int k, int n) { load_b(b, k0 + k, n); });
    } else {
        multiply<dtype, kDepth>(d, load_a, load_b);
    }
}

}  // namespace flash::cuda
