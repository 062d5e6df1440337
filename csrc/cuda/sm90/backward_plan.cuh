// What the warps of a block of the backward share: the block's tile of keys, the ring of tiles of queries,
// and what the producer says of each of those.
#pragma once

#include "../any/dq_sums.cuh"
#include "../any/row_tile.cuh"
#include "../any/tile_walk.cuh"
#include "../ptx/mbarrier.h"
#include "ring.h"

namespace flash::cuda::sm90 {

struct BackwardConfiguration {
    int head_dim, query_tile, key_tile, stages;

    static constexpr int warpgroups = 2;  // that compute, 64 keys each
    static constexpr int consumers = 128 * warpgroups, threads = consumers + 128;
};

// A tile of queries, beside its stage.
struct QueryNote {
    static constexpr uint32_t masked = 1, last = 2,
                              bad = 4;  // some rows of Q and dO were not finite, and are zeros now
    uint32_t flags;
    // If it is masked:
    Position first;
    const uint32_t* bits;  // of the head's query 0, if bits say what is visible
    Interval seen;         // what of it exists and sees some key
};

// Which tile of queries a dQ belongs to. Read when its stage may have been given up, so that there are more
// of these than stages, and tiles that are one behind.
struct DqNote {
    Position first;
    int head;  // of the group
    bool last;
};
constexpr int kDqNotes = 8;

struct BackwardPlan {
    TileOrder::Place place;
    RowTile tile;
    Mask mask;
    bool partial;  // some of the tile's keys don't exist
    bool has_queries;
    uint32_t first_dq_tile;  // of the batch entry, among those of one of the unit's heads
    int first_statistic;     // of the batch entry's query 0
    Interval earlier;        // what the tile of keys before this one visits; in multiples of tiles of queries
    SchedulePlace start, walks[2];

    __device__ void make(const ForwardProblem& problem, const RowTiling& tiling, const DqSums& dq_sums,
                         const AlignedRows& statistics, uint32_t index, int query_tile, int key_tile) {
        place = tiling.place(index);
        tile = tiling(place, problem, false);
        mask = Mask(problem, tile.sequence);
        partial = tile.rows.begin > tile.first || tile.rows.end < tile.first + key_tile;
        has_queries = false;
        if (tile.unowned || tile.rows.empty()) return;
        first_dq_tile = dq_sums.first_tile(tile.batch);
        first_statistic = int(statistics.first(tile.batch));
        const Interval first = mask.queries_of(tile.rows.begin), last = mask.queries_of(tile.rows.end - 1);
        const BlockLists& lists = problem.query_blocks;  // the same for all heads of a group
        start.schedule =
            lists.counts
                ? TileSchedule(first, last, query_tile,
                               block_list_of(lists, tile.batch, tile.head * tile.group, tile.rows.begin))
                : TileSchedule(first, last, query_tile);
        start.next();
        has_queries = start.run.begin < start.run.end;
        earlier = tile.first == 0
                      ? Interval(0, 0)
                      : Interval(mask.queries_of(tile.first - key_tile).begin / query_tile * query_tile,
                                 mask.queries_of(tile.first - 1).end);
    }
};

template <BackwardConfiguration c>
struct BackwardShared {
    static constexpr int key_bytes = c.key_tile * c.head_dim * 2, query_bytes = c.query_tile * c.head_dim * 2;

    alignas(1024) char k[key_bytes];  // at the end dK
    alignas(1024) char v[key_bytes];  // at the end dV
    alignas(1024) char q[c.stages][query_bytes];
    alignas(1024) char dout[c.stages][query_bytes];
    alignas(1024) char ds[2][c.key_tile * c.query_tile * 2];  // dS^T
    alignas(16) float dq[c.query_tile * c.head_dim];          // on its way to the sums
    alignas(128) float lse[c.stages][c.query_tile];           // in log 2
    alignas(128) float delta[c.stages][c.query_tile];
    uint64_t k_full, v_full;
    uint64_t q_full[c.stages];  // Q, the note, lse and delta
    uint64_t dout_full[c.stages];
    uint64_t empty[c.stages], masked[c.stages];  // masked: empty, for a tile that is masked
    uint64_t dq_full[c.warpgroups], dq_empty[c.warpgroups], dq_added;
    uint64_t landed;  // copies of tiles that have to be looked at before they are handed on
    QueryNote notes[c.stages];
    static_assert(c.stages + 2 <= kDqNotes);
    DqNote dq_notes[kDqNotes];
    uint32_t bad_queries[c.stages][(c.query_tile + 31) / 32];
    uint32_t bad_keys[(c.key_tile + 31) / 32];
    bool has_bad_keys, finishes_dq;
    bool all_finite;  // lse and delta of all queries, and so Q and dO
    BackwardPlan plan;

    // By one thread.
    __device__ void start() {
        mbarrier_init(shared_address(&k_full), 1);
        mbarrier_init(shared_address(&v_full), 1);
        mbarrier_init(shared_address(&landed), 1);
        mbarrier_init(shared_address(&dq_added), c.warpgroups * kWarpArrivals);
        for (int i = 0; i < c.warpgroups; ++i) {
            mbarrier_init(shared_address(&dq_full[i]), 4 * kWarpArrivals);
            mbarrier_init(shared_address(&dq_empty[i]), kWarpArrivals);
        }
        for (int i = 0; i < c.stages; ++i) {
            mbarrier_init(shared_address(&q_full[i]), 1);
            mbarrier_init(shared_address(&dout_full[i]), 1);
            mbarrier_init(shared_address(&empty[i]), c.warpgroups * 4 * kWarpArrivals);
            mbarrier_init(shared_address(&masked[i]), 1);
        }
        for (uint32_t& keys : bad_keys) keys = 0;
        has_bad_keys = false;
    }
};

}  // namespace flash::cuda::sm90
