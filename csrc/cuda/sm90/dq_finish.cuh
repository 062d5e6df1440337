// dQ of sums that blocks add to in no fixed order (backward_dq.cuh). As a kernel behind the walk it would
// read all sums from device memory, and take a tenth of the time where sequences are short. So a few blocks,
// the last ones of the grid, walk no tiles of keys but make dQ of units' sums as soon as those are complete,
// while the cache has them; and blocks that find no tile of keys any more do the rest. A block waits for
// blocks that walk alone, all of which began before the last ones of the grid.
#pragma once

#include "../ptx/counter.h"
#include "../ptx/tma.h"
#include "../tile/warp_product.h"
#include "backward_dq.cuh"
#include "store_rows.cuh"

namespace flash::cuda::sm90 {

class DqFinish {
  public:
    static constexpr uint32_t kTaken = 8;  // tiles of queries at once

    DqFinish() = default;  // all sums are finished in the walk

    // blocks: those that walk no tiles of keys.
    DqFinish(int64_t tiles, int64_t blocks) : tiles_(uint32_t(tiles)), blocks_(uint32_t(blocks)) {}

    // A counter, zero at the start.
    int64_t bytes() const { return tiles_ > 0 ? sizeof(uint32_t) : 0; }
    void lie_at(void* workspace) { next_ = static_cast<uint32_t*>(workspace); }
    uint32_t blocks() const { return blocks_; }

    __device__ __forceinline__ bool block_walks() const { return blockIdx.x < gridDim.x - blocks_; }
    __device__ __forceinline__ uint32_t tiles() const { return tiles_; }
    // By one thread: the first of the next kTaken tiles.
    __device__ __forceinline__ uint32_t take() const { return add_relaxed(next_, kTaken); }

  private:
    uint32_t tiles_ = 0, blocks_ = 0;
    uint32_t* next_ = nullptr;
};

// What a block's warps do when there is nothing to walk: one has sums copied to where the tiles of keys and
// queries were, the consumers make dQ of them.
template <DType dtype, BackwardConfiguration c>
class DqFinisher {
  public:
    __device__ __forceinline__ DqFinisher(const BackwardProblem& problem, const DqSums& sums,
                                          const DqFinish& finish, const WalkParts& parts, const WalkEnd& end,
                                          BackwardShared<c>& shared)
        : problem_(problem), sums_(sums), finish_(finish), parts_(parts), end_(end), shared_(shared) {}

    // The whole warp; each lane looks after one of the tiles that are taken together.
    __device__ __forceinline__ void load() const {
        mbarrier_wait(shared_address(&shared_.finish.begins), 0);
        __syncwarp();
        uint32_t n = 0, next = 0;
        if (lane_index() == 0) next = finish_.take();
#pragma unroll 1
        while (true) {
            const uint32_t index = __shfl_sync(0xffffffff, next, 0) + lane_index();
            const bool is_tile = lane_index() < DqFinish::kTaken && index < finish_.tiles();
            if (!__any_sync(0xffffffff, is_tile)) break;
            if (lane_index() == 0) next = finish_.take();  // it takes a while
            const uint32_t unit = sums_.unit_tiles().quotient(index),
                           tile = sums_.unit_tiles().remainder(index);
            DqFinishNote note{};
            bool complete = false;
            if (is_tile) {
                complete = sums_.is_complete(unit);
                const RowTile rows =
                    sums_.rows_of(problem_.forward, parts_.unit_of_heads(unit), tile);
                note.rows = row_of<Bits<dtype>>(problem_.dq, rows.unowned ? 0 : rows.batch,
                                                rows.sequence.first_query_row + rows.first, rows.head);
                note.exist = rows.rows.empty() ? 0 : rows.rows.end - rows.first;
                note.scale = rows.unowned ? 0 : sums_.scale();
            }
            fence_async_proxy_of_memory();
            const uint32_t tiles = __ballot_sync(0xffffffff, note.exist > 0);
#pragma unroll 1
            for (int lane = 0; lane < int(DqFinish::kTaken); ++lane) {
                if (!(tiles >> lane & 1)) continue;
                mbarrier_wait(in_ring(shared_.finish.empty, n), parity(shared_.finish.empty, n) ^ 1);
                __syncwarp();
                if (lane_index() == lane) {
                    if (!complete) {
                        while (!sums_.is_complete(unit)) __nanosleep(200);
                        fence_async_proxy_of_memory();
                    }
                    const uint32_t full = in_ring(shared_.finish.full, n);
                    shared_.finish.notes[n % kStages] = note;
                    mbarrier_expect(full, kTileBytes);
                    bulk_load(tile_at(n), sums_.of_tile(end_.sums_of(unit), tile), kTileBytes, full);
                    mbarrier_arrive(full);
                }
                __syncwarp();
                ++n;
            }
        }
        mbarrier_wait(in_ring(shared_.finish.empty, n), parity(shared_.finish.empty, n) ^ 1);
        __syncwarp();
        if (lane_index() > 0) return;
        shared_.finish.notes[n % kStages].exist = 0;
        mbarrier_arrive(in_ring(shared_.finish.full, n));
    }

    // By the consumers.
    __device__ __forceinline__ void store() const {
        fence_async_proxy();
        mbarrier_arrive_warp(shared_address(&shared_.finish.begins));
        const int warp = int(threadIdx.x) / 32, row = warp / Dq::column_warps * 16;
        const int column = warp % Dq::column_warps * Part::column_tiles * 8;
        HeadRows<Bits<dtype>> to(problem_.dq, 0, 0, 0, problem_.forward.head_dim);
        to.head_dim -= column;
#pragma unroll 1
        for (uint32_t n = 0;; ++n) {
            mbarrier_wait(in_ring(shared_.finish.full, n), parity(shared_.finish.full, n));
            const DqFinishNote note = shared_.finish.notes[n % kStages];
            if (note.exist == 0) return;
            Part dq;
            dq.fill(0);
            Dq::add_shared(dq, tile_at(n) + Dq::shared_place(threadIdx.x));
            mbarrier_arrive_warp(in_ring(shared_.finish.empty, n));
            dq *= note.scale;
            to.data = static_cast<Bits<dtype>*>(note.rows) + column;
            const RegisterOperand<dtype, 16, Part::column_tiles * 8> packed(dq);
            if (to.vectors)
                store_by_way_of(shared_address(shared_.ds) + warp * kStagedPanelBytes, to, packed, row,
                                note.exist);
            else
                store_rows<dtype>(to, packed, row, {0, note.exist});
        }
    }

  private:
    using Dq = sm90::Dq<dtype, c>;
    using Part = typename Dq::Accumulators;
    using Shared = BackwardShared<c>;
    static constexpr uint32_t kTileBytes = c.query_tile * c.head_dim * 4;
    static constexpr int kStages = Shared::kFinishStages;

    // Rows in whole lines: sectors of many rows take the warp three times as long. staging: the warp's own.
    template <int kColumns>
    __device__ __forceinline__ static void store_by_way_of(uint32_t staging, const HeadRows<Bits<dtype>>& to,
                                                           const RegisterOperand<dtype, 16, kColumns>& tile,
                                                           Position first, Position end) {
        using Layout = TileLayout<16, 64, 2>;
        static_assert(kColumns <= 64);
        __syncwarp();  // all have read the last tile's
        stage_panel<0>(tile, staging);
        __syncwarp();
        const int chunk = lane_index() % 8;
        Bits<dtype>* row = to.row(first + lane_index() / 8) + chunk * 8;
        const bool exists = chunk * 8 < min(kColumns, to.head_dim);
#pragma unroll
        for (int i = 0; i < 16; i += 4, row += 4 * to.row_stride)
            if (exists && first + i + lane_index() / 8 < end)
                *reinterpret_cast<uint4*>(row) =
                    load_shared_16(staging + Layout::offset(i + lane_index() / 8, 0, chunk));
    }

    __device__ __forceinline__ uint32_t tile_at(uint32_t n) const {
        return shared_address(shared_.k) + n % kStages * kTileBytes;
    }

    const BackwardProblem& problem_;
    const DqSums& sums_;
    const DqFinish& finish_;
    const WalkParts& parts_;
    const WalkEnd& end_;
    Shared& shared_;
};

}  // namespace flash::cuda::sm90
