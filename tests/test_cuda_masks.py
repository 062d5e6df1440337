"""Masks of elements and maps of blocks on a GPU: whichever kernels take them, and the portable ones."""

import pytest
import torch

import block_maps
import flash_attn
from acceptance import Expected
from attention_case import Case, check_result
from gpu import DEVICE, HALVES, assert_bitwise, attend, check, deterministic_as_asked, needs_gpu  # noqa: F401
from reference import expand_block_map

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]

SEQLEN_Q, SEQLEN_K = 520, 700


def masks(heads):
    """{name: bool, broadcastable to [2, heads, SEQLEN_Q, SEQLEN_K]}"""
    queries, keys = torch.arange(SEQLEN_Q)[:, None], torch.arange(SEQLEN_K)
    half = torch.rand(2, heads, SEQLEN_Q, SEQLEN_K) < 0.5
    blocks = half.clone()
    blocks[..., 128:384] = True  # without a hidden element
    blocks[..., 384:512] = False
    return {
        "half": half,
        "few": torch.rand(1, heads, SEQLEN_Q, SEQLEN_K) < 0.003,
        "blocks": blocks,
        "keys": (keys < 450)[None, None, None],
        "band": ((queries - keys).abs() < 90)[None, None],
        "some queries": (torch.rand(2, 1, SEQLEN_Q, 1) < 0.3).expand(-1, -1, -1, SEQLEN_K),
    }


@pytest.mark.parametrize("which", masks(1))
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (200, 50)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES)
def test_masks(dtype, head_dim, features, which):
    heads = 1 if features.get("causal") else 2  # one mask for both heads, or one for each
    mask = masks(heads)[which].to(DEVICE)
    case = Case(dtype, 2, SEQLEN_Q, SEQLEN_K, 2, 2, head_dim, device=DEVICE, **features)
    inputs, dlse = case.draw(), case.draw_dlse()
    expected = Expected(case.attend(mask), *inputs, dlse)
    actual = case.run(inputs, dlse, attn_mask=mask)
    check_result(actual, expected)


@pytest.mark.parametrize("heads_k", [1, 2])
def test_mask_of_grouped_heads(heads_k):
    """Shared by all heads, and one for each query head; the latter Hopper's backward leaves to sm80."""
    for heads in (1, 4):
        mask = masks(heads)["half"].to(DEVICE)
        case = Case(torch.bfloat16, 2, SEQLEN_Q, SEQLEN_K, 4, heads_k, 64, device=DEVICE)
        inputs = case.draw()
        Expected(case.attend(mask), *inputs).check(**vars(case.run(inputs, attn_mask=mask)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_what_a_mask_hides_does_not_matter(head_dim, value):
    """Whatever lies behind it, in K, V, Q or dO: the rows that don't see it keep their results."""
    case = Case(torch.bfloat16, 2, SEQLEN_Q, SEQLEN_K, 2, 2, head_dim, device=DEVICE)
    mask = masks(2)["half"].to(DEVICE)
    mask[..., 77] = False
    mask[..., 33, :] = False
    q, k, v, dout = case.draw()
    expected = case.run((q, k, v, dout), attn_mask=mask, deterministic=True)
    for tensor, row in ((q, 33), (dout, 33), (k, 77), (v, 77)):
        tensor[:, row] = value
    for deterministic in (True, False):
        actual = case.run((q, k, v, dout), attn_mask=mask, deterministic=deterministic)
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert not vars(actual)[name].isnan().any(), name
        if deterministic:  # else the number of queries decides on the kernel
            assert_bitwise([actual.out, actual.lse], [expected.out, expected.lse], ("out", "lse"))


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (150, 70)}], ids=str)
@pytest.mark.parametrize("which", block_maps.LISTED)
@pytest.mark.parametrize("rows", [64, 128, 192, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("heads_k", [1, 2])
def test_tiles_of_several_rows_of_blocks(heads_k, head_dim, rows, which, features):
    """deterministic: else so few queries are another kernel's."""
    case = Case(torch.bfloat16, 2, 450, 1700, 2, heads_k, head_dim, device=DEVICE, **features)
    block_map = block_maps.map_of(which, -(-450 // rows), 14).to(DEVICE)
    check(case, block_map=block_map, block_size=(rows, 128), deterministic=True)
    visible = expand_block_map(block_map, (rows, 128), 450, 1700)
    mask = visible & (torch.rand(visible.shape, device=DEVICE) < 0.8)
    inputs = case.draw()
    actual = case.run(inputs, attn_mask=mask, deterministic=True)
    Expected(case.attend(mask), *inputs).check(**vars(actual))


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (150, 70)}], ids=str)
@pytest.mark.parametrize("seqlen_k", [700, 1700])  # at head dim 64, tiles of 64 keys and of 128
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_quarters_of_blocks(deterministic, head_dim, seqlen_k, features):
    """So few queries Hopper's forward takes only if deterministic; its backward up to 128 only if not."""
    case = Case(torch.bfloat16, 2, 450, seqlen_k, 2, 2, head_dim, device=DEVICE, **features)
    mask = block_maps.mask_of_quarters(450, seqlen_k).to(DEVICE)
    inputs, dlse = case.draw(), case.draw_dlse()
    actual = case.run(inputs, dlse, attn_mask=mask, deterministic=deterministic)
    expected = Expected(case.attend(mask), *inputs, dlse)
    check_result(actual, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_not_finite_in_a_neighbours_block(head_dim, rows, bits, value):
    """In a block that some of a tile's queries list: the others keep their bits."""
    case = Case(torch.bfloat16, 2, 450, 900, 2, 2, head_dim, device=DEVICE)
    block_map = block_maps.map_of("in turn", -(-450 // rows), 8).to(DEVICE)
    visible = expand_block_map(block_map, (rows, 128), 450, 900)
    mask = None if bits else flash_attn.BlockSparseMask.from_block_map(block_map, (rows, 128))
    options = {"attn_mask": visible} if bits else {}
    results = []
    for filled in (0.0, value):
        q, k, v, _ = case.draw()
        v[:, 394] = filled
        results.append(attend(case, q, k, v, mask, deterministic=True, return_attn_probs=True, **options)[:2])
    (clean, clean_lse), (dirty, dirty_lse) = results
    sees = visible[0, :, :, 394].T.expand(2, -1, -1)
    assert_bitwise([dirty[~sees], dirty_lse], [clean[~sees], clean_lse], ("out", "lse"))
    assert not dirty[sees].isfinite().any()
