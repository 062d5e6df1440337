// What launches of Hopper's backward begin with: what they can't copy, the statistics of queries and their
// place in the workspace, the tensors' maps.
#pragma once

#include "../any/key_tiles.h"
#include "../any/rows.h"
#include "backward_producer.cuh"
#include "problem.h"

namespace flash::cuda::sm90 {

// Of a part of the workspace, so that the next one is aligned.
inline int64_t padded(int64_t bytes) {
    return (bytes + 255) / 256 * 256;
}

// What every kernel for keys' gradients refuses.
inline const char* why_not_backward(const BackwardProblem& whole) {
    const ForwardProblem& problem = whole.forward;
    // A block walks all query heads of a key head alike.
    if (problem.query_blocks.head_stride != 0 && problem.heads_q != problem.heads_k)
        return "grouped heads must share their map of blocks";
    if (const char* reason = cannot_copy({queries_of(problem, problem.q, problem.head_dim),
                                          queries_of(problem, whole.dout, problem.head_dim_v),
                                          keys_of(problem, problem.k, problem.head_dim),
                                          keys_of(problem, problem.v, problem.head_dim_v)}))
        return reason;
    // The gradients are contiguous (store_rows.cuh).
    if ((problem.head_dim | problem.head_dim_v) % 4 != 0) return "the head dims are no multiples of 4";
    return nullptr;
}

// lse in log 2, delta, and, last, whether they are finite, whether keys are not, and how far delta is: to be
// zero before that is computed.
class StatisticsSpace {
  public:
    explicit StatisticsSpace(const ForwardProblem& problem)
        : rows_{problem.cu_seqlens_q, problem.batch, problem.rows_q},
          heads_(problem.heads_q),
          batches_(problem.cu_seqlens_q ? 1 : problem.batch) {}

    int64_t zeros() const { return 2 * array_bytes(); }  // where they begin
    int64_t bytes() const { return zeros() + padded((2 + batches_ * heads_) * sizeof(uint32_t)); }

    // beside: delta is computed beside the kernel that is given this.
    AlignedStatistics at(char* space, bool beside) const {
        uint32_t* const counters = counters_at(space);
        return {array_at(space),
                array_at(space + array_bytes()),
                rows_,
                counters,
                {beside ? counters + 2 : nullptr}};
    }

    uint32_t* bad_keys(char* space) const { return counters_at(space) + 1; }

  private:
    uint32_t* counters_at(char* space) const { return reinterpret_cast<uint32_t*>(space + zeros()); }
    int64_t array_bytes() const { return padded(batches_ * heads_ * rows_.count() * int64_t(sizeof(float))); }
    RowStatistics array_at(void* data) const {
        const int64_t rows = rows_.count();
        return {data, rows_.cu_seqlens ? 0 : rows * heads_, rows};
    }

    AlignedRows rows_;
    int64_t heads_, batches_;
};

// Under a diagonal a block that takes a tile of keys early may end late, but its plan and first copies take
// five steps: so many tiles of queries are left to copy then.
inline int lead_by_length(const ForwardProblem& problem) {
    return has_diagonal(problem) && !has_map(problem) ? 5 : -1;
}

// So many blocks compute delta while others begin to walk; 0: all do, before. It is bound by the memory, of
// which a third of the multiprocessors have nearly as much as all have. They begin to walk a few tiles later
// than the others, so walks have to be many, and are not to end all at the same time, unless they are short.
// Rows of 64 are done so soon that under a diagonal nothing is won; shorter ones have not been timed.
inline int64_t blocks_for_delta(const ForwardProblem& problem, const RowTiling& keys, const Launch& launch) {
    const int64_t blocks = launch.device.multiprocessors, columns = problem.head_dim_v;
    if (problem.cu_seqlens_q || problem.cu_seqlens_k || columns < 64) return 0;
    if (columns == 64 && has_diagonal(problem)) return 0;
    const bool end_together = !has_diagonal(problem) && problem.head_dim <= 128;
    if (problem.seqlen_q > (end_together ? 1024 : 2048)) return 0;
    return keys.count() >= 4 * blocks ? blocks / 3 : 0;
}

// beside: so many blocks (blocks_for_delta); 0: before.
inline void compute_delta(const BackwardProblem& problem, AlignedStatistics& statistics, int64_t beside,
                          const Launch& launch) {
    if (beside > 0)
        compute_delta_beside(problem, statistics, beside, launch.overlapping());
    else
        compute_delta(problem, statistics, launch.overlapping());
}

inline BackwardMaps maps_of(const BackwardProblem& problem, const AlignedStatistics& statistics, DType dtype,
                            int query_tile, int key_tile, bool biased) {
    const ForwardProblem& forward = problem.forward;
    return {tensor_map(queries_of(forward, forward.q, forward.head_dim), dtype, query_tile),
            tensor_map(queries_of(forward, problem.dout, forward.head_dim_v), dtype, query_tile),
            tensor_map(keys_of(forward, forward.k, forward.head_dim), dtype, key_tile),
            tensor_map(keys_of(forward, forward.v, forward.head_dim_v), dtype, key_tile),
            tensor_map(statistics.lse_log2, forward, statistics.rows.count(), query_tile),
            tensor_map(statistics.delta, forward, statistics.rows.count(), query_tile),
            biased ? bias_map(forward, dtype, query_tile) : CUtensorMap{}};
}

}  // namespace flash::cuda::sm90
