"""Cross-entropy over large vocabularies: beside the logits it keeps one number a row for the backward.

With z = logit_scale * logits [N, V], lse_i = log sum_j exp z_ij and smoothing e,

    loss_i = lse_i - (1 - e) z_i,label - (e / V) sum_j z_ij + lse_square_scale * lse_i^2
    dloss_i / dz_ij = (1 + 2 lse_square_scale lse_i) exp(z_ij - lse_i) - (1 - e) [j = label] - e / V

Rows are taken a few at a time, so that float32 copies of half-precision logits stay small: at no time is
there a float32 [N, V].
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

__all__ = ["cross_entropy_loss"]

# Logits in flight: 64 MiB of float32, which keeps a GPU busy and is nothing beside the logits of a batch.
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class _Options:
    label_smoothing: float
    logit_scale: float
    lse_square_scale: float
    ignore_index: int
    inplace_backward: bool
    process_group: object


@dataclass(frozen=True)
class _Shard:
    """The classes that this process holds: first_class, first_class + 1, ... of total."""

    first_class: int
    total: int

    @staticmethod
    def of(logits, process_group):
        if process_group is None:
            return _Shard(0, logits.shape[1])
        width = logits.shape[1]
        return _Shard(dist.get_rank(process_group) * width, dist.get_world_size(process_group) * width)


def _check(logits, labels, precomputed_lse):
    if logits.dim() != 2 or not logits.is_floating_point() or logits.shape[1] == 0:
        raise ValueError(
            f"flash_attn: logits must be floating [rows, classes]; got {logits.dtype} {list(logits.shape)}"
        )
    rows = logits.shape[:1]
    is_integer = labels.dtype in (torch.int32, torch.int64)
    if labels.shape != rows or not is_integer or labels.device != logits.device:
        raise ValueError(
            f"flash_attn: labels must be int64 {list(rows)} on {logits.device}, one a row of logits; got "
            f"{labels.dtype} {list(labels.shape)} on {labels.device}"
        )
    if precomputed_lse is not None and precomputed_lse.shape != rows:
        raise ValueError(
            f"flash_attn: precomputed_lse must be {list(rows)}, one a row of logits; got "
            f"{list(precomputed_lse.shape)}"
        )


def _row_chunks(logits):
    rows, classes = logits.shape
    step = max(CHUNK_ELEMENTS // classes, 1)
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


def _scaled(logits, options):
    """A fresh float32 (float64) copy of a few rows, times logit_scale."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype, copy=True).mul_(options.logit_scale)


def _row_lse(scaled, largest):
    """log sum exp of rows whose largest entry is known; -inf where all are. Overwrites scaled."""
    shift = torch.where(largest.isfinite(), largest, 0)
    return scaled.sub_(shift[:, None]).exp_().sum(dim=1).log_().add_(shift)


def _reduce_lse(lse, process_group):
    """From each process' own classes to all of them."""
    largest = lse.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=process_group)
    shift = torch.where(largest.isfinite(), largest, 0)
    total = (lse - shift).exp_()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=process_group)
    return total.log_().add_(shift)


def _own_classes(labels, shard, classes, ignore_index):
    """(column of each row's label, whether this process holds it). An ignored row's column is 0."""
    column = torch.where(labels == ignore_index, -1, labels.long() - shard.first_class)
    if shard.total == classes:
        # A label that is no class fails in gather; those of other processes cannot be told from it.
        return torch.where(labels == ignore_index, 0, column), labels != ignore_index
    is_own = (column >= 0) & (column < classes)
    return torch.where(is_own, column, 0), is_own


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, precomputed_lse, options):
        shard = _Shard.of(logits, options.process_group)
        column, is_own = _own_classes(labels, shard, logits.shape[1], options.ignore_index)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        lse, at_label = (torch.empty(logits.shape[0], dtype=dtype, device=logits.device) for _ in range(2))
        # What smoothing takes the loss down by, but for its factor; read only if there is smoothing.
        total = torch.zeros_like(lse)
        for rows in _row_chunks(logits):
            scaled = _scaled(logits[rows], options)
            at_label[rows] = scaled.gather(1, column[rows, None])[:, 0]
            if options.label_smoothing:
                total[rows] = scaled.sum(dim=1)
            if precomputed_lse is None:
                lse[rows] = _row_lse(scaled, scaled.amax(dim=1))
        if precomputed_lse is not None:
            lse.copy_(precomputed_lse)
        # Smoothing with e moves e of the label's weight to all classes alike.
        gained = torch.where(is_own, (1 - options.label_smoothing) * at_label, 0)
        if options.label_smoothing:
            gained += options.label_smoothing / shard.total * total
        if options.process_group is not None:
            if precomputed_lse is None:
                lse = _reduce_lse(lse, options.process_group)
            dist.all_reduce(gained, group=options.process_group)
        is_ignored = labels == options.ignore_index
        z_losses = torch.where(is_ignored, 0, options.lse_square_scale * lse.square())
        losses = torch.where(is_ignored, 0, lse - gained) + z_losses
        ctx.save_for_backward(logits, labels, lse)
        ctx.options = options
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses, _):
        logits, labels, lse = ctx.saved_tensors
        options = ctx.options
        shard = _Shard.of(logits, options.process_group)
        column, is_own = _own_classes(labels, shard, logits.shape[1], options.ignore_index)
        is_ignored = labels == options.ignore_index
        dscaled = torch.where(is_ignored, 0, dlosses) * options.logit_scale
        at_label = torch.where(is_own, -(1 - options.label_smoothing) * dscaled, 0)
        dlogits = logits if options.inplace_backward else torch.empty_like(logits)
        for rows in _row_chunks(logits):
            gradient = _scaled(logits[rows], options).sub_(lse[rows, None]).exp_()
            gradient.mul_((dscaled[rows] * (1 + 2 * options.lse_square_scale * lse[rows]))[:, None])
            if options.label_smoothing:
                gradient.sub_((options.label_smoothing / shard.total * dscaled[rows])[:, None])
            label = column[rows, None]
            # Not scatter_add_, which has no deterministic form on a GPU; here each row adds once.
            gradient.scatter_(1, label, gradient.gather(1, label) + at_label[rows, None])
            # Selected, not multiplied by zero: an ignored row may hold anything.
            dlogits[rows] = gradient.masked_fill_(is_ignored[rows, None], 0)
        return dlogits, None, None, None


def cross_entropy_loss(
    logits,
    labels,
    precomputed_lse=None,
    label_smoothing=0.0,
    logit_scale=1.0,
    lse_square_scale=0.0,
    ignore_index=-100,
    inplace_backward=False,
    process_group=None,
):
    """Cross-entropy of each row, with label smoothing (arXiv 1512.00567) and z-loss (arXiv 2204.02311).

    Arguments:
        logits: [rows, classes], any floating dtype and strides. With process_group the classes are shared
            out: process r of w holds columns r * classes to (r + 1) * classes of [rows, w * classes].
        labels: int64 or int32 [rows], in [0, all classes), or ignore_index.
        precomputed_lse: None, or [rows], the natural log of the summed exponentials of all unscaled logits,
            where it is known already. Useless and not read if logit_scale is not 1. It gets no gradient of
            its own: that of logits is the full one.
        label_smoothing: weight of the uniform distribution in the target, in [0, 1].
        logit_scale: factor on logits.
        lse_square_scale: adds lse_square_scale * lse^2 to the loss, which keeps lse near 0.
        ignore_index: a label whose row has loss 0 and no gradient.
        inplace_backward: write the gradient into the memory of logits, which are lost then.
        process_group: None, or a torch.distributed group over which the classes are shared out. All of its
            processes must call this alike.

    Returns:
        losses: float32 (float64 for float64 logits) [rows], z-loss included. Differentiable in logits, once;
            the gradient has logits' dtype. Under process_group every process gets all losses.
        z_losses: like losses, the z-loss alone, for logging: no gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        RuntimeError: a label is no class (on the CPU; a CUDA device asserts). Under process_group it is not
            noticed.
    """
    _check(logits, labels, precomputed_lse)
    options = _Options(
        float(label_smoothing), float(logit_scale), float(lse_square_scale), ignore_index, inplace_backward,
        process_group,
    )
    if logit_scale != 1.0:
        precomputed_lse = None
    return _CrossEntropy.apply(logits, labels, precomputed_lse, options)
