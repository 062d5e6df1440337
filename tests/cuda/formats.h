// The element types on the host, written from their definitions: bits to double and back, to nearest even.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "../../csrc/problem.h"

namespace flash {

struct Format {
    int exponent_bits, fraction_bits;
};

constexpr Format format_of(DType dtype) {
    return dtype == DType::float16 ? Format{5, 10} : dtype == DType::bfloat16 ? Format{8, 7} : Format{8, 23};
}

inline double decoded(DType dtype, uint32_t bits) {
    const auto [exponent_bits, fraction_bits] = format_of(dtype);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const uint32_t fraction = bits & ((1u << fraction_bits) - 1);
    const int exponent = int(bits >> fraction_bits & ((1u << exponent_bits) - 1));
    const double sign = bits >> (exponent_bits + fraction_bits) & 1 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) return fraction ? NAN : sign * INFINITY;
    const double significand =
        exponent ? 1 + std::ldexp(fraction, -fraction_bits) : std::ldexp(fraction, -fraction_bits);
    return sign * std::ldexp(significand, (exponent ? exponent : 1) - bias);
}

inline double rounded(DType dtype, double x) {
    if (!std::isfinite(x) || x == 0) return x;
    const auto [exponent_bits, fraction_bits] = format_of(dtype);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = std::max(std::ilogb(x), 1 - bias);
    const double unit = std::ldexp(1, exponent - fraction_bits);
    const double nearest = std::nearbyint(x / unit) * unit;
    return std::fabs(nearest) < std::ldexp(1, bias + 1) ? nearest : std::copysign(INFINITY, x);
}

// Of a number that the type has.
inline uint32_t encoded(DType dtype, double x) {
    const auto [exponent_bits, fraction_bits] = format_of(dtype);
    const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
    const uint32_t sign = uint32_t(std::signbit(x)) << (exponent_bits + fraction_bits);
    if (std::isnan(x)) return uint32_t(top) << fraction_bits | 1u << (fraction_bits - 1);
    if (std::isinf(x)) return sign | uint32_t(top) << fraction_bits;
    if (x == 0) return sign;
    const int exponent = std::max(std::ilogb(x), 1 - bias);
    // The implicit bit of a normal number adds one to the exponent's field.
    const uint32_t significand = uint32_t(std::ldexp(std::fabs(x), fraction_bits - exponent));
    return sign | (uint32_t(exponent + bias - 1) << fraction_bits) + significand;
}

}  // namespace flash
