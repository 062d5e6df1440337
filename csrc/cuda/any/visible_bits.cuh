// The bits of an element mask, of one head, at the scores that a warp's fragment covers. They are read from
// device memory where they are needed.
#pragma once

#include "../../attention/score_matrix.h"
#include "../ptx/shared.h"
#include "../tile/fragment.h"

namespace flash::cuda {

// Queries past the last one read its bits: what lies there is masked anyway.
struct VisibleBits {
    const uint32_t* rows;  // row 0; nullptr: all is visible
    int stride;            // a row has fewer than 2^30 keys
    Position last_query;

    VisibleBits() = default;
    __device__ VisibleBits(const ForwardProblem& problem, int64_t batch, int64_t head)
        : rows(problem.visible.data ? row_of<const uint32_t>(problem.visible, batch, head, 0) : nullptr),
          stride(int(problem.visible.row_stride)),
          last_query(Position(problem.seqlen_q) - 1) {}

    __device__ __forceinline__ const uint32_t* row(Position query) const {
        return rows + int64_t(min(query, last_query)) * stride;
    }

    // For where it is rarely asked.
    __device__ __forceinline__ bool hides(Position query, Position key) const {
        return rows && !is_visible(row(query), key);
    }

    // Calls hide(r, column) for what is hidden of the fragment of scores whose corner is (query, key); key is
    // a multiple of its width, or of 32.
    template <class Scores, class Hide>
    __device__ __forceinline__ void each_hidden(Position query, Position key, const Hide& hide) const {
        constexpr int in_word = Scores::column_tiles < 4 ? Scores::column_tiles : 4;  // 8 keys each
        constexpr int words = Scores::column_tiles / in_word;
        static_assert(Scores::column_tiles % in_word == 0);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            const uint32_t* const from = row(int(opaque(query)) + Scores::row(r)) + key / 32;
            uint32_t bits[words];
            load(bits, from);
#pragma unroll
            for (int w = 0; w < words; ++w) {
                // Opaque: else the bits that are tested would be shifted instead, and kept for all tiles.
                const uint32_t word = opaque(bits[w] >> (key % 32 + lane_index() % 4 * 2));
#pragma unroll
                for (int i = 0; i < 2 * in_word; ++i)
                    if (!(word & 1u << (i / 2 * 8 + i % 2))) hide(r, w * 2 * in_word + i);
            }
        }
    }

    // Of the fragment's rows, a bit for each of the lane's columns, of which there are 32 at most. All loads
    // start before the first one is waited for.
    template <class Scores>
    __device__ __forceinline__ void load_columns(uint32_t (&shown)[Scores::rows], Position query,
                                                 Position key) const {
        constexpr int words = Scores::column_tiles / 4;  // 32 keys each
        static_assert(Scores::column_tiles % 4 == 0 && words <= 4);
        uint32_t bits[Scores::rows][words];
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) load(bits[r], row(query + Scores::row(r)) + key / 32);
#pragma unroll
        for (int r = 0; r < Scores::rows; ++r) {
            shown[r] = 0;
#pragma unroll
            for (int i = 0; i < words; ++i) {
                // Two of each byte are the lane's; a product puts them side by side in the last byte.
                const uint32_t own = bits[r][i] >> (lane_index() % 4 * 2) & 0x03030303;
                shown[r] |= own * 0x01041040 >> 24 << 8 * i;
            }
        }
    }

  private:
    // Rows are padded to whole blocks of keys, so that four words are aligned.
    template <int kWords>
    __device__ __forceinline__ static void load(uint32_t (&bits)[kWords], const uint32_t* from) {
        if constexpr (kWords == 4) {
            const uint4 x = *reinterpret_cast<const uint4*>(from);
            bits[0] = x.x, bits[1] = x.y, bits[2] = x.z, bits[3] = x.w;
        } else {
#pragma unroll
            for (int i = 0; i < kWords; ++i) bits[i] = from[i];
        }
    }
};

}  // namespace flash::cuda
