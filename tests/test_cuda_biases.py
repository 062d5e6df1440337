"""Biases of scores at sizes that fill a GPU, so that Hopper's own kernels are taken."""

import functools

import pytest
import torch

from acceptance import Expected
from attention_case import Case, check_result
from bias_gradient import bias_gradient, check_bias_gradient
from gpu import DEVICE, HALVES, assert_bitwise, deterministic_as_asked, needs_gpu  # noqa: F401

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]

SEQLEN_Q, SEQLEN_K = 700, 776
HEAD_DIMS = [64, 80, 128, 192, 256]
BIASES = {  # shape, features of the call
    "of each": ((2, 8, SEQLEN_Q, SEQLEN_K), {}),
    "heads": ((1, 8, SEQLEN_Q, SEQLEN_K), {"causal": True}),
    "batches": ((2, 1, SEQLEN_Q, SEQLEN_K), {"num_heads_k": 2}),
    "rows": ((2, 8, 1, SEQLEN_K), {"num_heads_k": 1, "window_size": (300, 100)}),
    "one": ((1, 1, 1, SEQLEN_K), {}),
    "odd": ((1, 8, 701, 777), {"seqlen_q": 701, "seqlen_k": 777}),  # whose rows are copied
    "ALiBi": ((1, 8, SEQLEN_Q, SEQLEN_K), {"alibi": "heads", "softmax_scale": -0.2, "causal": True}),
    "softcap": ((1, 1, SEQLEN_Q, SEQLEN_K), {"softcap": 2.0}),
}


def case_of(dtype, head_dim, **features):
    sizes = {"batch": 2, "seqlen_q": SEQLEN_Q, "seqlen_k": SEQLEN_K, "num_heads": 8, "num_heads_k": 8}
    return Case(dtype, head_dim=head_dim, device=DEVICE, **{**sizes, **features})


def hiding_bias(shape, dtype):
    """Some numbers hide: single ones, whole tiles of keys, and of some queries the first tile."""
    bias = 3 * torch.randn(shape, device=DEVICE)
    bias[..., 384:520] = -torch.inf
    bias[..., -1:, :130] = -torch.inf
    return bias.masked_fill(torch.rand(shape, device=DEVICE) < 0.1, -torch.inf).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("which", BIASES)
def test_biases(which, head_dim, dtype):
    shape, features = BIASES[which]
    case = case_of(dtype, head_dim, **features)
    inputs, dlse = case.draw(), case.draw_dlse()
    for bias in (hiding_bias(shape, dtype), torch.randn(shape, device=DEVICE).to(dtype)):
        expected = Expected(case.attend(None, bias), *inputs, dlse)
        actual = case.run(inputs, dlse, attn_bias=bias)
        check_result(actual, expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_beside_a_mask(head_dim):
    case = case_of(torch.bfloat16, head_dim)
    mask = torch.rand(2, 1, SEQLEN_Q, SEQLEN_K, device=DEVICE) < 0.7
    bias = hiding_bias((1, 8, SEQLEN_Q, SEQLEN_K), torch.bfloat16)
    inputs = case.draw()
    expected = Expected(case.attend(mask, bias), *inputs)
    expected.check(**vars(case.run(inputs, attn_mask=mask, attn_bias=bias)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("which", BIASES)
def test_same_bits_in_every_run(which, head_dim):
    shape, features = BIASES[which]
    case, bias = case_of(torch.bfloat16, head_dim, **features), hiding_bias(shape, torch.bfloat16)
    inputs, runs = case.draw(), []
    for _ in range(2):
        result = case.run(inputs, attn_bias=bias, deterministic=True)
        runs.append([result.out, result.lse, result.dq, result.dk, result.dv])
    assert_bitwise(*runs)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192])
@pytest.mark.parametrize("which", BIASES)
def test_gradient(which, head_dim, dtype):
    shape, features = BIASES[which]
    case = case_of(dtype, head_dim, **features)
    for bias in (torch.randn(shape, device=DEVICE).to(dtype), hiding_bias(shape, dtype)):
        check_bias_gradient(case, bias)


@pytest.mark.parametrize("seqlens", [(1, 2000), (2000, 1), (129, 255), (1024, 1024), (3000, 640)], ids=str)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradient_of_other_sizes(head_dim, rows, seqlens):
    """Fewer tiles than multiprocessors, and many; with a mask beside the bias."""
    case = case_of(torch.bfloat16, head_dim, seqlen_q=seqlens[0], seqlen_k=seqlens[1], causal=True)
    bias = torch.randn(1, 8, seqlens[0] if rows else 1, seqlens[1], device=DEVICE).bfloat16()
    check_bias_gradient(case, bias)
    check_bias_gradient(case, bias, torch.rand(2, 1, *seqlens, device=DEVICE) < 0.7)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("which", BIASES)
def test_same_bits_of_the_gradient(which, head_dim):
    shape, features = BIASES[which]
    case, bias = case_of(torch.bfloat16, head_dim, **features), hiding_bias(shape, torch.bfloat16)
    inputs, dlse = case.draw(), case.draw_dlse()
    attend = functools.partial(case.call, return_attn_probs=True)
    first = bias_gradient(attend, bias, inputs, dlse)
    for _ in range(3):
        assert torch.equal(bias_gradient(attend, bias, inputs, dlse), first)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_what_a_bias_hides_does_not_matter_to_its_gradient(head_dim, value):
    case = case_of(torch.bfloat16, head_dim)
    bias = torch.randn(1, 8, SEQLEN_Q, SEQLEN_K, device=DEVICE).bfloat16()
    bias[..., 650:660] = bias[..., 333, :] = -torch.inf
    dlse, gradients = case.draw_dlse(), []
    for filled in (0.0, value):
        q, k, v, dout = case.draw()
        k[:, 650:660] = v[:, 650:660] = q[:, 333] = dout[:, 333] = filled
        attend = functools.partial(case.call, return_attn_probs=True)
        gradients.append(bias_gradient(attend, bias, (q, k, v, dout), dlse))
    assert gradients[0].isfinite().all() and torch.equal(*gradients)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_a_bias_hides_does_not_matter(head_dim, value):
    """Whatever lies behind it, in K, V, Q or dO: the rows that don't see it keep their bits."""
    case = case_of(torch.bfloat16, head_dim)
    bias = torch.randn(1, 8, SEQLEN_Q, SEQLEN_K, device=DEVICE).bfloat16()
    bias[..., 650:] = bias[..., 333, :] = -torch.inf
    bias[..., 400:, 650] = 0
    runs = []
    for filled in (0.0, value):
        q, k, v, dout = case.draw()
        for x, rows in ((k, slice(650, None)), (v, slice(650, None)), (q, 333), (dout, 333)):
            x[:, rows] = filled
        runs.append(case.run((q, k, v, dout), attn_bias=bias, deterministic=True))
    clean, dirty = runs
    assert_bitwise([dirty.out[:, :400], dirty.dq[:, :400]], [clean.out[:, :400], clean.dq[:, :400]],
                   ("out", "dq"))
    assert not dirty.out[:, 400:].isfinite().any()
    for name in ("dk", "dv"):  # keys that nobody sees
        assert (getattr(dirty, name)[:, 651:] == 0).all(), name


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("low", [-1e4, -3e4, torch.finfo(torch.bfloat16).min])
def test_sequences_that_are_padded_on_the_left(low, head_dim, dtype):
    """As masks that are added do it: low, but no infinity."""
    case = case_of(dtype, head_dim)
    bias = torch.zeros(2, 1, 1, SEQLEN_K, device=DEVICE)
    bias[1, ..., :290] = max(low, torch.finfo(dtype).min)
    bias, inputs = bias.to(dtype), case.draw()
    Expected(case.attend(None, bias), *inputs).check(**vars(case.run(inputs, attn_bias=bias)))
