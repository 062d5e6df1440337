"""What the tests of the GPU engines share: when they run, and calls that take more than Case.run does."""

import pytest
import torch

import flash_attn
from acceptance import Expected, Result
from attention_case import check_result
from reference import expand_block_map

DEVICE = "cuda"
HALVES = [torch.bfloat16, torch.float16]
ENGINES = [engine["name"] for engine in flash_attn.build_info()["engines"]
           if engine["usable"] and engine["name"] != "cpu"]
needs_gpu = pytest.mark.skipif(not ENGINES or not torch.cuda.is_available(), reason="no usable GPU engine")


@pytest.fixture
def deterministic_as_asked(monkeypatch):
    """conftest.py poisons memory by torch's deterministic mode, in which every call is deterministic=True.
    Here memory stays poisoned and the argument decides."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)


@pytest.fixture
def portable(monkeypatch):
    """Without Hopper's kernels, which take some layouts only: another engine's bits are others."""
    monkeypatch.setenv("FLASH_ATTN_SM90", "0")


def attend(case, q, k, v, mask=None, **options):
    """case.call, or the block-sparse function with the case's features."""
    if mask is None:
        return case.call(q, k, v, **options)
    torch.manual_seed(case.seed)
    options = {"dropout_p": case.dropout_p, "alibi_slopes": case.slopes(), **case.features(), **options}
    return flash_attn.flash_attn_block_sparse_func(q, k, v, mask, **options)


def run(case, inputs=None, dlse=None, mask=None, **options):
    """Case.run with a block mask, and with options of the call: deterministic=True, say."""
    *qkv, dout = case.draw() if inputs is None else inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, lse, _ = attend(case, *leaves, mask, return_attn_probs=True, **options)
    outputs, gradients = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return Result(out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, gradients))


def check(case, inputs=None, dlse=None, block_map=None, block_size=None, **options):
    """Case.check with a block map, and with options of the call."""
    inputs = case.draw() if inputs is None else inputs
    visible = mask = None
    if block_map is not None:
        visible = expand_block_map(block_map, block_size, case.seqlen_q, case.seqlen_k)
        mask = flash_attn.BlockSparseMask.from_block_map(block_map, block_size)
    expected = Expected(case.attend(visible), *inputs, dlse)
    actual = run(case, inputs, dlse, mask, **options)
    check_result(actual, expected)


def check_neighbours_of_infinite_queries(dtype, head_dim, device):
    """Of packed sequences, with a softcap, to which such a query's scores are equal, so that its lse and
    output are as those of others."""
    ends = torch.tensor([0, 70, 203, 450], dtype=torch.int32, device=device)
    q, k, v, dout = (torch.randn(450, 2, head_dim).to(dtype).to(device) for _ in range(4))
    results = []
    for filled in (0.0, torch.inf):
        q[70:203, :, 0] = filled
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash_attn.flash_attn_varlen_func(*leaves, ends, ends, 247, 247, softcap=2.0)
        results.append(torch.autograd.grad(out, leaves, dout))
    for clean, dirty in zip(*results, strict=True):
        for part in (slice(0, 70), slice(203, None)):
            torch.testing.assert_close(clean[part], dirty[part], rtol=2e-2, atol=2e-2)


def assert_bitwise(actual, expected, names=("out", "lse", "dq", "dk", "dv")):
    """Results, or sequences of tensors with these names."""
    for name, x, y in zip(names, in_order(actual, names), in_order(expected, names), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype, name
        if not torch.equal(x, y):
            places = (x != y).nonzero()
            first = tuple(places[0].tolist())
            raise AssertionError(f"{name}: {len(places)} of {x.numel()} elements differ, first at {first}: "
                                 f"{x[first].item()!r} and {y[first].item()!r}")


def in_order(results, names):
    return [getattr(results, name) for name in names] if isinstance(results, Result) else results
