"""Variants of one kernel of the table side by side, without torch: for tuning.

    python benchmarks/kernel_variants.py sm90_forward_bfloat16_d128 \\
        --variant 'wide: key_tile=176 query_slots=2' --variant 'no exp: -DNO_EXP @ablation.patch'

The first variant is the row as it stands. A variant changes fields of the row's configuration, defines macros,
or patches a copy of csrc/ (paths as git diff writes them). All are compiled at once, as many jobs as
processors, with the registers and spills that ptxas reports; then they run in turn, --rounds times, and the
median of rounds is shown in TFLOP/s, FLOPs as in attention.py. The checksum, a mean of absolute values, says
whether a variant still computes the same.
"""

import argparse
import dataclasses
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "csrc" / "cuda"))

import toolkit  # noqa: E402  (found on the path set just above)
from kernel_table import ROWS  # noqa: E402


def row_of(symbol):
    """(row, dtype): the first whose symbol begins so."""
    for row in ROWS:
        for dtype in row.dtypes:
            if row.symbol(dtype).startswith(symbol) and row.which:
                return row, dtype
    raise SystemExit(f"no forward or backward kernel begins with {symbol}")


def compile_variant(folder, row, dtype, text, only_compile):
    """What ptxas says of the program folder/run."""
    words = text.split()
    fields = dict(re.fullmatch(r"(\w+)=(\w+)", word).groups() for word in words if re.match(r"\w+=", word))
    source = ROOT / "csrc"
    patches = [Path(word[1:]).absolute() for word in words if word.startswith("@")]
    if patches:
        shutil.copytree(source, folder / "csrc")
        for patch in patches:
            subprocess.run(["patch", "-s", "-p1", "-i", str(patch)], cwd=folder, check=True)
        source = folder / "csrc"
    configuration = dataclasses.replace(row.configuration, **{name: int(value) for name, value in fields.items()})
    changed = dataclasses.replace(row, configuration=configuration)
    header = changed.header(dtype) + f'#define FLASH_SOURCE "{source}/cuda/{row.engine}/{row.kernel}.cu"\n'
    if row.which == "backward":
        header += "#define FLASH_BACKWARD\n"
    (folder / "row.h").write_text(header)
    shutil.copy(ROOT / "benchmarks" / "kernel_timer.cu", folder)
    helper = "backward_prepare.cu" if row.which == "backward" else "combine.cu"
    output = ["-cubin", "-o", folder / "run.cubin"] if only_compile else [
        source / "cuda" / "any" / helper, "-o", folder / "run"]
    command = [toolkit.Toolkit.find().nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v",
               *(toolkit.only(row.capability) if row.capability else toolkit.Architecture(90).flags()),
               *(word for word in words if word.startswith("-")), "-include", folder / "row.h",
               folder / "kernel_timer.cu", *output]
    done = subprocess.run(list(map(str, command)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        return f"does not compile: {done.stdout[-2000:]}"
    main = re.search(r"attention_\S*'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
                     r"Used (\d+) registers", done.stdout, re.S)
    serial = "; products serialised" if re.search(r"C75\d\d", done.stdout) else ""
    return f"{main[3]} registers, spills {main[1]}/{main[2]} bytes{serial}"


def run(folder, options):
    """{(seqlen, causal): (TFLOP/s, checksum)}; empty if the program fails."""
    cells = [f"{seqlen}:{causal}" for seqlen in options.seqlens for causal in options.causal]
    sizes = map(str, (options.tokens, options.width, options.group, options.idle_ms))
    done = subprocess.run([folder / "run", *sizes, *cells], text=True, stdout=subprocess.PIPE,
                          timeout=options.timeout)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(int(s), int(c)): (float(flops) / float(seconds) / 1e12, float(checksum))
            for s, c, seconds, flops, checksum in lines}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("symbol", help="the beginning of a kernel's name, with its engine")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME: CHANGES")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[512, 1024, 4096, 16384])
    parser.add_argument("--causal", type=int, nargs="+", choices=(0, 1), default=[0, 1])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048, help="heads times head dim")
    parser.add_argument("--group", type=int, default=1, help="query heads of a key head")
    parser.add_argument("--idle-ms", type=int, default=0,
                        help="before each sample: 100, as attention.py, for a burst's clock")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=60, help="seconds, of one run of a variant")
    parser.add_argument("--only-compile", action="store_true", help="registers and spills; needs no GPU")
    options = parser.parse_args()
    row, dtype = row_of(options.symbol)
    variants = {"as it stands": ""}
    for variant in options.variant:
        name, changes = variant.split(":", 1)
        variants[name.strip()] = changes
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as jobs:
        folders = {}
        for index, name in enumerate(variants):
            folders[name] = Path(temporary) / str(index)
            folders[name].mkdir()
        said = jobs.map(lambda name: compile_variant(folders[name], row, dtype, variants[name],
                                                     options.only_compile), variants)
        for name, text in zip(variants, said):
            print(f"{name}: {text}", flush=True)
        if options.only_compile:
            return
        results = {name: [] for name in variants}
        for _ in range(options.rounds):
            for name in variants:
                results[name].append(run(folders[name], options))
        cells = [(seqlen, causal) for seqlen in options.seqlens for causal in options.causal]
        print(f"{'TFLOP/s':24}" + "".join(f"{s:>8}{' causal' if c else '':7}" for s, c in cells))
        for name, rounds in results.items():
            medians = [statistics.median(r[cell][0] for r in rounds) if all(cell in r for r in rounds) else 0
                       for cell in cells]
            sums = {round(r[cell][1] / results["as it stands"][0][cell][1], 3)
                    for r in rounds for cell in cells if cell in r and cell in results["as it stands"][0]}
            print(f"{name:24}" + "".join(f"{x:15.0f}" for x in medians)
                  + ("" if sums == {1.0} else f"  checksum {sorted(sums)}"), flush=True)


if __name__ == "__main__":
    main()
