// dQ where it has a walk of its own (key_gradients.cuh). A block computes one tile of 128 queries after the
// other, each of two warpgroups 64 of them, as in the forward:
//
//     S = Q K^T, dP = dO V^T   from shared memory
//     dS = P (dP - delta)      registers, rounded: with P = exp(S - lse)
//     dQ += dS K               A from registers; until the end
//
// A tile's last product, started for one half of its keys after the other, and the next one's first two run
// together. Three warps plan and copy: one decides which queries are next, and copies those and dO; one
// copies the keys, one the values.
#pragma once

#include "../any/finite.cuh"
#include "../any/rows.h"
#include "../ptx/barrier.h"
#include "../ptx/tma.h"
#include "../tile/gpu_math.h"
#include "../tile/warp_product.h"
#include "backward_plan.cuh"
#include "load_rows.cuh"
#include "query_tiles.cuh"
#include "transformed_scores.cuh"
#include "warpgroup_product.h"

namespace flash::cuda::sm90 {

struct QueryGradientMaps {
    CUtensorMap q, dout, k, v;  // boxes of 64 rows
};

// What plans know of it: key tiles are kept until dQ is multiplied, values only until dP is.
constexpr ForwardConfiguration query_gradient_configuration(const BackwardConfiguration& c) {
    return {.head_dim = c.head_dim,
            .key_tile = 64,
            .warpgroups = 2,
            .stages = 2,
            .query_slots = 2,
            .turns = false,
            .transformed = c.transformed,
            .value_dim = c.value_dim};
}

template <ForwardConfiguration c>
struct QueryGradientShared {
    static constexpr int query_bytes = c.queries() * c.head_dim * 2, key_bytes = c.key_tile * c.head_dim * 2;
    static constexpr int dout_bytes = c.queries() * c.values() * 2, value_bytes = c.key_tile * c.values() * 2;
    static constexpr int kValues = c.head_dim > 192 ? 1 : 2;  // tiles in flight
    static constexpr int kNotes = 2 * c.stages;  // read until the keys are left, and one may be ahead

    alignas(1024) char q[query_bytes];
    alignas(1024) char dout[dout_bytes];
    alignas(1024) char k[c.stages][key_bytes];
    alignas(1024) char v[kValues][value_bytes];
    uint64_t q_full[c.warpgroups], q_empty[c.warpgroups];  // dO, too
    uint64_t k_full[c.stages], k_empty[c.stages], v_full[kValues], v_empty[kValues];
    KeyNote notes[kNotes];
    // Of a stage's keys: those that are not finite, if somebody has looked; they may be zeros now.
    uint32_t bad_keys[c.stages][(c.key_tile + 31) / 32];
    bool has_bad_keys[c.stages];
    uint32_t looked_at[c.warpgroups];  // the warpgroup's last tile of keys that it had to look at, from 1 on
    PlanRing plans;

    // By one thread.
    __device__ void start() {
        for (int i = 0; i < c.warpgroups; ++i) {
            mbarrier_init(shared_address(&q_full[i]), 1);
            mbarrier_init(shared_address(&q_empty[i]), 4 * kWarpArrivals);
            looked_at[i] = 0;
        }
        plans.start(c.warpgroups * 4);
        for (int i = 0; i < c.stages; ++i) {
            mbarrier_init(shared_address(&k_full[i]), 1);
            mbarrier_init(shared_address(&k_empty[i]), c.warpgroups * 4 * kWarpArrivals);
        }
        for (int i = 0; i < kValues; ++i) {
            mbarrier_init(shared_address(&v_full[i]), 1);
            mbarrier_init(shared_address(&v_empty[i]), c.warpgroups * 4 * kWarpArrivals);
        }
    }
};

template <DType dtype, ForwardConfiguration c>
class QueryGradientProducer {
  public:
    __device__ QueryGradientProducer(const ForwardProblem& problem, const QueryGradientMaps& maps,
                                     const TileQueue& queue, QueryGradientShared<c>& shared)
        : problem_(problem), maps_(maps), queue_(queue), shared_(shared) {}

    // A whole warp.
    __device__ void plan() {
        plan_query_tiles<c>(problem_, queue_, shared_.plans, [&](const ForwardPlan& plan, uint32_t n) {
            for (int i = 0; i < c.warpgroups; ++i) copy_queries(plan, n, i);
        });
    }

    // A whole warp each.
    __device__ void copy_keys() {
        copy_tiles<true>([&](const KeyRows& rows, uint32_t tile, const KeyNote& note) {
            const uint32_t full = in_ring(shared_.k_full, tile), stage = tile % c.stages;
            mbarrier_wait(in_ring(shared_.k_empty, tile), parity(shared_.k_empty, tile) ^ 1);
            __syncwarp();  // else a lane could miss the phase
            if (lane_index() > 0) return;
            load_keys<c.key_tile, c.head_dim>(shared_.k[stage], maps_.k, full, rows, note.first);
            for (uint32_t& keys : shared_.bad_keys[stage]) keys = 0;
            shared_.has_bad_keys[stage] = false;
            shared_.notes[tile % Shared::kNotes] = note;
            mbarrier_arrive(full);
        });
    }
    __device__ void copy_values() {
        copy_tiles<false>([&](const KeyRows& rows, uint32_t tile, Position first) {
            mbarrier_wait(in_ring(shared_.v_empty, tile), parity(shared_.v_empty, tile) ^ 1);
            __syncwarp();
            if (lane_index() > 0) return;
            load_keys<c.key_tile, c.values()>(shared_.v[tile % Shared::kValues], maps_.v,
                                              in_ring(shared_.v_full, tile), rows, first);
            mbarrier_arrive(in_ring(shared_.v_full, tile));
        });
    }

  private:
    using Shared = QueryGradientShared<c>;

    // The warpgroup's queries and gradients, or the word that there are none.
    __device__ void copy_queries(const ForwardPlan& plan, uint32_t n, int warpgroup) {
        const uint32_t full = shared_address(&shared_.q_full[warpgroup]);
        mbarrier_wait(shared_address(&shared_.q_empty[warpgroup]), n % 2 ^ 1);
        __syncwarp();  // else a lane could miss the phase
        if (lane_index() > 0) return;
        if (plan.work == Work::tile) {
            const int row = int(plan.tile.sequence.first_query_row) + plan.tile.first + warpgroup * 64;
            const int head = int(plan.tile.head), batch = tensor_batch(problem_.cu_seqlens_q, plan.tile);
            load_rows<64, c.queries(), c.head_dim>(shared_.q + warpgroup * 64 * 128, maps_.q, full, row, head,
                                                   batch);
            load_rows<64, c.queries(), c.values()>(shared_.dout + warpgroup * 64 * 128, maps_.dout, full, row,
                                                   head, batch);
        }
        mbarrier_arrive(full);
    }

    template <bool kKeys, class Copy>
    __device__ __forceinline__ void copy_tiles(const Copy& copy) {
        uint32_t tile = 0;  // of all that the block does
        shared_.plans.each([&](const ForwardPlan& plan, uint32_t n) {
            const KeyRows rows(plan.tile, problem_);
            for (NoteWriter<c> notes(plan, problem_); notes.more(); ++tile) {
                if constexpr (kKeys) {
                    copy(rows, tile, notes.next_note());
                } else {
                    copy(rows, tile, notes.next());
                }
                __syncwarp();
            }
            mbarrier_arrive_warp(in_ring(kKeys ? shared_.plans.walked : shared_.plans.done, n));
        });
    }

    const ForwardProblem& problem_;
    const QueryGradientMaps& maps_;
    const TileQueue& queue_;
    Shared& shared_;
};

template <DType dtype, ForwardConfiguration c>
class QueryGradient {
  public:
    // score_unit: from a dot product to a score in log 2.
    __device__ QueryGradient(const BackwardProblem& problem, const AlignedStatistics& statistics,
                             QueryGradientShared<c>& shared, const float& score_unit)
        : problem_(problem),
          statistics_(statistics),
          shared_(shared),
          score_unit_(score_unit),
          warpgroup_(__shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0)) {}

    __device__ __forceinline__ void run() {
        uint32_t tile = 0;  // of keys, of all that the block does
        for (uint32_t n = 0;; ++n) {
            mbarrier_wait(shared_address(&shared_.q_full[warpgroup_]), n % 2);
            const ForwardPlan& plan = shared_.plans[n];
            if (plan.work == Work::end) break;
            clear();
            if (__shfl_sync(0xffffffff, plan.multiply, 0) >> warpgroup_ & 1) {
                walk(plan, tile);
            } else {
                mbarrier_arrive_warp(shared_address(&shared_.q_empty[warpgroup_]));
                if (plan.has_keys) leave_rest(tile);
            }
            store_query_gradient<dtype>(problem_, plan.tile, dq_, warp_row());
            mbarrier_arrive_warp(in_ring(shared_.plans.done, n));
        }
    }

  private:
    using Shared = QueryGradientShared<c>;
    using Scores = Fragment<16, c.key_tile>;
    static constexpr int kHalfKeys = c.key_tile / 2;
    using Half = Fragment<16, kHalfKeys>;
    using Operand = RegisterOperand<dtype, 16, kHalfKeys>;
    using KeyTile = TileLayout<c.key_tile, c.head_dim, 2, kPanel>;

    // A barrier of each warpgroup; 0 is the block's.
    __device__ __forceinline__ void meet() const { barrier_of<128>(1 + warpgroup_); }

    // Here, not when products are under way.
    __device__ __forceinline__ void clear() {
        dq_.clear();
        keep(registers_of(dq_));
    }

    __device__ __forceinline__ static int warp_row() { return int(threadIdx.x) / 32 * 16; }
    __device__ __forceinline__ Position query(const ForwardPlan& plan, int r) const {
        return plan.tile.first + warp_row() + Scores::row(r);
    }
    __device__ __forceinline__ uint32_t keys(uint32_t tile) const {
        return shared_address(shared_.k[0]) + tile % c.stages * Shared::key_bytes;
    }
    // The warpgroup's flags, and those of all.
    __device__ __forceinline__ uint32_t await_keys(uint32_t tile) const {
        mbarrier_wait(in_ring(shared_.k_full, tile), parity(shared_.k_full, tile));
        const uint32_t flags = __shfl_sync(0xffffffff, shared_.notes[tile % Shared::kNotes].flags, 0);
        return KeyNote::flags_of(flags, warpgroup_);
    }
    __device__ __forceinline__ void await_values(uint32_t tile) const {
        mbarrier_wait(in_ring(shared_.v_full, tile), parity(shared_.v_full, tile));
    }
    __device__ __forceinline__ void leave_keys(uint32_t tile) const {
        mbarrier_arrive_warp(in_ring(shared_.k_empty, tile));
    }
    __device__ __forceinline__ void leave_values(uint32_t tile) const {
        mbarrier_arrive_warp(in_ring(shared_.v_empty, tile));
    }
    __device__ __forceinline__ void leave_unused(uint32_t tile) const {
        leave_keys(tile);
        await_values(tile);
        leave_values(tile);
    }
    // Up to the tile of queries' last one.
    __device__ __forceinline__ void leave_rest(uint32_t& tile) const {
        for (bool end = false; !end; ++tile) {
            end = await_keys(tile) & KeyNote::end;
            leave_unused(tile);
        }
    }

    // Of a tile in shared memory. Were it always the same, all its descriptors would be kept, in registers
    // that there are not.
    __device__ __forceinline__ uint32_t own_rows(const char* tile) const {
        return __shfl_sync(0xffffffff, shared_address(tile) + warpgroup_ * 64 * kPanelRowBytes, 0);
    }
    __device__ __forceinline__ void start_scores(Scores& s, uint32_t tile) const {
        multiply_rows_by_rows<dtype, c.head_dim>(s, own_rows(shared_.q), c.queries(), keys(tile));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_gradients(Scores& dp, uint32_t tile) const {
        multiply_rows_by_rows<dtype, c.values()>(
            dp, own_rows(shared_.dout), c.queries(),
            shared_address(shared_.v[0]) + tile % Shared::kValues * Shared::value_bytes);
        wgmma_commit();
    }

    // The plan's tiles of keys, from the block's tile-th on; tile becomes the next plan's first one.
    __device__ __forceinline__ void walk(const ForwardPlan& plan, uint32_t& tile) {
        float lse[Scores::rows], delta[Scores::rows];
        load_statistics(plan, lse, delta);
        uint32_t flags;
        do {
            for (; (flags = await_keys(tile)) & KeyNote::hidden; ++tile) leave_unused(tile);
            flags = walk_to_gap(plan, tile, flags, lse, delta);
        } while (!(flags & KeyNote::last));
        if (!(flags & KeyNote::end)) leave_rest(tile);
    }

    // Up to the warpgroup's last tile, or one behind which a map leaves a gap: its flags are returned.
    __device__ __forceinline__ uint32_t walk_to_gap(const ForwardPlan& plan, uint32_t& tile, uint32_t flags,
                                                    const float (&lse)[Scores::rows],
                                                    const float (&delta)[Scores::rows]) {
        Scores s, dp;
        wgmma_fence();
        start_scores(s, tile);
        await_values(tile);
        wgmma_fence();
        start_gradients(dp, tile);
        while (true) {
            wgmma_wait<1>();
            keep(registers_of(s));
            const bool masked = flags & KeyNote::masked, suspicious = masked && has_bad_score(s);
            const TransformedScores transformed = this->transformed(plan, tile);
            if constexpr (c.transformed) {
                transformed.scale_and_cap(s);
                transformed.add_alibi(s);
            }
            const bool whole = c.transformed || masked;
            exponentiate<0>(s, lse);
            if (whole) exponentiate<1>(s, lse);
            wgmma_wait<0>();
            keep(registers_of(dp));
            leave_values(tile);
            if (flags & KeyNote::last) mbarrier_arrive_warp(shared_address(&shared_.q_empty[warpgroup_]));
            differentiate<0>(s, dp, delta);
            if (whole) differentiate<1>(s, dp, delta);
            if constexpr (c.transformed)
                transformed.differentiate_cap(
                    dp,
                    [&](int tile) {
                        const float(&x)[4] = s.value[0][tile];
                        return make_float4(x[0], x[1], x[2], x[3]);
                    },
                    [&](int) { return make_float4(lse[0], lse[0], lse[1], lse[1]); });
            if (masked) mask(dp, plan, tile, flags, exclude_bad_keys(suspicious, tile));
            const Operand first(half_of<0>(dp));
            add_to_dq<0>(first, tile);
            if (!whole) {
                keep(registers_of(half_of<1>(s)));  // not before
                keep(registers_of(half_of<1>(dp)));
                exponentiate<1>(s, lse);
                differentiate<1>(s, dp, delta);
            }
            const Operand second(half_of<1>(dp));
            add_to_dq<1>(second, tile);
            wgmma_commit();
            if (flags & (KeyNote::last | KeyNote::gap)) break;
            ++tile;
            flags = await_keys(tile);
            wgmma_fence();
            start_scores(s, tile);
            wgmma_wait<1>();
            keep(registers_of(dq_));
            leave_keys(tile - 1);
            await_values(tile);
            wgmma_fence();  // only now: registers suffice for dP or for the operand dS
            start_gradients(dp, tile);
        }
        wgmma_wait<0>();
        keep(registers_of(dq_));
        leave_keys(tile);
        ++tile;
        return flags;
    }

    __device__ __forceinline__ void load_statistics(const ForwardPlan& plan, float (&lse)[Scores::rows],
                                                    float (&delta)[Scores::rows]) const {
        const int64_t first = statistics_.rows.first(plan.tile.batch);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            lse[r] = INFINITY;
            delta[r] = 0;
            if (!plan.tile.rows.contains(query(plan, r))) continue;
            const int64_t place = first + query(plan, r), batch = plan.tile.batch, head = plan.tile.head;
            lse[r] = *statistics_of<const float>(statistics_.lse_log2, batch, place, head);
            delta[r] = *statistics_of<const float>(statistics_.delta, batch, place, head);
        }
    }

    __device__ __forceinline__ TransformedScores transformed(const ForwardPlan& plan, uint32_t tile) const {
        return {plan.transform, plan.tile.first + warp_row() + plan.mask.diagonal() -
                                    shared_.notes[tile % Shared::kNotes].first};
    }

    // Of a tile's keys the second half becomes dS when the first one's part of dQ is being multiplied.
    // (kHalf: 0 or 1.)
    template <int kHalf>
    __device__ __forceinline__ void exponentiate(Scores& scores, const float (&lse)[Scores::rows]) const {
        Half& s = half_of<kHalf>(scores);
#pragma unroll
        for (int column = 0; column < Half::columns; ++column)
#pragma unroll
            for (int r = 0; r < Half::rows; ++r)
                s.at(r, column) = GpuMath::exponential(s.at(r, column) * score_unit_ - lse[r]);
    }
    // dp: dO V^T on entry, dS on return; it lacks the factor softmax_scale, which dQ gets.
    template <int kHalf>
    __device__ __forceinline__ static void differentiate(Scores& probabilities, Scores& gradients,
                                                         const float (&delta)[Scores::rows]) {
        const Half& p = half_of<kHalf>(probabilities);
        Half& dp = half_of<kHalf>(gradients);
#pragma unroll
        for (int column = 0; column < Half::columns; ++column)
#pragma unroll
            for (int r = 0; r < Half::rows; ++r)
                dp.at(r, column) = p.at(r, column) * (dp.at(r, column) - delta[r]);
    }
    template <int kHalf>
    __device__ __forceinline__ void add_to_dq(const Operand& ds, uint32_t tile) {
        wgmma_fence();
        multiply_registers_by_columns<dtype, kHalfKeys>(
            dq_, ds.value, keys(tile) + kHalf * kHalfKeys * kPanelRowBytes, c.key_tile);
    }

    // Of a key that is not finite no score is.
    __device__ __forceinline__ static bool has_bad_score(const Scores& s) {
        float zero = 0;  // NaN if one is not finite
#pragma unroll
        for (int column = 0; column < Scores::columns; ++column) zero = fmaf(s.at(0, column), 0, zero);
        return __any_sync(0xffffffff, zero != 0);
    }

    // What of the keys is not finite becomes 0, for dQ += dS K, where it may meet a gradient of 0. The other
    // warpgroup may do so, too, or have done so before this one's scores were computed: it notes them before.
    // True if there are such keys.
    __device__ __forceinline__ bool exclude_bad_keys(bool suspicious, uint32_t tile) const {
        const uint32_t keys_at = keys(tile), stage = tile % c.stages;
        uint32_t& looked_at = shared_.looked_at[warpgroup_];
        if (suspicious || shared_.has_bad_keys[stage]) looked_at = tile + 1;
        meet();
        if (__shfl_sync(0xffffffff, looked_at, 0) != tile + 1) return false;
        uint32_t(&bad_keys)[(c.key_tile + 31) / 32] = shared_.bad_keys[stage];
        note_bad_rows<dtype, 128, KeyTile>(keys_at, bad_keys);
        meet();
        shared_.has_bad_keys[stage] = true;
        meet();
        clear_bad_elements<dtype, 128, KeyTile>(keys_at, bad_keys);
        fence_async_proxy();
        meet();
        return true;
    }

    // dS is zero where invisible: what lies behind the mask may be infinite. NaN where a key that is not
    // finite is seen.
    __device__ __forceinline__ void mask(Scores& ds, const ForwardPlan& plan, uint32_t tile, uint32_t flags,
                                         bool has_bad_keys) const {
        const RowSight sight(plan, shared_.notes[tile % Shared::kNotes], 0);
        uint32_t bits[Scores::rows];
        for (uint32_t& of_row : bits) of_row = ~0u;
        if (flags & KeyNote::partial)
            plan.bits.load_columns<Scores>(bits, plan.tile.first + warp_row(), sight.first());
        const uint32_t(&bad_keys)[(c.key_tile + 31) / 32] = shared_.bad_keys[tile % c.stages];
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Interval keys = sight[warp_row() + Scores::row(r)];
            const uint32_t shown = bits[r] & columns_in_front_of(keys.end - sight.first(), lane_index()) &
                                   ~columns_in_front_of(keys.begin - sight.first(), lane_index());
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column)
                if (!(shown >> column & 1)) ds.at(r, column) = 0;
            if (!has_bad_keys) continue;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const int i = Scores::column(column);
                if (shown >> column & bad_keys[i / 32] >> i % 32 & 1)
                    ds.at(r, column) = __int_as_float(0x7fffffff);
            }
        }
    }

    const BackwardProblem& problem_;
    const AlignedStatistics& statistics_;
    QueryGradientShared<c>& shared_;
    const float& score_unit_;
    const int warpgroup_;  // the same in all lanes, as the compiler sees, too
    Fragment<16, c.head_dim> dq_;
};

}  // namespace flash::cuda::sm90
