"""Does a wheel's native code depend on one version of torch? It must not: one binary serves all of them.

    python tools/check_abi.py dist/flash_attn-*.whl
    python tools/check_abi.py dist/flash_attn-*.whl --torch-lib site-packages/torch/lib

For every shared library of the wheel, checked and printed:
  - it asks for no mangled C++ symbol of torch (at, c10, torch, caffe2): those change from release to release
  - it links neither libtorch nor libtorch_python nor anything of CUDA, so that it loads under any torch, one
    without CUDA included (libtorch_cpu, which each has, is fine)
  - the torch symbols it does ask for are of the C shim (aoti_torch_*, torch_*); with --torch-lib, each one is
    exported by that torch's libtorch_cpu.so

Exit status 1 if any of this fails, with every reason. Needs nm and readelf (binutils).
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# A nested name (N, cv-qualifiers, substitutions of std aside) whose outermost namespace is torch's.
TORCH_CXX = re.compile(r"^_Z.*N[rVKRO]*(2at|3c10|5torch|6caffe2)(?=\d|[A-Z])")
TORCH_C = re.compile(r"^(aoti_|torch_)")
FORBIDDEN_LIBRARY = re.compile(
    r"^lib(torch\.|torch_python|torch_cuda|torch_hip|c10_cuda|cuda|cudnn|cublas|cufft|nv|nccl)"
)


def lines_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def symbols(library, which):
    """Names in the dynamic symbol table; which: "--undefined-only" or "--defined-only"."""
    entries = (line.split() for line in lines_of("nm", "-D", which, str(library)))
    return {entry[-1].split("@")[0] for entry in entries if len(entry) >= 2}


def linked_libraries(library):
    return [match[1] for line in lines_of("readelf", "-d", "-W", str(library))
            if (match := re.search(r"\(NEEDED\).*\[(.+)\]", line))]


def libtorch_cpu(path):
    """The library itself, or what lies in torch/lib or in torch."""
    candidates = [path, path / "libtorch_cpu.so", path / "lib" / "libtorch_cpu.so"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise SystemExit(f"check_abi: no libtorch_cpu.so at {path} (give the file, torch/lib or torch)")


def problems_of(library, exported):
    """Prints what the library asks for; what is wrong with it, a sentence each. exported: names, or None."""
    undefined = symbols(library, "--undefined-only")
    shim = sorted(name for name in undefined if TORCH_C.match(name))
    linked = linked_libraries(library)
    print(f"  links {', '.join(linked) or 'nothing'}")
    print(f"  {len(shim)} torch C symbols: {' '.join(shim)}")
    mangled = sorted(name for name in undefined if TORCH_CXX.search(name))
    problems = [f"asks for a C++ symbol of torch: {name}" for name in mangled]
    problems += [f"links {name}" for name in linked if FORBIDDEN_LIBRARY.match(name)]
    if exported is not None:
        missing = [name for name in shim if name not in exported]
        problems += [f"asks for {name}, which this torch does not export" for name in missing]
        print(f"  {len(shim) - len(missing)} of {len(shim)} exported by this torch")
    return problems


def main(arguments=None):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch-lib", type=Path, metavar="PATH", help="libtorch_cpu.so, or torch/lib")
    options = parser.parse_args(arguments)
    exported = None
    if options.torch_lib:
        exported = symbols(libtorch_cpu(options.torch_lib), "--defined-only")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(options.wheel) as wheel:
            wheel.extractall(folder)
        libraries = sorted(Path(folder).rglob("*.so*"))
        if not libraries:
            print(f"check_abi: {options.wheel.name} holds no shared library")
            failed = True
        for library in libraries:
            print(f"{library.relative_to(folder)} ({library.stat().st_size / 1e6:.1f} MB)")
            problems = problems_of(library, exported)
            for problem in problems:
                print(f"  FAILED: {problem}")
            failed = failed or bool(problems)
    print(f"check_abi: {'failed' if failed else 'ok'}, {len(libraries)} libraries in {options.wheel.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
