// FlashAttention backward (docs/algorithm.md) with wgmma: one block owns a tile of keys of one key head and
// visits the tiles of queries that see it, of every query head of the group in turn. One warp copies
// (backward_producer.cuh); each of two warpgroups owns 64 of the keys. Scores are transposed, [keys,
// queries], so that what one product leaves in registers is the next one's operand:
//
//     S^T = K Q^T, dP^T = V dO^T   from shared memory
//     P^T, dS^T                    registers, rounded
//     dV += P^T dO, dK += dS^T Q   A from registers; until the end
//     dQ = dS K                    dS of all keys by way of shared memory; the warpgroups divide the tile's
//                                  rows or columns. fp32 additions in device memory, by the copy engine
//
// Whatever a warpgroup does itself runs beside a product that it has started before:
//
//     exponentials of tile n           dP(n)
//     dS(n), to shared memory          dV(n)
//     sums of dQ(n - 1)                dK(n)
//
// dQ is a tile behind, so that no warpgroup waits for the other's dS, and one can be half a tile ahead: with
// turns at the exponentials it is, and one's products fill what the other leaves of the tensor cores.
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
          warpgroup_(warpgroup()) {}

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
    // What is done at once of the scores, to need fewer registers.
    static constexpr int kPart = 64, kParts = c.query_tile / kPart;
    using Part = Fragment<16, kPart>;
    using Operand = RegisterOperand<dtype, 16, kPart>;
    using Gradient = Fragment<16, c.head_dim>;
    // The mask's bits of the warp's 16 keys, which are in one word of a query's: each lane has the words of
    // two of 64 queries.
    struct Words {
        uint32_t of[kParts][2];
    };
    using Dq = sm90::Dq<dtype, c>;
    // As the copies leave them.
    using KeyTile = TileLayout<c.key_tile, c.head_dim, 2, kPanel>;
    using ScoreTile = TileLayout<c.key_tile, c.query_tile, 2, kPanel>;
    static_assert(c.warpgroups == 2 && c.key_tile == 64 * c.warpgroups &&
                  c.query_tile * c.head_dim == 64 * 64 * c.warpgroups);

    static constexpr int kConsumers = 1, kTurns = 2;  // barriers; 0 is the block's

    // The same for the whole warp, and the compiler knows.
    __device__ __forceinline__ static int warpgroup() {
        return __shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0);
    }
    // Of the tile of keys.
    __device__ __forceinline__ static int warp_row() { return int(opaque(threadIdx.x)) / 32 * 16; }
    __device__ __forceinline__ uint32_t warpgroup_rows() const { return warpgroup_ * 64 * kPanelRowBytes; }
    __device__ __forceinline__ static void meet() { barrier_of<c.consumers>(kConsumers); }
    __device__ __forceinline__ void await_turn() const {
        if constexpr (c.turns) barrier_of<c.consumers>(kTurns + warpgroup_);
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (c.turns) arrive_at_barrier_of<c.consumers>(kTurns + 1 - warpgroup_);
    }

    __device__ __forceinline__ void await_queries(uint32_t n) const {
        mbarrier_wait(in_ring(shared_.q_full, n), parity(shared_.q_full, n));
    }
    __device__ __forceinline__ void await_douts(uint32_t n) const {
        mbarrier_wait(in_ring(shared_.dout_full, n), parity(shared_.dout_full, n));
    }
    __device__ __forceinline__ void await_ds(uint32_t n) const {
        mbarrier_wait(in_ring(shared_.ds_full, n), parity(shared_.ds_full, n));
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
    // Of one part of the queries.
    __device__ __forceinline__ void start_dv(const Operand& p, uint32_t n, int part) {
        multiply_registers_by_columns<dtype, kPart>(dv_, p.value, douts(n) + part * kPart * kPanelRowBytes,
                                                    c.query_tile);
        wgmma_commit();
    }
    __device__ __forceinline__ void start_dk(const Operand (&ds)[kParts], uint32_t n) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            multiply_registers_by_columns<dtype, kPart>(
                dk_, ds[part].value, queries(n) + part * kPart * kPanelRowBytes, c.query_tile);
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
        uint32_t n = 0;
        mbarrier_wait(shared_address(&shared_.k_full), 0);
        await_queries(0);
        wgmma_fence();
        start_scores(s, 0);
        mbarrier_wait(shared_address(&shared_.v_full), 0);
        await_douts(0);
        wgmma_fence();
        start_gradients(dp, 0);
        look_for_bad_keys();
        if (warpgroup_ == 1) pass_turn();
        float* sums_before = nullptr;  // of the tile before
        while (true) {
            const QueryNote& note = shared_.notes[n % c.stages];
            const bool last = note.last;
            float* const sums = note.dq;
            Operand p[kParts], ds[kParts];
            Words words{};
            if (note.bits) words = words_of(note);  // on their way while S is waited for
            await_turn();
            wgmma_wait<1>();
            keep(registers_of(s));
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                exponentiate(part_of(s, part), note, words, n, part);
                if (part > 0) continue;
                p[0] = Operand(part_of(s, 0));
                wgmma_fence();
                start_dv(p[0], n, 0);
            }
            pass_turn();
            wgmma_wait<1>();
            keep(registers_of(dp));
            mbarrier_wait(in_ring(shared_.ds_empty, n), parity(shared_.ds_empty, n) ^ 1);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                if (part > 0) {
                    p[part] = Operand(part_of(s, part));
                    wgmma_fence();
                    start_dv(p[part], n, part);
                }
                differentiate(part_of(s, part), part_of(dp, part), note, n, part);
                ds[part] = Operand(part_of(dp, part));
                store_ds(ds[part], n, part);
            }
            fence_async_proxy();
            mbarrier_arrive_warp(in_ring(shared_.ds_full, n));
            if (n == 0) {
                wgmma_fence();
                start_dk(ds, n);
                wgmma_wait<0>();
            } else {
                typename Dq::Accumulators dq;
                await_ds(n - 1);
                wgmma_fence();
                start_dq(dq, n - 1);
                start_dk(ds, n);
                wgmma_wait<1>();
                keep(registers_of(dq));
                mbarrier_arrive_warp(in_ring(shared_.ds_empty, n - 1));
                add_dq(sums_before, dq);
                wgmma_wait<0>();
            }
            leave(n);
            sums_before = sums;
            if (last) break;
            await_queries(++n);
            wgmma_fence();
            start_scores(s, n);
            await_douts(n);
            wgmma_fence();
            start_gradients(dp, n);
        }
        typename Dq::Accumulators dq;
        await_ds(n);
        wgmma_fence();
        start_dq(dq, n);
        wgmma_wait<0>();
        keep(registers_of(dq));
        add_dq(sums_before, dq);
        keep(registers_of(dk_));
        keep(registers_of(dv_));
    }

    // The n-th tile's dV and dK have what they need of it.
    __device__ __forceinline__ void leave(uint32_t n) const {
        mbarrier_arrive_warp(in_ring(shared_.q_empty, n));
        mbarrier_arrive_warp(in_ring(shared_.dout_empty, n));
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

    __device__ __forceinline__ static Part& part_of(Scores& x, int part) {
        return reinterpret_cast<Part&>(x.value[0][part * Part::column_tiles]);
    }

    // s: dot products on entry, P on return.
    __device__ __forceinline__ void exponentiate(Part& s, const QueryNote& note, const Words& words,
                                                 uint32_t n, int part) const {
        each_pair(shared_.lse[n % c.stages] + part * kPart, [&](int tile, float2 lse) {
            float (&x)[4] = s.value[0][tile];
            x[0] = GpuMath::exponential(x[0] * score_unit_ - lse.x);
            x[1] = GpuMath::exponential(x[1] * score_unit_ - lse.y);
            x[2] = GpuMath::exponential(x[2] * score_unit_ - lse.x);
            x[3] = GpuMath::exponential(x[3] * score_unit_ - lse.y);
        });
        if (note.masked) mask(s, note, n, part, note.bits ? visible(words.of[part]) : ~0u);
    }

    // dp: dO V^T on entry, dS on return; it lacks the factor softmax_scale, which the sums get.
    __device__ __forceinline__ void differentiate(const Part& p, Part& dp, const QueryNote& note, uint32_t n,
                                                  int part) const {
        each_pair(shared_.delta[n % c.stages] + part * kPart, [&](int tile, float2 delta) {
            float (&x)[4] = dp.value[0][tile];
            const float (&factor)[4] = p.value[0][tile];
            x[0] = factor[0] * (x[0] - delta.x);
            x[1] = factor[1] * (x[1] - delta.y);
            x[2] = factor[2] * (x[2] - delta.x);
            x[3] = factor[3] * (x[3] - delta.y);
        });
        if (note.masked) mask(dp, note, n, part, note.bits ? not_zero(p) : ~0u);
    }

    // A lane's two columns of each 8, which are queries.
    template <class Visit>
    __device__ __forceinline__ static void each_pair(const float* of_query, const Visit& visit) {
        const uint32_t first = shared_address(of_query) + opaque(threadIdx.x) % 4 * 8;
#pragma unroll
        for (int tile = 0; tile < Part::column_tiles; ++tile) {
            const uint2 pair = load_shared_8(first + tile * 32);
            visit(tile, make_float2(__uint_as_float(pair.x), __uint_as_float(pair.y)));
        }
    }

    __device__ __forceinline__ Words words_of(const QueryNote& note) const {
        const ForwardProblem& problem = problem_.forward;
        const Position key = min(shared_.plan.tile.first + warp_row(), Position(problem.rows_k) - 1);
        const uint32_t* const word = note.bits + key / 32;
        Words words;
#pragma unroll
        for (int i = 0; i < 2 * kParts; ++i) {
            const Position query = min(note.first + i * 32 + lane_index(), Position(problem.rows_q) - 1);
            words.of[i / 2][i % 2] = word[query * problem.visible.row_stride];
        }
        return words;
    }

    // A bit for each of a lane's scores, those of a row together.
    static_assert(Part::rows * Part::columns == 32);
    __device__ __forceinline__ uint32_t visible(const uint32_t (&words)[2]) const {
        const int key = (shared_.plan.tile.first + warp_row() + Part::row(0)) % 32;
        uint32_t shown = 0;
#pragma unroll
        for (int column = 0; column < Part::columns; ++column) {
            const uint32_t word =
                __shfl_sync(0xffffffff, words[column / 2 * 8 / 32], Part::column(column) % 32) >> key;
            shown |= (word & 1) << column | (word >> 8 & 1) << (Part::columns + column);
        }
        return shown;
    }
    // What is hidden has probability 0.
    __device__ __forceinline__ static uint32_t not_zero(const Part& p) {
        uint32_t shown = 0;
#pragma unroll
        for (int r = 0; r < Part::rows; ++r)
#pragma unroll
            for (int column = 0; column < Part::columns; ++column)
                shown |= uint32_t(p.at(r, column) != 0) << (r * Part::columns + column);
        return shown;
    }

    // Zero where invisible: what lies behind the mask may be infinite. NaN where a row of Q, dO or K that is
    // not finite is seen.
    __device__ __forceinline__ void mask(Part& x, const QueryNote& note, uint32_t n, int part,
                                         uint32_t shown) const {
        const BackwardPlan& plan = shared_.plan;
        const Position first = note.first + part * kPart;
#pragma unroll
        for (int r = 0; r < Part::rows; ++r) {
            const int row = warp_row() + Part::row(r);
            const Position key = plan.tile.first + row;
            const Interval queries = plan.tile.rows.contains(key)
                                         ? intersection(plan.mask.queries_of(key), note.seen)
                                         : Interval(0, 0);
            const int begin = queries.begin - first, end = queries.end - first;
            const bool bad_key = shared_.has_bad_keys && shared_.bad_keys[row / 32] >> row % 32 & 1;
            uint32_t bad = 0;  // 32 of the queries
#pragma unroll
            for (int column = 0; column < Part::columns; ++column) {
                const int i = Part::column(column);
                if (column % 8 == 0)
                    bad = bad_key    ? ~0u
                          : note.bad ? shared_.bad_queries[n % c.stages][part * kPart / 32 + column / 8]
                                     : 0;
                if (i < begin || i >= end || !(shown >> (r * Part::columns + column) & 1))
                    x.at(r, column) = 0;
                else if (bad >> i % 32 & 1)
                    x.at(r, column) = __int_as_float(0x7fffffff);
            }
        }
    }

    __device__ __forceinline__ void store_ds(const Operand& ds, uint32_t n, int part) const {
        const int thread = opaque(threadIdx.x), lane = thread % 32;
        const uint32_t place = shared_address(shared_.ds[n % 2]) + thread / 32 * 16 * kPanelRowBytes +
                               ScoreTile::offset(lane % 16, 0, lane / 16);
#pragma unroll
        for (int k = 0; k < kPart / 16; ++k)
            stmatrix_x4(ScoreTile::at(place, 0, part * kPart + k * 16), ds.value[k][0]);
    }

    // By way of shared memory: additions straight from registers keep a warp for as long as they take.
    __device__ __forceinline__ void add_dq(float* sums, const typename Dq::Accumulators& dq) const {
        // DqTile counts a warp's columns first, warpgroups divide what is left of the columns last.
        constexpr uint32_t row_warps = c.consumers / 32 / Dq::column_warps;
        const uint32_t thread = opaque(threadIdx.x), warp = thread / 32;
        const uint32_t place = (warp % row_warps * Dq::column_warps + warp / row_warps) * Dq::warp_elements;
        const uint32_t staging = shared_address(shared_.dq) + place * 4;
        if (thread % 32 == 0) bulk_wait_read();
        __syncwarp();
        Dq::store_shared(staging, dq);
        fence_async_proxy();
        __syncwarp();
        if (thread % 32 == 0) bulk_reduce_add(sums + place, staging, Dq::warp_elements * 4);
    }

    __device__ __forceinline__ void store() {
        const ForwardProblem& problem = problem_.forward;
        const RowTile& tile = shared_.plan.tile;
        dk_ *= float(problem.softmax_scale);
        if (opaque(threadIdx.x) % 32 == 0) bulk_wait();
        meet();  // everybody has left K and added what it had to
        if (threadIdx.x == 0) {
            if (!shared_.plan.has_queries) dq_sums_.wait_for_place(shared_.plan.place.head);
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
    Gradient dk_, dv_;
};

}  // namespace flash::cuda::sm90
