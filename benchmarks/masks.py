"""What masks and biases of elements cost.

    python benchmarks/masks.py
    python benchmarks/masks.py --device cuda --json results.json

Every row is one call of flash_attn_func, and the ratio beside it is its time over that of the same work
without mask or bias: a causal mask as bits against causal=True, which visits the same blocks; the others
against full attention. Masks are packed once (AttentionMask), as a model packs its own once for all layers;
"packing" is the time of that. Errors are the largest on some rows of one head against float64.
"""

import argparse
import math

import torch

import report
from flash_attn import AttentionMask, flash_attn_func
from machine import machine, seconds_per_call

DEFAULTS = {"cpu": dict(batch=1, heads=8, seqlens=[512, 2048], dtype="float32"),
            "cuda": dict(batch=4, heads=16, seqlens=[1024, 4096], dtype="bfloat16")}


def variants(shape, device, dtype):
    """{name: (compared with, options of the call, visible [.., S, S] or None, bias or None)}"""
    batch, heads, seqlen = shape
    causal = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril()
    half = torch.rand(1, heads, seqlen, seqlen, device=device) < 0.5
    half[..., 0] = True
    keys = torch.arange(seqlen, device=device) < seqlen - seqlen // 5
    bias = torch.randn(1, heads, seqlen, seqlen, device=device).to(dtype)
    packed = {name: AttentionMask.from_bool(mask, seqlen, seqlen)
              for name, mask in (("causal", causal), ("half", half), ("keys", keys))}
    return {
        "full": ("full", {}, None, None),
        "causal": ("causal", {"causal": True}, causal, None),
        "causal as bits": ("causal", {"attn_mask": packed["causal"]}, causal, None),
        "half of all, as bits": ("full", {"attn_mask": packed["half"]}, half, None),
        "4/5 of the keys, as bits": ("full", {"attn_mask": packed["keys"]}, keys, None),
        "bias": ("full", {"attn_bias": bias}, None, bias),
        "bias with its gradient": ("full", {"attn_bias": bias.clone().requires_grad_()}, None, bias),
        "bias and causal": ("causal", {"attn_bias": bias, "causal": True}, causal, bias),
    }


def exact_rows(q, k, v, rows, visible, bias):
    """float64 rows [n, D] of the last head of the first batch entry."""
    _, seqlen, heads, head_dim = q.shape
    scores = q[0, rows, -1].double() @ k[0, :, -1].double().T / math.sqrt(head_dim)
    if bias is not None:
        scores += bias[0, -1, rows].double()
    if visible is not None:
        scores.masked_fill_(~visible.broadcast_to(1, heads, seqlen, seqlen)[0, -1, rows], -math.inf)
    return scores.softmax(dim=-1) @ v[0, :, -1].double()


def measure(seqlen, options):
    shape, dtype = (options.batch, options.heads, seqlen), getattr(torch, options.dtype)
    q, k, v, dout = (torch.randn(options.batch, seqlen, options.heads, options.head_dim,
                                 device=options.device).to(dtype) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    rows = torch.randperm(seqlen)[:64].to(options.device)
    calls, measured = {}, {}
    for name, (base, given, visible, bias) in variants(shape, options.device, dtype).items():
        out = flash_attn_func(q, k, v, **given).detach()
        error = (out[0, rows, -1].double() - exact_rows(q, k, v, rows, visible, bias)).abs().max().item()
        wanted = leaves + [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        graph = flash_attn_func(*leaves, **given)
        measured[name] = {"base": base, "error": error, "forward": [], "backward": []}
        calls[name] = {
            "forward": lambda given=given: flash_attn_func(q, k, v, **given).detach(),
            "backward": lambda graph=graph, wanted=wanted: torch.autograd.grad(
                graph, wanted, dout, retain_graph=True),
        }
    for _ in range(options.rounds):
        for name, both in calls.items():
            for direction, call in both.items():
                seconds, _ = seconds_per_call([call], options.repeats, options.device)
                measured[name][direction].append(seconds)
    mask = torch.rand(options.batch, 1, seqlen, seqlen, device=options.device) < 0.5
    packing, _ = seconds_per_call([lambda: AttentionMask.from_bool(mask, seqlen, seqlen)], options.repeats,
                                  options.device)
    return {"seqlen": seqlen, "variants": measured, "packing": packing}


def table(row):
    packing = f"packing a mask of its own for each batch entry {row['packing'] * 1e3:.3f} ms"
    lines = [f"S={row['seqlen']}, {packing}"]
    lines.append(f"{'':26}{'forward ms':>12}{'/ base':>8}{'backward ms':>13}{'/ base':>8}{'error':>10}  base")
    for name, one in row["variants"].items():
        base, columns = row["variants"][one["base"]], ""
        for direction, width in (("forward", 12), ("backward", 13)):
            seconds = min(one[direction])
            columns += f"{seconds * 1e3:{width}.3f}{seconds / min(base[direction]):8.2f}"
        lines.append(f"{name:26}{columns}{one['error']:10.1e}  {one['base']}")
    return "\n".join(lines)


def draw(results, figure):
    figure.set_size_inches(10, 4)
    axes = figure.subplots(1, 2, sharey=True)
    for ax, direction in zip(axes, ("forward", "backward"), strict=True):
        for row in results["rows"]:
            names = list(row["variants"])
            ratios = [min(one[direction]) / min(row["variants"][one["base"]][direction])
                      for one in row["variants"].values()]
            ax.plot(ratios, range(len(names)), "o", label=f"S={row['seqlen']}")
        ax.set(title=direction, xlabel="time over that without", yticks=range(len(names)), yticklabels=names)
        ax.grid(alpha=0.3)
    axes[0].legend()


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seqlens", nargs="+", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="calls in a sample")
    report.add_output_options(parser)
    return report.fill_in(parser.parse_args(arguments), DEFAULTS)


def main(arguments=None):
    report.measure_rows(parse(arguments), draw, measure, table, ("batch", "heads", "head_dim", "dtype"), machine)


if __name__ == "__main__":
    main()
