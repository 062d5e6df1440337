"""Block-sparse attention: FlashAttention's Algorithm 5 (arXiv 2205.14135, section 3.3)."""

from dataclasses import dataclass

import torch

from .attention import attention


@dataclass(frozen=True)
class BlockSparseMask:
    """Which blocks of the score matrix exist, as compressed lists for both passes. Make it with
    from_block_map.

    Build it once and use it in every layer and step: the lists are made at construction and never again.

    Attributes:
        block_size: (queries, keys) of a block. Block (0, 0) covers the first queries and the first keys; the
            last blocks may reach past the end.
        key_block_counts: int32 [1 or B, 1 or H, Mq], how many blocks of keys each block of queries visits.
        key_block_indices: int32 [1 or B, 1 or H, Mq, Nk], which ones, ascending; undefined past the count.
            From bit 23 on, two bits for each quarter of the block, row by row: 1 where an AttentionMask's
            bits hide some of its elements, 2 where they hide all.
        query_block_counts, query_block_indices: the transpose, for the backward.
    """

    block_size: tuple[int, int]
    key_block_counts: torch.Tensor
    key_block_indices: torch.Tensor
    query_block_counts: torch.Tensor
    query_block_indices: torch.Tensor

    @classmethod
    def from_block_map(cls, block_map, block_size):
        """Mask from a map of blocks.

        Args:
            block_map: bool [1 or B, 1 or H, Mq, Nk] with Mq = ceil(Sq / block_size[0]) and Nk = ceil(Sk /
                block_size[1]); True where queries of the block attend to keys of the block. On the device of
                the attention's tensors.
            block_size: positive int, or (queries, keys).

        Raises:
            ValueError: block_map is not a 4-dimensional bool tensor, or a block size is not positive.
        """
        sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
        if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(
                f"flash_attn: block_size is {block_size}; it must be a positive int or a pair of them"
            )
        if not isinstance(block_map, torch.Tensor) or block_map.dtype != torch.bool or block_map.dim() != 4:
            is_tensor = isinstance(block_map, torch.Tensor)
            got = f"{block_map.dtype} {list(block_map.shape)}" if is_tensor else repr(block_map)
            raise ValueError(
                f"flash_attn: block_map is {got}; it must be a bool tensor [1 or B, 1 or H, Mq, Nk]"
            )
        return cls(tuple(sizes), *_compressed(block_map), *_compressed(block_map.transpose(-1, -2)))

    @property
    def block_map(self):
        """bool [1 or B, 1 or H, Mq, Nk]: the map that the mask was made from."""
        blocks = self.key_block_indices.shape[-1]
        listed = torch.arange(blocks, device=self.key_block_counts.device)
        listed = listed < self.key_block_counts.unsqueeze(-1)
        places = torch.where(listed, self.key_block_indices.long() % 2**_BLOCK_BITS, blocks)
        return torch.nn.functional.pad(torch.zeros_like(listed), (0, 1)).scatter_(-1, places, True)[..., :-1]

    @property
    def density(self):
        """Share of blocks that exist, from 0 to 1. Reads device memory."""
        return float(self.key_block_counts.sum()) / max(self.key_block_indices.numel(), 1)

    def to(self, device):
        """The mask with its lists on another device."""
        return BlockSparseMask(
            self.block_size,
            self.key_block_counts.to(device),
            self.key_block_indices.to(device),
            self.query_block_counts.to(device),
            self.query_block_indices.to(device),
        )


_BLOCK_BITS = 23  # kBlockBits in csrc/attention/block_mask.h


def _compressed(block_map):
    counts = block_map.sum(-1, dtype=torch.int32)
    # A stable sort puts the present blocks first, still ascending, without reading the map on the host.
    indices = torch.sort(block_map.to(torch.uint8), dim=-1, descending=True, stable=True).indices
    return counts, indices.to(torch.int32)


def flash_attn_block_sparse_func(
    q,
    k,
    v,
    mask,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention over the blocks that a map lists, forward and backward: a block that is not listed costs
    nothing.

    Element (i, j) of the score matrix exists if its block does and if causal and window_size let query i see
    key j.

    Args:
        q, k, v: [B, Sq, H, D], [B, Sk, Hk, D], [B, Sk, Hk, Dv]; see flash_attn_func.
        mask: BlockSparseMask for these lengths, on the same device.
        Everything else: see flash_attn_func.

    Returns:
        out [B, Sq, H, Dv], or (out, lse, S_dmask); see flash_attn_func.

    Raises:
        TypeError: mask is not a BlockSparseMask.
        RuntimeError: the mask's blocks don't fit the lengths, batch or heads; and what flash_attn_func
            raises.
    """
    if not isinstance(mask, BlockSparseMask):
        raise TypeError(
            f"flash_attn: mask is a {type(mask).__name__}; it must be a BlockSparseMask, for example "
            "BlockSparseMask.from_block_map(block_map, block_size)"
        )
    return attention(
        q, k, v, None, None, 0, 0, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, mask,
    )
