// The arithmetic that score.h and online_softmax.h are written with, for one number at a time. An engine that
// holds several rows in a vector provides the same names for its vector type (cpu/vector_math.h).
#pragma once

#include <cmath>

#include "host_device.h"

namespace flash {

template <class R>
struct ScalarMath {
    using Real = R;
    using Value = R;
    using Condition = bool;

    // One natural unit of a score in the unit of the exponential: 1 for exp, log2(e) for exp2.
    static constexpr double unit = 1;

    FLASH_HOST_DEVICE static Value broadcast(Real x) { return x; }
    FLASH_HOST_DEVICE static Value select(Condition condition, Value yes, Value no) {
        return condition ? yes : no;
    }
    FLASH_HOST_DEVICE static Value exponential(Value x) { return ::exp(x); }
    FLASH_HOST_DEVICE static Value reciprocal(Value x) { return 1 / x; }
    // x * factor + log(y)
    FLASH_HOST_DEVICE static Value plus_log(Value x, double factor, Value y) {
        return Value(x * factor + ::log(double(y)));
    }
    FLASH_HOST_DEVICE static Value tanh(Value x) { return ::tanh(x); }
};

}  // namespace flash
