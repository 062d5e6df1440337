// A schedule one tile at a time, every warp for itself: where the next tile starts is an addition, and only
// at the end of a run (three times in a dense row of tiles) does a lane ask the schedule.
#pragma once

#include "../../attention/tile_schedule.h"
#include "../tile/fragment.h"

namespace flash::cuda {

// A place in a schedule: the run that is being walked and what follows it. Each warp's is in shared memory,
// since what is needed only at a mask would waste registers.
struct SchedulePlace {
    TileSchedule schedule;
    Run run;  // empty at the end

    __device__ __forceinline__ void next() {
        if (!schedule.next(run)) run = {0, 0, false};
    }
};

// Every call is given the warp's place: a reference kept would be two registers. Tiles start at multiples of
// kTile, wherever a run starts: what they hold outside the run is masked.
template <int kTile>
class TileWalk {
  public:
    // From `start` on, which stands at the first run. The warp's place becomes a copy.
    __device__ __forceinline__ TileWalk(SchedulePlace& place, const SchedulePlace& start) {
        if (lane_index() == 0) place = start;
        enter(start.run);
        __syncwarp();
    }

    __device__ __forceinline__ bool more() const { return first() < end_; }
    __device__ __forceinline__ Position first() const { return at_ & -kAligned; }
    // What of the tile exists and some row sees.
    __device__ __forceinline__ Interval seen(const SchedulePlace& place) const {
        return intersection({first(), first() + kTile}, {place.run.begin, place.run.end});
    }
    // All of the tile is in its run.
    __device__ __forceinline__ bool whole() const { return !(at_ & kCut) && first() + kTile <= end_; }
    // Some row of the block's tile does not see some position of this one.
    __device__ __forceinline__ bool masked() const {
        return at_ & (kCut | kMasked) || first() + kTile > end_;
    }

    __device__ __forceinline__ void advance(SchedulePlace& place) {
        at_ = (at_ & ~kCut) + kTile;
        if (!more()) next_run(place);
    }

    // Where a tile is not masked: past that and all others of its run that are not. Returns how many.
    __device__ __forceinline__ uint32_t pass(SchedulePlace& place) {
        const uint32_t tiles = uint32_t(end_ - at_) / kTile;
        at_ += tiles * kTile;
        if (!more()) next_run(place);
        return tiles;
    }

  private:
    __device__ __forceinline__ void next_run(SchedulePlace& place) {
        __syncwarp();
        if (lane_index() == 0) place.next();
        __syncwarp();
        enter(place.run);
    }

    __device__ __forceinline__ void enter(const Run& run) {
        const int cut = run.begin % kTile;
        at_ = (run.begin - cut) | (run.masked ? kMasked : 0) | (cut ? kCut : 0);
        end_ = run.end;
    }

    // In at_'s low bits, which a tile's first position leaves free: the run is masked, begins in the tile.
    static constexpr Position kMasked = 1, kCut = 2, kAligned = kTile & -kTile;
    static_assert(kAligned > (kMasked | kCut));

    Position at_, end_;
};

}  // namespace flash::cuda
