"""Time and error of attention, forward and backward, against the machine's other implementations.

    python benchmarks/attention.py                          # the whole table, a few minutes
    python benchmarks/attention.py --dtypes bfloat16 --seqlens 2048 --passes forward --window 256
    python benchmarks/attention.py --json benchmarks/results/cpu/attention.json

What is compared: one process, the same threads, the same values. Each implementation gets them contiguous
in its own layout. The implementations take turns within each round, in rotating order, so that a change
of clock or load meets all of them; the table shows the chosen statistic over rounds, the JSON every sample.
Forward runs under no_grad. Backward is torch.autograd.grad of a retained graph: dq, dk and dv, nothing else.

FLOPs count two GEMMs for the forward and five for the backward, 4 * B * H * S * S * D and 2.5 times that,
halved for causal masks (the convention of the FlashAttention papers) and exact for windows; what an
implementation recomputes or wastes behind a mask is not counted. Errors are the largest absolute difference
from a float64 evaluation of the same (rounded) inputs on random rows of a random head, first and last rows
included: of out for the forward, of dq, dk and dv for the backward.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import flash_attn

OURS = "flash_attn"
STATISTICS = {"median": statistics.median, "min": min}
# A sample repeats its call until it takes this long, so that the clock and the first touch do not count.
SAMPLE_SECONDS = 0.05
# Forward FLOPs of a cell that is not causal: heads are left out until long sequences fit in about a second.
CELL_FLOPS = 140e9


@dataclass(frozen=True)
class Cell:
    direction: str  # "forward" or "backward"
    dtype: str
    seqlen: int
    head_dim: int
    mask: str  # "full", "causal" or "window"
    left: int  # keys before its own that a query sees, for "window"
    batch: int
    heads: int

    @property
    def scores(self):
        """Visible (query, key) pairs of one head."""
        if self.mask == "window":
            return sum(min(i, self.left) + 1 for i in range(self.seqlen))
        return self.seqlen**2 / (2 if self.mask == "causal" else 1)

    @property
    def flops(self):
        forward = 4 * self.batch * self.heads * self.scores * self.head_dim
        return forward * (2.5 if self.direction == "backward" else 1)

    @property
    def label(self):
        mask = f"window {self.left}" if self.mask == "window" else self.mask
        return (f"{self.direction:8} {self.dtype:8} S={self.seqlen:<5} D={self.head_dim:<3} {mask:10} "
                f"B={self.batch:<2} H={self.heads:<2}")

    def visible(self, queries, device):
        """Positions [n] -> bool [n, seqlen]: which keys each query sees."""
        distance = queries.to(device)[:, None] - torch.arange(self.seqlen, device=device)
        if self.mask == "full":
            return torch.ones_like(distance, dtype=torch.bool)
        nearest = distance >= 0
        return nearest & (distance <= self.left) if self.mask == "window" else nearest


@dataclass(frozen=True)
class Implementation:
    """Everything to compare registers here: `build` returns attend(q, k, v) -> out for a cell and device."""

    layout: str  # "bshd" or "bhsd": the axes of q, k, v and out
    build: Callable
    devices: tuple


def _flash_attn(cell, device):
    window_size = (cell.left, 0) if cell.mask == "window" else (-1, -1)
    causal = cell.mask != "full"
    return lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=causal, window_size=window_size)


def _sdpa(cell, device):
    mask = cell.visible(torch.arange(cell.seqlen), device) if cell.mask == "window" else None
    causal = cell.mask == "causal"
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


IMPLEMENTATIONS = {
    OURS: Implementation("bshd", _flash_attn, ("cpu", "cuda")),
    "sdpa": Implementation("bhsd", _sdpa, ("cpu", "cuda")),
}


def in_layout(tensor, layout):
    """[B, S, H, D], or [B, H, S, D] where the layout says so (its own inverse), contiguous."""
    return tensor.transpose(1, 2).contiguous() if layout == "bhsd" else tensor.contiguous()


def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_per_call(call, repeats, device):
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    wait_for(device)
    return (time.perf_counter() - begin) / repeats


def inputs_of(cell, device):
    """q, k, v, dout [B, S, H, D]: the same values for every implementation and pass of a shape."""
    generator = torch.Generator().manual_seed(cell.seqlen * 1000 + cell.head_dim)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    dtype = getattr(torch, cell.dtype)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]


def prepared_call(cell, implementation, inputs, device):
    """The call to time, and what it last returned, each tensor [B, S, H, D] by name."""
    q, k, v, dout = (in_layout(x, implementation.layout) for x in inputs)
    attend = implementation.build(cell, device)
    if cell.direction == "forward":
        names = ["out"]

        def call():
            with torch.no_grad():
                return (attend(q, k, v),)
    else:
        names = ["dq", "dk", "dv"]
        for x in (q, k, v):
            x.requires_grad_()
        out = attend(q, k, v)

        def call():
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return call, lambda: {n: in_layout(x, implementation.layout) for n, x in zip(names, call())}


def probabilities(q, k, queries, cell):
    """Softmax of the visible scores of some queries: q, k float64 [S, D], queries [n] -> [n, S]."""
    scores = q[queries] @ k.T / math.sqrt(cell.head_dim)
    return scores.masked_fill_(~cell.visible(queries, q.device), -math.inf).softmax(dim=-1)


def reference_rows(q, k, v, dout, rows, cell):
    """float64 [S, D] of one head, rows [n] -> the rows [n, D] of what the cell computes.

    A row of dk needs every query's softmax, so queries go by in chunks of bounded memory.
    """
    if cell.direction == "forward":
        return {"out": probabilities(q, k, rows, cell) @ v}

    def score_gradient(queries):
        p = probabilities(q, k, queries, cell)
        dp = dout[queries] @ v.T
        return p, p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(cell.head_dim)

    gradients = {"dq": score_gradient(rows)[1] @ k, "dk": 0, "dv": 0}
    for queries in torch.arange(cell.seqlen, device=q.device).split(max(1, 2**22 // cell.seqlen)):
        p, ds = score_gradient(queries)
        gradients["dk"] += ds[:, rows].T @ q[queries]
        gradients["dv"] += p[:, rows].T @ dout[queries]
    return gradients


def errors(cell, inputs, results, count=64):
    """{implementation: {tensor: largest absolute error}} on `count` rows of one head, chosen at random."""
    generator = torch.Generator().manual_seed(cell.seqlen)
    b = int(torch.randint(cell.batch, (1,), generator=generator))
    h = int(torch.randint(cell.heads, (1,), generator=generator))
    rows = torch.randperm(cell.seqlen, generator=generator)[:count]
    rows[0], rows[-1] = 0, cell.seqlen - 1
    rows = rows.to(inputs[0].device)
    reference = reference_rows(*(x[b, :, h].double() for x in inputs), rows, cell)
    return {
        implementation: {
            name: (tensors[name][b, rows, h].double() - exact).abs().max().item()
            for name, exact in reference.items()
        }
        for implementation, tensors in results.items()
    }


def measure(cell, rounds, statistic, device):
    """{implementation: {"seconds": every sample, "ms", "gflops", "errors"} or {"refused": why}}"""
    inputs = inputs_of(cell, device)
    measured, calls, results = {}, {}, {}
    for name, implementation in IMPLEMENTATIONS.items():
        if device not in implementation.devices:
            continue
        try:
            calls[name], result = prepared_call(cell, implementation, inputs, device)
            results[name] = result()
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as refusal:
            calls.pop(name, None)
            measured[name] = {"refused": f"{type(refusal).__name__}: {refusal}"}
    repeats = {}
    for name, call in calls.items():
        repeats[name] = max(1, math.ceil(SAMPLE_SECONDS / seconds_per_call(call, 1, device)))
    samples = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls)
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            samples[name].append(seconds_per_call(calls[name], repeats[name], device))
    worst = errors(cell, inputs, results) if results else {}
    for name, taken in samples.items():
        seconds = statistic(taken)
        measured[name] = {"seconds": taken, "ms": seconds * 1e3, "gflops": cell.flops / seconds / 1e9,
                          "errors": worst[name]}
    return measured


def cells(options):
    """The table's cells. Shapes keep B * S and H * D near what was asked, except where that takes minutes."""
    masks = [("causal" if causal else "full", -1) for causal in options.causal]
    masks += [("window", left) for left in options.window]
    for dtype, direction, seqlen, head_dim, (mask, left) in itertools.product(
        options.dtypes, options.passes, options.seqlens, options.head_dims, masks
    ):
        batch = max(1, options.tokens // seqlen)
        affordable = int(CELL_FLOPS / (4 * batch * seqlen**2 * head_dim))
        heads = max(1, min(options.hidden // head_dim, affordable))
        yield Cell(direction, dtype, seqlen, head_dim, mask, left, batch, heads)


def gemm_gflops(dtype, device, size=2048):
    """Best rate of torch.mm on [size, size]: what attention's GEMMs can hope for."""
    a, b = (torch.randn(size, size).to(device, getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / min(seconds_per_call(lambda: torch.mm(a, b), 1, device) for _ in range(8)) / 1e9


def processor(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def machine(device):
    """What a number depends on besides the code."""
    build_info = getattr(flash_attn, "build_info", None)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(device),
        "threads": torch.get_num_threads(),
        # Neighbours' load slows the implementations unequally: a table from a busy machine is not evidence.
        "load_average": os.getloadavg()[0],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_config": torch.__config__.show(),
        "flash_attn": getattr(flash_attn, "__version__", "unknown"),
        "build_info": build_info() if build_info else None,
    }


def geometric_means(rows):
    """[(which cells, peer, count, geometric mean of peer's time / ours)]"""
    groups = {}
    for cell, measured in rows:
        for name, result in measured.items():
            if name != OURS and "ms" in result and "ms" in measured.get(OURS, {}):
                ratio = result["ms"] / measured[OURS]["ms"]
                window = " window" if cell.mask == "window" else ""
                for group in (f"{cell.direction} {cell.dtype}{window}", f"all{window}"):
                    groups.setdefault((group, name), []).append(ratio)
    return [(group, name, len(ratios), statistics.geometric_mean(ratios))
            for (group, name), ratios in sorted(groups.items())]


def table_header(names):
    def heading(quantity, columns, width):
        named = [f"{'ours' if n == OURS else n:>{width}}" for n in columns]
        return named, f"{quantity:^{width * len(columns)}}"

    peers = [n for n in names if n != OURS]
    groups = [heading("ms", names, 10), heading("/ours", peers, 8), heading("GFLOP/s", names, 8),
              heading("error", names, 9)]
    above = " |".join(quantity for _, quantity in groups)
    return f"{'':55}{above}\n{'cell':55}" + " |".join("".join(columns) for columns, _ in groups)


def table_row(cell, measured, names):
    def shown(width, text, *needed):
        return f"{text() if all('ms' in measured[n] for n in needed) else '-':>{width}}"

    groups = [
        [shown(10, lambda n=n: f"{measured[n]['ms']:.2f}", n) for n in names],
        [shown(8, lambda n=n: f"{measured[n]['ms'] / measured[OURS]['ms']:.2f}", n, OURS)
         for n in names if n != OURS],
        [shown(8, lambda n=n: f"{measured[n]['gflops']:.0f}", n) for n in names],
        [shown(9, lambda n=n: f"{max(measured[n]['errors'].values()):.1e}", n) for n in names],
    ]
    refusals = [f"\n  {n} refused: {r['refused']}" for n, r in measured.items() if "refused" in r]
    return f"{cell.label:55}" + " |".join("".join(columns) for columns in groups) + "".join(refusals)


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--causal", nargs="+", type=int, choices=[0, 1], default=[0, 1], help="0: full")
    passes = ["forward", "backward"]
    parser.add_argument("--passes", nargs="+", choices=passes, default=passes)
    parser.add_argument("--window", nargs="+", type=int, default=[], metavar="LEFT",
                        help="more cells: a query sees its own key and LEFT before; SDPA gets a boolean mask")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--statistic", default="median", choices=STATISTICS, help="over rounds")
    parser.add_argument("--tokens", type=int, default=4096, help="B * S, at least one sequence")
    parser.add_argument("--hidden", type=int, default=1024, help="H * D")
    parser.add_argument("--threads", type=int, help="default: as torch chooses")
    parser.add_argument("--json", type=Path, help="write every sample, with versions, here")
    return parser.parse_args(arguments)


def print_heading(where, options, names):
    print(f"{where['processor']}, {where['threads']} threads ({where['cpu_capability']}), "
          f"load before {where['load_average']:.1f}, torch {where['torch']}, "
          f"flash_attn {where['flash_attn']}")
    rates = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in where["gemm_gflops"].items())
    print(f"torch.mm 2048 GFLOP/s: {rates}")
    print(f"ms: {options.statistic} of {options.rounds} rounds, implementations interleaved; "
          "/ours: peer's ms over ours, above 1 where ours is faster\n")
    print(table_header(names))


def main(arguments=None):
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = options.device
    names = [name for name, implementation in IMPLEMENTATIONS.items() if device in implementation.devices]
    where = machine(device)
    where["gemm_gflops"] = {dtype: gemm_gflops(dtype, device) for dtype in options.dtypes}
    print_heading(where, options, names)
    rows = []
    for cell in cells(options):
        rows.append((cell, measure(cell, options.rounds, STATISTICS[options.statistic], device)))
        print(table_row(*rows[-1], names), flush=True)
    means = geometric_means(rows)
    print("\ngeometric means of peer's time over ours")
    for group, name, count, mean in means:
        print(f"  {group:28} {name:10} {mean:.2f}  ({count} cells)")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({
            "machine": where,
            "statistic": options.statistic,
            "cells": [{**asdict(cell), "flops": cell.flops, "results": measured} for cell, measured in rows],
            "geometric_means": [dict(zip(("cells", "peer", "count", "ratio"), mean)) for mean in means],
        }, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
