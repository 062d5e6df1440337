"""Dropout on a GPU: its bits are the CPU engine's, element for element, in both passes."""

import pytest
import torch

import flash_attn
from attention_case import Case, draw_rng_state, keep_mask
from gpu import DEVICE, HALVES, deterministic_as_asked, needs_gpu  # noqa: F401
from operator_arguments import options
from test_dropout import shown_mask

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]

forward = torch.ops.flash_attn.attention_forward
backward = torch.ops.flash_attn.attention_backward
STATE = (2**62 + 12345, 2**40 + 3)


def draw(dtype, batch, seqlen_q, seqlen_k, num_heads, head_dim):
    """q and k small enough that no probability underflows, v = identity: out shows the probabilities."""
    case = Case(dtype, batch, seqlen_q, seqlen_k, num_heads, num_heads, head_dim)
    q, k, _, _ = case.draw()
    identity = torch.eye(seqlen_k, 256, dtype=dtype)[None, :, None].expand(batch, -1, num_heads, -1)
    return q, k, identity


def arguments(device, dropout_p, scale, state=STATE, **others):
    rng_state = torch.tensor(state, device=device)
    return options(rng_state=rng_state, dropout_p=dropout_p, softmax_scale=scale, **others)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (130, 200), (257, 256), (16, 33)])
@pytest.mark.parametrize("dropout_p", [0.1, 0.6])
def test_forward_drops_what_the_cpu_engine_drops(dtype, head_dim, seqlen_q, seqlen_k, dropout_p):
    q, k, v = draw(dtype, 2, seqlen_q, seqlen_k, 3, head_dim)
    given = dropout_p, 0.5 * head_dim**-0.5
    expected, expected_lse = forward(q, k, v, *arguments("cpu", *given))
    actual, lse = forward(*(x.to(DEVICE) for x in (q, k, v)), *arguments(DEVICE, *given))
    keep = keep_mask(torch.tensor(STATE), dropout_p, 2, 3, seqlen_q, seqlen_k)
    assert torch.equal(actual[..., :seqlen_k].cpu().movedim(1, 2) != 0, keep)
    torch.testing.assert_close(actual.cpu(), expected, rtol=2e-2, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (200, 130), (256, 257), (16, 33)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_drops_what_the_cpu_engine_drops(dtype, head_dim, seqlen_q, seqlen_k, deterministic):
    """dout = identity: dv shows the dropped probabilities, transposed."""
    q, k, v = draw(dtype, 2, seqlen_q, seqlen_k, 3, head_dim)
    dout = torch.eye(seqlen_q, 256, dtype=dtype)[None, :, None].expand(2, -1, 3, -1)
    gradients = []
    for device in ("cpu", DEVICE):
        given = arguments(device, 0.4, 0.5 * head_dim**-0.5, deterministic=deterministic)
        inputs = [x.to(device) for x in (q, k, v)]
        results = forward(*inputs, *given)
        gradients.append([x.cpu() for x in backward(dout.to(device), None, *inputs, *results, *given)])
    keep = keep_mask(torch.tensor(STATE), 0.4, 2, 3, seqlen_q, seqlen_k)
    assert torch.equal(gradients[1][2][..., :seqlen_q].permute(0, 2, 3, 1) != 0, keep)
    torch.testing.assert_close(gradients[1][2], gradients[0][2], rtol=2e-2, atol=1e-5)
    for actual, expected in zip(gradients[1][:2], gradients[0][:2]):
        assert (actual.double() - expected.double()).norm() <= 0.02 * expected.double().norm() + 1e-6


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(37, 150), (200, 65)])
def test_s_dmask_shows_the_same_bits(dtype, seqlen_q, seqlen_k):
    q, k, v = draw(dtype, 2, seqlen_q, seqlen_k, 3, 64)
    shown = [torch.ops.flash_attn.attention_probabilities(
        *(x.to(device) for x in (q, k, v)), *arguments(device, 0.3, 0.125)) for device in ("cpu", DEVICE)]
    assert shown[1].device.type == DEVICE
    assert torch.equal(*(shown_mask(x.cpu(), seqlen_q, seqlen_k) for x in shown))
    torch.testing.assert_close(shown[1].cpu(), shown[0], rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("flip", [(0, 0), (1, 0), (0, 1), (1 << 33, 0), (0, 1 << 33), (1 << 62, 0)], ids=str)
def test_every_bit_of_the_state_counts(flip):
    state = tuple(x ^ bit for x, bit in zip(STATE, flip))
    q, k, v = (x.to(DEVICE) for x in draw(torch.bfloat16, 1, 64, 64, 2, 64))
    out, _ = forward(q, k, v, *arguments(DEVICE, 0.5, 0.05, state))
    keep = keep_mask(torch.tensor(state), 0.5, 1, 2, 64, 64)
    assert torch.equal(out[..., :64].cpu().movedim(1, 2) != 0, keep)


@pytest.mark.parametrize("features", [
    {}, {"causal": True}, {"window_size": (30, 10)}, {"alibi": "batch"},
    {"cu_seqlens_q": (0, 20, 20, 150), "cu_seqlens_k": (0, 100, 110, 290), "causal": True}], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dropout_p", [0.001, 0.2, 0.97])
@pytest.mark.parametrize("head_dim", [32, 128, 192])
def test_against_reference(features, dtype, dropout_p, head_dim):
    case = Case(dtype, 2, 190, 210, 4, 2, head_dim, dropout_p=dropout_p, device=DEVICE, **features)
    case.check(dlse=case.draw_dlse())


def test_manual_seed_repeats_and_calls_differ():
    q, k, v, _ = Case(torch.bfloat16, 1, 64, 64, device=DEVICE).draw()

    def two_calls():
        torch.manual_seed(5)
        return [flash_attn.flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2)]

    first, second = two_calls()
    again_first, again_second = two_calls()
    assert torch.equal(first, again_first) and torch.equal(second, again_second)
    assert not torch.equal(first, second)


def test_no_dropout_draws_nothing():
    """p = 0 leaves the device's generator where it was."""
    case = Case(torch.bfloat16, 1, 16, 16, device=DEVICE)
    case.call(*case.draw()[:3])
    after = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=DEVICE)
    assert torch.equal(after, draw_rng_state(case.seed, DEVICE))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_fraction_and_expectation(dropout_p):
    """Equal scores, v = 1: out is the kept fraction over its expectation."""
    case = Case(torch.float16, 4, 512, 2048, 8, 8, 64, 8, dropout_p=dropout_p, device=DEVICE)
    q, k, v, _ = case.draw()
    out = case.call(torch.zeros_like(q), k, torch.ones_like(v))[..., 0].float()
    assert abs(out.mean().item() - 1) < 0.001
    spread = (dropout_p / (1 - dropout_p) / 2048) ** 0.5
    assert 0.95 * spread < out.std().item() < 1.05 * spread


def test_probability_so_small_that_nothing_drops():
    """round(p * 65536) = 0."""
    case = Case(torch.bfloat16, 1, 64, 64, device=DEVICE)
    q, k, v, _ = case.draw()
    assert torch.equal(case.call(q, k, v, dropout_p=1e-6), case.call(q, k, v))
