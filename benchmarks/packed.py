"""Time and error of packed batches: sequences of different lengths one behind the other, and grouped heads.

    python benchmarks/packed.py --device cuda --json results.json
    python benchmarks/packed.py --device cuda --lengths 4096 --group 8   # of one length, grouped heads

Lengths are drawn between 64 and 8192 tokens, as many short as long ones (uniform logarithms, always the
same), until --tokens are full; the last one is cut. Peers get the same tensors: fa3 is FlashAttention-3's
operators for packed sequences (FA3_LIBRARY, as in attention.py), fa2 torch's varlen_attn, cudnn torch's
scaled_dot_product_attention held to that backend, where all sequences are as long, sdpa a loop of it over the
sequences, for the CPU. Implementations take turns within each round. FLOPs are those of every sequence,
counted as in attention.py; errors the largest on rows of the first, the longest and the last sequence.
"""

import argparse
import itertools
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn
import implementations
import report
from attention import RATE, reference_rows
from cell import Cell
from machine import machine, seconds_per_call

DEFAULTS = {"cpu": dict(tokens=2048, hidden=256, dtype="float32", peers=["sdpa"]),
            "cuda": dict(tokens=65536, hidden=2048, dtype="bfloat16", peers=["fa2", "cudnn", "fa3"])}
OURS = "flash_attn"
SHORTEST, LONGEST = 64, 8192


def drawn_lengths(tokens):
    generator, lengths = torch.Generator().manual_seed(0), []
    while (left := tokens - sum(lengths)) > 0:
        drawn = SHORTEST * (LONGEST / SHORTEST) ** torch.rand((), generator=generator).item()
        lengths.append(min(left, round(drawn)))
    return lengths


class Batch:
    """Sequences of these lengths, and how implementations are told of them."""

    def __init__(self, lengths, options, head_dim, causal):
        self.lengths, self.causal, self.head_dim, self.group = lengths, causal, head_dim, options.group
        self.heads = max(1, options.hidden // head_dim // options.group) * options.group
        self.dtype, self.device = options.dtype, options.device
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self.starts, self.cu_seqlens = ends.tolist(), ends.to(self.device, torch.int32)

    def inputs(self):
        """q, k, v, dout [tokens, heads or key heads, head_dim]"""
        heads = (self.heads, self.heads // self.group, self.heads // self.group, self.heads)
        generator = torch.Generator(self.device).manual_seed(self.head_dim)
        return [torch.randn(self.starts[-1], h, self.head_dim, generator=generator, device=self.device)
                .to(getattr(torch, self.dtype)) for h in heads]

    def cell(self, direction, length):
        mask = "causal" if self.causal else "full"
        return Cell(direction, self.dtype, length, self.head_dim, mask, -1, 1, self.heads)

    def flops(self, direction):
        return sum(self.cell(direction, length).flops for length in self.lengths)


def _flash_attn(b):
    longest = max(b.lengths)
    return lambda q, k, v: flash_attn.flash_attn_varlen_func(
        q, k, v, b.cu_seqlens, b.cu_seqlens, longest, longest, causal=b.causal)


def _fa3(b):
    longest = max(b.lengths)
    options = {"cu_seqlens_q": b.cu_seqlens, "cu_seqlens_k": b.cu_seqlens, "max_seqlen_q": longest,
               "max_seqlen_k": longest, "softmax_scale": b.head_dim**-0.5, "is_causal": b.causal}
    return lambda q, k, v: implementations.fa3(q, k, v, **options)


def _fa2(b):
    from torch.nn.attention.varlen import varlen_attn

    options = {"enable_gqa": True} if b.group > 1 else {}  # 2.11 knows nothing of it
    options |= {"window_size": (-1, 0)} if b.causal else {}
    longest = max(b.lengths)
    return lambda q, k, v: varlen_attn(q, k, v, b.cu_seqlens, b.cu_seqlens, longest, longest, **options)


def _dense(b, q, k, v):
    """[batch, seqlen, heads, head_dim] each; the result, too."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=b.causal, enable_gqa=b.group > 1)
    return out.transpose(1, 2)


def _cudnn(b):
    if len(set(b.lengths)) > 1:
        raise NotImplementedError("it takes sequences of one length")

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return _dense(b, *(x.unflatten(0, (len(b.lengths), -1)) for x in (q, k, v))).flatten(0, 1)

    return attend


def _sdpa(b):
    def attend(q, k, v):
        parts = zip(*(x.split(b.lengths) for x in (q, k, v)))
        return torch.cat([_dense(b, *(x[None] for x in part))[0] for part in parts])

    return attend


ATTENTIONS = {OURS: _flash_attn, "fa2": _fa2, "cudnn": _cudnn, "fa3": _fa3, "sdpa": _sdpa}


def prepared_call(b, direction, attend, inputs):
    *qkv, dout = inputs
    if direction == "forward":
        return lambda: [attend(*qkv).detach()]
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def error(b, direction, inputs, results):
    """Of a key head all query heads are looked at, since they share its gradients."""
    q, k, v, dout = (x.double() for x in inputs)
    names, worst = ["out"] if direction == "forward" else ["dq", "dk", "dv"], 0.0
    longest, last = max(range(len(b.lengths)), key=b.lengths.__getitem__), len(b.lengths) - 1
    for i in {0, longest, last}:
        length, part = b.lengths[i], slice(b.starts[i], b.starts[i + 1])
        rows = torch.randperm(length)[:32].to(q.device)
        sums = {}
        for head in range(b.group):
            own = (q[part, head], k[part, 0], v[part, 0], dout[part, head])
            exact = reference_rows(*own, rows, b.cell(direction, length), head)
            for name, x in exact.items():
                sums[name] = sums.get(name, 0) + x if name in ("dk", "dv") else x
        for name, x in zip(names, results, strict=True):
            head = 0 if name in ("dk", "dv") else b.group - 1
            worst = max(worst, (x[part][rows, head].double() - sums[name]).abs().max().item())
    return worst


def measure(b, direction, options):
    inputs = b.inputs()
    calls, refused, row = {}, {}, {}
    for name in [OURS, *options.peers]:
        try:
            call = prepared_call(b, direction, ATTENTIONS[name](b), inputs)
            row[name] = {"error": error(b, direction, inputs, call()), "seconds": []}
            calls[name] = call
        except (ImportError, KeyError, NotImplementedError, RuntimeError, TypeError) as reason:
            refused[name] = f"{type(reason).__name__}: {reason}"
    for turn in range(options.rounds):
        names = list(calls)[turn % len(calls):] + list(calls)[:turn % len(calls)]
        for name in names:
            row[name]["seconds"].append(seconds_per_call([calls[name]], options.repeats, options.device)[0])
    flops = b.flops(direction)
    for one in row.values():
        one["gflops"] = flops / statistics.median(one["seconds"]) / 1e9
    return {"direction": direction, "head_dim": b.head_dim, "causal": b.causal, "heads": b.heads,
            "group": b.group, "flops": flops, "results": row, "refused": refused}


def table(row, device):
    unit, factor = RATE[device]
    ours = row["results"][OURS]["gflops"]
    label = f"{row['direction']:8} D={row['head_dim']:<3} {'causal' if row['causal'] else 'full':6}"
    columns = [f"{name} {one['gflops'] * factor:.0f} {unit}, error {one['error']:.1e}"
               + (f", {ours / one['gflops']:.2f} of it" if name != OURS else "")
               for name, one in row["results"].items()]
    return "; ".join([f"{label} {columns[0]}", *columns[1:]])


def draw(results, figure):
    axes = figure.subplots()
    labels = [f"{row['direction']}, {row['head_dim']}{', causal' * row['causal']}" for row in results["rows"]]
    for name in results["rows"][0]["results"]:
        rates = [row["results"].get(name, {}).get("gflops") for row in results["rows"]]
        axes.plot(rates, labels, "o", label=name)
    axes.set(xlabel="GFLOP/s")
    axes.legend()


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--device", default="cpu", choices=DEFAULTS)
    parser.add_argument("--lengths", type=int, help="of every sequence; default: drawn")
    parser.add_argument("--group", type=int, default=1, help="query heads for each head of keys and values")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--hidden", type=int, help="query heads times head dim")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype")
    parser.add_argument("--peers", nargs="*", choices=[name for name in ATTENTIONS if name != OURS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="calls in a sample")
    report.add_output_options(parser)
    return report.fill_in(parser.parse_args(arguments), DEFAULTS)


def main(arguments=None):
    options = parse(arguments)
    if report.drawn_earlier_run(options, draw):
        return
    if options.lengths:
        lengths = [options.lengths] * max(1, options.tokens // options.lengths)
    else:
        lengths = drawn_lengths(options.tokens)
    print(f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, "
          f"{options.dtype}, {options.group} query heads a key head")
    rows, said = [], {}
    directions = ("forward", "backward")
    for direction, head_dim, causal in itertools.product(directions, options.head_dims, (False, True)):
        rows.append(measure(Batch(lengths, options, head_dim, causal), direction, options))
        print(table(rows[-1], options.device), flush=True)
        said |= rows[-1]["refused"]
    for name, reason in said.items():
        print(f"{name} refused: {reason}")
    shape = {"lengths": lengths, "group": options.group, "hidden": options.hidden, "dtype": options.dtype}
    report.write({"machine": machine(options.device), "shape": shape, "rows": rows}, options, draw)


if __name__ == "__main__":
    main()
