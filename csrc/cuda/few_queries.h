// How the kernels for few queries fill a tile.
#pragma once

#include <algorithm>

#include "../problem.h"

namespace flash::cuda {

// Heads that share keys are rows of one tile: as many as divide them into equal parts.
inline int64_t heads_in_rows(const ForwardProblem& problem, int64_t query_tile) {
    const int64_t group = problem.heads_k > 0 ? problem.heads_q / problem.heads_k : 1;
    int64_t heads = std::min(group, query_tile);
    while (heads > 1 && group % heads != 0) --heads;
    return std::max<int64_t>(heads, 1);
}

// The tiles of all heads, at most. seqlen_q: of packed sequences the longest one.
inline int64_t tiles_of_few(const ForwardProblem& problem, int64_t query_tile) {
    const int64_t heads = heads_in_rows(problem, query_tile), queries = query_tile / heads;
    int64_t tiles = (problem.seqlen_q + queries - 1) / queries * problem.batch;
    if (problem.cu_seqlens_q) tiles = std::min(tiles, problem.rows_q / queries + problem.batch);
    return tiles * (problem.heads_q / heads);
}

}  // namespace flash::cuda
