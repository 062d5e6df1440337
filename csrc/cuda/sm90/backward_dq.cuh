// dQ of Hopper's backward. Blocks have what a tile of keys adds to dQ added to sums in device memory
// (../any/dq_sums.cuh). Those of a unit do it in turns, the last keys first, so that the sums do not depend
// on time: the first one stores, and the last one gets the sums back and adds, rounds and stores in
// registers. Sums then need not be cleared nor finished. A block that does all tiles of a unit has no turn to
// wait for; others hardly have to, if they begin in the same order. Under a map of blocks nobody knows whose
// turn it is: sums are cleared before, and dq_finish.cuh makes dQ of them.
#pragma once

#include "backward_producer.cuh"

namespace flash::cuda::sm90 {

// dQ of a tile of queries: 64 rows of it for each warpgroup, and of those all columns or half of them.
template <DType dtype, BackwardConfiguration c>
using Dq = DqTile<dtype, c.query_tile, c.head_dim, c.consumers / 32, c.query_tile / 16>;

// Which of the additions to a tile of queries is the block's, and of how many.
class DqTurn {
  public:
    static constexpr uint32_t kMost = 0xffff;

    __device__ __forceinline__ DqTurn(uint32_t mine, uint32_t count) : packed_(mine << 16 | count) {}
    __device__ __forceinline__ explicit DqTurn(uint32_t packed) : packed_(packed) {}

    __device__ __forceinline__ uint32_t packed() const { return packed_; }
    __device__ __forceinline__ uint32_t mine() const { return packed_ >> 16; }
    __device__ __forceinline__ bool begins() const { return mine() == 0; }
    __device__ __forceinline__ bool finishes() const { return mine() + 1 == (packed_ & 0xffff); }

  private:
    uint32_t packed_;  // registers are few
};

// A warp for each warpgroup, which has its part of every dQ added to the sums. A consumer that did that
// itself would wait until the copy engine can read what it stored. What such a warp reads in shared memory or
// spills it waits for as long as products do, and it has but 24 registers.
template <DType dtype, BackwardConfiguration c>
class DqAdder {
  public:
    // turns: for every tile of queries and warpgroup, how many additions are done, 0 at the start; or
    // nullptr.
    __device__ __forceinline__ DqAdder(const DqSums& dq_sums, uint32_t* turns, BackwardShared<c>& shared,
                                       int warpgroup)
        : dq_sums_(dq_sums), turns_(turns), shared_(shared), warpgroup_(warpgroup) {}

    // Whatever tiles of queries the blocks visit.
    __device__ __forceinline__ void add_to_zeros() {
        for_each_plan([&](const BackwardPlan& plan) {
            fence_async_proxy_of_memory();  // who made the plan has waited for the zeros
#pragma unroll 1
            for (bool last = false; !last; ++n_) {
                if (lane_index() == 0) mbarrier_arrive(empty());
                await_dq();
                const DqNote note = shared_.dq_notes[n_ % kDqNotes];
                last = note.last;
                const uint32_t tile = plan.first_dq_tile + note.head * dq_sums_.tiles_of_head();
                add(sums_at(dq_sums_.index(plan.place.head, tile + note.first / c.query_tile)), false);
            }
        });
    }

    // The first addition stores, and the last one makes dQ. Blocks wait for those of later keys, which have
    // to have taken their tiles before; without turns the block does all tiles of a unit itself.
    __device__ __forceinline__ void add_up() {
        for_each_plan([&](const BackwardPlan& plan) {
            const uint32_t of_head = plan.query_tiles;
            // index: of the tile, among all sums and turns; i: among the head's that are visited.
            uint32_t i = 0, index = dq_sums_.index(turns_ ? plan.place.head : blockIdx.x,
                                                   plan.first_dq_tile + plan.first_query_tile);
            uint32_t turns_of_32 = 0, added = kNone;
#pragma unroll 1
            for (int heads = plan.tile.group; heads > 0; ++n_) {
                if (i % 32 == 0) turns_of_32 = turns_from(plan, i);
                const DqTurn turn(__shfl_sync(0xffffffff, turns_of_32, i % 32));
                if (!turn.finishes()) make_room(DqEnd::none);
                if (turns_) {
                    tell_of(added);
                    if (!turn.begins()) wait_for(index, turn.mine());
                }
                if (turn.finishes()) {
                    if (!turn.begins()) {
                        if (lane_index() == 0) mbarrier_expect(empty(), 4 * kBytes);
                        __syncwarp();
                        if (lane_index() < 4) bulk_load(staging(), sums_at(index), kBytes, empty());
                    }
                    make_room(turn.begins() ? DqEnd::alone : DqEnd::with_sums);
                }
                await_dq();
                if (!turn.finishes()) add(sums_at(index), turn.begins());
                added = turn.finishes() ? kNone : index;
                ++index;
                if (++i == of_head) i = 0, index += dq_sums_.tiles_of_head() - of_head, --heads;
            }
            if (turns_) tell_of(added);
        });
    }

  private:
    using Dq = sm90::Dq<dtype, c>;
    // DqTile counts a warp's columns first, warpgroups divide what is left of the columns last.
    static constexpr int kWarps = c.consumers / 32, kRowWarps = kWarps / Dq::column_warps;
    static constexpr uint32_t kBytes = Dq::warp_elements * 4;  // of a warp's part of dQ
    static constexpr uint32_t kNone = ~0u;

    __device__ __forceinline__ uint32_t empty() const {
        return shared_address(&shared_.dq_empty[warpgroup_]);
    }
    // A lane of the first four has a warp's part of dQ copied.
    __device__ __forceinline__ int warp() const { return warpgroup_ * 4 + lane_index() % 4; }
    __device__ __forceinline__ uint32_t staging() const {
        return shared_address(shared_.dq) + warp() * kBytes;
    }
    __device__ __forceinline__ float* sums_at(uint32_t index) const {
        const int place = warp() % kRowWarps * Dq::column_warps + warp() / kRowWarps;
        return dq_sums_.at(index) + place * Dq::warp_elements;
    }
    __device__ __forceinline__ uint32_t* turns_at(uint32_t index) const {
        return turns_ + index * int64_t(c.warpgroups) + warpgroup_;
    }

    // Of 32 tiles of queries, a lane's each, from the i-th on that the plan visits. Tiles of keys add in
    // descending order.
    __device__ __forceinline__ static uint32_t turns_from(const BackwardPlan& plan, uint32_t i) {
        const Mask& mask = plan.mask;
        const Position tile = plan.first_query_tile + i + lane_index();
        const Position first_query = min(tile * c.query_tile, mask.seqlen_q - 1);
        const Position last_query = min(first_query + c.query_tile, mask.seqlen_q) - 1;
        const uint32_t first = uint32_t(mask.keys_of(first_query).begin) / c.key_tile;
        const uint32_t last = uint32_t(mask.keys_of(last_query).end - 1) / c.key_tile;
        return DqTurn(last - uint32_t(plan.tile.first) / c.key_tile, last - first + 1).packed();
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

    // Until so many additions are in device memory.
    __device__ __forceinline__ void wait_for(uint32_t index, uint32_t additions) const {
        const uint32_t* const done = turns_at(index);
        while (load_acquire(done) < additions) __nanosleep(20);
        fence_async_proxy_of_memory();
    }
    // When the addition to the tile is in device memory. For this warp it is earlier than for others, who may
    // miss some of it unless they are told by a release, slow as that is.
    __device__ __forceinline__ void tell_of(uint32_t index) const {
        if (index == kNone) return;
        await_addition();
        if (lane_index() == 0) add_release(turns_at(index), 1);
    }

    __device__ __forceinline__ void make_room(DqEnd end) const {
        if (lane_index() == 0) {
            shared_.dq_ends[warpgroup_] = end;
            mbarrier_arrive(empty());
        }
        __syncwarp();
    }
    __device__ __forceinline__ void await_dq() const {
        mbarrier_wait(shared_address(&shared_.dq_full[warpgroup_]), n_ % 2);
        __syncwarp();
    }
    // When it returns, dQ may be overwritten.
    __device__ __forceinline__ void add(float* sums, bool begins) const {
        if (lane_index() < 4) {
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
        if (lane_index() < 4) bulk_wait();
        __syncwarp();
    }

    const DqSums& dq_sums_;
    uint32_t* const turns_;
    BackwardShared<c>& shared_;
    const int warpgroup_;
    uint32_t n_ = 0;  // tiles of queries so far
};

}  // namespace flash::cuda::sm90
