"""torch.nn.MultiheadAttention with this library's attention."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .. import operators
from ..attention import attend
from ..attention_mask import AttentionMask
from ..flash_attn_interface import flash_attn_varlen_func
from .attention_weights import attention_weights


def keep_forward(module, inputs):
    """A forward pre-hook that changes nothing. torch.nn.TransformerEncoderLayer in eval mode computes a whole
    layer from its modules' weights, past this module's forward, unless one of its modules has a hook."""


def _require(condition, message, error=AssertionError):
    """torch raises AssertionError for most of what does not fit, and code that catches it should go on to."""
    if not condition:
        raise error(f"flash_attn: {message}")


@dataclass(frozen=True)
class _Masks:
    """Of the scores [N, H, L, S]; each tensor may have 1 for N, H and L."""

    visible: torch.Tensor | None = None  # bool, True where a query sees a key
    bias: torch.Tensor | None = None  # floating, added
    causal: bool = False  # query i sees the keys j <= i

    @classmethod
    def merged(cls, masks, causal):
        """masks: torch's, bool and True where blocked, or floating, [N or 1, H or 1, L or 1, S] each."""
        blocked = [mask for mask in masks if mask.dtype == torch.bool]
        added = [mask for mask in masks if mask.dtype != torch.bool]
        visible = ~functools.reduce(torch.logical_or, blocked) if blocked else None
        return cls(visible, functools.reduce(torch.add, added) if added else None, causal)

    def padded(self, extra_keys):
        """With keys behind the others that everybody sees."""
        if extra_keys == 0:
            return self
        visible = None if self.visible is None else F.pad(self.visible, (0, extra_keys), value=True)
        return _Masks(visible, None if self.bias is None else F.pad(self.bias, (0, extra_keys)), self.causal)


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention that never stores the [L, S] scores, forward or backward: the same
    arguments, parameters, initial values, state_dict and results (arXiv 1706.03762, 2205.14135).

    A model that has been built takes it in with flash_attn.nn.replace_attention.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device,
            dtype: as in torch, defaults, too. embed_dim / num_heads must be at most 256, and dtype one that
            an engine of the device has: see flash_attn.explain.

    Where it differs from torch's module:

    - A query for which everything is blocked has attention output 0 (forward's result is then out_proj's
      bias) and weights 0. torch gives NaN with need_weights=True and in its inference fast path.
    - need_weights=True, the default, needs memory for the weights that it returns, but not for all heads'
      scores; need_weights=False is faster. Weights can be differentiated once.
    - Which weights dropout drops is drawn from torch's generator, but the numbers are this library's.
    - is_causal: with need_weights=False and no key_padding_mask torch looks at no mask; neither does this
      module. Otherwise torch reads the mask and this module does as well, unless attn_mask is [L, L] and has
      no gradient: then the hint is believed. Without an attn_mask it raises in inference, too, where torch
      ignores it.
    - TransformerEncoderLayer's inference fast path, which would bypass this module, does not run, and
      torch.jit.script does not take it.
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        dropout=0.0,
        bias=True,
        add_bias_kv=False,
        add_zero_attn=False,
        kdim=None,
        vdim=None,
        batch_first=False,
        device=None,
        dtype=None,
    ):
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device,
            dtype,
        )
        self.register_forward_pre_hook(keep_forward)

    @classmethod
    def take_over(cls, module):
        """Makes a torch.nn.MultiheadAttention one of these, in place: it stays the same object, with its
        parameters, hooks and mode."""
        module.__class__ = cls
        module.register_forward_pre_hook(keep_forward)

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        average_attn_weights=True,
        is_causal=False,
    ):
        """
        Args:
            query: [L, N, embed_dim], with batch_first [N, L, embed_dim], or unbatched [L, embed_dim].
            key, value: [S, N, kdim] and [S, N, vdim], or as query.
            key_padding_mask: [N, S], unbatched [S]; bool, True where a key is not to be seen by any query, or
                floating, added to the scores.
            attn_mask: [L, S] or [N * num_heads, L, S]; bool, True where a query is not to see a key, or
                floating, added to the scores. A floating mask that requires grad gets its gradient.
            need_weights: also return the attention weights.
            average_attn_weights: the weights averaged over heads.
            is_causal: a hint that attn_mask is the causal mask, which is then not read (see the class).

        Returns: the output, like query, and None or the weights [N, L, S], without average_attn_weights [N,
            num_heads, L, S], unbatched without N. With add_bias_kv and add_zero_attn S is one more each. In
            training the weights are the dropped ones, as in torch.

            A NestedTensor as query, key and value (the same one, without masks and weights) gives one.

        Raises:
            AssertionError, RuntimeError: shapes or dtypes do not fit; the same types as torch raises.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            return self._attend_nested(query, key, value, key_padding_mask, need_weights, attn_mask), None
        self._check(query, key, value, key_padding_mask, attn_mask)
        _require(
            not is_causal or attn_mask is not None,
            "is_causal is a hint about attn_mask, which is None; pass it, for example "
            "torch.nn.Transformer.generate_square_subsequent_mask(L)", RuntimeError,
        )
        is_batched = query.dim() == 3
        q, k, v = (self._rows_of(x, is_batched) for x in self._project(query, key, value))
        # torch's rule: the hint alone counts where nothing else needs the mask.
        if is_causal and key_padding_mask is None and not need_weights:
            masks = _Masks(causal=True)
        else:
            masks = self._merge(q, k, key_padding_mask, attn_mask, is_causal)
        k, v = self._with_extra_keys(k, v)
        masks = masks.padded(self._extra_keys())
        context, weights = self._attend(q, k, v, masks, need_weights, average_attn_weights)
        context = context.flatten(-2)
        if not is_batched:
            context = context.squeeze(0)
            weights = None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            context = context.transpose(0, 1)
        return F.linear(context, self.out_proj.weight, self.out_proj.bias), weights

    def _check(self, query, key, value, key_padding_mask, attn_mask):
        dims = (query.dim(), key.dim(), value.dim())
        _require(
            dims in ((2, 2, 2), (3, 3, 3)),
            f"query, key and value have {dims} dimensions; they must have 3 each, or 2 each without a batch",
        )
        for name, mask, allowed in (
            ("key_padding_mask", key_padding_mask, (query.dim() - 1,)), ("attn_mask", attn_mask, (2, 3)),
        ):
            if mask is None:
                continue
            _require(
                mask.dtype == torch.bool or mask.is_floating_point(),
                f"{name} is {mask.dtype}; it must be bool, True where blocked, or floating, to be added",
            )
            _require(
                mask.dim() in allowed,
                f"{name} has shape {list(mask.shape)}; for a query of {query.dim()} dimensions it must have "
                f"{' or '.join(map(str, allowed))}",
            )
        if attn_mask is not None and dims == (2, 2, 2) and attn_mask.dim() == 3:
            self._check_mask(attn_mask, 1, query.shape[0], key.shape[0], AssertionError)
        _require(
            query.shape[-1] == self.embed_dim,
            f"query has shape {list(query.shape)}; its last dimension must be embed_dim = {self.embed_dim}",
        )
        alike = key.shape == value.shape if self._qkv_same_embed_dim else key.shape[:-1] == value.shape[:-1]
        features = (key.shape[-1], value.shape[-1])
        _require(
            alike and (self._qkv_same_embed_dim or features == (self.kdim, self.vdim)),
            f"key has shape {list(key.shape)} and value {list(value.shape)}; they must be of as many "
            f"positions, with kdim = {self.kdim} and vdim = {self.vdim} features",
        )

    def _check_mask(self, attn_mask, batch, seqlen_q, seqlen_k, error):
        of_heads = () if attn_mask.dim() == 2 else (batch * self.num_heads,)
        expected = [*of_heads, seqlen_q, seqlen_k]
        shape = list(attn_mask.shape)
        _require(shape == expected, f"attn_mask has shape {shape}; it must be {expected}", error)

    def _project(self, query, key, value):
        """q, k and v, heads apart, [..., num_heads, head_dim]; one product for inputs that are one tensor."""
        heads, weight, bias = (self.num_heads, self.head_dim), self.in_proj_weight, self.in_proj_bias
        if weight is not None and key is value:
            if query is key:
                return F.linear(query, weight, bias).unflatten(-1, (3, *heads)).unbind(-3)
            sizes = [self.embed_dim, 2 * self.embed_dim]
            biases = (None, None) if bias is None else bias.split(sizes)
            q, kv = (F.linear(*args) for args in zip((query, key), weight.split(sizes), biases))
            return q.unflatten(-1, heads), *kv.unflatten(-1, (2, *heads)).unbind(-3)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = weights if weight is None else weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        projected = (F.linear(*args) for args in zip((query, key, value), weights, biases))
        return tuple(x.unflatten(-1, heads) for x in projected)

    def _rows_of(self, projected, is_batched):
        """A view [N, L, num_heads, head_dim]."""
        if not is_batched:
            return projected.unsqueeze(0)
        return projected if self.batch_first else projected.transpose(0, 1)

    def _extra_keys(self):
        return (self.bias_k is not None) + bool(self.add_zero_attn)

    def _with_extra_keys(self, k, v):
        """First the learned one, then zeros, behind the others."""
        if self._extra_keys() == 0:
            return k, v
        result = []
        for rows, learned in ((k, self.bias_k), (v, self.bias_v)):
            parts, shape = [rows], (rows.shape[0], 1, *rows.shape[2:])
            if learned is not None:  # under autocast rows are of another dtype
                parts.append(learned.to(rows.dtype).view(1, 1, *rows.shape[2:]).expand(shape))
            if self.add_zero_attn:
                parts.append(rows.new_zeros(shape))
            result.append(torch.cat(parts, dim=1))
        return result

    def _merge(self, q, k, key_padding_mask, attn_mask, is_causal):
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        masks, causal = [], False
        if attn_mask is not None:
            self._check_mask(attn_mask, batch, seqlen_q, seqlen_k, RuntimeError)
            flat = attn_mask.dim() == 2
            # Keys behind the others are seen by all and a learned mask has values: neither is causal.
            causal = (is_causal and flat and seqlen_q == seqlen_k and self._extra_keys() == 0
                      and not attn_mask.requires_grad)
            if not causal:
                heads = 1 if flat else self.num_heads
                masks.append(attn_mask.reshape(-1, heads, seqlen_q, seqlen_k))
        if key_padding_mask is not None:
            padding = key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1])
            _require(
                padding.shape == (batch, 1, 1, seqlen_k),
                f"key_padding_mask has shape {list(key_padding_mask.shape)}; it must be "
                f"{[batch, seqlen_k]}, or {[seqlen_k]} without a batch",
            )
            masks.append(padding)
        return _Masks.merged(masks, causal)

    def _attend(self, q, k, v, masks, need_weights, average):
        """[N, L, num_heads, head_dim] and the weights, or None."""
        (batch, seqlen_q), visible, bias, window = q.shape[:2], masks.visible, masks.bias, (-1, -1)
        if masks.causal:
            # torch aligns the diagonal to the first query and key, the engines to the last ones. Keys past
            # the last query are nobody's.
            k, v = k[:, :seqlen_q], v[:, :seqlen_q]
            window = (-1, seqlen_q - k.shape[1])
        seqlen_k = k.shape[1]
        dropout_p = self.dropout if self.training else 0.0
        if batch == 0:  # the engines take none; the projections' gradients are zero
            heads = () if average else (self.num_heads,)
            return q, q.new_empty(0, *heads, seqlen_q, seqlen_k) if need_weights else None
        blocks = bits = None
        if visible is not None:
            made = AttentionMask.from_bool(visible, seqlen_q, seqlen_k)
            blocks, bits = made.blocks, made.bits
        bias = None if bias is None else bias.to(q.dtype)
        # flash_attn_func, but for the random state that it drew.
        out, lse, options = attend(
            q, k, v, dropout_p=dropout_p, window_size=window, mask=blocks, bits=bits, attn_bias=bias,
            wants_lse=need_weights,
        )
        if not need_weights:
            return out, None
        rng_state = options and options[operators.RNG_STATE]
        return out, attention_weights(q, k, lse, visible, bias, masks.causal, dropout_p, rng_state, average)

    def _attend_nested(self, query, key, value, key_padding_mask, need_weights, attn_mask):
        """Self-attention of sequences of different lengths, without padding."""
        alone = key_padding_mask is None and attn_mask is None and not need_weights
        _require(
            query is key and key is value and alone and self._extra_keys() == 0 and self._qkv_same_embed_dim,
            "a NestedTensor must be query, key and value, without masks, with need_weights=False, in a "
            "module without kdim, vdim, add_bias_kv and add_zero_attn",
        )
        sequences = query.unbind()
        lengths = [len(sequence) for sequence in sequences]
        rows = torch.cat(sequences)
        q, k, v = self._project(rows, rows, rows)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(q.device, torch.int32)
        dropout_p = self.dropout if self.training else 0.0
        context = flash_attn_varlen_func(q, k, v, ends, ends, max(lengths), max(lengths), dropout_p)
        out = F.linear(context.flatten(-2), self.out_proj.weight, self.out_proj.bias)
        return torch.nested.as_nested_tensor(list(out.split(lengths)), layout=query.layout)
