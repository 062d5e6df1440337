// Two warps that copy: a tile's keys and values once, then every tile of queries that sees some of them, of
// each query head of the group, with its dO, lse and delta; and one of them plans which tile of keys is next.
// What is not finite they keep from the products where a mask could not (finite.cuh), so that the others
// never wait for that.
#pragma once

#include "../../attention/score_matrix.h"
#include "../any/finite.cuh"
#include "../any/rows.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "backward_plan.cuh"
#include "bias_tile.cuh"
#include "dq_zeros.cuh"
#include "load_rows.cuh"
#include "tensor_map.h"
#include "tile_queue.cuh"

namespace flash::cuda::sm90 {

struct BackwardMaps {
    CUtensorMap q, dout, k, v;
    CUtensorMap lse, delta;  // a row each
    CUtensorMap bias;        // if there is one
};

template <DType dtype, BackwardConfiguration c>
class BackwardProducer {
  public:
    // lead: a tile of keys is taken when all but so many tiles of queries of the one before have been copied;
    // negative: as soon as there is room for its plan.
    __device__ BackwardProducer(const BackwardProblem& problem, const BackwardMaps& maps,
                                const AlignedStatistics& statistics, const TileQueue& queue,
                                const DqSums& dq_sums, BackwardOrder order, const WalkParts& parts,
                                const WalkEnd& end, int lead, BackwardShared<c>& shared)
        : problem_(problem),
          maps_(maps),
          statistics_(statistics),
          queue_(queue),
          dq_sums_(dq_sums),
          order_(order),
          parts_(parts),
          end_(end),
          lead_(lead),
          shared_(shared) {}

    // The whole warp, which waits as a whole, too: a single lane would not sleep meanwhile, and disturb those
    // that multiply; and no lane has others go on before all have seen what they waited for, or they would
    // miss it. Plans, what is to be known of tiles that are masked, and their copies if something may not be
    // finite; or all other copies, so that few registers suffice for those. What a warp reads in shared
    // memory or spills it waits for as long as products do; who copies should read the barrier alone.
    template <bool kMasked, class Zeros = NoDqZeros>
    __device__ void run(const Zeros& zeros = {}) {
        TileQueue::Reader queue(queue_);
        if (kMasked && lane_index() == 0) queue.open();
        uint32_t stage = 0, state = kOddUse;
        uint32_t handed = 0;  // the parity of each stage's last use as the one warp hands it to the other
        uint32_t n = 0;
#pragma unroll 1
        for (uint32_t tile = 0;; ++tile) {
            if constexpr (kMasked) {
                mbarrier_wait(in_ring(shared_.left, tile), parity(shared_.left, tile) ^ 1);
                if (Zeros::exist && tile >= kBackwardPlans) tell_of_additions(tile);
                if (lead_ >= 0 && tile > 0) mbarrier_wait(shared_address(&shared_.walked), (tile - 1) % 2);
                __syncwarp();
                if (lane_index() == 0) make_plan(queue, tile);
                __syncwarp();
                const BackwardPlan& plan = shared_.plan(tile);
                if (!plan.end) zeros.await(plan.place.head);
                await_delta(shared_.plan(tile));
                if (lane_index() == 0) mbarrier_arrive(in_ring(shared_.planned, tile));
                if (!plan.end) zeros.clear_later(plan.place, dq_sums_);
            } else {
                shared_.await_plan(tile);
            }
            BackwardPlan& plan = shared_.plan(tile);
            if (plan.end) {
                if (kMasked && Zeros::exist && tile > 0) {
                    const uint32_t last = tile + kBackwardPlans - 1;
                    mbarrier_wait(in_ring(shared_.left, last), parity(shared_.left, last) ^ 1);
                    tell_of_additions(last);
                }
                break;
            }
            state = (state & kOddUse) | plan.until_next * kOneTile;
            if (plan.has_queries) {
                const int batch = tensor_batch(problem_.forward.cu_seqlens_q, plan.tile);
                const int first_row = int(plan.tile.sequence.first_query_row), group = plan.tile.group;
                const int first_statistic = plan.first_statistic;
                const bool first_lane = lane_index() == 0;
                if (statistics_.progress.done) fence_async_proxy_of_memory();  // who made the plan has waited
                // A bias may hide what is not finite anywhere.
                const bool all_finite = plan.all_finite, partial = plan.partial || (c.biased && !all_finite);
                state |= (kMasked ? QueryNote::masked : 0) | (tile % 2 ? QueryNote::odd_tile : 0) |
                         (all_finite ? kAllFinite : 0) | (partial ? kPartial : 0);
                int head = int(plan.tile.head) * group;
                const int end = head + group;
#pragma unroll 1
                for (; head < end; ++head) {
                    if (head + 1 == end) state |= kLastHead;
                    float slope = 0;
                    if (c.transformed)
                        slope = ScoreTransform<GpuMath>::slope_of(problem_.forward, plan.tile.batch, head);
                    SchedulePlace& place = plan.walks[kMasked];
                    __syncwarp();  // all lanes have seen that the last head's walk ended
                    TileWalk<c.query_tile> walk(place, plan.start);
#pragma unroll 1
                    while (walk.more()) {
                        keep(state);
                        const Position first = walk.first();
                        const bool masked = walk.masked() || state & kPartial;
                        uint32_t which = kMasked;
                        keep(which);  // or addresses for the rare end of a run would be in registers
                        SchedulePlace& next = plan.walks[which];
                        if (kMasked && !masked) {
                            const uint32_t others = walk.pass(next);
                            n += others, stage = (stage + others) % c.stages;
                            continue;
                        }
                        bool bad = false;
                        if constexpr (!kMasked) {
                            mbarrier_wait(shared_address(&shared_.empty[stage]), (state & kOddUse) != 0);
                            __syncwarp();
                            if (first_lane && (!masked || state & kAllFinite))
                                copy(stage, true, first_row + first, first_statistic + first, head, batch);
                            if (masked && first_lane) mbarrier_arrive(shared_address(&shared_.masked[stage]));
                        } else {
                            QueryNote& note = shared_.notes[stage];
                            const Interval run = walk.seen(place);  // before the wait: meanwhile it is read
                            const QueryNote::Seen seen{plan.bounds.begin - first,
                                                       plan.bounds.end - first,
                                                       {run.begin - first, run.end - first}};
                            const uint32_t* const bits = bits_of(plan, place.run.partial, head);
                            mbarrier_wait(shared_address(&shared_.masked[stage]), handed >> stage & 1);
                            handed ^= 1 << stage;
                            if (first_lane) {
                                note.first = first;
                                note.seen = seen;
                                note.bits = bits;
                            }
                            if (!(state & kAllFinite)) {
                                bad = may_be_bad(plan, first, head);
                                if (bad) copy_finite(stage, first_row + first, head, batch);
                                if (first_lane)
                                    copy(stage, !bad, first_row + first, first_statistic + first, head,
                                         batch);
                            }
                            __syncwarp();
                        }
                        if (!kMasked && !(state & kBegun)) load_keys(plan, state);
                        state |= kBegun;
                        walk.advance(next);
                        if (masked == kMasked && first_lane) {
                            const bool last = !walk.more() && state & kLastHead;
                            QueryNote& note = shared_.notes[stage];
                            note.flags = state | (last ? QueryNote::last : 0) | (bad ? QueryNote::bad : 0);
                            if (c.transformed) {
                                note.first = first;
                                note.slope = slope;
                            }
                            shared_.dq_notes[n % kDqNotes] = {first, head, last};
                            mbarrier_arrive(shared_address(&shared_.q_full[stage]));
                        }
                        if constexpr (c.biased && !kMasked) copy_bias(plan, n, first, head);
                        ++n;
                        if (++stage == c.stages) stage = 0, state ^= kOddUse;
                        state -= kOneTile;
                        if (!kMasked && state < kOneTile) tell_of_walk();
                    }
                }
            } else if (!kMasked) {
                load_keys(plan, tile % 2 ? QueryNote::odd_tile : 0);
            }
            if constexpr (!kMasked) {
                shared_.leave_plan(tile);
                if (int(state) >= int(kOneTile)) tell_of_walk();  // nobody has yet
            }
        }
    }

  private:
    using Shared = BackwardShared<c>;
    using QueryTile = TileLayout<c.query_tile, c.columns(), 2, kPanel>;
    using DoutTile = TileLayout<c.query_tile, c.value_columns(), 2, kPanel>;

    // What is to be known at each tile of queries is in one register, beside notes' flags, or it would be
    // spilled: all queries are finite; some of the tile's keys don't exist, or have to be looked for as if;
    // the group's last head is walked; the tile's keys have been copied; the parity of the stage's last use;
    // and how many tiles are copied until the next tile of keys may be taken.
    static constexpr uint32_t kAllFinite = 16, kPartial = 32, kLastHead = 64, kBegun = 128, kOddUse = 256,
                              kOneTile = 512;

    __device__ __forceinline__ void tell_of_walk() const {
        if (lane_index() == 0) mbarrier_arrive(shared_address(&shared_.walked));
    }

    // To the sums of what was walked before in the plan of `tile`, which all have left; where sums were
    // zeros. A release takes a thousand cycles, which those who add don't have.
    __device__ __forceinline__ void tell_of_additions(uint32_t tile) const {
        __syncwarp();
        if (lane_index() == 0) dq_sums_.count(shared_.plan(tile).place.head);
    }

    // By one thread. Others read the plan behind a barrier, its own warp behind __syncwarp.
    __device__ __forceinline__ void make_plan(TileQueue::Reader& queue, uint32_t tile) const {
        BackwardPlan& plan = shared_.plan(tile);
        shared_.forget_bad_keys(tile);
        TileOrder::Place place;
        if (next_place(queue, tile, place)) {
            plan.end = false;
            plan.make(problem_.forward, queue_.tiling, dq_sums_, statistics_.rows, place, order_, parts_,
                      end_, c);
            // As one expression it would cost the consumers' loop registers (tools/check_loops.py).
            if (lead_ >= 0)
                plan.until_next =
                    plan.has_queries ? max(int(plan.query_tiles) * plan.tile.group - lead_, 1) : 1;
            else
                plan.until_next = 0;
        } else {
            plan.end = true;
        }
    }
    // Of the plan's queries.
    __device__ __forceinline__ void await_delta(BackwardPlan& plan) const {
        bool all_finite = shared_.all_finite;
        if (statistics_.progress.done && !plan.end && plan.has_queries) {
            const int64_t heads = problem_.forward.heads_q, group = plan.tile.group;
            const int64_t first = plan.tile.batch * heads + plan.tile.head * group;
            all_finite = statistics_.progress.await(first, int(group));
        }
        if (lane_index() == 0) plan.all_finite = all_finite;
        __syncwarp();
    }
    // False at the end.
    __device__ __forceinline__ bool next_place(TileQueue::Reader& queue, uint32_t tile,
                                               TileOrder::Place& place) const {
        if (order_ == BackwardOrder::whole_units && tile > 0) {
            place = shared_.plan(tile - 1).place;
            if (++place.tile < queue_.tiling.tiles()) return true;
        }
        uint32_t index;
        if (!queue.take(index)) return false;
        if constexpr (!c.adds_dq())
            place = queue_.place(index);
        else if (order_ == BackwardOrder::whole_units)
            place = TileOrder::Place{0, index};
        else
            place = queue_.tiling.place(index);
        if (end_.has(place.head)) place.tile = queue_.tiling.tiles() - 1 - place.tile;
        return true;
    }

    // The tile's keys and values, if there is somebody to see them. Where they lie is known before they are
    // waited for; there is room for the values first. flags: of which plan.
    __device__ __forceinline__ void load_keys(const BackwardPlan& plan, uint32_t flags) const {
        const uint32_t free = Shared::tile_of(flags) ^ 1;  // the parity of their room's last use
        const uint32_t k_full = shared_address(&shared_.k_full), v_full = shared_address(&shared_.v_full);
        const int row = int(plan.tile.sequence.first_key_row) + plan.tile.first;
        const int head = int(plan.tile.key_head);
        const int batch = tensor_batch(problem_.forward.cu_seqlens_k, plan.tile);
        const bool loads = plan.has_queries && lane_index() == 0;
        mbarrier_wait(shared_address(&shared_.v_empty), free);
        __syncwarp();
        if (loads)
            load_rows<c.key_tile, c.key_tile, c.values()>(shared_.v, maps_.v, v_full, row, head, batch);
        if (lane_index() == 0) mbarrier_arrive(v_full);
        mbarrier_wait(shared_address(&shared_.k_empty), free);
        __syncwarp();
        if (loads)
            load_rows<c.key_tile, c.key_tile, c.head_dim, c.key_panel_step()>(shared_.k, maps_.k, k_full, row,
                                                                              head, batch);
        if (lane_index() == 0) mbarrier_arrive(k_full);
    }

    // Of the n-th tile of queries.
    __device__ __forceinline__ void copy_bias(const BackwardPlan& plan, uint32_t n, Position first,
                                              int head) const {
        const uint32_t full = shared_address(&shared_.bias.full);
        mbarrier_wait(shared_address(&shared_.bias.empty), n % 2 ^ 1);
        __syncwarp();
        if (lane_index() > 0) return;
        BiasTile<dtype, c.query_tile, c.key_tile>::load(shared_.bias.tile, maps_.bias, full,
                                                        problem_.forward.bias, int(plan.tile.batch), head,
                                                        first, plan.tile.first);
        mbarrier_arrive(full);
    }

    template <int kHeadDim>
    __device__ __forceinline__ static void load_queries(const char* to, const CUtensorMap& map,
                                                        uint32_t barrier, int row, int head, int batch) {
        load_rows<c.query_tile, c.query_tile, kHeadDim>(to, map, barrier, row, head, batch);
    }

    // By one thread. rows: Q and dO themselves, too. dO's barrier is told that this is all, Q's is not yet.
    __device__ __forceinline__ void copy(uint32_t stage, bool rows, int row, int statistic, int head,
                                         int batch) const {
        const uint32_t q_full = shared_address(&shared_.q_full[stage]),
                       dout_full = shared_address(&shared_.dout_full[stage]);
        if (rows) load_queries<c.head_dim>(shared_.q[stage], maps_.q, q_full, row, head, batch);
        mbarrier_expect(q_full, 2 * c.query_tile * int(sizeof(float)));
        tma_load(shared_address(shared_.lse[stage]), &maps_.lse, q_full, statistic, 0, head, batch);
        tma_load(shared_address(shared_.delta[stage]), &maps_.delta, q_full, statistic, 0, head, batch);
        if (rows) load_queries<c.values()>(shared_.dout[stage], maps_.dout, dout_full, row, head, batch);
        mbarrier_arrive(dout_full);
    }

    __device__ __forceinline__ const uint32_t* bits_of(const BackwardPlan& plan, bool partial,
                                                       int head) const {
        const ScoreMatrix& visible = problem_.forward.visible;
        return partial && visible.data ? row_of<const uint32_t>(visible, plan.tile.batch, head, 0) : nullptr;
    }

    __device__ __forceinline__ bool is_bad(int64_t batch, int place, int head) const {
        return !(fabsf(*statistics_of<const float>(statistics_.lse_log2, batch, place, head)) +
                     fabsf(*statistics_of<const float>(statistics_.delta, batch, place, head)) <
                 INFINITY);
    }
    // A row of Q or dO that is not finite leaves its mark on lse or delta.
    __device__ __forceinline__ bool may_be_bad(const BackwardPlan& plan, Position first, int head) const {
        const int64_t batch = plan.tile.batch;
        const int own = min(first + c.query_tile, plan.mask.seqlen_q);
        bool bad = false;
#pragma unroll 1
        for (int query = first + lane_index(); query < own; query += 32)
            bad |= is_bad(batch, plan.first_statistic + query, head);
        // Rows of a neighbouring sequence are copied, too, and have to be looked for.
        const int first_row = int(plan.tile.sequence.first_query_row);
        const int end = min(first_row + first + c.query_tile, int(problem_.forward.rows_q));
#pragma unroll 1
        for (int row = first_row + own + lane_index(); row < end; row += 32) {
            const int place = int(statistics_.rows.place(row));
            bad |= place < 0 || is_bad(batch, place, head);
        }
        return __any_sync(0xffffffff, bad);
    }

    __device__ __forceinline__ void copy_finite(uint32_t stage, int row, int head, int batch) {
        const uint32_t landed = shared_address(&shared_.landed);
        if (lane_index() == 0) {
            load_queries<c.head_dim>(shared_.q[stage], maps_.q, landed, row, head, batch);
            load_queries<c.values()>(shared_.dout[stage], maps_.dout, landed, row, head, batch);
            mbarrier_arrive(landed);
        }
        uint32_t (&bad)[(c.query_tile + 31) / 32] = shared_.bad_queries[stage];
        if (lane_index() == 0)  // which hands them on, too
            for (uint32_t& rows : bad) rows = 0;
        mbarrier_wait(landed, landed_++ % 2);
        __syncwarp();
        clear_bad_elements<dtype, 32, QueryTile>(shared_address(shared_.q[stage]), bad);
        clear_bad_elements<dtype, 32, DoutTile>(shared_address(shared_.dout[stage]), bad);
        fence_async_proxy();
        __syncwarp();
    }

    const BackwardProblem& problem_;
    const BackwardMaps& maps_;
    const AlignedStatistics& statistics_;
    const TileQueue& queue_;
    const DqSums& dq_sums_;
    const BackwardOrder order_;
    const WalkParts& parts_;
    const WalkEnd& end_;
    const int lead_;
    Shared& shared_;
    uint32_t landed_ = 0;  // tiles that were looked at
};

}  // namespace flash::cuda::sm90
