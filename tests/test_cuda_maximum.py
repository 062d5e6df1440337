"""The forward's running maximum lags behind the scores (docs/algorithm.md): rows whose scores rise late or
all along, in tiles that hide nothing, where only the sum of the exponentials tells. And the kernels that only
long sequences reach."""

import pytest
import torch

from attention_case import Case
from gpu import DEVICE, HALVES, assert_bitwise, check, deterministic_as_asked, needs_gpu, run  # noqa: F401

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]

DTYPES = [*HALVES, torch.float32]
HEAD_DIMS = [64, 96, 128, 192, 256]
SEQLENS_K = [700, 1300]  # at head dim 64 two kernels
# Scores above those of the first keys, natural units, over the length: a jump beyond float16's range of
# probabilities, two of them, one just below the limit, a climb, and one key that outweighs all.
RISES = {
    "jump": lambda x: 30.0 * (x > 0.6),
    "stairs": lambda x: 25.0 * (x > 0.3) + 25.0 * (x > 0.8),
    "below the limit": lambda x: 6.0 * (x > 0.5),
    "climb": lambda x: 60.0 * x,
    "spike": lambda x: 25.0 * (x > 0.7) * (x < 0.702),
    "fall": lambda x: -60.0 * x,
}


def rising(case, rise, rows=slice(None)):
    """The case's inputs, where the scores of these query rows rise along the keys."""
    q, k, v, dout = case.draw()
    positions = torch.linspace(0, 1, case.seqlen_k, device=q.device, dtype=torch.float64)
    q[..., 0], k[..., 0] = 0, (RISES[rise](positions) / 4)[None, :, None].to(k.dtype)
    q[:, rows, :, 0] = 4 * case.head_dim**0.5
    return q, k, v, dout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seqlen_k", SEQLENS_K)
@pytest.mark.parametrize("rise", RISES)
def test_scores_that_rise(dtype, head_dim, seqlen_k, rise):
    case = Case(dtype, 1, 150, seqlen_k, 2, 1, head_dim, device=DEVICE)
    check(case, rising(case, rise))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seqlen_k", SEQLENS_K)
@pytest.mark.parametrize("height", [83.0, 84.0, 85.0])
def test_sums_at_the_end_of_the_range(dtype, head_dim, seqlen_k, height):
    """Relative to the first keys' maximum, sums between 2^126 and 2^128: float32 has them, but their
    reciprocals only as subnormal numbers, which GPUs take for 0."""
    case = Case(dtype, 1, 150, seqlen_k, 2, 1, head_dim, device=DEVICE)
    q, k, v, _ = case.draw()
    q[..., 0], k[..., 0] = 4 * head_dim**0.5, 0
    k[:, seqlen_k * 3 // 5:, :, 0] = height / 4
    case.check_forward((q, k, v, None))


@pytest.mark.parametrize("features", [{"causal": True}, {"window_size": (400, 60)}, {"softcap": 50.0},
                                      {"alibi": "heads"}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rise", ["jump", "climb"])
def test_with_features(features, head_dim, rise):
    case = Case(torch.bfloat16, 1, 300, 1300, 2, 2, head_dim, device=DEVICE, **features)
    check(case, rising(case, rise))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_other_rows_keep_their_bits(dtype, head_dim):
    """A tile that is done again for one row gives the others what they had."""
    case = Case(dtype, 1, 128, 1300, 2, 2, head_dim, device=DEVICE)
    calm = case.call(*rising(case, "stairs", slice(0, 0))[:3], deterministic=True)
    one = case.call(*rising(case, "stairs", slice(37, 38))[:3], deterministic=True)
    others = torch.arange(128, device=DEVICE) != 37
    assert_bitwise([one[:, others]], [calm[:, others]], ["out"])
    assert not torch.equal(one[:, 37], calm[:, 37])


@pytest.mark.parametrize("seqlen_q,seqlen_k",
                         [(1, 1024), (129, 1100), (2151, 2151), (1300, 1700), (77, 2049)])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (1200, 30)},
                                      {"dropout_p": 0.2, "causal": True}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_kernels_of_long_sequences(seqlen_q, seqlen_k, features, dtype):
    case = Case(dtype, 1, seqlen_q, seqlen_k, 4, 2, 64, 40, device=DEVICE, **features)
    case.check(dlse=case.draw_dlse())


@pytest.mark.parametrize("dtype", HALVES)
def test_long_packed_sequences(dtype):
    case = Case(dtype, num_heads=4, num_heads_k=2, head_dim=64, causal=True,
                cu_seqlens_q=(0, 5, 2200, 2200, 2301), cu_seqlens_k=(0, 1100, 1107, 1300, 3700), tail=3,
                device=DEVICE)
    case.check(dlse=case.draw_dlse())
