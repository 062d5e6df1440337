"""A GPU engine as a citizen of torch: torch.compile, operator checks, fake tensors, checkpointing, autocast,
and errors for tensors that it can't take."""

import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import flash_attn
from attention_case import Case
from gpu import DEVICE, HALVES, assert_bitwise, needs_gpu
from operator_arguments import options
from test_block_sparse import random_map
from test_errors import BAD_OPTIONS, BAD_TENSORS, expect, tensors
from test_operators import CHECKS, VARIANTS, operator, variants

pytestmark = needs_gpu

NAMES = ("out", "lse", "dq", "dk", "dv")
CASE = Case(torch.bfloat16, 3, 70, 130, 4, 2, 64, causal=True, device=DEVICE)


def can_run_inductor():
    """Triton compiles a launcher on the spot."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and (Path(sysconfig.get_path("include")) / "Python.h").is_file()


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.skipif(
    not can_run_inductor(), reason="no C compiler or no Python.h for Triton"))]


def step(q, k, v, alibi_slopes=None, mask=None, cu_seqlens=None, max_seqlens=None, **features):
    """Around the call, elementwise work that a compiler may fuse without changing bits."""
    features = {"return_attn_probs": True, "alibi_slopes": alibi_slopes, "deterministic": True, **features}
    if mask is not None:
        out, lse, _ = flash_attn.flash_attn_block_sparse_func(q * 2, k, v * 0.5, mask, **features)
    elif cu_seqlens is not None:
        lengths = (*cu_seqlens, *max_seqlens)
        out, lse, _ = flash_attn.flash_attn_varlen_func(q * 2, k, v * 0.5, *lengths, **features)
    else:
        out, lse, _ = flash_attn.flash_attn_func(q * 2, k, v * 0.5, **features)
    return out * 4, lse * 2


def compare_with_eager(compiled, case, **extra):
    """Bits of out, lse and gradients."""
    *qkv, dout = case.draw()
    dlse, results = case.draw_dlse(), []
    if case.packed:
        extra["cu_seqlens"] = case.cu_seqlens()
        extra["max_seqlens"] = tuple(case.max_seqlens)
    for function in (step, compiled):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out, lse = function(*leaves, **extra)
        results.append((out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))))
    assert_bitwise(*results[::-1], NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("features", [
    {"causal": True}, {"window_size": (20, 9), "softcap": 5.0}, {"alibi": "heads"}], ids=str)
def test_one_compilation_serves_all_shapes(features, backend):
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    features = dict(features)
    case = replace(CASE, causal=False, alibi=features.pop("alibi", "none"))
    for index, (batch, seqlen_q, seqlen_k) in enumerate([(3, 70, 130), (5, 33, 257), (6, 300, 100)]):
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            now = replace(case, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
            compare_with_eager(compiled, now, alibi_slopes=now.slopes(), **features)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_packed(backend):
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    packed = replace(CASE, cu_seqlens_q=(0, 70, 71, 203), cu_seqlens_k=(0, 40, 170, 300))
    compare_with_eager(compiled, packed, causal=True)
    packed = replace(CASE, cu_seqlens_q=(0, 10, 90, 307), cu_seqlens_k=(0, 140, 180, 410))
    compare_with_eager(compiled, packed, causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_block_sparse_with_dropout(backend):
    torch._dynamo.reset()
    mask = flash_attn.BlockSparseMask.from_block_map(random_map(CASE, 64, density=0.8), 64)
    *qkv, dout = CASE.draw()

    def attend(q, k, v):
        return flash_attn.flash_attn_block_sparse_func(q * 2, k, v, mask, dropout_p=0.3, deterministic=True)

    results = []
    with torch._inductor.config.patch(fallback_random=True):  # torch's own generator, as eager
        for function in (attend, torch.compile(attend, fullgraph=True, backend=backend)):
            torch.manual_seed(3)
            leaves = [x.detach().requires_grad_() for x in qkv]
            out = function(*leaves)
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert_bitwise(*results[::-1], ("out", "dq", "dk", "dv"))


def gpu_variant(name):
    case, given = variants()[name]
    case = replace(case, dtype=torch.bfloat16, device=DEVICE)
    return case, {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in given.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_forward(variant):
    case, given = gpu_variant(variant)
    q, k, v, _ = case.draw()
    for requires_grad in (False, True):
        leaves = [x.detach().requires_grad_(requires_grad) for x in (q, k, v)]
        torch.library.opcheck(operator("attention_forward"), (*leaves, *options(**given)), test_utils=CHECKS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(variant, with_dlse):
    case, given = gpu_variant(variant)
    q, k, v, dout = case.draw()
    out, lse = operator("attention_forward")(q, k, v, *options(**given))
    dlse = torch.randn_like(lse) if with_dlse else None
    arguments = (dout, dlse, q, k, v, out, lse, *options(**given))
    torch.library.opcheck(operator("attention_backward"), arguments, test_utils=CHECKS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_probabilities(variant):
    case, given = gpu_variant(variant)
    arguments = (*case.draw()[:3], *options(**given))
    torch.library.opcheck(operator("attention_probabilities"), arguments, test_utils=CHECKS)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("packed", [False, True])
def test_fake_tensors_are_shaped_and_placed_as_real_ones(dtype, packed):
    offsets = {"cu_seqlens_q": (0, 20, 90), "cu_seqlens_k": (0, 60, 90)} if packed else {}
    case = replace(CASE, dtype=dtype, head_dim_v=40, **offsets)
    inputs = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in case.draw()]
    given = case.cu_seqlens() if packed else ()

    def passes(q, k, v, dout, *cu_seqlens):
        lengths = (*cu_seqlens, *case.max_seqlens) if packed else ()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        function = flash_attn.flash_attn_varlen_func if packed else flash_attn.flash_attn_func
        out, lse, _ = function(*leaves, *lengths, causal=True, return_attn_probs=True)
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    real = passes(*inputs, *given)
    with FakeTensorMode() as mode:
        fake = passes(*(mode.from_tensor(x) for x in (*inputs, *given)))
    meta = passes(*(x.to("meta") for x in (*inputs, *given)))
    for name, x, y, z in zip(NAMES, real, fake, meta, strict=True):
        described = [(t.shape, t.stride(), t.dtype) for t in (x, y, z)]
        assert described[0] == described[1] == described[2], name
        assert x.device == y.device, name


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("packed", [False, True])
def test_checkpointing_gives_the_same_bits(use_reentrant, dropout_p, packed):
    """The recomputed forward draws the same mask, in the middle of a stream of other random numbers."""
    offsets = {"cu_seqlens_q": (0, 20, 290), "cu_seqlens_k": (0, 260, 400)} if packed else {}
    case = Case(torch.bfloat16, 2, 300, 400, 4, 2, 64, device=DEVICE, **offsets)
    q, k, v, dout = case.draw()
    lengths = (*case.cu_seqlens(), *case.max_seqlens) if packed else ()
    attention = flash_attn.flash_attn_varlen_func if packed else flash_attn.flash_attn_func

    def block(q, k, v):
        q = torch.nn.functional.dropout(q, 0.1)
        out = attention(q * 1.5, k, v, *lengths, dropout_p=dropout_p, causal=True, deterministic=True)
        return torch.nn.functional.dropout(out.sin(), 0.1)

    def recomputed(q, k, v):
        return checkpoint(block, q, k, v, use_reentrant=use_reentrant, preserve_rng_state=True)

    results = []
    for layer in (block, recomputed):
        torch.manual_seed(7)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = layer(*leaves)
        torch.randn(1000, device=DEVICE)
        out.backward(dout)
        results.append((out.detach(), *(x.grad for x in leaves)))
    assert_bitwise(*results, ("out", "dq", "dk", "dv"))


class Attention(torch.nn.Module):
    """As models use flash_attn: fp32 parameters, a norm whose results are fp32, a cast before the call."""

    def __init__(self, heads=4, head_dim=64):
        super().__init__()
        self.heads, width = heads, heads * head_dim
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, head_dim))

    def norm(self, x):
        return self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    def forward(self, x, attend):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(dim=2)
        return self.out(attend(self.norm(q), self.norm(k), v).flatten(2))


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_with_fp32_parameters(dtype):
    """q and k leave a norm in fp32 and are cast with v, as transformers does before flash attention."""
    torch.manual_seed(0)
    model, x = Attention().to(DEVICE), torch.randn(2, 150, 256, device=DEVICE)
    seen = []

    def cast_and_attend(q, k, v):
        seen.append((q.dtype, v.dtype))
        q, k, v = (y.to(torch.get_autocast_dtype(DEVICE)) for y in (q, k, v))
        return flash_attn.flash_attn_func(q, k, v, causal=True)

    def standard(q, k, v):
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).triu(1)
        return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(future, -torch.inf).softmax(-1), v)

    with torch.autocast(DEVICE, dtype=dtype):
        out = model(x, cast_and_attend)
    assert seen == [(torch.float32, dtype)] and out.dtype == dtype
    actual = torch.autograd.grad(out.float().square().mean(), list(model.parameters()))
    exact_model = Attention().to(DEVICE, torch.float64)
    exact_model.load_state_dict(model.state_dict())
    exact_out = exact_model(x.double(), standard)
    exact = torch.autograd.grad(exact_out.square().mean(), list(exact_model.parameters()))
    assert (out.double() - exact_out).norm() <= 0.02 * exact_out.norm()
    for (name, parameter), x, y in zip(model.named_parameters(), actual, exact):
        assert x.dtype == parameter.dtype == torch.float32, name
        assert (x.double() - y).norm() <= 0.03 * y.norm() + 1e-6, name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    q, k, v, _ = CASE.draw()
    expected = CASE.call(q, k, v)
    with mode():
        out = CASE.call(q.requires_grad_(), k, v)
    assert not out.requires_grad and out.grad_fn is None and torch.equal(out, expected)


@pytest.mark.parametrize("needed", range(1, 8))
def test_any_subset_of_gradients(needed):
    *inputs, dout = CASE.draw()
    wanted = [bool(needed >> n & 1) for n in range(3)]
    gradients = []
    for flags in ([True] * 3, wanted):
        leaves = [x.detach().requires_grad_(flag) for x, flag in zip(inputs, flags)]
        CASE.call(*leaves, deterministic=True).backward(dout)
        gradients.append([x.grad for x in leaves])
    for full, partial, want in zip(*gradients, wanted):
        assert torch.equal(full, partial) if want else partial is None


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(seqlen_q, seqlen_k):
    case = replace(CASE, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    result = case.run()
    assert (result.lse == -torch.inf).all() and (result.out == 0).all()
    assert all((x == 0).all() for x in (result.dq, result.dk, result.dv))


def on_gpu(given):
    """CPU tensors of a bad call, on the GPU, in a dtype that it takes unless the dtype is what is bad."""
    return {name: x.to(DEVICE, torch.float16 if x.dtype == torch.float32 else x.dtype)
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for name, x in given.items()}


@pytest.mark.parametrize("name", [n for n in BAD_TENSORS if n not in ("mixed devices", "not a tensor")])
def test_bad_tensors_raise_before_any_launch(name):
    change, words = BAD_TENSORS[name]
    expect(on_gpu({**tensors(), **change}), *(word.replace("float32", "float16") for word in words))
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_raise_before_any_launch(name):
    change, words = BAD_OPTIONS[name]
    slopes = change.get("alibi_slopes")
    if slopes is not None and slopes.device.type == "cpu":
        change = {"alibi_slopes": slopes.detach().to(DEVICE).requires_grad_(slopes.requires_grad)}
    expect({**on_gpu(tensors()), **change}, *words)
    torch.cuda.synchronize()


@pytest.mark.parametrize("elsewhere", ["k", "v", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"])
def test_tensors_on_two_devices_raise(elsewhere):
    q = torch.zeros(8, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32, device=DEVICE)
    given = {"q": q, "k": q, "v": q, "alibi_slopes": torch.ones(2, device=DEVICE), "cu_seqlens_q": offsets,
             "cu_seqlens_k": offsets, "max_seqlen_q": 5, "max_seqlen_k": 5}
    given[elsewhere] = given[elsewhere].cpu()
    expect(given, rf"\b{elsewhere}\b", "cpu", DEVICE, call=flash_attn.flash_attn_varlen_func)


def test_float64_raises_with_advice():
    q = torch.zeros(1, 8, 2, 64, device=DEVICE, dtype=torch.float64)
    expect({"q": q, "k": q, "v": q}, "float64", "bfloat16|float16")


def test_an_error_leaves_the_next_call_right():
    q, k, v, _ = CASE.draw()
    before = CASE.call(q, k, v)
    with pytest.raises(RuntimeError):
        CASE.call(q, k, v, dropout_p=2.0)
    assert torch.equal(CASE.call(q, k, v), before)
