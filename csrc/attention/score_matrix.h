// What is given for each score of a dense problem: an additive bias, and bits that say which scores exist. A
// bias of -inf hides its score as a bit of 0 does: the score is selected away, never added to.
#pragma once

#include "../problem.h"
#include "host_device.h"
#include "mask.h"

namespace flash {

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

}  // namespace flash
