"""Who sees whom, and that nothing behind a mask leaks into anything."""

import math

import pytest
import torch

import acceptance
import reference
from attention_case import Case, check_empty_rows

WINDOWS = [(False, (-1, -1)), (True, (-1, -1)), (False, (0, 0)), (False, (5, 0)), (False, (0, 5)),
           (False, (3, -1)), (False, (-1, 3)), (True, (7, -1)), (True, (7, 7)), (True, (0, -1)),
           (False, (1000, 1000)), (False, (70, 1000)), (False, (1000, 40))]


def onehot_values(case):
    """v such that out[i] is the row of probabilities: head dim Dv = Sk, v = identity."""
    identity = torch.eye(case.seqlen_k, dtype=case.dtype, device=case.device)
    return identity[None, :, None].expand(case.batch, -1, case.num_heads_k, -1)


@pytest.mark.parametrize("causal,window_size", WINDOWS)
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(50, 50), (33, 100), (100, 33), (1, 64), (64, 1), (7, 5)])
def test_visibility_is_exact(seqlen_q, seqlen_k, causal, window_size, device):
    """With equal scores the probabilities show the mask itself, element for element."""
    case = Case(torch.float32, 1, seqlen_q, seqlen_k, 1, 1, 4, causal=causal, window_size=window_size,
                device=device)
    q, k, _, _ = case.draw()
    p, lse, _ = case.call(torch.zeros_like(q), k, onehot_values(case), return_attn_probs=True)
    visible = reference.visible_keys(seqlen_q, seqlen_k, causal, window_size, device)
    assert torch.equal(p[0, :, 0] > 0, visible)
    count = visible.sum(dim=-1)
    torch.testing.assert_close(lse[0, 0].exp(), count.float(), rtol=1e-5, atol=0)
    assert (lse[0, 0][count == 0] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seqlen_q,seqlen_k,causal,window_size", [
    (100, 33, True, (-1, -1)), (300, 100, True, (-1, -1)), (64, 200, False, (3, 2)), (200, 64, False, (3, 2)),
    (130, 7, True, (2, -1)), (200, 64, False, (-1, 0)), (64, 64, True, (0, 0)), (150, 90, False, (20, -1))])
def test_windows_against_reference(dtype, seqlen_q, seqlen_k, causal, window_size, device):
    case = Case(dtype, 2, seqlen_q, seqlen_k, 2, 1, 32, causal=causal, window_size=window_size, device=device)
    case.check(dlse=case.draw_dlse())


def poisoned(x, rows, value):
    x = x.clone()
    x[:, rows] = value
    return x


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen_q,seqlen_k,causal,window_size", [
    (20, 100, False, (10, -1)), (20, 100, True, (10, -1)), (20, 100, False, (70, 0)),
    (60, 190, False, (5, 3)), (60, 190, True, (0, 0))])
def test_invisible_keys_change_nothing(dtype, value, seqlen_q, seqlen_k, causal, window_size, device):
    """NaN in keys and values that no query sees: all bitwise as with zeros there, and their gradient 0."""
    case = Case(dtype, 2, seqlen_q, seqlen_k, 2, 1, 32, causal=causal, window_size=window_size, device=device)
    q, k, v, dout = case.draw()
    dead = ~reference.visible_keys(seqlen_q, seqlen_k, causal, window_size, device).any(dim=0)
    assert dead.any() and not dead.all()
    clean = case.run((q, poisoned(k, dead, 0), poisoned(v, dead, 0), dout), case.draw_dlse())
    dirty = case.run((q, poisoned(k, dead, value), poisoned(v, dead, value), dout), case.draw_dlse())
    for name, x in vars(dirty).items():
        assert torch.equal(x, getattr(clean, name)), name
    assert (dirty.dk[:, dead] == 0).all() and (dirty.dv[:, dead] == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen,heads_k,head_dim,key", [
    (70, 2, 32, 0), (70, 2, 32, 37), (70, 2, 32, 69), (200, 1, 128, 130), (200, 1, 128, 199)])
def test_partly_visible_bad_key(dtype, value, seqlen, heads_k, head_dim, key, device):
    """NaN in one key and value of a causal sequence touches no query before it, nor its gradient."""
    case = Case(dtype, 1, seqlen, seqlen, 2, heads_k, head_dim, causal=True, device=device)
    q, k, v, dout = case.draw()
    dout[:, key:] = 0  # the rows that see the key; their dP is NaN, so only rows before it may be looked at
    clean = case.run((q, k, v, dout))
    dirty = case.run((q, poisoned(k, key, value), poisoned(v, key, value), dout))
    for name in ("out", "dq"):
        assert torch.equal(getattr(dirty, name)[:, :key], getattr(clean, name)[:, :key]), name
    assert torch.equal(dirty.lse[..., :key], clean.lse[..., :key])
    assert dirty.out[:, key:].isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen_q,seqlen_k,causal,window_size", [
    (100, 33, True, (-1, -1)), (200, 7, True, (-1, -1)), (150, 40, False, (20, 3)), (90, 40, False, (-1, 0))])
def test_dead_queries_change_nothing(dtype, value, seqlen_q, seqlen_k, causal, window_size, device):
    """NaN in query and dout rows that see no key: their out and dq are 0, dk and dv don't notice."""
    case = Case(dtype, 2, seqlen_q, seqlen_k, 2, 1, 32, causal=causal, window_size=window_size, device=device)
    q, k, v, dout = case.draw()
    dead = ~reference.visible_keys(seqlen_q, seqlen_k, causal, window_size, device).any(dim=1)
    assert dead.any() and not dead.all()
    clean = case.run((poisoned(q, dead, 0), k, v, poisoned(dout, dead, 0)))
    dirty = case.run((poisoned(q, dead, value), k, v, poisoned(dout, dead, value)))
    for name, x in vars(dirty).items():
        assert torch.equal(x, getattr(clean, name)), name
    check_empty_rows(dirty, dirty.lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dlse_of_dead_queries_is_ignored(dtype, device):
    """The gradient of lse = -inf is whatever the loss makes of it, often NaN."""
    case = Case(dtype, 1, 60, 20, 2, 2, 16, causal=True, device=device)
    inputs, dlse = case.draw(), case.draw_dlse()
    clean = case.run(inputs, dlse)
    dlse[..., :40] = math.nan
    dirty = case.run(inputs, dlse)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(dirty, name), getattr(clean, name)), name


def test_memory_around_the_tensors_is_not_read(device):
    """Views into a tensor of NaN: the rows, heads and columns next to them are outside."""
    case = Case(torch.float32, 1, 37, 41, 3, 3, 13, device=device)
    inputs = case.draw()
    views = []
    for x in inputs:
        outside = x.new_full((x.shape[0] + 2, x.shape[1] + 40, x.shape[2] + 2, x.shape[3] + 24), math.nan)
        inside = outside[1:-1, 20:-20, 1:-1, 8:-16]
        inside.copy_(x)
        views.append(inside)
    result, expected = case.run(views), case.run(inputs)
    for name, x in vars(result).items():
        assert torch.equal(x, getattr(expected, name)), name


def test_masked_scores_are_masked_before_exp(device):
    """Invisible scores of +1e4 beside visible ones of -1e4."""
    case = Case(torch.float32, 1, 70, 70, 1, 1, 8, softmax_scale=1.0, causal=True, device=device)
    q, k, v, dout = case.draw()
    q[..., 0], k[..., 0] = 1.0, torch.linspace(-1e4, 1e4, 70, device=device)[:, None]
    result = case.run((q, k, v, dout))
    exact = acceptance.evaluate(case.attend(), q, k, v, dout)
    for name in ("out", "dq", "dk", "dv"):
        x = getattr(result, name)
        assert x.isfinite().all(), name
        torch.testing.assert_close(x.double(), getattr(exact, name), rtol=1e-2, atol=1e-2)
