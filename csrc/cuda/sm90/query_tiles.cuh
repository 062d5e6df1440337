// What the kernels for dQ alone (query_gradient.cuh, stored_query_gradient.cuh) do with tiles of queries:
// plan one after the other, and store what has become of one.
#pragma once

#include "forward_plan.cuh"
#include "store_rows.cuh"
#include "tile_queue.cuh"

namespace flash::cuda::sm90 {

// By one thread: the next tile that has rows, or the end.
__device__ __forceinline__ void take_query_tile(const ForwardProblem& problem, const TileQueue& queue,
                                                TileQueue::Reader& reader, ForwardPlan& plan) {
    plan.careful = plan.redo = false;
    plan.work = Work::tile;
    for (uint32_t index; reader.take(index);) {
        plan.tile = queue.tiling(queue.place(index), problem, true);
        if (!plan.tile.rows.empty()) return;
    }
    plan.work = Work::end;
}

// By a whole warp, which calls planned(plan, n) behind each one's word, and behind the end's.
template <ForwardConfiguration c, class Planned>
__device__ __forceinline__ void plan_query_tiles(const ForwardProblem& problem, const TileQueue& queue,
                                                 PlanRing& plans, const Planned& planned) {
    TileQueue::Reader reader(queue);
    if (lane_index() == 0) reader.open();
    for (uint32_t n = 0;; ++n) {
        ForwardPlan& plan = plans[n];
        plans.await_room(n, queue.ahead);
        if (lane_index() == 0) take_query_tile(problem, queue, reader, plan);
        __syncwarp();
        if (plan.work == Work::tile) plan.make(problem, c);
        mbarrier_arrive_warp(in_ring(plans.planned, n));
        planned(plan, n);
        if (plan.work == Work::end) break;
    }
}

// dq lacks the factor softmax_scale. row: the warp's first one, of the tile.
template <DType dtype, int kColumns>
__device__ __forceinline__ void store_query_gradient(const BackwardProblem& problem, const RowTile& tile,
                                                     Fragment<16, kColumns>& dq, int row) {
    dq *= float(problem.forward.softmax_scale);
    const HeadRows<Bits<dtype>> to(problem.dq, tile.unowned ? 0 : tile.batch, tile.sequence.first_query_row,
                                   tile.head, problem.forward.head_dim);
    store_rows<dtype>(to, dq, tile.first + row, tile.rows);
}

}  // namespace flash::cuda::sm90
