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

// 8 bytes at a multiple of 8.
__device__ __forceinline__ void store_global(void* to, uint2 x) {
    asm volatile("st.global.v2.b32 [%0], {%1,%2};\n" ::"l"(__cvta_generic_to_global(to)), "r"(x.x), "r"(x.y)
                 : "memory");
}

}  // namespace flash::cuda
