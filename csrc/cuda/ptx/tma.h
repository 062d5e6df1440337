// The tensor memory accelerator: one thread starts the copy of a whole box of a tensor, whose shape, strides
// and swizzle a tensor map holds (PTX ISA, "cp.async.bulk.tensor"; CUDA driver API, cuTensorMapEncodeTiled).
// Coordinates count elements, innermost first; what lies outside the tensor becomes zeros.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cache_hint.h"

namespace flash::cuda {

// The map is on its way to where copies look for it.
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Into shared memory; the mbarrier is told of every byte.
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x,
                                         int row, int head, int batch, NoHint = {}) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
        "%4, %5, %6}], [%2];\n" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(x), "r"(row), "r"(head), "r"(batch)
        : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x,
                                         int row, int head, int batch, EvictFirst hint) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(x), "r"(row), "r"(head), "r"(batch), "l"(hint.policy)
        : "memory");
}

// From shared memory, to be committed (ptx/reduce.h); what lies outside the tensor is left out.
__device__ __forceinline__ void tma_store(uint32_t shared, const CUtensorMap* map, int x, int row, int head,
                                          int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%1, {%2, %3, %4, %5}], [%0];\n" ::"r"(
            shared),
        "l"(map), "r"(x), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// Copies that follow see what of device memory this thread knows to be written.
__device__ __forceinline__ void fence_async_proxy_of_memory() {
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

// Shared memory that this thread wrote, or read, is from here on seen, or overwritten, by wgmma and by
// copies.
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace flash::cuda
