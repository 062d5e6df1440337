"""dq, dk, dv against the reference, row by row, for every dtype, feature and ragged shape."""

import pytest
import torch

import flash_attn
from acceptance import Expected, Result, evaluate
from attention_case import Case
from test_forward import DTYPES, FEATURES, SHAPES, layouts_of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:-1], ids=str)
def test_ragged_shapes(dtype, shape, device):
    causal = shape[0] % 2 == 1 or shape[1] == 512
    Case(dtype, 1, *shape, 2, 2, 64, causal=causal, device=device).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_features(dtype, features, with_dlse, device):
    case = Case(dtype, 2, 97, 155, 4, 2, 40, device=device, **features)
    case.check(dlse=case.draw_dlse() if with_dlse else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim,head_dim_v", [
    (1, 1), (2, 3), (8, 8), (17, 17), (31, 65), (64, 1), (96, 96), (128, 128), (192, 128), (256, 256),
    (1, 256)])
def test_head_dims(dtype, head_dim, head_dim_v, device):
    Case(dtype, 1, 70, 90, 2, 2, head_dim, head_dim_v, causal=True, device=device).check()


@pytest.mark.parametrize("num_heads,num_heads_k", [(1, 1), (4, 2), (4, 1), (6, 3), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads(dtype, num_heads, num_heads_k, device):
    Case(dtype, 2, 65, 130, num_heads, num_heads_k, 32, causal=True, device=device).check()


@pytest.mark.parametrize("seqlen", [15, 17, 31, 33, 48, 63, 65, 97, 127, 129, 193, 257])
def test_around_tile_edges(seqlen, device):
    Case(torch.float32, 1, seqlen, seqlen, 2, 1, 24, causal=True, device=device).check()
    Case(torch.float32, 1, seqlen, 300 - seqlen, 2, 1, 24, window_size=(9, 11), device=device).check()


def test_longer_sequence(device):
    Case(torch.bfloat16, 1, 1023, 1024, 2, 1, 64, causal=True, device=device).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_dlse(dtype, device):
    """A loss of lse alone: v has no part in it."""
    case = Case(dtype, 2, 50, 70, 2, 1, 24, causal=True, device=device)
    q, k, v, dout = case.draw()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, lse, _ = case.call(*leaves, return_attn_probs=True)
    dlse = case.draw_dlse()
    dq, dk, dv = torch.autograd.grad(lse, leaves, dlse, allow_unused=True)
    Expected(case.attend(), q, k, v, torch.zeros_like(dout), dlse).check(dq=dq, dk=dk)
    assert dv is None or (dv == 0).all()


@pytest.mark.parametrize("layout", ["heads first", "sequence first", "slice of last dim", "every third row",
                                    "transposed last dim", "strided last dim"])
@pytest.mark.parametrize("which", ["inputs", "dout"])
def test_any_strides(layout, which, device):
    case = Case(torch.bfloat16, 2, 37, 53, 4, 2, 24, causal=True, device=device)
    *inputs, dout = case.draw()
    expected = case.run((*inputs, dout))
    if which == "dout":
        actual = case.run((*inputs, layouts_of(dout)[layout]))
    else:
        actual = case.run((*(layouts_of(x)[layout] for x in inputs), dout))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


@pytest.mark.parametrize("kind", ["sum", "mean", "slice of cat", "one head's"])
def test_dout_of_a_loss(kind, device):
    """Autograd hands over whatever strides the loss has made: 0, or another tensor's."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    case = Case(dtype, 2, 33, 33, 2, 2, 16, device=device)
    q, k, v, _ = case.draw()
    other = torch.randn(2, 33, 2, 7, device=device)
    weight = torch.linspace(-1, 1, 23, device=device)
    loss = {
        "sum": lambda out: out.sum(), "mean": lambda out: out.mean(),
        "slice of cat": lambda out: (torch.cat((other, out), dim=-1) * weight).sum(),
        "one head's": lambda out: out[:, :, 1, 3].square().sum(),
    }[kind]
    gradients = []
    ours, exactly = lambda *x: case.call(*x), lambda *x: case.attend()(*x)[0]
    for attend, precision in ((ours, dtype), (exactly, torch.float64)):
        leaves = [x.detach().to(precision).requires_grad_() for x in (q, k, v)]
        gradients.append([x.double() for x in torch.autograd.grad(loss(attend(*leaves)), leaves)])
    for actual, exact in zip(*gradients):
        tolerance = 1e-12 if device == "cpu" else 0.02
        assert (actual - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("needed", range(1, 8))
def test_any_subset_of_gradients(needed, device):
    case = Case(torch.float32, 1, 40, 50, 2, 1, 16, causal=True, device=device)
    *inputs, dout = case.draw()
    full = case.run((*inputs, dout))
    wanted = [bool(needed >> n & 1) for n in range(3)]
    leaves = [x.requires_grad_(want) for x, want in zip(inputs, wanted)]
    case.call(*leaves).backward(dout)
    for x, want, gradient in zip(leaves, wanted, (full.dq, full.dk, full.dv)):
        assert torch.equal(x.grad, gradient) if want else x.grad is None


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(seqlen_q, seqlen_k, device):
    result = Case(torch.bfloat16, 2, seqlen_q, seqlen_k, 2, 1, 16, device=device).run()
    for gradient in (result.dq, result.dk, result.dv):
        assert (gradient == 0).all()


def test_packed_layouts_give_one_gradient(device):
    case = Case(torch.float32, 2, 45, 45, 2, 2, 16, causal=True, device=device)
    q, k, v, dout = case.draw()
    expected = case.run()
    kv, qkv = torch.stack((k, v), dim=2).requires_grad_(), torch.stack((q, k, v), dim=2).requires_grad_()
    flash_attn.flash_attn_kvpacked_func(q, kv, causal=True).backward(dout)
    assert torch.equal(kv.grad, torch.stack((expected.dk, expected.dv), dim=2))
    flash_attn.flash_attn_qkvpacked_func(qkv, causal=True).backward(dout)
    assert torch.equal(qkv.grad, torch.stack((expected.dq, expected.dk, expected.dv), dim=2))


def test_backward_twice_and_accumulation(device):
    case = Case(torch.float32, 1, 20, 30, device=device)
    q, k, v, dout = case.draw()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = case.call(*leaves)
    out.backward(dout, retain_graph=True)
    first = [x.grad.clone() for x in leaves]
    out.backward(dout)
    for x, gradient in zip(leaves, first):
        assert torch.equal(x.grad, 2 * gradient)


@pytest.mark.parametrize("shift", [-1e4, -120.0, 120.0, 1e4])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 128), (64, 64), (192, 192), (40, 67)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shifted_logits(dtype, shift, seqlen_q, seqlen_k, device):
    """exp(s - lse) on the columns that pad a tile overflows unless it is masked first: lse may be -1e4.

    The standard formula's bfloat16 scores can't tell such logits apart and budget for anything; an engine
    that keeps scores in fp32 can, up to the rounding of lse, the relative error of every probability. dq of
    the shifted dimension is shift * sum(dS), which cancels, and is left out.
    """
    case = Case(dtype, 1, seqlen_q, seqlen_k, 2, 2, 32, softmax_scale=1.0, causal=seqlen_q == 192,
                device=device)
    q, k, v, dout = case.draw()
    q[..., 0], k[..., 0] = 1.0, shift
    actual, exact = case.run((q, k, v, dout)), evaluate(case.attend(), q, k, v, dout)
    rounding = 1e-5 if dtype == torch.float32 else 0.02
    tolerance = rounding + 2 * torch.finfo(torch.float32).eps * abs(shift)
    for name in ("out", "dq", "dk", "dv"):
        x, y = (getattr(result, name)[..., 1:].double() for result in (actual, exact))
        assert (x - y).norm() <= tolerance * y.norm(), name


def test_result_type_is_complete():
    """acceptance.Result names every tensor that a run has to produce."""
    result = Case(torch.float32, 1, 3, 3).run()
    assert isinstance(result, Result) and all(x is not None for x in vars(result).values())
