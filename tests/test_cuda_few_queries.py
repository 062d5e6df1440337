"""Few queries: the heads that share keys are rows of one tile, and keys are split for all of the GPU."""

import itertools
import re

import pytest
import torch

import flash_attn
from acceptance import Expected
from attention_case import Case
from gpu import DEVICE, HALVES, check, deterministic_as_asked, needs_gpu  # noqa: F401
from test_kvcache import Cache

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]
# One row, parts of a tile, all of it, several tiles; groups that divide 16 or 64, that don't, that exceed 16.
GROUPS = [(3, 3), (8, 2), (6, 2), (5, 1), (16, 1), (48, 2), (34, 2)]


def kernel_of(*qkv, **features):
    return flash_attn.explain(*qkv, **features).forward.configuration


def draw(seqlen_q, seqlen_k, heads, heads_k, head_dim, dtype=torch.bfloat16, batch=2):
    shapes = (batch, seqlen_q, heads, head_dim), *[(batch, seqlen_k, heads_k, head_dim)] * 2
    return [torch.randn(shape, dtype=dtype, device=DEVICE) for shape in shapes]


SHORT, LONG = (700, 129), (3000, 2400)


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (300, 3)}], ids=str)
@pytest.mark.parametrize("seqlen_q,seqlens_k", [(1, SHORT), (2, SHORT), (7, SHORT), (16, SHORT), (17, LONG),
                                                (50, LONG), (130, LONG)])
@pytest.mark.parametrize("num_heads,num_heads_k", GROUPS)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_dense(head_dim, num_heads, num_heads_k, seqlen_q, seqlens_k, features):
    """On Hopper also tiles of parts that hold whole queries: some not full, one part's alone, several."""
    for dtype, seqlen_k in zip(HALVES, seqlens_k):
        sizes = (2, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim)
        Case(dtype, *sizes, device=DEVICE, **features).check_forward()


@pytest.mark.parametrize("features", [
    {"softcap": 3.0}, {"alibi": "heads"}, {"softmax_scale": -0.2}, {"softmax_scale": 0.0},
    {"softcap": 5.0, "alibi": "batch", "causal": True, "window_size": (90, 0)}], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 7, 16])
@pytest.mark.parametrize("num_heads,num_heads_k", GROUPS)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_transformed_scores(head_dim, num_heads, num_heads_k, seqlen_q, features):
    """Each row has its head's slope."""
    for dtype, seqlen_k in zip(HALVES, SHORT):
        case = Case(dtype, 2, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim, device=DEVICE, **features)
        case.check_forward()


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_transformed_scores_of_caches(head_dim, page_size):
    for dtype in HALVES:
        cache = Cache(DEVICE, dtype, seqlen_q=3, capacity=1024, heads=12, heads_k=2, head_dim=head_dim,
                      page_size=page_size)
        cache.check(causal=True, softcap=4.0, slopes=torch.rand(12, device=DEVICE))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("layout", [
    {}, {"empty": True}, {"padded": True}, {"indexed": True, "padded": True}, {"page_size": 128},
    {"page_size": 64}, {"page_size": 256}], ids=str)
def test_caches(layout, head_dim):
    """What no sequence may see is NaN. Tables of pages end with the keys."""
    sizes = {"capacity": 4096, "heads": 12, "heads_k": 2, "head_dim": head_dim, "new": 0, **layout}
    for dtype, seqlen_q in itertools.product(HALVES, (20, 45)):
        Cache(DEVICE, dtype, seqlen_q=seqlen_q, **sizes).check(causal=True)
    Cache(DEVICE, torch.bfloat16, seqlen_q=30, **{**sizes, "new": 30}).check(causal=True, num_splits=3)


@pytest.mark.parametrize("longest", [16, 70])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (40, 3)}], ids=str)
@pytest.mark.parametrize("num_heads,num_heads_k", GROUPS)
def test_packed(num_heads, num_heads_k, features, longest):
    """Sequences without queries, without keys, with fewer keys than queries; rows past the last one. Keys are
    split."""
    lengths = 1, 0, 13, longest, 3, 2
    check(Case(torch.bfloat16, num_heads=num_heads, num_heads_k=num_heads_k, head_dim=128, device=DEVICE,
               cu_seqlens_q=(0, *itertools.accumulate(lengths)),
               cu_seqlens_k=(0, 200, 290, 299, 3400, 3400, 4100), tail=4, **features))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_more_tiles_than_run_at_once(head_dim, dtype):
    """Go to kernels of smaller tiles."""
    batch = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    case = Case(dtype, batch, 3, 150, 16, 4, head_dim, causal=True, device=DEVICE)
    case.check_forward()
    one, many = (kernel_of(*draw(3, 150, 16, 4, head_dim, dtype, entries)) for entries in (1, batch))
    assert one != many or head_dim == 256


@pytest.mark.parametrize("batch", [1, 11, 70])
def test_parts_of_keys_in_turn(batch):
    """More of them than run at once."""
    Case(torch.bfloat16, batch, 30, 3000, 16, 4, 128, causal=True, device=DEVICE).check_forward()


@pytest.mark.parametrize("num_splits", [2, 3, 4, 7, 16, 17])
@pytest.mark.parametrize("seqlen_q", [1, 5, 20, 45])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_parts_of_keys_at_once(head_dim, seqlen_q, num_splits):
    """Up to 16 are a cluster where the GPU has those. Some have no key that anyone sees; in one rows are done
    again, since exponentials grow to 2^200 times those of its first tile."""
    for window_size, dtype in itertools.product([(-1, -1), (900, 0)], HALVES):
        case = Case(dtype, 1, seqlen_q, 3000, 8, 1, head_dim, window_size=window_size, device=DEVICE)
        q, k, v, _ = case.draw()
        k[:, 2500:] *= 30
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k, v, window_size=window_size, num_splits=num_splits, return_softmax_lse=True)
        Expected(case.attend(), q, k, v).check(out=out, lse=lse)


@pytest.mark.parametrize("num_heads,num_heads_k", GROUPS)
def test_unaligned_rows(num_heads, num_heads_k):
    q, k, v = draw(3, 300, num_heads, num_heads_k, 72)
    expected = flash_attn.flash_attn_func(*(x[..., 1:].contiguous() for x in (q, k, v)), causal=True)
    # Copied element by element: the same numbers in the same places.
    assert torch.equal(flash_attn.flash_attn_func(*(x[..., 1:] for x in (q, k, v)), causal=True), expected)


@pytest.mark.parametrize("seqlen_q", [4, 40])
@pytest.mark.parametrize("num_heads,num_heads_k", GROUPS)
def test_rows_do_not_meet(num_heads, num_heads_k, seqlen_q):
    """A query that is NaN, or whose scores overflow, is none of the others' business."""
    q, k, v = draw(seqlen_q, 3000, num_heads, num_heads_k, 128)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    q[0, 2, num_heads - 1], q[1, 1, 0] = float("nan"), float("inf")
    actual = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert actual[0, 2, num_heads - 1].isnan().all() and actual[1, 1, 0].isnan().all()
    for out in (actual, expected):
        out[0, 2, num_heads - 1] = out[1, 1, 0] = 0
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("seqlen_q", [4, 45])
def test_growing_scores(seqlen_q):
    """Of which the first tile of keys says nothing: 2^200 times as large exponentials follow."""
    case = Case(torch.float16, 2, seqlen_q, 3000, 8, 2, 64, device=DEVICE)
    q, k, v, dout = case.draw()
    k[:, 1000:] *= 30
    case.check_forward((q, k, v, dout))


@pytest.mark.parametrize("seqlen_q", [5, 45])
def test_keys_nobody_sees_do_not_matter(seqlen_q):
    """Keys and values of infinity, which the causal mask hides from all queries but the last one."""
    q, k, v = draw(seqlen_q, 3000, 8, 2, 128)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    k[:, -1], v[:, -1] = float("inf"), float("nan")
    actual = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(actual[:, :-1], expected[:, :-1]) and actual[:, -1].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks(head_dim):
    """Other kernels take them: heads that share keys have masks of their own."""
    case = Case(torch.bfloat16, 2, 5, 300, 4, 2, head_dim, device=DEVICE)
    inputs, mask = case.draw(), torch.rand(2, 4, 5, 300, device=DEVICE) < 0.7
    Expected(case.attend(mask), *inputs).check(**vars(case.run(inputs, attn_mask=mask)))


def test_which_calls_they_are():
    def rows_of(*sizes, **features):
        found = re.search(r"_q(\d+)_\w+_few$", kernel_of(*draw(*sizes), **features))
        return found and int(found[1])

    assert rows_of(1, 500, 8, 2, 128) == rows_of(16, 500, 8, 8, 64) == rows_of(2, 500, 4, 2, 200) == 16
    assert rows_of(1, 500, 8, 2, 128, softcap=3.0) == 16
    assert rows_of(1, 500, 8, 2, 128, dropout_p=0.5) is None
    assert rows_of(1, 500, 8, 2, 128, deterministic=True) is None
    many = 128 if torch.cuda.get_device_capability() == (9, 0) else None
    for sizes in ((17, 3000, 8, 2, 128), (40, 3000, 12, 2, 256), (60, 3000, 3, 3, 40)):
        assert rows_of(*sizes) == many, sizes
