// Intel's matrix unit (AMX): 16 x 16 sums += 16 x 16 pairs of bfloat16 times 16 x 16 pairs. "Intel 64 and
// IA-32 Architectures Software Developer's Manual", volume 1, chapter 18.
#pragma once

#include "transpose.h"

namespace flash::cpu::FLASH_CPU_ISA {

enum class Result { overwrite, accumulate };

#if defined(__AMX_BF16__)

inline constexpr bool kHasMatrixUnit = true;

// The calling thread's tile registers, all eight of 16 rows of 64 bytes, while this lives.
class MatrixUnit {
  public:
    MatrixUnit() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } configuration;
        _tile_loadconfig(&configuration);
    }
    ~MatrixUnit() { _tile_release(); }
    MatrixUnit(const MatrixUnit&) = delete;
};

// c[32 or 16][32] (+)= a[32 or 16][steps] b[steps][32], steps a multiple of 16.
FLASH_INLINE void matrix_unit_block(bool two, int64_t steps, const Pair* a, int64_t lda, const Pair* b,
                                    int64_t ldb, float* c, int64_t ldc, Result result) {
    constexpr int64_t kTile = 16;
    const size_t a_bytes = size_t(lda) * sizeof *a, b_bytes = size_t(ldb) * sizeof *b,
                 c_bytes = size_t(ldc) * sizeof *c;
    float* c_low = c + kTile * ldc;
    if (result == Result::accumulate) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + kTile, c_bytes);
        if (two) _tile_loadd(2, c_low, c_bytes);
        if (two) _tile_loadd(3, c_low + kTile, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; step += kTile) {
        _tile_loadd(4, a + step, a_bytes);
        _tile_loadd(6, b + step * ldb, b_bytes);
        _tile_loadd(7, b + step * ldb + kTile, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!two) continue;
        _tile_loadd(5, a + kTile * lda + step, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + kTile, c_bytes);
    if (two) _tile_stored(2, c_low, c_bytes);
    if (two) _tile_stored(3, c_low + kTile, c_bytes);
}

#else

inline constexpr bool kHasMatrixUnit = false;

class MatrixUnit {
  public:
    MatrixUnit() {}  // not trivial: an unused variable of this type is no warning
};

#endif

}  // namespace flash::cpu::FLASH_CPU_ISA
