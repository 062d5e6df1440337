// lg2.approx: log2(x) on the special function unit, absolute error below 2^-22 for x in (0.5, 2), relative
// error 2^-22 elsewhere; -inf at 0 (PTX ISA, "lg2").
#pragma once

namespace flash::cuda {

__device__ __forceinline__ float log2_approximate(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
    return result;
}

}  // namespace flash::cuda
