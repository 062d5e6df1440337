// Where dS lies in device memory (score_gradients.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../attention/host_device.h"

namespace flash::cuda::sm90 {

// Which groups of 16 queries a head's tiles of keys have in memory: those that may see one of the keys, and
// what else is in their tiles of queries. Under a diagonal the k-th tile's first one is 4 k - lead.
class ScoreGradientRows {
  public:
    static constexpr int kKeys = 64, kQueries = 16;

    ScoreGradientRows() = default;
    // Windows as ForwardProblem has them. query_tile: so many queries are stored at once.
    ScoreGradientRows(int64_t seqlen_q, int64_t seqlen_k, int64_t window_left, int64_t window_right,
                      int query_tile)
        : groups_(int((seqlen_q + query_tile - 1) / query_tile * query_tile / kQueries)),
          lead_(int(seqlen_k / kQueries) + kKeys / kQueries) {
        const int margin = query_tile / kQueries - 1;
        if (window_right >= 0) {
            const int64_t reach = seqlen_k - seqlen_q + window_right;
            lead_ = int(std::min<int64_t>(lead_, (reach + kQueries - 1) / kQueries + margin));
        }
        whole_ = std::max((lead_ + 3) / 4, 0);
        if (window_right < 0 || window_left < 0) return;
        const int64_t band = (window_left + window_right + kKeys) / kQueries + 3 + 2 * margin;
        if (band < groups_) band_ = int(band);
    }

    // Of all tiles before this one.
    FLASH_HOST_DEVICE int64_t before(int tile) const {
        if (band_) return int64_t(tile) * band_;
        const int cut = tile > whole_ ? tile - whole_ : 0;
        return int64_t(tile) * groups_ - int64_t(cut) * (2 * (whole_ + tile - 1) - lead_);
    }
    // Of a head. Behind the keys that some query sees there are none.
    int64_t count(int64_t keys) const {
        const int64_t tiles = (keys + kKeys - 1) / kKeys;
        return before(int(band_ ? tiles : std::min<int64_t>(tiles, (groups_ + lead_) / 4 + 1)));
    }
    // Where a tile has query 0, or would have it.
    FLASH_HOST_DEVICE int64_t of_query_0(int tile) const {
        const int first = 4 * tile - lead_;
        return before(tile) - (band_ || first > 0 ? first : 0);
    }

  private:
    int groups_;    // that there are
    int lead_;      // so large that 4 k is less, if there is no diagonal
    int band_ = 0;  // so many for each tile; 0: all, from its first one on
    int whole_;     // tiles of which it is group 0
};

}  // namespace flash::cuda::sm90
