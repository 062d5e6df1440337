"""What a call would run, and why not something else."""

import itertools
from dataclasses import dataclass, field

import torch

from . import _C
from .attention import check_tensors, scale_of, window_of
from .attention_mask import bias_for, mask_for


@dataclass(frozen=True)
class PassPlan:
    """One pass of one call.

    Attributes:
        engine: "cpu", "sm80", ...; None if nothing runs it.
        configuration: the instruction set, or the kernel's name.
        splits: blocks of the GPU that share the keys of a query tile.
        workspace_bytes: memory taken for the time of the call, besides the results.
        flops: floating-point operations of the matrix products over visible pairs of a query and a key.
        error: what the call would raise if engine is None, otherwise "".
        others: (engine, kernel or "", reason) of everything that does not run it.
    """

    engine: str | None
    configuration: str
    splits: int
    workspace_bytes: int
    flops: int
    error: str
    others: list = field(repr=False)

    def lines(self, name):
        if self.engine is None:
            yield f"{name:9} raises {self.error}"
            return
        split = f"keys split in {self.splits}, " if self.splits > 1 else ""
        work = f"{self.flops / 1e9:,.3f} GFLOP, {split}{self.workspace_bytes:,} bytes of workspace"
        yield f"{name:9} {self.engine} {self.configuration}: {work}"
        for engine, kernel, reason in self.others:
            yield f"          not {f'{engine} {kernel}'.strip()}: {reason}"


@dataclass(frozen=True)
class Explanation:
    """What flash_attn.explain returns; print it.

    Attributes:
        tensors: shapes, dtype and device, in words.
        pairs: how many pairs of a query and a key the mask lets see each other, over all heads.
        all_pairs: how many there are.
        forward, backward: PassPlan.
    """

    tensors: str
    pairs: int
    all_pairs: int
    forward: PassPlan
    backward: PassPlan

    def __str__(self):
        share = 100 * self.pairs / max(self.all_pairs, 1)
        visible = f"visible   {self.pairs:,} of {self.all_pairs:,} pairs of a query and a key ({share:.1f} %)"
        passes = [*self.forward.lines("forward"), *self.backward.lines("backward")]
        return "\n".join([self.tensors, visible, *passes])


def _visible_pairs(seqlen_q, seqlen_k, left, right, block_size=None):
    """Visible pairs of one head: a number, or per block int64 [Mq, Nk]."""
    diagonal = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    begin = (diagonal - left).clamp(0, seqlen_k) if left >= 0 else torch.zeros_like(diagonal)
    end = (diagonal + right + 1).clamp(0, seqlen_k) if right >= 0 else torch.full_like(diagonal, seqlen_k)
    if block_size is None:
        return int((end - begin).clamp(min=0).sum())
    rows, columns = block_size
    first = torch.arange(0, seqlen_k, columns)
    inside = torch.minimum(end[:, None], first + columns) - torch.maximum(begin[:, None], first)
    counts = torch.zeros(-(-seqlen_q // rows), len(first), dtype=torch.int64)
    return counts.index_add_(0, torch.arange(seqlen_q) // rows, inside.clamp(min=0))


def _lengths(cu_seqlens_q, cu_seqlens_k):
    """(seqlen_q, seqlen_k) of each sequence."""
    offsets = (cu_seqlens.tolist() for cu_seqlens in (cu_seqlens_q, cu_seqlens_k))
    return list(zip(*([end - begin for begin, end in itertools.pairwise(o)] for o in offsets), strict=True))


def _count_pairs(lengths, heads, window, mask):
    """(visible, all) pairs over all heads."""
    everything = heads * sum(seqlen_q * seqlen_k for seqlen_q, seqlen_k in lengths)
    if mask is None:
        counted = {pair: _visible_pairs(*pair, *window) for pair in set(lengths)}
        return heads * sum(counted[pair] for pair in lengths), everything
    block_map = mask.block_map.cpu()
    copies = len(lengths) // block_map.shape[0] * (heads // block_map.shape[1])
    counts = _visible_pairs(*lengths[0], *window, mask.block_size)
    return copies * int((block_map * counts).sum()), everything


def _plans(sizes, device):
    """{"forward": PassPlan's fields but flops, "backward": the same}."""
    if device.type == "cuda":
        elsewhere, threads = ["cpu"], 1
        try:
            plans = _C.plan(sizes, _C.devices()[device.index])
        except RuntimeError as error:
            plans = {name: {"error": str(error), "others": []} for name in ("forward", "backward")}
    else:
        elsewhere = dict.fromkeys(kernel["engine"] for kernel in _C.kernels())
        threads = torch.get_num_threads()
        plans = _C.plan(sizes, None)
    nothing = {"engine": None, "configuration": "", "splits": 1, "workspace_bytes": 0, "error": ""}
    for name, plan in plans.items():
        plan = plans[name] = {**nothing, **plan}
        plan["workspace_bytes"] *= threads
        plan["others"] += [(engine, "", f"q is on {device}") for engine in elsewhere]
    return plans


def _strides(bias):
    """Of batch entries, heads and rows as kernels get them, rows of 16 bytes; None without a bias."""
    if bias is None:
        return None
    batch, heads, rows, keys = bias.shape
    row = -(-keys // 8) * 8
    return (batch > 1) * heads * rows * row, (heads > 1) * rows * row, (rows > 1) * row


def explain(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=0,
    max_seqlen_k=0,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    mask=None,
    attn_mask=None,
    attn_bias=None,
):
    """Which engine and kernel flash_attn_func would run for these tensors, forward and backward, and why not
    the others. Runs nothing; for packed sequences and masks it reads device memory.

    Args:
        q, k, v: as for flash_attn_func; with cu_seqlens_q and cu_seqlens_k as for flash_attn_varlen_func.
        mask: BlockSparseMask, as for flash_attn_block_sparse_func.
        attn_mask: as for flash_attn_func; all pairs count of a block that holds a visible one.
        Everything else: see flash_attn_func.

    Returns:
        Explanation, to print or to read.

    Examples:
        >>> q = torch.randn(1, 512, 8, 64)
        >>> print(explain(q, q, q, causal=True))  # doctest: +SKIP
        q [1, 512, 8, 64], k [1, 512, 8, 64], v [1, 512, 8, 64] float32 on cpu
        visible   1,050,624 of 2,097,152 pairs of a query and a key (50.1 %)
        forward   cpu avx512_bf16: 0.269 GFLOP, 342,144 bytes of workspace
                  not sm80: q is on cpu
        backward  cpu avx512_bf16: 0.672 GFLOP, 522,240 bytes of workspace
                  not sm80: q is on cpu
    """
    check_tensors(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, alibi_slopes=alibi_slopes)
    if q.device.type == "meta":
        raise RuntimeError("flash_attn: q is on meta, where nothing runs; explain needs to know a device")
    if attn_mask is not None:
        mask = mask_for(attn_mask, q.shape[1], k.shape[1]).blocks
    if attn_bias is not None:
        attn_bias = bias_for(attn_bias, q.shape[1], k.shape[1], q.dtype)
    packed = cu_seqlens_q is not None
    window = window_of(window_size, causal)
    (rows_q, heads_q, head_dim), (rows_k, heads_k), head_dim_v = q.shape[-3:], k.shape[-3:-1], v.shape[-1]
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k) if packed else [(rows_q, rows_k)] * q.shape[0]
    sizes = {
        "dtype": str(q.dtype).removeprefix("torch."), "batch": len(lengths), "heads_q": heads_q,
        "heads_k": heads_k, "head_dim": head_dim, "head_dim_v": head_dim_v,
        "seqlen_q": max([int(max_seqlen_q), *(length for length, _ in lengths)]),
        "seqlen_k": max([int(max_seqlen_k), *(length for _, length in lengths)]),
        "rows_q": rows_q, "rows_k": rows_k,
        "window_left": window[0], "window_right": window[1], "packed": packed,
        "block_size": (0, 0) if mask is None else mask.block_size, "attn_bias": _strides(attn_bias),
        "alibi": alibi_slopes is not None, "softmax_scale": scale_of(softmax_scale, q),
        "softcap": float(softcap), "dropout_p": float(dropout_p),
        "deterministic": bool(deterministic) or torch.are_deterministic_algorithms_enabled(),
    }
    plans = _plans(sizes, q.device)
    pairs, all_pairs = _count_pairs(lengths, heads_q, window, mask)
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    return Explanation(
        f"{shapes} {sizes['dtype']} on {q.device}",
        pairs,
        all_pairs,
        # Forward S = Q K^T and O = P V; backward S again, dP = dO V^T, and a product for each gradient.
        forward=PassPlan(flops=2 * pairs * (head_dim + head_dim_v), **plans["forward"]),
        backward=PassPlan(flops=2 * pairs * (3 * head_dim + 2 * head_dim_v), **plans["backward"]),
    )
