"""Rotary position embedding with gradients (RoFormer, arXiv 2104.09864), and the module with its tables.

Turning is orthogonal: the gradient turns the other way, so nothing of the input is kept for it, and turning
in place costs no memory.
"""

from dataclasses import dataclass

import torch

from ..ops.triton.rotary import apply_rotary

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]

ALL = slice(None)


@dataclass(frozen=True)
class _Turn:
    """Which parts of a tensor turn, and how. A part is an index that leaves [batch, seqlen, heads, head_dim],
    or packed [total, heads, head_dim]."""

    interleaved: bool
    inplace: bool
    part: tuple = (...,)  # with cos and sin
    part_k: tuple | None = None  # with cos_k and sin_k
    max_seqlen: int | None = None
    conjugate: bool = False


class _Rotation(torch.autograd.Function):
    """Turns parts of x. Differentiable any number of times: the gradient is this function, conjugate."""

    @staticmethod
    def forward(ctx, x, cos, sin, cos_k, sin_k, seqlen_offsets, cu_seqlens, turn):
        if turn.inplace:
            ctx.mark_dirty(x)
        out = x if turn.inplace else x.clone()
        for part, part_cos, part_sin in ((turn.part, cos, sin), (turn.part_k, cos_k, sin_k)):
            if part is not None:
                apply_rotary(
                    out[part], part_cos, part_sin, seqlen_offsets, cu_seqlens, turn.max_seqlen,
                    interleaved=turn.interleaved, inplace=True, conjugate=turn.conjugate,
                )
        is_tensor = isinstance(seqlen_offsets, torch.Tensor)
        ctx.save_for_backward(cos, sin, cos_k, sin_k, cu_seqlens, seqlen_offsets if is_tensor else None)
        ctx.seqlen_offset = None if is_tensor else seqlen_offsets
        ctx.turn = turn
        return out

    @staticmethod
    def backward(ctx, dout):
        cos, sin, cos_k, sin_k, cu_seqlens, seqlen_offsets = ctx.saved_tensors
        if seqlen_offsets is None:
            seqlen_offsets = ctx.seqlen_offset
        # Never in place: dout may also be somebody else's gradient.
        turn = _Turn(
            ctx.turn.interleaved, inplace=False, part=ctx.turn.part, part_k=ctx.turn.part_k,
            max_seqlen=ctx.turn.max_seqlen, conjugate=not ctx.turn.conjugate,
        )
        dx = _Rotation.apply(dout, cos, sin, cos_k, sin_k, seqlen_offsets, cu_seqlens, turn)
        return dx, *[None] * 7


def rotate_half(x, interleaved=False):
    """Turns every feature pair by 90 degrees: (a, b) becomes (-b, a).

    Arguments:
        x: [..., dim], dim even.
        interleaved: True pairs features 2i and 2i + 1; False pairs i and i + dim / 2.

    Returns:
        Shape and dtype of x.
    """
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """The formula x cos + rotate_half(x) sin as it stands, differentiable in x, cos and sin.

    Arguments:
        x: [batch, seqlen, heads, head_dim].
        cos, sin: [seqlen, rotary_dim / 2] or [batch, seqlen, rotary_dim / 2], of x's dtype.
        interleaved: as in apply_rotary_emb.

    Returns:
        [batch, seqlen, heads, head_dim]; features from rotary_dim on as they were.

    Raises:
        ValueError: rotary_dim exceeds head_dim.
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise ValueError(f"flash_attn: rotary_dim is {rotary_dim}, more than the head dim {x.shape[-1]} of x")
    if interleaved:
        cos, sin = (table.repeat_interleave(2, dim=-1).unsqueeze(-2) for table in (cos, sin))
    else:
        cos, sin = (torch.cat((table, table), dim=-1).unsqueeze(-2) for table in (cos, sin))
    turning, resting = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((turning * cos + rotate_half(turning, interleaved) * sin, resting), dim=-1)


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
):
    """Rotary position embedding of one tensor (arXiv 2104.09864), differentiable in x.

    Arguments:
        x: [batch, seqlen, heads, head_dim], or with cu_seqlens packed [total, heads, head_dim]; any floating
            dtype, any strides.
        cos, sin: [seqlen_ro, rotary_dim / 2], row p for position p; rotary_dim <= head_dim. The first
            rotary_dim features of each head turn, the others stay.
        interleaved: True pairs features 2i and 2i + 1 (GPT-J); False pairs i and i + rotary_dim / 2
            (GPT-NeoX).
        inplace: write into x and return it.
        seqlen_offsets: int, or int32 or int64 [batch]: the position of each sequence's first row.
        cu_seqlens: None, or int32 or int64 [batch + 1]: where each packed sequence begins.
        max_seqlen: int, the longest packed sequence; only checked against the tables, and None skips that.

    Returns:
        Shape and dtype of x; arithmetic in float32 (float64 if x or a table is). No gradient reaches cos and
        sin.

    Raises:
        ValueError: see flash_attn.ops.triton.rotary.apply_rotary.
        RuntimeError: inplace, and x is a leaf that requires grad (torch's rule).
    """
    turn = _Turn(interleaved, inplace, max_seqlen=max_seqlen)
    return _Rotation.apply(x, cos, sin, None, None, seqlen_offsets, cu_seqlens, turn)


apply_rotary_emb_func = apply_rotary_emb


def rotate_queries_and_keys_(
    qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q, cu_seqlens=None, max_seqlen=None
):
    """apply_rotary_emb_qkv_, also for packed rows [total, num_heads_q + 2 * num_heads_k, head_dim]."""
    heads = qkv.shape[-2]
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        part, part_k = (ALL, ALL, 0), (ALL, ALL, 1)
    elif qkv.dim() == (4 if cu_seqlens is None else 3) and num_heads_q and (heads - num_heads_q) % 2 == 0:
        first_value = (heads + num_heads_q) // 2
        part, part_k = (..., slice(0, num_heads_q), ALL), (..., slice(num_heads_q, first_value), ALL)
    else:
        raise ValueError(
            "flash_attn: qkv must be [batch, seqlen, 3, heads, head_dim], or with num_heads_q "
            f"[batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim]; got {list(qkv.shape)} and "
            f"num_heads_q = {num_heads_q}"
        )
    turn = _Turn(interleaved, inplace=True, part=part, part_k=part_k, max_seqlen=max_seqlen)
    return _Rotation.apply(qkv, cos, sin, cos_k, sin_k, seqlen_offsets, cu_seqlens, turn)


def apply_rotary_emb_qkv_(
    qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None
):
    """Rotary position embedding of queries and keys in one tensor, in place; values stay.

    Arguments:
        qkv: [batch, seqlen, 3, heads, head_dim], or [batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim]:
            all query heads, then all key heads, then all value heads.
        cos, sin: [seqlen_ro, rotary_dim / 2].
        cos_k, sin_k: other tables for the keys (xPos, arXiv 2212.10554); None: the same.
        interleaved, seqlen_offsets: as in apply_rotary_emb.
        num_heads_q: int, for the second layout only.

    Returns:
        qkv itself, changed; differentiable in qkv.

    Raises:
        ValueError: qkv has neither layout, or as apply_rotary_emb.
        RuntimeError: qkv is a leaf that requires grad (torch's rule).
    """
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    return rotate_queries_and_keys_(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotary position embedding of the keys of kv [batch, seqlen, 2, heads, head_dim], in place; values stay.

    Arguments and errors as apply_rotary_emb_qkv_.

    Returns:
        kv itself, changed; differentiable in kv.
    """
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"flash_attn: kv must be [batch, seqlen, 2, heads, head_dim]; got {list(kv.shape)}")
    turn = _Turn(interleaved, inplace=True, part=(ALL, ALL, 0))
    return _Rotation.apply(kv, cos, sin, None, None, seqlen_offsets, None, turn)


class RotaryEmbedding(torch.nn.Module):
    """Rotary position embedding with its tables, made when first needed and kept (arXiv 2104.09864).

    Pair i of position p turns by p / base^(2 i / dim). With scale_base, xPos (arXiv 2212.10554): queries are
    also multiplied by z_i^((p - c) / scale_base) and keys divided by it, z_i = (2 i + 0.4 dim) / (1.4 dim),
    so that scores decay with distance. c is the middle of the tables and cancels in every score.

    Arguments:
        dim: features that turn, even, at most the head dim.
        base: float, 10000 in the paper.
        interleaved: True pairs features 2i and 2i + 1 (GPT-J); False pairs i and i + dim / 2 (GPT-NeoX).
        scale_base: None, or xPos' scale (512 in its paper). Keys turned with tables of one length do not fit
            queries turned with another: with a cache, pass its length as max_seqlen from the first call on.
        device: of the buffers.

    Buffers, not in the state dict: inv_freq float32 [dim / 2], scale float32 [dim / 2] or None.
    """

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        if dim <= 0 or dim % 2:
            raise ValueError(f"flash_attn: dim is {dim}; features turn in pairs, so it must be even, not 0")
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = None
        self._cos_k_cached = self._sin_k_cached = None

    def _even_features(self, device):
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device=None):
        return self.base ** (-self._even_features(device) / self.dim)

    def _compute_scale(self, device=None):
        return (self._even_features(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _tables_serve(self, seqlen, device, dtype):
        cos = self._cos_cached
        if cos is None or seqlen > self._seq_len_cached or cos.device != device or cos.dtype != dtype:
            return False
        # Autograd cannot save what was made in inference mode.
        return torch.is_inference_mode_enabled() or not cos.is_inference()

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        """Makes the tables, [seqlen, dim / 2] in dtype, unless those kept are long enough and fit."""
        device = self.inv_freq.device if device is None else torch.device(device)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if self._tables_serve(seqlen, device, dtype):
            return
        # Angles in float32, also in a model that was converted to a half type together with its buffers.
        is_exact = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq.to(device) if is_exact else self._compute_inv_freq(device)
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq)
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is not None:
            power = (positions - seqlen // 2) / self.scale_base
            scale = self._compute_scale(device) ** power[:, None]
            self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)
            cos, sin = cos * scale, sin * scale
        self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
        self._seq_len_cached = seqlen

    def _prepare_tables(self, x, seqlen, seqlen_offset, max_seqlen):
        if max_seqlen is not None:
            self._update_cos_sin_cache(int(max_seqlen), x.device, x.dtype)
        elif not isinstance(seqlen_offset, torch.Tensor):
            self._update_cos_sin_cache(seqlen + seqlen_offset, x.device, x.dtype)
        elif self._cos_cached is None:
            raise ValueError(
                "flash_attn: seqlen_offset is a tensor, whose values are not read; pass max_seqlen, one more "
                "than the last position"
            )

    def tables(self):
        """(cos, sin, cos_k, sin_k) as they are kept; without xPos keys turn as queries do."""
        if self.scale_base is None:
            return self._cos_cached, self._sin_cached, self._cos_cached, self._sin_cached
        return self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """Turns queries and keys in place.

        Arguments:
            qkv: [batch, seqlen, 3, heads, head_dim]; with num_heads_q
                [batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim]; with kv the queries alone,
                [batch, seqlen, heads, head_dim].
            kv: None, or [batch, seqlen, 2, heads_k, head_dim].
            seqlen_offset: int, or int32 or int64 [batch]: the position of the first row.
            max_seqlen: int, one more than the last position; None: seqlen + seqlen_offset. Needed where
                seqlen_offset is a tensor.

        Returns:
            qkv, or (q, kv): the tensors given, changed.

        Raises:
            ValueError: as apply_rotary_emb_qkv_, or seqlen_offset is a tensor and no tables were made yet.
        """
        self._prepare_tables(qkv, qkv.shape[1], seqlen_offset, max_seqlen)
        cos, sin, cos_k, sin_k = self.tables()
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, interleaved=self.interleaved, seqlen_offsets=seqlen_offset,
                num_heads_q=num_heads_q,
            )
        q = apply_rotary_emb(
            qkv, cos, sin, interleaved=self.interleaved, inplace=True, seqlen_offsets=seqlen_offset
        )
        kv = apply_rotary_emb_kv_(
            kv, cos_k, sin_k, interleaved=self.interleaved, seqlen_offsets=seqlen_offset
        )
        return q, kv

    def rotate_packed_(self, qkv, cu_seqlens, max_seqlen, num_heads_q):
        """forward of packed [total, num_heads_q + 2 * num_heads_k, head_dim]; cu_seqlens [batch + 1]."""
        self._update_cos_sin_cache(int(max_seqlen), qkv.device, qkv.dtype)
        return rotate_queries_and_keys_(
            qkv, *self.tables(), self.interleaved, 0, num_heads_q, cu_seqlens, int(max_seqlen)
        )
