"""The operators behind the public functions, as PyTorch sees them: shapes for tracing and gradients.

``csrc/torch/library.cpp`` defines them (``torch.ops.flash_attn``) with schemas that share one list of
options::

    attention_forward(q, k, v, *options) -> (out, lse)
    attention_backward(dout, dlse or None, q, k, v, out, lse, *options) -> (dq, dk, dv)
    attention_backward_with_bias(...) -> (dq, dk, dv, dbias), dbias of the accumulation dtype
    attention_probabilities(q, k, v, *options) -> S_dmask
    plain_attention_forward, plain_attention_backward: the same with plain_options alone, for calls that
                     nobody traces
    pack_mask(mask, seqlen_q) -> (attn_mask, *lists): bits, and BlockSparseMask's lists of their blocks
    attention_cached(q, k, v, cu_seqlens_q, max_seqlen_q, cache_seqlens, cache_leftpad, cache_batch_idx,
                     block_table, alibi_slopes, softmax_scale, window_size_left, window_size_right, softcap,
                     num_splits) -> (out, lse)

    options = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, alibi_slopes, rng_state,
               key_block_counts, key_block_indices, query_block_counts, query_block_indices,
               block_size_q, block_size_k, dropout_p, softmax_scale, window_size_left, window_size_right,
               softcap, deterministic, attn_bias=None, attn_mask=None)
    plain_options = (softmax_scale, window_size_left, window_size_right, deterministic)

Dense tensors are [batch, seqlen, heads, head_dim]; with cu_seqlens they are packed, [total, heads, head_dim].
"""

import torch

try:
    from . import _C  # noqa: F401  (its initialisation registers the operators)
except ImportError as error:
    raise ImportError(
        f"flash_attn's compiled module does not load ({error}). In a source checkout install it first "
        "(pip install .) and start Python in another folder, where the checkout does not hide it."
    ) from error

from . import gradient_node


def _inside(overload):
    """What an overload calls, 0.3 us sooner; not for what torch.compile traces."""
    return getattr(overload, "_op", overload)


# The overloads: finding the only one takes 8 us a call.
forward = torch.ops.flash_attn.attention_forward.default
backward = torch.ops.flash_attn.attention_backward.default
plain_forward = _inside(torch.ops.flash_attn.plain_attention_forward.default)
plain_backward = _inside(torch.ops.flash_attn.plain_attention_backward.default)
backward_with_bias = torch.ops.flash_attn.attention_backward_with_bias.default
probabilities = torch.ops.flash_attn.attention_probabilities.default
pack_mask = torch.ops.flash_attn.pack_mask.default
cached = torch.ops.flash_attn.attention_cached.default

MASK_BLOCK = 128  # queries and keys
RNG_STATE, _BIAS = 5, 18  # among the options
_TENSOR_OPTIONS = (0, 1, 4, RNG_STATE, 6, 7, 8, 9, _BIAS, 19)


def scale_of(softmax_scale, q):
    """The factor on the scores: D ** -0.5 unless the caller has one."""
    return max(q.shape[-1], 1) ** -0.5 if softmax_scale is None else float(softmax_scale)


def accumulation_dtype(dtype):
    """dtype of lse and of all sums: float64 for float64 tensors, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.register_fake("flash_attn::attention_forward")
@torch.library.register_fake("flash_attn::plain_attention_forward")
@torch.library.register_fake("flash_attn::attention_cached")
def _(q, k, v, *args, **kwargs):
    rows, heads = q.shape[-3], q.shape[-2]
    lse_shape = (heads, rows) if q.dim() == 3 else (q.shape[0], heads, rows)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape, dtype=accumulation_dtype(q.dtype))


@torch.library.register_fake("flash_attn::attention_backward")
@torch.library.register_fake("flash_attn::plain_attention_backward")
def _(dout, dlse, q, k, v, *args, **kwargs):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


@torch.library.register_fake("flash_attn::attention_backward_with_bias")
def _(dout, dlse, q, k, v, out, lse, *options):
    bias = options[_BIAS]
    dbias = bias.new_empty(bias.shape, dtype=accumulation_dtype(q.dtype))
    return (*(tensor.new_empty(tensor.shape) for tensor in (q, k, v)), dbias)


@torch.library.register_fake("flash_attn::pack_mask")
def _(mask, seqlen_q):
    rows, columns = ((size + MASK_BLOCK - 1) // MASK_BLOCK for size in (seqlen_q, mask.shape[3]))
    words = columns * (MASK_BLOCK // 32)
    shapes = ((mask.shape[2], words), (rows,), (rows, columns), (columns,), (columns, rows))
    return tuple(mask.new_empty((*mask.shape[:2], *shape), dtype=torch.int32) for shape in shapes)


@torch.library.register_fake("flash_attn::attention_probabilities")
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **kwargs):
    if cu_seqlens_q is None:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    else:
        batch, seqlen_q, seqlen_k = cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k
    rows, columns = ((seqlen + 127) // 128 * 128 for seqlen in (seqlen_q, seqlen_k))
    return q.new_empty((batch, q.shape[-2], rows, columns))


class _Attention(torch.autograd.Function):
    """bias is among the options as well: here for its gradient. plain: options are plain_options."""

    @staticmethod
    def forward(ctx, q, k, v, bias, options, plain):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = (plain_forward if plain else forward)(q, k, v, *options)
        ctx.tensors = () if plain else [
            i for i in _TENSOR_OPTIONS if i < len(options) and options[i] is not None
        ]
        # In the order of gradient_node's operator: a checkpoint may come this way when it computes again.
        ctx.save_for_backward(k, q, v, lse, out, *[options[i] for i in ctx.tensors])
        ctx.options = [None if i in ctx.tensors else option for i, option in enumerate(options)]
        ctx.plain = plain
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        k, q, v, lse, out, *tensors = ctx.saved_tensors
        options = list(ctx.options)
        for i, tensor in zip(ctx.tensors, tensors, strict=True):
            options[i] = tensor
        if dout is None:  # the loss used lse alone
            dout = torch.zeros_like(out)
        wants_bias = ctx.needs_input_grad[3]
        operator = plain_backward if ctx.plain else backward_with_bias if wants_bias else backward
        arguments = (dout, dlse, q, k, v, out, lse, *options)
        if torch.is_grad_enabled():
            gradients = operator(*arguments)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                gradients = operator(*arguments)
        dbias = gradients[3].to(options[_BIAS].dtype) if wants_bias else None
        return (*gradients[:3], dbias, None, None)


def _forward_with_gradients(q, k, v, *options):
    bias = options[_BIAS] if len(options) > _BIAS else None
    needed = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    )
    if needed:
        return _Attention.apply(q, k, v, bias, options, False)
    with torch._C._AutoDispatchBelowAutograd():
        return forward(q, k, v, *options)


# torch.library.register_autograd does the same, and takes 100 us a call to look up defaults; there are none.
_library = torch.library.Library("flash_attn", "FRAGMENT")
_library.impl("attention_forward", _forward_with_gradients, "Autograd")


def attend(q, k, v, *options):
    """forward, without asking the dispatcher to call back for the gradients: 5 us less."""
    return (forward if torch.compiler.is_compiling() else _forward_with_gradients)(q, k, v, *options)


def attend_plainly(q, k, v, softmax_scale, left, right, deterministic, wants_lse):
    """The same without other options, which take 5 us more; not to be traced. Unless wants_lse, lse may be
    None."""
    needed = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if needed and not wants_lse and left == -1 and right <= 0:
        out = gradient_node.attend(q, k, v, softmax_scale, right == 0, deterministic)
        if out is not None:
            return out, None
    options = scale_of(softmax_scale, q), left, right, deterministic
    if needed:
        return _Attention.apply(q, k, v, None, options, True)
    with torch._C._AutoDispatchBelowAutograd():
        return plain_forward(q, k, v, *options)


def _no_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "flash_attn: the gradient of the gradient (double backward) is not implemented; use "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) with scaled_dot_product_attention for it"
    )


for _name in ("attention_backward", "attention_backward_with_bias", "plain_attention_backward"):
    torch.library.register_autograd(f"flash_attn::{_name}", _no_second_derivative)
