// dK and dV where head dims are too wide for a warpgroup to hold both (FlashAttention backward,
// docs/algorithm.md): a block takes one tile of 64 keys after the other, one warpgroup accumulates dV and one
// dK. dQ has a kernel of its own, which multiplies what this one stores of dS (stored_query_gradient.cuh), or
// walks as this one does (query_gradient.cuh): nothing is summed up in device memory, and bits repeat. Scores
// are transposed, [keys, queries]:
//
//     warpgroup 0                          warpgroup 1
//     S^T = K Q^T                          dP^T = V dO^T          from shared memory
//     P^T = exp(S^T - lse)       P^T --->  dS^T = P^T (dP^T - delta)
//     dV += P^T dO                         dK += dS^T Q           A from registers
//
// Both start the next tile's first product before this one's second, and compute what is between them while
// that runs.
#pragma once

#include <algorithm>

#include "../any/finite.cuh"
#include "../ptx/barrier.h"
#include "../sanitized.h"
#include "../tile/warp_product.h"
#include "backward_mask.cuh"
#include "backward_producer.cuh"
#include "score_gradients.cuh"
#include "store_rows.cuh"
#include "transposed_scores.cuh"
#include "warpgroup_product.h"

namespace flash::cuda::sm90 {

// What a warpgroup accumulates. Where the two gradients are equally wide both run the same code, which has to
// be fetched once: 1 to 3 % faster than code for each where sequences are short.
enum class KeyRole { dv, dk, either };

template <DType dtype, BackwardConfiguration c, KeyRole role>
class KeyGradients {
  public:
    // score_unit: from a dot product to a score in log 2.
    __device__ KeyGradients(const BackwardProblem& problem, const WalkParts& parts,
                            BackwardShared<c>& shared, const ScoreGradients& ds, const float& score_unit)
        : problem_(problem),
          parts_(parts),
          shared_(shared),
          ds_(ds),
          score_unit_(score_unit),
          thread_(threadIdx.x % 128),
          of_keys_(__shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0)) {}

    __device__ __forceinline__ void run() {
        if (of_keys() && !kSanitized)
            for (int i = 0; i < Shared::kBuffers; ++i) arrive_at_barrier_of<c.consumers>(kEmpty + i);
        uint32_t n = 0;  // tiles of queries so far
#pragma unroll 1
        for (uint32_t tile = 0;; ++tile) {
            shared_.await_plan(tile);
            const BackwardPlan& plan = shared_.plan(tile);
            if (plan.end) break;
            // Of a 0 that the compiler knew it would make a loop of its own for the first tile.
            float zero[1] = {0};
            keep(zero);
            gradient_.fill(zero[0]);
            mbarrier_wait(shared_address(of_keys() ? &shared_.v_full : &shared_.k_full), tile % 2);
            if (plan.has_queries)
                walk(plan, n);
            else
                leave_keys();
            store(plan, tile);
        }
        // Barriers count in pairs: what was counted in at the start is taken out.
        if (!of_keys() && !kSanitized)
            for (int i = 0; i < Shared::kBuffers; ++i)
                barrier_of<c.consumers>(kEmpty + (n + i) % Shared::kBuffers);
    }

  private:
    using Shared = BackwardShared<c>;
    using Scores = Fragment<16, c.query_tile>;
    using Half = Fragment<16, c.query_tile / 2>;
    using Operand = RegisterOperand<dtype, 16, c.query_tile>;
    // Of the first product and of the gradient.
    static constexpr int kDepth = role == KeyRole::dk ? c.values() : c.head_dim;
    static constexpr int kColumns = role == KeyRole::dv ? c.values() : c.head_dim;
    static_assert(role != KeyRole::either || c.values() == c.head_dim);
    static constexpr int kHeld = c.held_keys < kDepth ? c.held_keys : kDepth;
    using KeyTile = TileLayout<c.key_tile, kDepth, 2, kPanel>;  // or the values'
    static_assert(c.warpgroups == 2 && c.key_tile == 64);

    // Barriers, of each buffer of P, and of each half of what is in it; 0 is the block's. racecheck does not
    // know that bar.arrive orders what was read and written before it: for it both warpgroups meet at an
    // mbarrier, in front of and behind what one reads of the other.
    static constexpr int kFull = 1, kEmpty = kFull + 2 * Shared::kBuffers;
    __device__ __forceinline__ static int full(uint32_t n, int half) {
        return kFull + int(n % Shared::kBuffers) * 2 + half;
    }

    __device__ __forceinline__ void meet(uint32_t parity) const {
        mbarrier_arrive_warp(shared_address(&shared_.met));
        mbarrier_wait(shared_address(&shared_.met), parity);
    }

    __device__ __forceinline__ bool of_keys() const {
        return role == KeyRole::either ? of_keys_ : role == KeyRole::dk;
    }
    __device__ __forceinline__ int warp_row() const { return int(thread_) / 32 * 16; }
    __device__ __forceinline__ void await_queries(uint32_t n) const {
        mbarrier_wait(in_ring(shared_.q_full, n), parity(shared_.q_full, n));
    }
    __device__ __forceinline__ void await_douts(uint32_t n) const {
        mbarrier_wait(in_ring(shared_.dout_full, n), parity(shared_.dout_full, n));
    }
    __device__ __forceinline__ const char* keys() const { return of_keys() ? shared_.v : shared_.k; }
    __device__ __forceinline__ uint32_t queries(uint32_t n) const {
        return shared_address(shared_.q[0]) + n % c.stages * Shared::query_bytes;
    }
    __device__ __forceinline__ uint32_t douts(uint32_t n) const {
        return shared_address(shared_.dout[0]) + n % c.stages * Shared::dout_bytes;
    }

    __device__ __forceinline__ void leave_keys() const {
        mbarrier_arrive_warp(shared_address(&shared_.v_empty));
        mbarrier_arrive_warp(shared_address(&shared_.k_empty));
    }

    __device__ __forceinline__ void start_scores(Scores& x, uint32_t n) const {
        if (of_keys())
            await_douts(n);
        else
            await_queries(n);
        wgmma_fence();
        // Its descriptors would be kept, in registers that there are not.
        uint32_t rest = 0;
        if constexpr (kHeld < kDepth) rest = __shfl_sync(0xffffffff, shared_address(keys()), 0);
        multiply_held_rows_by_rows<dtype, kDepth>(x, keys_, rest, c.key_tile,
                                                  of_keys() ? douts(n) : queries(n));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_gradient(const Operand& a, uint32_t n) {
        if (!of_keys()) await_douts(n);
        wgmma_fence();
        multiply_registers_by_columns<dtype, c.query_tile>(gradient_, a.value,
                                                           of_keys() ? queries(n) : douts(n));
        wgmma_commit();
    }

    // The tiles of queries that see the tile of keys, from the n-th of the block on; n becomes the next one.
    __device__ __forceinline__ void walk(const BackwardPlan& plan, uint32_t& n) {
        Scores x;
        keys_.template load<KeyTile>(keys(), warp_row());
        start_scores(x, n);
        char* const ds = place_of_ds(plan);
        wgmma_wait<0>();
        keep(registers_of(x));
        uint32_t flags = between(x, n);
        Operand a(x);
        while (!(flags & QueryNote::last)) {
            start_scores(x, n + 1);
            start_gradient(a, n);
            if (ds) store_ds(ds, a, n);
            wgmma_wait<1>();
            keep(registers_of(x));
            flags = between(x, n + 1);
            wgmma_wait<0>();
            keep(registers_of(gradient_));
            mbarrier_arrive_warp(in_ring(shared_.empty, n));
            ++n;
            a = Operand(x);
        }
        start_gradient(a, n);
        if (ds) store_ds(ds, a, n);
        wgmma_wait<0>();
        keep(registers_of(gradient_));
        mbarrier_arrive_warp(in_ring(shared_.empty, n));
        ++n;
    }

    // Of the tile of keys, head 0 and its query 0, for the warpgroup that has dS; nullptr: it is not stored.
    // The other one looks at the keys, which meet dS where it is 0, too.
    __device__ __forceinline__ char* place_of_ds(const BackwardPlan& plan) const {
        if (!ds_.data) return nullptr;
        const RowTile& tile = plan.tile;
        if (of_keys())
            return ds_.at(tile.batch * problem_.forward.heads_q, tile.first, 0) +
                   ScoreGradients::place_of(thread_);
        if (has_bad_element<dtype, 128, KeyTile>(shared_address(keys()))) *ds_.bad_keys = 1;
        return nullptr;
    }
    __device__ __forceinline__ void store_ds(char* to, const Operand& ds, uint32_t n) const {
        const DqNote& note = shared_.dq_notes[n % kDqNotes];
        store_score_gradients(to + ds_.offset(note.head, note.first), ds);
    }

    // What a warpgroup's first product becomes before its second one. Returns the tile's flags.
    __device__ __forceinline__ uint32_t between(Scores& x, uint32_t n) const {
        if (of_keys()) await_queries(n);
        const uint32_t flags = __shfl_sync(0xffffffff, shared_.notes[n % c.stages].flags, 0);
        if constexpr (kSanitized) {
            if (!of_keys()) exponentiate(x, n);
            meet(0);
            if (of_keys()) differentiate(x, n);
            meet(1);
        } else if (of_keys()) {
            differentiate(x, n);
        } else {
            exponentiate(x, n);
        }
        if (flags & QueryNote::masked) mask(x, flags, n);
        if (flags & QueryNote::last) leave_keys();
        return flags;
    }

    // All that bits need is read here, late: before, every tile would wait until it knew whether it is
    // masked.
    __device__ __forceinline__ void mask(Scores& x, uint32_t flags, uint32_t n) const {
        const QueryNote& note = shared_.notes[n % c.stages];
        const bool has_bits = note.bits;
        QueryWords<c> words{};
        if (has_bits) words.load(problem_.forward, shared_, note, warp_row());
        mask_scores(
            shared_, flags, n, warp_row(), thread_,
            [&](int part) { return has_bits ? words.visible(shared_, flags, warp_row(), part) : ~0u; }, x);
    }

    // Of P's n-th buffer, four of a thread's numbers: those of other threads lie between them and the next.
    __device__ __forceinline__ uint32_t place_of_p(uint32_t n, int tile) const {
        return shared_address(shared_.p[n % Shared::kBuffers]) + thread_ * 16 + tile * 128 * 16;
    }

    __device__ __forceinline__ TransformedScores transformed(uint32_t n) const {
        return shared_.transformed(shared_.notes[n % c.stages], warp_row());
    }

    // x: dot products on entry, P on return, of which the other warpgroup gets a copy, half by half.
    __device__ __forceinline__ void exponentiate(Scores& x, uint32_t n) const {
        if constexpr (c.transformed) {
            transformed(n).scale_and_cap(x);
            transformed(n).add_alibi(x);
        }
        exponentiate_half<0>(x, n);
        exponentiate_half<1>(x, n);
    }
    template <int kHalf>
    __device__ __forceinline__ void exponentiate_half(Scores& x, uint32_t n) const {
        Half& s = half_of<kHalf>(x);
        exponentiate_columns(s, score_unit_, [&](int i) {
            return pair_of(shared_.lse[n % c.stages], kHalf * Half::column_tiles + i, thread_);
        });
        if constexpr (kHalf == 0 && !kSanitized) barrier_of<c.consumers>(kEmpty + n % Shared::kBuffers);
#pragma unroll
        for (int i = 0; i < Half::column_tiles; ++i) {
            const float (&p)[4] = s.value[0][i];
            store_shared(place_of_p(n, kHalf * Half::column_tiles + i),
                         make_uint4(__float_as_uint(p[0]), __float_as_uint(p[1]), __float_as_uint(p[2]),
                                    __float_as_uint(p[3])));
        }
        if constexpr (!kSanitized) arrive_at_barrier_of<c.consumers>(full(n, kHalf));
    }

    // x: dO V^T on entry, dS on return; it lacks the factor softmax_scale, which dK gets.
    __device__ __forceinline__ void differentiate(Scores& x, uint32_t n) const {
        differentiate_half<0>(x, n);
        differentiate_half<1>(x, n);
        if constexpr (c.transformed)
            transformed(n).differentiate_cap(
                x, [&](int tile) { return load_p(n, tile); },
                [&](int tile) {
                    const float2 lse = pair_of(shared_.lse[n % c.stages], tile, thread_);
                    return make_float4(lse.x, lse.y, lse.x, lse.y);
                });
        if constexpr (!kSanitized) arrive_at_barrier_of<c.consumers>(kEmpty + n % Shared::kBuffers);
    }
    template <int kHalf>
    __device__ __forceinline__ void differentiate_half(Scores& x, uint32_t n) const {
        if constexpr (!kSanitized) barrier_of<c.consumers>(full(n, kHalf));
        constexpr int first = kHalf * Half::column_tiles;
        differentiate_columns(
            half_of<kHalf>(x), [&](int i) { return load_p(n, first + i); },
            [&](int i) { return pair_of(shared_.delta[n % c.stages], first + i, thread_); });
    }
    __device__ __forceinline__ float4 load_p(uint32_t n, int tile) const {
        const uint4 p = load_shared_16(place_of_p(n, tile));
        return make_float4(__uint_as_float(p.x), __uint_as_float(p.y), __uint_as_float(p.z),
                           __uint_as_float(p.w));
    }

    __device__ __forceinline__ void store(const BackwardPlan& plan, uint32_t tile) {
        const ForwardProblem& problem = problem_.forward;
        const HeadRows<Bits<dtype>> to(of_keys() ? problem_.dk : problem_.dv,
                                       plan.tile.unowned ? 0 : plan.tile.batch,
                                       plan.tile.sequence.first_key_row, plan.tile.key_head,
                                       of_keys() ? problem.head_dim : problem.head_dim_v);
        const Position first = plan.tile.first + warp_row();
        const Interval rows = plan.tile.rows;
        const uint32_t part = plan.part, tile_of_all = plan.tile_of_all;
        shared_.leave_plan(tile);
        constexpr int tiles = std::max(c.head_dim, c.values()) / 8;
        if (!parts_.end<c.consumers, tiles>(part, tile_of_all, threadIdx.x, gradient_)) return;
        if (of_keys()) gradient_ *= float(problem.softmax_scale);
        store_rows<dtype>(to, gradient_, first, rows);
    }

    const BackwardProblem& problem_;
    const WalkParts& parts_;
    BackwardShared<c>& shared_;
    const ScoreGradients& ds_;
    const float& score_unit_;
    const uint32_t thread_;        // of the warpgroup
    const int of_keys_;            // 1: dK, 0: dV
    HeldRows<dtype, kHeld> keys_;  // or the values
    Fragment<16, kColumns> gradient_;
};

}  // namespace flash::cuda::sm90
