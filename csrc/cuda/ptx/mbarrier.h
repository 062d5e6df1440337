// mbarrier: a barrier in shared memory at which arriving and waiting are two things (PTX ISA, "mbarrier"). It
// completes a phase when as many have arrived as it was made for; phases count 0, 1, 0, ...
#pragma once

#include <cstdint>

#include "../sanitized.h"

namespace flash::cuda {

// By one thread, before a __syncthreads.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }\n" ::"r"(barrier) : "memory");
}

// The phase waits for so many bytes of copies more (ptx/tma.h). The thread has yet to arrive.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// The whole warp, as kWarpArrivals. One is enough, since __syncwarp orders what the other lanes did before;
// racecheck of compute-sanitizer follows only what a thread did that arrives itself (tools/sanitize.sh).
// thread: threadIdx.x, perhaps from a register: read again it comes behind the warp's stores to shared
// memory.
constexpr int kWarpArrivals = kSanitized ? 32 : 1;

__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier, uint32_t thread = threadIdx.x) {
    __syncwarp();
    if (kWarpArrivals == 32 || thread % 32 == 0) mbarrier_arrive(barrier);
}

// The thread arrives when all cp.async that it has started are done.
__device__ __forceinline__ void mbarrier_arrive_behind_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}

// Is the phase of that parity complete? Of a new barrier the phase before the first one, 1, is.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

// Until it is.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    uint32_t done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
#else
    while (!mbarrier_test(barrier, parity)) continue;
#endif
}

}  // namespace flash::cuda
