"""Head dims above 128 on Hopper, whose backward has dS in device memory, some heads at a time."""

import pytest
import torch

import flash_attn
import score_gradient_cases as cases
from gpu import DEVICE, HALVES, check, needs_gpu, run

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dims", cases.HEAD_DIMS, ids=str)
@pytest.mark.parametrize("features", cases.FEATURES)
def test_memory_changes_no_bits(features, head_dims, dtype, monkeypatch):
    given = cases.case(dtype, features, head_dims, device=DEVICE)
    check(given)
    cases.check_bits_for_each_size(given, run, monkeypatch)


@pytest.mark.parametrize("heads", cases.HEADS)
@pytest.mark.parametrize("head_dims", cases.HEAD_DIMS, ids=str)
def test_a_key_that_is_not_finite(head_dims, heads, monkeypatch):
    given = cases.case(torch.bfloat16, "causal", head_dims, device=DEVICE)
    cases.set_memory(monkeypatch, given, heads)
    cases.check_key_that_is_not_finite(given, run)


def test_explain_tells_of_the_memory(monkeypatch):
    q, k, v = (torch.randn(1, 1024, 8, 256, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    needs = []
    for size in ("0", "16", "4096"):
        monkeypatch.setenv("FLASH_ATTN_SCORE_GRADIENT_MIB", size)
        needs.append(flash_attn.explain(q, k, v).backward.workspace_bytes)
    if flash_attn.explain(q, k, v).backward.engine != "sm90":
        assert len(set(needs)) == 1
        return
    of_head = 1024 // 64 * 1056 // 16 * 2048  # 22 tiles of 48 queries
    assert [need - needs[0] for need in needs[1:]] == pytest.approx([6 * of_head, 8 * of_head], abs=1 << 16)
