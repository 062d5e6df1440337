// Sums of dQ that blocks add to in no fixed order are zeros before. Cleared before the walk they are written
// to device memory and read again, 30 us for 16384 tokens of 2048 elements. So only the first units' are
// (any/dq_sums.cuh); those of the others are cleared by the blocks that walk units which come so much earlier
// that nobody waits for it.
#pragma once

#include <algorithm>

#include "../ptx/counter.h"
#include "backward_plan.cuh"

namespace flash::cuda::sm90 {

class DqZeros {
  public:
    static constexpr bool exist = true;

    DqZeros() = default;  // no sums have to be zero

    // blocks: that run at once. They have to take tiles in the order of their numbers.
    DqZeros(const RowTiling& keys, int64_t blocks) : units_(uint32_t(keys.heads())), sharers_(keys.tiles()) {
        // A unit's sums are cleared by blocks that began before its section, by a wave.
        const int64_t wave = (blocks + sharers_ - 1) / sharers_;
        const int64_t lead = keys.last_section() + wave + 1;
        lead_ = keys.count() > 0 && lead < units_ ? uint32_t(lead) : units_;
    }

    // Of counters, zero at the start.
    int64_t bytes() const { return units_ * int64_t(sizeof(uint32_t)); }
    void lie_at(void* workspace) { cleared_ = static_cast<uint32_t*>(workspace); }
    // So many units' sums are zero at the start.
    int64_t lead() const { return std::min(lead_, units_); }

    // By a warp, before the block adds for a tile of keys.
    __device__ __forceinline__ void await(uint32_t unit) const {
        if (unit < lead_) return;
        while (load_acquire(cleared_ + unit) < sharers_) __nanosleep(20);
    }
    // By a warp, once for each tile of keys: its share of a later unit.
    __device__ __forceinline__ void clear_later(const TileOrder::Place& place, const DqSums& sums) const {
        const uint32_t unit = place.head + lead_;
        if (unit >= units_) return;
        const int64_t elements = sums.unit_elements(), end = share(place.tile + 1, elements);
        float* const first = sums.of_tile(unit, 0) + lane_index() * 4;
#pragma unroll 8
        for (int64_t i = share(place.tile, elements); i < end; i += 32 * 4)
            __stcg(reinterpret_cast<float4*>(first + i), float4{0, 0, 0, 0});
        __syncwarp();
        if (lane_index() == 0) add_release(cleared_ + unit, 1);
    }

  private:
    // Where that of a tile of keys begins: a multiple of what a warp clears at once, as a tile's sums are.
    __device__ __forceinline__ int64_t share(uint32_t tile, int64_t elements) const {
        return elements / 128 * tile / sharers_ * 128;
    }

    uint32_t units_ = 0;
    uint32_t sharers_ = 0;         // tiles of keys of a unit
    uint32_t lead_ = ~0u;          // units before it wait for no zeros
    uint32_t* cleared_ = nullptr;  // of each unit: so many sharers have cleared their share
};

// Where no sums have to be zero.
struct NoDqZeros {
    static constexpr bool exist = false;
    __device__ __forceinline__ void await(uint32_t) const {}
    __device__ __forceinline__ void clear_later(const TileOrder::Place&, const DqSums&) const {}
};

}  // namespace flash::cuda::sm90
