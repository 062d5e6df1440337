// ScoreGradientRows gives every group of queries that a tile of keys stores a place of its own, below count(),
// and none where nothing is seen. Prints the number of groups; a failure returns 1.
#include "../../csrc/cuda/sm90/score_gradient_rows.h"

#include <cstdio>
#include <random>
#include <vector>

using flash::cuda::sm90::ScoreGradientRows;

int main() {
    std::mt19937 random(std::random_device{}());
    long stored = 0;
    for (int turn = 0; turn < 4000; ++turn) {
        const int64_t queries = 1 + random() % 1500, keys = 1 + random() % 1500;
        const auto window = [&] { return random() % 2 ? -1 : int64_t(random() % (turn % 3 ? 300 : 2000)); };
        const int64_t left = window(), right = turn % 4 ? window() : 0;
        const int query_tile = turn % 2 ? 48 : 64;
        const ScoreGradientRows rows(queries, keys, left, right, query_tile);
        const int64_t count = rows.count(keys), diagonal = keys - queries;
        const int64_t all = (keys + 63) / 64 * ((queries + query_tile - 1) / query_tile * query_tile / 16);
        bool right_so_far = count >= 0 && count <= all + 64;
        std::vector<int> taken(count, 0);
        for (int64_t key = 0; key < keys; key += 64) {
            const int64_t last = std::min(key + 64, keys) - 1;
            // Queries that see the tile's first key, or its last one: what is between them sees some.
            const int64_t begin = right < 0 ? 0 : std::max<int64_t>(key - diagonal - right, 0);
            const int64_t end = left < 0 ? queries : std::min(last - diagonal + left + 1, queries);
            if (begin >= end) continue;
            for (int64_t query = begin / query_tile * query_tile; query < end; query += query_tile)
                for (int group = 0; group < query_tile / 16; ++group) {
                    const int64_t place = rows.of_query_0(int(key / 64)) + query / 16 + group;
                    right_so_far = right_so_far && place >= 0 && place < count && !taken[place]++;
                    ++stored;
                }
        }
        if (right_so_far) continue;
        std::printf("wrong: %lld queries, %lld keys, window %lld, %lld, tiles of %d\n", (long long)queries,
                    (long long)keys, (long long)left, (long long)right, query_tile);
        return 1;
    }
    std::printf("%ld groups have places\n", stored);
}
