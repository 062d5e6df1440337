// The gradient of a bias (FlashAttention backward, docs/algorithm.md): dS, before the derivative of what came
// between dot product and score, summed over what the bias is shared by. A block takes one tile of the bias
// after the other and visits all that read it, batch entries, heads and, where rows share the bias, tiles of
// queries, in an order that is always the same. Each of two warpgroups has 64 of the tile's queries:
//
//     S = Q K^T, dP = dO V^T       from shared memory
//     P = exp(S + bias - lse)      registers, as all that follows
//     sum += P (dP - delta)        fp32, until the tile's end
//
// Its four operands make a visit short of copies before it is short of anything else, so they go through one
// ring of tiles, Q K dO V Q K ..., in which the next visit's are copied as soon as a product is done: by two
// warps, one for each product, of which one decides what is visited. Warpgroups take turns at starting their
// products, so that one multiplies while the other one takes exponentials.
#pragma once

#include "../any/bias_tiles.cuh"
#include "../any/visible_bits.cuh"
#include "../ptx/barrier.h"
#include "../ptx/register_budget.h"
#include "../tile/gpu_math.h"
#include "backward_producer.cuh"
#include "tile_queue.cuh"
#include "warpgroup_product.h"

namespace flash::cuda::sm90 {

struct BiasGradientConfiguration {
    int head_dim, query_tile, key_tile, stages;  // stages: tiles in flight, of Q, K, dO and V together

    static constexpr int warpgroups = 2;  // that compute
    static constexpr int consumers = 128 * warpgroups, threads = consumers + 128;
};

// Which tiles of a visit are whose in the ring.
enum VisitTile { kQ, kK, kDout, kV, kVisitTiles };

// What the copying warp says of a visit.
struct VisitNote {
    static constexpr uint32_t first = 1;   // of a tile of the bias
    static constexpr uint32_t masked = 2;  // some queries don't exist, or don't see all keys that do
    static constexpr uint32_t end = 4;     // there is no visit any more; nothing else is set
    uint32_t flags;
    Position query;
    int head, batch;
    BiasTiles::Tile tile;
};

template <BiasGradientConfiguration c>
struct BiasGradientShared {
    static_assert(c.query_tile == 64 * c.warpgroups && c.key_tile == c.query_tile);
    static constexpr int tile_bytes = c.query_tile * c.head_dim * 2;
    static constexpr int kBiases = 2;  // the next tile's is copied meanwhile
    static constexpr int kStatistics = (c.stages + kVisitTiles - 1) / kVisitTiles;  // visits in flight
    static constexpr int kNotes = 4;  // of those, of one that has left its tiles, and of the one before
    static_assert(kStatistics + 2 <= kNotes);

    alignas(1024) char tiles[c.stages][tile_bytes];
    alignas(1024) char bias[kBiases][c.query_tile * c.key_tile * 2];
    alignas(128) float lse[kStatistics][c.query_tile];  // in log 2
    alignas(128) float delta[kStatistics][c.query_tile];
    uint64_t full[c.stages], empty[c.stages];  // that of Q: the note, lse and delta, too
    uint64_t bias_full[kBiases], bias_empty[kBiases];
    uint64_t noted[kNotes];
    VisitNote notes[kNotes];

    // Of each warp, where rows share the bias: such a bias takes the first row of its tile alone.
    __device__ __forceinline__ float (&column_sums()) [c.consumers / 32][c.key_tile] {
        return *reinterpret_cast<float (*)[c.consumers / 32][c.key_tile]>(bias[0] + 8 * kPanelRowBytes);
    }

    // By one thread.
    __device__ void start() {
        for (int i = 0; i < c.stages; ++i) {
            mbarrier_init(shared_address(&full[i]), 1);
            mbarrier_init(shared_address(&empty[i]), c.warpgroups * 4 * kWarpArrivals);
        }
        for (uint64_t& note : noted) mbarrier_init(shared_address(&note), 1);
        for (int i = 0; i < kBiases; ++i) {
            mbarrier_init(shared_address(&bias_full[i]), 1);
            mbarrier_init(shared_address(&bias_empty[i]), c.warpgroups * 4 * kWarpArrivals);
        }
    }
};

// Of all batch entries: biases are for dense problems.
__device__ __forceinline__ Mask mask_of(const ForwardProblem& problem) {
    return {problem, {0, 0, Position(problem.seqlen_q), Position(problem.seqlen_k), 0}};
}

template <DType dtype, BiasGradientConfiguration c>
class BiasGradientProducer {
  public:
    // group: query heads of a key head.
    __device__ BiasGradientProducer(const ForwardProblem& problem, const BackwardMaps& maps,
                                    const TileNumbers& queue, const BiasTiles& tiles, const Division& group,
                                    BiasGradientShared<c>& shared)
        : problem_(problem), maps_(maps), queue_(queue), tiles_(tiles), group_(group), shared_(shared) {}

    // A whole warp: decides what is visited, and copies the operands of S and the biases.
    __device__ void copy_for_scores() const {
        TileNumbers::Reader queue(queue_);
        if (lane_index() == 0) queue.open();
        uint32_t n = 0, biases = 0;  // visits, and tiles of the bias that have some, so far
#pragma unroll 1
        for (uint32_t index; take(queue, index);) {
            const BiasTiles::Tile tile = tiles_(index);
            uint32_t first = VisitNote::first;
            tiles_.each_reader(problem_, tile, [&](int batch, int head, Position query) {
                if (!sees(query, tile)) return;
                const uint32_t masked = shows_all(query, tile) ? 0 : VisitNote::masked;
                await_room(n, kQ);
                if (lane_index() == 0) {
                    give(n, {first | masked, query, head, batch, tile});
                    load_statistics(n, query, head, batch);
                    load(n, kQ, maps_.q, query, head, batch);
                }
                await_room(n, kK);
                if (lane_index() == 0) load(n, kK, maps_.k, tile.key, int(group_.quotient(head)), batch);
                if (first) load_bias(tile, biases++);
                first = 0;
                ++n;
            });
        }
        await_room(n, kQ);
        if (lane_index() > 0) return;
        give(n, {VisitNote::end});
        mbarrier_arrive(in_ring(shared_.full, n * kVisitTiles + kQ));
    }

    // Another one: the operands of dP.
    __device__ void copy_for_gradients() const {
#pragma unroll 1
        for (uint32_t n = 0;; ++n) {
            mbarrier_wait(in_ring(shared_.noted, n), parity(shared_.noted, n));
            const VisitNote& note = shared_.notes[n % Shared::kNotes];
            if (__shfl_sync(0xffffffff, note.flags, 0) & VisitNote::end) break;
            await_room(n, kDout);
            if (lane_index() == 0) load(n, kDout, maps_.dout, note.query, note.head, note.batch);
            await_room(n, kV);
            if (lane_index() == 0)
                load(n, kV, maps_.v, note.tile.key, int(group_.quotient(note.head)), note.batch);
        }
    }

  private:
    using Shared = BiasGradientShared<c>;

    // The next tile's number; false at the end.
    __device__ __forceinline__ static bool take(TileNumbers::Reader& queue, uint32_t& index) {
        constexpr uint32_t end = ~0u;
        if (lane_index() > 0 || !queue.take(index)) index = end;
        index = __shfl_sync(0xffffffff, index, 0);
        return index != end;
    }

    __device__ __forceinline__ Position last_query(Position query) const {
        return min(query + c.query_tile, Position(problem_.seqlen_q)) - 1;
    }
    // Whether some of the tile of queries see some of the keys.
    __device__ __forceinline__ bool sees(Position query, const BiasTiles::Tile& tile) const {
        const Mask mask = mask_of(problem_);
        const Interval seen = {mask.keys_of(query).begin, mask.keys_of(last_query(query)).end};
        return !intersection(seen, {tile.key, tile.key + c.key_tile}).empty();
    }
    // Whether all of it exist and see all keys that do.
    __device__ __forceinline__ bool shows_all(Position query, const BiasTiles::Tile& tile) const {
        const Mask mask = mask_of(problem_);
        return query + c.query_tile <= mask.seqlen_q && mask.keys_of(last_query(query)).begin <= tile.key &&
               mask.keys_of(query).end >= min(tile.key + c.key_tile, mask.seqlen_k);
    }

    __device__ __forceinline__ void await_room(uint32_t n, VisitTile which) const {
        const uint32_t i = n * kVisitTiles + which;
        mbarrier_wait(in_ring(shared_.empty, i), parity(shared_.empty, i) ^ 1);
        __syncwarp();
    }
    // The rest is one thread's.
    __device__ __forceinline__ void give(uint32_t n, const VisitNote& note) const {
        shared_.notes[n % Shared::kNotes] = note;
        mbarrier_arrive(in_ring(shared_.noted, n));
    }
    // The last thing that the visit's tile waits for.
    __device__ __forceinline__ void load(uint32_t n, VisitTile which, const CUtensorMap& map, Position row,
                                         int head, int batch) const {
        const uint32_t i = n * kVisitTiles + which, full = in_ring(shared_.full, i);
        load_rows<c.query_tile, c.query_tile, c.head_dim>(shared_.tiles[i % c.stages], map, full, row, head,
                                                          batch);
        mbarrier_arrive(full);
    }
    __device__ __forceinline__ void load_statistics(uint32_t n, Position query, int head, int batch) const {
        const uint32_t full = in_ring(shared_.full, n * kVisitTiles + kQ), place = n % Shared::kStatistics;
        mbarrier_expect(full, 2 * c.query_tile * int(sizeof(float)));
        tma_load(shared_address(shared_.lse[place]), &maps_.lse, full, query, 0, head, batch);
        tma_load(shared_address(shared_.delta[place]), &maps_.delta, full, query, 0, head, batch);
    }

    __device__ __forceinline__ void load_bias(const BiasTiles::Tile& tile, uint32_t i) const {
        mbarrier_wait(in_ring(shared_.bias_empty, i), parity(shared_.bias_empty, i) ^ 1);
        __syncwarp();
        if (lane_index() > 0) return;
        const uint32_t full = in_ring(shared_.bias_full, i);
        BiasTile<dtype, c.query_tile, c.key_tile>::load(shared_.bias[i % Shared::kBiases], maps_.bias, full,
                                                        problem_.bias, tile.batch, tile.head, tile.query,
                                                        tile.key);
        mbarrier_arrive(full);
    }

    const ForwardProblem& problem_;
    const BackwardMaps& maps_;
    const TileNumbers& queue_;
    const BiasTiles& tiles_;
    const Division& group_;
    Shared& shared_;
};

template <DType dtype, BiasGradientConfiguration c>
class BiasGradientConsumer {
  public:
    // score_unit: from a dot product to a score in log 2.
    __device__ BiasGradientConsumer(const BackwardProblem& problem, BiasGradientShared<c>& shared,
                                    const float& score_unit)
        : problem_(problem),
          shared_(shared),
          score_unit_(score_unit),
          warpgroup_(__shfl_sync(0xffffffff, int(threadIdx.x) / 128, 0)) {}

    __device__ __forceinline__ void run() {
        if (warpgroup_ == c.warpgroups - 1) pass_turn();
        uint32_t n = 0, biases = 0;  // visits, and tiles of the bias that have some, so far
        bool bias_hides = false;
#pragma unroll 1
        for (;; ++n) {
            await(n, kQ);
            const VisitNote& note = shared_.notes[n % Shared::kNotes];
            const uint32_t flags = __shfl_sync(0xffffffff, note.flags, 0);
            if (flags & VisitNote::end) break;
            float lse[Scores::rows], delta[Scores::rows];
            load_statistics(lse, delta, n);
            Scores s, dp;
            start_products(s, dp, n);
            if (flags & VisitNote::first) {  // the last tile's sums leave while products run
                if (n > 0) store(n - 1, biases - 1);
                sum_.clear();
                bias_hides = await_bias(biases++);
            }
            wgmma_wait<1>();
            keep(registers_of(s));
            leave(n, kQ);
            leave(n, kK);
            exponentiate(s, lse, note, biases - 1);
            wgmma_wait<0>();
            keep(registers_of(dp));
            leave(n, kDout);
            leave(n, kV);
            subtract(dp, delta);
            if (bias_hides) clear_hidden_by_bias(s, dp, biases - 1);
            if (problem_.forward.visible.data) clear_hidden_by_bits(s, dp, note);
            if (flags & VisitNote::masked) clear_hidden_by_mask(s, dp, note);
            add(s, dp);
        }
        if (n > 0) store(n - 1, biases - 1);
    }

  private:
    using Shared = BiasGradientShared<c>;
    using Scores = Fragment<16, c.key_tile>;

    // Names of barriers: 0 is the block's.
    static constexpr int kTurns = 1, kConsumers = kTurns + c.warpgroups;

    __device__ __forceinline__ void await_turn() const { barrier_of<c.consumers>(kTurns + warpgroup_); }
    __device__ __forceinline__ void pass_turn() const {
        arrive_at_barrier_of<c.consumers>(kTurns + (warpgroup_ + 1) % c.warpgroups);
    }

    // Of the tile of queries. Computed where it is wanted: there is no register to keep it in.
    __device__ __forceinline__ static int warp_row() { return int(opaque(threadIdx.x)) / 32 * 16; }

    __device__ __forceinline__ void await(uint32_t n, VisitTile which) const {
        const uint32_t i = n * kVisitTiles + which;
        mbarrier_wait(in_ring(shared_.full, i), parity(shared_.full, i));
    }
    __device__ __forceinline__ void leave(uint32_t n, VisitTile which) const {
        mbarrier_arrive_warp(in_ring(shared_.empty, n * kVisitTiles + which));
    }

    // The warpgroup's rows of a, all of b. The same in all lanes, as the compiler sees, too.
    __device__ __forceinline__ void start_product(Scores& d, uint32_t n, VisitTile a, VisitTile b) const {
        const uint32_t rows = place(n, a) + warpgroup_ * 64 * kPanelRowBytes;
        wgmma_fence();
        multiply_rows_by_rows<dtype, c.head_dim>(d, rows, c.query_tile, place(n, b));
        wgmma_commit();
    }
    __device__ __forceinline__ uint32_t place(uint32_t n, VisitTile which) const {
        const uint32_t stage = (n * kVisitTiles + which) % c.stages;
        return __shfl_sync(0xffffffff, shared_address(shared_.tiles[0]) + stage * Shared::tile_bytes, 0);
    }

    __device__ __forceinline__ void start_products(Scores& s, Scores& dp, uint32_t n) const {
        await(n, kK);
        await_turn();
        start_product(s, n, kQ, kK);
        await(n, kDout);
        await(n, kV);
        start_product(dp, n, kDout, kV);
        pass_turn();
    }

    __device__ __forceinline__ void load_statistics(float (&lse)[Scores::rows], float (&delta)[Scores::rows],
                                                    uint32_t n) const {
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            lse[r] = shared_.lse[n % Shared::kStatistics][warp_row() + Scores::row(r)];
            delta[r] = shared_.delta[n % Shared::kStatistics][warp_row() + Scores::row(r)];
        }
    }

    __device__ __forceinline__ BiasTile<dtype, c.query_tile, c.key_tile> bias(uint32_t i) const {
        return {shared_.bias[i % Shared::kBiases], problem_.forward.bias.row_stride == 0};
    }
    // True if it hides some of the warp's scores.
    __device__ __forceinline__ bool await_bias(uint32_t i) const {
        mbarrier_wait(in_ring(shared_.bias_full, i), parity(shared_.bias_full, i));
        uint32_t lowest = 0;
        bias(i).each_part_of_rows(warp_row(), [&](int, const BiasPart<dtype, 16>& part) {
            lowest = minimum<dtype>(lowest, part.lowest());
        });
        return one_hides_a_score<dtype>(lowest);
    }

    // s: dot products on entry, P on return.
    __device__ __forceinline__ void exponentiate(Scores& s, const float (&lse)[Scores::rows],
                                                 const VisitNote& note, uint32_t bias_index) const {
#pragma unroll
        for (int column = 0; column < Scores::columns; ++column)
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) s.at(r, column) = s.at(r, column) * score_unit_ - lse[r];
        if (problem_.forward.alibi_slopes)
            TransformedScores({problem_.forward, note.batch, note.head},
                              note.query + warp_row() + mask_of(problem_.forward).diagonal() - note.tile.key)
                .add_alibi(s);
        bias(bias_index).each_part_of_rows(warp_row(), [&](int key, const BiasPart<dtype, 16>& part) {
            part.template add_to<false>(s, key);
        });
#pragma unroll
        for (int column = 0; column < Scores::columns; ++column)
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) s.at(r, column) = GpuMath::exponential(s.at(r, column));
    }

    __device__ __forceinline__ static void subtract(Scores& dp, const float (&delta)[Scores::rows]) {
#pragma unroll
        for (int column = 0; column < Scores::columns; ++column)
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r) dp.at(r, column) -= delta[r];
    }
    __device__ __forceinline__ void add(const Scores& p, const Scores& factor) {
#pragma unroll
        for (int column = 0; column < Scores::columns; ++column)
#pragma unroll
            for (int r = 0; r < Scores::rows; ++r)
                sum_.at(r, column) = fmaf(p.at(r, column), factor.at(r, column), sum_.at(r, column));
    }

    // What is hidden is zero, whatever lies behind it, in both factors: no product of theirs may be NaN.
    __device__ __forceinline__ void clear_hidden_by_bias(Scores& p, Scores& factor, uint32_t i) const {
        bias(i).each_part_of_rows(warp_row(), [&](int key, const BiasPart<dtype, 16>& part) {
            part.clear_hidden(p, key);
            part.clear_hidden(factor, key);
        });
    }
    __device__ __forceinline__ void clear_hidden_by_bits(Scores& p, Scores& factor,
                                                         const VisitNote& note) const {
        VisibleBits(problem_.forward, note.batch, note.head)
            .template each_hidden<Scores>(note.query + warp_row(), note.tile.key, [&](int r, int column) {
                p.at(r, column) = factor.at(r, column) = 0;
            });
    }
    __device__ __forceinline__ void clear_hidden_by_mask(Scores& p, Scores& factor,
                                                         const VisitNote& note) const {
        const Mask mask = mask_of(problem_.forward);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Position i = note.query + warp_row() + Scores::row(r);
            const Interval keys = i < mask.seqlen_q ? mask.keys_of(i) : Interval(0, 0);
            const uint32_t shown = columns_in_front_of(keys.end - note.tile.key, lane_index()) &
                                   ~columns_in_front_of(keys.begin - note.tile.key, lane_index());
#pragma unroll
            for (int column = 0; column < Scores::columns; ++column)
                if (!(shown >> column & 1)) p.at(r, column) = factor.at(r, column) = 0;
        }
    }

    // The sums of the tile whose last visit was the n-th; its bias, the i-th, is not wanted any more.
    __device__ __forceinline__ void store(uint32_t n, uint32_t i) const {
        mbarrier_arrive_warp(in_ring(shared_.bias_empty, i));
        const BiasTiles::Tile tile = shared_.notes[n % Shared::kNotes].tile;
        if (problem_.dbias.row_stride)
            store_rows(tile);
        else
            store_column_sums(tile);
    }

    __device__ __forceinline__ void store_rows(const BiasTiles::Tile& tile) const {
        const ForwardProblem& problem = problem_.forward;
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const Position query = tile.query + warp_row() + Scores::row(r);
            if (query >= Position(problem.seqlen_q)) continue;
            const Position key = tile.key + Scores::column(0);
            float* const to = row_of<float>(problem_.dbias, tile.batch, tile.head, query) + key;
            const int columns = Position(problem.seqlen_k) - key;
            const bool pairs = reinterpret_cast<uintptr_t>(to) % sizeof(float2) == 0;
#pragma unroll
            for (int i = 0; i < Scores::column_tiles; ++i) {
                const float2 two = {sum_.at(r, 2 * i), sum_.at(r, 2 * i + 1)};
                if (pairs && i * 8 + 1 < columns) {
                    *reinterpret_cast<float2*>(to + i * 8) = two;
                } else {
                    if (i * 8 < columns) to[i * 8] = two.x;
                    if (i * 8 + 1 < columns) to[i * 8 + 1] = two.y;
                }
            }
        }
    }

    // In an order that is always the same, too: a lane's rows, those of a warp, warps.
    __device__ __forceinline__ void store_column_sums(const BiasTiles::Tile& tile) const {
        float (&sums)[c.consumers / 32][c.key_tile] = shared_.column_sums();
        const int thread =
            opaque(threadIdx.x);  // and no address waits in a register from one tile to the next
        float* const own = &sums[thread / 32][thread % 4 * 2];
#pragma unroll
        for (int column = 0; column < Scores::columns; ++column) {
            float sum = sum_.at(0, column) + sum_.at(1, column);
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
            if (thread % 32 < 4) own[column / 2 * 8 + column % 2] = sum;
        }
        barrier_of<c.consumers>(kConsumers);
        const Position key = tile.key + thread;
        if (thread < c.key_tile && key < Position(problem_.forward.seqlen_k)) {
            float sum = 0;
#pragma unroll
            for (int warp = 0; warp < c.consumers / 32; ++warp) sum += sums[warp][thread];
            row_of<float>(problem_.dbias, tile.batch, tile.head, 0)[key] = sum;
        }
        barrier_of<c.consumers>(kConsumers);  // before the next tile's
    }

    const BackwardProblem& problem_;
    Shared& shared_;
    const float& score_unit_;
    const int warpgroup_;  // the same in all lanes, as the compiler sees, too
    Scores sum_;
};

}  // namespace flash::cuda::sm90
