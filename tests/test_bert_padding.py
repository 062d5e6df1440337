"""Promise: unpadding keeps exactly the valid rows, padding puts them back, and gradients follow both ways."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn import bert_padding
from flash_attn.bert_padding import (
    IndexFirstAxis,
    IndexFirstAxisResidual,
    IndexPutFirstAxis,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

LEFT_RIGHT_EMPTY_HOLES = [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]]


def _same(results, expected):
    pairs = zip(results, expected, strict=True)
    return all(a == b if isinstance(a, int) else torch.equal(a, b) for a, b in pairs)


def _leaf(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def _unpadded_by_loop(hidden_states, mask, unused):
    """Specification: visits every position in Python."""
    rows, indices, cu_seqlens, seqused = [], [], [0], []
    batch, seqlen = len(mask), len(mask[0])
    for b in range(batch):
        for s in range(seqlen):
            if mask[b][s] or unused[b][s]:
                rows.append(hidden_states[b, s])
                indices.append(b * seqlen + s)
        cu_seqlens.append(len(indices))
        seqused.append(sum(mask[b]))
    lengths = [end - begin for begin, end in zip(cu_seqlens, cu_seqlens[1:])]
    rows = torch.stack(rows) if rows else hidden_states.new_zeros(0, *hidden_states.shape[2:])
    return rows, indices, cu_seqlens, max(lengths), seqused


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_unpad_then_pad_equals_a_loop(data):
    batch, seqlen = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    trailing = data.draw(st.sampled_from([(), (3,), (2, 3)]))
    row = st.lists(st.integers(0, 1), min_size=seqlen, max_size=seqlen)
    bits = st.lists(row, min_size=batch, max_size=batch)
    mask, unused = data.draw(bits), data.draw(bits)
    with_unused = data.draw(st.booleans())
    hidden_states = _leaf(batch, seqlen, *trailing).detach()
    unused = unused if with_unused else [[0] * seqlen] * batch

    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(
        hidden_states, torch.tensor(mask), torch.tensor(unused) if with_unused else None
    )

    expected = _unpadded_by_loop(hidden_states, mask, unused)
    assert torch.equal(rows, expected[0])
    assert (indices.tolist(), cu_seqlens.tolist(), max_seqlen, seqused.tolist()) == expected[1:]
    kept = (torch.tensor(mask) + torch.tensor(unused) != 0).reshape(batch, seqlen, *[1] * len(trailing))
    assert torch.equal(pad_input(rows, indices, batch, seqlen), torch.where(kept, hidden_states, 0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8, torch.float32])
def test_result_types(dtype):
    mask = torch.tensor(LEFT_RIGHT_EMPTY_HOLES).to(dtype)
    result = unpad_input(_leaf(4, 5, 2, dtype=torch.bfloat16), mask, unused_mask=None)
    assert len(result) == 5
    rows, indices, cu_seqlens, max_seqlen, seqused = result
    assert rows.dtype == torch.bfloat16 and rows.shape == (8, 2)
    assert indices.dtype == torch.int64
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 3, 5, 5, 8]
    assert type(max_seqlen) is int and max_seqlen == 3
    assert seqused.dtype == torch.int32 and seqused.tolist() == [3, 2, 0, 3]


def test_positions_both_valid_and_unused_count_once():
    mask = torch.tensor([[1, 1, 0, 0]])
    unused = torch.tensor([[0, 1, 1, 0]])
    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(_leaf(1, 4, 2), mask, unused_mask=unused)
    assert rows.shape == (3, 2) and indices.tolist() == [0, 1, 2]
    assert (cu_seqlens.tolist(), max_seqlen, seqused.tolist()) == ([0, 3], 3, [2])


def test_nonzero_means_valid_whatever_its_value():
    values = torch.tensor([[1, 2, 3, 0]])
    hidden_states = _leaf(1, 4, 2)
    assert _same(unpad_input(hidden_states, values), unpad_input(hidden_states, values != 0))


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_nothing_but_padding(batch):
    hidden_states = _leaf(batch, 4, 2)
    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden_states, torch.zeros(batch, 4))
    assert rows.shape == (0, 2) and indices.shape == (0,)
    assert cu_seqlens.tolist() == [0] * (batch + 1) and max_seqlen == 0 and seqused.tolist() == [0] * batch
    padded = pad_input(rows, indices, batch, 4)
    assert torch.equal(padded, torch.zeros(batch, 4, 2))
    (gradient,) = torch.autograd.grad(padded.sum(), hidden_states)
    assert torch.equal(gradient, torch.zeros(batch, 4, 2))


def test_padding_is_dropped_not_multiplied_by_zero():
    mask = torch.tensor(LEFT_RIGHT_EMPTY_HOLES, dtype=torch.bool)
    hidden_states = torch.full((4, 5, 2), torch.nan)
    hidden_states[mask] = 1.0
    hidden_states.requires_grad_()
    rows, indices, *_ = unpad_input(hidden_states, mask)
    padded = pad_input(rows, indices, 4, 5)
    assert torch.equal(padded, mask[..., None].expand(4, 5, 2).float())
    (gradient,) = torch.autograd.grad(padded.sum(), hidden_states)
    assert torch.equal(gradient, padded)


def test_strided_inputs():
    hidden_states = _leaf(5, 4, 3, 2).detach().transpose(0, 1).transpose(2, 3)
    mask = torch.tensor(LEFT_RIGHT_EMPTY_HOLES).t().contiguous().t()
    assert _same(unpad_input(hidden_states, mask), unpad_input(hidden_states.contiguous(), mask))


def test_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0] * 6])
    hidden_states = _leaf(4, 6, 2)
    result = unpad_input_for_concatenated_sequences(hidden_states, lengths)
    assert len(result) == 4
    rows, indices, cu_seqlens, max_seqlen = result
    assert indices.dtype == torch.int64 and indices.tolist() == [*range(0, 5), *range(6, 11), *range(12, 18)]
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert type(max_seqlen) is int and max_seqlen == 6
    assert torch.equal(rows, torch.cat([hidden_states[0, :5], hidden_states[1, :5], hidden_states[2]]))


def test_concatenated_sequences_need_not_be_adjacent_entries():
    rows, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(
        _leaf(1, 6, 2), torch.tensor([[0, 2, 0, 0, 3, 0]])
    )
    assert (indices.tolist(), cu_seqlens.tolist(), max_seqlen) == ([0, 1, 2, 3, 4], [0, 2, 5], 3)


def test_concatenated_sequences_none():
    rows, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(
        _leaf(2, 3, 2), torch.zeros(2, 3, dtype=torch.int64)
    )
    assert rows.shape == (0, 2) and indices.shape == (0,) and cu_seqlens.tolist() == [0] and max_seqlen == 0


def test_gradients_of_padding():
    mask = torch.tensor(LEFT_RIGHT_EMPTY_HOLES)
    lengths = torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    indices = mask.flatten().nonzero().flatten()
    for function, leaf in [
        (lambda x: unpad_input(x, mask)[0], _leaf(4, 5, 2)),
        (lambda x: unpad_input_for_concatenated_sequences(x, lengths)[0], _leaf(4, 5, 2)),
        (lambda x: pad_input(x, indices, 4, 5), _leaf(8, 2, 2)),
    ]:
        assert torch.autograd.gradcheck(function, leaf)
        assert torch.autograd.gradgradcheck(function, leaf)


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
@pytest.mark.parametrize("chosen", [[4, 0, 2], [1, 1, 4], []])
def test_gradients_of_taking_rows(chosen, trailing):
    indices = torch.tensor(chosen, dtype=torch.int64)
    for function in (index_first_axis, index_first_axis_residual):
        assert torch.autograd.gradcheck(lambda x: function(x, indices), _leaf(5, *trailing))
        assert torch.autograd.gradgradcheck(lambda x: function(x, indices), _leaf(5, *trailing))


def test_gradients_of_putting_rows():
    indices = torch.tensor([4, 0, 2])
    assert torch.autograd.gradcheck(lambda x: index_put_first_axis(x, indices, 6), _leaf(3, 2))
    assert torch.autograd.gradgradcheck(lambda x: index_put_first_axis(x, indices, 6), _leaf(3, 2))


def test_a_row_taken_twice_gets_both_gradients():
    x = _leaf(3, 2)
    (gradient,) = torch.autograd.grad(index_first_axis(x, torch.tensor([1, 1, 0])).sum(), x)
    assert torch.equal(gradient, torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]], dtype=torch.float64))


def test_residual():
    x = _leaf(4, 2)
    taken, residual = index_first_axis_residual(x, torch.tensor([2, 0]))
    assert torch.equal(taken, x[[2, 0]]) and torch.equal(residual, x)
    assert residual.data_ptr() == x.data_ptr()
    incoming = torch.ones(4, 2, dtype=torch.float64)
    (gradient,) = torch.autograd.grad([taken, residual], x, [3 * torch.ones_like(taken), incoming])
    assert torch.equal(gradient, torch.tensor([[4.0, 4.0], [1.0, 1.0], [4.0, 4.0], [1.0, 1.0]]).double())
    assert torch.equal(incoming, torch.ones_like(incoming)), "the caller's gradient must not be changed"


def test_integer_rows_and_indices():
    ids = torch.arange(8).reshape(2, 4)
    rows, indices, *_ = unpad_input(ids, torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]]))
    assert rows.tolist() == [0, 1, 5, 6, 7]
    assert pad_input(rows, indices.int(), 2, 4).tolist() == [[0, 1, 0, 0], [0, 5, 6, 7]]
    assert index_first_axis(ids, torch.tensor([1], dtype=torch.int32)).tolist() == [[4, 5, 6, 7]]


def test_names_that_callers_import():
    import einops

    assert bert_padding.rearrange is einops.rearrange and bert_padding.repeat is einops.repeat
    assert all(issubclass(c, torch.autograd.Function)
               for c in (IndexFirstAxis, IndexPutFirstAxis, IndexFirstAxisResidual))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: unpad_input(x, torch.ones(5, 4)), r"attention_mask must be \[batch, seqlen\] = \[4, 5\]"),
        (lambda x: unpad_input(x, torch.ones(4, 5, 1)), r"attention_mask must be .* got .*\[4, 5, 1\]"),
        (lambda x: unpad_input(x, torch.ones(4, 5), torch.ones(4, 6)), r"unused_mask must be"),
        (lambda x: unpad_input(x[0, :, 0], torch.ones(5)), r"hidden_states must be \[batch, seqlen, ...\]"),
        (lambda x: unpad_input(x, torch.full((4, 5), -torch.inf)), "an additive mask"),
        (lambda x: unpad_input(x, torch.ones(4, 5, device="meta")), "is on meta, hidden_states on cpu"),
        (lambda x: unpad_input_for_concatenated_sequences(x, torch.ones(4, 5)), "must hold integer lengths"),
        (lambda x: unpad_input_for_concatenated_sequences(x, torch.full((4, 5), 2)), r"at most seqlen = 5"),
        (lambda x: unpad_input_for_concatenated_sequences(x, torch.full((4, 5), -1)), r"lengths >= 0"),
        (lambda x: pad_input(x[0], torch.arange(4), 1, 5), "5 rows for 4 indices"),
        (lambda x: index_first_axis(x, torch.tensor([[0]])), "indices must be one-dimensional"),
        (lambda x: index_first_axis(x, torch.tensor([0.0])), "indices must be one-dimensional int64"),
        (lambda x: index_first_axis(x, torch.tensor([True] * 4)), "indices must be one-dimensional int64"),
        (lambda x: index_first_axis(x.sum(), torch.tensor([0])), "must have a first axis"),
        (lambda x: index_first_axis(x, torch.tensor([0], device="meta")), "indices are on meta"),
    ],
)
def test_errors_say_what_was_given_and_what_is_needed(call, message):
    with pytest.raises(ValueError, match=message):
        call(_leaf(4, 5, 2))


@pytest.mark.parametrize("index", [-1, 4])
def test_indices_out_of_range(index):
    with pytest.raises((IndexError, RuntimeError)):
        index_first_axis(_leaf(4, 2), torch.tensor([index]))
    with pytest.raises((IndexError, RuntimeError)):
        index_put_first_axis(_leaf(1, 2), torch.tensor([index]), 4)
