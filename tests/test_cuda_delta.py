"""On Hopper delta is computed beside the walk that needs it if there are many tiles of keys."""

import pytest
import torch

import delta_cases as cases
from gpu import DEVICE, HALVES, check, needs_gpu

pytestmark = needs_gpu
MANY = {"batch": 48, "device": DEVICE}  # 384 tiles of 128 keys, or 576 of 64
MORE = {"batch": 70, "device": DEVICE}  # 560 of 128


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dims", cases.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("features", cases.FEATURES)
def test_against_the_reference(features, head_dims, dtype):
    check(cases.case(dtype, features, head_dims, **(MANY if head_dims[0] > 128 else MORE)))


@pytest.mark.parametrize("head_dims", cases.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("features", cases.FEATURES)
def test_an_entry_has_the_bits_that_it_has_alone(features, head_dims):
    cases.check_entries(cases.case(torch.bfloat16, features, head_dims, **MORE))


@pytest.mark.parametrize("head_dims", cases.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("features", ["causal", "groups", "ALiBi"])
def test_a_gradient_that_is_not_finite(features, head_dims):
    cases.check_gradient_that_is_not_finite(cases.case(torch.float16, features, head_dims, **MORE))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_last_heads_under_a_diagonal(head_dim, dtype):
    cases.check_last_heads(dtype, "causal", head_dim, batch=50, device=DEVICE)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("batch,seqlen_q,seqlen_k", [(15, 1030, 1040), (3, 2490, 2500)])
def test_long_sequences_under_a_diagonal(batch, seqlen_q, seqlen_k, head_dim):
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    cases.check_last_heads(torch.bfloat16, "causal", head_dim, device=DEVICE, **sizes)
