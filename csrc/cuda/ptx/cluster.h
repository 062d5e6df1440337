// Clusters: blocks of a grid that run at the same time, and read each other's shared memory (PTX ISA,
// "barrier.cluster", "mapa"). From Hopper on.
#pragma once

#include <cstdint>

namespace flash::cuda {

// All threads of the cluster arrive, then wait until all have; what they wrote before is seen behind it. A
// block whose memory others may still read must not end.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}

// The same by those that have only read: says nothing of what they wrote, and does not wait for that.
__device__ __forceinline__ void arrive_at_cluster_relaxed() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// What the cluster's block of that rank has at that address of its shared memory; if not `really`, x stays.
// Without a branch, so that several loads are under way at the same time.
__device__ __forceinline__ void load_cluster(float& x, uint32_t address, uint32_t rank, bool really) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; .reg .b32 there; setp.ne.b32 p, %3, 0; mapa.shared::cluster.u32 there, %1, %2;\n"
        "  @p ld.shared::cluster.f32 %0, [there]; }\n"
        : "+f"(x)
        : "r"(address), "r"(rank), "r"(int(really))
        : "memory");
#endif
}

__device__ __forceinline__ void load_cluster(float4& x, uint32_t address, uint32_t rank, bool really) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; .reg .b32 there; setp.ne.b32 p, %6, 0; mapa.shared::cluster.u32 there, %4, %5;\n"
        "  @p ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there]; }\n"
        : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
        : "r"(address), "r"(rank), "r"(int(really))
        : "memory");
#endif
}

}  // namespace flash::cuda
