// Scores of Hopper's backward are transposed, [keys, queries]: what is known of a query is a column's.
#pragma once

#include "../ptx/shared.h"
#include "../tile/fragment.h"
#include "../tile/gpu_math.h"

namespace flash::cuda::sm90 {

// Of a tile's queries what a lane needs of the i-th 8: numbers of two columns.
__device__ __forceinline__ float2 pair_of(const float* of_query, int i, uint32_t thread) {
    const uint2 pair = load_shared_8(shared_address(of_query) + thread % 4 * 8 + i * 32);
    return make_float2(__uint_as_float(pair.x), __uint_as_float(pair.y));
}

// s: dot products on entry, P on return. unit: from a dot product to a score in log 2; lse_of(i): a pair.
template <int kQueries, class LseOf>
__device__ __forceinline__ void exponentiate_columns(Fragment<16, kQueries>& s, const float& unit,
                                                     const LseOf& lse_of) {
#pragma unroll
    for (int i = 0; i < kQueries / 8; ++i) {
        const float2 lse = lse_of(i);
        float (&x)[4] = s.value[0][i];
        x[0] = GpuMath::exponential(x[0] * unit - lse.x);
        x[1] = GpuMath::exponential(x[1] * unit - lse.y);
        x[2] = GpuMath::exponential(x[2] * unit - lse.x);
        x[3] = GpuMath::exponential(x[3] * unit - lse.y);
    }
}

// dp: dO V^T on entry, dS on return; it lacks the factor softmax_scale. p_of(i): four of P; delta_of(i): a
// pair.
template <int kQueries, class POf, class DeltaOf>
__device__ __forceinline__ void differentiate_columns(Fragment<16, kQueries>& dp, const POf& p_of,
                                                      const DeltaOf& delta_of) {
#pragma unroll
    for (int i = 0; i < kQueries / 8; ++i) {
        const float2 delta = delta_of(i);
        const float4 p = p_of(i);
        float (&x)[4] = dp.value[0][i];
        x[0] = p.x * (x[0] - delta.x);
        x[1] = p.y * (x[1] - delta.y);
        x[2] = p.z * (x[2] - delta.x);
        x[3] = p.w * (x[3] - delta.y);
    }
}

// As p_of wants it.
template <int kQueries>
__device__ __forceinline__ float4 four_of(const Fragment<16, kQueries>& p, int i) {
    const float (&x)[4] = p.value[0][i];
    return make_float4(x[0], x[1], x[2], x[3]);
}

}  // namespace flash::cuda::sm90
