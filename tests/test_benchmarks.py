"""benchmarks/: that what they print is what they claim, on sizes of no interest."""

import importlib.util
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flash_attn

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import attention  # noqa: E402  (found on the path set just above, as the modules below)
import decode  # noqa: E402
import kernel_variants  # noqa: E402
import machine  # noqa: E402
import masks  # noqa: E402
import memory  # noqa: E402
import models  # noqa: E402
import multihead_attention  # noqa: E402
import packed  # noqa: E402
import training  # noqa: E402
from cell import Cell  # noqa: E402
from implementations import IMPLEMENTATIONS, Implementation  # noqa: E402

PACKED = "--tokens 400 --lengths 9 200 --head-dims 32 --hidden 64 --rounds 2 --idle-ms 0".split()
SMALL = "--seqlens 96 --head-dims 32 --tokens 192 --hidden 64 --rounds 2 --idle-ms 0".split()
CELL = Cell("forward", "float32", 96, 32, "full", -1, 2, 2)
TRANSFORMS = [{}, {"softcap": 1.5}, {"alibi": True}, {"softcap": 1.5, "alibi": True}]
MASKS = [("full", -1), ("causal", -1), ("window", 7)]
NCU_HEADER = ('"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
              '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"')
NCU_LINE = '"{}","7","python","host","{}","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0","","{}","byte","{}"'


@pytest.fixture(autouse=True)
def small_gemm(monkeypatch):
    """torch multiplies bfloat16 at 1 GFLOP/s where a CPU has no instructions for it."""
    monkeypatch.setitem(machine.GEMM_SIZE, "cpu", 256)


@pytest.fixture(scope="module")
def io():
    """By its path: the name is the standard library's."""
    spec = importlib.util.spec_from_file_location("benchmarks_io", BENCHMARKS / "io.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("more,label", [("", "Q=1"), (",3", "Q=3"), (",2,16", "Q=2 page=16"),
                                        (",1,0,30", "Q=1 softcap=30")])
def test_decode_writes_its_table(more, label, device, tmp_path, capsys):
    path, cell = tmp_path / "decode.json", f"2,8,2,64,400{more}"
    decode.main(["--device", device, "--cells", cell, "--rounds", "2", "--idle-ms", "0", "--json", str(path)])
    (found,) = json.loads(path.read_text())["cells"]
    assert f"B=2   H=8  Hk=2  D=64  N=400    {label}" in capsys.readouterr().out
    refused = {"flash_attn", "sdpa"} if "page" in label else {"sdpa"} if "softcap" in label else set()
    for name in {"flash_attn", "kvcache", "sdpa"} - refused:
        result = found["results"][name]
        assert len(result["seconds"]) == 2 and result["errors"]["out"] < 0.02


def test_attention_writes_its_table(device, tmp_path, capsys):
    path = tmp_path / "results" / "attention.json"
    attention.main([*SMALL, "--device", device, "--dtypes", "bfloat16", "--window", "7", "--deterministic",
                    "--json", str(path)])
    printed, results = capsys.readouterr().out, json.loads(path.read_text())
    assert len(results["cells"]) == 6 and printed.count("\nforward ") == 3
    for cell in results["cells"]:
        ours = cell["results"]["flash_attn"]
        assert len(ours["seconds"]) == 2 and ours["ms"] > 0 and ours["gflops"] > 0
        assert set(ours["errors"]) == ({"out"} if cell["direction"] == "forward" else {"dq", "dk", "dv"})
        assert max(ours["errors"].values()) < 0.1
        assert ("deterministic" in cell["results"]) == (cell["direction"] == "backward")
    means = {(mean["cells"], mean["peer"]): mean for mean in results["geometric_means"]}
    peer = "sdpa" if device == "cpu" else "fa2"
    assert means["all", peer]["count"] == 4 and means["all", peer]["least"] <= means["all", peer]["ratio"]
    assert results["machine"]["gemm_gflops"]["bfloat16"] > 0


def test_attention_with_grouped_heads(device, tmp_path, capsys):
    path = tmp_path / "attention.json"
    attention.main([*SMALL, "--device", device, "--dtypes", "bfloat16", "--window", "7", "--group", "2",
                    "--hidden", "160", "--peers", "sdpa", "standard", "--json", str(path)])
    printed, results = capsys.readouterr().out, json.loads(path.read_text())
    assert printed.count(" H=4  group 2 ") == len(results["cells"]) == 6
    for cell in results["cells"]:
        scores = {"full": 96**2, "causal": 96**2 / 2, "window": 8 * 96 - 28}[cell["mask"]]
        passes = 2.5 if cell["direction"] == "backward" else 1
        assert cell["flops"] == 4 * 2 * 4 * scores * 32 * passes
        for name in ("flash_attn", "sdpa", "standard"):
            assert max(cell["results"][name]["errors"].values()) < 0.1, name


@pytest.mark.parametrize("value_dim", [16, 48])
def test_attention_with_a_head_dim_of_values(device, tmp_path, capsys, value_dim):
    path = tmp_path / "attention.json"
    attention.main([*SMALL, "--device", device, "--dtypes", "float32", "--causal", "1", "--window", "7",
                    "--group", "2", "--value-dim", str(value_dim), "--peers", "sdpa", "standard",
                    "--rounds", "1", "--json", str(path)])
    printed, results = capsys.readouterr().out, json.loads(path.read_text())
    assert printed.count(f" D=32/{value_dim} ") == len(results["cells"]) == 4
    for cell in results["cells"]:
        assert (cell["heads"], cell["head_dim"], cell["value_dim"]) == (2, 32, value_dim)
        for name in ("flash_attn", "sdpa", "standard"):
            one = cell["results"][name]
            assert set(one["errors"]) == ({"out"} if cell["direction"] == "forward" else {"dq", "dk", "dv"})
            assert max(one["errors"].values()) < (1e-5 if device == "cpu" else 0.1), name


def test_inputs_have_the_head_dim_of_values():
    cell = replace(CELL, heads=4, group=2)
    for value_dim in (0, 16):
        own = replace(cell, value_dim=value_dim)
        inputs = attention.inputs_of(own, "cpu")
        assert [x.shape[2:] for x in inputs] == [(4, 32), (2, 32), (2, own.out_dim), (4, own.out_dim)]
        assert own.input_bytes == sum(x.nbytes for x in inputs)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_reference_rows_of_grouped_heads_are_those_of_autograd(group):
    cell = replace(CELL, direction="backward", mask="causal", batch=1, heads=4, group=group)
    q, k, v, dout = (x.double() for x in attention.inputs_of(cell, "cpu"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    results, heads = {}, torch.arange(4)
    for name, read in {"right": heads // group, "wrong": heads % (4 // group)}.items():
        heads_first = (x.transpose(1, 2) for x in (q, k[:, :, read], v[:, :, read]))
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
        gradients = torch.autograd.grad(out, leaves, dout)
        results[name] = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients))}
    inputs, rows = [x.detach()[0] for x in (q, k, v, dout)], torch.tensor([0, 5, 95])
    for head in range(4):
        exact = attention.group_reference_rows(*inputs, rows, cell, head)
        for name, key_head in {"dq": head, "dk": head // group, "dv": head // group}.items():
            torch.testing.assert_close(exact[name], results["right"][name][0, rows, key_head])
    for direction in ("forward", "backward"):
        found = attention.errors(replace(cell, direction=direction), [x[None] for x in inputs], results)
        assert max(found["right"].values()) < 1e-12
        assert (max(found["wrong"].values()) > 0.1) == (group == 2)  # with 1 and 4 it isn't wrong


def test_models_writes_its_table(device, tmp_path, capsys, monkeypatch):
    shapes = {"grouped": (1, 96, 4, 32, "causal", {"group": 2}), "text": (2, 96, 2, 32, "full", {"keys": 7}),
              "local": (1, 96, 2, 32, "window", {"left": 9}), "left out": (1, 8, 1, 8, "full", {})}
    monkeypatch.setattr(models, "MODELS", shapes)
    path = tmp_path / "models.json"
    models.main([*"--models grouped text local --dtypes float32 --rounds 2 --idle-ms 0 --peers sdpa".split(),
                 "--device", device, "--json", str(path)])
    printed, results = capsys.readouterr().out, json.loads(path.read_text())
    assert len(results["cells"]) == 6 and printed.count("ward  text ") == printed.count("ward text ") == 1
    for cell in results["cells"]:
        passes = 2.5 if cell["direction"] == "backward" else 1
        scores = {"grouped": 96 * 96 / 2 * 4, "text": 2 * 2 * 96 * 7, "local": 2 * (45 + 87 * 10)}
        assert cell["flops"] == 4 * 32 * scores[cell["model"]] * passes
        for name in ("flash_attn", "sdpa"):
            assert max(cell["results"][name]["errors"].values()) < (1e-5 if device == "cpu" else 1e-2)


@pytest.mark.parametrize("group", [1, 2])
def test_packed_writes_its_table(device, tmp_path, capsys, group):
    path = tmp_path / "packed.json"
    packed.main([*PACKED, "--device", device, "--group", str(group), "--json", str(path)])
    printed, results = capsys.readouterr().out, json.loads(path.read_text())
    assert len(results["cells"]) == printed.count(" T=400 ") == 4 and results["machine"]["torch"]
    for cell in results["cells"]:
        passes, part = 2.5 if cell["direction"] == "backward" else 1, 2 if cell["mask"] == "causal" else 1
        assert sum(cell["lengths"]) == 400 and len(cell["lengths"]) > 2
        assert cell["flops"] == 4 * 2 * 32 * sum(s**2 for s in cell["lengths"]) / part * passes
        for name in ("flash_attn", "loop"):
            one = cell["results"][name]
            assert len(one["seconds"]) == 2 and one["gflops"] > 0
            assert set(one["errors"]) == ({"out"} if cell["direction"] == "forward" else {"dq", "dk", "dv"})
            assert max(one["errors"].values()) < (1e-5 if device == "cpu" else 0.1)


def test_packed_notices_what_leaves_its_sequence(tmp_path, monkeypatch):
    def one_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        return flash_attn.flash_attn_func(q[None], k[None], v[None], causal=causal)[0]

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", one_sequence)
    path = tmp_path / "packed.json"
    packed.main([*PACKED, "--rounds", "1", "--json", str(path)])
    for cell in json.loads(path.read_text())["cells"]:
        assert min(cell["results"]["flash_attn"]["errors"].values()) > 0.1
        assert max(cell["results"]["loop"]["errors"].values()) < 1e-5


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_packed_calls_its_peers_as_ours(mask, monkeypatch):
    """With ours in the place of what they call."""
    def fa3(q, k, v, is_causal, softmax_scale, **lengths):
        options = {"softmax_scale": softmax_scale, "causal": is_causal}
        return flash_attn.flash_attn_varlen_func(q, k, v, **lengths, **options)

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
        return flash_attn.flash_attn_varlen_func(q, k, v, *lengths, window_size=window_size)

    def first_varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        window = (-1, 0 if is_causal else -1)
        return varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window)

    cell = packed.PackedCell("forward", "float32", (7, 33, 1), 32, mask, 2)
    tensors = [x[0] for x in attention.inputs_of(cell.sequence(41), "cpu")[:3]]
    exact = packed.IMPLEMENTATIONS["loop"].build(cell, "cpu")(*tensors)
    monkeypatch.setattr(packed.implementations, "fa3", fa3)
    for attend in (varlen_attn, first_varlen_attn):
        monkeypatch.setattr(packed, "varlen", SimpleNamespace(varlen_attn=attend))
        for name in packed.IMPLEMENTATIONS:
            torch.testing.assert_close(packed.IMPLEMENTATIONS[name].build(cell, "cpu")(*tensors), exact)


def test_masks_writes_its_table(device, tmp_path, capsys):
    path = tmp_path / "masks.json"
    masks.main(["--device", device, "--seqlens", "160", "--heads", "2", "--head-dim", "32", "--rounds", "1",
                "--repeats", "1", "--json", str(path), "--plot", str(tmp_path / "masks.png")])
    printed, results = capsys.readouterr().out, json.loads(path.read_text())
    (row,) = results["rows"]
    assert len(row["variants"]) == 8 and row["packing"] > 0
    for name, one in row["variants"].items():
        assert f"\n{name} " in printed
        assert one["error"] < 0.05 and min(one["forward"] + one["backward"]) > 0


def test_multihead_attention_writes_its_table(device, tmp_path, capsys):
    path = tmp_path / "multihead.json"
    multihead_attention.main(["--device", device, "--seqlens", "48", "--batch", "2", "--width", "64",
                              "--heads", "2", "--rounds", "1", "--repeats", "1", "--json", str(path)])
    printed, results = capsys.readouterr().out, json.loads(path.read_text())
    for name, one in results["rows"][0]["uses"].items():
        assert f"\n{name} " in printed
        assert one["difference"] < (1e-5 if device == "cpu" else 0.05) and min(one["seconds"]["ours"]) > 0


@pytest.mark.parametrize("mask,left", MASKS)
@pytest.mark.parametrize("transforms", TRANSFORMS, ids=str)
def test_reference_rows_are_those_of_autograd(transforms, mask, left):
    cell = replace(CELL, mask=mask, left=left, **transforms)
    q, k, v, dout = (torch.randn(96, 32, dtype=torch.float64) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    hidden = ~cell.visible(torch.arange(96), "cpu")
    scores = q @ k.T / math.sqrt(32)
    if cell.softcap:
        scores = cell.softcap * (scores / cell.softcap).tanh()
    if cell.alibi:  # the second head's slope
        scores = scores - 2.0**-8 * (torch.arange(96)[:, None] - torch.arange(96)).abs()
    out = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    q, k, v, rows = q.detach(), k.detach(), v.detach(), torch.tensor([0, 5, 95])
    forward = attention.reference_rows(q, k, v, dout, rows, cell, 1)
    backward = attention.reference_rows(q, k, v, dout, rows, replace(cell, direction="backward"), 1)
    for name, exact in {"out": out, "dq": dq, "dk": dk, "dv": dv}.items():
        torch.testing.assert_close({**forward, **backward}[name], exact.detach()[rows])


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("mask,left", MASKS)
@pytest.mark.parametrize("name", ["sdpa", "standard", "deterministic"])
def test_implementations_compute_the_same(name, mask, left, group):
    cell = replace(CELL, mask=mask, left=left, heads=4, group=group)
    inputs, results = attention.inputs_of(cell, "cpu"), {}
    for each in ("flash_attn", name):
        call = attention.prepared_call(cell, IMPLEMENTATIONS[each], inputs, "cpu")
        results[each] = attention.result_of(cell, IMPLEMENTATIONS[each], call)["out"]
    torch.testing.assert_close(results["flash_attn"], results[name])
    assert not any(x.requires_grad for x in inputs)


@pytest.mark.parametrize("transforms", TRANSFORMS[1:], ids=str)
def test_transforms_are_computed_or_refused(transforms):
    cell = replace(CELL, mask="causal", **transforms)
    inputs = attention.inputs_of(cell, "cpu")
    call = attention.prepared_call(cell, IMPLEMENTATIONS["flash_attn"], inputs, "cpu")
    results = {"flash_attn": attention.result_of(cell, IMPLEMENTATIONS["flash_attn"], call)}
    assert attention.errors(cell, inputs, results)["flash_attn"]["out"] < 1e-5
    for name in ("sdpa", "standard", *["fa3"] * cell.alibi):
        with pytest.raises(NotImplementedError, match="it has no"):
            IMPLEMENTATIONS[name].build(cell, "cpu")


def test_a_refusal_is_shown_and_no_peer(monkeypatch):
    def refuse(cell, device):
        raise RuntimeError("no kernel")

    monkeypatch.setitem(attention.IMPLEMENTATIONS, "fa3", Implementation("bshd", refuse))
    options = attention.parse([*SMALL, "--rounds", "1"])
    names = ["flash_attn", "sdpa", "fa3"]
    measured = attention.measure(CELL, names, options)
    row = attention.table_row(CELL, measured, names, "cuda")
    assert "fa3 refused: RuntimeError: no kernel" in row and row.splitlines()[0].endswith(" -")
    assert attention.looked_up(measured, attention.BEST) is measured["sdpa"]
    means = attention.geometric_means([(CELL, measured)], names)
    assert {mean["peer"] for mean in means} == {"sdpa", "best"}


def test_flops():
    assert CELL.flops == 4 * 2 * 2 * 96**2 * 32
    assert replace(CELL, mask="causal", direction="backward").flops == 2.5 * CELL.flops / 2
    assert replace(CELL, mask="window", left=1).scores == 2 * 96 - 1
    own = replace(CELL, value_dim=16)
    assert own.flops == 2 * 2 * 2 * 96**2 * (32 + 16)
    assert replace(own, direction="backward").flops == 2 * 2 * 2 * 96**2 * (3 * 32 + 2 * 16)
    assert replace(own, value_dim=32).flops == CELL.flops


def test_label_shows_the_head_dim_of_values():
    assert CELL.label == "forward  float32  S=96    D=32  full       B=2  H=2 "
    own = replace(CELL, head_dim=192, value_dim=128).label
    assert own == "forward  float32  S=96    D=192/128 full       B=2  H=2 "
    assert replace(CELL, value_dim=32).label == "forward  float32  S=96    D=32      full       B=2  H=2 "


def test_memory_measures_and_draws(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory, "COMPARED", {"cpu": ("flash_attn", "standard")})
    monkeypatch.setattr(memory, "STANDARD_MATRICES", {"forward+backward": 3, "forward": 2})
    results, png = tmp_path / "memory.json", tmp_path / "memory.png"
    memory.main(["--seqlens", "1024", "--limit-gb", "0.04", "--json", str(results), "--plot", str(png)])
    both, forward = json.loads(results.read_text())["cells"]
    assert both["results"]["standard"] == {"left_out": "needs about 0.1 GB"}
    ours, standard = forward["results"]["flash_attn"], forward["results"]["standard"]
    assert ours["inputs"] == 3 * ours["results"] == 3 * 2**20
    assert ours["bytes"] < 4 * 2**20 < 2 * 16 * 2**20 < standard["bytes"] + 4 * 2**20
    first = png.read_bytes()
    png.unlink()
    memory.main(["--plot", str(results)])
    assert png.read_bytes() == first and first.startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    memory.main(["--plot", str(results)])
    assert "is not drawn" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_memory_on_a_gpu(tmp_path):
    path = tmp_path / "memory.json"
    memory.main(["--device", "cuda", "--seqlens", "2048", "--heads", "2", "--json", str(path)])
    for cell in json.loads(path.read_text())["cells"]:
        ours, standard = cell["results"]["flash_attn"], cell["results"]["standard"]
        assert 0 <= ours["bytes"] < 2**24 <= standard["bytes"]


def ncu_log(io, passes):
    """What ncu writes of [[(kernel, bytes of every metric), ...] of each pass], amid its own messages."""
    lines, number = ["==PROF== Connected", NCU_HEADER], 0
    for kernels in passes:
        for name, size in [("at::cuda::spin_kernel(long)", 1), *kernels]:
            for metric, scale in io.METRICS.values():
                lines.append(NCU_LINE.format(number, name, metric, f"{size // scale:,}"))
            number += 1
    return "\n".join([*lines, "==PROF== Disconnected\n"])


def test_io_sums_a_pass(io, tmp_path):
    cells = io.sweeps(io.parse(["--seqlens", "512", "1024", "--head-dims", "64", "128"]))["seqlen"]
    passes = [[("ours", 2**21)], [("ours", 2**21), ("prepare", 2**20)], [("mm", 2**26)], [("mm", 2**27)]]
    counted = io.passes_of(ncu_log(io, passes * len(cells)))
    assert [kernel["name"] for kernel in counted[1]] == ["ours", "prepare"]
    rows = list(io.rows_of("seqlen", cells, counted, io.COMPARED, 2**17))
    assert len(rows) == 8 and rows[1]["l2_sm"] == 3 * 2**20 and io.dram(rows[1]) == 6 * 2**20
    # N^2 d^2 / M and N d + N^2, of 32 * 16 heads in bfloat16.
    assert rows[0]["formula"] == 512 * 512**2 * 64**2 / 2**16 * 2
    assert rows[2]["formula"] == 512 * (512 * 64 + 512**2) * 2
    table = list(io.table(rows))
    assert len(table) == 2 + 4 and re.search(r"^forward +512 +64 +0\.004 +0\.134 +0\.002 +0\.067", table[2])
    results = {"rows": rows, "machine": {"processor": "GPU"}, "options": vars(io.parse([]))}
    path = tmp_path / "io.json"
    path.write_text(json.dumps(results, default=str))
    io.main(["--plot", str(path)])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_io_counts_nothing_where_a_counter_is_missing(io):
    text = ncu_log(io, [[("ours", 2**21)]]).replace("2,097,152", "n/a")
    (row, *_) = io.rows_of("seqlen", [CELL], io.passes_of(text) * 4, io.COMPARED, 2**17)
    assert row["dram_read"] is None and io.dram(row) is None and row["l2_sm"] == 2**21
    assert " - " in list(io.table([row]))[2]


@pytest.mark.parametrize("script,message", [
    (None, "not on the PATH"),
    ("echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1", r"ncu is not usable here[\s\S]*ERR_NVGPUCTRPERM"),
])
def test_io_says_that_ncu_is_not_usable(io, tmp_path, monkeypatch, script, message):
    if script:
        (tmp_path / "ncu").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    monkeypatch.setattr(io.glob, "glob", lambda pattern: [])
    with pytest.raises(SystemExit, match=message):
        io.count([CELL], io.COMPARED, {})


@pytest.mark.parametrize("example", ["gpt2", "bert"])
def test_training_compares(example, tmp_path, capsys):
    text, results = tmp_path / "text.txt", tmp_path / "training.json"
    lines = (f"{i}: the quick brown fox, {i % 7} lazy dogs\n" + "\n" * (i % 3) for i in range(300))
    text.write_text("".join(lines))
    options = f"--example {example} --steps 8 --context 32 --batch 4 --device cpu --data {text}".split()
    options += {"gpt2": ["--eval-windows", "4"], "bert": ["--eval-documents", "4"]}[example]
    training.main([*options, "--json", str(results), "--plot", str(tmp_path / "training.png")])
    results = json.loads(results.read_text())
    attentions = results["attentions"]
    assert list(attentions) == ["flash", "sdpa", "standard"] and results["config"]["example"] == example
    for row in attentions.values():
        assert len(row["train_losses"]) == 8 and row["tokens_per_second"] > 0
        assert row["train_losses"] == pytest.approx(attentions["standard"]["train_losses"], abs=2e-4)
        assert row["held_out_loss"] == pytest.approx(attentions["standard"]["held_out_loss"], abs=2e-4)
        assert (row["padding"] > 0) == (example == "bert") and row["tokens_per_step"] <= 4 * 32
    assert re.search(r"^flash +[\d,]+ +\d+\.\d\d +- +\d\.\d{4}", capsys.readouterr().out, re.M)
    assert (tmp_path / "training.png").stat().st_size > 10_000


@pytest.mark.parametrize("example", ["gpt2", "bert"])
def test_training_with_fa3(example, tmp_path, monkeypatch):
    """FlashAttention-3 is called as flash is: with ours in its place the losses are the same."""
    def fa3(q, k, v, softmax_scale, is_causal, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
            max_seqlen_k=None):
        if cu_seqlens_q is None:
            return flash_attn.flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=is_causal)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return flash_attn.flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=softmax_scale,
                                                 causal=is_causal)

    monkeypatch.setattr(training.implementations, "fa3", fa3)
    text, results = tmp_path / "text.txt", tmp_path / "training.json"
    lines = (f"{i}: the quick brown fox, {i % 7} lazy dogs\n" + "\n" * (i % 3) for i in range(300))
    text.write_text("".join(lines))
    options = f"--example {example} --steps 3 --context 32 --batch 4 --device cpu --data {text}".split()
    training.main([*options, "--attentions", "flash", "fa3", "--json", str(results)])
    rows = json.loads(results.read_text())["attentions"]
    assert rows["fa3"]["train_losses"] == pytest.approx(rows["flash"]["train_losses"], abs=1e-5)
    assert rows["fa3"]["padding"] == rows["flash"]["padding"]
    with pytest.raises(SystemExit, match="no dropout"):
        training.main([*options, "--attentions", "fa3", "--dropout", "0.1"])


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_kernel_variants(capfd, monkeypatch):
    """Compiles a row and a variant of it, and runs them where a GPU is."""
    arguments = ["kernel_variants.py", "sm90_forward_bfloat16_d64", "--variant", "two stages: stages=2",
                 "--seqlens", "256", "--tokens", "1024", "--rounds", "1"]
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    monkeypatch.setattr(sys, "argv", arguments + ([] if hopper else ["--only-compile"]))
    kernel_variants.main()
    said = capfd.readouterr().out
    assert len(re.findall(r": \d+ registers, spills \d+/\d+ bytes\n", said)) == 2, said
    assert hopper == ("TFLOP/s" in said) and "checksum" not in said
