#!/usr/bin/env python3
"""Runs forward and backward of a reduced matrix on the GPU, each feature with each padded head dim, and no
kernel but this library's own: what compute-sanitizer watches (tools/sanitize.sh).

    tools/sanitize_cases.py memcheck                  the cases of one tool
    tools/sanitize_cases.py racecheck -k causal       those of them whose name holds a word
    tools/sanitize_cases.py memcheck --list           their names
    tools/sanitize_cases.py memcheck --kernels        which kernels they launch

All tensors are made on the CPU and copied, so that every byte that a kernel may read was written by a copy or
by a kernel of ours. Results have to be finite; whether they are right is for the tests.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch

import flash_attn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from attention_case import Case  # noqa: E402
from operator_arguments import options  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (192, 192))
# Lengths end inside a tile, and give a query tile several key tiles and the reverse.
DENSE = {"batch": 2, "seqlen_q": 139, "seqlen_k": 203, "num_heads": 2, "num_heads_k": 1}
PACKED = {"cu_seqlens_q": (0, 70, 70, 139), "cu_seqlens_k": (0, 5, 90, 203), "tail": 3}
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"window_size": (70, 9), "softcap": 5.0},
    "alibi": {"causal": True, "alibi": "batch"},
    "dropout": {"dropout_p": 0.3},
    "packed": {"causal": True, **PACKED},
    "block sparse": {"causal": True},
    "unaligned": {"causal": True},
    "many keys": {"batch": 1, "seqlen_k": 1100, "num_heads": 1, "causal": True},  # rows of their own at 64
    "many queries": {"batch": 1, "seqlen_q": 3600, "seqlen_k": 140, "num_heads": 1},
    "split": {"batch": 1, "seqlen_q": 17, "seqlen_k": 2100, "num_heads": 1},
    "empty rows": {"causal": True, "seqlen_q": 203, "seqlen_k": 77},
    "few queries": {"batch": 1, "seqlen_q": 5, "seqlen_k": 700, "num_heads": 3, "causal": True},
    "few queries, more rows": {"batch": 1, "seqlen_q": 40, "seqlen_k": 3000, "num_heads": 3, "causal": True},
    # Head dim 64 alone: more tiles than Hopper's multiprocessors, so that two blocks share one.
    "short": {"batch": 1, "seqlen_q": 100, "seqlen_k": 130, "num_heads": 140, "num_heads_k": 140},
}
# The slowest tool: one head of one sequence, unless the feature asks for others.
SMALL = ("racecheck",)
FEW = {"batch": 1, "num_heads": 1}
HALVES = (torch.bfloat16, torch.float16)


def cases(tool):
    """name -> Case; every head dim with every feature in one of HALVES, a third of them in float32, too."""
    found = {}
    for (row, (head_dim, head_dim_v)), (column, feature) in itertools.product(
            enumerate(HEAD_DIMS), enumerate(FEATURES)):
        turn = row + column
        if feature == "short" and head_dim != 64:
            continue
        if feature == "unaligned":
            head_dim, head_dim_v = head_dim - 3, head_dim_v - 7
        shape = {**DENSE, **(FEW if tool in SMALL else {}), **FEATURES[feature]}
        for dtype in (HALVES[turn % 2], *([torch.float32] if turn % 3 == 1 else [])):
            name = f"{feature}, {head_dim}/{head_dim_v}, {str(dtype)[6:]}"
            # With deterministic=True few queries, and short sequences, have no kernels of their own.
            own = feature.startswith(("few queries", "short"))
            name += ", deterministic" if turn // 2 % 2 and not own else ""
            found[name] = Case(dtype, head_dim=head_dim, head_dim_v=head_dim_v, seed=turn, **shape)
    return found


def block_lists(case):
    """Blocks of 64 queries and 128 keys, about 70% of them, as the operators take them."""
    shape = (1, case.num_heads, -(-case.seqlen_q // 64), -(-case.seqlen_k // 128))
    block_map = torch.rand(shape, generator=torch.Generator().manual_seed(case.seed)) < 0.7
    mask = flash_attn.BlockSparseMask.from_block_map(block_map, (64, 128))
    names = ("key_block_counts", "key_block_indices", "query_block_counts", "query_block_indices")
    return {"block_size_q": 64, "block_size_k": 128, **{name: getattr(mask, name) for name in names}}


def arguments(name, case):
    """(q, k, v, dout, dlse) and the operators' options, on the GPU."""
    given = {"softmax_scale": case.head_dim**-0.5, "softcap": case.softcap, "dropout_p": case.dropout_p,
             "alibi_slopes": case.slopes(), "deterministic": "deterministic" in name}
    given["window_size_left"], right = case.window_size
    given["window_size_right"] = 0 if case.causal else right
    if case.packed:
        given["cu_seqlens_q"], given["cu_seqlens_k"] = case.cu_seqlens()
        given["max_seqlen_q"], given["max_seqlen_k"] = case.max_seqlens
    if case.dropout_p > 0:
        given["rng_state"] = torch.tensor([123, 456])
    if "block sparse" in name:
        given |= block_lists(case)
    inputs = (*case.draw(), case.draw_dlse())
    on_gpu = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    return [x.cuda() for x in inputs], options(**on_gpu)


def run(name, case):
    (q, k, v, dout, dlse), given = arguments(name, case)
    out, lse = torch.ops.flash_attn.attention_forward(q, k, v, *given)
    gradients = torch.ops.flash_attn.attention_backward(dout, dlse, q, k, v, out, lse, *given)
    torch.cuda.synchronize()
    # Copied back first: no kernel but ours, and initcheck looks at every byte of a copy.
    out, lse, *gradients = (x.cpu() for x in (out, lse, *gradients))
    if lse.isnan().any() or not all(x.isfinite().all() for x in (out, *gradients)):
        raise SystemExit(f"{name}: a result is not finite")


def launched_kernels(chosen):
    """Names of the kernels that the cases launch, without the sanitizer."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for name, case in chosen.items():
            run(name, case)
    device_events = (e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return sorted({e.name for e in device_events if not e.name.startswith(("Memcpy", "Memset"))})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("-k", metavar="WORD", default="", help="only cases whose name holds it")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--kernels", action="store_true", help="print the kernels that the cases launch")
    given = parser.parse_args()
    chosen = {name: case for name, case in cases(given.tool).items() if given.k in name}
    if not chosen:
        sys.exit(f"no case of {given.tool} has {given.k!r} in its name; --list shows them")
    if given.list:
        print("\n".join(chosen))
    elif given.kernels:
        names = launched_kernels(chosen)
        print("\n".join(names))
        if not any("flash" in name for name in names):
            sys.exit("no kernel has a name with 'flash', by which tools/sanitize.sh chooses kernels")
    else:
        for name, case in chosen.items():
            begin = time.time()
            run(name, case)
            print(f"{name}: {time.time() - begin:.0f} s", flush=True)
        print(f"{len(chosen)} cases")


if __name__ == "__main__":
    main()
