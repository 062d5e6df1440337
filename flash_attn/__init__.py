"""Exact IO-aware attention for PyTorch: a drop-in for flash_attn, from scratch in C++ (arXiv 2205.14135)."""

from . import not_shipped  # noqa: F401  (its import says what to use instead of what is missing)
from .attention_mask import AttentionMask
from .block_sparse import BlockSparseMask, flash_attn_block_sparse_func
from .explain import explain
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .info import build_info

__version__ = "2.8.3"

__all__ = [
    "AttentionMask",
    "BlockSparseMask",
    "build_info",
    "explain",
    "flash_attn_block_sparse_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
