// A schedule one tile at a time, every warp for itself: where the next tile starts is an addition, and only
// at the end of a run (three times in a dense row of tiles) does a lane ask the schedule, which lies in
// shared memory.
#pragma once

#include "../../attention/tile_schedule.h"
#include "../tile/fragment.h"

namespace flash::cuda::sm80 {

template <int kTile>
class TileWalk {
  public:
    // schedule: this warp's own copy, in shared memory.
    __device__ __forceinline__ explicit TileWalk(TileSchedule& schedule) { next_run(schedule); }

    __device__ __forceinline__ bool more() const { return position_ < end_; }
    __device__ __forceinline__ Position first() const { return position_; }
    // Some row of the block's tile does not see some position of this one.
    __device__ __forceinline__ bool masked() const { return masked_; }

    __device__ __forceinline__ void advance(TileSchedule& schedule) {
        position_ += kTile;
        if (position_ >= end_) next_run(schedule);
    }

  private:
    __device__ __forceinline__ void next_run(TileSchedule& schedule) {
        Run run{0, 0, false};
        if (lane_index() == 0 && !schedule.next(run)) run = {0, 0, false};
        position_ = __shfl_sync(0xffffffff, run.begin, 0);
        end_ = __shfl_sync(0xffffffff, run.end, 0);
        masked_ = __shfl_sync(0xffffffff, int(run.masked), 0);
    }

    Position position_, end_;
    bool masked_;
};

}  // namespace flash::cuda::sm80
