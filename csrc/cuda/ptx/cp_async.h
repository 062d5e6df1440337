// cp.async: copies 16 bytes from global to shared memory past the registers (PTX ISA, "Asynchronous copy").
#pragma once

#include <cstdint>

#include "cache_hint.h"

namespace flash::cuda {

__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, NoHint = {}) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(shared),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
}

__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, EvictFirst hint) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared),
                 "l"(__cvta_generic_to_global(global)), "l"(hint.policy)
                 : "memory");
}

// Zeros instead of what lies there unless `valid`; the address is not read then.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most `pending` of the groups committed by this thread are still under way.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// Until all copies that this thread has started are done, committed or not.
__device__ __forceinline__ void cp_async_wait_all() {
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}

}  // namespace flash::cuda
