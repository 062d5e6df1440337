"""Accuracy of the GPU engines where tensor cores have edges: head dims, lengths around tiles, long sequences,
every pair of features. Row by row, as acceptance.py says."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

import reference
from attention_case import Case
from gpu import DEVICE, HALVES, assert_bitwise, check, deterministic_as_asked, needs_gpu, run  # noqa: F401
from test_block_sparse import BLOCK_SIZES, random_map
from test_masks import WINDOWS, onehot_values, poisoned
from test_properties import SETTINGS, dense_cases, packed_cases
from test_varlen import FEATURES as PACKED_FEATURES
from test_varlen import OFFSETS, packed_case

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]

HEAD_DIMS = [1, 7, 8, 16, 24, 40, 64, 72, 80, 96, 100, 128, 160, 192, 224, 256]
UNEQUAL_HEAD_DIMS = [(192, 128), (128, 192), (64, 256), (256, 64), (40, 72), (72, 40), (1, 256), (256, 1),
                     (8, 100), (100, 7), (96, 64), (16, 224), (129, 65)]
EDGES = [1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 257, 513, 1000]
TILES = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim,head_dim_v", [(d, d) for d in HEAD_DIMS] + UNEQUAL_HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(dtype, head_dim, head_dim_v, causal):
    case = Case(dtype, 1, 200, 333, 4, 2, head_dim, head_dim_v, causal=causal, device=DEVICE)
    case.check(dlse=case.draw_dlse())


@pytest.mark.parametrize("seqlen_q", EDGES)
@pytest.mark.parametrize("seqlen_k", EDGES)
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (66, 30)}], ids=str)
def test_around_tile_edges(seqlen_q, seqlen_k, features):
    turn = EDGES.index(seqlen_q) + 2 * EDGES.index(seqlen_k)
    dtype, dims = HALVES[turn % 2], TILES[turn % len(TILES)]
    Case(dtype, 1, seqlen_q, seqlen_k, 2, 1, *dims, device=DEVICE, **features).check()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 8, 7])
@pytest.mark.parametrize("packed", [False, True])
def test_grouped_heads(dtype, dims, group, packed):
    heads = {"num_heads": 2 * group, "num_heads_k": 2}
    offsets = {"cu_seqlens_q": (0, 70, 70, 199), "cu_seqlens_k": (0, 150, 160, 289)} if packed else {}
    case = Case(dtype, 1, 129, 200, **heads, head_dim=dims[0], head_dim_v=dims[1], causal=True, device=DEVICE,
                **offsets)
    case.check()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seqlen_q,seqlen_k,head_dim,features", [
    (4096, 4096, 128, {"causal": True}), (4096, 4096, 64, {"window_size": (1000, 0)}),
    (4096, 4096, 256, {"causal": True, "softcap": 30.0}), (8192, 8192, 64, {"causal": True}),
    (8192, 8192, 128, {"window_size": (700, 300)}), (8192, 8192, 96, {"causal": True, "alibi": "heads"}),
    (1, 8192, 128, {}), (77, 8192, 64, {"causal": True}), (8192, 100, 128, {}),
    (8192, 1000, 64, {"causal": True}), (2048, 2048, 64, {"dropout_p": 0.1, "causal": True}),
    (6200, 4200, 128, {}), (4200, 4200, 256, {}), (8400, 8400, 192, {"causal": True})], ids=str)
def test_long_sequences(dtype, seqlen_q, seqlen_k, head_dim, features):
    """All rows are judged: a float64 score matrix of 8192 x 8192 fits a GPU."""
    Case(dtype, 1, seqlen_q, seqlen_k, 2, 1, head_dim, device=DEVICE, **features).check()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", [(24, 40), (64, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("features", PACKED_FEATURES, ids=str)
def test_packed(dtype, dims, name, features):
    case = packed_case(name, dtype, head_dim=dims[0], head_dim_v=dims[1], tail=7, device=DEVICE, **features)
    case.check(dlse=case.draw_dlse())


@pytest.mark.parametrize("cu_seqlens_q,cu_seqlens_k,head_dim,num_heads_k", [
    ((0, 76, 110, 256), (0, 1, 2, 3), 32, 2),                              # flash-attention#443
    ((0, 0, 1208, 2048, 2048), (0, 2538, 4280, 5120, 8192), 256, 2),       # flash-attention#2562
    ((0, 0, 0, 0, 1), (0, 0, 0, 0, 1), 64, 1),                             # flash-attention#1619
    ((0, 1, 1), (0, 0, 1), 64, 1),                                         # flash-attention#1537
])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_offsets_that_broke_others(cu_seqlens_q, cu_seqlens_k, head_dim, num_heads_k, causal):
    Case(torch.bfloat16, num_heads=2, num_heads_k=num_heads_k, head_dim=head_dim, cu_seqlens_q=cu_seqlens_q,
         cu_seqlens_k=cu_seqlens_k, causal=causal, device=DEVICE).check()


@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("block_size", [*BLOCK_SIZES[1:], (64, 128), (128, 64), 128], ids=str)
@pytest.mark.parametrize("features", [
    {}, {"causal": True}, {"window_size": (100, 40), "alibi": "batch"}, {"softcap": 4.0, "causal": True}],
    ids=str)
def test_block_sparse(dims, block_size, features):
    case = Case(torch.bfloat16, 2, 300, 400, 4, 2, *dims, device=DEVICE, **features)
    check(case, dlse=case.draw_dlse(), block_map=random_map(case, block_size), block_size=block_size)


@pytest.mark.parametrize("causal,window_size", WINDOWS)
@pytest.mark.parametrize("seqlen_q,seqlen_k", [
    (130, 200), (200, 130), (256, 256), (1, 256), (256, 1), (65, 64)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_visibility_is_exact(seqlen_q, seqlen_k, causal, window_size, head_dim):
    """With equal scores the probabilities show the mask itself, element for element."""
    case = Case(torch.bfloat16, 1, seqlen_q, seqlen_k, 2, 1, head_dim, causal=causal, window_size=window_size,
                device=DEVICE)
    q, k, _, _ = case.draw()
    p, lse, _ = case.call(torch.zeros_like(q), k, onehot_values(case), return_attn_probs=True)
    visible = reference.visible_keys(seqlen_q, seqlen_k, causal, window_size, DEVICE)
    assert torch.equal(p[0] > 0, visible[:, None].expand(-1, 2, -1))
    count = visible.sum(dim=-1)
    torch.testing.assert_close(lse[0].exp(), count.float().expand(2, -1), rtol=1e-5, atol=0)
    assert (lse[0, :, count == 0] == -math.inf).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_k,features", [
    (150, 400, {"window_size": (30, 40)}), (70, 300, {"causal": True, "window_size": (9, -1)}),
    (200, 200, {"window_size": (0, 0), "softcap": 3.0})], ids=str)
def test_invisible_keys_and_queries_change_nothing(dtype, value, dims, seqlen_q, seqlen_k, features):
    """NaN in keys that no query sees, and in other batch entries: bitwise as with zeros there."""
    case = Case(dtype, 2, seqlen_q, seqlen_k, 4, 2, *dims, device=DEVICE, **features)
    q, k, v, dout = case.draw()
    visible = reference.visible_keys(seqlen_q, seqlen_k, case.causal, case.window_size, DEVICE)
    dead_keys = ~visible.any(dim=0)
    results = []
    for fill in (0, value):
        inputs = (q.clone(), poisoned(k, dead_keys, fill), poisoned(v, dead_keys, fill), dout.clone())
        for x in inputs:
            x[1] = fill
        results.append([x[0] for x in vars(run(case, inputs, deterministic=True)).values()])
    assert_bitwise(*results)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("key", [0, 100, 199])
def test_bad_key_spoils_only_rows_that_see_it(dtype, value, dims, key):
    case = Case(dtype, 1, 200, 200, 2, 1, *dims, causal=True, device=DEVICE)
    q, k, v, dout = case.draw()
    dout[:, key:] = 0
    clean = run(case, (q, k, v, dout), deterministic=True)
    dirty = run(case, (q, poisoned(k, key, value), poisoned(v, key, value), dout), deterministic=True)
    before = [(x.out[:, :key], x.lse[..., :key], x.dq[:, :key]) for x in (dirty, clean)]
    assert_bitwise(*before, names=("out", "lse", "dq"))
    assert dirty.out[:, key:].isnan().all()


@pytest.mark.parametrize("dtype,value,head_dim", [
    (torch.bfloat16, 133120.0, 64), (torch.float16, 256.0, 80), (torch.float16, -256.0, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_equal_huge_inputs(dtype, value, head_dim, causal):
    """PyTorch's own edge case: every element the same, scores far beyond the dtype's range."""
    case = Case(dtype, 1, 150, 150, 2, 2, head_dim, causal=causal, device=DEVICE)
    q, k, v, dout = (torch.full_like(x, value) for x in case.draw())
    result = run(case, (q, k, v, torch.ones_like(dout)))
    torch.testing.assert_close(result.out, v, rtol=2**-7, atol=0)
    assert result.lse.isfinite().all()
    if result.lse.max() < 1e6:  # larger ones are rounded so much that a recomputed probability means nothing
        columns = result.dv.double().sum(dim=1)
        torch.testing.assert_close(columns, torch.full_like(columns, 150), rtol=0.1, atol=0)
        assert not result.dq.isnan().any() and not result.dk.isnan().any()


FACTORS = {
    "dtype": HALVES,
    "dims": [*TILES, (40, 72), (64, 256), (7, 8)],
    "lengths": [(1, 300), (129, 129), (200, 333), (333, 200), (64, 64), (257, 700), (513, 63)],
    "heads": [(2, 2), (4, 2), (8, 1), (7, 1)],
    "mask": [{}, {"causal": True}, {"window_size": (65, -1)}, {"window_size": (33, 70)},
             {"window_size": (-1, 20)}, {"causal": True, "window_size": (100, 5)}],
    "score": [{}, {"softcap": 5.0}, {"alibi": "heads"}, {"alibi": "batch"}, {"dropout_p": 0.2},
              {"dropout_p": 0.5, "alibi": "heads"}, {"softmax_scale": 0.3}, {"softmax_scale": -0.2}],
    "layout": ["dense", "packed", 64, 128, (64, 128), (48, 33)],
    "with_dlse": [False, True],
    "deterministic": [False, True],
}


def pairwise(factors, candidates=40):
    """Rows of one value a factor, in which every two values of different factors meet; as indices."""
    names = list(factors)
    missing = {(a, i, b, j) for a, b in itertools.combinations(range(len(names)), 2)
               for i in range(len(factors[names[a]])) for j in range(len(factors[names[b]]))}
    generator, rows = random.Random(0), []

    def met(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(names)), 2)} & missing

    while missing:
        a, i, b, j = min(missing)
        drawn = [[generator.randrange(len(values)) for values in factors.values()] for _ in range(candidates)]
        for row in drawn:
            row[a], row[b] = i, j
        rows.append(max(drawn, key=lambda row: len(met(row))))
        missing -= met(rows[-1])
    return rows


COMBINATIONS = [{name: FACTORS[name][i] for name, i in zip(FACTORS, row)} for row in pairwise(FACTORS)]


def test_combinations_hold_every_pair():
    for (a, values_a), (b, values_b) in itertools.combinations(FACTORS.items(), 2):
        for x, y in itertools.product(values_a, values_b):
            assert any(row[a] == x and row[b] == y for row in COMBINATIONS), (a, x, b, y)


def combined_case(dtype, dims, lengths, heads, mask, score, layout):
    seqlen_q, seqlen_k = lengths
    features = {**mask, **score, "device": DEVICE}
    if layout == "packed":
        lengths_q, lengths_k = (seqlen_q, 0, 5, seqlen_q // 3), (seqlen_k, 17, 0, seqlen_k // 2)
        features["tail"] = 9
        for name, parts in (("cu_seqlens_q", lengths_q), ("cu_seqlens_k", lengths_k)):
            features[name] = (0, *itertools.accumulate(parts))
    return Case(dtype, 2, *lengths, *heads, *dims, **features)


@pytest.mark.parametrize("row", COMBINATIONS, ids=range(len(COMBINATIONS)))
def test_every_pair_of_features(row):
    factors = dict(row)
    with_dlse, deterministic = factors.pop("with_dlse"), factors.pop("deterministic")
    case = combined_case(**factors)
    blocks = {}
    if factors["layout"] not in ("dense", "packed"):
        blocks["block_size"] = factors["layout"]
        blocks["block_map"] = random_map(case, factors["layout"], density=0.6)
    check(case, dlse=case.draw_dlse() if with_dlse else None, deterministic=deterministic, **blocks)


GPU_DTYPES = {torch.float32: torch.bfloat16, torch.float64: torch.float16}


@st.composite
def on_gpu(draw, cases):
    """The CPU engine's cases, in the dtypes and with the head dims of the GPU's."""
    case = draw(cases)
    head_dims = st.one_of(st.integers(1, 256), st.sampled_from(HEAD_DIMS))
    dtype = GPU_DTYPES.get(case.dtype, case.dtype)
    return replace(case, dtype=dtype, device=DEVICE, head_dim=draw(head_dims), head_dim_v=draw(head_dims),
                   softmax_scale=None)


@settings(SETTINGS, max_examples=120)
@given(case=on_gpu(dense_cases()), with_dlse=st.booleans(), deterministic=st.booleans())
def test_drawn_dense(case, with_dlse, deterministic):
    note(repr(case))
    check(case, dlse=case.draw_dlse() if with_dlse else None, deterministic=deterministic)


@settings(SETTINGS, max_examples=120)
@given(case=on_gpu(packed_cases()), with_dlse=st.booleans())
def test_drawn_packed(case, with_dlse):
    note(repr(case))
    check(case, dlse=case.draw_dlse() if with_dlse else None)


@settings(SETTINGS, max_examples=80)
@given(case=on_gpu(dense_cases()),
       block_size=st.one_of(st.sampled_from([64, 128]), st.integers(1, 140)),
       density=st.sampled_from([0.1, 0.5, 0.9]))
def test_drawn_block_sparse(case, block_size, density):
    note(f"{case!r}, random_map(case, {block_size}, {density})")
    check(case, block_map=random_map(case, block_size, density), block_size=block_size)
