// The tile products of one instruction set against plain loops in double: every order, operand and ragged
// size, and the zeros that must hide NaN. Also exp on its whole range and rounding to and from the 16-bit
// types.
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "../../csrc/cpu/operand_tile.h"
#include "../../csrc/cpu/vector_math.h"

using namespace flash::cpu::FLASH_CPU_ISA;

static std::mt19937 generator(1);
static double draw() {
    return std::uniform_real_distribution<double>(-1, 1)(generator);
}

static void assign(float& x, int, double value) {
    x = float(value);
}
static void assign(double& x, int, double value) {
    x = value;
}
static void assign(Pair& x, int part, double value) {
    const uint32_t bits = Rounded<BFloat16>::of(float(value)).bits;
    x.bits = part == 0 ? (x.bits & 0xffff0000u) | bits : (x.bits & 0xffffu) | bits << 16;
}

template <Order order, class Operand>
static bool check_gemm(int64_t rows, int64_t columns, int64_t steps, bool selecting) {
    using Real = typename GemmTraits<Operand>::Real;
    constexpr int kParts = GemmTraits<Operand>::depth_per_step;
    const int64_t padded_rows = rows + kMicroRows,
                  lda = order == Order::row_major ? steps + 3 : padded_rows + 1;
    const int64_t ldb = round_up<int64_t>(columns, kMicroColumns<Real>) + 5;
    std::vector<Operand> a(size_t((order == Order::row_major ? padded_rows : steps + 1) * lda)),
        b(size_t((steps + 1) * ldb));
    std::vector<Real> c(size_t(padded_rows * ldb));
    for (auto& x : a)
        for (int i = 0; i < kParts; ++i) assign(x, i, draw());
    for (auto& x : b)
        for (int i = 0; i < kParts; ++i) assign(x, i, draw());
    for (auto& x : c) x = Real(draw());
    if (selecting)  // A's row 0 hides a NaN in B's step 0 with a zero
        for (int i = 0; i < kParts; ++i) {
            assign(a[0], i, 0);
            for (int64_t column = 0; column < columns; ++column)
                assign(b[size_t(column)], i, column % 2 ? NAN : INFINITY);
        }
    const std::vector<Real> before = c;
    std::vector<Real> plain = c;
    if (selecting) {
        selecting_gemm<Probabilities::in_a>(rows, columns, steps, a.data(), lda, b.data(), ldb, c.data(),
                                            ldb);
        for (int64_t column = 0; column < columns; ++column)
            for (int i = 0; i < kParts; ++i) assign(b[size_t(column)], i, 1);
        gemm<order>(rows, columns, steps, a.data(), lda, b.data(), ldb, plain.data(), ldb,
                    Result::accumulate);
        // Row 0 gets the bits it would get without the NaN; the others see it.
        for (int64_t column = 0; column < columns; ++column)
            if (c[size_t(column)] != plain[size_t(column)] ||
                (rows > 1 && std::isfinite(c[size_t(ldb + column)])))
                return false;
    } else {
        gemm<order>(rows, columns, steps, a.data(), lda, b.data(), ldb, c.data(), ldb, Result::accumulate);
    }
    for (int64_t row = 0; row < (selecting ? 1 : rows); ++row)
        for (int64_t column = 0; column < columns; ++column) {
            double expected = before[size_t(row * ldb + column)], magnitude = std::fabs(expected);
            for (int64_t step = selecting ? 1 : 0; step < steps; ++step)
                for (int i = 0; i < kParts; ++i) {
                    const double product =
                        double(part(order == Order::row_major ? a[size_t(row * lda + step)]
                                                              : a[size_t(step * lda + row)],
                                    i)) *
                        double(part(b[size_t(step * ldb + column)], i));
                    expected += product;
                    magnitude += std::fabs(product);
                }
            const double epsilon = sizeof(Real) == 4 ? 0x1p-23 : 0x1p-52;
            if (!(std::fabs(double(c[size_t(row * ldb + column)]) - expected) <= 4 * epsilon * magnitude)) {
                std::fprintf(stderr, "gemm %ld x %ld x %ld order %d: [%ld, %ld]\n", long(rows), long(columns),
                             long(steps), int(order), long(row), long(column));
                return false;
            }
        }
    return true;
}

template <class Operand>
static bool check_all_gemms() {
    for (const int64_t rows : {1, 5, 8, 17, 64})
        for (const int64_t columns : {1, 16, 32, 70})
            for (const int64_t steps : {1, 2, 33})
                for (const bool selecting : {false, true})
                    if ((!selecting && !check_gemm<Order::row_major, Operand>(rows, columns, steps, false)) ||
                        !check_gemm<Order::column_major, Operand>(rows, columns, steps, selecting))
                        return false;
    return true;
}

template <class Operand>
static bool check_transpose() {
    constexpr int64_t lanes = kOperandLanes<Operand>;
    const int64_t rows = 2 * lanes, columns = 3 * lanes;
    std::vector<Operand> from(size_t(rows * columns)), to(from.size());
    for (auto& x : from) assign(x, 0, draw());
    transpose(to.data(), rows, from.data(), columns, rows, columns);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < columns; ++column)
            if (part(to[size_t(column * rows + row)], 0) != part(from[size_t(row * columns + column)], 0))
                return false;
    return true;
}

static bool check_exp() {
    for (double x = -110; x < 100; x += 0.00023) {
        const float argument = float(x), got = exp_lanes(broadcast(argument))[0];
        const double exact = std::exp(double(argument));
        // Results below the normal range may be rounded to subnormals or to 0; at the upper end infinity
        // comes early.
        const bool right = argument < -87.3   ? got <= 0x1p-125f
                           : argument < 88.37 ? std::fabs(got / exact - 1) < 1e-7
                                              : got > 0x1p127f;
        if (!right) {
            std::fprintf(stderr, "exp(%a) = %a\n", double(argument), double(got));
            return false;
        }
    }
    return exp_lanes(broadcast(-INFINITY))[0] == 0 && std::isinf(exp_lanes(broadcast(INFINITY))[0]) &&
           std::isnan(exp_lanes(broadcast(NAN))[0]) && exp_lanes(broadcast(0.0f))[0] == 1;
}

// Every 16-bit pattern survives the way there and back, and halfway cases round to even.
static bool check_rounding() {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float half = to_real(Half{uint16_t(bits)}), bfloat = to_real(BFloat16{uint16_t(bits)});
        const bool half_back = half != half || Rounded<Half>::of(half).bits == bits;
        const bool bfloat_back = bfloat != bfloat || Rounded<BFloat16>::of(bfloat).bits == bits;
        const float half_of_nan = to_real(Rounded<Half>::of(half)),
                    bfloat_of_nan = to_real(Rounded<BFloat16>::of(bfloat));
        if (!half_back || !bfloat_back || (half != half && half_of_nan == half_of_nan) ||
            (bfloat != bfloat && bfloat_of_nan == bfloat_of_nan)) {
            std::fprintf(stderr, "rounding of pattern %x\n", bits);
            return false;
        }
    }
    return to_real(Rounded<Half>::of(1 + 0x1p-11f)) == 1 &&
           to_real(Rounded<Half>::of(1 + 0x1.8p-10f)) == 1 + 0x1p-9f &&
           std::isinf(to_real(Rounded<Half>::of(65520.0f))) &&
           to_real(Rounded<Half>::of(65519.0f)) == 65504 &&
           to_real(Rounded<Half>::of(0x1.8p-24f)) == 0x1p-23f &&
           to_real(Rounded<BFloat16>::of(1 + 0x1p-8f)) == 1 &&
           to_real(Rounded<BFloat16>::of(1 + 0x1.8p-7f)) == 1 + 0x1p-6f;
}

int main() {
#if defined(__AMX_BF16__)
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 1;  // permission to use the matrix unit's registers
#endif
    const MatrixUnit unit;
    bool right = check_all_gemms<float>() && check_all_gemms<double>() && check_transpose<float>() &&
                 check_transpose<double>() && check_transpose<Pair>() && check_exp() && check_rounding();
#if defined(__AVX512BF16__)
    right = right && check_all_gemms<Pair>();
#endif
    std::printf(right ? "ok\n" : "failed\n");
    return right ? 0 : 1;
}
