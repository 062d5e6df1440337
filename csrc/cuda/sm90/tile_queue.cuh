// Which tiles a persistent block computes, longest first. Where tiles take different times a block asks for
// the next one when it needs one; else the order is fixed, and nothing is asked.
#pragma once

#include <atomic>
#include <random>

#include "../any/row_tile.cuh"
#include "../launch.h"
#include "../ptx/counter.h"
#include "../sanitized.h"

namespace flash::cuda::sm90 {

// The counter that blocks share lies in memory that may hold anything when the kernel starts: block 0, which
// is started first, sets it and then the ticket, which is another one at every launch; the others wait for
// that. Whoever takes the last number that is ever taken clears the ticket, so that a launch repeated with
// the same one, as from a CUDA graph, waits, too.
struct TileCounter {
    uint64_t ticket;
    uint32_t next;
};

// Where a launch's counter is. For compute-sanitizer it is cleared: a block that looks for the ticket does
// read what nobody may have written.
inline void* counter_at(void* memory, const Launch& launch) {
    if (kSanitized && memory) set_zero(memory, sizeof(TileCounter), "tile counter", launch);
    return memory;
}

// Differs from that of every launch whose ticket may still lie in memory. On the host.
inline uint64_t new_ticket() {
    static std::atomic<uint64_t> ticket = [] {
        std::random_device random;
        return uint64_t(random()) << 32 | random();
    }();
    const uint64_t mine = ++ticket;
    return mine ? mine : ++ticket;
}

// Which of so many tiles, whatever they are of.
class TileNumbers {
  public:
    static constexpr int64_t workspace_bytes = sizeof(TileCounter);
    static constexpr uint32_t kMostAhead = 2;  // of those that know what is theirs

    // On the host. counter == nullptr: block b of n takes the tiles b, 2n - 1 - b, 2n + b, ...
    // count: of tiles, or of what else blocks take. ahead: how many of them a block takes before it wants
    // them; what it has taken no other can do for it at the end. strict: a tile is taken by a block that runs
    // when all before it have been; else block b's first tile is b, whenever it runs.
    // others: so many blocks, the grid's last ones, take none.
    TileNumbers(int64_t count, uint32_t ahead, void* counter, bool strict = false, uint32_t others = 0)
        : ahead(counter ? ahead : kMostAhead),
          strict_(strict),
          others_(others),
          count_(uint32_t(count)),
          counter_(static_cast<TileCounter*>(counter)),
          ticket_(counter ? new_ticket() : 0) {}

    // What one block has taken so far. For one thread.
    class Reader {
      public:
        __device__ explicit Reader(const TileNumbers& queue) : queue_(queue) {}

        // Before the second number is taken, strict: before the first. The first one touches no memory
        // else, so that it can be had while the grid before still uses the counter's (ptx/grid_dependency.h).
        __device__ void open() const {
            TileCounter* const counter = queue_.counter_;
            if (!counter || blockIdx.x > 0) return;
            counter->next = queue_.strict_ ? 0 : gridDim.x;
            store_release(&counter->ticket, queue_.ticket_);
        }

        // False at the end, and then not to be called again.
        __device__ bool take(uint32_t& index) {
            index = taken_ > 0 || queue_.strict_ ? following() : blockIdx.x;
            if (index < queue_.count_) {
                ++taken_;
                return true;
            }
            if (queue_.counter_ && index == queue_.count_ + last() - queue_.others_)
                queue_.counter_->ticket = 0;
            return false;
        }

      private:
        __device__ static uint32_t last() { return gridDim.x - 1; }

        __device__ uint32_t following() const {
            TileCounter* const counter = queue_.counter_;
            if (!counter) return taken_ * gridDim.x + (taken_ % 2 ? last() - blockIdx.x : blockIdx.x);
            if (taken_ <= 1 && blockIdx.x > 0)
                while (load_acquire(&counter->ticket) != queue_.ticket_) continue;
            return add_relaxed(&counter->next, 1);
        }

        const TileNumbers& queue_;
        uint32_t taken_ = 0;
    };

    const uint32_t ahead;

  private:
    bool strict_;
    uint32_t others_;
    uint32_t count_;
    TileCounter* counter_;
    uint64_t ticket_;  // not 0
};

// Of tiles of queries, or of keys.
class TileQueue : public TileNumbers {
  public:
    // Under a mask, and in packed sequences, tiles take different times; and where a block does several, the
    // last tiles of heads, which have fewer queries, and what memory takes make enough of a difference.
    static bool needs_counter(const ForwardProblem& problem) {
        return problem.batch * problem.heads_q * problem.seqlen_q > 1 << 16 || problem.window_left >= 0 ||
               problem.window_right >= 0 || problem.cu_seqlens_q || problem.cu_seqlens_k ||
               problem.key_blocks.counts || problem.query_blocks.counts;
    }

    // What is taken are numbers for tiling(), or what the caller knows; the rest as of TileNumbers.
    TileQueue(const RowTiling& tiling, int64_t count, uint32_t ahead, void* counter, bool strict = false,
              uint32_t others = 0)
        : TileNumbers(count, ahead, counter, strict, others), tiling(tiling) {}
    // All tiles of some heads, from one of all batch entries on.
    TileQueue(const RowTiling& tiling, int64_t first_head, int64_t heads, uint32_t ahead, void* counter)
        : TileNumbers(tiling.of_heads(heads).count(), ahead, counter),
          tiling(tiling.of_heads(heads)),
          first_head_(uint32_t(first_head)) {}

    // Of the tiles of some heads.
    __device__ __forceinline__ TileOrder::Place place(uint32_t index) const {
        TileOrder::Place place = tiling.place(index);
        place.head += first_head_;
        return place;
    }

    const RowTiling tiling;

  private:
    uint32_t first_head_ = 0;
};

}  // namespace flash::cuda::sm90
