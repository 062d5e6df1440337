"""What a call costs besides its arithmetic: the host's time for a tiny problem, import time, wheel size.

    python benchmarks/overhead.py --json benchmarks/results/cpu/overhead.json
    python benchmarks/overhead.py --device cuda --wheel dist/flash_attn-2.8.3-*.whl --json results.json

Host time: batch 1, 64 tokens, bfloat16 on a GPU, float32 on a CPU. The implementations take turns within
each round, in rotating order, after a warm-up; the table shows medians over rounds in microseconds a call,
the JSON every sample. On a GPU the clock runs while calls are queued, and stops before the device is waited
for: what the host needs to put a call into the queue. A round queues few enough calls that the queue never
holds the host up. On a CPU there is no queue, so the time contains the arithmetic. forward runs under
no_grad; forward+backward is one forward and torch.autograd.grad of out with respect to q, k and v.

Import time: a new interpreter imports torch, then flash_attn; the time of the second, median over runs, each
after a run that does not count, so that files are in the page cache.

Wheel: its bytes, and those of what it installs.
"""

import argparse
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F

import flash_attn
import report
from machine import machine

IMPLEMENTATIONS = ("flash_attn_func", "sdpa", "flash_attn_varlen_func")
DIRECTIONS = ("forward", "forward+backward")
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
# A GPU's queue takes about a thousand launches; a forward and backward are some ten.
CALLS = 32
WARM_UP_CALLS = 50
TIME_IMPORT = """
import time, torch
begin = time.perf_counter()
import flash_attn
print(time.perf_counter() - begin)
"""


def prepared_call(implementation, direction, options):
    """The call to time, with tensors in the implementation's own layout."""
    shape = (1, options.seqlen, options.heads, options.head_dim)
    dtype = DTYPES[options.device]
    q, k, v, dout = (torch.randn(shape, device=options.device).to(dtype) for _ in range(4))
    if implementation == "sdpa":
        q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))

        def attend():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif implementation == "flash_attn_func":

        def attend():
            return flash_attn.flash_attn_func(q, k, v, causal=True)
    else:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
        ends = torch.tensor([0, options.seqlen], dtype=torch.int32, device=options.device)
        lengths = (ends, ends, options.seqlen, options.seqlen)

        def attend():
            return flash_attn.flash_attn_varlen_func(q, k, v, *lengths, causal=True)

    if direction == "forward":
        return torch.no_grad()(attend)
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(attend(), (q, k, v), dout)


def seconds_per_call(call, device):
    """Of the host: the device is idle before, and nobody waits for it until the clock has stopped."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    seconds = time.perf_counter() - begin
    if device == "cuda":
        torch.cuda.synchronize()
    return seconds / CALLS


def measure_calls(options):
    """[{direction, implementation, microseconds, samples}]"""
    rows = []
    for direction in DIRECTIONS:
        calls = {name: prepared_call(name, direction, options) for name in IMPLEMENTATIONS}
        for call in calls.values():
            for _ in range(WARM_UP_CALLS):
                call()
        samples = {name: [] for name in calls}
        for turn in range(options.rounds):
            first = turn % len(IMPLEMENTATIONS)
            for name in IMPLEMENTATIONS[first:] + IMPLEMENTATIONS[:first]:
                samples[name].append(seconds_per_call(calls[name], options.device) * 1e6)
        rows += [{"direction": direction, "implementation": name, "samples": taken,
                  "microseconds": statistics.median(taken)} for name, taken in samples.items()]
    return rows


def measure_import(runs):
    """{seconds, samples} of importing flash_attn after torch: the flash_attn that is imported here."""
    folder = Path(flash_attn.__file__).parent.parent  # -c looks where it runs first
    samples = []
    for _ in range(1 + runs):
        printed = subprocess.check_output([sys.executable, "-c", TIME_IMPORT], cwd=folder, text=True)
        samples.append(float(printed))
    return {"seconds": statistics.median(samples[1:]), "samples": samples[1:]}


def measure_wheel(path):
    with zipfile.ZipFile(path) as wheel:
        files = {item.filename: item.file_size for item in wheel.infolist()}
    largest = max(files, key=files.get)
    return {"name": path.name, "bytes": path.stat().st_size, "installed_bytes": sum(files.values()),
            "largest_file": largest, "largest_file_bytes": files[largest]}


def table(rows):
    yield f"{'microseconds a call':22}" + "".join(f"{name:>24}" for name in IMPLEMENTATIONS)
    for direction in DIRECTIONS:
        medians = {row["implementation"]: row["microseconds"] for row in rows
                   if row["direction"] == direction}
        yield f"{direction:22}" + "".join(f"{medians[name]:24.1f}" for name in IMPLEMENTATIONS)


def draw(results, figure):
    axes = figure.subplots()
    for offset, name in enumerate(IMPLEMENTATIONS):
        rows = [row for row in results["calls"] if row["implementation"] == name]
        places = [place + 0.25 * (offset - 1) for place in range(len(rows))]
        bars = axes.bar(places, [row["microseconds"] for row in rows], width=0.25, label=name)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks(range(len(DIRECTIONS)), DIRECTIONS)
    axes.set_ylabel("microseconds of the host a call")
    axes.set_title(results["machine"]["processor"])
    axes.legend()


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--device", default="cpu", choices=DTYPES)
    parser.add_argument("--seqlen", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30, help=f"of {CALLS} calls of each implementation")
    parser.add_argument("--imports", type=int, default=5, help="interpreters that are started; 0: none")
    parser.add_argument("--wheel", type=Path, help="tell this file's size")
    report.add_output_options(parser)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    if report.drawn_earlier_run(options, draw):
        return
    results = {"machine": machine(options.device), "options": vars(options), "calls": measure_calls(options)}
    where = results["machine"]
    print(f"{where['processor']}, {where['threads']} threads, load before {where['load_average']:.1f}, torch "
          f"{where['torch']}; 1 x {options.seqlen} tokens, {options.heads} heads of {options.head_dim}, "
          f"{DTYPES[options.device]}, causal, medians of {options.rounds} rounds\n")
    print("\n".join(table(results["calls"])))
    if options.imports:
        results["import"] = measure_import(options.imports)
        print(f"\nimport flash_attn after torch: {results['import']['seconds'] * 1e3:.0f} ms")
    if options.wheel:
        results["wheel"] = wheel = measure_wheel(options.wheel)
        print(f"{wheel['name']}: {wheel['bytes'] / 1e6:.1f} MB, "
              f"installed {wheel['installed_bytes'] / 1e6:.1f} MB")
    report.write(results, options, draw)


if __name__ == "__main__":
    main()
