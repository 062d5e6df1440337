// The warp that decides what the block does next and starts all copies: tiles of queries one after the other,
// so that the next one's first copies run while one is computed, and of each its tiles of keys and values.
#pragma once

#include "../ptx/tma.h"
#include "forward_plan.cuh"
#include "tensor_map.h"

namespace flash::cuda::sm90 {

struct ForwardMaps {
    CUtensorMap q, k, v;
};

template <ForwardConfiguration c>
class ForwardProducer {
  public:
    __device__ ForwardProducer(const ForwardProblem& problem, const ForwardMaps& maps,
                               const RowTiling& tiling, ForwardShared<c>& shared)
        : problem_(problem), maps_(maps), tiling_(tiling), shared_(shared) {}

    // The whole warp.
    __device__ void run() {
        uint32_t tile = 0;  // of keys, of all that the block does
        // A buffer's next tile may be its last one again; so all of them have to be seen empty at the end.
        for (uint32_t n = 0, empty = 0; empty <= c.query_buffers; ++n) {
            ForwardPlan& plan = shared_.plans[n % c.query_buffers];
            mbarrier_wait(in_ring(shared_.q_empty, n), parity(shared_.q_empty, n) ^ 1);
            if (lane_index() == 0) decide(plan, empty == c.query_buffers);
            __syncwarp();
            empty = plan.work == Work::tile ? 0 : empty + 1;
            if (plan.work == Work::tile)
                copy(plan, n, tile);
            else if (lane_index() == 0)
                mbarrier_arrive(in_ring(shared_.q_full, n));
        }
    }

  private:
    using Shared = ForwardShared<c>;
    static constexpr int panels = c.head_dim / kPanel;

    __device__ void decide(ForwardPlan& plan, bool all_empty) {
        plan.careful = plan.redo;
        plan.redo = false;
        plan.work = Work::tile;
        if (plan.careful) {
            plan.make(problem_, RowTile(plan.tile), c.key_tile);
            return;
        }
        for (uint32_t index; (index = next()) < tiling_.count();) {
            const RowTile tile = tiling_(index, problem_, true);
            if (tile.rows.empty()) continue;
            plan.make(problem_, tile, c.key_tile);
            return;
        }
        plan.work = all_empty ? Work::end : Work::nothing;
    }

    // Tiles are counted from the longest one on; blocks take them to and fro.
    __device__ uint32_t next() {
        const uint32_t in_round = round_ % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        return round_++ * gridDim.x + in_round;
    }

    __device__ void copy(ForwardPlan& plan, uint32_t n, uint32_t& tile) {
        const RowTile& of = plan.tile;
        const int batch = problem_.cu_seqlens_q ? 0 : int(of.batch);
        if (lane_index() == 0)
            load<c.queries()>(shared_.q[n % c.query_buffers], Shared::query_bytes, maps_.q,
                              in_ring(shared_.q_full, n), int(of.sequence.first_query_row) + of.first,
                              int(of.head), batch);
        TileWalk<c.key_tile> walk(plan.place, plan.start);
        while (walk.more()) {
            const int stage = int(tile % c.stages), row = int(of.sequence.first_key_row) + walk.first();
            const KeyNote note{walk.first(), walk.seen(plan.place), walk.masked(), false};
            walk.advance(plan.place);
            mbarrier_wait(in_ring(shared_.k_empty, tile), parity(shared_.k_empty, tile) ^ 1);
            if (lane_index() == 0) {
                shared_.notes[stage] = {note.first, note.seen, note.masked, !walk.more()};
                load<c.key_tile>(shared_.k[stage], Shared::key_bytes, maps_.k, in_ring(shared_.k_full, tile),
                                 row, int(of.key_head), batch);
            }
            mbarrier_wait(in_ring(shared_.v_empty, tile), parity(shared_.v_empty, tile) ^ 1);
            if (lane_index() == 0)
                load<c.key_tile>(shared_.v[stage], Shared::key_bytes, maps_.v, in_ring(shared_.v_full, tile),
                                 row, int(of.key_head), batch);
            __syncwarp();
            ++tile;
        }
    }

    template <int kRows>
    __device__ __forceinline__ void load(const char* to, int bytes, const CUtensorMap& map, uint32_t barrier,
                                         int row, int head, int batch) const {
        mbarrier_arrive_expecting(barrier, bytes);
#pragma unroll
        for (int panel = 0; panel < panels; ++panel)
            tma_load(shared_address(to) + panel * kRows * 128, &map, barrier, panel * kPanel, row, head,
                     batch);
    }

    const ForwardProblem& problem_;
    const ForwardMaps& maps_;
    const RowTiling& tiling_;
    Shared& shared_;
    uint32_t round_ = 0;
};

}  // namespace flash::cuda::sm90
