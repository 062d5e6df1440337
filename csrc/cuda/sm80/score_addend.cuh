// A bias and the bits of an element mask as a warp meets them: at the scores that its fragment covers. A
// tile's are read from device memory once by each warp: a bias some time before it is needed, the bits where
// they are needed.
#pragma once

#include "../../attention/score_matrix.h"
#include "../any/rows.cuh"
#include "../any/visible_bits.cuh"
#include "../tile/fragment.h"
#include "../tile/gpu_math.h"

namespace flash::cuda::sm80 {

// `never` is false, which the compiler can't know: its basic block ends here. Within one, ptxas starts all it
// can and keeps the intermediate results in registers that it does not have.
__device__ __forceinline__ void end_block(bool never) {
    if (never) __trap();
}

// The bias of a fragment of scores, as it lies in memory.
template <DType dtype, class Scores>
struct BiasPart {
    typename ElementOf<dtype>::Pair pairs[Scores::rows][Scores::column_tiles];

    // In the unit of the scores; -inf hides one.
    __device__ __forceinline__ float at(int r, int column) const {
        const float2 pair = ElementOf<dtype>::to_floats(pairs[r][column / 2]);
        return (column % 2 ? pair.y : pair.x) * float(GpuMath::unit);
    }
};

// Of one head. Positions outside the matrix read its last row, and of the bias its last column: what lies
// there is masked anyway.
template <DType dtype>
struct ScoreAddend {
    using Element = ElementOf<dtype>;
    using Pair = typename Element::Pair;

    const typename Element::Bits* bias;  // row 0; nullptr: none
    VisibleBits visible;
    int bias_stride;  // of rows: a row has fewer than 2^30 keys
    bool paired;      // an even column and the next one can be one load
    Position last_query, last_key;

    ScoreAddend() = default;
    __device__ ScoreAddend(const ForwardProblem& problem, int64_t batch, int64_t head)
        : bias(problem.bias.data ? row_of<const typename Element::Bits>(problem.bias, batch, head, 0)
                                 : nullptr),
          visible(problem, batch, head),
          bias_stride(int(problem.bias.row_stride)),
          paired(reinterpret_cast<uintptr_t>(bias) % sizeof(Pair) == 0 && bias_stride % 2 == 0),
          last_query(Position(problem.seqlen_q) - 1),
          last_key(Position(problem.seqlen_k) - 1) {}

    // By the bias alone. For where it is rarely asked.
    __device__ __forceinline__ bool bias_hides(Position query, Position key) const {
        return bias &&
               Element::to_float(bias_row(query)[min(key, last_key)]) * float(GpuMath::unit) == -INFINITY;
    }

    // Of the fragment of scores whose corner is (query, key). All loads, or those of a row where each column
    // takes one, start before the first one is waited for.
    template <class Scores>
    __device__ __forceinline__ void load_bias(BiasPart<dtype, Scores>& part, Position query,
                                              Position key) const {
        const int first = key + Scores::column(0);
        if (paired && key + 8 * Scores::column_tiles - 1 <= last_key) {
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) {
                const auto* row = bias_row(query + Scores::row(r)) + first;
#pragma unroll
                for (int n = 0; n < Scores::column_tiles; ++n)
                    part.pairs[r][n] = __ldg(reinterpret_cast<const Pair*>(row + 8 * n));
            }
        } else {
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) {
                const auto* row = bias_row(query + Scores::row(r));
#pragma unroll
                for (int n = 0; n < Scores::column_tiles; ++n) {
                    const int j = first + 8 * n;
                    part.pairs[r][n] =
                        Element::pair_of(__ldg(row + min(j, last_key)), __ldg(row + min(j + 1, last_key)));
                }
                end_block(query < 0);
            }
        }
    }

  private:
    __device__ __forceinline__ const typename Element::Bits* bias_row(Position query) const {
        return bias + int64_t(min(query, last_query)) * bias_stride;
    }
};

}  // namespace flash::cuda::sm80
