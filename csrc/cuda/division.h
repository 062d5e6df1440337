// Division of many numbers by one that the host knows: a multiplication and a shift, where the GPU would need
// some hundred cycles before a block's first loads. (Granlund and Montgomery, "Division by invariant integers
// using multiplication", 1994.)
#pragma once

#include <cstdint>

#include "../attention/host_device.h"

namespace flash::cuda {

struct Division {
    uint32_t divisor;  // at least 1

    // For dividends below 2^31.
    explicit Division(uint32_t divisor) : divisor(divisor), shift_(0) {
        while (shift_ < 31 && (1u << shift_) < divisor) ++shift_;
        multiplier_ = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << shift_) - divisor)) / divisor + 1);
    }

    FLASH_HOST_DEVICE uint32_t quotient(uint32_t dividend) const {
        return (uint32_t((uint64_t(dividend) * multiplier_) >> 32) + dividend) >> shift_;
    }
    FLASH_HOST_DEVICE uint32_t remainder(uint32_t dividend) const {
        return dividend - quotient(dividend) * divisor;
    }

  private:
    uint32_t multiplier_, shift_;
};

}  // namespace flash::cuda
