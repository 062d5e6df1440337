"""Time and error of attention over one packed batch of sequences of mixed lengths, against the others.

    python benchmarks/packed.py                                     # a small batch on the CPU
    python benchmarks/packed.py --device cuda --json results.json
    python benchmarks/packed.py --device cuda --head-dims 128 --peers fa3 --rounds 3
    python benchmarks/packed.py --device cuda --lengths 4096 4096 --group 8    # of one length, grouped heads

Lengths are drawn log-uniformly from 64 to 8192 tokens (--lengths), the same in every run, until they fill
--tokens; the last one is cut. Ours is flash_attn_varlen_func. fa2 and cudnn are torch's varlen_attn held to
that backend, fa3 FlashAttention-3's compiled operators (FA3_LIBRARY names the shared library), each on the
same packed tensors [T, H, D]; loop is torch's scaled_dot_product_attention of one sequence after the other.

Rounds, clocks, table, JSON and the count of FLOPs, here summed over the sequences, are those of
benchmarks/attention.py; there is one set of inputs, as no cache holds them at a GPU's default size. Errors
are those of one random head, on random rows of the longest sequence, the last one and two at random.
"""

import argparse
import inspect
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention
import flash_attn
import implementations
from cell import Cell, whole_groups
from implementations import OURS, Implementation
from report import fill_in

try:
    from torch.nn.attention import varlen
except ImportError:
    varlen = None

DEFAULTS = {"cpu": {"dtypes": ["float32"], "tokens": 8192, "hidden": 512, "idle_ms": 0},
            "cuda": {"dtypes": ["bfloat16"], "tokens": 65536, "hidden": 2048, "idle_ms": 100}}


@dataclass(frozen=True)
class PackedCell:
    direction: str  # "forward" or "backward"
    dtype: str
    lengths: tuple  # of the sequences, in their order
    head_dim: int
    mask: str  # "full" or "causal"
    heads: int
    group: int = 1  # heads of q for each head of k and v

    def sequence(self, length):
        """One sequence's part."""
        return Cell(self.direction, self.dtype, length, self.head_dim, self.mask, -1, 1, self.heads,
                    group=self.group)

    @property
    def flops(self):
        return sum(self.sequence(length).flops for length in self.lengths)

    @property
    def label(self):
        group = f" group {self.group}" * (self.group > 1)
        return (f"{self.direction:8} {self.dtype:8} T={sum(self.lengths):<6} D={self.head_dim:<3} "
                f"{self.mask:10} N={len(self.lengths):<3} H={self.heads:<2}{group}")

    def packing(self, device):
        """Options of flash_attn_varlen_func and of FlashAttention-3's operators."""
        starts = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)
        return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(self.lengths),
                "max_seqlen_k": max(self.lengths)}


def _flash_attn(cell, device):
    options = {**cell.packing(device), "causal": cell.mask == "causal"}
    return lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, **options)


def _fa3(cell, device):
    options = {**cell.packing(device), "is_causal": cell.mask == "causal",
               "softmax_scale": cell.head_dim**-0.5}
    return lambda q, k, v: implementations.fa3(q, k, v, **options)


def _varlen_attn(backend):
    def build(cell, device):
        # torch's first versions of it have no windows, and take grouped heads as they come.
        lengths, known = cell.packing(device).values(), inspect.signature(varlen.varlen_attn).parameters
        options = implementations.grouped(cell) if "enable_gqa" in known else {}
        if cell.mask == "causal":
            options |= {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}

        def attend(q, k, v):
            with sdpa_kernel(backend):
                return varlen.varlen_attn(q, k, v, *lengths, **options)

        return attend

    return build


def _loop(cell, device):
    options = {"is_causal": cell.mask == "causal", **implementations.grouped(cell)}

    def one(*sequence):  # [S, H, D] each
        heads_first = (x.transpose(0, 1)[None] for x in sequence)
        out = F.scaled_dot_product_attention(*heads_first, **options)
        return out[0].transpose(0, 1)

    return lambda q, k, v: torch.cat([one(*x) for x in zip(*(x.split(cell.lengths) for x in (q, k, v)))])


IMPLEMENTATIONS = {
    OURS: Implementation("thd", _flash_attn),
    "fa2": Implementation("thd", _varlen_attn(SDPBackend.FLASH_ATTENTION), ("cuda",),
                          available=lambda: varlen is not None),
    # Before it chose between backends, varlen_attn was flash whatever sdpa_kernel said.
    "cudnn": Implementation("thd", _varlen_attn(SDPBackend.CUDNN_ATTENTION), ("cuda",),
                            available=lambda: hasattr(varlen, "_select_backend")),
    "fa3": Implementation("thd", _fa3, ("cuda",), available=implementations.IMPLEMENTATIONS["fa3"].available),
    "loop": Implementation("thd", _loop),
}


def drawn_lengths(tokens, shortest, longest):
    generator, lengths = torch.Generator().manual_seed(0), []
    while (left := tokens - sum(lengths)) > 0:
        part = torch.rand((), generator=generator).item()
        lengths.append(min(left, round(shortest * (longest / shortest) ** part)))
    return tuple(lengths)


def errors(cell, inputs, results):
    """{implementation: {tensor: largest absolute error}}"""
    count, generator = len(cell.lengths), torch.Generator().manual_seed(len(cell.lengths))
    head = int(torch.randint(cell.heads, (1,), generator=generator))
    chosen = {cell.lengths.index(max(cell.lengths)), count - 1,
              *torch.randperm(count, generator=generator)[:2].tolist()}

    def errors_of_sequence(i):
        begin, one = sum(cell.lengths[:i]), cell.sequence(cell.lengths[i])
        rows = slice(begin, begin + one.seqlen)
        part = {name: {tensor: x[rows] for tensor, x in tensors.items()} for name, tensors in results.items()}
        return attention.sequence_errors(one, [x[rows] for x in inputs], part, head, generator)

    found = [errors_of_sequence(i) for i in sorted(chosen)]
    return {name: {tensor: attention.largest(one[name][tensor] for one in found) for tensor in tensors}
            for name, tensors in results.items()}


def measure(cell, names, options):
    inputs = [x[0] for x in attention.inputs_of(cell.sequence(sum(cell.lengths)), options.device)]
    chosen = {name: IMPLEMENTATIONS[name] for name in names}
    return attention.compare(cell, chosen, [inputs], errors, options)


def cells(lengths, options):
    for dtype, direction, head_dim, mask in itertools.product(
        options.dtypes, ("forward", "backward"), options.head_dims, ("full", "causal")
    ):
        heads = whole_groups(options.hidden // head_dim, options.group)
        yield PackedCell(direction, dtype, lengths, head_dim, mask, heads, options.group)


def parse(arguments):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--tokens", type=int, help="default: 8192, on a GPU 65536")
    parser.add_argument("--lengths", nargs=2, type=int, default=[64, 8192], metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--hidden", type=int, help="H * D; default: 512, on a GPU 2048")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--group", type=int, default=1, help="heads of q for each head of k and v")
    parser.add_argument("--dtypes", nargs="+", help="default: float32, on a GPU bfloat16")
    peers = [name for name in IMPLEMENTATIONS if name != OURS]
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers, help="default: all that are here")
    attention.add_run_options(parser)
    return fill_in(parser.parse_args(arguments), DEFAULTS)


def main(arguments=None):
    options = parse(arguments)
    lengths = drawn_lengths(options.tokens, *options.lengths)
    print(f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all")
    names = attention.usable([OURS, *options.peers], IMPLEMENTATIONS, options.device)
    attention.run(options, names, cells(lengths, options), measure)


if __name__ == "__main__":
    main()
