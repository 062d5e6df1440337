"""out and lse against the reference, row by row, for every dtype, feature and ragged shape."""

import pytest
import torch

import flash_attn
from acceptance import Expected
from attention_case import Case

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217),
          (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (3, 799), (1, 1023)]
FEATURES = [
    {}, {"causal": True}, {"window_size": (31, 7)}, {"window_size": (0, 0)}, {"window_size": (-1, 5)},
    {"causal": True, "window_size": (40, 3)}, {"softcap": 3.0}, {"alibi": "heads"},
    {"alibi": "batch", "causal": True},
    {"softmax_scale": 0.7, "softcap": 20.0, "alibi": "heads", "causal": True},
    {"softmax_scale": 0.0}, {"softmax_scale": -0.3, "causal": True}, {"dropout_p": 0.17},
    {"dropout_p": 0.5, "causal": True, "window_size": (100, -1), "alibi": "heads"},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_shapes(dtype, shape, causal, device):
    Case(dtype, 2, *shape, 2, 2, 64, causal=causal, device=device).check_forward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_features(dtype, features, device):
    Case(dtype, 2, 113, 203, 4, 2, 40, device=device, **features).check_forward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("head_dim,head_dim_v", [
    (1, 1), (2, 3), (3, 2), (8, 8), (17, 17), (31, 65), (64, 1), (96, 96), (128, 128), (192, 128), (255, 33),
    (256, 256), (1, 256)])
def test_head_dims(dtype, head_dim, head_dim_v, device):
    Case(dtype, 1, 70, 90, 2, 2, head_dim, head_dim_v, causal=True, device=device).check_forward()


@pytest.mark.parametrize("num_heads,num_heads_k", [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3), (7, 1)])
def test_grouped_heads(num_heads, num_heads_k, device):
    Case(torch.bfloat16, 2, 65, 130, num_heads, num_heads_k, 32, causal=True, device=device).check_forward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_one_query_of_grouped_heads(dtype, features, device):
    """Where nothing tells them apart, heads that share keys are rows of one tile."""
    Case(dtype, seqlen_q=1, seqlen_k=300, num_heads=6, num_heads_k=2, device=device, **features).check()


@pytest.mark.parametrize("seqlen", [15, 16, 17, 31, 33, 47, 48, 63, 65, 95, 97, 127, 129, 191, 193, 255, 257])
def test_around_tile_edges(seqlen, device):
    Case(torch.float32, 1, seqlen, seqlen, 2, 1, 24, causal=True, device=device).check_forward()
    Case(torch.float32, 1, seqlen, 300 - seqlen, 2, 1, 24, window_size=(9, 11), device=device).check_forward()


def test_longer_sequence(device):
    Case(torch.bfloat16, 1, 1024, 1023, 2, 2, 64, causal=True, device=device).check_forward()
    Case(torch.float32, 1, 1023, 2100, 1, 1, 64, device=device).check_forward()


def test_lse_is_of_final_scores_before_dropout(device):
    case = Case(torch.float32, 1, 50, 60, 2, 2, 16, softcap=0.0, dropout_p=0.5, device=device)
    q, k, v, _ = case.draw()
    _, dropped, _ = case.call(q, k, v, return_attn_probs=True)
    _, plain, _ = case.call(q, k, v, dropout_p=0.0, return_attn_probs=True)
    # On a GPU these are two kernels, and one of them rounds a score before it takes the maximum off.
    torch.testing.assert_close(dropped, plain, rtol=0 if device == "cpu" else 5e-7, atol=0)


def test_without_probs_only_out_is_returned(device):
    case = Case(torch.float32, 1, 20, 20, device=device)
    q, k, v, _ = case.draw()
    out = case.call(q, k, v)
    with_probs, lse, probs = case.call(q, k, v, return_attn_probs=True)
    assert isinstance(out, torch.Tensor) and torch.equal(out, with_probs)
    assert probs.shape == (0,) and lse.shape == (1, 2, 20)


def layouts_of(x):
    """The values of x [B, S, H, D] in other memory layouts; the last two need a copy."""
    wide = x.new_full((*x.shape[:3], x.shape[3] + 5), torch.nan)
    wide[..., 3:-2] = x
    padded = x.new_full((x.shape[0], 3 * x.shape[1], 2, *x.shape[2:]), torch.nan)
    padded[:, ::3, 1] = x
    return {
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "sequence first": x.transpose(0, 1).contiguous().transpose(0, 1),
        "slice of last dim": wide[..., 3:-2],
        "every third row": padded[:, ::3, 1],
        "transposed last dim": x.transpose(1, 3).contiguous().transpose(1, 3),
        "strided last dim": x.repeat_interleave(2, dim=3)[..., ::2],
    }


@pytest.mark.parametrize("layout", ["heads first", "sequence first", "slice of last dim", "every third row",
                                    "transposed last dim", "strided last dim"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides(dtype, layout, device):
    case = Case(dtype, 2, 37, 53, 4, 2, 24, causal=True, device=device)
    q, k, v, _ = case.draw()
    expected = case.call(q, k, v)
    views = [layouts_of(x)[layout] for x in (q, k, v)]
    assert all(torch.equal(view, x) and view.stride() != x.stride() for view, x in zip(views, (q, k, v)))
    assert torch.equal(case.call(*views), expected)


def test_expanded_inputs(device):
    """One sequence, one head, shared by stride 0."""
    case = Case(torch.float32, 1, 33, 44, 1, 1, 16, device=device)
    q, k, v, _ = case.draw()
    expanded = case.call(q.expand(3, -1, 4, -1), k.expand(3, -1, 2, -1), v.expand(3, -1, 2, -1))
    assert torch.equal(expanded, case.call(q, k, v).expand(3, -1, 4, -1))


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(seqlen_q, seqlen_k, device):
    case = Case(torch.bfloat16, 2, seqlen_q, seqlen_k, 2, 1, 16, causal=True, device=device)
    case.check_forward()
    _, lse, _ = case.call(*case.draw()[:3], return_attn_probs=True)
    assert (lse == -torch.inf).all() and lse.shape == (2, 2, seqlen_q)


def test_packed_layouts_are_views_of_the_same_call(device):
    case = Case(torch.float32, 2, 45, 45, 2, 2, 16, causal=True, softcap=4.0, device=device)
    q, k, v, _ = case.draw()
    expected = case.call(q, k, v)
    features = {"causal": True, "softcap": 4.0}
    kv, qkv = torch.stack((k, v), dim=2), torch.stack((q, k, v), dim=2)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, **features), expected)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, **features), expected)


@pytest.mark.parametrize("shift", [-1e4, -120.0, 120.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shifted_logits(dtype, shift, device):
    """One more head dimension adds the same number to every score: out stays, lse moves by it."""
    case = Case(dtype, 1, 64, 192, 2, 2, 32, softmax_scale=1.0, device=device)
    q, k, v, _ = case.draw()
    q[..., 0], k[..., 0] = 1.0, shift
    out, lse, _ = case.call(q, k, v, return_attn_probs=True)
    expected = Expected(case.attend(), q, k, v)
    assert expected.exact.lse.abs().min() > abs(shift) / 2
    expected.check(out=out, lse=lse)


def test_equal_maxima(device):
    """Ties in the row maximum: identical keys share the weight exactly."""
    case = Case(torch.bfloat16, 1, 40, 128, 2, 2, 16, device=device)
    q, k, v, _ = case.draw()
    k = k[:, :1].expand(-1, 128, -1, -1)
    out, lse, _ = case.call(q * 100, k * 100, v, return_attn_probs=True)
    mean = v.double().mean(dim=1, keepdim=True).expand(-1, 40, -1, -1)
    torch.testing.assert_close(out.double(), mean, rtol=2**-7, atol=2**-9)
    assert lse.isfinite().all()


def test_window_as_tensor_or_list_and_max_seqlen_as_tensor(device):
    case = Case(torch.float32, 1, 30, 30, window_size=(4, 2), device=device)
    q, k, v, _ = case.draw()
    expected = case.call(q, k, v)
    assert torch.equal(case.call(q, k, v, window_size=[4, 2]), expected)
    assert torch.equal(case.call(q, k, v, window_size=torch.tensor([4, 2])), expected)
    cu_seqlens = torch.tensor([0, 30], device=device)
    longest = torch.tensor(30, dtype=torch.int32)
    packed = flash_attn.flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens, cu_seqlens, longest, longest, window_size=(4, 2))
    torch.testing.assert_close(packed, expected[0])
