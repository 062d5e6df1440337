#pragma once

#include "../../problem.h"

namespace flash::cuda {

struct Mma {
    float (&d)[4];
    const uint32_t (&a)[4];
    uint32_t b0, b1;
};

// depth elements of kBytes each, `half` of them from a register to the next.
template <int kDepth, class Element>
void multiply_warp(Mma* const* lanes, const Element& element) {
    constexpr int kPerLane = kDepth / 8;  // of one register
    double a[kDepth][16], b[kDepth][8], sums[16][8];
    for (int lane = 0; lane < emulator::kLanes; ++lane) {
        const int g = lane / 4, t = lane % 4 * kPerLane;
        for (int i = 0; i < kPerLane; ++i) {
            for (int r = 0; r < 4; ++r)
                a[t + i + r / 2 * kDepth / 2][g + r % 2 * 8] = element(lanes[lane]->a[r], i);
            b[t + i][g] = element(lanes[lane]->b0, i);
            b[t + i + kDepth / 2][g] = element(lanes[lane]->b1, i);
        }
        for (int i = 0; i < 4; ++i) sums[g + i / 2 * 8][lane % 4 * 2 + i % 2] = lanes[lane]->d[i];
    }
    emulator::add_products(sums[0], a[0], b[0], kDepth, 8);
    for (int lane = 0; lane < emulator::kLanes; ++lane)
        for (int i = 0; i < 4; ++i)
            lanes[lane]->d[i] = float(sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
}

template <DType dtype>
inline float half_of(uint32_t pair, int i) {
    const uint16_t bits = uint16_t(pair >> 16 * i);
    if constexpr (dtype == DType::bfloat16)
        return __uint_as_float(uint32_t(bits) << 16);
    else
        return float(reinterpret_cast<const _Float16&>(bits));
}

template <DType dtype>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Mma mine{d, a, b0, b1};
    emulator::with_warp(mine, [](Mma* const* lanes) {
        multiply_warp<16>(lanes, [](uint32_t x, int i) { return half_of<dtype>(x, i); });
    });
}

inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Mma mine{d, a, b0, b1};
    emulator::with_warp(mine, [](Mma* const* lanes) {
        multiply_warp<8>(lanes, [](uint32_t x, int) { return __uint_as_float(x & ~uint32_t(0x1fff)); });
    });
}

}  // namespace flash::cuda
