// The element types of the tensor cores: their size, conversion of pairs of 16 bits, and what is finite.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../../problem.h"

namespace flash::cuda {

constexpr int element_bytes(DType dtype) {
    return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

// An element as it lies in memory.
template <DType dtype>
using Bits = std::conditional_t<element_bytes(dtype) == 4, uint32_t, uint16_t>;

// Two floats rounded to nearest; `low` goes to the lower half, which is the lower column.
template <DType dtype>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    static_assert(element_bytes(dtype) == 2);
    if constexpr (dtype == DType::bfloat16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    } else {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
}

template <DType dtype>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
    static_assert(element_bytes(dtype) == 2);
    if constexpr (dtype == DType::bfloat16)
        return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
    else
        return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Of two pairs.
template <DType dtype>
__device__ __forceinline__ uint32_t minimum(uint32_t a, uint32_t b) {
    using Pair = std::conditional_t<dtype == DType::bfloat16, __nv_bfloat162, __half2>;
    const Pair lower = __hmin2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
    return reinterpret_cast<const uint32_t&>(lower);
}

// A pair's elements that are infinite or NaN replaced by 0; of 32 bits, the element.
template <DType dtype>
__device__ __forceinline__ uint32_t finite_or_zero(uint32_t x) {
    if constexpr (dtype == DType::float32) {
        return (x & 0x7f800000) == 0x7f800000 ? 0 : x;
    } else {
        constexpr uint32_t exponent = dtype == DType::bfloat16 ? 0x7f80 : 0x7c00;
        const uint32_t low = (x & exponent) == exponent ? 0 : 0xffff;
        const uint32_t high = (x & exponent << 16) == exponent << 16 ? 0 : 0xffff0000;
        return x & (low | high);
    }
}

}  // namespace flash::cuda
