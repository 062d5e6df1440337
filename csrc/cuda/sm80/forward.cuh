// FlashAttention forward (docs/algorithm.md) with mma.sync. One block owns a tile of queries of one head and
// walks the key tiles that its schedule lists. With columns = 1 each warp owns query_tile / warps of the
// rows, from the scores to the output, so that no warp needs another one's numbers:
//
//     Q     query_tile x head_dim    shared, stays              S, P  registers: what one product leaves
//     K, V  key_tile x head_dim      shared, in two stages            is the next one's operand
//                                    (key_stages.cuh)           O     registers, until the end
//
// With columns = 2 (large head dims, where reading K and V from shared memory is the limit) two warps share
// twice as many rows: each computes S for half of the keys, P goes through shared memory, and each computes O
// for half of the head dim. With columns = 4 four share the 16 rows of a tile that is for few queries.
//
// A row's maximum only has to keep the exponentials within range, so it need not follow every tile: where no
// score is hidden the exponentials are taken relative to the maximum so far, and their sum, which is needed
// anyway, says whether that was too low; then the tile is done again, which is rare. That saves the maxima
// and the rescaling of O. Whether a row's maximum moves depends on this row alone.
#pragma once

#include "../../attention/online_softmax.h"
#include "../ptx/barrier.h"
#include "../tile/gpu_math.h"
#include "../tile/warp_product.h"
#include "../any/finite.cuh"
#include "../any/parts_together.cuh"
#include "../any/query_rows.cuh"
#include "forward_shared.cuh"
#include "score_gradient.cuh"

namespace flash::cuda::sm80 {

// careful: values that are not finite are kept from the rows that don't see them, tile by tile.
template <DType dtype, ForwardConfiguration c, Features features,
          bool careful = !c.retries || features != Features::none>
class ForwardTile {
  public:
    // score_unit: from a dot product to a score in log 2; 1 where a feature does more. natural: one unit of a
    // score in natural units. heads: of QueryRows.
    __device__ ForwardTile(const ForwardProblem& problem, ForwardShared<dtype, c>& shared,
                           const float& score_unit, const double& natural, const int& heads)
        : problem_(problem), shared_(shared), score_unit_(score_unit), natural_(natural), rows_{heads} {}

    // By one thread.
    __device__ __forceinline__ void start_barriers() const { Pipeline::start_barriers(shared_.keys); }

    // Needs no plan: the copies run while thread 0 makes it.
    __device__ __forceinline__ void load_first(const RowTile& tile, const Split& split) {
        load_queries(tile);
        loaded_early_ = Pipeline::load_early(shared_.keys, problem_, tile, split);
    }

    __device__ __forceinline__ void load_queries(const RowTile& tile) const {
        const auto q = rows_.template of<const Bits<dtype>>(problem_.q, tile, problem_.head_dim);
        load_tile<threads, QueryTile>(q_address(), q, rows_.first_row(tile), rows_.rows(tile));
    }

    // tile: how many tiles have come through the stages before.
    __device__ __forceinline__ void run(uint32_t tile = 0) {
        out_.clear();
        note_maxima(kUnsettled);
        TileWalk<c.key_tile> walk(shared_.plan.warp(), shared_.plan.start);
        const Pipeline pipeline(shared_.keys, problem_, shared_.plan);
        pipeline.begin(loaded_early_, tile, walk);
        uint32_t too_low = 0;  // rows of the lane whose maximum was, a bit each: the tile is done again
        for (Position key = 0; walk.more() || too_low;) {
            if (!too_low) pipeline.wait_keys(tile);
            if (!c.few || !too_low) key = walk.first();  // else the walk is one ahead
            const bool check_mask = (walk.masked() || has_bias()) && !too_low;
            const Sees sees = has_no_rows() ? Sees::none : check_mask ? what_warp_sees(walk) : Sees::all;
            const auto next = [&] {
                walk.advance(shared_.plan.warp());
                pipeline.load(tile + 1, walk);
            };
            const bool bad = careful && check_mask && exclude_bad_values(pipeline, tile);
            if (sees == Sees::none) {
                next();
                pipeline.wait_values(tile);  // who leaves a stage lets it be filled again
                pipeline.leave(tile++);
                continue;
            }
            BiasPart<dtype, Scores> bias;
            if (has_bias())
                shared_.plan.addend.load_bias(bias, shared_.plan.tile.first + warp_row(), key + warp_key());
            Scores scores;
            multiply_qk(scores, pipeline.k_address(tile));
            transform(scores, key, bias);
            if (sees == Sees::part) mask(scores, key, walk.seen(shared_.plan.warp()));
            if (bad) spoil_rows(scores);
            uint32_t maxima = shared_.maxima[warp()];  // on its way beside the copies
            if (!too_low) next();
            const bool follows = !optimistic || sees == Sees::part || (c.few && problem_.alibi_slopes);
            if (follows || too_low || maxima & kUnsettled)
                maxima = follow_maximum(scores, maxima, [&](int r, float maximum) {
                    return !softmax_[r].settled() || too_low >> r & 1 ||
                           (follows && maximum > softmax_[r].row_max + kRise);
                });
            float sums[Scores::rows];
            exponentiate(scores, sums, maxima & kRounds);
            if (has_dropout())
                drop(scores, shared_.plan.dropout, shared_.plan.tile.first + warp_row(), key + warp_key());
            const auto p = left_operand(scores);
            const bool check = !follows && !too_low;
            too_low = check ? rows_beyond(sums) : 0;
            if (c.columns > 1 && !check) meet();  // P is whole
            if (too_low) continue;
            if constexpr (!optimistic) end_block(key < 0);  // the sums are done before P V starts
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) softmax_[r].add(sums[r]);
            pipeline.wait_values(tile);
            multiply_pv(p, pipeline.v_address(tile));
            pipeline.leave(tile++);
        }
        if constexpr (careful) {
            store();
        } else {
            const bool hides =
                problem_.window_left >= 0 || problem_.window_right >= 0 || problem_.visible.data;
            const bool doubtful = hides && !out_.is_finite();
            store();
            // Behind the stores: warps that see less than others are done before them.
            if (hides && __syncthreads_or(doubtful))
                run_carefully(problem_, shared_, score_unit_, natural_, rows_.heads, tile);
        }
    }

  private:
    static constexpr int threads = c.warps * 32;
    static_assert(c.columns == 1 || c.columns == 2 || c.columns == 4);
    static constexpr int warp_rows = c.query_tile / c.warps * c.columns;
    static constexpr int warp_keys = c.key_tile / c.columns;
    static constexpr int warp_values = c.head_dim / c.columns;
    using QueryTile = SmemTile<c.query_tile, c.head_dim, element_bytes(dtype)>;
    using KeyTile = SmemTile<c.key_tile, c.head_dim, element_bytes(dtype)>;
    using Pipeline = KeyPipeline<dtype, c.key_tile, c.head_dim, c.warps, (c.key_tile > 64 && !c.few), 2,
                                 (c.columns > 1), c.few != 0>;
    using ScoreTile = SmemTile<c.query_tile, c.key_tile, element_bytes(dtype)>;
    using Scores = Fragment<warp_rows, warp_keys>;
    using Output = Fragment<warp_rows, warp_values>;

    // Three blocks or more leave their plain kernels no registers for the bits of a mask.
    static constexpr bool takes_bits = features != Features::none || c.blocks < 3;
    // Biases that grow along the keys would have every tile's scores computed twice.
    static constexpr bool optimistic = features == Features::none;
    // How far scores may rise above the maximum, log 2, before the maximum follows them.
    static constexpr float kRise = 8;
    // A lane's sum of a tile's probabilities that is still in float16's range.
    static constexpr float kLargestSum = 1 << 15;
    // Scores whose rounding errors matter as exponents.
    static constexpr float kHuge = 1 << 22;
    // Of a warp's rows one has no maximum, one's is beyond kHuge.
    static constexpr uint32_t kUnsettled = 1, kRounds = 2;

    __device__ __forceinline__ uint32_t q_address() const { return shared_address(shared_.q); }
    __device__ __forceinline__ uint32_t p_address() const { return shared_address(shared_.p); }
    __device__ __forceinline__ static int warp() { return int(threadIdx.x) / 32; }
    __device__ __forceinline__ static int warp_row() { return warp() / c.columns * warp_rows; }
    // The warp's first column of the scores, of O.
    __device__ __forceinline__ static int warp_key() { return warp() % c.columns * warp_keys; }
    __device__ __forceinline__ static int warp_value() { return warp() % c.columns * warp_values; }
    // The warps that share their rows.
    __device__ __forceinline__ static void meet() { barrier_of<32 * c.columns>(1 + warp() / c.columns); }
    __device__ __forceinline__ static int row(int r) { return warp_row() + Scores::row(r); }
    __device__ __forceinline__ Position query(int r) const {
        return shared_.plan.tile.first + rows_.query(row(r));
    }
    __device__ __forceinline__ void multiply_qk(Scores& s, uint32_t k) const {
        s.clear();
        const uint32_t q_lane = QueryTile::lane_rows_first(q_address()) + warp_row() * QueryTile::row_bytes;
        const uint32_t k_lane = KeyTile::lane_columns_first(k) + warp_key() * KeyTile::row_bytes;
        multiply_rows_by_rows<dtype, QueryTile, KeyTile>(s, q_lane, k_lane);
    }

    // P as the left operand of P V: in registers, or written to shared memory for all warps of its rows.
    __device__ __forceinline__ auto left_operand(const Scores& p) const {
        if constexpr (c.columns == 1) {
            return RegisterOperand<dtype, warp_rows, warp_keys>(p);
        } else {
            meet();  // the other warps have left the last tile's
            store_fragment<dtype, ScoreTile>(p_address(), p, warp_row(), warp_key());
            return nullptr;
        }
    }

    template <class Operand>
    __device__ __forceinline__ void multiply_pv(const Operand& p, uint32_t v) {
        const uint32_t v_lane =
            KeyTile::template part<warp_values>(KeyTile::lane_rows_first(v), 0, warp_value());
        if constexpr (c.columns == 1) {
            multiply_registers_by_columns<dtype, KeyTile>(out_, p, v_lane);
        } else {
            const uint32_t p_lane =
                ScoreTile::lane_rows_first(p_address()) + warp_row() * ScoreTile::row_bytes;
            multiply_rows_by_columns<dtype, ScoreTile, KeyTile>(out_, p_lane, v_lane);
        }
    }

    // Of each row, over the warps that share it. combine() is symmetric, so all of them get the same bits.
    template <class Combine>
    __device__ __forceinline__ void exchange(float (&x)[Scores::rows], const Combine& combine) const {
        if constexpr (c.columns > 1) {
            meet();  // the other warps have read what was here
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r)
                if (lane_index() % 4 == 0) shared_.exchange[warp()][Scores::row(r)] = x[r];
            meet();
            const auto of = [&](int by, int r) { return shared_.exchange[warp() ^ by][Scores::row(r)]; };
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) {
                x[r] = combine(x[r], of(1, r));
                if constexpr (c.columns > 2) x[r] = combine(x[r], combine(of(2, r), of(3, r)));
            }
        }
    }

    // Of each row, over the lanes and warps that share it.
    __device__ __forceinline__ void row_maxima(float (&x)[Scores::rows]) const {
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) x[r] = quad_max(x[r]);
        exchange(x, [](float a, float b) { return fmaxf(a, b); });
    }

    // What the warp's rows see of a masked tile; always a part where the rest would cost more than it saves.
    enum class Sees { none, part, all };
    static constexpr bool skips = c.key_tile < c.query_tile && c.blocks < 3;

    // One query, or the last few of a sequence, leave some warps nothing to do but to copy.
    __device__ __forceinline__ bool has_no_rows() const {
        return skips && shared_.plan.tile.first + warp_row() >= shared_.plan.tile.rows.end;
    }

    __device__ __forceinline__ Sees what_warp_sees(const TileWalk<c.key_tile>& walk) const {
        if (!skips) return Sees::part;
        const Interval seen = walk.seen(shared_.plan.warp());
        const Position row = shared_.plan.tile.first + warp_row(), key = walk.first();
        const Interval first = intersection(shared_.plan.visible(row), seen);
        const Interval last = intersection(shared_.plan.visible(row + warp_rows - 1), seen);
        // Both ends never decrease with the row.
        if (last.end <= first.begin) return Sees::none;
        if (shared_.plan.warp().run.partial) return Sees::part;
        return last.begin <= key && first.end >= key + c.key_tile ? Sees::all : Sees::part;
    }

    // From dot products to scores; without features the scale is left to exponentiate(). With few queries the
    // kernel waits for memory anyway, and asks.
    __device__ __forceinline__ void transform(Scores& s, Position key,
                                              const BiasPart<dtype, Scores>& bias) const {
        if (c.few && score_unit_ != 1) return;
        if constexpr (c.few > 0 || features != Features::none) {
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) {
                if (c.few && !shared_.plan.tile.rows.contains(query(r))) continue;
                const auto transform = rows_.transform(problem_, shared_.plan, row(r));
                const int meeting =
                    query(r) + shared_.plan.mask.diagonal() - key - warp_key();  // the column on the diagonal
#pragma unroll
                for (int column = 0; column < Scores::columns; ++column) {
                    const int distance = meeting - Scores::column(column);
                    s.at(r, column) =
                        transform.score(s.at(r, column), float(distance < 0 ? -distance : distance));
                }
            }
            if (!has_bias()) return;
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r)
#pragma unroll
                for (int column = 0; column < Scores::columns; ++column) {
                    const float x = bias.at(r, column);
                    s.at(r, column) = x == -INFINITY ? -INFINITY : s.at(r, column) + x;
                }
        }
    }

    __device__ __forceinline__ void mask(Scores& s, Position key, Interval seen) const {
        if (takes_bits && shared_.plan.warp().run.partial && shared_.plan.addend.visible.rows)
            shared_.plan.addend.visible.template each_hidden<Scores>(
                shared_.plan.tile.first + warp_row(), key + warp_key(),
                [&](int r, int column) { s.at(r, column) = OnlineSoftmax<GpuMath>::minus_infinity(); });
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Interval keys = intersection(shared_.plan.visible(query(r)), seen);
            const int first = key + warp_key(), begin = keys.begin - first, end = keys.end - first;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const int j = Scores::column(column);
                if (j < begin || j >= end) s.at(r, column) = OnlineSoftmax<GpuMath>::minus_infinity();
            }
        }
    }

    __device__ __forceinline__ bool has_bias() const {
        return c.bias && features == Features::all && shared_.plan.addend.bias;
    }
    __device__ __forceinline__ bool has_dropout() const {
        return features == Features::all && (!c.bias || problem_.dropout_threshold);
    }

    __device__ __forceinline__ float unit() const { return optimistic ? score_unit_ : 1.f; }

    // The maxima of the rows that move(row, its tile's maximum) names take in the tile, and O follows them.
    template <class Move>
    __device__ __forceinline__ uint32_t follow_maximum(const Scores& s, uint32_t maxima, const Move& move) {
        float largest[Scores::rows];
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) largest[r] = s.at(r, 0);
#pragma unroll
        for (int column = 1; column < Scores::columns; ++column)
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) largest[r] = fmaxf(largest[r], s.at(r, column));
        row_maxima(largest);
        bool moves[Scores::rows], any = false;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            largest[r] *= unit();
            moves[r] = move(r, largest[r]);
            any |= moves[r];
        }
        if (!__any_sync(0xffffffff, any)) return maxima;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r)
            out_.scale_row(r, moves[r] ? softmax_[r].update(largest[r]) : 1);
        bool unsettled = false, rounds = false;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            unsettled |= !softmax_[r].settled();
            rounds |= fabsf(softmax_[r].reference()) > kHuge;
        }
        return note_maxima((__any_sync(0xffffffff, unsettled) ? kUnsettled : 0) |
                           (__any_sync(0xffffffff, rounds) ? kRounds : 0));
    }

    // In shared memory, where they take no register from the loop.
    __device__ __forceinline__ uint32_t note_maxima(uint32_t maxima) const {
        if (!optimistic) return 0;
        __syncwarp();
        if (lane_index() == 0) shared_.maxima[warp()] = uint8_t(maxima);
        __syncwarp();
        return maxima;
    }

    // Scores become probabilities relative to the maximum. The product with unit() is not rounded before the
    // subtraction: nothing to be seen of it, unless the scores are so large that their rounding errors are
    // exponents. Then they are rounded as the maximum was, and the largest probability is 1.
    __device__ __forceinline__ void exponentiate(Scores& s, float (&sums)[Scores::rows], bool rounds) const {
        float factor = unit();
        if (optimistic && rounds) {
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
                sums[r] = column == 0 ? p : sums[r] + p;
            }
        }
    }

    // Rows whose maximum is too far below this tile's scores, a bit each, and one more bit that says that any
    // row of the warp has one: what is done again is done by all warps that share rows.
    __device__ __forceinline__ uint32_t rows_beyond(float (&sums)[Scores::rows]) const {
        bool beyond = false;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) beyond |= sums[r] > kLargestSum;
        beyond = __any_sync(0xffffffff, beyond);
        if constexpr (c.columns > 1) {
            shared_.beyond[warp()] = beyond;
            meet();
#pragma unroll
            for (int other = 1; other < c.columns; ++other) beyond |= shared_.beyond[warp() ^ other];
        }
        if (!beyond) return 0;
        row_maxima(sums);
        uint32_t rows = 1u << 31;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) rows |= uint32_t(sums[r] > kLargestSum) << r;
        return rows;
    }

    // In a masked tile a probability of 0 may meet a value that is not finite. That is rare, and leaves its
    // mark in O: then all tiles are visited again. A function of its own, so that the loop above keeps its
    // registers.
    __device__ static __noinline__ void run_carefully(const ForwardProblem& problem,
                                                      ForwardShared<dtype, c>& shared,
                                                      const float& score_unit, const double& natural,
                                                      const int& heads, uint32_t tile) {
        ForwardTile<dtype, c, features, true> again(problem, shared, score_unit, natural, heads);
        again.load_queries(shared.plan.tile);  // O took their place
        again.run(tile);
    }

    // Such values become 0 in shared memory, and keys that had one are noted. All threads of the block; true
    // if there were any.
    __device__ __forceinline__ bool exclude_bad_values(const Pipeline& pipeline, uint32_t tile) {
        pipeline.wait_values(tile);
        return clear_bad_rows<dtype, threads, KeyTile>(shared_.bad_keys, pipeline.v_address(tile));
    }

    // O of a row that sees such a key is NaN from here on.
    __device__ __forceinline__ void spoil_rows(const Scores& s) {
        const uint32_t bad = bad_columns<Scores>(shared_.bad_keys, warp_key());
        float sees[Scores::rows];
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            sees[r] = 0;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column)
                if (s.at(r, column) != -INFINITY && bad >> column & 1) sees[r] = 1;
        }
        row_maxima(sees);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r)
            if (sees[r] != 0) out_.scale_row(r, __int_as_float(0x7fffffff));
    }

    __device__ __forceinline__ void store() {
        const float keep_scale = has_dropout() ? float(shared_.plan.dropout.keep_scale()) : 1;
        float sums[Scores::rows];
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) sums[r] = quad_sum(softmax_[r].row_sum);
        exchange(sums, [](float a, float b) { return a + b; });
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            softmax_[r].row_sum = sums[r];
            out_.scale_row(r, softmax_[r].normalizer() * keep_scale);
        }
        if (shared_.plan.split.count > 1) {
            if constexpr (c.few > 0)
                if (shared_.plan.split.is_cluster()) return store_in_cluster();
            return store_partial();
        }
        const RowTile& tile = shared_.plan.tile;
        each_lse([&, lse = statistics_of<float>(problem_.lse, tile.batch, tile.sequence.first_query_row,
                                                rows_.first_head(tile))](int r, float x) {
            lse[rows_.head(row(r)) * problem_.lse.head_stride + query(r)] = x;
        });
        // Its rows of Q are read by nobody else.
        store_fragment<dtype, QueryTile>(q_address(), out_, warp_row(), warp_value());
        if constexpr (c.columns > 1)
            meet();
        else
            __syncwarp();
        const auto out = rows_.template of<Bits<dtype>>(problem_.out, tile, problem_.head_dim_v);
        store_tile<32 * c.columns, QueryTile, warp_rows>(out, q_address() + warp_row() * QueryTile::row_bytes,
                                                         rows_.first_row(tile) + warp_row(),
                                                         rows_.rows(tile));
    }

    // The lanes of a quad take one row each: store(its r, lse).
    template <class Store>
    __device__ __forceinline__ void each_lse(const Store& store) const {
        const int mine = lane_index() % 4;
        OnlineSoftmax<GpuMath> softmax = softmax_[0];
#pragma unroll
        for (int r = 1; r < Scores::rows; ++r)
            if (r == mine) softmax = softmax_[r];
        if (mine < Scores::rows && warp_key() == 0 && shared_.plan.tile.rows.contains(query(mine)))
            store(mine, softmax.log_sum_exp(natural_));
    }

    // Averages over this split's keys, in fp32 for the combination (any/combine.cu).
    __device__ __forceinline__ void store_partial() const {
        const auto& plan = shared_.plan;
        const int64_t first = plan.split.first_row(problem_, plan.tile, rows_.first_head(plan.tile));
        const auto place = [&](int r) { return first + rows_.head(row(r)) * problem_.rows_q + query(r); };
        each_lse([&](int r, float x) { plan.split.lse[place(r)] = x; });
        store_floats(out_, warp_value(), [&](int r) {
            return plan.tile.rows.contains(query(r)) ? plan.split.out + place(r) * c.head_dim : nullptr;
        });
    }

    // The same where the splits are a cluster; in the place of keys and values.
    __device__ __forceinline__ void store_in_cluster() const {
        auto& part = *reinterpret_cast<PartialRows<c.query_tile, c.head_dim>*>(&shared_.keys);
        __syncthreads();  // all warps are done with them
        each_lse([&](int r, float x) { part.lse[row(r)] = x; });
        store_floats(out_, warp_value(), [&](int r) { return part.out[row(r)]; });
        const Split& split = shared_.plan.split;
        store_together<dtype, threads, 1>(problem_, shared_.plan.tile, rows_, split.index, split.count, part);
    }

    const ForwardProblem& problem_;
    ForwardShared<dtype, c>& shared_;
    const float& score_unit_;
    const double& natural_;
    const QueryRows<(c.few != 0)> rows_;
    OnlineSoftmax<GpuMath> softmax_[Scores::rows];
    bool loaded_early_ = false;
    Output out_;
};

}  // namespace flash::cuda::sm80
