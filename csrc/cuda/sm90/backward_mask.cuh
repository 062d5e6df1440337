// The mask of Hopper's backward, where scores are transposed: [keys, queries].
#pragma once

#include "../ptx/shared.h"
#include "../tile/fragment.h"
#include "backward_plan.cuh"

namespace flash::cuda::sm90 {

// A lane's columns of a tile of queries, of 64 queries at most: those of a part.
template <BackwardConfiguration c>
constexpr int kPartColumns = c.query_tile < 64 ? Fragment<16, c.query_tile>::columns : 16;

// What bits say of a warp's 16 keys, which are in one word of a query's: each lane has the words of every
// 32nd query of a tile.
template <BackwardConfiguration c>
class QueryWords {
  public:
    // Of the tile that the note is of. warp_row: where the warp's keys begin.
    __device__ __forceinline__ void load(const ForwardProblem& problem, const BackwardShared<c>& shared,
                                         const QueryNote& note, int warp_row) {
        const Position first_key = first_key_of(shared, note.flags, warp_row);
        const uint32_t* const word = note.bits + min(first_key, Position(problem.rows_k) - 1) / 32;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const Position query = min(note.first + i * 32 + lane_index(), Position(problem.rows_q) - 1);
            words_[i] = word[query * problem.visible.row_stride];
        }
    }

    // As mask_scores wants it.
    __device__ __forceinline__ uint32_t visible(const BackwardShared<c>& shared, uint32_t flags,
                                                int warp_row, int part) const {
        const int key = (first_key_of(shared, flags, warp_row) + Scores::row(0)) % 32;
        uint32_t shown = 0;
#pragma unroll
        for (int column = 0; column < kPartColumns<c>; ++column) {
            const uint32_t word =
                __shfl_sync(0xffffffff, words_[part * 2 + column / 8], Scores::column(column) % 32) >> key;
            shown |= (word & 1) << column | (word >> 8 & 1) << (16 + column);
        }
        return shown;
    }

  private:
    using Scores = Fragment<16, c.query_tile>;
    static constexpr int kWords = (c.query_tile + 31) / 32;

    __device__ __forceinline__ static Position first_key_of(const BackwardShared<c>& shared, uint32_t flags,
                                                            int warp_row) {
        return shared.plans[BackwardShared<c>::tile_of(flags)].tile.first + warp_row;
    }

    uint32_t words_[kWords];
};

// P and dS, or one of them, of the warp's 16 keys, which begin at warp_row, are zero where invisible: what
// lies behind the mask may be infinite. NaN where a row of Q, dO or K that is not finite is seen.
// visible(part): of 64 queries, a bit for each of a lane's 16 columns, from what is shown of its second row
// on in the upper half.
template <BackwardConfiguration c, class Visible, class... Scores>
__device__ __forceinline__ void mask_scores(const BackwardShared<c>& shared, uint32_t flags, uint32_t n,
                                            int warp_row, uint32_t thread, const Visible& visible,
                                            Scores&... scores) {
    using Tile = Fragment<16, c.query_tile>;
    const uint32_t tile = BackwardShared<c>::tile_of(flags);
    const uint4 seen = load_shared_16(shared_address(&shared.notes[n % c.stages].seen));
    const Interval keys = shared.plans[tile].bounds.keys;
    const bool has_bad_keys = shared.has_bad_keys[tile][thread / 128];
    constexpr int columns = kPartColumns<c>;
#pragma unroll
    for (int part = 0; part < Tile::columns / columns; ++part) {
        const uint32_t bits = visible(part);
#pragma unroll
        for (int r = 0; r < Tile::rows; ++r) {
            const int row = warp_row + Tile::row(r);
            const int begin = max(row + int(seen.x), int(seen.z));
            const int end = keys.contains(row) ? min(row + int(seen.y), int(seen.w)) : 0;
            const uint32_t shown = bits >> (r * 16) & columns_in_front_of(end - part * 64, thread) &
                                   ~columns_in_front_of(begin - part * 64, thread);
            const bool bad_key = has_bad_keys && shared.bad_keys[tile][row / 32] >> row % 32 & 1;
#pragma unroll
            for (int column = 0; column < columns; ++column)
                if (!(shown >> column & 1)) ((scores.at(r, part * 16 + column) = 0), ...);
            if (!(bad_key || flags & QueryNote::bad)) continue;
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
