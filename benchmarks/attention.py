"""Time and error of attention, forward and backward, against the machine's other implementations.

    python benchmarks/attention.py                          # the whole table on the CPU, a few minutes
    python benchmarks/attention.py --dtypes bfloat16 --seqlens 2048 --passes forward --window 256
    python benchmarks/attention.py --json benchmarks/results/cpu/attention.json
    python benchmarks/attention.py --device cuda --grid targets --deterministic --json results.json
    python benchmarks/attention.py --group 4                # 4 heads of q for each head of k and v
    python benchmarks/attention.py --head-dims 192 --value-dim 128     # DeepSeek's: values have their own

What is compared: one process, the same threads, the same values. Each implementation gets them contiguous
in its own layout (implementations.py says which). The implementations take turns within each round, in
rotating order, so that a change of clock or load meets all of them; the table shows the chosen statistic
over rounds, the JSON every sample. Forward runs under no_grad. Backward is torch.autograd.grad of a retained
graph: dq, dk and dv, nothing else.

On a GPU the time is the device's own (machine.py), inputs that its L2 cache could hold are taken in turn from
several sets, and --idle-ms (100) before each sample says which clock is met: a burst's, or with 0 that of a
card at work for minutes, lower by a few per cent. Compare within one run.

FLOPs count two GEMMs for the forward and five for the backward, 4 * B * H * S * S * D and 2.5 times that,
halved for causal masks (the convention of the FlashAttention papers) and exact for windows; with --value-dim
Dv, one GEMM of the forward and two of the backward are Dv wide: 2 * B * H * S * S times D + Dv and 3 * D +
2 * Dv. What an implementation recomputes, pads or wastes behind a mask is not counted. Errors are the largest
absolute difference from a float64 evaluation of the same (rounded) inputs on random rows of a random head,
first and last rows included: of out for the forward, of dq, dk and dv for the backward; with --group, of the
head of k and v that this head reads.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch

from cell import Cell, whole_groups
from implementations import DETERMINISTIC, IMPLEMENTATIONS, OURS, in_layout
from machine import GEMM_SIZE, gemm_gflops, gpu_state, machine, seconds_per_call

BEST = "best"  # of the peers: a column of the table
PEERS = {"cpu": ["sdpa"], "cuda": ["fa2", "cudnn", "fa3"]}
STATISTICS = {"median": statistics.median, "min": min}
GRIDS = {
    "small": dict(dtypes=["float32", "bfloat16"], seqlens=[512, 2048, 8192], head_dims=[64, 128],
                  tokens=4096, hidden=1024),
    "targets": dict(dtypes=["bfloat16"], seqlens=[512, 1024, 4096, 16384], head_dims=[64, 128, 256],
                   tokens=16384, hidden=2048),
}
DEFAULTS = {"cpu": dict(grid="small", idle_ms=0), "cuda": dict(grid="targets", idle_ms=100)}
# A sample repeats its call until it takes this long, so that the clock and the first touch do not count; on a
# GPU no more often than its queue takes.
SAMPLE_SECONDS = {"cpu": 0.05, "cuda": 0.01}
MOST_REPEATS = {"cpu": math.inf, "cuda": 64}
# Forward FLOPs of a cell that is not causal: heads are left out until long sequences fit in about a second.
CELL_FLOPS = {"cpu": 140e9, "cuda": math.inf}
LABEL_WIDTH = 55  # of the table's first column, at least
RATE = {"cpu": ("GFLOP/s", 1), "cuda": ("TFLOP/s", 1e-3)}


def inputs_of(cell, device, number=0):
    """q, k, v, dout [B, S, H, D], k and v with their own S and H, v and dout with their own D: the same values
    for every implementation and pass of a shape."""
    generator = torch.Generator(device).manual_seed(cell.seqlen * 1000 + cell.head_dim + number * 10**9)
    dtype, options = getattr(torch, cell.dtype), {"generator": generator, "device": device}
    shapes = ((cell.seqlen, cell.heads, cell.head_dim), (cell.seqlen_k, cell.key_heads, cell.head_dim),
              (cell.seqlen_k, cell.key_heads, cell.out_dim), (cell.seqlen, cell.heads, cell.out_dim))
    return [torch.randn(cell.batch, *shape, **options).to(dtype) for shape in shapes]


def input_sets(cell, device, draw=inputs_of):
    """As many inputs, drawn by draw(cell, device, number), as fill a GPU's L2 cache twice over, at most 8; a
    CPU's calls are long enough."""
    cache = torch.cuda.get_device_properties().L2_cache_size if device == "cuda" else 0
    count = 1 + min(7, 2 * cache // cell.input_bytes)
    return [draw(cell, device, number) for number in range(count)]


def prepared_call(cell, implementation, inputs, device):
    """The call to time: it returns out, or dq, dk and dv."""
    q, k, v, dout = (in_layout(x, implementation.layout) for x in inputs)
    attend = implementation.build(cell, device)
    if cell.direction == "forward":

        def call():
            with torch.no_grad():
                return (attend(q, k, v),)
    else:
        # On a GPU inputs are shared by the implementations: a leaf of its own for each.
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attend(q, k, v)

        def call():
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return call


def result_of(cell, implementation, call):
    """What the call returns, each tensor [B, S, H, D] by name; D is v's own for out and dv."""
    names = ["out"] if cell.direction == "forward" else ["dq", "dk", "dv"]
    return {name: in_layout(x, implementation.layout) for name, x in zip(names, call())}


def probabilities(q, k, queries, cell, head):
    """Softmax of the visible scores of some queries, and the scores' derivative where softcap bends them:
    float64 q, k [S, D], queries [n] -> [n, S] each."""
    scores, derivative = q[queries] @ k.T / math.sqrt(cell.head_dim), 1
    if cell.softcap:
        tanh = torch.tanh(scores / cell.softcap)
        scores, derivative = cell.softcap * tanh, 1 - tanh**2
    if cell.alibi:
        distance = queries[:, None] - torch.arange(cell.seqlen_k, device=q.device)
        scores = scores - cell.slopes(q.device)[head].double() * distance.abs()
    hidden = ~cell.visible(queries, q.device)
    return scores.masked_fill_(hidden, -math.inf).softmax(dim=-1), derivative


def reference_rows(q, k, v, dout, rows, cell, head):
    """float64 [S, D] of one head, v and dout with their own D; rows [n] -> the rows [n, D] of what the cell
    computes.

    A row of dk needs every query's softmax, so queries go by in chunks of bounded memory.
    """
    if cell.direction == "forward":
        return {"out": probabilities(q, k, rows, cell, head)[0] @ v}

    def score_gradient(queries):
        p, derivative = probabilities(q, k, queries, cell, head)
        dp = dout[queries] @ v.T
        return p, p * (dp - (p * dp).sum(-1, keepdim=True)) * derivative / math.sqrt(cell.head_dim)

    gradients = {"dq": score_gradient(rows)[1] @ k, "dk": 0, "dv": 0}
    for queries in torch.arange(cell.seqlen, device=q.device).split(max(1, 2**22 // cell.seqlen_k)):
        p, ds = score_gradient(queries)
        gradients["dk"] += ds[:, rows].T @ q[queries]
        gradients["dv"] += p[:, rows].T @ dout[queries]
    return gradients


def of_head(tensor, head, cell):
    """[S, H, D] -> [S, D] of a head of q, or of the head of k and v that it reads."""
    return tensor[:, head * tensor.shape[1] // cell.heads]


def group_reference_rows(q, k, v, dout, rows, cell, head):
    """reference_rows of [S, H, D] and a head of q; dk and dv, of the head of k and v that it reads, are sums
    over all heads of q that read it."""
    def of(h):
        return reference_rows(*(of_head(x, h, cell).double() for x in (q, k, v, dout)), rows, cell, h)

    reference, first = of(head), head - head % cell.group
    if cell.direction == "backward":
        for other in {*range(first, first + cell.group)} - {head}:
            gradients = of(other)
            reference |= {name: reference[name] + gradients[name] for name in ("dk", "dv")}
    return reference


def sequence_errors(cell, inputs, results, head, generator, count=64):
    """{implementation: {tensor: largest absolute error}} of one sequence's tensors [S, H, D], on `count` rows
    of one head, chosen at random."""
    shorter = min(cell.seqlen, cell.seqlen_k)  # rows of queries and of keys
    rows = torch.randperm(shorter, generator=generator)[:count]
    rows[0], rows[-1] = 0, shorter - 1
    rows = rows.to(inputs[0].device)
    reference = group_reference_rows(*inputs, rows, cell, head)
    return {
        implementation: {
            name: (of_head(tensors[name], head, cell)[rows].double() - exact).abs().max().item()
            for name, exact in reference.items()
        }
        for implementation, tensors in results.items()
    }


def errors(cell, inputs, results):
    """sequence_errors of a random sequence and head of it."""
    generator = torch.Generator().manual_seed(cell.seqlen)
    b = int(torch.randint(cell.batch, (1,), generator=generator))
    h = int(torch.randint(cell.heads, (1,), generator=generator))
    results = {implementation: {name: x[b] for name, x in tensors.items()}
               for implementation, tensors in results.items()}
    return sequence_errors(cell, [x[b] for x in inputs], results, h, generator)


def measure(cell, names, options):
    implementations = {name: IMPLEMENTATIONS[name] for name in names}
    return compare(cell, implementations, input_sets(cell, options.device), errors, options)


def compare(cell, implementations, sets, errors_of, options):
    """{implementation: {"seconds": every sample, "ms", "gflops", "errors"} or {"refused": why}}; the sets of
    inputs take turns, errors_of(cell, inputs, results) are found with the first."""
    device, measured, calls, results = options.device, {}, {}, {}
    for name, implementation in implementations.items():
        if cell.direction not in implementation.directions:
            continue
        try:
            prepared = [prepared_call(cell, implementation, inputs, device) for inputs in sets]
            results[name] = result_of(cell, implementation, prepared[0])
            calls[name] = prepared
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as refusal:
            measured[name] = {"refused": f"{type(refusal).__name__}: {refusal}"}
    repeats = {}
    for name, call in calls.items():
        once, _ = seconds_per_call(call, len(call), device)
        repeats[name] = min(MOST_REPEATS[device], max(len(call), math.ceil(SAMPLE_SECONDS[device] / once)))
    samples, waited_for_host = {name: [] for name in calls}, set()
    for turn in range(options.rounds):
        names = list(calls)
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            time.sleep(options.idle_ms / 1e3)
            seconds, host_was_ahead = seconds_per_call(calls[name], repeats[name], device)
            samples[name].append(seconds)
            if not host_was_ahead:
                waited_for_host.add(name)
    worst = errors_of(cell, sets[0], results) if results else {}
    for name, taken in samples.items():
        seconds = STATISTICS[options.statistic](taken)
        measured[name] = {"seconds": taken, "ms": seconds * 1e3, "gflops": cell.flops / seconds / 1e9,
                          "errors": worst[name], "waited_for_host": name in waited_for_host}
    return measured


def cells(options):
    """The table's cells. Shapes keep B * S and H * D near what was asked, except where that takes minutes."""
    masks = [("causal" if causal else "full", -1) for causal in options.causal]
    masks += [("window", left) for left in options.window]
    for dtype, direction, seqlen, head_dim, (mask, left) in itertools.product(
        options.dtypes, options.passes, options.seqlens, options.head_dims, masks
    ):
        batch = max(1, options.tokens // seqlen)
        flops = 2 * batch * seqlen**2 * (head_dim + (options.value_dim or head_dim))
        heads = int(min(options.hidden // head_dim, CELL_FLOPS[options.device] / flops))
        yield Cell(direction, dtype, seqlen, head_dim, mask, left, batch, whole_groups(heads, options.group),
                   options.softcap, options.alibi, options.group, options.value_dim)


def looked_up(measured, name):
    """An implementation's result or the best peer's; empty if it refused or was not measured."""
    if name != BEST:
        return measured[name] if "ms" in measured.get(name, {}) else {}
    peers = [r for peer, r in measured.items() if peer not in (OURS, DETERMINISTIC) and "ms" in r]
    return min(peers, key=lambda result: result["ms"], default={})


def compared(names):
    """The table's columns of what ours is compared with."""
    others = [n for n in names if n != OURS]
    return others + [BEST] * (len([n for n in others if n != DETERMINISTIC]) > 1)


def geometric_means(rows, names):
    """[{which cells, peer, count, geometric mean and least of peer's time / ours}]"""
    groups = {}
    for (cell, measured), name in itertools.product(rows, compared(names)):
        peer, ours = looked_up(measured, name), looked_up(measured, OURS)
        if peer and ours:
            window = " window" if cell.mask == "window" else ""
            for group in (f"{cell.direction} {cell.dtype}{window}", f"all{window}"):
                groups.setdefault((group, name), []).append(peer["ms"] / ours["ms"])
    return [{"cells": group, "peer": name, "count": len(ratios), "ratio": statistics.geometric_mean(ratios),
             "least": min(ratios)} for (group, name), ratios in sorted(groups.items())]


def largest(values):
    """NaN is larger than any number."""
    return max(values, key=lambda value: (math.isnan(value), value))


def column_groups(names, device):
    """[(heading, names, width, (result, our result) -> text)] of the table."""
    unit, factor = RATE[device]
    milliseconds = ("ms", names, 10, lambda r, ours: f"{r['ms']:.2f}")
    ratios = ("/ours", compared(names), 8, lambda r, ours: f"{r['ms'] / ours['ms']:.2f}" if ours else "-")
    rates = (unit, names, 8, lambda r, ours: f"{r['gflops'] * factor:.0f}")
    worst = ("error", names, 9, lambda r, ours: f"{largest(r['errors'].values()):.1e}")
    return [milliseconds, ratios, rates, worst] if device == "cpu" else [rates, ratios, worst]


def table_header(names, device, width=LABEL_WIDTH):
    short = {OURS: "ours", DETERMINISTIC: "determ."}
    above, below = [], []
    for heading, columns, column, _ in column_groups(names, device):
        above.append(f"{heading:^{column * len(columns)}}")
        below.append("".join(f"{short.get(n, n):>{column}}" for n in columns))
    return f"{'':{width}}{' |'.join(above)}\n{'cell':{width}}{' |'.join(below)}"


def table_row(cell, measured, names, device, width=LABEL_WIDTH):
    ours, groups = looked_up(measured, OURS), []
    for _, columns, column, text in column_groups(names, device):
        results = [looked_up(measured, n) for n in columns]
        groups.append("".join(f"{text(result, ours) if result else '-':>{column}}" for result in results))
    remarks = [f"\n  {n} refused: {r['refused']}" for n, r in measured.items() if "refused" in r]
    remarks += [f"\n  {n}: the GPU waited for the host"
                for n, r in measured.items() if r.get("waited_for_host")]
    return f"{cell.label:{width}}{' |'.join(groups)}{''.join(remarks)}"


def add_run_options(parser):
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--statistic", default="median", choices=STATISTICS, help="over rounds")
    parser.add_argument("--idle-ms", type=float,
                        help="rest before each sample; default: 0 on a CPU, 100 on a GPU")
    parser.add_argument("--threads", type=int, help="default: as torch chooses")
    parser.add_argument("--json", type=Path, help="write every sample, with versions, here")


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--grid", choices=GRIDS, help="the next five options, where not given; targets: "
                        "16384 tokens of 2048 values, as in the FlashAttention papers; default: small, on a "
                        "GPU targets")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--seqlens", nargs="+", type=int)
    parser.add_argument("--head-dims", nargs="+", type=int)
    parser.add_argument("--tokens", type=int, help="B * S, at least one sequence")
    parser.add_argument("--hidden", type=int, help="H * D")
    parser.add_argument("--causal", nargs="+", type=int, choices=[0, 1], default=[0, 1], help="0: full")
    passes = ["forward", "backward"]
    parser.add_argument("--passes", nargs="+", choices=passes, default=passes)
    parser.add_argument("--window", nargs="+", type=int, default=[], metavar="LEFT",
                        help="more cells: a query sees its own key and LEFT before; SDPA gets a boolean mask")
    parser.add_argument("--group", type=int, default=1,
                        help="heads of q for each head of k and v; H is a multiple of it")
    parser.add_argument("--value-dim", type=int, default=0, metavar="N",
                        help="head dim of v and out, of every cell; default: the head dim")
    parser.add_argument("--softcap", type=float, default=0, help="of every cell; fa3 and flex have it")
    parser.add_argument("--alibi", action="store_true", help="in every cell; flex has it")
    peers = [name for name in IMPLEMENTATIONS if name not in (OURS, DETERMINISTIC)]
    parser.add_argument("--peers", nargs="*", choices=peers,
                        help="default: sdpa; on a GPU fa2, cudnn and, if FA3_LIBRARY names it, fa3")
    parser.add_argument("--deterministic", action="store_true",
                        help="ours with deterministic=True beside it")
    add_run_options(parser)
    options = parser.parse_args(arguments)
    defaults = DEFAULTS[options.device]
    for name, value in {**defaults, **GRIDS[options.grid or defaults["grid"]]}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def names_of(options):
    peers = PEERS[options.device] if options.peers is None else options.peers
    names = [OURS, *[DETERMINISTIC] * options.deterministic, *peers]
    return usable(names, IMPLEMENTATIONS, options.device)


def usable(names, implementations, device):
    return [n for n in names if device in implementations[n].devices and implementations[n].available()]


def gemm_rates(gflops, device):
    unit, factor = RATE[device]
    rates = ", ".join(f"{dtype} {rate * factor:.0f}" for dtype, rate in gflops.items())
    return f"torch.mm {GEMM_SIZE[device]} {unit}: {rates}"


def print_heading(where, options, names, width):
    print(f"{where['processor']}, {where['threads']} threads ({where['cpu_capability']}), "
          f"load before {where['load_average']:.1f}, torch {where['torch']}, "
          f"flash_attn {where['flash_attn']}")
    if "gpu" in where:
        print(f"CUDA {where['gpu']['cuda']}, cuDNN {where['gpu']['cudnn']}; under load "
              + ", ".join(f"{name} {value}" for name, value in where["gpu"]["state_under_load"].items()))
        print(f"thermal: {where['thermal']}")
    print(gemm_rates(where["gemm_gflops"], options.device))
    print(f"times: {options.statistic} of {options.rounds} rounds, implementations interleaved; "
          "/ours: peer's time over ours, above 1 where ours is faster\n")
    print(table_header(names, options.device, width))


def write_json(path, where, options, rows, means):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "machine": where,
        "statistic": options.statistic,
        "cells": [{**asdict(cell), "flops": cell.flops, "results": measured} for cell, measured in rows],
        "geometric_means": means,
    }, indent=1, default=str) + "\n")


def run(options, names, cells, measure):
    """Print a row for each cell's measure(cell, names, options), and write them all."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device, cells, begin = options.device, list(cells), time.perf_counter()
    width = max([LABEL_WIDTH, *(len(cell.label) + 1 for cell in cells)])
    where = machine(device)
    idle = options.idle_ms
    where["thermal"] = f"burst: {idle:g} ms idle before each sample" if idle else "sustained: no idle"
    where["gemm_gflops"] = {dtype: gemm_gflops(dtype, device) for dtype in options.dtypes}
    print_heading(where, options, names, width)
    rows = []
    for cell in cells:
        rows.append((cell, measure(cell, names, options)))
        print(table_row(*rows[-1], names, device, width), flush=True)
        if options.json:  # after every cell: a crash in one of them leaves the others
            write_json(options.json, where, options, rows, geometric_means(rows, names))
    if device == "cuda":
        where["gemm_gflops_after"] = {dtype: gemm_gflops(dtype, device) for dtype in options.dtypes}
        where["gpu"]["state_after"] = gpu_state()
        print(f"\n{gemm_rates(where['gemm_gflops_after'], device)} after; "
              f"{time.perf_counter() - begin:.0f} s in all")
    print("\ngeometric means of peer's time over ours")
    for mean in geometric_means(rows, names):
        print(f"  {mean['cells']:28} {mean['peer']:13} {mean['ratio']:.2f}  ({mean['count']} cells, least "
              f"{mean['least']:.2f})")
    if options.json:
        write_json(options.json, where, options, rows, geometric_means(rows, names))


def main(arguments=None):
    options = parse(arguments)
    run(options, names_of(options), cells(options), measure)


if __name__ == "__main__":
    main()
