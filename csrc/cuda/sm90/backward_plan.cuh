// What the warps of a block of the backward share: its tiles of keys, the ring of tiles of queries, and what
// the producer says of each of those.
#pragma once

#include "../any/dq_sums.cuh"
#include "../any/row_tile.cuh"
#include "../any/tile_walk.cuh"
#include "../any/walk_parts.cuh"
#include "../ptx/mbarrier.h"
#include "ring.h"
#include "tensor_map.h"
#include "transformed_scores.cuh"
#include "walk_end.h"

namespace flash::cuda::sm90 {

struct BackwardConfiguration {
    int head_dim, query_tile, key_tile, stages;
    bool transformed;   // scores have a softcap, ALiBi, or a scale that is not positive
    bool biased;        // or a bias, and perhaps those, but for a softcap
    int held_keys = 0;  // so many columns of the keys, and of the values, are in registers as well
    int value_dim = 0;  // head dim of the values, if it is another, as it may be where dQ has its own walk

    static constexpr int warpgroups = 2;  // that compute
    static constexpr int consumers = 128 * warpgroups, threads = consumers + 128;

    constexpr int values() const { return value_dim ? value_dim : head_dim; }
    constexpr int columns() const { return in_whole_panels(head_dim); }
    constexpr int value_columns() const { return in_whole_panels(values()); }
    // From a panel's first column of keys to the next one's: a panel holds what a warpgroup multiplies of
    // them for dQ, and where that is less than 64 columns some of the next panel's, too.
    constexpr int key_panel_step() const { return head_dim * kPanel / columns(); }
    // Or it has a walk of its own (query_gradient.cuh).
    constexpr bool adds_dq() const { return head_dim <= 128; }
    // Warpgroups may take turns (backward_turns.cuh). Of the second one's dS nobody needs more than the last
    // then, which at head dim 64 leaves room for a third stage.
    constexpr bool takes_turns() const { return adds_dq() && !transformed && !biased; }
    constexpr bool one_place() const { return takes_turns() && query_tile == 128; }
    constexpr int adders() const { return adds_dq() ? warpgroups : 0; }  // warps
};

// Of a tile of keys, row r is seen by queries from r + begin on and before r + end, if it is in `keys`.
struct KeyBounds {
    static constexpr int kFar = 1 << 30;
    int begin, end;
    Interval keys;

    __device__ KeyBounds(const Mask& mask, const RowTile& tile)
        : begin(mask.right < 0 ? -kFar : tile.first - mask.diagonal() - mask.right),
          end(mask.left < 0 ? kFar : tile.first - mask.diagonal() + mask.left + 1),
          keys(tile.rows.begin - tile.first, tile.rows.end - tile.first) {}
    KeyBounds() = default;
};

// A tile of queries, beside its stage.
struct QueryNote {
    static constexpr uint32_t masked = 1, last = 2;
    static constexpr uint32_t bad = 4;       // some rows of Q and dO were not finite, and are zeros now
    static constexpr uint32_t odd_tile = 8;  // of keys: which plan
    uint32_t flags;
    float slope;     // if scores are transformed: ALiBi's, of the tile's head
    Position first;  // if they are, or if it is masked
    // If it is masked:
    const uint32_t* bits;  // of the head's query 0, if bits say what is visible
    // The rest counted from the tile's first query: which queries see a key, and what of the tile exists and
    // sees some key. It is read at once, since what is read here is waited for.
    struct alignas(16) Seen {
        int begin, end;  // as of KeyBounds
        Interval queries;
    } seen;
};

// Which tile of queries a dQ belongs to. Read when its stage may have been given up, so that there are more
// of these than stages, and tiles that are one behind.
struct DqNote {
    Position first;
    int head;  // of all query heads
    bool last;
};
constexpr int kDqNotes = 8;

// What consumers do with a tile's dQ: hand it over to be added to sums, or finish it, as it is or with the
// sums that have been brought.
enum class DqEnd { none, alone, with_sums };

// In which order blocks take tiles of keys.
enum class BackwardOrder {
    by_length,    // those that may be longest first
    whole_units,  // a block does all of a unit, the last keys first
    // A unit's last keys first, which store dQ's sums, and other keys' additions behind them; or, in turns,
    // behind the next keys'. Then the next tile is taken when one has nearly been walked.
    stores_first,
    turns,
};

// A tile of keys. While the consumers store the gradients of one, the next one's first tiles of queries are
// copied.
constexpr int kBackwardPlans = 2;

struct BackwardPlan {
    bool end;         // there is no tile any more; nothing else is set
    bool all_finite;  // lse and delta of the queries, and so Q and dO
    TileOrder::Place place;
    RowTile tile;
    uint32_t part;         // which one is walked (walk_parts.cuh)
    uint32_t tile_of_all;  // of keys, of all key heads alike
    Mask mask;
    KeyBounds bounds;
    ScoreTransform<GpuMath> transform;  // if scores are transformed; of the unit's first head
    bool partial;                       // some of the tile's keys don't exist
    bool has_queries;
    uint32_t first_dq_tile;                  // of the batch entry, among those of one of the unit's heads
    int first_statistic;                     // of the batch entry's query 0
    uint32_t first_query_tile, query_tiles;  // how many are visited, if no map of blocks leaves some out
    // Unless by length: so many of those the next keys' tile does not visit, or kNone if it visits nothing;
    // and it visits so many behind.
    static constexpr uint32_t kNone = ~0u;
    uint32_t alone, behind;
    // So many tiles of queries are copied before the next tile of keys may be taken; 0: nobody waits for
    // that.
    uint32_t until_next;
    bool waits;          // for other tiles' additions, unless by length
    uint32_t sums_unit;  // in whose place the unit's sums are
    SchedulePlace start, walks[2];

    // Blocks of a map that are no whole tiles would be cut into more of them, each for itself; to find what
    // can be merged takes time.
    static constexpr bool merges_blocks(const BackwardConfiguration& c) {
        return kMaskQuarter % c.query_tile != 0;
    }

    // All but `end`.
    __device__ void make(const ForwardProblem& problem, const RowTiling& tiling, const DqSums& dq_sums,
                         const AlignedRows& statistics, TileOrder::Place at, BackwardOrder order,
                         const WalkParts& parts, const WalkEnd& end, const BackwardConfiguration& c) {
        place = at;
        waits = !end.has(at.head);
        sums_unit = end.sums_of(at.head);
        part = parts.part(at.head);
        tile_of_all = parts.tile_of_all(at, tiling.tiles());
        tile = parts.tile(tiling, at, problem, order != BackwardOrder::by_length);
        const Interval walked = parts.queries(part);
        mask = Mask(problem, tile.sequence);
        partial = tile.rows.begin > tile.first || tile.rows.end < tile.first + c.key_tile;
        has_queries = false;
        if (tile.unowned || tile.rows.empty()) return;
        bounds = KeyBounds(mask, tile);
        if (c.transformed) transform = ScoreTransform<GpuMath>(problem, tile.batch, tile.head * tile.group);
        first_dq_tile = dq_sums.first_tile(tile.batch);
        if (parts.of_queries()) first_dq_tile -= uint32_t(walked.begin) / c.query_tile;
        first_statistic = int(statistics.first(tile.batch));
        const Interval first = intersection(mask.queries_of(tile.rows.begin), walked),
                       last = intersection(mask.queries_of(tile.rows.end - 1), walked);
        const Interval tiles = tiles_of({first.begin, last.end}, c);
        first_query_tile = uint32_t(tiles.begin);
        query_tiles = uint32_t(tiles.end) - first_query_tile;
        alone = behind = 0;
        if (order != BackwardOrder::by_length && waits) compare_with_next_keys(walked, c);
        const BlockLists& lists = problem.query_blocks;  // the same for all heads of a group
        start.schedule =
            lists.counts
                ? TileSchedule(first, last, c.query_tile,
                               block_list_of(lists, tile.batch, tile.head * tile.group, tile.rows.begin),
                               merges_blocks(c))
                : TileSchedule(first, last, c.query_tile);
        start.next();
        has_queries = start.run.begin < start.run.end;
    }

  private:
    __device__ static Interval tiles_of(const Interval& queries, const BackwardConfiguration& c) {
        return {Position(uint32_t(queries.begin) / c.query_tile),
                Position(uint32_t(queries.end + c.query_tile - 1) / c.query_tile)};
    }
    __device__ void compare_with_next_keys(const Interval& walked, const BackwardConfiguration& c) {
        alone = kNone, behind = 0;
        const Position next = tile.first + c.key_tile, end = mask.seqlen_k;
        if (next >= end) return;
        const Interval queries = intersection(
            {mask.queries_of(next).begin, mask.queries_of(min(next + c.key_tile, end) - 1).end}, walked);
        if (queries.empty()) return;
        const Interval tiles = tiles_of(queries, c);
        alone = uint32_t(tiles.begin) - first_query_tile;
        behind = uint32_t(tiles.end) - (first_query_tile + query_tiles);
    }
};

// What the consumers hand each other.
template <BackwardConfiguration c, bool kAddsDq = c.adds_dq()>
struct BackwardExchange {
    static constexpr int kBuffers = c.biased && c.query_tile == 128 ? 1 : 2;
    // dS^T of a warpgroup's keys, in so many places.
    alignas(1024) char ds[kBuffers * c.warpgroups - c.one_place()][64 * c.query_tile * 2];
    alignas(16) float dq[c.query_tile * c.head_dim];  // on its way to the sums

    // Where the warpgroup's dS of the n-th tile of queries is.
    __device__ __forceinline__ uint32_t ds_of(int warpgroup, uint32_t n) const {
        const uint32_t buffer = n % kBuffers;
        if constexpr (c.one_place()) return shared_address(ds[warpgroup ? kBuffers : buffer]);
        return shared_address(ds[buffer * c.warpgroups + warpgroup]);
    }
};
template <BackwardConfiguration c>
struct BackwardExchange<c, false> {
    static constexpr int kBuffers = c.head_dim > 192 ? 1 : 2;
    alignas(1024) float p[kBuffers][c.key_tile * c.query_tile];  // P^T, as threads have it
};

// The bias of a tile of queries is read when its scores are there, and then the next one's is copied.
template <BackwardConfiguration c, bool kBiased = c.biased>
struct BackwardBias {
    __device__ void start() {}
};
template <BackwardConfiguration c>
struct BackwardBias<c, true> {
    alignas(1024) char tile[c.query_tile * c.key_tile * 2];
    uint64_t full, empty;

    // By one thread.
    __device__ void start() {
        mbarrier_init(shared_address(&full), 1);
        mbarrier_init(shared_address(&empty), c.warpgroups * 4 * kWarpArrivals);
    }
};

// A tile of sums that become dQ (dq_finish.cuh).
struct DqFinishNote {
    void* rows;      // of dQ: the tile's first one
    Position exist;  // so many; 0: this is the end
    float scale;
};
template <int kStages>
struct DqFinishShared {
    uint64_t begins;  // the consumers walk no more
    uint64_t full[kStages], empty[kStages];
    DqFinishNote notes[kStages];

    // By one thread.
    __device__ void start(int warps) {
        mbarrier_init(shared_address(&begins), warps * kWarpArrivals);
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(shared_address(&full[i]), 1);
            mbarrier_init(shared_address(&empty[i]), warps * kWarpArrivals);
        }
    }
};

template <BackwardConfiguration c>
struct BackwardShared : BackwardExchange<c> {
    static constexpr int key_bytes = c.key_tile * c.columns() * 2;
    static constexpr int value_bytes = c.key_tile * c.value_columns() * 2;
    static constexpr int query_bytes = c.query_tile * c.columns() * 2;
    static constexpr int dout_bytes = c.query_tile * c.value_columns() * 2;
    static_assert(c.values() == c.head_dim || !c.adds_dq());

    alignas(1024) char k[key_bytes];
    alignas(1024) char v[value_bytes];
    alignas(1024) char q[c.stages][query_bytes];
    alignas(1024) char dout[c.stages][dout_bytes];
    static constexpr int kStatistics =
        (c.query_tile + 31) / 32 * 32;              // copies begin at multiples of 128 bytes
    alignas(128) float lse[c.stages][kStatistics];  // in log 2
    alignas(128) float delta[c.stages][kStatistics];
    uint64_t planned[kBackwardPlans], left[kBackwardPlans];
    uint64_t walked;  // the next tile of keys may be taken, if that is waited for (BackwardPlan::until_next)
    uint64_t k_full, v_full, k_empty, v_empty;
    uint64_t q_full[c.stages];  // Q, the note, lse and delta
    uint64_t dout_full[c.stages];
    uint64_t empty[c.stages], masked[c.stages];  // masked: empty, for a tile that is masked
    uint64_t dq_full[c.warpgroups];              // a tile of the warpgroup's dQ, or it is finished
    uint64_t dq_empty[c.warpgroups];             // room for it, or the sums to which it is to be added
    uint64_t dq_relay[2];                        // the other warp that adds has seen the last tile's dq_full
    uint64_t landed;  // copies of tiles that have to be looked at before they are handed on
    uint64_t met;     // the warpgroups have (key_gradients.cuh), where the sanitizer follows
    DqEnd dq_ends[c.warpgroups];
    QueryNote notes[c.stages];
    static_assert(c.stages + 2 <= kDqNotes);
    DqNote dq_notes[kDqNotes];
    uint32_t bad_queries[c.stages][(c.query_tile + 31) / 32];
    // Of the plans' tiles. Whoever makes a plan forgets those of the one that was there before.
    uint32_t bad_keys[kBackwardPlans][(c.key_tile + 31) / 32];
    bool has_bad_keys[kBackwardPlans][c.warpgroups];  // among those of a warpgroup
    bool all_finite;  // as plans have it, of all queries; if delta was there when the grid began
    BackwardPlan plans[kBackwardPlans];
    BackwardBias<c> bias;
    // Sums take the place of what was multiplied.
    static constexpr int kFinishStages =
        (key_bytes + value_bytes + c.stages * (query_bytes + dout_bytes)) / (c.query_tile * c.head_dim * 4);
    DqFinishShared<kFinishStages> finish;

    __device__ __forceinline__ BackwardPlan& plan(uint32_t tile) { return plans[tile % kBackwardPlans]; }
    __device__ __forceinline__ static uint32_t tile_of(uint32_t flags) {
        return (flags & QueryNote::odd_tile) != 0;
    }
    // By each warp that reads plans, but for the one that makes them.
    __device__ __forceinline__ void await_plan(uint32_t tile) const {
        mbarrier_wait(in_ring(planned, tile), parity(planned, tile));
    }
    // Of the warp's keys, which begin at warp_row, and a tile of queries.
    __device__ __forceinline__ TransformedScores transformed(const QueryNote& note, int warp_row) const {
        const BackwardPlan& plan = plans[tile_of(note.flags)];
        ScoreTransform<GpuMath> transform = plan.transform;
        transform.slope = note.slope;
        return {transform, plan.tile.first + warp_row - plan.mask.diagonal() - note.first};
    }
    __device__ __forceinline__ void leave_plan(uint32_t tile) const {
        mbarrier_arrive_warp(in_ring(left, tile));
    }
    __device__ __forceinline__ void forget_bad_keys(uint32_t tile) {
        for (uint32_t& keys : bad_keys[tile % kBackwardPlans]) keys = 0;
        for (bool& some : has_bad_keys[tile % kBackwardPlans]) some = false;
    }

    // By one thread.
    __device__ void start() {
        mbarrier_init(shared_address(&walked), 1);
        mbarrier_init(shared_address(&k_full), 1);
        mbarrier_init(shared_address(&v_full), 1);
        mbarrier_init(shared_address(&k_empty), c.warpgroups * 4 * kWarpArrivals);
        mbarrier_init(shared_address(&v_empty), c.warpgroups * 4 * kWarpArrivals);
        mbarrier_init(shared_address(&landed), 1);
        if (kSanitized) mbarrier_init(shared_address(&met), c.warpgroups * 4 * kWarpArrivals);
        for (uint64_t& relay : dq_relay) mbarrier_init(shared_address(&relay), 1);
        for (int i = 0; i < kBackwardPlans; ++i) {
            mbarrier_init(shared_address(&planned[i]), 1);
            mbarrier_init(shared_address(&left[i]), (c.warpgroups * 4 + c.adders() + 1) * kWarpArrivals);
        }
        for (int i = 0; i < c.warpgroups; ++i) {
            mbarrier_init(shared_address(&dq_full[i]), 4 * kWarpArrivals);
            mbarrier_init(shared_address(&dq_empty[i]), 1);
        }
        for (int i = 0; i < c.stages; ++i) {
            mbarrier_init(shared_address(&q_full[i]), 1);
            mbarrier_init(shared_address(&dout_full[i]), 1);
            mbarrier_init(shared_address(&empty[i]), c.warpgroups * 4 * kWarpArrivals);
            mbarrier_init(shared_address(&masked[i]), 1);
        }
        bias.start();
        finish.start(c.consumers / 32);
    }
};

}  // namespace flash::cuda::sm90
