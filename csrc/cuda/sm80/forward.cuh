// FlashAttention forward (docs/algorithm.md) with mma.sync. One block owns a tile of queries of one head and
// walks the key tiles that its schedule lists; each warp owns query_tile / warps of the rows, from the scores
// to the output, so no warp ever waits for another one's numbers.
//
//     Q  query_tile x head_dim   shared, stays           S, P  registers: what one product leaves
//     K  key_tile x head_dim     shared, next one loads         is the next one's operand
//     V  key_tile x head_dim       while P V runs        O     registers, until the end
//
// Two barriers a tile: before the first K is whole and everybody has left V, before the second V is whole and
// everybody has left K; the copies of V and of the next K start behind them.
#pragma once

#include "../../attention/online_softmax.h"
#include "../tile/gpu_math.h"
#include "../tile/warp_product.h"
#include "finite.cuh"
#include "loader.cuh"
#include "query_plan.cuh"
#include "score_gradient.cuh"

namespace flash::cuda::sm80 {

struct ForwardConfiguration {
    int head_dim, query_tile, key_tile, warps, blocks;
};

template <ForwardConfiguration c>
struct ForwardShared {
    alignas(128) char q[c.query_tile * c.head_dim * 2];  // at the end O
    alignas(128) char k[c.key_tile * c.head_dim * 2];
    alignas(128) char v[c.key_tile * c.head_dim * 2];
    uint32_t bad_keys[c.key_tile / 32];  // keys whose value is not finite, a bit each
    QueryPlan<c.warps> plan;
};

template <DType dtype, ForwardConfiguration c, Features features>
class ForwardTile {
  public:
    __device__ ForwardTile(const ForwardProblem& problem, ForwardShared<c>& shared)
        : problem_(problem), shared_(shared) {}

    // Needs no plan: the copies run while thread 0 makes it.
    __device__ __forceinline__ void load_queries(const RowTile& tile) {
        const HeadRows<const uint16_t> q(problem_.q, tile.unowned ? 0 : tile.batch,
                                         tile.sequence.first_query_row, tile.head, problem_.head_dim);
        load_tile<threads, QueryTile>(q_address(), q, tile.first, tile.rows);
    }

    // natural: one unit of a score in natural units.
    __device__ __forceinline__ void run(double natural) {
        out_.clear();
        TileWalk<c.key_tile> walk(shared_.plan.warp(), shared_.plan.schedule);
        load_keys(k_address(), shared_.plan.keys, walk);
        cp_async_commit();
        while (walk.more()) {
            cp_async_wait<0>();
            __syncthreads();
            load_keys(v_address(), shared_.plan.values, walk);
            cp_async_commit();
            Scores scores;
            multiply_qk(scores);
            cp_async_wait<0>();
            __syncthreads();
            const Position key = walk.first();
            transform(scores, key);
            if (walk.masked(shared_.plan.warp())) {
                mask(scores, key, walk.seen(shared_.plan.warp()));
                if (exclude_bad_values()) spoil_rows(scores);
            }
            walk.advance(shared_.plan.warp());
            load_keys(k_address(), shared_.plan.keys, walk);
            cp_async_commit();
            follow_maximum(scores);
            exponentiate(scores);
            if constexpr (features == Features::dropout) drop(scores, key);
            const RegisterOperand<dtype, warp_rows, c.key_tile> p(scores);
            end_block(key < 0);  // the sums are done before P V starts
            multiply_registers_by_columns<dtype, KeyTile>(out_, p, KeyTile::lane_rows_first(v_address()));
        }
        store(natural);
    }

  private:
    static constexpr int threads = c.warps * 32;
    static constexpr int warp_rows = c.query_tile / c.warps;
    using QueryTile = SmemTile<c.query_tile, c.head_dim>;
    using KeyTile = SmemTile<c.key_tile, c.head_dim>;
    using Scores = Fragment<warp_rows, c.key_tile>;
    using Output = Fragment<warp_rows, c.head_dim>;

    __device__ __forceinline__ uint32_t q_address() const { return shared_address(shared_.q); }
    __device__ __forceinline__ uint32_t k_address() const { return shared_address(shared_.k); }
    __device__ __forceinline__ uint32_t v_address() const { return shared_address(shared_.v); }
    __device__ __forceinline__ static int warp_row() { return int(threadIdx.x) / 32 * warp_rows; }
    __device__ __forceinline__ Position query(int r) const {
        return shared_.plan.tile.first + warp_row() + Scores::row(r);
    }
    __device__ __forceinline__ void load_keys(uint32_t tile, const HeadRows<const uint16_t>& rows,
                                              const TileWalk<c.key_tile>& walk) {
        if (walk.more())
            load_tile<threads, KeyTile>(tile, rows, walk.first(), walk.seen(shared_.plan.warp()));
    }

    __device__ __forceinline__ void multiply_qk(Scores& s) const {
        s.clear();
        const uint32_t q_lane = QueryTile::lane_rows_first(q_address()) + warp_row() * QueryTile::row_bytes;
        multiply_rows_by_rows<dtype, QueryTile, KeyTile>(s, q_lane, KeyTile::lane_columns_first(k_address()));
    }

    // From dot products to scores; without features the scale is left to exponentiate().
    __device__ __forceinline__ void transform(Scores& s, Position key) const {
        if constexpr (features != Features::none) {
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) {
                const int meeting =
                    query(r) + shared_.plan.mask.diagonal() - key;  // the column on the diagonal
#pragma unroll
                for (int column = 0; column < Scores::columns; ++column) {
                    const int distance = meeting - Scores::column(column);
                    s.at(r, column) = shared_.plan.transform.score(
                        s.at(r, column), float(distance < 0 ? -distance : distance));
                }
            }
        }
    }

    __device__ __forceinline__ void mask(Scores& s, Position key, Interval seen) const {
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Interval keys = intersection(shared_.plan.visible(query(r)), seen);
            const int begin = keys.begin - key, end = keys.end - key;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const int j = Scores::column(column);
                if (j < begin || j >= end) s.at(r, column) = OnlineSoftmax<GpuMath>::minus_infinity();
            }
        }
    }

    __device__ __forceinline__ float unit() const {
        return features == Features::none ? shared_.plan.transform.inner : 1.f;
    }

    // The running maximum takes in the tile, and O follows it.
    __device__ __forceinline__ void follow_maximum(const Scores& s) {
        float largest[Scores::rows], rescale[Scores::rows];
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) largest[r] = s.at(r, 0);
#pragma unroll
        for (int column = 1; column < Scores::columns; ++column)
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) largest[r] = fmaxf(largest[r], s.at(r, column));
        bool moved = false;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            rescale[r] = softmax_[r].update(quad_max(largest[r]) * unit());
            moved |= rescale[r] != 1;
        }
        if (__any_sync(0xffffffff, moved)) {
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r)
#pragma unroll
                for (int column = 0; column < Output::columns; ++column) out_.at(r, column) *= rescale[r];
        }
    }

    // Scores become probabilities relative to the running maximum. The product with unit() is not rounded
    // before the subtraction: nothing to be seen of it, unless the scores are so large that their rounding
    // errors are exponents. Then they are rounded as the maximum was, and the largest probability is 1.
    __device__ __forceinline__ void exponentiate(Scores& s) {
        constexpr float huge = 1 << 22;
        float factor = unit();
        bool rounds = false;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) rounds |= fabsf(softmax_[r].reference()) > huge;
        if (features == Features::none && __any_sync(0xffffffff, rounds)) {
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r)
#pragma unroll
                for (int column = 0; column < Scores::columns; ++column)
                    s.at(r, column) = __fmul_rn(s.at(r, column), factor);
            factor = 1;
        }
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const float reference = softmax_[r].reference();
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                float& p = s.at(r, column);
                p = GpuMath::exponential(p * factor - reference);
                softmax_[r].add(p);
            }
        }
    }

    // In a masked tile a probability of 0 may meet a value that is not finite: such values become 0 in shared
    // memory, and keys that had one are noted. All threads of the block; true if there were any.
    __device__ __forceinline__ bool exclude_bad_values() {
        return clear_bad_rows<dtype, threads, KeyTile>(shared_.bad_keys, v_address());
    }

    // O of a row that sees such a key is NaN from here on.
    __device__ __forceinline__ void spoil_rows(const Scores& s) {
        uint32_t bad = 0;  // the lane's columns
#pragma unroll 1
        for (int column = 0; column < Scores::columns; ++column) {
            const int j = Scores::column(column);
            bad |= (shared_.bad_keys[j / 32] >> j % 32 & 1) << column;
        }
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            bool sees = false;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column)
                sees |= s.at(r, column) != -INFINITY && bad >> column & 1;
            if (quad_max(sees) == 0) continue;
#pragma unroll
            for (int column = 0; column < Output::columns; ++column)
                out_.at(r, column) = __int_as_float(0x7fffffff);
        }
    }

    __device__ __forceinline__ void drop(Scores& p, Position key) const {
#pragma unroll
        for (int m = 0; m < Scores::row_tiles; ++m)
#pragma unroll
            for (int n = 0; n < Scores::column_tiles; n += 2) {
                const uint32_t kept = kept_scores(shared_.plan.dropout,
                                                  shared_.plan.tile.first + warp_row() + m * 16, key + n * 8);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (!(kept >> i & 1)) p.at(2 * m + i / 4, 2 * n + i % 4) = 0;
            }
    }

    __device__ __forceinline__ void store(double natural) {
        float keep_scale = 1;
        if constexpr (features == Features::dropout) keep_scale = float(shared_.plan.dropout.keep_scale());
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            softmax_[r].row_sum = quad_sum(softmax_[r].row_sum);
            const float factor = softmax_[r].normalizer() * keep_scale;
#pragma unroll
            for (int column = 0; column < Output::columns; ++column) out_.at(r, column) *= factor;
        }
        if (shared_.plan.split.count > 1) {
            store_partial(natural);
            return;
        }
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r)
            if (lane_index() % 4 == 0 && shared_.plan.tile.rows.contains(query(r)))
                *statistics_of<float>(problem_.lse, shared_.plan.tile.batch,
                                      shared_.plan.tile.sequence.first_query_row + query(r),
                                      shared_.plan.tile.head) = softmax_[r].log_sum_exp(natural);
        cp_async_wait<0>();
        __syncthreads();  // everybody has left Q, and its copies are done where there was no key
        store_fragment<dtype, QueryTile>(q_address(), out_, warp_row(), 0);
        __syncthreads();
        const HeadRows<uint16_t> out(problem_.out, shared_.plan.tile.batch,
                                     shared_.plan.tile.sequence.first_query_row, shared_.plan.tile.head,
                                     problem_.head_dim_v);
        store_tile<threads, QueryTile>(out, q_address(), shared_.plan.tile.first, shared_.plan.tile.rows);
    }

    // Averages over this split's keys, in fp32 for the combination (any/combine.cu). Dense problems only.
    __device__ __forceinline__ void store_partial(double natural) {
        const int64_t head =
            (shared_.plan.split.index * problem_.batch + shared_.plan.tile.batch) * problem_.heads_q +
            shared_.plan.tile.head;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            if (!shared_.plan.tile.rows.contains(query(r))) continue;
            const int64_t row = head * problem_.seqlen_q + query(r);
            if (lane_index() % 4 == 0) shared_.plan.split.lse[row] = softmax_[r].log_sum_exp(natural);
            float* out = shared_.plan.split.out + row * c.head_dim + lane_index() % 4 * 2;
#pragma unroll
            for (int n = 0; n < Output::column_tiles; ++n)
                *reinterpret_cast<float2*>(out + n * 8) =
                    make_float2(out_.at(r, 2 * n), out_.at(r, 2 * n + 1));
        }
    }

    const ForwardProblem& problem_;
    ForwardShared<c>& shared_;
    OnlineSoftmax<GpuMath> softmax_[Scores::rows];
    Output out_;
};

}  // namespace flash::cuda::sm80
