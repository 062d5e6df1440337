// The element types of tensors on the CPU and what the tile products read: float and double as they are,
// float16 widened to float, bfloat16 as pairs where the instruction set multiplies them and widened to float
// elsewhere.
#pragma once

#include "tile_gemm.h"

namespace flash::cpu::FLASH_CPU_ISA {

struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

template <class Target, class Source>
FLASH_INLINE Target bit_cast(Source source) {
    static_assert(sizeof(Target) == sizeof(Source));
    Target target;
    std::memcpy(&target, &source, sizeof target);
    return target;
}

FLASH_INLINE float to_real(float x) {
    return x;
}
FLASH_INLINE double to_real(double x) {
    return x;
}
FLASH_INLINE float to_real(BFloat16 x) {
    return bit_cast<float>(uint32_t(x.bits) << 16);
}
FLASH_INLINE float to_real(Half x) {
    // As a float's bits the half is 2^112 too small; subnormals come out right by the same multiplication.
    const float magnitude = bit_cast<float>(uint32_t(x.bits & 0x7fff) << 13) * 0x1p112f;
    const uint32_t infinite = (x.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
    return bit_cast<float>(bit_cast<uint32_t>(magnitude) | infinite | uint32_t(x.bits & 0x8000) << 16);
}

template <class Element>
struct Rounded {  // the element nearest to a Real, ties to even
    FLASH_INLINE static Element of(Element x) { return x; }
};
template <>
struct Rounded<BFloat16> {
    FLASH_INLINE static BFloat16 of(float x) {
        const uint32_t bits = bit_cast<uint32_t>(x);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return {
            uint16_t(x == x ? rounded : bits >> 16 | 0x40)};  // rounding up could carry a NaN into infinity
    }
};
template <>
struct Rounded<Half> {
    FLASH_INLINE static Half of(float x) {
        const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
        const float magnitude = bit_cast<float>(bits & 0x7fffffff);
        // Normal: rebias, round to 10 bits of mantissa. 65520 and above carry into infinity, as they should.
        const uint32_t shifted = bit_cast<uint32_t>(magnitude) - 0x38000000u;
        const uint32_t normal = (shifted + 0xfff + (shifted >> 13 & 1)) >> 13;
        // Subnormal: the addition of 1/2 puts the unit 2^-24 at the float's last bit and rounds there.
        const uint32_t subnormal = bit_cast<uint32_t>(magnitude + 0.5f) - 0x3f000000u;
        const uint32_t finite = magnitude < 0x1p-14f ? subnormal : normal < 0x7c00 ? normal : 0x7c00;
        return {uint16_t(sign | (x == x ? finite : 0x7e00))};
    }
};

template <class Element>
struct ElementTraits {
    using Operand = float;
};
template <>
struct ElementTraits<double> {
    using Operand = double;
};
#if defined(__AVX512BF16__)
template <>
struct ElementTraits<BFloat16> {
    using Operand = Pair;
};
#endif
template <class Element>
using OperandOf = typename ElementTraits<Element>::Operand;
template <class Element>
using RealOf = typename GemmTraits<OperandOf<Element>>::Real;

// Rows that follow each other along the depth of a product, one vector of columns, as one row of operands.
FLASH_INLINE void store_step(float* to, const Vector<float> (&rows)[1]) {
    store(to, rows[0]);
}
FLASH_INLINE void store_step(double* to, const Vector<double> (&rows)[1]) {
    store(to, rows[0]);
}
#if defined(__AVX512BF16__)
FLASH_INLINE void store_step(Pair* to, const Vector<float> (&rows)[2]) {
    const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                                 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)rows[1], (__m512)rows[0]);
    store(to, _mm512_permutexvar_epi16(interleaved, (__m512i)both));
}
#endif

}  // namespace flash::cpu::FLASH_CPU_ISA
