// How many tiles of keys a backward's walk has, and in how many parts few of them are walked.
#pragma once

#include <algorithm>

#include "row_tile.cuh"
#include "walk_parts.cuh"

namespace flash::cuda {

inline bool has_map(const ForwardProblem& problem) {
    return problem.query_blocks.counts;
}

// The tiles of keys of a problem, and in how many parts they are walked at once (walk_parts.cuh).
class KeyTiles {
  public:
    // blocks: that the device runs at once.
    KeyTiles(const ForwardProblem& problem, int64_t blocks, int query_tile, int key_tile)
        : problem_(problem),
          blocks_(blocks),
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
    WalkParts at_once() const {
        const int64_t group = RowTiling::group_of(problem_);
        if (group > 1) return WalkParts::of_heads_at_once(parts(group, group), key_heads());
        if (has_map(problem_) || problem_.deterministic || problem_.cu_seqlens_q || problem_.cu_seqlens_k)
            return WalkParts::whole(key_heads());
        const int64_t of_queries = parts(1, tiles_of_queries());
        return WalkParts::of_queries_at_once(of_queries, key_heads(),
                                             tiles_of_queries() / of_queries * query_tile_);
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

}  // namespace flash::cuda
