"""torch.nn's attention with this library's kernels: the module, and a function that puts it into a model."""

from .multihead_attention import MultiheadAttention
from .replacement import Replacement, replace_attention

__all__ = ["MultiheadAttention", "Replacement", "replace_attention"]
