"""LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467) with what stands before them in a transformer.

    total = dropout(x * rowscale) + dropout(x1) + residual
    out = norm(total) * weight + bias,  out1 = norm(total) * weight1 + bias1

Sums and statistics are float32 (float64 for float64 tensors) whatever the tensors' dtypes: total is rounded
only where it is returned as the new residual.
"""

import torch
import torch.nn.functional as F

__all__ = [
    "RMSNorm",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layer_norm_ref",
    "rms_norm_fn",
    "rms_norm_ref",
]


def _check(x, weight, bias, residual, x1, weight1, bias1, rowscale):
    features = x.shape[-1:]
    for name, parameter in (("weight", weight), ("bias", bias), ("weight1", weight1), ("bias1", bias1)):
        if parameter is not None and parameter.shape != features:
            raise ValueError(
                f"flash_attn: {name} must be {list(features)}, the last dimension of x {list(x.shape)}; got "
                f"{list(parameter.shape)}"
            )
    for name, tensor in (("residual", residual), ("x1", x1)):
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(
                f"flash_attn: {name} must have the shape of x, {list(x.shape)}; got {list(tensor.shape)}"
            )
    if rowscale is not None and rowscale.shape != x.shape[:-1]:
        raise ValueError(
            f"flash_attn: rowscale must be {list(x.shape[:-1])}, one a row of x; got {list(rowscale.shape)}"
        )
    if weight1 is None and bias1 is not None:
        raise ValueError("flash_attn: bias1 is given without weight1; both make the second output")


def _norm(total, weight, bias, eps, zero_centered_weight, is_rms_norm):
    weight = None if weight is None else weight.to(total.dtype)
    if weight is not None and zero_centered_weight:
        weight = weight + 1.0
    bias = None if bias is None else bias.to(total.dtype)
    if not is_rms_norm:
        return F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    out = F.rms_norm(total, total.shape[-1:], weight, eps)
    return out if bias is None else out + bias


def _dropped(x, mask, dropout_p):
    """mask True keeps; None keeps all."""
    return x if mask is None else torch.where(mask, x / (1.0 - dropout_p), 0)


def _total(x, residual, x1, rowscale, dropout_p, mask, mask1):
    total = x if rowscale is None else x * rowscale[..., None]
    total = _dropped(total, mask, dropout_p)
    if x1 is not None:
        total = total + _dropped(x1, mask1, dropout_p)
    return total if residual is None else total + residual


def _stored(value, dtype, buffer):
    """value in dtype, written into the caller's buffer if there is one."""
    return value.to(dtype) if buffer is None else buffer.copy_(value)


def layer_norm_fn(
    x,
    weight,
    bias,
    residual=None,
    x1=None,
    weight1=None,
    bias1=None,
    eps=1e-6,
    dropout_p=0.0,
    rowscale=None,
    prenorm=False,
    residual_in_fp32=False,
    zero_centered_weight=False,
    is_rms_norm=False,
    return_dropout_mask=False,
    out_dtype=None,
    out=None,
    residual_out=None,
):
    """Dropout, residual sum and LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) over the last
    dimension; differentiable in all tensors.

    Arguments:
        x: [..., features], any floating dtype.
        weight, bias: [features], or None.
        residual: None, or [..., features], added before the norm, in any floating dtype.
        x1: None, or [..., features]: a second input, dropped out on its own, added before the norm.
        weight1, bias1: None, or [features]: parameters of a second output.
        eps: added to the variance (mean square).
        dropout_p: probability of dropping an element of x and of x1, in [0, 1); the others grow by
            1 / (1 - dropout_p).
        rowscale: None, or [...]: a factor on each row of x, not of x1, before dropout.
        prenorm: also return the sum that was normalised, the next layer's residual.
        residual_in_fp32: that sum in float32 where no residual says its dtype.
        zero_centered_weight: weights are stored less 1.
        is_rms_norm: divide by the root mean square, without taking off the mean.
        return_dropout_mask: also return the masks.
        out_dtype: dtype of the outputs; None: that of x.
        out, residual_out: None, or buffers of x's shape that take the first output and the sum.

    Returns:
        out [..., features], then, as far as asked for: out1 (with weight1), the sum (prenorm; in residual's
        dtype, else float32 with residual_in_fp32, else x's), and with return_dropout_mask always two masks of
        x and x1, bool [..., features], True where kept, None where nothing was dropped. One thing alone comes
        without a tuple.

    Raises:
        ValueError: a shape does not match that of x, dropout_p is not in [0, 1), or bias1 comes without
            weight1.
    """
    _check(x, weight, bias, residual, x1, weight1, bias1, rowscale)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"flash_attn: dropout_p is {dropout_p}; it must be in [0, 1)")
    dtype = torch.promote_types(x.dtype, torch.float32)
    mask = mask1 = None
    if dropout_p > 0.0:
        mask = torch.rand(x.shape, device=x.device) >= dropout_p
        mask1 = None if x1 is None else torch.rand(x.shape, device=x.device) >= dropout_p
    total = _total(x.to(dtype), residual, x1, rowscale, dropout_p, mask, mask1).to(dtype)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    results = [_stored(_norm(total, weight, bias, eps, zero_centered_weight, is_rms_norm), out_dtype, out)]
    if weight1 is not None:
        results.append(_norm(total, weight1, bias1, eps, zero_centered_weight, is_rms_norm).to(out_dtype))
    if prenorm or residual_out is not None:
        residual_dtype = torch.float32 if residual_in_fp32 else x.dtype
        stored = _stored(total, residual_dtype if residual is None else residual.dtype, residual_out)
        results += [stored] if prenorm else []
    if return_dropout_mask:
        results += [mask, mask1]
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x,
    weight,
    bias,
    residual=None,
    x1=None,
    weight1=None,
    bias1=None,
    eps=1e-6,
    dropout_p=0.0,
    rowscale=None,
    prenorm=False,
    residual_in_fp32=False,
    zero_centered_weight=False,
    return_dropout_mask=False,
    out_dtype=None,
    out=None,
    residual_out=None,
):
    """layer_norm_fn with is_rms_norm: arguments, results and errors are its (arXiv 1910.07467)."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, is_rms_norm=True, return_dropout_mask=return_dropout_mask, out_dtype=out_dtype,
        out=out, residual_out=residual_out,
    )


def layer_norm_linear_fn(
    x,
    norm_weight,
    norm_bias,
    linear_weight,
    linear_bias,
    residual=None,
    eps=1e-6,
    prenorm=False,
    residual_in_fp32=False,
    is_rms_norm=False,
):
    """layer_norm_fn, then a linear layer.

    Arguments:
        linear_weight: [out_features, features].
        linear_bias: [out_features] or None.
        The others: as in layer_norm_fn.

    Returns:
        [..., out_features], in x's dtype (under autocast, its dtype); with prenorm also the sum that was
        normalised.

    Raises:
        ValueError: as layer_norm_fn.
    """
    result = layer_norm_fn(
        x, norm_weight, norm_bias, residual, eps=eps, prenorm=prenorm, residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )
    normed, *total = result if prenorm else (result,)
    linear_bias = None if linear_bias is None else linear_bias.to(normed.dtype)
    out = F.linear(normed, linear_weight.to(normed.dtype), linear_bias)
    return (out, *total) if prenorm else out


def _reference(
    x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, zero_centered_weight,
    dropout_mask, dropout_mask1, upcast, is_rms_norm,
):
    """Every operation in the tensors' own dtypes, or all in float32 if upcast."""
    tensors = (x, weight, bias, residual, x1, weight1, bias1, rowscale)
    if upcast:
        dtype = torch.promote_types(x.dtype, torch.float32)
        tensors = [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]
    wide_x, weight, bias, residual, x1, weight1, bias1, rowscale = tensors
    total = _total(wide_x, residual, x1, rowscale, dropout_p, dropout_mask, dropout_mask1).to(wide_x.dtype)
    results = [_norm(total, weight, bias, eps, zero_centered_weight, is_rms_norm)]
    if weight1 is not None:
        results.append(_norm(total, weight1, bias1, eps, zero_centered_weight, is_rms_norm))
    results += [total] if prenorm else []
    results = tuple(result.to(x.dtype) for result in results)
    return results[0] if len(results) == 1 else results


def layer_norm_ref(
    x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None,
    prenorm=False, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, upcast=False,
):
    """What layer_norm_fn computes, step by step in the tensors' dtype or with upcast in float32, to compare
    with.

    Arguments as layer_norm_fn, but dropout_mask and dropout_mask1, bool [..., features], True where kept, say
    what is dropped. All results in x's dtype.
    """
    return _reference(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        zero_centered_weight, dropout_mask, dropout_mask1, upcast, is_rms_norm=False,
    )


def rms_norm_ref(
    x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None,
    prenorm=False, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, upcast=False,
):
    """layer_norm_ref for RMSNorm."""
    return _reference(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        zero_centered_weight, dropout_mask, dropout_mask1, upcast, is_rms_norm=True,
    )


class RMSNorm(torch.nn.Module):
    """RMSNorm (arXiv 1910.07467) with dropout and residual sum before it.

    Arguments:
        hidden_size: features, the last dimension.
        eps: added to the mean square.
        dropout_p: of x, in training only.
        zero_centered_weight: weight is stored less 1, and begins with 0.
        device, dtype: of weight, the only parameter; bias is None.
    """

    def __init__(
        self, hidden_size, eps=1e-5, dropout_p=0.0, zero_centered_weight=False, device=None, dtype=None
    ):
        super().__init__()
        self.eps = eps
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        """x [..., hidden_size] -> the same; with prenorm (out, sum). See rms_norm_fn."""
        return rms_norm_fn(
            x, self.weight, self.bias, residual=residual, eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
        )
