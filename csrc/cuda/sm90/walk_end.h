// The last heads of a walk in turns under a diagonal. A head's tiles of keys wait for those behind them, so
// the one that walks longest comes last, and the device would idle for as long at the walk's end. So the last
// heads' tiles wait for nobody, the longest of all come first, and what they add to is zero before.
#pragma once

#include <cstdint>

namespace flash::cuda::sm90 {

class WalkEnd {
  public:
    WalkEnd() = default;  // all wait

    // heads: so many of `units` units.
    WalkEnd(int64_t heads, int64_t units) : heads_(uint32_t(heads)), first_(uint32_t(units - heads)) {}

    int64_t heads() const { return heads_; }

    __device__ __forceinline__ bool has(uint32_t unit) const { return unit >= first_; }
    // In whose place the unit's sums lie, modulo units: the last heads' in front, to be cleared together.
    __device__ __forceinline__ uint32_t sums_of(uint32_t unit) const { return unit + heads_; }

  private:
    uint32_t heads_ = 0, first_ = ~0u;
};

}  // namespace flash::cuda::sm90
