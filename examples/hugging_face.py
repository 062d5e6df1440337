"""Hugging Face models on this library: transformers' own flash_attention_2 on a GPU, an adapter anywhere.

transformers lets "flash_attention_2" through only where torch sees a GPU and a distribution named flash-attn
is installed. `register_adapter` needs neither: AttentionInterface and AttentionMaskInterface, transformers'
documented extension points, get one function each under ADAPTER, and that runs in every dtype and on the CPU.
"""

import torch
import torch.nn.functional as F
from torch import nn

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input

# Not a name with "flash" in it: for those transformers asks for its own packages before it looks here.
ADAPTER = "io_aware"


def implementation(attention, device, dtype):
    """The attn_implementation of transformers for an --attention of the examples."""
    if attention == "flash":
        if torch.device(device).type == "cuda" and dtype == "bfloat16":
            return "flash_attention_2"
        register_adapter()
        return ADAPTER
    return {"sdpa": "sdpa", "standard": "eager"}[attention]


def register_adapter():
    """Makes attn_implementation=ADAPTER known to every model of transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask
    AttentionInterface.register(ADAPTER, attention_forward)
    # Without a mask function the model would hear nothing of padding; this one hands on the [B, S] mask.
    AttentionMaskInterface.register(ADAPTER, flash_attention_mask)


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
    is_causal=None, position_ids=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None,
    max_length_k=None, **_,
):
    """transformers' attention function: query [B, H, Sq, D], key and value [B, Hk, Sk, D] -> [B, Sq, H, D]
    and no weights. attention_mask is None, or [B, Sk] and true for tokens; position_ids that start afresh,
    or cu_seq_lens, mean sequences packed into a batch of one."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):  # rotary embeddings make float32 of q and k
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    causal = module.is_causal if is_causal is None else is_causal
    options = dict(dropout_p=dropout, softmax_scale=scaling, causal=causal, softcap=softcap or 0.0)
    if sliding_window is not None:  # transformers counts the query's own position, flash_attn does not
        options["window_size"] = (sliding_window - 1, sliding_window - 1)
    if attention_mask is not None:
        return attend_padded(q, k, v, attention_mask, options), None
    if cu_seq_lens_q is None and packed(position_ids, q, k):
        cu_seq_lens_q = cu_seq_lens_k = boundaries(position_ids[0])
        max_length_q = max_length_k = int(cu_seq_lens_q.diff().max())
    if cu_seq_lens_q is None:
        return flash_attn_func(q, k, v, **options), None
    rows = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(*rows, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **options)
    return out[None], None


def attend_padded(q, k, v, mask, options):
    """Keys without padding; queries too where they are the keys' tokens and causal, so that the last query
    stands at the last key. Otherwise every query counts: those of a cross attention have no mask here, and
    those after a cache are the last tokens, as padding is on the left."""
    B, Sq = q.shape[:2]
    k, _, cu_seqlens_k, max_seqlen_k, _ = unpad_input(k[:, :mask.shape[1]], mask)
    v = unpad_input(v[:, :mask.shape[1]], mask)[0]
    if options["causal"] and Sq == mask.shape[1]:
        q, indices, *_ = unpad_input(q, mask)
        out = flash_attn_varlen_func(q, k, v, cu_seqlens_k, cu_seqlens_k, max_seqlen_k, max_seqlen_k,
                                     **options)
        return pad_input(out, indices, B, Sq)
    cu_seqlens_q = torch.arange(0, B * Sq + 1, Sq, dtype=torch.int32, device=q.device)
    out = flash_attn_varlen_func(q.flatten(0, 1), k, v, cu_seqlens_q, cu_seqlens_k, Sq, max_seqlen_k,
                                 **options)
    return out.unflatten(0, (B, Sq))


def packed(position_ids, q, k):
    if position_ids is None or q.shape[0] != 1 or q.shape[1] == 1 or q.shape[1] != k.shape[1]:
        return False
    return bool((position_ids[0].diff() != 1).any())


def boundaries(position_ids):
    """[T] positions, from their first one upward in each sequence -> cu_seqlens [sequences + 1]"""
    starts = (position_ids.diff(prepend=position_ids[:1]) != 1).nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([len(position_ids)])]).int()


def padded_vocabulary(size):
    return -(-size // 64) * 64  # as the models of the examples: matrix products like multiples of 64


class GPT2(nn.Module):
    """transformers' GPT-2 with random weights, called as the model of train_gpt2.py."""

    def __init__(self, args, vocab_size):
        super().__init__()
        from transformers import AutoModelForCausalLM, GPT2Config
        config = GPT2Config(
            vocab_size=padded_vocabulary(vocab_size), n_positions=args.context, n_embd=args.width,
            n_layer=args.layers, n_head=args.heads, resid_pdrop=args.dropout, embd_pdrop=args.dropout,
            attn_pdrop=args.dropout, bos_token_id=None, eos_token_id=None)
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation(args.attention, args.device, args.dtype))

    def forward(self, tokens, targets=None):  # both [B, S] -> the mean loss, or the last position's logits
        hidden = self.model.transformer(tokens, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[:, -1] if targets is None else hidden)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bert(nn.Module):
    """transformers' BERT with random weights, called as the model of train_bert.py."""

    def __init__(self, args, vocab_size):
        super().__init__()
        from transformers import AutoModelForMaskedLM, BertConfig
        config = BertConfig(
            vocab_size=padded_vocabulary(vocab_size), max_position_embeddings=args.context,
            hidden_size=args.width, intermediate_size=4 * args.width, num_hidden_layers=args.layers,
            num_attention_heads=args.heads, hidden_dropout_prob=args.dropout,
            attention_probs_dropout_prob=args.dropout)
        self.packed = args.attention == "flash"
        self.model = AutoModelForMaskedLM.from_config(
            config, attn_implementation=implementation(args.attention, args.device, args.dtype))

    def forward(self, batch):  # -> the mean loss over the masked tokens
        if self.packed:  # one long row, whose sequences the attention is told of
            lengths = dict(cu_seq_lens_q=batch.cu_seqlens, cu_seq_lens_k=batch.cu_seqlens,
                           max_length_q=batch.max_seqlen, max_length_k=batch.max_seqlen)
            hidden = self.model.bert(batch.tokens_packed[None], position_ids=batch.positions[None],
                                     token_type_ids=torch.zeros_like(batch.positions)[None], **lengths)
        else:
            hidden = self.model.bert(batch.tokens_padded(), attention_mask=batch.mask())
        rows = hidden.last_hidden_state.flatten(0, 1)[batch.masked_rows(self.packed)]
        return F.cross_entropy(self.model.cls(rows), batch.targets)
