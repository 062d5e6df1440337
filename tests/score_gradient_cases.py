"""The backward that has dS in device memory (csrc/cuda/sm90/score_gradients.cuh), head dims above 128 on
Hopper: what the GPU's tests and the emulator's share."""

import torch

from attention_case import Case
from gpu import assert_bitwise

# Memory for it, in what a head needs if no mask leaves out any: for all heads, two places, one, none.
HEADS = (9, 2.1, 1.1, 0)
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (90, 20)},
    "groups": {"causal": True, "num_heads_k": 2},
    "more keys": {"causal": True, "seqlen_k": 650, "batch": 1},
    "more queries": {"window_size": (-1, 30), "seqlen_q": 650, "seqlen_k": 300, "batch": 1},
    "softcap, ALiBi": {"causal": True, "softcap": 5.0, "alibi": "heads"},
    "one head": {"batch": 1, "num_heads": 1, "num_heads_k": 1},
}
HEAD_DIMS = ((192, 192), (192, 128), (256, 256))


def case(dtype, features, head_dims, **options):
    head_dim, head_dim_v = head_dims
    sizes = {"batch": 2, "seqlen_q": 333, "seqlen_k": 390, "num_heads": 4, "num_heads_k": 4}
    return Case(dtype, head_dim=head_dim, head_dim_v=head_dim_v, **{**sizes, **FEATURES[features], **options})


def set_memory(monkeypatch, given, heads):
    queries, keys = (given.seqlen_q + 63) // 48 * 48, (given.seqlen_k + 63) // 64 * 64
    size = heads * queries * keys * 2 / 2**20 * given.num_heads / given.num_heads_k
    monkeypatch.setenv("FLASH_ATTN_SCORE_GRADIENT_MIB", str(size))


def check_bits_for_each_size(given, run, monkeypatch):
    """However much memory there is; with none a kernel computes dS once more, as the other one does."""
    inputs, dlse = given.draw(), given.draw_dlse()
    results = []
    for heads in HEADS:
        set_memory(monkeypatch, given, heads)
        results.append(run(given, inputs, dlse))
    for result in results[1:]:
        assert_bitwise(result, results[0])


def check_key_that_is_not_finite(given, run):
    """It makes dQ NaN where it is seen, also where its probability is 0, and changes no bit elsewhere."""
    q, k, v, dout = given.draw()
    key = given.seqlen_k // 2
    bad = k.clone()
    bad[:, key] = torch.inf
    clean, dirty = (run(given, (-q.abs(), keys, v, dout)).dq for keys in (k, bad))
    sees = torch.arange(given.seqlen_q, device=q.device) + given.seqlen_k - given.seqlen_q >= key
    assert sees.any() and not sees.all()
    assert torch.isnan(dirty[:, sees]).all()
    assert torch.equal(dirty[:, ~sees], clean[:, ~sees])
