// How far delta is, where the kernel that needs it runs beside the one that computes it.
#pragma once

#include "../ptx/counter.h"

namespace flash::cuda {

// Of each query head of a dense batch a counter, zero at the start, to which each warp adds that stores rows.
struct DeltaProgress {
    static constexpr uint32_t kBad = 1 << 16;  // and that, if something of them is not finite

    uint32_t* done = nullptr;  // [batch, heads]; nullptr: all is there when the grid begins
    uint32_t all = 0;          // warps of a head, fewer than kBad

    // By a warp that has stored.
    __device__ __forceinline__ void tell(int64_t head, bool bad) const {
        const bool some_bad = __any_sync(0xffffffff, bad);
        __syncwarp();
        if (threadIdx.x % 32 == 0) add_release(done + head, 1 + (some_bad ? kBad : 0));
    }
    // By a warp: until all of so many heads is there. True if it is finite.
    __device__ __forceinline__ bool await(int64_t first_head, int heads) const {
        bool bad = false;
        for (int i = 0; i < heads; i += 32) {
            const uint32_t* const mine = done + first_head + min(i + int(threadIdx.x % 32), heads - 1);
            uint32_t seen = 0;
            while (__any_sync(0xffffffff, (seen = load_acquire(mine)) % kBad < all)) __nanosleep(20);
            bad |= seen >= kBad;
        }
        return !__any_sync(0xffffffff, bad);
    }
};

}  // namespace flash::cuda
