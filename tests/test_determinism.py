"""The same bits, whatever the threads, the run, or the company in the batch."""

from dataclasses import replace

import pytest
import torch

from acceptance import Result
from attention_case import Case

CASES = [
    Case(torch.float32, 2, 190, 230, 4, 2, 40, causal=True),
    Case(torch.bfloat16, 2, 190, 230, 4, 1, 64, dropout_p=0.2),
    Case(torch.float16, 3, 70, 300, 2, 2, 24, window_size=(50, 20), softcap=3.0),
    Case(torch.float64, 1, 100, 90, 6, 3, 16, causal=True, alibi="heads"),
    Case(torch.float32, num_heads=4, num_heads_k=2, head_dim=32, causal=True,
         cu_seqlens_q=(0, 3, 3, 200, 290), cu_seqlens_k=(0, 50, 60, 300, 301)),
]


def assert_same(actual, expected):
    for name, x in vars(actual).items():
        assert torch.equal(x, getattr(expected, name)), name


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_runs(case, device):
    case = replace(case, device=device)
    inputs, dlse = case.draw(), case.draw_dlse()
    expected = case.run(inputs, dlse)
    for _ in range(10):
        assert_same(case.run(inputs, dlse), expected)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_number_of_threads(case, threads):
    inputs, dlse = case.draw(), case.draw_dlse()
    threads(1)
    expected = case.run(inputs, dlse)
    for count in (2, 3, 7):
        threads(count)
        assert_same(case.run(inputs, dlse), expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_argument(deterministic, device):
    """On the CPU both are; on a GPU True has to be, and dk and dv always."""
    case = Case(torch.float32, 2, 120, 130, 4, 1, 32, causal=True, device=device)
    *qkv, dout = case.draw()

    def gradients():
        leaves = [x.detach().requires_grad_() for x in qkv]
        return torch.autograd.grad(case.call(*leaves, deterministic=deterministic), leaves, dout)

    expected = gradients()
    for _ in range(5):
        dq, dk, dv = gradients()
        assert torch.equal(dk, expected[1]) and torch.equal(dv, expected[2])
        assert torch.equal(dq, expected[0]) or (device == "cuda" and not deterministic)


def entries(result, index):
    return Result(*(x[index] for x in vars(result).values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "features", [{}, {"causal": True}, {"window_size": (9, 30), "softcap": 4.0}], ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(33, 80), (150, 70), (1, 300)])
def test_company_in_the_batch(dtype, features, seqlen_q, seqlen_k, device):
    case = Case(dtype, 5, seqlen_q, seqlen_k, 4, 2, 32, device=device, **features)
    inputs, dlse = case.draw(), case.draw_dlse()
    together = case.run(inputs, dlse)
    for b in range(5):
        alone = replace(case, batch=1).run([x[b : b + 1] for x in inputs], dlse[b : b + 1])
        assert_same(alone, entries(together, slice(b, b + 1)))
    order = torch.tensor([3, 0, 4, 1, 2], device=device)
    assert_same(case.run([x[order] for x in inputs], dlse[order]), entries(together, order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_of_heads(dtype, device, monkeypatch):
    """A head of many computes what it computes alone, also where heads share keys."""
    case = Case(dtype, 1, 77, 140, 4, 4, 32, causal=True, device=device)
    inputs = case.draw()
    together = case.run(inputs)
    for h in range(4):
        alone = replace(case, num_heads=1, num_heads_k=1).run([x[:, :, h : h + 1] for x in inputs])
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[:, :, h : h + 1]), name
    monkeypatch.setenv("FLASH_ATTN_SM90", "0")  # Hopper's kernels take no strides of 0
    grouped = case.call(inputs[0], inputs[1][:, :, :1], inputs[2][:, :, :1])
    shared = case.call(inputs[0], *(x[:, :, :1].expand(-1, -1, 4, -1) for x in inputs[1:3]))
    assert torch.equal(grouped, shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_company_in_the_pack(dtype, causal, device):
    cu_q, cu_k = (0, 40, 41, 170), (0, 100, 160, 260)
    case = Case(dtype, num_heads=4, num_heads_k=2, head_dim=24, causal=causal, cu_seqlens_q=cu_q,
                cu_seqlens_k=cu_k, device=device)
    inputs, dlse = case.draw(), case.draw_dlse()
    together = case.run(inputs, dlse)
    for b in range(3):
        rows_q, rows_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        lengths = (0, cu_q[b + 1] - cu_q[b]), (0, cu_k[b + 1] - cu_k[b])
        single = replace(case, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])
        q, k, v, dout = inputs
        alone = single.run((q[rows_q], k[rows_k], v[rows_k], dout[rows_q]), dlse[:, rows_q])
        assert_same(alone, Result(together.out[rows_q], together.lse[:, rows_q], together.dq[rows_q],
                                  together.dk[rows_k], together.dv[rows_k]))


def test_inputs_are_not_written(device):
    case = Case(torch.float32, 2, 50, 60, 4, 2, 16, causal=True, dropout_p=0.1, device=device)
    inputs = case.draw()
    copies = [x.clone() for x in inputs]
    case.run(inputs, case.draw_dlse())
    for x, copy in zip(inputs, copies):
        assert torch.equal(x, copy)
