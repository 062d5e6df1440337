// Two warps that copy: keys and values once, then every tile of queries that sees some of them, of each query
// head of the group, with its dO, lse and delta. What is not finite it keeps from the products where a
// mask could not (finite.cuh), so that the others never wait for that.
#pragma once

#include "../../attention/score_matrix.h"
#include "../any/finite.cuh"
#include "../ptx/tma.h"
#include "backward_plan.cuh"
#include "load_rows.cuh"
#include "tensor_map.h"

namespace flash::cuda::sm90 {

struct BackwardMaps {
    CUtensorMap q, dout, k, v;
    CUtensorMap lse, delta;  // a row each
};

template <DType dtype, BackwardConfiguration c>
class BackwardProducer {
  public:
    __device__ BackwardProducer(const BackwardProblem& problem, const BackwardMaps& maps,
                                const AlignedStatistics& statistics, const DqSums& dq_sums,
                                BackwardShared<c>& shared)
        : problem_(problem), maps_(maps), statistics_(statistics), dq_sums_(dq_sums), shared_(shared) {}

    // The whole warp: the tiles that are masked, or all others, so that few registers suffice for those. What
    // a warp reads in shared memory or spills it waits for as long as products do; of tiles that are not
    // masked it should read the barrier alone.
    template <bool kMasked>
    __device__ void run() {
        BackwardPlan& plan = shared_.plan;
        if (!plan.has_queries) return;
        const bool first_lane = lane_index() == 0, partial = plan.partial;
        const int first_row = int(plan.tile.sequence.first_query_row), group = plan.tile.group;
        const int first_statistic = plan.first_statistic;
        const int batch = tensor_batch(problem_.forward.cu_seqlens_q, plan.tile);
        if (!kMasked && first_lane) load_keys(shared_.k, maps_.k, shared_address(&shared_.k_full));
        uint32_t stage = 0, free = 1;  // the parity of the stage's last use
        uint32_t handed = 0;           // the same of each stage as the one warp hands it to the other
        uint32_t n = 0;
#pragma unroll 1
        for (int i = 0; i < group; ++i) {
            const int head = int(plan.tile.head) * group + i;
            SchedulePlace& place = plan.walks[kMasked];
            __syncwarp();  // all lanes have seen that the last head's walk ended
            TileWalk<c.query_tile> walk(place, plan.start);
#pragma unroll 1
            while (walk.more()) {
                const Position first = walk.first();
                const bool masked = walk.masked() || partial;
                bool bad = false;
                if constexpr (!kMasked) {
                    mbarrier_wait(shared_address(&shared_.empty[stage]), free);
                    if (masked && first_lane) mbarrier_arrive(shared_address(&shared_.masked[stage]));
                }
                if (masked == kMasked) {
                    if constexpr (kMasked) {
                        QueryNote& note = shared_.notes[stage];
                        mbarrier_wait(shared_address(&shared_.masked[stage]), handed >> stage & 1);
                        handed ^= 1 << stage;
                        bad = may_be_bad(first, head);
                        if (first_lane) {
                            note.first = first;
                            note.seen = walk.seen(place);
                            note.bits = bits_of(place.run.partial, head);
                        }
                        if (bad) copy_finite(stage, first_row + first, head, batch);
                        __syncwarp();
                    }
                    if (first_lane)
                        copy(stage, !bad, n == 0, first_row + first, first_statistic + first, head, batch);
                }
                walk.advance(place);
                if (masked == kMasked && first_lane) {
                    const bool last = !walk.more() && i + 1 == group;
                    shared_.notes[stage].flags = (kMasked ? QueryNote::masked : 0) |
                                                 (last ? QueryNote::last : 0) | (bad ? QueryNote::bad : 0);
                    shared_.dq_notes[n % kDqNotes] = {first, i, last};
                    if (n == 0) dq_sums_.wait_for_place(plan.place.head);
                    mbarrier_arrive(shared_address(&shared_.q_full[stage]));
                }
                ++n;
                if (++stage == c.stages) stage = 0, free ^= 1;
            }
        }
    }

  private:
    using Shared = BackwardShared<c>;
    using QueryTile = TileLayout<c.query_tile, c.head_dim, 2, kPanel>;

    __device__ __forceinline__ void load_keys(const char* to, const CUtensorMap& map,
                                              uint32_t barrier) const {
        const RowTile& tile = shared_.plan.tile;
        load_rows<c.key_tile, c.key_tile, c.head_dim>(
            to, map, barrier, int(tile.sequence.first_key_row) + tile.first, int(tile.head),
            tensor_batch(problem_.forward.cu_seqlens_k, tile));
        mbarrier_arrive(barrier);
    }

    __device__ __forceinline__ void load_queries(const char* to, const CUtensorMap& map, uint32_t barrier,
                                                 int row, int head, int batch) const {
        load_rows<c.query_tile, c.query_tile, c.head_dim>(to, map, barrier, row, head, batch);
    }

    // By one thread. rows: Q and dO themselves, too. dO's barrier is told that this is all, Q's is not yet.
    __device__ __forceinline__ void copy(uint32_t stage, bool rows, bool start, int row, int statistic,
                                         int head, int batch) const {
        const uint32_t q_full = shared_address(&shared_.q_full[stage]),
                       dout_full = shared_address(&shared_.dout_full[stage]);
        if (rows) load_queries(shared_.q[stage], maps_.q, q_full, row, head, batch);
        mbarrier_expect(q_full, 2 * int(sizeof shared_.lse[0]));
        tma_load(shared_address(shared_.lse[stage]), &maps_.lse, q_full, statistic, 0, head, batch);
        tma_load(shared_address(shared_.delta[stage]), &maps_.delta, q_full, statistic, 0, head, batch);
        if (start) load_keys(shared_.v, maps_.v, shared_address(&shared_.v_full));
        if (rows) load_queries(shared_.dout[stage], maps_.dout, dout_full, row, head, batch);
        mbarrier_arrive(dout_full);
    }

    __device__ __forceinline__ const uint32_t* bits_of(bool partial, int head) const {
        const ScoreMatrix& visible = problem_.forward.visible;
        return partial && visible.data ? row_of<const uint32_t>(visible, shared_.plan.tile.batch, head, 0)
                                       : nullptr;
    }

    __device__ __forceinline__ bool is_bad(int place, int head) const {
        const int64_t batch = shared_.plan.tile.batch;
        return !(fabsf(*statistics_of<const float>(statistics_.lse_log2, batch, place, head)) +
                     fabsf(*statistics_of<const float>(statistics_.delta, batch, place, head)) <
                 INFINITY);
    }
    // A row of Q or dO that is not finite leaves its mark on lse or delta.
    __device__ __forceinline__ bool may_be_bad(Position first, int head) const {
        if (shared_.all_finite) return false;
        const BackwardPlan& plan = shared_.plan;
        const int own = min(first + c.query_tile, plan.mask.seqlen_q);
        bool bad = false;
#pragma unroll 1
        for (int query = first + lane_index(); query < own; query += 32)
            bad |= is_bad(plan.first_statistic + query, head);
        // Rows of a neighbouring sequence are copied, too, and have to be looked for.
        const int first_row = int(plan.tile.sequence.first_query_row);
        const int end = min(first_row + first + c.query_tile, int(problem_.forward.rows_q));
#pragma unroll 1
        for (int row = first_row + own + lane_index(); row < end; row += 32) {
            const int place = int(statistics_.rows.place(row));
            bad |= place < 0 || is_bad(place, head);
        }
        return __any_sync(0xffffffff, bad);
    }

    __device__ __forceinline__ void copy_finite(uint32_t stage, int row, int head, int batch) {
        const uint32_t landed = shared_address(&shared_.landed);
        if (lane_index() == 0) {
            load_queries(shared_.q[stage], maps_.q, landed, row, head, batch);
            load_queries(shared_.dout[stage], maps_.dout, landed, row, head, batch);
            mbarrier_arrive(landed);
        }
        uint32_t (&bad)[(c.query_tile + 31) / 32] = shared_.bad_queries[stage];
        if (lane_index() < (c.query_tile + 31) / 32) bad[lane_index()] = 0;
        mbarrier_wait(landed, landed_++ % 2);
        __syncwarp();
        clear_bad_elements<dtype, 32, QueryTile>(shared_address(shared_.q[stage]), bad);
        clear_bad_elements<dtype, 32, QueryTile>(shared_address(shared_.dout[stage]), bad);
        fence_async_proxy();
        __syncwarp();
    }

    const BackwardProblem& problem_;
    const BackwardMaps& maps_;
    const AlignedStatistics& statistics_;
    const DqSums& dq_sums_;
    Shared& shared_;
    uint32_t landed_ = 0;  // tiles that were looked at
};

}  // namespace flash::cuda::sm90
