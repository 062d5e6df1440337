"""Dropout: the mask is the published generator's, the same everywhere, and the passes agree on it."""

import pytest
import torch

import flash_attn
import philox
import reference
from attention_case import Case, draw_rng_state, keep_mask
from operator_arguments import options


def shown_mask(probs, seqlen_q, seqlen_k):
    return ~torch.signbit(probs[:, :, :seqlen_q, :seqlen_k])


@pytest.mark.parametrize("dropout_p", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (37, 150), (200, 65)])
def test_mask_is_philox(seqlen_q, seqlen_k, dtype, dropout_p, device):
    case = Case(dtype, 2, seqlen_q, seqlen_k, 3, 1, 8, dropout_p=dropout_p, seed=11, device=device)
    _, _, probs = case.call(*case.draw()[:3], return_attn_probs=True)
    assert torch.equal(shown_mask(probs, seqlen_q, seqlen_k), case.keep())


@pytest.mark.parametrize(
    "features", [{}, {"causal": True}, {"window_size": (20, 9), "alibi": "heads"}], ids=str)
def test_values_of_s_dmask(features, device):
    """exp(s - row maximum), 0 where invisible and in the padding to multiples of 128."""
    case = Case(torch.float32, 2, 50, 140, 4, 2, 16, dropout_p=0.25, device=device, **features)
    q, k, v, _ = case.draw()
    _, _, probs = case.call(q, k, v, return_attn_probs=True)
    assert probs.shape == (2, 4, 128, 256) and probs.dtype == torch.float32
    assert (probs[:, :, 50:] == 0).all() and (probs[:, :, :, 140:] == 0).all()
    visible = reference.visible_keys(50, 140, case.causal, case.window_size, device)
    s = reference.scores(q.double(), k.double(), alibi_slopes=case.slopes())
    s = torch.where(visible, s, -torch.inf)
    expected = torch.exp(s - s.amax(dim=-1, keepdim=True))
    torch.testing.assert_close(probs[:, :, :50, :140].abs().double(), expected, rtol=1e-5, atol=1e-7)


def test_values_of_s_dmask_packed(device):
    case = Case(torch.float32, num_heads=2, num_heads_k=1, head_dim=8, cu_seqlens_q=(0, 40, 40, 45),
                cu_seqlens_k=(0, 20, 23, 160), dropout_p=0.25, causal=True, tail=3, device=device)
    q, k, v, _ = case.draw()
    _, _, probs = case.call(q, k, v, return_attn_probs=True)
    assert probs.shape == (3, 2, 128, 256)
    keep = case.keep()
    for b, (rows, first_q, keys, first_k) in enumerate([(40, 0, 20, 0), (0, 40, 3, 20), (5, 40, 137, 23)]):
        visible = reference.visible_keys(rows, keys, True, device=device)
        own_q, own_k = q[None, first_q : first_q + rows], k[None, first_k : first_k + keys]
        s = reference.scores(own_q.double(), own_k.double())
        s = torch.where(visible, s, -torch.inf)[0]
        shift = torch.where(visible.any(-1, keepdim=True), s.amax(dim=-1, keepdim=True), 0.0)
        signed = torch.where(keep[b, :, :rows, :keys], 1.0, -1.0) * torch.exp(s - shift)
        torch.testing.assert_close(probs[b, :, :rows, :keys].double(), signed, rtol=1e-5, atol=1e-7)
        assert (probs[b, :, rows:] == 0).all() and (probs[b, :, :, keys:] == 0).all()


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(130, 259), (17, 700)])
def test_out_uses_the_shown_mask(seqlen_q, seqlen_k, device):
    """v = identity shows the probabilities, so every element of the forward's mask."""
    case = Case(torch.float32, 1, seqlen_q, min(seqlen_k, 256), 2, 2, 8, 256, dropout_p=0.3, device=device)
    q, k, v, _ = case.draw()
    v = torch.eye(v.shape[1], 256, device=device)[None, :, None].expand_as(v)
    p = case.call(q, k, v)[..., : v.shape[1]].movedim(1, 2)
    kept = case.keep()
    assert torch.equal(p != 0, kept)
    s = reference.scores(q.double(), k.double())
    expected = torch.where(kept, torch.softmax(s, dim=-1) * philox.keep_scale(0.3), 0.0)
    torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-7)


def test_backward_uses_the_same_mask(device):
    """dv of query row i alone is its row of dropped probabilities."""
    case = Case(torch.float32, 1, 40, 70, 2, 2, 8, 8, dropout_p=0.4, device=device)
    q, k, v, dout = case.draw()
    keep = case.keep()
    for row in (0, 7, 8, 15, 16, 39):
        dout = torch.zeros_like(dout)
        dout[:, row] = 1.0
        result = case.run((q, k, v, dout))
        assert torch.equal((result.dv[0, :, :, 0] != 0).T, keep[0, :, row]), row


@pytest.mark.parametrize("seed,offset", [(0, 0), (1, 2**40 + 3), (2**62 + 5, 7), (2**63 - 1, 2**63 - 1)])
def test_every_bit_of_the_state_counts(seed, offset):
    """A flipped bit in either half of seed or offset gives another mask, the reference's."""
    masks = []
    for flip_seed, flip_offset in ((0, 0), (1, 0), (0, 1), (1 << 33, 0), (0, 1 << 33)):
        state = torch.tensor([seed ^ flip_seed, offset ^ flip_offset])
        masks.append(keep_mask(state, 0.5, 1, 2, 64, 64))
        assert torch.equal(mask_of_operator(state, 0.5, 1, 2, 64, 64), masks[-1])
    for other in masks[1:]:
        assert (other != masks[0]).float().mean() > 0.3


def mask_of_operator(rng_state, dropout_p, batch, num_heads, seqlen_q, seqlen_k):
    q, k = torch.ones(batch, seqlen_q, num_heads, 1), torch.ones(batch, seqlen_k, num_heads, 1)
    probs = torch.ops.flash_attn.attention_probabilities(
        q, k, k, *options(rng_state=rng_state, dropout_p=dropout_p))
    return shown_mask(probs, seqlen_q, seqlen_k)


def test_manual_seed_repeats_and_calls_differ(device):
    case = Case(torch.float32, 1, 64, 64, dropout_p=0.5, device=device)
    q, k, v, _ = case.draw()

    def two_calls():
        torch.manual_seed(5)
        return [flash_attn.flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2)]

    first, second = two_calls()
    again_first, again_second = two_calls()
    assert torch.equal(first, again_first) and torch.equal(second, again_second)
    assert not torch.equal(first, second)


def test_no_dropout_draws_nothing(device):
    """p = 0 leaves torch's generator where it was."""
    case = Case(torch.float32, 1, 16, 16, device=device)
    case.call(*case.draw()[:3])
    after = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
    assert torch.equal(after, draw_rng_state(case.seed, device))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_fraction_and_expectation(dropout_p, device):
    """Equal scores, v = 1: out is the kept fraction over its expectation."""
    case = Case(torch.float32, 4, 128, 512, 4, 4, 8, 1, dropout_p=dropout_p, device=device)
    q, k, v, _ = case.draw()
    out = case.call(torch.zeros_like(q), k, torch.ones_like(v))
    assert abs(out.mean().item() - 1) < 0.004
    spread = (dropout_p / (1 - dropout_p) / 512) ** 0.5
    assert 0.9 * spread < out.std().item() < 1.1 * spread


@pytest.mark.parametrize(
    "features", [{}, {"causal": True}, {"window_size": (30, 10)}, {"alibi": "batch"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dropout_p", [0.001, 0.2, 0.97])
def test_against_reference(features, dtype, dropout_p, device):
    case = Case(dtype, 2, 90, 110, 4, 2, 32, dropout_p=dropout_p, device=device, **features)
    case.check(dlse=case.draw_dlse())


def test_probability_so_small_that_nothing_drops(device):
    """round(p * 65536) = 0."""
    case = Case(torch.float32, 1, 64, 64, device=device)
    q, k, v, _ = case.draw()
    assert torch.equal(case.call(q, k, v, dropout_p=1e-6), case.call(q, k, v))
