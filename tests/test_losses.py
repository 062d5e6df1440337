"""Promise: cross-entropy is the textbook's, in float32 from any dtype, and keeps little for its backward."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton import cross_entropy
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

SIGNATURES = {
    cross_entropy_loss: "logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0, "
                        "lse_square_scale=0.0, ignore_index=-100, inplace_backward=False, process_group=None",
    CrossEntropyLoss: "ignore_index=-100, reduction='mean', label_smoothing=0.0, logit_scale=1.0, "
                      "lse_square_scale=0.0, inplace_backward=False, process_group=None, return_z_loss=False",
    CrossEntropyLoss.forward: "self, input, target, precomputed_lse=None",
}
ROWS, CLASSES = 7, 13
FEATURES = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2},
    "scale": {"logit_scale": 0.7},
    "z_loss": {"lse_square_scale": 0.1},
    "all": {"label_smoothing": 0.1, "logit_scale": 1.3, "lse_square_scale": 0.05},
}
WITH_FEATURES = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)


def exact_losses(
    logits, labels, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, ignore_index=-100
):
    """Specification: cross-entropy between a smoothed one-hot row and softmax, in float64."""
    z = logits.double() * logit_scale
    lse = z.logsumexp(dim=-1)
    counts = labels != ignore_index
    one_hot = torch.nn.functional.one_hot(torch.where(counts, labels.long(), 0), z.shape[1]).double()
    target = (1 - label_smoothing) * one_hot + label_smoothing / z.shape[1]
    z_losses = torch.where(counts, lse_square_scale * lse**2, 0)
    losses = torch.where(counts, -(target * (z - lse[:, None])).sum(dim=-1), 0)
    return losses + z_losses, z_losses


def draw(device, dtype=torch.float64, rows=ROWS):
    logits = (3 * torch.randn(rows, CLASSES, dtype=torch.float64, device=device)).to(dtype)
    labels = torch.randint(CLASSES, (rows,), device=device)
    labels[2] = -100
    return logits.requires_grad_(), labels


@pytest.fixture(params=[cross_entropy.CHUNK_ELEMENTS, 3 * CLASSES, 1], ids=["whole", "by_threes", "by_rows"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", request.param)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures(function):
    assert str(inspect.signature(function)) == f"({SIGNATURES[function]})"
    assert inspect.getdoc(function)


@WITH_FEATURES
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_values_and_gradients(features, inplace, chunks, device):
    leaf, labels = draw(device)
    exact, exact_z = exact_losses(leaf, labels, **features)
    dlosses = torch.randn_like(exact)
    (exact_gradient,) = torch.autograd.grad(exact, leaf, dlosses)
    logits = leaf * 1.0
    losses, z_losses = cross_entropy_loss(logits, labels, inplace_backward=inplace, **features)
    assert losses.dtype == z_losses.dtype == torch.float64 and not z_losses.requires_grad
    torch.testing.assert_close(losses, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(z_losses, exact_z, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(losses, logits, dlosses)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=1e-12)
    assert (gradient.data_ptr() == logits.data_ptr()) == inplace
    assert losses[2] == z_losses[2] == 0 and not gradient[2].any()


@WITH_FEATURES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("label_dtype", [torch.int64, torch.int32], ids=str)
def test_dtypes(features, dtype, label_dtype, device):
    """float32 losses of the logits as they are, and a gradient rounded once."""
    logits, labels = draw(device, dtype)
    wide = logits.detach().double().requires_grad_()
    exact, exact_z = exact_losses(wide, labels, **features)
    losses, z_losses = cross_entropy_loss(logits, labels.to(label_dtype), **features)
    assert losses.dtype == z_losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), exact, rtol=2e-6, atol=4e-6)
    torch.testing.assert_close(z_losses.double(), exact_z, rtol=2e-6, atol=1e-6)
    (exact_gradient,) = torch.autograd.grad(exact.sum(), wide)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.dtype == dtype
    unit = torch.finfo(dtype).eps
    # Subnormal float16 numbers lie 2^-24 apart.
    assert ((gradient.double() - exact_gradient).abs() <= unit * exact_gradient.abs() + 2e-6).all()


def test_gradcheck():
    logits, labels = draw("cpu")
    assert torch.autograd.gradcheck(lambda x: cross_entropy_loss(x, labels, **FEATURES["all"])[0], logits)


@pytest.mark.parametrize("logit_scale", [1.0, 0.5])
def test_precomputed_lse(logit_scale, device):
    """That of the unscaled logits: with a scale it is of no use, and not used."""
    logits, labels = draw(device)
    lse = logits.detach().logsumexp(dim=-1)
    results = []
    for precomputed in (None, lse):
        losses, _ = cross_entropy_loss(
            logits, labels, precomputed, logit_scale=logit_scale, lse_square_scale=0.1)
        results += [losses, torch.autograd.grad(losses.sum(), logits)[0]]
    torch.testing.assert_close(results[:2], results[2:])
    losses, _ = cross_entropy_loss(logits, labels, lse + 1.0, logit_scale=logit_scale)
    shift = 1.0 if logit_scale == 1.0 else 0.0
    counts = (labels != -100).double()
    exact, _ = exact_losses(logits, labels, logit_scale=logit_scale)
    torch.testing.assert_close(losses, exact + shift * counts)


def test_large_and_masked_logits(device):
    """No overflow on the way, classes at -inf have no weight, and an ignored row may hold anything."""
    logits, labels = draw(device, torch.float32)
    with torch.no_grad():
        logits[0] *= 1e4
        logits[1, :5] = -torch.inf
        labels[1] = 7
        logits[2] = torch.nan
    losses, _ = cross_entropy_loss(logits, labels)
    exact = torch.nn.functional.cross_entropy(logits.detach().double(), labels, reduction="none")
    torch.testing.assert_close(losses.double(), exact, rtol=1e-5, atol=1e-5)
    losses.sum().backward()
    assert logits.grad.isfinite().all() and not logits.grad[2].any() and not logits.grad[1, :5].any()


def test_other_ignore_index():
    logits, labels = draw("cpu")
    labels[2] = 4
    losses, _ = cross_entropy_loss(logits, labels, ignore_index=4)
    torch.testing.assert_close(losses, exact_losses(logits, labels, ignore_index=4)[0])
    assert not losses[labels == 4].any()


def test_agrees_with_torch(device):
    logits, labels = draw(device)
    for reduction in ("mean", "sum", "none"):
        mine = CrossEntropyLoss(reduction=reduction, label_smoothing=0.1)(logits, labels)
        torchs = torch.nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.1)(logits, labels)
        torch.testing.assert_close(mine, torchs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_module(reduction, device):
    logits, labels = draw(device)
    module = CrossEntropyLoss(reduction=reduction, lse_square_scale=0.1, logit_scale=0.5, return_z_loss=True)
    exact = exact_losses(logits, labels, lse_square_scale=0.1, logit_scale=0.5)
    if reduction != "none":
        exact = [x.sum() / (ROWS - 1 if reduction == "mean" else 1) for x in exact]
    torch.testing.assert_close(list(module(logits, labels)), list(exact))
    module.return_z_loss = False
    torch.testing.assert_close(module(logits, labels), exact[0])


def test_no_rows(device):
    logits = torch.randn(0, CLASSES, device=device, requires_grad=True)
    losses, z_losses = cross_entropy_loss(logits, torch.zeros(0, dtype=torch.int64, device=device))
    assert losses.shape == z_losses.shape == (0,)
    losses.sum().backward()
    assert logits.grad.shape == (0, CLASSES)


def test_what_is_kept_for_the_backward():
    logits, labels = draw("cpu", torch.bfloat16)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cross_entropy_loss(logits, labels)
    assert sorted(tensor.numel() for tensor in kept) == [ROWS, ROWS, ROWS * CLASSES]
    assert any(tensor.data_ptr() == logits.data_ptr() for tensor in kept)


def test_any_strides(device):
    leaf, labels = draw(device)
    for logits in ((leaf * 1.0).T.contiguous().T, torch.cat((leaf, leaf), dim=1)[:, :CLASSES]):
        for inplace in (False, True):
            losses, _ = cross_entropy_loss(logits, labels, inplace_backward=inplace)
            exact, _ = exact_losses(leaf, labels)
            torch.testing.assert_close(losses, exact)
            if not inplace:
                torch.testing.assert_close(torch.autograd.grad(losses.sum(), leaf, retain_graph=True),
                                           torch.autograd.grad(exact.sum(), leaf))


TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
given = torch.load(f"{folder}/given.pt")
logits = given["logits"].chunk(2, dim=1)[rank].clone().requires_grad_()


def results_of(group):  # a function, since a graph that outlives it would hold the group until the process
    # ends, where gloo's threads abort it
    results = []
    for features in given["features"]:
        for lse in (None, given["lse"]):
            losses, z_losses = cross_entropy_loss(
                logits, given["labels"], lse, process_group=group, **features)
            gradient, = torch.autograd.grad(losses, logits, given["dlosses"])
            results.append((losses.detach(), z_losses.detach(), gradient))
    return results, CrossEntropyLoss(process_group=group)(logits, given["labels"]).detach()


torch.save(results_of(dist.group.WORLD), f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


def test_classes_shared_out_over_processes(tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch without gloo")
    logits = torch.randn(ROWS, 10, dtype=torch.float64)
    labels = torch.tensor([0, 4, 5, 9, -100, 7, 2])
    dlosses = torch.randn(ROWS, dtype=torch.float64)
    features = list(FEATURES.values())
    given = {"logits": logits, "labels": labels, "dlosses": dlosses, "features": features,
             "lse": logits.logsumexp(dim=-1)}
    torch.save(given, tmp_path / "given.pt")
    (tmp_path / "script.py").write_text(TWO_PROCESSES)
    environment = {"PYTHONPATH": str(Path(flash_attn.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, "script.py", str(rank), str(tmp_path)], cwd=tmp_path,
                                env=environment, stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    (results0, loss0), (results1, loss1) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    logits.requires_grad_()
    for i, (mine0, mine1) in enumerate(zip(results0, results1, strict=True)):
        exact, exact_z = exact_losses(logits, labels, **features[i // 2])
        (gradient,) = torch.autograd.grad(exact, logits, dlosses)
        for mine in (mine0, mine1):
            torch.testing.assert_close(mine[:2], (exact.detach(), exact_z.detach()))
        torch.testing.assert_close(torch.cat((mine0[2], mine1[2]), dim=1), gradient)
    assert loss0 == loss1
    torch.testing.assert_close(loss0, torch.nn.functional.cross_entropy(logits, labels).detach())


def test_compile():
    logits, labels = draw("cpu")

    def function(logits):
        return cross_entropy_loss(logits * 1.0, labels, label_smoothing=0.1)[0]

    torch._dynamo.reset()  # compilations of other tests count
    losses = torch.compile(function, backend="aot_eager", fullgraph=True)(logits)
    torch.testing.assert_close(losses, function(logits))
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), logits)[0] for x in (losses, function(logits))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_no_synchronisation_and_little_memory_cuda():
    rows, classes = 4096, 32768
    logits = torch.randn(rows, classes, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.randint(classes, (rows,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = CrossEntropyLoss(inplace_backward=True)(logits, labels)
        torch.autograd.grad(loss, logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The logits are 256 MiB; a few chunks of 64 MiB come and go.
    assert torch.cuda.max_memory_allocated() - before < 224 * 2**20


def test_errors():
    logits, labels = draw("cpu")
    for message, arguments in [
        ("logits must be", (logits[None], labels)),
        ("logits must be", (labels[:, None], labels)),
        ("labels must be", (logits, labels[:-1])),
        ("labels must be", (logits, labels.float())),
        ("precomputed_lse must be", (logits, labels, torch.zeros(ROWS, 1))),
    ]:
        with pytest.raises(ValueError, match=message):
            cross_entropy_loss(*arguments)
    labels[0] = CLASSES
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy_loss(logits, labels)
    with pytest.raises(NotImplementedError, match="reduction"):
        CrossEntropyLoss(reduction="median")
