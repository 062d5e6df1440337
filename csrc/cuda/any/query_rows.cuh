// Which query and head a row of a tile of queries is: of one head, a query a row; or, where queries are few,
// of heads that share keys, a query's next to each other, so that keys are read once for all of them.
#pragma once

#include "../../attention/score.h"
#include "../tile/gpu_math.h"
#include "loader.cuh"
#include "row_tile.cuh"

namespace flash::cuda {

template <bool kFew>
struct QueryRows {
    const int& heads;  // of a query that are rows; 1 but for few queries

    // Counted from the tile's first query; from the first of the heads.
    __device__ __forceinline__ Position query(int row) const { return kFew ? row / heads : row; }
    __device__ __forceinline__ int head(int row) const { return kFew ? row % heads : 0; }

    __device__ __forceinline__ int64_t first_head(const RowTile& tile) const {
        return kFew ? tile.head * heads : tile.head;
    }
    __device__ __forceinline__ Position first_row(const RowTile& tile) const {
        return kFew ? tile.first * heads : tile.first;
    }
    __device__ __forceinline__ Interval rows(const RowTile& tile) const {
        return kFew ? Interval(tile.rows.begin * heads, tile.rows.end * heads) : tile.rows;
    }

    // Of a tensor [.., Sq, H, head_dim], from the sequence's first query on.
    template <class Element>
    __device__ __forceinline__ auto of(const TensorView& tensor, const RowTile& tile,
                                       int64_t head_dim) const {
        const HeadRows<Element> first(tensor, tile.unowned ? 0 : tile.batch, tile.sequence.first_query_row,
                                      first_head(tile), head_dim);
        if constexpr (kFew)
            return GroupedRows<Element>(first, heads, tensor.head_stride);
        else
            return first;
    }

    // What the row's scores go through. plan: of its tile, and of one of the heads.
    template <class Plan>
    __device__ __forceinline__ ScoreTransform<GpuMath> transform(const ForwardProblem& problem,
                                                                 const Plan& plan, int row) const {
        ScoreTransform<GpuMath> transform = plan.transform;
        if (kFew && problem.alibi_slopes)
            transform.slope = ScoreTransform<GpuMath>::slope_of(
                problem, plan.tile.unowned ? 0 : plan.tile.batch, first_head(plan.tile) + head(row));
        return transform;
    }

    // The part of a tile of few queries that the i'th one of so many rows has.
    template <int kRows>
    __device__ __forceinline__ RowTile part(const RowTile& tile, int i) const {
        const Position queries = kRows / heads;
        RowTile part = tile;
        part.first += i * queries;
        part.rows = intersection(tile.rows, {part.first, part.first + queries});
        return part;
    }
    // Counted from the tile's first query: that of a row of a tile that has such parts.
    template <int kRows>
    __device__ __forceinline__ Position query_of_parts(int row) const {
        return kFew ? row / kRows * (kRows / heads) + query(row % kRows) : row;
    }
};

}  // namespace flash::cuda
