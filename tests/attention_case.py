"""A Case is one configuration: its inputs, the library's answer, the expected one. Its repr reproduces it:

    python -c "from attention_case import *; Case(seqlen_q=3, causal=True).check()"
"""

import functools
import math
from dataclasses import dataclass

import pytest
import torch

import acceptance
import philox
import reference

FEATURE_NAMES = ("softmax_scale", "causal", "window_size", "softcap")


def draw_rng_state(seed, device="cpu"):
    """The (seed, offset) pair that a call draws as the first thing after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


@functools.cache
def gpu_dtypes():
    """What the GPU engines have kernels for."""
    from flash_attn import _C

    return {getattr(torch, kernel["dtype"]) for kernel in _C.kernels()}


def keep_mask(rng_state, dropout_p, batch, num_heads, seqlen_q, seqlen_k):
    seed, offset = rng_state.tolist()
    mask = philox.keep_mask(seed, offset, dropout_p, batch, num_heads, seqlen_q, seqlen_k)
    return torch.from_numpy(mask).to(rng_state.device)


def largest_allocation(function):
    """Bytes of the largest tensor that function makes on the CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    return max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


@dataclass(frozen=True)
class Case:
    """cu_seqlens_q and cu_seqlens_k make it packed: then batch, seqlen_q and seqlen_k are ignored, and tail
    rows follow the last sequence."""

    dtype: torch.dtype = torch.float32
    batch: int = 2
    seqlen_q: int = 128
    seqlen_k: int = 128
    num_heads: int = 2
    num_heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple = (-1, -1)
    softcap: float = 0.0
    alibi: str = "none"  # "none", "heads" [H] or "batch" [B, H]
    dropout_p: float = 0.0
    cu_seqlens_q: tuple = ()
    cu_seqlens_k: tuple = ()
    tail: int = 0
    device: str = "cpu"
    seed: int = 0

    @property
    def packed(self):
        return len(self.cu_seqlens_q) > 0

    @property
    def num_sequences(self):
        return len(self.cu_seqlens_q) - 1 if self.packed else self.batch

    @property
    def max_seqlens(self):
        if not self.packed:
            return self.seqlen_q, self.seqlen_k
        return tuple(max(b - a for a, b in zip(cu, cu[1:])) for cu in (self.cu_seqlens_q, self.cu_seqlens_k))

    def shapes(self):
        rows_q, rows_k = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        if self.packed:
            rows_q, rows_k = (self.cu_seqlens_q[-1] + self.tail,), (self.cu_seqlens_k[-1] + self.tail,)
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        return ((*rows_q, self.num_heads, self.head_dim), (*rows_k, self.num_heads_k, self.head_dim),
                (*rows_k, self.num_heads_k, head_dim_v), (*rows_q, self.num_heads, head_dim_v))

    def draw(self):
        """q, k, v, dout, standard normal; the same on every device. Skips the test where no engine of the
        device has the dtype; test_kernel_table.py says which ones must have it."""
        if self.device.startswith("cuda") and self.dtype not in gpu_dtypes():
            pytest.skip(f"no GPU engine has kernels for {self.dtype}")
        generator = torch.Generator().manual_seed(self.seed)
        drawn = (torch.randn(s, generator=generator, dtype=torch.float64) for s in self.shapes())
        return tuple(x.to(self.dtype).to(self.device) for x in drawn)

    def draw_dlse(self):
        q_shape = self.shapes()[0]
        shape = (q_shape[1], q_shape[0]) if self.packed else (q_shape[0], q_shape[2], q_shape[1])
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(shape, generator=generator, dtype=dtype).to(self.device)

    def slopes(self):
        if self.alibi == "none":
            return None
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / self.num_heads) for h in range(self.num_heads)])
        if self.alibi == "batch":
            slopes = slopes * torch.linspace(0.5, 1.0, self.num_sequences)[:, None]
        return slopes.to(self.device)

    def features(self):
        return {name: getattr(self, name) for name in FEATURE_NAMES}

    def cu_seqlens(self):
        return tuple(torch.tensor(cu, dtype=torch.int32, device=self.device)
                     for cu in (self.cu_seqlens_q, self.cu_seqlens_k))

    def call(self, q, k, v, **options):
        """The library's answer, with its dropout state drawn from torch.manual_seed(self.seed)."""
        import flash_attn

        options = {"dropout_p": self.dropout_p, "alibi_slopes": self.slopes(), **self.features(), **options}
        torch.manual_seed(self.seed)
        if self.packed:
            lengths = (*self.cu_seqlens(), *self.max_seqlens)
            return flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **options)
        return flash_attn.flash_attn_func(q, k, v, **options)

    def run(self, inputs=None, dlse=None, **options):
        """The library's forward and backward, as an acceptance.Result; options: as call() takes them."""
        *qkv, dout = self.draw() if inputs is None else inputs
        leaves = [x.detach().requires_grad_() for x in qkv]
        out, lse, _ = self.call(*leaves, return_attn_probs=True, **options)
        outputs, gradients = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
        dq, dk, dv = torch.autograd.grad(outputs, leaves, gradients)
        return acceptance.Result(out.detach(), lse.detach(), dq, dk, dv)

    def keep(self):
        if self.dropout_p == 0:
            return None
        state = draw_rng_state(self.seed, self.device)
        return keep_mask(state, self.dropout_p, self.num_sequences, self.num_heads, *self.max_seqlens)

    def attend(self, block_visible=None, attn_bias=None):
        """The reference as a function of q, k and v."""
        options = {**self.features(), "alibi_slopes": self.slopes(), "keep": self.keep(),
                   "keep_scale": philox.keep_scale(self.dropout_p)}
        if self.packed:
            return functools.partial(reference.packed_attention, cu_seqlens_q=self.cu_seqlens_q,
                                     cu_seqlens_k=self.cu_seqlens_k, **options)
        return functools.partial(reference.attention, block_visible=block_visible, attn_bias=attn_bias,
                                 **options)

    def expected(self, inputs=None, dlse=None):
        q, k, v, dout = self.draw() if inputs is None else inputs
        return acceptance.Expected(self.attend(), q, k, v, dout, dlse)

    def check(self, inputs=None, dlse=None, actual=None):
        """out, lse and all gradients against the reference; empty rows exactly zero."""
        self.check_each([self.run(inputs, dlse) if actual is None else actual], inputs, dlse)

    def check_each(self, actuals, inputs=None, dlse=None):
        """Several answers of run(), as check() does with one."""
        expected = self.expected(inputs, dlse)
        for actual in actuals:
            check_result(actual, expected)

    def check_forward(self, inputs=None):
        q, k, v, _ = self.draw() if inputs is None else inputs
        with torch.no_grad():
            out, lse, _ = self.call(q, k, v, return_attn_probs=True)
        acceptance.Expected(self.attend(), q, k, v).check(out=out, lse=lse)


def check_result(actual, expected):
    """An acceptance.Result against an acceptance.Expected; empty rows exactly zero."""
    expected.check(**vars(actual))
    check_empty_rows(actual, expected.exact.lse)


def check_empty_rows(actual, exact_lse):
    empty = (exact_lse == -math.inf).movedim(-1, -2)
    assert (actual.lse.movedim(-1, -2)[empty] == -math.inf).all()
    for name in ("out", "dq"):
        rows = getattr(actual, name)[empty]
        assert (rows == 0).all(), f"{name}: rows that see no key have to be zero"
