"""Small problems for emulated kernels."""

import itertools
from pathlib import Path

import pytest
import torch

import flash_attn
from attention_case import Case

# `python -m pytest` in the repository would take the package there, whose engine is the CPU's.
assert not Path(flash_attn.__file__).is_relative_to(Path(__file__).parents[1]), "not the emulated package"

HALF, SINGLE = torch.bfloat16, torch.float32


def case(dtype, head_dim, seqlen_q=150, seqlen_k=200, **features):
    options = {"num_heads": 2, "num_heads_k": 2, "head_dim": head_dim, **features}
    return Case(dtype, 1, seqlen_q, seqlen_k, **options)


def rotated(*axes):
    """The product of three axes; marked `thorough` but for some in which any two values of two axes meet. A
    value that is a tuple is several arguments."""
    least = min(map(len, axes))
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = (axis[place] for axis, place in zip(axes, places, strict=True))
        flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
        marks = [pytest.mark.thorough] if sum(places) % least else []
        cases.append(pytest.param(*flat, marks=marks, id="-".join(map(str, flat))))
    return cases
