// A bias and the bits of an element mask as a warp meets them: at the scores that its fragment covers. They
// are read from device memory where they are needed; a tile's are read once by each warp.
#pragma once

#include "../../attention/score_matrix.h"
#include "../any/rows.cuh"
#include "../tile/fragment.h"
#include "../tile/gpu_math.h"

namespace flash::cuda::sm80 {

// `never` is false, which the compiler can't know: its basic block ends here. Within one, ptxas starts all it
// can and keeps the intermediate results in registers that it does not have.
__device__ __forceinline__ void end_block(bool never) {
    if (never) __trap();
}

// Of one head. Positions outside the matrix read its last row, and of the bias its last column: what lies
// there is masked anyway.
template <DType dtype>
struct ScoreAddend {
    using Element = ElementOf<dtype>;

    const typename Element::Bits* bias;  // row 0; nullptr: none
    const uint32_t* visible;             // row 0; nullptr: all
    int bias_stride, visible_stride;     // of rows: a row has fewer than 2^30 keys
    Position last_query, last_key;

    ScoreAddend() = default;
    __device__ ScoreAddend(const ForwardProblem& problem, int64_t batch, int64_t head)
        : bias(problem.bias.data ? row_of<const typename Element::Bits>(problem.bias, batch, head, 0)
                                 : nullptr),
          visible(problem.visible.data ? row_of<const uint32_t>(problem.visible, batch, head, 0) : nullptr),
          bias_stride(int(problem.bias.row_stride)),
          visible_stride(int(problem.visible.row_stride)),
          last_query(Position(problem.seqlen_q) - 1),
          last_key(Position(problem.seqlen_k) - 1) {}

    // In the unit of the scores; -inf hides one.
    __device__ __forceinline__ float bias_of(Position query, Position key) const {
        const auto* row = bias + int64_t(min(query, last_query)) * bias_stride;
        return Element::to_float(row[min(key, last_key)]) * float(GpuMath::unit);
    }

    // By the bias alone. For where it is rarely asked.
    __device__ __forceinline__ bool bias_hides(Position query, Position key) const {
        return bias && bias_of(query, key) == -INFINITY;
    }

    // Adds the bias to the fragment of scores whose corner is (query, key). A hidden score becomes -inf,
    // whatever it was.
    template <class Scores>
    __device__ __forceinline__ void add_bias(Scores& s, Position query, Position key) const {
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            // Opaque: addresses that are kept from tile to tile would be registers.
            const auto* row =
                bias + int64_t(min(int(opaque(query)) + Scores::row(r), last_query)) * bias_stride;
            const int first = int(opaque(key)) + Scores::column(0);
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const int j = first + column / 2 * 8 + column % 2;
                const float x = Element::to_float(row[min(j, last_key)]) * float(GpuMath::unit);
                s.at(r, column) = x == -INFINITY ? -INFINITY : s.at(r, column) + x;
                if (column % 4 == 3) end_block(query < 0);
            }
        }
    }

    // Calls hide(r, column) for what the bits hide of the fragment; key is a multiple of its width, or of 32.
    template <class Scores, class Hide>
    __device__ __forceinline__ void each_hidden(Position query, Position key, const Hide& hide) const {
        constexpr int in_word = Scores::column_tiles < 4 ? Scores::column_tiles : 4;  // 8 keys each
        static_assert(Scores::column_tiles % in_word == 0);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const int row = min(int(opaque(query)) + Scores::row(r), last_query);
            const uint32_t* words = visible + int64_t(row) * visible_stride + key / 32;
#pragma unroll
            for (int n = 0; n < Scores::column_tiles; n += in_word) {
                const uint32_t bits = words[n / 4] >> (key % 32 + lane_index() % 4 * 2);
#pragma unroll
                for (int i = 0; i < 2 * in_word; ++i)
                    if (!(bits & 1u << (i / 2 * 8 + i % 2))) hide(r, 2 * n + i);
            }
        }
    }
};

}  // namespace flash::cuda::sm80
