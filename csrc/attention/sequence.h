// Where batch entry b's queries and keys lie: the only reader of cu_seqlens and of a cache's lengths.
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
    int64_t key_entry;  // whose batch stride that is
};

// An engine that reads offsets where nobody has checked them stays within the tensor's rows.
FLASH_HOST_DEVICE Position offset_of(const int32_t* offsets, int64_t batch, int64_t rows) {
    const Position offset = offsets[batch];
    return offset < 0 ? 0 : offset < rows ? offset : Position(rows);
}

// Where neither sequences are packed nor the cache says how long they are.
FLASH_HOST_DEVICE bool fills_batch(const ForwardProblem& problem) {
    const KeyCache& cache = problem.cache;
    return !problem.cu_seqlens_q && !problem.cu_seqlens_k && !cache.seqlens && !cache.left_padding &&
           !cache.entry;
}

FLASH_HOST_DEVICE Sequence whole_entry(const ForwardProblem& problem, int64_t batch) {
    return {0, 0, Position(problem.seqlen_q), Position(problem.seqlen_k), batch};
}

FLASH_HOST_DEVICE Sequence sequence_of(const ForwardProblem& problem, int64_t batch) {
    Sequence sequence = whole_entry(problem, batch);
    if (problem.cu_seqlens_q) {
        const Position begin = offset_of(problem.cu_seqlens_q, batch, problem.rows_q);
        const Position end = offset_of(problem.cu_seqlens_q, batch + 1, problem.rows_q);
        sequence.first_query_row = begin;
        sequence.seqlen_q = end > begin ? end - begin : 0;
    }
    if (problem.cu_seqlens_k) {
        const Position begin = offset_of(problem.cu_seqlens_k, batch, problem.rows_k);
        const Position end = offset_of(problem.cu_seqlens_k, batch + 1, problem.rows_k);
        sequence.first_key_row = begin;
        sequence.seqlen_k = end > begin ? end - begin : 0;
    }
    const KeyCache& cache = problem.cache;
    if (cache.seqlens) sequence.seqlen_k = offset_of(cache.seqlens, batch, problem.rows_k);
    if (cache.left_padding) {
        const Position padding = offset_of(cache.left_padding, batch, sequence.seqlen_k);
        sequence.first_key_row = padding;
        sequence.seqlen_k -= padding;
    }
    if (cache.entry) sequence.key_entry = offset_of(cache.entry, batch, cache.entries - 1);
    return sequence;
}

// The rows of packed tensors past the last sequence, which come back as zeros.
FLASH_HOST_DEVICE Sequence unowned_rows(const ForwardProblem& problem) {
    const Position queries = offset_of(problem.cu_seqlens_q, problem.batch, problem.rows_q);
    const Position keys =
        problem.cu_seqlens_k ? offset_of(problem.cu_seqlens_k, problem.batch, problem.rows_k) : 0;
    return {queries, keys, Position(problem.rows_q - queries), Position(problem.rows_k - keys), 0};
}

// Packed sequences cut into tiles of `tile` rows, with no host or other kernel to count them: sequence b's
// tiles are given the slots from cu_seqlens[b] / tile + b on. That leaves room for all of them, since
// floor((c + n) / tile) - floor(c / tile) + 1 >= ceil(n / tile), and a slot's sequence is found by bisection.
// The rows past the last sequence count as sequence `batch`.
struct PackedTiles {
    const int32_t* cu_seqlens;
    int64_t batch, rows;
    Position tile;

    FLASH_HOST_DEVICE int64_t slots() const { return rows / tile + batch + 1; }
    FLASH_HOST_DEVICE int64_t first_slot(int64_t sequence) const {
        return offset_of(cu_seqlens, sequence, rows) / tile + sequence;
    }
    FLASH_HOST_DEVICE int64_t sequence_of_slot(int64_t slot) const {
        return last_sequence([&](int64_t sequence) { return first_slot(sequence) <= slot; });
    }
    FLASH_HOST_DEVICE int64_t sequence_of_row(int64_t row) const {
        return last_sequence([&](int64_t sequence) { return offset_of(cu_seqlens, sequence, rows) <= row; });
    }

  private:
    // The last one that begins early enough, or 0.
    template <class Begins>
    FLASH_HOST_DEVICE int64_t last_sequence(const Begins& begins) const {
        int64_t first = 0, last = batch;
        while (first < last) {
            const int64_t middle = (first + last + 1) / 2;
            if (begins(middle))
                first = middle;
            else
                last = middle - 1;
        }
        return first;
    }
};

// Numbers of rows where copies of 16 bytes reach them: a sequence's first one is at a multiple of 4.
struct AlignedRows {
    const int32_t* cu_seqlens;  // nullptr: dense, each batch entry begins at 0
    int64_t batch, rows;

    FLASH_HOST_DEVICE int64_t count() const { return 4 * (cu_seqlens ? quads().slots() : (rows + 3) / 4); }
    FLASH_HOST_DEVICE int64_t first(int64_t sequence) const {
        return cu_seqlens ? 4 * quads().first_slot(sequence) : 0;
    }
    // Of the tensor's row; negative if it is in no sequence.
    FLASH_HOST_DEVICE int64_t place(int64_t row) const {
        if (!cu_seqlens) return row;
        const int64_t sequence = quads().sequence_of_row(row);
        const int64_t within = row - offset_of(cu_seqlens, sequence, rows);
        return within < 0 ? -1 : first(sequence) + within;
    }

  private:
    FLASH_HOST_DEVICE PackedTiles quads() const { return {cu_seqlens, batch, rows, 4}; }
};

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
