"""What the compiled module of flash_attn 2.8 exports, called by position: flash_attn_2_cuda's functions.

`import flash_attn_2_cuda` and `flash_attn.flash_attn_interface.flash_attn_gpu` lead here. Shapes are those of
raw_interface.py; `out`, `dq`, `dk` and `dv` are filled where they are given, and made where they are None.
TransformerEngine imports the top-level module to see whether flash_attn is there; xformers calls it.
"""

from .kv_cache import flash_attn_with_kvcache
from .raw_interface import _flash_attn_forward, _flash_attn_varlen_forward, backward_pass

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def _no_generator(gen):
    if gen is not None:
        raise NotImplementedError(
            "flash_attn: gen must be None; dropout draws from torch's default generator of the device "
            "(torch.manual_seed)"
        )


def _filled(out, result):
    if out is None:
        return result
    if out.shape != result.shape or out.dtype != result.dtype:
        raise RuntimeError(
            f"flash_attn: out is {out.dtype} {list(out.shape)}; it must be {result.dtype} "
            f"{list(result.shape)}, or None"
        )
    return out.copy_(result)


def fwd(
    q, k, v, out_, alibi_slopes_, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right,
    softcap, return_softmax, gen_,
):
    """-> [out, lse, S_dmask, rng_state]: raw_interface._flash_attn_forward."""
    _no_generator(gen_)
    out, *others = _flash_attn_forward(
        q, k, v, p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        alibi_slopes_, return_softmax,
    )
    return [_filled(out_, out), *others]


def varlen_fwd(
    q, k, v, out_, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k_, block_table_, alibi_slopes_,
    max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left,
    window_size_right, softcap, return_softmax, gen_,
):
    """-> [out, lse, S_dmask, rng_state]: raw_interface._flash_attn_varlen_forward."""
    _no_generator(gen_)
    out, *others = _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, is_causal,
        window_size_left, window_size_right, softcap, alibi_slopes_, return_softmax, block_table_, leftpad_k_,
        seqused_k, zero_tensors,
    )
    return [_filled(out_, out), *others]


def bwd(
    dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, alibi_slopes_, p_dropout, softmax_scale, is_causal,
    window_size_left, window_size_right, softcap, deterministic, gen_, rng_state=None,
):
    """-> [dq, dk, dv, softmax_d]: raw_interface._flash_attn_backward."""
    _no_generator(gen_)
    return list(backward_pass(
        dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, dropout_p=p_dropout, softmax_scale=softmax_scale,
        causal=is_causal, window_size_left=window_size_left, window_size_right=window_size_right,
        softcap=softcap, alibi_slopes=alibi_slopes_, deterministic=deterministic, rng_state=rng_state,
    ))


def varlen_bwd(
    dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, cu_seqlens_q, cu_seqlens_k, alibi_slopes_, max_seqlen_q,
    max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right,
    softcap, deterministic, gen_, rng_state=None,
):
    """-> [dq, dk, dv, softmax_d]: raw_interface._flash_attn_varlen_backward."""
    _no_generator(gen_)
    return list(backward_pass(
        dout, q, k, v, out, softmax_lse, dq_, dk_, dv_, dropout_p=p_dropout, softmax_scale=softmax_scale,
        causal=is_causal, window_size_left=window_size_left, window_size_right=window_size_right,
        softcap=softcap, alibi_slopes=alibi_slopes_, deterministic=deterministic, rng_state=rng_state,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    ))


def fwd_kvcache(
    q, kcache, vcache, k_, v_, seqlens_k_, rotary_cos_, rotary_sin_, cache_batch_idx_, leftpad_k_,
    block_table_, alibi_slopes_, out_, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
    is_rotary_interleaved, num_splits,
):
    """-> [out, lse]: flash_attn.flash_attn_with_kvcache, which see. k_ and v_ are appended to the caches."""
    out, lse = flash_attn_with_kvcache(
        q, kcache, vcache, k=k_, v=v_, rotary_cos=rotary_cos_, rotary_sin=rotary_sin_,
        cache_seqlens=seqlens_k_, cache_batch_idx=cache_batch_idx_, cache_leftpad=leftpad_k_,
        block_table=block_table_, softmax_scale=softmax_scale, causal=is_causal,
        window_size=(window_size_left, window_size_right), softcap=softcap,
        rotary_interleaved=is_rotary_interleaved, alibi_slopes=alibi_slopes_, num_splits=num_splits,
        return_softmax_lse=True,
    )
    return [_filled(out_, out), lse]
