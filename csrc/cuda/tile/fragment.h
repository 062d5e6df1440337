// A warp's accumulators, as mma_sync leaves them: kRows x kColumns floats in tiles of 16 x 8. A lane holds
// 2 * row_tiles rows; lanes 4g .. 4g + 3, a quad, hold the same rows.
#pragma once

#include <cstdint>

namespace flash::cuda {

__device__ __forceinline__ int lane_index() {
    return threadIdx.x % 32;
}

template <int kRows, int kColumns>
struct Fragment {
    static constexpr int row_tiles = kRows / 16;
    static constexpr int column_tiles = kColumns / 8;
    static constexpr int rows = 2 * row_tiles;  // that one lane holds

    float value[row_tiles][column_tiles][4];

    __device__ __forceinline__ void clear() { fill(0); }

    __device__ __forceinline__ void fill(float x) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
#pragma unroll
            for (int n = 0; n < column_tiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) value[m][n][e] = x;
    }

    // Row r of the lane's rows, and its columns c = 0 .. 2 * column_tiles - 1 in ascending order.
    __device__ __forceinline__ float& at(int r, int c) { return value[r / 2][c / 2][r % 2 * 2 + c % 2]; }

    __device__ __forceinline__ float at(int r, int c) const { return value[r / 2][c / 2][r % 2 * 2 + c % 2]; }

    __device__ __forceinline__ static int row(int r) { return r / 2 * 16 + r % 2 * 8 + lane_index() / 4; }
    // Columns from the lane's first one to its c'th one: the same for all lanes.
    __device__ __forceinline__ static constexpr int columns_before(int c) { return c / 2 * 8 + c % 2; }
    __device__ __forceinline__ static int column(int c) { return c / 2 * 8 + lane_index() % 4 * 2 + c % 2; }
    static constexpr int columns = 2 * column_tiles;  // that one lane holds

    __device__ __forceinline__ void scale_row(int r, float factor) {
#pragma unroll
        for (int column = 0; column < columns; ++column) at(r, column) *= factor;
    }

    __device__ __forceinline__ void operator*=(float factor) {
#pragma unroll
        for (int r = 0; r < rows; ++r) scale_row(r, factor);
    }

    __device__ __forceinline__ bool is_finite() const {
        bool finite = true;
#pragma unroll
        for (int r = 0; r < rows; ++r)
#pragma unroll
            for (int column = 0; column < columns; ++column) finite &= fabsf(at(r, column)) < INFINITY;
        return finite;
    }
};

// The first half of its columns, or the second one (kHalf: 0 or 1).
template <int kHalf, int kColumns>
__device__ __forceinline__ Fragment<16, kColumns / 2>& half_of(Fragment<16, kColumns>& x) {
    return reinterpret_cast<Fragment<16, kColumns / 2>&>(x.value[0][kHalf * kColumns / 16]);
}

// Of the first 32 columns that a lane holds, 128 of the fragment's, a bit for each one in front of `end`.
__device__ __forceinline__ uint32_t columns_in_front_of(int end, int lane) {
    const int i = min(max(end, 0), 128);
    const int count = i / 8 * 2 + min(max(i % 8 - lane % 4 * 2, 0), 2);
    return count < 32 ? (1u << count) - 1 : ~0u;
}

// Over the four lanes that share their rows.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// Of a fragment's row.
template <int kRows, int kColumns>
__device__ __forceinline__ float row_maximum(const Fragment<kRows, kColumns>& x, int r) {
    float even = x.at(r, 0), odd = x.at(r, 1);  // two, since each waits for the one before
#pragma unroll
    for (int column = 2; column < x.columns; column += 2) {
        even = fmaxf(even, x.at(r, column));
        odd = fmaxf(odd, x.at(r, column + 1));
    }
    return quad_max(fmaxf(even, odd));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

}  // namespace flash::cuda
