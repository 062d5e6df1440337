// Which tiles a persistent block computes, longest first. Where tiles take different times a block asks for
// the next one when it needs one; else the order is fixed, and nothing is asked.
#pragma once

#include <atomic>
#include <random>

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

// Differs from that of every launch whose ticket may still lie in memory. On the host.
inline uint64_t new_ticket() {
    static std::atomic<uint64_t> ticket = [] {
        std::random_device random;
        return uint64_t(random()) << 32 | random();
    }();
    const uint64_t mine = ++ticket;
    return mine ? mine : ++ticket;
}

class TileQueue {
  public:
    static constexpr int64_t workspace_bytes = sizeof(TileCounter);

    // Under a mask, and in packed sequences, tiles take different times.
    static bool needs_counter(const ForwardProblem& problem) {
        return problem.window_left >= 0 || problem.window_right >= 0 || problem.cu_seqlens_q ||
               problem.cu_seqlens_k || problem.key_blocks.counts || problem.query_blocks.counts;
    }

    // On the host. counter == nullptr: block b of n takes the tiles b, 2n - 1 - b, 2n + b, ...
    // count: of tiles, or of what else blocks take. strict: a tile is taken by a block that runs when all
    // before it have been; else block b's first tile is b, whenever it runs.
    TileQueue(const RowTiling& tiling, int64_t count, void* counter, bool strict = false)
        : tiling(tiling),
          strict_(strict),
          count_(uint32_t(count)),
          counter_(static_cast<TileCounter*>(counter)),
          ticket_(counter ? new_ticket() : 0) {}

    // What one block has taken so far. For one thread.
    class Reader {
      public:
        __device__ explicit Reader(const TileQueue& queue) : queue_(queue) {}

        // The next tile's number, for tiling(); false at the end, and then not to be called again. To be
        // asked when the tile is wanted, and no earlier: what a block has taken no other can do for it at the
        // end.
        __device__ bool take(uint32_t& index) {
            if (taken_ == 0) start();
            index = taken_ > 0 || queue_.strict_ ? following() : blockIdx.x;
            if (index < queue_.count_) {
                ++taken_;
                return true;
            }
            if (queue_.counter_ && index == queue_.count_ + last()) queue_.counter_->ticket = 0;
            return false;
        }

      private:
        __device__ static uint32_t last() { return gridDim.x - 1; }

        __device__ void start() const {
            TileCounter* const counter = queue_.counter_;
            if (!counter || blockIdx.x > 0) return;
            counter->next = queue_.strict_ ? 0 : gridDim.x;
            store_release(&counter->ticket, queue_.ticket_);
        }

        __device__ uint32_t following() const {
            TileCounter* const counter = queue_.counter_;
            if (!counter) return taken_ * gridDim.x + (taken_ % 2 ? last() - blockIdx.x : blockIdx.x);
            if (taken_ <= 1 && blockIdx.x > 0)
                while (load_acquire(&counter->ticket) != queue_.ticket_) continue;
            return add_relaxed(&counter->next, 1);
        }

        const TileQueue& queue_;
        uint32_t taken_ = 0;
    };

    const RowTiling tiling;

  private:
    bool strict_;
    uint32_t count_;
    TileCounter* counter_;
    uint64_t ticket_;  // not 0
};

}  // namespace flash::cuda::sm90
