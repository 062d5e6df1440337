"""The name under which other projects look for flash_attn's compiled module; see flash_attn/raw_module.py."""

from flash_attn.raw_module import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
