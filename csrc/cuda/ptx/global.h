// Stores to device memory through a pointer whose kind the compiler lost sight of.
#pragma once

#include <cstdint>

namespace flash::cuda {

// 8 bytes at a multiple of 8.
__device__ __forceinline__ void store_global(void* to, uint2 x) {
    asm volatile("st.global.v2.b32 [%0], {%1,%2};\n" ::"l"(__cvta_generic_to_global(to)), "r"(x.x), "r"(x.y)
                 : "memory");
}

}  // namespace flash::cuda
