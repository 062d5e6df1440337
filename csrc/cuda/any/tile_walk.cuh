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

    __device__ __forceinline__ bool more() const { return first_ < end_; }
    __device__ __forceinline__ Position first() const { return first_; }
    // What of the tile exists and some row sees.
    __device__ __forceinline__ Interval seen(const SchedulePlace& place) const {
        return intersection({first_, first_ + kTile}, {place.run.begin, place.run.end});
    }
    // All of the tile is in its run.
    __device__ __forceinline__ bool whole() const { return !cut_ && first_ + kTile <= end_; }
    // Some row of the block's tile does not see some position of this one.
    __device__ __forceinline__ bool masked() const { return run_masked_ || !whole(); }

    __device__ __forceinline__ void advance(SchedulePlace& place) {
        first_ += kTile;
        cut_ = false;
        if (first_ >= end_) next_run(place);
    }

  private:
    __device__ __forceinline__ void next_run(SchedulePlace& place) {
        __syncwarp();
        if (lane_index() == 0) place.next();
        __syncwarp();
        enter(place.run);
    }

    __device__ __forceinline__ void enter(const Run& run) {
        first_ = run.begin / kTile * kTile;
        end_ = run.end;
        run_masked_ = run.masked;
        cut_ = first_ < run.begin;
    }

    Position first_, end_;
    bool run_masked_;
    bool cut_;  // the run begins within the tile
};

}  // namespace flash::cuda
