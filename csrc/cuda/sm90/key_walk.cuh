// Which tiles of keys a tile of queries visits, and which of its warpgroups do: all that some query sees, or
// what of it a map's lists have. A warpgroup's queries lie in one block row, the tile's in up to four.
#pragma once

#include "../../attention/block_union.h"
#include "../tile/fragment.h"

namespace flash::cuda::sm90 {

// A place in the walk: the keys that are being walked, all or a block, and what follows them. Each warp's is
// in shared memory, since what is rarely needed would waste registers.
struct KeyPlace {
    BlockUnion blocks;  // a list for each warpgroup
    Position block;
    Interval visited;  // begins with a tile
    Interval keys;     // empty at the end
    ListedBlock of;    // whose they are
    bool mapped;

    // The blocks are set, if there is a map.
    __device__ void start(Interval all, const BlockLists& map) {
        visited = keys = all;
        of = {0, ~0u, 0};
        block = Position(map.column_block);
        mapped = map.counts;
        if (mapped) next();
    }

    __device__ __forceinline__ void next() {
        of = blocks.next();
        keys = of.lists ? intersection({of.index * block, (of.index + 1) * block}, visited) : Interval();
    }
};

// Every call is given the warp's place: a reference kept would be two registers. It is of use under a map
// only: what a warp reads in shared memory it may wait for as long as products do. Blocks of a map are whole
// tiles.
template <int kTile>
class KeyWalk {
  public:
    // From `start` on. The warp's place becomes a copy.
    __device__ __forceinline__ KeyWalk(KeyPlace& place, const KeyPlace& start) : mapped_(start.mapped) {
        if (mapped_) {
            if (lane_index() == 0) place = start;
            __syncwarp();
        }
        enter(start);
    }

    __device__ __forceinline__ bool more() const { return first_ < end_; }
    __device__ __forceinline__ Position first() const { return first_; }
    // Whose the tile is.
    __device__ __forceinline__ ListedBlock of(const KeyPlace& place) const {
        return mapped_ ? place.of : ListedBlock{0, ~0u, 0};
    }
    // Who has some of what follows it, too.
    __device__ __forceinline__ uint32_t later(const KeyPlace& place) const {
        return mapped_ ? place.of.lists | place.blocks.unfinished() : ~0u;
    }

    __device__ __forceinline__ void advance(KeyPlace& place) {
        first_ += kTile;
        if (first_ < end_ || !mapped_) return;
        __syncwarp();
        if (lane_index() == 0) place.next();
        __syncwarp();
        enter(place);
    }

  private:
    __device__ __forceinline__ void enter(const KeyPlace& place) {
        first_ = place.keys.begin;
        end_ = place.keys.end;
    }

    Position first_, end_;
    const bool mapped_;
};

}  // namespace flash::cuda::sm90
