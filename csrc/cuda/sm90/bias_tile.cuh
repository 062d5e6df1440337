// A tile of a bias in shared memory: rows of queries, panels of 64 keys. The warps of a block add their parts
// to scores in registers, whose layout ldmatrix knows, and that of transposed scores, too.
#pragma once

#include "../ptx/ldmatrix.h"
#include "../tile/fragment.h"
#include "../tile/gpu_math.h"
#include "../tile/tile_layout.h"
#include "load_rows.cuh"

namespace flash::cuda::sm90 {

// In the unit of scores it is minus infinity.
__device__ __forceinline__ bool hides_a_score(float bias) {
    return bias * float(GpuMath::unit) == -INFINITY;
}

// Of a warp's scores 16 rows, and columns from `column` on, a multiple of 16: their bias.
template <DType dtype, int kColumns>
struct BiasPart {
    uint32_t pairs[kColumns / 16][4];  // of rows 0 and 8, of 8 columns and of the next 8

    // Of all lanes' pairs the lowest in the lane.
    __device__ __forceinline__ uint32_t lowest() const {
        uint32_t low = pairs[0][0];
#pragma unroll
        for (int i = 1; i < kColumns / 4; ++i) low = minimum<dtype>(low, pairs[i / 4][i % 4]);
        return low;
    }

    // exactly: what it hides is hidden, whatever the score. Else a score that is not finite stays so.
    template <bool kExactly, class Scores>
    __device__ __forceinline__ void add_to(Scores& s, int column = 0) const {
        each(s, column, [](float& x, float bias) {
            const float sum = fmaf(bias, float(GpuMath::unit), x);
            x = kExactly && hides_a_score(bias) ? -INFINITY : sum;
        });
    }

    // Numbers become zeros where the bias hides scores.
    template <class Scores>
    __device__ __forceinline__ void clear_hidden(Scores& x, int column = 0) const {
        each(x, column, [](float& x, float bias) {
            if (hides_a_score(bias)) x = 0;
        });
    }

  private:
    template <class Scores, class Run>
    __device__ __forceinline__ void each(Scores& x, int column, const Run& run) const {
        static_assert(Scores::row_tiles == 1);
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) {
            float* const two = x.value[0][column / 8 + i / 4 * 2 + i % 4 / 2] + i % 2 * 2;
            const float2 bias = unpack<dtype>(pairs[i / 4][i % 4]);
            run(two[0], bias.x);
            run(two[1], bias.y);
        }
    }
};

// In any of the warp's lanes.
template <DType dtype>
__device__ __forceinline__ bool one_hides_a_score(uint32_t lowest) {
    const float2 low = unpack<dtype>(lowest);
    return __any_sync(0xffffffff, hides_a_score(fminf(low.x, low.y)));
}

template <DType dtype, int kQueries, int kKeys>
class BiasTile {
  public:
    using Layout = TileLayout<kQueries, kKeys, 2, kPanel>;
    static constexpr int bytes = Layout::bytes;

    // What begins at (query, key), by one thread, which has yet to arrive. Boxes of the map have kQueries
    // rows, or one that all queries share.
    __device__ __forceinline__ static void load(const char* to, const CUtensorMap& map, uint32_t barrier,
                                                const ScoreMatrix& bias, int batch, int head, Position query,
                                                Position key) {
        const bool one_row = bias.row_stride == 0;
        mbarrier_expect(barrier, one_row ? kKeys * 2 : bytes);
#pragma unroll
        for (int panel = 0; panel < Layout::panels; ++panel)
            tma_load(shared_address(to) + panel * Layout::panel_bytes, &map, barrier, key + panel * kPanel,
                     one_row ? 0 : query, bias.head_stride ? head : 0, bias.batch_stride ? batch : 0);
    }

    // one_row: which all queries share.
    __device__ __forceinline__ BiasTile(const char* tile, bool one_row)
        : tile_(shared_address(tile)), one_row_(one_row) {}

    // Of scores [queries, keys] of a warp whose queries begin at `row`.
    __device__ __forceinline__ BiasPart<dtype, kKeys> rows_from(int row) const {
        const uint32_t place = place_of_rows(row);
        BiasPart<dtype, kKeys> part;
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) ldmatrix_x4(part.pairs[i], Layout::at(place, 0, i * 16));
        return part;
    }
    // The same 16 keys after the other, where there are no registers for all: use(key, part).
    template <class Use>
    __device__ __forceinline__ void each_part_of_rows(int row, const Use& use) const {
        const uint32_t place = place_of_rows(row);
#pragma unroll
        for (int key = 0; key < kKeys; key += 16) {
            BiasPart<dtype, 16> part;
            ldmatrix_x4(part.pairs[0], Layout::at(place, 0, key));
            use(key, part);
        }
    }

    // Of scores [keys, queries] of a warp whose keys begin at `key`, a multiple of 16: use(query, part) of 16
    // queries.
    template <class Use>
    __device__ __forceinline__ void each_part_of_columns(int key, const Use& use) const {
        const int lane = lane_index(), row = one_row_ ? 0 : lane % 8 + lane / 16 * 8;
        const uint32_t place = Layout::at(tile_ + Layout::offset(row, 0, lane / 8 % 2), 0, key);
        const uint32_t next = one_row_ ? 0 : 16 * 128;
#pragma unroll
        for (int i = 0; i < kQueries / 16; ++i) {
            BiasPart<dtype, 16> part;
            ldmatrix_x4_transposed(part.pairs[0], place + i * next);
            use(i * 16, part);
        }
    }

  private:
    // Of the lane's part of 16 rows.
    __device__ __forceinline__ uint32_t place_of_rows(int row) const {
        const int lane = lane_index();
        return tile_ + (one_row_ ? Layout::offset(0, 0, lane / 16)
                                 : Layout::offset(lane % 16, 0, lane / 16) + row * 128);
    }

    uint32_t tile_;
    bool one_row_;
};

}  // namespace flash::cuda::sm90
