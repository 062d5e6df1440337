// FlashAttention backward (docs/algorithm.md) with wgmma: a block takes one tile of keys of one key head
// after the other and visits the tiles of queries that see it, of every query head of the group, or of a part
// of all that (../any/walk_parts.cuh), in turn. Two warps copy (backward_producer.cuh), two add to dQ
// (backward_dq.cuh); each of two warpgroups owns 64 of the keys. Scores are transposed, [keys, queries], so
// that what one product leaves in registers is the next one's operand:
//
//     S^T = K Q^T, dP^T = V dO^T   from shared memory; some of K and V from registers (c.held_keys)
//     P^T, dS^T                    registers, rounded
//     dV += P^T dO, dK += dS^T Q   A from registers; until the end
//     dQ = dS K                    dS of all keys by way of shared memory; the warpgroups divide the tile's
//                                  rows or columns. fp32 additions in device memory, by the copy engine
//
// Products whose two operands lie in shared memory take all that it can deliver, and who else reads or stores
// there waits for up to a thousand cycles. backward_turns.cuh and backward_walk.cuh say what is done beside
// what.
#pragma once

#include "../any/finite.cuh"
#include "../ptx/barrier.h"
#include "../ptx/register_budget.h"
#include "../ptx/stmatrix.h"
#include "../ptx/tma.h"
#include "../tile/warp_product.h"
#include "backward_dq.cuh"
#include "backward_mask.cuh"
#include "store_rows.cuh"
#include "tensor_map.h"
#include "transposed_scores.cuh"
#include "warpgroup_product.h"

namespace flash::cuda::sm90 {

struct KeyGradientMaps {
    OutputMap dk, dv;
};

// kInWalk: see backward_dq.cuh.
template <DType dtype, BackwardConfiguration c, bool kInWalk>
class BackwardConsumer {
  public:
    // score_unit: from a dot product to a score in log 2.
    __device__ BackwardConsumer(const BackwardProblem& problem, const KeyGradientMaps& maps,
                                const DqSums& dq_sums, const WalkParts& parts, BackwardShared<c>& shared,
                                const float& score_unit)
        : problem_(problem),
          maps_(maps),
          dq_sums_(dq_sums),
          parts_(parts),
          shared_(shared),
          score_unit_(score_unit),
          thread_(__shfl_sync(0xffffffff, threadIdx.x, lane_index())) {}

    __device__ __forceinline__ void run() {
        uint32_t n = 0;  // tiles of queries so far
        if (kTakesTurns && warpgroup() == 1) arrive_at_barrier_of<c.consumers>(kTurns);
#pragma unroll 1
        for (uint32_t tile = 0;; ++tile) {
            shared_.await_plan(tile);
            const BackwardPlan& plan = shared_.plan(tile);
            if (plan.end) break;
            warpgroup_ = warpgroup();  // here: else descriptors wait in registers that products can't read
            // Of a 0 that the compiler knew it would make a loop of its own for the first tile.
            float zero[1] = {0};
            keep(zero);
            dk_.fill(zero[0]);
            dv_.fill(zero[0]);
            if (!kInWalk)
                parts_.begin<c.consumers, kTilesOfParts>(plan.part, plan.tile_of_all, thread_, dk_, dv_);
            bool values_stored = false;
            if (plan.has_queries) {
                if constexpr (kTakesTurns)
                    values_stored = walk_in_turns(plan, tile, n);
                else
                    walk(tile, n);
            } else {
                mbarrier_wait(shared_address(&shared_.k_full), tile % 2);
                leave_values();
                leave_keys();
                await_stores();
            }
            store(plan, tile, n, values_stored);
        }
        await_stores();
    }

  private:
    using Shared = BackwardShared<c>;
    using Scores = Fragment<16, c.query_tile>;
    using Operand = RegisterOperand<dtype, 16, c.query_tile>;
    using Half = Fragment<16, c.query_tile / 2>;
    using HalfOperand = RegisterOperand<dtype, 16, c.query_tile / 2>;
    static constexpr int kHalfRows = c.query_tile / 2 * kPanelRowBytes;  // bytes in a panel of Q or dO
    using Gradient = Fragment<16, c.head_dim>;
    using PackedGradient = RegisterOperand<dtype, 16, c.head_dim>;
    using Dq = sm90::Dq<dtype, c>;
    // As the copies leave them.
    using KeyTile = TileLayout<c.key_tile, c.columns(), 2, kPanel>;
    using ScoreTile = TileLayout<64, c.query_tile, 2, kPanel>;
    static_assert(c.warpgroups == 2 && c.key_tile == 64 * c.warpgroups &&
                  Dq::Accumulators::columns * 4 == c.key_panel_step());
    static_assert(c.held_keys <= kPanel || c.key_panel_step() == kPanel);

    // lse of the next tile is read before its products start, which leave little of shared memory's time to
    // others; where registers suffice.
    static constexpr bool kEarlyLse = c.query_tile == 64;
    // Without turns the second half of a tile's queries is done beside dV and dK of the first one, where that
    // is faster: 2 % at 128, -3 at 64. But not what has to be masked or transformed.
    static constexpr bool kInHalves = c.query_tile == 64 && !c.transformed;
    // Where dQ is finished in the walk, which makes them longer, turns lose 1 to 4 %, but win as much at 96.
    static constexpr bool kTakesTurns = c.takes_turns() && (!kInWalk || c.head_dim == 96);
    // Barriers; 0 is the block's. kTurns is two, and so is kOwn, of a warpgroup alone; kRoom: the second
    // warpgroup's dS is no longer needed, where it has one place.
    static constexpr int kConsumers = 1, kTurns = 2, kRoom = 4, kOwn = 5;
    static constexpr int kPanels = c.columns() / kPanel;  // of a gradient
    static constexpr int kTilesOfParts = 2 * Gradient::column_tiles;

    // The same for the whole warp, and the compiler knows.
    __device__ __forceinline__ static int warpgroup() {
        return __shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0);
    }
    // Of the tile of keys.
    __device__ __forceinline__ int warp_row() const { return int(thread_) / 32 * 16; }
    __device__ __forceinline__ uint32_t warpgroup_rows() const { return warpgroup_ * 64 * kPanelRowBytes; }
    __device__ __forceinline__ static void meet() { barrier_of<c.consumers>(kConsumers); }
    __device__ __forceinline__ void meet_own() const {
        barrier_of<128>(kOwn + warpgroup_);
    }

    __device__ __forceinline__ void await_queries(uint32_t n) const {
        mbarrier_wait(in_ring(shared_.q_full, n), parity(shared_.q_full, n));
    }
    __device__ __forceinline__ bool has_queries(uint32_t n) const {
        return mbarrier_test(in_ring(shared_.q_full, n), parity(shared_.q_full, n));
    }
    __device__ __forceinline__ void await_douts(uint32_t n) const {
        mbarrier_wait(in_ring(shared_.dout_full, n), parity(shared_.dout_full, n));
    }
    __device__ __forceinline__ uint32_t queries(uint32_t n) const {
        return shared_address(shared_.q[0]) + n % c.stages * Shared::query_bytes;
    }
    __device__ __forceinline__ uint32_t douts(uint32_t n) const {
        return shared_address(shared_.dout[0]) + n % c.stages * Shared::query_bytes;
    }

    __device__ __forceinline__ void start_scores(Scores& s, uint32_t n) const {
        multiply_held_rows_by_rows<dtype, c.head_dim, c.key_panel_step()>(
            s, keys_, shared_address(shared_.k) + warpgroup_rows(), c.key_tile, queries(n));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_gradients(Scores& dp, uint32_t n) const {
        multiply_held_rows_by_rows<dtype, c.head_dim>(
            dp, values_, shared_address(shared_.v) + warpgroup_rows(), c.key_tile, douts(n));
        wgmma_commit();
    }
    // Of all queries or of a half, whose P and dS become p and ds.
    template <int kHalf, class Part, class PartOperand>
    __device__ __forceinline__ void start_dv(const Part& from_p, const Part& from_ds, PartOperand& p,
                                             PartOperand& ds, uint32_t n) {
        ds = PartOperand(from_ds);
        store_ds<kHalf>(ds, n);
        p = PartOperand(from_p);
        start_dv<kHalf>(p, n);
    }
    template <int kHalf, class PartOperand>
    __device__ __forceinline__ void start_dv(const PartOperand& p, uint32_t n) {
        wgmma_fence();
        multiply_registers_by_columns<dtype, PartOperand::columns>(dv_, p.value, douts(n) + kHalf * kHalfRows,
                                                                   c.query_tile);
        wgmma_commit();
    }
    template <int kHalf, class PartOperand>
    __device__ __forceinline__ void start_dk(const PartOperand& ds, uint32_t n) {
        multiply_registers_by_columns<dtype, PartOperand::columns>(
            dk_, ds.value, queries(n) + kHalf * kHalfRows, c.query_tile);
        wgmma_commit();
    }
    // dS is there for dQ.
    __device__ __forceinline__ static void meet_for_dq() {
        fence_async_proxy();
        meet();
        wgmma_fence();
    }
    __device__ __forceinline__ void start_dq(typename Dq::Accumulators& dq, uint32_t n) const {
        const uint32_t k = shared_address(shared_.k);
        if constexpr (Dq::column_warps == c.warpgroups) {  // who divide the columns
            constexpr int panels = KeyTile::panels / c.warpgroups;
            multiply_columns_by_columns<dtype, c.key_tile>(dq, shared_.ds_of(0, n),
                                                           k + warpgroup_ * panels * KeyTile::panel_bytes);
        } else {  // or the rows, and dS does not lie together
#pragma unroll
            for (int i = 0; i < c.warpgroups; ++i)
                multiply_columns_by_columns<dtype, 64>(
                    dq, shared_.ds_of(i, n) + warpgroup_ * ScoreTile::panel_bytes,
                    k + i * 64 * kPanelRowBytes, c.key_tile, i > 0);
        }
        wgmma_commit();
    }

    // The tiles of queries that see the tile of keys, from the n-th of the block on; n becomes the next one.
    __device__ __forceinline__ void walk(uint32_t tile, uint32_t& n);  // backward_walk.cuh
    // True if dV has been stored, too.
    __device__ __forceinline__ bool walk_in_turns(const BackwardPlan& plan, uint32_t tile,
                                                  uint32_t& n);  // backward_turns.cuh
    __device__ __forceinline__ void await_turn() const { barrier_of<c.consumers>(kTurns + warpgroup_); }
    __device__ __forceinline__ void pass_turn() const {
        arrive_at_barrier_of<c.consumers>(kTurns + 1 - warpgroup_);
    }

    // The n-th tile's dV and dK have what they need of it.
    __device__ __forceinline__ void leave(uint32_t n) const {
        mbarrier_arrive_warp(in_ring(shared_.empty, n), thread_);
    }

    // The tile's values or keys have been multiplied for the last time.
    __device__ __forceinline__ void leave_values() const {
        mbarrier_arrive_warp(shared_address(&shared_.v_empty), thread_);
    }
    __device__ __forceinline__ void leave_keys() const {
        mbarrier_arrive_warp(shared_address(&shared_.k_empty), thread_);
    }

    // What of the warpgroup's rows of K is not finite becomes 0, for dQ = dS K, where it may meet a gradient
    // of 0; its keys are noted. Of such a key no score is finite, and s are those of the tile's first
    // queries. Before dQ the warpgroups meet, or one has waited for its turn.
    __device__ __forceinline__ void look_for_bad_keys(const Scores& s, uint32_t tile) const {
        bool& has_bad_keys = shared_.has_bad_keys[tile % 2][warpgroup_];
        if (fmaf(s.at(0, 0), 0, s.at(1, 0) * 0) != 0) has_bad_keys = true;
        meet_own();
        if (!has_bad_keys) return;
        using Panel = TileLayout<64, kPanel, 2, kPanel>;
        uint32_t place = shared_address(shared_.k) + warpgroup_rows();
#pragma unroll 1
        for (int panel = 0; panel < KeyTile::panels; ++panel, place += KeyTile::panel_bytes)
            clear_bad_elements<dtype, 128, Panel>(place, shared_.bad_keys[tile % 2] + warpgroup_ * 2);
        fence_async_proxy();
        meet_own();
    }

    // Numbers of a lane's queries: two columns of each 8.
    struct Pairs {
        float2 of[Scores::column_tiles];
    };
    __device__ __forceinline__ void load_early(Pairs& lse, uint32_t n) const {
        if constexpr (!kEarlyLse) return;
#pragma unroll
        for (int tile = 0; tile < Scores::column_tiles; ++tile) lse.of[tile] = late_lse(tile, n);
    }
    __device__ __forceinline__ float2 late_lse(int tile, uint32_t n) const {
        return pair_of(shared_.lse[n % c.stages], tile, thread_);
    }

    __device__ __forceinline__ TransformedScores transformed(uint32_t n) const {
        return shared_.transformed(shared_.notes[n % c.stages], warp_row());
    }

    // True if the bias hides some of the warp's scores. Then it is wanted once more.
    __device__ __forceinline__ bool add_bias(Scores& s, uint32_t n) const {
        mbarrier_wait(shared_address(&shared_.bias.full), n % 2);
        uint32_t lowest = 0;
        bias().each_part_of_columns(warp_row(), [&](int query, const BiasPart<dtype, 16>& part) {
            lowest = minimum<dtype>(lowest, part.lowest());
            part.template add_to<false>(s, query);
        });
        const bool hides = one_hides_a_score<dtype>(lowest);
        if (!hides) mbarrier_arrive_warp(shared_address(&shared_.bias.empty));
        return hides;
    }
    // What is hidden is zero, whatever lies behind it.
    __device__ __forceinline__ void clear_hidden(Scores& p, Scores& ds) const {
        bias().each_part_of_columns(warp_row(), [&](int query, const BiasPart<dtype, 16>& part) {
            part.clear_hidden(p, query);
            part.clear_hidden(ds, query);
        });
        mbarrier_arrive_warp(shared_address(&shared_.bias.empty));
    }
    __device__ __forceinline__ BiasTile<dtype, c.query_tile, c.key_tile> bias() const {
        return {shared_.bias.tile, problem_.forward.bias.row_stride == 0};
    }

    // s: dot products, or transformed ones, on entry, P on return; of half of the queries. lse_of: of 8 of
    // all queries.
    template <int kHalf, class LseOf>
    __device__ __forceinline__ void exponentiate(Scores& s, const LseOf& lse_of) const {
        exponentiate_columns(half_of<kHalf>(s), score_unit_,
                             [&](int i) { return lse_of(kHalf * Half::column_tiles + i); });
    }
    // dp: dO V^T on entry, dS on return; it lacks the factor softmax_scale, which the sums get.
    template <int kHalf>
    __device__ __forceinline__ void differentiate(Scores& p, Scores& dp, uint32_t n) const {
        differentiate_columns(
            half_of<kHalf>(dp), [&](int i) { return four_of(half_of<kHalf>(p), i); },
            [&](int i) {
                return pair_of(shared_.delta[n % c.stages], kHalf * Half::column_tiles + i, thread_);
            });
    }
    __device__ __forceinline__ void differentiate_cap(const Scores& p, Scores& ds, uint32_t n) const {
        transformed(n).differentiate_cap(
            ds, [&](int tile) { return four_of(p, tile); },
            [&](int tile) {
                const float2 lse = late_lse(tile, n);
                return make_float4(lse.x, lse.y, lse.x, lse.y);
            });
    }

    __device__ __forceinline__ void mask(Scores& p, Scores& ds, uint32_t flags, const QueryWords<c>& words,
                                         uint32_t n) const {
        const bool has_bits = shared_.notes[n % c.stages].bits;
        mask_scores(
            shared_, flags, n, warp_row(), thread_,
            [&](int part) { return has_bits ? words.visible(shared_, flags, warp_row(), part) : ~0u; }, p,
            ds);
    }

    template <int kHalf, class PartOperand>
    __device__ __forceinline__ void store_ds(const PartOperand& ds, uint32_t n) const {
        const uint32_t lane = thread_ % 32;
        const uint32_t place = own_ds(n) + ScoreTile::offset(lane % 16, 0, lane / 16);
#pragma unroll
        for (int k = 0; k < PartOperand::columns / 16; ++k)
            stmatrix_x4(ScoreTile::at(place, 0, kHalf * Half::column_tiles * 8 + k * 16), ds.value[k][0]);
    }

    __device__ __forceinline__ bool has_room_for_dq(uint32_t n) const {
        return mbarrier_test(shared_address(&shared_.dq_empty[warpgroup_]), n % 2);
    }
    // Where the n-th tile's dQ goes.
    __device__ __forceinline__ DqEnd await_room_for_dq(uint32_t n) const {
        mbarrier_wait(shared_address(&shared_.dq_empty[warpgroup_]), n % 2);
        return kInWalk ? shared_.dq_ends[warpgroup_] : DqEnd::none;
    }

    // To shared memory, from where another warp has it added (DqAdder); or to dQ itself.
    __device__ __forceinline__ void hand_over(typename Dq::Accumulators& dq, DqEnd end, uint32_t flags,
                                              uint32_t n) const {
        const uint32_t place = shared_address(shared_.dq) + Dq::shared_place(thread_);
        if (end == DqEnd::none) {
            Dq::store_shared(place, dq);
            mbarrier_arrive_warp(shared_address(&shared_.dq_full[warpgroup_]), thread_);
            return;
        }
        const BackwardPlan& plan = shared_.plan(Shared::tile_of(flags));
        const DqNote& note = shared_.dq_notes[n % kDqNotes];
        const Position first = note.first;
        if (end == DqEnd::with_sums) Dq::add_shared(dq, place);
        dq *= dq_sums_.scale();
        const ForwardProblem& problem = problem_.forward;
        HeadRows<Bits<dtype>> rows(problem_.dq, plan.tile.batch, plan.tile.sequence.first_query_row,
                                   note.head, problem.head_dim);
        mbarrier_arrive_warp(shared_address(&shared_.dq_full[warpgroup_]), thread_);
        // The products give a warpgroup all rows first (start_dq).
        constexpr int row_warps = c.query_tile / 16;
        const int warp = int(thread_) / 32, column = warp / row_warps * (c.head_dim / Dq::column_warps);
        rows.data += column;
        rows.head_dim -= column;
        store_rows<dtype>(rows, dq, first + warp % row_warps * 16, {0, plan.tile.sequence.seqlen_q});
    }

    // dK, and dV unless it has been stored. n: the next tile of queries.
    __device__ __forceinline__ void store(const BackwardPlan& plan, uint32_t tile, uint32_t n,
                                          bool values_stored) {
        const ForwardProblem& problem = problem_.forward;
        const RowTile keys = plan.tile;
        const uint32_t part = plan.part, tile_of_all = plan.tile_of_all;
        shared_.leave_plan(tile);  // before the stores: what ptxas keeps in memory comes behind them
        // The next dS's place is free; the other one when everybody's last dQ is multiplied, as it is behind
        // the last turn.
        if constexpr (!kTakesTurns && (ScoreTile::panels == 1 || Shared::kBuffers == 1)) meet();
        if (!values_stored && !parts_.end<c.consumers, kTilesOfParts>(part, tile_of_all, thread_, dk_, dv_))
            return;
        dk_ *= float(problem.softmax_scale);
        if (values_stored) {
            await_stores();
            store_panels<kPanels, 2 * kPanels, 2>(n, keys);
        } else if (copies_store(keys)) {
            store_panels<0, 2 * kPanels, 2>(n, keys);
        } else {
            const auto rows_of = [&](const TensorView& view, int64_t head_dim) {
                return HeadRows<Bits<dtype>>(view, keys.unowned ? 0 : keys.batch, keys.sequence.first_key_row,
                                             keys.key_head, head_dim);
            };
            const Position first = keys.first + warp_row();
            store_rows<dtype>(rows_of(problem_.dv, problem.head_dim_v), dv_, first, keys.rows);
            store_rows<dtype>(rows_of(problem_.dk, problem.head_dim), dk_, first, keys.rows);
        }
    }
    // dV, while dQ of the last tile of queries is still to be multiplied. n: the next one, whose dS's place
    // is free; others are not. False if that is not possible.
    __device__ __forceinline__ bool store_values(const RowTile& keys, uint32_t n) const {
        if (parts_.divide() || !copies_store(keys)) return false;
        store_panels<0, kPanels, 1>(n, keys);
        return true;
    }

    // The same for the whole warp. A copy leaves out what lies behind the tensor's rows, but would write
    // those of the next sequence.
    __device__ __forceinline__ bool copies_store(const RowTile& keys) const {
        const Position first = keys.first + warp_row();
        const bool whole = keys.rows.begin <= first && first + 16 <= keys.rows.end;
        return __any_sync(0xffffffff,
                          maps_.dk.fits & maps_.dv.fits & (whole | !problem_.forward.cu_seqlens_k));
    }
    // Panels of dV, then of dK, by way of so many of the warp's places in dS, where its next dS will be, and
    // that behind it.
    template <int kFirst, int kEnd, int kPlaces>
    __device__ __forceinline__ void store_panels(uint32_t n, const RowTile& keys) const {
        constexpr bool kTwo = kPlaces > 1 && kFirst + 1 < kEnd;
        stage<kFirst>(own_scores(n, 0));
        if constexpr (kTwo) stage<kFirst + 1>(own_scores(n, 1));
        fence_async_proxy();
        __syncwarp();
        if (thread_ % 32 == 0) {
            start_copy<kFirst>(own_scores(n, 0), keys);
            if constexpr (kTwo) start_copy<kFirst + 1>(own_scores(n, 1), keys);
            bulk_commit();
        }
        if constexpr (kFirst + 1 + kTwo < kEnd) {
            await_stores();
            store_panels<kFirst + 1 + kTwo, kEnd, kPlaces>(n, keys);
        }
    }
    template <int kIndex>
    __device__ __forceinline__ void stage(uint32_t place) const {
        stage_panel<kIndex % kPanels * kPanel>(PackedGradient(kIndex < kPanels ? dv_ : dk_), place);
    }
    template <int kIndex>
    __device__ __forceinline__ void start_copy(uint32_t place, const RowTile& keys) const {
        tma_store(place, kIndex < kPanels ? &maps_.dv.map : &maps_.dk.map, kIndex % kPanels * kPanel,
                  int(keys.sequence.first_key_row) + keys.first + warp_row(), int(keys.key_head),
                  tensor_batch(problem_.forward.cu_seqlens_k, keys));
    }
    // The warp's rows in the n-th dS: in its second panel or, if it has one, in the next dS.
    __device__ __forceinline__ uint32_t own_scores(uint32_t n, int second) const {
        return ScoreTile::panels > 1 ? own_ds(n) + second * ScoreTile::panel_bytes : own_ds(n + second);
    }
    __device__ __forceinline__ uint32_t own_ds(uint32_t n) const {
        if constexpr (ScoreTile::panels == 1) return shared_.ds_of(0, n) + thread_ / 32 * 16 * kPanelRowBytes;
        return shared_.ds_of(warpgroup_, n) + thread_ % 128 / 32 * 16 * kPanelRowBytes;
    }
    // Until copies of the last tile's gradients no longer need dS.
    __device__ __forceinline__ void await_stores() const {
        if (thread_ % 32 == 0) bulk_wait_read();
        __syncwarp();
    }

    const BackwardProblem& problem_;
    const KeyGradientMaps& maps_;
    const DqSums& dq_sums_;
    const WalkParts& parts_;
    BackwardShared<c>& shared_;
    const float& score_unit_;
    int warpgroup_;
    // threadIdx.x as only a register has it: read again it would stand in line behind shared memory's.
    const uint32_t thread_;
    Gradient dk_, dv_;
    HeldRows<dtype, c.held_keys> keys_;
    HeldRows<dtype, c.held_keys> values_;
};

}  // namespace flash::cuda::sm90
