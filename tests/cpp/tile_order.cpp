// TileOrder gives every tile of every head one index, whatever the section; within a section tiles never
// decrease, and with sections of one head they count up head by head. Prints the number of tiles; a failure
// returns 1.
#include "../../csrc/cuda/tile_order.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

using flash::cuda::TileOrder;

int main() {
    std::mt19937 random(std::random_device{}());
    long count = 0;
    for (int turn = 0; turn < 2000; ++turn) {
        const uint32_t tiles = 1 + random() % 20, heads = 1 + random() % 40, section = 1 + random() % 50;
        const TileOrder order(tiles, heads, section);
        std::vector<int> seen(tiles * heads, 0);
        const uint32_t together = std::min(section, heads);
        uint32_t last_section = 0, last_tile = 0;
        for (uint32_t index = 0; index < tiles * heads; ++index) {
            const auto [tile, head] = order(index);
            bool right = tile < tiles && head < heads && !seen[head * tiles + tile]++;
            right = right && head / together >= last_section;
            if (head / together == last_section) right = right && tile >= last_tile;
            if (section == 1) right = right && tile == index % tiles && head == index / tiles;
            if (!right) {
                std::printf("wrong: %u tiles, %u heads, section %u, index %u\n", tiles, heads, section,
                            index);
                return 1;
            }
            last_section = head / together;
            last_tile = tile;
            ++count;
        }
    }
    std::printf("%ld tiles\n", count);
}
