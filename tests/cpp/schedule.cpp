// Brute force over random lengths, windows, tiles and block maps: a tile's runs are ascending and disjoint,
// contain all that any row of the tile sees (and is listed), plain runs contain nothing that some row doesn't
// see or that lies in a partial block, partial runs nothing else, and the transpose agrees with the mask.
// Prints the number of tiles; a failure prints its configuration and returns 1.
#include <cstdio>
#include <random>
#include <vector>

#include "../../csrc/attention/tile_schedule.h"

using namespace flash;

struct Case {
    ForwardProblem problem{};
    std::vector<char> map;  // [row blocks][column blocks]: 0 not listed, 1 whole, 2 partial
    std::vector<int32_t> counts, indices;
    bool transposed;

    int64_t rows() const { return transposed ? problem.seqlen_k : problem.seqlen_q; }
    int64_t columns() const { return transposed ? problem.seqlen_q : problem.seqlen_k; }
    char listed(const BlockLists& lists, int64_t row, int64_t column) const {
        if (!lists.counts) return 1;
        return map[row / lists.row_block * lists.capacity + column / lists.column_block];
    }
};

static bool sees(const ForwardProblem& p, int64_t query, int64_t key) {
    const int64_t distance = key - query - (p.seqlen_k - p.seqlen_q);
    return (p.window_left < 0 || distance >= -p.window_left) &&
           (p.window_right < 0 || distance <= p.window_right);
}

static bool check_tile(const Case& c, const Mask& mask, const BlockLists& lists, Interval tile,
                       int64_t granularity, bool merges) {
    const auto visible = [&](int64_t row) { return c.transposed ? mask.queries_of(row) : mask.keys_of(row); };
    const Interval first = visible(tile.begin), last = visible(tile.end - 1);
    TileSchedule schedule =
        lists.counts ? TileSchedule(first, last, granularity, block_list_of(lists, 0, 0, tile.begin), merges)
                     : TileSchedule(first, last, granularity);
    std::vector<char> visited(size_t(c.columns()), 0);
    int64_t position = 0;
    for (Run run; schedule.next(run);) {
        if (run.begin >= run.end) continue;
        if (run.begin < position || run.end > c.columns()) return false;
        if (!run.masked && (run.begin % granularity || run.end % granularity)) return false;
        position = run.end;
        for (int64_t column = run.begin; column < run.end; ++column) {
            visited[size_t(column)] = 1;
            const char listed = c.listed(lists, tile.begin, column);
            if (!listed || run.partial != (listed == 2) || (run.partial && !run.masked)) return false;
            for (int64_t row = tile.begin; row < tile.end && !run.masked; ++row) {
                const bool seen = c.transposed ? sees(c.problem, column, row) : sees(c.problem, row, column);
                if (!seen) return false;
            }
        }
    }
    for (int64_t row = tile.begin; row < tile.end; ++row)
        for (int64_t column = 0; column < c.columns(); ++column) {
            const bool seen = c.transposed ? sees(c.problem, column, row) : sees(c.problem, row, column);
            if (seen != visible(row).contains(column)) return false;
            if (seen && c.listed(lists, row, column) && !visited[size_t(column)]) return false;
        }
    return true;
}

int main() {
    std::mt19937 random(1);
    const auto draw = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    int64_t tiles = 0;
    for (int trial = 0; trial < 6000; ++trial) {
        Case c;
        ForwardProblem& p = c.problem;
        p.seqlen_q = draw(1, 70);
        p.seqlen_k = draw(0, 70);
        p.window_left = draw(0, 2) ? draw(0, 40) : -1;
        p.window_right = draw(0, 2) ? draw(0, 40) * draw(0, 1) : -1;
        c.transposed = draw(0, 1);
        if (c.rows() == 0) continue;
        int64_t granularity = int64_t(1) << draw(0, 4);
        BlockLists lists;
        if (draw(0, 1)) {
            lists.row_block = draw(1, 40);
            lists.column_block = granularity * draw(1, 5);
            lists.capacity = (c.columns() + lists.column_block - 1) / lists.column_block;
            const int64_t block_rows = (c.rows() + lists.row_block - 1) / lists.row_block;
            c.indices.resize(size_t(block_rows * lists.capacity));
            for (int64_t row = 0; row < block_rows; ++row) {
                int32_t count = 0;
                for (int64_t column = 0; column < lists.capacity; ++column) {
                    c.map.push_back(char(draw(0, 3) % 3));
                    const int32_t partial = c.map.back() == 2 ? draw(1, 255) << kBlockBits : 0;
                    if (c.map.back())
                        c.indices[size_t(row * lists.capacity + count++)] = int32_t(column) | partial;
                }
                c.counts.push_back(count);
            }
            lists.counts = c.counts.data();
            lists.indices = c.indices.data();
        }
        const Mask mask(p, sequence_of(p, 0));
        const RowTiles row_tiles(c.rows(), lists, draw(1, 32));
        int64_t covered = 0;
        for (int64_t i = 0; i < row_tiles.count(); ++i) {
            const Interval tile = row_tiles[i];
            if (tile.empty()) continue;
            covered += tile.end - tile.begin;
            ++tiles;
            if (check_tile(c, mask, lists, tile, granularity, i % 2)) continue;
            std::fprintf(stderr,
                         "wrong: Sq %ld Sk %ld left %ld right %ld transposed %d rows [%ld, %ld) granularity "
                         "%ld blocks %ld x %ld\n",
                         long(p.seqlen_q), long(p.seqlen_k), long(p.window_left), long(p.window_right),
                         c.transposed, long(tile.begin), long(tile.end), long(granularity),
                         long(lists.row_block), long(lists.column_block));
            return 1;
        }
        if (covered != c.rows()) return 1;
    }
    std::printf("%ld tiles\n", long(tiles));
    return tiles > 10000 ? 0 : 1;
}
