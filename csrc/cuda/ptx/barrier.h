// bar.sync with a name: a barrier among some of a block's warps (PTX ISA, "bar"). 0 is __syncthreads'.
#pragma once

namespace flash::cuda {

// kThreads: of all the warps that meet at it.
template <int kThreads>
__device__ __forceinline__ void barrier_of(int name) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(name), "n"(kThreads) : "memory");
}

// Counts the warp in and lets it go on.
template <int kThreads>
__device__ __forceinline__ void arrive_at_barrier_of(int name) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(name), "n"(kThreads) : "memory");
}

}  // namespace flash::cuda
