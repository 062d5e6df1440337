"""Time and error of decoding, few queries a sequence, against the others: TB/s of the keys and values read.

    python benchmarks/decode.py --device cuda --json results.json
    python benchmarks/decode.py --cells 2,8,2,64,512 --dtypes float32    # on the CPU

Ours twice: flash_attn_func, as a model calls it whose cache is grown by concatenation, and
flash_attn_with_kvcache. sdpa is torch's scaled_dot_product_attention, which takes what it thinks best, cudnn
the same held to that backend, fa3 FlashAttention-3's compiled operator (FA3_LIBRARY names the shared library).
Several queries, as those of speculative decoding, see all keys here: torch's causal mask would mean others. A
cache in pages, in random order, is read by kvcache and fa3 alone. Rounds and clocks are those of
benchmarks/attention.py; errors are the largest of one random entry and head.
"""

import argparse
from dataclasses import dataclass, replace

import torch

import attention
import flash_attn
import implementations
from implementations import OURS, Implementation
from machine import machine
from report import fill_in

DEFAULTS = {"cpu": {"idle_ms": 0}, "cuda": {"idle_ms": 100}}
# batch, heads, key heads, head dim, keys, queries, rows of a page (0: none), softcap (0: none).
TARGETS = [(32, 32, 8, 128, 8192), (8, 32, 8, 128, 8192), (1, 32, 8, 128, 8192), (1, 32, 8, 128, 131072),
           (64, 64, 8, 64, 8192), (8, 64, 8, 64, 8192), (16, 16, 2, 256, 16384), (64, 32, 8, 128, 1024),
           (64, 32, 32, 128, 1024), (2, 32, 8, 128, 2048), (1, 14, 2, 64, 2000), (1, 8, 1, 256, 32768),
           (8, 32, 8, 128, 8192, 4), (32, 32, 8, 128, 8192, 4), (8, 64, 8, 64, 8192, 2), (8, 64, 4, 128, 8192, 8),
           (8, 32, 8, 128, 8192, 8), (8, 32, 8, 128, 8192, 32), (8, 32, 8, 128, 8192, 64),
           (32, 32, 8, 128, 8192, 16), (1, 32, 8, 128, 8192, 16), (1, 32, 8, 128, 8192, 128),
           (8, 64, 8, 64, 8192, 8), (8, 16, 2, 256, 8192, 8), (8, 32, 8, 128, 8192, 1, 256),
           (32, 32, 8, 128, 4096, 1, 16), (64, 32, 8, 128, 1024, 1, 64), (8, 32, 8, 128, 8192, 16, 256),
           (8, 16, 8, 256, 8192, 1, 0, 50), (8, 32, 16, 128, 8192, 1, 0, 50)]


@dataclass(frozen=True)
class DecodeCell:
    dtype: str
    batch: int
    heads: int
    key_heads: int
    head_dim: int
    keys: int
    queries: int = 1
    page: int = 0
    softcap: float = 0
    # Of a Cell, what implementations ask for.
    direction: str = "forward"
    mask: str = "full"
    alibi: bool = False

    @property
    def flops(self):
        return 4 * self.batch * self.heads * self.queries * self.keys * self.head_dim

    @property
    def group(self):
        return self.heads // self.key_heads

    @property
    def input_bytes(self):
        """Of K and V; what few queries have is nothing beside them."""
        return 2 * self.batch * self.key_heads * self.keys * self.head_dim * getattr(torch, self.dtype).itemsize

    @property
    def label(self):
        return (f"{self.dtype:8} B={self.batch:<3} H={self.heads:<2} Hk={self.key_heads:<2} "
                f"D={self.head_dim:<3} N={self.keys:<6} Q={self.queries}" + f" page={self.page}" * bool(self.page)
                + f" softcap={self.softcap}" * bool(self.softcap))

    def visible(self, queries, device):
        return torch.ones(len(queries), self.keys, dtype=torch.bool, device=device)

    def table(self, device):
        """int32 [batch, pages of a sequence]; None without pages."""
        if not self.page:
            return None
        generator = torch.Generator().manual_seed(self.keys)
        pages = torch.randperm(self.batch * self.keys // self.page, generator=generator)
        return pages.view(self.batch, -1).int().to(device)

    def pages(self, cache):
        """[batch, keys, ...] as [pages, page, ...]."""
        return cache.view(-1, self.page, *cache.shape[2:]) if self.page else cache


def inputs_of(cell, device, number):
    """As attention.inputs_of."""
    generator = torch.Generator(device).manual_seed(cell.keys + number)

    def draw(rows, heads):
        shape = cell.batch, rows, heads, cell.head_dim
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, cell.dtype))

    return [draw(cell.queries, cell.heads), draw(cell.keys, cell.key_heads), draw(cell.keys, cell.key_heads),
            draw(cell.queries, cell.heads)]


def _without_pages(build):
    def built(cell, device):
        if cell.page:
            raise NotImplementedError("it reads no pages")
        return build(cell, device)

    return built


def _flash_attn(cell, device):
    return lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=cell.queries == 1, softcap=cell.softcap)


def _kvcache(cell, device):
    table = cell.table(device)
    lengths = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=device) if cell.page else None
    return lambda q, k, v: flash_attn.flash_attn_with_kvcache(
        q, cell.pages(k), cell.pages(v), block_table=table, cache_seqlens=lengths, softcap=cell.softcap)


def _fa3(cell, device):
    if not cell.page:
        return implementations.IMPLEMENTATIONS["fa3"].build(cell, device)
    options = {"page_table": cell.table(device), "softmax_scale": cell.head_dim**-0.5, "softcap": cell.softcap,
               "seqused_k": torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=device)}
    return lambda q, k, v: implementations.fa3(q, cell.pages(k), cell.pages(v), **options)


IMPLEMENTATIONS = {
    OURS: Implementation("bshd", _without_pages(_flash_attn)),
    "kvcache": Implementation("bshd", _kvcache),
    "sdpa": Implementation("bshd", _without_pages(implementations.sdpa_in_place)),
    "cudnn": replace(implementations.IMPLEMENTATIONS["cudnn"],
                     build=_without_pages(implementations.IMPLEMENTATIONS["cudnn"].build)),
    "fa3": replace(implementations.IMPLEMENTATIONS["fa3"], build=_fa3),
}


def errors(cell, inputs, results):
    generator = torch.Generator().manual_seed(cell.keys)
    entry, head = (int(torch.randint(n, (1,), generator=generator)) for n in (cell.batch, cell.heads))
    q, *caches = inputs[:3]
    if cell.page:
        rows = cell.table(q.device).long()[entry]
        caches = [cell.pages(cache)[rows].flatten(0, 1) for cache in caches]
    else:
        caches = [cache[entry] for cache in caches]
    q = q[entry, :, head].double()
    k, v = (cache[:, head // cell.group].double() for cache in caches)
    expected = attention.probabilities(q, k, torch.arange(cell.queries), cell, head)[0] @ v
    return {name: {"out": float((tensors["out"][entry, :, head].double() - expected).abs().max())}
            for name, tensors in results.items()}


def row(cell, measured, names):
    """TB/s and the largest error of each, after the cell's label."""
    found = [measured[name] for name in names]
    rates = "".join(f"{cell.input_bytes / r['ms'] / 1e9:9.2f}" if "ms" in r else f"{'-':>9}" for r in found)
    worst = "".join(f"{r['errors']['out']:9.1e}" if "ms" in r else f"{'-':>9}" for r in found)
    remarks = [f"\n  {n} refused: {r['refused']}" for n, r in measured.items() if "refused" in r]
    remarks += [f"\n  {n}: the GPU waited for the host" for n, r in measured.items() if r.get("waited_for_host")]
    return f"{cell.label:62}{rates} |{worst}{''.join(remarks)}"


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--cells", nargs="+", type=lambda text: tuple(map(int, text.split(","))),
                        help="batch,heads,key heads,head dim,keys[,queries[,page[,softcap]]]; default: TARGETS")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    attention.add_run_options(parser)
    return fill_in(parser.parse_args(arguments), DEFAULTS)


def main(arguments=None):
    options = parse(arguments)
    names = attention.usable(IMPLEMENTATIONS, IMPLEMENTATIONS, options.device)
    where, rows = machine(options.device), []
    print(f"{where['processor']}; TB/s of K and V read, then errors\n{'':62}"
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
