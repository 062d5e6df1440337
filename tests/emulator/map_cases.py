"""As cases.py: maps of blocks and masks of elements."""

import pytest
import torch

import block_maps
import flash_attn
import reference
from acceptance import Expected
from attention_case import check_result
from emulated_case import HALF, case, rotated
from gpu import deterministic_as_asked  # noqa: F401

pytestmark = pytest.mark.usefixtures("deterministic_as_asked")


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("block", [64, 128])
def test_block_sparse(head_dim, block):
    given = case(HALF, head_dim, 256, 300)
    block_map = torch.rand(1, 2, -(-256 // block), -(-300 // block)) < 0.5
    mask = flash_attn.BlockSparseMask.from_block_map(block_map, block)
    q, k, v, dout = given.draw()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn.flash_attn_block_sparse_func(*leaves, mask, return_attn_probs=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    visible = reference.expand_block_map(block_map, (block, block), 256, 300)
    expected = Expected(given.attend(visible), *(x.detach() for x in leaves), dout)
    expected.check(out=out.detach(), lse=lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


@pytest.mark.parametrize("head_dim,rows,which,features", rotated(
    [(64, 64), (64, 128), (64, 256), (96, 128), (128, 64), (128, 128), (256, 128)], list(block_maps.LISTED),
    [{}, {"causal": True}, {"window_size": (150, 70)}]))
def test_lists_of_warpgroups(head_dim, rows, which, features):
    """A tile of queries lies in several rows of blocks."""
    given = case(HALF, head_dim, 450, 1100, num_heads_k=1, **features)
    block_map = block_maps.map_of(which, -(-450 // rows), 9)
    visible = reference.expand_block_map(block_map, (rows, 128), 450, 1100)
    q, k, v, _ = given.draw()
    expected = Expected(given.attend(visible), q, k, v)
    blocks = flash_attn.BlockSparseMask.from_block_map(block_map, (rows, 128))
    out, lse, _ = flash_attn.flash_attn_block_sparse_func(q, k, v, blocks, return_attn_probs=True,
                                                          **given.features())
    expected.check(out=out, lse=lse)
    assert (out[(lse == -torch.inf).movedim(1, 2)] == 0).all()
    if rows == 128:
        mask = visible & (torch.rand(visible.shape) < 0.8)
        mask[:, :, :, :256] = visible[:, :, :, :256]  # without a hidden element
        with torch.no_grad():
            out, lse, _ = given.call(q, k, v, attn_mask=mask, return_attn_probs=True)
        Expected(given.attend(mask), q, k, v).check(out=out, lse=lse)


@pytest.mark.parametrize("head_dim,head_dim_v,rows,which,bits,features", rotated(
    [(192, 192, 64), (192, 128, 64), (256, 256, 64), (256, 256, 128)], list(block_maps.LISTED),
    [(False, {}), (False, {"softcap": 5.0}), (True, {"causal": True}), (True, {"window_size": (150, 70)})]))
def test_gradients_under_a_map(head_dim, head_dim_v, rows, which, bits, features):
    """Where keys and queries have walks of their own: gaps in either's lists, tiles that are no blocks."""
    given = case(HALF, head_dim, 450, 700, head_dim_v=head_dim_v, **features)
    block_map = block_maps.map_of(which, -(-450 // rows), 6)
    mask = reference.expand_block_map(block_map, (rows, 128), 450, 700)
    blocks = flash_attn.BlockSparseMask.from_block_map(block_map, (rows, 128))
    if bits:
        mask &= torch.rand(mask.shape) < 0.8
    (q, k, v, dout), dlse = given.draw(), given.draw_dlse()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if bits:
        out, lse, _ = given.call(*leaves, attn_mask=mask, return_attn_probs=True)
    else:
        out, lse, _ = flash_attn.flash_attn_block_sparse_func(*leaves, blocks, return_attn_probs=True,
                                                              **given.features())
    gradients = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    expected = Expected(given.attend(mask), *(x.detach() for x in leaves), dout, dlse)
    gradients = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    expected.check(out=out.detach(), lse=lse.detach(), **gradients)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_what_a_mask_hides_does_not_matter_to_gradients(head_dim, value):
    """Whatever lies behind it, in K, V, Q or dO."""
    given = case(HALF, head_dim, 300, 450)
    mask = torch.rand(1, 2, 300, 450) < 0.5
    mask[..., 77] = False
    mask[..., 33, :] = False
    q, k, v, dout = given.draw()
    for tensor, row in ((q, 33), (dout, 33), (k, 77), (v, 77)):
        tensor[:, row] = 0
    clean = given.run((q, k, v, dout), attn_mask=mask)
    for tensor, row in ((q, 33), (dout, 33), (k, 77), (v, 77)):
        tensor[:, row] = value
    dirty = given.run((q, k, v, dout), attn_mask=mask)
    assert torch.equal(clean.dk, dirty.dk) and torch.equal(clean.dv, dirty.dv)
    torch.testing.assert_close(clean.dq, dirty.dq, rtol=2e-2, atol=4e-3)  # blocks add in any order


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (150, 70)}], ids=str)
# A mask for each query head, or for each key head; at head dim 64, tiles of 64 keys and of 128.
@pytest.mark.parametrize("heads_k,seqlen_k", [(1, 450), (2, 450), (2, 1400)])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_quarters_of_blocks(head_dim, heads_k, seqlen_k, features):
    given = case(HALF, head_dim, 300, seqlen_k, num_heads_k=heads_k, **features)
    mask = block_maps.mask_of_quarters(300, seqlen_k)
    inputs, dlse = given.draw(), given.draw_dlse()
    actual = given.run(inputs, dlse, attn_mask=mask)
    expected = Expected(given.attend(mask), *inputs, dlse)
    check_result(actual, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("head_dim,rows", [(64, 64), (64, 128), (96, 64), (128, 64), (128, 128), (256, 64)])
def test_lists_of_warpgroups_with_care(head_dim, rows, bits, value):
    """What is not finite in a block that some warpgroups of a tile list: as zeros there for the others."""
    given = case(HALF, head_dim, 450, 900)
    block_map = block_maps.map_of("in turn", -(-450 // rows), 8)
    block_map[:, :, :, 6:] = True
    visible = reference.expand_block_map(block_map, (rows, 128), 450, 900)
    if bits:
        visible = visible & (torch.arange(900) % 3 > 0)
    mask = flash_attn.BlockSparseMask.from_block_map(block_map, (rows, 128))
    results = []
    for filled in (0.0, value):
        q, k, v, _ = given.draw()
        v[:, 3 * 128 + 10] = filled
        if bits:
            results.append(given.call(q, k, v, attn_mask=visible, return_attn_probs=True)[:2])
        else:
            results.append(flash_attn.flash_attn_block_sparse_func(q, k, v, mask, return_attn_probs=True)[:2])
    (clean, clean_lse), (dirty, dirty_lse) = results
    sees = visible[0, :, :, 3 * 128 + 10].T
    assert torch.equal(clean_lse, dirty_lse)
    assert torch.equal(clean[0][~sees], dirty[0][~sees])
    assert not dirty[0][sees].isfinite().any()
