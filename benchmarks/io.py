"""Bytes that attention moves, counted by the GPU: ours against standard attention and the paper's formula.

    python benchmarks/io.py --json results.json --plot io.png      # needs ncu (Nsight Compute) and a CUDA GPU
    python benchmarks/io.py --plot results.json                    # anywhere, later

FlashAttention's Theorem 2 counts accesses of elements outside the on-chip memory of M elements: of order
N d + N^2 for standard attention, N^2 d^2 / M for flash attention, a head and pass. The columns:

    DRAM    bytes read and written by device memory. What the paper measured on GPUs of its time; caches are
            flushed before every kernel. A modern L2 cache (50 MB and more) holds the keys and values of many
            heads, so that reading them again costs no DRAM access: ours then comes close to reading each
            input and writing each result once, below the theorem.
    L2-SM   bytes between the L2 cache and the multiprocessors: what leaves the on-chip memory M of one
            multiprocessor, so the honest analogue of the paper's count. The size of the tiles shows here.

The formulas have no constants (and the second one is meant for N d >= M): they hold if L2-SM over formula
hardly changes down the column. The kernels of a pass are summed. Standard attention is three kernels and
more: Q K^T, softmax and P V in the inputs' dtype. The size of the tiles is what M decides on: ours is also
counted at the largest head dim with the kernels of chips that have less shared memory.
"""

import argparse
import csv
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

import report
from attention import inputs_of
from cell import Cell
from implementations import IMPLEMENTATIONS, OURS, in_layout
from machine import machine

SECTOR_BYTES = 32
# srcunit_tex: asked for by a multiprocessor. Without it, sectors that cross between the two halves of an
# H100's L2 cache would count twice.
METRICS = {
    "dram_read": ("dram__bytes_read.sum", 1),
    "dram_write": ("dram__bytes_write.sum", 1),
    "l2_sm": ("lts__t_sectors_srcunit_tex.sum", SECTOR_BYTES),
    "l2_all": ("lts__t_bytes.sum", 1),
}
NCU_OPTIONS = ["--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all",
               "--print-units", "base", "--csv"]
SEPARATOR = "spin_kernel"  # of torch.cuda._sleep: one is launched before each pass
DIRECTIONS = ("forward", "backward")
SWEEPS = {"seqlen": "sequence length", "head_dim": "head dim",
          "shared_kib": "shared memory that a block may take, KiB"}
COMPARED = (OURS, "standard")


def sweeps(options):
    """{what varies: cells}; B * S and H * D stay, so that results are larger than the L2 cache."""
    def cell(seqlen, head_dim):
        return Cell("forward", options.dtype, seqlen, head_dim, "full", -1, max(1, options.tokens // seqlen),
                    max(1, options.hidden // head_dim))

    middle = options.seqlens[len(options.seqlens) // 2]
    return {"seqlen": [cell(seqlen, options.head_dims[0]) for seqlen in options.seqlens],
            "head_dim": [cell(middle, head_dim) for head_dim in options.head_dims]}


def run_passes(cells, implementations):
    """In the process that ncu watches: after a call that warms up, one forward and one backward of each."""
    for fields in cells:
        cell = Cell(**fields)
        for name in implementations:
            implementation = IMPLEMENTATIONS[name]
            q, k, v, dout = (in_layout(x, implementation.layout) for x in inputs_of(cell, "cuda"))
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            attend = implementation.build(cell, "cuda")
            torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            out = attend(q, k, v)
            torch.cuda._sleep(1)
            torch.autograd.grad(out, (q, k, v), dout)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def find_ncu():
    installed = sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu") + glob.glob("/usr/local/cuda/bin/ncu"))
    ncu = shutil.which("ncu") or (installed and installed[-1])
    if not ncu:
        raise SystemExit("benchmarks/io.py: ncu (Nsight Compute) is not on the PATH: nothing was counted")
    return ncu


def count(cells, implementations, environment):
    """-> [[kernel, ...] of each pass], a kernel being its name and the bytes of METRICS."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        metrics = ",".join(metric for metric, _ in METRICS.values())
        work = json.dumps({"cells": [asdict(cell) for cell in cells], "implementations": implementations})
        command = [find_ncu(), *NCU_OPTIONS, "--metrics", metrics, "--log-file", str(log),
                   sys.executable, os.path.abspath(__file__), "--worker", work]
        child = subprocess.run(command, capture_output=True, text=True,
                               env={**os.environ, "LC_ALL": "C", **environment})
        text = log.read_text() if log.exists() else ""
    passes = passes_of(text)
    if child.returncode or len(passes) != len(cells) * len(implementations) * len(DIRECTIONS):
        complaints = [line for line in (text + child.stdout).splitlines() if line.startswith("==ERROR==")]
        raise SystemExit("\n".join([
            "benchmarks/io.py: ncu is not usable here, or the program that it watched failed "
            f"(exit status {child.returncode}, {len(passes)} passes counted)",
            *complaints, *child.stderr.splitlines()[-15:]]))
    return passes


def passes_of(text):
    """ncu's CSV, one line a kernel and metric -> the kernels between separators, in order of launch."""
    kernels = {}
    # Lines of ncu itself and of the program stand around the table; "n/a" is a counter that does not exist.
    for row in csv.DictReader(line for line in text.splitlines() if line.startswith('"')):
        kernel = kernels.setdefault(int(row["ID"]), {"name": row["Kernel Name"]})
        for name, (metric, scale) in METRICS.items():
            if row["Metric Name"] == metric and row["Metric Value"] != "n/a":
                kernel[name] = float(row["Metric Value"].replace(",", "")) * scale
    passes = []
    for _, kernel in sorted(kernels.items()):
        if SEPARATOR in kernel["name"]:
            passes.append([])
        elif passes:
            passes[-1].append(kernel)
    return passes


def formula_bytes(cell, implementation, shared_bytes):
    """Theorem 2's elements, without constants, as bytes of all heads."""
    itemsize = getattr(torch, cell.dtype).itemsize
    N, d, M = cell.seqlen, cell.head_dim, shared_bytes / itemsize
    elements = N * d + N**2 if implementation == "standard" else N**2 * d**2 / M
    return cell.batch * cell.heads * elements * itemsize


def rows_of(sweep, cells, passes, implementations, shared_bytes):
    """One row a cell, direction and implementation."""
    counted = iter(passes)
    for cell in cells:
        for name in implementations:
            for direction in DIRECTIONS:
                kernels = next(counted)
                label = shared_bytes // 1024 if sweep == "shared_kib" else getattr(cell, sweep)
                row = {"sweep": sweep, "label": label, "direction": direction,
                       "implementation": name, "seqlen": cell.seqlen, "head_dim": cell.head_dim,
                       "batch": cell.batch, "heads": cell.heads, "kernels": kernels,
                       "formula": formula_bytes(cell, name, shared_bytes)}
                for metric in METRICS:
                    values = [kernel[metric] for kernel in kernels if metric in kernel]
                    row[metric] = sum(values) if len(values) == len(kernels) else None
                yield row


def dram(row):
    return None if None in (row["dram_read"], row["dram_write"]) else row["dram_read"] + row["dram_write"]


def l2_sm(row):
    return row["l2_sm"]


def table(rows):
    """Ours and standard attention side by side, a line for each cell and direction."""
    def gigabytes(value):
        return f"{value / 1e9:.3f}" if value is not None else "-"

    def ratio(above, below):
        return f"{above / below:.2f}" if above and below else "-"

    def line(direction, label, *columns):
        widths = [7, 5, *[15] * 4, *[10] * 4]
        return f"{direction:9} {label:>18}" + "".join(f"{c:>{n}}" for c, n in zip(columns, widths))

    yield f"{'':40}{'GB (10^9 bytes)':^60}{'standard / ours':^20}{'L2-SM / formula':^20}"
    yield line("", "", "S", "D", "ours DRAM", "standard DRAM", "ours L2-SM", "standard L2-SM",
               "DRAM", "L2-SM", "ours", "standard")
    cells = {}
    for row in rows:
        limit = f"M = {row['label']} KiB" if row["sweep"] == "shared_kib" else ""
        key = (row["direction"], limit, row["seqlen"], row["head_dim"])
        cells.setdefault(key, {})[row["implementation"]] = row
    missing = {"dram_read": None, "dram_write": None, "l2_sm": None, "formula": None}
    for key, pair in cells.items():
        ours, standard = (pair.get(name, missing) for name in COMPARED)
        sizes = [dram(ours), dram(standard), l2_sm(ours), l2_sm(standard)]
        yield line(*key, *map(gigabytes, sizes), ratio(sizes[1], sizes[0]), ratio(sizes[3], sizes[2]),
                   ratio(sizes[2], ours["formula"]), ratio(sizes[3], standard["formula"]))


def draw(results, figure):
    """A row of plots for each of SWEEPS, with the formulas."""
    figure.set_size_inches(12, 12)
    for line, sweep in zip(figure.subplots(3, len(DIRECTIONS)), SWEEPS):
        for ax, direction in zip(line, DIRECTIONS):
            for name, color in zip(COMPARED, ("C0", "C1")):
                rows = [row for row in results["rows"] if row["sweep"] == sweep
                        and row["direction"] == direction and row["implementation"] == name]
                # Labels, not numbers: lengths double.
                labels, short = [str(row["label"]) for row in rows], "ours" if name == OURS else name
                for size, style, what in ((l2_sm, "o-", "L2-SM"), (dram, "s--", "DRAM")):
                    points = [(x, size(row) / 1e9) for x, row in zip(labels, rows) if size(row)]
                    if points:
                        ax.plot(*zip(*points), style, color=color, label=f"{short}, {what}")
                if rows:
                    formula = "N d + N²" if name == "standard" else "N² d² / M"
                    ax.plot(labels, [row["formula"] / 1e9 for row in rows], ":", color=color, label=formula)
            ax.set(title=direction, xlabel=SWEEPS[sweep], ylabel="GB", yscale="log")
            ax.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    options = results["options"]
    figure.suptitle(f"bytes moved, {results['machine']['processor']}, {options['dtype']}, "
                    f"{options['tokens']} tokens of {options['hidden']} values")


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256],
                        help="the first one for all lengths, the others at the middle length")
    parser.add_argument("--tokens", type=int, default=16384, help="B * S, at least one sequence")
    parser.add_argument("--hidden", type=int, default=1024, help="H * D")
    parser.add_argument("--shared-kib", nargs="*", type=int, default=[99, 163, 227],
                        help="ours again at the middle length and last head dim, with so much shared memory")
    report.add_output_options(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    if options.worker:
        run_passes(**json.loads(options.worker))
        return
    if report.drawn_earlier_run(options, draw):
        return
    find_ncu()
    where = machine("cuda")
    shared_bytes, planned = where["gpu"]["shared_bytes_per_multiprocessor"], sweeps(options)
    print(f"{where['processor']}, torch {where['torch']}, flash_attn {where['flash_attn']}; {options.dtype}, "
          f"{options.tokens} tokens of {options.hidden} values, M = {shared_bytes} bytes", flush=True)
    every = [cell for cells in planned.values() for cell in cells]
    passes, rows = count(every, COMPARED, {}), []
    for sweep, cells in planned.items():
        size = len(cells) * len(COMPARED) * len(DIRECTIONS)
        rows += rows_of(sweep, cells, passes[:size], COMPARED, shared_bytes)
        passes = passes[size:]
    largest = planned["head_dim"][-1:]
    for limit in (1024 * kib for kib in options.shared_kib):
        counted = count(largest, (OURS,), {"FLASH_ATTN_SHARED_BYTES": str(limit)})
        rows += rows_of("shared_kib", largest, counted, (OURS,), limit)
    rows.sort(key=lambda row: DIRECTIONS.index(row["direction"]))
    print(*table(rows), sep="\n")
    asked = {name: value for name, value in vars(options).items() if name not in ("json", "plot", "worker")}
    report.write({"machine": where, "metrics": METRICS, "options": asked, "rows": rows}, options, draw)


if __name__ == "__main__":
    main()
