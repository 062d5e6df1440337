"""What the CUDA compiler made of the kernels: registers, spills, local memory, seconds.

    python tools/check_kernels.py build/temp.*            # or the folder of FLASH_ATTN_BUILD_LOGS

Reads the compiler's reports (*.log, written by setup.py beside each object) and prints a row for each kernel
and architecture. Exit status 1, with the reasons, if a kernel spills more than the limits below, or if the
compiler serialises Hopper's asynchronous matrix products (wgmma, ptxas's C7510).
"""

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Bytes stored and loaded. sm80's plain kernels for 16 bits spill nothing, or a flag. Others may keep flags and
# addresses in memory, touched once a tile; anything more would show.
# The kernels with softcap, ALiBi or dropout are bound by those, the ones of float32 by their threefold
# products, not by the memory's first level; and functions that are called stand outside the loops over tiles.
# The warps that copy in Hopper's backward have 24 registers, in its forward, with more than two warpgroups that
# compute, 32 to 56; one of them plans, beside the products.
PORTABLE_LIMIT = 32
PLAIN_LIMIT = 256
OTHER_LIMIT = 1024

SERIALISED = re.compile(r"C7510|wgmma.*seriali[sz]ed", re.IGNORECASE)


@dataclass(frozen=True)
class Kernel:
    file: str
    function: str
    architecture: str
    registers: int
    stack: int  # bytes of local memory: arrays that are indexed at run time, and spills
    spill: int  # bytes stored and loaded
    called_spill: int  # the same of functions that it calls, together
    seconds: float  # of the whole file


def number(pattern, text):
    return sum(int(found) for found in re.findall(pattern, text))


def kernels_of(name, log):
    """Kernels of one file's report."""
    seconds = re.search(r"^seconds: ([\d.]+)", log, flags=re.M)
    head = r"Compiling entry function '(\w+)' for '(\w+)'"
    _, *parts = re.split(head, log)
    spills = r"(\d+) bytes spill (?:stores|loads)"
    for function, architecture, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        _, own, *called = text.split("Function properties for")
        yield Kernel(
            name, function, architecture,
            registers=number(r"Used (\d+) registers", own),
            stack=number(r"(\d+) bytes stack frame", own),
            spill=number(spills, own),
            called_spill=number(spills, "".join(called)),
            seconds=float(seconds[1]) if seconds else 0.0,
        )


def limit_of(kernel):
    """The kernels of one source are instances for feature sets, of which 0 is none (score_gradient.cuh), or it is
    its configuration that names one."""
    slow = r"FeaturesE[1-9]", "_float32_", "sm90_backward", r"sm90_forward\w+_q(192|256)_", "_transformed"
    plain = not any(re.search(of, f"{kernel.file} {kernel.function}") for of in slow)
    if not plain:
        return OTHER_LIMIT
    return PORTABLE_LIMIT if kernel.file.startswith("sm80_") else PLAIN_LIMIT


def readable(functions):
    """Function names without namespaces and parameters, where binutils can read them."""
    if not shutil.which("c++filt"):
        return dict(zip(functions, functions, strict=True))
    done = subprocess.run(["c++filt"], input="\n".join(functions), capture_output=True, text=True, check=True)
    unqualified = (re.sub(r"^void |\(anonymous namespace\)::|\w+::", "", n) for n in done.stdout.splitlines())
    return {f: re.sub(r"\([^()]*\)$", "", n) for f, n in zip(functions, unqualified, strict=True)}


def main(arguments=None):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("folders", type=Path, nargs="+")
    logs = {log.stem: log.read_text() for folder in parser.parse_args(arguments).folders
            for log in sorted(folder.glob("*.log"))}
    kernels = [kernel for name, log in logs.items() for kernel in kernels_of(name, log)]
    names = readable(sorted({kernel.function for kernel in kernels}))
    width = max((len(kernel.file) for kernel in kernels), default=4)
    print(f"{'file':{width}}  {'arch':8} registers  stack  spill  seconds  kernel")
    for k in kernels:
        numbers = f"{k.registers:9}  {k.stack:5}  {k.spill:5}  {k.seconds:7.1f}"
        print(f"{k.file:{width}}  {k.architecture:8} {numbers}  {names[k.function]}")
    problems = [f"{k.file} for {k.architecture}: {names[k.function]} spills {k.spill} bytes"
                for k in kernels if k.spill > limit_of(k)]
    problems += [f"{k.file} for {k.architecture}: what {names[k.function]} calls spills {k.called_spill} "
                 "bytes" for k in kernels if k.called_spill > OTHER_LIMIT]
    problems += [f"{name}: {line.strip()}" for name, log in logs.items() for line in log.splitlines()
                 if SERIALISED.search(line)]
    if not kernels:
        problems.append("no kernel was compiled (no *.log with ptxas's reports)")
    for problem in problems:
        print(f"FAILED: {problem}")
    seconds = sum({kernel.file: kernel.seconds for kernel in kernels}.values())
    verdict = "failed" if problems else "ok"
    print(f"check_kernels: {verdict}, {len(kernels)} kernels, {seconds:.0f} s of compiling")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
