#pragma once

namespace flash::cuda {

inline float log2_approximate(float x) {
    return std::log2(x < 0x1p-126f ? 0 : x);
}

}  // namespace flash::cuda
