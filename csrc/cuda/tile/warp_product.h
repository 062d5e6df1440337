// Products of a warp: D += A B with accumulators in registers and operands in shared memory, or A in
// registers as another product's accumulators. Addresses are those of SmemTile's lane_rows_first() or
// lane_columns_first(), already moved to the warp's part.
#pragma once

#include "../ptx/stmatrix.h"
#include "element.h"
#include "product_steps.h"
#include "smem_tile.h"

namespace flash::cuda {

template <class Tile, DType dtype>
constexpr bool holds = Tile::element_bytes == element_bytes(dtype);

// D[i][j] += sum_k A[i][k] B[j][k]: rows of A with rows of B.
template <DType dtype, class A, class B, class Accumulators>
__device__ __forceinline__ void multiply_rows_by_rows(Accumulators& d, uint32_t a_rows_first,
                                                      uint32_t b_columns_first) {
    static_assert(A::columns == B::columns && holds<A, dtype> && holds<B, dtype>);
    const uint32_t a_lane = A::by_rows(a_rows_first), b_lane = B::by_rows(b_columns_first);
    multiply_tiles<dtype, A::columns>(
        d,
        [&](uint32_t (&a)[Accumulators::row_tiles][4], int k) {
#pragma unroll
            for (int m = 0; m < Accumulators::row_tiles; ++m) A::load_a(a[m], a_lane, m * 16, k);
        },
        [&](uint32_t (&b)[4], int k, int n) { B::load_b(b, b_lane, n, k); });
}

// D[i][j] += sum_k A[i][k] B[k][j]: rows of A with columns of B.
template <DType dtype, class A, class B, class Accumulators>
__device__ __forceinline__ void multiply_rows_by_columns(Accumulators& d, uint32_t a_rows_first,
                                                         uint32_t b_rows_first) {
    static_assert(A::columns == B::rows && holds<A, dtype> && holds<B, dtype>);
    const uint32_t a_lane = A::by_rows(a_rows_first), b_lane = B::by_columns(b_rows_first);
    multiply_tiles<dtype, A::columns>(
        d,
        [&](uint32_t (&a)[Accumulators::row_tiles][4], int k) {
#pragma unroll
            for (int m = 0; m < Accumulators::row_tiles; ++m) A::load_a(a[m], a_lane, m * 16, k);
        },
        [&](uint32_t (&b)[4], int k, int n) { B::load_b_transposed(b, b_lane, k, n); });
}

// D[i][j] += sum_k A[k][i] B[k][j]: columns of A with columns of B.
template <DType dtype, class A, class B, class Accumulators>
__device__ __forceinline__ void multiply_columns_by_columns(Accumulators& d, uint32_t a_columns_first,
                                                            uint32_t b_rows_first) {
    static_assert(A::rows == B::rows && holds<A, dtype> && holds<B, dtype>);
    const uint32_t a_lane = A::by_columns(a_columns_first), b_lane = B::by_columns(b_rows_first);
    multiply_tiles<dtype, A::rows>(
        d,
        [&](uint32_t (&a)[Accumulators::row_tiles][4], int k) {
#pragma unroll
            for (int m = 0; m < Accumulators::row_tiles; ++m) A::load_a_transposed(a[m], a_lane, k, m * 16);
        },
        [&](uint32_t (&b)[4], int k, int n) { B::load_b_transposed(b, b_lane, k, n); });
}

// Another product's accumulators, rounded to dtype, as the operand A of the next one: in registers
// throughout.
template <DType dtype, int kRows, int kColumns>
struct RegisterOperand {
    static constexpr int row_tiles = kRows / 16, columns = kColumns;

    uint32_t value[kColumns / kStepDepth<dtype>][row_tiles][4];

    RegisterOperand() = default;
    __device__ __forceinline__ explicit RegisterOperand(const Fragment<kRows, kColumns>& from) {
#pragma unroll
        for (int k = 0; k < kColumns / kStepDepth<dtype>; ++k)
#pragma unroll
            for (int m = 0; m < row_tiles; ++m)
                if constexpr (dtype == DType::float32) {
                    // Columns 2t and 2t + 1 of an accumulator are elements t and t + 4 of k (SmemTile).
                    constexpr int order[4] = {0, 2, 1, 3};
#pragma unroll
                    for (int i = 0; i < 4; ++i) value[k][m][i] = __float_as_uint(from.value[m][k][order[i]]);
                } else {
                    const auto &low = from.value[m][2 * k], &high = from.value[m][2 * k + 1];
                    value[k][m][0] = pack<dtype>(low[0], low[1]);
                    value[k][m][1] = pack<dtype>(low[2], low[3]);
                    value[k][m][2] = pack<dtype>(high[0], high[1]);
                    value[k][m][3] = pack<dtype>(high[2], high[3]);
                }
    }
};

// D[i][j] += sum_k A[i][k] B[k][j] with A in registers.
template <DType dtype, class B, class A, class Accumulators>
__device__ __forceinline__ void multiply_registers_by_columns(Accumulators& d, const A& left,
                                                              uint32_t b_rows_first) {
    static_assert(A::columns == B::rows && holds<B, dtype>);
    const uint32_t b_lane = B::by_columns(b_rows_first);
    multiply<dtype, A::columns>(
        d,
        [&](uint32_t (&a)[A::row_tiles][4], int k) {
#pragma unroll
            for (int m = 0; m < A::row_tiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[m][i] = left.value[k / kStepDepth<dtype>][m][i];
        },
        [&](uint32_t (&b)[4], int k, int n) { B::load_b_transposed(b, b_lane, k, n); });
}

// Of two 16-bit tiles of columns, from Hopper on by one instruction.
template <DType dtype, class Accumulators>
constexpr bool stores_matrices() {
#if __CUDA_ARCH__ >= 900
    return dtype != DType::float32 && Accumulators::column_tiles % 2 == 0;
#else
    return false;
#endif
}

// Writes accumulators, rounded to dtype, to the part of a shared tile that starts at (row, column).
template <DType dtype, class Tile, class Accumulators>
__device__ __forceinline__ void store_fragment(uint32_t tile, const Accumulators& d, int row, int column) {
    static_assert(holds<Tile, dtype>);
    if constexpr (stores_matrices<dtype, Accumulators>()) {
        constexpr int columns = Accumulators::column_tiles * 8;
        constexpr bool divides = columns % Tile::panel == 0 || Tile::panel % columns == 0;
        uint32_t lane = Tile::lane_rows_first(tile);
        if constexpr (divides) lane = Tile::template part<columns>(lane, row, column);
#pragma unroll
        for (int m = 0; m < Accumulators::row_tiles; ++m)
#pragma unroll
            for (int n = 0; n < Accumulators::column_tiles; n += 2) {
                const auto &left = d.value[m][n], &right = d.value[m][n + 1];
                stmatrix_x4(
                    divides ? Tile::at(lane, m * 16, n * 8) : Tile::at(lane, row + m * 16, column + n * 8),
                    {pack<dtype>(left[0], left[1]), pack<dtype>(left[2], left[3]),
                     pack<dtype>(right[0], right[1]), pack<dtype>(right[2], right[3])});
            }
    } else {
#pragma unroll
        for (int r = 0; r < Accumulators::rows; ++r)
#pragma unroll
            for (int n = 0; n < Accumulators::column_tiles; ++n) {
                constexpr int elements = Tile::chunk_elements;
                const int chunk = column / elements + n * 8 / elements;
                const uint32_t place =
                    Tile::offset(row + Accumulators::row(r), chunk / Tile::chunks, chunk % Tile::chunks);
                const auto& x = d.value[r / 2][n];
                const float first = x[r % 2 * 2], second = x[r % 2 * 2 + 1];
                if constexpr (dtype == DType::float32)
                    store_shared(tile + place + lane_index() % 4 * 8,
                                 make_uint2(__float_as_uint(first), __float_as_uint(second)));
                else
                    store_shared(tile + place + lane_index() % 4 * 4, pack<dtype>(first, second));
            }
    }
}

}  // namespace flash::cuda
