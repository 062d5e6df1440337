// How the kernels for few queries fill a tile (any/query_rows.cuh).
#pragma once

#include <algorithm>

#include "../problem.h"
#include "split_times.h"

namespace flash::cuda {

// Heads that share keys are rows of one tile: as many as divide them into equal parts.
inline int64_t heads_in_rows(const ForwardProblem& problem, int64_t rows) {
    const int64_t group = problem.heads_k > 0 ? problem.heads_q / problem.heads_k : 1;
    int64_t heads = std::min(group, rows);
    while (heads > 1 && group % heads != 0) --heads;
    return std::max<int64_t>(heads, 1);
}

// Of all heads that share keys.
inline int64_t rows_of_few(const ForwardProblem& problem) {
    return problem.heads_k > 0 ? problem.seqlen_q * (problem.heads_q / problem.heads_k) : 0;
}

// The tiles of all heads, at most; a tile has so many parts of so many rows, which hold whole queries.
inline int64_t tiles_of_few(const ForwardProblem& problem, int64_t rows, int64_t parts) {
    const int64_t heads = heads_in_rows(problem, rows), queries = parts * (rows / heads);
    // seqlen_q: of packed sequences the longest one.
    int64_t tiles = (problem.seqlen_q + queries - 1) / queries * problem.batch;
    if (problem.cu_seqlens_q) tiles = std::min(tiles, problem.rows_q / queries + problem.batch);
    return tiles * (problem.heads_q / heads);
}

// Some keys lie too far to the left.
inline bool is_windowed(const ForwardProblem& problem) {
    return problem.window_left >= 0 && problem.window_left < problem.seqlen_k;
}

// The most keys that a query sees, where no map of blocks says otherwise.
inline int64_t most_keys(const ForwardProblem& problem) {
    if (problem.window_left < 0 || problem.window_right < 0) return problem.seqlen_k;
    return std::min(problem.seqlen_k, problem.window_left + problem.window_right + 1);
}

// And that a tile of all queries sees.
inline int64_t keys_of_few(const ForwardProblem& problem) {
    if (!is_windowed(problem)) return problem.seqlen_k;
    return std::min(problem.seqlen_k, most_keys(problem) + problem.seqlen_q - 1);
}

// The largest cluster that a chip starts whose multiprocessors have room for more than one of its blocks
// each.
inline int most_in_cluster(const Device& device) {
    if (device.capability == 90 || device.capability == 100) return kMostInCluster;
    return device.capability > 90 ? kPortableCluster : 1;
}

// Whether so many clusters run at once, of blocks that have a multiprocessor each. Those of one lie in a part
// of the chip with some 16 of them: an H200 runs 66 clusters of 2, 30 of 4, 22 of 5, 17 of 6, 15 of 8, 7 of
// 16.
inline bool clusters_fit(int64_t clusters, int64_t blocks, const Device& device) {
    const int64_t eighths = blocks <= 2 ? 8 : blocks <= 4 ? 7 : blocks <= 8 ? 6 : 0;
    return clusters * blocks * 8 <= device.multiprocessors * eighths;
}

// Of Hopper's kernels for few queries, measured.
inline TurnTimes times_of_few(const ForwardProblem& problem, int rows, int query_tile, int key_tile,
                              int head_dim, const Device& device) {
    const int64_t all_rows = rows_of_few(problem);
    // Half of the multiprocessors could read tiles of 64 KiB as fast as the memory can. What several tiles of
    // queries read it reads once.
    const int64_t tile_bytes = int64_t(key_tile) * head_dim * 2 * 2;
    return {tiles_of_few(problem, rows, query_tile / rows), (keys_of_few(problem) + key_tile - 1) / key_tile,
            device.multiprocessors, all_rows <= rows ? 3 : 4,
            device.multiprocessors * (int64_t(1) << 15) / tile_bytes *
                std::max<int64_t>(1, all_rows / query_tile)};
}

// What all kernels for few queries have against a problem, or nullptr.
inline const char* not_for_few(const ForwardProblem& problem) {
    // Nor masks of elements, which come with one.
    if (problem.key_blocks.counts) return "it takes no map of blocks";
    // seqlen_q is the longest sequence's, which is no matter of the others.
    if (problem.deterministic) return "with deterministic=True no row depends on how many others there are";
    return nullptr;
}

}  // namespace flash::cuda
