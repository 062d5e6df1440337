// Products of a warpgroup with operands as panels in shared memory (ptx/wgmma.h): asynchronous, to be
// committed and waited for by the caller.
#pragma once

#include "../ptx/ldmatrix.h"
#include "../ptx/wgmma.h"
#include "../tile/fragment.h"
#include "../tile/warp_product.h"

namespace flash::cuda::sm90 {

constexpr int kPanelRowBytes = 128;

template <int kColumns>
__device__ __forceinline__ float (&registers_of(Fragment<16, kColumns>& d))
    [kColumns / 2] { return reinterpret_cast<float (&)[kColumns / 2]>(d.value); }

// The descriptor of what lies so many bytes on in the same panels.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, int bytes) {
    return descriptor >> 32 << 32 | (uint32_t(descriptor) + bytes / 16);
}

// D[i][j] = sum_k A[i][k] B[j][k]; a: the warpgroup's 64 rows of a tile of a_rows, b: kColumns rows. From
// kFirst on, if that is not 0, it is added to D. kPanelStep: from a panel's first column of A to the next
// one's.
template <DType dtype, int kDepth, int kColumns, int kFirst = 0, int kPanelStep = 64>
__device__ __forceinline__ void multiply_rows_by_rows(Fragment<16, kColumns>& d, uint32_t a, int a_rows,
                                                      uint32_t b) {
    const uint64_t left = wgmma_descriptor(a, 16), right = wgmma_descriptor(b, 16);
#pragma unroll
    for (int k = kFirst / 16; k < kDepth / 16; ++k) {
        const int of_left = k * 16 / kPanelStep * a_rows * kPanelRowBytes + k * 16 % kPanelStep * 2;
        const int of_right = k / 4 * kColumns * kPanelRowBytes + k % 4 * 32;
        Wgmma<dtype, kColumns, false>::multiply(registers_of(d), further(left, of_left),
                                                further(right, of_right), k > 0);
    }
}

// The same with A in registers.
template <DType dtype, int kDepth, int kColumns>
__device__ __forceinline__ void multiply_registers_by_rows(Fragment<16, kColumns>& d,
                                                           const uint32_t (&a)[kDepth / 16][1][4],
                                                           uint32_t b) {
    const uint64_t right = wgmma_descriptor(b, 16);
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
        Wgmma<dtype, kColumns, false>::multiply(
            registers_of(d), a[k][0], further(right, k / 4 * kColumns * kPanelRowBytes + k % 4 * 32), k > 0);
}

// The first kColumns of a warp's 16 rows, or none: a product whose left operand changes rarely need not read
// them in shared memory, whose time is what products of two operands there wait for.
template <DType dtype, int kColumns>
struct HeldRows {
    RegisterOperand<dtype, 16, kColumns> operand;

    // Of a tile whose row is the warp's first one.
    template <class Tile>
    __device__ __forceinline__ void load(const char* tile, int row) {
        const int lane = lane_index();
        const uint32_t place =
            shared_address(tile) + row * kPanelRowBytes + Tile::offset(lane % 16, 0, lane / 16);
#pragma unroll
        for (int k = 0; k < kColumns / 16; ++k) ldmatrix_x4(operand.value[k][0], Tile::at(place, 0, k * 16));
    }
};
template <DType dtype>
struct HeldRows<dtype, 0> {
    template <class Tile>
    __device__ __forceinline__ void load(const char*, int) {}
};

// multiply_rows_by_rows, of whose A some columns are held.
template <DType dtype, int kDepth, int kPanelStep = 64, int kHeld, int kColumns>
__device__ __forceinline__ void multiply_held_rows_by_rows(Fragment<16, kColumns>& d,
                                                           const HeldRows<dtype, kHeld>& held, uint32_t a,
                                                           int a_rows, uint32_t b) {
    if constexpr (kHeld > 0) multiply_registers_by_rows<dtype, kHeld>(d, held.operand.value, b);
    if constexpr (kHeld < kDepth)
        multiply_rows_by_rows<dtype, kDepth, kColumns, kHeld, kPanelStep>(d, a, a_rows, b);
}

// D[i][j] += sum_k A[i][k] B[k][j] with A in registers; b: kDepth rows, of a tile of b_rows, of kColumns.
template <DType dtype, int kDepth, int kColumns>
__device__ __forceinline__ void multiply_registers_by_columns(Fragment<16, kColumns>& d,
                                                              const uint32_t (&a)[kDepth / 16][1][4],
                                                              uint32_t b, int b_rows = kDepth,
                                                              bool accumulate = true) {
    const uint64_t right = wgmma_descriptor(b, b_rows * kPanelRowBytes);
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
        Wgmma<dtype, kColumns, true>::multiply(registers_of(d), a[k][0],
                                               further(right, k * 16 * kPanelRowBytes), k > 0 || accumulate);
}

// D[i][j] = sum_k A[k][i] B[k][j], or that is added to D; a: kDepth rows of one panel, the warpgroup's; b:
// kDepth rows, of a tile of b_rows, of kColumns.
template <DType dtype, int kDepth, int kColumns>
__device__ __forceinline__ void multiply_columns_by_columns(Fragment<16, kColumns>& d, uint32_t a, uint32_t b,
                                                            int b_rows = kDepth, bool accumulate = false) {
    constexpr int step = 16 * kPanelRowBytes;
    const uint64_t left = wgmma_descriptor(a, kDepth * kPanelRowBytes),
                   right = wgmma_descriptor(b, b_rows * kPanelRowBytes);
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
        Wgmma<dtype, kColumns, true, true>::multiply(registers_of(d), further(left, k * step),
                                                     further(right, k * step), k > 0 || accumulate);
}

}  // namespace flash::cuda::sm90
