"""Plain calls take torch's own operator for their gradient: the same bits, and nobody else notices."""

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from attention_case import Case
from flash_attn import gradient_node

NODE, FUNCTION = "ScaledDotProductFusedAttentionOverrideableBackward0", "_AttentionBackward"
OPERATOR = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
SMALL = Case(torch.float32, 2, 9, 12, 4, 2, 8)


def leaves_of(case):
    *qkv, dout = case.draw()
    return [x.requires_grad_() for x in qkv], dout


def way(out):
    return type(out.grad_fn).__name__


def small(device):
    return leaves_of(Case(torch.float32, 2, 9, 12, 4, 2, 8, device=device))


def test_this_torch_has_it():
    assert gradient_node.available


CASES = [
    Case(torch.float32, 2, 70, 90, 4, 2, 16, causal=True), Case(torch.float32, 1, 90, 70, head_dim_v=24),
    Case(torch.bfloat16, 2, 130, 130, causal=True), Case(torch.float16, softmax_scale=-0.3),
    Case(torch.float64, 1, 20, 30, head_dim=7, causal=True, softmax_scale=0.5),
    Case(torch.float32, 1, 0, 5), Case(torch.float32, 1, 5, 0), Case(torch.float32, 1, 1, 1, 1, 1, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_same_bits_as_our_operators(case, deterministic, device):
    torch.use_deterministic_algorithms(False)  # the fixture's
    case = Case(**{**vars(case), "device": device})
    leaves, dout = leaves_of(case)
    out = case.call(*leaves, deterministic=deterministic)
    expected, *_ = case.call(*leaves, deterministic=deterministic, return_attn_probs=True)
    assert (way(out), way(expected)) == (NODE, FUNCTION)
    assert torch.equal(out, expected) and out.is_contiguous()
    for gradient in (dout, dout[..., :1].expand_as(out)):  # the last dimension has no stride
        pairs = zip(*(torch.autograd.grad(x, leaves, gradient, retain_graph=True) for x in (out, expected)))
        for name, (actual, ours) in zip(("dq", "dk", "dv"), pairs):
            if name == "dq" and device == "cuda" and not deterministic:
                torch.testing.assert_close(actual, ours, rtol=0.02, atol=0.02)  # sums in any order
            else:
                assert torch.equal(actual, ours), name


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"softmax_scale": -0.9}], ids=str)
def test_numerical_derivatives(features, device):
    case = Case(torch.float64, 2, 3, 5, 2, 1, 3, 2, device=device, **features)
    leaves, _ = leaves_of(case)
    assert way(case.call(*leaves)) == NODE
    assert torch.autograd.gradcheck(case.call, leaves, atol=1e-6, nondet_tol=0.0)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


class PassingOn(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window_size": (-1, 0)}, {"softmax_scale": 2}, {"deterministic": True},
], ids=str)
def test_plain_calls_take_it(options, device):
    leaves, _ = small(device)
    assert way(flash_attn.flash_attn_func(*leaves, **options)) == NODE


@pytest.mark.parametrize("options", [
    {"window_size": (3, -1)}, {"window_size": (-1, 2)}, {"softcap": 1.0}, {"dropout_p": 0.5},
    {"alibi_slopes": torch.ones(4)}, {"attn_mask": torch.ones(9, 12, dtype=torch.bool)},
    {"attn_bias": torch.ones(9, 12)},
], ids=lambda options: next(iter(options)))
def test_other_calls_do_not(options):
    leaves, _ = leaves_of(SMALL)
    assert way(flash_attn.flash_attn_func(*leaves, **options)) == FUNCTION


def test_whoever_looks_sees_our_operators(device):
    (q, k, v), _ = small(device)
    with Seen() as seen:
        assert way(flash_attn.flash_attn_func(q, k, v)) == FUNCTION
    assert "flash_attn::plain_attention_forward" in seen.names
    assert not any("overrideable" in name for name in seen.names)
    with PassingOn():
        assert way(flash_attn.flash_attn_func(q, k, v)) == FUNCTION
    assert way(flash_attn.flash_attn_func(torch.nn.Parameter(q.detach()), k, v)) == FUNCTION
    meta = [x.detach().to("meta").requires_grad_() for x in (q, k, v)]
    assert way(flash_attn.flash_attn_func(*meta)) == FUNCTION
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated
        traced = torch.jit.trace(flash_attn.flash_attn_func, (q, k, v), check_trace=False)
    assert "_Attention" in str(traced.graph) and "overrideable" not in str(traced.graph)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda q: flash_attn.flash_attn_func(q, k, v).sum())(q.detach())
    assert way(flash_attn.flash_attn_func(q, k, v)) == NODE


def test_without_it(monkeypatch):
    leaves, dout = leaves_of(SMALL)
    with_it = torch.autograd.grad(SMALL.call(*leaves), leaves, dout)
    monkeypatch.setattr(gradient_node, "available", False)
    out = SMALL.call(*leaves)
    assert way(out) == FUNCTION
    for actual, expected in zip(torch.autograd.grad(out, leaves, dout), with_it):
        assert torch.equal(actual, expected)


def run(code):
    """In an interpreter of its own, where flash_attn is not imported yet."""
    folder = Path(flash_attn.__file__).parent.parent  # -c looks where it runs first
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


TRY = """
import flash_attn
q = torch.ones(1, 3, 2, 4).requires_grad_()
out = flash_attn.flash_attn_func(q, q, q)
out.sum().backward()
print(flash_attn.gradient_node.available, type(out.grad_fn).__name__)
"""


def test_another_torch_or_owner_is_left_alone():
    assert run(f"import torch\n{TRY}") == ["True", NODE]
    other_schema = """
import torch
schema_of = torch._C._get_schema
torch._C._get_schema = lambda name, overload: (
    str(schema_of(name, overload)).replace("float? scale", "float? factor") if "overrideable" in name
    else schema_of(name, overload)
)
"""
    assert run(other_schema + TRY) == ["False", FUNCTION]
    owner = """
import torch
library = torch.library.Library("aten", "IMPL")
library.impl("_scaled_dot_product_fused_attention_overrideable", lambda *args, **kwargs: None, "CPU")
"""
    assert run(owner + TRY) == ["False", FUNCTION]


def test_sdpa_does_not_come_here(device):
    (q, k, v), dout = leaves_of(Case(torch.float32, 2, 9, 9, device=device))
    out = F.scaled_dot_product_attention(q, k, v)
    assert out.grad_fn is not None and way(out) != NODE
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, exact, rtol=1e-3, atol=1e-3)
    with sdpa_kernel(SDPBackend.OVERRIDEABLE), pytest.raises(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why no other backend is taken
        F.scaled_dot_product_attention(q, k, v)
    for dropout_p in (0.0, 0.5):  # whoever calls the operator means another layout
        with pytest.raises(RuntimeError, match="flash_attn_func's own calls"):
            OPERATOR(q, k, v, None, dropout_p)


def test_autocast_leaves_it_alone(device):
    leaves, dout = small(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_attn.flash_attn_func(*leaves)
    assert way(out) == NODE and out.dtype == torch.float32
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out, leaves, dout))


def test_differentiated_once(device):
    leaves, dout = small(device)
    out = flash_attn.flash_attn_func(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative for aten::.*overrideable_backward is not implemented"):
        torch.autograd.grad(gradients[0].square().sum(), leaves)
    out = flash_attn.flash_attn_func(*leaves)
    out.backward(dout)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward(dout)


def test_what_it_saved_must_not_change(device):
    leaves, dout = small(device)
    for changed in (lambda inputs, out: inputs[0], lambda inputs, out: out):
        inputs = [x * 1 for x in leaves]
        out = flash_attn.flash_attn_func(*inputs)
        with torch.no_grad():
            changed(inputs, out).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(dout)


def test_saved_tensors_are_packed(device):
    """The same number in the same order either way: a checkpoint may compute again by the other one."""
    leaves, dout = small(device)
    expected = torch.autograd.grad(flash_attn.flash_attn_func(*leaves), leaves, dout)
    kept = {}
    for options in ({}, {"window_size": (30, -1)}):
        saved = kept[len(options)] = []

        def pack(tensor):
            saved.append(tensor.detach().clone())
            return len(saved) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
            out = flash_attn.flash_attn_func(*leaves, **options)
        assert len(saved) == 5
        for actual, exact in zip(torch.autograd.grad(out, leaves, dout), expected):
            torch.testing.assert_close(actual, exact, rtol=1e-3, atol=1e-4)
    assert [x.shape for x in kept[0]] == [x.shape for x in kept[1]]
    with torch.autograd.graph.save_on_cpu():
        out = flash_attn.flash_attn_func(*leaves)
    for actual, exact in zip(torch.autograd.grad(out, leaves, dout), expected):
        torch.testing.assert_close(actual, exact)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_gradients_that_nobody_needs(device):
    (q, k, v), dout = small(device)
    NoGradient.apply(flash_attn.flash_attn_func(q, k, v)).sum().backward()
    assert q.grad is k.grad is v.grad is None
    expected = torch.autograd.grad(flash_attn.flash_attn_func(q, k, v), (q, k, v), dout)
    for n, x in enumerate((q, k, v)):
        others = [y if y is x else y.detach() for y in (q, k, v)]
        actual, = torch.autograd.grad(flash_attn.flash_attn_func(*others), x, dout)
        torch.testing.assert_close(actual, expected[n])


def test_hooks(device):
    """Of the tensors, and of the parameters that they come from, in the order of the backward."""
    layer, heard = torch.nn.Linear(8, 8, device=device), []
    layer.weight.register_post_accumulate_grad_hook(lambda p: heard.append(("weight", p.grad.shape)))
    x = torch.randn(2, 5, 3, 8, device=device)
    q = layer(x)
    q.register_hook(lambda gradient: heard.append(("q", gradient.shape)))
    out = flash_attn.flash_attn_func(q, x, x)
    out.register_hook(lambda gradient: heard.append(("out", gradient.shape)))
    assert way(out) == NODE
    out.square().sum().backward()
    assert heard == [("out", x.shape), ("q", x.shape), ("weight", (8, 8))]


def test_from_several_threads():
    cases = [Case(torch.float32, 1, 60 + n, 70, 2, 1, 16, causal=True, seed=n) for n in range(6)]

    def gradients(case):
        leaves, dout = leaves_of(case)
        return torch.autograd.grad(flash_attn.flash_attn_func(*leaves, causal=True), leaves, dout)

    expected = [gradients(case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(gradients, cases * 3))
    for n, result in enumerate(actual):
        assert all(torch.equal(x, y) for x, y in zip(result, expected[n % 6]))
