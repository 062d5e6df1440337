// dQ by a walk of its own, for deterministic=True: a block owns a tile of queries, recomputes S and dP of
// every key tile that its schedule lists and sums dQ in registers, always in the same order. Two products
// more than the walk by keys needs, and no additions in device memory. Each warp owns query_tile / warps rows
// throughout.
#pragma once

#include "finite.cuh"
#include "query_plan.cuh"
#include "score_gradient.cuh"

namespace flash::cuda::sm80 {

struct QueryGradientConfiguration {
    int head_dim, query_tile, key_tile, warps;
};

template <DType dtype, QueryGradientConfiguration c>
struct QueryGradientShared {
    alignas(128) char q[c.query_tile * c.head_dim * element_bytes(dtype)];  // at the end dQ
    alignas(128) char dout[c.query_tile * c.head_dim * element_bytes(dtype)];
    alignas(128) char k[c.key_tile * c.head_dim * element_bytes(dtype)];
    alignas(128) char v[c.key_tile * c.head_dim * element_bytes(dtype)];
    float lse[c.query_tile], delta[c.query_tile];
    uint32_t bad_keys[(c.key_tile + 31) / 32];
    QueryPlan<dtype, c.warps> plan;
};

template <DType dtype, QueryGradientConfiguration c, Features features>
class QueryGradientTile {
  public:
    // shared.plan is made.
    __device__ QueryGradientTile(const BackwardProblem& problem, QueryGradientShared<dtype, c>& shared)
        : problem_(problem), shared_(shared) {}

    __device__ __forceinline__ void run() {
        load_queries();
        dq_.clear();
        for (TileWalk<c.key_tile> walk(shared_.plan.warp(), shared_.plan.start); walk.more();
             walk.advance(shared_.plan.warp())) {
            const Interval seen = walk.seen(shared_.plan.warp());
            load_tile<threads, KeyTile>(shared_address(shared_.k), shared_.plan.keys, walk.first(), seen);
            load_tile<threads, KeyTile>(shared_address(shared_.v), shared_.plan.values, walk.first(), seen);
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();
            const bool bad = walk.masked() && clear_bad_rows<dtype, threads, KeyTile>(
                                                  shared_.bad_keys, shared_address(shared_.k));
            accumulate(walk, bad);
            __syncthreads();
        }
        store();
    }

  private:
    static constexpr int threads = c.warps * 32;
    static constexpr int warp_rows = c.query_tile / c.warps;
    using QueryTile = SmemTile<c.query_tile, c.head_dim, element_bytes(dtype)>;
    using KeyTile = SmemTile<c.key_tile, c.head_dim, element_bytes(dtype)>;
    using Scores = Fragment<warp_rows, c.key_tile>;

    __device__ __forceinline__ static int warp_row() { return int(threadIdx.x) / 32 * warp_rows; }

    __device__ __forceinline__ void load_queries() {
        const RowTile& tile = shared_.plan.tile;
        const ForwardProblem& problem = problem_.forward;
        const int64_t batch = tile.unowned ? 0 : tile.batch, first = tile.sequence.first_query_row;
        const HeadRows<const Bits<dtype>> q(problem.q, batch, first, tile.head, problem.head_dim);
        const HeadRows<const Bits<dtype>> dout(problem_.dout, batch, first, tile.head, problem.head_dim_v);
        load_tile<threads, QueryTile>(shared_address(shared_.q), q, tile.first, tile.rows);
        load_tile<threads, QueryTile>(shared_address(shared_.dout), dout, tile.first, tile.rows);
        cp_async_commit();
        for (int row = threadIdx.x; row < c.query_tile; row += threads) {
            const bool exists = tile.rows.contains(tile.first + row);
            const int64_t at = first + tile.first + row;
            shared_.lse[row] =
                exists ? *statistics_of<const float>(problem.lse, batch, at, tile.head) : -INFINITY;
            shared_.delta[row] =
                exists ? *statistics_of<const float>(problem_.delta, batch, at, tile.head) : 0;
        }
    }

    __device__ __forceinline__ void accumulate(const TileWalk<c.key_tile>& walk, bool bad) {
        const auto& plan = shared_.plan;
        const uint32_t rows = warp_row() * QueryTile::row_bytes;
        Scores s, ds;
        s.clear();
        ds.clear();
        multiply_rows_by_rows<dtype, QueryTile, KeyTile>(
            s, QueryTile::lane_rows_first(shared_address(shared_.q)) + rows,
            KeyTile::lane_columns_first(shared_address(shared_.k)));
        multiply_rows_by_rows<dtype, QueryTile, KeyTile>(
            ds, QueryTile::lane_rows_first(shared_address(shared_.dout)) + rows,
            KeyTile::lane_columns_first(shared_address(shared_.v)));
        RowConstants<Scores::rows> constants;
        constants.template load<Scores>(shared_.lse + warp_row(), shared_.delta + warp_row());
        const Position query = plan.tile.first + warp_row();
        differentiate<features>(s, ds, constants, plan.transform, plan.dropout,
                                {query, walk.first(), plan.mask.diagonal()});
        if (walk.masked()) mask(ds, walk, query, bad);
        const RegisterOperand<dtype, warp_rows, c.key_tile> operand(ds);
        multiply_registers_by_columns<dtype, KeyTile>(dq_, operand,
                                                      KeyTile::lane_rows_first(shared_address(shared_.k)));
    }

    // Zero where invisible, NaN where a key that is seen is not finite.
    __device__ __forceinline__ void mask(Scores& ds, const TileWalk<c.key_tile>& walk, Position query,
                                         bool bad) const {
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Interval keys =
                intersection(shared_.plan.visible(query + Scores::row(r)), walk.seen(shared_.plan.warp()));
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column) {
                const int j = Scores::column(column);
                if (!keys.contains(walk.first() + j))
                    ds.at(r, column) = 0;
                else if (bad && shared_.bad_keys[j / 32] >> j % 32 & 1)
                    ds.at(r, column) = __int_as_float(0x7fffffff);
            }
        }
    }

    __device__ __forceinline__ void store() {
        const RowTile& tile = shared_.plan.tile;
        if constexpr (features == Features::none) {
            const float scale = float(problem_.forward.softmax_scale);
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r)
#pragma unroll
                for (int column = 0; column < dq_.columns; ++column) dq_.at(r, column) *= scale;
        }
        cp_async_wait<0>();
        __syncthreads();  // Q may still be on its way where there was no key
        store_fragment<dtype, QueryTile>(shared_address(shared_.q), dq_, warp_row(), 0);
        __syncthreads();
        const HeadRows<Bits<dtype>> dq(problem_.dq, tile.unowned ? 0 : tile.batch,
                                       tile.sequence.first_query_row, tile.head, problem_.forward.head_dim);
        store_tile<threads, QueryTile>(dq, shared_address(shared_.q), tile.first, tile.rows);
    }

    const BackwardProblem& problem_;
    QueryGradientShared<dtype, c>& shared_;
    Fragment<warp_rows, c.head_dim> dq_;
};

}  // namespace flash::cuda::sm80
