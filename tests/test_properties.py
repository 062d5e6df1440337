"""Configurations that nobody thought of, drawn by hypothesis. A failure prints one line that repeats it."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from acceptance import Expected, Result
from attention_case import Case
from test_block_sparse import blocks_of, pair, run

SETTINGS = settings(max_examples=35, deadline=None, derandomize=True, print_blob=False,
                    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
TILE_EDGES = [31, 32, 33, 63, 64, 65, 127, 128, 129]
LENGTHS = st.one_of(st.integers(1, 20), st.integers(1, 150), st.sampled_from(TILE_EDGES))
BLOCKS = st.integers(1, 70)
WINDOW_ENDS = st.one_of(st.just(-1), st.integers(0, 12), st.integers(0, 160))


def repro(case):
    note(f'python -c "import torch; from attention_case import *; {case!r}.check()"')


@st.composite
def features(draw):
    softcap = draw(st.sampled_from([0.0, 0.0, 1.0, 30.0]))
    return {
        "dtype": draw(DTYPES), "causal": draw(st.booleans()),
        "window_size": (draw(WINDOW_ENDS), draw(WINDOW_ENDS)), "softcap": softcap,
        "dropout_p": 0.0 if softcap else draw(st.sampled_from([0.0, 0.0, 0.1, 0.6])),
        "alibi": draw(st.sampled_from(["none", "none", "heads", "batch"])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.05, 1.0])),
        "head_dim": draw(st.integers(1, 80)), "head_dim_v": draw(st.integers(1, 80)),
        "seed": draw(st.integers(0, 999)),
    }


@st.composite
def heads(draw):
    num_heads_k = draw(st.integers(1, 3))
    return {"num_heads": num_heads_k * draw(st.integers(1, 3)), "num_heads_k": num_heads_k}


@st.composite
def dense_cases(draw):
    return Case(batch=draw(st.integers(1, 3)), seqlen_q=draw(LENGTHS), seqlen_k=draw(LENGTHS),
                **draw(features()), **draw(heads()))


@st.composite
def packed_cases(draw):
    lengths = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=5))
    offsets = [[0], [0]]
    for pair_of_lengths in lengths:
        for axis, length in enumerate(pair_of_lengths):
            offsets[axis].append(offsets[axis][-1] + length)
    return Case(cu_seqlens_q=tuple(offsets[0]), cu_seqlens_k=tuple(offsets[1]), tail=draw(st.integers(1, 9)),
                **draw(features()), **draw(heads()))


@SETTINGS
@given(case=dense_cases(), with_dlse=st.booleans())
def test_dense(case, with_dlse):
    repro(case)
    case.check(dlse=case.draw_dlse() if with_dlse else None)


@SETTINGS
@given(case=packed_cases(), with_dlse=st.booleans())
def test_packed(case, with_dlse):
    repro(case)
    case.check(dlse=case.draw_dlse() if with_dlse else None)


@SETTINGS
@given(case=dense_cases(), block_size=st.one_of(BLOCKS, st.tuples(BLOCKS, BLOCKS)),
       density=st.sampled_from([0.1, 0.5, 0.9]), data=st.data())
def test_block_sparse(case, block_size, density, data):
    shape = (data.draw(st.sampled_from([1, case.batch])), data.draw(st.sampled_from([1, case.num_heads])),
             *map(blocks_of, (case.seqlen_q, case.seqlen_k), pair(block_size)))
    generator = torch.Generator().manual_seed(case.seed)
    block_map = torch.rand(shape, generator=generator) < density
    note(f"{case!r}, block map torch.rand({shape}, seed {case.seed}) < {density}, block size {block_size}")
    from reference import expand_block_map
    inputs = case.draw()
    visible = expand_block_map(block_map, block_size, case.seqlen_q, case.seqlen_k)
    actual = run(case, block_map, block_size, inputs)
    Expected(case.attend(visible), *inputs).check(**vars(actual))


@SETTINGS
@given(case=dense_cases(), split=st.floats(0, 1))
def test_softmax_over_two_halves_of_the_keys_merges(case, split):
    """out = sum_i exp(lse_i - lse) out_i, lse = log(sum_i exp(lse_i)): what ring attention relies on."""
    case = Case(torch.float32, case.batch, case.seqlen_q, max(case.seqlen_k, 2), case.num_heads,
                case.num_heads_k, case.head_dim, case.head_dim_v, softcap=case.softcap, seed=case.seed)
    repro(case)
    q, k, v, _ = case.draw()
    middle = min(max(round(split * case.seqlen_k), 1), k.shape[1] - 1)
    out, lse, _ = case.call(q, k, v, return_attn_probs=True)
    halves = (slice(middle), slice(middle, None))
    parts = [case.call(q, k[:, s], v[:, s], return_attn_probs=True)[:2] for s in halves]
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(merged, lse, rtol=1e-5, atol=1e-5)
    total = sum(torch.exp(part_lse - lse).movedim(1, 2)[..., None] * part for part, part_lse in parts)
    torch.testing.assert_close(total, out, rtol=1e-4, atol=1e-5)


@SETTINGS
@given(case=dense_cases())
def test_permuting_keys_changes_nothing(case):
    """Without positions in the scores, keys are a set; and out is linear in the values."""
    case = Case(torch.float64, case.batch, case.seqlen_q, case.seqlen_k, case.num_heads, case.num_heads_k,
                case.head_dim, case.head_dim_v, softmax_scale=case.softmax_scale, seed=case.seed)
    repro(case)
    q, k, v, dout = case.draw()
    order = torch.randperm(case.seqlen_k, generator=torch.Generator().manual_seed(case.seed))
    plain, shuffled = case.run((q, k, v, dout)), case.run((q, k[:, order], 2 * v[:, order], dout))
    torch.testing.assert_close(shuffled.out, 2 * plain.out)
    torch.testing.assert_close(shuffled.lse, plain.lse)
    torch.testing.assert_close(shuffled.dq, 2 * plain.dq)
    torch.testing.assert_close(shuffled.dk, 2 * plain.dk[:, order])
    torch.testing.assert_close(shuffled.dv, plain.dv[:, order])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 40.0])
@SETTINGS
@given(case=dense_cases())
def test_probabilities_sum_to_one(scale, case):
    """v = 1 gives 1 in every row with a key, however sharp the softmax, and dv sums to dout's."""
    case = Case(torch.float32, case.batch, case.seqlen_q, case.seqlen_k, case.num_heads, case.num_heads_k,
                case.head_dim, 3, scale, case.causal, case.window_size, seed=case.seed)
    repro(case)
    q, k, v, dout = case.draw()
    result: Result = case.run((q, k, torch.ones_like(v), dout))
    alive = (result.lse > -math.inf).movedim(1, 2)
    assert (result.out[~alive] == 0).all()
    torch.testing.assert_close(result.out[alive], torch.ones_like(result.out[alive]), rtol=3e-6, atol=0)
    seen = torch.where(alive[..., None], dout, 0.0).double().sum(dim=(1, 2))
    # Recomputed probabilities have the absolute error of lse as their relative one.
    largest_lse = torch.where(alive, result.lse.movedim(1, 2).abs(), 0.0).max().item()
    tolerance = 1e-4 + torch.finfo(torch.float32).eps * largest_lse * dout.abs().sum().item()
    torch.testing.assert_close(result.dv.double().sum(dim=(1, 2)), seen, rtol=0, atol=tolerance)
