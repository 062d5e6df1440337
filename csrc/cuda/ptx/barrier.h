// bar.sync with a name: a barrier among some of a block's warps (PTX ISA, "bar"). 0 is __syncthreads'.
#pragma once

#include <cstdint>

namespace flash::cuda {

// kThreads: of all the warps that meet at it.
template <int kThreads>
__device__ __forceinline__ void barrier_of(int name) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(name), "n"(kThreads) : "memory");
}

// The same; true for all of them if x was for any.
template <int kThreads>
__device__ __forceinline__ bool barrier_or(int name, bool x) {
    uint32_t any;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }\n"
        : "=r"(any)
        : "r"(uint32_t(x)), "r"(name), "n"(kThreads)
        : "memory");
    return any;
}

}  // namespace flash::cuda
