// Where batch entry b's queries and keys lie: the only reader of cu_seqlens.
#pragma once

#include "../problem.h"
#include "host_device.h"

namespace flash {

// A query or key within its sequence. Lengths stay below 2^30, so sums of two positions fit; rows in memory,
// and all addresses, count in 64 bits.
using Position = int32_t;

struct Sequence {
    int64_t first_query_row;  // row of query 0 in q, out, dq, ... after the batch stride
    int64_t first_key_row;    // row of key 0 in k, v, dk, dv after the batch stride
    Position seqlen_q;
    Position seqlen_k;
};

FLASH_HOST_DEVICE Sequence sequence_of(const ForwardProblem& problem, int64_t batch) {
    Sequence sequence{0, 0, Position(problem.seqlen_q), Position(problem.seqlen_k)};
    if (problem.cu_seqlens_q) {
        sequence.first_query_row = problem.cu_seqlens_q[batch];
        sequence.seqlen_q = problem.cu_seqlens_q[batch + 1] - problem.cu_seqlens_q[batch];
    }
    if (problem.cu_seqlens_k) {
        sequence.first_key_row = problem.cu_seqlens_k[batch];
        sequence.seqlen_k = problem.cu_seqlens_k[batch + 1] - problem.cu_seqlens_k[batch];
    }
    return sequence;
}

// First element of row `row` (counted from the tensor's first row of that batch entry) of one head.
template <class Element>
FLASH_HOST_DEVICE Element* row_of(const TensorView& tensor, int64_t batch, int64_t row, int64_t head) {
    return static_cast<Element*>(tensor.data) + batch * tensor.batch_stride + row * tensor.row_stride +
           head * tensor.head_stride;
}

template <class Real>
FLASH_HOST_DEVICE Real* statistics_of(const RowStatistics& statistics, int64_t batch, int64_t row,
                                      int64_t head) {
    return static_cast<Real*>(statistics.data) + batch * statistics.batch_stride +
           head * statistics.head_stride + row;
}

}  // namespace flash
