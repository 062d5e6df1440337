// Loads and stores of shared memory by 32-bit address, so that one register holds it.
#pragma once

#include <cstdint>

namespace flash::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return uint32_t(__cvta_generic_to_shared(pointer));
}

// The same number, of which the compiler knows nothing: what is derived from it inside a loop is computed
// there each time, instead of waiting for its use in a register from before the loop.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint2 x) {
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};\n" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];\n" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

}  // namespace flash::cuda
