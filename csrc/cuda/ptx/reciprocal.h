// rcp.approx: 1 / x on the special function unit, relative error below 2^-23; 0 from 2^126 on (PTX ISA,
// "rcp").
#pragma once

namespace flash::cuda {

__device__ __forceinline__ float reciprocal_approximate(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
    return result;
}

}  // namespace flash::cuda
