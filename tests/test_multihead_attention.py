"""flash_attn.nn.MultiheadAttention is torch.nn.MultiheadAttention: constructor, state, results, errors."""

import copy
import inspect
import io
import math

import pytest
import torch
from torch import nn

import flash_attn.nn
from acceptance import FACTOR, SINGLE_FACTOR
from attention_case import draw_rng_state, keep_mask, largest_allocation
from flash_attn.nn import attention_weights as weights_module
from module_pair import HEADS, E, answer, compare, draw, make_pair

CONSTRUCTORS = [
    {}, {"batch_first": True}, {"bias": False}, {"kdim": 10, "vdim": 17}, {"kdim": 10, "bias": False},
    {"add_bias_kv": True}, {"add_zero_attn": True, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True, "vdim": 5}, {"num_heads": 1},
    {"num_heads": 8, "batch_first": True},
]
MASKS = ["none", "padding", "float padding", "mask", "float mask", "mask of heads", "float mask of heads",
         "padding, mask", "padding, mask of heads", "float padding, float mask",
         "float padding, float mask of heads", "padding, float mask", "float padding, mask"]
LAYOUTS = [("all", 7, 7, 2), ("kv", 5, 9, 3), ("none", 9, 5, 2), ("all", 6, 6, None), ("none", 4, 8, None)]


def draw_masks(kind, seqlen_q, seqlen_k, batch, heads, device="cpu", dtype=torch.float64, hidden=0.3):
    """Options for forward; every query sees the first key, since torch's answer without one is NaN."""
    options = {}
    for part in kind.split(", ") if kind != "none" else ():
        shape = () if batch is None else (batch,)
        shape = (*shape, seqlen_k) if "padding" in part else (seqlen_q, seqlen_k)
        if "heads" in part:
            shape = ((batch or 1) * heads, *shape)
        blocked = torch.rand(shape) < hidden
        blocked[..., 0] = False
        mask = blocked
        if "float" in part:
            mask = torch.where(blocked, -math.inf, torch.randn(shape, dtype=dtype)).requires_grad_()
        options["key_padding_mask" if "padding" in part else "attn_mask"] = mask.to(device)
    return options


def tolerances(device):
    return (torch.float64, {}) if device == "cpu" else (torch.float32, {"rtol": 2e-3, "atol": 2e-3})


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", CONSTRUCTORS, ids=str)
def test_same_results(options, masks, device):
    """Outputs, weights and all gradients, a floating mask's too."""
    dtype, tolerance = tolerances(device)
    pair = make_pair(dtype, device, **options)
    for sharing, seqlen_q, seqlen_k, batch in LAYOUTS:
        if sharing != "none" and not pair[0]._qkv_same_embed_dim:
            continue
        inputs = draw(pair[0], seqlen_q, seqlen_k, batch, sharing)
        given = draw_masks(masks, seqlen_q, seqlen_k, batch, pair[0].num_heads, device, dtype)
        for need in ({"need_weights": False}, {}, {"average_attn_weights": False}):
            theirs, ours = compare(pair, inputs, **given, **need, **tolerance)
            assert all(gradient is not None for gradient in ours.gradients.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", ["none", "padding, mask", "float padding, float mask"])
def test_accuracy(dtype, masks, device):
    """Of float64 torch, no further off than torch is in the same dtype."""
    options = {"embed_dim": 64, "num_heads": 4, "batch_first": True, "add_bias_kv": True}
    theirs, ours = make_pair(dtype, device, **options)
    exact = copy.deepcopy(theirs).double()
    inputs = draw(theirs, 150, 150, 3)
    given = draw_masks(masks, 150, 150, 3, 4, device, dtype)
    result = [answer(m, inputs, **given) for m in (ours, theirs)]
    wide = {n: m if m.dtype == torch.bool else m.detach().double().requires_grad_() for n, m in given.items()}
    reference = answer(exact, [x.double() for x in inputs], **wide)

    def error(mine, right):
        return (mine.double() - right).pow(2).mean().sqrt()

    for name in ("out", "weights", *reference.gradients):
        right, mine, usual = (getattr(a, name) if hasattr(a, name) else a.gradients[name]
                              for a in (reference, *result))
        rounding = torch.finfo(dtype).eps * right.pow(2).mean().sqrt()
        # As acceptance.py asks of rows.
        factor = SINGLE_FACTOR if dtype == torch.float32 and device == "cuda" else FACTOR
        assert error(mine, right) <= factor * error(usual, right) + rounding, name


def test_same_signatures():
    for name in ("__init__", "forward"):
        mine, torchs = (inspect.signature(getattr(m, name)).parameters
                        for m in (flash_attn.nn.MultiheadAttention, nn.MultiheadAttention))
        assert [(p.name, p.default, p.kind) for p in mine.values()] == [
            (p.name, p.default, p.kind) for p in torchs.values()]


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=str)
def test_same_parameters(options):
    """The same seed, the same numbers; state_dicts go both ways; the attributes that others read."""
    modules = []
    for kind in (nn.MultiheadAttention, flash_attn.nn.MultiheadAttention):
        torch.manual_seed(3)
        modules.append(kind(E, **{"num_heads": HEADS, "dropout": 0.2, **options}))
        next_number = torch.rand(())
        modules.append(next_number)
    theirs, after_theirs, ours, after_ours = modules
    assert after_ours == after_theirs and isinstance(ours, nn.MultiheadAttention)
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())
    other = nn.MultiheadAttention(E, **{"num_heads": HEADS, **options})
    other.load_state_dict(ours.state_dict())
    ours.load_state_dict(other.state_dict())
    for name in ("embed_dim", "kdim", "vdim", "_qkv_same_embed_dim", "num_heads", "head_dim", "dropout",
                 "batch_first", "add_zero_attn", "bias_k", "bias_v", "in_proj_weight", "in_proj_bias"):
        mine, torchs = getattr(ours, name), getattr(theirs, name)
        assert type(mine) is type(torchs) and (isinstance(mine, torch.Tensor) or mine == torchs), name
    assert type(ours.out_proj) is type(theirs.out_proj)


def causal_mask(seqlen_q, seqlen_k, kind):
    blocked = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(1)
    return blocked if kind == "bool" else torch.where(blocked, -math.inf, 0.0).double()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("extra", [
    {}, {"add_bias_kv": True}, {"add_zero_attn": True, "add_bias_kv": True}], ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(8, 8), (4, 9), (9, 4), (1, 6), (6, 1)])
def test_is_causal(seqlen_q, seqlen_k, extra, kind):
    """torch aligns the diagonal to the first query and key, and the engines to the last ones."""
    pair = make_pair(**extra)
    inputs = draw(pair[0], seqlen_q, seqlen_k, sharing="kv")
    mask = causal_mask(seqlen_q, seqlen_k, kind)
    for given in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        compare(pair, inputs, attn_mask=mask, is_causal=True, **given)
        for padding in ("padding", "float padding"):
            masks = draw_masks(padding, seqlen_q, seqlen_k, 2, HEADS)
            compare(pair, inputs, attn_mask=mask, is_causal=True, **masks, **given)


def test_is_causal_alone_counts():
    """Without weights and padding torch does not look at the mask; nor where it does may a mask that can't be
    the causal one be overlooked."""
    pair = make_pair()
    inputs = draw(pair[0], 6, 6)
    compare(pair, inputs, attn_mask=torch.zeros(6, 6), is_causal=True, need_weights=False)
    compare(pair, inputs, attn_mask=torch.zeros(2, 3), is_causal=True, need_weights=False)
    heads = draw_masks("mask of heads", 6, 6, 2, HEADS)
    learned = {"attn_mask": torch.randn(6, 6, dtype=torch.float64, requires_grad=True)}
    for mask in (heads, learned):
        compare(pair, inputs, is_causal=True, **mask)
        padding = draw_masks("padding", 6, 6, 2, HEADS)
        compare(pair, inputs, is_causal=True, need_weights=False, **mask, **padding)
    believed, _ = pair[1](*inputs, attn_mask=torch.zeros(6, 6), is_causal=True)
    torch.testing.assert_close(believed, pair[1](*inputs, attn_mask=causal_mask(6, 6, "bool"))[0])


@pytest.mark.parametrize("by", ["padding", "float padding", "mask", "float mask", "float mask of heads"])
def test_rows_that_see_nothing(by):
    """Output 0 through out_proj, weights 0, finite gradients; torch's other rows are ours."""
    pair = make_pair()
    theirs, ours = pair
    inputs = draw(theirs, 5, 5)
    options = draw_masks(by, 5, 5, 2, HEADS)
    for mask in options.values():
        rows = (0,) if "padding" in by else (slice(None), 2) if "heads" in by else (2,)
        mask.data[rows] = True if mask.dtype == torch.bool else -math.inf
    result = answer(ours, inputs, **options)
    entry, query = (0, slice(None)) if "padding" in by else (slice(None), 2)
    bias = ours.out_proj.bias.detach()
    assert (result.out[query, entry] == bias).all() and (result.weights[entry, query] == 0).all()
    assert all(g.isfinite().all() for g in result.gradients.values())
    alive = ~(result.out == bias).all(-1)
    assert alive.any() and not alive.all()
    for need_weights in (True, False):
        out = theirs(*inputs, **options, need_weights=need_weights)[0]
        torch.testing.assert_close(result.out[alive], out[alive].detach())
        assert need_weights == bool(out[~alive].isnan().any())  # as the class says of torch


def test_hidden_keys_may_hold_anything():
    """NaN in keys and values behind a mask stays out of output and weights."""
    _, ours = make_pair()
    query, key, value = draw(ours, 6, 9, sharing="none")
    options = draw_masks("padding", 6, 9, 2, HEADS, hidden=0.5)
    expected = ours(query, key, value, **options)
    hidden = options["key_padding_mask"].T
    assert hidden.any()
    key[hidden], value[hidden] = math.nan, math.inf
    for mine, right in zip(ours(query, key, value, **options), expected):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("seqlen_k,first,last", [
    (1, 0, 1), (16, 0, 16), (100, 48, 70), (33, 16, 90), (8, 32, 33)])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9999])
def test_dropped_weights_are_known(dropout_p, seqlen_k, first, last):
    state = draw_rng_state(5)
    kept = weights_module.kept(state, dropout_p, 2, 3, first, last, seqlen_k)
    assert torch.equal(kept, keep_mask(state, dropout_p, 2, 3, last, seqlen_k)[:, :, first:])


def test_dropout():
    """In training weights and output are dropped alike: output = weights v, of one of many masks."""
    theirs, ours = make_pair(dropout=0.4, add_zero_attn=True)
    inputs = draw(theirs, 20, 30, sharing="none")
    out, weights = ours(*inputs, average_attn_weights=False)
    plain = ours.eval()(*inputs, average_attn_weights=False)[1]
    assert torch.equal(plain, ours(*inputs, average_attn_weights=False)[1])
    share = (weights == 0).double().mean()
    assert 0.3 < share < 0.5
    scaled = plain * 65536 / (65536 - round(0.4 * 65536))
    torch.testing.assert_close(weights, torch.where(weights == 0, 0.0, scaled))
    v = ours._with_extra_keys(*(x.transpose(0, 1) for x in ours._project(*inputs)[1:]))[1]
    context = torch.einsum("nhls,nshd->lnhd", weights, v).flatten(-2)
    torch.testing.assert_close(out, ours.out_proj(context))
    ours.train()
    torch.manual_seed(1)
    first = ours(*inputs)
    second = ours(*inputs)
    torch.manual_seed(1)
    again = ours(*inputs)
    assert torch.equal(first[1], again[1]) and torch.equal(first[0], again[0])
    assert not torch.equal(first[1], second[1])
    torch.manual_seed(1)
    assert torch.equal(ours(*inputs, need_weights=False)[0], first[0])


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradcheck_of_weights(dropout, average, monkeypatch):
    """Numerical derivatives of output and weights, in chunks of 16 and 4 queries, with mask and bias."""
    monkeypatch.setattr(weights_module, "CHUNK_ELEMENTS", 1)
    module = flash_attn.nn.MultiheadAttention(4, 2, dropout, add_bias_kv=True, dtype=torch.float64)
    bias = torch.randn(20, 5, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False, True, False, False, False], [False, False, False, False, True]])
    x = [torch.randn(n, 2, 4, dtype=torch.float64, requires_grad=True) for n in (20, 5, 5)]

    def call(query, key, value, bias):
        torch.manual_seed(0)
        return module(query, key, value, padding, True, bias, average)

    assert torch.autograd.gradcheck(call, (*x, bias), fast_mode=True, atol=1e-7)


def test_weights_come_in_chunks(monkeypatch):
    """The same weights and gradients in chunks of 16 queries, and never all heads' scores at once."""
    pair = make_pair(torch.float32, num_heads=8)
    inputs = draw(pair[0], 250, 260, sharing="kv")
    given = {**draw_masks("padding", 250, 260, 2, 8), "attn_mask": causal_mask(250, 260, "float").float()}
    whole = answer(pair[1], inputs, **given)
    monkeypatch.setattr(weights_module, "CHUNK_ELEMENTS", 2 * 8 * 260 * 20)
    parts = answer(pair[1], inputs, **given)
    torch.testing.assert_close(parts.weights, whole.weights, rtol=1e-5, atol=1e-7)
    for name, gradient in parts.gradients.items():
        torch.testing.assert_close(gradient, whole.gradients[name], rtol=1e-3, atol=1e-4)
    scores = 2 * 8 * 250 * 260 * 4
    assert largest_allocation(lambda: answer(pair[0], inputs, **given)) >= scores
    of_the_result = 2 * 250 * 260 * 8  # answer's factors are float64
    assert largest_allocation(lambda: answer(pair[1], inputs, **given)) <= max(of_the_result, scores // 10)


def bad_calls():
    x, wide = torch.randn(5, 2, E, dtype=torch.float64), torch.randn(5, 2, E + 1, dtype=torch.float64)
    flat = x[:, 0]
    yes = torch.ones
    return {
        "4 dimensions": ((x[None],) * 3, {}),
        "key unbatched": ((x, flat, flat), {}),
        "key batched": ((flat, x, x), {}),
        "other embed_dim": ((wide, wide, wide), {}),
        "other features in value": ((x, x, wide), {}),
        "other length in value": ((x, x, x[:4]), {}),
        "other batch in key": ((x, x[:, :1], x[:, :1]), {}),
        "int padding": ((x, x, x), {"key_padding_mask": torch.zeros(2, 5, dtype=torch.int32)}),
        "int mask": ((x, x, x), {"attn_mask": torch.zeros(5, 5, dtype=torch.uint8)}),
        "padding of 3 dimensions": ((x, x, x), {"key_padding_mask": torch.zeros(2, 1, 5)}),
        "padding unbatched": ((x, x, x), {"key_padding_mask": torch.zeros(5)}),
        "padding of another batch": ((x, x, x), {"key_padding_mask": torch.zeros(3, 5)}),
        "padding of other keys": ((x, x, x), {"key_padding_mask": torch.zeros(2, 6)}),
        "padding batched": ((flat, flat, flat), {"key_padding_mask": torch.zeros(1, 5)}),
        "mask of 4 dimensions": ((x, x, x), {"attn_mask": torch.zeros(1, 1, 5, 5)}),
        "mask of 1 dimension": ((x, x, x), {"attn_mask": torch.zeros(5)}),
        "mask of other keys": ((x, x, x), {"attn_mask": yes(5, 6, dtype=torch.bool)}),
        "mask of other queries": ((x, x, x), {"attn_mask": yes(1, 5, dtype=torch.bool)}),
        "mask of other heads": ((x, x, x), {"attn_mask": torch.zeros(2, 5, 5)}),
        "unbatched mask of other heads": ((flat, flat, flat), {"attn_mask": torch.zeros(2, 5, 5)}),
        "hint without mask": ((x, x, x), {"is_causal": True}),
        "hint without mask or weights": ((x, x, x), {"is_causal": True, "need_weights": False}),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_errors(name):
    inputs, options = bad_calls()[name]
    theirs, ours = make_pair()
    with pytest.raises(Exception) as expected:
        theirs(*inputs, **options)
    with pytest.raises(Exception, match="flash_attn") as error:
        ours(*inputs, **options)
    assert error.type is expected.type


def test_errors_of_other_features():
    theirs, ours = make_pair(kdim=10, vdim=17)
    query, key, value = draw(theirs, sharing="none")
    for inputs in ((query, value, value), (query, key, key), (query, key[:3], value)):
        for module in (theirs, ours):
            with pytest.raises(AssertionError):
                module(*inputs)


def test_errors_of_the_constructor():
    for arguments in ((10, 3), (0, 1), (8, 0)):
        kinds = []
        for kind in (nn.MultiheadAttention, flash_attn.nn.MultiheadAttention):
            with pytest.raises(Exception) as error:
                kind(*arguments)
            kinds.append(error.type)
        assert kinds[0] is kinds[1]


@pytest.mark.parametrize("shape", [(3, 0, E), (0, 2, E)])
@pytest.mark.parametrize("need", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=str)
def test_nothing_in_it(shape, need):
    pair = make_pair()
    compare(pair, (torch.randn(shape, dtype=torch.float64),) * 3, **need)
    queries, keys = torch.randn(3, 2, E, dtype=torch.float64), torch.randn(0, 2, E, dtype=torch.float64)
    compare(pair, (queries, keys, keys), **need)


def test_saved_and_copied():
    _, ours = make_pair(dropout=0.1, training=False)
    inputs = draw(ours)
    expected, _ = ours(*inputs)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(ours)):
        assert type(other) is flash_attn.nn.MultiheadAttention and not other.training
        assert torch.equal(other(*inputs)[0], expected)
        assert other.in_proj_weight is not ours.in_proj_weight


def test_autocast(device):
    """As torch: bfloat16 inside, from float32 parameters, the learned key and value included."""
    pair = make_pair(torch.float32, device, add_bias_kv=True)
    inputs = draw(pair[0])
    padding = draw_masks("float padding", 7, 7, 2, HEADS, device, torch.float32)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        for options in ({}, padding):
            theirs, ours = (module(*inputs, **options) for module in pair)
            assert ours[0].dtype == theirs[0].dtype == torch.bfloat16
            torch.testing.assert_close(ours[0], theirs[0], rtol=5e-2, atol=5e-2)
            torch.testing.assert_close(ours[1].float(), theirs[1].float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("masks", ["none", "padding, mask", "float padding, float mask"])
@pytest.mark.parametrize("need", [{"need_weights": False}, {}], ids=str)
def test_compile(need, masks, device):
    dtype = torch.float32
    _, ours = make_pair(dtype, device, dropout=0.2)
    inputs = draw(ours)
    given = {**draw_masks(masks, 7, 7, 2, HEADS, device, dtype), **need}
    torch._dynamo.reset()  # compilations of other tests count
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    results = []
    for module in (ours, compiled):
        torch.manual_seed(2)
        results.append(answer(module, inputs, **given))
    eager, traced = results
    torch.testing.assert_close(traced.out, eager.out)
    for a, b in zip(traced.gradients.values(), eager.gradients.values()):
        torch.testing.assert_close(a, b)
