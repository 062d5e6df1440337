"""flash_attn.nn.MultiheadAttention against torch.nn.MultiheadAttention: the same weights, inputs and masks.

    python benchmarks/multihead_attention.py
    python benchmarks/multihead_attention.py --device cuda --json results.json

A row is one use of the module in training, forward and backward together, milliseconds and, on a GPU, the
peak of torch's allocator beyond what is there before. The difference is the largest between the two outputs,
relative to the largest number in torch's.
"""

import argparse

import torch

import report
from flash_attn.nn import MultiheadAttention
from machine import machine, seconds_per_call

DEFAULTS = {"cpu": dict(batch=1, width=256, heads=4, seqlens=[512, 1024], dtype="float32"),
            "cuda": dict(batch=8, width=1024, heads=16, seqlens=[1024, 4096], dtype="bfloat16")}


def uses(batch, seqlen, device):
    """{name: arguments of forward besides query, key and value}"""
    hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)
    lengths = seqlen - torch.arange(batch, device=device) * (seqlen // (2 * batch))
    padding = torch.arange(seqlen, device=device) >= lengths[:, None]
    return {
        "no mask": {"need_weights": False},
        "causal": {"need_weights": False, "attn_mask": hidden, "is_causal": True},
        "mask": {"need_weights": False, "attn_mask": hidden},
        "padding": {"need_weights": False, "key_padding_mask": padding},
        "padding and mask": {"need_weights": False, "key_padding_mask": padding, "attn_mask": hidden},
        "weights": {},
    }


def measure(seqlen, options):
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    made = {"device": options.device, "dtype": dtype, "batch_first": True}
    modules = {"torch": torch.nn.MultiheadAttention(options.width, options.heads, **made),
               "ours": MultiheadAttention(options.width, options.heads, **made)}
    modules["ours"].load_state_dict(modules["torch"].state_dict())
    x = torch.randn(options.batch, seqlen, options.width, device=options.device).to(dtype).requires_grad_()
    row = {"seqlen": seqlen, "uses": {}}
    for name, given in uses(options.batch, seqlen, options.device).items():
        def step(module, given=given):
            out = module(x, x, x, **given)[0]
            out.sum().backward()
            return out.detach()

        outputs = {kind: step(module) for kind, module in modules.items()}
        apart = (outputs["ours"] - outputs["torch"]).abs().max() / outputs["torch"].abs().max()
        one = row["uses"][name] = {"difference": apart.item(), "seconds": {"torch": [], "ours": []}}
        if options.device == "cuda":
            one["bytes"] = {}
            for kind, module in modules.items():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step(module)
                one["bytes"][kind] = torch.cuda.max_memory_allocated() - before
        for _ in range(options.rounds):
            for kind, module in modules.items():
                seconds, _ = seconds_per_call([lambda m=module: step(m)], options.repeats, options.device)
                one["seconds"][kind].append(seconds)
    return row


def table(row):
    lines = [f"S={row['seqlen']:<16}{'torch ms':>10}{'ours':>10}{'/ ours':>8}{'difference':>12}"
             f"{'torch MB':>11}{'ours':>9}"]
    for name, one in row["uses"].items():
        theirs, ours = (min(one["seconds"][kind]) * 1e3 for kind in ("torch", "ours"))
        memory = [one["bytes"][kind] / 2**20 for kind in ("torch", "ours")] if "bytes" in one else []
        columns = "".join(f"{size:{width}.1f}" for size, width in zip(memory, (11, 9)))
        ratio = f"{theirs / ours:8.2f}{one['difference']:12.1e}"
        lines.append(f"{name:18}{theirs:10.3f}{ours:10.3f}{ratio}{columns}")
    return "\n".join(lines)


def draw(results, figure):
    figure.set_size_inches(6, 4)
    ax = figure.subplots()
    for row in results["rows"]:
        names = list(row["uses"])
        ratios = [min(one["seconds"]["torch"]) / min(one["seconds"]["ours"]) for one in row["uses"].values()]
        ax.plot(ratios, range(len(names)), "o", label=f"S={row['seqlen']}")
    ax.set(xlabel="torch's time over ours", yticks=range(len(names)), yticklabels=names)
    ax.grid(alpha=0.3)
    ax.legend()


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seqlens", nargs="+", type=int)
    for name in ("batch", "width", "heads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="steps in a sample")
    report.add_output_options(parser)
    return report.fill_in(parser.parse_args(arguments), DEFAULTS)


def main(arguments=None):
    report.measure_rows(parse(arguments), draw, measure, table, ("batch", "width", "heads", "dtype"), machine)


if __name__ == "__main__":
    main()
