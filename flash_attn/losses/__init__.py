"""Losses: cross-entropy over large vocabularies (flash_attn.losses.cross_entropy)."""
