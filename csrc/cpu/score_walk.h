// What every pass does to walk the score matrix: tiles of rows as tasks, panels of lanes, the schedule's runs
// cut into tiles.
#pragma once

#include "../attention/tile_schedule.h"
#include "parallel.h"
#include "vector_math.h"

namespace flash::cpu::FLASH_CPU_ISA {

inline constexpr int64_t kQueryTile = 128;
inline constexpr int64_t kKeyTile = 128;

// A schedule's runs cut at the multiples of kTile, and glued where they meet between two multiples: a tile's
// extent then follows from what is visited alone, and with it every bit of the result.
template <int64_t kTile>
class ScheduledTiles {
  public:
    struct Tile {
        Interval positions;
        bool masked, partial;
        int32_t listed;  // if it is partial: the block as the list has it, which is all of a tile's
    };

    ScheduledTiles(Interval first_row, Interval last_row, const BlockLists& lists, int64_t batch,
                   int64_t head, int64_t row)
        : list_(lists.counts ? block_list_of(lists, batch, head, row) : BlockList{nullptr, 0, 0}),
          schedule_(lists.counts ? TileSchedule(first_row, last_row, 1, list_)
                                 : TileSchedule(first_row, last_row, 1)) {
        more_ = schedule_.next(run_);
    }

    bool next(Tile& tile) {
        while (more_ && run_.begin >= run_.end) more_ = schedule_.next(run_);
        if (!more_) return false;
        const int64_t boundary = (run_.begin / kTile + 1) * kTile;
        tile = {{run_.begin, run_.begin}, false, false, 0};
        while (more_ && run_.begin == tile.positions.end && tile.positions.end < boundary) {
            tile.positions.end = run_.end < boundary ? run_.end : boundary;
            tile.masked |= run_.masked && run_.begin < run_.end;
            tile.partial |= run_.partial && run_.begin < run_.end;
            run_.begin = tile.positions.end;
            if (run_.begin >= run_.end) more_ = schedule_.next(run_);
        }
        if (tile.partial) tile.listed = *list_.within(tile.positions).indices;
        return true;
    }

  private:
    BlockList list_;
    TileSchedule schedule_;
    Run run_{0, 0, false};
    bool more_;
};

// The part of a tile that a panel visits. offset counts from the tile's first position; both are multiples of
// the operand's step (a Pair's two rows are multiplied together), except a count that ends with the tile.
struct PanelSpan {
    int64_t offset, count;
    bool masked;
};

// The lanes of one strip of columns in a tile product and what each of them sees along the other axis:
// queries and the keys they see for O and dQ, keys and the queries that see them for dK and dV.
template <class Real>
class Panel {
  public:
    static constexpr int64_t lanes = kMicroColumns<Real>;

    Panel() = default;

    // Lanes are the positions [first, min(first + lanes, end)); visible(position) is what a lane sees, and
    // center is the other axis' position that lane 0 meets on the diagonal.
    template <class Visible>
    Panel(int64_t first, int64_t end, int64_t center, const Visible& visible)
        : first_(first), count_(end - first < lanes ? end - first : lanes) {
        const Interval of_first = visible(first), of_last = visible(first + count_ - 1);
        visited_ = {of_first.begin, of_last.end};
        if (count_ == lanes) plain_ = {of_last.begin, of_first.end};
        for (int64_t lane = 0; lane < lanes; ++lane) {
            const Interval seen = lane < count_ ? visible(first + lane) : Interval{0, 0};
            const int v = int(lane / kLanes<Real>), i = int(lane % kLanes<Real>);
            begin_[v][i] = Position(seen.begin);
            end_[v][i] = Position(seen.end);
            center_[v][i] = Real(center + lane);
        }
    }

    int64_t first() const { return first_; }
    int64_t count() const { return count_; }
    Interval positions() const { return {first_, first_ + count_}; }

    template <int64_t kStep>
    PanelSpan span(Interval tile) const {
        const Interval seen = intersection(visited_, tile);
        if (seen.empty()) return {0, 0, false};
        const int64_t offset = (seen.begin - tile.begin) / kStep * kStep;
        int64_t end = (seen.end - tile.begin + kStep - 1) / kStep * kStep;
        if (end > tile.end - tile.begin) end = tile.end - tile.begin;
        return {offset, end - offset, tile.begin + offset < plain_.begin || tile.begin + end > plain_.end};
    }

    FLASH_INLINE LaneMask<Real> sees(int v, int64_t position) const {
        return (begin_[v] <= Position(position)) & (Position(position) < end_[v]);
    }

    // |i + Sk - Sq - j| between the lanes and a position of the other axis.
    FLASH_INLINE Vector<Real> distance(int v, int64_t position) const {
        return VectorMath<Real>::abs(center_[v] - Real(position));
    }

  private:
    using Position = typename VectorOf<Real>::position;

    int64_t first_, count_;
    Interval visited_;      // what some lane sees
    Interval plain_{0, 0};  // what every lane sees; empty where lanes lie past the end
    LaneMask<Real> begin_[kMicroVectors], end_[kMicroVectors];
    Vector<Real> center_[kMicroVectors];
};

template <class Real>
Panel<Real> query_panel(const Mask& mask, int64_t first, int64_t end) {
    return Panel<Real>(first, end, first + mask.diagonal(),
                       [&](int64_t query) { return mask.keys_of(query); });
}

template <class Real>
Panel<Real> key_panel(const Mask& mask, int64_t first, int64_t end) {
    return Panel<Real>(first, end, first - mask.diagonal(),
                       [&](int64_t key) { return mask.queries_of(key); });
}

// Calls run(scratch, batch, head, sequence, queries) for every tile of queries, latest queries first: under a
// causal mask they see the most keys.
template <class Run>
FLASH_INLINE void for_each_query_tile(const ForwardProblem& problem, const Threads& threads, const Run& run) {
    const RowTiles tiles(problem.seqlen_q, problem.key_blocks, kQueryTile);
    const int64_t heads = problem.batch * problem.heads_q, count = tiles.count();
    for_each_task(threads, heads * count, [&](int64_t task, char* scratch) {
        const int64_t batch = task % heads / problem.heads_q, head = task % heads % problem.heads_q;
        const Sequence sequence = sequence_of(problem, batch);
        const Interval queries = intersection(tiles[count - 1 - task / heads], {0, sequence.seqlen_q});
        if (!queries.empty()) run(scratch, batch, head, sequence, queries);
    });
}

// for_each_query_tile for a walk that adds to `shared`: a task gets all tiles that have the same rows of it,
// in a fixed order.
template <class Run>
FLASH_INLINE void for_each_query_tile_of(const ScoreMatrix& shared, const ForwardProblem& problem,
                                         const Threads& threads, const Run& run) {
    const RowTiles tiles(problem.seqlen_q, problem.key_blocks, kQueryTile);
    const auto apart = [](int64_t count, int64_t stride) { return stride ? count : 1; };
    const int64_t batches = apart(problem.batch, shared.batch_stride);
    const int64_t heads = apart(problem.heads_q, shared.head_stride);
    const int64_t groups = apart(tiles.count(), shared.row_stride);
    for_each_task(threads, batches * heads * groups, [&](int64_t task, char* scratch) {
        const int64_t first_tile = task % groups, first_head = task / groups % heads;
        for (int64_t batch = task / groups / heads; batch < problem.batch; batch += batches)
            for (int64_t head = first_head; head < problem.heads_q; head += heads)
                for (int64_t tile = first_tile; tile < tiles.count(); tile += groups) {
                    const Interval queries = tiles[tile];
                    if (!queries.empty()) run(scratch, batch, head, sequence_of(problem, batch), queries);
                }
    });
}

// Calls run(scratch, batch, key_head, sequence, keys) for every tile of keys, earliest keys first: under a
// causal mask the most queries see them.
template <class Run>
FLASH_INLINE void for_each_key_tile(const ForwardProblem& problem, const Threads& threads, const Run& run) {
    const RowTiles tiles(problem.seqlen_k, problem.query_blocks, kKeyTile);
    const int64_t heads = problem.batch * problem.heads_k, count = tiles.count();
    for_each_task(threads, heads * count, [&](int64_t task, char* scratch) {
        const int64_t batch = task % heads / problem.heads_k, head = task % heads % problem.heads_k;
        const Sequence sequence = sequence_of(problem, batch);
        const Interval keys = intersection(tiles[task / heads], {0, sequence.seqlen_k});
        if (!keys.empty()) run(scratch, batch, head, sequence, keys);
    });
}

}  // namespace flash::cpu::FLASH_CPU_ISA
