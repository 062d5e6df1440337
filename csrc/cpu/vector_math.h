// attention/scalar_math.h's names for a vector of lanes. exp in float is ours, because it is what the CPU
// engine does most after multiplying; the rest is rare and asks the C library lane by lane.
#pragma once

#include <cmath>

#include "simd.h"

namespace flash::cpu::FLASH_CPU_ISA {

// e^x, relative error below 1e-7. 0 below -88 and at -inf, inf from 88.4 on, NaN for NaN.
FLASH_INLINE Vector<float> exp_lanes(Vector<float> x) {
    const Vector<float> lowest = broadcast(-88.0f), highest = broadcast(89.0f);
    x = lowest > x ? lowest : x;  // in this order NaN passes both
    x = highest < x ? highest : x;
    // x = n ln 2 + f with |f| <= ln(2) / 2: adding 1.5 * 2^23 rounds to an integer, ln 2 comes in two parts.
    const Vector<float> magic = broadcast(12582912.0f);
    const Vector<float> shifted = x * 1.44269504f + magic;
    const Vector<float> n = shifted - magic;
    const Vector<float> f = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    // e^f, minimax: relative error 3e-9 before rounding.
    Vector<float> power = broadcast(1.381459848e-3f);
    power = power * f + 8.368716887e-3f;
    power = power * f + 4.166838805e-2f;
    power = power * f + 1.666652063e-1f;
    power = power * f + 4.999999345e-1f;
    power = power * f + 1.0f;
    power = power * f + 1.0f;
    // The integer sits in the low bits of shifted; as an exponent -127 is 0 and 128 infinity.
    const LaneMask<float> exponent = ((LaneMask<float>)shifted - 0x4B400000 + 127) << 23;
    return power * (Vector<float>)exponent;
}

FLASH_INLINE Vector<double> exp_lanes(Vector<double> x) {
    for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = ::exp(x[lane]);
    return x;
}

template <class R>
struct VectorMath {
    using Real = R;
    using Value = Vector<R>;
    using Condition = LaneMask<R>;

    static constexpr double unit = 1;

    FLASH_INLINE static Value broadcast(Real x) { return cpu::FLASH_CPU_ISA::broadcast(x); }
    FLASH_INLINE static Value select(Condition condition, Value yes, Value no) {
        return condition ? yes : no;
    }
    FLASH_INLINE static Value exponential(Value x) { return exp_lanes(x); }
    FLASH_INLINE static Value reciprocal(Value x) { return broadcast(Real(1)) / x; }
    // x * factor + log(y), rounded once: lse is what the backward recomputes every probability from.
    FLASH_INLINE static Value plus_log(Value x, double factor, Value y) {
        for (int lane = 0; lane < kLanes<R>; ++lane)
            x[lane] = R(double(x[lane]) * factor + ::log(double(y[lane])));
        return x;
    }
    FLASH_INLINE static Value tanh(Value x) {
        for (int lane = 0; lane < kLanes<R>; ++lane) x[lane] = R(::tanh(double(x[lane])));
        return x;
    }
    FLASH_INLINE static Value abs(Value x) { return x < 0 ? -x : x; }
};

}  // namespace flash::cpu::FLASH_CPU_ISA
