// Additions to device memory that bring nothing back: of registers (PTX ISA, "red"; four floats at once from
// Hopper on), or of what lies in shared memory, by the copy engine ("cp.reduce.async.bulk"), which also
// stores first summands and brings sums back ("cp.async.bulk").
#pragma once

#include <cstdint>

namespace flash::cuda {

__device__ __forceinline__ void reduce_add(float* global, float x) {
    asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(__cvta_generic_to_global(global)), "f"(x) : "memory");
}

__device__ __forceinline__ void reduce_add(float4* global, float4 x) {
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"l"(__cvta_generic_to_global(global)),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

// By one thread, which goes on; addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_reduce_add(float* global, uint32_t shared, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;\n" ::"l"(__cvta_generic_to_global(global)),
        "r"(shared), "r"(bytes)
        : "memory");
}

// The same, with nothing there before.
__device__ __forceinline__ void bulk_store(float* global, uint32_t shared, uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;\n" ::"l"(__cvta_generic_to_global(global)),
        "r"(shared), "r"(bytes)
        : "memory");
}

// Into shared memory; the mbarrier is told of every byte.
__device__ __forceinline__ void bulk_load(uint32_t shared, const float* global, uint32_t bytes,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
            shared),
        "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Until what the thread has started no longer needs shared memory.
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}

// Until all that the thread has started is in device memory.
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory");
}

}  // namespace flash::cuda
