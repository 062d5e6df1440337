// The mask of Hopper's forward.
#pragma once

#include "../../attention/online_softmax.h"
#include "../tile/fragment.h"
#include "../tile/gpu_math.h"
#include "bias_tile.cuh"
#include "forward_plan.cuh"

namespace flash::cuda::sm90 {

// Scores that the warp's rows, which begin at `row` of the plan's tile, don't see are minus infinity.
template <ForwardConfiguration c, class Scores>
__device__ __forceinline__ void mask_scores(Scores& s, const ForwardPlan& plan, const KeyNote& note,
                                            uint32_t flags, int row, const QueryRows<c.few != 0>& rows) {
    uint32_t bits[Scores::rows];
    for (uint32_t& of_row : bits) of_row = ~0u;
    if constexpr (Scores::columns <= 32 && c.key_tile % 32 == 0)
        if (__any_sync(0xffffffff, flags & KeyNote::partial))
            plan.bits.load_columns<Scores>(bits, plan.tile.first + row, note.first);
    const RowSight sight(plan, note, flags);
#pragma unroll
    for (int r = 0; r < Scores::rows; ++r) {
        const Interval keys = sight[rows.template query_of_parts<64>(row + Scores::row(r))];
        uint32_t shown = 0;
#pragma unroll
        for (int column = 0; column < Scores::columns; ++column) {
            const int begin = sight.first() + column / 32 * 128;
            if (column % 32 == 0)
                shown = bits[r] & columns_in_front_of(keys.end - begin, lane_index()) &
                        ~columns_in_front_of(keys.begin - begin, lane_index());
            if (!(shown >> column % 32 & 1)) s.at(r, column) = OnlineSoftmax<GpuMath>::minus_infinity();
        }
    }
}

// Does the tile's row see a key of those whose bits are set, of the tile of keys? For where it is rarely
// asked.
template <DType dtype, ForwardConfiguration c>
__device__ __forceinline__ bool sees_bad_key(const ForwardProblem& problem, const ForwardPlan& plan,
                                             const KeyNote& note, int warpgroup, int row,
                                             const QueryRows<c.few != 0>& rows,
                                             const uint32_t (&bad_keys)[(c.key_tile + 31) / 32]) {
    const int of_tile = rows.template query_of_parts<64>(row);
    const Interval keys = RowSight(plan, note, KeyNote::flags_of(note.flags, warpgroup))[of_tile];
    const Position query = plan.tile.first + of_tile;
    const Bits<dtype>* bias = nullptr;
    if constexpr (c.biased)
        bias = row_of<const Bits<dtype>>(problem.bias, plan.tile.batch, plan.tile.head,
                                         min(query, Position(problem.seqlen_q) - 1));
    bool sees = false;
#pragma unroll 1
    for (Position key = keys.begin; key < keys.end; ++key) {
        const int j = key - note.first;
        sees |= (bad_keys[j / 32] >> j % 32 & 1) &&
                !(note.flags & KeyNote::partial && plan.bits.hides(query, key)) &&
                !(c.biased && hides_a_score(unpack<dtype>(bias[key]).x));
    }
    return sees;
}

}  // namespace flash::cuda::sm90
