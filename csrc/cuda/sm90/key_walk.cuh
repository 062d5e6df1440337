// Which tiles of keys a tile of queries visits, and which of its warpgroups do: all that some query sees, or
// what of it a map's lists have. A warpgroup's queries lie in one block row, the tile's in up to four.
#pragma once

#include "../../attention/block_mask.h"
#include "../../attention/score_matrix.h"
#include "../tile/fragment.h"

namespace flash::cuda::sm90 {

// The walk's begin.
struct KeyStart {
    static constexpr int kLists = 4;                         // a warpgroup each
    static constexpr int32_t kNone = (1 << kBlockBits) - 1;  // behind all blocks

    Interval visited;  // begins with a tile
    bool mapped;
    int row_halves;  // where the tile's queries begin, in halves of a block
    // What a warpgroup has to visit, and its first index. It sees something of the last block.
    struct alignas(16) Rest {
        const int32_t* indices;
        Position count;
        int32_t first;
    } rests[kLists];  // if it is mapped

    __device__ __forceinline__ void set(int i, const BlockList& list) {
        rests[i] = {list.indices, list.count, list.count > 0 ? *list.indices : kNone};
    }
};

// By a warp, whose lanes look after one list each: so all are read in one latency, and ahead. What it needs
// of shared memory a warp reads once, since it may wait for that as long as products do, and what it has to
// know of a tile it finds out once for a block: it has to be done with a tile as soon as those that multiply.
// Blocks of a map are whole tiles.
template <int kTile>
class KeyWalk {
  public:
    // What the lane's list hides of a tile: some of it, or all. Without a map it hides nothing.
    static constexpr uint32_t some_hidden = 1, all_hidden = 2;

    // sight_end: behind what the list's rows see.
    __device__ __forceinline__ KeyWalk(const KeyStart& start, Position sight_end, const BlockLists& map,
                                       int list)
        : first_(start.visited.begin),
          end_(start.visited.end),
          last_(end_),
          list_end_(sight_end),
          mapped_(start.mapped) {
        if (!mapped_) return;
        row_half_ = (start.row_halves + list) % 2;
        const KeyStart::Rest rest = start.rests[list];
        indices_ = rest.indices;
        left_ = rest.count;
        index_ = rest.first;
        read_ahead(map);
        enter(map);
    }

    __device__ __forceinline__ bool more() const { return first_ < end_; }
    __device__ __forceinline__ Position first() const { return first_; }
    // Of the tile, for the lane.
    __device__ __forceinline__ uint32_t hidden() const {
        return hidden_ >> (kTile <= kMaskQuarter && first_ & kMaskQuarter ? kBits : 0) &
               (some_hidden | all_hidden);
    }
    // Behind what the lane's list has and its rows see, once its last block is known; before, behind what
    // those see.
    __device__ __forceinline__ Position list_end() const { return list_end_; }
    // Behind what any list has and its rows see.
    __device__ __forceinline__ Position last() const { return last_; }

    __device__ __forceinline__ void advance(const BlockLists& map) {
        first_ += kTile;
        if (first_ < end_ || !mapped_) return;
        if (hidden_ & kListed) {
            index_ = following_;
            ++indices_;
            --left_;
            read_ahead(map);
        }
        enter(map);
    }

  private:
    static constexpr int kBits = 2;                // of a half of a block's columns
    static constexpr uint32_t kListed = 1u << 31;  // the lane's list has the block

    __device__ __forceinline__ void read_ahead(const BlockLists& map) {
        following_ = left_ > 1 ? indices_[1] : KeyStart::kNone;
        if (left_ > 1) return;
        const bool half = quarter_of(index_, row_half_, 1) == Quarter::hidden;
        const Position end = (block_of(index_) + 1) * Position(map.column_block) - (half ? kMaskQuarter : 0);
        list_end_ = left_ > 0 ? min(list_end_, end) : 0;
    }

    // The first block of any list.
    __device__ __forceinline__ void enter(const BlockLists& map) {
        const int32_t mine = block_of(index_), index = __reduce_min_sync(0xffffffff, mine);
        end_ = first_;
        if (index == KeyStart::kNone) return;
        const Position block = Position(map.column_block);
        first_ = max(first_, index * block);
        end_ = min((index + 1) * block, last_);
        if (mine == index) {
            const uint32_t left = hidden_of(0), right = hidden_of(1);
            // A tile of both halves is hidden where both are.
            hidden_ = kListed |
                      (kTile <= kMaskQuarter ? left | right << kBits
                                             : left & right & all_hidden | (left | right ? some_hidden : 0));
        } else {
            hidden_ = all_hidden | all_hidden << kBits;
        }
    }
    __device__ __forceinline__ uint32_t hidden_of(int column_half) const {
        return uint32_t(quarter_of(index_, row_half_, column_half));
    }

    Position first_, end_;
    const Position last_;
    Position list_end_;
    const bool mapped_;
    uint32_t hidden_ = 0;  // of both halves, and kListed
    // If there is a map:
    int row_half_;               // of a block: where the list's rows are
    int32_t index_, following_;  // the list's, and the one behind it, read ahead
    const int32_t* indices_;     // from index_ on
    Position left_;
};

}  // namespace flash::cuda::sm90
