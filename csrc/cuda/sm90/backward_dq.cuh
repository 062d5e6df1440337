// dQ of Hopper's backward. Blocks have what a tile of keys adds to dQ added to sums in device memory
// (../any/dq_sums.cuh), of which dq_finish.cuh makes dQ. Sums are cleared before, or the last keys' tile that
// sees a query stores them, for which the others wait. In turns each waits for the next keys' tile, so that
// the sums do not depend on time; under a diagonal hardly for long, if all begin in the same order, but for
// the end of the walk (walk_end.h). Under a map of blocks nobody knows who is first or next. A block that
// does all tiles of a unit waits for nobody, gets the last sums back, and adds, rounds and stores in
// registers.
#pragma once

#include "backward_producer.cuh"

namespace flash::cuda::sm90 {

// dQ of a tile of queries: 64 rows of it for each warpgroup, and of those all columns or half of them.
template <DType dtype, BackwardConfiguration c>
using Dq = DqTile<dtype, c.query_tile, c.head_dim, c.consumers / 32, c.query_tile / 16>;

// A warp for each warpgroup, which has its part of every dQ added to the sums. A consumer that did that
// itself would wait until the copy engine can read what it stored. What such a warp reads in shared memory or
// spills it waits for as long as products do, and it has but 24 registers.
template <DType dtype, BackwardConfiguration c>
class DqAdder {
  public:
    // turns: for each tile of keys two numbers, of tiles of queries to which its even and its odd additions
    // are done, 0 at the start; or nullptr. strict: tiles of keys wait for the next keys' additions, else
    // for the last keys' alone.
    __device__ __forceinline__ DqAdder(const DqSums& dq_sums, uint32_t* turns, bool strict,
                                       BackwardShared<c>& shared, int warpgroup)
        : dq_sums_(dq_sums), turns_(turns), strict_(strict), shared_(shared), warpgroup_(warpgroup) {}

    // To sums that are finished when they are complete.
    __device__ __forceinline__ void add_to_sums() {
        if (turns_ && warpgroup_ == 0 && lane_index() < c.warpgroups) mbarrier_arrive(empty(lane_index()));
        for_each_plan([&](const BackwardPlan& plan) {
            fence_async_proxy_of_memory();  // who made the plan has waited for the zeros
            if (turns_)
                add_in_turns(plan);
            else
                add_to_zeros(plan);
        });
    }

    // Where the block does all tiles of a unit: the first addition stores, and the last one makes dQ.
    __device__ __forceinline__ void add_up() {
        for_each_plan([&](const BackwardPlan& plan) {
            const uint32_t of_head = plan.query_tiles, alone = plan.alone;
            const bool finishes = plan.tile.first == 0;  // every query sees those keys
            uint32_t i = 0, index = dq_sums_.index(blockIdx.x, plan.first_dq_tile + plan.first_query_tile);
#pragma unroll 1
            for (int heads = plan.tile.group; heads > 0; ++n_) {
                const bool begins = i < alone;
                if (finishes && !begins) {
                    const uint32_t full = empty(warpgroup_);
                    if (lane_index() == 0) mbarrier_expect(full, 4 * kBytes);
                    __syncwarp();
                    if (copies(warpgroup_)) bulk_load(staging(), sums_at(index), kBytes, full);
                }
                if (lane_index() == 0) {
                    shared_.dq_ends[warpgroup_] = !finishes ? DqEnd::none
                                                  : begins  ? DqEnd::alone
                                                            : DqEnd::with_sums;
                    mbarrier_arrive(empty(warpgroup_));
                }
                __syncwarp();
                await_dq(warpgroup_);
                if (!finishes) add(warpgroup_, sums_at(index), begins);
                ++index;
                if (++i == of_head) i = 0, index += dq_sums_.tiles_of_head() - of_head, --heads;
            }
        });
    }

  private:
    using Dq = sm90::Dq<dtype, c>;
    // DqTile counts a warp's columns first, warpgroups divide what is left of the columns last.
    static constexpr int kWarps = c.consumers / 32, kRowWarps = kWarps / Dq::column_warps;
    static constexpr uint32_t kBytes = Dq::warp_elements * 4;  // of a warp's part of dQ

    __device__ __forceinline__ uint32_t empty(int warpgroup) const {
        return shared_address(&shared_.dq_empty[warpgroup]);
    }
    // A lane has the part of dQ copied that a warp of a warpgroup made.
    __device__ __forceinline__ static int warp() {
        return lane_index() % (c.consumers / 32);
    }
    __device__ __forceinline__ static bool copies(int warpgroup) {
        return lane_index() / 4 == warpgroup;
    }
    __device__ __forceinline__ uint32_t staging() const {
        return shared_address(shared_.dq) + warp() * kBytes;
    }
    __device__ __forceinline__ float* sums_at(uint32_t index) const {
        const int place = warp() % kRowWarps * Dq::column_warps + warp() / kRowWarps;
        return dq_sums_.at(index) + place * Dq::warp_elements;
    }

    // In no fixed order, whatever tiles of queries the blocks visit.
    __device__ __forceinline__ void add_to_zeros(const BackwardPlan& plan) {
        const uint32_t first_head = uint32_t(plan.tile.head) * plan.tile.group;
        const uint32_t of_head_0 =
            dq_sums_.index(plan.place.head, plan.first_dq_tile) - first_head * dq_sums_.tiles_of_head();
#pragma unroll 1
        for (bool last = false; !last; ++n_) {
            if (lane_index() == 0) mbarrier_arrive(empty(warpgroup_));
            await_dq(warpgroup_);
            const DqNote note = shared_.dq_notes[n_ % kDqNotes];
            last = note.last;
            const uint32_t of_head = of_head_0 + note.head * dq_sums_.tiles_of_head();
            add(warpgroup_, sums_at(of_head + note.first / c.query_tile), false);
        }
    }

    // To wait for others and to tell them takes longer than a step. So each of the two warps looks after both
    // warpgroups' parts of every other tile of queries.
    __device__ __forceinline__ void add_in_turns(const BackwardPlan& plan) {
        const uint32_t tile = plan.place.head * dq_sums_.sharers() + plan.place.tile;
        uint32_t* const done = turns_ + tile * int64_t(2);
        const uint32_t before = (strict_ ? 1 : plan.place.tile) * 2;
        const uint32_t mine = (n_ ^ warpgroup_) % 2;
        const uint32_t of_head = plan.query_tiles, alone = plan.alone, behind = plan.behind;
        const bool waits = plan.waits, tells = waits && (strict_ || alone > 0);
        uint32_t index = dq_sums_.index(plan.sums_unit, plan.first_dq_tile + plan.first_query_tile);
        uint32_t i = 0, wanted = 0, seen = 0;
#pragma unroll 1
        for (int heads = plan.tile.group; heads > 0; ++n_) {
            const bool begins = i < alone;
            if (!begins && waits) ++wanted;
            if (n_ % 2 == warpgroup_) {
                if (!begins && seen < (wanted + 1) / 2) {
                    const uint32_t* const theirs = done - before + (wanted + 1) % 2;
                    while ((seen = load_acquire(theirs)) < (wanted + 1) / 2) __nanosleep(20);
                    fence_async_proxy_of_memory();
                }
                // Each phase of dq_full has to be seen by the one or the other.
                if (n_ > 0) mbarrier_wait(shared_address(&shared_.dq_relay[warpgroup_]), (n_ - 1) / 2 % 2);
                __syncwarp();
#pragma unroll
                for (int part = c.warpgroups - 1; part >= 0; --part) {  // the second one's is there first
                    await_dq(part);
                    add(part, sums_at(index), begins);
                    if (lane_index() == 0) mbarrier_arrive(empty(part));
                }
                if (lane_index() == 0) mbarrier_arrive(shared_address(&shared_.dq_relay[warpgroup_ ^ 1]));
                if (tells) {
                    await_addition();
                    if (lane_index() == 0) add_release(done + mine, 1);
                }
            }
            ++index;
            if (++i == of_head) {
                i = 0, index += dq_sums_.tiles_of_head() - of_head, wanted += behind;
                seen = 0;  // of another number, perhaps
                --heads;
            }
        }
    }

    template <class Visit>
    __device__ __forceinline__ void for_each_plan(const Visit& visit) {
#pragma unroll 1
        for (uint32_t tile = 0;; ++tile) {
            shared_.await_plan(tile);
            const BackwardPlan& plan = shared_.plan(tile);
            if (plan.end) break;
            if (plan.has_queries) visit(plan);
            await_addition();  // the next tile may add to the same sums, or get them back
            shared_.leave_plan(tile);
        }
    }

    __device__ __forceinline__ void await_dq(int warpgroup) const {
        mbarrier_wait(shared_address(&shared_.dq_full[warpgroup]), n_ % 2);
        __syncwarp();
    }
    // When it returns, dQ may be overwritten.
    __device__ __forceinline__ void add(int warpgroup, float* sums, bool begins) const {
        if (copies(warpgroup)) {
            fence_async_proxy();
            if (begins)
                bulk_store(sums, staging(), kBytes);
            else
                bulk_reduce_add(sums, staging(), kBytes);
            bulk_wait_read();
        }
        __syncwarp();
    }
    __device__ __forceinline__ static void await_addition() {
        bulk_wait();
        __syncwarp();
    }

    const DqSums& dq_sums_;
    uint32_t* const turns_;
    const bool strict_;
    BackwardShared<c>& shared_;
    const int warpgroup_;
    uint32_t n_ = 0;  // tiles of queries so far
};

}  // namespace flash::cuda::sm90
