// Which key positions a tile of query rows visits, in runs, and whether a run needs the element mask. The
// backward walks the same object with the roles of queries and keys exchanged (Mask::queries_of, BlockLists
// of the transpose).
//
// Let [begin(i), end(i)) be what row i sees; both ends never decrease with i. Rows [a, b] then visit
// [begin(a), end(b)), and every one of them sees all of [begin(b), end(a)):
//
//      begin(a)      begin(b)            end(a)        end(b)
//         |-- masked --|------ plain ------|-- masked --|
//
// (The plain part is empty where begin(b) >= end(a).) A block list cuts the visited positions into spans;
// each span is split at the same two places.
#pragma once

#include "block_mask.h"
#include "host_device.h"
#include "mask.h"

namespace flash {

struct Run {
    Position begin, end;  // positions; begin is a multiple of the granularity, or the begin of a listed block
    bool masked;          // some row of the tile does not see some position of the run
    bool partial = false;  // bits of an element mask say which; then masked is true, too
};

class TileSchedule {
  public:
    // first_row, last_row: what the tile's first and last row see. Runs begin and plain runs end at multiples
    // of granularity (the engine's tile, where it may not start tiles elsewhere), so a plain run is whole
    // tiles.
    FLASH_HOST_DEVICE TileSchedule(Interval first_row, Interval last_row, Position granularity)
        : visited_{first_row.begin / granularity * granularity, last_row.end},
          plain_{(last_row.begin + granularity - 1) / granularity * granularity,
                 first_row.end / granularity * granularity},
          position_(visited_.begin),
          span_end_(visited_.end),
          partial_(false),
          blocks_{nullptr, 0, 0} {}

    // With a block list the granularity must divide the block. merges: neighbouring blocks of a kind make one
    // span; else each is one of its own, and no more of the list is read than is needed.
    FLASH_HOST_DEVICE TileSchedule(Interval first_row, Interval last_row, Position granularity,
                                   const BlockList& blocks, bool merges = true)
        : TileSchedule(first_row, last_row, granularity) {
        blocks_ = blocks;
        merges_ = merges;
        span_end_ = position_;
    }

    // The next run in ascending order; false at the end.
    FLASH_HOST_DEVICE bool next(Run& run) {
        while (position_ >= span_end_)
            if (!next_span()) return false;
        if (plain_.empty() || position_ >= plain_.end) {
            run = {position_, span_end_, true, partial_};
        } else if (position_ < plain_.begin) {
            run = {position_, span_end_ < plain_.begin ? span_end_ : plain_.begin, true, partial_};
        } else {
            run = {position_, span_end_ < plain_.end ? span_end_ : plain_.end, partial_, partial_};
        }
        position_ = run.end;
        return true;
    }

  private:
    // Merged, so that an engine's tiles need not end at each block, or next_span be called for it.
    FLASH_HOST_DEVICE bool next_span() {
        if (blocks_.count == 0) return false;
        const Position first = blocks_.first();
        Position last = first;
        partial_ = blocks_.first_is_partial();
        do {
            ++blocks_.indices;
            --blocks_.count;
        } while (merges_ && blocks_.count > 0 && blocks_.first() == last + 1 &&
                 blocks_.first_is_partial() == partial_ && ++last);
        const Interval span = intersection({first * blocks_.block, (last + 1) * blocks_.block}, visited_);
        position_ = span.begin;
        span_end_ = span.end;
        return true;
    }

    Interval visited_, plain_;
    Position position_, span_end_;
    bool partial_;  // the span
    bool merges_ = false;
    BlockList blocks_;
};

}  // namespace flash
