"""Builds flash_attn._C: one C++ extension that runs under every torch from 2.10 on.

The tensors and operators go through LibTorch's stable ABI: C functions of libtorch_cpu, nothing else of torch
is linked, and the import of torch has loaded that library before ours needs it. The CPU engine's hot files
are compiled once per instruction set and the best one is picked at run time, so one wheel serves all machines
of an architecture.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "csrc" / "cpu"))

from variants import VARIANTS  # noqa: E402  (found on the path set just above)

SOURCES = [
    "csrc/engine.cpp",
    "csrc/cpu/probabilities.cpp",
    "csrc/torch/arguments.cpp",
    "csrc/torch/backward.cpp",
    "csrc/torch/forward.cpp",
    "csrc/torch/library.cpp",
    "csrc/torch/probabilities.cpp",
]
CPU_ENGINE_SOURCES = ["csrc/cpu/backward.cpp", "csrc/cpu/forward.cpp"]

FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    # Scores of -inf and NaN have a meaning here: no -ffast-math. Fused multiply-add is wanted.
    "-ffp-contract=fast",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # the stable ABI of torch 2.10
]


class BuildExtension(build_ext):
    """Compiles in parallel: about 0.5 GB a job, as many jobs as processors or MAX_JOBS."""

    def build_extension(self, ext):
        import pybind11
        import torch

        torch_root = Path(torch.__file__).parent
        include = torch_root / "include"
        # pybind11's own headers first: the copy in some torch wheels refuses to be used with the stable ABI.
        includes = [pybind11.get_include(), include, include / "torch/csrc/api/include"]
        includes += self.compiler.include_dirs
        flags = [*FLAGS, *(f"-isystem{path}" for path in includes)]
        compiler = os.environ.get("CXX", "g++").split()
        objects, commands = [], []
        for source, name, extra in self.units():
            objects.append(str(Path(self.build_temp) / f"{name}.o"))
            commands.append([*compiler, *flags, *extra, "-c", str(ROOT / source), "-o", objects[-1]])
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        if not shutil.which("nvcc"):
            print("flash_attn: no nvcc found, building the CPU engine only")
        jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(self.execute, commands))
        output = self.get_ext_fullpath(ext.name)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        link = ["-shared", "-fvisibility=hidden", "-Wl,--gc-sections", "-Wl,--allow-shlib-undefined", "-s"]
        # Exports the module's entry point alone: a compiler that links libstdc++ statically would otherwise have
        # half of it replaced by the copy that torch has loaded, which crashes in the first locale.
        link += [f"-Wl,--version-script={ROOT / 'csrc/torch/exports.map'}"]
        libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu"]
        self.execute([*compiler, *objects, "-o", output, *link, *libraries])

    @staticmethod
    def units():
        """(source, object name, extra flags) of every translation unit, slowest first."""
        for variant, flags in VARIANTS.items():
            for source in CPU_ENGINE_SOURCES:
                yield source, f"{Path(source).stem}_{variant}", [*flags, f"-DFLASH_CPU_ISA={variant}"]
        for source in SOURCES:
            yield source, "_".join(Path(source).with_suffix("").parts[1:]), []

    @staticmethod
    def execute(command):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.stdout:
            print(done.stdout)
        if done.returncode:
            raise SystemExit(f"flash_attn: this command failed:\n{' '.join(command)}\n{done.stdout}")


setup(
    ext_modules=[Extension("flash_attn._C", [*SOURCES, *CPU_ENGINE_SOURCES])],
    cmdclass={"build_ext": BuildExtension},
)
