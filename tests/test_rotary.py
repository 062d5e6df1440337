"""Promise: feature pairs turn by their position's angle, in place where asked, and gradients turn back."""

import inspect
from functools import partial

import pytest
import torch

from flash_attn.layers import rotary
from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)
from flash_attn.ops.triton.rotary import apply_rotary

SIGNATURES = {
    apply_rotary_emb: "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
                      "max_seqlen=None",
    apply_rotary_emb_torch: "x, cos, sin, interleaved=False",
    rotate_half: "x, interleaved=False",
    apply_rotary_emb_qkv_: "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
                           "num_heads_q=None",
    apply_rotary_emb_kv_: "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    RotaryEmbedding: "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    RotaryEmbedding.forward: "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
    apply_rotary: "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, "
                  "inplace=False, conjugate=False",
}
BOTH_PAIRINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
SEQLEN, ROTARY_DIM, HEAD_DIM, TABLE = 5, 6, 8, 12
OFFSETS = [3, 0]
# Two sequences of 3 and 4 with an empty one between, and two rows behind the last.
CU_SEQLENS = [0, 3, 3, 7]
PACKED_OFFSETS = [2, 5, 0]


def turned(x, angles, interleaved, factor=1.0):
    """Specification: pairs as complex numbers times factor * exp(i angle). x [rows, heads, D], angles
    [rows, R/2]."""
    half = angles.shape[-1]
    x = x.double()
    if interleaved:
        pairs = torch.complex(x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
    else:
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    pairs = pairs * torch.polar(torch.ones_like(angles) * factor, angles)[:, None]
    if interleaved:
        together = torch.view_as_real(pairs).flatten(-2)
    else:
        together = torch.cat((pairs.real, pairs.imag), dim=-1)
    return torch.cat((together, x[..., 2 * half :]), dim=-1)


def positions_of(layout):
    """For every row, flattened, its position by hand; None: it does not turn."""
    if layout == "dense":
        return list(range(SEQLEN)) * 2
    if layout == "offset":
        return [4 + s for s in range(SEQLEN)] * 2
    if layout == "offsets":
        return [offset + s for offset in OFFSETS for s in range(SEQLEN)]
    if layout == "packed":
        return [0, 1, 2, 0, 1, 2, 3, None, None]
    return [2, 3, 4, 0, 1, 2, 3, None, None]


def arguments_of(layout, device):
    if layout == "dense":
        return {}
    if layout == "offset":
        return {"seqlen_offsets": 4}
    if layout == "offsets":
        return {"seqlen_offsets": torch.tensor(OFFSETS, dtype=torch.int32, device=device)}
    packed = {"cu_seqlens": torch.tensor(CU_SEQLENS, dtype=torch.int32, device=device), "max_seqlen": 4}
    if layout == "packed_offsets":
        packed["seqlen_offsets"] = torch.tensor(PACKED_OFFSETS, dtype=torch.int32, device=device)
    return packed


LAYOUTS = pytest.mark.parametrize("layout", ["dense", "offset", "offsets", "packed", "packed_offsets"])


def draw(layout, device, dtype=torch.float64):
    """x, table of angles [TABLE, R/2]"""
    shape = (9, 3, HEAD_DIM) if layout.startswith("packed") else (2, SEQLEN, 3, HEAD_DIM)
    x = torch.randn(shape, dtype=torch.float64, device=device).to(dtype)
    return x, torch.randn(TABLE, ROTARY_DIM // 2, dtype=torch.float64, device=device)


def expected(x, table, layout, interleaved, conjugate=False):
    resting = torch.zeros_like(table[0])
    angles = torch.stack([resting if p is None else table[p] for p in positions_of(layout)])
    rows = x.reshape(-1, *x.shape[-2:])
    return turned(rows, -angles if conjugate else angles, interleaved).reshape(x.shape)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures(function):
    assert str(inspect.signature(function)) == f"({SIGNATURES[function]})"
    assert inspect.getdoc(function)


def test_alias():
    assert rotary.apply_rotary_emb_func is apply_rotary_emb


@BOTH_PAIRINGS
@LAYOUTS
def test_values_and_gradients(layout, interleaved, device):
    x, table = draw(layout, device)
    leaf = x.requires_grad_()
    exact = expected(leaf, table, layout, interleaved)
    dout = torch.randn_like(exact)
    (exact_gradient,) = torch.autograd.grad(exact, leaf, dout)
    arguments = arguments_of(layout, device)
    for inplace in (False, True):
        given = leaf * 1.0
        out = apply_rotary_emb(given, table.cos(), table.sin(), interleaved, inplace, **arguments)
        assert (out is given) == inplace
        torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(out, leaf, dout)
        torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-12)


@BOTH_PAIRINGS
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(layout, interleaved, dtype, device):
    """One rounding of the result, from float32 arithmetic: no more than the dtype's unit."""
    x, table = draw(layout, device, dtype)
    cos, sin = table.cos().to(dtype), table.sin().to(dtype)
    out = apply_rotary(x, cos, sin, interleaved=interleaved, **arguments_of(layout, device))
    assert out.dtype == dtype and out.shape == x.shape
    # With the rounded tables, cos + i sin is no longer of length 1.
    rounded = torch.complex(cos.double(), sin.double())
    resting = torch.ones_like(rounded[0])
    factors = torch.stack([resting if p is None else rounded[p] for p in positions_of(layout)])
    exact = turned(x.reshape(-1, 3, HEAD_DIM), factors.angle(), interleaved, factors.abs()).reshape(x.shape)
    unit = torch.finfo(dtype).eps
    error = (out.double() - exact).abs()
    assert (error <= unit * exact.abs() + 1e-6 * x.double().abs().max()).all()


@BOTH_PAIRINGS
@LAYOUTS
def test_conjugate_undoes(layout, interleaved, device):
    x, table = draw(layout, device)
    arguments = {**arguments_of(layout, device), "interleaved": interleaved}
    there = apply_rotary(x, table.cos(), table.sin(), **arguments)
    back = apply_rotary(there, table.cos(), table.sin(), conjugate=True, **arguments)
    torch.testing.assert_close(back, x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        apply_rotary(x, table.cos(), table.sin(), conjugate=True, **arguments),
        expected(x, table, layout, interleaved, conjugate=True), rtol=1e-12, atol=1e-12)


def test_gradcheck():
    for layout in ("offsets", "packed"):
        x, table = draw(layout, "cpu")
        arguments = arguments_of(layout, "cpu")

        function = partial(apply_rotary_emb, cos=table.cos(), sin=table.sin(), **arguments)
        assert torch.autograd.gradcheck(function, x.requires_grad_())
        assert torch.autograd.gradgradcheck(function, x.requires_grad_())


def test_raw_function_has_gradients_too():
    x, table = draw("dense", "cpu")
    out = apply_rotary(x.requires_grad_(), table.cos(), table.sin())
    dout = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, dout)
    torch.testing.assert_close(gradient, expected(dout, table, "dense", False, conjugate=True))


def test_an_incoming_gradient_is_left_alone():
    """y = turned(x) + z hands both terms the same gradient tensor."""
    x, table = draw("dense", "cpu")
    x, z = x.requires_grad_(), torch.randn_like(x).requires_grad_()
    dout = torch.randn_like(x)
    kept = dout.clone()
    (apply_rotary_emb(x * 1.0, table.cos(), table.sin(), inplace=True) + z).backward(dout)
    assert torch.equal(z.grad, kept) and torch.equal(dout, kept)


def test_any_strides(device):
    x, table = draw("dense", device)
    exact = expected(x, table, "dense", False)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(apply_rotary(strided, table.cos(), table.sin()), exact)
    apply_rotary(strided, table.cos(), table.sin(), inplace=True)
    torch.testing.assert_close(strided, exact)
    every_other = torch.empty(*x.shape[:-1], 2 * HEAD_DIM, dtype=x.dtype, device=device)[..., ::2].copy_(x)
    apply_rotary(every_other, table.cos(), table.sin(), inplace=True)
    torch.testing.assert_close(every_other, exact)


def test_positions_the_tables_lack(device):
    """Offsets in a tensor are not read by the host: what they lead past the tables rests."""
    x, table = draw("dense", device)
    offsets = torch.tensor([TABLE - 2, -1], dtype=torch.int64, device=device)
    out = apply_rotary_emb(x, table.cos(), table.sin(), seqlen_offsets=offsets)
    assert torch.equal(out[0, 2:], x[0, 2:]) and torch.equal(out[1, 0], x[1, 0])
    assert not torch.isclose(out[0, :2, :, :ROTARY_DIM], x[0, :2, :, :ROTARY_DIM]).any()
    torch.testing.assert_close(out[1, 1:], apply_rotary(x[1:, 1:], table.cos(), table.sin())[0])


@BOTH_PAIRINGS
@pytest.mark.parametrize("other_tables", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_queries_and_keys_in_place(grouped, other_tables, interleaved, device):
    heads_q, heads_k = (4, 2) if grouped else (3, 3)
    shape = (2, SEQLEN, heads_q + 2 * heads_k, HEAD_DIM) if grouped else (2, SEQLEN, 3, 3, HEAD_DIM)
    leaf = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    table, table_k = torch.randn(2, TABLE, ROTARY_DIM // 2, dtype=torch.float64, device=device)
    offsets = torch.tensor(OFFSETS, device=device)

    q, k, v = leaf.flatten(2, -2).split((heads_q, heads_k, heads_k), dim=2)
    keys_table = table_k if other_tables else table
    exact = torch.cat((expected(q, table, "offsets", interleaved),
                       expected(k, keys_table, "offsets", interleaved), v), dim=2).reshape(shape)
    dout = torch.randn_like(exact)
    (exact_gradient,) = torch.autograd.grad(exact, leaf, dout)

    qkv = leaf * 1.0
    tables_k = {"cos_k": table_k.cos(), "sin_k": table_k.sin()} if other_tables else {}
    out = apply_rotary_emb_qkv_(
        qkv, table.cos(), table.sin(), **tables_k, interleaved=interleaved, seqlen_offsets=offsets,
        num_heads_q=heads_q if grouped else None)
    assert out is qkv
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-12)


@BOTH_PAIRINGS
def test_keys_in_place(interleaved, device):
    leaf = torch.randn(2, SEQLEN, 2, 3, HEAD_DIM, dtype=torch.float64, device=device, requires_grad=True)
    table = torch.randn(TABLE, ROTARY_DIM // 2, dtype=torch.float64, device=device)
    exact = torch.stack((expected(leaf[:, :, 0], table, "offset", interleaved), leaf[:, :, 1]), dim=2)
    dout = torch.randn_like(exact)
    (exact_gradient,) = torch.autograd.grad(exact, leaf, dout)
    kv = leaf * 1.0
    out = apply_rotary_emb_kv_(kv, table.cos(), table.sin(), interleaved, seqlen_offsets=4)
    assert out is kv
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-12)


def test_in_place_on_a_view_of_a_projection():
    """As in a layer: the tensor that turns is a view of a linear layer's output."""
    layer = torch.nn.Linear(4, 3 * 2 * HEAD_DIM, dtype=torch.float64)
    x = torch.randn(2, SEQLEN, 4, dtype=torch.float64)
    table = torch.randn(TABLE, ROTARY_DIM // 2, dtype=torch.float64)
    qkv = apply_rotary_emb_qkv_(layer(x).unflatten(-1, (3, 2, HEAD_DIM)), table.cos(), table.sin())
    dout = torch.randn_like(qkv)
    (gradient,) = torch.autograd.grad(qkv, layer.weight, dout)
    plain = layer(x).unflatten(-1, (3, 2, HEAD_DIM))
    q, k = (expected(plain[:, :, part], table, "dense", False) for part in (0, 1))
    exact = torch.stack((q, k, plain[:, :, 2]), dim=2)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, layer.weight, dout)[0])


def test_in_place_on_a_leaf_raises():
    x, table = draw("dense", "cpu")
    with pytest.raises(RuntimeError, match="leaf"):
        apply_rotary_emb(x.requires_grad_(), table.cos(), table.sin(), inplace=True)


@BOTH_PAIRINGS
def test_formula_in_torch(interleaved):
    x, table = draw("dense", "cpu")
    cos, sin = table[:SEQLEN].cos(), table[:SEQLEN].sin()
    torch.testing.assert_close(apply_rotary_emb_torch(x, cos, sin, interleaved),
                               expected(x, table, "dense", interleaved))
    a, b = torch.randn(2, 3, dtype=torch.float64)
    pairs = torch.stack((a, b), dim=-1).flatten() if interleaved else torch.cat((a, b))
    quarter = torch.stack((-b, a), dim=-1).flatten() if interleaved else torch.cat((-b, a))
    assert torch.equal(rotate_half(pairs, interleaved), quarter)
    with pytest.raises(ValueError, match="head dim 4"):
        apply_rotary_emb_torch(x[..., :4], cos, sin)


def angles_of(positions, dim, base):
    frequencies = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    return positions.double()[:, None] * frequencies


@BOTH_PAIRINGS
def test_module(interleaved, device):
    module = RotaryEmbedding(ROTARY_DIM, base=100.0, interleaved=interleaved, device=device)
    qkv = torch.randn(1, SEQLEN, 3, 2, HEAD_DIM, device=device)
    given = qkv.clone()
    assert module(qkv, seqlen_offset=7) is qkv
    angles = angles_of(torch.arange(7, 7 + SEQLEN), ROTARY_DIM, 100.0).to(device)
    for part in (0, 1):
        exact = turned(given[0, :, part], angles, interleaved)
        torch.testing.assert_close(qkv[0, :, part].double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(qkv[:, :, 2], given[:, :, 2])

    q, kv = given[:, :, 0].clone(), given[:, :, 1:].clone()
    q_out, kv_out = module(q, kv, seqlen_offset=torch.tensor([7], device=device), max_seqlen=20)
    assert q_out is q and kv_out is kv
    assert torch.equal(torch.cat((q[:, :, None], kv), dim=2), qkv)
    assert module._cos_cached.shape == (20, ROTARY_DIM // 2)

    grouped = given.flatten(2, 3).clone()
    assert torch.equal(module(grouped, seqlen_offset=7, num_heads_q=2), qkv.flatten(2, 3))


def test_module_state():
    """Nothing in the state dict; angles stay float32 in a model of a half type, tables follow its dtype."""
    module = RotaryEmbedding(ROTARY_DIM, scale_base=512.0)
    assert not module.state_dict()
    assert {name for name, _ in module.named_buffers()} == {"inv_freq", "scale"}
    assert RotaryEmbedding(ROTARY_DIM).scale is None
    module = RotaryEmbedding(ROTARY_DIM).bfloat16()
    module(torch.randn(1, 1000, 3, 1, HEAD_DIM, dtype=torch.bfloat16))
    exact = angles_of(torch.arange(1000), ROTARY_DIM, 10000.0).cos()
    assert module._cos_cached.dtype == module._sin_cached.dtype == torch.bfloat16
    assert (module._cos_cached.double() - exact).abs().max() < 2**-8
    module._update_cos_sin_cache(10, dtype=torch.float32)
    assert module._cos_cached.dtype == torch.float32 and module._cos_cached.shape[0] == 10


def test_module_after_inference_mode():
    module = RotaryEmbedding(HEAD_DIM)
    with torch.inference_mode():
        module(torch.randn(1, SEQLEN, 3, 1, HEAD_DIM))
    leaf = torch.randn(1, SEQLEN, 3, 1, HEAD_DIM, requires_grad=True)
    module(leaf * 1.0).sum().backward()
    assert leaf.grad.isfinite().all()


def test_xpos(device):
    """Scores decay by z^(distance / scale_base), whatever the middle of the tables."""
    dim, scale_base, seqlen = 4, 16.0, 9
    module = RotaryEmbedding(dim, scale_base=scale_base, device=device)
    q, k = torch.randn(2, dim, dtype=torch.float64, device=device)
    rows = torch.stack((q, k, k)).expand(seqlen, 3, dim)[None, :, :, None].float()
    for use_kv in (False, True):
        qkv = rows.clone()
        if use_kv:
            module(qkv[:, :, 0], qkv[:, :, 1:])
        else:
            module(qkv)
        scores = torch.einsum("ihd,jhd->ij", qkv[0, :, 0].double(), qkv[0, :, 1].double())
        for i in range(seqlen):
            for j in range(seqlen):
                angles = angles_of(torch.tensor([i - j]), dim, 10000.0)[0]
                z = torch.tensor([(2 * f + 0.4 * dim) / (1.4 * dim) for f in range(dim // 2)])
                pairs_q, pairs_k = torch.complex(q[:2], q[2:]), torch.complex(k[:2], k[2:])
                turn = torch.polar(z.double() ** ((i - j) / scale_base), angles).to(device)
                exact = (pairs_q * turn * pairs_k.conj()).real.sum()
                torch.testing.assert_close(scores[i, j], exact, rtol=1e-4, atol=1e-4)


def test_packed_module():
    module = RotaryEmbedding(ROTARY_DIM)
    lengths = [3, 0, 4]
    qkv = torch.randn(7, 4 + 2 * 2, HEAD_DIM)
    exact = torch.cat([module(x[None].clone(), num_heads_q=4)[0] for x in qkv.split(lengths)])
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    assert torch.equal(module.rotate_packed_(qkv, cu_seqlens, 4, 4), exact)


def test_compile():
    x, table = draw("offsets", "cpu")
    offsets = arguments_of("offsets", "cpu")["seqlen_offsets"]

    def function(x, inplace):
        return apply_rotary_emb(x * 1.0, table.cos(), table.sin(), inplace=inplace, seqlen_offsets=offsets)

    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        torch._dynamo.reset()  # compilations of other tests count
        out = torch.compile(function, backend="aot_eager", fullgraph=True)(leaf, inplace)
        torch.testing.assert_close(out, expected(x, table, "offsets", False))
        dout = torch.randn_like(out)
        (gradient,) = torch.autograd.grad(out, leaf, dout)
        torch.testing.assert_close(gradient, expected(dout, table, "offsets", False, conjugate=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@LAYOUTS
def test_no_synchronisation_cuda(layout):
    x, table = draw(layout, "cuda")
    cos, sin, arguments = table.cos(), table.sin(), arguments_of(layout, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = apply_rotary_emb(x.requires_grad_(), cos, sin, **arguments)
        torch.autograd.grad(out, x, torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_errors():
    x, table = draw("dense", "cpu")
    cos, sin = table.cos(), table.sin()
    wide = torch.zeros(TABLE, HEAD_DIM)
    cases = [
        ("head dim of x is 8", (x, wide, wide), {}),
        ("cos and sin must both be", (x, cos, sin[1:]), {}),
        ("x must be", (x[0], cos, sin), {}),
        ("do not fit", (x, cos, sin), {"seqlen_offsets": TABLE - SEQLEN + 1}),
        ("do not fit", (x, cos[: SEQLEN - 1], sin[: SEQLEN - 1]), {}),
        ("seqlen_offsets must be", (x, cos, sin), {"seqlen_offsets": torch.zeros(3, dtype=torch.int32)}),
        ("seqlen_offsets must be", (x, cos, sin), {"seqlen_offsets": torch.zeros(2)}),
    ]
    for message, positional, named in cases:
        with pytest.raises(ValueError, match=message):
            apply_rotary_emb(*positional, **named)
    packed = arguments_of("packed", "cpu")
    with pytest.raises(ValueError, match="do not fit"):
        apply_rotary_emb(x[0], cos[:3], sin[:3], **packed)
    with pytest.raises(ValueError, match="num_heads_q"):
        apply_rotary_emb_qkv_(x, cos, sin)
    with pytest.raises(ValueError, match="kv must be"):
        apply_rotary_emb_kv_(x, cos, sin)
    with pytest.raises(ValueError, match="even"):
        RotaryEmbedding(3)
    with pytest.raises(ValueError, match="pass max_seqlen"):
        RotaryEmbedding(4)(x[:, :, None], seqlen_offset=torch.zeros(2, dtype=torch.int32))
