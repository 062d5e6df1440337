// dQ by a walk of its own, for deterministic=True: a block owns a tile of queries, recomputes S and dP of
// every key tile that its schedule lists and sums dQ in registers, always in the same order. Two products
// more than the walk by keys needs, and no additions in device memory. Each warp owns query_tile / warps rows
// throughout.
#pragma once

#include "../any/finite.cuh"
#include "key_stages.cuh"
#include "score_gradient.cuh"

namespace flash::cuda::sm80 {

struct QueryGradientConfiguration {
    int head_dim, query_tile, key_tile, warps, stages, blocks;
};

template <DType dtype, QueryGradientConfiguration c>
struct QueryGradientShared {
    alignas(128) char q[c.query_tile * c.head_dim * element_bytes(dtype)];  // at the end dQ
    alignas(128) char dout[c.query_tile * c.head_dim * element_bytes(dtype)];
    KeyStages<dtype, c.key_tile, c.head_dim, c.stages> keys;
    float lse[c.query_tile], delta[c.query_tile];
    uint32_t bad_keys[(c.key_tile + 31) / 32];
    QueryPlan<dtype, c.warps> plan;
};

template <DType dtype, QueryGradientConfiguration c, Features features>
class QueryGradientTile {
  public:
    __device__ QueryGradientTile(const BackwardProblem& problem, QueryGradientShared<dtype, c>& shared)
        : problem_(problem), shared_(shared) {}

    // By one thread.
    __device__ __forceinline__ void start_barriers() const { Pipeline::start_barriers(shared_.keys); }

    // Needs no plan: the copies run while thread 0 makes it.
    __device__ __forceinline__ void load_first(const RowTile& tile) {
        load_queries(tile);
        loaded_early_ = Pipeline::load_early(shared_.keys, problem_.forward, tile, Split());
    }

    __device__ __forceinline__ void run() {
        dq_.clear();
        TileWalk<c.key_tile> walk(shared_.plan.warp(), shared_.plan.start);
        const Pipeline pipeline(shared_.keys, problem_.forward, shared_.plan);
        pipeline.begin(loaded_early_, 0, walk);
        for (uint32_t tile = 0; walk.more(); ++tile) {
            pipeline.wait_keys(tile);
            const bool has_bias = features == Features::all && shared_.plan.addend.bias;
            const uint32_t k = pipeline.k_address(tile);
            const bool bad =
                (walk.masked() || has_bias) && clear_bad_rows<dtype, threads, KeyTile>(shared_.bad_keys, k);
            Scores s, ds;
            multiply_scores(s, ds, k, pipeline.v_address(tile));
            const Part part{walk.first(), walk.seen(shared_.plan.warp()), walk.masked() || has_bias,
                            walk.masked() && shared_.plan.warp().run.partial};
            walk.advance(shared_.plan.warp());
            if (c.stages > 1) pipeline.load(tile + 1, walk);
            differentiate_scores(s, ds, part, bad);
            const RegisterOperand<dtype, warp_rows, c.key_tile> operand(ds);
            // Opaque: else where this tile lies would be kept from its first products on.
            const uint32_t same = opaque(tile);
            multiply_registers_by_columns<dtype, KeyTile>(
                dq_, operand, KeyTile::lane_rows_first(pipeline.k_address(same)));
            pipeline.leave(same);
            if (c.stages == 1) pipeline.load(tile + 1, walk);
        }
        store();
    }

  private:
    static constexpr int threads = c.warps * 32;
    static constexpr int warp_rows = c.query_tile / c.warps;
    using QueryTile = SmemTile<c.query_tile, c.head_dim, element_bytes(dtype)>;
    using KeyTile = SmemTile<c.key_tile, c.head_dim, element_bytes(dtype)>;
    using Pipeline = KeyPipeline<dtype, c.key_tile, c.head_dim, c.warps, (c.query_tile > 64), c.stages>;
    using Scores = Fragment<warp_rows, c.key_tile>;

    // A tile of keys: where it starts, which of them exist and may be seen.
    struct Part {
        Position first;
        Interval seen;
        bool masked, partial;  // partial: asks the bits
    };

    __device__ __forceinline__ static int warp_row() { return int(threadIdx.x) / 32 * warp_rows; }

    __device__ __forceinline__ void load_queries(const RowTile& tile) {
        const ForwardProblem& problem = problem_.forward;
        const int64_t batch = tile.unowned ? 0 : tile.batch, first = tile.sequence.first_query_row;
        const HeadRows<const Bits<dtype>> q(problem.q, batch, first, tile.head, problem.head_dim);
        const HeadRows<const Bits<dtype>> dout(problem_.dout, batch, first, tile.head, problem.head_dim_v);
        load_tile<threads, QueryTile>(shared_address(shared_.q), q, tile.first, tile.rows);
        load_tile<threads, QueryTile>(shared_address(shared_.dout), dout, tile.first, tile.rows);
        for (int row = threadIdx.x; row < c.query_tile; row += threads) {
            const bool exists = tile.rows.contains(tile.first + row);
            const int64_t at = first + tile.first + row;
            shared_.lse[row] =
                exists ? *statistics_of<const float>(problem.lse, batch, at, tile.head) : -INFINITY;
            shared_.delta[row] =
                exists ? *statistics_of<const float>(problem_.delta, batch, at, tile.head) : 0;
        }
    }

    // s = Q K^T, dp = dO V^T.
    __device__ __forceinline__ void multiply_scores(Scores& s, Scores& dp, uint32_t k, uint32_t v) const {
        const uint32_t rows = warp_row() * QueryTile::row_bytes;
        s.clear();
        dp.clear();
        multiply_rows_by_rows<dtype, QueryTile, KeyTile>(
            s, QueryTile::lane_rows_first(shared_address(shared_.q) + rows), KeyTile::lane_columns_first(k));
        multiply_rows_by_rows<dtype, QueryTile, KeyTile>(
            dp, QueryTile::lane_rows_first(shared_address(shared_.dout) + rows),
            KeyTile::lane_columns_first(v));
    }

    // ds: dP on entry, dS on return.
    __device__ __forceinline__ void differentiate_scores(Scores& s, Scores& ds, const Part& part,
                                                         bool bad) const {
        const auto& plan = shared_.plan;
        RowConstants<Scores::rows> constants;
        constants.template load<Scores>(shared_.lse + warp_row(), shared_.delta + warp_row());
        const Position query = plan.tile.first + warp_row();
        differentiate<features>(
            s, ds, constants, plan.transform, plan.dropout, plan.addend,
            {query, part.first, plan.mask.diagonal(), problem_.forward.dropout_threshold != 0});
        if (part.masked) mask(ds, part, query, bad);
        if (part.partial && plan.addend.visible.rows)
            plan.addend.visible.template each_hidden<Scores>(
                query, part.first, [&](int r, int column) { ds.at(r, column) = 0; });
    }

    // Zero where invisible, NaN where a key that is seen is not finite.
    __device__ __forceinline__ void mask(Scores& ds, const Part& part, Position query, bool bad) const {
        const uint32_t bad_keys = bad ? bad_columns<Scores>(shared_.bad_keys, 0) : 0;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Interval keys = intersection(shared_.plan.visible(query + Scores::row(r)), part.seen);
            const int first = part.first + Scores::column(0);
            const int begin = keys.begin - first, end = keys.end - first;
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const int after = Scores::columns_before(column);
                if (after < begin || after >= end)
                    ds.at(r, column) = 0;
                else if (bad_keys >> column & 1 &&
                         !(features == Features::all &&
                           shared_.plan.addend.bias_hides(query + Scores::row(r), first + after)))
                    ds.at(r, column) = __int_as_float(0x7fffffff);
            }
        }
    }

    __device__ __forceinline__ void store() {
        const RowTile& tile = shared_.plan.tile;
        if constexpr (features == Features::none) dq_ *= float(problem_.forward.softmax_scale);
        // Its rows of Q are read by nobody else.
        store_fragment<dtype, QueryTile>(shared_address(shared_.q), dq_, warp_row(), 0);
        __syncwarp();
        const HeadRows<Bits<dtype>> dq(problem_.dq, tile.unowned ? 0 : tile.batch,
                                       tile.sequence.first_query_row, tile.head, problem_.forward.head_dim);
        store_tile<32, QueryTile, warp_rows>(dq,
                                             shared_address(shared_.q) + warp_row() * QueryTile::row_bytes,
                                             tile.first + warp_row(), tile.rows);
    }

    const BackwardProblem& problem_;
    QueryGradientShared<dtype, c>& shared_;
    Fragment<warp_rows, c.head_dim> dq_;
    bool loaded_early_ = false;
};

}  // namespace flash::cuda::sm80
