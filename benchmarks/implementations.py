"""Everything that the benchmarks compare: one line a name in IMPLEMENTATIONS.

fa2 and cudnn are torch's scaled_dot_product_attention held to that backend, on the [B, S, H, D] tensors that
users of flash_attn have (torch gets transposed views, which both backends read in place). fa3 is
FlashAttention-3's compiled operators, if the environment variable FA3_LIBRARY names the shared library.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn

OURS = "flash_attn"
DETERMINISTIC = "deterministic"  # ours too, with deterministic=True


@dataclass(frozen=True)
class Implementation:
    layout: str  # "bshd" or "bhsd": the axes of q, k, v and out
    build: Callable  # build(cell, device) -> attend(q, k, v) -> out
    devices: tuple = ("cpu", "cuda")
    directions: tuple = ("forward", "backward")
    available: Callable = lambda: True


def _flash_attn(cell, device, **options):
    window_size = (cell.left, 0) if cell.mask == "window" else (-1, -1)
    options |= {"causal": cell.mask != "full", "window_size": window_size, "softcap": cell.softcap,
                "alibi_slopes": cell.slopes(device)}
    return lambda q, k, v: flash_attn.flash_attn_func(q, k, v, **options)


def _deterministic(cell, device):
    return _flash_attn(cell, device, deterministic=True)


def _has_no(cell, *transforms):
    given = [name for name in transforms if getattr(cell, name)]
    if given:
        raise NotImplementedError(f"it has no {' and no '.join(given)}")


def grouped(cell):
    """What torch's functions want to be told where heads of q share those of k and v."""
    return {"enable_gqa": True} if cell.group > 1 else {}


def _sdpa(cell, device):
    _has_no(cell, "softcap", "alibi")
    mask = cell.visible(torch.arange(cell.seqlen), device) if cell.mask == "window" else None
    options = {"attn_mask": mask, "is_causal": cell.mask == "causal", **grouped(cell)}
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def sdpa_in_place(cell, device):
    """On views of [B, S, H, D]."""
    attend = _sdpa(cell, device)
    return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _sdpa_backend(backend):
    def build(cell, device):
        attend_in_place = sdpa_in_place(cell, device)

        def attend(q, k, v):
            with sdpa_kernel(backend):
                return attend_in_place(q, k, v)

        return attend

    return build


class _Fa3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options):
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        # Given, because what the operator returns differs between versions.
        gradients = dq, dk, dv = [torch.empty_like(x) for x in (q, k, v)]
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **ctx.options)
        return *gradients, None


def fa3(q, k, v, **options):
    """FlashAttention-3 with gradients; options of both its operators."""
    torch.ops.load_library(os.environ["FA3_LIBRARY"])
    return _Fa3.apply(q, k, v, options)


def _fa3(cell, device):
    _has_no(cell, "alibi")
    options = {"softmax_scale": cell.head_dim**-0.5, "is_causal": cell.mask == "causal",
               "softcap": cell.softcap}
    if cell.mask == "window":
        options |= {"window_size_left": cell.left, "window_size_right": 0}
    return lambda q, k, v: fa3(q, k, v, **options)


def _flex(cell, device):
    """torch's FlexAttention, compiled for the cell's shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes, mask = cell.slopes(device), None

    def score(score, batch, head, query, key):
        if cell.softcap:
            score = cell.softcap * torch.tanh(score / cell.softcap)
        return score - slopes[head] * (query - key).abs() if cell.alibi else score

    def visible(batch, head, query, key):
        return (query >= key) & (query - key <= cell.left) if cell.mask == "window" else query >= key

    if cell.mask != "full":
        mask = create_block_mask(visible, None, None, cell.seqlen, cell.seqlen, device=device)
    torch._dynamo.reset()  # or after some cells it would go uncompiled
    attend = torch.compile(flex_attention, dynamic=False)
    score_mod = score if cell.softcap or cell.alibi else None
    return lambda q, k, v: attend(q, k, v, score_mod=score_mod, block_mask=mask, **grouped(cell))


def _standard(cell, device):
    """Algorithm 0: the whole score matrix, in the inputs' dtype."""
    _has_no(cell, "softcap", "alibi")

    def attend(q, k, v):
        if cell.group > 1:
            k, v = (x.repeat_interleave(cell.group, dim=1) for x in (k, v))
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        if cell.mask != "full":
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=device).triu_(1)
            if cell.mask == "window":
                hidden |= torch.ones_like(hidden).tril_(-cell.left - 1)
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(dim=-1) @ v

    return attend


IMPLEMENTATIONS = {
    OURS: Implementation("bshd", _flash_attn),
    DETERMINISTIC: Implementation("bshd", _deterministic, directions=("backward",)),
    "sdpa": Implementation("bhsd", _sdpa),
    "fa2": Implementation("bshd", _sdpa_backend(SDPBackend.FLASH_ATTENTION), ("cuda",)),
    "cudnn": Implementation("bshd", _sdpa_backend(SDPBackend.CUDNN_ATTENTION), ("cuda",)),
    "fa3": Implementation("bshd", _fa3, ("cuda",), available=lambda: "FA3_LIBRARY" in os.environ),
    "flex": Implementation("bhsd", _flex, ("cuda",)),
    "standard": Implementation("bhsd", _standard),
}


def in_layout(tensor, layout):
    """[B, S, H, D], or [B, H, S, D] where the layout says so (its own inverse), contiguous."""
    return tensor.transpose(1, 2).contiguous() if layout == "bhsd" else tensor.contiguous()
