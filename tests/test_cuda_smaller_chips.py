"""Kernels for chips with less shared memory, on a GPU that has more. The kernel table's tests say which chip
takes which kernel; here those kernels run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flash_attn
from gpu import needs_gpu

SEVERAL = any(engine["name"] != "cpu" and "," in engine["configuration"]
              for engine in flash_attn.build_info()["engines"])
ELSEWHERE = "a build for several generations has them for the smaller chips alone"
pytestmark = [needs_gpu, pytest.mark.skipif(SEVERAL, reason=ELSEWHERE)]

TESTS = Path(__file__).resolve().parent
NAMES = """
import torch, flash_attn
q = torch.empty(1, 512, 4, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
print(flash_attn.explain(q, q, q))
"""


def run(arguments, kib, cwd):
    environment = {**os.environ, "FLASH_ATTN_SHARED_BYTES": str(1024 * kib)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def test_the_limit_decides_on_the_kernels(tmp_path):
    plans = [run(["-c", NAMES], kib, tmp_path) for kib in (99, 163, 227)]
    assert all(plan.returncode == 0 for plan in plans), plans[0].stderr[-2000:]
    assert len({plan.stdout for plan in plans}) == 3


# float32 gradients beyond head dim 128 need more than 99 KiB (test_kernel_table.py).
@pytest.mark.parametrize("kib,tests,chosen", [
    (99, "matrix.py::test_head_dims", ""), (163, "matrix.py::test_head_dims", ""),
    (99, "matrix.py::test_packed", ""), (99, "matrix.py::test_around_tile_edges", ""),
    (99, "dropout.py", ""), (163, "dropout.py", ""),
    (99, "maximum.py", "not (dtype2 and (192 or 256))"), (163, "maximum.py", "192 or 256")])
def test_smaller_kernels_keep_the_contracts(kib, tests, chosen, tmp_path):
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"{TESTS}/test_cuda_{tests}", "-k", chosen]
    done = run(command, kib, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
