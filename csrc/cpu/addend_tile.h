// What is added to a tile of scores: the bias, and -inf where a score does not exist.
#pragma once

#include <limits>

#include "../attention/score_matrix.h"
#include "element.h"

namespace flash::cpu::FLASH_CPU_ISA {

// tile[(query - queries.begin) * query_stride + (key - keys.begin) * key_stride]
template <class Element, class Real>
void fill_addend_tile(Real* tile, const ForwardProblem& problem, int64_t batch, int64_t head,
                      Interval queries, int64_t query_stride, Interval keys, int64_t key_stride) {
    for (int64_t query = queries.begin; query < queries.end; ++query, tile += query_stride) {
        if (problem.bias.data) {
            const Element* bias = row_of<const Element>(problem.bias, batch, head, query) + keys.begin;
            for (int64_t i = 0; i < keys.end - keys.begin; ++i) tile[i * key_stride] = to_real(bias[i]);
        } else {
            for (int64_t i = 0; i < keys.end - keys.begin; ++i) tile[i * key_stride] = 0;
        }
        if (!problem.visible.data) continue;
        const uint32_t* bits = row_of<const uint32_t>(problem.visible, batch, head, query);
        for (Position key = keys.begin; key < keys.end; ++key)
            if (!is_visible(bits, key))
                tile[(key - keys.begin) * key_stride] = -std::numeric_limits<Real>::infinity();
    }
}

}  // namespace flash::cpu::FLASH_CPU_ISA
