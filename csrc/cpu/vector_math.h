// attention/scalar_math.h's names for a vector of lanes. exp2 in float is ours, because it is what the CPU engine does
// most after multiplying; the rest is rare and asks the C library lane by lane.
#pragma once

#include <cmath>

#include "simd.h"

namespace flash::cpu::FLASH_CPU_ISA {

// 2^x, relative error below 8e-8. 0 below 2^-126 and at -inf, inf from 2^128 on, NaN for NaN.
FLASH_INLINE Vector<float> exp2_lanes(Vector<float> x) {
    const Vector<float> lowest = broadcast(-127.0f), highest = broadcast(128.0f);
    x = lowest > x ? lowest : x;  // in this order NaN passes both
    x = highest < x ? highest : x;
    const Vector<float> magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const Vector<float> shifted = x + magic;
    const Vector<float> fraction = x - (shifted - magic);
    // 2^f on [-1/2, 1/2], minimax: relative error 2e-9 before rounding.
    Vector<float> power = broadcast(1.535336189e-4f);
    power = power * fraction + 1.339887442e-3f;
    power = power * fraction + 9.618437358e-3f;
    power = power * fraction + 5.550332471e-2f;
    power = power * fraction + 2.402264791e-1f;
    power = power * fraction + 6.931472029e-1f;
    power = power * fraction + 1.0f;
    // The integer sits in the low bits of shifted; as an exponent -127 gives 0 and 128 infinity.
    const LaneMask<float> exponent = ((LaneMask<float>)shifted - 0x4B400000 + 127) << 23;
    return power * (Vector<float>)exponent;
}

FLASH_INLINE Vector<double> exp2_lanes(Vector<double> x) {
    for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = ::exp2(x[lane]);
    return x;
}

template <class R>
struct VectorMath {
    using Real = R;
    using Value = Vector<R>;
    using Condition = LaneMask<R>;

    FLASH_INLINE static Value broadcast(Real x) { return cpu::FLASH_CPU_ISA::broadcast(x); }
    FLASH_INLINE static Value select(Condition condition, Value yes, Value no) { return condition ? yes : no; }
    FLASH_INLINE static Value exp2(Value x) { return exp2_lanes(x); }
    FLASH_INLINE static Value log(Value x) {
        for (int lane = 0; lane < kLanes<R>; ++lane) x[lane] = R(::log(double(x[lane])));
        return x;
    }
    FLASH_INLINE static Value tanh(Value x) {
        for (int lane = 0; lane < kLanes<R>; ++lane) x[lane] = R(::tanh(double(x[lane])));
        return x;
    }
    FLASH_INLINE static Value abs(Value x) { return x < 0 ? -x : x; }
};

}  // namespace flash::cpu::FLASH_CPU_ISA
