// ex2.approx: 2^x on the special function unit, relative error below 2^-22; 0 at -inf (PTX ISA, "ex2").
#pragma once

namespace flash::cuda {

__device__ __forceinline__ float exp2_approximate(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
    return result;
}

// x, when y, which is not negative, is known.
__device__ __forceinline__ float behind(float x, float y) {
    float result;
    asm("lop3.b32 %0, %1, %2, 0x80000000, 0x70;\n" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

}  // namespace flash::cuda
