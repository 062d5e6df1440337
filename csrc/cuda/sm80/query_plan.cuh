// What the threads of a block that owns a tile of queries need to know, worked out by two threads and kept in
// shared memory: registers are scarce.
#pragma once

#include "../../attention/dropout.h"
#include "../../attention/score.h"
#include "../tile/gpu_math.h"
#include "../any/loader.cuh"
#include "../any/row_tile.cuh"
#include "../any/split.cuh"
#include "../any/tile_walk.cuh"
#include "score_addend.cuh"

namespace flash::cuda::sm80 {

template <DType dtype, int kWarps>
struct QueryPlan {
    RowTile tile;
    HeadRows<const Bits<dtype>> keys, values;
    Split split;
    Mask mask;
    ScoreTransform<GpuMath> transform;
    Dropout dropout;
    ScoreAddend<dtype> addend;
    Interval slice;       // the keys that the block may visit
    SchedulePlace start;  // where every warp starts
    SchedulePlace warps[kWarps];

    // By all threads, before a __syncthreads.
    __device__ __forceinline__ void make(const ForwardProblem& problem, const RowTile& row_tile,
                                         const Split& part, Position key_tile) {
        if (threadIdx.x == 0) make_schedule(problem, row_tile, part, key_tile);
        if (threadIdx.x == 32) make_operands(problem, row_tile, part);
    }

    __device__ __forceinline__ SchedulePlace& warp() { return warps[threadIdx.x / 32]; }
    __device__ __forceinline__ const SchedulePlace& warp() const { return warps[threadIdx.x / 32]; }

    __device__ __forceinline__ Interval visible(Position query) const {
        return intersection(mask.keys_of(query), slice);
    }

  private:
    __device__ __forceinline__ void make_operands(const ForwardProblem& problem, const RowTile& tile,
                                                  const Split& part) {
        split = part;
        const Sequence& sequence = tile.sequence;
        const int64_t batch = tile.unowned ? 0 : tile.batch;
        const int64_t first_key = sequence.first_key_row;
        if (problem.cache.pages) {
            const Pages pages(problem.cache, batch, first_key);
            keys = {problem.k, pages, tile.key_head, problem.head_dim};
            values = {problem.v, pages, tile.key_head, problem.head_dim_v};
        } else {
            keys = {problem.k, sequence.key_entry, first_key, tile.key_head, problem.head_dim};
            values = {problem.v, sequence.key_entry, first_key, tile.key_head, problem.head_dim_v};
        }
        transform = ScoreTransform<GpuMath>(problem, batch, tile.head);
        if (problem.dropout_threshold) dropout = Dropout(problem, batch, tile.head);
        addend = ScoreAddend<dtype>(problem, batch, tile.head);
    }

    __device__ __forceinline__ void make_schedule(const ForwardProblem& problem, const RowTile& row_tile,
                                                  const Split& part, Position key_tile) {
        tile = row_tile;
        mask = Mask(problem, tile.sequence);
        slice = tile.unowned ? Interval(0, 0) : part.keys(tile, mask, key_tile);
        const Interval first = visible(tile.rows.begin), last = visible(tile.rows.end - 1);
        start.schedule =
            problem.key_blocks.counts
                ? TileSchedule(first, last, key_tile,
                               block_list_of(problem.key_blocks, tile.unowned ? 0 : tile.batch, tile.head,
                                             tile.rows.begin))
                : TileSchedule(first, last, key_tile);
        start.next();
    }
};

}  // namespace flash::cuda::sm80
