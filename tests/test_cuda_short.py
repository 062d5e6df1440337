"""Short sequences of many heads, whose blocks share multiprocessors."""

import pytest
import torch

import flash_attn
import short_sequences
from gpu import DEVICE, HALVES, deterministic_as_asked, needs_gpu  # noqa: F401
from short_sequences import SHORT, short

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]


@pytest.fixture
def heads():
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count + 6


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("features", SHORT)
def test_forward_and_backward(features, dtype, heads):
    given = short(heads, DEVICE, dtype, **SHORT[features])
    given.check(dlse=given.draw_dlse())


@pytest.mark.parametrize("group", [2, 3])
def test_grouped_heads(group, heads):
    short(heads * group, DEVICE, num_heads_k=heads, causal=True).check()


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (300, 70)}], ids=str)
def test_maps_and_masks(features, heads):
    short_sequences.check_short_maps(heads, DEVICE, features)


def test_growing_scores(heads):
    short_sequences.check_short_growing_scores(heads, DEVICE)


def test_bad_values(heads):
    short_sequences.check_short_bad_values(heads, DEVICE)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                    reason="of Hopper")
def test_which_kernel_it_is(heads):
    q, k, v, _ = short(heads, DEVICE).draw()
    assert flash_attn.explain(q, k, v).forward.configuration.endswith("d64_q128_k64_s3")
