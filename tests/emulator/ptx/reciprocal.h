#pragma once

namespace flash::cuda {

inline float reciprocal_approximate(float x) {
    const float y = 1 / x;
    return std::fabs(y) < 0x1p-126f ? 0 : y;
}

}  // namespace flash::cuda
