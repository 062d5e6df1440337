"""Promise: the attention modules are standard attention between the projections their parameters say."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import flash_attn
import reference
from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)

SIGNATURES = {
    FlashSelfAttention: "causal=False, softmax_scale=None, attention_dropout=0.0, window_size=(-1, -1), "
                        "alibi_slopes=None, deterministic=False",
    FlashSelfAttention.forward: "self, qkv, causal=None, cu_seqlens=None, max_seqlen=None",
    FlashCrossAttention: "causal=False, softmax_scale=None, attention_dropout=0.0, alibi_slopes=None, "
                         "window_size=(-1, -1), deterministic=False",
    FlashCrossAttention.forward: "self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, "
                                 "cu_seqlens_k=None, max_seqlen_k=None",
    SelfAttention: "causal=False, softmax_scale=None, attention_dropout=0.0",
    SelfAttention.forward: "self, qkv, causal=None, key_padding_mask=None",
    CrossAttention: "causal=False, softmax_scale=None, attention_dropout=0.0",
    CrossAttention.forward: "self, q, kv, causal=None, key_padding_mask=None",
    MHA: "embed_dim, num_heads, num_heads_kv=None, cross_attn=False, qkv_proj_bias=True, out_proj_bias=True, "
         "dropout=0.0, softmax_scale=None, causal=False, layer_idx=None, dwconv=False, rotary_emb_dim=0, "
         "rotary_emb_base=10000.0, rotary_emb_scale_base=None, rotary_emb_interleaved=False, "
         "use_alibi=False, window_size=(-1, -1), "
         "fused_bias_fc=False, use_flash_attn=False, return_residual=False, "
         "checkpointing=False, device=None, dtype=None",
    MHA.forward: "self, x, x_kv=None, key_padding_mask=None, cu_seqlens=None, max_seqlen=None, "
                 "mixer_subset=None, inference_params=None",
    get_alibi_slopes: "nheads",
}
B, S, H, D = 2, 7, 4, 32
E = H * D
FLASH = pytest.mark.parametrize("use_flash_attn", [False, True], ids=["plain", "flash"])


def dtype_on(device):
    """float64, to compare closely; a GPU's engines take half types."""
    return torch.float64 if device == "cpu" else torch.bfloat16


def close(actual, exact):
    assert actual.shape == exact.shape
    tolerance = 1e-6 if actual.dtype == torch.float64 else 3e-2
    torch.testing.assert_close(actual.double(), exact.double(), rtol=tolerance, atol=tolerance)


def draw(*shape, device):
    return torch.randn(shape, dtype=torch.float64, device=device).to(dtype_on(device))


def exact_attention(q, kv, **features):
    return reference.attention(q.double(), kv[:, :, 0].double(), kv[:, :, 1].double(), **features)[0]


def cumulative(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures(function):
    assert str(inspect.signature(function)) == f"({SIGNATURES[function]})"
    assert inspect.getdoc(function)


def test_alibi_slopes():
    """The paper's: 1/2 ... 1/256 for 8 heads, 2^-0.5 ... 2^-8 for 16; between, some of the next power."""
    assert get_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert get_alibi_slopes(16) == pytest.approx([2.0 ** (-i / 2) for i in range(1, 17)])
    assert get_alibi_slopes(12) == pytest.approx(get_alibi_slopes(8) + get_alibi_slopes(16)[0:8:2])
    assert get_alibi_slopes(1) == [2.0**-8] and get_alibi_slopes(3)[:2] == get_alibi_slopes(2)
    assert all(len(get_alibi_slopes(n)) == n for n in range(1, 40))


@pytest.mark.parametrize("causal", [False, True])
def test_flash_self_attention(causal, device):
    qkv = draw(B, S, 3, H, D, device=device)
    slopes = torch.tensor(get_alibi_slopes(H), device=device)
    features = {"softmax_scale": 0.3, "window_size": (3, 2), "alibi_slopes": slopes}
    exact = exact_attention(qkv[:, :, 0], qkv[:, :, 1:], causal=causal, **features)
    module = FlashSelfAttention(causal=causal, **features)
    assert not module.state_dict()
    close(module(qkv), exact)
    close(FlashSelfAttention(not causal, **features)(qkv, causal=causal), exact)
    lengths = [3, 0, 4]
    packed = qkv[0]
    exact = torch.cat([exact_attention(x[None, :, 0], x[None, :, 1:], causal=causal, **features)[0]
                       for x in packed.split(lengths)])
    close(module(packed, cu_seqlens=cumulative(lengths, device), max_seqlen=4), exact)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_cross_attention(causal, device):
    q, kv = draw(B, S, H, D, device=device), draw(B, 2 * S, 2, H // 2, D, device=device)
    features = {"softmax_scale": 0.3, "window_size": (5, 5)}
    module = FlashCrossAttention(causal=causal, **features)
    close(module(q, kv), exact_attention(q, kv, causal=causal, **features))
    lengths, lengths_k = [3, 4], [10, 4]
    exact = torch.cat([exact_attention(x[None], y[None], causal=causal, **features)[0]
                       for x, y in zip(q[0].split(lengths), kv[0].split(lengths_k), strict=True)])
    close(module(q[0], kv[0], None, cumulative(lengths, device), 4, cumulative(lengths_k, device), 10), exact)


def padding(kind, seqlen, device):
    mask = torch.ones(B, seqlen, dtype=torch.bool, device=device)
    if kind == "right":
        mask[0, seqlen - 3 :] = False
    elif kind == "left":
        mask[0, :3] = False
    elif kind == "holes":
        mask[0, 1::2] = False
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, "right", "left", "holes"])
def test_self_attention(kind, causal, device):
    qkv = draw(B, S, 3, H, D, device=device)
    mask = None if kind is None else padding(kind, S, device)
    visible = None if mask is None else mask[:, None, None, :]
    exact = exact_attention(qkv[:, :, 0], qkv[:, :, 1:], causal=causal, block_visible=visible)
    module = SelfAttention(causal=causal)
    close(module(qkv, key_padding_mask=mask), exact)
    close(SelfAttention(not causal, softmax_scale=D**-0.5)(qkv, causal, mask), exact)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seqlen_k", [S - 2, S, 2 * S])
def test_cross_attention(seqlen_k, padded, causal, device):
    """Fewer heads of keys, and a diagonal that ends at the last valid key."""
    q, kv = draw(B, S, H, D, device=device), draw(B, seqlen_k, 2, H // 2, D, device=device)
    mask = padding("right", seqlen_k, device) if padded else None
    lengths = [seqlen_k - 3, seqlen_k] if padded else [seqlen_k] * B
    exact = torch.cat([exact_attention(q[b : b + 1], kv[b : b + 1, :length], causal=causal)
                       for b, length in enumerate(lengths)])
    close(CrossAttention(causal=causal)(q, kv, key_padding_mask=mask), exact)


@pytest.mark.parametrize("module", [SelfAttention, FlashSelfAttention])
def test_dropout_in_training_only(module, device):
    qkv = draw(B, S, 3, H, D, device=device)
    dropping = module(attention_dropout=0.5)
    assert not torch.equal(dropping(qkv), dropping(qkv))
    dropping.eval()
    assert torch.equal(dropping(qkv), dropping(qkv))


def turned(x, base, interleaved=False, scale_base=None, sign=1):
    """Rotary embedding (with xPos' decay) of all features of x [B, S, heads, D], by complex numbers."""
    dim = x.shape[-1]
    feature = torch.arange(0, dim, 2, dtype=torch.float64, device=x.device)
    position = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)[:, None]
    angles = position * base ** (-feature / dim)
    z = (feature + 0.4 * dim) / (1.4 * dim)
    radius = z ** (sign * position / scale_base) if scale_base else torch.ones_like(angles)
    x = x.double()
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) if interleaved else torch.complex(*x.chunk(2, dim=-1))
    pairs = pairs * torch.polar(radius, angles)[:, None]
    if interleaved:
        return torch.view_as_real(pairs).flatten(-2)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def exact_projections(module, x):
    """q, k and v [B, S, heads, D] of self-attention, in float64, as the parameters' layout says."""
    heads, heads_k = module.num_heads, module.num_heads_kv
    projected = F.linear(x.double(), module.Wqkv.weight.double(), module.Wqkv.bias.double())
    if module.dwconv:
        weight, bias = module.dwconv_qkv.weight.double()[:, 0], module.dwconv_qkv.bias.double()
        padded = F.pad(projected, (0, 0, 2, 0))
        projected = bias + sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(3))
    return projected.unflatten(-1, (-1, D)).split((heads, heads_k, heads_k), dim=2)


def exact_layer(module, x, rotary=None, **features):
    q, k, v = exact_projections(module, x)
    if rotary is not None:
        q, k = turned(q, **rotary, sign=1), turned(k, **rotary, sign=-1)
    out = reference.attention(q, k, v, **features)[0]
    return F.linear(out.flatten(2), module.out_proj.weight.double(), module.out_proj.bias.double())


def layer(device, **options):
    options = {"causal": True, **options}
    return MHA(E, H, device=device, dtype=dtype_on(device), **options)


@FLASH
@pytest.mark.parametrize("num_heads_kv", [None, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_layer_values_and_gradients(causal, num_heads_kv, use_flash_attn, device):
    module = layer(
        device, causal=causal, num_heads_kv=num_heads_kv, use_flash_attn=use_flash_attn, softmax_scale=0.2)
    x = draw(B, S, E, device=device).requires_grad_()
    out, exact = module(x), exact_layer(module, x, causal=causal, softmax_scale=0.2)
    close(out, exact)
    leaves = [x, *module.parameters()]
    dout = draw(B, S, E, device=device)
    found = torch.autograd.grad(out, leaves, dout)
    for gradient, wide in zip(found, torch.autograd.grad(exact, leaves, dout.double()), strict=True):
        scale = wide.abs().max().clamp(min=1.0)
        close(gradient / scale.to(gradient.dtype), wide / scale)


def test_parameters():
    names = {"Wqkv.weight": (E + 2 * 2 * D, E), "Wqkv.bias": (E + 2 * 2 * D,), "out_proj.weight": (E, E),
             "out_proj.bias": (E,)}
    shapes = {n: tuple(p.shape) for n, p in MHA(E, H, num_heads_kv=2, rotary_emb_dim=8).state_dict().items()}
    assert shapes == names
    cross = MHA(E, H, cross_attn=True, num_heads_kv=2, qkv_proj_bias=False, out_proj_bias=False, dwconv=True)
    shapes = {n: tuple(p.shape) for n, p in cross.state_dict().items() if n.endswith("weight")}
    assert shapes == {"Wq.weight": (E, E), "Wkv.weight": (4 * D, E), "out_proj.weight": (E, E),
                      "dwconv_q.weight": (E, 1, 3), "dwconv_kv.weight": (4 * D, 1, 3)}
    assert {n for n in cross.state_dict() if n.endswith("bias")} == {"dwconv_q.bias", "dwconv_kv.bias"}


@FLASH
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("scale_base", [None, 64.0])
def test_layer_with_rotary_embedding(scale_base, interleaved, use_flash_attn, device):
    module = layer(
        device, num_heads_kv=2, use_flash_attn=use_flash_attn, rotary_emb_dim=D, rotary_emb_base=500.0,
        rotary_emb_scale_base=scale_base, rotary_emb_interleaved=interleaved)
    x = draw(B, S, E, device=device).requires_grad_()
    rotary = {"base": 500.0, "interleaved": interleaved, "scale_base": scale_base}
    out, exact = module(x), exact_layer(module, x, rotary=rotary, causal=True)
    close(out, exact)
    dout = draw(B, S, E, device=device)
    close(*(torch.autograd.grad(y, x, dout.to(y.dtype))[0] for y in (out, exact)))


@pytest.mark.parametrize("num_heads_kv", [None, 2])
@pytest.mark.parametrize("rotary", [False, True])
def test_packed_layer(rotary, num_heads_kv, device):
    options = {"rotary_emb_dim": D, "rotary_emb_base": 500.0} if rotary else {}
    module = layer(device, use_flash_attn=True, num_heads_kv=num_heads_kv, **options)
    lengths = [3, 0, 4]
    x = draw(sum(lengths), E, device=device)
    rotary = {"base": 500.0} if rotary else None
    exact = torch.cat([exact_layer(module, part[None], rotary, causal=True)[0] for part in x.split(lengths)])
    close(module(x, cu_seqlens=cumulative(lengths, device), max_seqlen=4), exact)


def test_layer_with_alibi_and_window(device):
    module = layer(device, use_flash_attn=True, use_alibi=True, window_size=(3, 0), num_heads_kv=2)
    x = draw(B, S, E, device=device)
    slopes = torch.tensor(get_alibi_slopes(H), device=device)
    close(module(x), exact_layer(module, x, causal=True, window_size=(3, 0), alibi_slopes=slopes))
    assert not any("slopes" in name for name in module.state_dict())


@pytest.mark.parametrize("num_heads_kv", [None, 2])
@pytest.mark.parametrize("kind", ["right", "left"])
def test_layer_with_padding(kind, num_heads_kv, device):
    module = layer(device, num_heads_kv=num_heads_kv)
    x, mask = draw(B, S, E, device=device), padding(kind, S, device)
    exact = exact_layer(module, x, causal=True, block_visible=mask[:, None, None, :])
    close(module(x, key_padding_mask=mask), exact)


@FLASH
def test_layer_with_convolution(use_flash_attn, device):
    module = layer(device, dwconv=True, use_flash_attn=use_flash_attn)
    x = draw(B, S, E, device=device)
    close(module(x), exact_layer(module, x, causal=True))


@FLASH
@pytest.mark.parametrize("dwconv", [False, True])
def test_cross_layer(dwconv, use_flash_attn, device):
    module = MHA(E, H, num_heads_kv=2, cross_attn=True, use_flash_attn=use_flash_attn, dwconv=dwconv,
                 device=device, dtype=dtype_on(device))
    x, x_kv = draw(B, S, E, device=device), draw(B, 2 * S, E, device=device)
    subset = slice(0, 3)
    for arguments, queries, keys in [
        ({"x_kv": x_kv}, x, x_kv), ({}, x, x), ({"mixer_subset": subset}, x[:, subset], x),
    ]:
        q, kv = module.Wq(queries), module.Wkv(keys)
        if dwconv:
            q, kv = (c(F.pad(y.mT, (2, 0)))[..., 2:-2].mT
                     for c, y in ((module.dwconv_q, q), (module.dwconv_kv, kv)))
        q, kv = q.unflatten(-1, (H, D)), kv.unflatten(-1, (2, 2, D))
        exact = exact_attention(q, kv).flatten(2)
        exact = F.linear(exact, module.out_proj.weight.double(), module.out_proj.bias.double())
        close(module(x, **arguments), exact)
    if not use_flash_attn:
        mask = padding("right", 2 * S, device)
        trimmed = module(x[:1], x_kv[:1, : 2 * S - 3])
        close(module(x, x_kv, key_padding_mask=mask)[:1], trimmed)


@FLASH
@pytest.mark.parametrize("num_heads_kv", [None, 2])
def test_checkpointing_and_residual(num_heads_kv, use_flash_attn, device):
    module = layer(device, use_flash_attn=use_flash_attn, num_heads_kv=num_heads_kv, rotary_emb_dim=D)
    x = draw(B, S, E, device=device).requires_grad_()
    expected = module(x)
    dout = torch.randn_like(expected)
    gradient = torch.autograd.grad(expected, x, dout)
    module.checkpointing = module.return_residual = True
    out, residual = module(x)
    assert residual is x
    close(out, expected)
    close(torch.autograd.grad(out, x, dout)[0], gradient[0])


def inference_params(max_seqlen=16, batch=B, batch_size_offset=0, lengths=None):
    return SimpleNamespace(max_seqlen=max_seqlen, max_batch_size=batch, seqlen_offset=0,
                           batch_size_offset=batch_size_offset, key_value_memory_dict={},
                           lengths_per_sample=lengths)


def kvcache_stand_in(q, k_cache, v_cache, k, v, cache_seqlens, **features):
    """The interface's meaning, sequence by sequence."""
    outs = []
    for b in range(q.shape[0]):
        begin = int(cache_seqlens[b]) if isinstance(cache_seqlens, torch.Tensor) else cache_seqlens
        end = begin + k.shape[1]
        k_cache[b, begin:end], v_cache[b, begin:end] = k[b], v[b]
        kv = torch.stack((k_cache[b : b + 1, :end], v_cache[b : b + 1, :end]), dim=2)
        outs.append(exact_attention(q[b : b + 1], kv, **features).to(q.dtype))
    return torch.cat(outs)


@pytest.fixture(params=["plain", "flash", "flash_with_stand_in", "flash_with_kvcache"])
def use_flash(request, monkeypatch):
    """Whether a layer uses flash, and what there is of flash_attn_with_kvcache."""
    if request.param == "flash":
        monkeypatch.delattr(flash_attn, "flash_attn_with_kvcache", raising=False)
    elif request.param == "flash_with_stand_in":
        monkeypatch.setattr(flash_attn, "flash_attn_with_kvcache", kvcache_stand_in, raising=False)
    elif request.param == "flash_with_kvcache" and not hasattr(flash_attn, "flash_attn_with_kvcache"):
        pytest.skip("flash_attn_with_kvcache is not part of this build")
    return request.param != "plain"


@pytest.mark.parametrize("features", [
    {}, {"rotary_emb_dim": D, "num_heads_kv": 2}, {"rotary_emb_dim": D, "rotary_emb_scale_base": 64.0},
    {"use_alibi": True, "window_size": (3, 0)},
], ids=["plain_scores", "rotary", "xpos", "alibi_window"])
@torch.no_grad()
def test_decoding_equals_one_pass(features, use_flash, device):
    """A prompt, then a chunk, then token by token, for two requests that lie behind another in the cache."""
    if features.get("use_alibi") and not use_flash:
        pytest.skip("ALiBi and windows are flash's")
    module = layer(device, use_flash_attn=use_flash, layer_idx=3, **features)
    x = draw(B, 9, E, device=device)
    params = inference_params(batch=B + 1, batch_size_offset=1)
    outs, begin = [], 0
    for length in (4, 2, 1, 1, 1):
        params.seqlen_offset = begin
        outs.append(module(x[:, begin : begin + length], inference_params=params))
        begin += length
    close(torch.cat(outs, dim=1), module(x).double())
    cache = params.key_value_memory_dict[3]
    assert cache.shape == (B + 1, 16, 2, module.num_heads_kv, D)
    assert cache[1:, :9].any(dim=-1).all() and not cache[0].any() and not cache[:, 9:].any()


@torch.no_grad()
def test_decoding_with_lengths_of_their_own(use_flash, device):
    """The second request is two tokens shorter."""
    module = layer(device, use_flash_attn=use_flash, layer_idx=0, rotary_emb_dim=D, num_heads_kv=2)
    x = draw(B, 8, E, device=device)
    params = inference_params(lengths=torch.zeros(B, dtype=torch.int32, device=device))
    module(x[:, :5], inference_params=params)
    params.seqlen_offset = 5
    params.lengths_per_sample += torch.tensor([5, 3], dtype=torch.int32, device=device)
    chunk = torch.stack((x[0, 5:7], x[1, 3:5]))
    if use_flash and not hasattr(flash_attn, "flash_attn_with_kvcache"):
        with pytest.raises(NotImplementedError, match="lengths_per_sample"):
            module(chunk, inference_params=params)
        return
    out = module(chunk, inference_params=params)
    whole = module(x).double()
    close(out, torch.stack((whole[0, 5:7], whole[1, 3:5])))


@torch.no_grad()
def test_allocated_cache(device):
    module = layer(device, num_heads_kv=2, layer_idx=0)
    cache = module.allocate_inference_cache(3, 10)
    assert cache.shape == (3, 10, 2, 2, D) and cache.dtype == module.out_proj.weight.dtype
    params = inference_params(max_seqlen=10, batch=3)
    params.key_value_memory_dict[0] = cache
    module(draw(B, S, E, device=device), inference_params=params)
    assert cache[:B, :S].any(dim=-1).all()


def test_errors():
    x = torch.randn(B, S, E)
    cu_seqlens = cumulative([S, S], "cpu")
    mask = torch.ones(B, S, dtype=torch.bool)
    params = inference_params()
    for message, call in [
        ("must divide", lambda: MHA(E, 3)),
        ("must divide", lambda: MHA(E, 4, num_heads_kv=3)),
        ("use_flash_attn=True", lambda: MHA(E, H, use_alibi=True)),
        ("use_flash_attn=True", lambda: MHA(E, H, window_size=(3, 3))),
        ("self-attention only", lambda: MHA(E, H, cross_attn=True, rotary_emb_dim=8)),
        ("cross_attn=True", lambda: MHA(E, H)(x, x_kv=x)),
        ("key_padding_mask needs", lambda: MHA(E, H, use_flash_attn=True)(x, key_padding_mask=mask)),
        ("key_padding_mask must be", lambda: MHA(E, H)(x, key_padding_mask=mask[:, 1:])),
        ("key_padding_mask must be", lambda: MHA(E, H)(x, key_padding_mask=mask.float())),
        ("cu_seqlens needs", lambda: MHA(E, H)(x[0], cu_seqlens=cu_seqlens, max_seqlen=S)),
        ("max_seqlen", lambda: MHA(E, H, use_flash_attn=True)(x[0], cu_seqlens=cu_seqlens)),
        ("goes with neither", lambda: MHA(E, H)(x, key_padding_mask=mask, inference_params=params)),
        ("layer_idx", lambda: MHA(E, H)(x, inference_params=params)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ImportError, match="fused_bias_fc"):
        MHA(E, H, fused_bias_fc=True)
