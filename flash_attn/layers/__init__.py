"""Layers: rotary position embedding (flash_attn.layers.rotary)."""
