// stmatrix: a warp stores four 8 x 8 matrices of 16-bit elements; lane 8i + r gives the shared address of row
// r of matrix i, and register i of every lane holds its two elements of matrix i, as after an ldmatrix (PTX
// ISA, "stmatrix"; Hopper and later).
#pragma once

#include <cstdint>

namespace flash::cuda {

__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

}  // namespace flash::cuda
