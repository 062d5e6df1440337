// What is given for each score of a dense problem: an additive bias, and bits that say which scores exist. A
// bias of -inf hides its score as a bit of 0 does: the score is selected away, never added to.
#pragma once

#include "../problem.h"
#include "block_mask.h"
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

// The list of one block row of queries, or of keys, when all words are packed.
class MaskList {
  public:
    FLASH_HOST_DEVICE static int64_t count_of(const MaskPacking& packing) {
        return packing.matrices * (mask_blocks(packing.queries) + mask_blocks(packing.columns));
    }

    FLASH_HOST_DEVICE MaskList(const MaskPacking& packing, int64_t index)
        : packing_(packing), rows_(mask_blocks(packing.queries)), columns_(mask_blocks(packing.columns)) {
        matrix_ = index / (rows_ + columns_);
        row_ = index % (rows_ + columns_);
        of_queries_ = row_ < rows_;
        if (!of_queries_) row_ -= rows_;
    }

    FLASH_HOST_DEVICE int64_t capacity() const { return of_queries_ ? columns_ : rows_; }
    FLASH_HOST_DEVICE int32_t* indices() const {
        return of_queries_ ? packing_.key_indices + (matrix_ * rows_ + row_) * columns_
                           : packing_.query_indices + (matrix_ * columns_ + row_) * rows_;
    }
    FLASH_HOST_DEVICE int32_t& count() const {
        return of_queries_ ? packing_.key_counts[matrix_ * rows_ + row_]
                           : packing_.query_counts[matrix_ * columns_ + row_];
    }

    // As it is to be listed; negative if nothing of it is visible.
    FLASH_HOST_DEVICE int32_t block(int64_t column) const {
        int32_t listed = int32_t(column);
        bool any = false;
        for (int r = 0; r < 2; ++r)
            for (int c = 0; c < 2; ++c) {
                const int64_t place = of_queries_ ? quarter(2 * row_ + r, 2 * column + c)
                                                  : quarter(2 * column + c, 2 * row_ + r);
                const bool some = packing_.some[place], holes = packing_.holes[place];
                const Quarter kind = !holes ? Quarter::seen : some ? Quarter::partly_seen : Quarter::hidden;
                listed |= int32_t(kind) << (kBlockBits + 4 * r + 2 * c);
                any |= some;
            }
        return any ? listed : -1;
    }

  private:
    FLASH_HOST_DEVICE int64_t quarter(int64_t row, int64_t column) const {
        const int64_t rows = 2 * mask_blocks(packing_.rows);
        return (matrix_ * rows + (packing_.rows == 1 ? 0 : row)) * 2 * columns_ + column;
    }

    const MaskPacking& packing_;
    const int64_t rows_, columns_;
    int64_t matrix_, row_;
    bool of_queries_;
};

}  // namespace flash
