// A warp's accumulators, rounded, straight to rows in device memory: no shared memory, no barrier.
#pragma once

#include "../any/loader.cuh"
#include "../ptx/global.h"
#include "../ptx/stmatrix.h"
#include "../tile/fragment.h"
#include "../tile/warp_product.h"

namespace flash::cuda::sm90 {

// What store_rows asks of a tensor: it writes 8 bytes at once.
inline bool fits_store_rows(const TensorView& view, int64_t head_dim) {
    return reinterpret_cast<uintptr_t>(view.data) % 8 == 0 &&
           (view.batch_stride | view.row_stride | view.head_stride | head_dim) % 4 == 0;
}

// Rows of `tile` at first + Fragment::row(r), those in `rows` only, columns below to.head_dim. Neighbouring
// lanes exchange columns first, so that a quad writes 32 bytes of a row at once, a whole sector.
template <DType dtype, int kColumns, class Rows>
__device__ __forceinline__ void store_rows(const Rows& to, const RegisterOperand<dtype, 16, kColumns>& tile,
                                           Position first, Interval rows) {
    using Tile = Fragment<16, kColumns>;
    const int lane = lane_index() % 4;
    const bool odd = lane % 2;
    const int mine = lane % 2 * 8 + lane / 2 * 4;  // of 16 columns
    uint2 four[Tile::column_tiles / 2][Tile::rows];
#pragma unroll
    for (int n = 0; n < Tile::column_tiles; n += 2)
#pragma unroll
        for (int r = 0; r < Tile::rows; ++r) {
            const uint32_t low = tile.value[n / 2][0][r], high = tile.value[n / 2][0][2 + r];
            const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? low : high, 1);
            four[n / 2][r] = make_uint2(odd ? other : low, odd ? high : other);
        }
    Bits<dtype>* columns = to.row(first + Tile::row(0)) + mine;
    const int exist = to.head_dim - mine;
#pragma unroll
    for (int r = 0; r < Tile::rows; ++r) {
        if (r > 0)
            columns = Rows::strided ? columns + 8 * to.row_stride : to.row(first + Tile::row(r)) + mine;
        const int of_row = rows.contains(first + Tile::row(r)) ? exist : 0;
        columns = opaque(columns);
#pragma unroll
        for (int column = 0; column < kColumns; column += 16)
            store_global(columns + column, four[column / 16][r], column < of_row);
    }
}

template <DType dtype, int kColumns, class Rows>
__device__ __forceinline__ void store_rows(const Rows& to, const Fragment<16, kColumns>& tile, Position first,
                                           Interval rows) {
    store_rows<dtype>(to, RegisterOperand<dtype, 16, kColumns>(tile), first, rows);
}

// The panel of 64 columns from kFirst on to the warp's own shared memory, at a multiple of 1024, swizzled as
// copies want it.
constexpr int kStagedPanelBytes = 16 * 64 * 2;
template <int kFirst, DType dtype, int kColumns>
__device__ __forceinline__ void stage_panel(const RegisterOperand<dtype, 16, kColumns>& tile, uint32_t to) {
    using Layout = TileLayout<16, 64, 2>;
    const int lane = lane_index();
    const uint32_t place = to + Layout::offset(lane % 16, 0, lane / 16);
#pragma unroll
    for (int k = 0; k < 64 && kFirst + k < kColumns; k += 16)
        stmatrix_x4(Layout::at(place, 0, k), tile.value[(kFirst + k) / 16][0]);
}

// All panels, one after the other.
template <int kFirst = 0, DType dtype, int kColumns>
__device__ __forceinline__ void stage_rows(const RegisterOperand<dtype, 16, kColumns>& tile, uint32_t to) {
    stage_panel<kFirst>(tile, to);
    if constexpr (kFirst + 64 < kColumns) stage_rows<kFirst + 64>(tile, to + kStagedPanelBytes);
}

}  // namespace flash::cuda::sm90
