// The output of Hopper's forward: a warpgroup's O in registers, from the first product to the rows in device
// memory, and the look at whether it may stay there.
#pragma once

#include "../../attention/online_softmax.h"
#include "../any/loader.cuh"
#include "../any/parts_together.cuh"
#include "../ptx/barrier.h"
#include "../ptx/global.h"
#include "../ptx/pair_fma.h"
#include "../ptx/reduce.h"
#include "../ptx/tma.h"
#include "../tile/gpu_math.h"
#include "../tile/warp_product.h"
#include "forward_plan.cuh"
#include "load_rows.cuh"
#include "store_rows.cuh"
#include "warpgroup_product.h"

namespace flash::cuda::sm90 {

// Of a thread's two rows.
struct ForwardSoftmax {
    OnlineSoftmax<GpuMath> rows[2];
};

// Computed where it is wanted: there is no register to keep it in.
__device__ __forceinline__ int warp_row() {
    return int(opaque(threadIdx.x)) / 32 * 16;
}

// What the whole warp knows to be so, as the compiler sees then: branches need no care, and what they lead to
// is the same in all lanes.
__device__ __forceinline__ bool everywhere(bool x) {
    return __any_sync(0xffffffff, x);
}

// The name of the barrier of all that compute; the block's and the turns' come before.
template <ForwardConfiguration c>
constexpr int kConsumers = 1 + c.warpgroups;

template <DType dtype, ForwardConfiguration c>
class ForwardOutput {
  public:
    using Output = Fragment<16, c.values()>;

    // natural: a score in natural units.
    __device__ ForwardOutput(const ForwardProblem& problem, const PreciseFactor& natural,
                             const OutputMap& map, ForwardShared<c>& shared, const FewQueries& few)
        : problem_(problem), natural_(natural), map_(map), shared_(shared), few_(few), rows_{few.heads} {}

    // The next product is the first one. Where care is taken rows may be NaN before it.
    __device__ __forceinline__ void begin(bool careful) {
        fresh_ = !careful;
        undefine(registers_of(out_));
        if (__builtin_expect(careful, false)) out_.clear();
    }

    // O += P V. By the warpgroup, to be committed.
    __device__ __forceinline__ void add(const RegisterOperand<dtype, 16, c.key_tile>& p, uint32_t values) {
        multiply_registers_by_columns<dtype, c.key_tile>(out_, p.value, values, c.key_tile, !fresh_);
        fresh_ = false;
    }
    __device__ __forceinline__ void keep() { cuda::keep(registers_of(out_)); }
    __device__ __forceinline__ void rescale(const float (&factor)[Output::rows]) {
#pragma unroll
        for (int r = 0; r < Output::rows; ++r)
#pragma unroll
            for (int column = 0; column < Output::columns; ++column) out_.at(r, column) *= factor[r];
    }
    // The row is NaN from here on.
    __device__ __forceinline__ void forget(int r) {
#pragma unroll
        for (int column = 0; column < Output::columns; ++column)
            out_.at(r, column) = __int_as_float(0x7fffffff);
    }

    // Without branches, so that nothing waits for anything else. Rows that are not right are asked for again.
    __device__ __forceinline__ void finish(ForwardPlan& plan, ForwardSoftmax softmax) {
        const RowTile tile = part_of(plan.tile);  // read first, since it takes its time
        const bool careful = plan.careful;
        float factor[Output::rows];
#pragma unroll
        for (int r = 0; r < Output::rows; ++r) {
            softmax.rows[r].row_sum = quad_sum(softmax.rows[r].row_sum);
            factor[r] = softmax.rows[r].normalizer();
        }
        rescale(factor);
        bool finite[Output::rows];
        if constexpr (c.few > 0) {
            if (everywhere(plan.split.count > 1)) {
                look_for_what_is_not_finite(out_, finite);
                ask_again(plan, tile, softmax, finite, careful);
                if (few_.is_cluster())
                    keep_part(plan, softmax);
                else
                    store_partial(plan.split, tile, softmax);
                return;
            }
        }
        const Operand packed(out_);
        look_for_what_is_not_finite(packed, finite);
        ask_again(plan, tile, softmax, finite, careful);
        store_lse(tile, softmax);
        if (c.stages_output && leaves_in_a_box(tile))
            store_box(tile, packed, careful);
        else
            store_rows<dtype>(rows_of(tile), packed, first_row(tile), rows_.rows(tile));
    }

    // What finish() kept of a cluster's part, when all other warps of the block have ended. Its tile is the
    // only one: in the ring's first place, also if it was done again. had_tile: there was one.
    __device__ __forceinline__ void store_together(PlanRing& plans, bool had_tile) const {
        if (!had_tile || !few_.is_cluster()) return;
        const Split& split = plans[0].split;
        cuda::store_together<dtype, 128, 2>(problem_, part_of(plans[0].tile), rows_, split.index, split.count,
                                            part());
    }

    // No query of the tile sees a key.
    __device__ __forceinline__ void store_zeros(const RowTile& tile) {
        out_.clear();
        store_lse(tile, ForwardSoftmax());
        store_rows<dtype>(rows_of(tile), out_, first_row(tile), rows_.rows(tile));
    }

    // Until shared memory is no longer needed.
    __device__ __forceinline__ void await_stores() const {
        if (c.stages_output && lane_index() == 0) bulk_wait_read();
    }

  private:
    using Operand = RegisterOperand<dtype, 16, c.values()>;

    static constexpr float kHuge = 1 << 22;  // scores whose rounding errors matter as exponents
    // A sum of probabilities whose reciprocal is 0 (GpuMath).
    static constexpr float kTooLarge = 0x1p126f;
    // A sum of probabilities from which on their reference may be why the row is not finite.
    static constexpr float kLarge = dtype == DType::float16 ? 1 << 15 : 1 << 24;
    // And one from which on downwards probabilities are too small to be exact, as where ALiBi hides what the
    // row's first tile has.
    static constexpr float kSmall = dtype == DType::float16 ? 0x1p-4f : 0x1p-60f;

    // Of a tile of few queries: the warpgroup's.
    __device__ __forceinline__ RowTile part_of(const RowTile& tile) const {
        if constexpr (c.few > 0)
            return rows_.template part<64>(tile, warp_row() / 64);
        else
            return tile;
    }
    // The warp's first one, as rows_ counts them.
    __device__ __forceinline__ Position first_row(const RowTile& tile) const {
        return rows_.first_row(tile) + (c.few ? warp_row() % 64 : warp_row());
    }
    __device__ __forceinline__ Position row(const RowTile& tile, int r) const {
        return first_row(tile) + Output::row(r);
    }
    __device__ __forceinline__ auto rows_of(const RowTile& tile) const {
        return rows_.template of<Bits<dtype>>(problem_.out, tile, problem_.head_dim_v);
    }

    // For the rows that are not right.
    __device__ __forceinline__ void ask_again(ForwardPlan& plan, const RowTile& tile,
                                              const ForwardSoftmax& softmax,
                                              const bool (&finite)[Output::rows], bool careful) const {
        bool wrong = false;
        bool follows[Output::rows];
#pragma unroll
        for (int r = 0; r < Output::rows; ++r) {
            const OnlineSoftmax<GpuMath>& sums = softmax.rows[r];
            const bool huge = !(fabsf(sums.reference()) < kHuge);
            const bool small = c.transformed && sums.settled() && sums.row_sum < kSmall;
            const bool right = finite[r] & (sums.row_sum < kTooLarge) & !huge & !small;
            const bool mine = !careful & !right & rows_.rows(tile).contains(row(tile, r));
            follows[r] = mine & (huge | small | !(sums.row_sum < kLarge));
            wrong |= mine;
        }
        if (__builtin_expect(everywhere(wrong), false)) {
#pragma unroll
            for (int r = 0; r < Output::rows; ++r)
                if (follows[r]) plan.follow(warp_row() + Output::row(r));
            if (lane_index() == 0) plan.redo = true;
        }
    }

    // 0 times what is not finite is NaN.
    __device__ __forceinline__ static void look_for_what_is_not_finite(const Output& out,
                                                                       bool (&finite)[Output::rows]) {
#pragma unroll
        for (int r = 0; r < Output::rows; ++r) {
            float zero = 0;
#pragma unroll
            for (int column = 0; column < Output::columns; ++column) zero = fmaf(out.at(r, column), 0, zero);
            finite[r] = zero == 0;
        }
    }
    // Rounded as it is, two elements at once.
    __device__ __forceinline__ static void look_for_what_is_not_finite(const Operand& packed,
                                                                       bool (&finite)[Output::rows]) {
        uint32_t zeros[Output::rows][2] = {};
#pragma unroll
        for (int k = 0; k < c.values() / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                zeros[i % 2][i / 2] = pair_fma<dtype>(packed.value[k][0][i], 0, zeros[i % 2][i / 2]);
#pragma unroll
        for (int r = 0; r < Output::rows; ++r) {
            const float2 low = unpack<dtype>(zeros[r][0]), high = unpack<dtype>(zeros[r][1]);
            finite[r] = low.x + low.y + (high.x + high.y) == 0;
        }
    }

    __device__ __forceinline__ void store_lse(const RowTile& tile, const ForwardSoftmax& softmax) const {
        store_lse(statistics_of<float>(problem_.lse, tile.batch, tile.sequence.first_query_row,
                                       rows_.first_head(tile)),
                  problem_.lse.head_stride, tile, softmax);
    }
    // lse: of the sequence's first query and the first head.
    __device__ __forceinline__ void store_lse(float* lse, int64_t head_stride, const RowTile& tile,
                                              const ForwardSoftmax& softmax) const {
        const int mine = lane_index() % 4;
        const float log_sum_exp = (mine == 0 ? softmax.rows[0] : softmax.rows[1]).log_sum_exp(natural_);
        const Position at = row(tile, mine);
        store_global(lse + rows_.head(at) * head_stride + rows_.query(at), log_sum_exp,
                     mine < Output::rows && rows_.rows(tile).contains(at));
    }

    // Averages over the split's keys, in fp32 for the combination (any/combine.cu).
    __device__ __forceinline__ void store_partial(const Split& split, const RowTile& tile,
                                                  const ForwardSoftmax& softmax) const {
        const int64_t first = split.first_row(problem_, tile, rows_.first_head(tile));
        store_lse(split.lse + first, problem_.rows_q, tile, softmax);
        const bool odd = lane_index() % 2;
#pragma unroll
        for (int r = 0; r < Output::rows; ++r) {
            const Position at = row(tile, r);
            const bool exists = rows_.rows(tile).contains(at);
            if (!everywhere(exists)) continue;  // in none of the warp's
            const int64_t place = first + rows_.head(at) * problem_.rows_q + rows_.query(at);
            float* out = split.out + place * c.values() + lane_index() % 4 / 2 * 4 + odd * 8;
            // Neighbouring lanes exchange columns, so that each has four.
#pragma unroll
            for (int n = 0; n < Output::column_tiles; n += 2) {
                const float2 low = {out_.at(r, 2 * n), out_.at(r, 2 * n + 1)};
                const float2 high = {out_.at(r, 2 * n + 2), out_.at(r, 2 * n + 3)};
                const float2 mine = odd ? high : low, given = odd ? low : high;
                const float2 taken = {__shfl_xor_sync(0xffffffff, given.x, 1),
                                      __shfl_xor_sync(0xffffffff, given.y, 1)};
                const float4 four = odd ? make_float4(taken.x, taken.y, mine.x, mine.y)
                                        : make_float4(mine.x, mine.y, taken.x, taken.y);
                if (exists) *reinterpret_cast<float4*>(out + n * 8) = four;
            }
        }
    }

    // The warpgroup's rows of a cluster's part, the block's only tile: where copies were.
    using Part = PartialRows<64, c.values()>;
    __device__ __forceinline__ Part& part() const {
        static_assert(sizeof(Part) * c.warpgroups <=
                      sizeof(shared_.q) + sizeof(shared_.k) + sizeof(shared_.v));
        return reinterpret_cast<Part*>(shared_.q)[warp_row() / 64];
    }
    // Unless the tile is done again.
    __device__ __forceinline__ void keep_part(const ForwardPlan& plan, const ForwardSoftmax& softmax) const {
        barrier_of<c.consumers()>(kConsumers<c>);  // all need no copies, and have said what is not right
        if (everywhere(plan.redo)) return;
        const int first = warp_row() % 64;
#pragma unroll
        for (int r = 0; r < Output::rows; ++r)
            if (lane_index() % 4 == 0)
                part().lse[first + Output::row(r)] = softmax.rows[r].log_sum_exp(natural_);
        store_floats(out_, 0, [&](int r) { return part().out[first + Output::row(r)]; });
    }

    // Whether a copy of the warp's 16 rows writes what exists and nothing else: it leaves out what lies
    // behind the tensor's rows, but would write those of the next packed sequence.
    __device__ __forceinline__ bool leaves_in_a_box(const RowTile& tile) const {
        const Position end = tile.first + warp_row() + 16;
        return everywhere(map_.fits & (!problem_.cu_seqlens_q | (end <= tile.rows.end)));
    }
    __device__ __forceinline__ void store_box(const RowTile& tile, const Operand& packed,
                                              bool careful) const {
        const uint32_t scratch = shared_.output.of_warp(warp_row() / 16);
        if (lane_index() == 0) {
            if (careful)  // what was stored before, of the same rows, must not come later
                bulk_wait();
            else
                bulk_wait_read();
        }
        __syncwarp();
        stage_rows(packed, scratch);
        fence_async_proxy();
        __syncwarp();
        if (lane_index() > 0) return;
        const int row = int(tile.sequence.first_query_row) + tile.first + warp_row();
        const int batch = tensor_batch(problem_.cu_seqlens_q, tile);
#pragma unroll
        for (int column = 0; column < c.values(); column += kPanel)
            tma_store(scratch + column / kPanel * kStagedPanelBytes, &map_.map, column, row, int(tile.head),
                      batch);
        bulk_commit();
    }

    const ForwardProblem& problem_;
    const PreciseFactor& natural_;
    const OutputMap& map_;
    ForwardShared<c>& shared_;
    const FewQueries& few_;
    const QueryRows<(c.few != 0)> rows_;
    bool fresh_ = false;
    Output out_;
};

}  // namespace flash::cuda::sm90
