// The gradient of a bias: dS, before the derivative of what came between dot product and score, summed over
// what the bias is shared by. A block owns a tile of the bias and visits every batch entry, head and, where
// rows share the bias, tile of queries that read it, one after the other: sums are registers, their order is
// fixed, and nothing of the size of the score matrix is stored. S and dP are computed once more, over the
// head dim in chunks, so that one kernel serves all head dims.
#pragma once

#include "../any/bias_tiles.cuh"
#include "../any/loader.cuh"
#include "score_gradient.cuh"

namespace flash::cuda::sm80 {

struct BiasGradientConfiguration {
    int head_dim, query_tile, key_tile, warps;  // head_dim: at most
};

template <DType dtype, BiasGradientConfiguration c>
struct BiasGradientShared {
    static constexpr int chunk = 64;
    using QueryTile = SmemTile<c.query_tile, chunk, element_bytes(dtype)>;
    using KeyTile = SmemTile<c.key_tile, chunk, element_bytes(dtype)>;
    alignas(128) char q[QueryTile::bytes];
    alignas(128) char dout[QueryTile::bytes];
    alignas(128) char k[KeyTile::bytes];
    alignas(128) char v[KeyTile::bytes];
    float lse[c.query_tile], delta[c.query_tile];
    float column_sums[2][c.key_tile];  // of the upper and lower warps
};

template <DType dtype, BiasGradientConfiguration c>
class BiasGradientTile {
  public:
    __device__ BiasGradientTile(const BackwardProblem& problem, BiasGradientShared<dtype, c>& shared,
                                const BiasTiles& tiles, uint32_t index)
        : problem_(problem), shared_(shared), tiles_(tiles), tile_(tiles(index)) {}

    __device__ __forceinline__ void run() {
        const ForwardProblem& problem = problem_.forward;
        sum_.clear();
        tiles_.each_reader(problem, tile_, [&](int batch, int head, Position query) {
            const Sequence sequence = sequence_of(problem, batch);
            add(batch, head, sequence, Mask(problem, sequence), query);
        });
        if (problem_.dbias.row_stride)
            store_rows();
        else
            store_column_sums();
    }

  private:
    using Shared = BiasGradientShared<dtype, c>;
    using QueryTile = typename Shared::QueryTile;
    using KeyTile = typename Shared::KeyTile;
    static constexpr int threads = c.warps * 32;
    static_assert(c.warps == 4);
    using Scores = Fragment<c.query_tile / 2, c.key_tile / 2>;  // two by two warps

    __device__ __forceinline__ static int row() { return int(threadIdx.x) / 64 * (c.query_tile / 2); }
    __device__ __forceinline__ static int column() { return int(threadIdx.x) / 32 % 2 * (c.key_tile / 2); }

    __device__ __forceinline__ void add(int64_t batch, int64_t head, const Sequence& sequence,
                                        const Mask& mask, Position query) {
        const ForwardProblem& problem = problem_.forward;
        const Interval queries = intersection({query, query + c.query_tile}, {0, sequence.seqlen_q});
        const Interval seen =
            intersection({mask.keys_of(queries.begin).begin, mask.keys_of(queries.end - 1).end},
                         {tile_.key, tile_.key + c.key_tile});
        if (seen.empty()) return;
        const int64_t key_head = head / (problem.heads_q / problem.heads_k);
        Scores s, dp;
        s.clear();
        dp.clear();
        load_statistics(batch, head, queries);
        multiply(s, problem.q, problem.k, batch, head, key_head, problem.head_dim, query, queries, seen,
                 shared_.q, shared_.k);
        multiply(dp, problem_.dout, problem.v, batch, head, key_head, problem.head_dim_v, query, queries,
                 seen, shared_.dout, shared_.v);
        RowConstants<Scores::rows> constants;
        constants.template load<Scores>(shared_.lse + row(), shared_.delta + row());
        const ScoreTransform<GpuMath> transform(problem, batch, head);
        Dropout dropout;
        if (problem.dropout_threshold) dropout = Dropout(problem, batch, head);
        const ScoreAddend<dtype> addend(problem, batch, head);
        differentiate<Features::all, Of::scores>(
            s, dp, constants, transform, dropout, addend,
            {query + row(), tile_.key + column(), mask.diagonal(), problem.dropout_threshold != 0});
        if (addend.visible.rows)
            addend.visible.template each_hidden<Scores>(query + row(), tile_.key + column(),
                                                        [&](int r, int column) { dp.at(r, column) = 0; });
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Position i = query + row() + Scores::row(r);
            const Interval keys = queries.contains(i) ? mask.keys_of(i) : Interval(0, 0);
#pragma unroll
            for (int n = 0; n < Scores::columns; ++n)
                if (keys.contains(tile_.key + column() + Scores::column(n))) sum_.at(r, n) += dp.at(r, n);
        }
        __syncthreads();  // lse and delta have been read
    }

    __device__ __forceinline__ void load_statistics(int64_t batch, int64_t head, Interval queries) const {
        for (int i = threadIdx.x; i < c.query_tile; i += threads) {
            const Position at = queries.begin + i;
            const bool exists = at < queries.end;
            shared_.lse[i] =
                exists ? *statistics_of<const float>(problem_.forward.lse, batch, at, head) : -INFINITY;
            shared_.delta[i] = exists ? *statistics_of<const float>(problem_.delta, batch, at, head) : 0;
        }
    }

    // d += A B^T, over the head dim in chunks. Barriers: on return everybody sees lse and delta, too.
    __device__ __forceinline__ void multiply(Scores& d, const TensorView& a, const TensorView& b,
                                             int64_t batch, int64_t head, int64_t key_head, int64_t head_dim,
                                             Position query, Interval queries, Interval keys, char* a_tile,
                                             char* b_tile) const {
        HeadRows<const Bits<dtype>> rows(a, batch, 0, head, head_dim),
            columns(b, batch, 0, key_head, head_dim);
        for (int left = int(head_dim); left > 0; left -= Shared::chunk) {
            rows.head_dim = columns.head_dim = left < Shared::chunk ? left : Shared::chunk;
            load_tile<threads, QueryTile>(shared_address(a_tile), rows, query, queries);
            load_tile<threads, KeyTile>(shared_address(b_tile), columns, tile_.key, keys);
            cp_async_wait_all();
            __syncthreads();
            multiply_rows_by_rows<dtype, QueryTile, KeyTile>(
                d, QueryTile::lane_rows_first(shared_address(a_tile)) + row() * QueryTile::row_bytes,
                KeyTile::lane_columns_first(shared_address(b_tile)) + column() * KeyTile::row_bytes);
            __syncthreads();
            rows.data += Shared::chunk;
            columns.data += Shared::chunk;
        }
    }

    __device__ __forceinline__ bool exists(Position key) const {
        return key < Position(problem_.forward.seqlen_k);
    }

    __device__ __forceinline__ void store_rows() const {
        const Position query = tile_.query + row();
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Position i = query + Scores::row(r);
            if (i >= Position(problem_.forward.seqlen_q)) continue;
            float* to = row_of<float>(problem_.dbias, tile_.batch, tile_.head, i);
#pragma unroll
            for (int n = 0; n < Scores::columns; ++n) {
                const Position j = tile_.key + column() + Scores::column(n);
                if (exists(j)) to[j] = sum_.at(r, n);
            }
        }
    }

    __device__ __forceinline__ void store_column_sums() const {
#pragma unroll
        for (int n = 0; n < Scores::columns; ++n) {
            float sum = 0;
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) sum += sum_.at(r, n);
            for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
            if (lane_index() < 4) shared_.column_sums[threadIdx.x / 64][column() + Scores::column(n)] = sum;
        }
        __syncthreads();
        float* to = row_of<float>(problem_.dbias, tile_.batch, tile_.head, 0);
        for (int i = threadIdx.x; i < c.key_tile; i += threads)
            if (exists(tile_.key + i))
                to[tile_.key + i] = shared_.column_sums[0][i] + shared_.column_sums[1][i];
    }

    const BackwardProblem& problem_;
    BiasGradientShared<dtype, c>& shared_;
    const BiasTiles& tiles_;
    const BiasTiles::Tile tile_;
    Scores sum_;
};

}  // namespace flash::cuda::sm80
