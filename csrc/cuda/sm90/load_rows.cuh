// Copies from tensors to tiles in shared memory, by way of their maps.
#pragma once

#include "../any/row_tile.cuh"
#include "../ptx/mbarrier.h"
#include "../ptx/shared.h"
#include "../ptx/tma.h"
#include "tensor_map.h"

namespace flash::cuda::sm90 {

// Rows of a head to rows of a tile in panels of kTileRows, each 64 columns from a multiple of kPanelStep on.
// By one thread, which has yet to arrive.
template <int kRows, int kTileRows, int kHeadDim, int kPanelStep = kPanel>
__device__ __forceinline__ void load_rows(const char* to, const CUtensorMap& map, uint32_t barrier, int row,
                                          int head, int batch) {
    constexpr int columns = in_whole_panels(kHeadDim);
    mbarrier_expect(barrier, kRows * columns * 2);
#pragma unroll
    for (int panel = 0; panel < columns / kPanel; ++panel)
        tma_load(shared_address(to) + panel * kTileRows * 128, &map, barrier, panel * kPanelStep, row, head,
                 batch);
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

// A tile of kRows keys, or values. By one thread, which has yet to arrive.
template <int kRows, int kHeadDim>
__device__ __forceinline__ void load_keys(const char* to, const CUtensorMap& map, uint32_t barrier,
                                          const KeyRows& rows, Position first) {
    load_rows<kRows, kRows, kHeadDim>(to, map, barrier, rows.first + first, rows.head, rows.batch);
}

}  // namespace flash::cuda::sm90
