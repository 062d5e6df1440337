"""Up to 128 queries of more heads than a GPU has multiprocessors: on Hopper two blocks share one, at head dim
64. For kernels on a GPU and on the emulator."""

import torch

from acceptance import Expected
from attention_case import Case
from gpu import check

SHORT = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (60, 19)},
    "narrow": {"head_dim": 40, "head_dim_v": 24, "causal": True},
    "many tiles of keys": {"seqlen_q": 128, "seqlen_k": 700, "window_size": (600, 100)},
    "empty rows": {"seqlen_q": 120, "seqlen_k": 70, "causal": True},
    "packed": {"cu_seqlens_q": (0, 70, 70, 190, 191), "cu_seqlens_k": (0, 10, 60, 260, 300), "tail": 3,
               "causal": True},
}


def short(heads, device, dtype=torch.bfloat16, **features):
    sizes = {"seqlen_q": 100, "seqlen_k": 130, "head_dim": 64, "num_heads": heads, "num_heads_k": heads,
             **features}
    return Case(dtype, 1, device=device, **sizes)


def check_short_maps(heads, device, features):
    """Blocks of 64 keys, some of them with holes; a query block that sees none."""
    given = short(heads, device, seqlen_q=128, seqlen_k=400, **features)
    block_map = torch.rand(1, heads, 2, 7, device=device) < 0.5
    block_map[:, 0, 0] = False
    check(given, block_map=block_map, block_size=(64, 64))
    inputs, mask = given.draw(), torch.rand(1, heads, 128, 400, device=device) < 0.8
    Expected(given.attend(mask), *inputs).check(**vars(given.run(inputs, attn_mask=mask)))


def check_short_growing_scores(heads, device):
    """Of which the first tile of keys says nothing, for some heads: those tiles are done again."""
    given = short(heads, device, torch.float16, seqlen_k=300)
    q, k, v, dout = given.draw()
    k[:, 100:, ::3] *= 30
    given.check_forward((q, k, v, dout))


def check_short_bad_values(heads, device):
    """Keys and values of infinity, which the causal mask hides from all queries but the last one."""
    given = short(heads, device, causal=True)
    q, k, v, _ = given.draw()
    with torch.no_grad():
        expected = given.call(q, k, v)
        k[:, -1, ::2], v[:, -1, ::2] = float("inf"), float("nan")
        actual = given.call(q, k, v)
    assert torch.equal(actual[:, :-1], expected[:, :-1])
    assert torch.equal(actual[:, :, 1::2], expected[:, :, 1::2])
    assert actual[:, -1, ::2].isnan().all()
