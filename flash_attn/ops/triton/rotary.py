"""Rotary position embedding, the one implementation (RoFormer, arXiv 2104.09864).

Feature pair i of the row at position p turns by the angle p * theta_i. The caller brings cos and sin of all
angles as tables [seqlen_ro, rotary_dim / 2]; here rows find their positions and pairs are turned.
"""

import torch

__all__ = ["apply_rotary"]


def _described(tensor):
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _check_tables(x, cos, sin):
    if cos.dim() != 2 or cos.shape != sin.shape or cos.device != x.device or sin.device != x.device:
        raise ValueError(
            "flash_attn: cos and sin must both be [seqlen_ro, rotary_dim / 2] on the device of x; got cos "
            f"{_described(cos)} and sin {_described(sin)} for x {_described(x)}"
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"flash_attn: cos and sin have {cos.shape[1]} columns and turn the first {2 * cos.shape[1]} "
            f"features, but the head dim of x is {x.shape[-1]}"
        )


def _check_positions(x, cos, seqlen_offsets, cu_seqlens, max_seqlen):
    if x.dim() != (4 if cu_seqlens is None else 3):
        layout = "[batch, seqlen, heads, head_dim], or packed with cu_seqlens [total, heads, head_dim]"
        raise ValueError(f"flash_attn: x must be {layout}; got {_described(x)}")
    if isinstance(seqlen_offsets, torch.Tensor):
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if seqlen_offsets.shape != (batch,) or seqlen_offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"flash_attn: seqlen_offsets must be an int or int32 [batch] = [{batch}]; got "
                f"{_described(seqlen_offsets)}"
            )
        return
    longest = x.shape[1] if cu_seqlens is None else max_seqlen
    # A length that lies on a GPU is not read: that would wait for it.
    if isinstance(longest, int) and not 0 <= seqlen_offsets <= cos.shape[0] - longest:
        raise ValueError(
            f"flash_attn: cos and sin have {cos.shape[0]} rows; {longest} positions beginning with "
            f"seqlen_offsets = {seqlen_offsets} do not fit into them"
        )


def _row_tables(x, cos, sin, seqlen_offsets, cu_seqlens):
    """cos and sin of each row of x: [S, R/2] for all of the batch alike, [B, S, R/2], or packed [T, R/2]."""
    if cu_seqlens is None and not isinstance(seqlen_offsets, torch.Tensor):
        rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
        return cos[rows], sin[rows]
    if cu_seqlens is None:
        positions = seqlen_offsets[:, None] + torch.arange(x.shape[1], device=x.device)
        is_known = (positions >= 0) & (positions < cos.shape[0])
    else:
        row = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
        sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
        is_owned = sequence < cu_seqlens.shape[0] - 1  # the others lie behind the last sequence
        sequence = torch.where(is_owned, sequence, 0)
        if isinstance(seqlen_offsets, torch.Tensor):
            seqlen_offsets = seqlen_offsets[sequence]
        positions = row - cu_seqlens[sequence] + seqlen_offsets
        is_known = is_owned & (positions >= 0) & (positions < cos.shape[0])
    positions = torch.where(is_known, positions, 0)
    is_known = is_known[..., None]
    return torch.where(is_known, cos[positions], 1), torch.where(is_known, sin[positions], 0)


def apply_rotary(
    x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False,
    conjugate=False,
):
    """Turns the feature pairs of every row by the angles of its position (arXiv 2104.09864, section 3.4.2).

    Arguments:
        x: [batch, seqlen, heads, head_dim], or with cu_seqlens packed [total, heads, head_dim]; any floating
            dtype, any strides.
        cos, sin: [seqlen_ro, rotary_dim / 2], row p for position p; any floating dtype. The first rotary_dim
            features of each head turn, the others stay.
        seqlen_offsets: int, or int32 or int64 [batch]: the position of each sequence's first row.
        cu_seqlens: None, or int32 or int64 [batch + 1]: where each packed sequence begins; its positions
            count from there. Rows behind the last sequence stay as they are.
        max_seqlen: int, the longest packed sequence; only checked against the tables, and None skips that.
        interleaved: True pairs features 2i and 2i + 1 (GPT-J); False pairs i and i + rotary_dim / 2
            (GPT-NeoX).
        inplace: write into x and return it.
        conjugate: turn the other way, which undoes it and is its gradient.

    Returns:
        Shape and dtype of x; arithmetic in float32 (float64 if x or a table is). No gradient reaches cos and
        sin.

    Raises:
        ValueError: shapes or devices do not match, or positions reach past the tables. Offsets in a tensor
            and max_seqlen on a GPU are not read, which would wait for the device: rows whose positions the
            tables lack stay as they are.
    """
    _check_tables(x, cos, sin)
    _check_positions(x, cos, seqlen_offsets, cu_seqlens, max_seqlen)
    cos, sin = _row_tables(x, cos.detach(), sin.detach(), seqlen_offsets, cu_seqlens)
    dtype = torch.promote_types(cos.dtype, torch.float32)
    cos, sin = (table.to(dtype).unsqueeze(-2) for table in (cos, -sin if conjugate else sin))
    out = x if inplace else x.clone()
    rotary_dim = 2 * cos.shape[-1]
    if interleaved:
        first, second = out[..., 0:rotary_dim:2], out[..., 1:rotary_dim:2]
    else:
        first, second = out[..., : rotary_dim // 2], out[..., rotary_dim // 2 : rotary_dim]
    turned = first * cos - second * sin
    second.copy_(first * sin + second * cos)
    first.copy_(turned)
    return out
