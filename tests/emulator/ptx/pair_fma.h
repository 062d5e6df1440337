#pragma once

#include "../tile/element.h"

namespace flash::cuda {

template <DType dtype>
uint32_t pair_fma(uint32_t x, uint32_t y, uint32_t z) {
    const float2 a = unpack<dtype>(x), b = unpack<dtype>(y), c = unpack<dtype>(z);
    return pack<dtype>(a.x * b.x + c.x, a.y * b.y + c.y);
}

}  // namespace flash::cuda
