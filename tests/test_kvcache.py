"""flash_attn_with_kvcache: each sequence is what attention over its own rows of the cache is, the cache holds
what was appended, and nothing else in it changes or matters."""

import math

import pytest
import torch

import flash_attn
import reference
from acceptance import Expected
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

HALVES = [torch.bfloat16, torch.float16]
FEATURES = [{}, {"causal": True}, {"window_size": (20, 0)}, {"window_size": (9, 4)},
            {"causal": True, "softcap": 5.0}, {"causal": True, "alibi": True}]


@pytest.fixture(autouse=True)
def fresh_memory_is_not_ours(monkeypatch):
    """deterministic=True would leave no splits to test (conftest.py)."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)


class Cache:
    """A cache with junk in it, what a call gets, and what each sequence then consists of."""

    def __init__(self, device, dtype, batch=3, seqlen_q=1, new=1, capacity=200, heads=4, heads_k=2,
                 head_dim=64, head_dim_v=None, indexed=False, padded=False, page_size=None, empty=False):
        draw = {"device": device, "dtype": dtype}
        dims = (head_dim, head_dim if head_dim_v is None else head_dim_v)
        entries = batch + 2 if indexed else batch
        self.new, self.page_size, self.capacity = new, page_size, capacity
        self.q = torch.randn(batch, seqlen_q, heads, head_dim, **draw)
        self.k_new, self.v_new = (torch.randn(batch, new, heads_k, d, **draw) if new else None for d in dims)
        self.lengths = torch.randint(0 if empty else 1, capacity - new + 1, (batch,), dtype=torch.int32,
                                     device=device)
        if empty:
            self.lengths[0] = 0
        self.padding = (torch.rand(batch, device=device) * self.lengths).int() if padded else None
        self.entry = torch.randperm(entries, device=device)[:batch].int() if indexed else None
        shape = (entries, capacity)
        self.table = None
        if page_size:
            pages = capacity // page_size
            every = torch.randperm(batch * pages + 3, device=device)
            self.table = every[: batch * pages].view(batch, pages).int()
            shape = (len(every), page_size)
        self.k, self.v = (torch.randn(*shape, heads_k, d, **draw) for d in dims)

    def rows(self, cache, b):
        """The rows of sequence b, as a view where it has no pages."""
        if self.table is not None:
            return cache[self.table[b].long()].flatten(0, 1)
        return cache[b if self.entry is None else int(self.entry[b])]

    def arguments(self):
        return {"k": self.k_new, "v": self.v_new, "cache_seqlens": self.lengths,
                "cache_batch_idx": self.entry, "cache_leftpad": self.padding, "block_table": self.table}

    def poison(self, value=math.nan):
        """What no sequence may see: rows past its end and in front of its beginning, other entries."""
        for cache in (self.k, self.v):
            used = torch.zeros(cache.shape[:2], dtype=torch.bool, device=cache.device)
            for b, length in enumerate(self.lengths.tolist()):
                first = 0 if self.padding is None else int(self.padding[b])
                row = torch.arange(first, length, device=cache.device)
                if self.table is None:
                    used[b if self.entry is None else int(self.entry[b]), row] = True
                else:
                    used[self.table[b].long()[row // self.page_size], row % self.page_size] = True
            cache[~used] = value

    def check(self, rotate=None, slopes=None, **features):
        """Calls, and compares out, lse and the cache with what a loop over sequences says."""
        self.poison()
        before = self.k.clone(), self.v.clone()
        out, lse = flash_attn_with_kvcache(self.q, self.k, self.v, **self.arguments(), alibi_slopes=slopes,
                                           return_softmax_lse=True, **features)
        features.pop("num_splits", None)
        for name in [name for name in features if name.startswith("rotary")]:
            del features[name]
        for b, length in enumerate(self.lengths.tolist()):
            q, sources = self.q[b], [self.k_new, self.v_new]
            rows = [self.rows(cache, b)[:length] for cache in before]
            if self.new:
                appended = [x[b] for x in sources]
                if rotate:
                    q, appended[0] = rotate(q, appended[0], length)
                rows = [torch.cat([x, y]) for x, y in zip(rows, appended)]
            for cache, expected in zip((self.k, self.v), rows):
                actual = self.rows(cache, b)[: length + self.new]
                assert torch.equal(actual[:length].nan_to_num(), expected[:length].nan_to_num())
                torch.testing.assert_close(actual[length:], expected[length:])
                assert self.rows(cache, b)[length + self.new :].isnan().all()
            first = 0 if self.padding is None else int(self.padding[b])
            k, v = (self.rows(cache, b)[first : length + self.new][None] for cache in (self.k, self.v))

            def attend(*qkv):
                return reference.attention(*qkv, alibi_slopes=slopes, **features)

            Expected(attend, q[None], k, v).check(out=out[b : b + 1], lse=lse[b : b + 1])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("seqlen_q,new", [(1, 1), (1, 0), (5, 5), (70, 70), (3, 0), (7, 2)])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_append_and_attend(dtype, seqlen_q, new, features, device):
    features = dict(features)
    slopes = torch.rand(4, device=device) if features.pop("alibi", False) else None
    Cache(device, dtype, seqlen_q=seqlen_q, new=new).check(slopes=slopes, **features)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim,head_dim_v,heads,heads_k", [
    (64, 64, 8, 1), (128, 128, 8, 8), (40, 72, 6, 3), (256, 256, 4, 2), (96, 96, 4, 4)])
@pytest.mark.parametrize("layout", [
    {"indexed": True}, {"padded": True}, {"indexed": True, "padded": True}, {"page_size": 16},
    {"page_size": 48, "capacity": 240}, {"page_size": 256, "capacity": 1024}], ids=str)
def test_layouts(dtype, head_dim, head_dim_v, heads, heads_k, layout, device):
    sizes = {"capacity": 208, **layout, "heads": heads, "heads_k": heads_k, "head_dim": head_dim,
             "head_dim_v": head_dim_v}
    for seqlen_q in (1, 9):
        Cache(device, dtype, seqlen_q=seqlen_q, new=seqlen_q, **sizes).check(causal=True)
    Cache(device, dtype, seqlen_q=20, new=0, **sizes).check(window_size=(30, 2))


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7, 128])
@pytest.mark.parametrize("layout", [{}, {"page_size": 64}, {"padded": True}, {"empty": True, "new": 0}],
                         ids=str)
def test_splits(num_splits, layout, device):
    sizes = {"capacity": 4096, "batch": 2, "head_dim": 128, **layout}
    Cache(device, torch.bfloat16, **sizes).check(causal=True, num_splits=num_splits)
    Cache(device, torch.bfloat16, seqlen_q=6, **sizes).check(causal=True, num_splits=num_splits)


def rotation(cos, sin, interleaved, every_query):
    """RoPE as a product of complex numbers, in float64."""
    def rotated(x, rows):
        angles = torch.polar(torch.ones_like(cos, dtype=torch.float64),
                             torch.atan2(sin.double(), cos.double()))[rows][:, None]
        size = 2 * cos.shape[1]
        pairs = x[..., :size].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angles)
        turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
        return torch.cat([turned, x[..., size:].double()], dim=-1).to(x.dtype)

    def rotate(q, k, length):
        rows_q, rows_k = (torch.arange(len(x), device=x.device) for x in (q, k))
        return rotated(q, length + rows_q * every_query), rotated(k, length + rows_k)
    return rotate


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 64])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (50, 0)}], ids=str)
@pytest.mark.parametrize("layout", [{}, {"page_size": 16}, {"indexed": True, "padded": True}], ids=str)
def test_rotary(interleaved, rotary_dim, features, layout, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    angles = torch.rand(208, rotary_dim // 2, device=device) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    # In bfloat16 the table's rows are not of length 1; in float32 they are.
    if dtype != torch.float32:
        quarter = torch.randint(0, 4, cos.shape, device=device)
        cos, sin = (torch.tensor(x, device=device, dtype=dtype)[quarter]
                    for x in ([1, 0, -1, 0], [0, 1, 0, -1]))
    cache = Cache(device, dtype, seqlen_q=4, new=4, capacity=208, **layout)
    cache.check(rotation(cos, sin, interleaved, bool(features)), rotary_cos=cos, rotary_sin=sin,
                rotary_interleaved=interleaved, **features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", FEATURES[:4], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("longest", [4, 40])
def test_packed_queries_over_pages(longest, dtype, features, page_size, device):
    lengths_q, lengths_k, pages = [3, 0, longest, 1], [70, 5, 40, 128], 8
    cache = Cache(device, dtype, batch=4, new=0, capacity=page_size * pages, page_size=page_size)
    cache.lengths = torch.tensor(lengths_k, dtype=torch.int32, device=device)
    cache.poison()
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=device)
                  for x in (lengths_q, lengths_k))
    q = torch.randn(sum(lengths_q), 4, 64, device=device, dtype=dtype)
    out = flash_attn_varlen_func(q, cache.k, cache.v, cu_q, cu_k, longest, 128, block_table=cache.table,
                                 **features)
    for b, length in enumerate(lengths_k):
        rows = q[None, cu_q[b] : cu_q[b + 1]]
        if rows.shape[1]:
            k, v = (cache.rows(x, b)[None, :length] for x in (cache.k, cache.v))
            Expected(lambda *qkv: reference.attention(*qkv, **features), rows, k, v).check(
                out=out[None, cu_q[b] : cu_q[b + 1]])


def test_lengths_as_a_number_and_none(device):
    cache = Cache(device, torch.float32, new=0)
    full = flash_attn_with_kvcache(cache.q, cache.k, cache.v)
    assert torch.equal(full, flash_attn_with_kvcache(cache.q, cache.k, cache.v, cache_seqlens=200))
    some = flash_attn_with_kvcache(cache.q, cache.k, cache.v, cache_seqlens=70)
    torch.testing.assert_close(some, flash_attn.flash_attn_func(cache.q, cache.k[:, :70], cache.v[:, :70]))


@pytest.mark.parametrize("change,message", [
    ({"cache_seqlens": None}, "k is given without cache_seqlens"),
    ({"cache_seqlens": 200}, "from 0 to 199"),
    ({"k": None, "v": None, "rotary_cos": torch.ones(200, 8), "rotary_sin": torch.ones(200, 8)}, "without k"),
    ({"v_cache": torch.zeros(3, 200, 2, 128)[..., ::2]}, "v_cache has shape"),
    ({"cache_batch_idx": torch.tensor([0, 1, 3], dtype=torch.int32)}, None),
    ({"q": torch.zeros(2, 1, 4, 64)}, None),
    ({"num_splits": 129}, "num_splits is 129"),
])
def test_errors(change, message):
    cache = Cache("cpu", torch.float32)
    given = {"q": cache.q, "k_cache": cache.k, "v_cache": cache.v, **cache.arguments(), **change}
    with pytest.raises((ValueError, RuntimeError, IndexError), match=message):
        flash_attn_with_kvcache(**given)


def test_a_captured_graph_follows_the_lengths():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    cache = Cache("cuda", torch.bfloat16, capacity=512, page_size=64)
    given = cache.arguments()
    flash_attn_with_kvcache(cache.q, cache.k, cache.v, **given, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(cache.q, cache.k, cache.v, **given, causal=True)
    for length in (3, 100, 511):
        cache.lengths.fill_(length)
        graph.replay()
        assert torch.equal(out, flash_attn_with_kvcache(cache.q, cache.k, cache.v, **given, causal=True))
