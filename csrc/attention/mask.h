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
    int64_t begin, end;  // [begin, end); empty if begin >= end

    FLASH_HOST_DEVICE bool contains(int64_t position) const { return begin <= position && position < end; }
    FLASH_HOST_DEVICE bool empty() const { return begin >= end; }
};

FLASH_HOST_DEVICE Interval intersection(Interval a, Interval b) {
    return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

struct Mask {
    int64_t seqlen_q, seqlen_k;
    int64_t left, right;  // -1: unbounded

    FLASH_HOST_DEVICE Mask(const ForwardProblem& problem, const Sequence& sequence)
        : seqlen_q(sequence.seqlen_q),
          seqlen_k(sequence.seqlen_k),
          left(problem.window_left),
          right(problem.window_right) {}

    FLASH_HOST_DEVICE int64_t diagonal() const { return seqlen_k - seqlen_q; }

    FLASH_HOST_DEVICE Interval keys_of(int64_t query) const {
        const int64_t center = query + diagonal();
        return {left < 0 ? 0 : clamp(center - left, seqlen_k),
                right < 0 ? seqlen_k : clamp(center + right + 1, seqlen_k)};
    }

    FLASH_HOST_DEVICE Interval queries_of(int64_t key) const {
        const int64_t center = key - diagonal();
        return {right < 0 ? 0 : clamp(center - right, seqlen_q),
                left < 0 ? seqlen_q : clamp(center + left + 1, seqlen_q)};
    }

  private:
    FLASH_HOST_DEVICE static int64_t clamp(int64_t position, int64_t length) {
        return position < 0 ? 0 : position < length ? position : length;
    }
};

}  // namespace flash
