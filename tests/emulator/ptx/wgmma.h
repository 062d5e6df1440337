#pragma once

#include "mma_sync.h"

namespace flash::cuda {

inline uint64_t wgmma_descriptor(uint32_t address, int panel_bytes) {
    return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(panel_bytes / 16) << 16 |
           (address & 0x3ffff) / 16;
}

// An element of a tile, by row and depth; rows are those of A, or columns of B.
template <DType dtype>
float wgmma_element(uint64_t descriptor, bool transposed, int row, int depth) {
    const uint32_t start = uint32_t(descriptor & 0x3fff) * 16,
                   leading = uint32_t(descriptor >> 16 & 0x3fff) * 16,
                   stride = uint32_t(descriptor >> 32 & 0x3fff) * 16;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7)) emulator::fail("wgmma: descriptor");
    const uint32_t place =
        transposed ? start + row / 64 * leading + depth / 8 * stride + depth % 8 * 128 + row % 64 * 2
                   : start + row / 8 * stride + row % 8 * 128 + depth * 2;
    return half_of<dtype>(*emulator::at_shared<uint16_t>(place ^ (place / 128 % 8 * 16)), 0);
}

inline void wgmma_fence() {
    __syncwarp();
}

inline void wgmma_commit() {
    int nothing = 0;
    emulator::with_warp(nothing, [](int* const*) { emulator::end_group_in_warp(); });
}

template <int pending>
void wgmma_wait() {
    int nothing = 0;
    emulator::with_warp(nothing, [](int* const*) { emulator::wait_for_groups_in_warp(pending); });
}

template <int kCount>
void keep(float (&)[kCount]) {}
template <int kCount>
void keep(uint32_t (&)[kCount]) {}

template <int kCount>
void undefine(float (&d)[kCount]) {
    for (float& x : d) x = NAN;
}

template <DType dtype, int kColumns, bool transposed, bool left_transposed = false>
struct Wgmma {
    struct Lane {
        float* d;
        const uint32_t* a;  // nullptr: in shared memory
        uint64_t left, right;
        bool accumulate;
        int warp;
    };

    static void run(Lane mine) {
        emulator::with_warp(mine, [](Lane* const* lanes) {
            std::array<Lane, emulator::kLanes> kept;
            for (int lane = 0; lane < emulator::kLanes; ++lane) kept[lane] = *lanes[lane];
            emulator::start_in_warp([kept] { multiply(kept); });
        });
    }

    static void multiply(const std::array<Lane, emulator::kLanes>& lanes) {
        static float a[16][16], b[kColumns][16];
        for (int k = 0; k < 16; ++k) {
            for (int column = 0; column < kColumns; ++column)
                b[column][k] = wgmma_element<dtype>(lanes[0].right, transposed, column, k);
            if (!lanes[0].a)
                for (int row = 0; row < 16; ++row)
                    a[row][k] =
                        wgmma_element<dtype>(lanes[0].left, left_transposed, lanes[0].warp * 16 + row, k);
        }
        for (int lane = 0; lanes[0].a && lane < emulator::kLanes; ++lane)
            for (int r = 0; r < 4; ++r)
                for (int i = 0; i < 2; ++i)
                    a[lane / 4 + r % 2 * 8][lane % 4 * 2 + i + r / 2 * 8] =
                        half_of<dtype>(lanes[lane].a[r], i);
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            for (int i = 0; i < kColumns / 2; ++i) {
                const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                double sum = lanes[lane].accumulate ? lanes[lane].d[i] : 0;
                for (int k = 0; k < 16; ++k) sum += double(a[row][k]) * b[column][k];
                lanes[lane].d[i] = float(sum);
            }
    }

    static void multiply(float (&d)[kColumns / 2], uint64_t left, uint64_t right, bool accumulate) {
        run({d, nullptr, left, right, accumulate, int(threadIdx.x) / 32 % 4});
    }
    static void multiply(float (&d)[kColumns / 2], const uint32_t (&left)[4], uint64_t right,
                         bool accumulate) {
        run({d, left, 0, right, accumulate, int(threadIdx.x) / 32 % 4});
    }
};

}  // namespace flash::cuda
