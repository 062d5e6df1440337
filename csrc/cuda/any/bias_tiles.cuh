// The gradient of a bias is summed tile by tile: which tile a block owns, and who reads it.
#pragma once

#include <algorithm>

#include "../../attention/sequence.h"
#include "../division.h"

namespace flash::cuda {

class BiasTiles {
  public:
    // Where it begins.
    struct Tile {
        Position query, key;
        int head, batch;
    };

    BiasTiles(const BackwardProblem& problem, int query_tile, int key_tile)
        : BiasTiles(query_tile, key_tile, problem.dbias.batch_stride ? problem.forward.batch : 1,
                    problem.dbias.head_stride ? problem.forward.heads_q : 1,
                    problem.dbias.row_stride ? tiles(problem.forward.seqlen_q, query_tile) : 1,
                    tiles(problem.forward.seqlen_k, key_tile)) {}

    FLASH_HOST_DEVICE int64_t count() const { return count_; }

    __device__ __forceinline__ Tile operator()(uint32_t index) const {
        const uint32_t above = key_tiles_.quotient(index), head = query_tiles_.quotient(above);
        return {Position(query_tiles_.remainder(above)) * query_tile_,
                Position(key_tiles_.remainder(index)) * key_tile_, int(heads_.remainder(head)),
                int(heads_.quotient(head))};
    }

    // Calls visit(batch, head, query) of all that read the tile, always in the same order: batch entries,
    // heads, and, where rows share the bias, tiles of queries.
    template <class Visit>
    __device__ __forceinline__ void each_reader(const ForwardProblem& problem, const Tile& tile,
                                                const Visit& visit) const {
        const int batch_end = int(problem.batch), head_end = int(problem.heads_q);
        const uint32_t query_end = uint32_t(problem.seqlen_q),
                       query_step = query_tiles_.divisor * query_tile_;
#pragma unroll 1
        for (int batch = tile.batch; batch < batch_end; batch += batches_)
#pragma unroll 1
            for (int head = tile.head; head < head_end; head += heads_.divisor)
#pragma unroll 1
                for (uint32_t query = tile.query; query < query_end; query += query_step)
                    visit(batch, head, Position(query));
    }

  private:
    BiasTiles(int query_tile, int key_tile, int64_t batches, int64_t heads, int64_t query_tiles,
              int64_t key_tiles)
        : count_(batches * heads * query_tiles * key_tiles),
          batches_(uint32_t(batches)),
          heads_(at_least_1(heads)),
          query_tiles_(at_least_1(query_tiles)),
          key_tiles_(at_least_1(key_tiles)),
          query_tile_(query_tile),
          key_tile_(key_tile) {}

    static int64_t tiles(int64_t rows, int tile) { return (rows + tile - 1) / tile; }
    static uint32_t at_least_1(int64_t count) { return uint32_t(std::max<int64_t>(count, 1)); }

    int64_t count_;
    uint32_t batches_;  // of the bias, as the next three: 1 where shared
    Division heads_, query_tiles_, key_tiles_;
    Position query_tile_, key_tile_;
};

}  // namespace flash::cuda
