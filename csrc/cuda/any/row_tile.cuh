// Which rows a block owns: a tile of one head's queries (forward) or keys (backward).
#pragma once

#include <algorithm>

#include "../../attention/block_mask.h"
#include "../../attention/mask.h"
#include "../../attention/sequence.h"
#include "../tile/element.h"
#include "../tile_order.h"

namespace flash::cuda {

// Some tiles take longer than others, in the order of a diagonal.
inline bool has_diagonal(const ForwardProblem& problem) {
    return problem.window_right >= 0 && problem.window_left < 0;
}

struct RowTile {
    int64_t batch, head;
    int64_t key_head;
    int group;  // query heads of a key head
    Sequence sequence;
    Interval rows;   // empty: nothing to do
    Position first;  // of the tile, a multiple of 16 not after the first row
    bool unowned;    // rows past the last packed sequence: they get zeros
};

// Cuts one axis of a problem into tiles, on the host; a block finds its own with no division.
class RowTiling {
  public:
    // cache_bytes: what of the second-level cache the other axis of heads that go together may take, unless
    // they have fewer tiles than least_tiles then. Where neither a diagonal nor a map makes some tiles longer
    // than others, heads go one by one. How long they are a map alone knows; a causal one makes them so in
    // the order of a diagonal.
    static RowTiling of_queries(const ForwardProblem& problem, Position tile, int64_t cache_bytes,
                                int64_t least_tiles = 1) {
        return in_sections(problem, true, tiles_differ(problem), tile, cache_bytes, least_tiles);
    }
    // Tiles may span several blocks of a map.
    static RowTiling across_blocks(const ForwardProblem& problem, Position tile, int64_t cache_bytes,
                                   int64_t least_tiles) {
        ForwardProblem whole = problem;
        whole.key_blocks = {};
        return in_sections(whole, true, tiles_differ(problem), tile, cache_bytes, least_tiles);
    }
    static RowTiling of_keys(const ForwardProblem& problem, Position tile, int64_t cache_bytes,
                             int64_t least_tiles = 1) {
        return in_sections(problem, false, tiles_differ(problem), tile, cache_bytes, least_tiles);
    }
    // The same where something begins when a head's tiles are done, and fills what is idle at the end: of
    // dense sequences as few heads go together as keep so many blocks busy. Where tiles are long or few two
    // for each block have to be left for the end, or too much is idle.
    static RowTiling of_keys_soon_done(const ForwardProblem& problem, Position tile, int64_t cache_bytes,
                                       int64_t blocks) {
        if (problem.cu_seqlens_q || problem.cu_seqlens_k || !tiles_differ(problem))
            return of_keys(problem, tile, cache_bytes, blocks);
        const bool are_few = problem.batch * problem.heads_k * tiles_of_keys(problem, tile) < 10 * blocks;
        return RowTiling(problem, false, tile, 1, blocks,
                         are_long(problem, tile) || are_few ? 2 * blocks : 1);
    }
    // Tiles of keys of which a head has many.
    static bool are_long(const ForwardProblem& problem, Position tile) {
        return tiles_of_keys(problem, tile) >= 64;
    }
    // Whatever the mask, heads that go together have so many tiles, and those that come last so many; 0: as
    // TileOrder has it.
    static RowTiling of_keys_together(const ForwardProblem& problem, Position tile, int64_t least_tiles,
                                      int64_t last_tiles = 0) {
        return RowTiling(problem, false, tile, 1, least_tiles, last_tiles);
    }
    // Where heads wait for those so many before them: all of a section are among so many, and sections are no
    // larger than have so many tiles, or a little more.
    static RowTiling of_keys_apart(const ForwardProblem& problem, Position tile, int64_t heads_apart,
                                   int64_t least_tiles) {
        const RowTiling one_by_one(problem, false, tile, 1, 1);
        int64_t section = std::min(one_by_one.heads_with(least_tiles), heads_apart);
        while (heads_apart < 4 * section && heads_apart % section != 0) ++section;
        return RowTiling(problem, false, tile, section, 1, 1);
    }

    // Query heads of a key head.
    static int64_t group_of(const ForwardProblem& problem) {
        return at_least_1(problem.heads_q / at_least_1(problem.heads_k));
    }

    // As if there were so many heads.
    RowTiling of_heads(int64_t heads) const {
        RowTiling some = *this;
        some.order_ = TileOrder(tiles_, heads, section(), last_section());
        some.count_ = count_ / all_heads_ * heads;
        return some;
    }

    FLASH_HOST_DEVICE int64_t count() const { return count_; }
    FLASH_HOST_DEVICE uint32_t tiles() const { return tiles_; }  // of a head
    int64_t heads() const { return all_heads_; }                 // of all batch entries
    int64_t section() const { return order_.section(); }         // heads that go together
    int64_t last_section() const { return order_.last_section(); }

    FLASH_HOST_DEVICE TileOrder::Place place(uint32_t index) const { return order_(index); }

    // The first tile of a batch entry, in place()'s count.
    __device__ __forceinline__ uint32_t first_tile(int64_t batch) const {
        return packed_.cu_seqlens ? uint32_t(packed_.first_slot(batch)) : 0;
    }

    __device__ __forceinline__ RowTile operator()(uint32_t index, const ForwardProblem& problem,
                                                  bool descending) const {
        return (*this)(place(index), problem, descending);
    }

    // descending: a head's last tile first, which under a causal mask is the longest one of queries.
    __device__ __forceinline__ RowTile operator()(const TileOrder::Place& place,
                                                  const ForwardProblem& problem, bool descending) const {
        uint32_t slot = descending ? tiles_ - 1 - place.tile : place.tile;
        const uint32_t of_batch = heads_.quotient(place.head), head = heads_.remainder(place.head);
        RowTile tile;
        tile.head = head;
        tile.group = int(group_.divisor);
        tile.key_head = queries_ ? group_.quotient(head) : head;
        if (uniform_) {
            tile.batch = of_batch;
            tile.unowned = false;
            tile.sequence = whole_entry(problem, of_batch);
            tile.first = Position(slot) * cuts_.tile;
            tile.rows = intersection({tile.first, tile.first + cuts_.tile}, {0, cuts_.rows});
            return tile;
        }
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
    struct Axis {
        int64_t rows, heads;
        const int32_t* cu_seqlens;
        const BlockLists& lists;
    };
    static Axis queries_of(const ForwardProblem& problem) {
        return {problem.cu_seqlens_q ? problem.rows_q : problem.seqlen_q, problem.heads_q,
                problem.cu_seqlens_q, problem.key_blocks};
    }
    static Axis keys_of(const ForwardProblem& problem) {
        return {problem.cu_seqlens_k ? problem.rows_k : problem.seqlen_k, problem.heads_k,
                problem.cu_seqlens_k, problem.query_blocks};
    }

    // differ: tiles take different times, so heads go together; else one by one.
    static RowTiling in_sections(const ForwardProblem& problem, bool queries, bool differ, Position tile,
                                 int64_t cache_bytes, int64_t least_tiles) {
        if (!differ) return RowTiling(problem, queries, tile, 1, 1);
        const int64_t group = group_of(problem);
        const int64_t head_bytes = queries ? row_bytes(problem) * problem.seqlen_k / group
                                           : row_bytes(problem) * problem.seqlen_q * group;
        return RowTiling(problem, queries, tile, cache_bytes / at_least_1(head_bytes), least_tiles);
    }
    // Heads go together: so many, or those that have so many tiles, whichever is more. last_tiles: the same
    // of those that come last; 0: as TileOrder has it.
    RowTiling(const ForwardProblem& problem, bool queries, Position tile, int64_t least_heads,
              int64_t least_tiles, int64_t last_tiles = 0)
        : RowTiling(problem, queries, queries ? queries_of(problem) : keys_of(problem), tile, least_heads,
                    least_tiles, last_tiles) {}
    // Blocks that don't start at a multiple of 16 leave room for the rows before them.
    RowTiling(const ForwardProblem& problem, bool queries, const Axis& axis, Position tile,
              int64_t least_heads, int64_t least_tiles, int64_t last_tiles)
        : packed_{axis.cu_seqlens, problem.batch, axis.rows, tile},
          cuts_(axis.rows, axis.lists,
                axis.lists.counts && axis.lists.row_block % 16 != 0 ? tile - 16 : tile),
          queries_(queries),
          uniform_(fills_batch(problem) && cuts_.block == cuts_.tile),
          tiles_(uint32_t(at_least_1(axis.cu_seqlens ? packed_.slots() : cuts_.count()))),
          all_heads_(axis.heads * (axis.cu_seqlens ? 1 : problem.batch)),
          order_(tiles_, at_least_1(all_heads_), std::max(least_heads, heads_with(least_tiles)),
                 heads_with(last_tiles)),
          heads_(uint32_t(at_least_1(axis.heads))),
          group_(uint32_t(group_of(problem))),
          count_((axis.cu_seqlens ? packed_.slots() : cuts_.count()) * all_heads_) {}

    static int64_t tiles_of_keys(const ForwardProblem& problem, Position tile) {
        return (problem.seqlen_k + tile - 1) / tile;
    }
    static int64_t at_least_1(int64_t count) { return count > 1 ? count : 1; }
    int64_t heads_with(int64_t tiles) const { return (tiles + tiles_ - 1) / tiles_; }

    // Of a query and its output's gradient, of a key and its value.
    static int64_t row_bytes(const ForwardProblem& problem) {
        return (problem.head_dim + problem.head_dim_v) * element_bytes(problem.dtype);
    }

    static bool tiles_differ(const ForwardProblem& problem) {
        return has_diagonal(problem) || problem.key_blocks.counts || problem.query_blocks.counts;
    }

    PackedTiles packed_;  // cu_seqlens == nullptr: dense
    RowTiles cuts_;
    bool queries_;
    bool uniform_;  // a tile is found without asking the problem
    uint32_t tiles_;
    int64_t all_heads_;
    TileOrder order_;
    Division heads_, group_;
    int64_t count_;
};

}  // namespace flash::cuda
