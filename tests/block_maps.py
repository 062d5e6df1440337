"""Maps of blocks whose rows have different lists, for kernels whose tiles of queries span several rows, and
masks that leave out parts of blocks."""

import torch

from reference import expand_block_map

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


def mask_of_quarters(seqlen_q, seqlen_k):
    """bool [1, 2, Sq, Sk]: the quarters of an AttentionMask's blocks are visible, or hidden, or partly so."""
    kinds = torch.randint(3, (1, 2, -(-seqlen_q // 64), -(-seqlen_k // 64)))
    some, all_ = (expand_block_map(chosen, (64, 64), seqlen_q, seqlen_k) for chosen in (kinds > 0, kinds > 1))
    return some & (all_ | (torch.rand(some.shape) < 0.6))
