"""attn_mask and attn_bias: who sees whom, element by element; what is added to scores, and its gradient."""

import dataclasses
import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

import acceptance
import block_maps
import flash_attn
from attention_case import Case, check_empty_rows, check_result, largest_allocation
from bias_gradient import bias_gradient, check_bias_gradient
from flash_attn import AttentionMask, operators

# Sizes of the dimensions, the first ones left out: B batch, H heads, q queries, k keys.
SHAPES = ("BHqk", "1Hqk", "B1qk", "BH1k", "BHq1", "11qk", "1H1k", "1Hq1", "B11k", "B1q1", "BH11", "111k",
          "11q1", "1H11", "B111", "1111", "Hqk", "1qk", "H1k", "H11", "qk", "1k", "q1", "11", "k", "1", "")
FEATURES = [
    {}, {"causal": True}, {"window_size": (20, 9)}, {"softcap": 1.5}, {"alibi": "heads"},
    {"alibi": "batch", "causal": True, "window_size": (40, -1)}, {"dropout_p": 0.3},
    {"dropout_p": 0.2, "causal": True, "alibi": "heads"}, {"softmax_scale": -0.3, "num_heads_k": 1},
    {"head_dim_v": 40, "num_heads_k": 4, "softcap": 3.0, "window_size": (-1, 12)},
]
LENGTHS = [(1, 1), (1, 300), (300, 1), (31, 33), (32, 32), (33, 31), (127, 129), (129, 127), (129, 300),
           (300, 32), (128, 256)]


def make_case(dtype=torch.float32, seqlen_q=37, seqlen_k=70, device="cpu", **features):
    options = {"num_heads": 4, "num_heads_k": 2, "head_dim": 16, **features}
    return Case(dtype, 2, seqlen_q, seqlen_k, device=device, **options)


def sizes(shape, case):
    of = {"B": case.batch, "H": case.num_heads, "q": case.seqlen_q, "k": case.seqlen_k, "1": 1}
    return [of[letter] for letter in shape]


def draw_mask(shape, case, share=0.6):
    return (torch.rand(sizes(shape, case)) < share).to(case.device)


def draw_bias(shape, case, hidden=0.0, dtype=None):
    """Standard normal; a share of hidden elements is -inf."""
    bias = torch.randn(sizes(shape, case), dtype=torch.float64)
    bias = torch.where(torch.rand(sizes(shape, case)) < hidden, -math.inf, bias)
    return bias.to(case.dtype if dtype is None else dtype).to(case.device)


def check(case, mask=None, bias=None):
    """out, lse, dq, dk and dv, with gradients of out and lse, against the reference."""
    inputs, dlse = case.draw(), case.draw_dlse()
    actual = case.run(inputs, dlse, attn_mask=mask, attn_bias=bias)
    expected = acceptance.Expected(case.attend(mask, bias), *inputs, dlse)
    check_result(actual, expected)
    return actual


def same(actual, expected, *names):
    for name in names or (field.name for field in dataclasses.fields(actual)):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_mask_of_any_shape(shape, dtype, device):
    case = make_case(dtype, device=device)
    mask = draw_mask(shape, case)
    actual = check(case, mask)
    if len(shape) == 4:  # of what has been broadcast here nothing may be left
        copied = mask.expand(2, 4, 37, 70).contiguous()
        same(actual, case.run(case.draw(), case.draw_dlse(), attn_mask=copied))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_of_any_shape(shape, dtype, device):
    case = make_case(dtype, device=device)
    bias = draw_bias(shape, case, hidden=0.2 if "k" in shape else 0.0)
    check(case, bias=bias)
    check_bias_gradient(case, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_beside_everything_else(features, dtype, device):
    """A mask and a bias together, and with whatever else changes or hides scores."""
    case = make_case(dtype, 70, 100, device, **features)
    mask, bias = draw_mask("B1qk", case, 0.7), draw_bias("1Hqk", case, hidden=0.1)
    check(case, mask, bias)
    check_bias_gradient(case, bias, mask)


@pytest.mark.parametrize("features", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_k", LENGTHS)
def test_lengths(seqlen_q, seqlen_k, features, device):
    # All rows of dk and dv share a single query's rounding: too few errors for a percentile.
    case = make_case(torch.float32, seqlen_q, seqlen_k, device, num_heads=2, num_heads_k=1, **features)
    case = replace(case, batch=1 if seqlen_q == 1 else 2)
    mask, bias = draw_mask("BHqk", case), draw_bias("B1qk", case, hidden=0.1)
    check(case, mask)
    check(case, bias=bias)
    check(case, mask, bias)
    check_bias_gradient(case, bias, mask)
    check_bias_gradient(case, draw_bias("1Hqk", case))
    check_bias_gradient(case, draw_bias("k", case))


@pytest.mark.parametrize("of_bias", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_of_the_bias(dtype, of_bias, device):
    """Used in q's dtype; the gradient is of its own."""
    case = make_case(dtype, device=device)
    bias = draw_bias("1Hqk", case, hidden=0.1, dtype=of_bias)
    same(case.run(attn_bias=bias), case.run(attn_bias=bias.to(dtype)))
    gradient = check_bias_gradient(case, bias.to(dtype))
    library = functools.partial(case.call, return_attn_probs=True)
    assert torch.equal(bias_gradient(library, bias, case.draw(), case.draw_dlse()), gradient.to(of_bias))


def test_mask_is_exact(device):
    """With equal scores the probabilities show the mask itself, element for element."""
    case = make_case(torch.float32, 50, 200, device, num_heads_k=4)
    q, k, _, _ = case.draw()
    v = torch.eye(200, device=device)[None, :, None].expand(2, -1, 4, -1)
    mask = draw_mask("BHqk", case, 0.3)
    for options in ({"attn_mask": mask}, {"attn_bias": torch.where(mask, 0.0, -math.inf)}):
        p = case.call(torch.zeros_like(q), k, v, **options)
        assert torch.equal(p.transpose(1, 2) > 0, mask)


def blocks_of(pattern, case):
    """128 x 128 blocks, 1 visible, 0 not, . with a single visible element."""
    mask = torch.zeros(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
    for i, row in enumerate(pattern):
        for j, block in enumerate(row):
            view = mask[i * 128:(i + 1) * 128, j * 128:(j + 1) * 128]
            if block == "1":
                view.fill_(True)
            elif block == ".":
                view[view.shape[0] // 2, view.shape[1] - 1] = True
    return mask.to(case.device)


@pytest.mark.parametrize("pattern", [
    ("100", "010", "001"), ("000", "000", "000"), ("001", "000", "100"), (".00", "0.0", "00."),
    ("111", "0.1", "000"), ("01.", "0..", "01."), ("000", "1.1", "000")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_and_rows_that_nobody_sees(pattern, dtype, device):
    case = make_case(dtype, 300, 333, device, num_heads=2, num_heads_k=1)
    mask = blocks_of(pattern, case)
    actual = check(case, mask)
    empty = ~mask.any(dim=1)
    assert (actual.out[:, empty] == 0).all() and (actual.lse[:, :, empty] == -math.inf).all()
    assert (actual.dq[:, empty] == 0).all()
    unseen = ~mask.any(dim=0)
    assert (actual.dk[:, unseen] == 0).all() and (actual.dv[:, unseen] == 0).all()
    bias = torch.where(mask, draw_bias("qk", case), -math.inf)
    hidden_by_bias = check(case, bias=bias)
    assert (hidden_by_bias.out[:, empty] == 0).all() and (hidden_by_bias.dk[:, unseen] == 0).all()
    assert (check_bias_gradient(case, bias)[~mask] == 0).all()
    assert (check_bias_gradient(case, draw_bias("qk", case), mask)[~mask] == 0).all()


def poisoned(x, rows, value):
    """rows bool [S]; of the tensor [B, S, H, D]."""
    return torch.where(rows[None, :, None, None], value, x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", ["mask", "bias", "mask of keys", "bias of keys", "both"])
def test_hidden_keys_change_nothing(by, dtype, value, device):
    """NaN in keys and values that no query sees: all bitwise as with zeros there, and their gradient 0."""
    case = make_case(dtype, 45, 150, device)
    dead = torch.rand(150, device=device) < 0.5
    dead[-3:] = True
    inputs, dlse, shape = case.draw(), case.draw_dlse(), "k" if "keys" in by else "BHqk"
    mask = draw_mask(shape, case) & ~dead
    bias = torch.where(dead, -math.inf, draw_bias(shape, case))
    options = {"attn_mask": mask if "mask" in by or by == "both" else None, "attn_bias": bias}
    if "mask" in by:
        options["attn_bias"] = draw_bias("qk", case)
    results = []
    for filled in (0.0, value):
        q, k, v, dout = inputs
        given = (q, poisoned(k, dead, filled), poisoned(v, dead, filled), dout)
        call = functools.partial(case.call, attn_mask=options["attn_mask"], return_attn_probs=True)
        gradient = bias_gradient(call, options["attn_bias"], given, dlse)
        results.append((case.run(given, dlse, **options), gradient))
    (clean, dbias), (dirty, dirty_dbias) = results
    same(dirty, clean)
    assert torch.equal(dirty_dbias, dbias)
    assert (dirty.dk[:, dead] == 0).all() and (dirty.dv[:, dead] == 0).all() and clean.out.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_queries_that_see_nothing_change_nothing(by, value, device):
    """NaN in q, dout and dlse of rows that see no key: bitwise as with zeros there."""
    case = make_case(torch.float32, 150, 45, device)
    dead = torch.rand(150, device=device) < 0.5
    q, k, v, dout = case.draw()
    dlse = case.draw_dlse()
    mask = draw_mask("qk", case) & ~dead[:, None]
    bias = draw_bias("qk", case)
    options = {"attn_mask": mask, "attn_bias": bias}
    if by == "bias":
        options = {"attn_bias": torch.where(dead[:, None], -math.inf, bias)}
    results = []
    for filled in (0.0, value):
        given = (poisoned(q, dead, filled), k, v, poisoned(dout, dead, filled))
        given_dlse = torch.where(dead, filled, dlse)
        call = functools.partial(case.call, attn_mask=options.get("attn_mask"), return_attn_probs=True)
        gradient = bias_gradient(call, options["attn_bias"], given, given_dlse)
        results.append((case.run(given, given_dlse, **options), gradient))
    same(results[1][0], results[0][0])
    assert torch.equal(results[1][1], results[0][1])
    check_empty_rows(results[1][0], results[1][0].lse)


def test_bias_behind_the_mask_is_not_read(device):
    """NaN in the bias where mask, causal or window hide the score."""
    case = make_case(torch.float32, 80, 120, device, causal=True, window_size=(60, -1))
    mask, bias = draw_mask("qk", case), draw_bias("BHqk", case)
    distance = torch.arange(120)[None] - torch.arange(80)[:, None] - 40
    visible = mask & ((distance <= 0) & (distance >= -60)).to(device)
    inputs, dlse = case.draw(), case.draw_dlse()
    dirty = torch.where(visible, bias, math.nan)
    same(case.run(inputs, dlse, attn_mask=mask, attn_bias=dirty),
         case.run(inputs, dlse, attn_mask=mask, attn_bias=bias))
    library = functools.partial(case.call, attn_mask=mask, return_attn_probs=True)
    gradients = [bias_gradient(library, x, inputs, dlse) for x in (dirty, bias)]
    assert torch.equal(*gradients) and (gradients[0][:, :, ~visible] == 0).all()


def test_mask_made_once(device):
    """An AttentionMask serves every layer: other dtypes, head dims and key heads."""
    case = make_case(torch.float32, 130, 200, device)
    for shape in ("BHqk", "B11k", "1H1k", "qk"):
        mask = draw_mask(shape, case)
        made = AttentionMask.from_bool(mask, 130, 200)
        assert made.bits.dtype == torch.int32
        assert made.bits.numel() == math.prod(sizes(shape[:-1].rjust(3, "1"), case)) * 8  # two blocks of 128
        for change in ({}, {"head_dim": 40}, {"num_heads_k": 4, "dtype": torch.bfloat16}, {"causal": True}):
            layer = replace(case, **change)
            same(layer.run(attn_mask=made), layer.run(attn_mask=mask))


def check_lists(mask, counts, indices):
    """Of a bool matrix. A quarter past its last row or column may be called anything."""
    for i, (count, row) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        blocks = [mask[128 * i:, 128 * j:][:128, :128] for j in range(-(-mask.shape[1] // 128))]
        assert [x % 2**23 for x in row[:count]] == [j for j, block in enumerate(blocks) if block.any()]
        for x in row[:count]:
            for n, (r, c) in enumerate(itertools.product((0, 64), repeat=2)):
                quarter = blocks[x % 2**23][r:, c:][:64, :64]
                kind = 0 if quarter.all() else 1 if quarter.any() else 2
                assert quarter.numel() == 0 or x >> 23 + 2 * n & 3 == kind


@pytest.mark.parametrize("shape", ["qk", "k", "q1"])
def test_quarters_of_blocks(shape, device):
    whole = block_maps.mask_of_quarters(300, 450)[0, 0]
    mask = whole[tuple(slice(None) if size in shape else slice(1) for size in "qk")]
    lists = AttentionMask.from_bool(mask.to(device), 300, 450).blocks
    visible = mask.expand(300, 450)
    check_lists(visible, lists.key_block_counts, lists.key_block_indices)
    check_lists(visible.T, lists.query_block_counts, lists.query_block_indices)
    blocks = [[part.any() for part in rows.split(128, dim=1)] for rows in visible.split(128)]
    assert torch.equal(lists.block_map.cpu()[0, 0], torch.tensor(blocks))


@pytest.mark.parametrize("features", [*FEATURES, {"window_size": (131, 77), "head_dim": 40}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_quarters_of_blocks(dtype, features, device):
    mask = block_maps.mask_of_quarters(300, 450)[:, :1].to(device)
    check(make_case(dtype, 300, 450, device, **features), mask)


@pytest.mark.parametrize("shape", ["BHqk", "1Hqk", "B1qk", "11qk", "B11k", "1111"])
def test_same_bits_in_every_run(shape, threads, device):
    """The gradient of a bias is summed over what it is broadcast along, in a fixed order."""
    case = make_case(torch.float32, 150, 170, device, dropout_p=0.2)
    mask, bias, inputs, dlse = draw_mask("B1qk", case), draw_bias(shape, case), case.draw(), case.draw_dlse()
    library = functools.partial(case.call, attn_mask=mask, return_attn_probs=True)

    def results():
        result = case.run(inputs, dlse, attn_mask=mask, attn_bias=bias)
        return [*vars(result).values(), bias_gradient(library, bias, inputs, dlse)]

    threads(1)
    first = results()
    for count in (1, 2, 3, 7):
        threads(count)
        assert all(map(torch.equal, results(), first)), count


@pytest.mark.parametrize("wanted", ["qkv", "bias", "q and bias", "lse alone"])
def test_gradients_that_are_not_wanted(wanted, device):
    """Each gradient is the same whichever others are computed, and lse alone has one, too."""
    case = make_case(torch.float32, device=device)
    (*qkv, dout), dlse, bias = case.draw(), case.draw_dlse(), draw_bias("1Hqk", case)

    def gradients(names, of_lse=False):
        tensors = dict(zip(("q", "k", "v", "bias"), (x.detach().clone() for x in (*qkv, bias))))
        for name in names:
            tensors[name].requires_grad_()
        q, k, v, attn_bias = tensors.values()
        out, lse, _ = case.call(q, k, v, attn_bias=attn_bias, return_attn_probs=True)
        outputs, grads = ((lse,), (dlse,)) if of_lse else ((out, lse), (dout, dlse))
        found = torch.autograd.grad(outputs, [tensors[n] for n in names], grads, allow_unused=of_lse)
        return dict(zip(names, found))

    everything = gradients(("q", "k", "v", "bias"), wanted == "lse alone")
    names = {"qkv": "qkv", "bias": ("bias",), "q and bias": ("q", "bias"), "lse alone": ("bias", "k")}[wanted]
    for name, gradient in gradients(names, wanted == "lse alone").items():
        assert torch.equal(gradient, everything[name]), name
        assert gradient.abs().max() > 0


def test_layouts(device):
    """Any strides: transposed, sliced, expanded, and a last dimension that is not contiguous."""
    case = make_case(torch.float32, 40, 66, device)
    mask, bias = draw_mask("BHqk", case), draw_bias("BHqk", case)
    inputs, dlse = case.draw(), case.draw_dlse()
    expected = case.run(inputs, dlse, attn_mask=mask, attn_bias=bias)
    library = functools.partial(case.call, attn_mask=mask, return_attn_probs=True)
    dbias = bias_gradient(library, bias, inputs, dlse)

    def views(x):
        yield x.transpose(2, 3).contiguous().transpose(2, 3)
        yield x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
        wide = x.new_ones(3, 5, 50, 140)
        wide[1:, :4, 3:43, 5:137:2] = x
        yield wide[1:, :4, 3:43, 5:137:2]
        wide[1:, :4, 3:43, 5:71] = x
        yield wide[1:, :4, 3:43, 5:71]

    for mask_view, bias_view in zip(views(mask), views(bias)):
        assert not bias_view.is_contiguous()
        same(case.run(inputs, dlse, attn_mask=mask_view, attn_bias=bias_view), expected)
        assert torch.equal(bias_gradient(library, bias_view, inputs, dlse), dbias)
    row = draw_bias("B11k", case)
    same(case.run(inputs, attn_bias=row.expand(2, 4, 40, 66)), case.run(inputs, attn_bias=row.clone()))
    leaf = row.clone().requires_grad_()
    out, lse, _ = case.call(*inputs[:3], attn_bias=leaf.expand(2, 4, 40, 66), return_attn_probs=True)
    gradient = torch.autograd.grad((out, lse), leaf, (inputs[3], dlse))[0]
    broadcast = bias_gradient(functools.partial(case.call, return_attn_probs=True), row, inputs, dlse)
    torch.testing.assert_close(gradient, broadcast, rtol=1e-4, atol=1e-4)  # another order of summation


def test_dropped_probabilities_have_the_bias(device):
    """S_dmask is what the tests of dropout read: exp(score - maximum), of scores with mask and bias."""
    case = make_case(torch.float32, 20, 30, device, dropout_p=0.4, num_heads_k=4)
    mask, bias = draw_mask("B1qk", case, 0.8), draw_bias("BHqk", case)
    q, k, v, _ = case.draw()
    _, lse, dropped = case.call(q, k, v, attn_mask=mask, attn_bias=bias, return_attn_probs=True)
    dropped = dropped[:, :, :20, :30]
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) / 4 + bias).masked_fill(~mask, -math.inf)
    expected = torch.exp(scores - scores.amax(-1, keepdim=True))
    torch.testing.assert_close(dropped.abs(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(dropped < 0, ~case.keep() & (expected > 0))
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


BAD = {
    "int mask": ({"attn_mask": torch.ones(4, 6, dtype=torch.int32)}, "attn_mask.*int32.*bool"),
    "float mask": ({"attn_mask": torch.zeros(4, 6)}, "attn_mask.*float32.*attn_bias"),
    "mask, other queries": ({"attn_mask": torch.ones(5, 6, dtype=torch.bool)}, r"attn_mask.*\[5, 6\].*4, 6"),
    "mask, other keys": ({"attn_mask": torch.ones(4, 7, dtype=torch.bool)}, r"attn_mask.*\[4, 7\].*4, 6"),
    "mask, 5 dimensions": (
        {"attn_mask": torch.ones(1, 1, 1, 4, 6, dtype=torch.bool)}, r"attn_mask.*1, 1, 1, 4, 6"),
    "mask, other heads": ({"attn_mask": torch.ones(3, 4, 6, dtype=torch.bool)}, "3"),
    "mask, other batch": ({"attn_mask": torch.ones(3, 1, 4, 6, dtype=torch.bool)}, "3"),
    "bias, other queries": ({"attn_bias": torch.ones(5, 6)}, r"attn_bias.*\[5, 6\].*4, 6"),
    "bias, other keys": ({"attn_bias": torch.ones(7)}, r"attn_bias.*\[7\].*4, 6"),
    "bias, 5 dimensions": ({"attn_bias": torch.ones(1, 1, 1, 4, 6)}, r"attn_bias.*1, 1, 1, 4, 6"),
    "bias, other heads": ({"attn_bias": torch.ones(2, 4, 6)}, "attn_bias.*2"),
    "bias, other batch": ({"attn_bias": torch.ones(3, 1, 4, 6)}, "attn_bias.*3"),
    "bool bias": ({"attn_bias": torch.ones(4, 6, dtype=torch.bool)}, "attn_bias.*bool.*attn_mask"),
    "int bias": ({"attn_bias": torch.ones(4, 6, dtype=torch.int64)}, "attn_bias.*int64"),
    "complex bias": ({"attn_bias": torch.ones(4, 6, dtype=torch.complex64)}, "attn_bias.*complex64"),
    "bias elsewhere": ({"attn_bias": torch.ones(4, 6, device="meta")}, "attn_bias.*meta"),
    "mask elsewhere": ({"attn_mask": torch.ones(4, 6, dtype=torch.bool, device="meta")}, "attn_mask.*meta"),
    "mask of other lengths": (
        {"attn_mask": AttentionMask.from_bool(torch.ones(4, 7, dtype=torch.bool), 4, 7)}, "attn_mask.*7"),
    "mask of other queries": (
        {"attn_mask": AttentionMask.from_bool(torch.ones(6, dtype=torch.bool), 9, 6)}, "attn_mask.*9"),
    "no tensor as mask": ({"attn_mask": [[True]]}, "attn_mask.*list"),
    "no tensor as bias": ({"attn_bias": 1.0}, "attn_bias.*float"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    options, words = BAD[name]
    q, k = torch.randn(2, 4, 4, 8), torch.randn(2, 6, 2, 8)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
        flash_attn.flash_attn_func(q, k, k, **options)


def test_packed_sequences_have_none():
    q, offsets = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    options = (offsets, offsets, 4, 4, *(None,) * 6, 0, 0, 0.0, 1.0, -1, -1, 0.0, False)
    for given in ((torch.zeros(1, 1, 4, 4), None), (None, torch.zeros(1, 1, 4, 1, dtype=torch.int32))):
        with pytest.raises(RuntimeError, match="packed"):
            operators.forward(q, q, q, *options, *given)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic, device):
    case = make_case(torch.float32, device=device)
    inputs, dlse = case.draw(), case.draw_dlse()
    mask, bias = draw_mask("B1qk", case), draw_bias("1Hqk", case)

    def step(q, k, v, attn_mask, attn_bias):
        out, lse, _ = flash_attn.flash_attn_func(
            q * 1, k, v, attn_mask=attn_mask, attn_bias=attn_bias * 2, return_attn_probs=True)
        return out + 1, lse

    torch._dynamo.reset()  # compilations of other tests count
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = []
    for function in (step, compiled):
        leaves = [x.detach().requires_grad_() for x in (*inputs[:3], bias)]
        out, lse = function(*leaves[:3], mask, leaves[3])
        results.append([out, lse, *torch.autograd.grad((out, lse), leaves, (inputs[3], dlse))])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("shape", ["BHqk", "1Hqk", "B1qk", "BH1k", "BHq1", "B11k", "qk", "k", ""])
@pytest.mark.parametrize("features", [
    {}, {"causal": True, "softcap": 1.5}, {"dropout_p": 0.3, "alibi": "heads"}], ids=str)
def test_gradcheck(features, shape, device):
    case = make_case(torch.float64, 3, 5, device, num_heads=2, num_heads_k=1, head_dim=3, **features)
    mask = draw_mask("BHqk", case, 0.8)
    leaves = [x.requires_grad_() for x in (*case.draw()[:3], draw_bias(shape, case))]

    def differentiable(q, k, v, bias):
        out, lse, _ = case.call(q, k, v, attn_mask=mask, attn_bias=bias, return_attn_probs=True)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(differentiable, leaves, atol=1e-6, nondet_tol=0.0)


@pytest.mark.parametrize("shape", ["B11k", "1Hqk", "k"])
def test_no_score_matrix_is_allocated(shape):
    """Neither [B, H, Sq, Sk] nor a quarter of it, even in bytes."""
    case = make_case(torch.float32, 512, 640, num_heads=8)
    inputs, bias = case.draw(), draw_bias(shape, case)
    mask = AttentionMask.from_bool(draw_mask("B11k", case), 512, 640)

    def step():
        leaves = [x.detach().requires_grad_() for x in (*inputs[:3], bias)]
        case.call(*leaves[:3], attn_mask=mask, attn_bias=leaves[3]).sum().backward()

    elements = 2 * 8 * 512 * 640
    assert largest_allocation(lambda: torch.zeros(elements // 8)) >= elements // 2  # it is seen
    assert largest_allocation(step) <= max(inputs[0].nbytes, bias.nbytes) < elements * 4
    if shape != "1Hqk":
        assert largest_allocation(step) < elements // 4
