"""Standard attention, the specification that every engine is tested against.

The textbook formula on a materialised [Sq, Sk] matrix: in float64 it is the exact answer, and the same lines
in bfloat16, float16 or float32 are "standard attention in the same dtype", whose error sets the budget
(acceptance.py). torch's autograd differentiates it. Nothing here comes from flash_attn.

Layouts: q [B, Sq, H, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv], out [B, Sq, H, Dv], lse [B, H, Sq];
packed: q [Tq, H, D], k [Tk, Hk, D], v [Tk, Hk, Dv], out [Tq, H, Dv], lse [H, Tq].
"""

import math

import torch


def visible_keys(seqlen_q, seqlen_k, causal=False, window_size=(-1, -1), device="cpu"):
    """bool [Sq, Sk]; the diagonal ends in the bottom-right corner."""
    query = torch.arange(seqlen_q, device=device)[:, None]
    key = torch.arange(seqlen_k, device=device)[None, :]
    distance = key - query - (seqlen_k - seqlen_q)
    left, right = window_size
    if causal:
        right = 0
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible


def expand_block_map(block_map, block_size, seqlen_q, seqlen_k):
    """bool [1|B, 1|H, Mq, Nk] of blocks -> bool [1|B, 1|H, Sq, Sk] of elements."""
    block_q, block_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    elements = block_map.repeat_interleave(block_q, dim=2).repeat_interleave(block_k, dim=3)
    return elements[:, :, :seqlen_q, :seqlen_k]


def alibi_bias(slopes, seqlen_q, seqlen_k):
    """slopes [H] or [B, H] -> [1|B, H, Sq, Sk], in the dtype of the slopes."""
    query = torch.arange(seqlen_q, device=slopes.device)[:, None]
    key = torch.arange(seqlen_k, device=slopes.device)[None, :]
    distance = (query + seqlen_k - seqlen_q - key).abs().to(slopes.dtype)
    return -slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance


def scores(q, k, softmax_scale=None, softcap=0.0, alibi_slopes=None):
    """[B, H, Sq, Sk] before the mask, in the dtype of q; query head h reads key head h // (H / Hk)."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q * scale, k)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s + alibi_bias(alibi_slopes.to(s.dtype), q.shape[1], k.shape[1])
    return s


class StoredSoftmax(torch.autograd.Function):
    """softmax(s) v with a backward from the stored out and lse, as every engine's is."""

    @staticmethod
    def forward(ctx, s, visible, v, keep, keep_scale, stored_dtype):
        s = torch.where(visible, s, -math.inf)
        lse = torch.logsumexp(s, dim=-1)
        p = torch.where(visible, torch.exp(s - lse[..., None]), 0.0)
        dropped = p if keep is None else torch.where(keep, p * keep_scale, 0.0)
        out = torch.einsum("bhij,bjhd->bihd", dropped, v)
        ctx.save_for_backward(p, v, out.to(stored_dtype).to(out.dtype))
        ctx.keep, ctx.keep_scale = keep, keep_scale
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        p, v, out = ctx.saved_tensors
        dp, dropped = torch.einsum("bihd,bjhd->bhij", dout, v), p
        if ctx.keep is not None:
            dp, dropped = (torch.where(ctx.keep, x * ctx.keep_scale, 0.0) for x in (dp, p))
        # Off by one rounding of its terms: where dp and delta cancel, rounding is all that is left of ds, and
        # two sums that happen to take the same order would hide it.
        terms = dout * out
        delta = (terms.sum(-1) + torch.finfo(p.dtype).eps * terms.abs().sum(-1)).movedim(-1, -2)
        ds = p * (dp - (delta - dlse)[..., None])
        return ds, None, torch.einsum("bhij,bihd->bjhd", dropped, dout), None, None, None


def attention(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
              block_visible=None, keep=None, keep_scale=1.0, stored_dtype=None, attn_bias=None):
    """Returns out and lse in the dtype of q.

    block_visible: bool [1|B, 1|H, Sq, Sk], intersected with the causal mask and the window.
    attn_bias: broadcastable to [B, H, Sq, Sk], added to the scores in their dtype; -inf hides one.
    keep: bool [B, H, Sq, Sk], False where dropout removes a probability; the others are multiplied by
    keep_scale.
    stored_dtype: the backward is StoredSoftmax's, with out in this dtype, not the textbook's.
    """
    if q.shape[1] == 0 or k.shape[1] == 0:
        # Multiplied by the (empty) inputs so that autograd finds a path to each of them.
        nothing = q.sum() * 0 + k.sum() * 0 + v.sum() * 0
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)
        return q.new_zeros(*q.shape[:3], v.shape[3]) + nothing, lse + nothing
    visible = visible_keys(q.shape[1], k.shape[1], causal, window_size, q.device)[None, None]
    if block_visible is not None:
        visible = visible & block_visible
    if attn_bias is not None:
        visible = visible & (attn_bias != -math.inf)
    row_is_empty = ~visible.any(dim=-1, keepdim=True)
    s = scores(q, k, softmax_scale, softcap, alibi_slopes)
    if attn_bias is not None:
        s = s + attn_bias.to(s.dtype)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    if stored_dtype is not None:
        return StoredSoftmax.apply(s, visible, v, keep, keep_scale, stored_dtype)
    # An empty row is given finite scores here and its answer below: softmax of nothing but -inf is NaN, and
    # NaN multiplied by zero stays NaN.
    s = torch.where(visible, s, -math.inf)
    s = torch.where(row_is_empty, 0.0, s)
    p = torch.where(row_is_empty, 0.0, torch.softmax(s, dim=-1))
    lse = torch.where(row_is_empty[..., 0], -math.inf, torch.logsumexp(s, dim=-1))
    if keep is not None:
        p = torch.where(keep, p * keep_scale, 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes=None, keep=None, **features):
    """Each sequence on its own; rows past the last sequence give out = 0, lse = -inf.

    keep: bool [B, H, max_seqlen_q, max_seqlen_k]; alibi_slopes [H] or [B, H]; features: as attention() takes
    them.
    """
    outs, lses = [], []
    starts_q, starts_k = list(map(int, cu_seqlens_q)), list(map(int, cu_seqlens_k))
    for b in range(len(starts_q) - 1):
        rows_q = slice(starts_q[b], starts_q[b + 1])
        rows_k = slice(starts_k[b], starts_k[b + 1])
        seqlen_q, seqlen_k = rows_q.stop - rows_q.start, rows_k.stop - rows_k.start
        out, lse = attention(
            q[None, rows_q], k[None, rows_k], v[None, rows_k],
            alibi_slopes=alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b],
            keep=None if keep is None else keep[b : b + 1, :, :seqlen_q, :seqlen_k], **features)
        outs.append(out[0])
        lses.append(lse[0])
    tail = q.shape[0] - starts_q[-1]
    outs.append(q.new_zeros(tail, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], tail), -math.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)
