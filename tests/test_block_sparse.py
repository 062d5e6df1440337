"""A map of blocks decides which parts of the score matrix exist, whatever the size of block and tile."""

import math

import pytest
import torch

import flash_attn
from acceptance import Expected, Result
from attention_case import Case, check_result
from reference import expand_block_map

BLOCK_SIZES = [1, 16, 33, 64, (32, 128), (128, 32), (7, 50), 256]


def blocks_of(seqlen, block):
    return -(-seqlen // block)


def pair(block_size):
    return (block_size, block_size) if isinstance(block_size, int) else block_size


def random_map(case, block_size, density=0.4, batch=None, heads=None):
    block_q, block_k = pair(block_size)
    shape = (case.batch if batch is None else batch, case.num_heads if heads is None else heads,
             blocks_of(case.seqlen_q, block_q), blocks_of(case.seqlen_k, block_k))
    draw = torch.rand(shape, generator=torch.Generator().manual_seed(case.seed))
    return (draw < density).to(case.device)


def run(case, block_map, block_size, inputs=None, dlse=None):
    *qkv, dout = case.draw() if inputs is None else inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    mask = flash_attn.BlockSparseMask.from_block_map(block_map, block_size)
    torch.manual_seed(case.seed)
    out, lse, _ = flash_attn.flash_attn_block_sparse_func(
        *leaves, mask, dropout_p=case.dropout_p, alibi_slopes=case.slopes(), return_attn_probs=True,
        **case.features())
    outputs, gradients = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    return Result(out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, gradients))


def check(case, block_map, block_size, dlse=None):
    inputs = case.draw()
    visible = expand_block_map(block_map, block_size, case.seqlen_q, case.seqlen_k)
    expected = Expected(case.attend(visible), *inputs, dlse)
    actual = run(case, block_map, block_size, inputs, dlse)
    check_result(actual, expected)


@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("features", [
    {}, {"causal": True}, {"window_size": (40, 20)}, {"softcap": 2.0, "causal": True}, {"alibi": "batch"},
    {"dropout_p": 0.3, "causal": True}], ids=str)
def test_random_maps(block_size, features, device):
    case = Case(torch.float32, 2, 130, 170, 4, 2, 24, device=device, **features)
    check(case, random_map(case, block_size), block_size, case.draw_dlse())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("block_size", [16, 33, (32, 128)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(dtype, block_size, causal, device):
    case = Case(dtype, 2, 150, 190, 2, 1, 64, causal=causal, device=device)
    check(case, random_map(case, block_size), block_size)


@pytest.mark.parametrize("head_dim,head_dim_v", [(64, 64), (128, 128), (192, 128), (256, 256), (5, 9)])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_causal_map_is_causal(head_dim, head_dim_v, block_size, device):
    """Blocks of one element spell out the triangle; larger ones meet it with causal=True."""
    case = Case(torch.float32, 1, 128, 128, 2, 1, head_dim, head_dim_v, causal=block_size > 1, device=device)
    side = blocks_of(128, block_size)
    triangle = torch.ones(1, 1, side, side, dtype=torch.bool, device=device).tril()
    inputs = case.draw()
    actual = run(case, triangle, block_size, inputs)
    causal = Case(torch.float32, 1, 128, 128, 2, 1, head_dim, head_dim_v, causal=True, device=device)
    causal.check(inputs, actual=actual)
    dense = causal.run(inputs)
    for name, x in vars(actual).items():
        torch.testing.assert_close(x, getattr(dense, name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("block_size", [16, 33, 64, (128, 32)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_full_map_is_dense(block_size, causal, device):
    case = Case(torch.bfloat16, 2, 130, 170, 2, 2, 32, causal=causal, device=device)
    inputs = case.draw()
    actual, dense = run(case, random_map(case, block_size, density=2.0), block_size, inputs), case.run(inputs)
    case.check(inputs, actual=actual)
    for name, x in vars(actual).items():
        torch.testing.assert_close(x, getattr(dense, name), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch,heads", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(100, 130), (130, 50)])
def test_broadcast_dimensions(batch, heads, seqlen_q, seqlen_k, device):
    case = Case(torch.float32, 2, seqlen_q, seqlen_k, 4, 2, 16, causal=True, device=device)
    block_map = random_map(case, 32, batch=batch, heads=heads)
    check(case, block_map, 32)
    inputs = case.draw()
    expanded = run(case, block_map.expand(2, 4, -1, -1).contiguous(), 32, inputs)
    shared = run(case, block_map, 32, inputs)
    for name, x in vars(shared).items():
        assert torch.equal(x, getattr(expanded, name)), name


def test_empty_rows_columns_and_maps(device):
    case = Case(torch.float32, 1, 100, 120, 2, 2, 16, device=device)
    block_map = random_map(case, 20, density=0.6)
    block_map[:, :, 2] = False
    block_map[:, 1, :, 3] = False
    check(case, block_map, 20, case.draw_dlse())
    result = run(case, torch.zeros_like(block_map), 20)
    assert (result.lse == -math.inf).all()
    for x in (result.out, result.dq, result.dk, result.dv):
        assert (x == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [10, 32, (16, 48)], ids=str)
def test_nothing_leaks_from_absent_blocks(dtype, block_size, value, device):
    """NaN in key columns and query rows without a block: bitwise as with zeros there."""
    case = Case(dtype, 1, 96, 96, 2, 2, 16, causal=True, device=device)
    block_q, block_k = pair(block_size)
    block_map = random_map(case, block_size, density=0.7, heads=1)
    block_map[:, :, 1], block_map[:, :, :, 1] = False, False
    rows, keys = slice(block_q, 2 * block_q), slice(block_k, 2 * block_k)
    results = []
    for fill in (0.0, value):
        q, k, v, dout = case.draw()
        q[:, rows], dout[:, rows], k[:, keys], v[:, keys] = fill, fill, fill, fill
        results.append(run(case, block_map, block_size, (q, k, v, dout)))
    for name, x in vars(results[1]).items():
        assert torch.equal(x, getattr(results[0], name)), name


def test_single_blocks(device):
    """One present block in any place: the softmax of that block alone."""
    case = Case(torch.float32, 1, 90, 90, 1, 1, 8, device=device)
    q, k, v, _ = case.draw()
    for block in range(9):
        block_map = torch.zeros(1, 1, 3, 3, dtype=torch.bool, device=device)
        block_map.view(-1)[block] = True
        out = run(case, block_map, 30).out
        rows, keys = (slice(30 * x, 30 * x + 30) for x in divmod(block, 3))
        p = torch.softmax((q[0, rows, 0].double() @ k[0, keys, 0].double().T) * 8**-0.5, dim=-1)
        torch.testing.assert_close(out[0, rows, 0].double(), p @ v[0, keys, 0].double(), rtol=1e-5, atol=1e-5)
        assert out.count_nonzero() == 30 * 8


def test_one_mask_for_several_calls(device):
    """Lists cached by the first call serve another dtype, and both directions."""
    case = Case(torch.float32, 1, 100, 100, 2, 2, 16, device=device)
    mask = flash_attn.BlockSparseMask.from_block_map(random_map(case, 25, heads=1), 25)
    q, k, v, _ = case.draw()
    first = flash_attn.flash_attn_block_sparse_func(q, k, v, mask)
    flash_attn.flash_attn_block_sparse_func(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask)
    assert torch.equal(flash_attn.flash_attn_block_sparse_func(q, k, v, mask), first)


def test_more_blocks_than_an_index_has_room_for():
    """What is above bit 23 says what is hidden of a block."""
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 2**23, 1, 1)
    mask = flash_attn.BlockSparseMask.from_block_map(torch.zeros(1, 1, 1, 2**23, dtype=torch.bool), 1)
    with pytest.raises(RuntimeError, match="fewer than 8388608"):
        flash_attn.flash_attn_block_sparse_func(q, k, k, mask)
