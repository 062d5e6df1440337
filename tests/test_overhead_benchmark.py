"""benchmarks/overhead.py: that it measures what it names and writes what it prints."""

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import overhead  # noqa: E402  (found on the path set just above)

SMALL = "--seqlen 16 --heads 2 --head-dim 32 --rounds 3".split()


def test_overhead_writes_its_table(device, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(overhead, "CALLS", 2)
    monkeypatch.setattr(overhead, "WARM_UP_CALLS", 1)
    wheel, path, png = (tmp_path / name for name in ("flash_attn.whl", "new/overhead.json", "overhead.png"))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("flash_attn/_C.so", bytes(2_000_000))
        file.writestr("flash_attn/__init__.py", "")
    overhead.main([*SMALL, "--device", device, "--imports", "1", "--wheel", str(wheel), "--json", str(path),
                   "--plot", str(png)])
    printed, results = capsys.readouterr().out, json.loads(path.read_text())
    measured = {(row["direction"], row["implementation"]): row for row in results["calls"]}
    assert len(measured) == len(overhead.DIRECTIONS) * len(overhead.IMPLEMENTATIONS) == 6
    for (direction, _), row in measured.items():
        assert len(row["samples"]) == 3 and row["microseconds"] == sorted(row["samples"])[1] > 0
        assert f"{row['microseconds']:.1f}" in re.search(rf"^{re.escape(direction)} .*", printed, re.M)[0]
    assert 0 < results["import"]["seconds"] < 30 and len(results["import"]["samples"]) == 1
    assert results["wheel"]["installed_bytes"] == 2_000_000 == results["wheel"]["largest_file_bytes"]
    assert results["wheel"]["largest_file"] == "flash_attn/_C.so"
    assert results["wheel"]["bytes"] == wheel.stat().st_size < 100_000
    assert "installed 2.0 MB" in printed and results["machine"]["torch"] == torch.__version__
    first = png.read_bytes()
    png.unlink()
    path.with_suffix(".png").unlink(missing_ok=True)
    overhead.main(["--plot", str(path)])
    assert path.with_suffix(".png").read_bytes() == first and first.startswith(b"\x89PNG")


def test_overhead_compares_the_same_attention(device):
    """And the forward records no graph."""
    options = overhead.parse([*SMALL, "--device", device])
    for direction in overhead.DIRECTIONS:
        results = {}
        for name in overhead.IMPLEMENTATIONS:
            torch.manual_seed(5)
            result = overhead.prepared_call(name, direction, options)()
            tensors = result if isinstance(result, tuple) else (result,)
            assert not any(x.requires_grad for x in tensors) and tensors[0].dtype == overhead.DTYPES[device]
            if name == "sdpa":
                tensors = [x.transpose(1, 2) for x in tensors]
            results[name] = [x.reshape(16, 2, 32).float() for x in tensors]
        assert len(results["sdpa"]) == (1 if direction == "forward" else 3)
        precision = 1e-5 if device == "cpu" else 5e-2
        for name in overhead.IMPLEMENTATIONS[1:]:
            for x, y in zip(results[name], results["flash_attn_func"], strict=True):
                torch.testing.assert_close(x, y, atol=precision, rtol=precision)


def test_overhead_imports_nothing_if_asked(monkeypatch, capsys):
    rows = [{"direction": direction, "implementation": name, "microseconds": 1.0, "samples": [1.0]}
            for direction in overhead.DIRECTIONS for name in overhead.IMPLEMENTATIONS]
    monkeypatch.setattr(overhead, "measure_calls", lambda options: rows)
    monkeypatch.setattr(overhead, "measure_import", lambda runs: pytest.fail("an interpreter was started"))
    overhead.main([*SMALL, "--imports", "0"])
    assert "import flash_attn" not in capsys.readouterr().out
