// A tile of 16-bit elements in shared memory: rows of `kColumns`, cut into panels of 64 columns (32 for 96
// and 192, which warps divide in halves), each panel row contiguous. The 16-byte chunks of a row are permuted
// so that the eight rows that ldmatrix reads at once, at one column, lie in different banks:
//
//     panel of 64: chunk ^ (row % 8)       panel of 32: chunk ^ (row / 2 % 4)
//
// A lane's address is made once: the permutation of (row0 + r, column0 + c) for row0 a multiple of 8 and
// column0 a multiple of 16 is that of (r, c) exclusive-or a constant.
#pragma once

#include <cstdint>

#include "../ptx/ldmatrix.h"
#include "../ptx/shared.h"
#include "fragment.h"

namespace flash::cuda {

template <int kRows, int kColumns>
struct SmemTile {
    static constexpr int rows = kRows, columns = kColumns;
    static constexpr int panel = kColumns % 64 == 0 && kColumns % 192 != 0 ? 64 : 32;
    static constexpr int panels = kColumns / panel;
    static constexpr int chunks = panel / 8;  // of 16 bytes, in a panel's row
    static constexpr int row_bytes = panel * 2;
    static constexpr int panel_bytes = kRows * row_bytes;
    static constexpr int bytes = kRows * kColumns * 2;
    static_assert(kColumns % 32 == 0 && kRows % 8 == 0);

    // Byte offset of the chunk'th 16 bytes of a panel's row.
    __device__ __forceinline__ static uint32_t offset(int row, int panel_index, int chunk) {
        const int permuted = chunk ^ (panel == 64 ? row % 8 : row / 2 % 4);
        return panel_index * panel_bytes + row * row_bytes + permuted * 16;
    }

    // Where this lane reads for operands whose 16 x 16 matrices come as (rows 0-7 | 8-15) x (columns 0-7 |
    // 8-15), rows first: A as it is stored, B transposed.
    __device__ __forceinline__ static uint32_t lane_rows_first(uint32_t tile) {
        const int lane = lane_index();
        return opaque(tile + offset(lane % 16, 0, lane / 16));
    }

    // Columns first: B as it is stored, A transposed.
    __device__ __forceinline__ static uint32_t lane_columns_first(uint32_t tile) {
        const int lane = lane_index();
        return opaque(tile + offset(lane % 8 + lane / 16 * 8, 0, lane / 8 % 2));
    }

    __device__ __forceinline__ static uint32_t at(uint32_t lane_address, int row, int column) {
        return (lane_address ^ (column % panel / 8 * 16)) + column / panel * panel_bytes + row * row_bytes;
    }

    // A lane's address for a part of the tile that starts at `column`. Parts are whole panels or divide one,
    // so that their columns and the start share no bit.
    template <int kExtent>
    __device__ __forceinline__ static uint32_t part(uint32_t lane_address, int row, int column) {
        static_assert(kExtent % panel == 0 || panel % kExtent == 0);
        return at(lane_address, row, column);
    }

    // r becomes A[row .. row + 15][column .. column + 15].
    __device__ __forceinline__ static void load_a(uint32_t (&r)[4], uint32_t rows_first, int row,
                                                  int column) {
        ldmatrix_x4(r, at(rows_first, row, column));
    }

    // A^T is stored: r becomes A[column ..][row ..] of the tile's [row ..][column ..].
    __device__ __forceinline__ static void load_a_transposed(uint32_t (&r)[4], uint32_t columns_first,
                                                             int row, int column) {
        ldmatrix_x4_transposed(r, at(columns_first, row, column));
    }

    // The tile's rows are B's columns: r[0], r[1] for rows row .. row + 7, r[2], r[3] for the next eight.
    __device__ __forceinline__ static void load_b(uint32_t (&r)[4], uint32_t columns_first, int row,
                                                  int column) {
        ldmatrix_x4(r, at(columns_first, row, column));
    }

    // The tile's rows are B's rows: r[0], r[1] for columns column .. column + 7, r[2], r[3] for the next.
    __device__ __forceinline__ static void load_b_transposed(uint32_t (&r)[4], uint32_t rows_first, int row,
                                                             int column) {
        ldmatrix_x4_transposed(r, at(rows_first, row, column));
    }
};

}  // namespace flash::cuda
