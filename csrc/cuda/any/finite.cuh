// Keeps what is not finite from leaking through a product with zero. In a tile where a mask hides scores, the
// operand that meets the zeros has its bad elements cleared, and the rows that had one are noted, for the
// caller to make NaN what really depends on them.
#pragma once

#include "../ptx/pair_fma.h"
#include "../tile/element.h"
#include "../tile/smem_tile.h"
#include "loader.cuh"

namespace flash::cuda {

// Among those that this thread looks at.
template <DType dtype, int kThreads, class Tile>
__device__ __forceinline__ bool has_bad_element(uint32_t tile) {
    // Adding 1 to an exponent of all ones carries into the sign's place.
    constexpr uint32_t exponent = dtype == DType::float32    ? 0x7f800000
                                  : dtype == DType::bfloat16 ? 0x7f807f80
                                                             : 0x7c007c00;
    constexpr uint32_t one = dtype == DType::float32    ? 0x00800000
                             : dtype == DType::bfloat16 ? 0x00800080
                                                        : 0x04000400;
    const auto carry = [](uint32_t word) { return (word & exponent) + one; };
    uint32_t carries = 0, zeros = 0;  // of a pair: 0 times every element, and so NaN for ever
    const uint32_t first = tile + threadIdx.x * 16;
    static_assert(Tile::bytes % (kThreads * 16) == 0);
#pragma unroll 4
    for (int i = 0; i < Tile::bytes; i += kThreads * 16) {
        const uint4 x = load_shared_16(first + i);
        for (const uint32_t word : {x.x, x.y, x.z, x.w})
            if constexpr (dtype == DType::float32)
                carries |= carry(word);
            else
                zeros = pair_fma<dtype>(word, 0, zeros);
    }
    return ((carries | carry(zeros)) & 0x80008000) != 0;
}

// Calls visit(row, place, chunk without them) for every 16 bytes with bad elements that this thread looks at.
template <DType dtype, int kThreads, class Tile, class Visit>
__device__ __forceinline__ void each_bad_chunk(uint32_t tile, const Visit& visit) {
    using Threads = TileThreads<Tile, kThreads>;
#pragma unroll 1
    for (int row = Threads::first_row(); row < Tile::rows; row += Threads::row_step)
        for (int panel = 0; panel < Tile::panels; ++panel) {
            const uint32_t place = tile + Tile::offset(row, panel, Threads::chunk());
            const uint4 x = load_shared_16(place);
            const uint4 clean = make_uint4(finite_or_zero<dtype>(x.x), finite_or_zero<dtype>(x.y),
                                           finite_or_zero<dtype>(x.z), finite_or_zero<dtype>(x.w));
            if (clean.x == x.x && clean.y == x.y && clean.z == x.z && clean.w == x.w) continue;
            visit(row, place, clean);
        }
}

// By kThreads threads, which have cleared bad_rows and whose writes are seen behind a barrier.
template <DType dtype, int kThreads, class Tile>
__device__ __forceinline__ void note_bad_rows(uint32_t tile, uint32_t* bad_rows) {
    each_bad_chunk<dtype, kThreads, Tile>(
        tile, [&](int row, uint32_t, uint4) { atomicOr(&bad_rows[row / 32], 1u << row % 32); });
}

// The same, and the elements become 0.
template <DType dtype, int kThreads, class Tile>
__device__ __forceinline__ void clear_bad_elements(uint32_t tile, uint32_t* bad_rows) {
    each_bad_chunk<dtype, kThreads, Tile>(tile, [&](int row, uint32_t place, uint4 clean) {
        store_shared(place, clean);
        atomicOr(&bad_rows[row / 32], 1u << row % 32);
    });
}

// Which of the lane's columns of a fragment, whose first one is `first`, are noted in `bad`: a bit each.
template <class Scores>
__device__ __forceinline__ uint32_t bad_columns(const uint32_t* bad, int first) {
    uint32_t columns = 0;
#pragma unroll 1
    for (int column = 0; column < Scores::columns; ++column) {
        const int j = first + Scores::column(column);
        columns |= (bad[j / 32] >> j % 32 & 1) << column;
    }
    return columns;
}

// All of the block's kThreads threads; the tiles, which share their rows, are whole on entry and on return.
// bad_rows: a bit each; defined only if the result, the same for all threads, is true.
template <DType dtype, int kThreads, class Tile, class... Addresses>
__device__ __forceinline__ bool clear_bad_rows(uint32_t* bad_rows, Addresses... tiles) {
    if (!__syncthreads_or((has_bad_element<dtype, kThreads, Tile>(tiles) | ...))) return false;
    for (int i = threadIdx.x; i < (Tile::rows + 31) / 32; i += kThreads) bad_rows[i] = 0;
    __syncthreads();
    (clear_bad_elements<dtype, kThreads, Tile>(tiles, bad_rows), ...);
    __syncthreads();
    return true;
}

}  // namespace flash::cuda
