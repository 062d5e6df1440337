#pragma once

namespace flash::cuda {

struct LdMatrix {
    uint32_t (&r)[4];
    uint32_t address;
};

template <bool transposed>
void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    LdMatrix mine{r, address};
    emulator::with_warp(mine, [](LdMatrix* const* lanes) {
        for (int i = 0; i < 4; ++i) {
            uint16_t x[8][8];
            for (int row = 0; row < 8; ++row)
                std::memcpy(x[row], emulator::at_shared<char>(lanes[8 * i + row]->address, 16, 16), 16);
            for (int lane = 0; lane < emulator::kLanes; ++lane) {
                const int g = lane / 4, t = lane % 4 * 2;
                const uint32_t low = transposed ? x[t][g] : x[g][t];
                const uint32_t high = transposed ? x[t + 1][g] : x[g][t + 1];
                lanes[lane]->r[i] = low | high << 16;
            }
        }
    });
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    ldmatrix<false>(r, address);
}
inline void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
    ldmatrix<true>(r, address);
}

}  // namespace flash::cuda
