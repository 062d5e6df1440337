"""Functions other than attention, in plain torch for every device (flash_attn.ops.triton)."""
