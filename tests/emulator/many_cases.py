"""The backward of many tiles of keys, beside which delta is computed, on emulated kernels, as cases.py."""

import pytest
import torch

import delta_cases
from emulated_case import HALF
from gpu import deterministic_as_asked  # noqa: F401

pytestmark = pytest.mark.usefixtures("deterministic_as_asked")
FEATURES = [("plain", (128, 128)), ("plain", (64, 64)), ("groups", (96, 96)), ("groups", (192, 192)),
            ("ALiBi", (128, 128))]


@pytest.mark.parametrize("features,head_dims", FEATURES, ids=str)
def test_an_entry_has_the_bits_that_it_has_alone(features, head_dims):
    delta_cases.check_entries(delta_cases.case(HALF, features, head_dims, batch=3))


@pytest.mark.parametrize("head_dim", [128, 192])
def test_a_gradient_that_is_not_finite(head_dim):
    given = delta_cases.case(HALF, "causal", (head_dim, head_dim), batch=3)
    delta_cases.check_gradient_that_is_not_finite(given)


# Five heads are few for four multiprocessors.
LAST_HEADS = [("causal", 64, 6), ("causal", 128, 5), ("ALiBi", 128, 6)]


@pytest.mark.parametrize("features,head_dim,heads", LAST_HEADS)
def test_last_heads_under_a_diagonal(features, head_dim, heads):
    delta_cases.check_last_heads(HALF, features, head_dim, batch=1, num_heads=heads, num_heads_k=heads)


def test_a_bias_and_a_gradient_that_is_not_finite():
    given = delta_cases.case(HALF, "causal", (128, 128), batch=3)
    inputs, dlse = given.draw(), given.draw_dlse()
    bias = torch.randn(3, given.num_heads, given.seqlen_q, given.seqlen_k).to(HALF)
    bias[:, :, 50:60, 30:40] = -torch.inf
    inputs[3][2, 95, 1] = torch.nan

    def gradients(entries):
        *qkv, dout = (x[entries].detach().requires_grad_() for x in inputs)
        leaf = bias[entries].clone().requires_grad_()
        out, lse, *_ = given.call(*qkv, attn_bias=leaf, return_attn_probs=True)
        return torch.autograd.grad((out, lse), (*qkv, leaf), (dout.detach(), dlse[entries]))

    whole = gradients(slice(None))
    for entry in range(given.batch):
        own = slice(entry, entry + 1)
        for x, y in zip((x[own] for x in whole), gradients(own), strict=True):
            assert torch.isnan(y).any() == (entry == 2)
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
