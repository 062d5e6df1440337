// Transposes of blocks in registers.
#pragma once

#include <type_traits>

#include "simd.h"

namespace flash::cpu::FLASH_CPU_ISA {

// Exchanges rows and columns of a block of lanes x lanes in registers: the w-th round swaps the off-diagonal
// quarters of every 2w x 2w block.
template <class V, class M, int kCount>
FLASH_INLINE void transpose_registers(V (&rows)[kCount]) {
#pragma GCC unroll 8
    for (int width = kCount / 2; width > 0; width /= 2) {
        M low, high;
        for (int lane = 0; lane < kCount; ++lane) {
            low[lane] = lane & width ? lane - width + kCount : lane;
            high[lane] = lane & width ? lane + kCount : lane + width;
        }
#pragma GCC unroll 16
        for (int row = 0; row < kCount; ++row) {
            if (row & width) continue;
            const V first = rows[row], second = rows[row + width];
            rows[row] = __builtin_shuffle(first, second, low);
            rows[row + width] = __builtin_shuffle(first, second, high);
        }
    }
}

// to[columns][ld_to] = transpose of from[rows][ld_from]; rows and columns are multiples of the lanes.
template <class Operand>
void transpose(Operand* to, int64_t ld_to, const Operand* from, int64_t ld_from, int64_t rows,
               int64_t columns) {
    using Unit = std::conditional_t<sizeof(Operand) == sizeof(float), float, double>;  // moved as bits
    constexpr int kCount = kLanes<Unit>;
    for (int64_t row = 0; row < rows; row += kCount)
        for (int64_t column = 0; column < columns; column += kCount) {
            Vector<Unit> block[kCount];
#pragma GCC unroll 16
            for (int i = 0; i < kCount; ++i)
                block[i] = load<Vector<Unit>>(from + (row + i) * ld_from + column);
            transpose_registers<Vector<Unit>, LaneMask<Unit>, kCount>(block);
#pragma GCC unroll 16
            for (int i = 0; i < kCount; ++i) store(to + (column + i) * ld_to + row, block[i]);
        }
}

}  // namespace flash::cpu::FLASH_CPU_ISA
