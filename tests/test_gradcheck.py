"""Numerical derivatives in float64, tiny shapes, every feature; out and lse are both differentiated."""

import pytest
import torch

import flash_attn
from attention_case import Case

FEATURES = [
    {}, {"causal": True}, {"window_size": (2, 1)}, {"causal": True, "window_size": (1, -1)}, {"softcap": 1.5},
    {"alibi": "heads"}, {"alibi": "batch", "causal": True}, {"softmax_scale": -0.9}, {"dropout_p": 0.4},
    {"dropout_p": 0.3, "causal": True, "alibi": "heads"},
    {"softcap": 2.0, "alibi": "batch", "window_size": (3, 0)},
]


def gradcheck(case, call):
    leaves = [x.requires_grad_() for x in case.draw()[:3]]

    def differentiable(q, k, v):
        out, lse, _ = call(q, k, v)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(differentiable, leaves, atol=1e-6, nondet_tol=0.0)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(3, 5), (5, 3)])
def test_dense(features, seqlen_q, seqlen_k, device):
    case = Case(torch.float64, 2, seqlen_q, seqlen_k, 2, 1, 3, 2, device=device, **features)
    gradcheck(case, lambda *x: case.call(*x, return_attn_probs=True))


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_packed(features, device):
    case = Case(torch.float64, num_heads=2, num_heads_k=1, head_dim=2, cu_seqlens_q=(0, 3, 3, 4, 6),
                cu_seqlens_k=(0, 2, 4, 4, 5), tail=1, device=device, **features)
    gradcheck(case, lambda *x: case.call(*x, return_attn_probs=True))


@pytest.mark.parametrize("features", FEATURES[:5], ids=str)
def test_block_sparse(features, device):
    case = Case(torch.float64, 1, 5, 7, 2, 1, 3, device=device, **features)
    block_map = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool, device=device)[None, None]
    mask = flash_attn.BlockSparseMask.from_block_map(block_map, (2, 3))

    def call(q, k, v):
        return flash_attn.flash_attn_block_sparse_func(
            q, k, v, mask, return_attn_probs=True, **case.features())

    gradcheck(case, call)


def test_lse_alone(device):
    case = Case(torch.float64, 1, 4, 4, 2, 2, 3, causal=True, softcap=2.0, device=device)
    q, k, v, _ = case.draw()
    leaves = [x.requires_grad_() for x in (q, k)]
    assert torch.autograd.gradcheck(lambda q, k: case.call(q, k, v, return_attn_probs=True)[1], leaves)
