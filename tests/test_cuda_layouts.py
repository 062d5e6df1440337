"""Where tensors lie in memory changes no bit of a result: strides, alignment, expanded and sliced views."""

import math

import pytest
import torch

import flash_attn
from attention_case import Case
from gpu import (DEVICE, HALVES, assert_bitwise, check, deterministic_as_asked, needs_gpu,  # noqa: F401
                 portable, run)

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked", "portable")]


def shifted(x, elements):
    """The values of x, that many elements behind an aligned address."""
    storage = x.new_full((x.numel() + elements,), math.nan)
    return storage[elements:].view(x.shape).copy_(x)


def padded(x, dim, elements):
    """The values of x in a tensor of NaN that is larger along dim, so the stride before it grows."""
    shape = list(x.shape)
    shape[dim] += elements
    return x.new_full(shape, math.nan).narrow(dim, 0, x.shape[dim]).copy_(x)


def odd_rows(x):
    """Rows of heads that are one element further apart than they are long."""
    batch, rows, heads, dim = x.shape
    stride = heads * dim + 1
    storage = x.new_full((batch * rows * stride,), math.nan)
    return storage.as_strided(x.shape, (rows * stride, stride, dim, 1)).copy_(x)


LAYOUTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "last dim first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "one element off": lambda x: shifted(x, 1),
    "eight bytes off": lambda x: shifted(x, 4),
    "sixteen bytes off": lambda x: shifted(x, 8),
    "odd rows": odd_rows,
    "odd heads": lambda x: padded(x, 3, 1),
    "wider heads": lambda x: padded(x, 3, 8),
    "more heads": lambda x: padded(x, 2, 3),
    "more rows": lambda x: padded(x, 1, 5),
    "every other row": lambda x: padded(x.unsqueeze(2), 2, 1)[:, :, 0],
    "every other element": lambda x: padded(x.unsqueeze(4), 4, 1)[..., 0],
}
DIMS = [(64, 64), (40, 72), (13, 29), (128, 128), (96, 96), (256, 256)]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout(dims, name):
    """All of q, k, v and dout so, then each of them alone beside contiguous ones."""
    case = Case(torch.bfloat16, 2, 150, 200, 4, 2, *dims, causal=True, device=DEVICE)
    inputs, dlse = case.draw(), case.draw_dlse()
    views = [LAYOUTS[name](x) for x in inputs]
    for x, view in zip(inputs, views):
        assert torch.equal(x, view) and (view.stride() != x.stride() or view.data_ptr() % 256)
    expected = run(case, inputs, dlse, deterministic=True)
    assert_bitwise(run(case, views, dlse, deterministic=True), expected)
    for position in range(4):
        mixed = [*inputs]
        mixed[position] = views[position]
        assert_bitwise(run(case, mixed, dlse, deterministic=True), expected)


@pytest.mark.parametrize("dims", [(64, 64), (40, 72), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_with_all_engines(dims, name, monkeypatch):
    """Right, if not in the same bits, where a layout decides which engine takes it."""
    monkeypatch.delenv("FLASH_ATTN_SM90")
    case = Case(torch.bfloat16, 2, 150, 200, 4, 2, *dims, causal=True, device=DEVICE)
    check(case, [LAYOUTS[name](x) for x in case.draw()], case.draw_dlse())


@pytest.mark.parametrize("name", ["one element off", "odd heads", "heads first", "every other row"])
def test_any_layout_of_packed_sequences(name):
    case = Case(torch.float16, num_heads=4, num_heads_k=2, head_dim=80, cu_seqlens_q=(0, 3, 3, 170),
                cu_seqlens_k=(0, 70, 90, 250), tail=5, causal=True, device=DEVICE)
    inputs, dlse = case.draw(), case.draw_dlse()
    views = [LAYOUTS[name](x[None])[0] for x in inputs]
    expected = run(case, inputs, dlse, deterministic=True)
    assert_bitwise(run(case, views, dlse, deterministic=True), expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [64, 100, 128])
def test_slices_of_one_projection(dtype, head_dim):
    """q, k and v of a fused projection [B, S, (H + 2 Hk) D], as models slice it."""
    case = Case(dtype, 2, 180, 180, 4, 2, head_dim, causal=True, device=DEVICE)
    q, k, v, dout = case.draw()
    fused = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    parts = fused.split([4 * head_dim, 2 * head_dim, 2 * head_dim], dim=-1)
    views = [x.unflatten(-1, (-1, head_dim)) for x in parts]
    assert all(x.data_ptr() >= fused.data_ptr() and not x.is_contiguous() for x in views)
    expected = run(case, (q, k, v, dout), deterministic=True)
    assert_bitwise(run(case, (*views, dout), deterministic=True), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_packed_projections(dtype):
    """flash_attn_qkvpacked_func and its kin: one tensor in, one gradient out."""
    case = Case(dtype, 2, 150, 150, 3, 3, 72, causal=True, device=DEVICE)
    q, k, v, dout = case.draw()
    expected = run(case, (q, k, v, dout), deterministic=True)
    options = {"causal": True, "deterministic": True}
    kv, qkv = torch.stack((k, v), dim=2).requires_grad_(), torch.stack((q, k, v), dim=2).requires_grad_()
    out = flash_attn.flash_attn_kvpacked_func(q, kv, **options)
    out.backward(dout)
    assert_bitwise((out, kv.grad), (expected.out, torch.stack((expected.dk, expected.dv), 2)), ("out", "dkv"))
    out = flash_attn.flash_attn_qkvpacked_func(qkv, **options)
    out.backward(dout)
    gradient = torch.stack((expected.dq, expected.dk, expected.dv), dim=2)
    assert_bitwise((out, qkv.grad), (expected.out, gradient), ("out", "dqkv"))


@pytest.mark.parametrize("which", ["batch", "heads", "rows"])
def test_expanded_inputs(which):
    """Stride 0: one sequence for the whole batch, one head for all, one row again and again."""
    case = Case(torch.bfloat16, 3, 130, 190, 4, 2, 64, causal=True, device=DEVICE)
    dim = {"batch": 0, "rows": 1, "heads": 2}[which]
    inputs = case.draw()
    views = [x.narrow(dim, 0, 1).expand_as(x) for x in inputs]
    assert all(x.stride(dim) == 0 for x in views)
    expected = run(case, [x.contiguous() for x in views], deterministic=True)
    assert_bitwise(run(case, views, deterministic=True), expected)


@pytest.mark.parametrize("kind", ["sum", "mean", "slice of cat", "one head's", "transposed"])
@pytest.mark.parametrize("dims", [(64, 64), (40, 72), (128, 128)], ids=str)
def test_dout_of_a_loss(kind, dims):
    """Autograd hands over whatever strides the loss has made: all 0, or another tensor's."""
    case = Case(torch.bfloat16, 2, 140, 140, 2, 2, *dims, device=DEVICE)
    q, k, v, _ = case.draw()
    other = torch.randn(2, 140, 2, 7, device=DEVICE, dtype=case.dtype)
    weight = torch.linspace(-1, 1, 7 + dims[1], device=DEVICE, dtype=case.dtype)
    loss = {
        "sum": lambda out: out.sum(), "mean": lambda out: out.mean(),
        "slice of cat": lambda out: (torch.cat((other, out), dim=-1) * weight).sum(),
        "one head's": lambda out: out[:, :, 1, 3].float().square().sum(),
        "transposed": lambda out: (out.transpose(1, 3).contiguous() * weight[7:, None, None]).sum(),
    }[kind]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = case.call(*leaves, deterministic=True)
    received = []
    out.register_hook(received.append)
    actual = torch.autograd.grad(loss(out), leaves)
    inputs = (q, k, v, received[0].contiguous())
    expected = run(case, inputs, deterministic=True)
    assert_bitwise(actual, (expected.dq, expected.dk, expected.dv), ("dq", "dk", "dv"))
    case.expected(inputs).check(dq=actual[0], dk=actual[1], dv=actual[2])


def test_results_are_contiguous():
    case = Case(torch.bfloat16, 2, 50, 60, 4, 2, 64, 80, device=DEVICE)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.draw()]
    assert all(x.is_contiguous() for x in vars(run(case, views)).values())
