"""Hopper's backward of so many tiles of keys that some blocks compute delta while others begin to walk
(blocks_for_delta in csrc/cuda/sm90/backward_launch.h): what the GPU's tests and the emulator's share."""

import dataclasses

import torch

from attention_case import Case
from gpu import assert_bitwise, run

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "groups": {"causal": True, "num_heads": 8},  # as many tiles of keys as without
    "window": {"window_size": (70, 30)},
    "ALiBi": {"causal": True, "alibi": "heads"},
    "softcap": {"softcap": 5.0},
}


def case(dtype, features, head_dims, **options):
    """options: among them `batch`, so large that the whole one has many tiles, and an entry has not."""
    head_dim, head_dim_v = head_dims
    sizes = {"num_heads": 4, "num_heads_k": 4, "seqlen_q": 190, "seqlen_k": 190}
    return Case(dtype, head_dim=head_dim, head_dim_v=head_dim_v, **{**sizes, **FEATURES[features], **options})


def check_entries(given):
    """Each entry's bits are those it has alone, where all blocks compute delta before."""
    inputs, dlse = given.draw(), given.draw_dlse()
    whole = run(given, inputs, dlse, deterministic=True)
    for entry in range(given.batch):
        own = slice(entry, entry + 1)
        alone = run(given, [x[own] for x in inputs], dlse[own], deterministic=True)
        parts = {field.name: getattr(whole, field.name)[own] for field in dataclasses.fields(whole)}
        assert_bitwise(alone, dataclasses.replace(whole, **parts))


def check_last_heads(dtype, features, head_dim, **options):
    """Of a causal batch's last heads no tile of keys waits for another (csrc/cuda/sm90/walk_end.h), and of
    long sequences none at all: all bits but those of dQ are as where all wait."""
    sizes = {"seqlen_q": 770, "seqlen_k": 780, **options}
    given = case(dtype, features, (head_dim, head_dim), **sizes)
    inputs, dlse = given.draw(), given.draw_dlse()
    free, waiting = (run(given, inputs, dlse, deterministic=all_wait) for all_wait in (False, True))
    given.check(inputs, dlse, free)
    assert_bitwise(waiting, free, names=("out", "lse", "dk", "dv"))


def check_gradient_that_is_not_finite(given):
    """Of one query it makes NaN what that query sees, and changes no bit elsewhere."""
    q, k, v, dout = given.draw()
    entry, query, head = given.batch - 1, given.seqlen_q // 2, 1
    bad = dout.clone()
    bad[entry, query, head] = torch.nan
    clean, dirty = (run(given, (q, k, v, of), deterministic=True) for of in (dout, bad))
    head_k = head * given.num_heads_k // given.num_heads
    sees = torch.arange(given.seqlen_k, device=q.device) <= query
    assert given.causal and given.seqlen_q == given.seqlen_k
    places = {"dq": (entry, query, head), "dk": (entry, sees, head_k), "dv": (entry, sees, head_k)}
    for name, place in places.items():
        of_clean, of_dirty = getattr(clean, name), getattr(dirty, name)
        assert torch.isnan(of_dirty[place]).all(), name
        of_dirty[place] = of_clean[place]
        assert torch.equal(of_dirty, of_clean), name
