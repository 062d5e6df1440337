"""Sizes that break 32-bit offsets and grid limits: over 2**31 elements, batches and sequences over 65535.

Not run by default: pytest -m large. A test takes up to 60 GB of GPU memory. Where not all rows are judged,
those are that lie at the start, at the end, and where an offset passes a power of two.
"""

import gc
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import reference
from acceptance import Expected, Result
from attention_case import Case
from gpu import DEVICE, assert_bitwise, needs_gpu, run

pytestmark = [needs_gpu, pytest.mark.large]

LIMIT = 2**31


@pytest.fixture(autouse=True)
def whole_device():
    """Fresh memory as it comes, since NaN in tens of gigabytes takes time; nothing left of other tests."""
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def needs_gigabytes(count):
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < count:
        pytest.skip(f"{free:.0f} GB of device memory free, {count} needed")


def draw(case):
    """Standard normal, drawn on the device."""
    generator = torch.Generator(DEVICE).manual_seed(case.seed)
    options = {"generator": generator, "device": DEVICE, "dtype": case.dtype}
    return [torch.randn(shape, **options) for shape in case.shapes()]


def check_entries(case, inputs, result, entries):
    """Some batch entries, as a batch of their own."""
    some = [x[entries] for x in inputs]
    expected = replace(case, batch=len(entries)).expected(some)
    expected.check(**{name: x[entries] for name, x in vars(result).items()})


def check_window(case, inputs, result, first, heads=2, length=300):
    """Rows [first, first + length) of causal attention with a narrow window: only they matter, and one window
    on either side. They are those of the last batch entry and heads, whose offsets are largest."""
    margin = case.window_size[0]
    rows = slice(max(first - margin, 0), first + length + margin)
    group = case.num_heads // case.num_heads_k
    batch = case.batch - 1
    last_q, last_k = slice(-heads, None), slice(-max(heads // group, 1), None)
    q, k, v, dout = (x[batch, None, rows, head] for x, head in zip(inputs, (last_q, last_k, last_k, last_q)))
    expected = Expected(case.attend(), q, k, v, dout)
    seqlen = inputs[0].shape[1]
    inside = slice(first - rows.start, min(first + length, seqlen) - rows.start)
    for name, x in vars(result).items():
        head = last_k if name in ("dk", "dv") else last_q
        part = x[batch, None, head, rows] if name == "lse" else x[batch, None, rows, head]
        exact = getattr(expected.exact, name)
        shown = exact.to(part.dtype)  # rows without their whole window keep the exact value
        where = (..., inside) if name == "lse" else (slice(None), inside)
        shown[where] = part[where]
        expected.check(**{name: shown})


@pytest.mark.parametrize("num_heads_k", [8, 2])
def test_more_than_2_to_31_elements_in_the_batch(num_heads_k):
    case = Case(torch.bfloat16, 4200, 512, 512, 8, num_heads_k, 128, causal=True, device=DEVICE)
    assert 4200 * 512 * 8 * 128 > LIMIT
    needs_gigabytes(60)
    inputs = draw(case)
    result = case.run(inputs)
    check_entries(case, inputs, result, [0, 1, 1023, 2047, 2048, 4095, 4096, 4199])


@pytest.mark.parametrize("packed", [False, True])
def test_more_than_2_to_31_elements_in_one_sequence(packed):
    """Row offsets within a batch entry pass 2**31, and dense heads are that far from their first row."""
    seqlen, heads, head_dim = 66_000, 128, 256
    assert seqlen * heads * head_dim > LIMIT
    needs_gigabytes(60)
    case = Case(torch.bfloat16, 1, seqlen, seqlen, heads, heads, head_dim, causal=True, window_size=(60, 0),
                device=DEVICE)
    inputs = draw(case)
    if packed:
        own = replace(case, cu_seqlens_q=(0, 1000, seqlen), cu_seqlens_k=(0, 1000, seqlen))
        flat = own.run([x[0] for x in inputs])
        result = Result(*(x[None] for x in vars(flat).values()))
    else:
        result = case.run(inputs)
    for first in (1100 if packed else 0, 32_700, 65_400, seqlen - 300):
        check_window(case, inputs, result, first)


def test_more_than_2_to_31_rows():
    """Statistics have one number a row and head: here more than 2**31 of them."""
    case = Case(torch.bfloat16, 8, 65_537, 65_537, 4100, 1, 1, causal=True, window_size=(3, 0), device=DEVICE)
    assert 8 * 65_537 * 4100 > LIMIT
    needs_gigabytes(40)
    shapes = case.shapes()
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=case.dtype) for shape in shapes[:3])
    with torch.no_grad():
        out, lse, _ = case.call(q, k, v, return_attn_probs=True)
    for first in (3, 32_768, 65_237):
        rows, head = slice(first - 3, first + 300), slice(-2, None)
        parts = q[-1:, rows, head], k[-1:, rows], v[-1:, rows]
        expected = Expected(case.attend(), *parts)
        for name, part in (("out", out[-1:, rows, head]), ("lse", lse[-1:, head, rows])):
            shown = getattr(expected.exact, name).to(part.dtype)
            where = (..., slice(3, None)) if name == "lse" else (slice(None), slice(3, None))
            shown[where] = part[where]
            expected.check(**{name: shown})


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"alibi": "batch"}], ids=str)
def test_batch_beyond_65535(features):
    """pytorch#142228: the limit of grid.y and grid.z."""
    case = Case(torch.bfloat16, 65_539, 17, 33, 2, 1, 64, device=DEVICE, **features)
    inputs = draw(case)
    result = case.run(inputs)
    entries = [0, 1, 32_767, 65_534, 65_535, 65_536, 65_538]
    if case.alibi == "batch":
        slopes = case.slopes()
        expected = Expected(lambda *x, **options: reference.attention(
            *x, alibi_slopes=slopes[entries], **case.features(), **options), *(x[entries] for x in inputs))
        expected.check(**{name: x[entries] for name, x in vars(result).items()})
    else:
        check_entries(case, inputs, result, entries)


def test_packed_batch_beyond_65535():
    count = 65_539
    cu_q, cu_k = (tuple(range(0, n * count + 1, n)) for n in (3, 5))
    case = Case(torch.bfloat16, num_heads=2, num_heads_k=1, head_dim=64, causal=True, device=DEVICE,
                cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    inputs = draw(case)
    packed = case.run(inputs)
    dense = replace(case, cu_seqlens_q=(), cu_seqlens_k=(), batch=count, seqlen_q=3, seqlen_k=5)
    lengths = (3, 5, 5, 3)
    inputs = [x.unflatten(0, (count, n)) for x, n in zip(inputs, lengths)]
    result = Result(packed.out.unflatten(0, (count, 3)), packed.lse.unflatten(1, (count, 3)).movedim(1, 0),
                    *(x.unflatten(0, (count, n)) for x, n in zip((packed.dq, packed.dk, packed.dv), lengths)))
    check_entries(dense, inputs, result, list(range(0, count, 1001)) + [65_535, 65_536, 65_538])


@pytest.mark.parametrize("shape", [(28_800, 15, 16), (1600, 729, 16), (1600, 16, 729)], ids=str)
def test_many_heads_times_batch(shape):
    """flash-attention#1311, #2214: batch times heads is 460,800 and 1,166,400; head dim 72."""
    batch, seqlen, heads = shape
    needs_gigabytes(40)
    case = Case(torch.bfloat16, batch, seqlen, seqlen, heads, heads, 72, device=DEVICE)
    inputs = draw(case)
    result = case.run(inputs)
    check_entries(case, inputs, result, [0, 1, batch // 2, batch - 2, batch - 1])


def chunked(rows=1024):
    """The reference over blocks of queries, recomputed in the backward: no whole score matrix."""
    def attend(q, k, v, stored_dtype=None):
        outs, lses = [], []
        for first in range(0, q.shape[1], rows):
            own = q[:, first : first + rows]
            # Queries before the sequence's end see what they would see as the last ones of a shorter one.
            keys = slice(0, k.shape[1] - q.shape[1] + first + own.shape[1])

            def block(own, k, v):
                return reference.attention(own, k, v, causal=True, stored_dtype=stored_dtype)

            out, lse = checkpoint(block, own, k[:, keys], v[:, keys], use_reentrant=False)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=2)

    return attend


@pytest.mark.parametrize("seqlen", [65_537, 73_728])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_causal_sequence_beyond_65535(seqlen, head_dim):
    """pytorch#162588: garbage from row 2**32 / S on. All rows of out and of the gradients are judged."""
    needs_gigabytes(50)
    case = Case(torch.bfloat16, 1, seqlen, seqlen, 2, 1, head_dim, causal=True, device=DEVICE)
    inputs = draw(case)
    result = case.run(inputs)
    Expected(chunked(), *inputs).check(**vars(result))


def test_chunked_reference_is_the_reference():
    case = Case(torch.bfloat16, 1, 500, 700, 2, 1, 16, causal=True, device=DEVICE)
    inputs = case.draw()
    chunks, whole = Expected(chunked(96), *inputs), case.expected(inputs)
    for name, x in vars(whole.exact).items():
        torch.testing.assert_close(getattr(chunks.exact, name), x)


@pytest.mark.parametrize("position", ["dout", "q", "k", "v", "all"])
def test_rows_of_a_wide_buffer(position):
    """flash-attention#2611: views of a cat with 9,728 elements from row to row and 410,923 rows."""
    rows, width, heads, head_dim = 410_923, 9728, 4, 128
    assert rows * width > LIMIT
    needs_gigabytes(40)
    ends = (0, 100_000, 220_753, 220_760, 400_000, rows)
    case = Case(torch.bfloat16, num_heads=heads, num_heads_k=heads, head_dim=head_dim, causal=True,
                window_size=(60, 0), cu_seqlens_q=ends, cu_seqlens_k=ends, device=DEVICE)
    inputs = draw(case)

    def views_of(width):
        """The inputs of `position`, or all one element beside a multiple of 16 bytes."""
        buffer = torch.full((rows, width), torch.nan, device=DEVICE, dtype=case.dtype)
        views = [*inputs]
        for i, name in enumerate(("q", "k", "v", "dout")):
            if position in (name, "all"):
                first = 1 + i * heads * head_dim if position == "all" else width - heads * head_dim
                views[i] = buffer[:, first : first + heads * head_dim].unflatten(-1, (heads, head_dim))
                views[i].copy_(inputs[i])
                assert views[i].stride(0) == width
        return views

    # The bits are the engine's, and sm90 takes no such rows.
    narrow = views_of(4 * heads * head_dim + 8) if position == "all" else inputs
    expected = run(case, narrow, deterministic=True)
    del narrow
    assert_bitwise(run(case, views_of(width), deterministic=True), expected)
    dense = replace(case, cu_seqlens_q=(), cu_seqlens_k=(), batch=1)
    padded = Result(*(x[None] for x in vars(expected).values()))
    check_window(dense, [x[None] for x in inputs], padded, rows - 300)


def test_distant_batch_entries():
    """Batch entries more than 2**31 elements apart: an expanded view of a buffer, as a cache slice is."""
    needs_gigabytes(40)
    stride = LIMIT + 8
    case = Case(torch.bfloat16, 3, 100, 130, 2, 1, 64, causal=True, device=DEVICE)
    inputs = case.draw()
    expected = run(case, inputs, deterministic=True)
    storage = torch.full((2 * stride + 130 * 2 * 64,), torch.nan, device=DEVICE, dtype=case.dtype)
    for position in range(4):
        views, x = [*inputs], inputs[position]
        views[position] = storage.as_strided(x.shape, (stride, *x.stride()[1:])).copy_(x)
        assert_bitwise(run(case, views, deterministic=True), expected)
