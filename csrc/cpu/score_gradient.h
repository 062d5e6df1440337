// From the recomputed dot products and dP to P and dS, the elementwise heart of the backward
// (docs/algorithm.md):
//
//     P = exp(S - lse)        dS = P o (dropout(dP) - delta) o d(score)/d(dot)
//
// on tiles whose lanes are a panel. P is masked before it is used and dS by selection, so that neither a
// column past the end nor a NaN behind the mask gets through.
#pragma once

#include <limits>

#include "../attention/score.h"
#include "element.h"
#include "score_walk.h"

namespace flash::cpu::FLASH_CPU_ISA {

// lse and delta in the order of the rows or lanes they belong to.
template <class Real>
struct SoftmaxStatistics {
    Real* lse;
    Real* delta;

    void load(const BackwardProblem& problem, int64_t batch, int64_t row, int64_t head, int64_t count) const {
        const Real* row_lse = statistics_of<Real>(problem.forward.lse, batch, row, head);
        const Real* row_delta = statistics_of<Real>(problem.delta, batch, row, head);
        for (int64_t i = 0; i < count; ++i) {
            lse[i] = row_lse[i];
            delta[i] = row_delta[i];
        }
    }
};

enum class Lanes { queries, keys };

template <class Real>
struct ScoreTile {
    Real* dots;           // [rows][lanes]: in q.k, out P as operands (with dropout)
    Real* gradients;      // [rows][lanes]: in dP, out dS as operands
    const Real* keep;     // [rows][lanes] dropout factors, or nullptr
    const Real* addends;  // [rows][lanes], or nullptr
    Real* bias_gradient;  // [rows][lanes], written unless nullptr
    int64_t first;        // position of row 0 on its axis
};

template <Lanes lanes, class Operand, class Real>
void differentiate(const ScoreTile<Real>& tile, const Panel<Real>& panel, const PanelSpan& span,
                   const ScoreTransform<VectorMath<Real>>& transform,
                   const SoftmaxStatistics<Real>& statistics) {
    using Math = VectorMath<Real>;
    constexpr int64_t kPanel = Panel<Real>::lanes, kStep = GemmTraits<Operand>::depth_per_step;
    const Vector<Real> zero{};
    for (int v = 0; v < kMicroVectors; ++v) {
        const int64_t column = v * kLanes<Real>;
        for (int64_t row = 0; row < span.count; row += kStep) {
            Vector<Real> probabilities[kStep], gradients[kStep];
            for (int64_t i = 0; i < kStep; ++i) {
                probabilities[i] = gradients[i] = zero;
                if (row + i >= span.count) continue;
                const int64_t at = (row + i) * kPanel + column;
                const Vector<Real> dot = load<Vector<Real>>(tile.dots + at);
                Vector<Real> lse, delta;
                if constexpr (lanes == Lanes::queries) {
                    lse = load<Vector<Real>>(statistics.lse + column);
                    delta = load<Vector<Real>>(statistics.delta + column);
                } else {
                    lse = broadcast(statistics.lse[row + i]);
                    delta = broadcast(statistics.delta[row + i]);
                }
                const int64_t position = tile.first + row + i;
                Vector<Real> score = transform.is_linear()
                                         ? dot * transform.inner
                                         : transform.score(dot, panel.distance(v, position));
                LaneMask<Real> seen = span.masked ? panel.sees(v, position) : ~LaneMask<Real>{};
                if (tile.addends) {
                    const Vector<Real> addend = load<Vector<Real>>(tile.addends + at);
                    seen &= addend != -std::numeric_limits<Real>::infinity() + Vector<Real>{};
                    score += addend;
                }
                Vector<Real> p = Math::exponential(score - lse), dp = load<Vector<Real>>(tile.gradients + at);
                Vector<Real> dropped = p;
                if (tile.keep) {
                    const Vector<Real> keep = load<Vector<Real>>(tile.keep + at);
                    dp *= keep;
                    dropped *= keep;
                }
                const Vector<Real> ds = p * (dp - delta);
                probabilities[i] = Math::select(seen, dropped, zero);
                gradients[i] = Math::select(seen, ds * transform.derivative(dot), zero);
                if (tile.bias_gradient) store(tile.bias_gradient + at, Math::select(seen, ds, zero));
            }
            store_step(reinterpret_cast<Operand*>(tile.dots) + row / kStep * kPanel + column, probabilities);
            store_step(reinterpret_cast<Operand*>(tile.gradients) + row / kStep * kPanel + column, gradients);
        }
    }
}

}  // namespace flash::cpu::FLASH_CPU_ISA
