// C (+)= A B on tiles that lie in the cache. A's elements are broadcast, B's rows are vectors, C stays in
// registers over the whole depth. B is [depth][columns]; A is [rows][depth] (row major) or [depth][rows]
// (column major): the two orders are what lets attention use Q, K, V, P and dS as they lie, each product in
// the order that needs no transposed copy inside the loop over tiles.
//
// With bfloat16 operands two steps of the depth are one 32-bit Pair and one vdpbf16ps: B is
// [depth/2][columns] of pairs, column-major A [depth/2][rows] of pairs, row-major A plain rows. Sums are
// float in any case.
#pragma once

#include <cstdlib>
#include <type_traits>

#include "matrix_unit.h"
#include "simd.h"

namespace flash::cpu::FLASH_CPU_ISA {

template <class Operand>
struct GemmTraits {
    using Real = Operand;
    static constexpr int depth_per_step = 1;
};
template <>
struct GemmTraits<Pair> {
    using Real = float;
    static constexpr int depth_per_step = 2;
};

enum class Order { row_major, column_major };

template <class Real>
FLASH_INLINE void multiply_add(Vector<Real>& sum, Real a, const Real* b) {
    sum += a * load<Vector<Real>>(b);
}
#if defined(__AVX512BF16__)
FLASH_INLINE void multiply_add(Vector<float>& sum, Pair a, const Pair* b) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int(a.bits)), load<__m512bh>(b));
}
#endif

template <Order order, class Operand, class Real>
FLASH_INLINE void micro_tile(int64_t steps, const Operand* a, int64_t lda, const Operand* b, int64_t ldb,
                             Real* c, int64_t ldc, Result result) {
    // Summed from zero and added to C last: the error of a long sum grows with the tiles, not with their
    // depths.
    Vector<Real> sum[kMicroRows][kMicroVectors] = {};
    for (int64_t step = 0; step < steps; ++step, b += ldb) {
#pragma GCC unroll 16
        for (int row = 0; row < kMicroRows; ++row) {
            const Operand element = order == Order::row_major ? a[row * lda + step] : a[step * lda + row];
#pragma GCC unroll 4
            for (int v = 0; v < kMicroVectors; ++v) multiply_add(sum[row][v], element, b + v * kLanes<Real>);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kMicroRows; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < kMicroVectors; ++v) {
            Real* to = c + row * ldc + v * kLanes<Real>;
            store(to, result == Result::accumulate ? load<Vector<Real>>(to) + sum[row][v] : sum[row][v]);
        }
}

#if defined(__AMX_BF16__)
// Rows, columns and steps are multiples of 16, 32 and 16. A block of 32 x 32 sums is four of the unit's eight
// tiles; a tile is 16 rows of 16 operands. The unit reads A by rows only, so a column-major A is transposed
// block by block.
template <Order order>
void matrix_unit_gemm(int64_t rows, int64_t columns, int64_t steps, const Pair* a, int64_t lda, const Pair* b,
                      int64_t ldb, float* c, int64_t ldc, Result result) {
    constexpr int64_t kBlock = 32, kTile = 16, kMaxSteps = 128;
    alignas(64) Pair transposed[kBlock * kMaxSteps];
    for (int64_t first = 0; first < steps; first += kMaxSteps, result = Result::accumulate) {
        const int64_t count = steps - first < kMaxSteps ? steps - first : kMaxSteps;
        for (int64_t row = 0; row < rows; row += kBlock) {
            const bool two = row + kTile < rows;
            const Pair* block = a + row * lda + first;
            int64_t ld = lda;
            if constexpr (order == Order::column_major) {
                transpose(transposed, count, a + first * lda + row, lda, count, two ? kBlock : kTile);
                block = transposed;
                ld = count;
            }
            for (int64_t column = 0; column < columns; column += kBlock)
                matrix_unit_block(two, count, block, ld, b + first * ldb + column, ldb,
                                  c + row * ldc + column, ldc, result);
        }
    }
}
#endif

template <Order order, class Operand, class Real>
void vector_gemm(int64_t rows, int64_t columns, int64_t steps, const Operand* a, int64_t lda,
                 const Operand* b, int64_t ldb, Real* c, int64_t ldc, Result result) {
    for (int64_t column = 0; column < columns; column += kMicroColumns<Real>)
        for (int64_t row = 0; row < rows; row += kMicroRows)
            micro_tile<order>(steps, a + (order == Order::row_major ? row * lda : row), lda, b + column, ldb,
                              c + row * ldc + column, ldc, result);
}

// rows and columns are rounded up to whole micro tiles: A, B and C have (or own scratch for) that many.
// steps counts Operands along the depth; lda and ldb count Operands, ldc counts Reals.
template <Order order, class Operand, class Real>
void gemm(int64_t rows, int64_t columns, int64_t steps, const Operand* a, int64_t lda, const Operand* b,
          int64_t ldb, Real* c, int64_t ldc, Result result) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<Operand, Pair>) {
        const int64_t unit_rows = rows / 16 * 16, unit_steps = steps / 16 * 16;
        if (unit_rows > 0 && unit_steps > 0) {
            matrix_unit_gemm<order>(unit_rows, columns, unit_steps, a, lda, b, ldb, c, ldc, result);
            if (unit_steps < steps)
                vector_gemm<order>(unit_rows, columns, steps - unit_steps,
                                   a + (order == Order::row_major ? unit_steps : unit_steps * lda), lda,
                                   b + unit_steps * ldb, ldb, c, ldc, Result::accumulate);
            rows -= unit_rows;
            a += order == Order::row_major ? unit_rows * lda : unit_rows;
            c += unit_rows * ldc;
        }
    }
#endif
    vector_gemm<order>(rows, columns, steps, a, lda, b, ldb, c, ldc, result);
}

FLASH_INLINE float part(float x, int) {
    return x;
}
FLASH_INLINE double part(double x, int) {
    return x;
}
FLASH_INLINE float part(Pair x, int index) {
    const uint32_t bits = index == 0 ? x.bits << 16 : x.bits & 0xffff0000u;
    float real;
    std::memcpy(&real, &bits, sizeof real);
    return real;
}

FLASH_INLINE bool is_finite(float x) {
    return x - x == 0;
}
FLASH_INLINE bool is_finite(double x) {
    return x - x == 0;
}
FLASH_INLINE bool is_finite(Pair x) {
    return is_finite(part(x, 0)) && is_finite(part(x, 1));
}

template <class Real>
FLASH_INLINE Real finite_or_zero(Real x) {
    return is_finite(x) ? x : Real(0);
}
FLASH_INLINE Pair finite_or_zero(Pair x) {
    return {(is_finite(part(x, 0)) ? x.bits & 0xffffu : 0) |
            (is_finite(part(x, 1)) ? x.bits & 0xffff0000u : 0)};
}

enum class Probabilities { in_a, in_b };

// A copy with zeros for what is not finite. Not a std::vector: its code could be shared between variants.
template <class Operand>
struct FiniteCopy {
    Operand* data;

    FiniteCopy(const Operand* from, int64_t count, int64_t padding)
        : data(static_cast<Operand*>(std::calloc(size_t(count + padding), sizeof(Operand)))) {
        for (int64_t i = 0; i < count; ++i) data[i] = finite_or_zero(from[i]);
    }
    ~FiniteCopy() { std::free(data); }
    FiniteCopy(const FiniteCopy&) = delete;
};

// gemm for tiles in which a masked probability of 0 meets NaN or infinity: there 0 * x is 0, so nothing
// behind a mask leaks, and whoever doesn't see them gets the bits that gemm would give. Column-major A: a
// step's elements are neighbours in both operands. Taken only for such tiles, hence the copy and the plain
// loops.
template <Probabilities where, class Operand, class Real>
void selecting_gemm(int64_t rows, int64_t columns, int64_t steps, const Operand* a, int64_t lda,
                    const Operand* b, int64_t ldb, Real* c, int64_t ldc) {
    constexpr bool in_a = where == Probabilities::in_a;
    const Operand *values = in_a ? b : a, *probabilities = in_a ? a : b;
    const int64_t value_ld = in_a ? ldb : lda, probability_ld = in_a ? lda : ldb;
    const FiniteCopy<Operand> finite(values, steps * value_ld, kMicroRows);
    gemm<Order::column_major>(rows, columns, steps, in_a ? a : finite.data, lda, in_a ? finite.data : b, ldb,
                              c, ldc, Result::accumulate);
    for (int64_t step = 0; step < steps; ++step)
        for (int64_t i = 0; i < (in_a ? columns : rows); ++i)
            for (int half = 0; half < GemmTraits<Operand>::depth_per_step; ++half) {
                const Real value = part(values[step * value_ld + i], half);
                if (is_finite(value)) continue;
                for (int64_t j = 0; j < (in_a ? rows : columns); ++j) {
                    const Real probability = part(probabilities[step * probability_ld + j], half);
                    if (probability != 0) c[in_a ? j * ldc + i : i * ldc + j] += probability * value;
                }
            }
}

}  // namespace flash::cpu::FLASH_CPU_ISA
