"""Puts this library's attention into a model that was built with torch's."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parametrize

from .multihead_attention import MultiheadAttention

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Replacement:
    """What replace_attention did; print it.

    Attributes:
        replaced: paths of the modules that are flash_attn.nn.MultiheadAttention now ("" is the model itself).
        left: the paths of the others, and why.
    """

    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self):
        lines = [f"{len(self.replaced)} replaced by flash_attn.nn.MultiheadAttention, {len(self.left)} left"]
        lines += [f"  replaced  {path or '(the model)'}" for path in self.replaced]
        lines += [f"  left      {path or '(the model)'}: {reason}" for path, reason in self.left.items()]
        return "\n".join(lines)


def _reason_to_leave(module):
    """Why a torch.nn.MultiheadAttention, or what acts as one, stays; "" if it need not."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit"
    if isinstance(module, MultiheadAttention):
        return "it is a flash_attn.nn.MultiheadAttention already"
    if parametrize.is_parametrized(module):
        names = ", ".join(module.parametrizations)
        return f"{names} parametrised (torch.nn.utils.parametrize), which has given it a class of its own"
    if kind.__module__.startswith("torch.ao."):
        return f"it is quantised or prepared for it ({kind.__module__}.{kind.__qualname__})"
    if kind is not nn.MultiheadAttention:
        is_same = kind.forward is nn.MultiheadAttention.forward
        difference = "is a subclass" if is_same else "overrides forward"
        return f"its class {kind.__module__}.{kind.__qualname__} {difference}"
    if "forward" in vars(module):
        return "its forward has been replaced on the object"
    if module.head_dim > MAX_HEAD_DIM:
        return f"its head_dim is {module.head_dim}; at most {MAX_HEAD_DIM} is supported"
    return ""


def _is_attention(module):
    return isinstance(module, nn.MultiheadAttention) or (
        isinstance(module, torch.jit.ScriptModule)
        and getattr(module, "original_name", "") == "MultiheadAttention"
    )


def replace_attention(model):
    """Makes every torch.nn.MultiheadAttention of a model a flash_attn.nn.MultiheadAttention, in place.

    The modules stay the same objects: parameters, optimizers that hold them, hooks, state_dict, training mode
    and references from elsewhere stay valid. What differs afterwards, and what does not, that class says. In
    eval mode TransformerEncoder gives the same results as with torch's modules, zeros at padded positions
    included; its inference fast path is not taken.

    Args:
        model: a torch.nn.Module: TransformerEncoder or Transformer, a vision transformer, a detection
            decoder, or a torch.nn.MultiheadAttention.

    Returns: a Replacement: what was replaced, and what was left as it is and why. Left are subclasses (their
        forward is not torch's), quantised, parametrised and scripted modules, modules with a forward of their
        own, and head dims above 256.

    Examples:
        >>> print(replace_attention(torch.nn.TransformerEncoderLayer(64, 4)))
        1 replaced by flash_attn.nn.MultiheadAttention, 0 left
          replaced  self_attn
    """
    report = Replacement()
    for path, module in list(model.named_modules()):
        if not _is_attention(module):
            continue
        reason = _reason_to_leave(module)
        if reason:
            report.left[path] = reason
        else:
            MultiheadAttention.take_over(module)
            report.replaced.append(path)
    return report
