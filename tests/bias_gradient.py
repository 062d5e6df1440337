"""The gradient of a bias: the library's, the reference's, and how far apart they may be."""

import functools
import math

import torch

import acceptance


def bias_gradient(attend, bias, inputs, dlse, dtype=None):
    """d(out dout + lse dlse) / d(bias), of the library (dtype None) or of the reference in dtype."""
    q, k, v, dout = inputs if dtype is None else (x.to(dtype) for x in inputs)
    leaf = bias.detach().to(bias.dtype if dtype is None else dtype).requires_grad_()
    out, lse, *_ = attend(q, k, v, attn_bias=leaf)
    return torch.autograd.grad((out, lse), leaf, (dout, dlse.to(lse.dtype)))[0]


def check_bias_gradient(case, bias, mask=None):
    """Largest and mean deviation from float64 against standard attention's in the same dtype (see
    acceptance.py: what is computed from the stored out, too, and no less than a rounding of the result)."""
    inputs, dlse = case.draw(), case.draw_dlse()
    library = functools.partial(case.call, attn_mask=mask, return_attn_probs=True)
    actual = bias_gradient(library, bias, inputs, dlse)
    attend = case.attend(mask)
    exact = bias_gradient(attend, bias, inputs, dlse, torch.float64)
    assert actual.shape == bias.shape and actual.dtype == bias.dtype
    single = case.dtype == torch.float64
    standard_dtype = torch.float32 if single else case.dtype
    stored = functools.partial(attend, stored_dtype=standard_dtype)
    standards = [bias_gradient(attend, bias, inputs, dlse, standard_dtype),
                 bias_gradient(stored, bias, inputs, dlse, torch.float32)]
    unit = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if single else 1.0
    errors = torch.stack([(x.double() - exact).abs() for x in standards]) * unit
    error, ulp = (actual.double() - exact).abs(), torch.finfo(case.dtype).eps * exact.abs()
    assert error.max() <= acceptance.ROW_FACTOR * errors.max() + ulp.max()
    assert error.mean() <= acceptance.FACTOR * errors.reshape(2, -1).mean(dim=1).max() + ulp.mean()
    assert (actual[bias == -math.inf] == 0).all()
    return actual
