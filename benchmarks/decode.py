"""Time and error of decoding, one query a sequence, against the others: TB/s of the keys and values read.

    python benchmarks/decode.py --device cuda --json results.json
    python benchmarks/decode.py --cells 2,8,2,64,512 --dtypes float32    # on the CPU

Ours twice: flash_attn_func, as a model calls it whose cache is grown by concatenation, and
flash_attn_with_kvcache. sdpa is torch's scaled_dot_product_attention, which takes what it thinks best, cudnn
the same held to that backend, fa3 FlashAttention-3's compiled operator (FA3_LIBRARY names the shared library).
Rounds and clocks are those of benchmarks/attention.py; errors are the largest of one random entry and head.
"""

import argparse
from dataclasses import dataclass

import torch

import attention
import flash_attn
import implementations
from implementations import OURS, Implementation
from machine import machine
from report import fill_in

DEFAULTS = {"cpu": {"idle_ms": 0}, "cuda": {"idle_ms": 100}}
# batch, heads, key heads, head dim, keys: those of the tables that its targets come from.
TARGETS = [(32, 32, 8, 128, 8192), (1, 32, 8, 128, 8192), (1, 32, 8, 128, 131072), (64, 64, 8, 64, 8192),
           (16, 16, 2, 256, 16384), (64, 32, 8, 128, 1024)]


@dataclass(frozen=True)
class DecodeCell:
    dtype: str
    batch: int
    heads: int
    key_heads: int
    head_dim: int
    keys: int
    # Of a Cell, what implementations ask for. One query sees all keys, causal or not.
    direction: str = "forward"
    mask: str = "full"
    softcap: float = 0
    alibi: bool = False

    @property
    def flops(self):
        return 4 * self.batch * self.heads * self.keys * self.head_dim

    @property
    def group(self):
        return self.heads // self.key_heads

    @property
    def input_bytes(self):
        """Of K and V; what the one query has is nothing beside them."""
        return 2 * self.batch * self.key_heads * self.keys * self.head_dim * getattr(torch, self.dtype).itemsize

    @property
    def label(self):
        return (f"{self.dtype:8} B={self.batch:<3} H={self.heads:<2} Hk={self.key_heads:<2} "
                f"D={self.head_dim:<3} N={self.keys}")


def inputs_of(cell, device, number):
    """As attention.inputs_of."""
    generator = torch.Generator(device).manual_seed(cell.keys + number)

    def draw(rows, heads):
        shape = cell.batch, rows, heads, cell.head_dim
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, cell.dtype))

    return [draw(1, cell.heads), draw(cell.keys, cell.key_heads), draw(cell.keys, cell.key_heads),
            draw(1, cell.heads)]


def _flash_attn(cell, device):
    return lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True)


IMPLEMENTATIONS = {
    OURS: Implementation("bshd", _flash_attn),
    "kvcache": Implementation("bshd", lambda cell, device: flash_attn.flash_attn_with_kvcache),
    "sdpa": Implementation("bshd", implementations.sdpa_in_place),
    **{name: implementations.IMPLEMENTATIONS[name] for name in ("cudnn", "fa3")},
}


def errors(cell, inputs, results):
    generator = torch.Generator().manual_seed(cell.keys)
    entry, head = (int(torch.randint(n, (1,), generator=generator)) for n in (cell.batch, cell.heads))
    q, k, v = (x[entry, :, h].double() for x, h in
               zip(inputs, (head, *[head // cell.group] * 2)))
    expected = torch.softmax(q @ k.T * cell.head_dim**-0.5, -1) @ v
    return {name: {"out": float((tensors["out"][entry, :, head].double() - expected).abs().max())}
            for name, tensors in results.items()}


def row(cell, measured, names):
    """TB/s and the largest error of each, after the cell's label."""
    found = [measured[name] for name in names]
    rates = "".join(f"{cell.input_bytes / r['ms'] / 1e9:9.2f}" if "ms" in r else f"{'-':>9}" for r in found)
    worst = "".join(f"{r['errors']['out']:9.1e}" if "ms" in r else f"{'-':>9}" for r in found)
    remarks = [f"\n  {n} refused: {r['refused']}" for n, r in measured.items() if "refused" in r]
    remarks += [f"\n  {n}: the GPU waited for the host" for n, r in measured.items() if r.get("waited_for_host")]
    return f"{cell.label:48}{rates} |{worst}{''.join(remarks)}"


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--cells", nargs="+", type=lambda text: tuple(map(int, text.split(","))),
                        help="batch,heads,key heads,head dim,keys; default: those of TARGETS")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    attention.add_run_options(parser)
    return fill_in(parser.parse_args(arguments), DEFAULTS)


def main(arguments=None):
    options = parse(arguments)
    names = attention.usable(IMPLEMENTATIONS, IMPLEMENTATIONS, options.device)
    where, rows = machine(options.device), []
    print(f"{where['processor']}; TB/s of K and V read, then errors\n{'':48}"
          + "".join(f"{name:>9}" for name in ["ours" if n == OURS else n for n in names]))
    for dtype in options.dtypes:
        for sizes in options.cells or TARGETS:
            cell = DecodeCell(dtype, *sizes)
            chosen = {name: IMPLEMENTATIONS[name] for name in names}
            sets = attention.input_sets(cell, options.device, inputs_of)
            measured = attention.compare(cell, chosen, sets, errors, options)
            rows.append((cell, measured))
            print(row(cell, measured, names), flush=True)
    if options.json:
        attention.write_json(options.json, where, options, rows, attention.geometric_means(rows, names))


if __name__ == "__main__":
    main()
