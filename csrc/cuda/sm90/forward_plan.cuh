// What the warps of a block tell each other: the producer which tile of queries is next and where its keys
// lie, the consumers whether they have to be given a tile again.
#pragma once

#include "../../attention/score.h"
#include "../any/row_tile.cuh"
#include "../any/tile_walk.cuh"
#include "../ptx/mbarrier.h"
#include "ring.h"

namespace flash::cuda::sm90 {

struct ForwardConfiguration {
    int head_dim, key_tile, warpgroups, stages, query_buffers;  // warpgroups: that compute, 64 queries each

    constexpr int queries() const { return 64 * warpgroups; }
    constexpr int consumers() const { return 128 * warpgroups; }
    constexpr int threads() const { return consumers() + 128; }
};

// A tile of keys, beside its stage.
struct KeyNote {
    Position first;
    Interval seen;  // what of it exists and some row sees
    bool masked, last;
};

enum class Work { tile, nothing, end };

// A tile of queries, beside its buffer.
struct ForwardPlan {
    Work work;
    bool careful;  // given again: maxima are followed, and values that are not finite kept from other rows
    bool has_keys;
    bool redo;  // the consumers' answer
    RowTile tile;
    Mask mask;
    SchedulePlace start, place;

    __device__ void make(const ForwardProblem& problem, const RowTile& of, int key_tile) {
        tile = of;
        mask = Mask(problem, tile.sequence);
        const Interval first = visible(tile.rows.begin), last = visible(tile.rows.end - 1);
        start.schedule = TileSchedule(first, last, key_tile);
        start.next();
        has_keys = start.run.begin < start.run.end;
    }

    __device__ __forceinline__ Interval visible(Position query) const {
        return tile.unowned ? Interval(0, 0) : mask.keys_of(query);
    }
};

template <ForwardConfiguration c>
struct ForwardShared {
    static constexpr int query_bytes = c.queries() * c.head_dim * 2, key_bytes = c.key_tile * c.head_dim * 2;

    alignas(1024) char q[c.query_buffers][query_bytes];  // at the end O
    alignas(1024) char k[c.stages][key_bytes];
    alignas(1024) char v[c.stages][key_bytes];
    uint64_t q_full[c.query_buffers], q_empty[c.query_buffers];
    uint64_t k_full[c.stages], k_empty[c.stages], v_full[c.stages], v_empty[c.stages];
    KeyNote notes[c.stages];
    ForwardPlan plans[c.query_buffers];
    uint32_t bad_keys[(c.key_tile + 31) / 32];

    // By one thread.
    __device__ void start() {
        for (int i = 0; i < c.query_buffers; ++i) {
            mbarrier_init(shared_address(&q_full[i]), 1);
            mbarrier_init(shared_address(&q_empty[i]), c.warpgroups * 4 * kWarpArrivals);
            plans[i].redo = false;
        }
        for (int i = 0; i < c.stages; ++i) {
            mbarrier_init(shared_address(&k_full[i]), 1);
            mbarrier_init(shared_address(&v_full[i]), 1);
            mbarrier_init(shared_address(&k_empty[i]), c.warpgroups * 4 * kWarpArrivals);
            mbarrier_init(shared_address(&v_empty[i]), c.warpgroups * 4 * kWarpArrivals);
        }
    }
};

}  // namespace flash::cuda::sm90
