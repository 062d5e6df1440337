// Barriers that stand for stages of a ring (ptx/mbarrier.h).
#pragma once

#include <cstdint>

#include "../ptx/shared.h"

namespace flash::cuda::sm90 {

// The n-th use of a ring of barriers: which one, and the parity of its phase.
template <int kCount>
__device__ __forceinline__ uint32_t in_ring(const uint64_t (&barriers)[kCount], uint32_t n) {
    return shared_address(barriers) + n % kCount * uint32_t(sizeof(uint64_t));
}

template <int kCount>
__device__ __forceinline__ uint32_t parity(const uint64_t (&)[kCount], uint32_t n) {
    return n / kCount % 2;
}

}  // namespace flash::cuda::sm90
