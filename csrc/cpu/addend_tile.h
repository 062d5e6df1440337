// What is added to a tile of scores: the bias, and -inf where a score does not exist; and which of its scores
// need not be computed.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "../attention/score_matrix.h"
#include "element.h"
#include "score_walk.h"

namespace flash::cpu::FLASH_CPU_ISA {

// Takes from a panel's span, whose lanes are `rows`, the half of the tile's block that is hidden from its
// half of the block's rows. Returns whether bits hide scores of what is left. Of what keep_shown does this is
// cheap enough for masks that hide a little everywhere.
template <int64_t kStep, class Tile>
bool keep_listed(PanelSpan& span, const Tile& tile, Interval rows) {
    const int row_half = rows.begin / kMaskQuarter % 2;
    const Quarter left = quarter_of(tile.listed, row_half, 0), right = quarter_of(tile.listed, row_half, 1);
    const int64_t middle = block_of(tile.listed) * kMaskBlock + kMaskQuarter - tile.positions.begin;
    if (middle % kStep != 0) return true;
    int64_t begin = span.offset, end = begin + span.count;
    if (left == Quarter::hidden) begin = std::max(begin, middle);
    if (right == Quarter::hidden) end = std::min(end, middle);
    span.offset = begin;
    span.count = end - begin;
    return (begin < middle && left != Quarter::seen) || (end > middle && right != Quarter::seen);
}

// Takes from a panel's span the keys at both ends that bits hide from all its queries, in whole steps:
// blocks, by which a mask is listed, are coarse, and under a diagonal half of each is hidden. Returns whether
// bits hide scores of what is left.
template <int64_t kStep>
bool keep_shown(PanelSpan& span, Interval tile, const ForwardProblem& problem, int64_t batch, int64_t head,
                Interval queries) {
    std::array<bool, kKeyTile> some, all;  // of the queries see a key of the span
    const Position first_key = tile.begin + Position(span.offset);
    for (Position i = 0; i < span.count;) {
        const Position word = (first_key + i) / 32;
        uint32_t in_some = 0, in_all = ~uint32_t(0);
        for (Position query = queries.begin; query < queries.end; ++query) {
            const uint32_t shown = row_of<const uint32_t>(problem.visible, batch, head, query)[word];
            in_some |= shown;
            in_all &= shown;
        }
        for (; i < span.count && (first_key + i) / 32 == word; ++i) {
            some[size_t(i)] = in_some >> (first_key + i) % 32 & 1;
            all[size_t(i)] = in_all >> (first_key + i) % 32 & 1;
        }
    }
    int64_t first = 0, end = span.count;
    while (first < end && !some[size_t(first)]) ++first;
    while (end > first && !some[size_t(end - 1)]) --end;
    first = first / kStep * kStep;
    end = std::min((end + kStep - 1) / kStep * kStep, span.count);
    span.offset += first;
    span.count = end - first;
    return std::find(all.begin() + first, all.begin() + end, false) != all.begin() + end;
}

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
