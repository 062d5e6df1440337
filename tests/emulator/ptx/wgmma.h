#pragma once

#include "mma_sync.h"

namespace flash::cuda {

inline uint64_t wgmma_descriptor(uint32_t address, int panel_bytes) {
    return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(panel_bytes / 16) << 16 |
           (address & 0x3ffff) / 16;
}

// Eight elements of a tile side by side, from a row and a depth on: of eight rows if it is transposed. Rows
// are those of A, or columns of B.
inline const uint16_t* wgmma_elements(uint64_t descriptor, bool transposed, int row, int depth) {
    const uint32_t start = uint32_t(descriptor & 0x3fff) * 16,
                   leading = uint32_t(descriptor >> 16 & 0x3fff) * 16,
                   stride = uint32_t(descriptor >> 32 & 0x3fff) * 16;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7)) emulator::fail("wgmma: descriptor");
    const uint32_t place =
        transposed ? start + row / 64 * leading + depth / 8 * stride + depth % 8 * 128 + row % 64 * 2
                   : start + row / 8 * stride + row % 8 * 128 + depth * 2;
    return emulator::at_shared<uint16_t>(place ^ (place / 128 % 8 * 16), 16, 16);
}

template <DType dtype, bool transposed, int kRows>
void load_wgmma_tile(uint64_t descriptor, int first_row, double (&tile)[16][kRows]) {
    for (int depth = 0; depth < 16; depth += transposed ? 1 : 8)
        for (int row = 0; row < kRows; row += transposed ? 8 : 1) {
            const uint16_t* const from = wgmma_elements(descriptor, transposed, first_row + row, depth);
            for (int i = 0; i < 8; ++i)
                (transposed ? tile[depth][row + i] : tile[depth + i][row]) = half_of<dtype>(from[i], 0);
        }
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
inline void keep(uint32_t&) {}

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
        static double a[16][16], b[16][kColumns], sums[16][kColumns];
        load_wgmma_tile<dtype, transposed>(lanes[0].right, 0, b);
        if (!lanes[0].a) load_wgmma_tile<dtype, left_transposed>(lanes[0].left, lanes[0].warp * 16, a);
        for (int lane = 0; lanes[0].a && lane < emulator::kLanes; ++lane)
            for (int r = 0; r < 4; ++r)
                for (int i = 0; i < 2; ++i)
                    a[lane % 4 * 2 + i + r / 2 * 8][lane / 4 + r % 2 * 8] =
                        half_of<dtype>(lanes[lane].a[r], i);
        const auto each = [&](const auto& use) {
            for (int lane = 0; lane < emulator::kLanes; ++lane)
                for (int i = 0; i < kColumns / 2; ++i)
                    use(lanes[lane], i, sums[lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]);
        };
        each([](const Lane& lane, int i, double& sum) { sum = lane.accumulate ? lane.d[i] : 0; });
        emulator::add_products(sums[0], a[0], b[0], 16, kColumns);
        each([](const Lane& lane, int i, double sum) { lane.d[i] = float(sum); });
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
