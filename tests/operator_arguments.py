"""The options that all operators of torch.ops.flash_attn share, in the order of their schemas."""

DEFAULTS = {
    "cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0, "alibi_slopes": None,
    "rng_state": None, "key_block_counts": None, "key_block_indices": None, "query_block_counts": None,
    "query_block_indices": None, "block_size_q": 0, "block_size_k": 0, "dropout_p": 0.0, "softmax_scale": 1.0,
    "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "deterministic": False,
}


def options(**given):
    assert given.keys() <= DEFAULTS.keys()
    return tuple({**DEFAULTS, **given}.values())
