"""Bitwise promises of the GPU engines: forward, dk and dv always repeat, dq with deterministic=True; and a
row's result does not depend on what else is in the batch."""

import contextlib
from dataclasses import replace

import pytest
import torch

import flash_attn
from acceptance import Result
from attention_case import Case
from gpu import DEVICE, HALVES, assert_bitwise, deterministic_as_asked, needs_gpu, run  # noqa: F401
from test_block_sparse import random_map

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]

PACK = {"cu_seqlens_q": (0, 3, 3, 500, 1200, 1201), "cu_seqlens_k": (0, 50, 60, 700, 1500, 1800), "tail": 4}
CASES = {
    "causal, groups": Case(torch.bfloat16, 2, 700, 700, 8, 2, 128, causal=True, device=DEVICE),
    "plain": Case(torch.float16, 3, 513, 1000, 4, 4, 64, device=DEVICE),
    "window, softcap": Case(torch.bfloat16, 2, 600, 600, 4, 1, 256, window_size=(300, 50), softcap=10.0,
                            device=DEVICE),
    "dropout, ALiBi": Case(torch.float16, 2, 300, 350, 4, 2, 96, dropout_p=0.2, alibi="heads", device=DEVICE),
    "unequal dims": Case(torch.bfloat16, 2, 400, 900, 4, 2, 192, 128, causal=True, device=DEVICE),
    "packed, groups, causal": Case(torch.bfloat16, num_heads=8, num_heads_k=2, head_dim=64, causal=True,
                                   device=DEVICE, **PACK),
    "packed": Case(torch.float16, num_heads=4, num_heads_k=4, head_dim=128, device=DEVICE, **PACK),
    "many tiles": Case(torch.bfloat16, 2, 2000, 2100, 6, 6, 128, device=DEVICE),
    "many tiles, groups, causal": Case(torch.bfloat16, 2, 2000, 2100, 8, 4, 64, causal=True, device=DEVICE),
    "parts of groups": Case(torch.bfloat16, 2, 2100, 2200, 28, 7, 96, causal=True, device=DEVICE),
    "few queries, many keys": Case(torch.bfloat16, 1, 40, 5000, 2, 1, 64, device=DEVICE),
    "wide, groups, causal": Case(torch.bfloat16, 2, 700, 900, 4, 2, 256, causal=True, device=DEVICE),
    "wide, many tiles": Case(torch.float16, 2, 1500, 1500, 4, 4, 192, device=DEVICE),
    "wide, packed": Case(torch.bfloat16, num_heads=4, num_heads_k=4, head_dim=256, device=DEVICE, **PACK),
    "unaligned": Case(torch.bfloat16, 2, 300, 400, 4, 2, 33, 71, causal=True, device=DEVICE),
}
ALWAYS = ("out", "lse", "dk", "dv")


@contextlib.contextmanager
def other_work():
    """A function that starts products on another stream, so that blocks meet other neighbours each run."""
    stream, matrix = torch.cuda.Stream(), torch.ones(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    stream.wait_stream(torch.cuda.current_stream())

    def start(count):
        with torch.cuda.stream(stream):
            for _ in range(count):
                torch.mm(matrix, matrix)

    yield start
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", CASES)
def test_forward_and_key_gradients_repeat(name):
    case = CASES[name]
    inputs, dlse = case.draw(), case.draw_dlse()
    expected = run(case, inputs, dlse)
    with other_work() as disturb:
        for i in range(20):
            disturb(i % 4)
            assert_bitwise(run(case, inputs, dlse), expected, ALWAYS)


@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.large)])
@pytest.mark.parametrize("name", CASES)
def test_all_repeats_when_deterministic(name, times):
    case = CASES[name]
    inputs, dlse = case.draw(), case.draw_dlse()
    expected = run(case, inputs, dlse, deterministic=True)
    with other_work() as disturb:
        for i in range(times):
            disturb(i % 4)
            assert_bitwise(run(case, inputs, dlse, deterministic=True), expected)


@pytest.mark.parametrize("name", CASES)
def test_deterministic_changes_only_the_order_of_additions(name):
    case = CASES[name]
    inputs = case.draw()
    actual, expected = run(case, inputs), run(case, inputs, deterministic=True)
    for x in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(actual, x), getattr(expected, x), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("block_size", [64, 128, (48, 33)], ids=str)
def test_block_sparse_repeats(block_size):
    case = Case(torch.bfloat16, 2, 600, 700, 4, 2, 64, causal=True, device=DEVICE)
    mask = flash_attn.BlockSparseMask.from_block_map(random_map(case, block_size), block_size)
    inputs = case.draw()
    expected = run(case, inputs, mask=mask, deterministic=True)
    usual = run(case, inputs, mask=mask)  # of another engine, where queries are too few for Hopper's
    with other_work() as disturb:
        for i in range(30):
            disturb(i % 4)
            assert_bitwise(run(case, inputs, mask=mask, deterministic=True), expected)
            assert_bitwise(run(case, inputs, mask=mask), usual, ALWAYS)


def entries(result, index):
    return Result(*(x[index] for x in vars(result).values()))


def check_company_in_the_batch(case):
    """An entry of a batch of 5, alone, and in other places of a batch of 70: the same bits."""
    inputs, dlse = case.draw(), case.draw_dlse()
    together = run(case, inputs, dlse, deterministic=True)
    for b in (0, 3, 4):
        own = slice(b, b + 1)
        alone = run(replace(case, batch=1), [x[own] for x in inputs], dlse[own], deterministic=True)
        assert_bitwise(alone, entries(together, own))
    order = torch.tensor([3, 0, 4, 1, 2] * 14, device=DEVICE)
    crowd = run(replace(case, batch=70), [x[order] for x in inputs], dlse[order], deterministic=True)
    assert_bitwise(crowd, entries(together, order))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seqlen_q,seqlen_k,heads,head_dim,features", [
    (150, 250, (4, 2), 64, {"causal": True}), (1, 256, (8, 1), 128, {}), (333, 200, (2, 2), 96, {}),
    (200, 900, (4, 2), 256, {"window_size": (90, 30), "softcap": 4.0}), (900, 190, (4, 2), 128, {}),
    (130, 256, (4, 4), 40, {"alibi": "heads", "causal": True})], ids=str)
def test_company_in_the_batch(dtype, seqlen_q, seqlen_k, heads, head_dim, features):
    case = Case(dtype, 5, seqlen_q, seqlen_k, *heads, head_dim, device=DEVICE, **features)
    check_company_in_the_batch(case)


@pytest.mark.parametrize("seqlen_q,seqlen_k,heads,head_dim,features", [
    (40, 3000, (2, 1), 64, {}), (1, 8000, (1, 1), 128, {}), (150, 300, (4, 2), 64, {}),
    (130, 1000, (2, 2), 256, {}), (1000, 1000, (1, 1), 128, {"causal": True})], ids=str)
def test_company_that_fills_the_gpu(seqlen_q, seqlen_k, heads, head_dim, features):
    """Alone these are too few blocks for a GPU, which then shares out the keys of a query, in as many parts
    as fill it: not where deterministic=True asks for bits that depend on the row alone."""
    case = Case(torch.bfloat16, 5, seqlen_q, seqlen_k, *heads, head_dim, device=DEVICE, **features)
    check_company_in_the_batch(case)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_company_of_heads(head_dim, monkeypatch):
    """A head of many computes what it computes alone, and shared keys are what repeated ones are."""
    case = Case(torch.bfloat16, 1, 170, 250, 4, 4, head_dim, causal=True, device=DEVICE)
    inputs = case.draw()
    together = run(case, inputs, deterministic=True)
    names = ("out", "dq", "dk", "dv")
    for h in range(4):
        head, single = slice(h, h + 1), replace(case, num_heads=1, num_heads_k=1)
        alone = run(single, [x[:, :, head] for x in inputs], deterministic=True)
        assert_bitwise([getattr(alone, name) for name in names],
                       [getattr(together, name)[:, :, head] for name in names], names)
    q, k, v, dout = inputs
    monkeypatch.setenv("FLASH_ATTN_SM90", "0")  # Hopper's take no strides of 0
    shared = run(replace(case, num_heads_k=1), (q, k[:, :, :1], v[:, :, :1], dout), deterministic=True)
    repeated = (x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v))
    expected = run(case, (q, *repeated, dout), deterministic=True)
    assert_bitwise(shared, expected, ("out", "lse", "dq"))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_company_in_the_pack(dtype, causal, head_dim):
    """A sequence of a pack computes what it computes as a pack of its own, whatever bound max_seqlen is."""
    case = Case(dtype, num_heads=4, num_heads_k=2, head_dim=head_dim, causal=causal, device=DEVICE, **PACK)
    inputs, dlse = case.draw(), case.draw_dlse()
    together = run(case, inputs, dlse, deterministic=True)
    cu_q, cu_k = case.cu_seqlens_q, case.cu_seqlens_k
    for b in range(case.num_sequences):
        rows_q, rows_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if rows_q.start == rows_q.stop:
            continue
        single = replace(case, cu_seqlens_q=(0, cu_q[b + 1] - cu_q[b]), tail=0,
                         cu_seqlens_k=(0, cu_k[b + 1] - cu_k[b]))
        own = [x[rows] for x, rows in zip(inputs, (rows_q, rows_k, rows_k, rows_q))]
        alone = run(single, own, dlse[:, rows_q], deterministic=True)
        assert_bitwise(alone, Result(together.out[rows_q], together.lse[:, rows_q], together.dq[rows_q],
                                     together.dk[rows_k], together.dv[rows_k]))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (90, 20)}], ids=str)
def test_equal_lengths_are_the_dense_call(head_dim, features):
    """Of a batch that fills the GPU: packed sequences' keys are never shared out among blocks."""
    dense = Case(torch.bfloat16, 40, 150, 270, 4, 2, head_dim, device=DEVICE, **features)
    packed = replace(dense, cu_seqlens_q=tuple(range(0, 41 * 150, 150)),
                     cu_seqlens_k=tuple(range(0, 41 * 270, 270)))
    inputs = dense.draw()
    expected = run(dense, inputs, deterministic=True)
    actual = run(packed, [x.flatten(0, 1) for x in inputs], deterministic=True)
    assert_bitwise(actual, Result(expected.out.flatten(0, 1), torch.cat(tuple(expected.lse), dim=1),
                                  *(x.flatten(0, 1) for x in (expected.dq, expected.dk, expected.dv))))


def test_inputs_are_not_written():
    case = CASES["dropout, ALiBi"]
    inputs = case.draw()
    copies = [x.clone() for x in inputs]
    run(case, inputs, case.draw_dlse())
    assert_bitwise(inputs, copies, ("q", "k", "v", "dout"))
