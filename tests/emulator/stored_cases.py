"""The backward that has dS in device memory, on emulated kernels, as cases.py."""

import dataclasses

import pytest

import score_gradient_cases
from emulated_case import HALF
from gpu import deterministic_as_asked  # noqa: F401

pytestmark = pytest.mark.usefixtures("deterministic_as_asked")
FEATURES = [
    *((features, (256, 256)) for features in score_gradient_cases.FEATURES), ("window", (192, 192)),
    ("groups", (192, 192)), ("causal", (192, 128)), ("softcap, ALiBi", (192, 192)),
]


@pytest.mark.parametrize("features,head_dims", FEATURES, ids=str)
def test_backward_with_ds_in_memory(features, head_dims, monkeypatch):
    """Of some heads at a time."""
    given = score_gradient_cases.case(HALF, features, head_dims, batch=1)
    if not features.startswith("more"):
        given = dataclasses.replace(given, seqlen_q=210, seqlen_k=230)
    score_gradient_cases.check_bits_for_each_size(given, lambda case, *inputs: case.run(*inputs), monkeypatch)


@pytest.mark.parametrize("heads", score_gradient_cases.HEADS[::3])
@pytest.mark.parametrize("head_dim", [192, 256])
def test_backward_with_a_key_that_is_not_finite(head_dim, heads, monkeypatch):
    given = score_gradient_cases.case(HALF, "causal", (head_dim, head_dim), batch=1, num_heads=1,
                                      num_heads_k=1)
    score_gradient_cases.set_memory(monkeypatch, given, heads)
    score_gradient_cases.check_key_that_is_not_finite(given, lambda case, inputs: case.run(inputs))
