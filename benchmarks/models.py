"""Time and error of attention in the shapes that models have, on a GPU, against the machine's others.

    python benchmarks/models.py --json results.json
    python benchmarks/models.py --models vit llama --peers fa3 --rounds 3     # those with these in their name
    python benchmarks/models.py --device cpu --models vit --dtypes float32

Sequences are short, of odd lengths, or few, heads few or grouped, head dims between those that kernels are
made for: what a grid of powers of two (benchmarks/attention.py) does not show. Rounds, clocks, table, JSON,
the count of FLOPs and errors are those of that benchmark.
"""

import argparse
from dataclasses import dataclass

import attention
from cell import Cell
from implementations import DETERMINISTIC, IMPLEMENTATIONS, OURS
from report import fill_in

DEFAULTS = {device: {"idle_ms": attention.DEFAULTS[device]["idle_ms"], "peers": peers}
            for device, peers in attention.PEERS.items()}

# Of one GPU's part of a step: batch, tokens, heads, head dim, mask, and what else a Cell has.
MODELS = {
    "llama 8B, 2048": (1, 2048, 32, 128, "causal", {"group": 4}),
    "llama 8B, 8192": (1, 8192, 32, 128, "causal", {"group": 4}),
    "llama 70B on 8 GPUs, 8192": (1, 8192, 8, 128, "causal", {"group": 8}),
    "qwen 7B": (2, 4096, 28, 128, "causal", {"group": 7}),
    "qwen 0.5B": (4, 4096, 14, 64, "causal", {"group": 7}),
    "mistral": (1, 16384, 32, 128, "window", {"group": 4, "left": 4096}),
    "gemma 2B": (2, 4096, 8, 256, "causal", {"group": 8}),
    "gemma 3, local": (1, 8192, 8, 256, "window", {"group": 2, "left": 1024}),
    "deepseek": (1, 4096, 16, 192, "causal", {"value_dim": 128}),
    "phi 2": (2, 2048, 32, 80, "causal", {}),
    "4 heads": (1, 4096, 4, 128, "causal", {}),
    "gpt2": (8, 1024, 12, 64, "causal", {}),
    "bert, 128": (64, 128, 12, 64, "full", {}),
    "bert, 512": (32, 512, 12, 64, "full", {}),
    "vit, 197": (64, 197, 12, 64, "full", {}),
    "vit large, 577": (32, 577, 16, 64, "full", {}),
    "dino v2, 1370": (16, 1370, 16, 64, "full", {}),
    "siglip": (32, 729, 16, 72, "full", {}),
    "swin, 49": (4096, 49, 4, 32, "full", {}),
    "stable diffusion, 4096": (8, 4096, 8, 40, "full", {}),
    "stable diffusion, text": (8, 4096, 8, 40, "full", {"keys": 77}),
    "sdxl, text": (4, 4096, 10, 64, "full", {"keys": 77}),
    "flux": (1, 4608, 24, 128, "full", {}),
    "whisper, audio": (16, 448, 20, 64, "full", {"keys": 1500}),
}


@dataclass(frozen=True)
class ModelCell(Cell):
    model: str = ""

    @property
    def label(self):
        return f"{self.direction:8} {self.model}"


def cells(options):
    for name, (batch, seqlen, heads, head_dim, mask, rest) in MODELS.items():
        if options.models and not any(part in name for part in options.models):
            continue
        for dtype in options.dtypes:
            for direction in ("forward", "backward"):
                yield ModelCell(direction, dtype, seqlen, head_dim, mask, batch=batch, heads=heads, model=name,
                                **{"left": -1, **rest})


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--models", nargs="+", help="those whose name has one of these in it; default: all")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    peers = [name for name in IMPLEMENTATIONS if name not in (OURS, DETERMINISTIC)]
    parser.add_argument("--peers", nargs="*", choices=peers,
                        help="default: sdpa; on a GPU fa2, cudnn and, if FA3_LIBRARY names it, fa3")
    attention.add_run_options(parser)
    parser.set_defaults(device="cuda")
    return fill_in(parser.parse_args(arguments), DEFAULTS)


def main(arguments=None):
    options = parse(arguments)
    names = attention.usable([OURS, *options.peers], IMPLEMENTATIONS, options.device)
    attention.run(options, names, cells(options), attention.measure)


if __name__ == "__main__":
    main()
