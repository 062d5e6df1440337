// dQ += dS K where dS is in device memory (score_gradients.cuh). A block computes one tile of queries after
// the other, each of its warpgroups 64 of them. One warp plans, one copies keys and dS.
#pragma once

#include "../any/finite.cuh"
#include "../ptx/barrier.h"
#include "../ptx/reduce.h"
#include "../ptx/tma.h"
#include "backward_plan.cuh"
#include "load_rows.cuh"
#include "query_tiles.cuh"
#include "score_gradients.cuh"
#include "warpgroup_product.h"

namespace flash::cuda::sm90 {

// As many warpgroups share a tile of keys as have registers: the second-level cache is the limit.
constexpr ForwardConfiguration stored_query_gradient_configuration(const BackwardConfiguration& c) {
    return {.head_dim = c.head_dim,
            .key_tile = ScoreGradientRows::kKeys,
            .warpgroups = c.head_dim > 192 ? 2 : 3,
            .stages = 4,
            .registers = c.head_dim > 192 ? 208 : 152};
}

template <ForwardConfiguration c>
struct StoredQueryGradientShared {
    static constexpr int key_bytes = c.key_tile * c.head_dim * 2, ds_bytes = c.queries() * c.key_tile * 2;
    static constexpr int kNotes = 2 * c.stages;

    alignas(1024) char k[c.stages][key_bytes];
    alignas(1024) char ds[c.stages][ds_bytes];
    uint64_t full[c.stages], empty[c.stages];
    KeyNote notes[kNotes];
    uint32_t bad_keys[c.stages][c.key_tile / 32];  // if somebody looked
    bool looks;                                    // some key is not finite
    PlanRing plans;

    // By one thread.
    __device__ void start() {
        plans.start(c.warpgroups * 4);
        for (int i = 0; i < c.stages; ++i) {
            mbarrier_init(shared_address(&full[i]), 1);
            mbarrier_init(shared_address(&empty[i]), c.warpgroups * 4 * kWarpArrivals);
        }
    }
};

template <DType dtype, ForwardConfiguration c>
class StoredQueryGradientProducer {
  public:
    __device__ StoredQueryGradientProducer(const ForwardProblem& problem, const CUtensorMap& keys,
                                           const ScoreGradients& ds, const TileQueue& queue,
                                           StoredQueryGradientShared<c>& shared)
        : problem_(problem), keys_(keys), ds_(ds), queue_(queue), shared_(shared) {}

    // A whole warp.
    __device__ void plan() {
        plan_query_tiles<c>(problem_, queue_, shared_.plans, [](const ForwardPlan&, uint32_t) {});
    }

    // A whole warp.
    __device__ void copy() {
        uint32_t tile = 0;  // of all that the block does
        shared_.plans.each([&](const ForwardPlan& plan, uint32_t n) {
            const KeyRows rows(plan.tile, problem_);
            const int64_t head = plan.tile.batch * problem_.heads_q + plan.tile.head;
            const Position first_query = plan.tile.first;
            for (NoteWriter<c> notes(plan, problem_); notes.more(); ++tile) {
                const KeyNote note = notes.next_note();
                const uint32_t full = in_ring(shared_.full, tile), stage = tile % c.stages;
                mbarrier_wait(in_ring(shared_.empty, tile), parity(shared_.empty, tile) ^ 1);
                __syncwarp();  // else a lane could miss the phase
                if (lane_index() == 0) {
                    load_keys<c.key_tile, c.head_dim>(shared_.k[stage], keys_, full, rows, note.first);
                    mbarrier_expect(full, Shared::ds_bytes);
                    bulk_load(shared_address(shared_.ds[stage]),
                              reinterpret_cast<const float*>(ds_.at(head, note.first, first_query)),
                              Shared::ds_bytes, full);
                    for (uint32_t& keys : shared_.bad_keys[stage]) keys = 0;
                    shared_.notes[tile % Shared::kNotes] = note;
                    mbarrier_arrive(full);
                }
                __syncwarp();
            }
            mbarrier_arrive_warp(in_ring(shared_.plans.walked, n));
            mbarrier_arrive_warp(in_ring(shared_.plans.done, n));
        });
    }

  private:
    using Shared = StoredQueryGradientShared<c>;

    const ForwardProblem& problem_;
    const CUtensorMap& keys_;
    const ScoreGradients& ds_;
    const TileQueue& queue_;
    Shared& shared_;
};

template <DType dtype, ForwardConfiguration c>
class StoredQueryGradient {
  public:
    __device__ StoredQueryGradient(const BackwardProblem& problem, StoredQueryGradientShared<c>& shared)
        : problem_(problem),
          shared_(shared),
          thread_(threadIdx.x),
          warpgroup_(__shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0)) {}

    __device__ __forceinline__ void run() {
        uint32_t tile = 0;  // of keys, of all that the block does
        for (uint32_t n = 0;; ++n) {
            mbarrier_wait(in_ring(shared_.plans.planned, n), parity(shared_.plans.planned, n));
            const ForwardPlan& plan = shared_.plans[n];
            if (plan.work == Work::end) break;
            dq_.clear();
            keep(registers_of(dq_));
            if (__shfl_sync(0xffffffff, plan.has_keys, 0)) walk(plan, tile);
            store_query_gradient<dtype>(problem_, plan.tile, dq_, warp_row());
            mbarrier_arrive_warp(in_ring(shared_.plans.done, n));
        }
    }

  private:
    using Shared = StoredQueryGradientShared<c>;
    using Scores = Fragment<16, c.key_tile>;
    using Operand = RegisterOperand<dtype, 16, c.key_tile>;
    using KeyTile = TileLayout<c.key_tile, c.head_dim, 2, kPanel>;

    // A barrier of each warpgroup; 0 is the block's.
    __device__ __forceinline__ void meet() const { barrier_of<128>(1 + warpgroup_); }
    __device__ __forceinline__ int warp_row() const { return int(thread_) / 32 * 16; }
    __device__ __forceinline__ uint32_t keys(uint32_t tile) const {
        return shared_address(shared_.k[0]) + tile % c.stages * Shared::key_bytes;
    }
    // The warpgroup's flags, and those of all.
    __device__ __forceinline__ uint32_t await_tile(uint32_t tile) const {
        mbarrier_wait(in_ring(shared_.full, tile), parity(shared_.full, tile));
        const uint32_t flags = __shfl_sync(0xffffffff, shared_.notes[tile % Shared::kNotes].flags, 0);
        return KeyNote::flags_of(flags, warpgroup_);
    }
    __device__ __forceinline__ void leave(uint32_t tile) const {
        mbarrier_arrive_warp(in_ring(shared_.empty, tile), thread_);
    }

    __device__ __forceinline__ void load(Operand& ds, uint32_t tile) const {
        load_score_gradients(ds, shared_address(shared_.ds[0]) + tile % c.stages * Shared::ds_bytes +
                                     thread_ / 32 * ScoreGradients::kGroupBytes + thread_ % 32 * 16);
    }

    // The plan's tiles of keys, from the block's tile-th on; tile becomes the next plan's first one. While a
    // warpgroup loads, the others multiply. (dS of the next tile must not be loaded before the wait: ptxas
    // may take the registers that the product still reads.)
    __device__ __forceinline__ void walk(const ForwardPlan& plan, uint32_t& tile) {
        const bool looks = __shfl_sync(0xffffffff, shared_.looks, 0);
        for (bool end = false; !end; ++tile) {
            const uint32_t flags = await_tile(tile);
            end = flags & KeyNote::end;
            if (!(flags & KeyNote::hidden)) {
                Operand ds;
                load(ds, tile);
                if (flags & KeyNote::masked || looks) mask(ds, plan, tile, looks);
                wgmma_fence();
                multiply_registers_by_columns<dtype, c.key_tile>(dq_, ds.value, keys(tile));
                wgmma_commit();
                wgmma_wait<0>();
                keep(registers_of(dq_));
            }
            leave(tile);
        }
    }

    // dS is 0 where nothing is seen: nobody may have stored it. NaN where a key that is not finite is seen.
    __device__ __forceinline__ void mask(Operand& ds, const ForwardPlan& plan, uint32_t tile,
                                         bool looks) const {
        if (looks) exclude_bad_keys(tile);
        const RowSight sight(plan, shared_.notes[tile % Shared::kNotes], 0);
        const uint32_t(&bad_keys)[c.key_tile / 32] = shared_.bad_keys[tile % c.stages];
        const uint32_t bad = looks ? bad_columns<Scores>(bad_keys, 0) : 0;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Interval keys = sight[warp_row() + Scores::row(r)];
            const uint32_t shown = columns_in_front_of(keys.end - sight.first(), lane_index()) &
                                   ~columns_in_front_of(keys.begin - sight.first(), lane_index());
#pragma unroll
            for (int pair = 0; pair < Scores::columns / 2; ++pair) {
                uint32_t& x = ds.value[pair / 2][0][pair % 2 * 2 + r];
                const uint32_t of_pair = shown >> 2 * pair, bad_pair = bad >> 2 * pair & of_pair;
                x |= (bad_pair & 1 ? 0x7fff : 0) | (bad_pair & 2 ? 0x7fff0000 : 0);
                x &= (of_pair & 1 ? 0xffff : 0) | (of_pair & 2 ? 0xffff0000 : 0);
            }
        }
    }

    // What of the keys is not finite is noted, and becomes 0, for dQ += dS K, where it may meet a gradient of
    // 0.
    __device__ __forceinline__ void exclude_bad_keys(uint32_t tile) const {
        const uint32_t keys_at = keys(tile);
        uint32_t(&bad_keys)[c.key_tile / 32] = shared_.bad_keys[tile % c.stages];
        note_bad_rows<dtype, 128, KeyTile>(keys_at, bad_keys);
        meet();
        clear_bad_elements<dtype, 128, KeyTile>(keys_at, bad_keys);
        fence_async_proxy();
        meet();
    }

    const BackwardProblem& problem_;
    StoredQueryGradientShared<c>& shared_;
    const uint32_t thread_;  // read once: in the loop it would come behind what products read
    const int warpgroup_;    // the same in all lanes, as the compiler sees, too
    Fragment<16, c.head_dim> dq_;
};

}  // namespace flash::cuda::sm90
