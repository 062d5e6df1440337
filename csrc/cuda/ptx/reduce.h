// red.add: adds to device memory without reading back (PTX ISA, "red"); four floats at once from Hopper on.
#pragma once

namespace flash::cuda {

__device__ __forceinline__ void reduce_add(float* global, float x) {
    asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(global)), "f"(x) : "memory");
}

__device__ __forceinline__ void reduce_add(float4* global, float4 x) {
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"l"(__cvta_generic_to_global(global)),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

}  // namespace flash::cuda
