// Copies from tensors to tiles in shared memory, by way of their maps.
#pragma once

#include "../any/row_tile.cuh"
#include "../ptx/mbarrier.h"
#include "../ptx/shared.h"
#include "../ptx/tma.h"
#include "tensor_map.h"

namespace flash::cuda::sm90 {

// So many rows, those of a box of the map, to a tile in panels of kTileRows, each 64 columns from a multiple
// of kPanelStep on. at: the box's place on the map's other axes. hint: of ptx/cache_hint.h. By one thread,
// which has yet to arrive.
template <int kTileRows, int kHeadDim, int kPanelStep = kPanel, class Hint = NoHint>
__device__ __forceinline__ void load_boxes(const char* to, const CUtensorMap& map, uint32_t barrier, int rows,
                                           const int (&at)[3], Hint hint = {}) {
    constexpr int columns = in_whole_panels(kHeadDim);
    mbarrier_expect(barrier, rows * columns * 2);
#pragma unroll
    for (int panel = 0; panel < columns / kPanel; ++panel)
        tma_load(shared_address(to) + panel * kTileRows * 128, &map, barrier, panel * kPanelStep, at[0],
                 at[1], at[2], hint);
}

// Rows of a head.
template <int kRows, int kTileRows, int kHeadDim, int kPanelStep = kPanel, class Hint = NoHint>
__device__ __forceinline__ void load_rows(const char* to, const CUtensorMap& map, uint32_t barrier, int row,
                                          int head, int batch, Hint hint = {}) {
    load_boxes<kTileRows, kHeadDim, kPanelStep>(to, map, barrier, kRows, {row, head, batch}, hint);
}

// As many queries as kRows have room for, of so many heads that are next to each other in a row, and in the
// tile. head: of groups of them.
template <int kRows, int kHeadDim>
__device__ __forceinline__ void load_queries_of_heads(const char* to, const CUtensorMap& map,
                                                      uint32_t barrier, int heads, int query, int head,
                                                      int batch) {
    load_boxes<kRows, kHeadDim>(to, map, barrier, kRows / heads * heads, {head * heads, query, batch});
}

// Which entry of a tensor's map a tile lies in: packed sequences are one.
__device__ __forceinline__ int tensor_batch(const int32_t* cu_seqlens, const RowTile& tile) {
    return cu_seqlens ? 0 : int(tile.batch);
}

// Where the keys of a tile of queries lie, read once: to a warp that copies, what lies in shared memory is
// far.
struct KeyRows {
    int first, head, batch;

    __device__ __forceinline__ KeyRows(const RowTile& tile, const ForwardProblem& problem)
        : first(int(tile.sequence.first_key_row)),
          head(int(tile.key_head)),
          batch(tensor_batch(problem.cu_seqlens_k, tile)) {}
};

// Where a tile of keys lies if they are a cache's: in an entry, or in a page, which is whole tiles.
class CachedKeys {
  public:
    __device__ __forceinline__ CachedKeys(const RowTile& tile, const ForwardProblem& problem)
        : cache_(problem.cache), tile_(tile) {}

    // The tile's first row, counted from rows.first.
    __device__ __forceinline__ void find(KeyRows& rows, Position first) const {
        if (cache_.pages) {
            const int page_size = int(cache_.page_size), page = first / page_size;
            const int entry = cache_.pages[tile_.batch * cache_.pages_stride + page];
            rows.batch = entry < 0 ? 0 : min(entry, int(cache_.entries) - 1);
            rows.first = -page * page_size;
        } else if (cache_.entry) {
            rows.batch = int(tile_.sequence.key_entry);
        }
    }

  private:
    const KeyCache& cache_;
    const RowTile& tile_;
};

// A tile of kRows keys, or values. By one thread, which has yet to arrive.
template <int kRows, int kHeadDim, class Hint = NoHint>
__device__ __forceinline__ void load_keys(const char* to, const CUtensorMap& map, uint32_t barrier,
                                          const KeyRows& rows, Position first, Hint hint = {}) {
    load_rows<kRows, kRows, kHeadDim>(to, map, barrier, rows.first + first, rows.head, rows.batch, hint);
}

}  // namespace flash::cuda::sm90
