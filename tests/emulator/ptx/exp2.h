#pragma once

namespace flash::cuda {

inline float exp2_approximate(float x) {
    const float y = std::exp2(x);
    return y < 0x1p-126f ? 0 : y;
}

inline float behind(float x, float) {
    return x;
}

}  // namespace flash::cuda
