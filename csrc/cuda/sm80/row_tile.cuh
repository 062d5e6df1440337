// Which rows a block owns: a tile of one head's queries (forward) or keys (backward).
#pragma once

#include "../../attention/block_mask.h"
#include "../../attention/mask.h"
#include "../../attention/sequence.h"
#include "../division.h"

namespace flash::cuda::sm80 {

struct RowTile {
    int64_t batch, head;
    int64_t key_head;
    int group;  // query heads of a key head
    Sequence sequence;
    Interval rows;   // empty: nothing to do
    Position first;  // of the tile, a multiple of 16 not after the first row
    bool unowned;    // rows past the last packed sequence: they get zeros
};

// Cuts one axis of a problem into tiles, on the host; a block finds its own with no division. Blocks count
// tiles first, then heads, then batch entries, so that blocks that run together read the same keys and
// values.
class RowTiling {
  public:
    static RowTiling of_queries(const ForwardProblem& problem, Position tile) {
        return RowTiling(problem, true, tile, problem.cu_seqlens_q ? problem.rows_q : problem.seqlen_q,
                         problem.heads_q, problem.cu_seqlens_q, problem.key_blocks);
    }
    static RowTiling of_keys(const ForwardProblem& problem, Position tile) {
        return RowTiling(problem, false, tile, problem.cu_seqlens_k ? problem.rows_k : problem.seqlen_k,
                         problem.heads_k, problem.cu_seqlens_k, problem.query_blocks);
    }

    int64_t count() const { return count_; }

    // descending: a head's last tile first, which under a causal mask is the longest one of queries.
    __device__ __forceinline__ RowTile operator()(uint32_t index, const ForwardProblem& problem,
                                                  bool descending) const {
        const uint32_t of_heads = per_head_.quotient(index);
        uint32_t slot = per_head_.remainder(index);
        if (descending) slot = per_head_.divisor - 1 - slot;
        const uint32_t of_batch = heads_.quotient(of_heads), head = heads_.remainder(of_heads);
        RowTile tile;
        tile.head = head;
        tile.group = int(group_.divisor);
        tile.key_head = queries_ ? group_.quotient(head) : head;
        tile.batch = packed_.cu_seqlens ? packed_.sequence_of_slot(slot) : of_batch;
        tile.unowned = packed_.cu_seqlens && tile.batch == packed_.batch;
        tile.sequence = tile.unowned ? unowned_rows(problem) : sequence_of(problem, tile.batch);
        const Position length = queries_ ? tile.sequence.seqlen_q : tile.sequence.seqlen_k;
        if (!packed_.cu_seqlens && cuts_.block != cuts_.tile) {
            tile.rows = cuts_[Position(slot)];
            tile.first = tile.rows.begin / 16 * 16;
        } else {
            if (packed_.cu_seqlens) slot -= uint32_t(packed_.first_slot(tile.batch));
            tile.first = Position(slot) * cuts_.tile;
            tile.rows = intersection({tile.first, tile.first + cuts_.tile}, {0, length});
        }
        return tile;
    }

  private:
    // Blocks that don't start at a multiple of 16 leave room for the rows before them.
    RowTiling(const ForwardProblem& problem, bool queries, Position tile, int64_t rows, int64_t heads,
              const int32_t* cu_seqlens, const BlockLists& lists)
        : packed_{cu_seqlens, problem.batch, rows, tile},
          cuts_(rows, lists, lists.counts && lists.row_block % 16 != 0 ? tile - 16 : tile),
          queries_(queries),
          per_head_(at_least_1(cu_seqlens ? packed_.slots() : cuts_.count())),
          heads_(at_least_1(heads)),
          group_(at_least_1(problem.heads_q / at_least_1(problem.heads_k))),
          count_((cu_seqlens ? packed_.slots() : cuts_.count() * problem.batch) * heads) {}

    static uint32_t at_least_1(int64_t count) { return count > 1 ? uint32_t(count) : 1; }

    PackedTiles packed_;  // cu_seqlens == nullptr: dense
    RowTiles cuts_;
    bool queries_;
    Division per_head_, heads_, group_;
    int64_t count_;
};

}  // namespace flash::cuda::sm80
