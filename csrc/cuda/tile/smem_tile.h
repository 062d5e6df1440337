// A tile in shared memory (tile_layout.h says where its elements lie) and how a warp's lanes read operands of
// mma.sync from it: 16-bit elements with ldmatrix, 32-bit ones with plain loads, as ldmatrix can't transpose
// those.
#pragma once

#include <cstdint>

#include "../ptx/ldmatrix.h"
#include "../ptx/shared.h"
#include "fragment.h"
#include "tile_layout.h"

namespace flash::cuda {

// Kernels make an address of the tile with lane_rows_first() or lane_columns_first(), move it to the warp's
// part with part() or by rows, and give it to a product; which of the two says the product. The product takes
// it by rows or by columns, as it reads the operand, and loads from there.
template <int kRows, int kColumns, int kElementBytes = 2>
struct SmemTile;

template <int kRows, int kColumns>
struct SmemTile<kRows, kColumns, 2> : TileLayout<kRows, kColumns, 2> {
    using Layout = TileLayout<kRows, kColumns, 2>;
    using Layout::at, Layout::offset;

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

    // The address is the lane's already.
    __device__ __forceinline__ static uint32_t by_rows(uint32_t lane_address) { return lane_address; }
    __device__ __forceinline__ static uint32_t by_columns(uint32_t lane_address) { return lane_address; }

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

// Operands are 8 deep. Their k'th element is not the tile's k'th but, in A and B alike, 2k for k < 4 and
// 2(k - 4) + 1 for the rest: then by rows a lane's two elements are neighbours, one load, and the two that it
// holds of an accumulator's row are two of the next product's A.
template <int kRows, int kColumns>
struct SmemTile<kRows, kColumns, 4> : TileLayout<kRows, kColumns, 4> {
    using Layout = TileLayout<kRows, kColumns, 4>;
    using Layout::at;

    // Still the tile's address: which elements are a lane's depends on the operand, so the product decides.
    __device__ __forceinline__ static uint32_t lane_rows_first(uint32_t tile) { return tile; }
    __device__ __forceinline__ static uint32_t lane_columns_first(uint32_t tile) { return tile; }

    // The lane's address.
    __device__ __forceinline__ static uint32_t by_rows(uint32_t address) {
        return opaque(Layout::by_rows(address, lane_index()));
    }
    __device__ __forceinline__ static uint32_t by_columns(uint32_t address) {
        return opaque(Layout::by_columns(address, lane_index()));
    }

    // r becomes A[row .. row + 15][column .. column + 7]: what B's are, in A's order.
    __device__ __forceinline__ static void load_a(uint32_t (&r)[4], uint32_t lane_address, int row,
                                                  int column) {
        load_b(r, lane_address, row, column);
        swap_middle(r);
    }

    // A^T is stored: r becomes A[column .. column + 15][row .. row + 7] of the tile's [row ..][column ..].
    __device__ __forceinline__ static void load_a_transposed(uint32_t (&r)[4], uint32_t lane_address, int row,
                                                             int column) {
        load_b_transposed(r, lane_address, row, column);
        swap_middle(r);
    }

    // The tile's rows are B's columns: r[0], r[1] for rows row .. row + 7, r[2], r[3] for the next eight.
    __device__ __forceinline__ static void load_b(uint32_t (&r)[4], uint32_t lane_address, int row,
                                                  int column) {
        const uint2 first = load_shared_8(at(lane_address, row, column));
        const uint2 second = load_shared_8(at(lane_address, row + 8, column));
        r[0] = first.x, r[1] = first.y, r[2] = second.x, r[3] = second.y;
    }

    // The tile's rows are B's rows: r[0], r[1] for columns column .. column + 7, r[2], r[3] for the next.
    __device__ __forceinline__ static void load_b_transposed(uint32_t (&r)[4], uint32_t lane_address, int row,
                                                             int column) {
        r[0] = load_shared_4(at(lane_address, row, column));
        r[1] = load_shared_4(Layout::at_odd_row(lane_address, row, column));
        r[2] = load_shared_4(at(lane_address, row, column + 8));
        r[3] = load_shared_4(Layout::at_odd_row(lane_address, row, column + 8));
    }

  private:
    // A's registers count rows first, B's depth first.
    __device__ __forceinline__ static void swap_middle(uint32_t (&r)[4]) {
        const uint32_t second = r[1];
        r[1] = r[2];
        r[2] = second;
    }
};

}  // namespace flash::cuda
