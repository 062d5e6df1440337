"""Between padded batches [batch, seqlen, ...] and packed rows [total, ...], with gradients.

Attention over packed rows does no work on padding. `unpad_input` keeps the valid positions of a padded
batch, in order; `pad_input` puts rows back where they came from and zeros elsewhere. What describes a
packed batch: `indices`, the kept positions of the flattened [batch * seqlen] axis (int64), `cu_seqlens`,
where each sequence begins among the packed rows, and their number at the end (int32 [batch + 1]), and
`max_seqlen`, the longest length (a Python int: reading it waits for the device, as finding `indices` does).

`rearrange` and `repeat` of einops are importable from here because callers expect them here.
"""

import torch
from einops import rearrange, repeat

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "repeat",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def _described(tensor):
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _check_rows(name, rows):
    if rows.ndim < 1:
        raise ValueError(f"{name} must have a first axis to index, got a scalar: {_described(rows)}")


def _checked_indices(indices, rows):
    if indices.ndim != 1 or indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"indices must be one-dimensional int64, as unpad_input returns them; got {_described(indices)}"
        )
    if indices.device != rows.device:
        raise ValueError(f"indices are on {indices.device}, the rows on {rows.device}; they must share one")
    return indices.long()


def _check_batch(hidden_states, name, mask):
    if hidden_states.ndim < 2:
        raise ValueError(f"hidden_states must be [batch, seqlen, ...], got {_described(hidden_states)}")
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} must be [batch, seqlen] = {list(hidden_states.shape[:2])} to match hidden_states "
            f"{list(hidden_states.shape)}, got {_described(mask)}"
        )
    if mask.device != hidden_states.device:
        raise ValueError(f"{name} is on {mask.device}, hidden_states on {hidden_states.device}")


def _as_bool(name, mask):
    """Nonzero means true. An additive mask (0 keeps, -inf drops) means the opposite, so it is refused."""
    if mask.is_floating_point() and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"{name} must hold 1 for valid and 0 for padding, but has other values in {_described(mask)}; "
            "an additive mask (0 for valid, -inf for padding) becomes one by mask == 0"
        )
    return mask != 0


def _cumulative(seqlens):
    """Lengths [n] -> boundaries int32 [n + 1], beginning with 0."""
    boundaries = torch.zeros(seqlens.numel() + 1, dtype=torch.int32, device=seqlens.device)
    torch.cumsum(seqlens, dim=0, dtype=torch.int32, out=boundaries[1:])
    return boundaries


def _longest(seqlens):
    return int(seqlens.max()) if seqlens.numel() else 0


def _row_sum(rows, indices, first_axis_dim):
    """Adds rows [n, ...] into zeros [first_axis_dim, ...] at indices [n]: the transpose of taking rows.

    Addition, not assignment: a row taken twice owes its gradient to both.
    """
    return rows.new_zeros(first_axis_dim, *rows.shape[1:]).index_add_(0, indices, rows)


class IndexFirstAxis(torch.autograd.Function):
    """input [rows, ...], indices [n] -> input[indices] [n, ...]; the gradient is added back row by row."""

    @staticmethod
    def forward(ctx, input, indices):
        _check_rows("input", input)
        indices = _checked_indices(indices, input)
        ctx.save_for_backward(indices)
        ctx.first_axis_dim = input.shape[0]
        return input.index_select(0, indices)

    @staticmethod
    def backward(ctx, grad_output):
        (indices,) = ctx.saved_tensors
        return _row_sum(grad_output, indices, ctx.first_axis_dim), None


class IndexPutFirstAxis(torch.autograd.Function):
    """values [n, ...], indices [n] -> zeros [first_axis_dim, ...] with values at indices."""

    @staticmethod
    def forward(ctx, values, indices, first_axis_dim):
        _check_rows("values", values)
        indices = _checked_indices(indices, values)
        if values.shape[0] != indices.shape[0]:
            raise ValueError(f"values have {values.shape[0]} rows for {indices.shape[0]} indices")
        ctx.save_for_backward(indices)
        return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy_(0, indices, values)

    @staticmethod
    def backward(ctx, grad_output):
        (indices,) = ctx.saved_tensors
        return grad_output.index_select(0, indices), None, None


class IndexFirstAxisResidual(torch.autograd.Function):
    """IndexFirstAxis that hands its input through as a second output.

    The residual stream meets the gradient of the taken rows here, in one buffer, instead of in a second
    [rows, ...] gradient that autograd would add to the first.
    """

    @staticmethod
    def forward(ctx, input, indices):
        _check_rows("input", input)
        indices = _checked_indices(indices, input)
        ctx.save_for_backward(indices)
        return input.index_select(0, indices), input.detach()

    @staticmethod
    def backward(ctx, grad_output, grad_residual):
        (indices,) = ctx.saved_tensors
        return grad_residual.index_add(0, indices, grad_output), None


def index_first_axis(input, indices):
    """Takes rows.

    Arguments:
        input: [rows, ...], any dtype.
        indices: int64 [n], in [0, rows), in any order, repeats allowed.

    Returns:
        input[indices], [n, ...]. Differentiable in `input`, twice.

    Raises:
        ValueError: indices are not one-dimensional integers on the device of `input`.
        IndexError: an index lies outside [0, rows) (CPU; a CUDA device asserts).
    """
    return IndexFirstAxis.apply(input, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """Puts rows into zeros: undoes `index_first_axis` where every index is different.

    Arguments:
        values: [n, ...], any dtype.
        indices: int64 [n], in [0, first_axis_dim), all different.
        first_axis_dim: int, the number of rows of the result.

    Returns:
        [first_axis_dim, ...], values at indices, zero elsewhere. Differentiable in `values`, twice.

    Raises:
        ValueError: as `index_first_axis`, or values and indices differ in length.
    """
    return IndexPutFirstAxis.apply(values, indices, first_axis_dim)


def index_first_axis_residual(input, indices):
    """Takes rows, and hands the input through for a residual connection.

    Arguments and errors as `index_first_axis`.

    Returns:
        (input[indices] [n, ...], input [rows, ...]). Use the second in place of `input` from here on: the
        gradients of both meet in one buffer. It shares memory with `input`: do not change it in place.
    """
    return IndexFirstAxisResidual.apply(input, indices)


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Keeps the valid positions of a padded batch.

    Arguments:
        hidden_states: [batch, seqlen, ...], any dtype.
        attention_mask: [batch, seqlen], bool or integer, nonzero where a token is valid (a floating mask
            must hold 0 and 1 only). Padding may lie anywhere: left, right, between.
        unused_mask: [batch, seqlen] as attention_mask, or None. Its positions are kept and counted in
            `cu_seqlens`, but not in `seqused`: room for tokens that are not there yet.

    Returns:
        rows: [total, ...], the kept positions, batch by batch in order. Differentiable in hidden_states.
        indices: int64 [total], where in the flattened [batch * seqlen] axis each row was.
        cu_seqlens: int32 [batch + 1], where each sequence begins among the rows; the last is total.
        max_seqlen: int, the longest sequence with its unused positions; 0 if nothing is kept.
        seqused: int32 [batch], valid tokens of each sequence, unused positions left out.

    Raises:
        ValueError: a mask is not [batch, seqlen], lies on another device, or is floating with other values.

    The 5-tuple is flash-attn's since 2.7 (before, a 4-tuple without seqused).
    """
    _check_batch(hidden_states, "attention_mask", attention_mask)
    used = _as_bool("attention_mask", attention_mask)
    kept = used
    if unused_mask is not None:
        _check_batch(hidden_states, "unused_mask", unused_mask)
        kept = used | _as_bool("unused_mask", unused_mask)
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(rearrange(hidden_states, "b s ... -> (b s) ..."), indices)
    return rows, indices, _cumulative(seqlens), _longest(seqlens), used.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """Keeps the valid positions of a batch whose rows each hold several sequences, one after another.

    Arguments:
        hidden_states: [batch, seqlen, ...], any dtype. A row holds its sequences from position 0 on, with
            nothing between them; what is left at its end is padding.
        attention_mask_in_length: integer [batch, seqlen]. Its nonzero entries, in order, are the lengths
            of the row's sequences: [2, 3, 0, 0, 0, 0] for tokens a a b b b and one of padding.

    Returns:
        rows: [total, ...], every sequence of every batch row in order. Differentiable in hidden_states.
        indices: int64 [total], where in the flattened [batch * seqlen] axis each row was.
        cu_seqlens: int32 [sequences + 1], where each sequence begins among the rows; the last is total.
        max_seqlen: int, the longest sequence; 0 if there is none.

    Raises:
        ValueError: the lengths are not integers [batch, seqlen] on the device of hidden_states, one is
            negative, or those of a row exceed seqlen.
    """
    _check_batch(hidden_states, "attention_mask_in_length", attention_mask_in_length)
    if attention_mask_in_length.is_floating_point():
        given = _described(attention_mask_in_length)
        raise ValueError(f"attention_mask_in_length must hold integer lengths, got {given}")
    seqlen = hidden_states.shape[1]
    lengths = attention_mask_in_length.long()
    tokens = lengths.sum(dim=-1)
    # One wait for the device answers both questions.
    if bool((lengths < 0).any() | (tokens > seqlen).any()):
        raise ValueError(
            "attention_mask_in_length must hold lengths >= 0 that add up to at most "
            f"seqlen = {seqlen} in each row; got rows adding up to {tokens.tolist()}"
        )
    kept = torch.arange(seqlen, device=hidden_states.device) < tokens[:, None]
    seqlens = lengths[lengths != 0]
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(rearrange(hidden_states, "b s ... -> (b s) ..."), indices)
    return rows, indices, _cumulative(seqlens), _longest(seqlens)


def pad_input(hidden_states, indices, batch, seqlen):
    """Puts packed rows back into a padded batch: undoes `unpad_input`, with zeros for padding.

    Arguments:
        hidden_states: [total, ...], any dtype.
        indices: int64 [total], as returned by `unpad_input`.
        batch, seqlen: int, of the padded batch.

    Returns:
        [batch, seqlen, ...]. Differentiable in hidden_states.

    Raises:
        ValueError: as `index_put_first_axis`.
        IndexError: an index lies outside [0, batch * seqlen) (CPU; a CUDA device asserts).
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rearrange(padded, "(b s) ... -> b s ...", b=batch, s=seqlen)
