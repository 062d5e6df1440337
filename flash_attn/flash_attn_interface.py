"""The public attention functions: flash_attn's interface, documented once and thin over the operators.

Shapes: B batch, Sq and Sk sequence lengths, H query heads, Hk key and value heads (Hk divides H; query head h
reads key head h // (H // Hk)), D head dim and Dv value head dim from 1 to 256, Tq and Tk packed totals.
Tensors are float32, bfloat16, float16 or float64 (on a GPU what its engines have kernels for: see explain),
all of one dtype, on one device, with any strides (a last dimension that is not contiguous is copied).
"""

from . import raw_module as flash_attn_gpu  # noqa: F401  (the private names: other projects' needs)
from .attention import attention
from .attention_mask import bias_for, mask_for
from .kv_cache import flash_attn_with_kvcache, paged_forward  # noqa: F401  (offered here, too)
from .raw_interface import (  # noqa: F401
    USE_TRITON_ROCM,
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
    maybe_contiguous,
    round_multiple,
)


def _unpacked(name, packed, count, dim):
    if packed.dim() != dim or packed.shape[-3] != count:
        layout = "batch, seqlen" if dim == 5 else "total"
        raise ValueError(
            f"flash_attn: {name} has shape {list(packed.shape)}; "
            f"it must be [{layout}, {count}, heads, head_dim]"
        )
    return packed.unbind(-3)


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
    *,
    attn_mask=None,
    attn_bias=None,
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
        attn_mask: bool, broadcastable to [B, H, Sq, Sk], True where a query sees a key; or an AttentionMask,
            made once for many calls. Beside causal and window_size; blocks of 128 x 128 that nobody sees are
            skipped, and those that are seen whole cost nothing.
        attn_bias: floating, broadcastable to [B, H, Sq, Sk], added to the scores (after softcap), -inf hides
            one. Used in q's dtype; its gradient is summed in float32, in a fixed order, over what it is
            broadcast along, without a [B, H, Sq, Sk] tensor.

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
    blocks = bits = None
    if attn_mask is not None:
        mask = mask_for(attn_mask, q.shape[1], k.shape[1])
        blocks, bits = mask.blocks, mask.bits
    if attn_bias is not None:
        attn_bias = bias_for(attn_bias, q.shape[1], k.shape[1], q.dtype)
    return attention(
        q, k, v, None, None, 0, 0, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, blocks, bits, attn_bias,
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
        block_table: int32 [B, pages of a sequence]: k and v are pages [pages, page_size, Hk, D] and [..., Dv]
            (see flash_attn_with_kvcache), and cu_seqlens_k says how many keys each sequence has. No
            gradients, no dropout.
        Everything else: see flash_attn_func, with each sequence's own lengths for Sq and Sk.

    Returns:
        out [Tq, H, Dv], or (out, lse [H, Tq], S_dmask [B, H, max_seqlen_q, max_seqlen_k] rounded up to 128).

    Raises:
        RuntimeError, ValueError: as flash_attn_func; also for offsets that decrease or pass the end.
        NotImplementedError: block_table is given with dropout or return_attn_probs.
    """
    if block_table is not None:
        if dropout_p > 0 or return_attn_probs:
            raise NotImplementedError(
                "flash_attn: block_table goes with neither dropout nor return_attn_probs"
            )
        out, _ = paged_forward(
            q, k, v, cu_seqlens_q, max_seqlen_q, cu_seqlens_k.diff(), block_table,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes,
        )
        return out
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
