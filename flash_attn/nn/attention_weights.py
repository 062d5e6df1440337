"""The attention weights themselves, for those who ask for them: softmax(q k^T * D ** -0.5 + bias), dropped as
the output's were, averaged over heads or not.

Attention has given lse, so a weight is exp(score - lse) and no row needs the others: they come in chunks of
queries, and beyond the result nothing larger than a chunk [N, H, chunk, S] exists, in the backward neither.
"""

import torch
from torch.autograd.function import once_differentiable

from ..operators import accumulation_dtype

CHUNK_ELEMENTS = 1 << 23  # 32 MiB in float32
ON_A_GPU = 4  # times as many: with less to do at once it waits for its host
PATCH = 16  # dropout draws its bits by 16 x 16 patches, so chunks begin at multiples of it
_LOW_32 = 0xFFFFFFFF


def _rows(matrix, first, last):
    """The queries from first to last of what is broadcastable to [N, H, L, S]."""
    return matrix if matrix.shape[2] == 1 else matrix[:, :, first:last]


def _philox_4x32_10(x0, x1, x2, x3, key0, key1):
    """The round function of csrc/attention/dropout.h on int64 tensors that hold 32 bits: products wrap around
    at 64 bits, whose upper half the shift and the mask then read as unsigned."""
    for _ in range(10):
        product0, product1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (
            (product1 >> 32 & _LOW_32) ^ x1 ^ key0, product1 & _LOW_32,
            (product0 >> 32 & _LOW_32) ^ x3 ^ key1, product0 & _LOW_32,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _LOW_32, (key1 + 0xBB67AE85) & _LOW_32
    return x0, x1, x2, x3


def dropout_threshold(dropout_p):
    """A weight is kept if its 16 random bits are not below this."""
    return round(dropout_p * 65536)


def kept(rng_state, dropout_p, batch, heads, first, last, seqlen_k):
    """bool [N, H, last - first, S]: what dropout keeps of the queries from first, a multiple of 16, to last;
    the engines' mask (csrc/attention/dropout.h), computed again."""
    device = rng_state.device
    query_patches, key_patches = -(-(last - first) // PATCH), -(-seqlen_k // PATCH)
    seed, offset = rng_state.unbind()
    call = torch.arange(32, device=device)
    key_patch = torch.arange(key_patches, device=device)[:, None]
    query_patch = torch.arange(first // PATCH, first // PATCH + query_patches, device=device)[:, None, None]
    head = torch.arange(batch * heads, device=device)[:, None, None, None]
    words = _philox_4x32_10(
        key_patch * 32 + call, query_patch, head, offset & _LOW_32,
        seed & _LOW_32, ((seed >> 32) ^ (offset >> 32)) & _LOW_32,
    )
    threshold = dropout_threshold(dropout_p)
    halves = [half >= threshold for word in words for half in (word & 0xFFFF, word >> 16)]
    # A call's 8 numbers are of queries g and g + 8 and keys 2t, 2t + 1, 2t + 8 and 2t + 9 of the patch, where
    # the call counts g * 4 + t.
    keep = torch.stack(halves, dim=-1).view(-1, query_patches, key_patches, 8, 4, 2, 2, 2)
    keep = keep.permute(0, 1, 5, 3, 2, 6, 4, 7)
    keep = keep.reshape(batch, heads, query_patches * PATCH, key_patches * PATCH)
    return keep[:, :, : last - first, :seqlen_k]


class _Chunks:
    """Probabilities, a chunk of queries at a time."""

    def __init__(self, q, k, lse, bias, visible, causal):
        self.dtype = accumulation_dtype(q.dtype)
        self.batch, self.seqlen_q, self.heads, head_dim = q.shape
        self.seqlen_k = k.shape[1]
        self.scale = head_dim**-0.5
        self.q = q.transpose(1, 2)
        self.k = k.transpose(1, 2).to(self.dtype)  # [N, H, S, D]
        self.lse, self.bias, self.visible, self.causal = lse, bias, visible, causal

    def __iter__(self):
        """(first, last) query of each chunk."""
        elements = CHUNK_ELEMENTS * (ON_A_GPU if self.q.is_cuda else 1)
        rows = elements // max(self.batch * self.heads * self.seqlen_k, 1) // PATCH * PATCH
        rows = max(rows, PATCH)
        for first in range(0, self.seqlen_q, rows):
            yield first, min(first + rows, self.seqlen_q)

    def queries(self, first, last):
        """[N, H, rows, D], scaled."""
        return self.q[:, :, first:last].to(self.dtype) * self.scale

    def hide(self, scores, first, last):
        if self.visible is not None:
            scores.masked_fill_(~_rows(self.visible, first, last), -torch.inf)
        if self.causal:
            query = torch.arange(first, last, device=scores.device)[:, None]
            scores.masked_fill_(torch.arange(self.seqlen_k, device=scores.device) > query, -torch.inf)

    def probabilities(self, first, last):
        """[N, H, rows, S] before dropout."""
        scores = self.queries(first, last) @ self.k.transpose(-1, -2)
        if self.bias is not None:
            scores += _rows(self.bias, first, last)
        self.hide(scores, first, last)
        lse = self.lse[:, :, first:last, None]
        # A query that sees nothing has only -inf, and -inf - -inf would be NaN; its weights are 0.
        return scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_()

    def dropped(self, values, rng_state, dropout_p, first, last):
        """values [N, H, rows, S], 0 where a weight is dropped and larger where it is not."""
        if dropout_p == 0:
            return values
        keep = kept(rng_state, dropout_p, self.batch, self.heads, first, last, self.seqlen_k)
        keep_scale = 65536 / (65536 - dropout_threshold(dropout_p))
        return values.masked_fill(~keep, 0.0) * keep_scale


def _sum_to(values, shape):
    dims = [dim for dim, size in enumerate(shape) if size == 1 and values.shape[dim] != 1]
    return values.sum(dims, keepdim=True) if dims else values


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, lse, bias, visible, rng_state, causal, dropout_p, average):
        ctx.save_for_backward(q, k, lse, bias, visible, rng_state)
        ctx.options = causal, dropout_p, average
        chunks = _Chunks(q, k, lse, bias, visible, causal)
        heads = () if average else (chunks.heads,)
        weights = q.new_empty(chunks.batch, *heads, chunks.seqlen_q, chunks.seqlen_k)
        with torch.autocast(q.device.type, enabled=False):
            for first, last in chunks:
                values = chunks.dropped(chunks.probabilities(first, last), rng_state, dropout_p, first, last)
                weights[..., first:last, :] = values.mean(1) if average else values
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx, dweights):
        q, k, lse, bias, visible, rng_state = ctx.saved_tensors
        causal, dropout_p, average = ctx.options
        chunks = _Chunks(q, k, lse, bias, visible, causal)
        dq, dlse = torch.empty_like(q), torch.empty_like(lse)
        dk = torch.zeros_like(chunks.k)
        dbias = None
        if ctx.needs_input_grad[3]:
            dbias = torch.zeros(bias.shape, dtype=chunks.dtype, device=bias.device)
        with torch.autocast(q.device.type, enabled=False):
            for first, last in chunks:
                dp = dweights[..., first:last, :].to(chunks.dtype)
                if average:
                    dp = (dp / chunks.heads).unsqueeze(1).expand(-1, chunks.heads, -1, -1)
                dp = chunks.dropped(dp, rng_state, dropout_p, first, last)
                # p = exp(s - lse): dS = P dP and dlse = -rowsum(dS); attention's backward does the rest.
                ds = chunks.probabilities(first, last).mul_(dp)
                dlse[:, :, first:last] = -ds.sum(-1)
                dq[:, first:last] = (ds @ chunks.k * chunks.scale).transpose(1, 2)
                dk += ds.transpose(-1, -2) @ chunks.queries(first, last)
                if dbias is not None:
                    _rows(dbias, first, last).add_(_sum_to(ds, bias.shape))
        dbias = None if dbias is None else dbias.to(bias.dtype)
        return dq, dk.transpose(1, 2).to(k.dtype), dlse, dbias, None, None, None, None, None


def attention_weights(
    q, k, lse, visible=None, bias=None, causal=False, dropout_p=0.0, rng_state=None, average=True
):
    """Attention weights of an attention that has been computed.

    Args:
        q, k: [N, L, H, D], [N, S, H, D].
        lse: [N, H, L], as flash_attn_func returns it for the same mask, bias and causal.
        visible: None, or bool [N or 1, H or 1, L or 1, S], True where a query sees a key.
        bias: None, or [N or 1, H or 1, L or 1, S], added to the scores.
        causal: query i sees the keys j <= i; needs L == S.
        dropout_p, rng_state: of the output, whose dropped weights are 0 here, too.
        average: over heads.

    Returns: [N, L, S] or, without average, [N, H, L, S], in q's dtype. Differentiable once, in q, k, lse and
        bias; with lse's gradient that is the whole gradient. A query that sees no key has weights 0.
    """
    return _Weights.apply(q, k, lse, bias, visible, rng_state, causal, dropout_p, average)
