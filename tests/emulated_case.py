"""Small problems for emulated kernels."""

from pathlib import Path

import torch

import flash_attn
from attention_case import Case

# `python -m pytest` in the repository would take the package there, whose engine is the CPU's.
assert not Path(flash_attn.__file__).is_relative_to(Path(__file__).parents[1]), "not the emulated package"

HALF, SINGLE = torch.bfloat16, torch.float32


def case(dtype, head_dim, seqlen_q=150, seqlen_k=200, **features):
    options = {"num_heads": 2, "num_heads_k": 2, "head_dim": head_dim, **features}
    return Case(dtype, 1, seqlen_q, seqlen_k, **options)
