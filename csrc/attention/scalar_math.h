// The arithmetic that score.h and online_softmax.h are written with, for one number at a time. An engine that holds
// several rows in a vector provides the same names for its vector type (cpu/vector_math.h).
#pragma once

#include <cmath>

#include "host_device.h"

namespace flash {

template <class R>
struct ScalarMath {
    using Real = R;
    using Value = R;
    using Condition = bool;

    FLASH_HOST_DEVICE static Value broadcast(Real x) { return x; }
    FLASH_HOST_DEVICE static Value select(Condition condition, Value yes, Value no) { return condition ? yes : no; }
    FLASH_HOST_DEVICE static Value exp2(Value x) { return ::exp2(x); }
    FLASH_HOST_DEVICE static Value log(Value x) { return ::log(x); }
    FLASH_HOST_DEVICE static Value tanh(Value x) { return ::tanh(x); }
};
template <>
FLASH_HOST_DEVICE float ScalarMath<float>::exp2(float x) { return ::exp2f(x); }
template <>
FLASH_HOST_DEVICE float ScalarMath<float>::log(float x) { return ::logf(x); }
template <>
FLASH_HOST_DEVICE float ScalarMath<float>::tanh(float x) { return ::tanhf(x); }

}  // namespace flash
