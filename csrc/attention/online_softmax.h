// Softmax of a row whose scores arrive tile by tile (FlashAttention, Algorithm 1 lines 10-13; arXiv
// 1805.02867): the running maximum and sum, and the rules for rows that have seen nothing yet or never will.
#pragma once

#include <limits>

#include "host_device.h"

namespace flash {

template <class Math>
struct OnlineSoftmax {
    using Real = typename Math::Real;
    using Value = typename Math::Value;

    Value row_max;  // in the unit of Math::exponential; -inf until a visible score arrives
    Value row_sum;  // of exponential(score - row_max)

    FLASH_HOST_DEVICE OnlineSoftmax() : row_max(minus_infinity()), row_sum(Math::broadcast(Real(0))) {}

    FLASH_HOST_DEVICE static Value minus_infinity() {
        return Math::broadcast(-std::numeric_limits<Real>::infinity());
    }

    // Takes the next tile's maximum; returns the factor for what was accumulated under the old maximum. A NaN
    // score is no maximum: it reaches the sum, and so the output, through its probability.
    FLASH_HOST_DEVICE Value update(Value tile_max) {
        const Value old_max = row_max;
        row_max = Math::select(tile_max > old_max, tile_max, old_max);
        const Value rescale = Math::exponential(old_max - reference());
        row_sum = row_sum * rescale;
        return rescale;
    }

    FLASH_HOST_DEVICE bool settled() const { return row_max != -std::numeric_limits<Real>::infinity(); }

    // The maximum, or 0 where all is masked so far: -inf - (-inf) would be NaN.
    FLASH_HOST_DEVICE Value reference() const {
        return Math::select(row_max == minus_infinity(), Math::broadcast(Real(0)), row_max);
    }

    FLASH_HOST_DEVICE void add(Value tile_sum) { row_sum = row_sum + tile_sum; }

    // Factor that turns accumulated output into the softmax average; 0 for a row without a visible key.
    FLASH_HOST_DEVICE Value normalizer() const {
        const Value zero = Math::broadcast(Real(0));
        return Math::select(row_sum == zero, zero, Math::reciprocal(row_sum));
    }

    // Natural logarithm of the summed exponentials; -inf for a row without a visible key. natural: what one
    // unit of the scores is in natural units, where their scale was rounded after log2(e) went into it.
    template <class Factor = double>
    FLASH_HOST_DEVICE Value log_sum_exp(Factor natural = Factor(1 / Math::unit)) const {
        return Math::select(row_sum == Math::broadcast(Real(0)), minus_infinity(),
                            Math::plus_log(row_max, natural, row_sum));
    }
};

}  // namespace flash
