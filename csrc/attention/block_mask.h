// Block-sparse attention (FlashAttention, Algorithm 5): a map of blocks says which parts of the score matrix
// exist. The map arrives as compressed lists, one per block row, for queries (forward) and transposed for
// keys (backward). The user's block is not the engine's tile: engines cut their row tiles at block boundaries
// (RowTiles) and walk the listed spans with tiles of their own (TileSchedule), or let a tile span several
// block rows and walk what any of them lists.
#pragma once

#include "../problem.h"
#include "host_device.h"
#include "mask.h"

namespace flash {

// A listed block: its index, and above that what bits of an element mask hide of it
// (ForwardProblem::visible), two bits for each of its quarters, row by row.
constexpr int kBlockBits = 23;
enum class Quarter { seen, partly_seen, hidden };

FLASH_HOST_DEVICE Position block_of(int32_t listed) {
    return listed & ((1 << kBlockBits) - 1);
}
FLASH_HOST_DEVICE bool is_partial(int32_t listed) {
    return listed >> kBlockBits;
}
FLASH_HOST_DEVICE Quarter quarter_of(int32_t listed, int row_half, int column_half) {
    return Quarter(listed >> (kBlockBits + 4 * row_half + 2 * column_half) & 3);
}

// The blocks that one block row visits, ascending.
struct BlockList {
    const int32_t* indices;
    Position count;
    Position block;  // positions per block

    FLASH_HOST_DEVICE Position first() const { return block_of(indices[0]); }
    FLASH_HOST_DEVICE bool first_is_partial() const { return is_partial(indices[0]); }

    // Those that have some of the positions.
    FLASH_HOST_DEVICE BlockList within(Interval positions) const {
        if (positions.empty()) return {indices, 0, block};
        const Position before = count_before(positions.begin / block);
        return {indices + before, count_before((positions.end - 1) / block + 1) - before, block};
    }

  private:
    // Listed blocks before `index`. There are no more than that, and often as many.
    FLASH_HOST_DEVICE Position count_before(Position index) const {
        Position begin = 0, end = count < index ? count : index;
        for (Position at = end - 1; begin < end; at = begin + (end - begin) / 2) {
            if (block_of(indices[at]) < index)
                begin = at + 1;
            else
                end = at;
        }
        return begin;
    }
};

FLASH_HOST_DEVICE BlockList block_list_of(const BlockLists& lists, int64_t batch, int64_t head, int64_t row) {
    const int64_t block_row = batch * lists.batch_stride + head * lists.head_stride + row / lists.row_block;
    return {lists.indices + block_row * lists.capacity, lists.counts[block_row],
            Position(lists.column_block)};
}

// Cuts the rows of one axis into tiles of at most `tile` rows, none of which crosses a block boundary.
struct RowTiles {
    Position rows, block, tiles_per_block, tile;

    FLASH_HOST_DEVICE RowTiles(int64_t rows, const BlockLists& lists, Position tile)
        : rows(Position(rows)),
          block(lists.counts ? Position(lists.row_block) : tile),
          tiles_per_block((block + tile - 1) / tile),
          tile(tile) {}

    FLASH_HOST_DEVICE Position count() const { return (rows + block - 1) / block * tiles_per_block; }

    // May be empty where the block's rows end before its last tile.
    FLASH_HOST_DEVICE Interval operator[](Position index) const {
        const Position first_of_block = index / tiles_per_block * block;
        const Position first = first_of_block + index % tiles_per_block * tile;
        return intersection({first, first + tile},
                            {first_of_block, first_of_block + block < rows ? first_of_block + block : rows});
    }
};

}  // namespace flash
