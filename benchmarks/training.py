"""The training examples with each attention in one run: tokens/s, peak memory, loss.

    python benchmarks/training.py --size gpt2 --device cuda --json results.json
    python benchmarks/training.py --attentions flash standard --steps 20      # the tiny one, on a CPU
    python benchmarks/training.py --example bert --size base --device cuda    # packed against padded
    python benchmarks/training.py --model gpt2 --device cuda                  # Hugging Face's GPT-2

GPT-2 is examples/train_gpt2.py; BERT is examples/train_bert.py, whose documents are packed for flash and
padded for the others: tokens are those of the text, not of the padding. fa3 is flash with FlashAttention-3's
operators, if the environment variable FA3_LIBRARY names the shared library.

One attention after the other, each from the same initial weights, through the same windows of the same text;
every option of the example is an option here. tokens/s is from the median step. The loss is the mean of the
last tenth of the steps, the held-out loss that of the example; "from standard" is the largest distance
between two training losses of a step, to compare with that of sdpa: rounding alone moves the curves apart.
"""

import argparse
import contextlib
import gc
import importlib.util
import statistics
import tempfile
import time
from pathlib import Path

import torch

import implementations
import report
from machine import machine

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
WARM_UP_STEPS = 5  # left out of tokens/s: compiling, tuning, first allocations


def load_example(name):
    spec = importlib.util.spec_from_file_location(f"train_{name}", EXAMPLES / f"train_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fa3_in_gpt2(qkv, dropout_p):  # qkv [B, S, 3, H, D] -> [B, S, H, D]
    check_fa3_can(dropout_p)
    return implementations.fa3(*qkv.unbind(2), softmax_scale=qkv.shape[-1]**-0.5, is_causal=True)


def fa3_in_bert(qkv, batch, dropout_p):  # qkv [T, 3, H, D] -> [T, H, D]
    check_fa3_can(dropout_p)
    return implementations.fa3(
        *qkv.unbind(1), softmax_scale=qkv.shape[-1]**-0.5, is_causal=False, cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_k=batch.cu_seqlens, max_seqlen_q=batch.max_seqlen, max_seqlen_k=batch.max_seqlen,
    )


def check_fa3_can(dropout_p):
    if dropout_p:
        raise SystemExit("FlashAttention-3 has no dropout")


def add_fa3(example, name, model):
    if model:
        raise SystemExit("Hugging Face's models choose their attention themselves: no fa3 with --model")
    example.ATTENTION["fa3"] = {"gpt2": fa3_in_gpt2, "bert": fa3_in_bert}[name]
    if name == "bert":
        example.PACKED.add("fa3")


def train(example, args, vocabulary, train_data, held_out_data):
    """One attention's row of the table, with every step's loss and seconds."""
    on_gpu = args.device.startswith("cuda")
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = example.Trainer(args, vocabulary.size, train_data, held_out_data)
    for _ in range(args.steps):
        trainer.train_step()
    losses = example.column(trainer.history, "train_loss")
    measured = max(1, args.steps - WARM_UP_STEPS)
    return {
        "parameters": trainer.parameters,
        "tokens_per_step": trainer.tokens_per_step,  # a mean, for documents of different lengths
        "padding": trainer.padding(),
        "tokens_per_second": trainer.tokens_per_second(last=measured),
        # Not of a CPU's process: what one attention frees, the next one finds.
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "train_loss": statistics.fmean(losses[-max(1, len(losses) // 10):]),
        "held_out_loss": trainer.held_out_loss(),
        "train_losses": losses,
        "step_seconds": example.column(trainer.history, "step_seconds"),
    }


def table(rows):
    yield (f"{'attention':12}{'tokens/s':>12}{'/ standard':>12}{'peak GB':>10}{'loss':>10}{'held out':>10}"
           f"{'from standard':>15}")
    standard = rows.get("standard")
    for name, row in rows.items():
        speed = f"{row['tokens_per_second'] / standard['tokens_per_second']:.2f}" if standard else "-"
        distance = "-"
        if standard:
            pairs = zip(row["train_losses"], standard["train_losses"])
            distance = f"{max(abs(a - b) for a, b in pairs):.4f}"
        peak = f"{row['peak_memory_bytes'] / 1e9:.2f}" if row["peak_memory_bytes"] else "-"
        yield (f"{name:12}{row['tokens_per_second']:12,.0f}{speed:>12}{peak:>10}{row['train_loss']:10.4f}"
               f"{row['held_out_loss']:10.4f}{distance:>15}")


def run_name(config):
    name = f"{config.get('example', 'gpt2')}-{config['size']}"
    return f"Hugging Face's {config['model']}" if config.get("model") else name


def draw(results, figure):
    """The losses, which must coincide: the first lies beneath, wide and solid, the others dashed."""
    figure.set_size_inches(8, 5)
    ax = figure.subplots()
    for number, (name, row) in enumerate(results["attentions"].items()):
        steps = range(1, len(row["train_losses"]) + 1)
        line, width = ("--", 1.5) if number else ("-", 4)
        ax.plot(steps, row["train_losses"], line, linewidth=width,
                label=f"{name}, {row['tokens_per_second']:,.0f} tokens/s")
    config = results["config"]
    ax.set(xlabel="step", ylabel="training loss (nats per token)",
           title=f"{run_name(config)}, {config['context']} tokens, {config['dtype']}, "
                 f"{results['machine']['processor']}")
    ax.grid(alpha=0.3)
    ax.legend()


def parse(arguments):
    """-> this benchmark's options, and what the example shall parse."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--example", choices=["gpt2", "bert"], default="gpt2")
    parser.add_argument("--attentions", nargs="+", default=["flash", "sdpa", "standard"],
                        choices=["flash", "fa3", "sdpa", "standard"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10, help="steps until the learning rate is at its top")
    report.add_output_options(parser)
    return parser.parse_known_args(arguments)


def main(arguments=None):
    options, others = parse(arguments)
    if report.drawn_earlier_run(options, draw):
        return
    example, rows = load_example(options.example), {}
    with contextlib.ExitStack() as stack:
        if "--out" not in others:  # where the example keeps the byte pairs that it learns from the text
            others += ["--out", stack.enter_context(tempfile.TemporaryDirectory())]
        others += ["--steps", str(options.steps), "--warmup", str(options.warmup)]
        args = example.parse_arguments(others)
        if "fa3" in options.attentions:
            add_fa3(example, options.example, args.model)
        args.out.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        loaded = example.load_data(args)
        config = {"example": options.example, **vars(args)}
        where = machine(torch.device(args.device).type)
        print(f"{where['processor']}, torch {where['torch']}, flash_attn {where['flash_attn']}; "
              f"{run_name(config)}, batch {args.batch} x {args.accumulate} of {args.context} tokens, "
              f"{args.dtype}, {args.steps} steps; text ready in {time.perf_counter() - begin:.0f} s",
              flush=True)
        for name in options.attentions:
            args.attention, begin = name, time.perf_counter()
            rows[name] = train(example, args, *loaded)
            print(f"  {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{rows[options.attentions[0]]['parameters']:,} parameters", *table(rows), sep="\n")
    config = {name: value for name, value in config.items() if name not in ("attention", "out")}
    report.write({"machine": where, "config": config, "attentions": rows}, options, draw)


if __name__ == "__main__":
    main()
