// FlashAttention backward (docs/algorithm.md) with mma.sync, the walk by keys: one block owns a tile of keys
// of one key head, holds dK and dV in registers and visits the query tiles that see it, of every query head
// of the group in turn, so that no gradient is summed across blocks but dQ (and dK and dV where tiles of keys
// are few: any/walk_parts.cuh). Per query tile:
//
//     S = Q K^T, dP = dO V^T       warps split the scores      score_rows x rest
//     P, dS                        to shared memory, 16 bits
//     dV += P^T dO, dK += dS^T Q   warps split keys x head_dim gradient_rows x rest
//     dQ += dS K                   warps split queries x head_dim, fp32 additions in device memory
//
// Everybody waits for a tile's Q and dO to be there (full), for all to have left the last tile before P and
// dS are overwritten (left), and for P and dS to be whole (ready). A block that has the multiprocessor to
// itself waits at mbarriers, so that its warps drift apart and some multiply while others take exponentials;
// where several blocks do that for each other, two __syncthreads cost less. The next tile's Q and dO are
// loaded meanwhile (stages = 2), or when everybody has left this one into the same place (stages = 1).
#pragma once

#include "../any/finite.cuh"
#include "backward_plan.cuh"

namespace flash::cuda::sm80 {

template <DType dtype, BackwardConfiguration c, Features features>
class BackwardTile {
  public:
    // Where there are no sums dQ comes from the walk by queries (query_gradient.cuh).
    __device__ BackwardTile(const BackwardProblem& problem, BackwardShared<dtype, c>& shared,
                            const DqSums& dq_sums, const WalkParts& parts)
        : problem_(problem),
          shared_(shared),
          plan_(problem, shared, dq_sums, parts),
          dq_sums_(dq_sums),
          parts_(parts) {}

    // Needs no plan: the copies run while thread 0 makes it. Queries are among them where their first tile is
    // easily found.
    __device__ __forceinline__ void load_first(const RowTile& tile) {
        const ForwardProblem& problem = problem_.forward;
        const int64_t first = tile.sequence.first_key_row;
        const HeadRows<const Bits<dtype>> k(problem.k, tile.batch, first, tile.key_head, problem.head_dim);
        const HeadRows<const Bits<dtype>> v(problem.v, tile.batch, first, tile.key_head, problem.head_dim_v);
        load_tile<threads, KeyTile>(address(shared_.k), k, tile.first, tile.rows);
        const Mask mask(problem, tile.sequence);
        const Position begin = mask.queries_of(tile.rows.begin).begin, end = begin + c.query_tile;
        const bool early = !tile.unowned && !tile.rows.empty() && !problem.query_blocks.counts &&
                           !parts_.of_queries() && begin % c.query_tile == 0 &&
                           end <= mask.queries_of(tile.rows.end - 1).end;
        const QueryRows<dtype> rows(problem_, tile, 0);
        if (early) copy_queries(rows, begin, {begin, end}, 0);
        if constexpr (scores_first) cp_async_commit();
        load_tile<threads, KeyTile>(address(shared_.v), v, tile.first, tile.rows);
        if (early) copy_douts(rows, begin, {begin, end}, 0);
        if (threadIdx.x == 0) shared_.loaded_early = early;
    }

    // By one thread.
    __device__ __forceinline__ void start_barriers() const {
        for (uint64_t& full : shared_.full) mbarrier_init(shared_address(&full), threads);
        mbarrier_init(shared_address(&shared_.left), c.warps * kWarpArrivals);
        mbarrier_init(shared_address(&shared_.ready), c.warps * kWarpArrivals);
    }

    __device__ __forceinline__ void run() {
        const Interval keys = shared_.tile.rows;
        dk_.clear();
        dv_.clear();
        note_bad_keys(false);
        // A partial tile of keys is masked throughout: an empty key's score of 0 may be far above lse.
        const bool partial = keys.begin > shared_.tile.first || keys.end < shared_.tile.first + c.key_tile;
        uint32_t tile = 0;  // how many are done, of all heads
        for (int i = 0; i < shared_.group; ++i) {
            __syncthreads();  // head i is described, and everybody has left head i - 1
            if (threadIdx.x == 0 && i + 1 < shared_.group) plan_.start_head(i + 1);
            const BackwardHead<dtype>& head = shared_.heads[i % 2];
            TileWalk<c.query_tile> walk(shared_.warps[warp()], head.start);
            if (i == 0 && shared_.loaded_early) {
                announce_copies(0);
                if constexpr (scores_first) {  // K and Q, which were committed
                    cp_async_wait<0>();
                    __syncthreads();
                }
            } else {
                load_queries(head, walk, tile);
            }
            while (walk.more()) {
                const int stage = tile % c.stages;
                const bool has_bias = features == Features::all && head.addend.bias;
                Part now{walk.first(),
                         walk.seen(shared_.warps[warp()]),
                         walk.masked() || partial || has_bias,
                         walk.masked() && shared_.warps[warp()].run.partial,
                         stage,
                         false};
                walk.advance(shared_.warps[warp()]);
                const bool early = scores_first && tile == 0 && shared_.loaded_early && !now.masked;
                if (!early) wait_full(tile);
                if (!drifts && c.stages > 1) load_queries(head, walk, tile + 1);
                if (tile == 0 && (partial || may_hide())) note_bad_keys(exclude_bad_keys());
                if (now.masked && may_be_bad(stage)) now.bad_queries = exclude_bad_queries(stage);
                differentiate_scores(head, now, tile, early);
                arrive(shared_.ready);
                if (drifts && c.stages > 1) load_queries(head, walk, tile + 1);
                wait(shared_.ready, tile % 2);
                accumulate(stage);
                if (dq_sums_.exist()) add_dq(head, now.first);
                arrive(shared_.left);
                if (c.stages == 1) {
                    wait(shared_.left, tile % 2);
                    load_queries(head, walk, tile + 1);
                }
                ++tile;
            }
        }
        store();
    }

  private:
    static constexpr int threads = c.warps * 32;
    static constexpr int score_columns = c.warps / c.score_rows, gradient_columns = c.warps / c.gradient_rows;
    using KeyTile = SmemTile<c.key_tile, c.head_dim, element_bytes(dtype)>;
    using QueryTile = SmemTile<c.query_tile, c.head_dim, element_bytes(dtype)>;
    using ScoreTile = SmemTile<c.query_tile, c.key_tile, element_bytes(dtype)>;
    using Scores = Fragment<c.query_tile / c.score_rows, c.key_tile / score_columns>;
    using Gradient = Fragment<c.key_tile / c.gradient_rows, c.head_dim / gradient_columns>;
    using Dq = sm80::Dq<dtype, c>;

    __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
    __device__ __forceinline__ static uint32_t address(const char* tile) { return shared_address(tile); }

    // A tile of queries: where it starts, which of them exist and may see a key, where it lies.
    struct Part {
        Position first;
        Interval seen;
        bool masked, partial;  // partial: asks the bits
        int stage;
        bool bad_queries;
    };

    static constexpr bool drifts = c.blocks == 1;
    // A block's first scores are computed while the first V and dO come: 2.5 % faster at head dim 64, 1.5 %
    // slower at 128.
    static constexpr bool scores_first = drifts && c.head_dim <= 64;

    // The whole warp.
    __device__ __forceinline__ static void arrive(uint64_t& barrier) {
        if constexpr (drifts) mbarrier_arrive_warp(shared_address(&barrier));
    }

    __device__ __forceinline__ static void wait(uint64_t& barrier, uint32_t parity) {
        if constexpr (drifts)
            mbarrier_wait(shared_address(&barrier), parity);
        else
            __syncthreads();
    }

    __device__ __forceinline__ void wait_full(uint32_t tile) const {
        if constexpr (!drifts) cp_async_wait<0>();
        wait(shared_.full[tile % c.stages], tile / c.stages % 2);
    }

    __device__ __forceinline__ void load_queries(const BackwardHead<dtype>& head,
                                                 const TileWalk<c.query_tile>& walk, uint32_t tile) {
        if (!walk.more()) return;
        const Interval seen = walk.seen(shared_.warps[warp()]);
        copy_queries(head.rows, walk.first(), seen, tile % c.stages);
        copy_douts(head.rows, walk.first(), seen, tile % c.stages);
        announce_copies(tile % c.stages);
    }

    __device__ __forceinline__ void copy_queries(const QueryRows<dtype>& from, Position first, Interval seen,
                                                 int stage) {
        load_tile<threads, QueryTile>(address(shared_.q[stage]), from.queries, first, seen);
    }
    // And lse and delta.
    __device__ __forceinline__ void copy_douts(const QueryRows<dtype>& from, Position first, Interval seen,
                                               int stage) {
        load_tile<threads, QueryTile>(address(shared_.dout[stage]), from.douts, first, seen);
        for (int row = threadIdx.x; row < c.query_tile; row += threads) {
            const Position query = first + row;
            const bool valid = seen.contains(query);
            cp_async_4(shared_address(&shared_.lse[stage][row]), from.lse + (valid ? query : 0), valid);
            cp_async_4(shared_address(&shared_.delta[stage][row]), from.delta + (valid ? query : 0), valid);
        }
    }

    __device__ __forceinline__ void announce_copies(int stage) {
        if constexpr (drifts)
            mbarrier_arrive_behind_copies(shared_address(&shared_.full[stage]));
        else
            cp_async_commit();
    }

    // Some query that exists may not see some key.
    __device__ __forceinline__ bool may_hide() const {
        const ForwardProblem& problem = problem_.forward;
        return features != Features::none || problem.window_left >= 0 || problem.window_right >= 0 ||
               problem.query_blocks.counts;
    }

    // A row of Q or dO that is not finite leaves its mark on lse or delta, unless a softcap hides it. All
    // warps say the same.
    __device__ __forceinline__ bool may_be_bad(int stage) const {
        if (features != Features::none) return true;
        bool bad = false;
#pragma unroll
        for (int row = lane_index(); row < c.query_tile; row += 32)
            bad |= !(fabsf(shared_.lse[stage][row]) + fabsf(shared_.delta[stage][row]) < INFINITY);
        return __any_sync(0xffffffff, bad);
    }

    // What is not finite becomes 0 where it may meet a probability of 0, in dK += dS^T Q, dV += P^T dO and dQ
    // += dS K; true if there was any, for mark_bad().
    __device__ __forceinline__ bool exclude_bad_queries(int stage) {
        return clear_bad_rows<dtype, threads, QueryTile>(shared_.bad_queries, address(shared_.q[stage]),
                                                         address(shared_.dout[stage]));
    }

    __device__ __forceinline__ void note_bad_keys(bool any) {
        __syncwarp();
        if (lane_index() == 0) shared_.has_bad_keys[warp()] = any;
        __syncwarp();
    }

    __device__ __forceinline__ bool exclude_bad_keys() {
        return clear_bad_rows<dtype, threads, KeyTile>(shared_.bad_keys, address(shared_.k));
    }

    // early: of the tile only K and Q are there.
    __device__ __forceinline__ void differentiate_scores(const BackwardHead<dtype>& head, const Part& part,
                                                         uint32_t tile, bool early) {
        // Opaque: else what is worked out of it would be kept for all tiles.
        const int by = drifts && c.stages > 1 ? int(opaque(threadIdx.x)) / 32 : warp();
        const int row = by % c.score_rows * Scores::row_tiles * 16;
        const int column = by / c.score_rows * Scores::column_tiles * 8;
        Scores s, dp;
        s.clear();
        dp.clear();
        const int first = row * QueryTile::row_bytes, first_key = column * KeyTile::row_bytes;
        multiply_rows_by_rows<dtype, QueryTile, KeyTile>(
            s, QueryTile::lane_rows_first(address(shared_.q[part.stage])) + first,
            KeyTile::lane_columns_first(address(shared_.k)) + first_key);
        if (early) wait_full(0);
        multiply_rows_by_rows<dtype, QueryTile, KeyTile>(
            dp, QueryTile::lane_rows_first(address(shared_.dout[part.stage])) + first,
            KeyTile::lane_columns_first(address(shared_.v)) + first_key);
        RowConstants<Scores::rows> constants;
        constants.template load<Scores>(shared_.lse[part.stage] + row, shared_.delta[part.stage] + row);
        differentiate<features>(s, dp, constants, head.transform, head.dropout, head.addend,
                                {part.first + row, shared_.tile.first + column, shared_.mask.diagonal(),
                                 problem_.forward.dropout_threshold != 0});
        const bool bad_keys = shared_.has_bad_keys[warp()];
        if (part.bad_queries || bad_keys) mark_bad(s, dp, head, part, bad_keys, row, column);
        if (part.masked) mask(s, dp, part, row, column);
        if (part.partial && head.addend.visible.rows)
            head.addend.visible.template each_hidden<Scores>(
                part.first + row, shared_.tile.first + column,
                [&](int r, int column) { s.at(r, column) = dp.at(r, column) = 0; });
        if constexpr (drifts) wait(shared_.left, tile % 2 ^ 1);
        store_fragment<dtype, ScoreTile>(address(shared_.p), s, row, column);
        store_fragment<dtype, ScoreTile>(address(shared_.ds), dp, row, column);
    }

    __device__ __forceinline__ Interval keys_of(const Part& part, int row) const {
        const Position query = part.first + row;
        return part.seen.contains(query) ? intersection(shared_.mask.keys_of(query), shared_.tile.rows)
                                         : Interval(0, 0);
    }

    // Selects zeros: what lies behind the mask may be infinite.
    __device__ __forceinline__ void mask(Scores& p, Scores& ds, const Part& part, int row0,
                                         int column0) const {
        const int origin = shared_.tile.first + column0;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Interval keys = keys_of(part, row0 + Scores::row(r));
            const int begin = keys.begin - origin, end = keys.end - origin;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const int j = Scores::column(column);
                if (j < begin || j >= end) p.at(r, column) = ds.at(r, column) = 0;
            }
        }
    }

    // A visible score is NaN if its row of Q, dO or K was not finite.
    __device__ __forceinline__ void mark_bad(Scores& p, Scores& ds, const BackwardHead<dtype>& head,
                                             const Part& part, bool bad_keys, int row0, int column0) const {
        // Else places of bits would be kept throughout.
        row0 = int(opaque(uint32_t(row0)));
        column0 = int(opaque(uint32_t(column0)));
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const int i = row0 + Scores::row(r);
            const Interval keys = keys_of(part, i);
            const bool bad_row = part.bad_queries && shared_.bad_queries[i / 32] >> i % 32 & 1;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const int j = column0 + Scores::column(column);
                const bool bad = bad_row || (bad_keys && shared_.bad_keys[j / 32] >> j % 32 & 1);
                if (!bad || !keys.contains(shared_.tile.first + j)) continue;
                if (features != Features::all ||
                    !head.addend.bias_hides(part.first + i, shared_.tile.first + j))
                    p.at(r, column) = ds.at(r, column) = __int_as_float(0x7fffffff);
            }
        }
    }

    __device__ __forceinline__ void accumulate(int stage) {
        constexpr int rows = Gradient::row_tiles * 16, columns = Gradient::column_tiles * 8;
        const int row = warp() / gradient_columns * rows, column = warp() % gradient_columns * columns;
        const auto scores = [&](const char* tile) {
            return ScoreTile::template part<rows>(ScoreTile::lane_columns_first(address(tile)), 0, row);
        };
        const auto operand = [&](const char* tile) {
            return QueryTile::template part<columns>(QueryTile::lane_rows_first(address(tile)), 0, column);
        };
        multiply_columns_by_columns<dtype, ScoreTile, QueryTile>(dv_, scores(shared_.p),
                                                                 operand(shared_.dout[stage]));
        multiply_columns_by_columns<dtype, ScoreTile, QueryTile>(dk_, scores(shared_.ds),
                                                                 operand(shared_.q[stage]));
    }

    __device__ __forceinline__ void add_dq(const BackwardHead<dtype>& head, Position query) const {
        constexpr int columns = c.head_dim / Dq::column_warps;
        typename Dq::Accumulators dq;
        dq.clear();
        multiply_rows_by_columns<dtype, ScoreTile, KeyTile>(
            dq, ScoreTile::lane_rows_first(address(shared_.ds)) + Dq::row() * ScoreTile::row_bytes,
            KeyTile::template part<columns>(KeyTile::lane_rows_first(address(shared_.k)), 0, Dq::column()));
        Dq::add(head.dq + int64_t(query) * c.head_dim, dq);
    }

    // As a function of its own, which leaves the registers of the walk alone.
    __device__ __noinline__ static bool end_apart(const WalkParts& parts, BackwardShared<dtype, c>& shared,
                                                  Gradient& dk, Gradient& dv) {
        constexpr int tiles = 2 * Gradient::row_tiles * Gradient::column_tiles;
        return parts.end_of_block<threads, tiles>(shared.part, shared.tile_of_all, shared.is_whole, dk, dv);
    }

    __device__ __forceinline__ void store() {
        const ForwardProblem& problem = problem_.forward;
        const RowTile& tile = shared_.tile;
        bool is_whole = true;
        if (parts_.divide()) {
            Gradient dk = dk_, dv = dv_;
            is_whole = end_apart(parts_, shared_, dk, dv);
            dk_ = dk, dv_ = dv;
        }
        if constexpr (features == Features::none) dk_ *= float(problem.softmax_scale);
        const int row = warp() / gradient_columns * Gradient::row_tiles * 16;
        const int column = warp() % gradient_columns * Gradient::column_tiles * 8;
        cp_async_wait_all();
        __syncthreads();  // everybody has left K and V, and their copies are done where there was no query
        store_fragment<dtype, KeyTile>(address(shared_.k), dk_, row, column);
        store_fragment<dtype, KeyTile>(address(shared_.v), dv_, row, column);
        __syncthreads();
        if (threadIdx.x == threads - 1) shared_.finishes_dq = dq_sums_.last_of(shared_.place.head);
        const int64_t first = tile.sequence.first_key_row;
        const HeadRows<Bits<dtype>> dk(problem_.dk, tile.batch, first, tile.key_head, problem.head_dim);
        const HeadRows<Bits<dtype>> dv(problem_.dv, tile.batch, first, tile.key_head, problem.head_dim_v);
        if (is_whole) {
            store_tile<threads, KeyTile>(dk, address(shared_.k), tile.first, tile.rows);
            store_tile<threads, KeyTile>(dv, address(shared_.v), tile.first, tile.rows);
        }
        if (!dq_sums_.exist()) return;
        __syncthreads();
        if (!shared_.finishes_dq) return;
        if constexpr (c.finish_apart)
            finish_unit_apart<Dq>(problem_, dq_sums_, shared_.place.head, address(shared_.q[0]));
        else
            finish_unit<Dq>(problem_, dq_sums_, shared_.place.head, address(shared_.q[0]));
    }

    const BackwardProblem& problem_;
    BackwardShared<dtype, c>& shared_;
    BackwardPlan<dtype, c> plan_;
    const DqSums& dq_sums_;
    const WalkParts& parts_;
    Gradient dk_, dv_;
};

}  // namespace flash::cuda::sm80
