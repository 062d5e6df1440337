"""flash_attn.explain: what runs is what it says, and it counts visible pairs exactly."""

import pytest
import torch

import reference
from flash_attn import BlockSparseMask, _C, build_info, explain

MASKS = [{}, {"causal": True}, {"window_size": (7, 0)}, {"window_size": (0, 5)}, {"window_size": (-1, 3)},
         {"window_size": (4, -1), "causal": True}]
LENGTHS = [(40, 40), (13, 40), (40, 13), (1, 64), (0, 8), (8, 0)]


def inputs(seqlen_q=40, seqlen_k=40, batch=2, heads=4, heads_k=2, head_dim=16, head_dim_v=8):
    return (torch.zeros(batch, seqlen_q, heads, head_dim), torch.zeros(batch, seqlen_k, heads_k, head_dim),
            torch.zeros(batch, seqlen_k, heads_k, head_dim_v))


@pytest.mark.parametrize("seqlen_q,seqlen_k", LENGTHS)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_pairs_and_flops(options, seqlen_q, seqlen_k):
    got = explain(*inputs(seqlen_q, seqlen_k), **options)
    pairs = 2 * 4 * int(reference.visible_keys(seqlen_q, seqlen_k, **options).sum())
    assert (got.pairs, got.all_pairs) == (pairs, 2 * 4 * seqlen_q * seqlen_k)
    assert got.forward.flops == 2 * pairs * (16 + 8)
    assert got.backward.flops == 2 * pairs * (16 + 8 + 8 + 16 + 16)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_pairs_of_packed_sequences(options):
    cu_q, cu_k = torch.tensor([0, 5, 5, 40]), torch.tensor([0, 9, 20, 33], dtype=torch.int32)
    q, k, v = (x.flatten(0, 1) for x in inputs())
    got = explain(q, k, v, cu_q, cu_k, 35, 13, **options)
    lengths = [(5, 9), (0, 11), (35, 13)]
    assert got.pairs == 4 * sum(int(reference.visible_keys(*pair, **options).sum()) for pair in lengths)


@pytest.mark.parametrize("batch,heads", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_pairs_of_a_block_mask(options, batch, heads):
    block_map = torch.rand(batch, heads, 4, 6) < 0.5
    mask = BlockSparseMask.from_block_map(block_map, (11, 7))
    got = explain(*inputs(), mask=mask, **options)
    visible = reference.expand_block_map(block_map, (11, 7), 40, 40)
    visible = visible & reference.visible_keys(40, 40, **options)
    assert got.pairs == int(visible.expand(2, 4, 40, 40).sum())


def test_says_what_runs_on_the_cpu():
    (chosen,) = (e for e in build_info()["engines"] if e["chosen"] and e["name"] == "cpu")
    got = explain(*inputs(), causal=True)
    for plan in (got.forward, got.backward):
        assert (plan.engine, plan.configuration) == ("cpu", chosen["configuration"])
        assert plan.splits == 1 and plan.workspace_bytes > 0 and not plan.error
    text = str(got)
    for word in ("[2, 40, 4, 16]", "float32 on cpu", "forward", "backward", "GFLOP", chosen["configuration"]):
        assert word in text
    for engine in {kernel["engine"] for kernel in _C.kernels()}:
        assert f"not {engine}: q is on cpu" in text


def test_takes_the_options_of_the_functions():
    slopes = torch.ones(4)
    explain(*inputs(), dropout_p=0.1, softmax_scale=1.0, softcap=3.0, alibi_slopes=slopes, deterministic=True)
    with pytest.raises(TypeError):
        explain(*inputs(), no_such_option=1)
    for devices in (("cpu", "meta", "meta"), ("meta",) * 3):
        with pytest.raises(RuntimeError, match="meta"):
            explain(*(x.to(device) for x, device in zip(inputs(), devices, strict=True)))
