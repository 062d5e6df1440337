// Vectors of the instruction set that this translation unit is compiled for, and the few operations on them
// that attention needs. forward.cpp and backward.cpp are compiled once per instruction set (setup.py's
// table), each time with its own FLASH_CPU_ISA: everything here lives in that namespace, so the linker can't
// hand one variant's code to another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef FLASH_CPU_ISA
#error "compile with -DFLASH_CPU_ISA=<name>; see the table in setup.py"
#endif

#define FLASH_INLINE inline __attribute__((always_inline))

namespace flash::cpu::FLASH_CPU_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
// 8 x 2 accumulators of 32 registers keep two FMA ports busy over a latency of four cycles.
inline constexpr int kMicroRows = 8;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kMicroRows = 6;
#elif defined(__aarch64__)
inline constexpr int kVectorBytes = 16;
inline constexpr int kMicroRows = 8;
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kMicroRows = 4;
#endif
inline constexpr int kMicroVectors = 2;

template <class Real>
struct VectorOf;
template <>
struct VectorOf<float> {
    typedef float type __attribute__((vector_size(kVectorBytes)));
    typedef int32_t position;
    typedef int32_t mask __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
    typedef double type __attribute__((vector_size(kVectorBytes)));
    typedef int64_t position;
    typedef int64_t mask __attribute__((vector_size(kVectorBytes)));
};
template <class Real>
using Vector = typename VectorOf<Real>::type;
template <class Real>
using LaneMask = typename VectorOf<Real>::mask;  // all ones in a chosen lane, zero elsewhere

template <class Real>
inline constexpr int kLanes = kVectorBytes / int(sizeof(Real));
template <class Real>
inline constexpr int kMicroColumns = kMicroVectors * kLanes<Real>;

struct Pair {  // two bfloat16, first one in the low half
    uint32_t bits;
};

template <class V, class Source>
FLASH_INLINE V load(const Source* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V, class Target>
FLASH_INLINE void store(Target* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

FLASH_INLINE Vector<float> broadcast(float x) {
    return x - Vector<float>{};
}
FLASH_INLINE Vector<double> broadcast(double x) {
    return x - Vector<double>{};
}

}  // namespace flash::cpu::FLASH_CPU_ISA
