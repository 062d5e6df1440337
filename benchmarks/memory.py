"""Peak memory of attention against sequence length.

    python benchmarks/memory.py
    python benchmarks/memory.py --json results.json --plot memory.png
    python benchmarks/memory.py --device cuda --json results.json      # and later, anywhere:
    python benchmarks/memory.py --plot results.json

On the CPU every cell runs in a fresh process: a call on a short sequence loads the code, then the inputs are
made, the kernel's peak counter (VmHWM) is reset, and one call runs. What the table shows is

    peak resident bytes - resident bytes before the call - bytes of out (- bytes of dq, dk, dv)

so q, k, v and dout count for nobody, and zero is an implementation that needs only its results. Where Linux
refuses the reset, the peak is the process's (ru_maxrss), which importing torch may have set: the cell then
says so. Small pieces of memory that were free before the call are reused unseen, so a few hundred KB less
than the truth are possible.

On a GPU the peak is that of torch's allocator (torch.cuda.max_memory_allocated), exact, in one process. The
table shows it beside the sum with inputs and results, which is what the FlashAttention paper compares.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

import report
from cell import Cell
from implementations import IMPLEMENTATIONS, OURS, in_layout
from machine import machine

COMPARED = {"cpu": (OURS, "sdpa", "standard"), "cuda": (OURS, "fa2", "standard")}
DEFAULTS = {
    "cpu": dict(seqlens=[2048, 4096, 8192, 16384], dtype="float32", heads=4, limit_gb=8.0),
    "cuda": dict(seqlens=[512, 1024, 2048, 4096, 8192, 16384, 32768, 65536], dtype="bfloat16", heads=16),
}
# What is alive at once in units of a [B, H, S, S] matrix: scores and probabilities; and for the gradient
# probabilities, their gradient and that of the scores.
STANDARD_MATRICES = {"forward": 2, "forward+backward": 3}
WARM_UP_SEQLEN = 256
# What the plot shows of a result, and its name.
PLOTTED = {"cpu": (lambda r: r["bytes"], "peak memory beyond inputs and results, MB"),
           "cuda": (lambda r: r["bytes"] + r["results"] + r["inputs"],
                    "peak memory with inputs and results, MB")}


def resident(field):
    """VmRSS (now) or VmHWM (peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def reset_peak():
    """Sets VmHWM to the present; False where that is forbidden."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def return_free_memory():
    """Gives what malloc keeps of freed tensors back to Linux: reused, it would make the call look cheaper."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def bytes_of(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


def tensors_of(seqlen, layout, options):
    """q, k, v, and for a gradient dout, in the implementation's layout, contiguous."""
    shape = (options.batch, seqlen, options.heads, options.head_dim)
    dtype, count = getattr(torch, options.dtype), 3 if options.direction == "forward" else 4
    return [in_layout(torch.randn(shape, device=options.device).to(dtype), layout) for _ in range(count)]


def run_once(attend, tensors, options):
    """The results, kept alive together as a training step keeps them."""
    q, k, v, *dout = tensors
    if options.direction == "forward":
        with torch.no_grad():
            return [attend(q, k, v)]
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), *dout)]


def measure_here(options):
    """One cell. On the CPU the process exists for it alone."""
    implementation = IMPLEMENTATIONS[options.implementation]
    cell = Cell("forward", options.dtype, options.seqlen, options.head_dim,
                "causal" if options.causal else "full", -1, options.batch, options.heads)
    attend = implementation.build(cell, options.device)
    run_once(attend, tensors_of(WARM_UP_SEQLEN, implementation.layout, options), options)
    tensors = tensors_of(options.seqlen, implementation.layout, options)
    if options.device == "cuda":
        source = "max_memory_allocated"
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run_once(attend, tensors, options)
        peak = torch.cuda.max_memory_allocated()
    else:
        return_free_memory()
        source = "VmHWM" if reset_peak() else "ru_maxrss"
        before = resident("VmRSS")
        results = run_once(attend, tensors, options)
        peak = (resident("VmHWM") if source == "VmHWM"
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    needed = bytes_of(results)
    return {"bytes": peak - before - needed, "results": needed, "inputs": bytes_of(tensors), "before": before,
            "peak": peak, "source": source}


def measure(implementation, direction, seqlen, options):
    """One cell; {"left_out": why} for what would not fit or failed."""
    matrix = options.batch * options.heads * seqlen**2 * getattr(torch, options.dtype).itemsize
    needs = STANDARD_MATRICES[direction] * matrix
    if implementation == "standard" and needs > options.limit_gb * 1e9:
        return {"left_out": f"needs about {needs / 1e9:.1f} GB"}
    if options.device == "cuda":
        one = argparse.Namespace(**{**vars(options), "implementation": implementation,
                                    "direction": direction, "seqlen": seqlen})
        try:
            return measure_here(one)
        except (NotImplementedError, RuntimeError) as error:
            failure = str(error).splitlines()[0]
        torch.cuda.empty_cache()
        return {"left_out": f"failed: {failure}"}
    command = [sys.executable, os.path.abspath(__file__), "--implementation", implementation,
               "--direction", direction, "--seqlen", str(seqlen), "--dtype", options.dtype,
               "--batch", str(options.batch), "--heads", str(options.heads),
               "--head-dim", str(options.head_dim), *["--causal"] * options.causal]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        return {"left_out": f"failed: {last}"}
    return json.loads(child.stdout.strip().splitlines()[-1])


def shown(value):
    return "-" if value is None else f"{value:.1f}"


def table_row(results, device):
    """MB beyond inputs and results; on a GPU also MB in all, and by how much ours is smaller there."""
    beyond = [result["bytes"] / 2**20 if "bytes" in result else None for result in results.values()]
    columns = "".join(f"{shown(value):>12}" for value in beyond)
    if device == "cuda":
        whole = {name: PLOTTED[device][0](result) / 2**20 for name, result in results.items()
                 if "bytes" in result}
        columns = "".join(f"{shown(whole.get(name)):>12}" for name in results) + f" |{columns} |"
        for name in COMPARED[device][1:]:
            smaller = whole[name] / whole[OURS] if {name, OURS} <= whole.keys() else None
            columns += f"{shown(smaller):>12}"
    return columns


def table_header(device):
    names = "".join(f"{name:>12}" for name in COMPARED[device])
    header = f"{'':16}  {'S':>6}{names}"
    if device == "cuda":
        ratios = "".join(f"{name:>12}" for name in COMPARED[device][1:])
        header = (f"{'':24}{'with inputs and results':^36} |{'beyond them':^36} |{'in all, / ours':^24}\n"
                  f"{header} |{names} |{ratios}")
    return header


def draw(results, figure):
    shape, device = results["shape"], results["device"]
    size, label = PLOTTED[device]
    figure.set_size_inches(10, 4)
    axes = figure.subplots(1, len(STANDARD_MATRICES), sharey=True)
    for ax, direction in zip(axes, STANDARD_MATRICES):
        rows = [row for row in results["cells"] if row["direction"] == direction]
        for name in COMPARED[device]:
            points = [(row["seqlen"], size(row["results"][name])) for row in rows
                      if "bytes" in row["results"][name]]
            # A logarithm has no room for zero: everything below 64 KB lies on the lowest line.
            seqlens, sizes = zip(*points) if points else ((), ())
            ax.plot(seqlens, [max(b, 2**16) / 2**20 for b in sizes], "o-", label=name)
        seqlens = [row["seqlen"] for row in rows]
        ax.set(title=direction, xlabel="sequence length", xscale="log", yscale="log",
               xticks=seqlens, xticklabels=seqlens)
        ax.tick_params(axis="x", labelrotation=45)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel(label)
    axes[0].legend()
    processor = "CPU" if device == "cpu" else results["machine"]["processor"]
    mask = "causal" if shape["causal"] else "full"
    figure.suptitle(f"{shape['dtype']}, batch {shape['batch']}, {shape['heads']} heads of "
                    f"{shape['head_dim']}, {mask}, {processor}")


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seqlens", nargs="+", type=int)
    parser.add_argument("--dtype", help="default: float32, on a GPU bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--limit-gb", type=float,
                        help="standard attention is left out above; default: 8, on a GPU its memory")
    report.add_output_options(parser)
    one_cell = parser.add_argument_group("one cell, in this process", "what the table starts for each cell")
    one_cell.add_argument("--implementation", choices=IMPLEMENTATIONS)
    one_cell.add_argument("--direction", choices=STANDARD_MATRICES)
    one_cell.add_argument("--seqlen", type=int)
    return report.fill_in(parser.parse_args(arguments), DEFAULTS)


def main(arguments=None):
    options = parse(arguments)
    if report.drawn_earlier_run(options, draw):
        return
    if options.implementation:
        print(json.dumps(measure_here(options)))
        return
    device, where = options.device, machine(options.device)
    if options.limit_gb is None:
        options.limit_gb = where["gpu"]["memory_bytes"] / 1e9
    print(f"{where['processor']}, {where['threads']} threads, torch {where['torch']}, "
          f"flash_attn {where['flash_attn']}; {options.dtype}, B={options.batch} H={options.heads} "
          f"D={options.head_dim} {'causal' if options.causal else 'full'}")
    print("peak MB (2**20 bytes)" + " beyond inputs, out and gradients" * (device == "cpu"), end="\n\n")
    print(table_header(device))
    rows = []
    for direction in STANDARD_MATRICES:
        for seqlen in options.seqlens:
            results = {name: measure(name, direction, seqlen, options) for name in COMPARED[device]}
            rows.append({"direction": direction, "seqlen": seqlen, "results": results})
            print(f"{direction:16}  {seqlen:6}{table_row(results, device)}", flush=True)
            for name, result in results.items():
                if "left_out" in result:
                    print(f"  {name}: {result['left_out']}")
                elif result["source"] == "ru_maxrss":
                    print(f"  {name}: peak of the whole process")
    shape = {name: getattr(options, name) for name in ("dtype", "batch", "heads", "head_dim", "causal")}
    report.write({"machine": where, "device": device, "shape": shape, "cells": rows}, options, draw)


if __name__ == "__main__":
    main()
