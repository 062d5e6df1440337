// The dropout factors of a tile: 0 or keep_scale for every (query, key), drawn patch by patch so that the 32
// Philox calls of a patch run side by side in vectors.
#pragma once

#include "../attention/dropout.h"
#include "../attention/mask.h"
#include "simd.h"

namespace flash::cpu::FLASH_CPU_ISA {

// tile[(query - queries.begin) * query_stride + (key - keys.begin) * key_stride]
template <class Real>
void fill_dropout_tile(Real* tile, const Dropout& dropout, Interval queries, int64_t query_stride,
                       Interval keys, int64_t key_stride) {
    constexpr int64_t patch = Dropout::patch;
    const Real keep_scale = Real(dropout.keep_scale());
    for (int64_t query_patch = queries.begin / patch; query_patch * patch < queries.end; ++query_patch)
        for (int64_t key_patch = keys.begin / patch; key_patch * patch < keys.end; ++key_patch) {
            uint32_t words[4][Dropout::calls_per_patch];
            for (int call = 0; call < Dropout::calls_per_patch; ++call) {
                const Philox bits = dropout.bits(uint32_t(query_patch), uint32_t(key_patch), uint32_t(call));
                for (int word = 0; word < 4; ++word) words[word][call] = bits.word[word];
            }
            const Interval rows = intersection(queries, {query_patch * patch, (query_patch + 1) * patch});
            const Interval columns = intersection(keys, {key_patch * patch, (key_patch + 1) * patch});
            for (int64_t query = rows.begin; query < rows.end; ++query)
                for (int64_t key = columns.begin; key < columns.end; ++key) {
                    const int64_t call = query % 8 * 4 + key % 8 / 2;
                    const Philox bits{{words[0][call], words[1][call], words[2][call], words[3][call]}};
                    const int slot = int(query / 8 % 2 * 4 + key / 8 % 2 * 2 + key % 2);
                    tile[(query - queries.begin) * query_stride + (key - keys.begin) * key_stride] =
                        dropout.keep(bits, slot) ? keep_scale : Real(0);
                }
        }
}

}  // namespace flash::cpu::FLASH_CPU_ISA
