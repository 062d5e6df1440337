"""The private functions of flash_attn 2.8 that other projects call: one pass at a time, no defaults hidden.

Ring and context parallelism (ring-flash-attn, TransformerEngine, picotron, diffusers) computes attention in
pieces: a forward for each part of the keys, whose outputs are merged through lse, and for each part a
backward that is given out and lse of the whole. Names, order and defaults of the parameters are flash_attn
2.8's; these are plain functions, because callers read the defaults through inspect.getfullargspec.

Where this differs from flash_attn 2.8:

- lse of a query that sees no key is -inf, not +inf, as everywhere in this library. It is what merging needs:
  a part without keys gets the weight exp(-inf) = 0, in the running update out - sigmoid(lse_part - lse) *
  (out - out_part) as in log-sum-exp. With +inf it would get all the weight, and its zeros replace the
  result. A merge that begins with a part without keys needs care, with either sign.
- The forward functions are differentiable, instead of silently constant. Inside an autograd function, where
  they usually are called, nothing is recorded.
- float32 and float64 and any head dim up to 256 are taken, on the CPU too; nothing is padded.
- softmax_d (rowsum of dout * out, float32) has lse's shape. There its rows are rounded up to kernel tiles.
- zero_tensors is ignored: rows that belong to no sequence are always zero.
"""

from . import operators
from .attention import check_tensors, dropped_probabilities, new_rng_state, operator_options
from .kv_cache import paged_forward

USE_TRITON_ROCM = False  # there: the kernels for AMD GPUs


def maybe_contiguous(x):
    """x, copied if its last dimension is not contiguous; None stays None."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x, m):
    """The least multiple of m that is at least x."""
    return (x + m - 1) // m * m


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """How many keys of S_dmask share one maximum: all, because here S_dmask is relative to the row's own.
    Above every length, so that splitting S_dmask by it gives one part."""
    return 2**30


def forward_pass(q, k, v, return_softmax, *, dropout_p, **options):
    """-> (out, lse, S_dmask, rng_state); options as operator_options takes them, without rng_state."""
    check_tensors(q, k, v)
    rng_state = new_rng_state(dropout_p, q.device)
    options = operator_options(q, dropout_p=dropout_p, rng_state=rng_state, **options)
    out, lse = operators.forward(q, k, v, *options)
    s_dmask = dropped_probabilities(q, k, v, dropout_p if return_softmax else 0.0, options)
    return out, lse, s_dmask, rng_state


def backward_pass(dout, q, k, v, out, lse, dq, dk, dv, **options):
    """-> (dq, dk, dv, softmax_d): the given tensors, filled, and new ones for those that are None."""
    for name, gradient, tensor in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if gradient is not None and (gradient.shape != tensor.shape or gradient.dtype != tensor.dtype):
            raise RuntimeError(
                f"flash_attn: {name} is {gradient.dtype} {list(gradient.shape)}; it must be {tensor.dtype} "
                f"{list(tensor.shape)} as {name[1]} is, or None"
            )
    computed = operators.backward(dout, None, q, k, v, out, lse, *operator_options(q, **options))
    dq, dk, dv = (
        new if given is None else given.copy_(new)
        for given, new in zip((dq, dk, dv), computed, strict=True)
    )
    # In place: of a long sequence each tensor counts, and nobody is known to read the result.
    products = dout.to(operators.accumulation_dtype(q.dtype), copy=True).mul_(out)
    return dq, dk, dv, products.sum(-1).transpose(-1, -2).contiguous()


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    """One forward pass; flash_attn_func says what the arguments mean.

    Args:
        q, k, v: [B, Sq, H, D], [B, Sk, Hk, D], [B, Sk, Hk, Dv].
        softmax_scale: float; None: D ** -0.5.
        window_size_left, window_size_right: int, negative: unbounded.
        return_softmax: whether S_dmask is wanted; it exists with dropout only.

    Returns:
        out [B, Sq, H, Dv]; lse float32 [B, H, Sq]; S_dmask [B, H, Sq, Sk] rounded up to 128, or empty;
        rng_state int64 [2], for the backward pass, undefined without dropout.

    Raises:
        RuntimeError: as flash_attn_func.
    """
    return forward_pass(
        q, k, v, return_softmax, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size_left=window_size_left, window_size_right=window_size_right, softcap=softcap,
        alibi_slopes=alibi_slopes,
    )


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    """_flash_attn_forward over packed sequences; flash_attn_varlen_func says what the arguments mean.

    Args:
        q, k, v: [Tq, H, D], [Tk, Hk, D], [Tk, Hk, Dv]; with block_table k and v are pages.
        seqused_k: int32 [B], lengths in place of those that cu_seqlens_k gives. With block_table only.
        leftpad_k: not implemented; None.

    Returns:
        out [Tq, H, Dv]; lse float32 [H, Tq]; S_dmask [B, H, max_seqlen_q, max_seqlen_k] rounded up to 128, or
        empty; rng_state int64 [2].

    Raises:
        RuntimeError: as flash_attn_varlen_func.
        NotImplementedError: leftpad_k is given, seqused_k without block_table, or block_table with dropout.
    """
    if leftpad_k is not None:
        raise NotImplementedError("flash_attn: leftpad_k is not implemented for packed sequences; pass None")
    if block_table is not None:
        if dropout_p > 0:
            raise NotImplementedError("flash_attn: block_table does not go with dropout")
        out, lse = paged_forward(
            q, k, v, cu_seqlens_q, max_seqlen_q, cu_seqlens_k.diff() if seqused_k is None else seqused_k,
            block_table, softmax_scale=softmax_scale, causal=causal,
            window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
        )
        return out, lse, q.new_empty(0), new_rng_state(0.0, q.device)
    if seqused_k is not None:
        raise NotImplementedError(
            "flash_attn: seqused_k is implemented for a paged cache (block_table) only; pass None, and keys "
            "packed without gaps"
        )
    return forward_pass(
        q, k, v, return_softmax, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size_left=window_size_left, window_size_right=window_size_right, softcap=softcap,
        alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    """One backward pass. Given out and lse over more keys than k holds, it computes the gradients of k and v,
    and this part's share of q's: the shares of all parts add up.

    Args:
        dout, out: [B, Sq, H, Dv].
        q, k, v: as in the forward pass.
        softmax_lse: float32 [B, H, Sq].
        dq, dk, dv: filled with the gradients; shapes and dtypes of q, k and v, any strides. None: nobody
            gets that one.
        rng_state: int64 [2] of the forward pass; needed with dropout.
        Everything else: as in the forward pass.

    Returns:
        softmax_d, float32 [B, H, Sq]: the sum of dout * out over the head dim.

    Raises:
        RuntimeError: a shape, dtype, device or value is wrong; rng_state is missing.
    """
    *_, softmax_d = backward_pass(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p=dropout_p, softmax_scale=softmax_scale,
        causal=causal, window_size_left=window_size_left, window_size_right=window_size_right,
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic, rng_state=rng_state,
    )
    return softmax_d


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    """_flash_attn_backward over packed sequences: rows [T, ...] as in _flash_attn_varlen_forward, softmax_lse
    and the returned softmax_d float32 [H, Tq]."""
    *_, softmax_d = backward_pass(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p=dropout_p, softmax_scale=softmax_scale,
        causal=causal, window_size_left=window_size_left, window_size_right=window_size_right,
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic, rng_state=rng_state,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    return softmax_d


# There these are the same functions as torch.compile sees them. It sees through ours.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
