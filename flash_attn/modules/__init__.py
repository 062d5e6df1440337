"""Modules: attention layers (flash_attn.modules.mha)."""
