// Tiles of Q, K, V and dO in the orders that the products of tile_gemm.h read, copied from strided rows of a
// tensor:
//
//   plain        [rows][depth]          row-major A. depth runs along the head dim.
//   stacked      [rows / n][columns]    B, or column-major A: n rows that follow each other along the depth
//   in one
//                                       operand. n is 2 for Pair; otherwise stacked is plain.
//   transposed   [depth][rows]          B whose columns are the tensor's rows; made from plain.
//
// Rows and depth are filled up with zeros to what the products read in whole vectors.
#pragma once

#include "../attention/sequence.h"
#include "element.h"
#include "transpose.h"

namespace flash::cpu::FLASH_CPU_ISA {

template <class T>
FLASH_INLINE T round_up(T size, T unit) {
    return (size + unit - 1) / unit * unit;
}

// Lanes of operands in a vector: a Pair takes one lane of float.
template <class Operand>
inline constexpr int kOperandLanes = kVectorBytes / int(sizeof(Operand));

// Operands along a head dim, in whole vectors.
template <class Operand>
FLASH_INLINE int64_t operand_depth(int64_t head_dim) {
    constexpr int64_t per_step = GemmTraits<Operand>::depth_per_step;
    return round_up<int64_t>((head_dim + per_step - 1) / per_step, kOperandLanes<Operand>);
}

template <class Real, class Element>
FLASH_INLINE void load_row(Real* __restrict to, const Element* __restrict from, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; ++d) to[d] = to_real(from[d]);
}
FLASH_INLINE void load_row(Pair* to, const BFloat16* from, int64_t head_dim) {
    std::memcpy(to, from, size_t(head_dim) * sizeof *from);
}

// rows of `from` into to[padded_rows][ld], ld operands >= the head dim.
template <class Operand, class Element>
void load_plain(Operand* to, int64_t ld, const Element* from, int64_t row_stride, int64_t rows,
                int64_t padded_rows, int64_t head_dim) {
    const int64_t whole = head_dim / GemmTraits<Operand>::depth_per_step;
    for (int64_t row = 0; row < rows; ++row, to += ld, from += row_stride) {
        std::memset(to + whole, 0, size_t(ld - whole) * sizeof *to);
        load_row(to, from, head_dim);
    }
    std::memset(to, 0, size_t((padded_rows - rows) * ld) * sizeof *to);
}

// rows of `from` into to[ceil(rows / n)][columns], columns >= head_dim.
template <class Operand, class Element>
void load_stacked(Operand* to, const Element* from, int64_t row_stride, int64_t rows, int64_t head_dim,
                  int64_t columns) {
    for (int64_t row = 0; row < rows; ++row, to += columns, from += row_stride) {
        load_row(to, from, head_dim);
        std::memset(to + head_dim, 0, size_t(columns - head_dim) * sizeof *to);
    }
}
FLASH_INLINE void load_stacked(Pair* to, const BFloat16* from, int64_t row_stride, int64_t rows,
                               int64_t head_dim, int64_t columns) {
    for (int64_t row = 0; row < rows; row += 2, to += columns, from += 2 * row_stride) {
        const BFloat16* second = from + row_stride;
        if (row + 1 < rows)
            for (int64_t d = 0; d < head_dim; ++d)
                to[d].bits = uint32_t(from[d].bits) | uint32_t(second[d].bits) << 16;
        else
            for (int64_t d = 0; d < head_dim; ++d) to[d].bits = from[d].bits;
        std::memset(to + head_dim, 0, size_t(columns - head_dim) * sizeof *to);
    }
}

// rows of from[rows][ld_from] rounded to the tensor's elements.
template <class Element, class Real>
void store_rows(Element* to, int64_t row_stride, const Real* from, int64_t ld_from, int64_t rows,
                int64_t head_dim) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t d = 0; d < head_dim; ++d)
            to[row * row_stride + d] = Rounded<Element>::of(from[row * ld_from + d]);
}

// Rows of a packed tensor past the last sequence belong to nobody; they come back as zeros.
template <class Element>
void zero_unowned_rows(const TensorView& tensor, const int32_t* cu_seqlens, int64_t batch, int64_t rows,
                       int64_t heads, int64_t head_dim) {
    if (!cu_seqlens) return;
    for (int64_t row = cu_seqlens[batch]; row < rows; ++row)
        for (int64_t head = 0; head < heads; ++head)
            std::memset(row_of<Element>(tensor, 0, row, head), 0, size_t(head_dim) * sizeof(Element));
}

template <class Operand>
bool all_finite(const Operand* tile, int64_t count) {
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) finite &= is_finite(tile[i]);
    return finite;
}

}  // namespace flash::cpu::FLASH_CPU_ISA
