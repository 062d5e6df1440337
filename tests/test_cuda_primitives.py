"""The parts of the GPU kernels that have tests of their own, against plain loops on the CPU: every function
of csrc/cuda/ptx/ and csrc/cuda/tile/, and the products of Hopper's warpgroups, on the GPU that is here.
Without one: that these tests compile, without spills."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "csrc" / "cuda"))

import toolkit  # noqa: E402  (found on the path set just above)

TOOLKIT = toolkit.Toolkit.find()
DTYPES = ("float16", "bfloat16", "float32")
LOWEST, HOPPER = 80, 90
HOPPERS = {f"warpgroup products {dtype}": ("warpgroup_products", [f"-DFLASH_DTYPE={dtype}"])
           for dtype in DTYPES[:2]}
PROGRAMS = {"ptx": ("ptx", []), "tile": ("tile", []), **HOPPERS,
            **{f"products {dtype}": ("products", [f"-DFLASH_DTYPE={dtype}"]) for dtype in DTYPES}}

needs_nvcc = pytest.mark.skipif(TOOLKIT is None, reason="no nvcc")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def architecture(name, capability):
    """nvcc's flags: for a chip like this, or Hopper's own instructions."""
    return toolkit.only(HOPPER) if name in HOPPERS else TOOLKIT.nearest(capability).flags()


def compile_cuda(name, capability, output):
    """The compiler's report."""
    source, macros = PROGRAMS[name]
    command = [TOOLKIT.nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-Werror",
               "all-warnings", *architecture(name, capability), *macros]
    done = subprocess.run([*command, str(ROOT / "tests" / "cuda" / f"{source}.cu"), "-o", str(output)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_nvcc
@needs_gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_the_cpu(name, tmp_path, seed):
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < LOWEST:
        pytest.skip("the GPU is older than the kernels support")
    if name in HOPPERS and 10 * major + minor != HOPPER:
        pytest.skip("only Hopper has these instructions")
    program = tmp_path / "program"
    compile_cuda(name, 10 * major + minor, program)
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith("FAILED")]
    assert done.returncode == 0 and not failures, "\n".join(failures) or done.stdout + done.stderr
    assert sum(line.startswith("ok ") for line in lines) > 10


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles_without_spills(name, tmp_path):
    report = compile_cuda(name, LOWEST, tmp_path / "program")
    assert "C75" not in report  # wgmma one after the other
    spilled = re.findall(r"(\d+) bytes spill stores", report)
    assert spilled and not any(map(int, spilled)), report
