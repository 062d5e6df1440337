"""The C++ parts that have tests of their own: the tile schedule, unions of lists of blocks, the tiles of
packed sequences, division by a number that the host knows, where tiles lie in shared memory and dS in the
device's, and the tile products of every instruction set."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flash_attn import build_info

ROOT = Path(__file__).parent.parent
VARIANTS = runpy.run_path(ROOT / "csrc" / "cpu" / "variants.py")["VARIANTS"]
COMPILER = os.environ.get("CXX", "g++").split()

pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no C++ compiler")


def compile_cpp(source, output, *flags):
    command = [*COMPILER, "-std=c++20", "-Wall", "-Wextra", *flags, str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.parametrize("name", ["schedule", "block_list", "packed_tiles", "division", "tile_layout",
                                  "tile_order", "score_gradient_rows"])
def test_against_brute_force(name, tmp_path):
    program = compile_cpp(ROOT / "tests" / "cpp" / f"{name}.cpp", tmp_path / name, "-O2", "-Werror")
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 10_000


@pytest.mark.parametrize("isa", VARIANTS)
def test_tile_products(isa, tmp_path):
    usable = {engine["configuration"]: engine["usable"] for engine in build_info()["engines"]}
    flags = [*VARIANTS[isa], f"-DFLASH_CPU_ISA={isa}"]
    program = compile_cpp(ROOT / "tests" / "cpp" / "tile_gemm.cpp", tmp_path / "tile_gemm", "-O2", *flags)
    if not usable[isa]:
        pytest.skip(f"this machine can't run {isa}")
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
@pytest.mark.parametrize("isa", [isa for isa in VARIANTS if isa != "baseline"])
@pytest.mark.parametrize("source", ["forward", "backward"])
def test_no_code_is_shared_between_instruction_sets(isa, source, tmp_path):
    """A weak symbol outside the variant's namespace could replace another variant's copy at link time, and a
    machine without these instructions would run it."""
    flags = [*VARIANTS[isa], f"-DFLASH_CPU_ISA={isa}", "-O3", "-c"]
    made = compile_cpp(ROOT / "csrc" / "cpu" / f"{source}.cpp", tmp_path / "object.o", *flags)
    listing = subprocess.run(["nm", "-C", made], capture_output=True, text=True, check=True).stdout
    weak = [line for line in listing.splitlines() if any(f" {kind} " in line for kind in "VWu")]
    strangers = [line for line in weak if f"flash::cpu::{isa}::" not in line and "DW.ref." not in line]
    assert listing and not strangers, "\n".join(strangers)


@pytest.mark.parametrize("isa", VARIANTS)
def test_every_instruction_set_keeps_the_contracts(isa, tmp_path):
    """The other tests run the variant that this machine prefers; these files run all that it can."""
    engine = next(engine for engine in build_info()["engines"] if engine["configuration"] == isa)
    if engine["chosen"] or not engine["usable"]:
        pytest.skip(f"{isa} is what the other tests run, or what this machine can't")
    files = [ROOT / "tests" / name for name in ("test_masks.py", "test_properties.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    environment = {**os.environ, "FLASH_ATTN_CPU_ISA": isa, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
