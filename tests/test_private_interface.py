"""The names that other projects take from flash_attn besides its public functions: that each is there, can be
called as they call it, and computes what they need: attention in pieces, forward and backward."""

import importlib
import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flash_attn
import flash_attn_2_cuda
import reference
from acceptance import Expected, Result
from attention_case import Case, draw_rng_state
from flash_attn import bert_padding, flash_attn_interface
from gpu import assert_bitwise, needs_gpu
from test_public_api import SIGNATURES

REQUIRED = inspect.Parameter.empty


def parameters(required, **defaults):
    return [(name, REQUIRED) for name in required.split()] + list(defaults.items())


QKV = "q k v "
DOUT = "dout q k v out softmax_lse dq dk dv "
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
SCORES = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
FORWARD = parameters(QKV + SCORES + "return_softmax")
VARLEN_FORWARD = parameters(
    QKV + LENGTHS + "dropout_p softmax_scale causal", window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
    zero_tensors=False)
BACKWARD = parameters(DOUT + SCORES + "deterministic", rng_state=None)
VARLEN_BACKWARD = parameters(
    DOUT + LENGTHS + SCORES + "deterministic", rng_state=None, zero_tensors=False)

PRIVATE_SIGNATURES = {
    "_flash_attn_forward": FORWARD,
    "_flash_attn_varlen_forward": VARLEN_FORWARD,
    "_flash_attn_backward": BACKWARD,
    "_flash_attn_varlen_backward": VARLEN_BACKWARD,
    "_wrapped_flash_attn_forward": FORWARD,
    "_wrapped_flash_attn_varlen_forward": VARLEN_FORWARD,
    "_wrapped_flash_attn_backward": BACKWARD,
    "_wrapped_flash_attn_varlen_backward": VARLEN_BACKWARD,
    "_get_block_size_n": parameters("device head_dim is_dropout is_causal"),
    "maybe_contiguous": parameters("x"),
    "round_multiple": parameters("x m"),
}
# How many arguments by position; only the backward's last may be left out.
RAW_ARGUMENTS = {"fwd": 13, "varlen_fwd": 21, "bwd": 19, "varlen_bwd": 24, "fwd_kvcache": 20}

DENSE = {
    "plain": Case(seqlen_q=37, seqlen_k=53, num_heads=4, num_heads_k=2, head_dim=16),
    "causal": Case(seqlen_q=37, seqlen_k=53, causal=True, head_dim=20, softcap=3.0),
    "empty rows": Case(seqlen_q=53, seqlen_k=37, causal=True, head_dim=16, alibi="batch"),
    "window": Case(seqlen_q=40, seqlen_k=40, window_size=(5, 2), head_dim=16, alibi="heads"),
    "bfloat16": Case(torch.bfloat16, 2, 40, 40, 2, 2, 16, causal=True, softmax_scale=0.3),
    "dropout": Case(seqlen_q=37, seqlen_k=53, head_dim=16, dropout_p=0.3),
}
PACKED = Case(num_heads=4, num_heads_k=2, head_dim=16, cu_seqlens_q=(0, 5, 17, 40),
              cu_seqlens_k=(0, 11, 30, 60))
VARLEN = {
    "plain": PACKED,
    "causal": replace(PACKED, causal=True, tail=3),
    "window and slopes": replace(PACKED, window_size=(4, 1), alibi="batch"),
    "dropout": replace(PACKED, dropout_p=0.3),
}
CASES = [pytest.param(case, id=f"{kind} {name}") for kind, cases in (("dense", DENSE), ("packed", VARLEN))
         for name, case in cases.items()]


@pytest.fixture
def fresh(seed):
    """A case with inputs that no run drew before, unless FLASH_ATTN_TEST_SEED says so."""
    return lambda case, device="cpu": replace(case, seed=seed % 2**31, device=device)


def scores(case):
    """SCORES by name."""
    left, right = case.window_size
    scale = case.head_dim ** -0.5 if case.softmax_scale is None else case.softmax_scale
    return {"dropout_p": case.dropout_p, "softmax_scale": scale, "causal": case.causal,
            "window_size_left": left, "window_size_right": right, "softcap": case.softcap,
            "alibi_slopes": case.slopes()}


def lengths(case):
    return dict(zip(LENGTHS.split(), (*case.cu_seqlens(), *case.max_seqlens))) if case.packed else {}


def functions(case):
    kind = "_varlen" if case.packed else ""
    return (getattr(flash_attn_interface, f"_flash_attn{kind}_{name}") for name in ("forward", "backward"))


def run(case, inputs, buffers=None):
    """Both private functions by keyword, as ring attention calls them -> (Result, softmax_d, S_dmask)."""
    q, k, v, dout = inputs
    forward, backward = functions(case)
    torch.manual_seed(case.seed)
    out, lse, s_dmask, rng_state = forward(
        q=q, k=k, v=v, return_softmax=True, **scores(case), **lengths(case))
    dq, dk, dv = [torch.empty_like(x) for x in (q, k, v)] if buffers is None else buffers
    softmax_d = backward(
        dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, deterministic=False,
        rng_state=rng_state, **scores(case), **lengths(case))
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    if case.dropout_p > 0:
        assert torch.equal(rng_state, draw_rng_state(case.seed, case.device))
    return Result(out, lse, dq, dk, dv), softmax_d, s_dmask


@pytest.mark.parametrize("name", PRIVATE_SIGNATURES)
def test_signature(name):
    """Also as getfullargspec sees it, which looks through no decorator."""
    function = getattr(flash_attn_interface, name)
    actual = inspect.signature(function).parameters.values()
    assert [(p.name, p.default) for p in actual] == PRIVATE_SIGNATURES[name]
    assert all(p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD for p in actual)
    assert inspect.isfunction(function)
    assert inspect.getfullargspec(function).args == [parameter for parameter, _ in PRIVATE_SIGNATURES[name]]


@pytest.mark.parametrize("name", RAW_ARGUMENTS)
def test_raw_signature(name):
    assert getattr(flash_attn_2_cuda, name) is getattr(flash_attn_interface.flash_attn_gpu, name)
    actual = list(inspect.signature(getattr(flash_attn_2_cuda, name)).parameters.values())
    assert len(actual) == RAW_ARGUMENTS[name]
    optional = [p.name for p in actual if p.default is not REQUIRED]
    assert optional == (["rng_state"] if name.endswith("bwd") else [])


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case, fresh):
    case = fresh(case)
    inputs = case.draw()
    result, softmax_d, s_dmask = run(case, inputs)
    case.check(inputs, actual=result)
    delta = (inputs[3].double() * result.out.double()).sum(-1).transpose(-1, -2)
    torch.testing.assert_close(softmax_d.double(), delta, atol=1e-5, rtol=1e-5)
    assert softmax_d.shape == result.lse.shape and softmax_d.dtype == result.lse.dtype == torch.float32
    if case.dropout_p == 0:
        assert s_dmask.shape == (0,)
    else:
        rows = [flash_attn_interface.round_multiple(seqlen, 128) for seqlen in case.max_seqlens]
        assert list(s_dmask.shape) == [case.num_sequences, case.num_heads, *rows]


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_public_functions(case, fresh):
    case = fresh(case)
    result, _, s_dmask = run(case, case.draw())
    assert_bitwise(result, case.run())
    q, k, v, _ = case.draw()
    assert torch.equal(s_dmask, case.call(q, k, v, return_attn_probs=True)[2])


def test_gradients_go_into_any_strides(fresh):
    """Also into parts of one tensor, as models with packed projections have them."""
    case = fresh(DENSE["window"])
    inputs = case.draw()
    packed = torch.full((2, 40, 3, 2, 16), torch.nan)
    expected, _, _ = run(case, inputs)
    run(case, inputs, packed.unbind(2))
    assert_bitwise(packed.unbind(2), (expected.dq, expected.dk, expected.dv), ("dq", "dk", "dv"))
    heads_first = [torch.empty(2, 2, 40, 16).transpose(1, 2) for _ in range(3)]
    run(case, inputs, heads_first)
    assert_bitwise(heads_first, (expected.dq, expected.dk, expected.dv), ("dq", "dk", "dv"))


@pytest.mark.parametrize("bad", ["shape", "dtype"])
def test_gradients_into_a_wrong_tensor(bad, fresh):
    """copy_ alone would broadcast or convert."""
    case = fresh(DENSE["window"])
    inputs = case.draw()
    buffers = [torch.empty_like(x) for x in inputs[:3]]
    buffers[1] = buffers[1][:1] if bad == "shape" else buffers[1].bfloat16()
    with pytest.raises(RuntimeError, match=r"dk is .* as k is"):
        run(case, inputs, buffers)


def merged(parts):
    """Of (out [B, S, H, D], lse [B, H, S]) over different keys: the running update of ring attention."""
    (out, lse), *others = parts
    lse = lse.transpose(1, 2)[..., None]
    for part, part_lse in others:
        part_lse = part_lse.transpose(1, 2)[..., None]
        out = out - torch.sigmoid(part_lse - lse) * (out - part)
        lse = lse - torch.nn.functional.logsigmoid(lse - part_lse)
    return out, lse[..., 0].transpose(1, 2)


def ring(case, inputs):
    """Attention over two halves of the keys, causal if the case is: then the second half is the diagonal, and
    the first half is seen whole. -> Result, with the backward of each half from the merged out and lse."""
    q, k, v, dout = inputs
    half = k.shape[1] // 2
    halves = [(k[:, half:], v[:, half:], case.causal), (k[:, :half], v[:, :half], False)]
    parts = []
    for part_k, part_v, causal in halves:
        part = replace(case, causal=causal)
        out, lse, _, _ = flash_attn_interface._flash_attn_forward(
            q=q, k=part_k, v=part_v, return_softmax=False, **scores(part))
        parts.append((out.float(), lse))
    out, lse = merged(parts)
    dq, gradients = 0, []
    for part_k, part_v, causal in halves:
        buffers = [torch.empty_like(x) for x in (q, part_k, part_v)]
        part = replace(case, causal=causal)
        flash_attn_interface._flash_attn_backward(
            dout=dout, q=q, k=part_k, v=part_v, out=out.to(q.dtype), softmax_lse=lse, **scores(part),
            **dict(zip(("dq", "dk", "dv"), buffers)), deterministic=False)
        dq = dq + buffers[0].float()
        gradients.append(buffers[1:])
    dk, dv = (torch.cat(pair[::-1], dim=1) for pair in zip(*gradients))
    return Result(out.to(q.dtype), lse, dq.to(q.dtype), dk, dv)


RING = Case(torch.float32, 2, 60, 120, 4, 2, 16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_halves_of_the_keys_are_the_whole(causal, dtype, fresh):
    """Forward merged through lse; backward given lse of the whole, against autograd of standard attention."""
    case = replace(fresh(RING), dtype=dtype, causal=causal)
    inputs = case.draw()
    result, exact = ring(case, inputs), case.expected(inputs).exact
    precision = 1e-5 if dtype == torch.float32 else 1e-6  # the merge is in float32, as ring attention's is
    for name, value in vars(result).items():
        expected = getattr(exact, name).double()
        torch.testing.assert_close(value.double(), expected, atol=precision, rtol=precision, msg=name)


def test_a_part_without_keys_has_no_weight(fresh):
    """-inf, not +inf: a causal part that most queries see nothing of changes nothing in them."""
    case = fresh(replace(RING, num_heads_k=4))
    q, k, v, _ = case.draw()
    options = scores(case)
    visible, lse, _, _ = flash_attn_interface._flash_attn_forward(q, k, v, *options.values(), False)
    options["causal"] = True
    nothing, nothing_lse, _, _ = flash_attn_interface._flash_attn_forward(
        q, k[:, :20], v[:, :20], *options.values(), False)
    assert (nothing_lse[:, :, :40] == -torch.inf).all() and (nothing[:, :40] == 0).all()
    out, merged_lse = merged([(visible, lse), (nothing, nothing_lse)])
    assert torch.equal(out[:, :40], visible[:, :40]) and torch.equal(merged_lse[..., :40], lse[..., :40])
    assert out.isfinite().all() and not torch.equal(out[:, 40:], visible[:, 40:])


@pytest.mark.parametrize("given", [False, True], ids=["new tensors", "given tensors"])
@pytest.mark.parametrize("case", CASES)
def test_raw_functions(case, given, fresh):
    """By position, in the compiled module's order."""
    case = fresh(case)
    q, k, v, dout = case.draw()
    expected, expected_d, _ = run(case, (q, k, v, dout))
    p, scale, causal, left, right, softcap, slopes = scores(case).values()
    cu, longest = case.cu_seqlens(), case.max_seqlens
    buffers = [torch.full_like(x, torch.nan) if given else None for x in (expected.out, q, k, v)]
    torch.manual_seed(case.seed)
    raw = flash_attn_2_cuda
    if case.packed:
        out, lse, _, state = raw.varlen_fwd(
            q, k, v, buffers[0], *cu, None, None, None, slopes, *longest, p, scale, False, causal, left,
            right, softcap, False, None)
        *gradients, d = raw.varlen_bwd(
            dout, q, k, v, out, lse, *buffers[1:], *cu, slopes, *longest, p, scale, False, causal, left,
            right, softcap, True, None, state)
    else:
        out, lse, _, state = raw.fwd(
            q, k, v, buffers[0], slopes, p, scale, causal, left, right, softcap, False, None)
        *gradients, d = raw.bwd(
            dout, q, k, v, out, lse, *buffers[1:], slopes, p, scale, causal, left, right, softcap, True, None,
            state)
    assert_bitwise(Result(out, lse, *gradients), expected)
    assert torch.equal(d, expected_d)
    for result, buffer in zip((out, *gradients), buffers):
        assert not given or result is buffer


def test_raw_cache(fresh):
    """fwd_kvcache is flash_attn_with_kvcache by position, and appends to the caches as that does."""
    case = fresh(Case(torch.float32, 2, 3, 40, 4, 2, 16))
    q, k, v, _ = case.draw()
    new_k, new_v = k[:, :3].clone(), v[:, :3].clone()
    seqlens = torch.tensor([17, 30], dtype=torch.int32)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches[0], new_k, new_v, cache_seqlens=seqlens, softmax_scale=0.3, causal=True,
        return_softmax_lse=True)
    given = torch.empty_like(q)
    raw_out, raw_lse = flash_attn_2_cuda.fwd_kvcache(
        q, *caches[1], new_k, new_v, seqlens, None, None, None, None, None, None, given, 0.3, True, -1, -1,
        0.0, True, 0)
    assert raw_out is given
    assert_bitwise((raw_out, raw_lse, *caches[1]), (out, lse, *caches[0]), ("out", "lse", "k", "v"))


def test_raw_functions_take_no_generator(fresh):
    q, k, v, _ = fresh(RING).draw()
    with pytest.raises(NotImplementedError, match="gen must be None"):
        flash_attn_2_cuda.fwd(q, k, v, None, None, 0.1, 1.0, False, -1, -1, 0.0, False, torch.Generator())


def test_raw_output_of_another_shape(fresh):
    q, k, v, _ = fresh(RING).draw()
    with pytest.raises(RuntimeError, match="out is"):
        flash_attn_2_cuda.fwd(q, k, v, q[:1].clone(), None, 0.0, 1.0, False, -1, -1, 0.0, False, None)


def test_pages(fresh):
    """A paged cache through the private function; seqused_k says the lengths, or else cu_seqlens_k."""
    case = fresh(replace(PACKED, cu_seqlens_q=(0, 5, 17), cu_seqlens_k=(0, 11, 30), causal=True))
    q, k, v, _ = case.draw()
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    key_pages, value_pages = (torch.full((4, 16, 2, 16), torch.nan) for _ in range(2))
    for tensor, pages in ((k, key_pages), (v, value_pages)):
        pages[2, :11], pages[1], pages[3, :3] = tensor[:11], tensor[11:27], tensor[27:]
    cu_seqlens_q, cu_seqlens_k = case.cu_seqlens()
    expected = Expected(case.attend(), q, k, v)
    for lengths_k, used in ((cu_seqlens_k, None), (torch.tensor([0, 32, 64]), cu_seqlens_k.diff())):
        out, lse, s_dmask, _ = flash_attn_interface._flash_attn_varlen_forward(
            q, key_pages, value_pages, cu_seqlens_q, lengths_k, *case.max_seqlens, 0.0, 0.25, True,
            block_table=table, seqused_k=used)
        expected.check(out=out, lse=lse)
        assert s_dmask.shape == (0,)


@pytest.mark.parametrize("name", ["seqused_k", "leftpad_k"])
def test_what_is_not_implemented_says_so(name, fresh):
    case = fresh(PACKED)
    with pytest.raises(NotImplementedError, match=name):
        flash_attn_interface._flash_attn_varlen_forward(
            *case.draw()[:3], **lengths(case), dropout_p=0.0, softmax_scale=1.0, causal=False,
            **{name: torch.zeros(3, dtype=torch.int32)})


@pytest.mark.parametrize("case", [DENSE["causal"], DENSE["dropout"], VARLEN["causal"]], ids=str)
def test_compiled(case, fresh):
    """In one graph, with the gradients written into given tensors."""
    torch._dynamo.reset()
    case = fresh(case)
    results = []
    forward, backward = functions(case)

    def step(q, k, v, dout, dq, dk, dv, slopes, cu_seqlens):
        options = {**scores(replace(case, alibi="none")), "alibi_slopes": slopes}
        options.update(zip(LENGTHS.split(), (*cu_seqlens, *case.max_seqlens)) if cu_seqlens else ())
        out, lse, _, state = forward(q * 2, k, v, return_softmax=False, **options)
        softmax_d = backward(dout, q * 2, k, v, out, lse, dq, dk, dv, deterministic=True, rng_state=state,
                             **options)
        return out, lse, softmax_d

    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        inputs = case.draw()
        buffers = [torch.empty_like(x) for x in inputs[:3]]
        torch.manual_seed(case.seed)
        with torch.no_grad():
            outputs = function(*inputs, *buffers, case.slopes(), case.cu_seqlens() if case.packed else ())
        results.append((*outputs, *buffers))
    assert_bitwise(*results, ("out", "lse", "softmax_d", "dq", "dk", "dv"))


def test_forward_is_differentiable(fresh):
    case = fresh(DENSE["causal"])
    *qkv, dout = case.draw()
    leaves = [x.requires_grad_() for x in qkv]
    out, *_ = flash_attn_interface._flash_attn_forward(*leaves, *scores(case).values(), False)
    expected = case.run()
    assert_bitwise(torch.autograd.grad(out, leaves, dout), (expected.dq, expected.dk, expected.dv),
                   ("dq", "dk", "dv"))


def test_scale_by_default(fresh):
    q, k, v, _ = fresh(RING).draw()
    others = (True, -1, -1, 0.0, None, False)
    results = [flash_attn_interface._flash_attn_forward(q, k, v, 0.0, scale, *others)[:2]
               for scale in (None, 0.25)]
    assert_bitwise(*results, ("out", "lse"))


def test_the_raw_module_may_come_first(tmp_path):
    """TransformerEngine imports it before anything else of flash_attn's, which imports it in turn."""
    folders = [str(Path(flash_attn_2_cuda.__file__).parent), str(Path(flash_attn.__file__).parent.parent)]
    program = ("from flash_attn_2_cuda import varlen_bwd; from flash_attn import flash_attn_interface; "
               "assert flash_attn_interface.flash_attn_gpu.varlen_bwd is varlen_bwd")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=120)


def test_small_helpers():
    x = torch.randn(3, 4)
    assert flash_attn_interface.maybe_contiguous(None) is None
    for rows in (x, x[:, 1:3]):
        assert flash_attn_interface.maybe_contiguous(rows) is rows
    assert flash_attn_interface.maybe_contiguous(x.t()).is_contiguous()
    assert [flash_attn_interface.round_multiple(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
    assert flash_attn_interface.USE_TRITON_ROCM is False


def test_s_dmask_becomes_probabilities(fresh):
    """As flash_attn's own tests do it: S_dmask in pieces of _get_block_size_n keys, each relative to the
    maximum up to its end. Here that is one piece."""
    case = fresh(DENSE["dropout"])
    q, k, v, dout = case.draw()
    result, _, s_dmask = run(case, (q, k, v, dout))
    size = flash_attn_interface._get_block_size_n(q.device, case.head_dim, True, False)
    (piece,) = s_dmask[:, :, :37, :53].abs().split(size, dim=-1)
    all_scores = reference.scores(q, k)
    probabilities = piece * (all_scores.amax(-1) - result.lse).exp()[..., None]
    torch.testing.assert_close(probabilities, all_scores.softmax(-1), atol=1e-5, rtol=1e-5)


ROTARY = ("RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_",
          "apply_rotary_emb_qkv_")
RAW = ("fwd", "varlen_fwd", "bwd", "varlen_bwd")
# What most users import, from where, and the test that calls it.
TIER_1 = {
    **{("flash_attn", name): "test_public_api.py" for name in list(SIGNATURES)[:6]},
    ("flash_attn", "flash_attn_with_kvcache"): test_raw_cache,
    **{("flash_attn.flash_attn_interface", name): test_forward_and_backward
       for name in PRIVATE_SIGNATURES if name.startswith("_flash_attn")},
    **{("flash_attn.flash_attn_interface", name): test_signature
       for name in PRIVATE_SIGNATURES if name.startswith("_wrapped")},
    ("flash_attn.flash_attn_interface", "_get_block_size_n"): test_s_dmask_becomes_probabilities,
    ("flash_attn.flash_attn_interface", "maybe_contiguous"): test_small_helpers,
    ("flash_attn.flash_attn_interface", "round_multiple"): test_small_helpers,
    ("flash_attn.flash_attn_interface", "flash_attn_gpu"): test_raw_signature,
    **{("flash_attn_2_cuda", name): test_raw_functions for name in RAW},
    ("flash_attn_2_cuda", "fwd_kvcache"): test_raw_cache,
    **{("flash_attn.bert_padding", name): "test_bert_padding.py" for name in bert_padding.__all__},
    **{("flash_attn.layers.rotary", name): "test_rotary.py" for name in ROTARY},
    ("flash_attn.ops.triton.rotary", "apply_rotary"): "test_rotary.py",
}


@pytest.mark.parametrize("module,name", TIER_1, ids=lambda value: value.rpartition(".")[2])
def test_every_name_of_tier_1_is_there(module, name):
    assert hasattr(importlib.import_module(module), name)
    test = TIER_1[module, name]
    assert callable(test) or (Path(__file__).parent / test).is_file()


def test_wrapped_functions_are_the_functions():
    for name in PRIVATE_SIGNATURES:
        if name.startswith("_wrapped"):
            plain = getattr(flash_attn_interface, name.removeprefix("_wrapped"))
            assert getattr(flash_attn_interface, name) is plain


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_cuda_forward_and_backward(case, fresh):
    case = replace(fresh(case, "cuda"), dtype=torch.bfloat16)
    inputs = case.draw()
    result, softmax_d, _ = run(case, inputs)
    case.check(inputs, actual=result)
    delta = (inputs[3].double() * result.out.double()).sum(-1).transpose(-1, -2)
    torch.testing.assert_close(softmax_d.double(), delta, atol=1e-5, rtol=1e-5)


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_two_halves_of_the_keys_are_the_whole(causal, fresh):
    case = replace(fresh(RING, "cuda"), dtype=torch.bfloat16, causal=causal, seqlen_q=300, seqlen_k=600,
                   head_dim=64)
    inputs = case.draw()
    result, exact = ring(case, inputs), case.expected(inputs).exact
    for name, value in vars(result).items():
        expected = getattr(exact, name).double()
        torch.testing.assert_close(value.double(), expected, atol=2e-2, rtol=2e-2, msg=name)
