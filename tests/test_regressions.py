"""What has broken other attention kernels, one call each, with the report that the trigger comes from."""

import pytest
import torch

import flash_attn
from acceptance import Expected, evaluate
from attention_case import Case
from test_block_sparse import check as check_block_sparse


@pytest.mark.parametrize("seqlen", [64, 192, 704])
@pytest.mark.parametrize("causal", [False, True])
def test_strongly_negative_lse(seqlen, causal, device):
    """pytorch#196678: S % 128 == 64 and lse < -88.7, so exp(-lse) overflows; dq was NaN."""
    case = Case(torch.bfloat16, 1, seqlen, seqlen, 2, 2, 64, softmax_scale=1.0, causal=causal, device=device)
    q, k, v, dout = (0.1 * x for x in case.draw())
    q[..., 0], k[..., 0] = 12.0, -10.0
    actual, exact = case.run((q, k, v, dout)), evaluate(case.attend(), q, k, v, dout)
    assert exact.lse.max() < -88.7
    for name in ("out", "dq", "dk", "dv"):
        x, y = (getattr(result, name)[..., 1:].double() for result in (actual, exact))
        assert (x - y).norm() <= 0.02 * y.norm(), name


def test_one_query_negative_lse(device):
    """cudnn-frontend#1072: Sq = 1, Sk = 128, logits around -128; dk and dv were NaN."""
    case = Case(torch.float32, 1, 1, 128, 2, 2, 32, softmax_scale=1.0, device=device)
    q, k, v, dout = case.draw()
    q[..., 0], k[..., 0] = 16.0, -8.0
    actual, exact = case.run((q, k, v, dout)), evaluate(case.attend(), q, k, v, dout)
    assert exact.lse.max() < -88.7
    for name in ("out", "dq", "dk", "dv"):
        # All of a row's probabilities share the rounding of its lse, eps * 128.
        x, y = (getattr(result, name)[..., 1:].double() for result in (actual, exact))
        assert (x - y).norm() <= 5e-5 * y.norm(), name


def test_huge_logits_with_ties(device):
    """arXiv 2510.04212: several equal row maxima at 1e4 in bfloat16."""
    case = Case(torch.bfloat16, 1, 50, 130, 2, 2, 16, softmax_scale=1.0, device=device)
    q, k, v, dout = case.draw()
    q, k = torch.full_like(q, 25.0), torch.full_like(k, 25.0)
    k[:, 40:] = -25.0
    result = case.run((q, k, v, dout))
    mean = v[:, :40].double().mean(dim=1, keepdim=True).expand(-1, 50, -1, -1)
    torch.testing.assert_close(result.out.double(), mean, rtol=2**-7, atol=2**-8)
    assert (result.lse - (1e4 + torch.tensor(40.0).log())).abs().max() < 2e-3
    assert all(x.isfinite().all() for x in (result.dq, result.dk, result.dv))


def test_single_element(device):
    """flash-attention#334: (1, 1, 1, 16), inputs scaled by 3."""
    case = Case(torch.float32, 1, 1, 1, 1, 1, 16, device=device)
    q, k, v, dout = (3 * x for x in case.draw())
    result = case.run((q, k, v, dout))
    torch.testing.assert_close(result.out, v, rtol=1e-6, atol=0)
    torch.testing.assert_close(result.dv, dout, rtol=1e-6, atol=0)
    # dS = dO . V - dO . O cancels to the rounding of two sums.
    noise = torch.finfo(torch.float32).eps * (dout * v).abs().sum()
    assert result.dq.abs().max() <= noise * k.abs().max() and result.dk.abs().max() <= noise * q.abs().max()


def test_scaled_causal_half(device):
    """flash-attention#1052: causal, fp16, S = 1024, D = 128, inputs scaled by 3."""
    case = Case(torch.float16, 1, 1024, 1024, 1, 1, 128, causal=True, device=device)
    case.check(tuple(3 * x for x in case.draw()))


@pytest.mark.parametrize("cu_seqlens_q,cu_seqlens_k,head_dim,num_heads_k", [
    ((0, 76, 110, 256), (0, 1, 2, 3), 32, 2),                              # flash-attention#443
    ((0, 0, 302, 512, 512), (0, 634, 1070, 1280, 2048), 256, 2),           # flash-attention#2562, lengths / 4
    ((0, 0, 0, 0, 1), (0, 0, 0, 0, 1), 64, 1),                             # flash-attention#1619
    ((0, 1, 1), (0, 0, 1), 64, 1),                                         # flash-attention#1537
])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_offsets(cu_seqlens_q, cu_seqlens_k, head_dim, num_heads_k, causal, device):
    Case(torch.float32, num_heads=2, num_heads_k=num_heads_k, head_dim=head_dim, cu_seqlens_q=cu_seqlens_q,
         cu_seqlens_k=cu_seqlens_k, causal=causal, device=device).check()


def test_more_queries_than_keys_causal(device):
    """flash-attention#1778: the top rows see no key."""
    result = Case(torch.bfloat16, 1, 200, 72, 2, 2, 64, causal=True, device=device).run()
    assert (result.out[:, :128] == 0).all() and (result.out[:, 128:] != 0).any(dim=-1).all()
    assert (result.dq[:, :128] == 0).all()


def test_large_outer_stride(device):
    """flash-attention#2611: rows more than 2**31 elements apart. The memory between them is never touched, so
    it costs nothing: only the pages with rows in them become real."""
    rows, stride = 3, 2**31 + 8
    if torch.device(device).type == "cuda":
        pytest.skip("device memory is not lazily committed")
    torch.use_deterministic_algorithms(False)  # would fill all of it
    storage = torch.empty(stride * (rows - 1) + 16, dtype=torch.bfloat16)
    case = Case(torch.bfloat16, 1, rows, rows, 1, 1, 16, causal=True)
    q, k, v, dout = case.draw()
    far = storage.as_strided((1, rows, 1, 16), (0, stride, 16, 1))
    expected = case.run((q, k, v, dout))
    for position in range(4):
        inputs = [q, k, v, dout]
        far.copy_(inputs[position])
        inputs[position] = far
        actual = case.run(inputs)
        for name, x in vars(actual).items():
            assert torch.equal(x, getattr(expected, name)), (position, name)


@pytest.mark.parametrize("seqlen", [65537, 73728])
def test_rows_beyond_two_to_the_16(seqlen, device):
    """pytorch#162588: garbage from row 2**32 / S on. A narrow window keeps it cheap."""
    case = Case(torch.float32, 1, seqlen, seqlen, 1, 1, 4, window_size=(3, 0), device=device)
    q, k, v, dout = case.draw()
    result = case.run((q, k, v, dout))
    last = slice(seqlen - 200, seqlen)
    tail = evaluate(case.attend(), *(x[:, last] for x in (q, k, v, dout)))
    for name in ("out", "dq", "dk", "dv"):
        # The slice's first rows see fewer keys there than in the whole sequence.
        torch.testing.assert_close(getattr(result, name)[:, last][:, 4:].double(), getattr(tail, name)[:, 4:],
                                   rtol=1e-4, atol=1e-5)


def test_batch_of_65536(device):
    """pytorch#142228: a batch beyond the limit of grid.y."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(65536, 1, 1, 4, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn.flash_attn_func(*leaves)
    assert torch.equal(out, v)
    out.sum().backward()
    assert (v.grad == 1).all() and (q.grad.abs() < 1e-5).all()


def test_many_heads_tiny_sequences(device):
    """flash-attention#1311, #2214: (B, S, H, D) = (28800, 15, 16, 72), batch / 200."""
    Case(torch.bfloat16, 144, 15, 15, 16, 16, 72, device=device).check_forward()


@pytest.mark.parametrize("head_dim,head_dim_v", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_block_sparse_backward(head_dim, head_dim_v, device):
    """flash-attention#2623: forward exact, gradients wrong by factors, for some head dims."""
    case = Case(torch.bfloat16, 1, 256, 256, 2, 2, head_dim, head_dim_v, causal=True, device=device)
    block_map = torch.ones(1, 1, 4, 2, dtype=torch.bool, device=device)
    block_map[0, 0, 3, 0] = False
    check_block_sparse(case, block_map, (64, 128))


def test_alibi_lse(device):
    """Others return the lse of scores that are shifted row by row; here it is that of the scores."""
    case = Case(torch.float32, 1, 40, 90, 4, 4, 16, causal=True, alibi="heads", device=device)
    q, k, v, _ = case.draw()
    _, lse, _ = case.call(q, k, v, return_attn_probs=True)
    Expected(case.attend(), q, k, v).check(lse=lse)


def test_zero_queries_in_the_middle_of_training(device):
    """An empty micro-batch: backward runs, gradients are zeros, not None."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    leaves = [torch.zeros(1, 0, 2, 8, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    flash_attn.flash_attn_func(*leaves).sum().backward()
    assert all(x.grad.shape == x.shape for x in leaves)
