"""Every shape has a kernel on every chip, and what chooses it is a pure function of sizes: no GPU needed."""

import functools
import itertools
import re
import runpy
from pathlib import Path

import pytest

from flash_attn import _C, build_info

ROOT = Path(__file__).resolve().parent.parent
TABLE = runpy.run_path(ROOT / "csrc" / "cuda" / "kernel_table.py")["ROWS"]
KERNELS = _C.kernels()
FOR_FEW = {row.name(dtype) for row in TABLE for dtype in row.dtypes if getattr(row.configuration, "few", 0)}
PASSES = ("forward", "backward")
DTYPES = list(dict.fromkeys(kernel["dtype"] for kernel in KERNELS))
# Compute capability: multiprocessors of a chip, bytes of shared memory that a block may have (CUDA C++
# Programming Guide, technical specifications per compute capability).
CHIPS = {
    80: (108, 166912), 86: (84, 101376), 89: (142, 101376), 90: (132, 232448), 100: (148, 232448),
    120: (170, 101376),
}

pytestmark = pytest.mark.skipif(not KERNELS, reason="this build has no CUDA kernels")


@pytest.fixture
def portable(monkeypatch):
    """The choice among the rows of the engine that every chip has."""
    monkeypatch.setenv("FLASH_ATTN_SM90", "0")


def chip(capability):
    multiprocessors, shared_bytes = CHIPS[capability]
    return {"capability": capability, "multiprocessors": multiprocessors,
            "shared_bytes_per_block": shared_bytes}


def sizes(seqlen_q=1024, seqlen_k=1024, batch=4, heads=16, head_dim=64, **given):
    return {"dtype": "bfloat16", "batch": batch, "heads_q": heads, "heads_k": heads, "head_dim": head_dim,
            "head_dim_v": head_dim, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "rows_q": seqlen_q,
            "rows_k": seqlen_k, "window_left": -1, "window_right": -1, "packed": False, "block_size": (0, 0),
            "attn_bias": None, "alibi": False, "softmax_scale": 1.0, "softcap": 0.0, "dropout_p": 0.0,
            "deterministic": False, **given}


@functools.cache
def runs_on(capability):
    """Did this build compile for the chip?"""
    plan = _C.plan(sizes(dtype=DTYPES[0], head_dim=1), chip(capability))["forward"]
    return plan["engine"] is not None or "compiled for" not in plan["error"]


def rows_of(which, dtype, engine="sm80", few=False):
    """Of the engine that every chip has; those for few queries or the others."""
    return [kernel for kernel in KERNELS
            if (kernel["pass"], kernel["dtype"], kernel["engine"]) == (which, dtype, engine)
            and (kernel["name"] in FOR_FEW) == few]


def test_one_query_of_grouped_heads_is_a_tile_of_as_many_rows(portable):
    one = sizes(1, 8192, batch=2, head_dim=128, heads_k=4, window_right=0)
    rows = sizes(4, 8192, batch=2, head_dim=128, heads=4, heads_k=4)
    for capability in filter(runs_on, CHIPS):
        got = _C.plan(one, chip(capability))["forward"]
        assert got == _C.plan(rows, chip(capability))["forward"] and got["splits"] > 1


def test_registry_is_the_table():
    expected = [(row.engine, row.name(dtype)) for which in PASSES for row in TABLE if row.which == which
                and (row.capability is None or runs_on(row.capability)) for dtype in row.dtypes]
    assert [(kernel["engine"], kernel["name"]) for kernel in KERNELS] == expected
    assert len(set(expected)) == len(expected)


def test_rows_say_what_was_compiled():
    configurations = {row.symbol(dtype): row.configuration for row in TABLE for dtype in row.dtypes}
    for kernel in KERNELS:
        row = configurations[f"{kernel['engine']}_{kernel['name']}"]
        for field in ("head_dim", "query_tile", "key_tile", "blocks"):
            assert kernel[field] == getattr(row, field), kernel["name"]
        assert f"_{kernel['dtype']}_" in kernel["name"]


def test_shared_memory_is_within_some_chip():
    largest = max(shared_bytes for _, shared_bytes in CHIPS.values())
    assert all(0 < kernel["shared_bytes"] <= largest for kernel in KERNELS)


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", PASSES)
def test_every_head_dim_has_a_kernel(which, dtype, capability):
    rows = rows_of(which, dtype)
    if which == "backward" and not any(kernel["pass"] == "backward" for kernel in KERNELS):
        pytest.skip("this build has no backward kernels at all")
    fitting = [row["head_dim"] for row in rows
               if row["shared_bytes"] <= CHIPS[capability][1] and row["from_keys"] == 0]
    # dK, dV and their operands in float32 take more than 99 KiB beyond this head dim.
    largest = 128 if dtype == "float32" and which == "backward" and CHIPS[capability][1] < 102400 else 256
    missing = [head_dim for head_dim in range(1, largest + 1) if not any(head_dim <= m for m in fitting)]
    assert not missing, f"{which} {dtype} on {capability / 10}: no kernel from head_dim {missing[0]} on"


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("seqlen", [1, 1023, 1024])
@pytest.mark.usefixtures("portable")
def test_choice_is_the_best_row_that_fits(seqlen, which, dtype, capability):
    if not runs_on(capability):
        pytest.skip(f"this build is not for {capability / 10}")
    rows = rows_of(which, dtype)
    for head_dim in range(1, 257):
        for head_dim_v in {head_dim, 1, 257 - head_dim}:
            largest = max(head_dim, head_dim_v)
            fitting = [row for row in rows if largest <= row["head_dim"]
                       and row["shared_bytes"] <= CHIPS[capability][1] and row["from_keys"] <= seqlen]
            # The system takes 1 KiB of each block's shared memory.
            resident = [row for row in fitting if row["head_dim"] == fitting[0]["head_dim"]
                        and row["blocks"] * (row["shared_bytes"] + 1024) <= CHIPS[capability][1] + 1024]
            few = [row for row in rows_of(which, dtype, few=True) if largest <= row["head_dim"]
                   and row["shared_bytes"] <= CHIPS[capability][1] and seqlen <= row["query_tile"]]
            best = next((row["name"] for row in few or resident or fitting), None)
            problem = sizes(seqlen, seqlen, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
            plan = _C.plan(problem, chip(capability))[which]
            assert plan.get("configuration") == best


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("which", PASSES)
def test_hoppers_own_kernels_come_first(which, capability, monkeypatch):
    """On Hopper, for 16 bits and head dims that they have; the others know nothing of them."""
    if not runs_on(capability):
        pytest.skip(f"this build is not for {capability / 10}")

    def engine_of(problem):
        return _C.plan(problem, chip(capability))[which]["engine"]

    for head_dim in (8, 40, 64, 65, 96, 128, 136, 192, 256):
        for dtype in DTYPES:
            problem = sizes(dtype=dtype, head_dim=head_dim, window_right=0)
            # Rows are to be multiples of 16 bytes.
            own = capability == 90 and dtype in ("float16", "bfloat16") and head_dim % 8 == 0
            monkeypatch.setenv("FLASH_ATTN_SM90", "0")
            portable = engine_of(problem)
            # float32 gradients beyond head dim 128 need more shared memory than the smallest chips have.
            assert portable == "sm80" or (portable is None and which == "backward" and dtype == "float32"
                                          and head_dim > 128 and CHIPS[capability][1] < 100 * 1024)
            monkeypatch.delenv("FLASH_ATTN_SM90")
            assert engine_of(problem) == ("sm90" if own else portable)
            for transform in ({"softcap": 2.0}, {"alibi": True}, {"softmax_scale": -1.0}):
                assert engine_of({**problem, **transform}) == ("sm90" if own else portable)
            biased = own and (which == "forward" or head_dim <= 128)
            for bias in ((0, 1024 * 1024, 1024), (1024, 0, 0)):
                assert engine_of({**problem, "attn_bias": bias}) == ("sm90" if biased else portable)
                # Its rows, too; and dropout they lack.
                unaligned = {**problem, "attn_bias": tuple(stride + (stride > 0) for stride in bias)}
                assert engine_of(unaligned) == engine_of({**problem, "dropout_p": 0.5}) == portable
            assert engine_of({**problem, "block_size": (128, 128)}) == ("sm90" if own else portable)


@pytest.mark.skipif(not KERNELS or not runs_on(90), reason="this build is not for 9.0")
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.usefixtures("portable")
def test_large_tiles_are_for_queries_that_see_many_keys(which):
    def tile(seqlen, **given):
        name = _C.plan(sizes(seqlen, seqlen, **given), chip(90))[which]["configuration"]
        return next(row["key_tile"] for row in rows_of(which, "bfloat16") if row["name"] == name)

    causal = {"window_right": 0}
    first = 512 if which == "forward" else 1024
    assert (tile(first - 1), tile(first)) == (64, 128)
    # The forward counts how many keys the last queries see, the backward how many they see on average, a half
    # rounded up.
    if which == "backward":
        first = 2 * first - 2
    assert (tile(first - 1, **causal), tile(first, **causal)) == (64, 128)
    assert tile(4096, window_left=400, window_right=100) == 64


@pytest.mark.skipif(not KERNELS or not runs_on(90), reason="this build is not for 9.0")
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.usefixtures("portable")
def test_small_blocks_get_small_tiles(which):
    """A block-sparse map must not lose to dense attention because a tile is larger than a block."""
    long = {"seqlen_q": 4096, "seqlen_k": 4096}
    dense = _C.plan(sizes(**long), chip(90))[which]["configuration"]
    sparse = _C.plan(sizes(**long, block_size=(64, 64)), chip(90))[which]["configuration"]
    tiles = {row["name"]: row["key_tile"] for row in rows_of(which, "bfloat16")}
    assert tiles[sparse] == 64 < tiles[dense] == 128


@pytest.mark.skipif(not KERNELS or not runs_on(90), reason="this build is not for 9.0")
def test_hoppers_small_tiles_are_for_few_keys_under_a_diagonal_or_a_map():
    def key_tile(seqlen, **given):
        name = _C.plan(sizes(seqlen, seqlen, **given), chip(90))["forward"]["configuration"]
        return next(row["key_tile"] for row in rows_of("forward", "bfloat16", "sm90") if row["name"] == name)

    assert (key_tile(767), key_tile(768)) == (64, 128)
    for given in ({"window_right": 0}, {"block_size": (128, 128)}):
        assert (key_tile(1280, **given), key_tile(1281, **given)) == (64, 128)


@pytest.mark.skipif(not KERNELS or not runs_on(90), reason="this build is not for 9.0")
def test_short_sequences_have_blocks_that_share_a_multiprocessor():
    """If there is more than one for each; none in deterministic calls, whose tiles depend on nothing else."""
    def stages(seqlen, heads, **given):
        return re.search(r"_k64_s(\d)", on_h100(**{"seqlen_q": seqlen, "seqlen_k": seqlen, "batch": 1,
                                                   "heads": heads, **given})["configuration"])[1]

    assert (stages(128, 132), stages(128, 133), stages(256, 133)) == ("4", "3", "4")
    assert (stages(256, 66, window_right=0), stages(256, 100, window_right=0)) == ("4", "3")
    assert stages(128, 500, deterministic=True) == "4"


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.usefixtures("portable")
def test_large_chips_choose_no_kernel_for_small_ones(capability):
    """Builds for several generations have no machine code of those for them."""
    if not runs_on(capability):
        pytest.skip(f"this build is not for {capability / 10}")
    small = {row.name(dtype) for row in TABLE for dtype in row.dtypes if row.small}
    assert small
    problems = [{}, {"window_right": 0}, {"softcap": 3.0}, {"attn_bias": (0, 1024, 1)}, {"dropout_p": 0.5},
                {"deterministic": True}, {"block_size": (64, 64)}, {"packed": True}]
    for head_dim in range(8, 257, 8):
        for dtype, seqlen in itertools.product(DTYPES, (1, 100, 4096)):
            for given in problems:
                problem = sizes(seqlen, seqlen, dtype=dtype, head_dim=head_dim, **given)
                plan = _C.plan(problem, chip(capability))
                assert not {plan[which].get("configuration") for which in PASSES} & small, problem


@pytest.mark.parametrize("capability", CHIPS)
def test_no_more_padding_than_needed(capability):
    """Rows stand in an order in which the first that fits wastes the least of a tile."""
    for which in PASSES:
        for dtype in DTYPES:
            padded = [row["head_dim"] for row in rows_of(which, dtype)
                      if row["shared_bytes"] <= CHIPS[capability][1]]
            for head_dim in range(1, 257):
                wide_enough = [most for most in padded if most >= head_dim]
                assert not wide_enough or wide_enough[0] == min(wide_enough), (which, dtype, head_dim)


@pytest.mark.skipif(not KERNELS or not runs_on(90), reason="this build is not for 9.0")
@pytest.mark.parametrize("which", PASSES)
def test_what_hoppers_own_refuse_goes_to_no_wider_tile(which):
    """Few keys or queries, maps of small blocks: to the portable kernel of the same head dim."""
    problems = [{"window_right": 0}, {"seqlen_q": 200, "seqlen_k": 200, "window_right": 0},
                {"seqlen_q": 1100, "seqlen_k": 1100, "batch": 1, "heads": 8}, {"block_size": (64, 64)},
                {"block_size": (96, 128)}, {"block_size": (64, 160)}, {"softcap": 3.0}]
    for head_dim in (64, 96, 128, 192, 256):
        for given in problems:
            name = _C.plan(sizes(head_dim=head_dim, **given), chip(90))[which]["configuration"]
            # For transformed scores Hopper has no kernel of 96.
            padded = 128 if head_dim == 96 and "softcap" in given else head_dim
            assert f"_d{padded}_" in name, (head_dim, given, name)


@pytest.mark.skipif(not KERNELS or not runs_on(90), reason="this build is not for 9.0")
@pytest.mark.parametrize("which", PASSES)
def test_narrow_values_have_tiles_of_their_own(which):
    """Queries of 192 with values of 128; not where the map's blocks or what scores go through forbid it."""
    def name(**given):
        return _C.plan(sizes(head_dim=192, **given), chip(90))[which]["configuration"]

    for head_dim_v in (8, 64, 120, 128):
        for given in ({}, {"window_right": 0}, {"block_size": (128, 128)}, {"deterministic": True}):
            assert "_d192_v128_" in name(head_dim_v=head_dim_v, **given), (head_dim_v, given)
    assert "_d192_q" in name(head_dim_v=136) and "_d192_q" in name(head_dim_v=128, softcap=3.0)
    assert "_d192_v128_" in _C.plan(sizes(head_dim=136, head_dim_v=128), chip(90))[which]["configuration"]
    assert "_d128_" in _C.plan(sizes(head_dim=64, head_dim_v=128), chip(90))[which]["configuration"]


@pytest.mark.skipif(not KERNELS or not runs_on(90), reason="this build is not for 9.0")
def test_hoppers_backward_can_be_deterministic():
    """Under a map only where nothing is added up: else blocks add in no order that it knows."""
    for head_dim in (64, 96, 128, 192, 256):
        given = {"head_dim": head_dim, "deterministic": True}
        assert _C.plan(sizes(**given), chip(90))["backward"]["engine"] == "sm90"
        under_a_map = _C.plan(sizes(block_size=(128, 128), **given), chip(90))["backward"]["engine"]
        assert under_a_map == ("sm90" if head_dim > 128 else "sm80")


@pytest.mark.skipif(not KERNELS or not runs_on(90), reason="this build is not for 9.0")
@pytest.mark.parametrize("head_dim", [192, 256])
def test_memory_of_hoppers_wide_backward_is_bounded(head_dim, monkeypatch):
    """It stores dS of some heads, in at most 9 MiB a multiprocessor, or what the environment says; not where
    a head needs more, under a map or of packed sequences."""
    def extra(seqlen, **given):
        problem = sizes(seqlen, seqlen, 1, 8, head_dim, **given)
        need = _C.plan(problem, chip(90))["backward"]["workspace_bytes"]
        with monkeypatch.context() as none:
            none.setenv("FLASH_ATTN_SCORE_GRADIENT_MIB", "0")
            return need - _C.plan(problem, chip(90))["backward"]["workspace_bytes"]

    bound = 9 * chip(90)["multiprocessors"] << 20
    of_scores = {seqlen: 8 * 2 * seqlen**2 for seqlen in (1024, 8192)}
    assert of_scores[1024] <= extra(1024) <= 1.1 * of_scores[1024]
    assert extra(1024, window_right=0) <= 0.7 * of_scores[1024]
    assert 0 < extra(8192) <= bound + (1 << 16) and of_scores[8192] < bound
    assert 0 < extra(16384) <= bound + (1 << 16) < 8 * 2 * 16384**2
    # One head of a third of the device's tiles idles too much, unless it is asked for.
    assert extra(20000) == extra(65536) == extra(1024, block_size=(128, 128)) == 0
    assert extra(65536, window_left=1024, window_right=0) > 0
    monkeypatch.setenv("FLASH_ATTN_SCORE_GRADIENT_MIB", "1188")
    assert extra(20000) > 0
    monkeypatch.setenv("FLASH_ATTN_SCORE_GRADIENT_MIB", "4")
    assert 2 << 20 <= extra(1024) <= (4 << 20) + (1 << 16)


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize("multiprocessors", [1, 20, 108, 132, 148])
def test_splits_fill_the_device(multiprocessors, resident):
    places = multiprocessors * resident
    for blocks in (1, 2, 7, 8, 30, 64, 100, 105, 106, 132, 1000):
        for key_tiles in (0, 1, 4, 5, 6, 17, 64, 100, 1000, 100_000):
            splits = _C.splits_for(blocks, key_tiles, multiprocessors, resident)
            if key_tiles <= 4 or blocks >= 0.8 * multiprocessors:
                assert splits == 1
                continue
            # Waves of blocks, times the tiles of the longest one.
            times = {count: -(-blocks * count // places) * -(-key_tiles // count)
                     for count in range(1, min(128, places, key_tiles) + 1)}
            best = min(times.values())
            assert splits == next(count for count, time in times.items() if 0.85 * time <= best), times


@pytest.mark.parametrize("blocks,key_tiles,splits", [
    (8, 128, 32), (32, 128, 8), (64, 128, 4), (128, 64, 2), (160, 64, 2), (256, 128, 1), (512, 128, 1),
    (8, 5, 5), (8, 1, 1)])
def test_splits_of_few_queries(blocks, key_tiles, splits):
    """Those that were the fastest on 132 multiprocessors with three blocks each."""
    assert _C.splits_for_few(blocks, key_tiles, 132, 3) == splits


@pytest.mark.parametrize("blocks,key_tiles,splits", [(64, 128, 6), (64, 64, 6), (256, 64, 1), (8, 1, 1)])
def test_splits_of_few_queries_in_pages(blocks, key_tiles, splits):
    """The same of keys in pages."""
    assert _C.splits_for_few(blocks, key_tiles, 132, 3, pages=True) == splits


@pytest.mark.parametrize("blocks,key_tiles,splits", [
    (8, 32, 16), (8, 64, 16), (8, 128, 32), (4, 128, 64), (64, 128, 4), (256, 128, 1)])
def test_splits_of_few_queries_in_clusters(blocks, key_tiles, splits):
    """The same where up to 16 of them put their results together without another kernel."""
    assert _C.splits_for_few(blocks, key_tiles, 132, 3, cluster=16) == splits


def test_splits_for_nothing():
    assert _C.splits_for(0, 100, 132, 2) == _C.splits_for_few(0, 100, 132, 2) == 1


def on_h100(**given):
    if not runs_on(90):
        pytest.skip("this build is not for 9.0")
    return _C.plan(sizes(**given), chip(90))["forward"]


def test_few_queries_split_the_keys():
    assert 16 <= on_h100(seqlen_q=1, seqlen_k=8192, batch=1, heads=8)["splits"] <= 64
    plan = on_h100(seqlen_q=1, seqlen_k=16384, batch=1, heads=8)
    assert 16 < plan["splits"] <= 64  # more than a cluster has
    # A partial out of 64 numbers and a partial lse for each split, head and query.
    assert plan["workspace_bytes"] >= plan["splits"] * 8 * 65 * 4


def test_few_queries_have_tiles_of_their_own():
    """Of (query, head) rows: 4 queries of 4 heads are a tile of 16. Smaller tiles of keys where more than
    three blocks for each multiprocessor would not run at once."""
    few = {"seqlen_q": 4, "seqlen_k": 8192, "batch": 8, "heads": 32, "heads_k": 8, "head_dim": 128}
    plan = on_h100(**few)
    assert plan["configuration"] == "forward_bfloat16_d128_q16_k64_few" and plan["splits"] == 4
    assert plan["workspace_bytes"] == 0  # a cluster's parts stay in shared memory
    many = on_h100(**{**few, "batch": 50})
    assert many["configuration"] == "forward_bfloat16_d128_q16_k32_few" and many["splits"] == 1
    # Two tiles a key head, where Hopper's own, which would hold both, does not pay.
    short = on_h100(**{**few, "seqlen_q": 8, "seqlen_k": 1024, "batch": 4})
    assert short["configuration"] == "forward_bfloat16_d128_q16_k64_few" and short["splits"] == 4
    assert on_h100(**few, softcap=3.0, alibi=True)["configuration"] == plan["configuration"]
    lone = {**few, "heads": 16, "heads_k": 16, "alibi": True}
    assert "_q16_" in on_h100(**lone)["configuration"]
    assert "_q16_" not in on_h100(**{**lone, "batch": 9})["configuration"]
    for other in ({"seqlen_q": 17}, {"dropout_p": 0.1}, {"deterministic": True}, {"attn_bias": (0, 8192, 1)},
                  {"block_size": (64, 64)}):
        assert "_q16_" not in on_h100(**{**few, **other})["configuration"], other


GROUPED = {"seqlen_k": 8192, "heads": 32, "heads_k": 8, "head_dim": 128, "window_right": 0}


@pytest.mark.parametrize("batch,seqlen_q,splits", [
    (8, 8, 2), (8, 32, 2), (8, 64, 1), (32, 8, 1), (32, 64, 1), (1, 16, 13), (1, 256, 2), (12, 16, 1),
    (20, 16, 4)])
def test_rows_of_more_queries(batch, seqlen_q, splits):
    """Hopper's own tiles of (query, head) rows, and how many parts of the keys were about the fastest."""
    plan = on_h100(**GROUPED, batch=batch, seqlen_q=seqlen_q)
    assert plan["configuration"] == "forward_bfloat16_d128_q128_k128_s3_few" and plan["splits"] == splits


@pytest.mark.parametrize("batch,seqlen_q,cluster", [(8, 8, True), (8, 1, True), (1, 128, False)])
def test_parts_that_are_a_cluster_need_no_workspace(batch, seqlen_q, cluster):
    """Of about as many blocks as there are multiprocessors some clusters would come later."""
    plan = on_h100(**GROUPED, batch=batch, seqlen_q=seqlen_q)
    assert plan["splits"] > 1 and (plan["workspace_bytes"] == 0) == cluster


@pytest.mark.parametrize("given", [
    {"batch": 8, "seqlen_q": 4}, {"batch": 8, "seqlen_q": 128}, {"batch": 4, "seqlen_q": 64},
    {"batch": 1, "seqlen_q": 512}, {"batch": 8, "seqlen_q": 32, "seqlen_k": 1024},
    {"batch": 1, "seqlen_q": 32, "seqlen_k": 1024}, {"batch": 8, "heads_k": 32, "seqlen_q": 64},
    {"batch": 8, "seqlen_q": 32, "deterministic": True}, {"batch": 8, "seqlen_q": 32, "softcap": 3.0},
    {"batch": 8, "seqlen_q": 32, "block_size": (128, 128)}], ids=str)
def test_where_rows_of_more_queries_do_not_pay(given):
    assert "_q128_k128_s3_few" not in on_h100(**{**GROUPED, **given})["configuration"]


def test_enough_queries_do_not():
    plan = on_h100()
    assert plan["splits"] == 1 and plan["workspace_bytes"] == 0


@pytest.mark.parametrize("given", [{"packed": True}, {"block_size": (64, 64)}, {"window_left": 1000}],
                         ids=str)
def test_only_whole_dense_rows_of_keys_are_split(given):
    """But of few queries, whose tiles have some of the keys that they see each."""
    many = {"seqlen_q": 20, "seqlen_k": 8192, "batch": 1, "heads": 8, "softcap": 3.0}
    assert on_h100(**many)["splits"] > on_h100(**many, **given)["splits"] == 1
    few = {**many, "seqlen_q": 1, "window_right": 0, "softcap": 0.0}
    tiles_of_window = 8
    assert on_h100(**few, **given)["splits"] == (1 if "block_size" in given else on_h100(**few)["splits"]
                                                 if "packed" in given else tiles_of_window)


def test_a_window_as_wide_as_the_keys_is_none():
    few = {"seqlen_q": 1, "seqlen_k": 8192, "batch": 1, "heads": 8}
    assert on_h100(**few, window_left=8192)["splits"] == on_h100(**few)["splits"]


def test_empty_problems():
    for given in ({"seqlen_q": 0}, {"seqlen_k": 0}, {"seqlen_q": 0, "seqlen_k": 0, "packed": True}):
        plan = on_h100(**given)
        assert plan["splits"] == 1 and plan["workspace_bytes"] == 0


def test_a_dtype_without_kernels():
    plan = on_h100(dtype="float64")
    assert plan["engine"] is None
    for word in ("float64", *DTYPES):
        assert word in plan["error"]


def test_an_old_gpu():
    plan = _C.plan(sizes(), {**chip(80), "capability": 75})["forward"]
    assert plan["engine"] is None and "7.5" in plan["error"] and "8.0" in plan["error"]


def test_a_gpu_with_little_shared_memory():
    on_h100()
    plan = _C.plan(sizes(), {**chip(90), "shared_bytes_per_block": 1000})["forward"]
    assert plan["engine"] is None and "shared memory, this GPU has 1000" in plan["error"]


def test_every_other_kernel_has_its_reason():
    plan = on_h100()
    kernels = {kernel["name"] for kernel in KERNELS
               if (kernel["pass"], kernel["dtype"]) == ("forward", "bfloat16")}
    assert {kernel for _, kernel, _ in plan["others"] if kernel} == kernels - {plan["configuration"]}
    assert all(reason for _, _, reason in plan["others"])


def test_engines_are_reported():
    reports = {engine["name"]: engine for engine in build_info()["engines"]}
    for name in {kernel["engine"] for kernel in KERNELS}:
        assert reports[name]["configuration"].startswith("cuda ")
        assert reports[name]["usable"] != bool(reports[name]["why_not"])
