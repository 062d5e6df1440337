"""torch's scaled_dot_product_attention and varlen_attn with this library's kernels, on CUDA.

    import flash_attn.sdpa
    flash_attn.sdpa.activate()      # from here on, and
    flash_attn.sdpa.deactivate()    # until here

puts this library where torch has its own FlashAttention: scaled_dot_product_attention where torch chooses the
flash backend, torch.nn.attention.varlen.varlen_attn, nested tensors, and the gradients of all. Importing this
module activates nothing; it registers the name "flash_attn", so that torch's own functions do the same:

    torch.nn.attention.activate_flash_attention_impl("flash_attn")
    torch.nn.attention.restore_flash_attention_impl()               # torch 2.11 and later

Whether torch takes the flash backend at all stays its decision: half precision, no mask but is_causal, equal
head dims up to 256. And on Hopper and Blackwell torch prefers cuDNN to flash. torch's activation leaves that
so, and then little reaches this library outside sdpa_kernel(SDPBackend.FLASH_ATTENTION). So activate() also
turns cuDNN's attention off (torch.backends.cuda.enable_cudnn_sdp). A priority order would not do: torch
overwrites it in its first call, and varlen_attn has one of its own. What flash can't take then goes to
torch's memory-efficient or math kernels. deactivate(), and torch's restoring function, turn cuDNN's attention
on again if activate() turned it off.

Code that torch.compile compiled keeps the backend that it chose, and calls what is active when it runs.

Dropout is this library's: its random state is drawn from torch's generator and handed to torch as rng_state,
and the same seed gives the same mask in every layout. return_debug_mask raises. lse of a query that sees no
key is -inf.
"""

import warnings
from dataclasses import dataclass

import torch

from . import _C, operators
from .attention import new_rng_state, operator_options
from .kv_cache import paged_forward

NAME = "flash_attn"


def _check_forward(query, key, value, return_debug_mask, alibi_slopes=None):
    if return_debug_mask:
        raise RuntimeError(
            "flash_attn: return_debug_mask is not supported in torch's attention; for S_dmask call "
            "flash_attn_func with return_attn_probs=True"
        )
    needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
    if alibi_slopes is not None and needs_gradient and torch.is_grad_enabled():
        raise RuntimeError(
            "flash_attn: torch's attention does not hand alibi_slopes to the backward, whose gradients would "
            "be wrong; call flash_attn_func or flash_attn_varlen_func, or use torch.no_grad()"
        )


def _options(query, dropout_p, is_causal, scale, window_size_left=None, window_size_right=None, **others):
    return operator_options(
        query,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=is_causal,
        window_size_left=-1 if window_size_left is None else window_size_left,
        window_size_right=-1 if window_size_right is None else window_size_right,
        **others,
    )


def _auxiliary(query, rng_state):
    """rng_state uint64 [2], unused uint64 [], debug mask [0]."""
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return rng_state.view(torch.uint64), unused, query.new_empty(0)


def _laid_out_like(result, model):
    """result with the strides of torch.empty_like(model), which torch.compile counts on; maybe a copy."""
    if result.stride() == model.stride() or result.shape != model.shape:
        return result
    strides = torch.empty_like(model, device="meta").stride()
    if all(size == 1 or a == b for size, a, b in zip(result.shape, result.stride(), strides)):
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def _folds(query, key, value):
    """Whether heads can count as batch: the operators' results [B * H, S, 1, D] then lie as torch wants them,
    and no tensor is copied. Dropout depends on b * H + h alone, so it is the same."""
    return query.shape[1] == key.shape[1] and all(x.is_contiguous() for x in (query, key, value))


def _to_rows(tensor, folds):
    """[B, H, S, D] -> [B, S, H, D], or [B * H, S, 1, D]."""
    if folds:
        return tensor.reshape(-1, tensor.shape[2], 1, tensor.shape[3])
    return tensor.transpose(1, 2)


def _from_rows(rows, model, folds):
    """[B, S, H, D] or [B * H, S, 1, D] -> [B, H, S, D], laid out like model [B, H, S, any]."""
    if folds:
        return rows.view(*model.shape[:3], rows.shape[-1])
    return _laid_out_like(rows.transpose(1, 2), model)


def sdpa_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None,
):
    """aten::_scaled_dot_product_flash_attention.

    Args:
        query, key, value: [B, H, Sq, D], [B, Hk, Sk, D], [B, Hk, Sk, Dv]. Without a copy of out in any layout
            that leaves rows [B, S, H, D] contiguous, and in contiguous tensors if Hk == H.
        is_causal: bottom-right aligned, as everywhere; torch only asks for it with Sq == Sk.

    Returns:
        out [B, H, Sq, Dv], lse float32 [B, H, Sq], None, None, Sq, Sk, rng_state uint64 [2], unused, empty.
    """
    _check_forward(query, key, value, return_debug_mask)
    folds = _folds(query, key, value)
    rng_state = new_rng_state(dropout_p, query.device)
    options = _options(query, dropout_p, is_causal, scale, rng_state=rng_state)
    out, lse = operators.forward(*(_to_rows(x, folds) for x in (query, key, value)), *options)
    return (
        _from_rows(out, query, folds), lse.view(query.shape[:3]), None, None, query.shape[2], key.shape[2],
        *_auxiliary(query, rng_state),
    )


def sdpa_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):
    """aten::_scaled_dot_product_flash_attention_backward -> gradients of query, key and value, laid out like
    them."""
    folds = _folds(query, key, value)
    options = _options(query, dropout_p, is_causal, scale, rng_state=philox_seed.view(torch.int64))
    dout, *inputs, out = (_to_rows(x, folds) for x in (grad_out, query, key, value, out))
    lse = logsumexp.reshape(-1, 1, logsumexp.shape[2]) if folds else logsumexp
    gradients = operators.backward(dout, None, *inputs, out, lse, *options)
    return tuple(_from_rows(x, model, folds) for x, model in zip(gradients, (query, key, value)))


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
    block_table=None, num_splits=None,
):
    """aten::_flash_attention_forward.

    Args:
        query, key, value: [B, S, H, D], or packed [T, H, D] with cum_seq_q and cum_seq_k int32 [B + 1]; with
            block_table int32 [B, pages of a sequence] key and value are pages [pages, page_size, Hk, D].
        seqused_k: int32 [B], lengths of the paged sequences. Without block_table not supported.
        num_splits: 1: a row's bits do not depend on the rest of the batch. Anything else: what is fastest.

    Returns:
        out, lse float32 [B, H, Sq] or packed [H, Tq], rng_state uint64 [2], unused, empty.

    Raises:
        NotImplementedError: seqused_k without block_table, or the reverse.
    """
    _check_forward(query, key, value, return_debug_mask, alibi_slopes)
    if (seqused_k is None) != (block_table is None):
        raise NotImplementedError(
            "flash_attn: seqused_k and block_table are supported together only, for a paged cache; for a "
            "contiguous one call flash_attn_with_kvcache"
        )
    rng_state = new_rng_state(dropout_p, query.device)
    options = _options(
        query, dropout_p, is_causal, scale, window_size_left, window_size_right, alibi_slopes=alibi_slopes,
        rng_state=rng_state, deterministic=num_splits == 1, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k,
        max_seqlen_q=max_q, max_seqlen_k=max_k,
    )
    if block_table is None:
        out, lse = operators.forward(query, key, value, *options)
    else:
        out, lse = paged_forward(
            query, key, value, cum_seq_q, max_q, seqused_k, block_table, softmax_scale=scale,
            causal=is_causal, alibi_slopes=alibi_slopes, num_splits=num_splits or 0,
            window_size=tuple(-1 if x is None else x for x in (window_size_left, window_size_right)),
        )
    return _laid_out_like(out, query), lse, *_auxiliary(query, rng_state)


def flash_forward_into(out, query, key, value, *arguments, **keywords):
    """aten::_flash_attention_forward_no_dropout_inplace: flash_forward into out -> lse."""
    result, lse, *_ = flash_forward(query, key, value, *arguments, **keywords)
    out.copy_(result)
    return lse


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):
    """aten::_flash_attention_backward -> gradients of query, key and value, laid out like them."""
    options = _options(
        query, dropout_p, is_causal, scale, window_size_left, window_size_right,
        rng_state=rng_state.view(torch.int64), cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k,
        max_seqlen_q=max_q, max_seqlen_k=max_k,
    )
    gradients = operators.backward(grad_out, None, query, key, value, out, logsumexp, *options)
    return tuple(_laid_out_like(x, model) for x, model in zip(gradients, (query, key, value)))


KERNELS = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,  # after torch 2.11
    "_flash_attention_backward": flash_backward,
}


def register_kernels(dispatch_key):
    """-> the Library that holds KERNELS at this key. Without references to it torch's own are back."""
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    with warnings.catch_warnings():
        # In torch 2.11 replacing a kernel warns, which here is the purpose.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, kernel in KERNELS.items():
            if hasattr(torch.ops.aten, name):
                library.impl(name, kernel, dispatch_key)
    return library


@dataclass
class _Handle:
    """What torch's registry keeps while we are active, and removes."""

    library: torch.library.Library | None
    turned_cudnn_off: bool = False

    def remove(self):
        self.library = None
        if self.turned_cudnn_off:
            torch.backends.cuda.enable_cudnn_sdp(True)
            self.turned_cudnn_off = False


_handle = None  # the last one


def _register():
    global _handle
    if all(engine["name"] == "cpu" for engine in _C.engines()):
        raise RuntimeError(
            "flash_attn: this build has no GPU engine (python -m flash_attn lists engines), so it can't take "
            "the place of torch's attention on CUDA; install one built with FLASH_ATTN_CUDA_ARCHS"
        )
    _handle = _Handle(register_kernels("CUDA"))
    return _handle


def activate():
    """torch's flash backend is this library from now on, for the whole process, and cuDNN's attention is off.

    Twice is as good as once. Another active implementation (FA3, FA4) is replaced.

    Raises:
        RuntimeError: this build has no GPU engine.
    """
    deactivate()  # torch 2.10 does not register again what it takes for active
    torch.nn.attention.activate_flash_attention_impl(NAME)
    if torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        _handle.turned_cudnn_off = True


def deactivate():
    """Undoes activate(), or torch's activation of "flash_attn": torch's own kernels again, and cuDNN's
    attention on if activate() turned it off. Does nothing where "flash_attn" is not active."""
    if torch.nn.attention.current_flash_attention_impl() != NAME:
        return
    if hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        torch.nn.attention.restore_flash_attention_impl()
        return
    # torch 2.10 can activate but not restore.
    registry = torch.nn.attention._registry
    registry._FLASH_ATTENTION_HANDLES.pop(NAME).remove()
    registry._FLASH_ATTENTION_ACTIVE = None


torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_register)
