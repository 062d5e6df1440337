// A tile of K or V rows as the left operand of a product over those rows: O^T += V^T P^T and dQ^T += K^T
// dS^T.
#pragma once

#include "operand_tile.h"
#include "parallel.h"
#include "score_walk.h"

namespace flash::cpu::FLASH_CPU_ISA {

// The matrix unit reads this operand by rows only, so there it is transposed, once a tile for all panels.
template <class Operand>
inline constexpr bool kTransposesStackedTiles = kHasMatrixUnit && std::is_same_v<Operand, Pair>;

template <class Operand>
class StackedTile {
    using Real = typename GemmTraits<Operand>::Real;
    static constexpr int64_t kStep = GemmTraits<Operand>::depth_per_step;
    static constexpr int64_t kSteps = kKeyTile / kStep;

  public:
    // plain: a tile of the same rows that is loaded before this one; it serves here too where operands don't
    // stack.
    StackedTile(int64_t head_dim, Carver& carver, Operand* plain = nullptr)
        : head_dim_(head_dim),
          columns_(round_up<int64_t>(head_dim, kLanes<Real>)),
          shared_(kStep == 1 && plain) {
        rows_ = shared_ ? plain : carver.take<Operand>(kSteps * columns_ + kMicroRows);
        if (kTransposesStackedTiles<Operand>)
            transposed_ = carver.take<Operand>((columns_ + kMicroRows) * kSteps);
    }

    // finite is checked for tiles with masked scores only: elsewhere NaN and infinity are everybody's.
    template <class Element>
    void load(const Element* from, int64_t row_stride, int64_t count, bool masked) {
        if (!shared_) load_stacked(rows_, from, row_stride, count, head_dim_, columns_);
        finite_ = !masked || all_finite(rows_, (count + kStep - 1) / kStep * columns_);
        if constexpr (kTransposesStackedTiles<Operand>)
            transpose(transposed_, kSteps, rows_, columns_, round_up((count + 1) / 2, int64_t(16)), columns_);
    }

    // sum[head_dim][lanes] += rows^T probabilities, over the span's rows; probabilities [steps][lanes].
    void add_product(Real* sum, const PanelSpan& span, const Operand* probabilities) const {
        constexpr int64_t lanes = Panel<Real>::lanes;
        const int64_t first = span.offset / kStep, steps = (span.count + kStep - 1) / kStep;
        const Operand* rows = rows_ + first * columns_;
        if (span.masked && !finite_)
            selecting_gemm<Probabilities::in_b>(head_dim_, lanes, steps, rows, columns_, probabilities, lanes,
                                                sum, lanes);
        else if constexpr (kTransposesStackedTiles<Operand>)
            gemm<Order::row_major>(head_dim_, lanes, steps, transposed_ + first, kSteps, probabilities, lanes,
                                   sum, lanes, Result::accumulate);
        else
            gemm<Order::column_major>(head_dim_, lanes, steps, rows, columns_, probabilities, lanes, sum,
                                      lanes, Result::accumulate);
    }

  private:
    int64_t head_dim_, columns_;
    bool shared_, finite_ = true;
    Operand* rows_;                  // [kSteps][columns]
    Operand* transposed_ = nullptr;  // [columns][kSteps]
};

}  // namespace flash::cpu::FLASH_CPU_ISA
