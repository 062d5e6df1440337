"""What all public attention functions do once their tensors are unpacked: checks, defaults, random state, the
operators."""

import torch

from . import operators
from .operators import scale_of

_DEVICES = ("cpu", "cuda", "meta")


def window_of(window_size, causal):
    """(left, right) for the operators, -1 unbounded."""
    if type(window_size) is tuple and window_size == (-1, -1):  # in most calls
        return -1, 0 if causal else -1
    if isinstance(window_size, torch.Tensor):
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"flash_attn: window_size is {window_size!r}; it must be a pair of integers")
    left, right = (max(int(size), -1) for size in window_size)
    return left, 0 if causal else right


def check_tensors(q, k, v, /, **others):
    """Types and devices; what only the operators know, such as shapes, they check."""
    if type(q) is type(k) is type(v) is torch.Tensor and not others:
        # Of most calls all there is to look at: which GPU it is, the operators ask.
        if (q.is_cuda and k.is_cuda and v.is_cuda) or (q.is_cpu and k.is_cpu and v.is_cpu):
            return
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"flash_attn: {name} is {tensor!r}; it must be a tensor")
    if q.device.type not in _DEVICES:
        raise RuntimeError(
            f"flash_attn: q is on {q.device}, which no engine runs on (python -m flash_attn lists engines); "
            "move q, k and v to a CUDA GPU or to the CPU"
        )
    for name, tensor in (("k", k), ("v", v), *others.items()):
        if tensor is not None and tensor.device != q.device:
            raise RuntimeError(
                f"flash_attn: {name} is on {tensor.device} and q on {q.device}; they must be on one device"
            )


def new_rng_state(dropout_p, device):
    """int64 [2], (seed, offset), drawn from torch's generator of the device; anything without dropout."""
    if dropout_p > 0:
        return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
    return torch.empty(2, dtype=torch.int64, device=device)


def operator_options(
    q, *, dropout_p, softmax_scale, window_size_left, window_size_right, causal=False, softcap=0.0,
    alibi_slopes=None, rng_state=None, deterministic=False, cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=0, max_seqlen_k=0, mask=None, attn_bias=None, bits=None,
):
    """The options of the operators, in order: see operators.py. mask: a BlockSparseMask; bits: an
    AttentionMask's."""
    blocks = (None, None, None, None, 0, 0)
    if mask is not None:
        blocks = (
            mask.key_block_counts, mask.key_block_indices, mask.query_block_counts, mask.query_block_indices,
            *mask.block_size,
        )
    return (
        cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), alibi_slopes, rng_state, *blocks,
        float(dropout_p), scale_of(softmax_scale, q), window_size_left,
        0 if causal else window_size_right, float(softcap),
        bool(deterministic) or torch.are_deterministic_algorithms_enabled(), attn_bias, bits,
    )


def dropped_probabilities(q, k, v, dropout_p, options):
    """S_dmask (flash_attn_func says what it is); empty without dropout."""
    if dropout_p > 0:
        return operators.probabilities(q.detach(), k.detach(), v.detach(), *options)
    return q.new_empty(0)


def attend(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, mask=None, bits=None, attn_bias=None, wants_lse=True,
):
    """out, lse and, for dropped_probabilities, the operators' options; see attention. Unless wants_lse, lse
    may be None, and a call may take less time."""
    left, right = window_of(window_size, causal)
    plain = cu_seqlens_q is cu_seqlens_k is alibi_slopes is mask is bits is attn_bias is None
    if plain and dropout_p == softcap == 0 and not torch.compiler.is_compiling():
        check_tensors(q, k, v)
        deterministic = bool(deterministic) or torch.are_deterministic_algorithms_enabled()
        return *operators.attend_plainly(
            q, k, v, softmax_scale, left, right, deterministic, wants_lse
        ), None
    check_tensors(
        q, k, v, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        attn_bias=attn_bias, attn_mask=bits,
    )
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "flash_attn: alibi_slopes requires grad, but has no gradient here; pass alibi_slopes.detach()"
        )
    options = operator_options(
        q, dropout_p=dropout_p, softmax_scale=softmax_scale, window_size_left=left, window_size_right=right,
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, mask=mask,
        rng_state=new_rng_state(dropout_p, q.device) if dropout_p > 0 else None, attn_bias=attn_bias,
        bits=bits,
    )
    return *operators.attend(q, k, v, *options), options


def attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size, softcap, alibi_slopes, deterministic, return_attn_probs, mask=None, bits=None,
    attn_bias=None,
):
    """out, or (out, lse, S_dmask); see flash_attn_func. mask: a BlockSparseMask; bits: an AttentionMask's."""
    out, lse, options = attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, mask, bits, attn_bias, return_attn_probs,
    )
    if not return_attn_probs:
        return out
    return out, lse, dropped_probabilities(q, k, v, dropout_p, options)
