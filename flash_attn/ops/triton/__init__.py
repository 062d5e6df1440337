"""Rotary embedding, normalisation and cross-entropy where flash_attn's callers import them from.

The name is the interface's. Nothing here needs triton: the functions are torch's own operations, so that they
run on the CPU as on a GPU, and torch.compile fuses them.
"""
