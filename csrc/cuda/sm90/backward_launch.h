// What launches of Hopper's backward begin with: what they can't copy, the statistics of queries and their
// place in the workspace, the tensors' maps.
#pragma once

#include <algorithm>

#include "../any/rows.h"
#include "backward_producer.cuh"
#include "problem.h"
#include "walk_parts.cuh"

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

inline bool has_map(const ForwardProblem& problem) {
    return problem.query_blocks.counts;
}
inline bool has_diagonal(const ForwardProblem& problem) {
    return problem.window_right >= 0 && problem.window_left < 0;
}

// The tiles of keys of a problem, and in how many parts they are walked at once (walk_parts.cuh).
class KeyTiles {
  public:
    KeyTiles(const ForwardProblem& problem, const Device& device, int query_tile, int key_tile)
        : problem_(problem),
          blocks_(device.multiprocessors),
          query_tile_(query_tile),
          count_(RowTiling::of_keys_together(problem, key_tile, 1).count()) {}

    int64_t count() const { return count_; }
    // A part would have to wait for the one before.
    bool are_few() const { return are_few(count_); }
    // Of all batch entries.
    int64_t key_heads() const {
        return std::max<int64_t>(problem_.heads_k * (problem_.cu_seqlens_k ? 1 : problem_.batch), 1);
    }
    // Of a sequence.
    int64_t mean_queries() const {
        return problem_.cu_seqlens_q ? problem_.rows_q / std::max<int64_t>(problem_.batch, 1)
                                     : problem_.seqlen_q;
    }

    // A head without a group has its queries divided, if it is not packed, nor its sums to be the same
    // whatever else there is.
    int64_t parts_of_queries() const {
        if (RowTiling::group_of(problem_) > 1 || has_map(problem_) || problem_.deterministic ||
            problem_.cu_seqlens_q || problem_.cu_seqlens_k)
            return 1;
        return parts(1, tiles_of_queries());
    }
    WalkParts at_once() const {
        const int64_t of_queries = parts_of_queries(), group = RowTiling::group_of(problem_);
        return of_queries > 1 ? WalkParts::of_queries_at_once(of_queries, key_heads(),
                                                              tiles_of_queries() / of_queries * query_tile_)
                              : WalkParts::of_heads_at_once(parts(group, group), key_heads());
    }

  private:
    int64_t tiles_of_queries() const { return (mean_queries() + query_tile_ - 1) / query_tile_; }
    bool are_few(int64_t tiles) const { return tiles * 4 < blocks_ * 7; }

    // In how many parts, which divide `whole`, walks of so many heads end clearly first. Counted in tiles of
    // queries; a walk's begin and end are ten. Tiles of keys that differ are taken longest first. A
    // deterministic sum must not depend on how many batch entries there are, nor on other packed sequences.
    int64_t parts(int64_t heads, int64_t whole) const {
        int64_t tiles = count_;
        if (problem_.deterministic) {
            if (problem_.cu_seqlens_q || problem_.cu_seqlens_k || problem_.seqlen_k < 4096) return 1;
            tiles /= problem_.batch;
        }
        if (tiles == 0 || !are_few(tiles)) return 1;
        const int64_t longest = heads * tiles_of_queries();
        const auto time = [&](int64_t parts) {
            const int64_t walks = tiles * parts, steps = (longest + parts - 1) / parts + 10;
            if (!has_diagonal(problem_)) return (walks + blocks_ - 1) / blocks_ * steps;
            return std::max(steps, walks * (longest / parts / 2 + 10) / blocks_);
        };
        int64_t best = 1;
        for (int64_t parts = 2; parts <= whole; ++parts)
            if (whole % parts == 0 && time(parts) * 5 < time(best) * 4) best = parts;
        return best;
    }

    const ForwardProblem& problem_;
    int64_t blocks_;
    int query_tile_;
    int64_t count_;
};

// lse in log 2, delta, and, last, whether they are finite: to be zero before they are computed.
class StatisticsSpace {
  public:
    explicit StatisticsSpace(const ForwardProblem& problem)
        : rows_{problem.cu_seqlens_q, problem.batch, problem.rows_q},
          heads_(problem.heads_q),
          batches_(problem.cu_seqlens_q ? 1 : problem.batch) {}

    int64_t zeros() const { return 2 * array_bytes(); }  // where they begin
    int64_t bytes() const { return zeros() + padded(sizeof(uint32_t)); }

    AlignedStatistics at(char* space) const {
        return {array_at(space), array_at(space + array_bytes()), rows_,
                reinterpret_cast<uint32_t*>(space + zeros())};
    }

  private:
    int64_t array_bytes() const { return padded(batches_ * heads_ * rows_.count() * int64_t(sizeof(float))); }
    RowStatistics array_at(void* data) const {
        const int64_t rows = rows_.count();
        return {data, rows_.cu_seqlens ? 0 : rows * heads_, rows};
    }

    AlignedRows rows_;
    int64_t heads_, batches_;
};

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
