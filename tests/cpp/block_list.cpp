// Brute force over random lists and intervals: a list within positions has just the blocks that have some of
// them, whatever is hidden of each. Prints the number of blocks.
#include <array>
#include <cstdio>
#include <random>
#include <vector>

#include "../../csrc/attention/block_mask.h"

using namespace flash;

constexpr Position kBlocks = 40;

struct Listed {
    Position index;
    std::array<Quarter, 4> quarters;
};

static int32_t packed(const Listed& block) {
    int32_t hidden = 0;
    for (int i = 0; i < 4; ++i) hidden |= int32_t(block.quarters[i]) << (kBlockBits + 2 * i);
    return block.index | hidden;
}

static bool check(const std::vector<Listed>& blocks, Interval positions, Position block, long& checked) {
    std::vector<int32_t> indices;
    for (const Listed& listed : blocks) indices.push_back(packed(listed));
    BlockList list = BlockList{indices.data(), Position(indices.size()), block}.within(positions);
    for (const Listed& listed : blocks) {
        const Interval of_block(listed.index * block, (listed.index + 1) * block);
        if (intersection(positions, of_block).empty()) continue;
        if (list.count == 0 || list.first() != listed.index) return false;
        bool whole = true;
        for (int i = 0; i < 4; ++i) {
            if (quarter_of(*list.indices, i / 2, i % 2) != listed.quarters[i]) return false;
            whole &= listed.quarters[i] == Quarter::seen;
        }
        if (list.first_is_partial() == whole) return false;
        ++list.indices;
        --list.count;
        ++checked;
    }
    return list.count == 0;
}

int main() {
    std::mt19937 random(1);
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    long checked = 0;
    for (int trial = 0; trial < 6000; ++trial) {
        const Position block = draw(1, 9);
        const int rarely = draw(1, 8);
        std::vector<Listed> blocks;
        for (Position index = 0; index < kBlocks; ++index) {
            if (draw(0, rarely) == rarely) continue;
            Listed listed{index, {}};
            if (draw(0, 1))
                for (Quarter& quarter : listed.quarters) quarter = Quarter(draw(0, 2));
            blocks.push_back(listed);
        }
        if (draw(0, 9) == 0) blocks.clear();
        const Position begin = draw(0, kBlocks * block);
        if (check(blocks, {draw(0, 1) * begin, draw(begin - 2, kBlocks * block)}, block, checked)) continue;
        std::fprintf(stderr, "wrong: trial %d\n", trial);
        return 1;
    }
    std::printf("%ld blocks\n", checked);
    return 0;
}
