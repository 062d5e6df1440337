// The mask of Hopper's backward, where scores are transposed: [keys, queries].
#pragma once

#include "../tile/fragment.h"
#include "backward_plan.cuh"

namespace flash::cuda::sm90 {

// P and dS, or one of them, of the warp's 16 keys, which begin at warp_row, are zero where invisible: what
// lies behind the mask may be infinite. NaN where a row of Q, dO or K that is not finite is seen.
// visible(part): of 64 queries, a bit for each of a lane's 16 columns, from what is shown of its second row
// on in the upper half.
template <BackwardConfiguration c, class Visible, class... Scores>
__device__ __forceinline__ void mask_scores(const BackwardShared<c>& shared, const QueryNote& note,
                                            uint32_t n, int warp_row, uint32_t thread, const Visible& visible,
                                            Scores&... scores) {
    using Tile = Fragment<16, c.query_tile>;
    const uint32_t tile = BackwardShared<c>::tile_of(note.flags);
    const BackwardPlan& plan = shared.plans[tile];
    constexpr int columns = Tile::columns < 16 ? Tile::columns : 16;
#pragma unroll
    for (int part = 0; part < Tile::columns / columns; ++part) {
        const uint32_t bits = visible(part);
#pragma unroll
        for (int r = 0; r < Tile::rows; ++r) {
            const int row = warp_row + Tile::row(r);
            const Position key = plan.tile.first + row, first = note.first + part * 64;
            const Interval queries = plan.tile.rows.contains(key)
                                         ? intersection(plan.mask.queries_of(key), note.seen)
                                         : Interval(0, 0);
            const uint32_t shown = bits >> (r * 16) & columns_in_front_of(queries.end - first, thread) &
                                   ~columns_in_front_of(queries.begin - first, thread);
            const bool bad_key = shared.has_bad_keys[tile] && shared.bad_keys[tile][row / 32] >> row % 32 & 1;
#pragma unroll
            for (int column = 0; column < columns; ++column)
                if (!(shown >> column & 1)) ((scores.at(r, part * 16 + column) = 0), ...);
            if (!(bad_key || note.flags & QueryNote::bad)) continue;
#pragma unroll
            for (int column = 0; column < columns; ++column) {
                const int i = part * 64 + Tile::column(column);
                const uint32_t bad = bad_key ? ~0u : shared.bad_queries[n % c.stages][i / 32];
                if (shown >> column & bad >> i % 32 & 1)
                    ((scores.at(r, part * 16 + column) = __int_as_float(0x7fffffff)), ...);
            }
        }
    }
}

}  // namespace flash::cuda::sm90
