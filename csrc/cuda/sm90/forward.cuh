// FlashAttention forward (docs/algorithm.md) with wgmma. A block stays on its multiprocessor and computes one
// tile of queries after the other. One warp copies (forward_producer.cuh); each warpgroup of the others owns
// 64 queries of the tile:
//
//     S = Q K^T   from shared memory, into registers
//     P           registers: what one product leaves is the next one's operand
//     O += P V    registers, until the end
//
// The scores of a tile of keys and the output of the tile before are computed at the same time, and
// warpgroups take turns at starting them, so that one takes exponentials while another one's products run.
//
// A row's exponentials are taken relative to the maximum of its first tile of keys: bfloat16 and float have
// room for scores 2^100 times as large, float16 for 2^15. The sums and the output say whether that was
// enough. If not, or if a value is not finite, which a probability of 0 would spread, the tile of queries is
// done again, carefully. That is rare, and saves maxima, rescaling, and all votes.
#pragma once

#include "../../attention/online_softmax.h"
#include "../any/finite.cuh"
#include "../any/loader.cuh"
#include "../any/rows.cuh"
#include "../ptx/barrier.h"
#include "../ptx/register_budget.h"
#include "../tile/gpu_math.h"
#include "../tile/warp_product.h"
#include "forward_producer.cuh"
#include "warpgroup_product.h"

namespace flash::cuda::sm90 {

template <DType dtype, ForwardConfiguration c>
class ForwardConsumer {
  public:
    // score_unit: from a dot product to a score in log 2. natural: one of those in natural units.
    __device__ ForwardConsumer(const ForwardProblem& problem, ForwardShared<c>& shared,
                               const float& score_unit, const double& natural)
        : problem_(problem), shared_(shared), score_unit_(score_unit), natural_(natural) {}

    __device__ __forceinline__ void run() {
        if (warpgroup() == c.warpgroups - 1) pass_turn();
        uint32_t tile = 0;  // of keys, of all that the block does
        for (uint32_t n = 0;; ++n) {
            mbarrier_wait(in_ring(shared_.q_full, n), parity(shared_.q_full, n));
            ForwardPlan& plan = shared_.plans[n % c.query_buffers];
            if (plan.work == Work::end) break;
            if (plan.work == Work::tile) {
                q_ = shared_address(shared_.q[n % c.query_buffers]) + warpgroup() * 64 * kPanelRowBytes;
#pragma unroll
                for (auto& softmax : softmax_) softmax = OnlineSoftmax<GpuMath>();
                attend(plan, tile);
                finish(plan, shared_address(shared_.q[n % c.query_buffers]));
            }
            mbarrier_arrive_warp(in_ring(shared_.q_empty, n));
        }
    }

  private:
    using Scores = Fragment<16, c.key_tile>;
    using Output = Fragment<16, c.head_dim>;
    using Probabilities = RegisterOperand<dtype, 16, c.key_tile>;
    // As the copies leave them.
    using QueryTile = TileLayout<c.queries(), c.head_dim, 2, kPanel>;
    using ValueTile = TileLayout<c.key_tile, c.head_dim, 2, kPanel>;

    // Names of barriers: 0 is the block's.
    static constexpr int kTurns = 1, kGroups = 1 + c.warpgroups, kConsumers = 1 + 2 * c.warpgroups;
    static constexpr int kTurnThreads = 256;  // those whose turn it is, and those who were before
    // Scores whose rounding errors matter as exponents.
    static constexpr float kHuge = 1 << 22;

    __device__ __forceinline__ static int warpgroup() { return int(threadIdx.x) / 128; }
    __device__ __forceinline__ static int warp_row() { return int(threadIdx.x) / 32 * 16; }
    __device__ __forceinline__ Position query(const ForwardPlan& plan, int r) const {
        return plan.tile.first + warp_row() + Scores::row(r);
    }

    __device__ __forceinline__ static void await_turn() { barrier_of<kTurnThreads>(kTurns + warpgroup()); }
    __device__ __forceinline__ static void pass_turn() {
        arrive_at_barrier_of<kTurnThreads>(kTurns + (warpgroup() + 1) % c.warpgroups);
    }

    __device__ __forceinline__ KeyNote await_keys(uint32_t tile) const {
        mbarrier_wait(in_ring(shared_.k_full, tile), parity(shared_.k_full, tile));
        return shared_.notes[tile % c.stages];
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

    __device__ __forceinline__ void start_qk(Scores& s, uint32_t tile) const {
        multiply_rows_by_rows<dtype, c.head_dim>(s, q_, c.queries(),
                                                 shared_address(shared_.k[tile % c.stages]));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_pv(const Probabilities& p, uint32_t tile) {
        multiply_registers_by_columns<dtype, c.key_tile>(out_, p.value,
                                                         shared_address(shared_.v[tile % c.stages]));
        wgmma_commit();
    }

    __device__ __forceinline__ void attend(const ForwardPlan& plan, uint32_t& tile) {
        settled_ = false;
        out_.clear();
        if (!plan.has_keys) return;
        Scores s;
        float rescale[Scores::rows];
        KeyNote note = await_keys(tile);
        await_turn();
        wgmma_fence();
        start_qk(s, tile);
        pass_turn();
        wgmma_wait<0>();
        keep(registers_of(s));
        leave_keys(tile);
        exponentiate(s, rescale, plan, note);
        Probabilities p(s);
        while (!note.last) {
            await_values(tile);
            if (plan.careful && note.masked) exclude_bad_values(plan, note, tile);
            note = await_keys(tile + 1);
            await_turn();
            wgmma_fence();
            start_qk(s, tile + 1);
            start_pv(p, tile);
            pass_turn();
            wgmma_wait<1>();
            keep(registers_of(s));
            leave_keys(tile + 1);
            exponentiate(s, rescale, plan, note);
            wgmma_wait<0>();
            keep(registers_of(s));
            leave_values(tile);
            if (plan.careful) {
                keep(registers_of(out_));
#pragma unroll
                for (int r = 0; r < Scores::rows; ++r)
#pragma unroll
                    for (int column = 0; column < Output::columns; ++column) out_.at(r, column) *= rescale[r];
            }
            p = Probabilities(s);
            ++tile;
        }
        await_values(tile);
        if (plan.careful && note.masked) exclude_bad_values(plan, note, tile);
        wgmma_fence();
        start_pv(p, tile);
        wgmma_wait<0>();
        keep(registers_of(out_));
        leave_values(tile++);
    }

    // Scores become probabilities relative to the maximum of the row's first tile or, carefully, to that of
    // all so far: then what was summed up before is to be rescaled.
    __device__ __forceinline__ void exponentiate(Scores& s, float (&rescale)[Scores::rows],
                                                 const ForwardPlan& plan, const KeyNote& note) {
        float unit = score_unit_;
        if (note.masked) mask(s, plan, note);
        if (plan.careful) {
            // Rounded as the maximum is, so that the largest probability is 1.
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) {
#pragma unroll
                for (int column = 0; column < Scores::columns; ++column)
                    s.at(r, column) = __fmul_rn(s.at(r, column), unit);
                rescale[r] = softmax_[r].update(row_maximum(s, r));
            }
            unit = 1;
        } else if (!settled_) {
            settle(s);
        }
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const float reference = softmax_[r].reference();
            float sum = softmax_[r].row_sum;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                float& p = s.at(r, column);
                p = GpuMath::exponential(p * unit - reference);
                sum += p;
            }
            softmax_[r].row_sum = sum;
        }
    }

    // Rows without a maximum take this tile's.
    __device__ __forceinline__ void settle(const Scores& s) {
        bool settled = true;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const float largest = row_maximum(s, r) * score_unit_;
            if (!softmax_[r].settled() && largest > softmax_[r].row_max) softmax_[r].row_max = largest;
            settled &= softmax_[r].settled();
        }
        settled_ = !__any_sync(0xffffffff, !settled);
    }

    __device__ __forceinline__ static float row_maximum(const Scores& s, int r) {
        float largest = s.at(r, 0);
#pragma unroll
        for (int column = 1; column < Scores::columns; ++column) largest = fmaxf(largest, s.at(r, column));
        return quad_max(largest);
    }

    __device__ __forceinline__ void mask(Scores& s, const ForwardPlan& plan, const KeyNote& note) const {
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Interval keys = intersection(plan.visible(query(plan, r)), note.seen);
            const int begin = keys.begin - note.first, end = keys.end - note.first;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const int j = Scores::column(column);
                if (j < begin || j >= end) s.at(r, column) = OnlineSoftmax<GpuMath>::minus_infinity();
            }
        }
    }

    // All consumers: elements of V that are not finite become 0, and the output of a row that sees such a key
    // is NaN from here on. What is not finite would else be everybody's: a hidden key's probability is 0, not
    // no factor.
    __device__ __forceinline__ void exclude_bad_values(const ForwardPlan& plan, const KeyNote& note,
                                                       uint32_t tile) {
        barrier_of<c.consumers()>(kConsumers);  // everybody has read the last tile's notes
        if (threadIdx.x < (c.key_tile + 31) / 32) shared_.bad_keys[threadIdx.x] = 0;
        barrier_of<c.consumers()>(kConsumers);
        clear_bad_elements<dtype, c.consumers(), ValueTile>(shared_address(shared_.v[tile % c.stages]),
                                                            shared_.bad_keys);
        fence_async_proxy();
        barrier_of<c.consumers()>(kConsumers);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Interval keys = intersection(plan.visible(query(plan, r)), note.seen);
            bool sees = false;
#pragma unroll 1
            for (Position key = keys.begin; key < keys.end; ++key) {
                const int j = key - note.first;
                sees |= shared_.bad_keys[j / 32] >> j % 32 & 1;
            }
            if (sees)
#pragma unroll
                for (int column = 0; column < Output::columns; ++column)
                    out_.at(r, column) = __int_as_float(0x7fffffff);
        }
    }

    __device__ __forceinline__ void finish(ForwardPlan& plan, uint32_t staging) {
        const RowTile& tile = plan.tile;
        bool wrong = false;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            OnlineSoftmax<GpuMath>& softmax = softmax_[r];
            softmax.row_sum = quad_sum(softmax.row_sum);
            bool finite = softmax.row_sum < INFINITY && fabsf(softmax.reference()) < kHuge;
            const float factor = softmax.normalizer();
#pragma unroll
            for (int column = 0; column < Output::columns; ++column) {
                finite &= fabsf(out_.at(r, column)) < INFINITY;
                out_.at(r, column) *= factor;
            }
            wrong |= !finite && tile.rows.contains(query(plan, r));
        }
        if (!plan.careful && __any_sync(0xffffffff, wrong) && lane_index() == 0) plan.redo = true;
        store_lse(tile, plan);
        // The warpgroup's rows of Q are read by nobody any more.
        barrier_of<128>(kGroups + warpgroup());
        store_fragment<dtype, QueryTile>(staging, out_, warp_row(), 0);
        __syncwarp();
        const HeadRows<Bits<dtype>> out(problem_.out, tile.unowned ? 0 : tile.batch,
                                        tile.sequence.first_query_row, tile.head, problem_.head_dim_v);
        store_tile<32, QueryTile, 16>(out, staging + warp_row() * QueryTile::row_bytes,
                                      tile.first + warp_row(), tile.rows);
        fence_async_proxy();  // the next queries take its place
    }

    __device__ __forceinline__ void store_lse(const RowTile& tile, const ForwardPlan& plan) const {
        float* lse = statistics_of<float>(problem_.lse, tile.batch, tile.sequence.first_query_row, tile.head);
        const int mine = lane_index() % 4;
        const OnlineSoftmax<GpuMath> softmax = mine == 0 ? softmax_[0] : softmax_[1];
        if (mine < Scores::rows && tile.rows.contains(query(plan, mine)))
            lse[query(plan, mine)] = softmax.log_sum_exp(natural_);
    }

    const ForwardProblem& problem_;
    ForwardShared<c>& shared_;
    const float& score_unit_;
    const double& natural_;
    uint32_t q_;  // the warpgroup's queries
    OnlineSoftmax<GpuMath> softmax_[Scores::rows];
    bool settled_;  // every row of the warp has a maximum
    Output out_;
};

}  // namespace flash::cuda::sm90
