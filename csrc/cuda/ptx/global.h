// Stores to device memory by pointers of which the compiler knows nothing.
#pragma once

#include <cstdint>

namespace flash::cuda {

// The same pointer; addresses that follow from it are sums of it and a constant then, not computed anew.
template <class T>
__device__ __forceinline__ T* opaque(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

// Without a branch: that would keep what follows waiting for what only the store waits for.
__device__ __forceinline__ void store_global(float* to, float x, bool really) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.f32 [%0], %1; }\n" ::"l"(
                     __cvta_generic_to_global(to)),
                 "f"(x), "r"(int(really))
                 : "memory");
}

// 4 bytes at a multiple of 4.
__device__ __forceinline__ void store_global(void* to, uint32_t x) {
    asm volatile("st.global.b32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(to)), "r"(x) : "memory");
}

// 8 bytes at a multiple of 8.
__device__ __forceinline__ void store_global(void* to, uint2 x, bool really) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.b32 [%0], {%1,%2}; }\n" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(x.x), "r"(x.y), "r"(int(really))
                 : "memory");
}

}  // namespace flash::cuda
