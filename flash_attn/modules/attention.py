"""Attention as modules without parameters: what stands between the projections of MHA.

FlashSelfAttention and FlashCrossAttention call this library's functions. SelfAttention and CrossAttention
call torch's scaled_dot_product_attention, which takes padding masks. Shapes: B batch, S sequence length, T
packed total, H query heads, Hk key and value heads, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import nn

import flash_attn

__all__ = ["CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention", "check_lengths"]

TRAINING_OPTIONS = ("dropout_p", "deterministic")


class _FlashAttention(nn.Module):
    """What FlashSelfAttention and FlashCrossAttention keep: the last arguments of flash_attn's functions."""

    def __init__(self, causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.window_size = window_size
        self.deterministic = deterministic
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def _options(self, causal):
        slopes = self.alibi_slopes
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            # float32 also in a model converted to a half type together with its buffers.
            "alibi_slopes": None if slopes is None else slopes.float(),
            "deterministic": self.deterministic,
        }

    def decoding_options(self):
        """The same for flash_attn_with_kvcache, which has neither dropout nor gradients."""
        return {name: option for name, option in self._options(None).items() if name not in TRAINING_OPTIONS}


class FlashSelfAttention(_FlashAttention):
    """Attention of packed queries, keys and values (arXiv 2205.14135). No parameters.

    Arguments:
        causal, softmax_scale, window_size, deterministic: see flash_attn.flash_attn_func.
        attention_dropout: dropout_p in training; 0 in evaluation.
        alibi_slopes: None, or float32 [H] or [B, H].
    """

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
    ):
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None):
        """Arguments:
            qkv: [B, S, 3, H, D], or with cu_seqlens packed [T, 3, H, D].
            causal: bool in place of the module's; None: the module's.
            cu_seqlens: None, or int32 [B + 1]; then max_seqlen, int, too.

        Returns:
            [B, S, H, D] or [T, H, D].

        Raises:
            ValueError, RuntimeError: as flash_attn.flash_attn_qkvpacked_func; cu_seqlens without max_seqlen.
        """
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn.flash_attn_qkvpacked_func(qkv, **options)
        check_lengths("", cu_seqlens, max_seqlen)
        return flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)


class FlashCrossAttention(_FlashAttention):
    """Attention of queries to packed keys and values, of as many heads or fewer (arXiv 2205.14135). No
    parameters. Arguments as FlashSelfAttention, in another order."""

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        alibi_slopes=None,
        window_size=(-1, -1),
        deterministic=False,
    ):
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, max_seqlen_k=None
    ):
        """Arguments:
            q: [B, Sq, H, D], or with cu_seqlens packed [Tq, H, D].
            kv: [B, Sk, 2, Hk, D], or packed [Tk, 2, Hk, D].
            causal: bool in place of the module's; None: the module's. Bottom-right aligned.
            cu_seqlens, max_seqlen: of the queries; cu_seqlens_k, max_seqlen_k: of the keys. All or none.

        Returns:
            [B, Sq, H, D] or [Tq, H, D].

        Raises:
            ValueError, RuntimeError: as flash_attn.flash_attn_kvpacked_func; some lengths are missing.
        """
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn.flash_attn_kvpacked_func(q, kv, **options)
        check_lengths("", cu_seqlens, max_seqlen)
        check_lengths("_k", cu_seqlens_k, max_seqlen_k)
        return flash_attn.flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **options
        )


def check_lengths(suffix, cu_seqlens, max_seqlen):
    if cu_seqlens is None or max_seqlen is None:
        raise ValueError(
            f"flash_attn: packed sequences need cu_seqlens{suffix}, int32 [batch + 1], and "
            f"max_seqlen{suffix}, int; got {cu_seqlens} and {max_seqlen}"
        )


class _PlainAttention(nn.Module):
    """Attention by torch's scaled_dot_product_attention, for padding masks and for dtypes that flash_attn's
    engines do not take."""

    def __init__(self, causal=False, softmax_scale=None, attention_dropout=0.0):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def _attend(self, q, kv, causal, is_valid, num_keys):
        """is_valid: None or bool [B, Sk]; num_keys: int, or [B, 1, 1, 1]: under causal the last query sees
        all keys before that."""
        causal = self.causal if causal is None else causal
        k, v = kv.unbind(dim=2)
        is_torch_causal = bool(causal) and is_valid is None and q.shape[1] == k.shape[1]
        visible = None if is_valid is None else is_valid[:, None, None, :]
        if causal and not is_torch_causal:
            query = torch.arange(q.shape[1], device=q.device)[:, None]
            below = torch.arange(k.shape[1], device=q.device) <= query + (num_keys - q.shape[1])
            visible = below if visible is None else below & visible
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=visible,
            dropout_p=self.drop.p if self.training else 0.0,
            is_causal=is_torch_causal,
            scale=self.softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        if visible is not None:
            # Some of torch's kernels for GPUs give these rows an average of all values.
            out = out.masked_fill(~visible.any(dim=-1, keepdim=True), 0)
        return out.transpose(1, 2)


def _as_valid(key_padding_mask, kv):
    if key_padding_mask is None:
        return None
    if key_padding_mask.shape != kv.shape[:2] or key_padding_mask.is_floating_point():
        raise ValueError(
            f"flash_attn: key_padding_mask must be bool [batch, seqlen_k] = {list(kv.shape[:2])}, True where "
            f"a key is valid; got {key_padding_mask.dtype} {list(key_padding_mask.shape)}"
        )
    return key_padding_mask.bool()


class SelfAttention(_PlainAttention):
    """Attention of packed queries, keys and values by torch's scaled_dot_product_attention. No parameters.

    Arguments:
        causal: query i sees key j only if j <= i.
        softmax_scale: None: D ** -0.5.
        attention_dropout: in training only.
    """

    def forward(self, qkv, causal=None, key_padding_mask=None):
        """Arguments:
            qkv: [B, S, 3, H, D].
            causal: bool in place of the module's; None: the module's.
            key_padding_mask: None, or bool [B, S], True where a key is valid; padding may lie anywhere.

        Returns:
            [B, S, H, D]; zero for a query that sees no key.

        Raises:
            ValueError: key_padding_mask is not [B, S].
        """
        return self.attend(qkv[:, :, 0], qkv[:, :, 1:], causal, key_padding_mask)

    def attend(self, q, kv, causal=None, key_padding_mask=None):
        """forward with q [B, S, H, D] apart from kv [B, S, 2, Hk, D], whose heads may be fewer."""
        return self._attend(q, kv, causal, _as_valid(key_padding_mask, kv), num_keys=kv.shape[1])


class CrossAttention(_PlainAttention):
    """Attention of queries to packed keys and values by torch's scaled_dot_product_attention. No parameters.

    Arguments:
        causal: the last query sees all valid keys, the one before it one less, and so on.
        softmax_scale, attention_dropout: as SelfAttention.
    """

    def forward(self, q, kv, causal=None, key_padding_mask=None):
        """Arguments:
            q: [B, Sq, H, D].
            kv: [B, Sk, 2, Hk, D]; query head h reads key head h // (H // Hk).
            causal: bool in place of the module's; None: the module's.
            key_padding_mask: None, or bool [B, Sk], True where a key is valid; causal takes the valid ones
                for the first of their row.

        Returns:
            [B, Sq, H, D]; zero for a query that sees no key.

        Raises:
            ValueError: key_padding_mask is not [B, Sk].
        """
        is_valid = _as_valid(key_padding_mask, kv)
        num_keys = kv.shape[1] if is_valid is None else is_valid.sum(dim=-1)[:, None, None, None]
        return self._attend(q, kv, causal, is_valid, num_keys)
