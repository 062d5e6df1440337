// Counters in device memory by which blocks wait for each other's writes (PTX ISA, "Memory Consistency
// Model"): what was written before an addition is seen after a load that sees the addition. One thread may do
// it for a block, before or after a barrier of the block.
#pragma once

#include <cstdint>

namespace flash::cuda {

__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t x) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(counter)), "r"(x)
                 : "memory");
}

// Returns what was there before; sees what was written before the additions that it counts.
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* counter, uint32_t x) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;\n"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(x)
                 : "memory");
    return before;
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n"
                 : "=r"(x)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return x;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* ticket) {
    uint64_t x;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];\n"
                 : "=l"(x)
                 : "l"(__cvta_generic_to_global(ticket))
                 : "memory");
    return x;
}

__device__ __forceinline__ void store_release(uint64_t* ticket, uint64_t x) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;\n" ::"l"(__cvta_generic_to_global(ticket)), "l"(x)
                 : "memory");
}

// Returns what was there before; says nothing about other writes.
__device__ __forceinline__ uint32_t add_relaxed(uint32_t* counter, uint32_t x) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;\n"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(x)
                 : "memory");
    return before;
}

}  // namespace flash::cuda
