#pragma once

namespace flash::cuda {

struct StMatrix {
    const uint32_t (&r)[4];
    uint32_t address;
};

inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    StMatrix mine{r, address};
    emulator::with_warp(mine, [](StMatrix* const* lanes) {
        for (int i = 0; i < 4; ++i)
            for (int row = 0; row < 8; ++row) {
                uint32_t words[4];
                for (int t = 0; t < 4; ++t) words[t] = lanes[row * 4 + t]->r[i];
                std::memcpy(emulator::at_shared<char>(lanes[8 * i + row]->address, 16, 16), words, 16);
            }
    });
}

}  // namespace flash::cuda
