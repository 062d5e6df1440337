"""Short sequences by the hundred: places for sums of dQ are used again (csrc/cuda/any/dq_sums.cuh). Every
case has more heads, of all batch entries, than there are places on an H100."""

import pytest
import torch

import flash_attn
from attention_case import Case
from gpu import DEVICE, HALVES, check, deterministic_as_asked, needs_gpu  # noqa: F401

pytestmark = [needs_gpu, pytest.mark.usefixtures("deterministic_as_asked")]

FEATURES = [{}, {"causal": True}, {"window_size": (20, 10)}, {"softcap": 15.0, "causal": True},
            {"dropout_p": 0.2}]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_many_heads(head_dim, features):
    case = Case(torch.bfloat16, 60, 70, 90, 14, 14, head_dim, device=DEVICE, **features)
    case.check(dlse=case.draw_dlse())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_whole_heads(head_dim, causal, group, deterministic):
    """As many key heads as the GPU has multiprocessors: on Hopper a block does all keys of one, where the
    cache holds what that needs (csrc/cuda/sm90/backward_dq.cuh)."""
    heads = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    case = Case(torch.bfloat16, 2, 450 // group, 500, heads * group, heads, head_dim, causal=causal,
                device=DEVICE)
    inputs, dlse = case.draw(), case.draw_dlse()
    case.check(inputs, dlse, case.run(inputs, dlse, deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (200, 90)}], ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_k,heads", [
    (1000, 1010, (40, 40)), (1900, 1500, (18, 6)), (70, 1020, (60, 20)),
    (500, 510, (70, 70)), (450, 450, (140, 70))], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_tiles_of_many_blocks(head_dim, seqlen_q, seqlen_k, heads, features, deterministic):
    """Blocks share a head's queries: on Hopper the first of them stores its dQ where sequences are short and
    heads many, and where they add in turns (csrc/cuda/sm90/backward_dq.cuh)."""
    case = Case(torch.bfloat16, 3, seqlen_q, seqlen_k, *heads, head_dim, device=DEVICE, **features)
    inputs, dlse = case.draw(), case.draw_dlse()
    case.check(inputs, dlse, case.run(inputs, dlse, deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [
    {"batch": 2, "seqlen_q": 2100, "seqlen_k": 2180, "num_heads": 28, "num_heads_k": 7},
    {"batch": 4, "seqlen_q": 900, "seqlen_k": 1020, "num_heads": 64, "num_heads_k": 8},
    {"cu_seqlens_q": (0, 1500, 1500, 4000), "cu_seqlens_k": (0, 1450, 1500, 4100), "num_heads": 64,
     "num_heads_k": 8}], ids=["2100", "900", "packed"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_parts_of_groups(head_dim, shape, deterministic):
    """On Hopper blocks walk a tile of keys with a part of the group's heads, and hand dK and dV
    to the next part (csrc/cuda/any/walk_parts.cuh)."""
    case = Case(torch.bfloat16, head_dim=head_dim, causal=True, device=DEVICE, **shape)
    inputs, dlse = case.draw(), case.draw_dlse()
    case.check(inputs, dlse, case.run(inputs, dlse, deterministic=deterministic))


@pytest.mark.parametrize("features", [
    {}, {"causal": True}, {"window_size": (3400, -1)},
    {"cu_seqlens_q": (0, 3700, 4300), "cu_seqlens_k": (0, 3650, 4300)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", HALVES)
def test_long_walks(dtype, head_dim, features):
    """Tiles of keys seen by many queries, beside tiles that few see: on Hopper the warpgroups' turns
    (csrc/cuda/sm90/backward_turns.cuh) go round often, and end in the middle."""
    case = Case(dtype, 1, 3700, 3650, 2, 2, head_dim, device=DEVICE, **features)
    case.check(dlse=case.draw_dlse())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_walks_under_a_map(head_dim):
    case = Case(torch.bfloat16, 1, 4096, 4096, 2, 2, head_dim, device=DEVICE)
    drawn = torch.rand(1, 2, 32, 32, generator=torch.Generator().manual_seed(0)) < 0.95
    check(case, block_map=drawn.to(DEVICE), block_size=128)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_bad_keys_are_forgotten(head_dim, deterministic):
    """Of packed sequences some have keys that are not finite, some no queries: a block does tiles of keys of
    all kinds, one after the other, and they don't know each other's bad keys."""
    lengths_q, lengths_k = [70, 0, 60] * 60, [50, 130, 70] * 60
    ends_q, ends_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k))
    case = Case(torch.bfloat16, num_heads=8, num_heads_k=8, head_dim=head_dim, device=DEVICE,
                cu_seqlens_q=tuple(ends_q.tolist()), cu_seqlens_k=tuple(ends_k.tolist()))
    q, k, v, dout = case.draw()
    clean = case.run((q, k, v, dout), deterministic=deterministic)
    for begin in ends_k[:-1][::3].tolist():
        k[begin:begin + 50] = torch.nan
    dirty = case.run((q, k, v, dout), deterministic=deterministic)
    for i in range(2, 180, 3):
        for name, ends in (("dq", ends_q), ("dk", ends_k), ("dv", ends_k)):
            own = slice(ends[i], ends[i + 1])
            torch.testing.assert_close(getattr(dirty, name)[own], getattr(clean, name)[own], rtol=2e-2,
                                       atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 200), (130, 65), (300, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_many_groups(dtype, seqlen_q, seqlen_k, causal):
    case = Case(dtype, 30, seqlen_q, seqlen_k, 28, 14, 64, causal=causal, device=DEVICE)
    case.check()


@pytest.mark.parametrize("causal", [False, True])
def test_many_heads_of_packed_sequences(causal):
    case = Case(torch.bfloat16, num_heads=500, num_heads_k=500, head_dim=64, causal=causal,
                cu_seqlens_q=(0, 5, 5, 70, 100), cu_seqlens_k=(0, 9, 40, 40, 120), tail=3, device=DEVICE)
    case.check()


@pytest.mark.parametrize("dtype", HALVES)
def test_many_heads_under_a_map(dtype):
    case = Case(dtype, 50, 128, 192, 12, 12, 64, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    check(case, block_map=(torch.rand(50, 12, 2, 3, generator=generator) < 0.5).to(DEVICE), block_size=64)


def test_the_same_batch_entry_everywhere():
    """Whatever place its sums had, dQ is that of the deterministic walk."""
    q, k, v, dout = (torch.randn(1, 96, 16, 64, device=DEVICE, dtype=torch.bfloat16).expand(
        200, -1, -1, -1).contiguous().requires_grad_() for _ in range(4))
    dq, = torch.autograd.grad(flash_attn.flash_attn_func(q, k, v), q, dout)
    expected, = torch.autograd.grad(flash_attn.flash_attn_func(q, k, v, deterministic=True), q, dout)
    torch.testing.assert_close(dq, expected, atol=2e-3, rtol=2e-2)
