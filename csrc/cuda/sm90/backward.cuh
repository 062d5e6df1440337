// FlashAttention backward (docs/algorithm.md) with wgmma: one block owns a tile of keys of one key head and
// visits the tiles of queries that see it, of every query head of the group in turn. Two warps copy
// (backward_producer.cuh); each of two warpgroups owns 64 of the keys. Scores are transposed, [keys,
// queries], so that what one product leaves in registers is the next one's operand:
//
//     S^T = K Q^T, dP^T = V dO^T   from shared memory
//     P^T, dS^T                    registers, rounded
//     dV += P^T dO, dK += dS^T Q   A from registers; until the end
//     dQ = dS K                    dS of all keys by way of shared memory; the warpgroups divide the tile's
//                                  rows or columns. fp32 additions in device memory, by the copy engine
//
// Products whose two operands lie in shared memory take all that it can deliver, and who else reads or stores
// there waits for up to a thousand cycles. So both warpgroups run S and dP at the same time, then their
// exponentials and dS, then what reads dS; stores to shared memory are beside dV and dK.
#pragma once

#include "../any/finite.cuh"
#include "../ptx/barrier.h"
#include "../ptx/register_budget.h"
#include "../ptx/stmatrix.h"
#include "../ptx/tma.h"
#include "../tile/gpu_math.h"
#include "../tile/warp_product.h"
#include "backward_plan.cuh"
#include "tensor_map.h"
#include "warpgroup_product.h"

namespace flash::cuda::sm90 {

// dQ of a tile of queries: 64 x 64 for each warpgroup.
template <DType dtype, BackwardConfiguration c>
using Dq = DqTile<dtype, c.query_tile, c.head_dim, c.consumers / 32, c.query_tile / 16>;

template <DType dtype, BackwardConfiguration c>
class BackwardConsumer {
  public:
    // score_unit: from a dot product to a score in log 2.
    __device__ BackwardConsumer(const BackwardProblem& problem, const DqSums& dq_sums,
                                BackwardShared<c>& shared, const float& score_unit)
        : problem_(problem),
          dq_sums_(dq_sums),
          shared_(shared),
          score_unit_(score_unit),
          warpgroup_(warpgroup()),
          thread_(opaque(threadIdx.x)) {}

    __device__ __forceinline__ void run() {
        // Of a 0 that the compiler knew it would make a loop of its own for the first tile.
        float zero[1] = {0};
        keep(zero);
        dk_.fill(zero[0]);
        dv_.fill(zero[0]);
        if (shared_.plan.has_queries) walk();
        store();
    }

  private:
    using Shared = BackwardShared<c>;
    using Scores = Fragment<16, c.query_tile>;
    using Operand = RegisterOperand<dtype, 16, c.query_tile>;
    using Gradient = Fragment<16, c.head_dim>;
    // The mask's bits of the warp's 16 keys, which are in one word of a query's: each lane has the words of
    // every 32nd query.
    struct Words {
        uint32_t of[c.query_tile / 32];
    };
    using Dq = sm90::Dq<dtype, c>;
    // As the copies leave them.
    using KeyTile = TileLayout<c.key_tile, c.head_dim, 2, kPanel>;
    using ScoreTile = TileLayout<c.key_tile, c.query_tile, 2, kPanel>;
    static_assert(c.warpgroups == 2 && c.key_tile == 64 * c.warpgroups &&
                  c.query_tile * c.head_dim == 64 * 64 * c.warpgroups);

    // lse of the next tile is read before its products start, which leave little of shared memory's time to
    // others; where registers suffice.
    static constexpr bool kEarlyLse = c.query_tile == 64;
    static constexpr int kConsumers = 1;  // a barrier; 0 is the block's

    // The same for the whole warp, and the compiler knows.
    __device__ __forceinline__ static int warpgroup() {
        return __shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0);
    }
    // Of the tile of keys.
    __device__ __forceinline__ static int warp_row() { return int(opaque(threadIdx.x)) / 32 * 16; }
    __device__ __forceinline__ uint32_t warpgroup_rows() const { return warpgroup_ * 64 * kPanelRowBytes; }
    __device__ __forceinline__ static void meet() { barrier_of<c.consumers>(kConsumers); }

    __device__ __forceinline__ void await_queries(uint32_t n) const {
        mbarrier_wait(in_ring(shared_.q_full, n), parity(shared_.q_full, n));
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
        multiply_rows_by_rows<dtype, c.head_dim>(s, shared_address(shared_.k) + warpgroup_rows(), c.key_tile,
                                                 queries(n));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_gradients(Scores& dp, uint32_t n) const {
        multiply_rows_by_rows<dtype, c.head_dim>(dp, shared_address(shared_.v) + warpgroup_rows(), c.key_tile,
                                                 douts(n));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_dv(const Operand& p, uint32_t n) {
        multiply_registers_by_columns<dtype, c.query_tile>(dv_, p.value, douts(n));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_dk(const Operand& ds, uint32_t n) {
        multiply_registers_by_columns<dtype, c.query_tile>(dk_, ds.value, queries(n));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_dq(typename Dq::Accumulators& dq, uint32_t n) const {
        constexpr int parts = Dq::column_warps;  // of the columns, or else of the rows
        const uint32_t ds =
            shared_address(shared_.ds[n % 2]) + (parts == 1 ? warpgroup_ : 0) * ScoreTile::panel_bytes;
        const uint32_t k = shared_address(shared_.k) +
                           (parts == 1 ? 0 : warpgroup_) * (KeyTile::panels / parts) * KeyTile::panel_bytes;
        multiply_columns_by_columns<dtype, c.key_tile>(dq, ds, k);
        wgmma_commit();
    }

    __device__ __forceinline__ void walk() {
        Scores s, dp;
        typename Dq::Accumulators dq;
        uint32_t n = 0;
        mbarrier_wait(shared_address(&shared_.k_full), 0);
        await_queries(0);
        uint32_t flags = shared_.notes[0].flags;
        Pairs lse;
        load_early(lse, 0);
        wgmma_fence();
        start_scores(s, 0);
        mbarrier_wait(shared_address(&shared_.v_full), 0);
        await_douts(0);
        wgmma_fence();
        start_gradients(dp, 0);
        look_for_bad_keys();
        while (true) {
            const QueryNote& note = shared_.notes[n % c.stages];
            Words words{};
            if (flags & QueryNote::masked && note.bits)
                words = words_of(note);  // on their way while S is waited for
            wgmma_wait<1>();
            keep(registers_of(s));
            exponentiate(s, lse, n);
            wgmma_wait<0>();
            keep(registers_of(dp));
            differentiate(s, dp, n);
            if (flags & QueryNote::masked) mask(s, dp, note, words, n);
            const Operand ds(dp);
            store_ds(ds, n);
            const Operand p(s);
            wgmma_fence();
            start_dv(p, n);
            fence_async_proxy();
            meet();
            wgmma_fence();
            start_dq(dq, n);
            wgmma_wait<1>();
            wgmma_fence();
            start_dk(ds, n);
            wgmma_wait<1>();
            keep(registers_of(dq));
            add_dq(dq, n);
            wgmma_wait<0>();
            leave(n);
            if (flags & QueryNote::last) break;
            await_queries(++n);
            flags = shared_.notes[n % c.stages].flags;
            load_early(lse, n);
            wgmma_fence();
            start_scores(s, n);
            await_douts(n);
            wgmma_fence();
            start_gradients(dp, n);
        }
        keep(registers_of(dk_));
        keep(registers_of(dv_));
    }

    // The n-th tile's dV and dK have what they need of it.
    __device__ __forceinline__ void leave(uint32_t n) const {
        mbarrier_arrive_warp(in_ring(shared_.empty, n));
    }

    // What of K is not finite becomes 0, for dQ = dS K, where it may meet a gradient of 0; its keys are
    // noted. S of the first tile is under way.
    __device__ __forceinline__ void look_for_bad_keys() const {
        const uint32_t k = shared_address(shared_.k);
        if (has_bad_element<dtype, c.consumers, KeyTile>(k)) shared_.has_bad_keys = true;
        wgmma_wait<1>();
        meet();
        if (!shared_.has_bad_keys) return;
        clear_bad_elements<dtype, c.consumers, KeyTile>(k, shared_.bad_keys);
        fence_async_proxy();
        meet();
    }

    // Numbers of a lane's queries: two columns of each 8.
    struct Pairs {
        float2 of[Scores::column_tiles];
    };
    __device__ __forceinline__ float2 pair_of(const float* of_query, int tile) const {
        const uint2 pair = load_shared_8(shared_address(of_query) + thread_ % 4 * 8 + tile * 32);
        return make_float2(__uint_as_float(pair.x), __uint_as_float(pair.y));
    }
    __device__ __forceinline__ void load_early(Pairs& lse, uint32_t n) const {
        if constexpr (!kEarlyLse) return;
#pragma unroll
        for (int tile = 0; tile < Scores::column_tiles; ++tile)
            lse.of[tile] = pair_of(shared_.lse[n % c.stages], tile);
    }

    // s: dot products on entry, P on return.
    __device__ __forceinline__ void exponentiate(Scores& s, const Pairs& early, uint32_t n) const {
#pragma unroll
        for (int tile = 0; tile < Scores::column_tiles; ++tile) {
            const float2 lse = kEarlyLse ? early.of[tile] : pair_of(shared_.lse[n % c.stages], tile);
            float (&x)[4] = s.value[0][tile];
            x[0] = GpuMath::exponential(x[0] * score_unit_ - lse.x);
            x[1] = GpuMath::exponential(x[1] * score_unit_ - lse.y);
            x[2] = GpuMath::exponential(x[2] * score_unit_ - lse.x);
            x[3] = GpuMath::exponential(x[3] * score_unit_ - lse.y);
        }
    }

    // dp: dO V^T on entry, dS on return; it lacks the factor softmax_scale, which the sums get.
    __device__ __forceinline__ void differentiate(const Scores& p, Scores& dp, uint32_t n) const {
#pragma unroll
        for (int tile = 0; tile < Scores::column_tiles; ++tile) {
            const float2 delta = pair_of(shared_.delta[n % c.stages], tile);
            float (&x)[4] = dp.value[0][tile];
            const float (&factor)[4] = p.value[0][tile];
            x[0] = factor[0] * (x[0] - delta.x);
            x[1] = factor[1] * (x[1] - delta.y);
            x[2] = factor[2] * (x[2] - delta.x);
            x[3] = factor[3] * (x[3] - delta.y);
        }
    }

    __device__ __forceinline__ Words words_of(const QueryNote& note) const {
        const ForwardProblem& problem = problem_.forward;
        const Position key = min(shared_.plan.tile.first + warp_row(), Position(problem.rows_k) - 1);
        const uint32_t* const word = note.bits + key / 32;
        Words words;
#pragma unroll
        for (int i = 0; i < c.query_tile / 32; ++i) {
            const Position query = min(note.first + i * 32 + lane_index(), Position(problem.rows_q) - 1);
            words.of[i] = word[query * problem.visible.row_stride];
        }
        return words;
    }

    // A bit for each of a lane's 16 columns of 64 queries, from what is shown of its second row on in the
    // upper half.
    __device__ __forceinline__ uint32_t visible(const Words& words, int part) const {
        const int key = (shared_.plan.tile.first + warp_row() + Scores::row(0)) % 32;
        uint32_t shown = 0;
#pragma unroll
        for (int column = 0; column < 16; ++column) {
            const uint32_t word =
                __shfl_sync(0xffffffff, words.of[part * 2 + column / 8], Scores::column(column) % 32) >> key;
            shown |= (word & 1) << column | (word >> 8 & 1) << (16 + column);
        }
        return shown;
    }

    // P and dS are zero where invisible: what lies behind the mask may be infinite. NaN where a row of Q, dO
    // or K that is not finite is seen.
    __device__ __forceinline__ void mask(Scores& p, Scores& ds, const QueryNote& note, const Words& words,
                                         uint32_t n) const {
        const BackwardPlan& plan = shared_.plan;
#pragma unroll
        for (int part = 0; part < c.query_tile / 64; ++part) {
            const uint32_t bits = note.bits ? visible(words, part) : ~0u;
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) {
                const int row = warp_row() + Scores::row(r);
                const Position key = plan.tile.first + row, first = note.first + part * 64;
                const Interval queries = plan.tile.rows.contains(key)
                                             ? intersection(plan.mask.queries_of(key), note.seen)
                                             : Interval(0, 0);
                const uint32_t shown = bits >> (r * 16) & columns_in_front_of(queries.end - first, thread_) &
                                       ~columns_in_front_of(queries.begin - first, thread_);
                const bool bad_key = shared_.has_bad_keys && shared_.bad_keys[row / 32] >> row % 32 & 1;
#pragma unroll
                for (int column = 0; column < 16; ++column) {
                    float &x = p.at(r, part * 16 + column), &dx = ds.at(r, part * 16 + column);
                    if (!(shown >> column & 1)) x = dx = 0;
                }
                if (!(bad_key || note.flags & QueryNote::bad)) continue;
#pragma unroll
                for (int column = 0; column < 16; ++column) {
                    const int i = part * 64 + Scores::column(column);
                    const uint32_t bad = bad_key ? ~0u : shared_.bad_queries[n % c.stages][i / 32];
                    float &x = p.at(r, part * 16 + column), &dx = ds.at(r, part * 16 + column);
                    if (shown >> column & bad >> i % 32 & 1) x = dx = __int_as_float(0x7fffffff);
                }
            }
        }
    }

    __device__ __forceinline__ void store_ds(const Operand& ds, uint32_t n) const {
        const uint32_t lane = thread_ % 32;
        const uint32_t place = shared_address(shared_.ds[n % 2]) + thread_ / 32 * 16 * kPanelRowBytes +
                               ScoreTile::offset(lane % 16, 0, lane / 16);
#pragma unroll
        for (int k = 0; k < c.query_tile / 16; ++k)
            stmatrix_x4(ScoreTile::at(place, 0, k * 16), ds.value[k][0]);
    }

    // To shared memory, from where another warp has them added (add_dqs).
    __device__ __forceinline__ void add_dq(const typename Dq::Accumulators& dq, uint32_t n) const {
        mbarrier_wait(shared_address(&shared_.dq_empty[warpgroup_]), n % 2 ^ 1);
        Dq::store_shared(shared_address(shared_.dq) + thread_ / 32 * Dq::warp_elements * 4, dq);
        mbarrier_arrive_warp(shared_address(&shared_.dq_full[warpgroup_]));
    }

    __device__ __forceinline__ void store() {
        const ForwardProblem& problem = problem_.forward;
        const RowTile& tile = shared_.plan.tile;
        dk_ *= float(problem.softmax_scale);
        meet();  // everybody has left K
        if (threadIdx.x == 0) {
            if (shared_.plan.has_queries)
                mbarrier_wait(shared_address(&shared_.dq_added), 0);
            else
                dq_sums_.wait_for_place(shared_.plan.place.head);
            shared_.finishes_dq = dq_sums_.last_of(shared_.plan.place.head);
        }
        store_rows(problem_.dk, problem.head_dim, shared_address(shared_.k), dk_);
        store_rows(problem_.dv, problem.head_dim_v, shared_address(shared_.v), dv_);
        meet();
        if (shared_.finishes_dq)
            finish_unit<Dq>(problem_, dq_sums_, shared_.plan.place.head, shared_address(shared_.q[0]));
    }

    // The warp's, by way of shared memory that nobody reads any more.
    __device__ __forceinline__ void store_rows(const TensorView& view, int64_t head_dim, uint32_t staging,
                                               const Gradient& gradient) const {
        const RowTile& tile = shared_.plan.tile;
        store_fragment<dtype, KeyTile>(staging, gradient, warp_row(), 0);
        __syncwarp();
        const HeadRows<Bits<dtype>> rows(view, tile.batch, tile.sequence.first_key_row, tile.head, head_dim);
        store_tile<32, KeyTile, 16>(rows, staging + warp_row() * KeyTile::row_bytes, tile.first + warp_row(),
                                    tile.rows);
    }

    const BackwardProblem& problem_;
    const DqSums& dq_sums_;
    BackwardShared<c>& shared_;
    const float& score_unit_;
    const int warpgroup_;
    const uint32_t thread_;  // read again it would stand in line behind shared memory's
    Gradient dk_, dv_;
};

// A warp for each warpgroup, which has its part of every dQ added to the sums. A consumer that did that
// itself would wait until the copy engine can read what it stored.
//
// turns: nullptr, or for every tile of queries two counters of the additions to its halves, 0 at the start.
// Blocks then add in the order of their keys, so that the sums do not depend on time. They wait for blocks of
// lower indices alone (DqSums).
template <DType dtype, BackwardConfiguration c>
__device__ __forceinline__ void add_dqs(const DqSums& dq_sums, uint32_t* turns, BackwardShared<c>& shared,
                                        int warpgroup) {
    using Dq = sm90::Dq<dtype, c>;
    const BackwardPlan& plan = shared.plan;
    if (!plan.has_queries) return;
    // DqTile counts a warp's columns first, warpgroups divide what is left of the columns last.
    constexpr int warps = c.consumers / 32, row_warps = warps / Dq::column_warps;
    const int lane = lane_index(), warp = warpgroup * 4 + lane % 4;
    const int place = (warp % row_warps * Dq::column_warps + warp / row_warps) * Dq::warp_elements;
    const uint32_t staging = shared_address(shared.dq) + warp * Dq::warp_elements * 4;
    const uint32_t unit = plan.place.head, turn = plan.tile.first / c.key_tile;
    bool last = false;
#pragma unroll 1
    for (uint32_t n = 0; !last; ++n) {
        mbarrier_wait(shared_address(&shared.dq_full[warpgroup]), n % 2);
        const DqNote note = shared.dq_notes[n % kDqNotes];
        last = note.last;
        const uint32_t tile =
            note.head * dq_sums.tiles_of_head() + plan.first_dq_tile + note.first / c.query_tile;
        const bool waits = turns && plan.earlier.contains(note.first);
        uint32_t* const mine = turns + (int64_t(unit) * dq_sums.unit_tiles().divisor + tile) * 2 + warpgroup;
        if (waits)
            while (load_acquire(mine) != turn) __nanosleep(20);
        if (lane < 4) {
            fence_async_proxy();
            bulk_reduce_add(dq_sums.of_tile(unit, tile) + place, staging, Dq::warp_elements * 4);
            bulk_wait_read();
        }
        mbarrier_arrive_warp(shared_address(&shared.dq_empty[warpgroup]));
        if (turns) {
            if (lane < 4) bulk_wait();
            __syncwarp();
            if (lane == 0) add_release(mine, waits ? 1 : turn + 1);
        }
    }
    if (lane < 4) bulk_wait();
    mbarrier_arrive_warp(shared_address(&shared.dq_added));
}

}  // namespace flash::cuda::sm90
