// Which keys a query sees. Every mask here is an interval of keys whose two ends never decrease with the
// query; the tile schedule of both passes follows from that alone (tile_schedule.h).
//
// Bottom-right alignment: query i and key j meet on the diagonal where j - i = Sk - Sq, so that the last
// query sees the last key. Query i sees j - i in [(Sk - Sq) - left, (Sk - Sq) + right]; causal is right = 0.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "sequence.h"

namespace flash {

struct Interval {
    Position begin, end;  // [begin, end); empty if begin >= end

    FLASH_HOST_DEVICE constexpr Interval() : begin(0), end(0) {}
    FLASH_HOST_DEVICE constexpr Interval(int64_t begin, int64_t end)
        : begin(Position(begin)), end(Position(end)) {}

    FLASH_HOST_DEVICE bool contains(Position position) const { return begin <= position && position < end; }
    FLASH_HOST_DEVICE bool empty() const { return begin >= end; }
};

FLASH_HOST_DEVICE Interval intersection(Interval a, Interval b) {
    return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

struct Mask {
    Position seqlen_q, seqlen_k;
    Position left, right;  // -1: unbounded

    FLASH_HOST_DEVICE Mask(const ForwardProblem& problem, const Sequence& sequence)
        : seqlen_q(sequence.seqlen_q),
          seqlen_k(sequence.seqlen_k),
          left(Position(problem.window_left)),
          right(Position(problem.window_right)) {}

    FLASH_HOST_DEVICE Position diagonal() const { return seqlen_k - seqlen_q; }

    FLASH_HOST_DEVICE Interval keys_of(Position query) const {
        const Position center = query + diagonal();
        return {left < 0 ? 0 : clamp(center - left, seqlen_k),
                right < 0 ? seqlen_k : clamp(center + right + 1, seqlen_k)};
    }

    FLASH_HOST_DEVICE Interval queries_of(Position key) const {
        const Position center = key - diagonal();
        return {right < 0 ? 0 : clamp(center - right, seqlen_q),
                left < 0 ? seqlen_q : clamp(center + left + 1, seqlen_q)};
    }

  private:
    FLASH_HOST_DEVICE static Position clamp(Position position, Position length) {
        return position < 0 ? 0 : position < length ? position : length;
    }
};

}  // namespace flash
