// fma of two 16-bit elements at once (PTX ISA, "fma" of half precision; Ampere and later).
#pragma once

#include <cstdint>

#include "../../problem.h"

namespace flash::cuda {

// x * y + z.
template <DType dtype>
__device__ __forceinline__ uint32_t pair_fma(uint32_t x, uint32_t y, uint32_t z) {
    uint32_t result;
    if constexpr (dtype == DType::bfloat16)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(result) : "r"(x), "r"(y), "r"(z));
    else
        asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(result) : "r"(x), "r"(y), "r"(z));
    return result;
}

}  // namespace flash::cuda
