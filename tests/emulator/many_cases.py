"""The backward of many tiles of keys, beside which delta is computed, on emulated kernels, as cases.py."""

import pytest

import delta_cases
from emulated_case import HALF
from gpu import deterministic_as_asked  # noqa: F401

pytestmark = pytest.mark.usefixtures("deterministic_as_asked")
FEATURES = [("plain", (128, 128)), ("groups", (96, 96)), ("causal", (192, 192)), ("ALiBi", (128, 128))]


@pytest.mark.parametrize("features,head_dims", FEATURES, ids=str)
def test_an_entry_has_the_bits_that_it_has_alone(features, head_dims):
    delta_cases.check_entries(delta_cases.case(HALF, features, head_dims, batch=3))


@pytest.mark.parametrize("head_dim", [128, 192])
def test_a_gradient_that_is_not_finite(head_dim):
    given = delta_cases.case(HALF, "causal", (head_dim, head_dim), batch=3)
    delta_cases.check_gradient_that_is_not_finite(given)
