// A schedule one tile at a time, every warp for itself: where the next tile starts is an addition, and only
// at the end of a run (three times in a dense row of tiles) does a lane ask the schedule.
#pragma once

#include "../../attention/tile_schedule.h"
#include "../tile/fragment.h"

namespace flash::cuda::sm80 {

// A warp's place in its schedule, in shared memory. What is needed only at a mask stays there: registers are
// scarce.
struct WarpSchedule {
    TileSchedule schedule;
    Run run;
};

// Every call is given the warp's place: a reference kept would be two registers. Tiles start at multiples of
// kTile, wherever a run starts: what they hold outside the run is masked.
template <int kTile>
class TileWalk {
  public:
    __device__ __forceinline__ TileWalk(WarpSchedule& place, const TileSchedule& schedule) {
        if (lane_index() == 0) place.schedule = schedule;
        next_run(place);
    }

    __device__ __forceinline__ bool more() const { return first_ < end_; }
    __device__ __forceinline__ Position first() const { return first_; }
    // What of the tile exists and some row sees.
    __device__ __forceinline__ Interval seen(const WarpSchedule& place) const {
        return intersection({first_, first_ + kTile}, {place.run.begin, place.run.end});
    }
    // Some row of the block's tile does not see some position of this one.
    __device__ __forceinline__ bool masked(const WarpSchedule& place) const {
        return place.run.masked || first_ < place.run.begin || first_ + kTile > end_;
    }

    __device__ __forceinline__ void advance(WarpSchedule& place) {
        first_ += kTile;
        if (first_ >= end_) next_run(place);
    }

  private:
    __device__ __forceinline__ void next_run(WarpSchedule& place) {
        __syncwarp();
        if (lane_index() == 0 && !place.schedule.next(place.run)) place.run = {0, 0, false};
        __syncwarp();
        first_ = place.run.begin / kTile * kTile;
        end_ = place.run.end;
    }

    Position first_, end_;
};

}  // namespace flash::cuda::sm80
