"""The specification and the acceptance rule, before anything is judged by them."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import acceptance
import philox
import reference
from attention_case import Case


def sdpa(q, k, v, mask):
    q, k, v = (x.movedim(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).movedim(1, 2)


@pytest.mark.parametrize(
    "causal,window_size", [(False, (-1, -1)), (True, (-1, -1)), (False, (7, 3)), (True, (5, -1))])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(33, 47), (47, 33)])
def test_reference_agrees_with_torch(seqlen_q, seqlen_k, causal, window_size):
    case = Case(torch.float64, 2, seqlen_q, seqlen_k, 4, 2, 8, 5, causal=causal, window_size=window_size)
    q, k, v, dout = case.draw()
    mask = reference.visible_keys(seqlen_q, seqlen_k, causal, window_size)
    result = acceptance.evaluate(case.attend(), q, k, v, dout)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = sdpa(*leaves, mask)
    torch.testing.assert_close(result.out, out.detach())
    for ours, torchs in zip((result.dq, result.dk, result.dv), torch.autograd.grad(out, leaves, dout)):
        torch.testing.assert_close(ours, torchs)


def test_visible_keys_by_hand():
    causal = reference.visible_keys(3, 5, causal=True).int().tolist()
    assert causal == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert reference.visible_keys(4, 2, causal=True).int().tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]
    window = reference.visible_keys(2, 4, window_size=(1, 0)).int().tolist()
    assert window == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_softcap_and_alibi_by_hand():
    q, k, slopes = torch.tensor([[[[2.0]]]]), torch.tensor([[[[3.0]], [[-1.0]]]]), torch.tensor([0.5])
    s = reference.scores(q, k, softmax_scale=0.5, softcap=2.0, alibi_slopes=slopes)
    expected = 2 * torch.tanh(torch.tensor([3.0, -1.0]) / 2) - 0.5 * torch.tensor([1.0, 0.0])
    torch.testing.assert_close(s[0, 0, 0], expected)


def test_packed_reference_is_the_dense_one():
    q, k, v, _ = Case(torch.float64, 2, 9, 7, causal=True).draw()
    out, lse = reference.attention(q, k, v, causal=True)
    packed, packed_lse = reference.packed_attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), (0, 9, 18), (0, 7, 14), causal=True)
    torch.testing.assert_close(packed.reshape(out.shape), out)
    torch.testing.assert_close(packed_lse, torch.cat(tuple(lse), dim=1))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_recomputing_backward_is_the_textbooks(dropout_p):
    case = Case(torch.float64, 2, 21, 17, 4, 2, 8, causal=True, softcap=5.0, alibi="heads",
                dropout_p=dropout_p)
    inputs, dlse = case.draw(), case.draw_dlse()
    textbook = acceptance.evaluate(case.attend(), *inputs, dlse)
    recomputing = functools.partial(case.attend(), stored_dtype=torch.float64)
    for name, x in vars(acceptance.evaluate(recomputing, *inputs, dlse)).items():
        torch.testing.assert_close(x, getattr(textbook, name))


def test_philox_known_answers():
    """From the vectors that come with the Random123 library."""
    ones = 0xFFFFFFFF
    for counter, key, answer in [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]:
        words = philox.philox_4x32_10(counter, key)
        assert " ".join(f"{int(w):08x}" for w in words) == answer


def test_keep_mask_uses_every_bit_once():
    """Each score has its own 16 bits: over a 16 x 16 patch no (counter, slot) pair repeats."""
    query, key = np.divmod(np.arange(256), 16)
    x0 = key // 16 * 32 + query % 8 * 4 + key % 8 // 2
    slot = query // 8 % 2 * 4 + key // 8 % 2 * 2 + key % 2
    assert len(set(zip(x0.tolist(), slot.tolist()))) == 256
    kept = philox.keep_mask(3, 5, 0.25, 2, 3, 200, 200)
    assert abs(kept.mean() - 0.75) < 0.005
    assert not (kept[0, 0] == kept[0, 1]).all() and not (kept[0, 0] == kept[1, 0]).all()


@pytest.mark.parametrize("dtype,head_dim", [
    (torch.float32, 64), (torch.bfloat16, 8), (torch.bfloat16, 64), (torch.float16, 8), (torch.float16, 64)])
@pytest.mark.parametrize("causal", [False, True])
def test_acceptance_passes_another_correct_implementation(dtype, head_dim, causal):
    """torch's fused CPU kernel: an online softmax in tiles, written by others."""
    case = Case(dtype, 2, 300, 300, 2, 2, head_dim, causal=causal)
    q, k, v, dout = case.draw()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*(x.movedim(1, 2) for x in leaves), is_causal=causal).movedim(1, 2)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    case.expected().check(out=out.detach(), dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_acceptance_refuses(dtype, name):
    """The exact answer passes; one wrong row fails, NaN fails, a small error in every row fails."""
    case = Case(dtype, 1, 150, 150, 2, 2, 32, causal=True)
    expected = case.expected()
    result_dtype = expected.lse_dtype if name == "lse" else dtype
    good = getattr(expected.exact, name).to(result_dtype)
    expected.check(**{name: good})
    eps = torch.finfo(result_dtype).eps
    scale = 1 if name == "lse" else good.abs().double().median().item()
    for damage in (torch.nan, torch.inf, 2000 * eps * scale):
        bad = good.clone()
        (bad.movedim(1, 2) if name == "lse" else bad)[0, 100, 1] += damage
        with pytest.raises(AssertionError, match=f"{name}: 1 of"):
            expected.check(**{name: bad})
    noise = (torch.rand_like(good.double()) - 0.5).sign() * 100 * eps * scale
    with pytest.raises(AssertionError, match=name):
        expected.check(**{name: (good.double() + noise).to(result_dtype)})


def test_fresh_memory_is_poisoned(device):
    x = torch.ones(3, device=device)
    aten = torch.ops.aten
    for fresh in (aten.new_empty(x, [5]), aten.empty_like(x), aten.new_empty(x.bfloat16(), [5]),
                  torch.empty(4, device=device), torch.empty_strided((2, 2), (2, 1), device=device)):
        assert fresh.isnan().all()
