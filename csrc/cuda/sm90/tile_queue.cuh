// Which tiles a persistent block computes, longest first. Where tiles take different times a block asks for
// the next one when it needs one; else the order is fixed, and nothing is asked.
#pragma once

#include "../any/row_tile.cuh"
#include "../ptx/counter.h"

namespace flash::cuda::sm90 {

// The counter that blocks share lies in memory that may hold anything when the kernel starts: block 0, which
// is started first, sets it and then the ticket, which is another one at every launch; the others wait for
// that. Whoever takes the last number that is ever taken clears the ticket, so that a launch repeated with
// the same one, as from a CUDA graph, waits, too.
struct TileCounter {
    uint64_t ticket;
    uint32_t next;
};

class TileQueue {
  public:
    static constexpr int64_t workspace_bytes = sizeof(TileCounter);

    // On the host. counter == nullptr: block b of n takes the tiles b, 2n - 1 - b, 2n + b, ...
    // late: tiles take so long that the next one is taken only when one is begun.
    TileQueue(const RowTiling& tiling, bool late, TileCounter* counter, uint64_t ticket)
        : tiling(tiling), late(late), counter_(counter), ticket_(ticket) {}

    // What one block has taken so far. For one thread.
    class Reader {
      public:
        __device__ explicit Reader(const TileQueue& queue) : queue_(queue), next_(blockIdx.x) {}

        // The next tile's number, for tiling(); false at the end.
        __device__ bool take(uint32_t& index) {
            index = next_;
            const uint32_t count = uint32_t(queue_.tiling.count());
            if (index >= count) {
                if (queue_.counter_ && index == count + last()) queue_.counter_->ticket = 0;
                return false;
            }
            ++taken_;
            next_ = queue_.counter_ ? ask()
                                    : taken_ * gridDim.x + (taken_ % 2 ? last() - blockIdx.x : blockIdx.x);
            return true;
        }

      private:
        __device__ static uint32_t last() { return gridDim.x - 1; }

        // One tile ahead, so that nobody waits for the answer.
        __device__ uint32_t ask() const {
            TileCounter* const counter = queue_.counter_;
            if (taken_ == 1) {
                if (blockIdx.x == 0) {
                    counter->next = gridDim.x;
                    store_release(&counter->ticket, queue_.ticket_);
                } else {
                    while (load_acquire(&counter->ticket) != queue_.ticket_) continue;
                }
            }
            return add_relaxed(&counter->next, 1);
        }

        const TileQueue& queue_;
        uint32_t taken_ = 0, next_;
    };

    const RowTiling tiling;
    const bool late;

  private:
    TileCounter* counter_;
    uint64_t ticket_;  // not 0
};

}  // namespace flash::cuda::sm90
