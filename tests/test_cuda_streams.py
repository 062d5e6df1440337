"""Streams, graphs, devices: a call is work on the current stream and nothing else. No waiting, no memory but
torch's, and a captured call replays with other contents and other lengths."""

import gc
import os
from dataclasses import replace

import pytest
import torch

import flash_attn
from attention_case import Case
from gpu import DEVICE, assert_bitwise, deterministic_as_asked, needs_gpu, run  # noqa: F401
from test_block_sparse import random_map

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]

NAMES = ("out", "dq", "dk", "dv")
DENSE = Case(torch.bfloat16, 2, 300, 420, 4, 2, 64, causal=True, device=DEVICE)
CASES = {
    "dense": DENSE,
    "head dim 128, softcap, window": replace(DENSE, head_dim=128, softcap=8.0, window_size=(100, 50)),
    "head dim 256, ALiBi": replace(DENSE, dtype=torch.float16, head_dim=256, alibi="batch"),
    "dropout": replace(DENSE, head_dim=96, dropout_p=0.2),
    "unaligned": replace(DENSE, head_dim=33, head_dim_v=71),
    "few queries, many keys": replace(DENSE, batch=1, seqlen_q=16, seqlen_k=4096),
    "packed": replace(DENSE, cu_seqlens_q=(0, 100, 100, 400), cu_seqlens_k=(0, 70, 300, 650), tail=9),
    "block sparse": replace(DENSE, seqlen_q=420),
}
SLEEP = 100_000_000  # cycles, about 50 ms


class Step:
    """Forward and backward of a case as a function of tensors alone, which may lie anywhere."""

    def __init__(self, case, deterministic=True, cu_seqlens=None, max_seqlens=None):
        self.features = {**case.features(), "dropout_p": case.dropout_p, "alibi_slopes": case.slopes(),
                         "deterministic": deterministic}
        self.function, self.more = flash_attn.flash_attn_func, ()
        if case.packed:
            offsets = case.cu_seqlens() if cu_seqlens is None else cu_seqlens
            self.function = flash_attn.flash_attn_varlen_func
            self.more = (*offsets, *(case.max_seqlens if max_seqlens is None else max_seqlens))
        elif case == CASES["block sparse"]:
            self.function = flash_attn.flash_attn_block_sparse_func
            self.more = (flash_attn.BlockSparseMask.from_block_map(random_map(case, 64), 64),)

    def __call__(self, q, k, v, dout):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = self.function(*leaves, *self.more, **self.features)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)


def on_stream(stream, function, *arguments):
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = function(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    return result


def captured(step, inputs):
    """A graph of step(*inputs), and the tensors that each replay writes."""
    side = torch.cuda.Stream()
    for _ in range(2):
        on_stream(side, step, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(*inputs)
    return graph, outputs


@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout"])
def test_graph_replays_with_other_contents(name):
    case = CASES[name]
    step, inputs = Step(case), case.draw()
    graph, outputs = captured(step, inputs)
    for seed in (0, 5, 6):
        other = replace(case, seed=seed).draw()
        for x, y in zip(inputs, other):
            x.copy_(y)
        graph.replay()
        assert_bitwise(outputs, step(*other), NAMES)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_graph_replays_with_other_lengths(causal, head_dim, deterministic):
    """flash-attention#1164: only the contents of cu_seqlens change, and the bound is no sequence's length."""
    lengths = [((0, 100, 400, 1000), (0, 300, 310, 900)), ((0, 0, 512, 700), (0, 5, 300, 301)),
               ((0, 500, 500, 1000), (0, 0, 512, 900)), ((0, 1, 2, 3), (0, 1, 513, 514)),
               ((0, 0, 0, 0), (0, 0, 0, 0))]
    total_q, total_k, bounds = 1000, 900, (700, 600)
    case = Case(torch.bfloat16, num_heads=4, num_heads_k=2, head_dim=head_dim, causal=causal, device=DEVICE,
                cu_seqlens_q=lengths[0][0], cu_seqlens_k=lengths[0][1])
    inputs, cu_seqlens = case.draw(), case.cu_seqlens()
    step = Step(case, deterministic, cu_seqlens, bounds)
    graph, outputs = captured(step, inputs)
    names = NAMES if deterministic else ("out", "dk", "dv")
    for cu_q, cu_k in lengths:
        for x, values in zip(cu_seqlens, (cu_q, cu_k)):
            x.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        results = dict(zip(NAMES, outputs))
        eager = dict(zip(NAMES, step(*inputs)))
        assert_bitwise([results[x] for x in names], [eager[x] for x in names], names)
        used_q, used_k = cu_q[-1], cu_k[-1]
        for name, used, total in (("out", used_q, total_q), ("dq", used_q, total_q), ("dk", used_k, total_k),
                                  ("dv", used_k, total_k)):
            assert (results[name][used:total] == 0).all(), name
        if used_q:
            now = replace(case, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
            parts = [x[:used] for x, used in zip(inputs, (used_q, used_k, used_k, used_q))]
            now.expected(parts).check(out=results["out"][:used_q], dq=results["dq"][:used_q],
                                      dk=results["dk"][:used_k], dv=results["dv"][:used_k])


@pytest.mark.parametrize("name", ["dropout", "packed"])
def test_graph_draws_new_dropout_bits_each_replay(name):
    """The bits are those of eager calls after the same seed, the same in both passes of a replay."""
    case = replace(CASES[name], dropout_p=0.3)
    step, inputs = Step(case), case.draw()
    graph, outputs = captured(step, inputs)
    torch.manual_seed(11)
    eager = [step(*inputs) for _ in range(3)]
    for _ in range(2):
        torch.manual_seed(11)
        for expected in eager:
            graph.replay()
            assert_bitwise(outputs, expected, NAMES)
    assert not torch.equal(eager[0][0], eager[1][0]) and not torch.equal(eager[1][0], eager[2][0])


def test_streams_at_once_equal_one_after_the_other():
    steps = {name: (Step(case), case.draw()) for name, case in CASES.items() if case.dropout_p == 0}
    expected = {name: step(*inputs) for name, (step, inputs) in steps.items()}
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(8)]
    results = []
    for turn in range(12):
        for place, (name, (step, inputs)) in enumerate(steps.items()):
            with torch.cuda.stream(streams[(turn + place) % len(streams)]):
                results.append((name, step(*inputs)))
    torch.cuda.synchronize()
    for name, actual in results:
        assert_bitwise(actual, expected[name], NAMES)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_whose_blocks_wait_for_each_other_share_the_device(head_dim, causal, deterministic):
    """Backward passes on three streams: no block that runs waits for one that does not yet."""
    seqlen = 1000 if causal else 500
    case = Case(torch.bfloat16, 2, seqlen, seqlen + 10, 100, 100, head_dim, causal=causal, device=DEVICE)
    inputs = case.draw()
    expected = case.run(inputs, deterministic=deterministic)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(2):  # 6 GB of results each
        results = []
        for _ in range(10):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(case.run(inputs, deterministic=deterministic))
        torch.cuda.synchronize()
        for result in results:
            torch.testing.assert_close(result.dq, expected.dq, rtol=2e-2, atol=4e-3)
            assert_bitwise(result, expected, ("dq", "dk", "dv") if deterministic else ("dk", "dv"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("default_stream", [False, True])
def test_order_on_the_stream_is_kept(name, default_stream):
    """flash-attention#2481: kernels right before write q, k, v and dout, kernels right after spoil them."""
    case = CASES[name]
    step, inputs = Step(case), case.draw()
    torch.manual_seed(3)
    expected = step(*inputs)
    late = [torch.full_like(x, torch.nan) for x in inputs]

    def late_step():
        leaves = [x.detach().requires_grad_() for x in late[:3]]
        torch.cuda._sleep(SLEEP)
        with torch.no_grad():
            for x, y in zip(late, inputs[:3]):
                x.copy_(y)
        out = step.function(*leaves, *step.more, **step.features)
        torch.cuda._sleep(SLEEP)
        late[3].copy_(inputs[3])
        results = (out.detach(), *torch.autograd.grad(out, leaves, late[3]))
        with torch.no_grad():
            for x in late:
                x.fill_(torch.nan)
        return results

    torch.manual_seed(3)
    actual = late_step() if default_stream else on_stream(torch.cuda.Stream(), late_step)
    assert_bitwise(actual, expected, NAMES)


@pytest.mark.parametrize("name", CASES)
def test_no_call_waits_for_the_device(name):
    """Host code goes on while the device is busy with something else: torch notices its own waits, the event
    notices all."""
    case = CASES[name]
    step, inputs = Step(case), case.draw()
    for _ in range(3):
        step(*inputs)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(4 * SLEEP)
        done.record()
        for _ in range(3):
            step(*inputs)
        waited = done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert not waited


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_torchs_and_does_not_grow(name, deterministic):
    gc.collect()
    torch.cuda.empty_cache()  # what other tests left in pieces decides on what is reserved next
    case = CASES[name]
    step, inputs = Step(case, deterministic), case.draw()
    for _ in range(3):
        step(*inputs)
    gc.collect()
    torch.cuda.synchronize()

    def state():
        free, _ = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), free

    before = state()
    for _ in range(100):
        step(*inputs)
    gc.collect()
    torch.cuda.synchronize()
    after = state()
    assert after[0] <= before[0] and after[1] <= before[1]
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other processes take memory too
        assert before[2] - after[2] < 2**20, "memory was taken past torch's allocator"


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_linear_in_the_sequence(deterministic):
    """A score matrix of 32768 x 32768 halves is 2 GiB a head; temporary memory is a few times q's."""
    peaks = []
    for seqlen in (16384, 32768):
        case = Case(torch.bfloat16, 1, seqlen, seqlen, 2, 2, 64, causal=True, device=DEVICE)
        inputs = [torch.randn(shape, device=DEVICE, dtype=case.dtype) for shape in case.shapes()]
        step = Step(case, deterministic)
        step(*inputs)
        gc.collect()  # of other tests, too
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(*inputs)
        peaks.append((torch.cuda.max_memory_allocated() - before) / inputs[0].nbytes)
    assert max(peaks) < 40 and peaks[1] < 1.1 * peaks[0] + 0.1


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")


@needs_two
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("current", [0, 1])
def test_other_device_than_the_current_one(name, current):
    """Work goes where the tensors are, whatever device is current, which stays so."""
    case = CASES[name]
    inputs = case.draw()
    expected = run(replace(case, dropout_p=0.0), inputs, deterministic=True)
    there = replace(case, dropout_p=0.0, device="cuda:1")
    with torch.cuda.device(current):
        actual = run(there, [x.to("cuda:1") for x in inputs], deterministic=True)
        assert torch.cuda.current_device() == current
    assert all(x.device == torch.device("cuda:1") for x in vars(actual).values())
    assert_bitwise([x.to(DEVICE) for x in vars(actual).values()], list(vars(expected).values()))


@needs_two
def test_dropout_on_another_device_draws_from_its_generator():
    q, k, v, _ = replace(CASES["dropout"], device="cuda:1").draw()
    before = torch.cuda.get_rng_state(0)
    torch.cuda.manual_seed_all(4)
    at_start = torch.cuda.get_rng_state(0)
    first = flash_attn.flash_attn_func(q, k, v, dropout_p=0.3)
    assert torch.equal(torch.cuda.get_rng_state(0), at_start)
    torch.cuda.manual_seed_all(4)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, dropout_p=0.3), first)
    torch.cuda.set_rng_state(before, 0)
