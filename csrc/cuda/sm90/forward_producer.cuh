// The two warps that start all copies. One decides what the block does next, a tile of queries after the
// other, and copies the queries; the other one copies tiles of keys and values.
#pragma once

#include "../ptx/tma.h"
#include "forward_plan.cuh"
#include "tensor_map.h"
#include "tile_queue.cuh"

namespace flash::cuda::sm90 {

struct ForwardMaps {
    CUtensorMap q, k, v;
};

// To a tile in panels, from a row of a head on. By one thread.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_tile(const char* to, const CUtensorMap& map, uint32_t barrier, int row,
                                          int head, int batch) {
    mbarrier_arrive_expecting(barrier, kRows * kColumns * 2);
#pragma unroll
    for (int panel = 0; panel < kColumns / kPanel; ++panel)
        tma_load(shared_address(to) + panel * kRows * 128, &map, barrier, panel * kPanel, row, head, batch);
}

__device__ __forceinline__ int tensor_batch(const int32_t* cu_seqlens, const RowTile& tile) {
    return cu_seqlens ? 0 : int(tile.batch);
}

template <ForwardConfiguration c>
class ForwardPlanner {
  public:
    __device__ ForwardPlanner(const ForwardProblem& problem, const ForwardMaps& maps, const TileQueue& queue,
                              ForwardShared<c>& shared)
        : problem_(problem),
          maps_(maps),
          tiling_(queue.tiling),
          late_(queue.late),
          queue_(queue),
          shared_(shared) {}

    // One thread.
    __device__ void run() {
        tma_prefetch_map(&maps_.q);
        // A plan's tile may have to be done again; so all plans have to be seen done at the end.
        for (uint32_t n = 0, nothing = 0; nothing <= kPlans; ++n) {
            ForwardPlan& plan = shared_.plans[n % kPlans];
            const uint32_t due = n + late_;
            mbarrier_wait(in_ring(shared_.done, due), parity(shared_.done, due) ^ 1);
            decide(plan, nothing == kPlans);
            mbarrier_arrive(in_ring(shared_.planned, n));
            mbarrier_wait(in_ring(shared_.q_empty, n), parity(shared_.q_empty, n) ^ 1);
            if (plan.work == Work::tile) {
                nothing = 0;
                load_tile<c.queries(), c.head_dim>(
                    shared_.q[n % c.query_buffers], maps_.q, in_ring(shared_.q_full, n),
                    int(plan.tile.sequence.first_query_row) + plan.tile.first, int(plan.tile.head),
                    tensor_batch(problem_.cu_seqlens_q, plan.tile));
            } else {
                ++nothing;
                mbarrier_arrive(in_ring(shared_.q_full, n));
            }
        }
    }

  private:
    __device__ void decide(ForwardPlan& plan, bool all_done) {
        plan.careful = plan.redo;
        plan.redo = false;
        plan.work = Work::tile;
        if (plan.careful) {
            plan.make(problem_, RowTile(plan.tile), c);
            return;
        }
        for (uint32_t index; queue_.take(index);) {
            const RowTile tile = tiling_(index, problem_, true);
            if (tile.rows.empty()) continue;
            plan.make(problem_, tile, c);
            return;
        }
        plan.work = all_done ? Work::end : Work::nothing;
    }

    const ForwardProblem& problem_;
    const ForwardMaps& maps_;
    const RowTiling& tiling_;
    const uint32_t late_;  // 1: so that other blocks have the choice for longer
    TileQueue::Reader queue_;
    ForwardShared<c>& shared_;
};

template <ForwardConfiguration c>
class ForwardProducer {
  public:
    __device__ ForwardProducer(const ForwardProblem& problem, const ForwardMaps& maps,
                               ForwardShared<c>& shared)
        : problem_(problem), maps_(maps), shared_(shared) {}

    // The whole warp.
    __device__ void run() {
        tma_prefetch_map(&maps_.k);
        tma_prefetch_map(&maps_.v);
        uint32_t tile = 0;  // of keys, of all that the block does
        for (uint32_t n = 0;; ++n) {
            mbarrier_wait(in_ring(shared_.planned, n), parity(shared_.planned, n));
            __syncwarp();  // else the plan could change before a lane has seen that
            ForwardPlan& plan = shared_.plans[n % kPlans];
            if (plan.work == Work::end) break;
            if (plan.work == Work::tile) copy(plan, tile);
        }
    }

  private:
    __device__ void copy(ForwardPlan& plan, uint32_t& tile) {
        const RowTile& of = plan.tile;
        const int batch = tensor_batch(problem_.cu_seqlens_k, of), head = int(of.key_head);
        TileWalk<c.key_tile> walk(plan.place, plan.start);
        while (walk.more()) {
            const int stage = int(tile % c.stages), row = int(of.sequence.first_key_row) + walk.first();
            const Position first = walk.first();
            const Interval seen = walk.seen(plan.place);
            const bool masked = walk.masked(), whole = walk.whole();
            walk.advance(plan.place);
            mbarrier_wait(in_ring(shared_.k_empty, tile), parity(shared_.k_empty, tile) ^ 1);
            if (lane_index() == 0) {
                shared_.note(tile) = {first, seen,
                                      plan.template flags<c>(first, masked, whole, !walk.more())};
                load_tile<c.key_tile, c.head_dim>(shared_.k[stage], maps_.k, in_ring(shared_.k_full, tile),
                                                  row, head, batch);
            }
            mbarrier_wait(in_ring(shared_.v_empty, tile), parity(shared_.v_empty, tile) ^ 1);
            if (lane_index() == 0)
                load_tile<c.key_tile, c.head_dim>(shared_.v[stage], maps_.v, in_ring(shared_.v_full, tile),
                                                  row, head, batch);
            __syncwarp();
            ++tile;
        }
    }

    const ForwardProblem& problem_;
    const ForwardMaps& maps_;
    ForwardShared<c>& shared_;
};

}  // namespace flash::cuda::sm90
