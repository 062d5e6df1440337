// What is added to a tile of scores: the bias, and -inf where a score does not exist.
#pragma once

#include <limits>

#include "../attention/score_matrix.h"
#include "element.h"

namespace flash::cpu::FLASH_CPU_ISA {

// tile[(query - queries.begin) * query_stride + (key - keys.begin) * key_stride]; one of the strides is 1,
// and where it is the queries' they are no more than a panel's.
template <class Element, class Real>
void fill_addend_tile(Real* tile, const ForwardProblem& problem, int64_t batch, int64_t head,
                      Interval queries, int64_t query_stride, Interval keys, int64_t key_stride) {
    constexpr Real hidden = -std::numeric_limits<Real>::infinity();
    const int64_t rows = queries.end - queries.begin, columns = keys.end - keys.begin;
    for (int64_t row = 0; row < rows; ++row) {
        Real* to = tile + row * query_stride;
        if (problem.bias.data) {
            const Element* bias = row_of<const Element>(problem.bias, batch, head, queries.begin + row);
            for (int64_t i = 0; i < columns; ++i) to[i * key_stride] = to_real(bias[keys.begin + i]);
        } else {
            for (int64_t i = 0; i < columns; ++i) to[i * key_stride] = 0;
        }
    }
    if (!problem.visible.data) return;
    // A word of each row's bits at a time; the inner loops go along the lanes.
    for (Position first = keys.begin; first < keys.end; first = first / 32 * 32 + 32) {
        const int64_t left = 32 - first % 32, in_word = keys.end - first < left ? keys.end - first : left;
        const auto word_of = [&](int64_t row) {
            const auto* bits = row_of<const uint32_t>(problem.visible, batch, head, queries.begin + row);
            return bits[first / 32] >> first % 32;
        };
        Real* corner = tile + (first - keys.begin) * key_stride;
        if (query_stride == 1) {
            uint32_t words[kMicroColumns<Real>];
            for (int64_t row = 0; row < rows; ++row) words[row] = word_of(row);
            for (int64_t i = 0; i < in_word; ++i, corner += key_stride)
                for (int64_t row = 0; row < rows; ++row)
                    corner[row] = words[row] >> i & 1 ? corner[row] : hidden;
        } else {
            for (int64_t row = 0; row < rows; ++row, corner += query_stride) {
                const uint32_t word = word_of(row);
                for (int64_t i = 0; i < in_word; ++i) corner[i] = word >> i & 1 ? corner[i] : hidden;
            }
        }
    }
}

}  // namespace flash::cpu::FLASH_CPU_ISA
