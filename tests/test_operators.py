"""Citizens of torch: schemas, fake kernels, torch.compile, autocast, checkpointing, grad modes, hooks."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flash_attn
from attention_case import Case
from operator_arguments import DEFAULTS, options

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
DENSE = Case(torch.float32, 2, 17, 23, 4, 2, 8, 6, causal=True)
PACKED = Case(torch.float32, num_heads=4, num_heads_k=2, head_dim=8, head_dim_v=6, cu_seqlens_q=(0, 5, 17),
              cu_seqlens_k=(0, 11, 23), tail=2)


def operator(name):
    return getattr(torch.ops.flash_attn, name).default


def block_lists(block_map):
    """The lists of the blocks in each row of block_map, and those of its transpose."""
    lists = []
    for rows in (block_map, block_map.transpose(-1, -2)):
        counts = rows.sum(dim=-1, dtype=torch.int32)
        lists += [counts, torch.argsort(~rows, dim=-1, stable=True).to(torch.int32)]
    names = ("key_block_counts", "key_block_indices", "query_block_counts", "query_block_indices")
    return dict(zip(names, lists))


def variants():
    state = torch.tensor([123, 456])
    block_map = torch.rand(1, 1, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.6
    cu_q, cu_k = PACKED.cu_seqlens()
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 12, "max_seqlen_k": 12}
    return {
        "dense": (DENSE, {"max_seqlen_q": 17, "max_seqlen_k": 23, "window_size_right": 0}),
        "dense with everything": (DENSE, {
            "alibi_slopes": torch.rand(2, 4), "rng_state": state, "dropout_p": 0.3, "window_size_left": 9}),
        "packed": (PACKED, packed),
        "packed with everything": (PACKED, {
            **packed, "alibi_slopes": torch.rand(4), "rng_state": state, "dropout_p": 0.3}),
        "block sparse": (DENSE, {
            **block_lists(block_map), "block_size_q": 6, "block_size_k": 8, "softcap": 2.0}),
    }


VARIANTS = ["dense", "dense with everything", "packed", "packed with everything", "block sparse"]


@pytest.mark.parametrize("name", ["attention_forward", "attention_backward", "attention_probabilities"])
def test_schema_names_the_options_in_order(name):
    arguments = [argument.name for argument in operator(name)._schema.arguments]
    first = arguments.index("cu_seqlens_q")
    assert arguments[first : first + len(DEFAULTS)] == list(DEFAULTS)
    assert arguments[:first][-3:] == ["q", "k", "v"] or arguments[:first][-2:] == ["out", "lse"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_forward(variant):
    case, given = variants()[variant]
    q, k, v, _ = case.draw()
    for requires_grad in (False, True):
        leaves = [x.detach().requires_grad_(requires_grad) for x in (q, k, v)]
        torch.library.opcheck(operator("attention_forward"), (*leaves, *options(**given)), test_utils=CHECKS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(variant, with_dlse):
    case, given = variants()[variant]
    q, k, v, dout = case.draw()
    out, lse = operator("attention_forward")(q, k, v, *options(**given))
    dlse = torch.randn_like(lse) if with_dlse else None
    arguments = (dout, dlse, q, k, v, out, lse, *options(**given))
    torch.library.opcheck(operator("attention_backward"), arguments, test_utils=CHECKS)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 2)])
def test_plain_operators_are_the_others_without_options(window):
    q, k, v, dout = DENSE.draw()
    plain = (0.3, *window, True)
    full = options(softmax_scale=0.3, window_size_left=window[0], window_size_right=window[1],
                   deterministic=True)
    for name, tensors in (("attention_forward", ()), ("attention_backward", (dout, torch.randn(2, 4, 17)))):
        if tensors:
            tensors = (*tensors, q, k, v, *operator("attention_forward")(q, k, v, *full))
        else:
            tensors = (q, k, v)
        torch.library.opcheck(operator(f"plain_{name}"), (*tensors, *plain), test_utils=CHECKS)
        for actual, expected in zip(operator(f"plain_{name}")(*tensors, *plain),
                                    operator(name)(*tensors, *full), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_probabilities(variant):
    case, given = variants()[variant]
    q, k, v, _ = case.draw()
    arguments = (q, k, v, *options(**given))
    torch.library.opcheck(operator("attention_probabilities"), arguments, test_utils=CHECKS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_strides_are_the_real_ones(dtype):
    """For inputs in any layout: what torch.compile plans with is what it gets."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = Case(dtype, 2, 9, 13, 4, 2, 8, 6)
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.draw()]
    q, k, v, dout = inputs
    real = operator("attention_forward")(q, k, v, *options())
    real_backward = operator("attention_backward")(dout, None, q, k, v, *real, *options())
    with FakeTensorMode() as mode:
        q, k, v, dout = map(mode.from_tensor, inputs)
        fake = operator("attention_forward")(q, k, v, *options())
        fake_backward = operator("attention_backward")(dout, None, q, k, v, *fake, *options())
    for x, y in zip((*real, *real_backward), (*fake, *fake_backward)):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def run_compiled(case, dynamic, cases=()):
    """Compiles once, compares out, lse and gradients with eager for case and then for each of cases."""
    def step(q, k, v, dout, cu_seqlens):
        features = {**case.features(), "return_attn_probs": True}
        if case.packed:
            longest = case.max_seqlens
            out, lse, _ = flash_attn.flash_attn_varlen_func(q * 2, k, v, *cu_seqlens, *longest, **features)
        else:
            out, lse, _ = flash_attn.flash_attn_func(q * 2, k, v, **features)
        return (out * dout).sum() + torch.where(lse.isfinite(), lse, 0.0).sum(), out.relu()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for other in (case, *cases):
        results = []
        for function in (step, compiled):
            *qkv, dout = other.draw()
            leaves = [x.requires_grad_() for x in qkv]
            cu_seqlens = case.cu_seqlens() if case.packed else ()
            loss, out = function(*leaves, dout, cu_seqlens)
            results.append((loss, out, *torch.autograd.grad(loss, leaves)))
        for eager, actual in zip(*results):
            assert torch.equal(eager, actual)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "features", [{}, {"causal": True, "window_size": (5, -1)}, {"softcap": 3.0}], ids=str)
def test_compile_dense(features, dynamic):
    shapes = [(2, 17, 23), (2, 17, 23), (3, 40, 31)]
    cases = [Case(torch.bfloat16, *shape, 4, 2, 8, **features) for shape in shapes]
    run_compiled(cases[0], dynamic, cases[1:])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_packed(dynamic):
    run_compiled(PACKED, dynamic)


def test_compile_does_not_recompile_for_new_lengths():
    torch._dynamo.reset()
    compilations = []

    def counting_backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *x: flash_attn.flash_attn_func(*x, causal=True), fullgraph=True,
                             dynamic=True, backend=counting_backend)
    for seqlen in (16, 48, 33, 70):
        q, k, v, _ = Case(torch.float32, 2, seqlen, seqlen + 3).draw()
        assert torch.equal(compiled(q, k, v), flash_attn.flash_attn_func(q, k, v, causal=True))
    assert len(compilations) == 1


def test_compile_block_sparse_and_dropout():
    torch._dynamo.reset()
    q, k, v, _ = Case(torch.float32, 1, 40, 40).draw()
    mask = flash_attn.BlockSparseMask.from_block_map(torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(), 16)

    def step(q, k, v):
        return flash_attn.flash_attn_block_sparse_func(q, k, v, mask, dropout_p=0.3)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        torch.manual_seed(3)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for eager, actual in zip(*results):
        assert torch.equal(eager, actual)


def test_compile_with_inductor():
    """One run through the default backend, forward and backward."""
    torch._dynamo.reset()
    q, k, v, dout = Case(torch.float32, 1, 20, 20, causal=True).draw()
    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = wrap(lambda *x: flash_attn.flash_attn_func(*x, causal=True) + 1)(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for eager, actual in zip(*results):
        torch.testing.assert_close(eager, actual)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_checkpointing(use_reentrant, dropout_p, device):
    """The recomputed forward draws the same mask."""
    case = Case(torch.float32, 2, 30, 40, 2, 2, 16, dropout_p=dropout_p, device=device)
    q, k, v, dout = case.draw()

    def block(q, k, v):
        return flash_attn.flash_attn_func(q * 1.5, k, v, dropout_p=dropout_p).sin()

    results = []
    for run in (block, lambda *x: checkpoint(block, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(7)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = run(*leaves)
        out.backward(dout)
        results.append((out, *(x.grad for x in leaves)))
    for plain, recomputed in zip(*results):
        assert torch.equal(plain, recomputed)


def test_autocast(device):
    """Inputs come from layers that autocast made bfloat16; the operator follows them, in both passes."""
    layer = torch.nn.Linear(16, 3 * 32, device=device)
    x = torch.randn(2, 30, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        q, k, v = layer(x).view(2, 30, 3, 2, 16).unbind(dim=2)
        out = flash_attn.flash_attn_func(q, k, v, causal=True)
        loss = out.float().square().sum()
    assert q.dtype == out.dtype == torch.bfloat16
    loss.backward()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    plain = flash_attn.flash_attn_func(*leaves, causal=True)
    assert torch.equal(plain, out)
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.isfinite().all()
    assert layer.weight.grad.abs().max() > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    case = Case(torch.float32, 1, 20, 30, causal=True, device=device)
    q, k, v, _ = case.draw()
    with mode():
        out = case.call(q.requires_grad_(), k, v)
    assert not out.requires_grad and out.grad_fn is None
    assert torch.equal(out, case.call(q.detach(), k, v))


def test_nothing_is_differentiated_twice(device):
    """No second derivative: it says so instead of returning zeros."""
    case = Case(torch.float32, 1, 8, 8, device=device)
    *qkv, dout = case.draw()
    leaves = [x.requires_grad_() for x in qkv]
    for out in (case.call(*leaves, return_attn_probs=True)[0], case.call(*leaves, softcap=1.0)):
        gradients = torch.autograd.grad(out, leaves, dout, create_graph=True)
        with pytest.raises(NotImplementedError, match="double backward"):
            torch.autograd.grad(gradients[0].square().sum(), leaves)


def test_changing_an_input_before_backward_is_noticed(device):
    case = Case(torch.float32, 1, 8, 8, device=device)
    *qkv, dout = case.draw()
    leaves = [x.requires_grad_() for x in qkv]
    copies = [x * 1 for x in leaves]
    out, *_ = case.call(*copies, return_attn_probs=True)
    with torch.no_grad():
        copies[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def test_s_dmask_has_no_gradient(device):
    case = Case(torch.float32, 1, 8, 8, dropout_p=0.2, device=device)
    leaves = [x.requires_grad_() for x in case.draw()[:3]]
    out, lse, probs = case.call(*leaves, return_attn_probs=True)
    assert out.requires_grad and lse.requires_grad and not probs.requires_grad


def test_calls_from_several_python_threads():
    """The GIL may be released in an operator: results don't mix."""
    from concurrent.futures import ThreadPoolExecutor

    cases = [Case(torch.float32, 1, 60 + n, 70, 2, 1, 16, causal=True, seed=n) for n in range(6)]
    expected = [case.run() for case in cases]
    with ThreadPoolExecutor(4) as pool:
        # run() seeds torch's one generator, which without dropout nothing reads.
        actual = list(pool.map(lambda case: case.run(), cases * 3))
    for n, result in enumerate(actual):
        for name, x in vars(result).items():
            assert torch.equal(x, getattr(expected[n % 6], name)), name
