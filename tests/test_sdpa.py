"""torch's scaled_dot_product_attention on our kernels: the contract of each operator on the CPU, where torch
has no kernels of its own in the way; switching on and off as the dispatcher sees it; all of it on a GPU."""

import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import flash_attn
from flash_attn import sdpa
from acceptance import Expected, Result
from attention_case import Case, draw_rng_state
from gpu import HALVES, assert_bitwise, needs_gpu

REPLACED = [name for name in sdpa.KERNELS if hasattr(torch.ops.aten, name)]
CASE = Case(torch.float32, 2, 37, 53, 4, 4, 16)
PACKED = Case(torch.float32, num_heads=4, num_heads_k=2, head_dim=16, cu_seqlens_q=(0, 5, 17, 40),
              cu_seqlens_k=(0, 11, 23, 40))
LAYOUTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous(),
    "rows first": lambda x: x.contiguous().transpose(1, 2),
    "one of three": lambda x: torch.stack([x, x, x], dim=2)[:, :, 1].transpose(1, 2),
    "copied heads": lambda x: x[:, :, :1].transpose(1, 2).contiguous().expand(-1, x.shape[2], -1, -1),
}
CASES = {
    "plain": CASE,
    "causal": replace(CASE, seqlen_k=37, causal=True),
    "grouped": replace(CASE, num_heads_k=2),
    "dropout": replace(CASE, dropout_p=0.3),
    "scaled": replace(CASE, softmax_scale=0.2, dtype=torch.bfloat16),
    "one query": replace(CASE, seqlen_q=1),
    "empty rows": replace(CASE, seqlen_k=20, causal=True),
}


@pytest.fixture
def on_cpu():
    """Our kernels behind torch's operators on the CPU. Autograd, above them, is torch's own."""
    library = sdpa.register_kernels("CPU")
    yield
    del library


@pytest.fixture
def with_gpu_engine(monkeypatch):
    """So that what needs no GPU is tested without one."""
    monkeypatch.setattr(sdpa._C, "engines", lambda: [{"name": "cpu"}, {"name": "sm80"}])


@pytest.fixture
def restored():
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    sdpa.deactivate()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def bshd(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def check(case, inputs, out, lse, gradients):
    """Tensors [B, H, S, D], inputs with dout as the last."""
    exact = Expected(case.attend(), *bshd(*inputs))
    exact.check(out=out.transpose(1, 2), lse=lse, **dict(zip(("dq", "dk", "dv"), bshd(*gradients))))


def strides(x):
    """Of dimensions that have neighbours: torch.compile does not ask for others."""
    return [stride for stride, size in zip(x.stride(), x.shape) if size > 1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_sdpa_operator_and_its_gradient(on_cpu, name, layout):
    case = CASES[name]
    *qkv, dout = (LAYOUTS[layout](x) for x in case.draw())
    leaves = [x.detach().requires_grad_() for x in qkv]
    torch.manual_seed(case.seed)
    out, lse, cum_q, cum_k, max_q, max_k, rng_state, unused, debug = (
        torch.ops.aten._scaled_dot_product_flash_attention(
            *leaves, case.dropout_p, case.causal, scale=case.softmax_scale))
    gradients = torch.autograd.grad(out, leaves, dout)
    check(case, (*qkv, dout), out.detach(), lse, gradients)
    for result, model in zip((out, *gradients), (leaves[0], *leaves)):
        assert strides(result) == strides(torch.empty_like(model))
    assert (cum_q, cum_k, max_q, max_k) == (None, None, case.seqlen_q, case.seqlen_k)
    assert rng_state.dtype == unused.dtype == torch.uint64
    assert rng_state.shape == (2,) and unused.shape == () and debug.shape == (0,)
    if case.dropout_p > 0:
        assert torch.equal(rng_state.view(torch.int64), draw_rng_state(case.seed))


def test_dropout_is_the_same_in_every_layout(on_cpu):
    results = []
    for layout in ("heads first", "rows first"):
        *qkv, dout = (LAYOUTS[layout](x) for x in CASE.draw())
        leaves = [x.detach().requires_grad_() for x in qkv]
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            out = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, 0.4)[0]
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for other in (1, 3, 4):
        assert_bitwise(results[other], results[0], ("out", "dq", "dk", "dv"))
    assert not torch.equal(results[0][0], results[2][0])


@pytest.mark.parametrize("features", [
    {}, {"causal": True}, {"window_size": (4, -1)}, {"window_size": (3, 2), "dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize("case", [PACKED, replace(CASE, num_heads_k=2)], ids=["packed", "dense"])
def test_flash_operator_and_its_gradient(on_cpu, case, features):
    case = replace(case, **features)
    *qkv, dout = case.draw()
    leaves = [x.detach().requires_grad_() for x in qkv]
    cu_seqlens = case.cu_seqlens() if case.packed else (None, None)
    left, right = (None if size < 0 else size for size in case.window_size)
    torch.manual_seed(case.seed)
    out, lse, rng_state, unused, debug = torch.ops.aten._flash_attention_forward(
        *leaves, *cu_seqlens, *case.max_seqlens, case.dropout_p, case.causal, False, window_size_left=left,
        window_size_right=right)
    gradients = torch.autograd.grad(out, leaves, dout)
    case.check((*qkv, dout), actual=Result(out.detach(), lse, *gradients))
    assert rng_state.shape == (2,) and unused.shape == () and debug.shape == (0,)


def test_forward_with_slopes(on_cpu):
    """Without gradients only: torch's backward is not given the slopes."""
    case = replace(PACKED, alibi="heads")
    q, k, v, _ = case.draw()
    arguments = (q, k, v, *case.cu_seqlens(), *case.max_seqlens, 0.0, True, False)
    out, *_ = torch.ops.aten._flash_attention_forward(*arguments, alibi_slopes=case.slopes())
    assert torch.equal(out, case.call(q, k, v, causal=True))
    q.requires_grad_()
    with torch.no_grad():
        torch.ops.aten._flash_attention_forward(*arguments, alibi_slopes=case.slopes())
    with pytest.raises(RuntimeError, match="alibi_slopes"):
        torch.ops.aten._flash_attention_forward(*arguments, alibi_slopes=case.slopes())


def test_forward_into_a_given_tensor(on_cpu):
    if "_flash_attention_forward_no_dropout_inplace" not in REPLACED:
        pytest.skip("this torch has no such operator")
    q, k, v, _ = PACKED.draw()
    arguments = (q, k, v, *PACKED.cu_seqlens(), *PACKED.max_seqlens, 0.0, True, False)
    given = torch.empty_like(q)
    lse = torch.ops.aten._flash_attention_forward_no_dropout_inplace(given, *arguments)
    out, expected_lse, *_ = torch.ops.aten._flash_attention_forward(*arguments)
    assert torch.equal(given, out) and torch.equal(lse, expected_lse)


def test_forward_over_pages():
    """Called as the kernel that it is: older operators lack the block table."""
    q, k, v, _ = PACKED.draw()
    lengths = torch.tensor(PACKED.cu_seqlens_k).diff().int()
    pages, table = [], torch.zeros(3, 2, dtype=torch.int32)
    for b, (begin, end) in enumerate(zip(PACKED.cu_seqlens_k, PACKED.cu_seqlens_k[1:])):
        for page, first in enumerate(range(begin, end, 16)):
            table[b, page] = len(pages)
            rows = min(16, end - first)
            pages.append([torch.cat([x[first : first + rows], x.new_full((16 - rows, 2, 16), torch.nan)])
                          for x in (k, v)])
    key_pages, value_pages = (torch.stack(x) for x in zip(*pages))
    cu_seqlens_q, _ = PACKED.cu_seqlens()
    out, lse, *_ = sdpa.flash_forward(
        q, key_pages, value_pages, cu_seqlens_q, None, 23, 17, 0.0, True, False, seqused_k=lengths,
        block_table=table)
    Expected(replace(PACKED, causal=True).attend(), q, k, v).check(out=out, lse=lse)


@pytest.mark.parametrize("argument", ["return_debug_mask", "seqused_k", "block_table"])
def test_what_is_not_supported_raises(argument):
    q, k, v, _ = PACKED.draw()
    value = True if argument == "return_debug_mask" else torch.zeros(3, dtype=torch.int32)
    arguments = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False, argument: value}
    with pytest.raises((RuntimeError, NotImplementedError), match=argument):
        sdpa.flash_forward(q, k, v, *PACKED.cu_seqlens(), *PACKED.max_seqlens, **arguments)


@pytest.mark.parametrize("layout", ["heads first", "rows first"])
def test_compiled(on_cpu, layout):
    """The strides that torch's fake kernels promise are those that ours return."""
    torch._dynamo.reset()

    def step(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q * 2, k, v, 0.0, True)[0] * 3

    *qkv, dout = (LAYOUTS[layout](x) for x in CASES["causal"].draw())
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert_bitwise(*results, ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("name", [name for name in REPLACED if "inplace" not in name])
def test_parameters_are_those_of_the_operator(name):
    """Names, order, defaults and what is keyword-only; ours may have more of a newer torch."""
    parameters = list(inspect.signature(sdpa.KERNELS[name]).parameters.values())
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    assert len(parameters) >= len(arguments)
    for parameter, argument in zip(parameters, arguments):
        assert parameter.name == argument.name
        assert (parameter.kind == inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        default = parameter.default if argument.has_default_value() else None
        assert default == argument.default_value, argument.name
    assert all(parameter.default is None for parameter in parameters[len(arguments):])


def is_ours(name):
    """Whether the dispatcher's CUDA kernel of an operator is registered in sdpa.py."""
    lines = torch._C._dispatch_dump(f"aten::{name}").splitlines()
    (active,) = [line for line in lines if line.startswith("CUDA: ")]
    return sdpa.__file__ in active


def states():
    current = torch.nn.attention.current_flash_attention_impl()
    return current, torch.backends.cuda.cudnn_sdp_enabled(), {is_ours(name) for name in REPLACED}


def test_importing_registers_and_activates_nothing():
    assert "flash_attn" in torch.nn.attention.list_flash_attention_impls()
    assert states() == (None, True, {False})


@pytest.mark.parametrize("cudnn", [True, False])
def test_activation_and_back(with_gpu_engine, restored, cudnn):
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    before = states()
    for _ in range(2):
        sdpa.activate()
        sdpa.activate()
        assert states() == ("flash_attn", False, {True})
        sdpa.deactivate()
        assert states() == before == (None, cudnn, {False})
    sdpa.deactivate()
    assert states() == before


def test_activation_through_torch_leaves_cudnn(with_gpu_engine, restored):
    torch.nn.attention.activate_flash_attention_impl("flash_attn")
    assert states() == ("flash_attn", True, {True})
    sdpa.deactivate()
    assert states() == (None, True, {False})


def test_torch_restores_what_activate_changed(with_gpu_engine, restored):
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("this torch can't restore")
    sdpa.activate()
    torch.nn.attention.restore_flash_attention_impl()
    assert states() == (None, True, {False})


def test_activation_needs_a_gpu_engine(monkeypatch, restored):
    monkeypatch.setattr(sdpa._C, "engines", lambda: [{"name": "cpu"}])
    with pytest.raises(RuntimeError, match="no GPU engine"):
        sdpa.activate()
    assert states() == (None, True, {False})


GPU_CASES = {
    "plain": Case(torch.bfloat16, 2, 130, 257, 4, 4, 64),
    "causal": Case(torch.bfloat16, 2, 300, 300, 4, 4, 128, causal=True),
    "half": Case(torch.float16, 2, 300, 300, 4, 4, 64, causal=True),
    "grouped": Case(torch.bfloat16, 2, 130, 257, 8, 2, 64),
    "head dim 40": Case(torch.bfloat16, 2, 130, 130, 4, 4, 40, causal=True),
    "head dim 36": Case(torch.bfloat16, 2, 130, 130, 4, 4, 36),
    "head dim 256": Case(torch.bfloat16, 1, 130, 130, 2, 2, 256, causal=True),
    "dropout": Case(torch.bfloat16, 2, 130, 257, 4, 4, 64, dropout_p=0.3),
}
GPU_CASES = {name: replace(case, device="cuda") for name, case in GPU_CASES.items()}


@pytest.fixture
def calls(monkeypatch):
    """How often our operators ran."""
    counted = {"forward": 0, "backward": 0}
    for name in counted:
        def counting(*arguments, name=name, original=getattr(sdpa.operators, name)):
            counted[name] += 1
            return original(*arguments)

        monkeypatch.setattr(sdpa.operators, name, counting)
    return counted


@pytest.fixture
def active(restored):
    sdpa.activate()


def attend(case, q, k, v):
    options = {"dropout_p": case.dropout_p, "is_causal": case.causal}
    return F.scaled_dot_product_attention(
        q, k, v, **options, enable_gqa=case.num_heads != case.num_heads_k)


@needs_gpu
@pytest.mark.parametrize("layout", ["heads first", "rows first", "one of three"])
@pytest.mark.parametrize("name", GPU_CASES)
def test_cuda_sdpa(active, calls, name, layout):
    case = GPU_CASES[name]
    *qkv, dout = (LAYOUTS[layout](x) for x in case.draw())
    leaves = [x.detach().requires_grad_() for x in qkv]
    torch.manual_seed(case.seed)
    out = attend(case, *leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert calls == {"forward": 1, "backward": 1}, "torch took another backend"
    exact = Expected(case.attend(), *bshd(*qkv, dout))
    gradients = dict(zip(("dq", "dk", "dv"), bshd(*gradients)))
    exact.check(out=out.detach().transpose(1, 2), **gradients)


@needs_gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_cuda_sdpa_dropout_is_reproducible(active, dtype):
    case = replace(GPU_CASES["dropout"], dtype=dtype)
    *qkv, dout = bshd(*case.draw())
    leaves = [x.detach().requires_grad_() for x in qkv]
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = attend(case, *leaves)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert_bitwise(results[1], results[0], ("out", "dq", "dk", "dv"))
    assert not torch.equal(results[2][0], results[0][0])


@needs_gpu
def test_cuda_sdpa_is_restored(calls, restored):
    """The same bits as before, from torch's kernels."""
    qkv = bshd(*GPU_CASES["causal"].draw()[:3])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = attend(GPU_CASES["causal"], *qkv)
    sdpa.activate()
    ours = attend(GPU_CASES["causal"], *qkv)
    assert calls["forward"] == 1
    sdpa.deactivate()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        after = attend(GPU_CASES["causal"], *qkv)
    assert calls["forward"] == 1 and torch.equal(before, after)
    torch.testing.assert_close(ours, after, atol=2e-2, rtol=2e-2)


@needs_gpu
def test_cuda_sdpa_activated_by_torch(calls, restored):
    """Without our activate() cuDNN may come first; held to flash, torch comes to us."""
    torch.nn.attention.activate_flash_attention_impl("flash_attn")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attend(GPU_CASES["causal"], *bshd(*GPU_CASES["causal"].draw()[:3]))
    assert calls["forward"] == 1


@needs_gpu
def test_cuda_what_flash_refuses_goes_elsewhere(active, calls):
    case = GPU_CASES["plain"]
    q, k, v = bshd(*case.draw()[:3])
    mask = torch.rand(case.seqlen_q, case.seqlen_k, device="cuda") < 0.5
    mask[:, 0] = True
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), attn_mask=mask)
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    assert calls["forward"] == 0


@needs_gpu
def test_cuda_varlen_attn(active, calls):
    case = replace(PACKED, dtype=torch.bfloat16, num_heads_k=4, head_dim=64, device="cuda")
    *qkv, dout = case.draw()
    lengths = (*case.cu_seqlens(), *case.max_seqlens)
    results = []
    for attend_packed in (varlen_attn, flash_attn.flash_attn_varlen_func):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attend_packed(*leaves, *lengths)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert calls["forward"] == 2
    assert_bitwise(*results, ("out", "dq", "dk", "dv"))


@needs_gpu
@pytest.mark.parametrize("name", ["causal", "grouped", "dropout"])
def test_cuda_sdpa_compiled(active, name):
    torch._dynamo.reset()
    case = GPU_CASES[name]
    *qkv, dout = (LAYOUTS["heads first"](x) for x in case.draw())
    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = function(case, *leaves)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert_bitwise(*results, ("out", "dq", "dk", "dv"))


@needs_gpu
def test_cuda_sdpa_in_a_graph(active):
    """Capture and replay: other dropout bits each time, no allocation that a graph forbids."""
    case = GPU_CASES["dropout"]
    q, k, v = bshd(*case.draw()[:3])
    attend(case, q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case, q, k, v)
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append(out.clone())
    assert not torch.equal(*replays)
