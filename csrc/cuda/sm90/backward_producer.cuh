// The warp that copies: keys and values once, then every tile of queries that sees some of them, of each
// query head of the group, with its dO, lse and delta. What is not finite it keeps from the products where a
// mask could not (finite.cuh), so that the others never wait for that.
#pragma once

#include "../../attention/score_matrix.h"
#include "../any/finite.cuh"
#include "../ptx/cp_async.h"
#include "../ptx/tma.h"
#include "backward_plan.cuh"
#include "load_rows.cuh"
#include "tensor_map.h"

namespace flash::cuda::sm90 {

struct BackwardMaps {
    CUtensorMap q, dout, k, v;
};

template <DType dtype, BackwardConfiguration c>
class BackwardProducer {
  public:
    __device__ BackwardProducer(const BackwardProblem& problem, const BackwardMaps& maps,
                                const RowStatistics& lse_log2, const DqSums& dq_sums,
                                BackwardShared<c>& shared)
        : problem_(problem), maps_(maps), lse_log2_(lse_log2), dq_sums_(dq_sums), shared_(shared) {}

    // The whole warp.
    __device__ void run() {
        BackwardPlan& plan = shared_.plan;
        if (!plan.has_queries) return;
        if (lane_index() == 0) load_keys(shared_.k, maps_.k, shared_address(&shared_.k_full));
        uint32_t n = 0;
#pragma unroll 1
        for (int i = 0; i < plan.tile.group; ++i) {
            __syncwarp();  // all lanes have seen that the last head's walk ended
            TileWalk<c.query_tile> walk(plan.walk, plan.start);
#pragma unroll 1
            for (; walk.more(); ++n) {
                const int row = int(plan.tile.sequence.first_query_row) + walk.first();
                const int head = int(plan.tile.head) * plan.tile.group + i;
                const bool masked = walk.masked() || plan.partial, bad = masked && may_be_bad(row, head);
                mbarrier_wait(in_ring(shared_.q_empty, n), parity(shared_.q_empty, n) ^ 1);
                mbarrier_wait(in_ring(shared_.dout_empty, n), parity(shared_.dout_empty, n) ^ 1);
                __syncwarp();
                copy(n, bad, row, head);
                // While the copies are on their way.
                QueryNote& note = shared_.notes[n % c.stages];
                if (lane_index() == 0) {
                    note.dq = dq_sums_.of_head(plan.place.head, i, plan.tile.batch) +
                              int64_t(walk.first()) * c.head_dim;
                    note.first = walk.first();
                    note.seen = walk.seen(plan.walk);
                    note.masked = masked, note.bad = bad;
                    note.bits = bits_of(plan.walk.run.partial, head);
                }
                copy_statistics(int(n % c.stages), row, head);
                walk.advance(plan.walk);
                if (lane_index() == 0) {
                    note.last = !walk.more() && i + 1 == plan.tile.group;
                    if (n == 0) dq_sums_.wait_for_place(plan.place.head);
                    mbarrier_arrive(in_ring(shared_.q_full, n));
                }
                mbarrier_arrive_behind_copies(in_ring(shared_.q_full, n));
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
                                                 int row, int head) const {
        load_rows<c.query_tile, c.query_tile, c.head_dim>(
            to, map, barrier, row, head, tensor_batch(problem_.forward.cu_seqlens_q, shared_.plan.tile));
    }

    // dO's barrier is told that this is all, Q's is not yet.
    __device__ __forceinline__ void copy(uint32_t n, bool bad, int row, int head) {
        const int stage = int(n % c.stages);
        const uint32_t q_full = in_ring(shared_.q_full, n), dout_full = in_ring(shared_.dout_full, n);
        if (bad)
            copy_finite(stage, row, head);
        else if (lane_index() == 0) {
            load_queries(shared_.q[stage], maps_.q, q_full, row, head);
            if (n == 0) load_keys(shared_.v, maps_.v, shared_address(&shared_.v_full));
            load_queries(shared_.dout[stage], maps_.dout, dout_full, row, head);
        }
        if (lane_index() == 0) {
            if (bad && n == 0) load_keys(shared_.v, maps_.v, shared_address(&shared_.v_full));
            mbarrier_arrive(dout_full);
        }
    }

    __device__ __forceinline__ const float* statistics(const RowStatistics& of, int row, int head) const {
        return statistics_of<const float>(of, shared_.plan.tile.batch, row, head);
    }
    // Of all rows that are copied, also those of a neighbouring sequence.
    __device__ __forceinline__ bool exists(int row) const { return row < problem_.forward.rows_q; }

    __device__ __forceinline__ void copy_statistics(int stage, int row, int head) const {
        copy_statistics(shared_.lse[stage], statistics(lse_log2_, row, head), row);
        copy_statistics(shared_.delta[stage], statistics(problem_.delta, row, head), row);
    }
    __device__ __forceinline__ void copy_statistics(const float* to, const float* from, int row) const {
#pragma unroll 1
        for (int i = lane_index(); i < c.query_tile; i += 32)
            cp_async_4(shared_address(to + i), from + (exists(row + i) ? i : 0), exists(row + i));
    }

    __device__ __forceinline__ const uint32_t* bits_of(bool partial, int head) const {
        const ScoreMatrix& visible = problem_.forward.visible;
        return partial && visible.data ? row_of<const uint32_t>(visible, shared_.plan.tile.batch, head, 0)
                                       : nullptr;
    }

    // A row of Q or dO that is not finite leaves its mark on lse or delta.
    __device__ __forceinline__ bool may_be_bad(int row, int head) const {
        bool bad = false;
#pragma unroll 1
        for (int i = lane_index(); i < c.query_tile && exists(row + i); i += 32)
            bad |= !(fabsf(*statistics(lse_log2_, row + i, head)) +
                         fabsf(*statistics(problem_.delta, row + i, head)) <
                     INFINITY);
        return __any_sync(0xffffffff, bad);
    }

    __device__ __forceinline__ void copy_finite(int stage, int row, int head) {
        const uint32_t landed = shared_address(&shared_.landed);
        if (lane_index() == 0) {
            load_queries(shared_.q[stage], maps_.q, landed, row, head);
            load_queries(shared_.dout[stage], maps_.dout, landed, row, head);
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
    const RowStatistics& lse_log2_;
    const DqSums& dq_sums_;
    Shared& shared_;
    uint32_t landed_ = 0;  // tiles that were looked at
};

}  // namespace flash::cuda::sm90
