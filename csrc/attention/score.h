// What a dot product q.k passes through before the softmax, and the derivative of that:
//
//     capped = softcap * tanh(dot * scale / softcap)     or dot * scale without a cap
//     score  = capped - slope * |i + (Sk - Sq) - j|      (ALiBi, arXiv 2108.12409)
//
// Scores are kept in units of log 2 so that the softmax is exp2 of a difference.
#pragma once

#include "../problem.h"
#include "host_device.h"

namespace flash {

inline constexpr double kLog2e = 1.4426950408889634;
inline constexpr double kLn2 = 0.6931471805599453;

template <class Math>
struct ScoreTransform {
    using Real = typename Math::Real;
    using Value = typename Math::Value;

    Real scale;       // d(score) / d(dot) at 0, natural units
    Real inner;       // dot -> argument of tanh, or -> log2 units without a cap
    Real cap_log2;    // 0: no cap
    Real slope_log2;  // 0: no ALiBi

    FLASH_HOST_DEVICE ScoreTransform(const ForwardProblem& problem, int64_t batch, int64_t head)
        : scale(Real(problem.softmax_scale)),
          inner(Real(problem.softcap > 0 ? problem.softmax_scale / problem.softcap : problem.softmax_scale * kLog2e)),
          cap_log2(Real(problem.softcap * kLog2e)),
          slope_log2(problem.alibi_slopes
                         ? Real(problem.alibi_slopes[batch * problem.alibi_batch_stride + head] * kLog2e)
                         : Real(0)) {}

    FLASH_HOST_DEVICE bool is_linear() const { return cap_log2 == 0 && slope_log2 == 0; }

    // distance = |i + (Sk - Sq) - j|; it is read only with ALiBi.
    FLASH_HOST_DEVICE Value score_log2(Value dot, Value distance) const {
        Value score = dot * inner;
        if (cap_log2 != 0) score = Math::tanh(score) * cap_log2;
        if (slope_log2 != 0) score = score - distance * slope_log2;
        return score;
    }

    // d(score) / d(dot) in natural units: the factor that turns dP * P into the gradient of the dot product.
    FLASH_HOST_DEVICE Value derivative(Value dot) const {
        if (cap_log2 == 0) return Math::broadcast(scale);
        const Value tanh = Math::tanh(dot * inner);
        return (Math::broadcast(Real(1)) - tanh * tanh) * scale;
    }
};

}  // namespace flash
