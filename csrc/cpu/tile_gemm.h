// C (+)= A B on tiles that lie in the cache. A's elements are broadcast, B's rows are vectors, C stays in registers
// over the whole depth. B is [depth][columns]; A is [rows][depth] (row major) or [depth][rows] (column major): the
// two orders are what lets attention use Q, K, V, P and dS as they lie, each product in the order that needs no
// transposed copy inside the loop over tiles.
//
// With bfloat16 operands two steps of the depth are one 32-bit Pair and one vdpbf16ps: B is [depth/2][columns] of
// pairs, column-major A [depth/2][rows] of pairs, row-major A plain rows. Sums are float in any case.
#pragma once

#include "simd.h"

namespace flash::cpu::FLASH_CPU_ISA {

struct Pair {  // two bfloat16, first one in the low half
    uint32_t bits;
};

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
enum class Result { overwrite, accumulate };

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
FLASH_INLINE void micro_tile(int64_t steps, const Operand* a, int64_t lda, const Operand* b, int64_t ldb, Real* c,
                             int64_t ldc, Result result) {
    Vector<Real> sum[kMicroRows][kMicroVectors];
#pragma GCC unroll 16
    for (int row = 0; row < kMicroRows; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < kMicroVectors; ++v)
            sum[row][v] = result == Result::accumulate ? load<Vector<Real>>(c + row * ldc + v * kLanes<Real>)
                                                       : Vector<Real>{};
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
        for (int v = 0; v < kMicroVectors; ++v) store(c + row * ldc + v * kLanes<Real>, sum[row][v]);
}

// rows and columns are rounded up to whole micro tiles: A, B and C have (or own scratch for) that many.
// steps counts Operands along the depth; lda and ldb count Operands, ldc counts Reals.
template <Order order, class Operand, class Real>
void gemm(int64_t rows, int64_t columns, int64_t steps, const Operand* a, int64_t lda, const Operand* b, int64_t ldb,
          Real* c, int64_t ldc, Result result) {
    for (int64_t column = 0; column < columns; column += kMicroColumns<Real>)
        for (int64_t row = 0; row < rows; row += kMicroRows)
            micro_tile<order>(steps, a + (order == Order::row_major ? row * lda : row), lda, b + column, ldb,
                              c + row * ldc + column, ldc, result);
}

FLASH_INLINE float part(float x, int) { return x; }
FLASH_INLINE double part(double x, int) { return x; }
FLASH_INLINE float part(Pair x, int index) {
    const uint32_t bits = index == 0 ? x.bits << 16 : x.bits & 0xffff0000u;
    float real;
    std::memcpy(&real, &bits, sizeof real);
    return real;
}

enum class Probabilities { in_a, in_b };

// gemm for tiles in which a masked probability of 0 meets NaN or infinity: there 0 * x is 0, so nothing behind a mask
// leaks. Taken only for such tiles, hence plain loops.
template <Probabilities where, Order order, class Operand, class Real>
void selecting_gemm(int64_t rows, int64_t columns, int64_t steps, const Operand* a, int64_t lda, const Operand* b,
                    int64_t ldb, Real* c, int64_t ldc) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < columns; ++column) {
            Real sum = c[row * ldc + column];
            for (int64_t step = 0; step < steps; ++step)
                for (int i = 0; i < GemmTraits<Operand>::depth_per_step; ++i) {
                    const Real left = part(order == Order::row_major ? a[row * lda + step] : a[step * lda + row], i);
                    const Real right = part(b[step * ldb + column], i);
                    if ((where == Probabilities::in_a ? left : right) != 0) sum += left * right;
                }
            c[row * ldc + column] = sum;
        }
}

}  // namespace flash::cpu::FLASH_CPU_ISA
