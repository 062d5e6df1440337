"""What test_emulator.py runs on emulated kernels: small problems that meet each kernel of the table with what
it can do. The inputs of `pytest tests`, which run on real engines, are many times as many."""

import dataclasses
import functools

import pytest
import torch

import flash_attn
import short_sequences
from acceptance import Expected
from attention_case import Case, check_result
from bias_gradient import bias_gradient, check_bias_gradient
from emulated_case import HALF, SINGLE, case, rotated
from gpu import check_neighbours_of_infinite_queries, deterministic_as_asked  # noqa: F401
from short_sequences import SHORT, short
from test_kvcache import Cache

pytestmark = pytest.mark.usefixtures("deterministic_as_asked")
FEATURES = {
    "plain": {},
    "causal": {"causal": True, "num_heads_k": 1},
    "window": {"window_size": (40, 9)},
    "softcap": {"softcap": 2.0, "alibi": "batch", "head_dim_v": 40},
    "dropout": {"causal": True, "alibi": "heads", "dropout_p": 0.2},
    "packed": {"cu_seqlens_q": (0, 70, 70, 203), "cu_seqlens_k": (0, 10, 60, 260), "tail": 3, "causal": True},
}


TRANSFORMS = {
    "softcap": {"softcap": 1.5, "causal": True, "num_heads_k": 1},
    "alibi": {"alibi": "heads", "causal": True},
    "both": {"softcap": 3.0, "alibi": "batch", "window_size": (-1, 20), "num_heads_k": 1},
    "far": {"alibi": "heads", "seqlen_q": 550, "seqlen_k": 230},  # queries that no key is near
    "packed": {**FEATURES["packed"], "alibi": "batch", "softcap": 2.0},
    "negative": {"softmax_scale": -0.2, "window_size": (-1, 30)},
    "spread": {"softmax_scale": 3.0, "softcap": 200.0},  # many probabilities are 0
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype,head_dim", [(HALF, 64), (HALF, 72), (HALF, 128), (HALF, 192), (HALF, 256),
                                            (SINGLE, 64), (SINGLE, 200)])
def test_forward_and_backward(dtype, head_dim, features):
    given = case(dtype, head_dim, **FEATURES[features])
    given.check(given.draw(), given.draw_dlse())


@pytest.mark.parametrize("features", TRANSFORMS)
@pytest.mark.parametrize("dtype,head_dim", [(HALF, 64), (HALF, 128), (HALF, 192), (HALF, 256),
                                            (torch.float16, 64)])
def test_transformed_scores(dtype, head_dim, features):
    """On Hopper by kernels of their own."""
    given = case(dtype, head_dim, **{"seqlen_k": 300, **TRANSFORMS[features]})
    given.check(given.draw(), given.draw_dlse())


@pytest.mark.parametrize("features", ["plain", "causal", "window", "packed", "softcap"])
@pytest.mark.parametrize("num_heads,num_heads_k", [(2, 2), (4, 1), (6, 2), (34, 2)])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_few_queries(head_dim, num_heads, num_heads_k, features):
    """Heads that share keys are rows of one tile, and keys are split."""
    few = {"cu_seqlens_q": (0, 3, 3, 12), "cu_seqlens_k": (0, 10, 60, 260), "tail": 3, "causal": True}
    given = few if features == "packed" else {**FEATURES[features], "seqlen_q": 5, "seqlen_k": 700}
    if features == "window":
        given["window_size"] = (300, 3)
    case(HALF, head_dim, **{**given, "num_heads": num_heads, "num_heads_k": num_heads_k}).check_forward()


@pytest.mark.parametrize("layout", [{}, {"empty": True}, {"padded": True, "indexed": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_caches_of_few_queries(head_dim, layout):
    """72 rows a key head, which on Hopper are one tile, and three parts of the keys."""
    sizes = {"batch": 2, "seqlen_q": 12, "capacity": 768, "heads": 12, "heads_k": 2, "head_dim": head_dim}
    Cache("cpu", HALF, new=0, **sizes, **layout).check(causal=True, num_splits=3)


@pytest.mark.parametrize("num_splits", [2, 3, 7])
@pytest.mark.parametrize("seqlen_q", [2, 15])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_clusters_of_few_queries(head_dim, seqlen_q, num_splits):
    """One tile, whose parts are a cluster, but 7 of 120 rows. Rows are done again in some of them, and one
    has no keys."""
    given = Case(torch.float16, 1, seqlen_q, 2100, 8, 1, head_dim, window_size=(1200, 0))
    q, k, v, _ = given.draw()
    k[:, 1700:] *= 30
    out, lse = flash_attn.flash_attn_with_kvcache(q, k, v, window_size=(1200, 0), num_splits=num_splits,
                                                  return_softmax_lse=True)
    Expected(given.attend(), q, k, v).check(out=out, lse=lse)


HEADS = 6  # of which the emulated device has four multiprocessors


@pytest.mark.parametrize("dtype", [HALF, torch.float16])
@pytest.mark.parametrize("features", SHORT)
def test_short_sequences(features, dtype):
    short(HEADS, "cpu", dtype, **SHORT[features]).check_forward()


def test_short_sequences_of_groups():
    short(HEADS, "cpu", num_heads_k=2, causal=True).check_forward()


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (300, 70)}], ids=str)
def test_maps_of_short_sequences(features):
    short_sequences.check_short_maps(HEADS, "cpu", features)


def test_growing_scores_of_short_sequences():
    short_sequences.check_short_growing_scores(HEADS, "cpu")


def test_bad_values_of_short_sequences():
    short_sequences.check_short_bad_values(HEADS, "cpu")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_of_few_queries(head_dim):
    """Other kernels take them: heads that share keys have masks of their own."""
    given = case(HALF, head_dim, 5, 300, num_heads=4, num_heads_k=2)
    inputs, mask = given.draw(), torch.rand(1, 4, 5, 300) < 0.7
    Expected(given.attend(mask), *inputs).check(**vars(given.run(inputs, attn_mask=mask)))


@pytest.mark.parametrize("features", [*FEATURES, "grouped"])
def test_values_with_a_head_dim_of_their_own(features):
    """Hopper has kernels for queries and keys of 192 with values of 128, unless scores are transformed."""
    grouped = {"num_heads": 6, "num_heads_k": 2, "causal": True, "head_dim_v": 100}
    given = case(HALF, 192, 290, 330, **{"head_dim_v": 128, **FEATURES.get(features, grouped)})
    given.check(given.draw(), given.draw_dlse())


@pytest.mark.parametrize("dtype", [HALF, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_alibi_hides_what_is_far(head_dim, dtype):
    """The first tile of keys, whose scores are high, from the last queries; near keys have low ones."""
    given = case(dtype, head_dim, 300, 300, alibi="heads", causal=True)
    q, k, v, dout = given.draw()
    q[..., 0], k[..., 0] = 6, 0
    k[:, :100, :, 0] = 40
    given.check((q, k, v, dout))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic(head_dim):
    given = case(HALF, head_dim, causal=True)
    first, again = (given.run(deterministic=True) for _ in range(2))
    given.check(actual=first)
    for field in dataclasses.fields(first):
        assert torch.equal(getattr(first, field.name), getattr(again, field.name)), field.name


def test_keys_of_many_tiles():
    """So many that the kernels for long sequences are taken."""
    given = case(HALF, 64, seqlen_q=130, seqlen_k=1100, causal=True)
    given.check()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("features", [{}, {"causal": True, "dropout_p": 0.2, "num_heads_k": 1}], ids=str)
def test_masks_and_biases(features, head_dim):
    given = case(HALF, head_dim, 150, 300, **features)
    mask = torch.rand(1, 2, 150, 300) < 0.7
    mask[..., 128:256] = True  # blocks without a hidden element
    mask[:, :, 100:110] = False
    bias = torch.randn(1, 1, 150, 300).masked_fill(torch.rand(150, 300) < 0.1, -torch.inf).to(HALF)
    for options in ({"attn_mask": mask}, {"attn_bias": bias}, {"attn_mask": mask, "attn_bias": bias}):
        inputs, dlse = given.draw(), given.draw_dlse()
        attend = given.attend(options.get("attn_mask"), options.get("attn_bias"))
        expected = Expected(attend, *inputs, dlse)
        actual = given.run(inputs, dlse, **options)
        check_result(actual, expected)


BIASES = {
    "heads": ((1, 2, 150, 304), {}),
    "batches": ((2, 1, 150, 304), {"causal": True}),
    "rows": ((2, 2, 1, 304), {"num_heads_k": 1}),
    "one": ((1, 1, 1, 304), {"window_size": (100, 40)}),
    "ALiBi": ((1, 2, 150, 304), {"alibi": "heads", "softmax_scale": -0.2, "causal": True}),
    "softcap": ((1, 1, 150, 304), {"softcap": 2.0}),
}


@pytest.mark.parametrize("which", BIASES)
@pytest.mark.parametrize("dtype,head_dim", [(HALF, 64), (HALF, 128), (HALF, 192), (HALF, 256),
                                            (torch.float16, 64)])
def test_biases_of_aligned_rows(dtype, head_dim, which):
    """On Hopper by kernels of their own."""
    shape, features = BIASES[which]
    given = dataclasses.replace(case(dtype, head_dim, 150, 304, **features), batch=2)
    bias = 3 * torch.randn(shape)
    bias[..., 200:210] = -torch.inf
    bias[..., -1:, :130] = -torch.inf  # the whole first tile, of some queries
    bias = bias.masked_fill(torch.rand(shape) < 0.1, -torch.inf).to(dtype)
    mask = torch.rand(1, 1, 150, 304) < 0.8 if which == "heads" else None
    inputs, dlse = given.draw(), given.draw_dlse()
    expected = Expected(given.attend(mask, bias), *inputs, dlse)
    actual = given.run(inputs, dlse, attn_bias=bias, attn_mask=mask)
    check_result(actual, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_what_a_bias_hides_does_not_matter(head_dim, value):
    """Whatever lies behind it, in K, V, Q or dO: the rows that don't see it keep their bits."""
    given = case(HALF, head_dim, 150, 304)
    bias = torch.randn(1, 2, 150, 304).to(HALF)
    bias[..., 250:] = bias[..., 33, :] = -torch.inf
    bias[..., 40:, 250] = 0
    results = []
    for filled in (0.0, value):
        q, k, v, dout = given.draw()
        for x, rows in ((k, slice(250, None)), (v, slice(250, None)), (q, 33), (dout, 33)):
            x[:, rows] = filled
        results.append(given.run((q, k, v, dout), attn_bias=bias, deterministic=True))
    clean, dirty = results
    for name in ("out", "dq"):
        assert torch.equal(getattr(dirty, name)[:, :40], getattr(clean, name)[:, :40]), name
    assert not dirty.out[:, 40:].isfinite().any()
    for name in ("dk", "dv"):  # keys that nobody sees
        assert (getattr(dirty, name)[:, 251:] == 0).all(), name


@pytest.mark.parametrize("dtype", [HALF, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("low", [-1e4, -3e4, torch.finfo(HALF).min])
def test_biases_that_all_but_hide_the_first_keys(low, head_dim, dtype):
    """As masks that are added do, of sequences that are padded on the left."""
    given = dataclasses.replace(case(dtype, head_dim, 150, 304), batch=2)
    bias = torch.zeros(2, 1, 1, 304)
    bias[1, ..., :290] = low
    bias = bias.clamp(min=torch.finfo(dtype).min).to(dtype)
    inputs = given.draw()
    Expected(given.attend(None, bias), *inputs).check(**vars(given.run(inputs, attn_bias=bias)))


# Biases that begin at multiples of 16 bytes go to Hopper's own kernel, whatever their gradient's rows.
GRADIENTS = {
    **{name: BIASES[name] for name in ("heads", "batches", "rows", "one", "ALiBi")},
    "each": ((2, 2, 300, 301), {"num_heads_k": 1, "window_size": (150, 9), "head_dim_v": 40}),
    "odd row": ((1, 1, 1, 301), {"causal": True}),
    "few": ((1, 2, 5, 40), {"causal": True}),
}


def bias_of(shape, dtype):
    """Of rows that begin at multiples of 16 bytes."""
    bias = torch.randn(*shape[:-1], (shape[-1] + 7) // 8 * 8).to(dtype)
    return bias[..., :shape[-1]]


@pytest.mark.parametrize("which", GRADIENTS)
@pytest.mark.parametrize("dtype,head_dim", [(HALF, 40), (HALF, 64), (HALF, 96), (HALF, 128),
                                            (torch.float16, 64)])
def test_gradient_of_a_bias(dtype, head_dim, which):
    shape, features = GRADIENTS[which]
    seqlen_q = 150 if shape[2] == 1 else shape[2]
    given = dataclasses.replace(case(dtype, head_dim, seqlen_q, shape[-1], **features), batch=2)
    bias = bias_of(shape, dtype)
    check_bias_gradient(given, bias)
    if which == "heads":  # one row in memory, but for each query a gradient
        check_bias_gradient(given, bias[:, :, :1].expand(shape))
    bias[..., 20:30] = -torch.inf
    bias[..., -1:, :130] = -torch.inf  # the whole first tile, of some queries
    bias[torch.rand(shape) < 0.1] = -torch.inf
    mask = torch.rand(1, 2, seqlen_q, shape[-1]) < 0.8
    mask[:, :, 3] = False
    check_bias_gradient(given, bias, mask if which in ("heads", "rows") else None)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", [(1, 2, 150, 300), (1, 1, 1, 300)])
def test_gradient_of_a_bias_by_the_portable_kernel(shape, head_dim, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_SM90", "0")
    check_bias_gradient(dataclasses.replace(case(HALF, head_dim, 150, 300), batch=2),
                        torch.randn(shape).to(HALF))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("by", ["bias", "row of the bias", "mask"])
def test_what_is_hidden_does_not_matter_to_the_gradient_of_a_bias(by, head_dim, value):
    """In K, V, Q and dO, and in the bias behind a mask: bitwise as with zeros there."""
    given = dataclasses.replace(case(HALF, head_dim, 150, 304), batch=2)
    (q, k, v, dout), dlse = given.draw(), given.draw_dlse()
    bias = torch.randn(1, 2, 1 if "row" in by else 150, 304).to(HALF)
    hidden = torch.zeros(1, 1, 150, 304, dtype=torch.bool)
    hidden[..., 260:270] = True
    hidden[..., 33, :] = "row" not in by
    mask = (torch.rand(hidden.shape) < 0.8) & ~hidden if by == "mask" else None
    gradients = []
    for filled in (0.0, value):
        bias = bias.masked_fill(hidden[:, :, :bias.shape[2]], filled if by == "mask" else -torch.inf)
        k[:, 260:270] = v[:, 260:270] = filled
        if "row" not in by:
            q[:, 33] = dout[:, 33] = filled
        attend = functools.partial(given.call, attn_mask=mask, return_attn_probs=True)
        gradients.append(bias_gradient(attend, bias, (q, k, v, dout), dlse))
    clean, dirty = gradients
    assert clean.isfinite().all() and torch.equal(clean, dirty)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_behind_the_diagonal_does_not_matter_to_the_gradient_of_a_bias(head_dim, value):
    """The first 106 queries see none of the last keys, of the first 100 the bias is filled there, too."""
    given = dataclasses.replace(case(HALF, head_dim, 150, 304, causal=True), batch=2)
    (q, k, v, dout), dlse = given.draw(), given.draw_dlse()
    bias, gradients = torch.randn(1, 2, 150, 304).to(HALF), []
    for filled in (0.0, value):
        k[:, 260:] = v[:, 260:] = bias[..., :100, 260:] = filled
        attend = functools.partial(given.call, return_attn_probs=True)
        gradients.append(bias_gradient(attend, bias, (q, k, v, dout), dlse)[:, :, :106])
    clean, dirty = gradients
    assert clean.isfinite().all() and torch.equal(clean, dirty)


@pytest.mark.parametrize("page", [16, 48, 64, 256])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_paged_cache(num_splits, page):
    """What lies in no sequence's pages is never read. Pages end within tiles of keys, or go on."""
    lengths = torch.tensor([701, 77], dtype=torch.int32)
    pages = -(-701 // page)
    k, v = (torch.full((2 * pages + 3, page, 2, 64), torch.nan, dtype=HALF) for _ in range(2))
    table = torch.randperm(len(k))[: 2 * pages].view(2, pages).int()
    dense = torch.randn(2, 2, 701, 2, 64).to(HALF)  # keys, values
    for cache, filled in zip((k, v), dense, strict=True):
        for sequence in range(2):
            for position in range(int(lengths[sequence])):
                cache[table[sequence, position // page], position % page] = filled[sequence, position]
    q = torch.randn(2, 5, 4, 64).to(HALF)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, block_table=table, causal=True, num_splits=num_splits,
        return_softmax_lse=True)
    for sequence, length in enumerate(lengths.tolist()):
        alone = Case(HALF, 1, 5, length, 4, 2, 64, causal=True)
        Expected(alone.attend(), q[sequence, None], dense[0, sequence, None, :length],
                 dense[1, sequence, None, :length]).check(out=out[sequence, None], lse=lse[sequence, None])


@pytest.mark.parametrize("features", ["plain", "causal", "packed"])
@pytest.mark.parametrize("head_dim,seqlen_k", [(64, 1400), (96, 3200), (128, 2100), (256, 1100)])
def test_forward_of_many_keys(head_dim, seqlen_k, features):
    """By the kernels that are for long sequences, several tiles of queries a block."""
    packed = {"cu_seqlens_q": (0, 130, 201), "cu_seqlens_k": (0, seqlen_k, seqlen_k + 300), "tail": 3}
    chosen = {"plain": {}, "causal": {"causal": True}, "packed": packed}[features]
    given = case(HALF, head_dim, 201, seqlen_k, **chosen)
    given.check_forward(given.draw())


@pytest.mark.parametrize("dtype", [HALF, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_scores_that_grow_along_the_keys(head_dim, dtype):
    """Far above what the first tile of keys has."""
    given = case(dtype, head_dim, 150, 300, causal=True)
    q, k, v, _ = given.draw()
    k[:, 160:] *= 40
    given.check_forward((q, k, v, None))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim,head_dim_v", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192),
                                                 (256, 256)])
@pytest.mark.parametrize("softcap", [0, 2])
def test_what_is_not_finite_stays_where_it_is_seen(softcap, head_dim, head_dim_v, value):
    """NaN in keys, values and gradients behind the diagonal: bitwise as with zeros there."""
    given = case(HALF, head_dim, 150, 300, head_dim_v=head_dim_v, causal=True, softcap=softcap)
    results = []
    for filled in (0.0, value):
        q, k, v, dout = given.draw()
        for x in (k, v):
            x[:, 250:] = filled
        results.append(given.run((q, k, v, dout), deterministic=True))
    clean, dirty = results
    for name in ("out", "dq"):
        assert torch.equal(getattr(dirty, name)[:, :100], getattr(clean, name)[:, :100]), name
    assert not dirty.out[:, 100:].isfinite().any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim,head_dim_v", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192),
                                                 (256, 256)])
@pytest.mark.parametrize("softcap", [0, 2])
def test_neighbours_that_are_not_finite(softcap, head_dim, head_dim_v, value):
    """Of packed sequences, whose rows are in the same tiles: as zeros there."""
    ends = (0, 70, 203, 260), (0, 90, 150, 460)
    lengths_q, lengths_k = (torch.tensor(x, dtype=torch.int32) for x in ends)
    shapes = [(263, 4, head_dim), (462, 2, head_dim), (462, 2, head_dim_v), (263, 4, head_dim_v)]
    q, k, v, dout = (torch.randn(shape).to(HALF) for shape in shapes)
    results = []
    for filled in (0.0, value):
        for x in (q, dout):
            x[70:203] = x[260:] = filled
        for x in (k, v):
            x[90:150] = x[460:] = filled
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash_attn.flash_attn_varlen_func(*leaves, lengths_q, lengths_k, 133, 310, causal=True,
                                                softcap=softcap)
        results.append(torch.autograd.grad(out, leaves, dout))
    for clean, dirty in zip(*results, strict=True):
        first, second = (70, 203) if clean is results[0][0] else (90, 150)
        for part in (slice(0, first), slice(second, None)):
            torch.testing.assert_close(clean[part], dirty[part], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_neighbours_queries_that_a_softcap_makes_finite(head_dim):
    check_neighbours_of_infinite_queries(HALF, head_dim, "cpu")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_bad_keys_are_forgotten(head_dim):
    """Packed sequences, of which some have keys that are not finite and some no queries."""
    lengths = [20, 0, 30], [40, 10, 50]
    ends_q, ends_k = (torch.tensor([0, *x * 12]).cumsum(0).to(torch.int32) for x in lengths)
    q, k, v = (torch.randn(int(ends[-1]), 2, head_dim).to(HALF) for ends in (ends_q, ends_k, ends_k))
    for begin in ends_k[:-1:3].tolist():
        k[begin:begin + 40] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn.flash_attn_varlen_func(*leaves, ends_q, ends_k, 30, 50)
    for gradient, ends in zip(torch.autograd.grad(out.sum(), leaves), (ends_q, ends_k, ends_k), strict=True):
        for begin, end in zip(ends[2::3], ends[3::3], strict=True):
            assert gradient[begin:end].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlens", [(1, 300), (300, 1), (129, 255)], ids=str)
def test_backward_of_many_heads_and_ragged_tiles(seqlens, head_dim):
    given = case(HALF, head_dim, *seqlens, num_heads=8, num_heads_k=1, causal=seqlens[0] == 129)
    given.check(given.draw(), given.draw_dlse())


def check_both_ways(given):
    given.check_each(given.run(deterministic=deterministic) for deterministic in (False, True))


@pytest.mark.parametrize("features", ["plain", "causal", "window", "packed", "packed, causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_backward_of_many_tiles_of_keys(head_dim, features):
    """Each block takes several of them; where it can, all of a head."""
    packs = features.startswith("packed")
    given = case(HALF, head_dim, 260, 300, **{**FEATURES["packed" if packs else features], "num_heads": 12,
                                              "num_heads_k": 12})
    if packs:
        ends = (0, 70, 70, 203, 203, 470)
        given = dataclasses.replace(given, cu_seqlens_q=ends, cu_seqlens_k=(0, 0, 130, 290, 300, 560),
                                    causal="causal" in features)
    check_both_ways(given)


@pytest.mark.parametrize("features", ["plain", "causal", "window", "packed"])
@pytest.mark.parametrize("head_dim,seqlen_k", [(64, 300), (64, 2100), (96, 1400), (128, 300), (128, 1100),
                                               (192, 300), (256, 300)])
def test_backward_of_grouped_heads(head_dim, seqlen_k, features):
    """A block visits all heads of a group; many keys are walked by length under a diagonal, too."""
    given = case(HALF, head_dim, 200, seqlen_k, **{**FEATURES[features], "num_heads": 6})
    if features == "packed":
        given = dataclasses.replace(given, cu_seqlens_k=(0, 10, 60, seqlen_k))
    check_both_ways(given)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_backward_of_more_heads_than_are_cleared_before(head_dim):
    """The sums of later heads' dQ are cleared beside the walk of earlier ones (dq_zeros.cuh)."""
    given = case(HALF, head_dim, 10, 1200, num_heads=7, num_heads_k=7)  # no round number of its blocks
    given.check()


@pytest.mark.parametrize("lengths", [(1000, 1020, 1, 8), (2050, 2040, 1, 4), (600, 700, 2, 8),
                                     "packed"], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_backward_of_parts_of_groups(head_dim, lengths):
    """dK and dV are handed from a part of the group's heads to the next (walk_parts.cuh)."""
    if lengths == "packed":
        ends = (0, 900, 900, 2100)
        given = Case(HALF, num_heads=8, num_heads_k=1, head_dim=head_dim, causal=True, cu_seqlens_q=ends,
                     cu_seqlens_k=ends, tail=3)
    else:
        seqlen_q, seqlen_k, batch, heads = lengths
        given = Case(HALF, batch, seqlen_q, seqlen_k, heads, 1, head_dim, causal=True)
    check_both_ways(given)


@pytest.mark.parametrize("dtype,head_dim,features,shape", rotated(
    [(HALF, 64), (HALF, 96), (HALF, 128), (HALF, 192), (HALF, 256), (SINGLE, 64)],
    ["plain", "causal", "window", "dropout"],
    [[1600, 60, 1, 1, 1], [700, 300, 1, 1, 1], [20, 500, 2, 1, 1], [500, 150, 1, 1, 6]]))
def test_backward_of_parts_at_once(dtype, head_dim, features, shape):
    """Few tiles of keys are walked with some of the queries or of the group's heads each; of one tile dQ is
    no sum (walk_parts.cuh)."""
    seqlen_q, seqlen_k, batch, key_heads, group = shape
    given = dataclasses.replace(case(dtype, head_dim, seqlen_q, seqlen_k, **FEATURES[features]), batch=batch,
                                num_heads=key_heads * group, num_heads_k=key_heads)
    given.check(given.draw(), given.draw_dlse())
