"""Multi-head attention as one layer (Attention Is All You Need, arXiv 1706.03762).

Projections, rotary embedding or ALiBi, and a cache of keys and values around the modules of
flash_attn.modules.attention, which are importable from here too. Shapes as there.
"""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flash_attn

from ..layers.rotary import RotaryEmbedding
from ..not_shipped import absent_names
from .attention import CrossAttention, FlashCrossAttention, FlashSelfAttention, SelfAttention, check_lengths

__all__ = [
    "MHA",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "SelfAttention",
    "get_alibi_slopes",
]

__getattr__ = absent_names(
    __name__, ParallelMHA="use MHA, and torch.distributed.tensor.parallel to share its projections out"
)


def get_alibi_slopes(nheads):
    """Slopes of ALiBi's linear biases (arXiv 2108.12409).

    Arguments:
        nheads: int, at least 1.

    Returns:
        list of nheads floats: for a power of two the geometric sequence that begins with its ratio
        2^(-8 / nheads); otherwise that of the power of two below, then every other slope of the power above.
    """
    power = 2 ** int(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * head / power) for head in range(1, power + 1)]
    between = [2.0 ** (-4.0 * head / power) for head in range(1, 2 * power, 2)]
    return slopes + between[: nheads - power]


def _shifted_convolution(channels, **factory):
    """Depthwise over the last three positions; see MHA._convolved."""
    return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels, **factory)


class MHA(nn.Module):
    """Multi-head attention: projections, attention, output projection (arXiv 1706.03762).

    Parameters: Wqkv [(H + 2 Hk) D, embed_dim], all query heads, then all key heads, then all value heads
    (with cross_attn Wq [embed_dim, embed_dim] and Wkv [2 Hk D, embed_dim], keys, then values), and out_proj
    [embed_dim, embed_dim]; each with its bias.

    Arguments:
        embed_dim, num_heads: D = embed_dim / num_heads.
        num_heads_kv: Hk, divides num_heads; None: num_heads.
        cross_attn: keys and values come from another sequence, x_kv.
        qkv_proj_bias, out_proj_bias: whether the projections have biases.
        dropout: of attention weights, in training.
        softmax_scale: None: D ** -0.5.
        causal: see flash_attn.flash_attn_func.
        layer_idx: int, this layer's key in a cache of keys and values.
        dwconv: a depthwise causal convolution over three positions behind the input projections.
        rotary_emb_dim: features per head that turn with position; 0: none. rotary_emb_base,
            rotary_emb_scale_base, rotary_emb_interleaved: see flash_attn.layers.rotary.RotaryEmbedding.
        use_alibi, window_size: see flash_attn.flash_attn_func; only with use_flash_attn.
        fused_bias_fc: False.
        use_flash_attn: attention by this library; False: by torch's scaled_dot_product_attention, which takes
            key_padding_mask.
        return_residual: forward returns (out, x).
        checkpointing: attention is computed again in the backward.
        device, dtype: of the parameters.

    Raises:
        ValueError: heads do not divide, or arguments exclude each other; the message says which.
        ImportError: fused_bias_fc, whose extension is not part of this library.
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        num_heads_kv=None,
        cross_attn=False,
        qkv_proj_bias=True,
        out_proj_bias=True,
        dropout=0.0,
        softmax_scale=None,
        causal=False,
        layer_idx=None,
        dwconv=False,
        rotary_emb_dim=0,
        rotary_emb_base=10000.0,
        rotary_emb_scale_base=None,
        rotary_emb_interleaved=False,
        use_alibi=False,
        window_size=(-1, -1),
        fused_bias_fc=False,
        use_flash_attn=False,
        return_residual=False,
        checkpointing=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if embed_dim % num_heads or num_heads % num_heads_kv:
            raise ValueError(
                f"flash_attn: num_heads = {num_heads} must divide embed_dim = {embed_dim}, and num_heads_kv "
                f"= {num_heads_kv} must divide num_heads"
            )
        if fused_bias_fc:
            raise ImportError("flash_attn: fused_bias_fc needs an extension that is not shipped; pass False")
        if (use_alibi or tuple(window_size) != (-1, -1)) and not use_flash_attn:
            raise ValueError("flash_attn: use_alibi and window_size need use_flash_attn=True")
        if cross_attn and rotary_emb_dim > 0:
            raise ValueError("flash_attn: rotary embedding (rotary_emb_dim) is for self-attention only")
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim
        self.use_alibi = use_alibi
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing

        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        factory = {"device": device, "dtype": dtype}
        self._make_projections(qkv_proj_bias, out_proj_bias, factory)
        options = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        inner, inner_cross = SelfAttention, CrossAttention
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), dtype=torch.float32, device=device)
            options |= {"window_size": window_size, "alibi_slopes": slopes if use_alibi else None}
            inner, inner_cross = FlashSelfAttention, FlashCrossAttention
        self.inner_attn = inner(**options)
        self.inner_cross_attn = inner_cross(**options)

    def _make_projections(self, qkv_proj_bias, out_proj_bias, factory):
        embed_dim, dim_kv = self.embed_dim, 2 * self.num_heads_kv * self.head_dim
        if self.cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **factory)
            self.Wkv = nn.Linear(embed_dim, dim_kv, bias=qkv_proj_bias, **factory)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + dim_kv, bias=qkv_proj_bias, **factory)
        if self.dwconv and self.cross_attn:
            self.dwconv_q = _shifted_convolution(embed_dim, **factory)
            self.dwconv_kv = _shifted_convolution(dim_kv, **factory)
        elif self.dwconv:
            self.dwconv_qkv = _shifted_convolution(embed_dim + dim_kv, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **factory)

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None):
        """Memory for keys and values of max_seqlen positions, [batch_size, max_seqlen, 2, Hk, D]."""
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.zeros(shape, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def _check_call(self, x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params):
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            raise ValueError("flash_attn: x_kv and mixer_subset need MHA(cross_attn=True)")
        if self.use_flash_attn and key_padding_mask is not None:
            raise ValueError(
                "flash_attn: key_padding_mask needs use_flash_attn=False; with it, pack the sequences "
                "(flash_attn.bert_padding.unpad_input) and pass cu_seqlens and max_seqlen"
            )
        if cu_seqlens is not None:
            check_lengths("", cu_seqlens, max_seqlen)
            if not self.use_flash_attn or self.dwconv or self.cross_attn:
                raise ValueError(
                    "flash_attn: cu_seqlens needs use_flash_attn=True, dwconv=False and cross_attn=False"
                )
        if inference_params is not None:
            if cu_seqlens is not None or key_padding_mask is not None or self.cross_attn or self.dwconv:
                raise ValueError(
                    "flash_attn: inference_params goes with neither cu_seqlens, key_padding_mask, cross_attn "
                    "nor dwconv"
                )
            if self.layer_idx is None:
                raise ValueError("flash_attn: inference_params needs MHA(layer_idx=...), a key of the cache")

    def _attention(self, module, *inputs, **options):
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(module, *inputs, use_reentrant=False, **options)
        return module(*inputs, **options)

    def _split(self, projected):
        """[..., features] -> [..., heads, D]"""
        return projected.unflatten(-1, (-1, self.head_dim))

    def _convolved(self, convolution, projected):
        """Position i of the result sees positions i - 2, i - 1 and i of projected [B, S, features]."""
        seqlen = projected.shape[1]
        return convolution(projected.transpose(1, 2))[..., :seqlen].transpose(1, 2).contiguous()

    def _cross(self, x, x_kv, key_padding_mask, mixer_subset):
        q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
        kv = self.Wkv(x if x_kv is None else x_kv)
        if self.dwconv:
            q, kv = self._convolved(self.dwconv_q, q), self._convolved(self.dwconv_kv, kv)
        kv = self._split(kv).unflatten(-2, (2, self.num_heads_kv))
        options = {} if self.use_flash_attn else {"key_padding_mask": key_padding_mask}
        return self._attention(self.inner_cross_attn, self._split(q), kv, **options)

    def _self(self, x, key_padding_mask, cu_seqlens, max_seqlen):
        qkv = self.Wqkv(x)
        if self.dwconv:
            qkv = self._convolved(self.dwconv_qkv, qkv)
        qkv = self._split(qkv)
        if self.rotary_emb_dim > 0 and cu_seqlens is not None:
            qkv = self.rotary_emb.rotate_packed_(qkv, cu_seqlens, max_seqlen, self.num_heads)
        elif self.rotary_emb_dim > 0:
            qkv = self.rotary_emb(qkv, max_seqlen=max_seqlen, num_heads_q=self.num_heads)
        if self.use_flash_attn:
            options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        else:
            options = {"key_padding_mask": key_padding_mask}
        if self.num_heads_kv == self.num_heads:
            return self._attention(self.inner_attn, qkv.unflatten(-2, (3, self.num_heads)), **options)
        q, kv = self._queries_and_rest(qkv)
        if not self.use_flash_attn:
            return self._attention(self.inner_attn.attend, q, kv, **options)
        options |= {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen}
        return self._attention(self.inner_cross_attn, q, kv, **options)

    def _queries_and_rest(self, qkv):
        """[..., H + 2 Hk, D] -> [..., H, D] and [..., 2, Hk, D]"""
        q, kv = qkv.split((self.num_heads, 2 * self.num_heads_kv), dim=-2)
        return q, kv.unflatten(-2, (2, self.num_heads_kv))

    def _decode(self, x, params):
        """Self-attention to what the cache holds and to x, which is added to it."""
        offset = params.seqlen_offset
        lengths = getattr(params, "lengths_per_sample", None)
        # Before the first token all lengths are 0, whatever that tensor holds.
        start = offset if lengths is None or offset == 0 else lengths
        qkv = self._split(self.Wqkv(x))
        if self.rotary_emb_dim > 0:
            qkv = self.rotary_emb(
                qkv, seqlen_offset=start, max_seqlen=params.max_seqlen, num_heads_q=self.num_heads
            )
        q, kv = self._queries_and_rest(qkv)
        memory = params.key_value_memory_dict
        if self.layer_idx not in memory:
            memory[self.layer_idx] = self.allocate_inference_cache(
                params.max_batch_size, params.max_seqlen, kv.dtype
            )
        first = params.batch_size_offset
        cache = memory[self.layer_idx][first : first + x.shape[0]]
        with_kvcache = getattr(flash_attn, "flash_attn_with_kvcache", None)
        if self.use_flash_attn and with_kvcache is not None and offset > 0:
            options = self.inner_cross_attn.decoding_options()
            seqlens = start.int() if isinstance(start, torch.Tensor) else start
            k_cache, v_cache = cache.unbind(2)
            return with_kvcache(q, k_cache, v_cache, *kv.unbind(2), cache_seqlens=seqlens, **options)
        return self._append_and_attend(q, kv, cache, start)

    def _append_and_attend(self, q, kv, cache, start):
        batch, seqlen = kv.shape[:2]
        if not isinstance(start, torch.Tensor):
            cache[:, start : start + seqlen] = kv
            return self.inner_cross_attn(q, cache[:, : start + seqlen])
        if self.use_flash_attn:
            raise NotImplementedError(
                "flash_attn: lengths_per_sample needs flash_attn_with_kvcache, which this build lacks; use "
                "seqlen_offset alone or MHA(use_flash_attn=False)"
            )
        positions = start[:, None] + torch.arange(seqlen, device=kv.device)
        cache[torch.arange(batch, device=kv.device)[:, None], positions] = kv
        is_valid = torch.arange(cache.shape[1], device=kv.device) < (start + seqlen)[:, None]
        return self.inner_cross_attn(q, cache, key_padding_mask=is_valid)

    def forward(
        self,
        x,
        x_kv=None,
        key_padding_mask=None,
        cu_seqlens=None,
        max_seqlen=None,
        mixer_subset=None,
        inference_params=None,
    ):
        """Arguments:
            x: [B, S, embed_dim], or with cu_seqlens packed [T, embed_dim].
            x_kv: None, or [B, Sk, embed_dim], with cross_attn; None: x.
            key_padding_mask: None, or bool [B, Sk], True where a key is valid; with use_flash_attn=False.
            cu_seqlens, max_seqlen: None, or int32 [B + 1] and int; with use_flash_attn.
            mixer_subset: None, or an index of positions of x that query; with cross_attn.
            inference_params: None, or an object with the attributes max_seqlen, max_batch_size,
                seqlen_offset, batch_size_offset, key_value_memory_dict and lengths_per_sample (int32 [B] or
                None, in place of seqlen_offset once that is not 0). x is what follows seqlen_offset known
                positions; its keys and values are added to key_value_memory_dict[layer_idx], which is made
                if it is not there.

        Returns:
            [B, S, embed_dim] (S of mixer_subset), or [T, embed_dim]; with return_residual (out, x).

        Raises:
            ValueError: arguments exclude each other or their shapes do not match.
            NotImplementedError: lengths_per_sample with use_flash_attn, where flash_attn_with_kvcache is not
                part of the build.
        """
        self._check_call(x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        if inference_params is not None:
            context = self._decode(x, inference_params)
        elif self.cross_attn:
            context = self._cross(x, x_kv, key_padding_mask, mixer_subset)
        else:
            context = self._self(x, key_padding_mask, cu_seqlens, max_seqlen)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out
