"""Packed sequences: each is what it would be alone, whatever lies beside it or behind the last one."""

import math

import pytest
import torch

import flash_attn
from attention_case import Case
from test_forward import DTYPES

OFFSETS = {
    "equal": ((0, 64, 128), (0, 64, 128)),
    "ragged": ((0, 3, 76, 110, 256), (0, 50, 51, 180, 300)),
    "empty queries": ((0, 0, 30, 30, 71), (0, 5, 20, 33, 90)),
    "empty keys": ((0, 9, 30, 42, 71), (0, 0, 20, 20, 20)),
    "both empty": ((0, 0, 17, 17), (0, 0, 40, 40)),
    "one long, many short": ((0, 1, 2, 3, 203, 204), (0, 1, 2, 3, 303, 304)),
    "more keys than queries": ((0, 1, 2, 4), (0, 128, 200, 329)),
    "more queries than keys": ((0, 76, 110, 256), (0, 1, 2, 3)),
    "nothing but empty": ((0, 0, 0), (0, 0, 0)),
}
FEATURES = [{}, {"causal": True}, {"window_size": (9, 4)}, {"softcap": 2.0, "causal": True},
            {"alibi": "heads"}, {"alibi": "batch", "causal": True}, {"dropout_p": 0.3, "causal": True}]


def packed_case(name, dtype=torch.float32, **features):
    cu_seqlens_q, cu_seqlens_k = OFFSETS[name]
    defaults = {"num_heads": 4, "num_heads_k": 2, "head_dim": 24, "head_dim_v": 40}
    return Case(dtype, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **{**defaults, **features})


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("tail", [0, 7])
def test_against_reference(name, features, tail, device):
    case = packed_case(name, tail=tail, device=device, **features)
    if case.draw()[0].numel() == 0:
        result = case.run()
        assert result.out.shape == (0, 4, 40) and result.lse.shape == (4, 0)
        return
    case.check(dlse=case.draw_dlse())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(dtype, causal, device):
    packed_case("ragged", dtype, causal=causal, device=device).check()


@pytest.mark.parametrize("features", FEATURES[:4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_lengths_are_the_dense_call(dtype, features, device):
    dense = Case(dtype, 3, 50, 70, 4, 2, 24, device=device, **features)
    packed = Case(dtype, num_heads=4, num_heads_k=2, head_dim=24, cu_seqlens_q=(0, 50, 100, 150),
                  cu_seqlens_k=(0, 70, 140, 210), device=device, **features)
    inputs = dense.draw()
    expected, actual = dense.run(inputs), packed.run([x.flatten(0, 1) for x in inputs])
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(actual, name), getattr(expected, name).flatten(0, 1)), name
    assert torch.equal(actual.lse, torch.cat(tuple(expected.lse), dim=1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tail_is_neither_read_nor_left_unwritten(dtype, value, device):
    """Rows past cu_seqlens[-1]: NaN in, zeros out, in both passes."""
    case = packed_case("ragged", dtype, causal=True, tail=33, device=device)
    inputs = case.draw()
    dirty = []
    for x, used in zip(inputs, (256, 300, 300, 256)):
        x = x.clone()
        x[used:] = value
        dirty.append(x)
    expected, actual = case.run(inputs), case.run(dirty)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    for x, used in ((actual.out, 256), (actual.dq, 256), (actual.dk, 300), (actual.dv, 300)):
        assert (x[used:] == 0).all()
    assert torch.equal(actual.lse[:, :256], expected.lse[:, :256])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_neighbours_do_not_leak(value, device):
    """NaN in every other sequence, the one in between bitwise unchanged."""
    case = packed_case("ragged", causal=True, device=device)
    inputs = case.draw()
    dirty = [x.clone() for x in inputs]
    rows_q, rows_k = slice(76, 110), slice(51, 180)
    for x, rows in zip(dirty, (rows_q, rows_k, rows_k, rows_q)):
        x[: rows.start] = value
        x[rows.stop :] = value
    expected, actual = case.run(inputs), case.run(dirty)
    for name, rows in (("out", rows_q), ("dq", rows_q), ("dk", rows_k), ("dv", rows_k)):
        assert torch.equal(getattr(actual, name)[rows], getattr(expected, name)[rows]), name


def test_offsets_of_either_integer_type_and_loose_max_seqlen(device):
    case = packed_case("ragged", causal=True, device=device)
    q, k, v, _ = case.draw()
    expected = case.call(q, k, v)
    for dtype in (torch.int32, torch.int64):
        cu_seqlens = [x.to(dtype) for x in case.cu_seqlens()]
        out = flash_attn.flash_attn_varlen_func(q, k, v, *cu_seqlens, 1000, 2000, causal=True)
        assert torch.equal(out, expected), dtype
    wide = torch.stack([case.cu_seqlens()[0]] * 2, dim=1)[:, 0]
    assert wide.stride() == (2,)
    lengths = (wide, case.cu_seqlens()[1], *case.max_seqlens)
    out = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, causal=True)
    assert torch.equal(out, expected)


def test_lse_is_unpadded(device):
    case = packed_case("ragged", device=device)
    _, lse, _ = case.call(*case.draw()[:3], return_attn_probs=True)
    assert lse.shape == (4, 256) and lse.dtype == torch.float32


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (3, 3)}], ids=str)
def test_packed_layouts(features, device):
    cu_seqlens = (0, 20, 20, 61)
    case = Case(torch.float32, num_heads=2, num_heads_k=2, head_dim=16, cu_seqlens_q=cu_seqlens,
                cu_seqlens_k=cu_seqlens, device=device, **features)
    q, k, v, dout = case.draw()
    expected = case.run()
    offsets = case.cu_seqlens()[0]
    kv, qkv = torch.stack((k, v), dim=1).requires_grad_(), torch.stack((q, k, v), dim=1).requires_grad_()
    out = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 41, 41, **features)
    out.backward(dout)
    assert torch.equal(out, expected.out)
    assert torch.equal(kv.grad, torch.stack((expected.dk, expected.dv), dim=1))
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 41, **features)
    out.backward(dout)
    assert torch.equal(out, expected.out)
    assert torch.equal(qkv.grad, torch.stack((expected.dq, expected.dk, expected.dv), dim=1))


def test_strided_packed_inputs(device):
    case = packed_case("ragged", torch.bfloat16, causal=True, device=device)
    inputs = case.draw()
    expected = case.run(inputs)
    actual = case.run([x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs])
    for name, x in vars(actual).items():
        assert torch.equal(x, getattr(expected, name)), name
