"""Masks of elements: which query sees which key, where neither causal nor a window says it."""

from dataclasses import dataclass

import torch

from . import operators
from .block_sparse import BlockSparseMask


@dataclass(frozen=True)
class AttentionMask:
    """A bool mask as the engines read it: a bit for each element, and lists of blocks of 128 x 128, so that
    blocks without a visible element are skipped and blocks without a hidden one cost nothing. Made once with
    from_bool, it serves every layer and both passes; 1/8 byte an element."""

    bits: torch.Tensor  # int32 [B or 1, H or 1, Sq or 1, ceil(Sk / 128) * 4]
    blocks: BlockSparseMask  # whose lists say which blocks are partial
    seqlen_q: int
    seqlen_k: int

    @classmethod
    def from_bool(cls, mask, seqlen_q, seqlen_k):
        """
        Args:
            mask: bool, broadcastable to [B, H, seqlen_q, seqlen_k], True where a query sees a key. Dimensions
                of size 1 are shared and not copied, but the last.

        Raises:
            TypeError: mask is not a tensor.
            ValueError: mask is not bool, or its shape does not fit.
        """
        _check_is_tensor("attn_mask", mask, "a bool tensor or an AttentionMask")
        if mask.dtype != torch.bool:
            raise ValueError(
                f"flash_attn: attn_mask is {mask.dtype}; it must be bool, True where a query sees a key (a "
                "float mask is an attn_bias)"
            )
        mask = four_dimensions("attn_mask", mask, seqlen_q, seqlen_k)
        bits, *lists = operators.pack_mask(mask, seqlen_q)
        blocks = BlockSparseMask((operators.MASK_BLOCK, operators.MASK_BLOCK), *lists)
        return cls(bits, blocks, seqlen_q, seqlen_k)


def mask_for(attn_mask, seqlen_q, seqlen_k):
    """An AttentionMask of what flash_attn_func takes for attn_mask."""
    if not isinstance(attn_mask, AttentionMask):
        return AttentionMask.from_bool(attn_mask, seqlen_q, seqlen_k)
    # The bits alone don't tell: they are as many for 97 keys as for 128, and a shared row fits any queries.
    if (attn_mask.seqlen_q, attn_mask.seqlen_k) != (seqlen_q, seqlen_k):
        raise ValueError(
            f"flash_attn: attn_mask was made for {attn_mask.seqlen_q} queries and {attn_mask.seqlen_k} keys; "
            f"there are {seqlen_q} and {seqlen_k}"
        )
    return attn_mask


def bias_for(attn_bias, seqlen_q, seqlen_k, dtype):
    """[B or 1, H or 1, Sq or 1, Sk] in dtype of what flash_attn_func takes for attn_bias."""
    _check_is_tensor("attn_bias", attn_bias, "a floating tensor")
    if not attn_bias.is_floating_point():
        raise ValueError(
            f"flash_attn: attn_bias is {attn_bias.dtype}; it must be floating, to be added to the scores (a "
            "bool mask is an attn_mask)"
        )
    return four_dimensions("attn_bias", attn_bias, seqlen_q, seqlen_k).to(dtype)


def _check_is_tensor(name, value, needed):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"flash_attn: {name} is a {type(value).__name__}; it must be {needed}")


def four_dimensions(name, tensor, seqlen_q, seqlen_k):
    """A view [B or 1, H or 1, Sq or 1, Sk] of what broadcasts to [B, H, Sq, Sk]."""
    shape = tensor.shape
    tensor = tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor
    if tensor.dim() > 4 or tensor.shape[3] not in (1, seqlen_k) or tensor.shape[2] not in (1, seqlen_q):
        raise ValueError(
            f"flash_attn: {name} has shape {list(shape)}; it must broadcast to [batch, heads, {seqlen_q}, "
            f"{seqlen_k}]"
        )
    return tensor.expand(-1, -1, -1, seqlen_k)
