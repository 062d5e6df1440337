"""The CUDA kernels, without a GPU: compiled by the host's compiler and run by tests/emulator/."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "emulator"
sys.path.insert(0, str(FOLDER))

import build  # noqa: E402  (found on the path set just above)

# All of a dtype and, of the rest, what the cases ask for.
KERNELS = ["bfloat16", "float16_d64", "float16_d256", "float32_d64", "float32_d256", "bias_gradient"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not shutil.which("g++") or not shutil.which("nvcc"), reason="needs g++ and the CUDA toolkit's headers")]


def run_cases(package, *options, **environment):
    """(exit status, what pytest said) of the emulator's cases with the package, on all processors."""
    cases = FOLDER / "cases.py", FOLDER / "map_cases.py", FOLDER / "stored_cases.py", FOLDER / "many_cases.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough", *cases,
               *options]
    if importlib.util.find_spec("xdist") and "PYTEST_XDIST_WORKER" not in os.environ:
        command += ["-n", str(os.cpu_count())]
    environment = {**os.environ, "PYTHONPATH": str(package), **environment}
    done = subprocess.run(list(map(str, command)), cwd=package, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=environment)
    return done.returncode, done.stdout


def test_kernels(tmp_path):
    build.build(tmp_path, KERNELS)
    status, said = run_cases(tmp_path)
    assert status == 0, said[-10000:]
    assert int(re.search(r"(\d+) passed", said)[1]) >= 50 and "skipped" not in said
    # The portable kernels, where Hopper has its own. Only Hopper's hand sums from part to part of a group.
    chosen = "forward_and_backward or transformed or backward_of and not parts_of_groups or grow or finite"
    status, said = run_cases(tmp_path, "-k", chosen, FLASH_ATTN_SM90="0")
    assert status == 0, said[-10000:]


def test_a_wrong_kernel_is_noticed(tmp_path):
    """Without the wait for the copies of a tile."""
    wait = "mbarrier_wait(of_tile(full, tile), tile / kStages % 2);"
    assert wait in (FOLDER.parents[1] / "csrc/cuda/sm80/key_stages.cuh").read_text()
    build.build(tmp_path, ["sm80_forward_bfloat16_d64", "sm80_backward_bfloat16_d64",
                           "query_gradient_bfloat16_d64", "sm80_bias_gradient_bfloat16"],
                {**build.REWRITTEN, re.escape(wait): ""})
    status, said = run_cases(tmp_path, "-k", "test_forward_and_backward and 64-plain and dtype0")
    assert status == 1 and "inaccurate" in said
