// What is given for each score of a dense problem: an additive bias, and bits that say which scores exist. A
// bias of -inf hides its score as a bit of 0 does: the score is selected away, never added to.
#pragma once

#include "../problem.h"
#include "host_device.h"
#include "mask.h"

namespace flash {

// Queries and keys of a block of an element mask. Rows of bits are padded to whole blocks, with zeros, so
// that they can be read in vectors.
constexpr int64_t kMaskBlock = 128;
constexpr Position kMaskQuarter = kMaskBlock / 2;  // of a block's quarter (block_mask.h)

FLASH_HOST_DEVICE int64_t mask_blocks(int64_t length) {
    return (length + kMaskBlock - 1) / kMaskBlock;
}

FLASH_HOST_DEVICE int64_t mask_words(int64_t columns) {
    return mask_blocks(columns) * (kMaskBlock / 32);
}

// One query's numbers, from key 0 on.
template <class Number>
FLASH_HOST_DEVICE Number* row_of(const ScoreMatrix& matrix, int64_t batch, int64_t head, int64_t query) {
    return static_cast<Number*>(matrix.data) + batch * matrix.batch_stride + head * matrix.head_stride +
           query * matrix.row_stride;
}

FLASH_HOST_DEVICE bool has_score_matrices(const ForwardProblem& problem) {
    return problem.bias.data || problem.visible.data;
}

// bits: a row of ForwardProblem::visible.
FLASH_HOST_DEVICE bool is_visible(const uint32_t* bits, Position key) {
    return bits[key / 32] >> key % 32 & 1;
}

// One word of a mask: 32 keys of one row of one matrix. Several may say so of one quarter; they say the same.
FLASH_HOST_DEVICE void pack_word(const MaskPacking& packing, int64_t index) {
    const int64_t words = mask_words(packing.columns), row = index / words, first = index % words * 32;
    const bool* from = packing.mask + row * packing.columns + first;
    const int64_t left = packing.columns - first, count = left < 0 ? 0 : left < 32 ? left : 32;
    uint32_t packed = 0;
    for (int64_t i = 0; i < count; ++i) packed |= uint32_t(from[i]) << i;
    packing.bits[index] = packed;
    const int64_t quarter_row =
        row / packing.rows * mask_blocks(packing.rows) * 2 + row % packing.rows / kMaskQuarter;
    const int64_t place = quarter_row * mask_blocks(packing.columns) * 2 + first / kMaskQuarter;
    const uint32_t all = count == 32 ? ~0u : (1u << count) - 1;
    if (packed) packing.some[place] = true;
    if (packed != all) packing.holes[place] = true;
}

FLASH_HOST_DEVICE int64_t words_of(const MaskPacking& packing) {
    return packing.matrices * packing.rows * mask_words(packing.columns);
}

}  // namespace flash
