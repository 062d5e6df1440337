// TileOrder gives every tile of every head one index, whatever the section; within a section tiles never
// decrease, and with sections of one head they count up head by head. A device that takes tiles in that order,
// as under a causal mask, hardly idles, however many blocks it runs at once. Prints the number of tiles; a
// failure returns 1.
#include "../../csrc/cuda/tile_order.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <queue>
#include <random>
#include <vector>

using flash::cuda::TileOrder;

// What of the time blocks are busy, if tile i of n takes n - i, and a little more.
double busy(const TileOrder& order, uint32_t tiles, uint32_t heads, int at_once) {
    std::priority_queue<double, std::vector<double>, std::greater<double>> ends;
    for (int i = 0; i < at_once; ++i) ends.push(0);
    double work = 0, last = 0;
    for (uint32_t index = 0; index < tiles * heads; ++index) {
        const double time = tiles - order(index).tile + 0.75, end = ends.top() + time;
        ends.pop();
        ends.push(end);
        work += time;
        last = std::max(last, end);
    }
    return work / at_once / last;
}

int main() {
    std::mt19937 random(std::random_device{}());
    long count = 0;
    for (int turn = 0; turn < 2000; ++turn) {
        const uint32_t tiles = 1 + random() % 20, heads = 1 + random() % 40, section = 1 + random() % 50;
        const uint32_t least = turn % 2 ? 1 + random() % 60 : 0;  // of the last section; 0: as it is
        const TileOrder order(tiles, heads, section, least);
        std::vector<int> seen(tiles * heads, 0);
        const uint32_t together = std::min(section, heads), rest = order.last_section();
        const uint32_t wanted = least ? std::max(least, section) : section > 1 ? 2 * section : 1;
        const uint32_t before = (heads - rest) / together;  // sections
        if (order.section() != together || (heads - rest) % together != 0 || rest < std::min(heads, wanted) ||
            (rest < heads && rest >= wanted + together)) {
            std::printf("wrong sections: %u heads, section %u, the last one %u of %u\n", heads, section, rest,
                        wanted);
            return 1;
        }
        uint32_t last_section = 0, last_tile = 0;
        for (uint32_t index = 0; index < tiles * heads; ++index) {
            const auto [tile, head] = order(index);
            bool right = tile < tiles && head < heads && !seen[head * tiles + tile]++;
            const uint32_t its_section = std::min(head / together, before);
            right = right && its_section >= last_section;
            if (its_section == last_section) right = right && tile >= last_tile;
            if (wanted == 1) right = right && tile == index % tiles && head == index / tiles;
            if (!right) {
                std::printf("wrong: %u tiles, %u heads, section %u, index %u\n", tiles, heads, section,
                            index);
                return 1;
            }
            last_section = its_section;
            last_tile = tile;
            ++count;
        }
    }
    for (uint32_t section = 5; section <= 12; ++section) {
        const double share = busy(TileOrder(32, 64, section), 32, 64, 264);
        if (share < 0.94) {
            std::printf("busy for %.3f of the time with sections of %u\n", share, section);
            return 1;
        }
    }
    // As few heads as have a tile for each block, and two for each in the last section (RowTiling).
    for (uint32_t heads = 16; heads <= 64; ++heads) {
        const int64_t section = (132 + 63) / 64, last = (264 + 63) / 64;
        const double share = busy(TileOrder(64, heads, section, last), 64, heads, 132);
        if (share < 0.97) {  // 0.962 without the latter
            std::printf("busy for %.3f of the time with %u heads\n", share, heads);
            return 1;
        }
    }
    std::printf("%ld tiles\n", count);
}
