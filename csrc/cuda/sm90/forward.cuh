// FlashAttention forward (docs/algorithm.md) with wgmma. A block stays on its multiprocessor and computes one
// tile of queries after the other. Three warps plan and copy (forward_producer.cuh); each warpgroup of the
// others owns 64 queries of the tile:
//
//     S = Q K^T   from shared memory, into registers; some of Q from registers (c.held_queries)
//     P           registers: what one product leaves is the next one's operand
//     O += P V    registers, until the end
//
// The scores of a tile of keys and the output of the tile before are computed at the same time, also where
// those belong to different tiles of queries, and warpgroups take turns at starting them, so that one takes
// exponentials while another one's products run. Tiles of keys that none of its 64 queries sees a warpgroup
// leaves out. Few queries are rows with all heads that share keys; parts of those are tiles apart (Split).
//
// A row's exponentials are taken relative to the maximum of its first tile of keys: bfloat16 and float have
// room for scores 2^100 times as large, float16 for 2^15. The sums and the output say whether that was
// enough. If not, or if a value is not finite, which a probability of 0 would spread, the tile of queries is
// done again, carefully: rows whose sums were the reason follow their maxima, the others do the same again.
// That is rare, and saves maxima, rescaling, and all votes.
#pragma once

#include "../../attention/online_softmax.h"
#include "../any/finite.cuh"
#include "../any/loader.cuh"
#include "../any/rows.cuh"
#include "../ptx/barrier.h"
#include "../ptx/exp2.h"
#include "../ptx/register_budget.h"
#include "../tile/gpu_math.h"
#include "../tile/warp_product.h"
#include "bias_tile.cuh"
#include "forward_mask.cuh"
#include "forward_output.cuh"
#include "forward_producer.cuh"
#include "transformed_scores.cuh"
#include "warpgroup_product.h"

namespace flash::cuda::sm90 {

template <DType dtype, ForwardConfiguration c>
class ForwardConsumer {
  public:
    // score_unit: from a dot product to a score in log 2. natural: one of those in natural units.
    __device__ ForwardConsumer(const ForwardProblem& problem, ForwardShared<c>& shared,
                               const float& score_unit, const PreciseFactor& natural, const OutputMap& out,
                               const FewQueries& few)
        : problem_(problem),
          shared_(shared),
          score_unit_(score_unit),
          rows_{few.heads},
          out_(problem, natural, out, shared, few),
          warpgroup_(__shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0)) {}

    __device__ __forceinline__ void run() {
        if (c.turns && warpgroup_ == c.warpgroups - 1) pass_turn();
        uint32_t tile = 0;  // of keys, of all that the block does
        bool had_tile = false;
        for (uint32_t n = 0;;) {
            const ForwardPlan& plan = await_queries(n);
            if (everywhere(plan.work == Work::end)) break;
            if constexpr (c.one_by_one()) {
                if (everywhere(plan.work == Work::tile)) attend_one_by_one(n, tile), had_tile = true;
            } else if (multiplies(plan)) {
                attend(n, tile);
                continue;
            } else if (everywhere(plan.work == Work::tile)) {
                bool over = !everywhere(plan.has_keys);
                tile = leave_rest(tile, tile - 1, over);
                out_.store_zeros(plan.tile);
            }
            leave_queries(n);
            leave_plan(n++);
        }
        if constexpr (c.few > 0) out_.store_together(shared_.plans, had_tile);
        out_.await_stores();
    }

  private:
    using Scores = Fragment<16, c.key_tile>;
    using Probabilities = RegisterOperand<dtype, 16, c.key_tile>;
    using QueryTile = TileLayout<64, c.columns(), 2, kPanel>;  // as the copies leave them
    using ValueTile = TileLayout<c.key_tile, c.value_columns(), 2, kPanel>;

    static constexpr int kTurns = 1, kTurnThreads = 256;  // the first turn's barrier; who has and had it
    static constexpr uint32_t kUnsettled = 1u << 31;  // beside a note's flags: a row has no maximum yet
    static constexpr int kAhead = 4;  // so many of a row's exponentials are prepared at once

    __device__ __forceinline__ void await_turn() const {
        if constexpr (c.turns) barrier_of<kTurnThreads>(kTurns + warpgroup_);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (c.turns) arrive_at_barrier_of<kTurnThreads>(kTurns + (warpgroup_ + 1) % c.warpgroups);
    }

    // Of what few steps need, and the compiler knows to be the same in all lanes: all of it behind one
    // branch, since each costs a step 20 cycles.
    __device__ __forceinline__ static bool rare(bool x) { return __builtin_expect(x, false); }

    __device__ __forceinline__ ForwardPlan& await_queries(uint32_t n) const {
        const uint32_t queries = n * c.warpgroups + warpgroup_;
        mbarrier_wait(in_ring(shared_.q_full, queries), parity(shared_.q_full, queries));
        return shared_.plans[n];
    }
    __device__ __forceinline__ void leave_queries(uint32_t n) const {
        mbarrier_arrive_warp(in_ring(shared_.q_empty, n * c.warpgroups + warpgroup_));
    }
    __device__ __forceinline__ void leave_plan(uint32_t n) const {
        mbarrier_arrive_warp(in_ring(shared_.plans.done, n));
    }
    __device__ __forceinline__ bool multiplies(const ForwardPlan& plan) const {
        return __shfl_sync(0xffffffff, plan.multiply, 0) >> warpgroup_ & 1;
    }
    __device__ __forceinline__ bool has_keys(uint32_t tile) const {
        return mbarrier_test(in_ring(shared_.k_full, tile), parity(shared_.k_full, tile));
    }
    __device__ __forceinline__ void await_keys(uint32_t tile) const {
        mbarrier_wait(in_ring(shared_.k_full, tile), parity(shared_.k_full, tile));
    }
    // Of keys that are there: the warpgroup's flags, and those of all.
    __device__ __forceinline__ uint32_t flags_of(uint32_t tile) const {
        return of_warpgroup(shared_.note(tile).flags);
    }
    __device__ __forceinline__ uint32_t of_warpgroup(uint32_t flags) const {
        return KeyNote::flags_of(__shfl_sync(0xffffffff, flags, 0), warpgroup_);
    }
    // What a step asks before it wants to know, since answers take as long as products: are the values there,
    // and if the warpgroup sees more, what the next tile's keys, which are there, are to it.
    struct Ahead {
        bool values;
        uint32_t flags;
    };
    __device__ __forceinline__ Ahead look_ahead(uint32_t tile, uint32_t flags) const {
        return {has_values(tile), flags & KeyNote::last ? 0 : shared_.note(tile + 1).flags};
    }
    __device__ __forceinline__ bool has_values(uint32_t tile) const {
        return mbarrier_test(in_ring(shared_.v_full, tile), parity(shared_.v_full, tile));
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

    __device__ __forceinline__ const char* queries(uint32_t n) const {
        return shared_.q[(n * c.warpgroups + warpgroup_) % c.query_slots];
    }
    __device__ __forceinline__ void hold_queries(uint32_t n) {
        queries_.template load<QueryTile>(queries(n), warp_row() % 64);
    }
    __device__ __forceinline__ void start_qk(Scores& s, uint32_t n, uint32_t tile) const {
        uint32_t q = shared_address(queries(n));
        // Were it always the same, all its descriptors would be kept, in registers that there are not.
        if constexpr (c.query_slots == c.warpgroups) q = __shfl_sync(0xffffffff, q, 0);
        multiply_held_rows_by_rows<dtype, c.head_dim>(s, queries_, q, 64,
                                                      shared_address(shared_.k[tile % c.stages]));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_pv(const Probabilities& p, uint32_t tile) {
        out_.add(p, shared_address(shared_.v[tile % c.stages]));
        wgmma_commit();
    }

    // A tile that is of no use to the warpgroup, whose keys are there. Its turn is passed before the values
    // are awaited: those may wait until another warpgroup has had its turn and left the values before.
    __device__ __forceinline__ void leave_unused(uint32_t tile) const {
        leave_keys(tile);
        await_turn();
        pass_turn();
        await_values(tile);
        leave_values(tile);
    }
    // Returns the first tile that the warpgroup sees, or `limit`, and its flags.
    __device__ __forceinline__ uint32_t leave_hidden(uint32_t tile, uint32_t limit, uint32_t& flags) const {
        for (;; ++tile) {
            await_keys(tile);
            flags = flags_of(tile);
            if (!(flags & KeyNote::hidden) || tile == limit) return tile;
            leave_unused(tile);
        }
    }
    // Returns the next tile of queries' first one, or `limit`. over: the last tile before was these queries'.
    __device__ __forceinline__ uint32_t leave_rest(uint32_t tile, uint32_t limit, bool& over) const {
        for (; !over && tile != limit; ++tile) {
            await_keys(tile);
            over = flags_of(tile) & KeyNote::end;
            leave_unused(tile);
        }
        return tile;
    }

    // Tiles of queries from the n-th on, as long as the next one is there to go on with: its first scores are
    // computed beside the last output, and that is finished beside its second ones.
    __device__ __forceinline__ void attend(uint32_t& n, uint32_t& tile) {
        const ForwardPlan* plan = &shared_.plans[n];
        Scores s;
        float rescale[Scores::rows];
        ForwardSoftmax before;
        bool pending = false;  // the output is that of the queries before, not finished yet
        bool ends, over;       // with the tile of keys the queries, for the warpgroup; for all
        softmax_ = ForwardSoftmax();
        unsettled_ = kUnsettled;
        out_.begin(everywhere(plan->careful));
        hold_queries(n);
        do {  // as long as a map leaves no gap that is too long to go on beside the last output
            uint32_t flags, next_tile;
            tile = leave_hidden(tile, tile - 1, flags);
            await_turn();
            wgmma_fence();
            start_qk(s, n, tile);
            pass_turn();
            wgmma_wait<0>();
            keep(registers_of(s));
            leave_keys(tile);
            exponentiate(s, rescale, *plan, n, tile, flags);
            if (!(flags & KeyNote::last)) await_keys(tile + 1);
            Ahead ahead = look_ahead(tile, flags);
            Probabilities p(s);
            while (true) {
                ends = false;
                next_tile = tile + 1;
                bool known = false;  // the next tile's flags
                if (rare(flags & (KeyNote::last | KeyNote::gap | KeyNote::careful))) {
                    if (pending) finish_before(n, before, pending);
                    if (flags & KeyNote::careful && flags & KeyNote::masked) {
                        await_values(tile);
                        exclude_bad_values(*plan, tile);
                    }
                    ends = flags & KeyNote::last;
                    over = flags & KeyNote::end;
                    // The producer waits for the values of this tile when it has copied so many more.
                    const uint32_t limit = tile + c.stages;
                    const bool gap = flags & KeyNote::gap;
                    if (ends) {
                        next_tile = leave_rest(next_tile, limit, over);
                        if (!over) break;
                        known = has_keys(next_tile);  // mostly; then both are looked at together
                        plan = &await_queries(n + 1);
                        const uint32_t noted = flags_of(next_tile);
                        const bool goes_on = multiplies(*plan);
                        known = !everywhere(!known | !goes_on | (noted & KeyNote::hidden) != 0);
                        if (!known && !goes_on) break;
                        if (known) flags = noted;
                    }
                    if (!known && (ends || gap)) {
                        next_tile = leave_hidden(next_tile, limit, flags);
                        if (flags & KeyNote::hidden) break;
                        known = true;
                    }
                    if (ends) {
                        hold_queries(n + 1);
                        before = softmax_;
                        softmax_ = ForwardSoftmax();
                        unsettled_ = kUnsettled;
                    }
                }
                await_turn();
                wgmma_fence();
                start_qk(s, n + ends, next_tile);
                const bool late = rare(pending);
                if (late) {
                    pass_turn();
                    finish_before(n, before, pending);
                }
                if (!ahead.values) await_values(tile);
                wgmma_fence();
                start_pv(p, tile);
                if (!late) pass_turn();
                if (!known) flags = of_warpgroup(ahead.flags);
                const bool keys_are_there = has_keys(next_tile + 1);
                wgmma_wait<1>();
                keep(registers_of(s));
                leave_keys(next_tile);
                exponentiate(s, rescale, *plan, n + ends, next_tile, flags);
                wgmma_wait<0>();
                keep(registers_of(s));
                leave_values(tile);
                if (!keys_are_there && !(flags & KeyNote::last)) await_keys(next_tile + 1);
                if (rare(ends || flags & KeyNote::careful)) {
                    out_.keep();
                    if (ends) {
                        pending = true;
                        ++n;
                    } else {
                        out_.rescale(rescale);
                    }
                }
                ahead = look_ahead(next_tile, flags);
                p = Probabilities(s);
                tile = next_tile;
            }
            await_values(tile);
            wgmma_fence();
            start_pv(p, tile);
            wgmma_wait<0>();
            out_.keep();
            leave_values(tile);
            tile = next_tile;
        } while (!ends);
        tile = leave_rest(tile, tile - 1, over);
        out_.finish(shared_.plans[n], softmax_);
        leave_plan(n++);
    }

    // The same with less at a time: of few queries an output beside the next scores, else one product.
    __device__ __forceinline__ void attend_one_by_one(uint32_t n, uint32_t& tile) {
        ForwardPlan& plan = shared_.plans[n];
        softmax_ = ForwardSoftmax();
        unsettled_ = kUnsettled;
        out_.begin(true);  // perhaps no product comes
        hold_queries(n);
        Probabilities p;
        uint32_t before = 0;
        bool pending = false;  // the values of `before` are being multiplied
        const auto leave_before = [&] {
            wgmma_wait<0>();
            out_.keep();
            if (pending) leave_values(before);
            pending = false;
        };
        for (bool over = !everywhere(plan.has_keys); !over; ++tile) {
            await_keys(tile);
            const uint32_t flags = flags_of(tile);
            over = flags & KeyNote::end;
            if (flags & KeyNote::hidden) {
                leave_before();
                leave_unused(tile);
                continue;
            }
            Scores s;
            float rescale[Scores::rows];
            if (c.blocks > 1) leave_before();
            wgmma_fence();
            start_qk(s, n, tile);
            if (c.blocks > 1)
                wgmma_wait<0>();
            else
                leave_before();
            keep(registers_of(s));
            leave_keys(tile);
            exponentiate(s, rescale, plan, n, tile, flags);
            await_values(tile);
            if (rare(flags & KeyNote::careful)) {
                out_.rescale(rescale);
                if (flags & KeyNote::masked) exclude_bad_values(plan, tile);
            }
            p = Probabilities(s);
            wgmma_fence();
            start_pv(p, tile);
            before = tile;
            pending = true;
        }
        leave_before();
        out_.finish(plan, softmax_);
    }

    // The output of the queries before the n-th, while the first scores of the n-th are multiplied.
    __device__ __forceinline__ void finish_before(uint32_t n, const ForwardSoftmax& softmax, bool& pending) {
        out_.finish(shared_.plans[n - 1], softmax);
        out_.begin(everywhere(shared_.plans[n].careful));
        leave_plan(n - 1);
        pending = false;
    }

    // Scores become probabilities relative to the maximum of the row's first tile.
    __device__ __forceinline__ void exponentiate(Scores& s, float (&rescale)[Scores::rows],
                                                 const ForwardPlan& plan, uint32_t n, uint32_t tile,
                                                 uint32_t flags) {
        constexpr uint32_t unusual = KeyNote::last | KeyNote::masked | KeyNote::careful | kUnsettled;
        const KeyNote& note = shared_.note(tile);
        if constexpr (c.transformed) transformed(plan, note).scale_and_cap(s);
        if constexpr (c.biased) add_bias(s, flags & KeyNote::careful);
        bool wants_alibi = c.transformed;
        if (rare((flags | unsettled_) & unusual)) {
            if (!c.one_by_one() && flags & KeyNote::last) leave_queries(n);
            if (flags & KeyNote::masked) mask_scores<c>(s, plan, note, flags, warp_row(), rows_);
            wants_alibi = c.transformed && !plan.template alibi_first<c>(warpgroup_);
            if (c.transformed && !wants_alibi) transformed(plan, note).add_alibi(s);
            if (flags & KeyNote::careful) return exponentiate_carefully(s, rescale, plan, note);
            if (unsettled_) settle(s);
        }
        if (wants_alibi) transformed(plan, note).add_alibi(s);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) exponentiate_row(s, r, score_unit_);
    }

    // Or, in rows that need it, to the maximum of all tiles so far: then what was summed up before is to be
    // rescaled.
    __device__ __forceinline__ void exponentiate_carefully(Scores& s, float (&rescale)[Scores::rows],
                                                           const ForwardPlan& plan, const KeyNote& note) {
        if constexpr (c.transformed) {
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) {
                const float largest = row_maximum(s, r);
                if (!plan.follows(warp_row() + Scores::row(r))) settle_row(r, largest);
            }
            if (!plan.template alibi_first<c>(warpgroup_)) transformed(plan, note).add_alibi(s);
        }
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const float largest = __fmul_rn(row_maximum(s, r), score_unit_);
            float unit = score_unit_;
            rescale[r] = 1;
            if (plan.follows(warp_row() + Scores::row(r))) {
                rescale[r] = softmax_.rows[r].update(largest);
                // Rounded as the maximum is, so that the largest probability is 1.
#pragma unroll
                for (int column = 0; column < Scores::columns; ++column)
                    s.at(r, column) = __fmul_rn(s.at(r, column), unit);
                unit = 1;
            } else {
                settle_row(r, largest);
            }
            exponentiate_row(s, r, unit);
        }
    }

    // ALiBi comes when a row has its reference: what it takes from the first tile's scores is no measure of
    // what it takes from those of nearer keys.
    __device__ __forceinline__ static TransformedScores transformed(const ForwardPlan& plan,
                                                                    const KeyNote& note) {
        return {plan.transform, plan.tile.first + warp_row() + plan.mask.diagonal() - note.first};
    }

    // A warpgroup meets all tiles of the bias that it sees.
    __device__ __forceinline__ void add_bias(Scores& s, bool careful) {
        mbarrier_wait(shared_address(&shared_.bias.full[warpgroup_]), bias_tile_++ % 2);
        const BiasTile<dtype, 64, c.key_tile> tile(shared_.bias.tiles[warpgroup_],
                                                   problem_.bias.row_stride == 0);
        const auto part = tile.rows_from(warp_row() % 64);
        if (careful || one_hides_a_score<dtype>(part.lowest()))
            part.template add_to<true>(s);
        else
            part.template add_to<false>(s);
        mbarrier_arrive_warp(shared_address(&shared_.bias.empty[warpgroup_]));
    }
    __device__ __forceinline__ void exponentiate_row(Scores& s, int r, float unit) {
        float reference = softmax_.rows[r].reference(), sum = softmax_.rows[r].row_sum;
#pragma unroll
        for (int column = 0; column < Scores::columns; ++column) {
            // Waits for an exponential: ptxas would begin with all multiplications, and leave the
            // exponentials nothing to hide behind.
            if (column >= 2 * kAhead && column % kAhead == 0)
                reference = behind(reference, s.at(r, column - 2 * kAhead));
            float& p = s.at(r, column);
            p = GpuMath::exponential(fmaf(p, unit, -reference));
            sum += p;
        }
        softmax_.rows[r].row_sum = sum;
    }

    // Rows without a maximum take this tile's.
    __device__ __forceinline__ void settle(const Scores& s) {
        bool settled = true;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            settle_row(r, __fmul_rn(row_maximum(s, r), score_unit_));
            settled &= softmax_.rows[r].settled();
        }
        unsettled_ = everywhere(!settled) ? kUnsettled : 0;
    }
    __device__ __forceinline__ void settle_row(int r, float largest) {
        OnlineSoftmax<GpuMath>& row = softmax_.rows[r];
        if (!row.settled() && largest > row.row_max) row.row_max = largest;
    }

    // All consumers: elements of V that are not finite become 0, and the output of a row that sees such a key
    // is NaN from here on. What is not finite would else be everybody's: a hidden key's probability is 0, not
    // no factor.
    __device__ __forceinline__ void exclude_bad_values(const ForwardPlan& plan, uint32_t tile) {
        const KeyNote& note = shared_.note(tile);
        barrier_of<c.consumers()>(kConsumers<c>);  // everybody has read the last tile's notes
        if (threadIdx.x < (c.key_tile + 31) / 32) shared_.bad_keys[threadIdx.x] = 0;
        barrier_of<c.consumers()>(kConsumers<c>);
        clear_bad_elements<dtype, c.consumers(), ValueTile>(shared_address(shared_.v[tile % c.stages]),
                                                            shared_.bad_keys);
        fence_async_proxy();
        barrier_of<c.consumers()>(kConsumers<c>);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r)
            if (sees_bad_key<dtype, c>(problem_, plan, note, warpgroup_, warp_row() + Scores::row(r), rows_,
                                       shared_.bad_keys))
                out_.forget(r);
    }

    const ForwardProblem& problem_;
    ForwardShared<c>& shared_;
    const float& score_unit_;
    const QueryRows<(c.few != 0)> rows_;
    const int warpgroup_;  // the same in all lanes, as the compiler sees, too
    ForwardSoftmax softmax_;
    uint32_t unsettled_;  // kUnsettled or 0
    uint32_t bias_tile_ = 0;
    ForwardOutput<dtype, c> out_;
    HeldRows<dtype, c.held_queries> queries_;
};

}  // namespace flash::cuda::sm90
