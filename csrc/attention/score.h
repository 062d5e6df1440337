// What a dot product q.k passes through before the softmax, and the derivative of that:
//
//     capped = softcap * tanh(dot * scale / softcap)     or dot * scale without a cap
//     score  = capped - slope * |i + (Sk - Sq) - j|      (ALiBi, arXiv 2108.12409)
//
// Scores are kept in the unit of the engine's exponential, Math::exponential: natural where it is exp, log 2
// where it is exp2 (one instruction on a GPU, but in float32 the rounding of log2(e) * score costs accuracy).
#pragma once

#include "../problem.h"
#include "host_device.h"

namespace flash {

template <class Math>
struct ScoreTransform {
    using Real = typename Math::Real;
    using Value = typename Math::Value;

    Real scale;  // d(score) / d(dot) at 0, natural units
    Real inner;  // dot -> argument of tanh, or -> score without a cap
    Real cap;    // 0: no cap
    Real slope;  // 0: no ALiBi

    FLASH_HOST_DEVICE ScoreTransform(const ForwardProblem& problem, int64_t batch, int64_t head)
        : scale(Real(problem.softmax_scale)),
          inner(Real(problem.softcap > 0 ? problem.softmax_scale / problem.softcap
                                         : problem.softmax_scale * Math::unit)),
          cap(Real(problem.softcap * Math::unit)),
          slope(slope_of(problem, batch, head)) {}

    FLASH_HOST_DEVICE static Real slope_of(const ForwardProblem& problem, int64_t batch, int64_t head) {
        if (!problem.alibi_slopes) return 0;
        return Real(problem.alibi_slopes[batch * problem.alibi_batch_stride + head] * Math::unit);
    }

    FLASH_HOST_DEVICE bool is_linear() const { return cap == 0 && slope == 0; }

    // distance = |i + (Sk - Sq) - j|; it is read only with ALiBi.
    FLASH_HOST_DEVICE Value score(Value dot, Value distance) const {
        Value result = dot * inner;
        if (cap != 0) result = Math::tanh(result) * cap;
        if (slope != 0) result = result - distance * slope;
        return result;
    }

    // d(score) / d(dot) in natural units: the factor that turns dP * P into the gradient of the dot product.
    FLASH_HOST_DEVICE Value derivative(Value dot) const {
        if (cap == 0) return Math::broadcast(scale);
        const Value tanh = Math::tanh(dot * inner);
        return (Math::broadcast(Real(1)) - tanh * tanh) * scale;
    }
};

}  // namespace flash
