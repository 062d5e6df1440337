"""Peak memory of attention on the CPU against sequence length, beyond what any implementation must hold.

    python benchmarks/memory.py
    python benchmarks/memory.py --json results.json --plot memory.png

Every cell runs in a fresh process: a call on a short sequence loads the code, then the inputs are made, the
kernel's peak counter (VmHWM) is reset, and one call runs. What the table shows is

    peak resident bytes - resident bytes before the call - bytes of out (- bytes of dq, dk, dv)

so q, k, v and dout count for nobody, and zero is an implementation that needs only its results. Where Linux
refuses the reset, the peak is the process's (ru_maxrss), which importing torch may have set: the cell then
says so. Small pieces of memory that were free before the call are reused unseen, so a few hundred KB less
than the truth are possible.
"""

import argparse
import ctypes
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import flash_attn
from attention import in_layout, machine

# What is alive at once in units of a [B, H, S, S] matrix: scores and probabilities; and for the gradient
# probabilities, their gradient and that of the scores.
STANDARD_MATRICES = {"forward": 2, "forward+backward": 3}
WARM_UP_SEQLEN = 256


def _flash_attn(q, k, v, causal):
    return flash_attn.flash_attn_func(q, k, v, causal=causal)


def _sdpa(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _standard(q, k, v, causal):
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(dim=-1) @ v


IMPLEMENTATIONS = {
    "flash_attn": ("bshd", _flash_attn),
    "sdpa": ("bhsd", _sdpa),
    "standard": ("bhsd", _standard),
}


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


def tensors_of(seqlen, layout, options):
    """q, k, v, dout in the implementation's layout, contiguous."""
    shape = (options.batch, seqlen, options.heads, options.head_dim)
    dtype = getattr(torch, options.dtype)
    return [in_layout(torch.randn(shape).to(dtype), layout) for _ in range(4)]


def run_once(attend, tensors, options):
    """The results, kept alive together as a training step keeps them."""
    q, k, v, dout = tensors
    if options.direction == "forward":
        with torch.no_grad():
            return [attend(q, k, v, options.causal)]
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(q, k, v, options.causal)
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


def measure_here(options):
    """One cell, in the process that exists for it alone."""
    layout, attend = IMPLEMENTATIONS[options.implementation]
    run_once(attend, tensors_of(WARM_UP_SEQLEN, layout, options), options)
    tensors = tensors_of(options.seqlen, layout, options)
    return_free_memory()
    was_reset = reset_peak()
    before = resident("VmRSS")
    results = run_once(attend, tensors, options)
    peak = resident("VmHWM") if was_reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    needed = sum(x.numel() * x.element_size() for x in results)
    return {"bytes": peak - before - needed, "results": needed, "before": before, "peak": peak,
            "source": "VmHWM" if was_reset else "ru_maxrss"}


def measure(implementation, direction, seqlen, options):
    """One cell in a fresh process; {"left_out": why} for what would not fit or failed."""
    matrix = options.batch * options.heads * seqlen**2 * getattr(torch, options.dtype).itemsize
    needs = STANDARD_MATRICES[direction] * matrix
    if implementation == "standard" and needs > options.limit_gb * 1e9:
        return {"left_out": f"needs about {needs / 1e9:.1f} GB"}
    command = [sys.executable, os.path.abspath(__file__), "--implementation", implementation,
               "--direction", direction, "--seqlen", str(seqlen), "--dtype", options.dtype,
               "--batch", str(options.batch), "--heads", str(options.heads),
               "--head-dim", str(options.head_dim), *["--causal"] * options.causal]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        return {"left_out": f"failed: {last}"}
    return json.loads(child.stdout.strip().splitlines()[-1])


def shown(result):
    return f"{result['bytes'] / 2**20:.1f}" if "bytes" in result else "-"


def plot(rows, options):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(STANDARD_MATRICES), figsize=(10, 4), sharey=True, squeeze=False)
    for ax, direction in zip(axes[0], STANDARD_MATRICES):
        for implementation in IMPLEMENTATIONS:
            points = [(row["seqlen"], row["results"][implementation]["bytes"]) for row in rows
                      if row["direction"] == direction and "bytes" in row["results"][implementation]]
            # A logarithm has no room for zero: everything below 64 KB lies on the lowest line.
            seqlens, bytes = zip(*points) if points else ((), ())
            ax.plot(seqlens, [max(b, 2**16) / 2**20 for b in bytes], "o-", label=implementation)
        ax.set(title=direction, xlabel="sequence length", xscale="log", yscale="log",
               xticks=options.seqlens, xticklabels=options.seqlens)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("peak memory beyond inputs and results, MB")
    axes[0][0].legend()
    figure.suptitle(f"{options.dtype}, batch {options.batch}, {options.heads} heads of {options.head_dim}, "
                    f"{'causal' if options.causal else 'full'}, CPU")
    figure.tight_layout()
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.plot, dpi=150)


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--seqlens", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--limit-gb", type=float, default=8, help="standard attention is left out above")
    parser.add_argument("--json", type=Path, help="write the results, with versions, here")
    parser.add_argument("--plot", type=Path, help="write a PNG here")
    one_cell = parser.add_argument_group("one cell, in this process", "what the table starts for each cell")
    one_cell.add_argument("--implementation", choices=IMPLEMENTATIONS)
    one_cell.add_argument("--direction", choices=STANDARD_MATRICES)
    one_cell.add_argument("--seqlen", type=int)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    if options.implementation:
        print(json.dumps(measure_here(options)))
        return
    where = machine("cpu")
    print(f"{where['processor']}, {where['threads']} threads, torch {where['torch']}, "
          f"flash_attn {where['flash_attn']}; {options.dtype}, B={options.batch} H={options.heads} "
          f"D={options.head_dim} {'causal' if options.causal else 'full'}")
    print("peak MB (2**20 bytes) beyond inputs, out and gradients\n")
    print(f"{'':16}  {'S':>6}" + "".join(f"{name:>12}" for name in IMPLEMENTATIONS))
    rows = []
    for direction in STANDARD_MATRICES:
        for seqlen in options.seqlens:
            results = {name: measure(name, direction, seqlen, options) for name in IMPLEMENTATIONS}
            rows.append({"direction": direction, "seqlen": seqlen, "results": results})
            columns = "".join(f"{shown(result):>12}" for result in results.values())
            print(f"{direction:16}  {seqlen:6}{columns}", flush=True)
            for name, result in results.items():
                if "left_out" in result:
                    print(f"  {name}: {result['left_out']}")
                elif result["source"] != "VmHWM":
                    print(f"  {name}: peak of the whole process")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        shape = {name: getattr(options, name) for name in ("dtype", "batch", "heads", "head_dim", "causal")}
        report = {"machine": where, "shape": shape, "cells": rows}
        options.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    if options.plot:
        plot(rows, options)


if __name__ == "__main__":
    main()
