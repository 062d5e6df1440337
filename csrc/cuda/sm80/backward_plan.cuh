// What the warps of a block of the backward share, and thread 0's plan of which tiles of queries are visited.
#pragma once

#include "../any/dq_sums.cuh"
#include "../any/tile_walk.cuh"
#include "../any/walk_parts.cuh"
#include "../ptx/mbarrier.h"
#include "score_gradient.cuh"

namespace flash::cuda::sm80 {

struct BackwardConfiguration {
    int head_dim, query_tile, key_tile, warps, stages, blocks;
    int score_rows, gradient_rows, dq_rows;  // warps along the rows of S, of dK and dV, of dQ
    int finish_apart;  // finish_unit is a function of its own: 4 % faster at 128, slower elsewhere
};

template <DType dtype, BackwardConfiguration c>
using Dq = DqTile<dtype, c.query_tile, c.head_dim, c.warps, c.dq_rows>;

// What a query head's tiles are loaded from.
template <DType dtype>
struct QueryRows {
    HeadRows<const Bits<dtype>> queries, douts;
    const float *lse, *delta;  // of the sequence's first query

    // i: of the group.
    __device__ __forceinline__ QueryRows(const BackwardProblem& problem, const RowTile& tile, int i)
        : QueryRows(problem, tile, tile.head * tile.group + i, tile.sequence.first_query_row) {}

  private:
    __device__ __forceinline__ QueryRows(const BackwardProblem& problem, const RowTile& tile, int64_t head,
                                         int64_t first)
        : queries(problem.forward.q, tile.batch, first, head, problem.forward.head_dim),
          douts(problem.dout, tile.batch, first, head, problem.forward.head_dim_v),
          lse(statistics_of<const float>(problem.forward.lse, tile.batch, first, head)),
          delta(statistics_of<const float>(problem.delta, tile.batch, first, head)) {}
};

// What the block needs of one query head of the group.
template <DType dtype>
struct BackwardHead {
    QueryRows<dtype> rows;
    float* dq;                 // sums of the sequence's first query tile
    ScoreTransform<GpuMath> transform;
    Dropout dropout;
    ScoreAddend<dtype> addend;
    SchedulePlace start;
};

template <DType dtype, BackwardConfiguration c>
struct BackwardShared {
    alignas(128) char k[c.key_tile * c.head_dim * element_bytes(dtype)];  // at the end dK
    alignas(128) char v[c.key_tile * c.head_dim * element_bytes(dtype)];  // at the end dV
    alignas(128) char q[c.stages][c.query_tile * c.head_dim * element_bytes(dtype)];
    alignas(128) char dout[c.stages][c.query_tile * c.head_dim * element_bytes(dtype)];
    alignas(128) char p[c.query_tile * c.key_tile * element_bytes(dtype)];
    alignas(128) char ds[c.query_tile * c.key_tile * element_bytes(dtype)];
    alignas(16) float lse[c.stages][c.query_tile];
    alignas(16) float delta[c.stages][c.query_tile];
    uint64_t full[c.stages], left, ready;            // mbarriers
    uint32_t bad_queries[(c.query_tile + 31) / 32];  // rows of Q or dO that are not finite, a bit each
    uint32_t bad_keys[(c.key_tile + 31) / 32];
    bool finishes_dq, loaded_early, is_whole;
    bool has_bad_keys[c.warps];  // each warp's own: all say the same

    // Thread 0's plan.
    TileOrder::Place place;
    RowTile tile;
    Mask mask;
    int group;                     // query heads to visit
    uint32_t part, tile_of_all;    // which part is walked, of which tile of all key heads (walk_parts.cuh)
    Interval walked;               // queries
    BackwardHead<dtype> heads[2];  // of head i at i % 2
    SchedulePlace warps[c.warps];
};

template <DType dtype, BackwardConfiguration c>
class BackwardPlan {
  public:
    __device__ BackwardPlan(const BackwardProblem& problem, BackwardShared<dtype, c>& shared,
                            const DqSums& dq_sums, const WalkParts& parts)
        : problem_(problem), shared_(shared), dq_sums_(dq_sums), parts_(parts) {}

    // tiles: of keys, of a head.
    __device__ void start(const TileOrder::Place& place, const RowTile& tile, uint32_t tiles) const {
        shared_.place = place;
        shared_.part = parts_.part(place.head);
        shared_.tile_of_all = parts_.tile_of_all(place, tiles);
        shared_.walked = parts_.queries(shared_.part);
        shared_.tile = tile;
        shared_.mask = Mask(problem_.forward, tile.sequence);
        if (tile.unowned || tile.rows.empty()) {
            shared_.group = 1;
            shared_.heads[0].start.run = {0, 0, false};
        } else {
            shared_.group = tile.group;
            start_head(0);
        }
    }

    // Describes head i of the group; nobody may be reading head i - 2.
    __device__ void start_head(int i) const {
        const ForwardProblem& problem = problem_.forward;
        BackwardHead<dtype>& out = shared_.heads[i % 2];
        const RowTile& tile = shared_.tile;
        const int64_t head = tile.head * tile.group + i;
        out.rows = QueryRows<dtype>(problem_, tile, i);
        out.dq = dq_sums_.of_head(shared_.place.head, i, tile.batch);
        if (parts_.of_queries()) out.dq -= int64_t(shared_.walked.begin) * c.head_dim;
        out.transform = ScoreTransform<GpuMath>(problem, tile.batch, head);
        if (problem.dropout_threshold) out.dropout = Dropout(problem, tile.batch, head);
        out.addend = ScoreAddend<dtype>(problem, tile.batch, head);
        const Interval first = intersection(shared_.mask.queries_of(tile.rows.begin), shared_.walked);
        const Interval last = intersection(shared_.mask.queries_of(tile.rows.end - 1), shared_.walked);
        out.start.schedule =
            problem.query_blocks.counts
                ? TileSchedule(first, last, c.query_tile,
                               block_list_of(problem.query_blocks, tile.batch, head, tile.rows.begin))
                : TileSchedule(first, last, c.query_tile);
        out.start.next();
    }

  private:
    const BackwardProblem& problem_;
    BackwardShared<dtype, c>& shared_;
    const DqSums& dq_sums_;
    const WalkParts& parts_;
};

}  // namespace flash::cuda::sm80
