// The warps that start all copies. One decides what the block does next, a tile of queries after the other,
// and copies the queries; one copies the tiles of keys, one those of values, which are wanted, and left, at
// other times, and one those of a bias.
#pragma once

#include <type_traits>

#include "../ptx/grid_dependency.h"
#include "bias_tile.cuh"
#include "forward_plan.cuh"
#include "load_rows.cuh"
#include "tile_queue.cuh"

namespace flash::cuda::sm90 {

struct ForwardMaps {
    CUtensorMap q, k, v;
    CUtensorMap bias;  // if there is one
};

template <ForwardConfiguration c>
class ForwardPlanner {
  public:
    __device__ ForwardPlanner(const ForwardProblem& problem, const ForwardMaps& maps, const TileQueue& queue,
                              ForwardShared<c>& shared, const FewQueries& few)
        : problem_(problem),
          maps_(maps),
          tiling_(queue.tiling),
          ahead_(queue.ahead),
          queue_(queue),
          shared_(shared),
          few_(few) {}

    // A whole warp. The first plan is made while the grid before ends, up to where it reads device memory.
    __device__ void run() {
        const bool reads_memory = c.transformed || problem_.cu_seqlens_q || problem_.cu_seqlens_k || c.few;
        if (reads_memory) begin();
        // A plan's tile may have to be done again; so all plans have to be seen done at the end.
        bool ended = false;
        for (uint32_t n = 0, nothing = 0; !ended; ++n) {
            ForwardPlan& plan = shared_.plans[n];
            shared_.plans.await_room(n, ahead_);
            if (lane_index() == 0) {
                decide(plan, nothing == kPlans - 1);
                if constexpr (c.few > 0) {
                    if (plan.work == Work::tile) plan.locate(problem_, c);
                    if (n == 0) mbarrier_arrive(shared_address(&shared_.located));
                }
            }
            __syncwarp();
            nothing = plan.work == Work::tile ? 0 : nothing + 1;
            ended = plan.work == Work::end;
            if (c.few && n == 0)  // their places are empty
                for (int i = 0; i < c.warpgroups; ++i) load(plan, i, i);
            if (nothing == 0) {
                if (problem_.key_blocks.counts) await_grid_before();
                plan.make(problem_, c, few_.heads);
            }
            mbarrier_arrive_warp(in_ring(shared_.plans.planned, n));
            if (n == 0 && !reads_memory) begin();
#pragma unroll 1
            for (int i = 0; i < c.warpgroups; ++i) copy(plan, n, i);
        }
    }

  private:
    __device__ void begin() const {
        await_grid_before();
        if (lane_index() == 0) queue_.open();
    }

    // One thread.
    __device__ void decide(ForwardPlan& plan, bool all_done) {
        plan.careful = plan.redo;
        plan.redo = false;
        plan.work = Work::tile;
        if (plan.careful) return;
        for (uint32_t index; more_ && (more_ = queue_.take(index));) {
            if constexpr (c.few > 0) plan.split = few_.take_split(index, problem_, c.values());
            plan.tile = tiling_(index, problem_, true);
            if (!plan.tile.rows.empty()) return;
        }
        plan.work = all_done ? Work::end : Work::nothing;
        plan.multiply = 0;
    }

    // The warpgroup's queries, or the word that there are none.
    __device__ void copy(const ForwardPlan& plan, uint32_t n, int warpgroup) {
        const uint32_t queries = n * c.warpgroups + warpgroup;
        mbarrier_wait(in_ring(shared_.q_empty, queries), parity(shared_.q_empty, queries) ^ 1);
        __syncwarp();  // else a lane could miss the phase
        if (!(c.few && n == 0)) load(plan, queries, warpgroup);
        if (lane_index() == 0) mbarrier_arrive(in_ring(shared_.q_full, queries));
    }

    // One lane.
    __device__ void load(const ForwardPlan& plan, uint32_t queries, int warpgroup) const {
        if (lane_index() > 0 || plan.work != Work::tile) return;
        const char* const to = shared_.q[queries % c.query_slots];
        const uint32_t full = in_ring(shared_.q_full, queries);
        const int row = int(plan.tile.sequence.first_query_row) + plan.tile.first,
                  batch = tensor_batch(problem_.cu_seqlens_q, plan.tile), head = int(plan.tile.head);
        if constexpr (c.few > 0)
            load_queries_of_heads<64, c.head_dim>(to, maps_.q, full, few_.heads,
                                                  row + warpgroup * (64 / few_.heads), head, batch);
        else
            load_rows<64, 64, c.head_dim>(to, maps_.q, full, row + warpgroup * 64, head, batch, Hint());
    }

    // Of the widest heads they are as many bytes as a short diagonal's keys, which the cache is to keep.
    using Hint = std::conditional_t<c.head_dim == 256, EvictFirst, NoHint>;

    const ForwardProblem& problem_;
    const ForwardMaps& maps_;
    const RowTiling& tiling_;
    const uint32_t& ahead_;
    TileQueue::Reader queue_;
    bool more_ = true;  // in the queue
    ForwardShared<c>& shared_;
    const FewQueries& few_;
};

template <DType dtype, ForwardConfiguration c>
class ForwardProducer {
  public:
    __device__ ForwardProducer(const ForwardProblem& problem, const ForwardMaps& maps,
                               ForwardShared<c>& shared)
        : problem_(problem), maps_(maps), shared_(shared) {}

    // A whole warp.
    __device__ void copy_keys() { copy_tiles<true>(); }
    __device__ void copy_values() { copy_tiles<false>(); }
    __device__ void copy_bias() {
        uint32_t tiles[c.warpgroups] = {};  // of all that the block does
        shared_.plans.each([&](ForwardPlan& plan, uint32_t n) {
            if (plan.work == Work::tile) copy_bias(plan, tiles);
            mbarrier_arrive_warp(in_ring(shared_.plans.done, n));
        });
    }

  private:
    template <bool kKeys>
    __device__ __forceinline__ void copy_tiles() {
        uint32_t tile = 0;  // of all that the block does
        if constexpr (c.few > 0) copy_first<kKeys>();
        shared_.plans.each([&](ForwardPlan& plan, uint32_t n) {
            if (plan.work == Work::tile) copy_plan<kKeys>(plan, tile);
            mbarrier_arrive_warp(in_ring(kKeys ? shared_.plans.walked : shared_.plans.done, n));
        });
    }

    // What warpgroups see of the plan's tiles.
    __device__ __forceinline__ void copy_bias(const ForwardPlan& plan, uint32_t (&tiles)[c.warpgroups]) {
        using Tile = BiasTile<dtype, 64, c.key_tile>;
        await_grid_before();
        for (NoteWriter<c> notes(plan, problem_); notes.more();) {
            const KeyNote note = notes.next_note();
#pragma unroll
            for (int i = 0; i < c.warpgroups; ++i) {
                if (KeyNote::flags_of(note.flags, i) & KeyNote::hidden) continue;
                mbarrier_wait(shared_address(&shared_.bias.empty[i]), tiles[i]++ % 2 ^ 1);
                __syncwarp();  // else a lane could miss the phase
                if (lane_index() > 0) continue;
                const uint32_t full = shared_address(&shared_.bias.full[i]);
                Tile::load(shared_.bias.tiles[i], maps_.bias, full, problem_.bias, int(plan.tile.batch),
                           int(plan.tile.head), plan.tile.first + i * 64, note.first);
                mbarrier_arrive(full);
            }
        }
    }

    // Of few queries, the block's first tile as soon as it is known where that lies: to make the plan, and
    // the first note, takes as long as the copy.
    template <bool kKeys>
    __device__ __forceinline__ void copy_first() {
        mbarrier_wait(shared_address(&shared_.located), 0);
        __syncwarp();
        const ForwardPlan& plan = shared_.plans[0];
        const Interval visited = plan.start.visited;
        if (plan.work != Work::tile || visited.empty()) return;
        KeyRows rows(plan.tile, problem_);
        await_grid_before();
        CachedKeys(plan.tile, problem_).find(rows, visited.begin);
        if (lane_index() == 0) load<kKeys>(0, rows, visited.begin);
        begun_ = true;
    }

    // The plan's tiles of keys, or of values, from the block's tile-th on; tile becomes the next plan's first
    // one. All that is read in shared memory is read before a stage is waited for.
    template <bool kKeys>
    __device__ __forceinline__ void copy_plan(const ForwardPlan& plan, uint32_t& tile) {
        KeyRows rows(plan.tile, problem_);
        await_grid_before();
        const CachedKeys cached(plan.tile, problem_);
        for (NoteWriter<c> notes(plan, problem_); notes.more(); ++tile) {
            if constexpr (kKeys) {
                const KeyNote note = notes.next_note();
                if constexpr (c.few > 0) cached.find(rows, note.first);
                mbarrier_wait(in_ring(shared_.k_empty, tile), parity(shared_.k_empty, tile) ^ 1);
                __syncwarp();  // else a lane could miss the phase
                if (lane_index() == 0) {
                    load<true>(tile, rows, note.first);
                    shared_.note(tile) = note;
                    mbarrier_arrive(in_ring(shared_.k_full, tile));
                }
            } else {
                const Position first = notes.next();
                if constexpr (c.few > 0) cached.find(rows, first);
                mbarrier_wait(in_ring(shared_.v_empty, tile), parity(shared_.v_empty, tile) ^ 1);
                __syncwarp();
                if (lane_index() == 0) {
                    load<false>(tile, rows, first);
                    mbarrier_arrive(in_ring(shared_.v_full, tile));
                }
            }
            __syncwarp();
        }
    }

    // By one lane, which has yet to arrive; what has been asked for is not again.
    template <bool kKeys>
    __device__ __forceinline__ void load(uint32_t tile, const KeyRows& rows, Position first) const {
        if (tile == 0 && begun_) return;
        using Hint = std::conditional_t<c.few != 0, EvictFirst, NoHint>;
        if constexpr (kKeys)
            load_keys<c.key_tile, c.head_dim>(shared_.k[tile % c.stages], maps_.k,
                                              in_ring(shared_.k_full, tile), rows, first, Hint());
        else
            load_keys<c.key_tile, c.values()>(shared_.v[tile % c.stages], maps_.v,
                                              in_ring(shared_.v_full, tile), rows, first, Hint());
    }

    const ForwardProblem& problem_;
    const ForwardMaps& maps_;
    ForwardShared<c>& shared_;
    bool begun_ = false;  // the block's first tile has been asked for
};

}  // namespace flash::cuda::sm90
