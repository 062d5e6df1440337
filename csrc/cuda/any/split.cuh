// Blocks that share the keys of a tile of queries; any/combine.cu puts together what they write.
#pragma once

#include "row_tile.cuh"

namespace flash::cuda {

// The keys of one call that this block may visit, and where its results go. Of packed sequences, which few
// queries alone have split, B is 1 and Sq all of their rows.
struct Split {
    int index = 0, count = 1;
    float* out = nullptr;  // [count, B, H, Sq, head_dim of the configuration] partial results, count > 1
                           // only; nullptr where the blocks are a cluster (parts_together.cuh)
    float* lse = nullptr;  // [count, B, H, Sq]

    // partial: the workspace.
    FLASH_HOST_DEVICE static Split of(const ForwardProblem& problem, int index, int count, float* partial,
                                      int64_t stride) {
        return {index, count, partial, partial + count * rows(problem) * stride};
    }
    static int64_t workspace_bytes(const ForwardProblem& problem, int count, int64_t stride) {
        return count == 1 ? 0 : count * rows(problem) * (stride + 1) * int64_t(sizeof(float));
    }

    __device__ bool is_cluster() const { return !out; }

    // A share of the tiles that the block's rows see.
    __device__ Interval keys(const RowTile& tile, const Mask& mask, Position key_tile) const {
        if (count == 1) return {0, mask.seqlen_k};
        const Position first = mask.keys_of(tile.rows.begin).begin / key_tile;
        const Position end = (mask.keys_of(tile.rows.end - 1).end + key_tile - 1) / key_tile;
        const Position share = (end - first + count - 1) / count, begin = first + index * share;
        return intersection({begin * key_tile, (begin + share) * key_tile}, {0, mask.seqlen_k});
    }

    // Where the head's row of the tile's first query is.
    __device__ __forceinline__ int64_t first_row(const ForwardProblem& problem, const RowTile& tile,
                                                 int64_t head) const {
        const int64_t entry = problem.cu_seqlens_q ? index : index * problem.batch + tile.batch;
        return (entry * problem.heads_q + head) * problem.rows_q + tile.sequence.first_query_row;
    }

  private:
    // Of all heads.
    FLASH_HOST_DEVICE static int64_t rows(const ForwardProblem& problem) {
        return (problem.cu_seqlens_q ? 1 : problem.batch) * problem.heads_q * problem.rows_q;
    }
};

}  // namespace flash::cuda
