"""Builds flash_attn._C: one C++ and CUDA extension that runs under every torch from 2.10 on.

The tensors and operators go through LibTorch's stable ABI: C functions of libtorch_cpu, nothing else of torch
is linked, and the import of torch has loaded that library before ours needs it. The CPU engine's hot files
are compiled once per instruction set and the best one is picked at run time, so one wheel serves all machines
of an architecture. Each row of the kernel table is compiled once per dtype, for all GPU architectures; CUDA's
runtime is linked statically, so that a module with GPU engines loads where no driver is.

Environment: FLASH_ATTN_CUDA_ARCHS ("all", "80;90", "none"; otherwise TORCH_CUDA_ARCH_LIST, otherwise the GPUs
of this machine), CUDA_HOME, CXX, MAX_JOBS, FLASH_ATTN_BUILD_LOGS (a folder for the CUDA compiler's reports,
which tools/check_kernels.py reads), FLASH_ATTN_SANITIZE (1: kernels that compute-sanitizer can follow, see
tools/sanitize.sh).
"""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "csrc" / folder) for folder in ("cpu", "cuda")]

import toolkit  # noqa: E402  (found on the path set just above)
from kernel_table import ROWS, registry  # noqa: E402
from variants import VARIANTS  # noqa: E402

SOURCES = [
    "csrc/engine.cpp",
    "csrc/cpu/probabilities.cpp",
    "csrc/cuda/device.cpp",
    "csrc/cuda/plan.cpp",
    "csrc/torch/arguments.cpp",
    "csrc/torch/backward.cpp",
    "csrc/torch/execution.cpp",
    "csrc/torch/forward.cpp",
    "csrc/torch/library.cpp",
    "csrc/torch/module.cpp",
    "csrc/torch/pack_mask.cpp",
    "csrc/torch/probabilities.cpp",
    "csrc/torch/gradient_node.cpp",
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
CUDA_FLAGS = [
    "-std=c++20",
    # Of the host's code, which only starts kernels, in a hundred copies; the device's is at -O3 always.
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden,-Os",
    "--expt-relaxed-constexpr",
    "-Xptxas",
    "-v",
]


@dataclass(frozen=True)
class Unit:
    """One translation unit. Beside its object stand the headers it read (.d), what made it (.made), and what
    the compiler said (.log); it is compiled again only if one of them changed."""

    object: Path
    command: list  # without outputs
    made_with: str  # versions of compiler and torch

    def beside(self, suffix):
        return self.object.with_suffix(suffix)

    def record(self):
        return "\n".join([self.made_with, *self.command])

    def is_fresh(self):
        made, dependencies = self.beside(".made"), self.beside(".d")
        if not (self.object.exists() and dependencies.exists() and made.exists()):
            return False
        if made.read_text() != self.record():
            return False
        _, _, listed = dependencies.read_text().replace("\\\n", " ").partition(": ")
        age = self.object.stat().st_mtime
        return all(os.path.exists(path) and os.stat(path).st_mtime < age for path in listed.split())

    def compile(self):
        if self.is_fresh():
            return
        begin = time.time()
        said = execute([*self.command, "-MMD", "-MF", str(self.beside(".d")), "-o", str(self.object)])
        # A header saved while this ran is newer than the object.
        os.utime(self.object, (begin, begin))
        seconds = time.time() - begin
        self.beside(".log").write_text(f"{said}seconds: {seconds:.1f}\n")
        self.beside(".made").write_text(self.record())
        if "-Xptxas" in self.command:
            print(f"flash_attn: compiled {self.object.stem} in {seconds:.0f} s", flush=True)
        elif said:
            print(said)


class BuildExtension(build_ext):
    """Compiles in parallel: 0.5 to 1 GB a job, as many jobs as processors or MAX_JOBS."""

    def build_extension(self, ext):
        import torch

        self.folder = Path(self.build_temp)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.torch_root = Path(torch.__file__).parent
        self.compiler_command = os.environ.get("CXX", "g++").split()
        self.toolkit = toolkit.Toolkit.find()
        self.architectures, why = toolkit.choose(self.toolkit, os.environ)
        print(f"flash_attn: {why}", flush=True)
        version = execute([*self.compiler_command, "--version"]).splitlines()[0]
        made_with = f"{version}, torch {torch.__version__}"
        # nvcc's files take the longest and come first; they see nothing of torch.
        kernels = [Unit(self.folder / f"{name}.o", command, f"nvcc {self.toolkit.version}, {version}")
                   for name, command in self.cuda_units()]
        units = kernels + [
            Unit(self.folder / f"{name}.o", command, made_with) for name, command in self.cpp_units()
        ]
        for log in set(self.folder.glob("*.log")) - {unit.beside(".log") for unit in units}:
            log.unlink()  # of a kernel that has left the table
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            list(pool.map(Unit.compile, units))
        self.keep_logs(kernels)
        self.link([unit.object for unit in units], Path(self.get_ext_fullpath(ext.name)))

    def rows(self):
        """Those of the kernel table that the chosen architectures can run."""
        chosen = {architecture.capability for architecture in self.architectures}
        return [row for row in ROWS if chosen and (row.capability is None or row.capability in chosen)]

    def cuda_units(self):
        """(object name, command) of every kernel of the table and of the files that no row is needed for."""
        if not self.architectures:
            return
        nvcc = [self.toolkit.nvcc, *CUDA_FLAGS, *self.toolkit.smallest]
        if os.environ.get("FLASH_ATTN_SANITIZE") == "1":
            nvcc.append("-DFLASH_SANITIZED")
        for row in sorted(self.rows(), key=lambda row: (row.kernel, -row.configuration.head_dim)):
            for dtype in row.dtypes:
                macros = self.folder / f"{row.symbol(dtype)}.h"
                write(macros, row.header(dtype))
                source = ROOT / "csrc" / "cuda" / row.engine / f"{row.kernel}.cu"
                chosen = toolkit.with_less_memory(self.architectures) if row.small else self.architectures
                flags = toolkit.only(row.capability) if row.capability else toolkit.code_for(chosen)
                yield row.symbol(dtype), [*nvcc, *flags, "-include", str(macros), "-c", str(source)]
        nvcc += toolkit.code_for(self.architectures)
        for source in sorted((ROOT / "csrc" / "cuda" / "any").glob("*.cu")):
            yield f"any_{source.stem}", [*nvcc, "-c", str(source)]

    def cpp_units(self):
        import pybind11

        include = self.torch_root / "include"
        # pybind11's own headers first: the copy in some torch wheels refuses to be used with the stable ABI.
        includes = [pybind11.get_include(), include, include / "torch/csrc/api/include"]
        includes += self.compiler.include_dirs
        flags = [*FLAGS, *(f"-isystem{path}" for path in includes)]
        if self.architectures:
            flags += ["-DFLASH_CUDA", f"-isystem{self.toolkit.include}"]
        compile_cpp = [*self.compiler_command, *flags]
        for variant, extra in VARIANTS.items():
            for source in CPU_ENGINE_SOURCES:
                name = f"{Path(source).stem}_{variant}"
                yield name, [*compile_cpp, *extra, f"-DFLASH_CPU_ISA={variant}", "-c", str(ROOT / source)]
        for source in [*SOURCES, self.registry()]:
            name = "_".join(Path(source).with_suffix("").parts[-2:])
            yield name, [*compile_cpp, "-c", str(ROOT / source)]

    def registry(self):
        """The kernels that were compiled, in the table's order (csrc/cuda/kernel.h)."""
        compiled = [(row, dtype) for row in self.rows() for dtype in row.dtypes]
        version = self.toolkit.version if self.architectures else ""
        path = self.folder.absolute() / "registry.cpp"
        write(path, registry(compiled, self.architectures, version, ROOT / "csrc/cuda/kernel.h"))
        return path

    def keep_logs(self, kernels):
        folder = os.environ.get("FLASH_ATTN_BUILD_LOGS")
        if folder and kernels:
            os.makedirs(folder, exist_ok=True)
            for unit in kernels:
                shutil.copy(unit.beside(".log"), folder)

    def link(self, objects, output):
        output.parent.mkdir(parents=True, exist_ok=True)
        link = ["-shared", "-fvisibility=hidden", "-Wl,--gc-sections", "-Wl,--allow-shlib-undefined", "-s"]
        # Exports the module's entry point alone: a compiler that links libstdc++ statically would otherwise
        # have half of it replaced by the copy that torch has loaded, which crashes in the first locale.
        link += [f"-Wl,--version-script={ROOT / 'csrc/torch/exports.map'}"]
        libraries = [f"-L{self.torch_root / 'lib'}", "-ltorch_cpu"]
        if self.architectures:
            libraries += [str(self.toolkit.static_runtime), "-lrt", "-ldl", "-lpthread"]
        execute([*self.compiler_command, *map(str, objects), "-o", str(output), *link, *libraries])


def execute(command):
    """What the command printed; stops the build if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"flash_attn: this command failed:\n{' '.join(command)}\n{done.stdout}")
    return done.stdout


def write(path, text):
    """Only if it changes: what was made from it stays fresh."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


setup(
    ext_modules=[Extension("flash_attn._C", [*SOURCES, *CPU_ENGINE_SOURCES])],
    cmdclass={"build_ext": BuildExtension},
)
