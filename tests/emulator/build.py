"""Builds flash_attn with its GPU kernels compiled by the host's compiler, to run on the CPU:

    python tests/emulator/build.py /tmp/emulated bfloat16_d64 float32_d64
    PYTHONPATH=/tmp/emulated pytest tests/emulator/*cases.py

The names choose kernels of csrc/cuda/kernel_table.py: all whose symbol has a part that is given; what a
chosen kernel calls has to be among them. In the result tensors on the CPU go to the GPU engines. emulator.h
says what that shows, and what not.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "csrc" / folder) for folder in ("cpu", "cuda")]

import toolkit  # noqa: E402
from kernel_table import ROWS, registry  # noqa: E402

CPU_ENGINE = ("csrc/cpu/forward.cpp", "csrc/cpu/backward.cpp")
FLAGS = ["-std=c++20", "-fPIC", "-w", "-fvisibility=hidden", "-DFLASH_CUDA", "-DFLASH_CPU_ISA=baseline",
         "-DTORCH_TARGET_VERSION=0x020a000000000000"]
REWRITTEN = {
    r"extern __shared__ __align__\(\d+\) char memory\[\];": "char* const memory = emulator::shared_memory();",
    r"cudaLaunchKernelEx\(&config, kernel, Parameters\(arguments\)\.\.\.\)":
        "(emulator::launch(kernel, blocks, threads, shared_bytes, launch.cluster, arguments...), "
        "cudaSuccess)",
    r"__CUDA_ARCH__": "EMULATED_ARCH",
    r"defined\(__x86_64__\)": "0",  # one variant of the CPU engine
}


def copy_sources(folder, rewritten):
    """csrc/ with the emulator's PTX wrappers and launch; files that don't change keep their time."""
    source, copy = ROOT / "csrc", folder / "csrc"
    replaced = {source / "cuda/ptx" / path.name: path for path in (ROOT / "tests/emulator/ptx").glob("*.h")}
    replaced[source / "torch/execution.cpp"] = ROOT / "tests/emulator/execution.cpp"
    for path in sorted(source.rglob("*")):
        if path.suffix not in (".h", ".cuh", ".cu", ".cpp"):
            continue
        if path.parent.name == "ptx" and path not in replaced:
            raise SystemExit(f"{path}: tests/emulator/ptx has no {path.name}")
        text = replaced.get(path, path).read_text()
        for pattern, replacement in rewritten.items():
            text = re.sub(pattern, replacement, text, flags=re.DOTALL)
        write(copy / path.relative_to(source), text)
    return copy


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def units(folder, names):
    """(object, command) of each translation unit."""
    import pybind11
    import torch

    torch_include = Path(torch.__file__).parent / "include"
    csrc = folder / "csrc"
    includes = [pybind11.get_include(), torch_include, torch_include / "torch/csrc/api/include",
                toolkit.Toolkit.find().include, sysconfig.get_paths()["include"]]
    cpp = ["g++", *FLAGS, *(f"-isystem{path}" for path in includes)]
    emulated = [*cpp, "-include", str(ROOT / "tests/emulator/emulator.h"), "-DEMULATED_ARCH=900"]
    chosen = [(row, dtype) for row in ROWS for dtype in row.dtypes
              if any(name in row.symbol(dtype) for name in names)]
    for row, dtype in chosen:
        macros = folder / f"{row.symbol(dtype)}.h"
        write(macros, row.header(dtype))
        yield row.symbol(dtype), [*emulated, "-O1", "-include", str(macros), "-x", "c++", "-c",
                                  str(csrc / "cuda" / row.engine / f"{row.kernel}.cu")]
    for source in sorted((csrc / "cuda/any").glob("*.cu")):
        yield f"any_{source.stem}", [*emulated, "-O1", "-x", "c++", "-c", str(source)]
    yield "emulator", [*emulated, "-O3", "-c", str(ROOT / "tests/emulator/emulator.cpp")]
    for source in [*csrc.glob("*.cpp"), *csrc.glob("cpu/*.cpp"), *csrc.glob("cuda/*.cpp"),
                   *csrc.glob("torch/*.cpp")]:
        name = "_".join(source.with_suffix("").parts[-2:])
        yield name, [*cpp, "-O1", "-c", str(source)]
    listed = folder / "registry.cpp"
    write(listed, registry(chosen, [toolkit.Architecture(90)], "emulated", csrc / "cuda/kernel.h"))
    yield "registry", [*cpp, "-c", str(listed)]


def compile_unit(folder, name, command):
    object_file, depends = folder / "build" / f"{name}.o", folder / "build" / f"{name}.d"
    object_file.parent.mkdir(exist_ok=True)
    if object_file.exists() and depends.exists():
        files = depends.read_text().replace("\\\n", " ").partition(": ")[2].split()
        made = object_file.stat().st_mtime
        if all(os.path.exists(file) and os.stat(file).st_mtime < made for file in files):
            return object_file
    if subprocess.run([*command, "-MMD", "-MF", str(depends), "-o", str(object_file)]).returncode:
        raise SystemExit(f"{name}: does not compile")
    return object_file


def build(folder, names, rewritten=REWRITTEN):
    """The module's path. rewritten: {pattern: replacement} of what changes in csrc/."""
    import torch

    folder = Path(folder).absolute()
    copy_sources(folder, rewritten)
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count()))) as pool:
        objects = list(pool.map(lambda unit: compile_unit(folder, *unit), units(folder, names)))
    package = folder / "flash_attn"
    shutil.copytree(ROOT / "flash_attn", package, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    module = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["g++", "-shared", *map(str, objects), "-o", str(module), "-Wl,--allow-shlib-undefined",
                    f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"], check=True)
    return module


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    print(build(sys.argv[1], sys.argv[2:]))
