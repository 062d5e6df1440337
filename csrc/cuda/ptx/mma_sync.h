// mma.sync: a warp multiplies small matrices that lie in its registers (PTX ISA, "Matrix Fragments for
// mma.m16n8k16" and "mma.m16n8k8"). With g = lane / 4 and t = lane % 4:
//
//     16 bits   A 16 x 16   a[0]: row g, columns 2t, 2t + 1   a[1]: row g + 8   a[2]: columns + 8
//                           a[3]: both
//               B 16 x 8    b0: rows 2t, 2t + 1 of column g   b1: rows + 8
//     tf32      A 16 x 8    a[0]: row g, column t   a[1]: row g + 8   a[2]: column + 4   a[3]: both
//               B 8 x 8     b0: row t of column g   b1: row + 4
//     all       D 16 x 8    d[0], d[1]: row g, columns 2t, 2t + 1   d[2], d[3]: row g + 8
//
// Products are exact; their sum with D is truncated, not rounded.
#pragma once

#include <cstdint>

#include "../../problem.h"

namespace flash::cuda {

template <DType dtype>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    static_assert(dtype == DType::float16 || dtype == DType::bfloat16);
    if constexpr (dtype == DType::bfloat16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Floats as tf32, of which the lowest 13 bits are ignored: 11 significant bits are left.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flash::cuda
