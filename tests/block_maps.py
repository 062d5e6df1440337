"""Maps of blocks whose rows have different lists, for kernels whose tiles of queries span several rows."""

import torch

# {name: is a block of keys in a row of blocks listed?} Gaps of any length; neighbours' lists begin and end
# elsewhere, or are empty.
LISTED = {
    "random": lambda row, block: torch.rand(row.shape[0], block.shape[1]) < 0.4,
    "in turn": lambda row, block: (row + block) % 2 == 0,
    "first and last": lambda row, block: (row % 2 == 0) | (block == 0) | (block == block.max()),
    "one of three": lambda row, block: row % 3 == 1,
    "stairs": lambda row, block: (block < 2 * row) & (block >= row - 1),
}


def map_of(which, rows, blocks):
    """bool [1, 2, rows, blocks]: the second head's rows are the first one's the other way around."""
    listed = LISTED[which](torch.arange(rows)[:, None], torch.arange(blocks)[None]).expand(rows, blocks)
    return torch.stack([listed, listed.flip(0)])[None].contiguous()
