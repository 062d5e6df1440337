// Operator schemas and their registration through LibTorch's stable ABI.
#include <torch/csrc/stable/library.h>

#include "operators.h"

// Dense: q [B, Sq, H, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv]. Packed: [T, H, D] with cu_seqlens_* int32 [B +
// 1]. The options mean the same in every operator:
//   alibi_slopes float32 [H] or [B, H]; rng_state int64 [2] = (seed, offset), needed if dropout_p > 0;
//   key_block_* lists per query block, query_block_* per key block (attention/block_mask.h), all four or
//   none; attn_bias [B or 1, H or 1, Sq or 1, Sk] of q's dtype, attn_mask the same as bits (pack_mask), dense
//   problems only; window sizes -1 = unbounded, causal = right 0; deterministic concerns the backward.
#define FLASH_OPTIONS                                                                                    \
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "             \
    "Tensor? alibi_slopes, Tensor? rng_state, Tensor? key_block_counts, Tensor? key_block_indices, "     \
    "Tensor? query_block_counts, Tensor? query_block_indices, int block_size_q, int block_size_k, "      \
    "float dropout_p, float softmax_scale, int window_size_left, int window_size_right, float softcap, " \
    "bool deterministic, Tensor? attn_bias=None, Tensor? attn_mask=None"

#define FLASH_PLAIN_OPTIONS \
    "float softmax_scale, int window_size_left, int window_size_right, bool deterministic"

STABLE_TORCH_LIBRARY(flash_attn, library) {
    library.def("attention_forward(Tensor q, Tensor k, Tensor v, " FLASH_OPTIONS
                ") -> (Tensor out, Tensor lse)");
    library.def(
        "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
        "lse, " FLASH_OPTIONS ") -> (Tensor dq, Tensor dk, Tensor dv)");
    library.def(
        "attention_backward_with_bias(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
        "Tensor lse, " FLASH_OPTIONS ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)");
    // The same without the other options.
    library.def("plain_attention_forward(Tensor q, Tensor k, Tensor v, " FLASH_PLAIN_OPTIONS
                ") -> (Tensor out, Tensor lse)");
    library.def(
        "plain_attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
        "Tensor lse, " FLASH_PLAIN_OPTIONS ") -> (Tensor dq, Tensor dk, Tensor dv)");
    library.def(
        "pack_mask(Tensor mask, SymInt seqlen_q) -> (Tensor bits, Tensor key_block_counts, Tensor "
        "key_block_indices, Tensor query_block_counts, Tensor query_block_indices)");
    // k and v are a cache [entries, capacity, Hk, D], or pages [entries, page_size, Hk, D] that block_table
    // int32 [B, pages of a sequence] puts together; the other cache_* int32 [B]. No gradients.
    library.def(
        "attention_cached(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, SymInt max_seqlen_q, Tensor? "
        "cache_seqlens, Tensor? cache_leftpad, Tensor? cache_batch_idx, Tensor? block_table, Tensor? "
        "alibi_slopes, float softmax_scale, int window_size_left, int window_size_right, float softcap, int "
        "num_splits) -> (Tensor out, Tensor lse)");
    library.def("attention_probabilities(Tensor q, Tensor k, Tensor v, " FLASH_OPTIONS ") -> Tensor");
}

// One implementation for both: it goes by q's device. In a build without GPU engines it says so.
STABLE_TORCH_LIBRARY_IMPL(flash_attn, CPU, library) {
    library.impl("attention_forward", TORCH_BOX(&flash::attention_forward));
    library.impl("attention_cached", TORCH_BOX(&flash::attention_cached));
    library.impl("attention_backward", TORCH_BOX(&flash::attention_backward));
    library.impl("attention_backward_with_bias", TORCH_BOX(&flash::attention_backward_with_bias));
    library.impl("plain_attention_forward", TORCH_BOX(&flash::plain_attention_forward));
    library.impl("plain_attention_backward", TORCH_BOX(&flash::plain_attention_backward));
    library.impl("pack_mask", TORCH_BOX(&flash::pack_mask));
    library.impl("attention_probabilities", TORCH_BOX(&flash::attention_probabilities));
}

STABLE_TORCH_LIBRARY_IMPL(flash_attn, CUDA, library) {
    library.impl("attention_forward", TORCH_BOX(&flash::attention_forward));
    library.impl("attention_cached", TORCH_BOX(&flash::attention_cached));
    library.impl("attention_backward", TORCH_BOX(&flash::attention_backward));
    library.impl("attention_backward_with_bias", TORCH_BOX(&flash::attention_backward_with_bias));
    library.impl("plain_attention_forward", TORCH_BOX(&flash::plain_attention_forward));
    library.impl("plain_attention_backward", TORCH_BOX(&flash::plain_attention_backward));
    library.impl("pack_mask", TORCH_BOX(&flash::pack_mask));
    library.impl("attention_probabilities", TORCH_BOX(&flash::attention_probabilities));
}
