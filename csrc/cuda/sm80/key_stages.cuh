// The way of one head's keys and values into a block: two stages in shared memory, of which one is filled
// with the next tile while the other one is used, or a single one where there is no room for two. A stage is
// filled when all warps have left it; the warps of a block do not meet otherwise, so they drift apart, and
// some multiply while others take exponentials.
#pragma once

#include <type_traits>

#include "../ptx/mbarrier.h"
#include "query_plan.cuh"

namespace flash::cuda::sm80 {

template <DType dtype, int kRows, int kColumns, int kStages>
struct KeyStages {
    static constexpr int bytes = kRows * kColumns * element_bytes(dtype);
    struct Stage {
        alignas(128) char k[bytes];
        alignas(128) char v[bytes];
    } stages[kStages];
    uint64_t keys_full[kStages], values_full[kStages], empty[kStages];  // mbarriers
};

// Every thread of the block has one; tiles are counted from 0 in the order in which they are visited.
// kFrugal: for loops whose products take all registers. kValuesApart: wait_keys() does not wait for the
// values; to look at two barriers takes registers. kFew: whole tiles in pages have a path of their own, and
// what is read leaves the second-level cache first.
template <DType dtype, int kRows, int kColumns, int kWarps, bool kFrugal, int kStages = 2,
          bool kValuesApart = false, bool kFew = false>
class KeyPipeline {
  public:
    using Stages = KeyStages<dtype, kRows, kColumns, kStages>;
    using Plan = QueryPlan<dtype, kWarps>;
    using Tile = SmemTile<kRows, kColumns, element_bytes(dtype)>;
    static constexpr int threads = kWarps * 32;
    using Whole = WholeTiles<threads, Tile, kFrugal>;

    // By one thread, before a __syncthreads.
    __device__ static void start_barriers(const Stages& shared) {
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(of_tile(shared.keys_full, stage), threads);
            mbarrier_init(of_tile(shared.values_full, stage), threads);
            mbarrier_init(of_tile(shared.empty, stage), kWarps * kWarpArrivals);
        }
    }

    // Asks for the first tile where it is easily found, so that its copies run while the plan is made. True
    // if it did.
    __device__ __forceinline__ static bool load_early(const Stages& shared, const ForwardProblem& problem,
                                                      const RowTile& tile, const Split& split) {
        if (tile.unowned || problem.key_blocks.counts || problem.cache.pages) return false;
        const Mask mask(problem, tile.sequence);
        const Interval slice = split.keys(tile, mask, kRows);
        const Position key = intersection(mask.keys_of(tile.rows.begin), slice).begin;
        const Position end = intersection(mask.keys_of(tile.rows.end - 1), slice).end;
        if (key % kRows != 0 || key + kRows > end) return false;
        const int64_t first = tile.sequence.first_key_row;
        const int64_t entry = tile.sequence.key_entry;
        const HeadRows<const Bits<dtype>> k(problem.k, entry, first, tile.key_head, problem.head_dim);
        const HeadRows<const Bits<dtype>> v(problem.v, entry, first, tile.key_head, problem.head_dim_v);
        const Whole keys(k), values(v);
        if (!keys.usable() || !values.usable()) return false;
        keys.load(shared_address(shared.stages[0].k), k, key, int(problem.k.row_stride), Hint());
        if (kValuesApart) cp_async_commit();
        values.load(shared_address(shared.stages[0].v), v, key, int(problem.v.row_stride), Hint());
        return true;
    }

    __device__ __forceinline__ KeyPipeline(Stages& shared, const ForwardProblem& problem, const Plan& plan)
        : shared_(shared),
          problem_(problem),
          plan_(plan),
          keys_(plan.keys),
          values_(plan.values),
          usable_pages_(kFew && Whole::usable_pages(plan.keys) && Whole::usable_pages(plan.values)) {}

    // A walk's first tile, unless load_early() has asked for it. Where there is none: waits for all that the
    // block has copied, as results take the place of the queries.
    __device__ __forceinline__ void begin(bool loaded_early, uint32_t tile,
                                          const TileWalk<kRows>& walk) const {
        if (loaded_early) {
            if (kValuesApart) {
                cp_async_wait<0>();  // for what load_early() committed
                mbarrier_arrive(of_tile(shared_.keys_full, tile));
            }
            mbarrier_arrive_behind_copies(of_tile(shared_.values_full, tile));
        } else {
            load(tile, walk);
        }
        if (!walk.more()) {
            cp_async_wait_all();
            __syncthreads();
        }
    }

    // The walk stands at that tile, or at the end. With one stage after leave() of the tile before.
    __device__ __forceinline__ void load(uint32_t tile, const TileWalk<kRows>& walk) const {
        if (!walk.more()) return;
        mbarrier_wait(of_tile(shared_.empty, tile), tile / kStages % 2 ^ 1);
        const bool whole = walk.whole(), pages = whole && usable_pages_;
        if (pages && ahead_.row != walk.first()) ahead_.ask(plan_.keys.pages, walk.first(), plan_.slice.end);
        // Keys and values alike; as one function the compiler spills in the tiles of 128 x 128 on sm_100.
        if (whole && keys_.usable())
            keys_.load(k_address(tile), plan_.keys, walk.first(), int(problem_.k.row_stride), Hint());
        else if (pages)
            Whole::load_pages(k_address(tile), ahead_, plan_.keys, Hint());
        else
            load_partial(k_address(tile), plan_.keys, walk);
        if (kValuesApart) mbarrier_arrive_behind_copies(of_tile(shared_.keys_full, tile));
        if (whole && values_.usable())
            values_.load(v_address(tile), plan_.values, walk.first(), int(problem_.v.row_stride), Hint());
        else if (pages)
            Whole::load_pages(v_address(tile), ahead_, plan_.values, Hint());
        else
            load_partial(v_address(tile), plan_.values, walk);
        mbarrier_arrive_behind_copies(of_tile(shared_.values_full, tile));
        if (pages) ahead_.ask(plan_.keys.pages, walk.first() + kRows, plan_.slice.end);
    }

    // Until the tile's keys are there, and all that this block's threads copied before.
    __device__ __forceinline__ void wait_keys(uint32_t tile) const {
        const auto& full = kValuesApart ? shared_.keys_full : shared_.values_full;
        mbarrier_wait(of_tile(full, tile), tile / kStages % 2);
    }

    // Behind wait_keys().
    __device__ __forceinline__ void wait_values(uint32_t tile) const {
        if (kValuesApart) mbarrier_wait(of_tile(shared_.values_full, tile), tile / kStages % 2);
    }

    // The warp is done with the tile.
    __device__ __forceinline__ void leave(uint32_t tile) const {
        mbarrier_arrive_warp(of_tile(shared_.empty, tile));
    }

    __device__ __forceinline__ uint32_t k_address(uint32_t tile) const {
        return shared_address(shared_.stages[0].k) + tile % kStages * sizeof(typename Stages::Stage);
    }
    __device__ __forceinline__ uint32_t v_address(uint32_t tile) const {
        return shared_address(shared_.stages[0].v) + tile % kStages * sizeof(typename Stages::Stage);
    }

  private:
    using Hint = std::conditional_t<kFew, EvictFirst, NoHint>;

    __device__ __forceinline__ static uint32_t of_tile(const uint64_t (&barriers)[kStages], uint32_t tile) {
        return shared_address(barriers) + tile % kStages * sizeof(uint64_t);
    }

    __device__ __forceinline__ void load_partial(uint32_t place, const HeadRows<const Bits<dtype>>& rows,
                                                 const TileWalk<kRows>& walk) const {
        load_tile<threads, Tile, false>(place, rows, walk.first(), walk.seen(plan_.warp()));
    }

    Stages& shared_;
    const ForwardProblem& problem_;
    const Plan& plan_;
    const Whole keys_, values_;
    const bool usable_pages_;
    mutable PagesAhead<kRows> ahead_;
};

}  // namespace flash::cuda::sm80
