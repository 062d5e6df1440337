"""Attention over a cache of keys and values, for generation: flash_attn_with_kvcache."""

import torch

from . import operators
from .attention import check_tensors, scale_of, window_of


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Appends k and v to a cache, in place, and attends to all of it. No gradients.

    B batch, Sq queries and Snew new keys a sequence, H query heads, Hk key heads (Hk divides H), D and Dv
    head dims. Query i of a sequence with n keys in use (the new ones, none of the padding) is at position
    i + n - Sq: the last query sees the last key.

    Args:
        q: [B, Sq, H, D].
        k_cache, v_cache: [entries, capacity, Hk, D] and [..., Dv], or with block_table [pages, page_size,
            Hk, D] and [..., Dv], where page_size is a multiple of 16. The last dimension must be contiguous.
        k, v: [B, Snew, Hk, D] and [..., Dv], written to rows [cache_seqlens, cache_seqlens + Snew) first.
            None: nothing is appended.
        rotary_cos, rotary_sin: [capacity or more, rotary_dim / 2] in q's dtype: q and k, which has to be
            given, are rotated (RoPE, arXiv 2104.09864) before they are used. Row cache_seqlens + i is used
            for key i, and for query i under causal or window_size; otherwise row cache_seqlens serves all
            queries.
        cache_seqlens: int or int32 [B], rows of the cache in use before k is appended. None: all of them.
        cache_batch_idx: int32 [B], which entry of the cache is whose; None: entry b. Entries that k is
            appended to must be distinct.
        cache_leftpad: int32 [B], rows in front of a sequence's first key; cache_seqlens counts them too.
        block_table: int32 [B, pages of a sequence]: row j of the sequence lies in row j % page_size of page
            block_table[b, j // page_size]. Not together with cache_batch_idx or cache_leftpad.
        softmax_scale, causal, window_size, softcap, alibi_slopes: see flash_attn_func.
        rotary_interleaved: pairs are (0, 1), (2, 3), ... (GPT-J); False: (0, rotary_dim / 2), ...
            (GPT-NeoX).
        num_splits: blocks of a GPU that share the keys of a query tile; 0: as many as fill the device; 1:
            none, so that a row's bits do not depend on the batch; at most 128.
        return_softmax_lse: also return lse.

    Returns:
        out [B, Sq, H, Dv], or (out, lse float32 [B, H, Sq]). A query that sees no key: out 0, lse -inf.

    Raises:
        RuntimeError, ValueError: an argument's shape, dtype, device or value is wrong, or the new keys pass
            the capacity (on a GPU only if cache_seqlens is an int: a tensor's values are not read back).
    """
    check_tensors(q, k_cache, v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                  alibi_slopes=alibi_slopes, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
                  block_table=block_table)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.stride(-1) != 1:
            raise ValueError(
                f"flash_attn: {name} has shape {list(cache.shape)} and strides {cache.stride()}; it must "
                "have 4 dimensions, the last one contiguous"
            )
    left, right = window_of(window_size, causal)
    with torch.no_grad():
        if k is not None or isinstance(cache_seqlens, int):
            cache_seqlens = _lengths(cache_seqlens, q, k, _capacity(k_cache, block_table))
        if k is not None:
            if rotary_cos is not None:
                q, k = _rotated(q, k, rotary_cos, rotary_sin, cache_seqlens, rotary_interleaved,
                                every_query=left >= 0 or right >= 0)
            rows = _rows(cache_seqlens, k.shape[1], cache_batch_idx, block_table, k_cache.shape[1])
            k_cache[rows], v_cache[rows] = k, v
            cache_seqlens = cache_seqlens + k.shape[1]
        elif rotary_cos is not None:
            raise ValueError("flash_attn: rotary_cos is given without k; rotate q before the call")
        k_cache, v_cache, block_table = _put_together(k_cache, v_cache, block_table)
        out, lse = operators.cached(
            q, k_cache, v_cache, None, 0, cache_seqlens, cache_leftpad, cache_batch_idx, block_table,
            alibi_slopes, scale_of(softmax_scale, q), left, right, float(softcap), int(num_splits))
    return (out, lse) if return_softmax_lse else out


def paged_forward(
    q, k, v, cu_seqlens_q, max_seqlen_q, seqlens_k, block_table, *, softmax_scale, causal, window_size,
    softcap=0.0, alibi_slopes=None, num_splits=0,
):
    """Packed queries q [Tq, H, D] over pages k, v [pages, page_size, Hk, D and Dv]; seqlens_k int [B]. No
    gradients.

    Returns: out [Tq, H, Dv], lse [H, Tq].
    """
    check_tensors(q, k, v, cu_seqlens_q=cu_seqlens_q, block_table=block_table, alibi_slopes=alibi_slopes)
    k, v, block_table = _put_together(k, v, block_table)
    return operators.cached(
        q, k, v, cu_seqlens_q, int(max_seqlen_q), seqlens_k.int(), None, None, block_table, alibi_slopes,
        scale_of(softmax_scale, q), *window_of(window_size, causal), float(softcap), int(num_splits),
    )


def _put_together(k_cache, v_cache, block_table):
    """The CPU engine knows no pages."""
    if block_table is None or k_cache.device.type != "cpu":
        return k_cache, v_cache, block_table
    table = block_table.clamp(min=0).long()
    return k_cache[table].flatten(1, 2), v_cache[table].flatten(1, 2), None


def _capacity(cache, block_table):
    return cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _lengths(cache_seqlens, q, k, capacity):
    """int32 [B]."""
    if isinstance(cache_seqlens, int):
        new = 0 if k is None else k.shape[1]
        if not 0 <= cache_seqlens <= capacity - new:
            raise ValueError(
                f"flash_attn: cache_seqlens is {cache_seqlens}; with {new} new keys it must be from 0 to "
                f"{capacity - new}, the cache has {capacity} rows"
            )
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_seqlens is None:
        raise ValueError("flash_attn: k is given without cache_seqlens, which says where to append it")
    return cache_seqlens


def _rows(cache_seqlens, count, cache_batch_idx, block_table, page_size):
    """Indices of the new rows in the cache's first two dimensions, each [B, count]."""
    rows = cache_seqlens.long()[:, None] + torch.arange(count, device=cache_seqlens.device)
    if block_table is not None:
        return block_table.long().gather(1, rows // page_size), rows % page_size
    if cache_batch_idx is None:
        cache_batch_idx = torch.arange(len(rows), device=rows.device)
    return cache_batch_idx.long()[:, None].expand_as(rows), rows


def _rotated(q, k, cos, sin, offsets, interleaved, every_query):
    from .ops.triton.rotary import apply_rotary

    k = apply_rotary(k, cos, sin, seqlen_offsets=offsets, interleaved=interleaved)
    if every_query or q.shape[1] == 1:
        return apply_rotary(q, cos, sin, seqlen_offsets=offsets, interleaved=interleaved), k
    at_one_position = q.reshape(q.shape[0], 1, -1, q.shape[-1])
    turned = apply_rotary(at_one_position, cos, sin, seqlen_offsets=offsets, interleaved=interleaved)
    return turned.view(q.shape), k
