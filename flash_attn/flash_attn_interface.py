"""The public attention functions: flash_attn's interface, documented once and thin over the operators.

Shapes: B batch, Sq and Sk sequence lengths, H query heads, Hk key and value heads (Hk divides H; query head h
reads key head h // (H // Hk)), D head dim and Dv value head dim from 1 to 256, Tq and Tk packed totals.
Tensors are float32, bfloat16, float16 or float64 (on a GPU what its engines have kernels for: see explain),
all of one dtype, on one device, with any strides (a last dimension that is not contiguous is copied).
"""

import torch

from . import operators


def _window(window_size, causal):
    if isinstance(window_size, torch.Tensor):
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"flash_attn: window_size is {window_size!r}; it must be a pair of integers")
    left, right = (max(int(size), -1) for size in window_size)
    return left, 0 if causal else right


def _check_tensors(q, k, v, **others):
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"flash_attn: {name} is {tensor!r}; it must be a tensor")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise RuntimeError(
            f"flash_attn: q is on {q.device}, which no engine runs on (python -m flash_attn lists engines); "
            "move q, k and v to a CUDA GPU or to the CPU"
        )
    for name, tensor in (("k", k), ("v", v), *others.items()):
        if tensor is not None and tensor.device != q.device:
            raise RuntimeError(
                f"flash_attn: {name} is on {tensor.device} and q on {q.device}; they must be on one device"
            )


def attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size, softcap, alibi_slopes, deterministic, return_attn_probs, mask=None,
):
    """What all public functions do once their tensors are unpacked: defaults, random state, operators."""
    _check_tensors(
        q, k, v, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
    )
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "flash_attn: alibi_slopes requires grad, but has no gradient here; pass alibi_slopes.detach()"
        )
    if softmax_scale is None:
        softmax_scale = max(q.shape[-1], 1) ** -0.5
    left, right = _window(window_size, causal)
    rng_state = None
    if dropout_p > 0:
        rng_state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    blocks, block_size = (None,) * 4, (0, 0)
    if mask is not None:
        blocks = (
            mask.key_block_counts, mask.key_block_indices, mask.query_block_counts, mask.query_block_indices,
        )
        block_size = mask.block_size
    options = (
        cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), alibi_slopes, rng_state, *blocks,
        *block_size, float(dropout_p), float(softmax_scale), left, right, float(softcap),
        bool(deterministic) or torch.are_deterministic_algorithms_enabled(),
    )
    out, lse = operators.forward(q, k, v, *options)
    if not return_attn_probs:
        return out
    if dropout_p > 0:
        s_dmask = operators.probabilities(q.detach(), k.detach(), v.detach(), *options)
    else:
        s_dmask = q.new_empty(0)
    return out, lse, s_dmask


def _unpacked(name, packed, count, dim):
    if packed.dim() != dim or packed.shape[-3] != count:
        layout = "batch, seqlen" if dim == 5 else "total"
        raise ValueError(
            f"flash_attn: {name} has shape {list(packed.shape)}; "
            f"it must be [{layout}, {count}, heads, head_dim]"
        )
    return packed.unbind(-3)


def _no_block_table(block_table):
    if block_table is not None:
        raise NotImplementedError(
            "flash_attn: block_table (a paged key and value cache) is not implemented yet; pass None"
        )


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Exact attention, softmax(q k^T * softmax_scale) v, without ever storing the score matrix (arXiv
    2205.14135).

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hk, D].
        v: [B, Sk, Hk, Dv].
        dropout_p: probability of dropping an attention weight, in [0, 1), rounded to a multiple of 2^-16. The
            random bits depend on the state drawn from torch's generator of q's device and on the weight's
            position alone.
        softmax_scale: factor on q k^T; None: D ** -0.5.
        causal: query i sees key j only if j <= i + Sk - Sq (bottom-right alignment: the last query sees all
            keys).
        window_size: (left, right); query i sees keys j with i + Sk - Sq - left <= j <= i + Sk - Sq + right.
            -1 (or any negative number) is unbounded. causal sets right to 0.
        softcap: scores become softcap * tanh(score / softcap); 0: off. Not together with dropout.
        alibi_slopes: float32 [H] or [B, H]; scores get -slope * |i + Sk - Sq - j| (ALiBi, arXiv 2108.12409).
            Not differentiable.
        deterministic: make the backward bitwise repeatable, as torch.use_deterministic_algorithms does too.
            On the CPU it always is, on a GPU all but q's gradient. On a GPU it also keeps a row's bits
            independent of the rest of the batch: keys are not shared out over blocks to fill the device.
        return_attn_probs: also return lse and S_dmask.

    Returns: out [B, Sq, H, Dv], contiguous, in q's dtype. With return_attn_probs (out, lse, S_dmask): lse,
        float32 (float64 for float64 tensors) [B, H, Sq], is the natural logarithm of the row's summed
        exponentials before dropout, and differentiable. S_dmask is for tests: without dropout an empty
        tensor, with dropout [B, H, Sq, Sk] rounded up to 128, exp(score - the row's maximum), negative where
        dropped.

        A query that sees no key gives out = 0, lse = -inf and no gradient. Nothing behind a mask matters, NaN
        or not.

    Raises:
        RuntimeError, ValueError: an argument's shape, dtype, device or value is wrong; the message says
        which, what it is, and what it must be.

    Examples:
        >>> q, k, v = (torch.randn(2, 128, 4, 64) for _ in range(3))
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 128, 4, 64])
    """
    return attention(
        q, k, v, None, None, 0, 0, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash_attn_func with k and v in one tensor kv [B, Sk, 2, Hk, D], whose gradient is one tensor too."""
    k, v = _unpacked("kv", kv, 2, 5)
    return attention(
        q, k, v, None, None, 0, 0, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash_attn_func with q, k and v in one tensor qkv [B, S, 3, H, D], whose gradient is one tensor too."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return attention(
        q, k, v, None, None, 0, 0, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """flash_attn_func over sequences of different lengths packed one after the other.

    Args:
        q: [Tq, H, D].
        k: [Tk, Hk, D].
        v: [Tk, Hk, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 (or int64) [B + 1], offsets of the sequences: 0, then never
            decreasing. A sequence may be empty on either side. Rows past the last offset belong to nobody:
            out and gradients are 0.
        max_seqlen_q, max_seqlen_k: int or 0-dimensional tensor, at least the longest sequence. On a GPU these
            and the offsets are taken as they are: checking them would wait for the GPU.
        block_table: not implemented yet; None.
        Everything else: see flash_attn_func, with each sequence's own lengths for Sq and Sk.

    Returns:
        out [Tq, H, Dv], or (out, lse [H, Tq], S_dmask [B, H, max_seqlen_q, max_seqlen_k] rounded up to 128).

    Raises:
        RuntimeError, ValueError: as flash_attn_func; also for offsets that decrease or pass the end.
        NotImplementedError: block_table is given.
    """
    _no_block_table(block_table)
    return attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash_attn_varlen_func with k and v in one tensor kv [Tk, 2, Hk, D]."""
    k, v = _unpacked("kv", kv, 2, 4)
    return attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """flash_attn_varlen_func with q, k and v in one tensor qkv [T, 3, H, D]."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return attention(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )
