// The warp that copies: keys and values once, then every tile of queries that sees some of them, of each
// query head of the group, with its dO, lse and delta. What is not finite it keeps from the products where a
// mask could not (finite.cuh), so that the others never wait for that.
#pragma once

#include "../any/finite.cuh"
#include "../ptx/tma.h"
#include "../tile/gpu_math.h"
#include "backward_plan.cuh"
#include "tensor_map.h"

namespace flash::cuda::sm90 {

struct BackwardMaps {
    CUtensorMap q, dout, k, v;
};

template <DType dtype, BackwardConfiguration c>
class BackwardProducer {
  public:
    __device__ BackwardProducer(const BackwardProblem& problem, const BackwardMaps& maps,
                                const DqSums& dq_sums, BackwardShared<c>& shared)
        : problem_(problem), maps_(maps), dq_sums_(dq_sums), shared_(shared) {}

    // The whole warp.
    __device__ void run() {
        BackwardPlan& plan = shared_.plan;
        if (!plan.has_queries) return;
        if (lane_index() == 0) load_keys(shared_.k, maps_.k, shared_address(&shared_.k_full));
        uint32_t n = 0;
        for (int i = 0; i < plan.tile.group; ++i) {
            float* const dq = dq_sums_.of_head(plan.place.head, i, plan.tile.batch);
            TileWalk<c.query_tile> walk(plan.walk, plan.start);
            while (walk.more()) {
                QueryNote note{dq + int64_t(walk.first()) * c.head_dim, walk.first(), walk.seen(plan.walk),
                               walk.masked() || plan.partial};
                walk.advance(plan.walk);
                note.last = !walk.more() && i + 1 == plan.tile.group;
                copy(note, int(plan.tile.head) * plan.tile.group + i, n++);
            }
        }
    }

  private:
    using Shared = BackwardShared<c>;
    using QueryTile = TileLayout<c.query_tile, c.head_dim, 2, kPanel>;
    static constexpr int kSteps = (c.query_tile + 31) / 32;

    __device__ __forceinline__ int batch() const {
        return problem_.forward.cu_seqlens_q ? 0 : int(shared_.plan.tile.batch);
    }

    __device__ __forceinline__ void load_keys(const char* to, const CUtensorMap& map,
                                              uint32_t barrier) const {
        const RowTile& tile = shared_.plan.tile;
        mbarrier_arrive_expecting(barrier, Shared::key_bytes);
        load<c.key_tile>(to, map, barrier, int(tile.sequence.first_key_row) + tile.first, int(tile.head));
    }

    template <int kRows>
    __device__ __forceinline__ void load(const char* to, const CUtensorMap& map, uint32_t barrier, int row,
                                         int head) const {
#pragma unroll
        for (int panel = 0; panel < c.head_dim / kPanel; ++panel)
            tma_load(shared_address(to) + panel * kRows * 128, &map, barrier, panel * kPanel, row, head,
                     batch());
    }

    __device__ __forceinline__ void copy(QueryNote& note, int head, uint32_t n) {
        const int stage = int(n % c.stages);
        const int row = int(shared_.plan.tile.sequence.first_query_row) + note.first;
        const uint32_t q_full = in_ring(shared_.q_full, n), dout_full = in_ring(shared_.dout_full, n);
        float lse[kSteps], delta[kSteps];
        note.bad = load_statistics(lse, delta, row, head) && note.masked;
        mbarrier_wait(in_ring(shared_.q_empty, n), parity(shared_.q_empty, n) ^ 1);
        if (note.bad) {
            mbarrier_wait(in_ring(shared_.dout_empty, n), parity(shared_.dout_empty, n) ^ 1);
            copy_finite(stage, row, head);
            if (lane_index() == 0) {
                mbarrier_arrive(q_full);
                mbarrier_arrive(dout_full);
            }
        } else if (lane_index() == 0) {
            mbarrier_arrive_expecting(q_full, Shared::query_bytes);
            load<c.query_tile>(shared_.q[stage], maps_.q, q_full, row, head);
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int at = i * 32 + lane_index();
            if (at >= c.query_tile) break;
            shared_.lse[stage][at] = lse[i] == -INFINITY ? INFINITY : lse[i] * float(GpuMath::unit);
            shared_.delta[stage][at] = delta[i];
        }
        if (lane_index() == 0) {
            shared_.notes[stage] = note;
            if (n == 0) {
                load_keys(shared_.v, maps_.v, shared_address(&shared_.v_full));
                dq_sums_.wait_for_place(shared_.plan.place.head);
            }
        }
        mbarrier_arrive_warp(q_full);
        if (note.bad) return;
        mbarrier_wait(in_ring(shared_.dout_empty, n), parity(shared_.dout_empty, n) ^ 1);
        if (lane_index() == 0) {
            mbarrier_arrive_expecting(dout_full, Shared::query_bytes);
            load<c.query_tile>(shared_.dout[stage], maps_.dout, dout_full, row, head);
        }
    }

    // Also of a neighbouring sequence's rows, since those are copied, too. True if some row of Q or dO may
    // not be finite: that leaves its mark on lse or delta.
    __device__ __forceinline__ bool load_statistics(float (&lse)[kSteps], float (&delta)[kSteps], int row,
                                                    int head) const {
        const int64_t batch = shared_.plan.tile.batch;
        bool bad = false;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int64_t at = row + i * 32 + lane_index();
            const bool exists = i * 32 + lane_index() < c.query_tile && at < problem_.forward.rows_q;
            lse[i] = exists ? *statistics_of<const float>(problem_.forward.lse, batch, at, head) : 0;
            delta[i] = exists ? *statistics_of<const float>(problem_.delta, batch, at, head) : 0;
            bad |= !(fabsf(lse[i]) + fabsf(delta[i]) < INFINITY);
        }
        return __any_sync(0xffffffff, bad);
    }

    __device__ __forceinline__ void copy_finite(int stage, int row, int head) {
        const uint32_t landed = shared_address(&shared_.landed);
        if (lane_index() == 0) {
            mbarrier_arrive_expecting(landed, 2 * Shared::query_bytes);
            load<c.query_tile>(shared_.q[stage], maps_.q, landed, row, head);
            load<c.query_tile>(shared_.dout[stage], maps_.dout, landed, row, head);
        }
        uint32_t(&bad)[(c.query_tile + 31) / 32] = shared_.bad_queries[stage];
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
    const DqSums& dq_sums_;
    Shared& shared_;
    uint32_t landed_ = 0;  // tiles that were looked at
};

}  // namespace flash::cuda::sm90
