"""Softcap, ALiBi and scales that are not positive, which Hopper has kernels of their own for, at sizes that
fill a GPU, so that those are taken."""

import pytest
import torch

from attention_case import Case
from gpu import (  # noqa: F401
    DEVICE,
    HALVES,
    assert_bitwise,
    check,
    check_neighbours_of_infinite_queries,
    deterministic_as_asked,
    needs_gpu,
    run,
)

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]

HEAD_DIMS = [64, 80, 128, 192, 256]
TRANSFORMS = {
    "softcap": {"softcap": 1.5, "causal": True, "num_heads_k": 2},
    "Gemma 2": {"softcap": 50.0, "window_size": (300, 0), "num_heads_k": 2},
    "ALiBi": {"alibi": "heads", "causal": True},
    "both": {"softcap": 3.0, "alibi": "batch", "num_heads_k": 1},
    "far": {"alibi": "heads", "seqlen_q": 900, "seqlen_k": 300},  # queries that no key is near
    "packed": {"alibi": "batch", "softcap": 2.0, "causal": True, "tail": 5,
               "cu_seqlens_q": (0, 300, 300, 1203, 1600), "cu_seqlens_k": (0, 270, 280, 1300, 1900)},
    "negative": {"softmax_scale": -0.2, "window_size": (-1, 30)},
    "spread": {"softmax_scale": 3.0, "softcap": 200.0},  # many probabilities are 0
}


def case_of(dtype, head_dim, name, **given):
    sizes = {"batch": 2, "seqlen_q": 700, "seqlen_k": 777, "num_heads": 8, "num_heads_k": 8}
    return Case(dtype, head_dim=head_dim, device=DEVICE, **{**sizes, **TRANSFORMS[name], **given})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, head_dim, dtype):
    case = case_of(dtype, head_dim, name)
    check(case, case.draw(), case.draw_dlse())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_deterministic(name, head_dim):
    case = case_of(torch.bfloat16, head_dim, name)
    first, again = (run(case, deterministic=True) for _ in range(2))
    assert_bitwise(first, again)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_alibi_of_long_sequences(head_dim, dtype):
    """The first tile of keys is thousands of units of a score below the last one."""
    case_of(dtype, head_dim, "ALiBi", seqlen_q=4096, seqlen_k=4096, batch=1).check()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_alibi_hides_what_is_far(head_dim, dtype):
    """Scores of the first keys, which are far from most queries, are high, and those of near ones low."""
    case = case_of(dtype, head_dim, "ALiBi")
    q, k, v, dout = case.draw()
    q[..., 0], k[..., 0] = 6, 0
    k[:, :100, :, 0] = 40
    check(case, (q, k, v, dout))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_neighbours_of_infinite_queries(head_dim, dtype):
    check_neighbours_of_infinite_queries(dtype, head_dim, DEVICE)
