"""Promise: the norms are the textbook's with what stands before them, in float32 whatever the dtypes."""

import inspect

import pytest
import torch

from flash_attn.ops.triton.layer_norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)

HEAD = ("x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, "
        "rowscale=None, prenorm=False")
TAIL = "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
REFERENCE = f"{HEAD}, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, upcast=False"
SIGNATURES = {
    layer_norm_fn: f"{HEAD}, residual_in_fp32=False, zero_centered_weight=False, is_rms_norm=False, {TAIL}",
    rms_norm_fn: f"{HEAD}, residual_in_fp32=False, zero_centered_weight=False, {TAIL}",
    layer_norm_ref: REFERENCE,
    rms_norm_ref: REFERENCE,
    layer_norm_linear_fn: "x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-06, "
                          "prenorm=False, residual_in_fp32=False, is_rms_norm=False",
    RMSNorm: "hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, device=None, dtype=None",
    RMSNorm.forward: "self, x, residual=None, prenorm=False, residual_in_fp32=False",
}
SHAPE, FEATURES = (2, 3, 16), 16
BOTH_NORMS = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def exact_norm(total, weight, bias, eps=1e-6, is_rms_norm=False):
    """Specification, in float64."""
    centre = 0 if is_rms_norm else total.mean(dim=-1, keepdim=True)
    spread = ((total - centre) ** 2).mean(dim=-1, keepdim=True)
    out = (total - centre) / (spread + eps).sqrt() * weight
    return out if bias is None else out + bias


def draw(*names, device, dtype=torch.float64):
    shapes = {"x": SHAPE, "x1": SHAPE, "residual": SHAPE, "rowscale": SHAPE[:-1]}
    return {name: torch.randn(shapes.get(name, (FEATURES,)), dtype=torch.float64, device=device).to(dtype)
            .requires_grad_() for name in names}


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures(function):
    assert str(inspect.signature(function)) == f"({SIGNATURES[function]})"
    assert inspect.getdoc(function)


def exact(tensors, is_rms_norm=False, zero_centered_weight=False, prenorm=True, eps=1e-6, masks=(1.0, 1.0)):
    """(out, out1 with weight1, total with prenorm), masks holding 0 or 1 / (1 - p)."""
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    total = wide["x"] * wide["rowscale"][..., None] if "rowscale" in wide else wide["x"]
    total = total * masks[0]
    if "x1" in wide:
        total = total + wide["x1"] * masks[1]
    if "residual" in wide:
        total = total + wide["residual"]
    centre = 1.0 if zero_centered_weight else 0.0
    outs = [exact_norm(total, wide[f"weight{i}"] + centre, wide.get(f"bias{i}"), eps, is_rms_norm)
            for i in ("", "1") if f"weight{i}" in wide]
    return (*outs, total) if prenorm else tuple(outs)


@BOTH_NORMS
@pytest.mark.parametrize("zero_centered_weight", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("names", [
    "x weight bias", "x weight", "x weight bias residual", "x weight bias residual x1",
    "x weight bias rowscale", "x weight residual x1 weight1",
    "x weight bias residual x1 weight1 bias1 rowscale"])
def test_values_and_gradients(names, prenorm, zero_centered_weight, is_rms_norm, device):
    tensors = draw(*names.split(), device=device)
    options = {"prenorm": prenorm, "zero_centered_weight": zero_centered_weight}
    expected = exact(tensors, is_rms_norm, **options)
    if is_rms_norm:
        results = rms_norm_fn(**{"bias": None, **tensors}, **options)
    else:
        results = layer_norm_fn(**{"bias": None, **tensors}, **options)
    assert isinstance(results, tuple) == (len(expected) > 1)
    results = as_tuple(results)
    torch.testing.assert_close(results, expected, rtol=1e-11, atol=1e-11)
    gradients = [torch.randn_like(result) for result in expected]
    leaves = list(tensors.values())
    torch.testing.assert_close(torch.autograd.grad(results, leaves, gradients),
                               torch.autograd.grad(expected, leaves, gradients), rtol=1e-10, atol=1e-10)


@BOTH_NORMS
@HALVES
@pytest.mark.parametrize("weight_dtype", ["same", torch.float32], ids=str)
def test_half_types(weight_dtype, dtype, is_rms_norm, device):
    """Everything between input and output in float32: one rounding."""
    tensors = draw("x", "x1", "residual", "rowscale", device=device, dtype=dtype)
    weight_dtype = dtype if weight_dtype == "same" else weight_dtype
    tensors |= draw("weight", "bias", device=device, dtype=weight_dtype)
    expected = exact(tensors, is_rms_norm)
    results = layer_norm_fn(**tensors, prenorm=True, is_rms_norm=is_rms_norm)
    assert [result.dtype for result in results] == [dtype, dtype]
    leaves = list(tensors.values())
    gradients = [torch.randn_like(result) for result in results]
    found = torch.autograd.grad(results, leaves, gradients)
    assert [gradient.dtype for gradient in found] == [leaf.dtype for leaf in leaves]
    unit = torch.finfo(dtype).eps
    for result, wide in zip(results, expected, strict=True):
        assert ((result.double() - wide).abs() <= unit * wide.abs() + 1e-5).all()
    wide_found = torch.autograd.grad(expected, leaves, [gradient.double() for gradient in gradients])
    for gradient, wide in zip(found, wide_found, strict=True):
        torch.testing.assert_close(gradient.double(), wide.double(), rtol=8 * unit, atol=8 * unit)


@HALVES
def test_result_dtypes(dtype):
    x = torch.randn(SHAPE, dtype=dtype)
    weight = torch.ones(FEATURES)

    def dtypes(**options):
        return [result.dtype for result in rms_norm_fn(x, weight, None, prenorm=True, **options)]

    assert dtypes() == [dtype, dtype]
    assert dtypes(residual_in_fp32=True) == [dtype, torch.float32]
    assert dtypes(residual=x.float()) == [dtype, torch.float32]
    assert dtypes(residual=x, residual_in_fp32=True) == [dtype, dtype]
    assert dtypes(out_dtype=torch.float32) == [torch.float32, dtype]


def test_the_sum_is_not_rounded_before_the_norm():
    """1 + 2^-10 is not a bfloat16 number: rounded, all entries would be alike and the output 0."""
    x = torch.tensor([[2.0**-10, 0.0]], dtype=torch.bfloat16)
    residual = torch.ones(1, 2, dtype=torch.bfloat16)
    out, total = layer_norm_fn(x, torch.ones(2), torch.zeros(2), residual, prenorm=True, eps=0.0)
    assert torch.equal(total, residual)
    torch.testing.assert_close(out, torch.tensor([[1.0, -1.0]], dtype=torch.bfloat16))


@BOTH_NORMS
def test_dropout(is_rms_norm, device):
    tensors = draw("x", "x1", "residual", "rowscale", "weight", "bias", "weight1", device=device)
    *results, mask, mask1 = layer_norm_fn(
        **tensors, dropout_p=0.4, prenorm=True, is_rms_norm=is_rms_norm, return_dropout_mask=True)
    assert mask.dtype == mask1.dtype == torch.bool and mask.shape == mask1.shape == SHAPE
    assert mask.any() and not mask.all() and not torch.equal(mask, mask1)
    expected = exact(tensors, is_rms_norm, masks=(mask / 0.6, mask1 / 0.6))
    torch.testing.assert_close(tuple(results), expected)
    leaves = list(tensors.values())
    gradients = [torch.randn_like(result) for result in expected]
    torch.testing.assert_close(torch.autograd.grad(results, leaves, gradients, retain_graph=True),
                               torch.autograd.grad(expected, leaves, gradients))
    reference = rms_norm_ref if is_rms_norm else layer_norm_ref
    again = reference(**tensors, dropout_p=0.4, prenorm=True, dropout_mask=mask, dropout_mask1=mask1)
    torch.testing.assert_close(again, tuple(results))


def test_dropout_rate_and_absent_masks():
    x = torch.randn(64, 64, 16)
    _, mask, mask1 = rms_norm_fn(x, torch.ones(16), None, dropout_p=0.25, return_dropout_mask=True)
    assert mask1 is None and abs(mask.float().mean() - 0.75) < 0.01
    _, mask, mask1 = rms_norm_fn(x, torch.ones(16), None, return_dropout_mask=True)
    assert mask is None and mask1 is None


@BOTH_NORMS
@HALVES
def test_reference(dtype, is_rms_norm):
    tensors = draw("x", "residual", "weight", "bias", device="cpu", dtype=dtype)
    reference = rms_norm_ref if is_rms_norm else layer_norm_ref
    expected = exact(tensors, is_rms_norm)
    unit = torch.finfo(dtype).eps
    for upcast, factor in ((True, 1), (False, 16)):
        results = reference(**tensors, prenorm=True, upcast=upcast)
        for result, wide in zip(results, expected, strict=True):
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), wide, rtol=factor * unit, atol=factor * unit)


def test_buffers():
    tensors = draw("x", "residual", "weight", "bias", device="cpu")
    out, residual_out = torch.empty(SHAPE, dtype=torch.float64), torch.empty(SHAPE, dtype=torch.float64)
    results = layer_norm_fn(**tensors, prenorm=True, out=out, residual_out=residual_out)
    assert results[0] is out and results[1] is residual_out
    torch.testing.assert_close(results, exact(tensors))
    leaves = list(tensors.values())
    torch.testing.assert_close(torch.autograd.grad(results[0].sin().sum(), leaves, allow_unused=True),
                               torch.autograd.grad(exact(tensors)[0].sin().sum(), leaves))


def test_gradcheck():
    tensors = draw("x", "residual", "weight", "bias", device="cpu")
    for is_rms_norm in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, residual, weight, bias: layer_norm_fn(
                x, weight, bias, residual, is_rms_norm=is_rms_norm, eps=0.1),  # noqa: B023 (called at once)
            tuple(tensors.values()))


@BOTH_NORMS
@pytest.mark.parametrize("prenorm", [False, True])
def test_linear(prenorm, is_rms_norm, device):
    tensors = draw("x", "weight", "bias", "residual", device=device)
    linear = torch.nn.Linear(FEATURES, 5, dtype=torch.float64, device=device)
    result = layer_norm_linear_fn(
        tensors["x"], tensors["weight"], tensors["bias"], linear.weight, linear.bias, tensors["residual"],
        prenorm=prenorm, is_rms_norm=is_rms_norm)
    out, total = exact(tensors, is_rms_norm)
    torch.testing.assert_close(result, (linear(out), total) if prenorm else linear(out))


def test_linear_of_another_dtype():
    tensors = draw("x", "weight", "bias", device="cpu", dtype=torch.bfloat16)
    linear = torch.nn.Linear(FEATURES, 5)
    assert layer_norm_linear_fn(**{f"norm_{n}" if n != "x" else n: t for n, t in tensors.items()},
                                linear_weight=linear.weight, linear_bias=linear.bias).dtype == torch.bfloat16


@pytest.mark.parametrize("zero_centered_weight", [False, True])
def test_module(zero_centered_weight, device):
    module = RMSNorm(FEATURES, zero_centered_weight=zero_centered_weight, device=device, dtype=torch.float64)
    assert list(module.state_dict()) == ["weight"] and module.bias is None
    assert (module.weight == (0.0 if zero_centered_weight else 1.0)).all()
    tensors = draw("x", "residual", device=device)
    expected = exact({**tensors, "weight": torch.ones(FEATURES, device=device)}, is_rms_norm=True, eps=1e-5)
    torch.testing.assert_close(module(**tensors, prenorm=True), expected)
    torch.testing.assert_close(module(**tensors), expected[0])


def test_module_dropout_in_training_only():
    module = RMSNorm(FEATURES, dropout_p=0.5)
    x = torch.randn(SHAPE)
    assert (module(x) == 0).any()
    assert not (module.eval()(x) == 0).any()


def test_compile():
    tensors = draw("x", "residual", "weight", "bias", device="cpu")
    torch._dynamo.reset()  # compilations of other tests count
    compiled = torch.compile(layer_norm_fn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**tensors, prenorm=True), exact(tensors))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_no_synchronisation_cuda():
    tensors = draw("x", "x1", "residual", "rowscale", "weight", "bias", device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = layer_norm_fn(**tensors, dropout_p=0.1)
        torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_errors():
    x, weight = torch.randn(SHAPE), torch.ones(FEATURES)
    for message, arguments in [
        ("weight must be", {"weight": torch.ones(FEATURES + 1)}),
        ("bias must be", {"bias": torch.ones(1, FEATURES)}),
        ("residual must have", {"residual": x[0]}),
        ("x1 must have", {"x1": x[..., :1]}),
        ("rowscale must be", {"rowscale": weight}),
        ("bias1 is given", {"bias1": weight}),
        ("dropout_p is 1.0", {"dropout_p": 1.0}),
    ]:
        with pytest.raises(ValueError, match=message):
            layer_norm_fn(**{"x": x, "weight": weight, "bias": None, **arguments})
