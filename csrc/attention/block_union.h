// The blocks that any of several block rows visits, as where a tile of rows spans them: ascending, and who
// lists each.
#pragma once

#include "block_mask.h"

namespace flash {

struct ListedBlock {
    Position index;
    uint32_t lists, partial;  // a bit for each list that has it, and for each of which it is a partial block
};

class BlockUnion {
  public:
    static constexpr int kLists = 4;

    FLASH_HOST_DEVICE void clear() {
        for (Rest& rest : rest_) rest.count = 0, rest.index = kNone;
    }
    FLASH_HOST_DEVICE void set(int i, const BlockList& list) {
        rest_[i] = {list.indices, list.count, kNone};
        if (list.count > 0) rest_[i].index = *list.indices;
    }

    // A bit for each list of which there is more.
    FLASH_HOST_DEVICE uint32_t unfinished() const {
        uint32_t lists = 0;
        for (int i = 0; i < kLists; ++i) lists |= uint32_t(rest_[i].count > 0) << i;
        return lists;
    }

    // The first block that is left; at the end in no list.
    FLASH_HOST_DEVICE ListedBlock next() {
        ListedBlock block{kNone, 0, 0};
        for (const Rest& rest : rest_)
            if (rest.first() < block.index) block.index = rest.first();
        for (int i = 0; i < kLists; ++i) {
            Rest& rest = rest_[i];
            if (rest.count == 0 || rest.first() != block.index) continue;
            block.lists |= 1u << i;
            if (rest.index & kPartialBlock) block.partial |= 1u << i;
            rest.index = --rest.count > 0 ? *++rest.indices : kNone;
        }
        return block;
    }

  private:
    static constexpr int32_t kNone = kPartialBlock - 1;  // behind all blocks

    struct Rest {
        const int32_t* indices;
        Position count;
        int32_t index;  // the first one, read ahead

        FLASH_HOST_DEVICE Position first() const { return index & ~kPartialBlock; }
    };
    Rest rest_[kLists];
};

}  // namespace flash
