// Brute force over random lists and intervals: a list within positions has just the blocks that have some of
// them, and a union of lists each block once, ascending, with those that list it. Prints the number of
// blocks.
#include <cstdio>
#include <random>
#include <vector>

#include "../../csrc/attention/block_union.h"

using namespace flash;

constexpr Position kBlocks = 40;

struct List {
    std::vector<int32_t> indices;
    std::vector<char> kinds = std::vector<char>(kBlocks, 0);  // 0 not listed, 1 whole, 2 partial
};

static bool check(const std::vector<List>& lists, const std::vector<Interval>& intervals, Position block,
                  long& blocks) {
    BlockUnion all;
    for (int i = 0; i < BlockUnion::kLists; ++i) {
        const BlockList whole{lists[i].indices.data(), Position(lists[i].indices.size()), block};
        all.set(i, whole.within(intervals[i]));
    }
    const auto visits = [&](int i, Position index) {
        const Interval common = intersection(intervals[i], {index * block, (index + 1) * block});
        return lists[i].kinds[index] && !common.empty();
    };
    for (Position index = 0; index < kBlocks; ++index) {
        uint32_t listed = 0, partial = 0, unfinished = 0;
        for (int i = 0; i < BlockUnion::kLists; ++i) {
            listed |= uint32_t(visits(i, index)) << i;
            partial |= uint32_t(visits(i, index) && lists[i].kinds[index] == 2) << i;
            for (Position later = index; later < kBlocks; ++later)
                unfinished |= uint32_t(visits(i, later)) << i;
        }
        if (all.unfinished() != unfinished) return false;
        if (!listed) continue;
        const ListedBlock next = all.next();
        if (next.index != index || next.lists != listed || next.partial != partial) return false;
        ++blocks;
    }
    return all.unfinished() == 0 && all.next().lists == 0;
}

int main() {
    std::mt19937 random(1);
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    long blocks = 0;
    for (int trial = 0; trial < 6000; ++trial) {
        const Position block = draw(1, 9);
        std::vector<List> lists(BlockUnion::kLists);
        std::vector<Interval> intervals;
        for (List& list : lists) {
            const int rarely = draw(1, 8);
            for (Position index = 0; index < kBlocks; ++index) {
                if (draw(0, rarely) == rarely) continue;
                list.kinds[index] = char(draw(1, 2));
                list.indices.push_back(index | (list.kinds[index] == 2 ? kPartialBlock : 0));
            }
            if (draw(0, 9) == 0) list = List();
            const Position begin = draw(0, kBlocks * block);
            intervals.push_back({draw(0, 1) * begin, draw(begin - 2, kBlocks * block)});
        }
        if (check(lists, intervals, block, blocks)) continue;
        std::fprintf(stderr, "wrong: trial %d\n", trial);
        return 1;
    }
    std::printf("%ld blocks\n", blocks);
    return 0;
}
