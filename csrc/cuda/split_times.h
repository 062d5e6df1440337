// How many blocks should share the keys of a tile of queries: models of how long that takes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernel.h"

namespace flash::cuda {

// The least of 1 to `most` of whose time the shortest one is that many percent, or more:
// each one more adds to what is combined.
template <class Time>
int fewest_splits(int64_t most, int64_t percent, const Time& time) {
    int64_t best = time(1);
    for (int64_t splits = 2; splits <= most; ++splits) best = std::min(best, time(splits));
    int64_t splits = 1;
    while (time(splits) * percent > best * 100) ++splits;
    return int(splits);
}

// Where a multiprocessor's one block does one part of the keys after the other, as Hopper's for few queries.
struct TurnTimes {
    int64_t blocks, key_tiles;  // of queries; of keys
    int64_t multiprocessors;
    int64_t slowness;  // half the time that a block takes for a tile of keys
    int64_t readers;   // so many blocks that take 2 read as fast as the memory can

    int64_t of_tiles(int64_t tiles, int64_t busy) const {
        return tiles * std::max(slowness * readers, 2 * busy);
    }
    int64_t operator()(int64_t splits) const {
        // To begin and to end a part takes as long as a tile of keys, to combine them as long as eight.
        const int64_t tiles = (key_tiles + splits - 1) / splits + 1, parts = blocks * splits;
        return parts / multiprocessors * of_tiles(tiles, multiprocessors) +
               (parts % multiprocessors ? of_tiles(tiles, parts % multiprocessors) : 0) +
               (splits > 1 ? 16 * readers : 0);
    }
    int splits() const {
        return blocks == 0 ? 1 : fewest_splits(std::min<int64_t>(kMostSplits, key_tiles), 97, *this);
    }
};

}  // namespace flash::cuda
